"""How much lr, damping, T, S and ema matter: ``python benchmarks/guidance.py``. The tables of docs/choosing.md are made from it.

MLP 784-200-200-10 on the embedded 6,000 images of Fashion-MNIST, batch 100, 300 steps (5 epochs), two seeds; one setting is changed
at a time, or lr and damping together. The mean training loss of the last 50 steps, and CPU time per step of one thread.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import foof
from foof.study.data import load

STEPS, BATCH, SEEDS, RESULTS = 300, 100, 2, Path(__file__).with_suffix(".json")
USUAL: dict[str, Any] = {"lr": 0.3, "damping": 1.0, "T": 10, "S": 10, "ema": 0.95}
GRID = [
    *({"lr": lr, "damping": damping} for damping in (0.1, 1.0, 10.0) for lr in (0.03, 0.1, 0.3, 1.0, 3.0)),
    *({"T": T, "S": S} for T, S in ((1, 1), (10, 1), (100, 1), (100, 10), (100, 100))),
    *({"ema": ema} for ema in (0.0, 0.5, 0.99)),
]


def run(options: dict[str, Any], seed: int, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    opt = foof.FOOF(model, **options)
    order, losses, start = torch.Generator().manual_seed(seed + 1), [], time.process_time()
    while len(losses) < STEPS:
        for rows in torch.randperm(len(images), generator=order).split(BATCH):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            if not math.isfinite(loss.item()) or loss.item() > 1e3:
                return math.inf, math.nan
            opt.step()
            losses.append(loss.item())
    return statistics.mean(losses[-50:]), 1000 * (time.process_time() - start) / STEPS


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = load("fashion-mnist", "embedded")
    records = []
    for changed in GRID:
        options = {**USUAL, **changed}
        found = [run(options, seed, data.train_x.flatten(1), data.train_y) for seed in range(SEEDS)]
        loss = [round(f[0], 4) if math.isfinite(f[0]) else None for f in found]  # None: it diverged
        records.append({**options, "loss": loss, "ms": round(min(f[1] for f in found), 2) if None not in loss else None})
        print(records[-1], flush=True)
        RESULTS.write_text(json.dumps(records, indent=1).replace("\n  ", " ").replace("\n }", " }") + "\n")
