"""Second moments of a convolution's patches, without the patches.

The rows of a convolution are the patches under its kernel, ``a_r = (x[s·r + d·u])_u`` over the offsets ``u`` in the kernel, for
stride s and dilation d. Cut out, they hold each number once for every offset, and ``Σ_r a_r a_rᵀ`` multiplies all pairs of them:

    M[u, u'] = Σ_r x[s·r + d·u] x[s·r + d·u']ᵀ = Σ_p x[p] x[p + d·(u' - u)]ᵀ    over p ∈ {d·u + s·r : 0 ≤ r < R}.

The summand knows ``δ = u' - u`` alone, so most of these products are the same ones; the positions p differ, but only at the border.
Each dimension falls into a few *spans* of positions that count for the same offsets u: a long one inside and short ones at either
end (and as many again for each phase of a stride). Over a box of spans all sums ``K[δ] = Σ_p x[p] x[p + d·δ]ᵀ`` are one weight
gradient: that of a convolution whose errors are the box, cut out of x itself, and whose kernel has an offset for each δ. Then
``M[u, u'] = Σ K[u' - u]`` over the boxes that count for u. These are only sums: nothing is taken away again, so nothing cancels.
Half of them do, since M is symmetric: δ ≥ 0 in the first dimension.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from foof.layers import Conv
from foof.statistics import wide

FEW_POSITIONS = 16  # for which a product of rows is faster than a call of the weight gradient
CHANNELS_LAST = {4: torch.channels_last}  # for inputs of two dimensions, (N, C, H, W): weight gradients are up to twice as fast so
AT_A_TIME = 2**20  # numbers to cut out at once: little memory, and sums of sums round less than one long sum
CORRELATIONS = 512  # matrices (C, C) to hold at once
DENSE = 2**14  # entries of a matrix of ones and zeros that is faster multiplied as it is


@dataclass(frozen=True)
class Subset:
    """Which rows to look at: every so-manieth datapoint, and every so-manieth location of each dimension.

    ``shift`` says where to begin. Counted up from batch to batch, it comes by all datapoints and locations in turn.
    """

    datapoints: int = 1
    locations: int = 1
    shift: int = 0

    def __post_init__(self) -> None:
        if self.datapoints < 1 or self.locations < 1 or self.shift < 0:
            raise ValueError(f"a subset is every n-th of the rows, from a shift on: it needs n ≥ 1 and shift ≥ 0, got {self}.")


@torch.no_grad()
def second_moment(layer: Conv, x: Tensor, subset: Subset | None = None) -> Tensor:
    """``Σ_rows a aᵀ`` of a convolution's input ``x``: ``(m, m)``, or ``(G, m, m)``; in float32 or wider.

    Equal to ``rows.mT @ rows`` for ``rows = layer.input_matrix(x)``, by patches or without, whichever is cheaper.
    Of a subset of the rows it is an estimate: scaled by how many there are over how many were looked at.
    """
    subset = subset or Subset()
    with torch.autocast(x.device.type, enabled=False), full_precision(x.device):
        x = layer.batched(x.detach())
        datapoints, every = len(x), subset.datapoints
        x = x[subset.shift % max(1, min(every, datapoints)) :: every]
        axes = axes_of(layer, x, subset)
        how = without_patches if cheaper_without_patches(x, axes, layer.groups) else by_patches
        X = layer._pad(x.to(wide(x.dtype), memory_format=CHANNELS_LAST.get(x.dim(), torch.preserve_format)))
        moment = X.new_empty(layer.groups, layer.m, layer.m)
        how(X, axes, moment)
        looked_at = len(x) * math.prod(axis.R for axis in axes)
        if layer.has_bias:
            moment[:, :-1, -1] = moment[:, -1, :-1]
            moment[:, -1, -1] = looked_at
        there = datapoints * math.prod(axis.locations for axis in axes)
        if there != looked_at:
            moment *= there / looked_at
        return moment if layer.groups > 1 else moment[0]


@dataclass(frozen=True)
class Axis:
    """One dimension of a convolution over its padded input: offset ``u < k`` sees the position ``start + s·r + d·u`` at ``r < R``.

    Positions outside of ``data`` are known to be zero. ``locations``: how many there are, of which R are looked at.
    """

    k: int
    s: int
    d: int
    R: int
    start: int
    data: range
    locations: int

    def spans(self, half: bool) -> Iterator[Span]:
        """The spans of positions, each with the offsets it counts for and the differences δ to look at (``half``: δ ≥ 0)."""
        common = math.gcd(self.s, self.d)
        step, lag = self.s // common, self.d // common
        for phase in range(min(step, self.k)):  # offsets in step see the same positions: offset j of these sees q at r = q - lag·j
            offsets, origin = range(phase, self.k, step), self.start + self.d * phase
            cuts = sorted({lag * j + end for j in range(len(offsets)) for end in (0, self.R)})
            for first, last in itertools.pairwise(cuts):
                counting = [u for j, u in enumerate(offsets) if lag * j <= first and last <= lag * j + self.R]
                positions = _within(range(origin + self.s * first, origin + self.s * last, self.s), self.data)
                if counting and positions:
                    yield self._span(positions, range(counting[0], counting[-1] + 1, step), half)

    def _span(self, p: range, offsets: range, half: bool) -> Span:
        least = 0 if half else max(-offsets[-1], -((p[-1] - self.data.start) // self.d))
        most = min(self.k - 1 - offsets[0], (self.data.stop - 1 - p[0]) // self.d)
        return Span(p, offsets, range(least, most + 1))


@dataclass(frozen=True)
class Span:
    """Positions ``p`` of one dimension that count for all of ``offsets``, and the ``differences`` δ of offsets to look at from there."""

    positions: range
    offsets: range
    differences: range

    @property
    def own(self) -> slice:
        return slice(self.positions[0], self.positions[-1] + 1, self.positions.step)

    def seen(self, d: int) -> slice:
        """The positions ``p + d·δ`` and what lies between them."""
        return slice(self.positions[0] + d * self.differences[0], self.positions[-1] + d * self.differences[-1] + 1)


Axes = tuple[Axis, ...]
Box = tuple[Span, ...]


def axes_of(layer: Conv, x: Tensor, subset: Subset) -> Axes:
    """The dimensions of a convolution over ``x (N, C, *sizes)``, at a subset of its locations."""
    axes, shift = [], subset.shift
    for i, size in enumerate(x.shape[2:]):
        left, right = layer.both_sides[-2 * i - 2 :][:2]  # the last dimension comes first
        k, s, d = layer.kernel[i], layer.stride[i], layer.dilation[i]
        locations = (left + size + right - d * (k - 1) - 1) // s + 1
        every = min(subset.locations, locations)
        shift, first = divmod(shift, every)
        data = range(left, left + size) if layer.padding_mode == "constant" else range(left + size + right)
        axes.append(Axis(k, s * every, d, -(-(locations - first) // every), s * first, data, locations))
    return tuple(axes)


def better_than_rows(layer: Conv, x: Tensor) -> bool:
    """Is the second moment better computed now than its rows kept? So where they are larger than it, or patches are the dearer way."""
    x = layer.batched(x)
    return len(x) * layer.locations(x) > layer.m or cheaper_without_patches(x, axes_of(layer, x, Subset()), layer.groups)


def by_patches(X: Tensor, axes: Axes, moment: Tensor) -> None:
    """Write ``Σ a aᵀ`` over the patches of a padded input ``X (N, C, *sizes)`` to ``moment (G, m, m)``; ``Σ a`` to a last row for the bias.

    A few datapoints at a time: all their patches are never in memory.
    """
    moment.zero_()
    groups, C = len(moment), X.shape[1] // len(moment)
    rows, m = math.prod(axis.R for axis in axes), C * math.prod(axis.k for axis in axes)
    for part in X.split(max(1, 8 * AT_A_TIME // (rows * groups * m))):
        for i, axis in enumerate(axes):
            extent = axis.d * (axis.k - 1) + 1
            part = part.narrow(2 + i, axis.start, axis.s * (axis.R - 1) + extent).unfold(2 + i, extent, axis.s)[..., :: axis.d]
        part = part.unflatten(1, (groups, C)).transpose(0, 1)  # (G, N, C, *locations, *kernel)
        P = part.movedim(2, 2 + len(axes)).reshape(groups, -1, m)
        moment[:, :m, :m].baddbmm_(P.mT, P)
        if moment.shape[-1] > m:
            moment[:, m, :m] += P.sum(1)


def without_patches(X: Tensor, axes: Axes, moment: Tensor) -> None:
    """As ``by_patches``, by one weight gradient for each box of spans: ``M[u, u'] = Σ K[u' - u]`` over the boxes that count for u."""
    groups, C = len(moment), X.shape[1] // len(moment)
    kernel, D = [axis.k for axis in axes], len(axes)
    m = C * math.prod(kernel)
    biased = moment.shape[-1] > m
    M, sums = X.new_empty(m * m // (C * C), groups * C * C), X.new_empty(m // C, groups * C)
    for i, part in enumerate(_parts(axes, X.dtype, X.device)):
        K, totals = X.new_empty(part.counts.shape[1], groups, C, C), X.new_empty(len(part.boxes), groups * C)
        for box, rows, total in zip(part.boxes, part.rows, totals, strict=True):
            inside = _cut(X, [span.own for span in box])
            K[rows].unflatten(0, [len(span.differences) for span in box]).copy_(_correlations(X, inside, box, axes, groups))
            if biased:
                total.copy_(inside.sum((0, *range(2, 2 + D))))
        M.addmm_(part.counts, K.flatten(1), beta=min(i, 1))  # the first overwrites what was there
        if biased:
            sums.addmm_(part.covered, totals, beta=min(i, 1))
    M = M.view(*kernel, *kernel, groups, C, C)
    swapped = (*range(D - 1, 2 * D - 2), *range(D - 1), 2 * D - 2, 2 * D, 2 * D - 1)
    for first, second in itertools.combinations(range(kernel[0]), 2):  # the other half: M[u', u] = M[u, u']ᵀ
        M[second].select(D - 1, first).copy_(M[first].select(D - 1, second).permute(swapped))
    # (*u, *u', G, C, C) to (G, C, *u, C, *u')
    M = M.permute(2 * D, 2 * D + 1, *range(D), 2 * D + 2, *range(D, 2 * D))
    moment[:, :m, :m].unflatten(2, (C, *kernel)).unflatten(1, (C, *kernel)).copy_(M)
    if biased:
        moment[:, m, :m] = sums.unflatten(1, (groups, C)).permute(1, 2, 0).flatten(1)


@lru_cache(1024)
def _boxes(axes: Axes) -> tuple[Box, ...]:
    return tuple(itertools.product(*[list(axis.spans(half=i == 0)) for i, axis in enumerate(axes)]))


@dataclass(frozen=True)
class Part:
    """Some boxes, the rows of their correlations K, and what these are part of.

    ``counts (k²ᴰ, rows)`` is 1 where ``K[δ]`` of a box counts for ``M[u, u' = u + δ]``, ``covered (kᴰ, boxes)`` where a box counts for u.
    """

    boxes: tuple[Box, ...]
    rows: tuple[slice, ...]
    counts: Tensor
    covered: Tensor


@lru_cache(256)
def _parts(axes: Axes, dtype: torch.dtype, device: torch.device) -> tuple[Part, ...]:
    """All boxes, a few hundred correlations at a time: of a kernel 3 × 3 in one part."""
    parts, boxes, many = list[Part](), list[Box](), 0
    for box in _boxes(axes):
        new = math.prod(len(span.differences) for span in box)
        if many + new > CORRELATIONS and boxes:
            parts.append(_part(boxes, axes, dtype, device))
            boxes, many = [], 0
        boxes.append(box)
        many += new
    return (*parts, _part(boxes, axes, dtype, device))


def _part(boxes: list[Box], axes: Axes, dtype: torch.dtype, device: torch.device) -> Part:
    kernel = [axis.k for axis in axes]
    number = {u: i for i, u in enumerate(itertools.product(*map(range, kernel)))}
    rows, counting, covering, first = list[slice](), list[tuple[int, int]](), list[tuple[int, int]](), 0
    for b, box in enumerate(boxes):
        deltas = list(itertools.product(*[span.differences for span in box]))
        for u in itertools.product(*[span.offsets for span in box]):
            covering.append((number[u], b))
            there = [number.get(tuple(map(sum, zip(u, delta, strict=True)))) for delta in deltas]
            counting += [(number[u] * len(number) + v, first + i) for i, v in enumerate(there) if v is not None]
        rows.append(slice(first, first + len(deltas)))
        first += len(deltas)
    counts = _ones(counting, (len(number) ** 2, first), dtype, device)
    return Part(tuple(boxes), tuple(rows), counts, _ones(covering, (len(number), len(boxes)), dtype, device))


def _ones(places: list[tuple[int, int]], shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A matrix with 1 in these places, sparse if it is large."""
    ones = torch.ones(len(places), dtype=dtype, device=device)
    matrix = torch.sparse_coo_tensor(torch.tensor(places, device=device).reshape(-1, 2).mT, ones, shape, check_invariants=False).coalesce()
    return matrix.to_dense() if math.prod(shape) <= DENSE else matrix


def _correlations(X: Tensor, inside: Tensor, box: Box, axes: Axes, groups: int) -> Tensor:
    """``K[δ] = Σ_p x[p] x[p + d·δ]ᵀ`` over the positions p of a box: ``(*δ, G, C, C)``.

    Of few positions one product of rows; else the weight gradient of a convolution from the positions ``p + d·δ`` to the positions p,
    which are its locations.
    """
    seen = _cut(X, [span.seen(axis.d) for span, axis in zip(box, axes, strict=True)])
    C, D = X.shape[1] // groups, len(axes)
    if math.prod(len(span.positions) for span in box) <= FEW_POSITIONS:
        for i, (span, axis) in enumerate(zip(box, axes, strict=True)):
            seen = seen.unfold(2 + i, axis.d * (len(span.differences) - 1) + 1, axis.s)[..., :: axis.d]
        rows = inside.unflatten(1, (groups, C)).permute(1, 0, *range(3, 3 + D), 2).flatten(1, -2)  # (G, rows, C)
        seen = seen.unflatten(1, (groups, C)).permute(1, 0, *range(3, 3 + 2 * D), 2)  # (G, N, *p, *δ, C)
        K = rows.mT @ seen.reshape(*rows.shape[:2], -1)
        return K.unflatten(2, seen.shape[-D - 1 :]).permute(*range(2, 2 + D), 0, 1, 2 + D)
    shape_only = X.new_empty(()).expand(groups * C, C, *[len(span.differences) for span in box])
    few = max(1, AT_A_TIME // seen[:1].numel())
    stride, dilation, none = [axis.s for axis in axes], [axis.d for axis in axes], [0] * D
    pieces = (
        torch.ops.aten.convolution_backward(e, x, shape_only, None, stride, none, dilation, False, none, groups, [False, True, False])[1]
        for e, x in zip(inside.split(few), seen.split(few), strict=True)
    )
    K = next(pieces)
    for piece in pieces:
        K += piece
    return K.unflatten(0, (groups, C)).permute(*range(3, 3 + D), 0, 1, 2)


def _cut(X: Tensor, slices: list[slice]) -> Tensor:
    return X[(slice(None), slice(None), *slices)]


def _within(positions: range, data: range) -> range:
    before, after = max(0, data.start - positions.start), max(0, positions[-1] + 1 - data.stop)
    return positions[-(-before // positions.step) : max(0, len(positions) + -after // positions.step)]


def cheaper_without_patches(x: Tensor, axes: Axes, groups: int) -> bool:
    """The estimated cost of each way for inputs of the number and channels of ``x``, in multiplications of a large matrix product.

    The weights were fitted to times of 28 convolutions on a CPU in float32: what it costs to copy a number of a patch; to call a weight
    gradient, to copy a number for it, and to put a number of the second moment in its place.
    """
    return _cheaper_without_patches(*x.shape[:2], axes, groups)


@lru_cache(1024)
def _cheaper_without_patches(N: int, C: int, axes: Axes, groups: int) -> bool:
    m, rows = C // groups * math.prod(axis.k for axis in axes), N * math.prod(axis.R for axis in axes)
    with_patches = rows * groups * m * (m + 100)
    without = 300.0 * groups * m * m
    for box in _boxes(axes):
        inside = N * math.prod(len(span.positions) for span in box)
        seen = N * math.prod(span.seen(axis.d).stop - span.seen(axis.d).start for span, axis in zip(box, axes, strict=True))
        without += 15e6 + 30 * C * (inside + seen) + inside * C * (C // groups) * math.prod(len(span.differences) for span in box)
    return without < with_patches


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """On a GPU convolutions round to TF32 unless told otherwise; matrix products do not."""
    if device.type != "cuda":
        yield
        return
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
