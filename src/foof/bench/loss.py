"""Seconds to a training loss: every method trains the same network on the same batches, a slice of time at a time, in turns.

The goal is the loss at which SGD with momentum arrives after its epochs, the mean over the last twentieth of its steps. Every method has as
many seconds as SGD took for that. Losses are means over the same 2,000 training images, taken between slices of half a second, off the
clock; a loss counts as reached when the mean of three takings is there. Statistics gathered before training are on the clock. Learning
rate and λ are the study's where it has any; the learning rates of others are chosen by ``search`` on another seed, around those that
their documentation names.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from foof.bench.cases import Batch, Case, fully_connected
from foof.bench.machine import synchronise
from foof.bench.methods import BASELINE, METHODS, Method, Training, reason
from foof.study.train.models import mlp

SEED, SEARCH_SEED, SEARCH_STEPS = 0, 100, 100
SLICE, TAKINGS, JUDGED = 0.5, 3, 2000
INITIAL = 50  # batches of statistics before training, as in the study
NO_LR = ("FOOF, no lr",)  # has nothing to choose
STUDY = {BASELINE.name: 0.01, "FOOF": 0.3, "KFAC": 0.003}  # at batch 100, with λ = 1 for FOOF and 0.01 for KFAC
DOCUMENTED = {  # learning rates that the documentation of each names, or, for curvlinops, which has none, ours
    "AdamW": 1e-3, "Muon (torch)": 1e-3, "curvlinops FOOF": 0.3, "curvlinops KFAC": 0.003, "SINGD": 1e-3, "SOAP": 3e-3, "Shampoo": 1e-3,
}  # fmt: skip
Say = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """What is trained on, for how long, and how it is judged."""

    title: str
    case: Case
    network: Callable[[torch.Generator], nn.Module]
    x: Tensor
    y: Tensor
    batch: int = 100
    epochs: int = 10
    slice: float = SLICE
    judged: int = JUDGED

    @property
    def steps(self) -> int:
        return self.epochs * (len(self.y) // self.batch)

    def batches(self, seed: int) -> Iterator[Batch]:
        """Without end, a fresh order every epoch."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            for rows in torch.randperm(len(self.y), generator=generator).split(self.batch):
                if len(rows) == self.batch:
                    yield self.x[rows].to(self.case.device), self.y[rows].to(self.case.device)


def fashion_mnist(source: str = "full", width: int = 1000, epochs: int = 10, device: str = "cpu") -> Task:
    """Fashion-MNIST, the paper's network, batch 100."""
    from foof.study.data import load

    data = load("fashion-mnist", source)
    title = f"Fashion-MNIST, {len(data.train_y):,} images, MLP of width {width:,}, batch 100, {epochs} epochs"
    case = replace(fully_connected(width), device=device)
    return Task(title, case, lambda generator: mlp(784, [width] * 3, 10, generator), data.train_x.flatten(1), data.train_y, epochs=epochs)


@dataclass
class Run:
    """A training on the clock, and its losses: (seconds, steps, loss)."""

    training: Training
    batches: Iterator[Batch]
    seconds: float
    steps: int = 0
    curve: list[tuple[float, int, float]] = field(default_factory=list)

    def train(self, seconds: float, most: int) -> None:
        """For this much more time, or until this many steps have been taken in all."""
        device, until = next(self.training.model.parameters()).device, self.seconds + seconds
        while self.seconds < until and self.steps < most:
            x, y = next(self.batches)
            start = time.perf_counter()
            self.training.step(x, y)
            synchronise(device)
            self.seconds += time.perf_counter() - start
            self.steps += 1

    @torch.no_grad()
    def judge(self, task: Task) -> float:
        """The loss now, and the mean of it and the two before."""
        device = next(self.training.model.parameters()).device
        out = self.training.model(task.x[: task.judged].to(device))
        self.curve.append((self.seconds, self.steps, float(task.case.loss(out, task.y[: task.judged].to(device)))))
        return statistics.fmean(loss for _, _, loss in self.curve[-TAKINGS:])

    def reaches(self, goal: float) -> tuple[float, int] | None:
        """Seconds and steps after which the mean of three takings is at the goal."""
        for k, (seconds, steps, _) in enumerate(self.curve):
            taken = [loss for _, _, loss in self.curve[: k + 1][-TAKINGS:]]
            if len(taken) == TAKINGS and statistics.fmean(taken) <= goal:
                return seconds, steps
        return None


def begin(task: Task, method: Method, lr: float, seed: int) -> Run:
    """The same initial weights for every method; what it gathers before training is on the clock."""
    model = task.network(torch.Generator().manual_seed(seed)).to(task.case.device)
    case = replace(task.case, draw=task.batches(seed + 2).__next__, initial=INITIAL)
    start = time.perf_counter()
    training = Training(method, case, lr, model)
    return Run(training, task.batches(seed + 1), time.perf_counter() - start)


def race(task: Task, lrs: Mapping[str, float], seed: int = SEED, floor: float = 0.0, say: Say = lambda _: None,
         ) -> tuple[dict[str, Run], dict[str, str]]:  # fmt: skip
    """All methods in turns until SGD has taken its steps. A method is done early when its loss is below ``floor``, or not finite."""
    runs, failed = dict[str, Run](), dict[str, str]()

    def attempt(name: str, what: Callable[[], None]) -> bool:
        try:
            what()
        except Exception as problem:  # a peer may fail in any way: the table says how
            failed[name] = reason(problem)
        return name not in failed

    def start(name: str) -> None:
        runs[name] = begin(task, {BASELINE.name: BASELINE, **METHODS}[name], lrs[name], seed)

    def follow(name: str) -> None:
        """As many seconds as SGD has had."""
        while name in going and runs[name].seconds < sgd.seconds:
            runs[name].train(task.slice, task.steps)
            loss = runs[name].judge(task)
            if not math.isfinite(loss) or loss < floor or runs[name].steps >= task.steps:
                going.remove(name)

    going = [name for name in lrs if attempt(name, lambda name=name: start(name)) and name != BASELINE.name]  # type: ignore[misc]
    sgd = runs[BASELINE.name]
    while sgd.steps < task.steps:
        sgd.train(task.slice, task.steps)
        sgd.judge(task)
        say(f"SGD: {sgd.steps:,} of {task.steps:,} steps, loss {sgd.curve[-1][2]:.3f}")
        for name in list(going):
            if not attempt(name, lambda name=name: follow(name)) and name in going:  # type: ignore[misc]
                going.remove(name)
    for run in runs.values():
        run.training.close()
    return runs, failed


def unit(task: Task, lrs: Mapping[str, float], seed: int = SEED, floor: float = 0.1, say: Say = lambda _: None) -> dict[str, Any]:
    """The race as a record: for each method seconds to SGD's last loss (None: not within SGD's seconds) and its curve."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        runs, failed = race(task, lrs, seed, floor, say)
    sgd = runs[BASELINE.name]
    goal = statistics.fmean(loss for _, steps, loss in sgd.curve if steps > 0.95 * task.steps)
    methods = {}
    for name, run in runs.items():
        reached = (sgd.seconds, sgd.steps) if run is sgd else run.reaches(goal)
        seconds, steps = reached or (None, None)
        methods[name] = {
            "lr": lrs[name], "reached": seconds, "steps_to": steps, "of_sgd": seconds and seconds / sgd.seconds, "seconds": run.seconds,
            "steps": run.steps, "last": run.curve[-1][2] if run.curve else None, "curve": run.curve,
        }  # fmt: skip
    return {"kind": "loss", "title": task.title, "goal": goal, "seed": seed, "methods": methods, "failed": failed}


def search(task: Task, name: str, steps: int = SEARCH_STEPS, seed: int = SEARCH_SEED) -> dict[str, Any]:
    """The learning rate with the lowest loss after these steps, as a record: the documented one, a third and three times it, and where
    the best is at an end, one more beyond."""
    losses = dict[float, float]()

    def best() -> float:
        return min(losses, key=lambda lr: losses[lr] if math.isfinite(losses[lr]) else math.inf)

    def attempt(lr: float) -> None:
        try:
            run = begin(task, METHODS[name], lr, seed)
            run.train(math.inf, steps)
            losses[lr] = run.judge(task)
            run.training.close()
        except Exception:  # weights that grew until nothing could be inverted, or whatever else a peer may do
            losses[lr] = math.nan

    middle = DOCUMENTED[name]
    for lr in (middle, middle / 3, middle * 3):  # the first of them, if none can be trained with
        attempt(lr)
    if best() != middle:
        attempt(best() ** 2 / middle)
    tried = sorted(losses.items())
    return {"kind": "search", "method": name, "title": task.title, "steps": steps, "seed": seed, "tried": tried, "best": best()}
