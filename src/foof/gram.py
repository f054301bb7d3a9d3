"""The subsampled Fisher ``F = G Gᵀ`` as a matrix: products with it, ``GᵀG`` and ``G Gᵀ`` themselves, and nothing else.

With N datapoints and K labels each, G has D = N·K columns ``g_ik/√N``. Vectors are lists with one tensor ``(k, *p.shape)`` per
parameter: k vectors at once. Its damped inverse is in ``foof.woodbury``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from foof.gradients import BUDGET, Call, Columns, Weights, blocks_of, chunks
from foof.statistics import exact, wide
from foof.vectors import ParameterSpace, Vectors


@dataclass(eq=False)
class Part:
    """Blocks that share one Gram matrix: all of them, or (block-diagonal Fisher) one."""

    blocks: list[Columns]
    where: list[int]  # positions of the blocks' parameters among the operator's, block by block
    gram: Tensor | None = None
    moment: Tensor | None = None

    @property
    def size(self) -> int:
        """Its parameters."""
        return sum(block.size for block in self.blocks)

    def order(self) -> Tensor:
        """Which entry of the part's flat vector each row of ``GramOperator.moment`` is of: ``(p,)``."""
        block = self.blocks[0]
        return block.positions(block.layer) if self.separable else torch.arange(self.size, device=block.params[0].device)

    @property
    def separable(self) -> bool:
        """Is this one block whose columns are outer products ``e aᵀ``?"""
        return len(self.blocks) == 1 and self.blocks[0].separable


class GramOperator:
    """``F = G Gᵀ`` from the calls of one recording."""

    def __init__(self, params: list[nn.Parameter], calls: list[Call], N: int, K: int, by_layer: bool,
                 dtype: torch.dtype | None = None, names: list[str] | None = None) -> None:  # fmt: skip
        self.N, self.K = N, K
        self.space = ParameterSpace(params, wide(dtype or params[0].dtype), names)
        blocks = blocks_of(params, calls, N, K)
        at = {id(p): i for i, p in enumerate(params)}
        groups = [[block] for block in blocks] if by_layer else [blocks]
        self.parts = [Part(group, [at[id(p)] for block in group for p in block.params]) for group in groups]

    @property
    def params(self) -> list[nn.Parameter]:
        return self.space.params

    @property
    def dtype(self) -> torch.dtype:
        """Of the Gram matrix, and of all that is computed with it."""
        return self.space.dtype

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

    # --- GᵀG and G Gᵀ --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gram(self, part: Part) -> Tensor:
        """``GᵀG`` ``(D, D)``, made once."""
        if part.gram is None:
            self.check_memory(self.D)
            part.gram = self.cross(part, self, part, None)
        return part.gram

    @torch.no_grad()
    @exact
    def cross(self, part: Part, other: GramOperator, others: Part, weights: Weights | None) -> Tensor:
        """``G₁ᵀ diag(weights) G₂`` ``(D₁, D₂)`` with the same part of an operator of the same model on other datapoints."""
        where = iter(part.where)
        products = torch.zeros(self.D, other.D, dtype=self.dtype, device=self.device)
        for block, theirs in zip(part.blocks, others.blocks, strict=True):
            indices = [next(where) for _ in block.params]
            block.add_gram(theirs, None if weights is None else [weights[i] for i in indices], products)
        return products.div_(math.sqrt(self.N * other.N))

    @torch.no_grad()
    @exact
    def moment(self, part: Part) -> Tensor:
        """``G Gᵀ`` of the part itself ``(p, p)``, its rows in the order ``part.order()``, made once."""
        if part.moment is None:
            self.check_memory(part.size)
            if part.separable:
                part.moment = part.blocks[0].moment(self.dtype).div_(self.N)
            else:
                total = torch.zeros(part.size, part.size, dtype=self.dtype, device=self.device)
                for chunk in chunks(self.N, BUDGET // (8 * self.K * part.size)):
                    columns = self.columns(part, chunk)
                    total.addmm_(columns.mT, columns)
                part.moment = total
        return part.moment

    def columns(self, part: Part, datapoints: slice = slice(None)) -> Tensor:
        """The part's columns of G themselves, as rows: ``(K·n, p)`` for n datapoints, block by block."""
        return torch.cat([block.flat(self.dtype, datapoints) for block in part.blocks], dim=1) / math.sqrt(self.N)

    def columns_are_cheaper(self, part: Part) -> bool:
        """Are ``GᵀG`` and its factor, D³/6 multiply-adds, cheaper than ``G Gᵀ`` and its, p³/6?

        For one linear layer of p = 7,850 on D = 9,000 columns both take the same time (benchmarks/solvers.py).
        """
        p, D = part.size, self.D
        if p >= D:
            return True
        by_columns = sum(block.gram_cost(block) for block in part.blocks) + D**3 / 6
        by_parameters = p * (p + 1) * (self.N if part.separable else D) + p**3 / 6
        return by_columns <= by_parameters

    # --- memory -------------------------------------------------------------------------------------------------------------

    def check_memory(self, order: int) -> None:
        """Raise a ``MemoryError`` before allocating what cannot fit: matrices of this order and their factors, two more in passing."""
        parts = len(self.parts)
        bytes_each = order**2 * torch.finfo(self.dtype).bits // 8
        needed, available = (2 * parts + 2) * bytes_each + BUDGET, available_memory(self.device)
        held = sum(t.numel() * t.element_size() for part in self.parts for t in (part.gram, part.moment) if t is not None)
        if available is not None and needed - held > available:
            raise MemoryError(
                f"D = {self.N:,} datapoints × {self.K} labels = {self.D:,} columns, {self.space.P:,} parameters: {parts} matrices of order "
                f"{order:,} and their factors need {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free. Use fewer datapoints, "
                f'labels="mc" instead of "full", blocks="full" instead of "layer", or a float32 Gram matrix.'
            )

    def memory(self) -> dict[str, int]:
        """Bytes held now: inputs and errors; Gram matrices."""
        matrices = [t for part in self.parts for t in (part.gram, part.moment) if t is not None]
        return {
            "inputs and errors": sum(block.bytes for part in self.parts for block in part.blocks),
            "gram": sum(t.numel() * t.element_size() for t in matrices),
        }


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
