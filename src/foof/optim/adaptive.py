"""Damping, step size and momentum from a quadratic model of the loss (Martens & Grosse 2015, Sections 6.4 to 7; Appendix A).

With the gradient g of the loss h and the exact Fisher F, the model of an update δ is ``M(δ) = gᵀδ + ½ δᵀ(F + λI)δ``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adaptive:
    """Which of the three are adapted. ``period`` steps between changes of λ, each by a factor ``decay ** period``."""

    step: bool = True  # α minimises M along the update direction; the learning rate is not used
    momentum: bool = True  # α and μ minimise M over the plane of the direction and the previous update
    damping: bool = True  # λ follows the reduction ratio
    period: int = 5
    decay: float = 19 / 20

    def __post_init__(self) -> None:
        if self.momentum and not self.step:
            raise ValueError("adaptive momentum is found together with the step size: it needs step=True.")
        if self.period < 1 or not 0 < self.decay < 1:
            raise ValueError(f"period must be at least 1 and decay in (0, 1), got {self.period} and {self.decay}.")

    def adapted(self, damping: float, ratio: float) -> float:
        """λ for the next ``period`` steps: smaller where the model was right (ρ > 3/4), larger where not (ρ < 1/4, or NaN)."""
        if ratio > 0.75:
            return damping * self.decay**self.period
        return damping if ratio >= 0.25 else damping / self.decay**self.period


def minimise(curvature: Tensor, slope: Tensor) -> tuple[Tensor, float]:
    """Coefficients c ``(j,)`` that minimise ``slopeᵀc + ½ cᵀCc``, and the minimum; the curvature C ``(j, j)`` may be singular."""
    c = -torch.linalg.lstsq(curvature.double(), slope.double().unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return c, float(0.5 * slope.double() @ c)


def reduction_ratio(before: float, after: float, predicted: float) -> float:
    """``ρ = (h(θ+δ) - h(θ)) / M(δ)``: 1 where the model predicts the loss's change exactly."""
    return (after - before) / predicted if predicted != 0 else float("nan")
