"""Images like those of CURVES, which may not be redistributed: 28 × 28, a smooth curve through three random points, anti-aliased.

What is known of the original (Hinton & Salakhutdinov 2006): 20,000 training and 10,000 test images of 28 × 28 of curves "generated from
three randomly chosen points in two dimensions". How the points are spread, which curve goes through them, how thick and how bright it
is drawn is not published, so losses on these images are not comparable with losses on CURVES; comparisons between methods are.
Here the points are uniform in the square that leaves two pixels at the border, and the curve is the quadratic polynomial through them,
at times in proportion to the distances between them; a stroke of one and a half pixels, cut off at the border.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foof.study.data.formats import Images, Labels

SIZE, MARGIN, THICKNESS = 28, 2, 1.5
SEGMENTS = 24  # the curve is drawn as so many straight pieces
COUNTS, SEED = (20_000, 10_000), 2006


def read_curves(counts: tuple[int, int] = COUNTS) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Training and test images ``(N, 1, 28, 28)``, always the same; labels are zeros, since there are none."""
    generator = torch.Generator().manual_seed(SEED)
    train, test = (curves(count, generator) for count in counts)
    return (train, np.zeros(len(train), np.int64)), (test, np.zeros(len(test), np.int64))


def curves(count: int, generator: torch.Generator) -> Images:
    """``count`` images ``(N, 1, 28, 28)``, white on black."""
    points = MARGIN + (SIZE - 2 * MARGIN) * torch.rand(count, 3, 2, generator=generator, dtype=torch.float64)
    drawn = [draw(path(some)) for some in points.split(500)]
    return (255 * torch.cat(drawn)).round().to(torch.uint8).unsqueeze(1).numpy()


def path(points: Tensor) -> Tensor:
    """Points ``(N, 3, 2)`` to the ends ``(N, SEGMENTS + 1, 2)`` of the pieces of the curve through them.

    Lagrange's ``p(t) = Σ_i p_i Π_j≠i (t - t_j) / (t_i - t_j)`` with t = 0, |p₁ - p₀|, |p₁ - p₀| + |p₂ - p₁|: it passes all three.
    """
    steps = (points[:, 1:] - points[:, :-1]).norm(dim=-1).clamp_min(1e-3)
    at = torch.cat([torch.zeros_like(steps[:, :1]), steps.cumsum(1)], 1)  # (N, 3)
    t = torch.linspace(0, 1, SEGMENTS + 1, dtype=points.dtype) * at[:, -1:]  # (N, SEGMENTS + 1)
    weights = []
    for i in range(3):
        j, k = (other for other in range(3) if other != i)
        below = (at[:, i] - at[:, j]) * (at[:, i] - at[:, k])
        weights.append((t - at[:, j, None]) * (t - at[:, k, None]) / below[:, None])
    return torch.stack(weights, -1) @ points


def draw(ends: Tensor) -> Tensor:
    """Brightness ``(N, 28, 28)`` of each pixel: how much of it a stroke covers, by the distance of its centre from the nearest piece."""
    axis = torch.arange(SIZE, dtype=torch.float32) + 0.5
    pixels = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 2)
    ends = ends.float()
    nearest = torch.full((len(ends), len(pixels)), torch.inf)
    for start, end in zip(ends[:, :-1].unbind(1), ends[:, 1:].unbind(1), strict=True):
        along = (end - start).unsqueeze(1)  # (N, 1, 2)
        offset = pixels - start.unsqueeze(1)  # (N, pixels, 2)
        where = ((offset * along).sum(-1) / (along**2).sum(-1).clamp_min(1e-12)).clamp(0, 1)
        nearest = torch.minimum(nearest, (offset - where.unsqueeze(-1) * along).norm(dim=-1))
    return ((THICKNESS + 1) / 2 - nearest).clamp(0, 1).view(-1, SIZE, SIZE)
