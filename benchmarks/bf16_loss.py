"""Training under bfloat16 autocast beside float32: ``python benchmarks/bf16_loss.py [seeds] [hidden]``.

MLP 784-1000-1000-1000-10 without biases on Fashion-MNIST, batch 100, FOOF at (0.3, 1) with T = 10; the mean training loss of steps
1,700 to 1,800. Weights, statistics and inverses are float32 in both; products of activations and weights are bfloat16 in one.
Results are added to ``benchmarks/bf16_loss.json``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

import foof
from foof.study.data import load
from foof.study.train.models import mlp

STEPS, BATCH, RESULTS = 1800, 100, Path(__file__).with_suffix(".json")


def train(bf16: bool, seed: int, hidden: int, images: torch.Tensor, labels: torch.Tensor) -> float:
    torch.manual_seed(seed)
    model = mlp(784, [hidden] * 3, 10)
    order = torch.Generator().manual_seed(seed + 1)
    opt = foof.FOOF(model, lr=0.3, damping=1.0, T=10)
    losses: list[float] = []
    while len(losses) < STEPS:
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
                loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            opt.step()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
    return statistics.mean(losses[-100:])


if __name__ == "__main__":
    seeds, hidden = [*map(int, sys.argv[1:]), *(1, 1000)[len(sys.argv) - 1 :]]
    data = load("fashion-mnist")
    for seed in range(seeds):
        for bf16 in (True, False):
            start = time.perf_counter()
            loss = train(bf16, seed, hidden, data.train_x.flatten(1), data.train_y)
            records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
            records.append({
                "autocast": "bfloat16" if bf16 else "none", "seed": seed, "hidden": hidden, "steps": STEPS, "loss": round(loss, 5),
                "seconds": round(time.perf_counter() - start), "data": data.name,
                "images": len(data.train_x), "torch": torch.__version__,
            })  # fmt: skip
            RESULTS.write_text(json.dumps(records, indent=1) + "\n")
            print(records[-1], flush=True)
