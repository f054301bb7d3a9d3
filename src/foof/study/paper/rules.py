"""What decides a claim: measured quantities, and conditions on them, as data.

A condition holds, or does not, only by more than the deviations over seeds of both sides together; otherwise it is undecided.
Where there is one seed only, a quarter of the value stands in for its deviation. Where the worse of two losses was found at the
edge of its grid, beyond which it may get better, twice as much is asked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from foof.study.paper.verdicts import Ruling, Spread, lower, spread
from foof.study.search.grids import Tuned
from foof.study.train.setting import Record

Found = Mapping[str, Tuned]  # what each search of an experiment found; those without records are left out
ONE_SEED = 0.25  # stands in for a relative deviation nobody has measured
EDGE = 2.0  # what a loss at the edge of its grid may still gain


def _mean_of(name: str, late: bool) -> Callable[[Record, int | None], float]:
    """Mean of a measured series: all of it, or its second half."""

    def value(record: Record, until: int | None = None) -> float:
        values = record.series.get(name, [])
        return statistics.fmean(values[len(values) // 2 if late else 0 :]) if values else math.nan

    return value


def _final(name: str) -> Callable[[Record, int | None], float]:
    def value(record: Record, until: int | None = None) -> float:
        return {**record.final, **record.cost}.get(name, math.nan)

    return value


@dataclass(frozen=True)
class Quantity:
    """Something measured of a run: what to call it, how to get it from a record, how to print it."""

    title: str
    value: Callable[[Record, int | None], float]
    scale: float = 1.0
    unit: str = ""


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity("training loss", Record.end_loss),
    "train_loss": Quantity("loss on all training images", _final("train_loss")),
    "test_accuracy": Quantity("test accuracy", _final("test_accuracy"), 100, " %"),
    "similarity": Quantity("cosine with FOOF's update", _mean_of("similarity", late=True)),
    "decrease": Quantity("share of the batch's loss removed per update", _mean_of("decrease", late=False), 100, " %"),
    "decrease_without": Quantity("the same without the second factor", _mean_of("decrease_without", late=False), 100, " %"),
    "cpu_per_step": Quantity("time per step on one core", _final("cpu_per_step"), 1000, " ms"),
}


@dataclass(frozen=True)
class Term:
    """A quantity of one of an experiment's curves."""

    label: str
    quantity: str = "loss"

    def spread(self, found: Found, until: int | None) -> Spread:
        quantity = QUANTITIES[self.quantity]
        return spread(quantity.scale * quantity.value(r, until) for r in found[self.label].records)

    def say(self, found: Found, until: int | None) -> str:
        found_here = self.spread(found, until)
        if math.isinf(found_here.mean):
            lost = sum(math.isinf(QUANTITIES[self.quantity].value(r, until)) for r in found[self.label].records)
            return f"{self.label} diverged on {lost} of {found_here.n} seeds"
        return f"{self.label}: {found_here.say(QUANTITIES[self.quantity].unit)}"


@dataclass(frozen=True)
class Measured:
    """A condition after measurement."""

    text: str
    ruling: Ruling


class Rule(Protocol):
    """A condition: which curves it needs, what it says, and how records decide it."""

    @property
    def needs(self) -> tuple[str, ...]: ...
    def text(self) -> str: ...
    def judge(self, found: Found, until: int | None) -> Measured: ...


def _with_margin(s: Spread) -> Spread:
    return replace(s, deviation=ONE_SEED * abs(s.mean)) if s.n == 1 and math.isfinite(s.mean) else s


def _times(s: Spread, factor: float) -> Spread:
    return replace(s, mean=factor * s.mean, deviation=factor * s.deviation)


def _both(a: Term, b: Term, found: Found, until: int | None) -> int | None:
    """Curves of different lengths are compared where the shorter one ends."""
    ends = {found[term.label].best.steps for term in (a, b)}
    return until if len(ends) == 1 else min(*ends, until or min(ends))


def _at(term: Term, until: int | None) -> str:
    """Which step losses are of, where it is not the last one of both."""
    return f"; at step {until:,}" if until and term.quantity == "loss" else ""


def _below(a: Term, b: Term, by: float, found: Found, until: int | None) -> Ruling:
    """Does `by` times a lie below b?"""
    left, right = a.spread(found, until), b.spread(found, until)
    ruling = lower(_times(_with_margin(left), by), _with_margin(right))
    if a.quantity != "loss" or ruling is Ruling.UNDECIDED:
        return ruling
    worse, better = (right.mean, by * left.mean) if ruling is Ruling.HOLDS else (by * left.mean, right.mean)
    at_edge = found[(b if ruling is Ruling.HOLDS else a).label].on_edge
    return Ruling.UNDECIDED if at_edge and math.isfinite(worse) and worse < EDGE * better else ruling


@dataclass(frozen=True)
class Lower:
    """`by` times a lies below b."""

    a: Term
    b: Term
    by: float = 1.0

    @property
    def needs(self) -> tuple[str, ...]:
        return self.a.label, self.b.label

    def text(self) -> str:
        factor = "" if self.by == 1 else f"{self.by:.3g} × "
        title = QUANTITIES[self.a.quantity].title
        if self.a.label == self.b.label:
            return f"{factor}{title} of {self.a.label} below {QUANTITIES[self.b.quantity].title}"
        return f"{title}: {factor}{self.a.label} below {self.b.label}"

    def judge(self, found: Found, until: int | None) -> Measured:
        until = _both(self.a, self.b, found, until)
        a, b = self.a.spread(found, until), self.b.spread(found, until)
        ratio = b.mean / a.mean if a.mean and math.isfinite(a.mean) else math.nan
        says = [t.say(found, until) if self.a.label != self.b.label else self._unlabelled(t, found, until) for t in (self.a, self.b)]
        text = "; ".join([*says, *([] if math.isnan(ratio) or math.isinf(ratio) else [f"ratio {ratio:.3g}"])])
        return Measured(text + _at(self.a, until), _below(self.a, self.b, self.by, found, until))

    def _unlabelled(self, term: Term, found: Found, until: int | None) -> str:
        quantity = QUANTITIES[term.quantity]
        return f"{quantity.title}: {term.spread(found, until).say(quantity.unit)}"


@dataclass(frozen=True)
class Similar:
    """a and b differ by no more than a factor."""

    a: Term
    b: Term
    within: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.a.label, self.b.label

    def text(self) -> str:
        return f"{QUANTITIES[self.a.quantity].title}: {self.a.label} and {self.b.label} within a factor of {self.within:g}"

    def judge(self, found: Found, until: int | None) -> Measured:
        until = _both(self.a, self.b, found, until)
        a, b = self.a.spread(found, until), self.b.spread(found, until)
        ratio = b.mean / a.mean if a.mean else math.nan
        text = f"{self.a.say(found, until)}; {self.b.say(found, until)}; ratio {ratio:.3g}{_at(self.a, until)}"
        ways = [_below(x, y, 1 / self.within, found, until) for x, y in ((self.a, self.b), (self.b, self.a))]
        return Measured(text, together(ways))


@dataclass(frozen=True)
class Between:
    """The ratio b/a lies between two numbers. For costs, of which one run is enough."""

    a: Term
    b: Term
    low: float
    high: float

    @property
    def needs(self) -> tuple[str, ...]:
        return self.a.label, self.b.label

    def text(self) -> str:
        title = QUANTITIES[self.a.quantity].title
        return f"{title}: {self.b.label} over {self.a.label} between {self.low:g} and {self.high:g}"

    def judge(self, found: Found, until: int | None) -> Measured:
        a, b = self.a.spread(found, until), self.b.spread(found, until)
        ratio = b.mean / a.mean
        text = f"{self.b.say(found, until)}; {self.a.say(found, until)}; ratio {ratio:.3g}"
        if math.isnan(ratio):
            return Measured(text, Ruling.UNDECIDED)
        return Measured(text, Ruling.HOLDS if self.low <= ratio <= self.high else Ruling.FAILS)


@dataclass(frozen=True)
class Bound:
    """A quantity lies on the right side of a number."""

    a: Term
    value: float
    at_least: bool

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.a.label,)

    def text(self) -> str:
        side = "at least" if self.at_least else "at most"
        return f"{QUANTITIES[self.a.quantity].title} of {self.a.label} {side} {self.value:g}{QUANTITIES[self.a.quantity].unit}"

    def judge(self, found: Found, until: int | None) -> Measured:
        a = _with_margin(self.a.spread(found, until))
        if math.isnan(a.mean) or abs(a.mean - self.value) < a.deviation:
            ruling = Ruling.UNDECIDED
        else:
            ruling = Ruling.HOLDS if (a.mean >= self.value) == self.at_least else Ruling.FAILS
        return Measured(self.a.say(found, until), ruling)


@dataclass(frozen=True)
class All:
    """All of several conditions."""

    rules: tuple[Rule, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for rule in self.rules for label in rule.needs))

    def text(self) -> str:
        return "; and ".join(rule.text() for rule in self.rules)

    def judge(self, found: Found, until: int | None) -> Measured:
        parts = [rule.judge(found, until) for rule in self.rules]
        return Measured("\n".join(part.text for part in parts), together([part.ruling for part in parts]))


def together(rulings: list[Ruling]) -> Ruling:
    """One that fails fails all; all must hold for all to hold."""
    if Ruling.FAILS in rulings:
        return Ruling.FAILS
    return Ruling.HOLDS if all(r is Ruling.HOLDS for r in rulings) else Ruling.UNDECIDED


def decide(rule: Rule, found: Found, until: int | None) -> Measured:
    """Judge a rule with whatever there is: without records it is not run, without a search undecided."""
    missing = [label for label in rule.needs if label not in found]
    if missing:
        return Measured(f"not run at this preset: no records of {', '.join(missing)}", Ruling.NOT_RUN)
    measured = rule.judge(found, until)
    unsearched = [label for label in rule.needs if not found[label].searched]
    if unsearched:
        return Measured(f"{measured.text} (the search for settings is not finished)", Ruling.UNDECIDED)
    edges = [label for label in rule.needs if found[label].on_edge]
    note = f" (at the edge of its grid: {', '.join(edges)})" if edges else ""
    return Measured(measured.text + note, measured.ruling)
