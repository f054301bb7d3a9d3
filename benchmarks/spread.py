"""Do inversions spread over the steps of a period train as well as all at once? ``python benchmarks/spread.py [seeds]``.

Fashion-MNIST, MLP 784-1000-1000-1000-10 without biases, batch 100, 1,800 steps, learning rates and λ of the study; the mean training loss
of steps 1,700 to 1,800, by seed. Written to ``spread.json`` beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import foof
from foof.study.data import load
from foof.study.train.models import mlp

STEPS, BATCH = 1800, 100
METHODS: dict[str, Callable[[nn.Module], foof.FOOF | foof.KFAC]] = {
    "FOOF": partial(foof.FOOF, lr=0.3, damping=1.0, T=100, S=10),
    "FOOF, spread": partial(foof.FOOF, lr=0.3, damping=1.0, T=100, S=10, spread=True),
    "KFAC": partial(foof.KFAC, lr=0.003, damping=0.01, T=100, S=10),
    "KFAC, spread": partial(foof.KFAC, lr=0.003, damping=0.01, T=100, S=10, spread=True),
}


def train(name: str, seed: int, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = mlp(784, [1000] * 3, 10)
    order = torch.Generator().manual_seed(seed + 1)
    opt = METHODS[name](model)
    opt.initialise(images[torch.randint(len(images), (BATCH,), generator=order)] for _ in range(50))
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            opt.zero_grad()
            out = model(images[batch])
            if isinstance(opt, foof.KFAC):
                opt.update_curvature(out)
            loss = nn.functional.cross_entropy(out, labels[batch])
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    data, ends = load("fashion-mnist"), dict[str, list[float]]()
    for name in METHODS:
        seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
        ends[name] = [statistics.mean(train(name, seed, data.train_x.flatten(1), data.train_y)[1700:1800]) for seed in seeds]
        spread = statistics.stdev(ends[name]) if len(ends[name]) > 1 else float("nan")
        print(f"{name:<12} {statistics.mean(ends[name]):.4f} ± {spread:.4f} over {len(ends[name])} seeds", flush=True)
    Path(__file__).with_suffix(".json").write_text(json.dumps({"loss": ends, "torch": torch.__version__}, indent=1) + "\n")
