"""Images like those of FACES, made of the Olivetti faces as Hinton & Salakhutdinov (2006) say they made theirs.

Ten pictures of 64 × 64 of each of forty people, rotated (-90° to 90°), scaled (1.4 to 1.8), cropped and subsampled to 25 × 25, 414 of each
picture; every pixel shifted to mean zero, and all scaled by one number to unit variance; the first twenty-five people to train on, 103,500
patches in a random order, and the last ten to test (theirs: thirty, of which five are for validation; the paper's 104 updates per epoch are
of twenty-five). Their very rotations and crops are not published, so losses are close to theirs but not comparable digit by digit.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from foof.study.data.formats import Images, Labels, read_olivetti

SIZE, SCALES, PER_PICTURE, SEED = 25, (1.4, 1.8), 414, 2006
TRAIN, TEST = range(25), range(30, 40)  # people


def read_faces(folder: Path, per_picture: int = PER_PICTURE) -> tuple[tuple[Images, Labels], tuple[Images, Labels]]:
    """Training and test patches ``(N, 1, 25, 25)`` of the official file in ``folder``, always the same; the label is the person."""
    path = folder / "olivettifaces.mat"
    if not path.exists():
        raise FileNotFoundError(path)
    pictures, people = read_olivetti(path)
    generator = torch.Generator().manual_seed(SEED)
    seen = patches(pictures, per_picture, generator)
    label = np.repeat(people, per_picture)
    train, test = (np.flatnonzero(np.isin(label, who)) for who in (TRAIN, TEST))
    train = train[torch.randperm(len(train), generator=generator).numpy()]  # the first of them are of all people
    return (seen[train], label[train]), (seen[test], label[test])


def patches(pictures: Images, per_picture: int, generator: torch.Generator) -> Images:
    """``per_picture`` patches of each of ``pictures (N, 1, H, W)``, one picture after the other: ``(N · per_picture, 1, 25, 25)``."""
    found = []
    for picture in torch.from_numpy(pictures).float():
        where = _places(picture.shape[-1], per_picture, generator)
        sampled = F.grid_sample(picture.expand(per_picture, -1, -1, -1), where, mode="bilinear", align_corners=True)
        found.append(F.avg_pool2d(sampled, 2))
    return torch.cat(found).round().to(torch.uint8).numpy()


def _places(side: int, count: int, generator: torch.Generator) -> Tensor:
    """Where to look at a square picture, two by two points for each pixel: ``(count, 50, 50, 2)``, from -1 to 1 as ``grid_sample`` counts.

    Neighbouring pixels are ``scale`` pixels of the picture apart. The centre is anywhere that keeps the patch inside.
    """
    angle, scale, *centre = torch.rand(4, count, generator=generator)
    angle, scale = torch.pi * (angle - 0.5), SCALES[0] + (SCALES[1] - SCALES[0]) * scale
    cos, sin = angle.cos(), angle.sin()
    reach = scale * (SIZE - 0.5) / 2 * (cos.abs() + sin.abs())  # of a corner, along either axis
    room = (side - 1 - 2 * reach).clamp_min(0)
    line = (torch.arange(2 * SIZE) - SIZE + 0.5) / 2  # half pixels, around zero
    y, x = torch.meshgrid(line, line, indexing="ij")
    turned = (cos[:, None, None] * x - sin[:, None, None] * y, sin[:, None, None] * x + cos[:, None, None] * y)
    pixels = [scale[:, None, None] * t + (reach + room * c)[:, None, None] for t, c in zip(turned, centre, strict=True)]
    return torch.stack(pixels, -1) * (2 / (side - 1)) - 1


def moments(train: Images) -> tuple[NDArray[np.float32], float]:
    """What to shift every pixel by, its mean over the training images ``(1, 1, 25, 25)``, and the one number to divide all by: the root of
    their average variance. Of brightness from 0 to 1."""
    mean = train.mean(0, keepdims=True, dtype=np.float64) / 255
    scale = np.sqrt(np.mean((train.astype(np.float32) / 255).var(0, dtype=np.float64)))
    return mean.astype(np.float32), float(scale)
