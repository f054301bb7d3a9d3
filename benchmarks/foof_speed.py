"""What FOOF costs per step: ``python benchmarks/foof_speed.py [rounds]``."""

from __future__ import annotations

import sys

import torch
from timing import SIZES, Make, ratios_to_sgd, report

import foof


def foof_with(T: int, S: int) -> Make:
    def make(model: torch.nn.Module) -> torch.optim.Optimizer:
        opt = foof.FOOF(model, lr=1e-3, damping=1.0, T=T, S=S)
        opt.initialise([torch.randn(100, SIZES[0])])
        return opt

    return make


METHODS = {
    "FOOF T=100, S=10": (foof_with(100, 10), 100),
    "FOOF T=S=100": (foof_with(100, 100), 100),
    "FOOF T=S=10": (foof_with(10, 10), 20),
    "FOOF T=1": (foof_with(1, 1), 10),
}
BOUNDS = {"FOOF T=100, S=10": 1.45, "FOOF T=S=100": 1.9, "FOOF T=1": 4.5}

if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    report(ratios_to_sgd(METHODS, rounds), BOUNDS, rounds)
