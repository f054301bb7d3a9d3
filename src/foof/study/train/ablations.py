"""KFAC as only the study needs it, built from the library's pieces: its second factor dropped, the released damping, sums over rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import foof
from foof.kronecker import EigenInverse, KroneckerInverse, Plain
from foof.layers import Layer
from foof.optim.estimators import KroneckerFisher
from foof.statistics import wide


class ScaledInputInverse(KroneckerInverse):
    """FOOF with KFAC's λ_A, times ``λ_E⁻¹ = λ_A/λ`` for steps of KFAC's size (Appendix D.9, Fig. 3C+D)."""

    def left(self, X: Tensor) -> Tensor:
        return X

    def finish(self, G: Tensor) -> Tensor:
        return G / self.lambda_E[..., None, None]


class RescaledInputInverse(KroneckerInverse):
    """FOOF with KFAC's λ_A, rescaled to the norm of the layer's KFAC update (Appendix D.9, Fig. 4C)."""

    linear = False

    def apply(self, G: Tensor) -> Tensor:
        without = self.right(G)
        size = self.left(without.mT).norm()
        return without * (size / without.norm().clamp_min(torch.finfo(G.dtype).tiny))

    def gradient(self, layer: Layer, x: Tensor, e: Tensor, plain: Plain | None = None) -> Tensor:
        e = e.to(wide(e.dtype))
        return self.apply(layer.weight_gradient(x if layer.diagonal else x.to(e.dtype), e))


class TransposedEigenInverse(EigenInverse):
    """A counter-example: `U_Eᵀ [(U_E Eᵀ A U_A) / (s_E s_Aᵀ + λ)] U_Aᵀ`, the paper's released code for its standard damping.

    It rotates with U_E where U_Eᵀ belongs, so it solves no damped system; see `tests/oracle.py`. The study alone has it, to
    reproduce Figs. 3A and 3B as published beside the damping of Eq. (3).
    """

    def left(self, X: Tensor) -> Tensor:
        return X.to(self.U_E.dtype) @ self.U_E.mT

    def finish(self, G: Tensor) -> Tensor:
        G = self.U_E.mT @ (G / (self.s_E.unsqueeze(-1) * self.s_A.unsqueeze(-2) + self.damping))
        return G if self.U_A is None else G @ self.U_A.mT


KINDS: dict[tuple[str, str], type[KroneckerInverse] | type[EigenInverse]] = {
    ("heuristic", "keep"): KroneckerInverse,
    ("heuristic", "drop-scaled"): ScaledInputInverse,
    ("heuristic", "drop-rescaled"): RescaledInputInverse,
    ("standard", "keep"): EigenInverse,
    ("transposed", "keep"): TransposedEigenInverse,
}


def kind_named(damping_mode: str, second_factor: str = "keep") -> type[KroneckerInverse] | type[EigenInverse]:
    """The kind of inverse for `damping_mode` and `second_factor`, or an error that says what there is."""
    if (damping_mode, second_factor) not in KINDS:
        choices = "; ".join(f"damping_mode={mode!r} with second_factor={second!r}" for mode, second in KINDS)
        raise ValueError(f"there is no KFAC with damping_mode={damping_mode!r} and second_factor={second_factor!r}; there is {choices}.")
    return KINDS[damping_mode, second_factor]


def kronecker_fisher(optimizer: foof.KFAC) -> KroneckerFisher:
    """The estimator inside a KFAC."""
    estimator = optimizer.preconditioner.estimator
    assert isinstance(estimator, KroneckerFisher)
    return estimator


def kfac(model: nn.Module, lr: float = 0.003, damping: float = 0.01, *, damping_mode: str = "heuristic", second_factor: str = "keep",
         rows: str = "mean", deferred: bool = False, **options: Any) -> foof.KFAC:  # fmt: skip
    """KFAC, or an ablation of it.

    second_factor: `"keep"`, or one of Appendix D.9, FOOF with KFAC's λ_A: `"drop-scaled"` times λ_E⁻¹ = λ_A/λ, `"drop-rescaled"`
    rescaled to the norm of each layer's KFAC update. damping_mode: also `"transposed"`, as released. rows: `"sum"` makes Σ_E the sum
    over a datapoint's rows, R times as large, as in the paper's convolutions. deferred: leave gradients plain until the step.
    """
    if rows not in ("mean", "sum"):
        raise ValueError(f'rows must be "mean" or "sum", got {rows!r}.')
    kind = kind_named(damping_mode, second_factor)
    optimizer = foof.KFAC(model, lr, damping, damping_mode="heuristic" if damping_mode == "heuristic" else "standard", **options)
    estimator = kronecker_fisher(optimizer)
    estimator.kind, estimator.plain = kind, estimator.plain or deferred or not kind.linear
    estimator.settings = replace(estimator.settings, average_rows=rows == "mean")
    return optimizer
