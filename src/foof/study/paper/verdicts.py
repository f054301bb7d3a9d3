"""A claim of the paper after measurement."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from scipy.special import stdtrit

from foof.study.train.setting import Record


class Ruling(StrEnum):
    HOLDS = "holds"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    NOT_RUN = "not run"  # at this preset, or not yet


@dataclass(frozen=True)
class Verdict:
    """One row of the report's table of claims."""

    id: str
    where: str  # in the paper: "Fig. 1A", "Appendix F"
    claim: str  # what it says, in our words
    measured: str  # the measured quantity, with its spread
    rule: str  # what had to be true for the claim to hold
    ruling: Ruling
    section: str = ""  # the report's section that shows it
    about: str = "paper"  # whose claim it is: see `claims.ABOUT`
    conditions: tuple[Condition, ...] = ()
    changed: str = ""  # when and why the rule was changed after runs had been seen


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


@dataclass(frozen=True)
class Effect:
    """How many times b is a: the geometric mean of the ratios b/a of runs with the same seed, and its 95 % interval.

    The interval is that of Student's t for the mean of ``log(b/a)``. With one pair it is everything. Where all of b (or of a) diverged
    the ratio is infinite (or 0) for certain; where only some did, nothing is known.
    """

    ratio: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if not self.n or math.isnan(self.ratio):
            return f"unknown (n = {self.n})"
        if self.low == self.high and self.n > 1 and (math.isinf(self.ratio) or self.ratio == 0):
            return "diverges" if self.ratio else "the other diverges"
        ratio, low, high = self.numbers(3)
        return f"{ratio}{f', 95 % interval {low}–{high}' if self.n > 1 else ''} (n = {self.n})"

    def numbers(self, digits: int) -> tuple[str, str, str]:
        """Ratio, low and high, in as many digits or as many as it takes to tell them apart, up to six."""
        values = self.ratio, self.low, self.high
        while digits < 6 and len({f"{v:.{digits}g}" for v in values}) < len(set(values)):
            digits += 1
        ratio, low, high = (f"{v:.{digits}g}" for v in values)
        return _plain(ratio), _plain(low), _plain(high)


def _plain(number: str) -> str:
    """480, not 4.8e+02."""
    return f"{float(number):.0f}" if "e+" in number and float(number) < 1e6 else number


@dataclass(frozen=True)
class Condition:
    """A ratio, and between which numbers the claim wants it."""

    effect: Effect
    low: float
    high: float
    open_above: bool = False  # above `high` nothing is said

    @property
    def ruling(self) -> Ruling:
        """It holds if all of the interval lies there, and does not if none of it does."""
        if math.isnan(self.effect.ratio):
            return Ruling.UNDECIDED
        if self.low <= self.effect.low and self.effect.high <= self.high:
            return Ruling.HOLDS
        above = self.effect.low > self.high and not self.open_above
        return Ruling.FAILS if self.effect.high < self.low or above else Ruling.UNDECIDED


CONFIDENCE = 0.95


def effect(a: Mapping[int, float], b: Mapping[int, float]) -> Effect:
    """The effect from values by seed: seeds that both have are paired."""
    pairs = [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]
    n = len(pairs)
    if not n or any(math.isnan(x) or x <= 0 for pair in pairs for x in pair):
        return Effect(math.nan, 0.0, math.inf, n)
    lost = [(math.isinf(x), math.isinf(y)) for x, y in pairs]
    if any(x or y for x, y in lost):
        certain = {(False, True): math.inf, (True, False): 0.0}.get(lost[0]) if len(set(lost)) == 1 and n > 1 else None
        return Effect(math.nan, 0.0, math.inf, n) if certain is None else Effect(certain, certain, certain, n)
    logs = [math.log(y / x) for x, y in pairs]
    mean = statistics.fmean(logs)
    if n == 1:
        return Effect(math.exp(mean), 0.0, math.inf, 1)
    half = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * statistics.stdev(logs) / math.sqrt(n)
    return Effect(math.exp(mean), math.exp(mean - half), math.exp(min(mean + half, 700.0)), n)


def deciding(v: Verdict) -> Condition | None:
    """Of several conditions the one that the ruling hangs on: a broken one first, then an undecided one."""
    order = (Ruling.FAILS, Ruling.UNDECIDED, Ruling.HOLDS)
    return min(v.conditions, key=lambda c: order.index(c.ruling), default=None)
