"""What setting or bounding a step by its change of the outputs costs: ``python benchmarks/defaults/step_time.py [rounds] [threads]``.

Each form of FOOF covers the same layers and leaves the others to the same fallback optimizer. A round is one period of T = 100 steps, of
which the methods take ten at a time in turn, always in the same phase of their period; a ratio is that of two sums over a period.
With one thread it is processor time, which other processes disturb least; with more it is time on the clock.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from tasks import TASKS, Task, mlp
from torch import nn

import foof
from foof.optim.foof import ADAMW
from foof.optim.split import of_vocabulary

T, CHUNK = 100, 10
CASES = {
    "MLP 784-1000-1000-1000-10, batch 100": replace(TASKS["mlp-32"], model=lambda: mlp(784, 1000, 1000, 1000, 10), size=100),
    "MLP 784-128-128-10, batch 32": TASKS["mlp-32"],
    "CNN, batch 64": TASKS["cnn"],
    "GPT, batch 16 of 32 tokens": TASKS["gpt"],
}
SGD, PAPER = "SGD with momentum", "the paper's form"
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    SGD: lambda model: torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9),
    PAPER: lambda model: foof.FOOF(model, lr=1e-4, damping=0.1, relative=True, exclude=of_vocabulary(model), rest=ADAMW),
    "FOOF(model)": lambda model: foof.FOOF(model, max_change=1e-4),
    "bounded, lr and max_change": lambda model: foof.FOOF(model, lr=1e-4, max_change=1e-2, rest=ADAMW),
}


class Run:
    def __init__(self, task: Task, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.batches = task.model(), task.loss, task.batches(0)
        self.opt = make(self.model)
        self.seconds(T)  # past the warm-up: the first period has inversions of its own

    def seconds(self, steps: int) -> float:
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        data = [next(self.batches) for _ in range(steps)]
        start = clock()
        for x, y in data:
            self.opt.zero_grad()
            self.loss(self.model(x), y).backward()
            self.opt.step()
        return clock() - start


def periods(task: Task, rounds: int) -> list[dict[str, float]]:
    """Seconds of each method for T steps, round by round."""
    runs = {name: Run(task, make) for name, make in METHODS.items()}
    found = []
    for _ in range(rounds):
        total = dict.fromkeys(runs, 0.0)
        for k in range(T // CHUNK):
            for name in list(runs)[k % len(runs) :] + list(runs)[: k % len(runs)]:
                total[name] += runs[name].seconds(CHUNK)
        found.append(total)
    return found


def ratio(found: list[dict[str, float]], name: str, to: str) -> str:
    values = [total[name] / total[to] for total in found]
    low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return f"{median:.3f} ({low:.3f} to {high:.3f})"


def main(rounds: int, threads: int) -> None:
    torch.set_num_threads(threads)
    print(f"torch {torch.__version__}, {threads} threads, {platform.machine()}; median (quartiles) of {rounds} interleaved periods")
    for title, task in CASES.items():
        found = periods(task, rounds)
        step = statistics.median(total[SGD] for total in found) / T
        print(f"\n{title} (SGD: {1000 * step:.2f} ms a step)")
        for name in list(METHODS)[1:]:
            beside = f"   {ratio(found, name, PAPER)} of {PAPER}" if name != PAPER else ""
            print(f"  {name:<28} {ratio(found, name, SGD)} of SGD{beside}", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in (sys.argv[1:] + ["5", "1"][len(sys.argv[1:]) :])))
