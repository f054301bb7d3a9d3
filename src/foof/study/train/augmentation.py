"""Random flips and padded crops that depend on the seed and the step alone: an interrupted run goes on with the same images."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional as F

PADDING = 4  # the paper's


def augment(x: Tensor, seed: int, step: int, padding: int = PADDING) -> Tensor:
    """Images ``(N, C, H, W)``, each flipped left to right with probability 1/2, padded by zeros, and cropped anywhere to its size.

    Zero is the mean colour of normalised images.
    """
    N, _, H, W = x.shape
    mixed = hashlib.sha256(f"{seed}, {step}".encode()).digest()[:4]  # torch's generator looks at 32 bits of a seed
    draw = torch.Generator().manual_seed(int.from_bytes(mixed, "big"))
    flipped = torch.rand(N, generator=draw) < 0.5
    down, right = torch.randint(0, 2 * padding + 1, (2, N, 1), generator=draw)
    rows, columns = down + torch.arange(H), right + torch.arange(W)
    columns = torch.where(flipped[:, None], columns.flip(1), columns)
    padded = F.pad(x, [padding] * 4).permute(0, 2, 3, 1)  # (N, H, W, C)
    return padded[torch.arange(N)[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
