"""Elastic weight consolidation with the exact subsampled Fisher (Appendix C.2): learning tasks one after another.

After task t the weights θ_t and the Fisher F_t of some of its datapoints are kept; later tasks pay
``½ Σ_t strength · (θ - θ_t)ᵀ F_t (θ - θ_t) = ½ Σ_t strength · |G_tᵀ(θ - θ_t)|²``. The usual diagonal of F ignores how weights act
together; the exact one needs datapoints × neurons of memory.

>>> ewc = foof.ewc.EWC(model, strength=1000.0)
>>> for x, y in tasks:
...     ... minimise loss_fn(model(x), y) + ewc.penalty()
...     ewc.consolidate(x)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foof.fisher import Fisher
from foof.gram import GramOperator
from foof.tap import differentiable_once
from foof.vectors import Vectors

__all__ = ["EWC"]


class _Quadratic(torch.autograd.Function):
    """``½ δᵀ F δ`` with the gradient ``F δ = G (Gᵀδ)``: of the forward pass only ``Gᵀδ``, one number per column, is kept."""

    @staticmethod
    def forward(ctx: Any, operator: GramOperator, *deltas: Tensor) -> Tensor:
        us: Vectors = [d.to(operator.dtype).unsqueeze(0) for d in deltas]
        ctx.operator, ctx.dtypes = operator, [d.dtype for d in deltas]
        projected = [operator.project(part, us) for part in operator.parts]
        ctx.save_for_backward(*projected)
        return 0.5 * torch.stack([t.square().sum() for t in projected]).sum()

    @staticmethod
    @differentiable_once("the exact penalty has first derivatives only: for second ones, use curvature=\"diagonal\"")
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        operator: GramOperator = ctx.operator
        gradient: Vectors = [torch.empty(0)] * len(operator.params)
        for part, t in zip(operator.parts, ctx.saved_tensors, strict=True):
            operator.combine(part, t * g, gradient)
        return None, *(each[0].to(dtype) for each, dtype in zip(gradient, ctx.dtypes, strict=True))


class ExactAnchor:
    """One task: its weights and its exact Fisher."""

    def __init__(self, fisher: Fisher) -> None:
        self.operator, self.params = fisher.operator, fisher.params
        self.weights = [p.detach().clone() for p in fisher.params]

    def penalty(self) -> Tensor:
        """``½ (θ - θ_t)ᵀ F_t (θ - θ_t)``, differentiable."""
        return _Quadratic.apply(self.operator, *(p - w for p, w in zip(self.params, self.weights, strict=True)))

    def bytes(self) -> int:
        return sum(self.operator.memory().values()) + sum(w.numel() * w.element_size() for w in self.weights)


class DiagonalAnchor:
    """One task: its weights and the diagonal of its Fisher (Kirkpatrick et al. 2017)."""

    def __init__(self, fisher: Fisher) -> None:
        self.params, self.diagonal = fisher.params, fisher.diagonal()
        self.weights = [p.detach().clone() for p in fisher.params]

    def penalty(self) -> Tensor:
        """``½ Σ_j F_jj (θ - θ_t)_j²``, differentiable."""
        terms = [(d * (p - w).square()).sum() for d, p, w in zip(self.diagonal, self.params, self.weights, strict=True)]
        return 0.5 * torch.stack(terms).sum()

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.diagonal, *self.weights))


ANCHORS: dict[str, type[ExactAnchor] | type[DiagonalAnchor]] = {"exact": ExactAnchor, "diagonal": DiagonalAnchor}


class EWC:
    """The quadratic penalties of all tasks seen so far.

    Args:
        model: the network that learns the tasks.
        strength: of the penalty against the mean loss; the number of datapoints of a task is the Bayesian choice.
        curvature: ``"exact"``, or ``"diagonal"`` for comparison.
    """

    def __init__(self, model: nn.Module, strength: float, curvature: str = "exact") -> None:
        if curvature not in ANCHORS:
            raise ValueError(f"curvature must be one of {sorted(ANCHORS)}, got {curvature!r}.")
        if not 0 <= strength < float("inf"):
            raise ValueError(f"strength must be a finite number ≥ 0, got {strength}.")
        self.model, self.strength, self._kind = model, strength, ANCHORS[curvature]
        self.anchors: list[ExactAnchor | DiagonalAnchor] = []

    def consolidate(self, x: Any, y: Tensor | None = None, labels: str = "mc", **options: Any) -> None:
        """Remember the weights as they are now, and the Fisher at datapoints ``x`` of the task learnt, or of a ``DataLoader``'s (see
        ``foof.Fisher``)."""
        self.anchors.append(self._kind(Fisher(self.model, x, labels, y, **options)))

    def penalty(self) -> Tensor:
        """``½ strength Σ_t (θ - θ_t)ᵀ F_t (θ - θ_t)``: add it to the loss of a new task. 0 before the first."""
        if not self.anchors:
            return next(self.model.parameters()).new_zeros(())
        return self.strength * torch.stack([anchor.penalty() for anchor in self.anchors]).sum()

    def memory(self) -> Sequence[int]:
        """Bytes kept for each task."""
        return [anchor.bytes() for anchor in self.anchors]
