"""Time per step: every method's period in turn with SGD's steps before and after it, round after round, in one process."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from foof.bench.cases import Batch, Case
from foof.bench.machine import synchronise
from foof.bench.methods import BASELINE, Method, Training, reason

BESIDE = 20  # steps of SGD before and after a block of another method
BLOCK = 25  # steps of a method whose steps are all alike
WARM_UP = 5
BUDGET = 6.0  # seconds after which a peer's period is cut off,
CLEAR = 3.0  # if its median step is so many times SGD's: else a lower bound would leave open who is faster
Failures = dict[str, str]
Say = Callable[[str], None]


@dataclass
class Times:
    """Seconds of each step, by round, and the mean step of SGD beside each round. ``cut``: steps of a period that was not finished."""

    rounds: list[list[float]] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    cut: int = 0

    def summary(self) -> dict[str, Any]:
        """Ratio to SGD (median and quartiles over rounds); mean, median and worst step in milliseconds.

        The worst step is that of the schedule, not of the machine: the largest over a period's places of the median over rounds. Of a
        period cut off after its first steps, which are seldom refreshes, the ratio is one of the median step: a lower bound.
        """
        typical = [statistics.median(steps) if self.cut else statistics.fmean(steps) for steps in self.rounds]
        ratios = [seconds / sgd for seconds, sgd in zip(typical, self.beside, strict=True)]
        low, middle, high = quartiles(ratios)
        places = [statistics.median(place) for place in zip(*self.rounds, strict=True)]
        return {
            "ratio": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)], "rounds": len(ratios), "steps": len(self.rounds[0]),
            "mean_ms": 1e3 * statistics.median(typical), "median_ms": 1e3 * statistics.median(s for r in self.rounds for s in r),
            "worst_ms": 1e3 * max(places), "worst_of_all_ms": 1e3 * max(s for r in self.rounds for s in r), "cut": self.cut,
        }  # fmt: skip


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile; of fewer than four values their extremes."""
    if len(values) < 4:
        return min(values), statistics.median(values), max(values)
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


def block(training: Training, batches: list[Batch], steps: int, budget: float | None = None, least: int = 2,
          clear: float = 0.0) -> list[float]:  # fmt: skip
    """Seconds of each of these steps, or of as many as the budget has time for, but at least so many, and until their median is clear."""
    device, taken = next(training.model.parameters()).device, list[float]()
    for k in range(steps):
        x, y = batches[k % len(batches)]
        start = time.perf_counter()
        training.step(x, y)
        synchronise(device)
        taken.append(time.perf_counter() - start)
        if budget is not None and len(taken) >= least and sum(taken) > budget and statistics.median(taken) > clear:
            break
    return taken


def measure(case: Case, methods: Mapping[str, Method], say: Say, budget: float) -> tuple[dict[str, Times], Failures]:
    """Rounds of: SGD, a method, SGD, the next method, SGD, ...; a method that fails is left out, with its error.

    Others than ours take part in half of the rounds, at least in one.
    """
    batches = case.batches()
    sgd, failed, runs = Training(BASELINE, case), Failures(), dict[str, Training]()
    block(sgd, batches, WARM_UP)
    for name, method in methods.items():
        try:
            runs[name] = Training(method, case)
            block(runs[name], batches, WARM_UP, None if method.ours else budget / 4, least=1)
        except Exception as problem:  # a peer may fail in any way: the table says how
            failed[name] = reason(problem)
            runs.pop(name, None)
    times = {name: Times() for name in runs}
    plain = Times()
    for k in range(case.rounds):
        before = block(sgd, batches, BESIDE, budget / 6)
        plain.rounds.append(before)
        for name, training in runs.items():
            method = methods[name]
            if name in failed or times[name].cut or (not method.ours and 0 < case.rounds // 2 <= k):
                continue
            steps = max(case.T, BLOCK) if method.scheduled else BLOCK
            try:
                taken = block(training, batches, steps, None if method.ours else budget, clear=CLEAR * statistics.fmean(before))
            except Exception as problem:
                failed[name] = reason(problem)
                continue
            after = block(sgd, batches, BESIDE, budget / 6)
            times[name].rounds.append(taken)
            times[name].beside.append(statistics.fmean(before + after))
            if len(taken) < steps:
                times[name].rounds, times[name].beside, times[name].cut = [taken], times[name].beside[-1:], len(taken)
            plain.rounds.append(after)
            before = after
        say(f"round {k + 1} of {case.rounds}")
    for training in (sgd, *runs.values()):
        training.close()
    shortest = min(map(len, plain.rounds))
    plain.rounds = [steps[:shortest] for steps in plain.rounds]
    plain.beside = [statistics.fmean(steps) for steps in plain.rounds]
    gc.collect()
    return {BASELINE.name: plain} | {name: of for name, of in times.items() if name not in failed}, failed


def unit(case: Case, methods: Mapping[str, Method], say: Say = lambda _: None, budget: float = BUDGET) -> dict[str, Any]:
    """One case as a record."""
    with torch.random.fork_rng():
        times, failed = measure(case, methods, say, budget)
    parameters = sum(p.numel() for p in case.model().parameters() if p.requires_grad)
    left_out = {name: why for name, why in case.without if name not in times}
    return {
        "kind": "steps", "case": case.name, "title": case.title, "T": case.T, "S": case.S, "parameters": parameters,
        "methods": {name: t.summary() for name, t in times.items()}, "failed": left_out | failed,
    }  # fmt: skip
