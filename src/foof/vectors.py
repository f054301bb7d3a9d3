"""Vectors over a list of parameters, in the forms in which people have them, and positive diagonals over them.

Inside, k vectors at once are a list with one tensor ``(k, *p.shape)`` per parameter. Outside, a vector is a list of tensors shaped
like the parameters, a flat tensor ``(P,)``, or ``(P, k)`` for k of them; an answer has the form of its question.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Vectors = list[Tensor]  # k vectors at once: one (k, *p.shape) per parameter
Vector = Tensor | Sequence[Tensor]  # (P,), (P, k), or a list shaped like the parameters
Diagonal = float | Tensor | Sequence[float | Tensor]  # λ, a flat diagonal (P,), or for each parameter a number or a tensor


@dataclass(frozen=True, eq=False)
class Precision:
    """The positive diagonal ``Λ``: for each parameter a number, or a tensor of its shape."""

    values: tuple[float | Tensor, ...]

    @property
    def scalar(self) -> float | None:
        """λ where Λ = λI."""
        first = self.values[0]
        return first if isinstance(first, float) and all(isinstance(v, float) and v == first for v in self.values) else None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Precision) or len(self.values) != len(other.values):
            return False
        return all(_equal(a, b) for a, b in zip(self.values, other.values, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def divide(self, us: Vectors, where: Sequence[int], power: float = 1.0) -> Vectors:
        """``Λ^(-power) u`` for the parameters at these positions; the others stay as they are."""
        answer = list(us)
        for i in where:
            v = self.values[i]
            answer[i] = us[i] / (v.to(us[i].dtype) ** power if isinstance(v, Tensor) else v**power)
        return answer

    def times(self, us: Vectors) -> Vectors:
        """``Λ u``."""
        return [u * (v.to(u.dtype) if isinstance(v, Tensor) else v) for u, v in zip(us, self.values, strict=True)]

    def inverse(self) -> list[float | Tensor]:
        """``Λ⁻¹``, entry by entry."""
        return [1 / v for v in self.values]

    def logdet(self, params: Sequence[Tensor]) -> Tensor:
        terms = [
            v.double().log().sum() if isinstance(v, Tensor) else torch.tensor(p.numel() * math.log(v), dtype=torch.float64)
            for v, p in zip(self.values, params, strict=True)
        ]
        return torch.stack([t.cpu() for t in terms]).sum()


def _equal(a: float | Tensor, b: float | Tensor) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b.to(a))
    return a == b


class ParameterSpace:
    """The space of vectors over some parameters; computed with in ``dtype``."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype, names: Sequence[str] | None = None) -> None:
        self.params, self.dtype = params, dtype
        self.names = [f"parameter {i}" for i in range(len(params))] if names is None else list(names)

    @property
    def P(self) -> int:
        """Its dimension."""
        return sum(p.numel() for p in self.params)

    def read(self, v: Vector) -> tuple[Vectors, Callable[[Vectors], Any]]:
        """k vectors inside, and how to give an answer the form of the question."""
        if isinstance(v, Tensor):
            self._check_flat(v)
            columns = v.detach().to(self.dtype).reshape(self.P, -1)
            pieces = columns.split([p.numel() for p in self.params])
            us = [piece.mT.reshape(-1, *p.shape) for piece, p in zip(pieces, self.params, strict=True)]
            return us, lambda answer: self.flat(answer).to(v.dtype).reshape(v.shape)
        vs = list(v)
        if len(vs) != len(self.params) or any(u.shape != p.shape for u, p in zip(vs, self.params, strict=False)):
            raise ValueError(
                f"a vector must be a list shaped like F.params ({len(self.params)} tensors: {_shapes(self.params)}), "
                f"got {len(vs)} tensors: {_shapes(vs)}."
            )
        us = [u.detach().to(self.dtype).unsqueeze(0) for u in vs]
        return us, lambda answer: [a[0].to(u.dtype) for a, u in zip(answer, vs, strict=True)]

    def flat(self, vectors: Vectors) -> Tensor:
        """k vectors as the columns of ``(P, k)``."""
        return torch.cat([u.flatten(1) for u in vectors], dim=1).mT

    def as_list(self, flat: Tensor) -> list[Tensor]:
        """A flat vector ``(P,)`` as views shaped like the parameters."""
        self._check_flat(flat)
        return [piece.view(p.shape) for piece, p in zip(flat.split([p.numel() for p in self.params]), self.params, strict=True)]

    def precision(self, value: Diagonal | Precision, name: str) -> Precision:
        """A positive diagonal from a number, a flat tensor, or one entry per parameter."""
        if isinstance(value, Precision):
            return value
        values: list[Any]
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.P and self.P > 1:
            values = list(self.as_list(value))
        elif isinstance(value, Sequence) and len(value) == len(self.params):
            values = list(value)
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            values = [float(value)] * len(self.params)
        else:
            given = tuple(value.shape) if isinstance(value, Tensor) else f"{type(value).__name__} of {value!r:.60}"
            raise ValueError(
                f"{name} must be a number, a flat diagonal ({self.P},), or {len(self.params)} entries like F.params; got {given}."
            )
        for i, (entry, p) in enumerate(zip(values, self.params, strict=True)):
            if isinstance(entry, Tensor) and entry.numel() > 1 and entry.shape != p.shape:
                raise ValueError(
                    f"{name}: entry {i} ({self.names[i]}) must be a number or {tuple(p.shape)}, got {tuple(entry.shape)}."
                )
            if not isinstance(entry, Tensor) or entry.numel() == 1:
                values[i] = entry = float(entry)
            else:
                values[i] = entry = entry.detach().clone()  # ours: the caller's may change
            smallest, largest = (float(entry.min()), float(entry.max())) if isinstance(entry, Tensor) else (entry, entry)
            if not (smallest > 0 and largest < float("inf")):
                raise ValueError(f"{name} must be positive and finite, got {smallest:g} for {self.names[i]}: F alone is singular")
        return Precision(tuple(values))

    def _check_flat(self, v: Tensor) -> None:
        if v.dim() not in (1, 2) or v.shape[0] != self.P:
            raise ValueError(f"a flat vector must be ({self.P},), or ({self.P}, k) for k vectors; got {tuple(v.shape)}.")


def _shapes(tensors: Sequence[Any]) -> str:
    shapes = [str(tuple(getattr(t, "shape", ("?",)))) for t in tensors]
    return ", ".join(shapes[:6]) + (", ..." if len(shapes) > 6 else "")
