"""Damping, step size and momentum from a quadratic model of the loss, with KFAC; natural gradients' are in test_natural.py."""

import copy
import pickle

import pytest
import torch
from torch import nn

import foof
from cases import flat
from foof.likelihood import Likelihood, likelihood_named
from foof.optim.adaptive import Adaptive, ModelCall, fisher_in
from foof.study.train import ablations, updates
from oracle import full_fisher, relative_error
from test_kfac import batch, net, step


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_fisher_of_a_plane_by_forward_mode_is_the_dense_one(likelihood):
    model, (x, _) = net().double(), batch(0, 5)
    x, params = x.double(), list(model.parameters())
    F = full_fisher(model, x, params, likelihood)
    plane = [torch.randn(2, *p.shape).double() for p in params]
    flat_plane = torch.cat([u.flatten(1) for u in plane], 1)
    opt = foof.KFAC(model)  # taps stand aside in forward mode
    calls = [ModelCall((part,), {}, model(part).shape) for part in (x[:2], x[2:])]
    ours = fisher_in(model, calls, params, plane, likelihood_named(likelihood))
    assert relative_error(ours, flat_plane @ F @ flat_plane.T) < 1e-10
    assert opt is not None


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 4)])
def test_products_with_the_output_hessian_are_those_of_its_root(likelihood, shape):
    torch.manual_seed(0)
    out, u = torch.randn(shape).double(), torch.randn(shape).double()
    known = likelihood_named(likelihood)
    assert relative_error(known.hessian_product(out, u), Likelihood.hessian_product(known, out, u)) < 1e-12


def test_adaptive_step_and_momentum_minimise_the_quadratic_model():
    """Martens & Grosse, Section 7: α and μ by the exact Fisher of the step's batch, for KFAC's direction and the previous step."""
    model, (x, y) = net().double(), batch(0, 8)
    x, params, lam = x.double(), list(model.parameters()), 0.2
    opt = foof.KFAC(model, damping=lam, fisher="full", adaptive=True, T=1)
    opt.initialise([x])
    previous = torch.zeros(sum(p.numel() for p in params)).double()
    for t in range(4):
        twin = copy.deepcopy(model)
        own = list(twin.parameters())
        F = full_fisher(twin, x, own, "categorical") + lam * torch.eye(len(previous)).double()
        g = torch.cat([v.flatten() for v in torch.autograd.grad(nn.functional.cross_entropy(twin(x), y), own)])
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out)
        nn.functional.cross_entropy(out, y).backward()
        pieces = []
        for name, matrix in updates.updates(opt).items():
            assert name in ("0", "2", "4")
            pieces += [matrix[:, :-1].flatten(), matrix[:, -1]]
        plane = torch.stack([-torch.cat(pieces), previous])[: 1 if t == 0 else 2]
        best = -torch.linalg.solve(plane @ F @ plane.T, plane @ g)
        before = flat(model)
        opt.step()
        previous = flat(model) - before
        assert relative_error(previous, best @ plane) < 1e-8
        assert opt._predicted == pytest.approx((g @ previous + 0.5 * previous @ F @ previous).item())


@pytest.mark.parametrize("kind", ["kfac", "natural"])
def test_without_adaptive_steps_each_group_has_its_own_lr_and_momentum(kind):
    """The same updates as without adaptation, and what the quadratic model expects of them."""
    ends = []
    for adaptive in (False, Adaptive(step=False, momentum=False)):
        model, (x, y) = net().double(), batch(0, 8)
        x, params = x.double(), list(model.parameters())
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.3, "momentum": 0.9}]
        options = {"lr": 0.1, "damping": 0.2, "fisher": "full", "groups": groups, "adaptive": adaptive, "T": 1}
        opt = ablations.kfac(model, deferred=True, **options) if kind == "kfac" else foof.NaturalGradient(model, **options)
        for _ in range(3):
            F = full_fisher(model, x, params, "categorical")
            opt.zero_grad()
            out = model(x)
            opt.update_curvature(out)
            nn.functional.cross_entropy(out, y).backward()
            g, before = torch.cat([p.grad.flatten() for p in params]), flat(model)
            opt.step()
        ends.append(flat(model))
        delta = ends[-1] - before
    assert relative_error(ends[1], ends[0]) < 1e-12
    assert opt._predicted == pytest.approx((g @ delta + 0.5 * delta @ (F @ delta + 0.2 * delta)).item())


def adaptive_end(two_calls):
    """Weights after some steps, on each of which a further forward pass may follow the one that is used."""
    model = net()
    opt = foof.KFAC(model, damping=0.1, T=2, fisher="full", adaptive=Adaptive(damping=False))
    for t in range(4):
        x, y = batch(t)
        opt.zero_grad()
        out = model(x)
        if two_calls:
            model(batch(100 + t)[0])
        opt.update_curvature(out)
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
    return flat(model)


def test_the_quadratic_model_is_of_the_batch_behind_the_outputs():
    assert torch.equal(adaptive_end(two_calls=True), adaptive_end(two_calls=False))


def test_adaptation_leaves_the_model_picklable_and_lets_go_of_it():
    model = net()
    opt = foof.KFAC(model, adaptive=True)
    step(model, opt, *batch(0))
    assert torch.equal(flat(pickle.loads(pickle.dumps(model))), flat(model))
    del opt
    foof.KFAC(model, adaptive=True)


def test_an_adaptive_step_after_a_skipped_one_with_zero_grad_in_between():
    model = net()
    opt = foof.KFAC(model, damping=0.1, T=1, adaptive=True)
    for t in range(2):
        x, y = batch(t)
        out = model(x)
        opt.update_curvature(out)
        opt.zero_grad()
        nn.functional.cross_entropy(out, y).backward()  # of the first batch no step is taken
    notes = [note for ledger in opt.preconditioner.step.settle().values() for note in ledger.notes if isinstance(note, ModelCall)]
    assert [call.args[0] is x for call in notes] == [True]
    opt.step()


def test_adaptive_steps_of_a_loss_that_is_not_a_number():
    model, (x, y) = net(), batch(0)
    opt = foof.KFAC(model, damping=0.1, T=1, adaptive=True)
    out = model(x)
    opt.update_curvature(out)
    (nn.functional.cross_entropy(out, y) * float("nan")).backward()
    opt.step()
    assert flat(model).isnan().all()


def test_adaptive_damping_follows_the_reduction_ratio_and_needs_no_tuning():
    model, (x, y) = net(), batch(0, 30)
    opt = foof.KFAC(model, damping=1.0, adaptive=Adaptive(period=2), T=1)
    losses, dampings = [], []
    for _ in range(40):
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out)
        loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
        opt.adapt_damping(losses[-1], nn.functional.cross_entropy(model(x), y).item())
        dampings.append(opt.param_groups[0]["damping"])
    assert losses[-1] < 0.5 * losses[0]
    assert dampings[-1] < 1.0


def test_dropout_is_the_same_along_every_direction():
    model, x = nn.Sequential(nn.Linear(4, 30), nn.Dropout(0.5), nn.Linear(30, 3)), torch.randn(5, 4)
    params = list(model.parameters())
    plane = [torch.randn_like(p).expand(2, *p.shape) for p in params]
    before = torch.get_rng_state()
    C = fisher_in(model, [ModelCall((x,), {}, torch.Size([5, 3]))], params, plane, likelihood_named("categorical"))
    assert torch.equal(C, C[0, 0].expand(2, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_norm_keeps_its_averages():
    model, (x, y) = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), batch(0, 12)
    opt = foof.KFAC(model, damping=0.1, T=1, adaptive=True)
    out = model(x)
    opt.update_curvature(out)
    nn.functional.cross_entropy(out, y).backward()
    averages = [b.clone() for b in model.buffers()]
    opt.step()
    assert all(map(torch.equal, averages, model.buffers()))


@pytest.mark.parametrize("given", [lambda out: out.movedim(1, -1), lambda out: out[:, :2]])
def test_outputs_that_are_not_the_model_s_own_are_refused(given):
    model = nn.Conv1d(2, 3, 1)
    opt = foof.KFAC(model, damping=0.1, T=1, adaptive=True)
    out = given(model(torch.randn(5, 2, 4)))
    opt.update_curvature(out)
    out.square().sum().backward()
    with pytest.raises(ValueError, match="needs update_curvature to be given what the model returns"):
        opt.step()
