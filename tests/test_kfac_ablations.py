"""KFAC without its second factor, and what is measured of updates that are not taken."""

import copy

import pytest
import torch
from torch import nn

import foof
from cases import batch, flat, net, step
from foof.study.train import ablations, updates
from oracle import kfac_heuristic, relative_error

# --- ablations ------------------------------------------------------------------------------------------------------------------


def raw_gradient(model, x, y):
    twin = copy.deepcopy(model)  # copies carry no taps
    nn.functional.cross_entropy(twin(x), y).backward()
    return {n: torch.cat([m.weight.grad, m.bias.grad[:, None]], 1) for n, m in twin.named_modules() if isinstance(m, nn.Linear)}


@pytest.mark.parametrize("second_factor", ["drop-scaled", "drop-rescaled"])
def test_foof_with_kfacs_lambda(second_factor):
    """Appendix D.9, step by step: ``G (Σ + λ_A I)⁻¹``, times λ_A/λ, or with the norm of the layer's KFAC update."""
    model, (x, y) = net().double(), batch(0, 9)
    x = x.double()
    opt = ablations.kfac(model, lr=1.0, damping=0.3, second_factor=second_factor, fisher="full")
    opt.initialise([x])
    raw, before = raw_gradient(model, x, y), copy.deepcopy(model)
    step(model, opt, x, y)
    for block in opt.preconditioner.blocks:
        name, m = block.layer.name, block.layer.m
        Sigma, Sigma_E = block.moments["Sigma"].value, block.moments["Sigma_E"].value
        kfac, lambda_A, lambda_E = kfac_heuristic(raw[name], Sigma, Sigma_E, 0.3)
        assert abs(lambda_A * lambda_E - 0.3) < 1e-12
        expected = raw[name] @ torch.linalg.inv(Sigma + lambda_A * torch.eye(m).double())
        expected *= lambda_A / 0.3 if second_factor == "drop-scaled" else kfac.norm() / expected.norm()
        old, new = dict(before.named_modules())[name], block.layer.module
        ours = torch.cat([old.weight - new.weight, (old.bias - new.bias)[:, None]], 1)
        assert relative_error(ours.detach(), expected) < 1e-10


@pytest.mark.parametrize("mode", ["heuristic", "standard"])
def test_asking_what_the_update_would_have_been_disturbs_nothing(mode):
    """A run that asks at every step ends where one does that never asks, and where one does that defers nothing."""
    ends, asked = [], []
    for deferred, asks in ((False, False), (True, False), (True, True)):
        model = net()
        opt = ablations.kfac(model, lr=0.1, damping=0.1, damping_mode=mode, T=2, deferred=deferred, generator=0)
        for t in range(6):
            x, y = batch(t)
            opt.zero_grad()
            out = model(x)
            opt.update_curvature(out)
            nn.functional.cross_entropy(out, y).backward()
            if asks:
                asked.append({k: updates.updates(opt, k) for k in ("keep", "drop-scaled", "drop-rescaled")})
                asked[-1]["foof"] = updates.updates(opt, foof_damping=0.5)
                before = {n: m.weight.clone() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
            opt.step()
            if asks:  # what "keep" announced is what happened
                for n, weight in before.items():
                    assert relative_error(weight - model.get_submodule(n).weight, 0.1 * asked[-1]["keep"][n][:, :-1]) < 1e-4
        ends.append(flat(model))
    assert torch.equal(ends[1], ends[2])
    assert relative_error(ends[1], ends[0]) < 1e-5
    for name, kept in asked[-1]["keep"].items():
        if mode == "heuristic":
            assert abs(asked[-1]["drop-rescaled"][name].norm() / kept.norm() - 1) < 1e-5
        without = [asked[-1][k][name].flatten() for k in ("drop-rescaled", "drop-scaled")]
        assert abs(torch.cosine_similarity(*without, 0) - 1) < 1e-5


def test_updates_needs_raw_gradients():
    model = net()
    opt = foof.KFAC(model)
    with pytest.raises(RuntimeError, match="deferred=True"):
        updates.updates(opt)


# --- measures -------------------------------------------------------------------------------------------------------------------


def test_cosine_in_both_inner_products():
    torch.manual_seed(0)
    u, v = ({"a": torch.randn(3, 4), "b": torch.randn(2, 5)} for _ in range(2))
    root = torch.randn(4, 4)
    Sigma = {"a": root @ root.T, "b": torch.rand(5)}

    def flat_in(w):
        return torch.cat([(w["a"] @ root).flatten(), (w["b"] * Sigma["b"].sqrt()).flatten()])

    assert updates.cosine(u, u, Sigma) == pytest.approx(1)
    assert updates.cosine(u, v, Sigma) == pytest.approx(torch.cosine_similarity(flat_in(u), flat_in(v), 0).item(), abs=1e-5)
    plain = [torch.cat([w["a"].flatten(), w["b"].flatten()]) for w in (u, v)]
    assert updates.cosine(u, v) == pytest.approx(torch.cosine_similarity(*plain, 0).item(), abs=1e-5)
    with pytest.raises(ValueError, match="different layers"):
        updates.cosine(u, {"a": u["a"]})


def test_loss_after_an_update_is_the_loss_after_the_step():
    model, (x, y) = net(), batch(0)
    opt = ablations.kfac(model, lr=0.05, damping=0.1, deferred=True)
    before = flat(model)

    def loss():
        return nn.functional.cross_entropy(model(x), y)

    out = model(x)
    opt.update_curvature(out)
    start = nn.functional.cross_entropy(out, y)
    start.backward()
    foretold = updates.loss_after(opt.preconditioner, updates.updates(opt), 0.05, loss)
    assert torch.equal(flat(model), before)
    opt.step()
    assert foretold == pytest.approx(loss().item(), abs=1e-6)
    assert 0 < updates.relative_decrease(start.item(), foretold) < 1
    assert set(updates.second_moments(opt.preconditioner)) == {"0", "2", "4"}
