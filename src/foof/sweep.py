"""Damped inverses in parts, so that no single step has to pay for all of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foof.linalg import WIDE, add_damping, product, times_transposed

PANEL = 192  # rows and columns that are swept at once: enough for products to be fast


class Sweep:
    """``P = (S + λI)⁻¹`` of a symmetric S ``(..., m, m)``, by sweeping one panel of rows and columns after the other.

    To sweep the panel k of A, with ``L Lᵀ = A_kk``: ``A ← A⁰ - F Fᵀ``, where ``A⁰`` is A with zeros for the rows and columns k, and
    F ``(..., m, b)`` has the rows ``A_ik L⁻ᵀ`` for i ≠ k and ``-L⁻ᵀ`` for k. When all panels of ``S + λI`` are swept, ``A = -(S + λI)⁻¹``.
    Each costs ``m² b``; together ``m³``, as a Cholesky and the inverse from it, and they are as accurate. Only the lower triangle of A is
    kept.
    """

    def __init__(self, S: Tensor, damping: float | Tensor, panel: int | None = None) -> None:
        self._shape, self._panel = S.shape, panel or PANEL
        self._A = add_damping(S, damping).flatten(end_dim=-3) if S.dim() > 3 else add_damping(S, damping)
        self.parts, self.done = parts_of(S.shape[-1], self._panel), 0
        self._failed = torch.zeros((), dtype=torch.bool, device=S.device)  # a tensor: no part waits for the device

    def advance(self, to: int) -> None:
        """Until so many parts are done."""
        for part in range(self.done, min(to, self.parts)):
            self._sweep(part * self._panel)
        self.done = max(self.done, to)

    def _sweep(self, k: int) -> None:
        A, b = self._A, self._panel
        end = min(k + b, self._shape[-1])
        L, info = torch.linalg.cholesky_ex(A[..., k:end, k:end])
        self._failed |= info.any()
        R = torch.linalg.solve_triangular(L, torch.eye(end - k, dtype=A.dtype, device=A.device), upper=False).mT  # L⁻ᵀ
        F = torch.cat([product(A[..., k:end, :k].mT, R), -R, product(A[..., end:, k:end], R)], dim=-2)
        A[..., k:end, :k] = 0
        A[..., k:, k:end] = 0
        for one, f in zip(A, F, strict=True) if A.dim() == 3 else [(A, F)]:
            for j in range(0, len(one), b):  # down from the diagonal
                if WIDE:
                    one[j:, j : j + b].sub_(times_transposed(f[j:], f[j : j + b]))
                else:
                    one[j:, j : j + b].addmm_(f[j:], f[j : j + b].mT, alpha=-1)

    def result(self) -> Tensor | None:
        """``P``, once all parts are done, in the memory of A; None where rounding has left ``S + λI`` indefinite, as a Cholesky would have
        told."""
        if self._failed:
            return None
        P, b = self._A.neg_(), self._panel
        for k in range(0, self._shape[-1], b):  # the upper triangle from the lower one
            end = min(k + b, self._shape[-1])
            P[..., k:end, end:] = P[..., end:, k:end].mT
            P[..., k:end, k:end] = P[..., k:end, k:end].tril() + P[..., k:end, k:end].tril(-1).mT
        return P.reshape(self._shape)


def parts_of(m: int, panel: int | None = None) -> int:
    """How many panels an ``(m, m)`` matrix has."""
    return -(-m // (panel or PANEL))


class Gradual:
    """What is made of one or several inverses, each a sweep, one after the other: ``make(*inverses)``."""

    def __init__(self, sweeps: Sequence[Sweep], make: Callable[..., Any]) -> None:
        self.sweeps, self.make, self.parts = sweeps, make, sum(sweep.parts for sweep in sweeps)

    def advance(self, to: int) -> None:
        """Until so many parts are done."""
        for sweep in self.sweeps:
            sweep.advance(min(to, sweep.parts))
            to = max(0, to - sweep.parts)

    def result(self) -> Any | None:
        """All parts done: what is made of them; None where one of them could not be."""
        inverses = [sweep.result() for sweep in self.sweeps]
        return None if any(inverse is None for inverse in inverses) else self.make(*inverses)
