"""Hypergradients by implicit differentiation against unrolled and closed-form ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foof
from foof.implicit import hypergradient


def test_the_l2_strength_of_ridge_regression_in_closed_form() -> None:
    """θ*(λ) = (XᵀX/N + λI)⁻¹ XᵀY/N, so dV/dλ can be had by differentiating through the solve."""
    torch.manual_seed(0)
    x, y, xv, yv = (torch.randn(*shape, dtype=torch.float64) for shape in ((30, 5), (30, 2), (40, 5), (40, 2)))
    strength = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    theta = torch.linalg.solve(x.T @ x / 30 + strength * torch.eye(5, dtype=torch.float64), x.T @ y / 30)
    expected = torch.autograd.grad((xv @ theta - yv).pow(2).mean(), strength)[0]

    model = nn.Linear(5, 2, bias=False).double()
    model.weight.data = theta.detach().T.clone()
    inner = 0.5 * (model(x) - y).pow(2).sum() / 30 + 0.5 * strength * model.weight.square().sum()
    outer = (model(xv) - yv).pow(2).mean()
    F = foof.Fisher(model, x, "full", likelihood="gaussian")
    (ours,) = hypergradient(F, inner, outer, strength, damping=0.3)
    assert ours.item() == pytest.approx(expected.item(), rel=1e-9)


def test_the_l2_strength_of_a_classifier_matches_the_unrolled_gradient() -> None:
    """Logistic regression: outputs linear in θ, so the Fisher is the Hessian and implicit equals unrolled at convergence."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 4).double(), torch.randint(0, 3, (40,))
    xv, yv = torch.randn(30, 4).double(), torch.randint(0, 3, (30,))
    strength = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    cross_entropy = nn.functional.cross_entropy

    def inner(w: Tensor) -> Tensor:
        return cross_entropy(x @ w.T, y) + 0.5 * strength * w.square().sum()

    w = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(400):  # unrolled gradient descent
        w = w - 0.5 * torch.autograd.grad(inner(w), w, create_graph=True)[0]
    unrolled = torch.autograd.grad(cross_entropy(xv @ w.T, yv), strength)[0]

    model = nn.Linear(4, 3, bias=False).double()
    model.weight.data = w.detach().clone()
    F = foof.Fisher(model, x, "full")
    inner_loss = cross_entropy(model(x), y) + 0.5 * strength * model.weight.square().sum()
    (ours,) = hypergradient(F, inner_loss, cross_entropy(model(xv), yv), strength, damping=strength.item())
    assert ours.item() == pytest.approx(unrolled.item(), rel=1e-6)


@pytest.mark.parametrize("attached", ["inner", "outer"])
def test_losses_that_go_through_an_optimizer_on_neurons_are_refused(attached: str) -> None:
    """Their gradients are neuron gradients, whether or not the optimizer is still there when they are computed."""
    torch.manual_seed(0)
    model, x, h = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    F = foof.Fisher(model, x, "full")

    def losses() -> dict[str, Tensor]:
        return {"inner": model(x).square().mean() + h * model.weight.square().sum(), "outer": model(x).sum()}

    plain = losses()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    (expected,) = hypergradient(F, plain["inner"], plain["outer"], h, damping=1.0)
    mixed = {**losses(), **{name: loss for name, loss in plain.items() if name != attached}}
    opt.remove()
    with pytest.raises(ValueError, match=r"call opt.remove\(\) before building the losses"):
        hypergradient(F, mixed["inner"], mixed["outer"], h, damping=1.0)
    again = losses()
    torch.testing.assert_close(hypergradient(F, again["inner"], again["outer"], h, damping=1.0)[0], expected)


def test_what_the_outer_loss_says_directly_is_added_and_nothing_to_differentiate_is_an_error() -> None:
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    h = torch.tensor(0.5, requires_grad=True)
    F = foof.Fisher(model, x, "full")
    inner = model(x).square().mean() + h * model.weight.square().sum()
    outer = model(x).sum()
    (without,) = hypergradient(F, inner, outer, h, damping=1.0)
    (with_direct,) = hypergradient(F, inner, outer + 2 * h, h, damping=1.0)
    assert with_direct.item() == pytest.approx(without.item() + 2, rel=1e-5)
    with pytest.raises(ValueError, match="does not depend on the hyperparameters"):
        hypergradient(F, model(x).sum(), outer + h, h, damping=1.0)
