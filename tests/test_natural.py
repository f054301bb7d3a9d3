"""Exact natural gradients against dense solves, and as an optimizer."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foof
import oracle
from cases import cnn, mlp
from foof.optim.adaptive import Adaptive

LOSS = nn.functional.cross_entropy


def problem(kind: str = "mlp", N: int = 12) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = (mlp(5, 6, 3), torch.randn(N, 5)) if kind == "mlp" else (cnn(), torch.randn(N, 2, 8, 8))
    return model.double(), x.double(), torch.randint(0, 3, (N,))


def flat(params: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in params])


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("blocks", ["full", "layer"])
@pytest.mark.parametrize("source", ["inputs", "out"])
def test_a_step_is_the_dense_natural_gradient(kind: str, blocks: str, source: str) -> None:
    model, x, y = problem(kind)
    params = list(model.parameters())
    F = oracle.full_fisher(model, x, params, "categorical")
    if blocks == "layer":
        F = oracle.block_diagonal(F, [sum(p.numel() for p in m.parameters()) for m in model if list(m.parameters())])
    g, before = flat(torch.autograd.grad(LOSS(model(x), y), params)), flat(params)
    expected = before - 0.5 * torch.linalg.solve(F + 0.1 * torch.eye(len(F), dtype=F.dtype), g)

    opt = foof.NaturalGradient(model, lr=0.5, damping=0.1, fisher="full", blocks=blocks)
    out = model(x)
    opt.update_curvature(out) if source == "out" else opt.update_curvature(inputs=x)
    LOSS(out, y).backward()
    opt.step()
    assert oracle.relative_error(flat(params), expected) < 1e-9


def test_the_fisher_may_come_from_another_and_larger_batch_and_is_renewed_every_T_steps() -> None:
    model, x, y = problem()
    params, other = list(model.parameters()), torch.randn(50, 5, dtype=torch.float64)
    opt = foof.NaturalGradient(model, lr=0.1, damping=0.1, fisher="full", T=3)
    for step in range(7):
        assert opt.curvature_due == (step % 3 == 0)
        if step % 3 == 0:
            F = oracle.full_fisher(model, other, params, "categorical")
        opt.update_curvature(inputs=other)
        assert not opt.curvature_due
        g, before = flat(torch.autograd.grad(LOSS(model(x), y), params)), flat(params)
        LOSS(model(x), y).backward()
        opt.step()
        opt.zero_grad()
        expected = before - 0.1 * torch.linalg.solve(F + 0.1 * torch.eye(len(F), dtype=F.dtype), g)
        assert oracle.relative_error(flat(params), expected) < 1e-9


@pytest.mark.parametrize("way", ["outputs", "inputs"])
def test_a_buffer_filled_with_the_next_batch_leaves_the_fisher_as_it_was(way: str) -> None:
    """F lives T steps; a loop may read all its batches into one buffer."""
    batches, ends = [torch.randn(12, 5, dtype=torch.float64) for _ in range(3)], []
    for buffered in (True, False):
        model, x, y = problem()
        opt = foof.NaturalGradient(model, lr=0.1, damping=0.1, fisher="full", T=3)
        for each in batches:
            x = x.copy_(each) if buffered else each
            out = model(x)
            opt.update_curvature(out) if way == "outputs" else opt.update_curvature(inputs=x)
            LOSS(out, y).backward()
            opt.step()
            opt.zero_grad()
        ends.append(flat(model.parameters()))
    assert torch.equal(*ends)


def test_momentum_decay_and_groups() -> None:
    """Two steps by hand: v ← μ v + (F + Λ)⁻¹ g, w ← (1 - lr·decay) w - lr·v, with a damping of its own for one layer."""
    model, x, y = problem()
    params = list(model.parameters())
    group = {"params": list(model[0].parameters()), "damping": 0.7}
    opt = foof.NaturalGradient(model, lr=0.2, damping=0.1, momentum=0.9, weight_decay=0.01, fisher="full", groups=[group])
    damping = torch.cat([torch.full((p.numel(),), 0.7 if i < 2 else 0.1, dtype=torch.float64) for i, p in enumerate(params)])
    w, v = flat(params), torch.zeros(len(damping), dtype=torch.float64)
    for _ in range(2):
        F = oracle.full_fisher(model, x, params, "categorical")
        g = flat(torch.autograd.grad(LOSS(model(x), y), params))
        v = 0.9 * v + torch.linalg.solve(F + damping.diag(), g)
        w = (1 - 0.2 * 0.01) * w - 0.2 * v
        out = model(x)
        opt.update_curvature(out)
        LOSS(out, y).backward()
        opt.step()
        opt.zero_grad()
        assert oracle.relative_error(flat(params), w) < 1e-9


def test_large_damping_is_gradient_descent() -> None:
    model, x, y = problem("cnn")
    params = list(model.parameters())
    g, before = flat(torch.autograd.grad(LOSS(model(x), y), params)), flat(params)
    opt = foof.NaturalGradient(model, lr=1e8, damping=1e9)
    opt.update_curvature(inputs=x)
    LOSS(model(x), y).backward()
    opt.step()
    assert oracle.relative_error(flat(params), before - 0.1 * g) < 1e-6


def test_least_squares_in_one_step() -> None:
    """A linear model with squared error: the Fisher is the Hessian, so one full step reaches the minimum."""
    torch.manual_seed(0)
    x, model = torch.randn(30, 4).double(), nn.Linear(4, 2).double()
    y = torch.randn(30, 2).double()
    opt = foof.NaturalGradient(model, lr=1.0, damping=1e-7, fisher="full", likelihood="gaussian")
    out = model(x)
    opt.update_curvature(out)
    (0.5 * (out - y).pow(2).sum() / 30).backward()
    opt.step()
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(30, 1).double()], dim=1), y).solution
    assert oracle.relative_error(torch.cat([model.weight.T, model.bias[None]]).detach(), best) < 1e-5


def train(model: nn.Module, opt: foof.NaturalGradient, x: Tensor, y: Tensor, steps: int, source: str = "inputs") -> None:
    for _ in range(steps):
        out = model(x)
        opt.update_curvature(out) if source == "out" else opt.update_curvature(inputs=x.flip(0))
        LOSS(out, y).backward()
        opt.step()
        opt.zero_grad()


@pytest.mark.parametrize("before", [3, 4, 6])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_resuming_is_bitwise_also_between_two_fishers(before: int, blocks: str) -> None:
    model, x, y = problem("cnn")
    options = {"lr": 0.1, "damping": 0.1, "momentum": 0.9, "T": 3, "blocks": blocks, "generator": 5}
    opt = foof.NaturalGradient(model, **options)
    train(model, opt, x, y, before)
    twin, file = copy.deepcopy(model), io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    resumed = foof.NaturalGradient(twin, **{**options, "generator": 77})
    resumed.load_state_dict(torch.load(file, weights_only=True))
    train(model, opt, x, y, 5)
    train(twin, resumed, x, y, 5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_rest_is_stepped_by_another_optimizer_and_batch_norm_keeps_its_averages() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3))
    x, y = torch.randn(20, 5), torch.randint(0, 3, (20,))
    opt = foof.NaturalGradient(model, lr=0.1, rest={"name": "sgd", "lr": 0.5})
    mean, scale = model[1].running_mean.clone(), model[1].weight.detach().clone()
    opt.update_curvature(inputs=x)
    assert torch.equal(model[1].running_mean, mean)
    LOSS(model(x), y).backward()
    grad = model[1].weight.grad.clone()
    opt.step()
    torch.testing.assert_close(model[1].weight, scale - 0.5 * grad)


def test_training_lowers_the_loss_far_below_gradient_descent() -> None:
    losses = {}
    for name in ("natural", "sgd"):
        model, x, y = problem(N=40)
        opt = foof.NaturalGradient(model, lr=0.5, damping=1e-2, fisher="full") if name == "natural" else None
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        if opt:
            train(model, opt, x, y, 40, "out")
        else:
            for _ in range(40):
                sgd.zero_grad()
                LOSS(model(x), y).backward()
                sgd.step()
        losses[name] = LOSS(model(x), y).item()
    assert losses["natural"] < 0.5 * losses["sgd"]


# --- adaptive ---------------------------------------------------------------------------------------------------------


def test_adaptive_step_and_momentum_minimise_the_quadratic_model() -> None:
    model, x, y = problem()
    params = list(model.parameters())
    opt = foof.NaturalGradient(model, damping=0.1, fisher="full", adaptive=True)
    previous = torch.zeros(sum(p.numel() for p in params), dtype=torch.float64)
    for step in range(4):
        F = oracle.full_fisher(model, x, params, "categorical") + 0.1 * torch.eye(len(previous), dtype=torch.float64)
        g, w = flat(torch.autograd.grad(LOSS(model(x), y), params)), flat(params)
        plane = torch.stack([-torch.linalg.solve(F, g), previous])[: 1 if step == 0 else 2]
        best = -torch.linalg.solve(plane @ F @ plane.T, plane @ g)
        train(model, opt, x, y, 1, "out")
        previous = flat(params) - w
        assert oracle.relative_error(previous, best @ plane) < 1e-8
        assert opt._predicted == pytest.approx((g @ previous + 0.5 * previous @ F @ previous).item())


def test_adaptive_damping_follows_the_reduction_ratio() -> None:
    model, x, y = problem()
    opt = foof.NaturalGradient(model, damping=5.0, fisher="full", adaptive=Adaptive(period=2))
    seen = []
    for _ in range(20):
        before = LOSS(model(x), y).item()
        train(model, opt, x, y, 1, "out")
        ratio = opt.adapt_damping(before, LOSS(model(x), y).item())
        assert ratio > 0
        seen.append(opt.param_groups[0]["damping"])
    assert seen[0] == 5.0
    assert seen[-1] < 5.0
    assert len(set(seen)) <= 11
    settings = Adaptive(period=5)
    assert settings.adapted(1.0, 0.9) == pytest.approx(0.95**5)
    assert settings.adapted(1.0, 0.5) == 1.0
    assert settings.adapted(1.0, 0.1) == pytest.approx(0.95**-5)
    assert settings.adapted(1.0, float("nan")) > 1


# --- bad input --------------------------------------------------------------------------------------------------------


def test_bad_input_is_explained() -> None:
    model, x, y = problem()
    for options, message in [
        ({"damping": 0.0}, "damping λ must be"),
        ({"damping": "auto"}, "damping as a positive number"),
        ({"fisher": "exact"}, '"mc", "full" or "empirical"'),
        ({"blocks": "diagonal"}, '"full" or "layer"'),
        ({"adaptive": True, "weight_decay": 0.1}, "quadratic model"),
    ]:
        with pytest.raises(ValueError, match=message):
            foof.NaturalGradient(model, **options)
    before = model(x)
    opt = foof.NaturalGradient(model, fisher="empirical")
    LOSS(model(x), y).backward()
    with pytest.raises(RuntimeError, match="no Fisher yet"):
        opt.step()
    with pytest.raises(ValueError, match="one of them"):
        opt.update_curvature()
    with pytest.raises(ValueError, match="pass y"):
        opt.update_curvature(inputs=x)
    with pytest.raises(ValueError, match=r"forward pass of this model|outside its layer"):
        opt.update_curvature(before, y)
    opt.update_curvature(inputs=x, y=y)


def test_a_step_without_the_fisher_that_was_due_is_told_of_once() -> None:
    torch.manual_seed(0)
    model, x = mlp(4, 5, 3), torch.randn(6, 4)
    opt = foof.NaturalGradient(model, T=2)
    told = []
    for t in range(6):
        opt.zero_grad()
        out = model(x)
        if t < 2:
            opt.update_curvature(out)
        out.square().mean().backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        told.append(["a new Fisher is due" in str(each.message) for each in caught])
    assert told == [[], [], [True], [], [], []]


def test_there_are_no_averages_to_initialise() -> None:
    with pytest.raises(NotImplementedError, match=r"call update_curvature\(inputs=...\)"):
        foof.NaturalGradient(mlp(4, 5, 3)).initialise([torch.randn(2, 4)])


def test_a_second_step_on_the_same_gradients_is_the_same_step():
    model, x = mlp(4, 5, 3), torch.randn(6, 4)
    opt = foof.NaturalGradient(model, lr=0.1, damping=0.1)
    start = flat(model.parameters())
    opt.update_curvature(inputs=x)
    model(x).square().sum().backward()
    opt.step()
    first = flat(model.parameters()) - start
    opt.update_curvature(inputs=x)
    opt.step()
    assert torch.allclose(flat(model.parameters()) - start, 2 * first, rtol=1e-4, atol=1e-6)
