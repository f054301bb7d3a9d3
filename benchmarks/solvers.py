"""Ways to solve with a damped full Fisher: by columns, by parameters, by conjugate gradients. Fig. 2A's setting.

One linear layer 784 → 10 after 50 steps of gradient descent, 1,000 datapoints of Fashion-MNIST, all labels: 9,000 columns and 7,850
parameters, in float32. Seconds of CPU on one thread, and the error relative to a refined solution in float64.

    python benchmarks/solvers.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import foof
from foof.conjugate import ConjugateGradients
from foof.study.data.datasets import load
from foof.woodbury import ByColumns, ByParameters, Woodbury

DAMPINGS = (0.1, 0.01, 0.001)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A model on the way, its inputs, and the gradient."""
    torch.manual_seed(0)
    data = load("fashion-mnist", train_size=1000)
    x, y, model = data.train_x.flatten(1).float(), data.train_y, nn.Linear(784, 10)
    opt = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(50):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    grads = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), list(model.parameters()))
    return model, x, torch.cat([g.flatten() for g in grads])


def seconds(call: Callable[[], Tensor]) -> tuple[float, Tensor]:
    start = time.process_time()
    answer = call()
    return time.process_time() - start, answer


def factorised(model: nn.Module, x: Tensor, v: Tensor, damping: float, side: type[ByColumns] | type[ByParameters]) -> Tensor:
    """With a Fisher, a matrix and a factor of its own."""
    F = foof.Fisher(model, x, "full").operator
    inverse = Woodbury(F, damping)
    inverse.parts = [side(F, part, inverse.precision, 1.0) for part in F.parts]
    return inverse.solve(v)  # type: ignore[no-any-return]


def main() -> None:
    torch.set_num_threads(1)
    model, x, v = problem()
    print(f"{'damping':>8}  {'way':<20} {'seconds':>8} {'error':>8}")
    for damping in DAMPINGS:
        exact = foof.Fisher(model.double(), x.double(), "full").solve(v.double(), damping, refine=2)
        model.float()
        solver: list[ConjugateGradients] = []

        def by_cg(damping: float = damping, solver: list[ConjugateGradients] = solver) -> Tensor:
            solver.append(ConjugateGradients(foof.Fisher(model, x, "full").operator, damping))
            return solver[-1].solve(v)  # type: ignore[no-any-return]

        ways: dict[str, Callable[[], Tensor]] = {
            "by columns": lambda d=damping: factorised(model, x, v, d, ByColumns),  # type: ignore[misc]
            "by parameters": lambda d=damping: factorised(model, x, v, d, ByParameters),  # type: ignore[misc]
            "conjugate gradients": by_cg,
        }
        for name, way in ways.items():
            best, answer = min((seconds(way) for _ in range(2)), key=lambda pair: pair[0])
            steps = f"  {solver[-1].taken} iterations" if name == "conjugate gradients" else ""
            print(f"{damping:8g}  {name:<20} {best:8.2f} {float((answer.double() - exact).norm() / exact.norm()):8.1e}{steps}", flush=True)


if __name__ == "__main__":
    main()
