"""The damped inverse of ``F = G Gᵀ``: ``Λ + c F`` factorised once, then solves, samples, its determinant, variances (Appendix I).

With ``V = Λ^(-1/2) G`` the matrix is ``Λ^(1/2) (I + c V Vᵀ) Λ^(1/2)``, so that it is enough to factorise the smaller of

    VᵀV + I/c   (D × D: by columns, Woodbury's identity)   and   V Vᵀ + I/c   (P × P: by parameters),

for each part of a block-diagonal F. Where Λ = λI, V = G and λ/c stand for these, and one ``GᵀG`` serves every λ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foof import linalg
from foof.gram import GramOperator, Part
from foof.statistics import exact
from foof.vectors import Diagonal, Precision, Vector, Vectors

NAME = "the Gram matrix GᵀG"


class Woodbury:
    """``(Λ + c F)`` for a positive diagonal Λ and a number c > 0, factorised when first asked, and once.

    >>> D = F.damped(0.1)
    >>> D.solve(v); D.sample(10); D.logdet()
    """

    def __init__(self, F: GramOperator, precision: Diagonal | Precision, datapoints: float = 1.0) -> None:
        if not 0 < datapoints < float("inf"):
            raise ValueError(f"datapoints must be a positive number, got {datapoints}.")
        self.F, self.precision, self.c = F, F.space.precision(precision, "precision"), float(datapoints)
        self.parts = [
            (ByColumns if F.columns_are_cheaper(part) else ByParameters)(F, part, self.precision, self.c) for part in F.parts
        ]

    @torch.no_grad()
    def solve(self, v: Vector, refine: int = 0) -> Any:
        """``(Λ + c F)⁻¹ v``, in the form of ``v``.

        By columns this is, along F's large eigenvalues μ, a small difference of large numbers, with a relative error of about
        ε·cμ/λ; each of ``refine`` corrections by the residual, ``x ← x + (Λ + c F)⁻¹ (v - (Λ + c F) x)``, shrinks the error by that
        factor.
        """
        us, back = self.F.space.read(v)
        solved = self._solve(us)
        left = self._residual(us, solved) if refine else []
        for _ in range(refine):
            better = [x + y for x, y in zip(solved, self._solve(left), strict=True)]
            still_left = self._residual(us, better)
            if not _size(still_left) < _size(left):  # beyond this precision
                break
            solved, left = better, still_left
        return back(solved)

    def _residual(self, us: Vectors, xs: Vectors) -> Vectors:
        """``u - (Λ + c F) x``."""
        products = zip(us, self.precision.times(xs), self.F.apply(xs), strict=True)
        return [u - scaled - self.c * y for u, scaled, y in products]

    def _solve(self, us: Vectors) -> Vectors:
        answer: Vectors = [us[0]] * len(us)
        for part in self.parts:
            part.solve(us, answer)
        return answer

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n exact draws from ``N(0, (Λ + c F)⁻¹)``: ``(P, n)``."""
        if n < 1:
            raise ValueError(f"the number of samples must be at least 1, got {n}.")
        F = self.F
        ys = [torch.randn(n, *p.shape, dtype=F.dtype, device=F.device, generator=generator) for p in F.params]
        answer = list(ys)
        for part in self.parts:
            part.sample(ys, generator, answer)
        return F.space.flat(answer)

    @torch.no_grad()
    def logdet(self) -> Tensor:
        """``log det (Λ + c F) = log det Λ + Σ log(1 + c μ)``, a float64 number, with μ the eigenvalues of ``V Vᵀ``."""
        total = self.precision.logdet(self.F.params)
        for part in self.parts:
            total = part.add_log_ratio(total)
        return total

    @torch.no_grad()
    def variance(self, jacobian: GramOperator) -> Tensor:
        """Of linearised outputs: each datapoint's own ``J (Λ + c F)⁻¹ Jᵀ``, ``(N, K, K)``.

        jacobian: column (k, i), times √N, is the gradient of output k of datapoint i, over the same parameters as F.
        """
        total = torch.zeros((), dtype=self.F.dtype, device=self.F.device)
        for part, theirs in zip(self.parts, jacobian.parts, strict=True):
            total = part.add_variance(total, jacobian, theirs)
        return total

    def memory(self) -> int:
        """Bytes of the factors."""
        return sum(part.held.numel() * part.held.element_size() for part in self.parts if part.held is not None)

    def state_dict(self) -> dict[str, Any]:
        """The factors made so far, and what they are of; the matrix F itself is kept elsewhere."""
        return {
            "precision": list(self.precision.values),
            "datapoints": self.c,
            "parts": [{"side": part.side, "factor": None if part.held is None else part.held.clone()} for part in self.parts],
        }

    @classmethod
    def from_state_dict(cls, F: GramOperator, state: Mapping[str, Any]) -> Woodbury:
        """The same for a matrix F that has been restored."""
        sides = {side.side: side for side in (ByColumns, ByParameters)}
        damped = cls(F, Precision(tuple(state["precision"])), state["datapoints"])
        for i, (saved, part) in enumerate(zip(state["parts"], F.parts, strict=True)):
            damped.parts[i] = sides[saved["side"]](F, part, damped.precision, damped.c)
            if saved["factor"] is not None:
                damped.parts[i].held = saved["factor"].to(F.device, F.dtype, copy=True)
        return damped


class Side(ABC):
    """One part of ``Λ + c F``, by way of one of its two small matrices K: ``VᵀV`` or ``V Vᵀ``, or ``GᵀG`` or ``G Gᵀ`` where Λ = λI.

    Factorised is ``K + δI = L Lᵀ`` with ``δ = 1/c``, or λ/c where Λ = λI.
    """

    side: str

    def __init__(self, F: GramOperator, part: Part, precision: Precision, c: float) -> None:
        self.F, self.part, self.precision, self.c = F, part, precision, c
        self.held: Tensor | None = None
        self.scalar = precision.scalar
        self.unit = 1.0 if self.scalar is None else self.scalar  # K + δI is this many times I/c + VᵀV

    @property
    def device(self) -> torch.device:
        return self.F.device

    @abstractmethod
    def matrix(self) -> Tensor:
        """K."""

    def factor(self, K: Tensor | None = None) -> Tensor:
        """L, made once; K, if it is at hand."""
        if self.held is None:
            self.held = linalg.damped_cholesky(self.matrix() if K is None else K, self.unit / self.c, NAME)
        return self.held

    def add_log_ratio(self, total: Tensor) -> Tensor:
        """``total + log det (I + c V Vᵀ)``, from the factor, unless c times the rounding errors of eigenvalues that are 0 would count."""
        K = self.matrix()
        strength = self.c / self.unit
        rounding = torch.finfo(K.dtype).eps * float(K.diagonal().max())
        if len(K) * rounding * strength < 0.1:
            return total + 2 * self.factor(K).diagonal().double().log().sum().cpu() + len(K) * math.log(strength)
        rank = min(self.F.D, self.part.size)
        mu = torch.linalg.eigvalsh(K.double()).cpu()[-rank:]
        return total + torch.log1p(strength * torch.where(mu > torch.finfo(K.dtype).eps * mu[-1], mu, 0.0)).sum()

    @abstractmethod
    def solve(self, us: Vectors, into: Vectors) -> None:
        """Write ``(Λ + c F)⁻¹ u`` into the part's parameters of ``into``."""

    @abstractmethod
    def sample(self, ys: Vectors, generator: torch.Generator | None, into: Vectors) -> None:
        """Write draws from ``N(0, (Λ + c F)⁻¹)`` into the part's parameters, from standard normal ys and more noise if need be."""

    @abstractmethod
    def add_variance(self, total: Tensor, jacobian: GramOperator, theirs: Part) -> Tensor:
        """``total`` plus the part's ``J (Λ + c F)⁻¹ Jᵀ`` of each datapoint, ``(N, K, K)``."""


class ByColumns(Side):
    """Woodbury's identity, with ``U = I/c + Gᵀ Λ⁻¹ G``: ``(Λ + c F)⁻¹ u = Λ⁻¹u - Λ⁻¹ G U⁻¹ Gᵀ Λ⁻¹u``."""

    side = "columns"

    def matrix(self) -> Tensor:
        if self.scalar is not None:
            return self.F.gram(self.part)
        self.F.check_memory(self.F.D)
        return self.F.cross(self.part, self.F, self.part, self.precision.inverse())

    def _divide_by_U(self, t: Tensor) -> Tensor:
        """``U⁻¹ t`` for t ``(D, k)``."""
        return torch.cholesky_solve(t, self.factor()) * self.unit

    def _explain(self, scaled: Vectors, t: Tensor, into: Vectors) -> None:
        """Write ``x - Λ⁻¹ G U⁻¹ t``, x being ``scaled``."""
        inside = list(scaled)
        self.F.combine(self.part, self._divide_by_U(t), inside)
        explained = self.precision.divide(inside, self.part.where)
        for i in self.part.where:
            into[i] = scaled[i] - explained[i]

    def solve(self, us: Vectors, into: Vectors) -> None:
        scaled = self.precision.divide(us, self.part.where)
        self._explain(scaled, self.F.project(self.part, scaled), into)

    def sample(self, ys: Vectors, generator: torch.Generator | None, into: Vectors) -> None:
        """Appendix C.1 with ``V = √c Λ^(-1/2) G``: ``x = y - V (I + VᵀV)⁻¹ (Vᵀy + z)``, y and z standard normal, has covariance
        ``I + V U'⁻¹ (VᵀV + I) U'⁻¹ Vᵀ - 2 V U'⁻¹ Vᵀ = I - V U'⁻¹ Vᵀ`` with ``U' = I + VᵀV`` (in the paper's Eq. (12) the last
        term lacks the ``U'⁻¹``); ``Λ^(-1/2) x`` is the sample. Here ``U' = cU``, hence z/√c.
        """
        scaled = self.precision.divide(ys, self.part.where, 0.5)
        z = torch.randn(self.F.D, len(ys[0]), dtype=self.F.dtype, device=self.device, generator=generator)
        self._explain(scaled, self.F.project(self.part, scaled) + z / math.sqrt(self.c), into)

    @exact
    def add_variance(self, total: Tensor, jacobian: GramOperator, theirs: Part) -> Tensor:
        """``J Λ⁻¹ Jᵀ - (J Λ⁻¹ G) U⁻¹ (Gᵀ Λ⁻¹ Jᵀ)``, all of it products of gradients."""
        weights = self.precision.inverse()
        where = iter(self.part.where)
        for block in theirs.blocks:
            total = total + block.own([weights[next(where)] for _ in block.params], self.F.dtype)
        cross = self.F.cross(self.part, jacobian, theirs, weights) * math.sqrt(jacobian.N)  # GᵀΛ⁻¹Jᵀ: (D, K·N)
        half = torch.linalg.solve_triangular(self.factor(), cross, upper=False).unflatten(1, (jacobian.K, jacobian.N))
        return total - torch.einsum("dki,dli->ikl", half, half) * self.unit


class ByParameters(Side):
    """``(Λ + c F)⁻¹ = Λ^(-1/2) (c L Lᵀ)⁻¹ Λ^(-1/2)`` directly, for a part with fewer parameters than columns.

    Its vectors are flat, ``(p, k)``, in the order of the matrix, and already divided by ``Λ^(1/2)`` (by nothing where Λ = λI).
    """

    side = "parameters"

    def matrix(self) -> Tensor:
        M = self.F.moment(self.part)
        if self.scalar is not None:
            return M
        root = self._root()
        return M / (root.unsqueeze(0) * root.unsqueeze(1))

    def _root(self) -> Tensor:
        """``Λ^(1/2)`` in the order of the matrix, ``(p,)``."""
        values = iter([self.precision.values[i] for i in self.part.where])
        flat = [block.flat_weights([next(values) for _ in block.params], self.F.dtype) for block in self.part.blocks]
        return torch.cat(flat).sqrt()[self.part.order()]

    def _read(self, us: Vectors) -> Tensor:
        flat = torch.cat([us[i].flatten(1) for i in self.part.where], dim=1)[:, self.part.order()].mT
        return flat if self.scalar is not None else flat / self._root().unsqueeze(1)

    def _write(self, x: Tensor, into: Vectors) -> None:
        """Write flat vectors, divided by ``Λ^(1/2)`` once more, into the part's parameters."""
        if self.scalar is None:
            x = x / self._root().unsqueeze(1)
        flat = torch.empty_like(x)
        flat[self.part.order()] = x
        pieces = flat.mT.split([self.F.params[i].numel() for i in self.part.where], dim=1)
        for i, piece in zip(self.part.where, pieces, strict=True):
            into[i] = piece.reshape(-1, *self.F.params[i].shape)

    @exact
    def solve(self, us: Vectors, into: Vectors) -> None:
        self._write(torch.cholesky_solve(self._read(us), self.factor()) / self.c, into)

    @exact
    def sample(self, ys: Vectors, generator: torch.Generator | None, into: Vectors) -> None:
        """``Λ^(-1/2) (√c Lᵀ)⁻¹ y``."""
        y = torch.cat([ys[i].flatten(1) for i in self.part.where], dim=1).mT
        self._write(torch.linalg.solve_triangular(self.factor().mT, y, upper=True) / math.sqrt(self.c), into)

    @exact
    def add_variance(self, total: Tensor, jacobian: GramOperator, theirs: Part) -> Tensor:
        """``|L⁻¹ Λ^(-1/2) Jᵀ|² / c``."""
        J = (jacobian.columns(theirs) * math.sqrt(jacobian.N))[:, self.part.order()].mT
        half = J if self.scalar is not None else J / self._root().unsqueeze(1)
        half = torch.linalg.solve_triangular(self.factor(), half, upper=False).unflatten(1, (jacobian.K, jacobian.N))
        return total + torch.einsum("pki,pli->ikl", half, half) / self.c


def _size(us: Vectors) -> float:
    return math.sqrt(sum(float(u.double().square().sum()) for u in us))
