"""FOOF and SGD with momentum on Fashion-MNIST, 1,800 steps: ``python benchmarks/foof_loss.py [seeds]``.

MLP 784-1000-1000-1000-10 without biases, batch 100, the paper's preprocessing; prints the mean training loss of steps 1,700 to 1,800.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import nn

import foof
from foof.study.data import load
from foof.study.train.models import mlp

STEPS, BATCH = 1800, 100


def train(name: str, seed: int, images: torch.Tensor, labels: torch.Tensor) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = mlp(784, [1000] * 3, 10)
    order = torch.Generator().manual_seed(seed + 1)
    opt: torch.optim.Optimizer
    if name == "SGD+M":
        opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    else:
        opt = foof.FOOF(model, lr=0.3, damping=1.0, T=10)
        opt.initialise(images[torch.randint(len(images), (BATCH,), generator=order)] for _ in range(50))
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    data = load("fashion-mnist")
    seeds = range(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
    for name in ("FOOF T=10", "SGD+M"):
        start, ends = time.perf_counter(), []
        for seed in seeds:
            ends.append(statistics.mean(train(name, seed, data.train_x.flatten(1), data.train_y)[1700:1800]))
        spread = statistics.stdev(ends) if len(ends) > 1 else float("nan")
        print(f"{name:<10} {statistics.mean(ends):.4f} ± {spread:.4f} over {len(ends)} seeds, {time.perf_counter() - start:.0f} s")
