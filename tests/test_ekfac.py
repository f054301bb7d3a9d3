"""EKFAC against dense per-datapoint gradients in the eigenbases, and where it is KFAC with standard damping."""

import copy

import pytest
import torch
from torch import nn

import foof
from cases import batch, flat, mlp, net, step
from oracle import relative_error


def dense_update(model, x, y, damping):
    """``U_E [(U_Eᵀ G U_A) / (S + λ)] U_Aᵀ`` of every linear layer, from plain autograd, one datapoint and one class at a time."""
    layers = [m for m in model if isinstance(m, nn.Linear)]
    loss = nn.functional.cross_entropy(model(x), y)
    plain = {m: torch.cat([g, b[:, None]], 1) for m, g, b in zip(
        layers, torch.autograd.grad(loss, [m.weight for m in layers], retain_graph=True),
        torch.autograd.grad(loss, [m.bias for m in layers]), strict=True)}  # fmt: skip
    columns = {m: [] for m in layers}
    a, e = {m: [] for m in layers}, {m: [] for m in layers}
    for datum in x:
        inputs, outs, h = {}, {}, datum[None]
        for m in model:
            if m in layers:
                inputs[m] = h
            h = m(h)
            if m in layers:
                outs[m] = h
        p = h.softmax(-1)[0]
        for k in range(h.shape[1]):
            loss_k = nn.functional.cross_entropy(h, torch.tensor([k]))
            errors = torch.autograd.grad(loss_k, list(outs.values()), retain_graph=True)
            for m, err in zip(layers, errors, strict=True):
                row = torch.cat([inputs[m][0], torch.ones(1, dtype=x.dtype)])
                columns[m].append(p[k].sqrt() * err[0][:, None] * row[None])
                e[m].append(p[k].sqrt() * err[0])
                if k == 0:
                    a[m].append(row)
    updates = {}
    for m in layers:
        A, E, N = torch.stack(a[m]), torch.stack(e[m]), len(x)
        U_A, U_E = torch.linalg.eigh(A.mT @ A / N).eigenvectors, torch.linalg.eigh(E.mT @ E / N).eigenvectors
        S = sum((U_E.mT @ g @ U_A) ** 2 for g in columns[m]) / N
        updates[len(updates)] = (U_E @ ((U_E.mT @ plain[m] @ U_A) / (S + damping)) @ U_A.mT).detach()
    return updates


def test_the_first_step_is_the_dense_one():
    torch.manual_seed(0)
    model = mlp(5, 6, 4).double()
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.randint(4, (7,))
    expected, before = dense_update(model, x, y, 0.3), copy.deepcopy(model)
    opt = foof.EKFAC(model, lr=1.0, damping=0.3, fisher="full")
    step(model, opt, x, y)
    pairs = [(new, old) for new, old in zip(model, before, strict=True) if isinstance(new, nn.Linear)]
    for number, (new, old) in enumerate(pairs):
        moved = torch.cat([old.weight - new.weight, (old.bias - new.bias)[:, None]], 1)
        assert relative_error(moved, expected[number]) < 1e-10


def test_every_step_of_the_latest_batch_alone():
    """ema = 0 and T = 1: the basis is that of the step before last, S in it of the step before."""
    torch.manual_seed(1)
    model = mlp(4, 5, 3).double()
    opt = foof.EKFAC(model, lr=0.05, damping=0.2, fisher="full", ema=0.0, T=1)
    for t in range(4):
        x, y = batch(t)
        step(model, opt, x.double(), y)
    assert torch.isfinite(flat(model)).all()
    for block in opt.preconditioner.blocks:
        assert (block.inverse.scale >= 0).all()
        kronecker = block.inverse.s_E.unsqueeze(-1) * block.inverse.s_A.unsqueeze(-2)
        assert relative_error(block.inverse.scale, kronecker) > 1e-3  # it is not KFAC's


@pytest.mark.parametrize("case", ["one datapoint", "linear, squared error"])
def test_kfac_with_standard_damping_where_second_moments_factorise(case):
    """``Σ_k (e_k aᵀ)² = (Σ_k e_k²) (a²)ᵀ`` of one datapoint; and of many where errors do not depend on the datum."""
    linear = case.startswith("linear")
    ends = []
    for make in (foof.EKFAC, lambda m, **o: foof.KFAC(m, damping_mode="standard", **o)):
        torch.manual_seed(0)
        model = mlp(4, 5, 3, activation=nn.Identity if linear else nn.Tanh).double()
        opt = make(model, lr=0.1, damping=0.1, fisher="full", likelihood="gaussian" if linear else "categorical")
        x = torch.randn(9 if linear else 1, 4, dtype=torch.float64)
        out = model(x)
        opt.update_curvature(out)
        (out.square().sum() / len(x)).backward()
        opt.step()
        ends.append(flat(model))
    assert relative_error(*ends) < 1e-10


def test_the_scale_follows_the_basis():
    """In a new basis S is the diagonal of the old approximation ``U diag(S) Uᵀ``."""
    torch.manual_seed(0)

    def inverse():
        Sigma, Sigma_E = (m @ m.mT for m in (torch.randn(4, 6, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)))
        return foof.optim.ekfac.ScaledEigenInverse.make(Sigma, Sigma_E, 0.1, "layer", (1, 1))

    old, new = inverse(), inverse()
    old.update(torch.rand(3, 4, dtype=torch.float64), 0.9)
    new.follow(old)
    dense = torch.kron(old.U_E, old.U_A) @ torch.diag(old.scale.flatten()) @ torch.kron(old.U_E, old.U_A).mT
    basis = torch.kron(new.U_E, new.U_A)
    assert torch.allclose(new.scale.flatten(), (basis.mT @ dense @ basis).diagonal())
    assert new.mass == old.mass


@pytest.mark.parametrize("rows", [1, 3])
def test_a_layer_called_twice_and_convolutions_train(rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * rows, 3)).double()
    opt = foof.EKFAC(model, lr=0.02, damping=0.1, fisher="full", T=2)
    x, y = torch.randn(12, 2, rows + 2, dtype=torch.float64), torch.randint(3, (12,))
    losses = []
    for _ in range(15):
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_resumed_is_uninterrupted():
    ends = []
    for interrupted in (False, True):
        model = net()
        opt = foof.EKFAC(model, T=3, S=2, generator=0)
        for t in range(7):
            if interrupted and t == 4:
                saved, opt_state = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
                model = net()
                model.load_state_dict(saved)
                opt = foof.EKFAC(model, T=3, S=2, generator=1)
                opt.load_state_dict(opt_state)
            step(model, opt, *batch(t))
        ends.append(flat(model))
    assert torch.equal(*ends)
