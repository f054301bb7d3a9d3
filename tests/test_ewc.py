"""EWC's penalty against the dense quadratic form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import oracle
from cases import cnn, mlp
from foof.ewc import EWC


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("curvature", ["exact", "diagonal"])
def test_the_penalty_and_its_gradient_are_the_dense_ones(kind: str, curvature: str) -> None:
    torch.manual_seed(0)
    model, shape = (mlp(5, 6, 3), (5,)) if kind == "mlp" else (cnn(), (2, 8, 8))
    model, params = model.double(), list(model.parameters())
    ewc = EWC(model, strength=3.0, curvature=curvature)
    assert ewc.penalty() == 0
    remembered = []
    for _ in range(2):  # two tasks
        x = torch.randn(6, *shape).double()
        ewc.consolidate(x, labels="full")
        F = oracle.full_fisher(model, x, params, "categorical")
        remembered.append((F if curvature == "exact" else F.diagonal().diag(), torch.cat([p.detach().flatten() for p in params])))
        with torch.no_grad():
            for p in params:
                p.add_(0.1 * torch.randn_like(p))
    now = torch.cat([p.detach().flatten() for p in params])
    penalty = ewc.penalty()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(penalty, params)])
    assert penalty.item() == pytest.approx(sum(1.5 * (now - w) @ F @ (now - w) for F, w in remembered).item(), rel=1e-9)
    assert oracle.relative_error(gradient, sum(3.0 * F @ (now - w) for F, w in remembered)) < 1e-9


def test_the_penalty_is_the_same_under_autocast() -> None:
    torch.manual_seed(0)
    model = mlp(5, 6, 3)
    params = list(model.parameters())
    ewc = EWC(model, strength=3.0)
    ewc.consolidate(torch.randn(6, 5), labels="full")
    with torch.no_grad():
        for p in params:
            p.add_(0.1 * torch.randn_like(p))
    expected = [ewc.penalty(), *torch.autograd.grad(ewc.penalty(), params)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [ewc.penalty(), *torch.autograd.grad(ewc.penalty(), params)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_memory_is_datapoints_times_neurons() -> None:
    model = nn.Sequential(nn.Linear(100, 200, bias=False), nn.ReLU(), nn.Linear(200, 10, bias=False))
    ewc = EWC(model, strength=1.0)
    ewc.consolidate(torch.randn(50, 100))
    weights = (100 * 200 + 200 * 10) * 4
    assert ewc.memory()[0] == weights + 50 * (100 + 200 + 200 + 10) * 4
    ewc.penalty().backward()
    assert ewc.memory()[0] == weights + 50 * (100 + 200 + 200 + 10) * 4  # no Gram matrix


def test_two_tasks_of_least_squares_are_learnt_as_if_together() -> None:
    """For a linear model the quadratic penalty is exact: after the second task the weights are those of both at once."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2, bias=False).double()
    tasks = [(torch.randn(20, 6).double(), torch.randn(20, 2).double()) for _ in range(2)]

    def minimise(x: torch.Tensor, y: torch.Tensor, ewc: EWC) -> None:
        opt = torch.optim.LBFGS(model.parameters(), max_iter=200, tolerance_grad=1e-12, tolerance_change=1e-16, history_size=20)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = 0.5 * (model(x) - y).pow(2).sum() / len(x) + ewc.penalty()
            loss.backward()
            return loss

        opt.step(closure)

    ewc = EWC(model, strength=1.0)
    for x, y in tasks:
        minimise(x, y, ewc)
        ewc.consolidate(x, labels="full", likelihood="gaussian")
    together = torch.linalg.lstsq(torch.cat([x for x, _ in tasks]), torch.cat([y for _, y in tasks])).solution.T
    assert oracle.relative_error(model.weight.detach(), together) < 1e-6


def test_bad_input_is_explained() -> None:
    with pytest.raises(ValueError, match="curvature must be one of"):
        EWC(mlp(2, 2), 1.0, "kronecker")
    with pytest.raises(ValueError, match="strength"):
        EWC(mlp(2, 2), -1.0)


def test_second_derivatives_of_the_exact_penalty_are_refused():
    """They would be zero, which they are not."""
    model = mlp(3, 4, 2)
    ewc = EWC(model, strength=1.0)
    ewc.consolidate(torch.randn(6, 3))
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1
    gradients = torch.autograd.grad(ewc.penalty(), list(model.parameters()), create_graph=True)
    with pytest.raises(RuntimeError, match="first derivatives only"):
        sum(g.square().sum() for g in gradients).backward()
