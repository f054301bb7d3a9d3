"""Time per step of KFAC over SGD with momentum: ``python benchmarks/kfac_speed.py [rounds] [threads]``."""

from __future__ import annotations

import sys

import torch
from timing import BATCH, SIZES, ratios_to_sgd, report
from torch import nn

import foof

BOUNDS = {"KFAC T=100 S=10": 2.2, "KFAC T=1": 8.0}  # the released code: 8.1 and 15.8


def kfac(T: int, S: int | None = None, mode: str = "heuristic"):
    def make(model: nn.Module) -> torch.optim.Optimizer:
        opt = foof.KFAC(model, lr=1e-5, damping=0.01, T=T, S=S, damping_mode=mode)
        opt.initialise([torch.randn(BATCH, SIZES[0])] * 3)
        return opt

    return make


METHODS = {
    "KFAC T=100 S=10": (kfac(100, 10), 100),
    "KFAC T=10": (kfac(10), 20),
    "KFAC T=1": (kfac(1), 10),
    "KFAC standard T=100 S=10": (kfac(100, 10, "standard"), 100),
}


if __name__ == "__main__":
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    if len(sys.argv) > 2:
        torch.set_num_threads(int(sys.argv[2]))
    report(ratios_to_sgd(METHODS, rounds), BOUNDS, rounds)
