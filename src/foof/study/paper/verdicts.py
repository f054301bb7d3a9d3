"""A claim of the paper after measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from foof.study.train.setting import Record


class Ruling(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_RUN = "not run"  # at this preset, or not yet


@dataclass(frozen=True)
class Verdict:
    """One row of the report's first table."""

    id: str
    where: str  # in the paper: "Fig. 1A", "Appendix F"
    claim: str  # what it says, in our words
    measured: str  # the measured quantity, with its spread
    rule: str  # what had to be true for the claim to hold
    ruling: Ruling
    section: str = ""  # the report's section that shows it


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (n − 1; 0 for one value) of a quantity over seeds.

    Where all seeds diverged the mean is infinite and the deviation 0; where only some did, both are infinite.
    """

    mean: float
    deviation: float
    n: int

    def say(self, unit: str = "") -> str:
        if math.isinf(self.mean):
            return f"diverged{' on some seeds' if self.deviation else ''} (n = {self.n})"
        around = f" ± {self.deviation:.1g}" if self.n > 1 else ""
        return f"{self.mean:.3g}{around}{unit} (n = {self.n})"

    def __str__(self) -> str:
        return self.say()


def spread(values: Iterable[float]) -> Spread:
    xs = list(values)
    if not xs or any(math.isnan(x) for x in xs):
        return Spread(math.nan, math.nan, len(xs))
    if lost := [x for x in xs if math.isinf(x)]:
        return Spread(lost[0], 0.0 if len(lost) == len(xs) else math.inf, len(xs))
    return Spread(statistics.fmean(xs), statistics.stdev(xs) if len(xs) > 1 else 0.0, len(xs))


def of(records: Iterable[Record], name: str) -> Spread:
    """The spread of a final value (`train_loss`, `test_accuracy`, ...) or cost (`seconds_per_step`, ...) over records."""
    return spread({**r.final, **r.cost}.get(name, math.nan) for r in records)


def lower(a: Spread, b: Spread) -> Ruling:
    """Whether `a` lies below `b` by more than both deviations together; undecided where the ranges overlap."""
    if math.isnan(a.mean) or math.isnan(b.mean) or a.mean == b.mean:
        return Ruling.UNDECIDED
    if abs(a.mean - b.mean) <= a.deviation + b.deviation:
        return Ruling.UNDECIDED
    return Ruling.HOLDS if a.mean < b.mean else Ruling.FAILS
