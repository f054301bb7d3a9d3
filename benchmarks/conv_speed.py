"""What FOOF and KFAC cost per step of a ResNet18: ``python benchmarks/conv_speed.py [processes] [width] [batch]``.

At T = 500, S = 10 of 500 steps 490 are plain, 10 gather, and one of these inverts. Each kind is timed by an optimizer all of whose steps
are of that kind (T = 500: plain; S = T: all gather; T = 1: all gather and invert), in interleaved rounds with SGD with momentum, as
processor time of one thread: other processes do not count. Where the allocator happens to put a network's activations moves the ratios of
one process by several hundredths, for all its rounds alike: so each method has several processes, in turn, and the median is over all.
"""

from __future__ import annotations

import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import foof
from foof.study.train.networks import resnet18

T, S = 500, 10
ROUNDS = 10
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


def measure(task: tuple[str, int, int]) -> dict[str, list[float]]:
    """Steps of each kind of one method over those of SGD right before and after, in this process."""
    name, width, batch = task
    torch.set_num_threads(1)
    x, y = torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))
    plain = network(width)
    runs: dict[str, Any] = {"SGD": (plain, torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9))}
    for kind, (period, gathered) in KINDS.items():
        model = network(width)
        runs[kind] = (model, METHODS[name](model, T=period, S=gathered))
        runs[kind][1].initialise([x])
    for model, opt in runs.values():  # the step at t = 0 inverts; t = 1 and on are of their kind
        seconds(model, opt, x, y)
    ratios: dict[str, list[float]] = {kind: [] for kind in runs}
    for k in range(ROUNDS):
        for kind, (model, opt) in runs.items():
            if kind in ("SGD", "plain") or k < 3:  # one in fifty steps counts for little: a few rounds of it do
                before = seconds(*runs["SGD"], x, y)
                taken = seconds(model, opt, x, y)
                ratios[kind].append(2 * taken / (before + seconds(*runs["SGD"], x, y)))
    return ratios


def main(processes: int, width: int, batch: int) -> None:
    print(f"torch {torch.__version__}, 1 thread, {platform.machine()}; ResNet18, width {width}, batch {batch}; time per step over SGD with")
    print(f"momentum: median (quartiles) of {ROUNDS} interleaved rounds in each of {processes} processes; medians of the processes")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:  # one at a time, each in a process of its own
        tasks = [(name, width, batch) for _ in range(processes) for name in METHODS]
        found = list(zip(tasks, pool.imap(measure, tasks), strict=True))
    for name in METHODS:
        middle = {}
        for kind in ("SGD", *KINDS):
            of_process = [ratios[kind] for task, ratios in found if task[0] == name]
            low, middle[kind], high = statistics.quantiles([ratio for ratios in of_process for ratio in ratios], n=4)
            each = " ".join(f"{statistics.median(ratios):.3f}" for ratios in of_process)
            print(f"  {name if kind != 'SGD' else 'beside'} {kind:<8} {middle[kind]:6.3f}  ({low:.3f} to {high:.3f})   {each}")
        whole = ((T - S) * middle["plain"] + (S - 1) * middle["gathers"] + middle["inverts"]) / T
        print(f"  {name} at T = {T}, S = {S}: {whole:.3f}   asked for at width 16, batch 64: ≤ {BOUNDS[name]}")


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:]]
    main(*(given + [5, 16, 64][len(given) :]))
