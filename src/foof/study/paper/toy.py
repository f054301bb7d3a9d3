"""The toy example of Appendix F: two datapoints whose gradients conflict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

INPUTS = ((3.0, 1.0), (1.0, 0.0))
LABELS = (1.0, -1.0)


@dataclass(frozen=True)
class Toy:
    """Update directions at w = 0, and the loss of each datapoint along them: `losses[method]` is `(steps, 2)`."""

    gradients: Tensor  # (2, 2): minus the gradient of each datapoint
    sgd: Tensor  # (2,)
    foof: Tensor  # (2,)
    step_sizes: Tensor
    losses: dict[str, Tensor]


def toy(points: int = 51) -> Toy:
    """One linear neuron, squared distance ½(w·a − y)² summed over both datapoints, weights at zero.

    SGD goes along −EᵀA, undamped FOOF along −EᵀA (AᵀA)⁻¹ (Eq. 6 with λ = 0).
    """
    A = torch.tensor(INPUTS, dtype=torch.float64)  # (N, m)
    y = torch.tensor(LABELS, dtype=torch.float64)
    E = -y[:, None]  # dL/db = b − y with b = 0, (N, 1)
    sgd = -(E.T @ A)[0]
    foof = torch.linalg.solve(A.T @ A, sgd)
    step_sizes = torch.linspace(0, 1, points, dtype=torch.float64)

    def losses(direction: Tensor) -> Tensor:
        return 0.5 * (step_sizes[:, None] * (A @ direction) - y) ** 2

    return Toy(-E * A, sgd, foof, step_sizes, {"SGD": losses(sgd), "FOOF": losses(foof)})
