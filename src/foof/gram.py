"""The subsampled Fisher ``F = G Gᵀ`` as an operator: products with it, and everything Woodbury's identity gives (Appendix I).

With N datapoints, K labels each and D = N·K columns ``g_ik/√N``, only D × D matrices are factorised. For a diagonal ``Λ`` and a
number c, with ``U = I/c + Gᵀ Λ⁻¹ G``,

    (Λ + c F)⁻¹ u = Λ⁻¹u - Λ⁻¹ G U⁻¹ Gᵀ Λ⁻¹u
    log det (Λ + c F) = log det Λ + D log c + log det U.

Vectors are lists with one tensor ``(k, *p.shape)`` per parameter: k vectors at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from foof import linalg
from foof.gradients import BUDGET, Call, Columns, Vectors, blocks_of
from foof.statistics import exact, wide


@dataclass(frozen=True, eq=False)
class Precision:
    """The diagonal ``Λ``: for each parameter a positive number, or a tensor of its shape."""

    values: tuple[float | Tensor, ...]

    @property
    def scalar(self) -> float | None:
        """λ where Λ = λI."""
        first = self.values[0]
        return first if isinstance(first, float) and all(isinstance(v, float) and v == first for v in self.values) else None

    def same(self, other: Precision) -> bool:
        """Are these the same diagonal?"""

        def equal(a: float | Tensor, b: float | Tensor) -> bool:
            if isinstance(a, Tensor) or isinstance(b, Tensor):
                return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
            return a == b

        return all(equal(a, b) for a, b in zip(self.values, other.values, strict=True))

    def divide(self, us: Vectors, power: float = 1.0) -> Vectors:
        """``Λ^(-power) u``."""
        return [u / (v.to(u.dtype) ** power if isinstance(v, Tensor) else v**power) for u, v in zip(us, self.values, strict=True)]

    def times(self, us: Vectors) -> Vectors:
        """``Λ u``."""
        return [u * (v.to(u.dtype) if isinstance(v, Tensor) else v) for u, v in zip(us, self.values, strict=True)]

    def logdet(self, params: list[nn.Parameter]) -> Tensor:
        terms = [
            v.double().log().sum() if isinstance(v, Tensor) else torch.tensor(p.numel() * math.log(v), dtype=torch.float64)
            for v, p in zip(self.values, params, strict=True)
        ]
        return torch.stack([t.cpu() for t in terms]).sum()


@dataclass(eq=False)
class Part:
    """Blocks that share one Gram matrix: all of them, or (block-diagonal Fisher) one."""

    blocks: list[Columns]
    where: list[int]  # positions of the blocks' parameters among the operator's, block by block
    gram: Tensor | None = None
    factor: Tensor | None = None  # L Lᵀ = U, or λU where Λ = λI
    factor_of: tuple[Precision, float] | None = None


class GramOperator:
    """``F = G Gᵀ`` from the calls of one recording."""

    def __init__(self, params: list[nn.Parameter], calls: list[Call], N: int, K: int, by_layer: bool,
                 dtype: torch.dtype | None = None) -> None:  # fmt: skip
        self.params, self.N, self.K = params, N, K
        self.dtype = wide(dtype or params[0].dtype)  # of the Gram matrix and of all that is solved with it
        blocks = blocks_of(params, calls, N, K)
        at = {id(p): i for i, p in enumerate(params)}
        groups = [[block] for block in blocks] if by_layer else [blocks]
        self.parts = [Part(group, [at[id(p)] for block in group for p in block.params]) for group in groups]

    @property
    def D(self) -> int:
        """Columns of G."""
        return self.N * self.K

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    # --- products -----------------------------------------------------------------------------------------------------------

    @exact
    def project(self, part: Part, us: Vectors) -> Tensor:
        """``Gᵀu``: ``(D, k)``."""
        mine, total = iter([us[i] for i in part.where]), us[0].new_zeros(self.D, len(us[0]))
        for block in part.blocks:
            total += block.project([next(mine) for _ in block.params])
        return total / math.sqrt(self.N)

    @exact
    def combine(self, part: Part, w: Tensor, into: Vectors) -> None:
        """Write ``G w`` for w ``(D, k)`` into the part's parameters of ``into``."""
        where = iter(part.where)
        for block in part.blocks:
            for values in block.combine(w / math.sqrt(self.N)):
                into[next(where)] = values

    @torch.no_grad()
    def apply(self, us: Vectors) -> Vectors:
        """``F u = G (Gᵀ u)``."""
        answer: Vectors = [us[0]] * len(us)
        for part in self.parts:
            self.combine(part, self.project(part, us), answer)
        return answer

    @torch.no_grad()
    def quadratic(self, us: Vectors) -> Tensor:
        """``uᵀ F u = |Gᵀu|²``: ``(k,)``."""
        return sum((self.project(part, us).square().sum(0) for part in self.parts), us[0].new_zeros(len(us[0])))

    @torch.no_grad()
    @exact
    def diagonal(self) -> list[Tensor]:
        """The diagonal of F, one tensor per parameter."""
        answer: list[Tensor] = [torch.empty(0)] * len(self.params)
        for part in self.parts:
            where = iter(part.where)
            for block in part.blocks:
                for values in block.diagonal(self.dtype):
                    answer[next(where)] = values / self.N
        return answer

    # --- the Gram matrix and its factor -------------------------------------------------------------------------------------

    @torch.no_grad()
    def gram(self, part: Part) -> Tensor:
        """``GᵀG`` ``(D, D)``, made once."""
        if part.gram is None:
            self.check_memory()
            part.gram = self._weighted_gram(part, None)
        return part.gram

    def _weighted_gram(self, part: Part, precision: Precision | None) -> Tensor:
        """``Gᵀ Λ⁻¹ G``."""
        return self.cross(part, self, part, precision)

    @torch.no_grad()
    @exact
    def cross(self, part: Part, other: GramOperator, others: Part, precision: Precision | None) -> Tensor:
        """``G₁ᵀ Λ⁻¹ G₂`` ``(D₁, D₂)`` with the same part of an operator of the same model on other datapoints."""
        where = iter(part.where)
        products = torch.zeros(self.D, other.D, dtype=self.dtype, device=self.device)
        for block, theirs in zip(part.blocks, others.blocks, strict=True):
            indices = [next(where) for _ in block.params]
            weights = None if precision is None else [1 / precision.values[i] for i in indices]
            block.add_gram(theirs, weights, products)
        return products.div_(math.sqrt(self.N * other.N))

    @torch.no_grad()
    def factor(self, part: Part, precision: Precision, c: float, weighted: Tensor | None = None) -> Tensor:
        """Cholesky factor of ``U = I/c + Gᵀ Λ⁻¹ G``, or of ``λU = λ/c I + GᵀG`` where Λ = λI, kept until Λ or c changes.

        weighted: ``Gᵀ Λ⁻¹ G``, if it is at hand.
        """
        if part.factor is None or part.factor_of is None or part.factor_of[1] != c or not part.factor_of[0].same(precision):
            part.factor = None  # free the old one first
            name = "the Gram matrix GᵀG"
            if precision.scalar is not None:
                part.factor = linalg.damped_cholesky(self.gram(part), precision.scalar / c, name)
            else:
                self.check_memory()
                K = self._weighted_gram(part, precision) if weighted is None else weighted
                part.factor = linalg.damped_cholesky(K, 1 / c, name)
            part.factor_of = (precision, c)
        return part.factor

    def _divide_by_U(self, part: Part, t: Tensor, precision: Precision, c: float) -> Tensor:
        """``U⁻¹ t`` for t ``(D, k)``."""
        L = self.factor(part, precision, c)
        return torch.cholesky_solve(t, L) * (precision.scalar or 1.0)

    # --- Woodbury -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def solve(self, us: Vectors, precision: Precision, c: float = 1.0, refine: int = 0) -> Vectors:
        """``(Λ + c F)⁻¹ u = Λ⁻¹u - Λ⁻¹ G U⁻¹ Gᵀ Λ⁻¹u``.

        Along F's large eigenvalues μ this is a small difference of large numbers, with a relative error of about ε·cμ/λ; each of
        ``refine`` corrections by the residual, ``x ← x + (Λ + c F)⁻¹ (u - (Λ + c F) x)``, shrinks the error by that factor.
        """
        solved = self._solve(us, precision, c)
        left = self._residual(us, solved, precision, c) if refine else []
        for _ in range(refine):
            better = [x + y for x, y in zip(solved, self._solve(left, precision, c), strict=True)]
            still_left = self._residual(us, better, precision, c)
            if not _size(still_left) < _size(left):  # beyond this precision
                break
            solved, left = better, still_left
        return solved

    def _residual(self, us: Vectors, xs: Vectors, precision: Precision, c: float) -> Vectors:
        """``u - (Λ + c F) x``."""
        products = zip(us, precision.times(xs), self.apply(xs), strict=True)
        return [u - scaled - c * y for u, scaled, y in products]

    def _solve(self, us: Vectors, precision: Precision, c: float) -> Vectors:
        scaled = precision.divide(us)
        inside: Vectors = [us[0]] * len(us)
        for part in self.parts:
            self.combine(part, self._divide_by_U(part, self.project(part, scaled), precision, c), inside)
        return [u - v for u, v in zip(scaled, precision.divide(inside), strict=True)]

    @torch.no_grad()
    def sample(self, n: int, precision: Precision, c: float, generator: torch.Generator | None) -> Vectors:
        """n exact draws from ``N(0, (Λ + c F)⁻¹)``.

        Appendix C.1 with ``V = √c Λ^(-1/2) G``: ``x = y - V (I + VᵀV)⁻¹ (Vᵀy + z)``, y and z standard normal, has covariance
        ``I + V U'⁻¹ (VᵀV + I) U'⁻¹ Vᵀ - 2 V U'⁻¹ Vᵀ = I - V U'⁻¹ Vᵀ`` with ``U' = I + VᵀV`` (in the paper's Eq. (12) the last
        term lacks the ``U'⁻¹``); ``Λ^(-1/2) x`` is the sample. Here ``U' = cU``, hence z/√c.
        """

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=self.dtype, device=self.device, generator=generator)

        ys = [normal(n, *p.shape) for p in self.params]
        scaled, inside = precision.divide(ys, 0.5), list(ys)
        for part in self.parts:
            t = self.project(part, scaled) + normal(self.D, n) / math.sqrt(c)
            self.combine(part, self._divide_by_U(part, t, precision, c), inside)
        return [y - x for y, x in zip(scaled, precision.divide(inside), strict=True)]

    @torch.no_grad()
    def logdet(self, precision: Precision, c: float) -> Tensor:
        """``log det (Λ + c F) = log det Λ + Σ log(1 + c μ)``, in float64, with μ the eigenvalues of ``Gᵀ Λ⁻¹ G``.

        From the Cholesky factor, unless c times the rounding errors of the μ that should be 0 would count.
        """
        total = precision.logdet(self.params)
        for part in self.parts:
            K = self.gram(part) if precision.scalar is not None else self._weighted_gram(part, precision)
            strength = c / (precision.scalar or 1.0)
            rounding = torch.finfo(K.dtype).eps * float(K.diagonal().max())
            if self.D * rounding * strength < 0.1:
                L = self.factor(part, precision, c, K)
                total = total + 2 * L.diagonal().double().log().sum().cpu() + self.D * math.log(strength)
            else:
                rank = min(self.D, sum(block.size for block in part.blocks))
                mu = torch.linalg.eigvalsh(K.double()).cpu()[-rank:]
                total = total + torch.log1p(strength * torch.where(mu > torch.finfo(K.dtype).eps * mu[-1], mu, 0.0)).sum()
        return total

    # --- memory -------------------------------------------------------------------------------------------------------------

    def gram_bytes(self) -> int:
        """What the Gram matrices and their factorisation need at most: kept Gram and factor of each part, two more in passing."""
        return (2 * len(self.parts) + 2) * self.D**2 * torch.finfo(self.dtype).bits // 8

    def check_memory(self) -> None:
        """Raise a ``MemoryError`` before allocating what cannot fit."""
        needed, available = self.gram_bytes() + BUDGET, available_memory(self.device)
        held = sum(t.numel() * t.element_size() for part in self.parts for t in (part.gram, part.factor) if t is not None)
        if available is not None and needed - held > available:
            raise MemoryError(
                f"D = {self.N:,} datapoints × {self.K} labels = {self.D:,} columns: {len(self.parts)} Gram matrices of D × D and "
                f"their factors need {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free. Use fewer datapoints, "
                f'labels="mc" instead of "full", blocks="full" instead of "layer", or a float32 Gram matrix.'
            )

    def memory(self) -> dict[str, int]:
        """Bytes held now: inputs and errors; Gram matrices; their factors."""
        return {
            "inputs and errors": sum(block.bytes for part in self.parts for block in part.blocks),
            "gram": sum(0 if part.gram is None else part.gram.numel() * part.gram.element_size() for part in self.parts),
            "factor": sum(0 if part.factor is None else part.factor.numel() * part.factor.element_size() for part in self.parts),
        }


def _size(us: Vectors) -> float:
    return math.sqrt(sum(float(u.double().square().sum()) for u in us))


def by_layer_named(blocks: str) -> bool:
    """Is the Fisher block-diagonal?"""
    if blocks not in ("full", "layer"):
        raise ValueError(f'blocks must be "full" or "layer", got {blocks!r}.')
    return blocks == "layer"


def available_memory(device: torch.device) -> int | None:
    """Bytes that can be had on this device, or None where nobody knows."""
    if device.type == "cuda":  # what the driver has, and what torch keeps for itself but does not use
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type == "cpu" and (info := Path("/proc/meminfo")).exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
