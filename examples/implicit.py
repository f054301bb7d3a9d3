"""Tune the L2 strength of a classifier by its hypergradient, without unrolling its training (Appendix C.3).

The inner problem is a classifier on 7 × 7 images with penalty ``½ λ |θ|²``; the outer loss is that of validation images. At the
minimum of the inner problem, ``dV/dλ`` follows from one solve with ``λI + F``. It is compared with the gradient through 500 unrolled
steps of gradient descent, and then used to descend on log λ.
"""

from __future__ import annotations

import math
import time

import plotly.graph_objects as go
import torch
from common import data, output_file, save
from torch import Tensor, nn

import foof
from foof.implicit import hypergradient

CROSS_ENTROPY = nn.functional.cross_entropy


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, valid_x, valid_y = data(60, 500)
    small, valid_small = (nn.functional.avg_pool2d(images.reshape(-1, 1, 28, 28), 4).flatten(1) for images in (x, valid_x))
    return small.double(), y, valid_small.double(), valid_y


def minimum(x: Tensor, y: Tensor, strength: float) -> nn.Linear:
    """The inner problem solved by Newton's method: natural gradients, whose Fisher is the Hessian of a linear model."""
    model = nn.Linear(x.shape[1], 10).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    for _ in range(20):
        loss = CROSS_ENTROPY(model(x), y) + 0.5 * strength * sum(p.square().sum() for p in model.parameters())
        F = foof.Fisher(model, x, "full")
        gradient = list(torch.autograd.grad(loss, F.params))
        step = F.solve(gradient, strength)
        with torch.no_grad():
            for p, s in zip(F.params, step, strict=True):
                p -= s
        if max(float(g.abs().max()) for g in gradient) < 1e-9:
            break
    return model


def implicit(x: Tensor, y: Tensor, valid_x: Tensor, valid_y: Tensor, log_strength: Tensor) -> tuple[float, float]:
    """Validation loss and its derivative by log λ."""
    strength = log_strength.exp()
    model = minimum(x, y, strength.item())
    inner = CROSS_ENTROPY(model(x), y) + 0.5 * strength * sum(p.square().sum() for p in model.parameters())
    outer = CROSS_ENTROPY(model(valid_x), valid_y)
    (gradient,) = hypergradient(foof.Fisher(model, x, "full"), inner, outer, log_strength, damping=strength.item())
    return outer.item(), gradient.item()


def unrolled(x: Tensor, y: Tensor, valid_x: Tensor, valid_y: Tensor, log_strength: Tensor, steps: int = 500) -> float:
    """The same derivative, through the whole of training by gradient descent with momentum."""
    x, valid_x = (torch.cat([each, torch.ones(len(each), 1).double()], dim=1) for each in (x, valid_x))
    W = torch.zeros(10, x.shape[1], dtype=torch.float64, requires_grad=True)
    velocity = torch.zeros_like(W)
    for _ in range(steps):
        loss = CROSS_ENTROPY(x @ W.T, y) + 0.5 * log_strength.exp() * W.square().sum()
        velocity = 0.9 * velocity + torch.autograd.grad(loss, W, create_graph=True)[0]
        W = W - 0.05 * velocity
    return torch.autograd.grad(CROSS_ENTROPY(valid_x @ W.T, valid_y), log_strength)[0].item()


def main() -> None:
    out = output_file("implicit")
    torch.manual_seed(0)
    x, y, valid_x, valid_y = problem()

    log_strength = torch.tensor(math.log(0.1), dtype=torch.float64, requires_grad=True)
    start = time.perf_counter()
    ours = implicit(x, y, valid_x, valid_y, log_strength)[1]
    middle = time.perf_counter()
    theirs = unrolled(x, y, valid_x, valid_y, log_strength)
    print(f"dV/d log λ at λ = 0.1: implicit {ours:.8f} ({middle - start:.2f} s), "
          f"unrolled {theirs:.8f} ({time.perf_counter() - middle:.2f} s)")  # fmt: skip

    path = []
    for _ in range(8):
        value, gradient = implicit(x, y, valid_x, valid_y, log_strength)
        path.append((log_strength.exp().item(), value))
        with torch.no_grad():
            log_strength -= 15 * gradient
    print(f"validation loss {path[0][1]:.4f} at λ = {path[0][0]:.3g}, {path[-1][1]:.4f} at λ = {path[-1][0]:.3g} after {len(path)} steps")

    grid = [10 ** (-2.5 + 0.5 * i) for i in range(6)]
    curve = [implicit(x, y, valid_x, valid_y, torch.tensor(math.log(s), dtype=torch.float64, requires_grad=True))[0] for s in grid]
    figure = go.Figure()
    figure.add_scatter(name="validation loss", x=grid, y=curve, mode="lines")
    figure.add_scatter(name="descent on log λ", x=[s for s, _ in path], y=[v for _, v in path], mode="lines+markers")
    figure.update_xaxes(type="log", title="L2 strength λ")
    figure.update_layout(title="The L2 strength by implicit differentiation", yaxis_title="validation loss")
    save(figure, out)


if __name__ == "__main__":
    main()
