"""What FOOF and KFAC cost per step of a ResNet18: ``python benchmarks/conv_speed.py [rounds] [width] [batch]``.

At T = 500, S = 10 of 500 steps 490 are plain, 10 gather, and one of these inverts. Each kind is timed by an optimizer all of whose steps
are of that kind (T = 500: plain; S = T: all gather; T = 1: all gather and invert), in interleaved rounds with SGD with momentum, as
processor time of one thread: other processes do not count.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import foof
from foof.study.train.networks import resnet18

T, S = 500, 10
KINDS = {"plain": (T, S), "gathers": (T, T), "inverts": (1, 1)}  # T and S of optimizers whose steps are all of one kind
METHODS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "FOOF": lambda model, **schedule: foof.FOOF(model, lr=1e-4, damping=1.0, momentum=0.9, **schedule),
    "KFAC": lambda model, **schedule: foof.KFAC(model, lr=1e-4, damping=1.0, momentum=0.9, **schedule),
}
BOUNDS = {"FOOF": 1.14, "KFAC": 1.25}


def network(width: int) -> nn.Module:
    return resnet18(3, 10, width, train_norm=False, generator=torch.Generator().manual_seed(0))


def seconds(model: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    """Processor time of one step."""
    start = time.process_time()
    opt.zero_grad()
    out = model(x)
    if hasattr(opt, "update_curvature"):
        opt.update_curvature(out)
    cross_entropy(out, y).backward()
    opt.step()
    return time.process_time() - start


def measure(rounds: int, width: int, batch: int) -> None:
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    plain = network(width)
    runs = {"SGD": (plain, torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9))}
    for name, make in METHODS.items():
        for kind, (period, gathered) in KINDS.items():
            model = network(width)
            runs[f"{name} {kind}"] = (model, make(model, T=period, S=gathered))
            runs[f"{name} {kind}"][1].initialise([x])  # type: ignore[attr-defined]
    for model, opt in runs.values():  # the step at t = 0 inverts; t = 1 and on are of their kind
        seconds(model, opt, x, y)
    ratios: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(rounds):
        for name, (model, opt) in runs.items():
            if name == "SGD" or name.endswith("plain") or k < 5:  # one in fifty steps counts for little: a few rounds of it do
                before = seconds(*runs["SGD"], x, y)
                taken = seconds(model, opt, x, y)
                ratios[name].append(2 * taken / (before + seconds(*runs["SGD"], x, y)))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {platform.machine()}; ResNet18, width {width}, batch {batch};")
    print(f"time per step over SGD with momentum: median (quartiles) of {rounds} interleaved rounds")
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4)
        print(f"  {name:<14} {middle:6.3f}  ({low:.3f} to {high:.3f})")
    for name in METHODS:
        middle = {kind: statistics.median(ratios[f"{name} {kind}"]) for kind in KINDS}
        whole = ((T - S) * middle["plain"] + (S - 1) * middle["gathers"] + middle["inverts"]) / T
        print(f"  {name} at T = {T}, S = {S}: {whole:.3f}   asked for at width 16, batch 64: ≤ {BOUNDS[name]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    given = [int(argument) for argument in sys.argv[1:]]
    measure(*(given + [30, 16, 64][len(given) :]))
