"""What decides a claim: measured quantities, and conditions on them, as data.

Every condition is one on a ratio of two quantities, or of one and a number: paired over seeds, as logarithms, with a 95 % interval
(`verdicts.Effect`). It holds if the whole interval lies where the claim wants it, does not hold if none of it does, and is undecided
otherwise. So each rule says in both directions what would refute it.

A run that diverged counts as ten times its first loss, at which a run is said to have exploded; where all of a method's did, the ratio is
infinite. Where the worse of two losses was found at the edge of its grid, beyond which it may get better, twice as much is asked; where
only the beginning of one has been run, as much more as the other would have gained by being chosen there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from scipy.stats.contingency import odds_ratio

from foof.study.paper.searches import timed
from foof.study.paper.verdicts import CONFIDENCE, Condition, Effect, Ruling, Spread, effect, spread
from foof.study.search.grids import EXPLODED, Tuned, exploded_until
from foof.study.train.setting import Record

Found = Mapping[str, Tuned]  # what each search of an experiment found; those without records are left out
EDGE = 2.0  # what a loss at the edge of its grid may still gain


def _mean_of(name: str, first: float = 0.0, last: float = 1.0) -> Callable[[Record, int | None], float]:
    """Mean of a measured series from one share of its values to another: 0.5 to 1 is its second half."""

    def value(record: Record, until: int | None = None) -> float:
        values = record.series.get(name, [])
        part = values[int(first * len(values)) : max(int(last * len(values)), 1)]
        return statistics.fmean(part) if part else math.nan

    return value


def _final(name: str) -> Callable[[Record, int | None], float]:
    def value(record: Record, until: int | None = None) -> float:
        return {**record.final, **record.cost}.get(name, math.nan)

    return value


SOON = 0.2  # the training loss that methods are timed to
RUNNING = 5  # logged losses that are averaged


def _steps_to_loss(record: Record, until: int | None = None) -> float:
    """Steps until the mean of `RUNNING` logged mini-batch losses is at most `SOON`; infinite if it never is."""
    steps, losses = record.series["step"], record.series["loss"]
    ends = range(RUNNING, len(losses) + 1)
    return next((steps[i - 1] for i in ends if statistics.fmean(losses[i - RUNNING : i]) <= SOON), math.inf)


def _damping(record: Record, until: int | None = None) -> float:
    return record.setting.damping if isinstance(record.setting.damping, float) else math.nan


def _error(name: str) -> Callable[[Record, int | None], float]:
    def value(record: Record, until: int | None = None) -> float:
        return 1 - record.final.get(name, math.nan)

    return value


def _averaged(record: Record, until: int | None = None) -> float:
    """The loss of averaged weights over the last tenth of the steps: infinite if the run diverged."""
    named = {**record.series, "loss": record.series.get("averaged_loss", [])}
    return replace(record, series=named).end_loss(until) if named["loss"] else math.nan


@dataclass(frozen=True)
class Quantity:
    """Something measured of a run: what to call it, how to get it from a record, how to print it."""

    title: str
    value: Callable[[Record, int | None], float]
    scale: float = 1.0
    unit: str = ""
    never: str = "diverged"  # what is said of a run for which it is infinite
    timed: bool = False  # in steps, which become seconds by the curve's timed runs: those of all curves are of one machine


QUANTITIES: dict[str, Quantity] = {
    "loss": Quantity("training loss", Record.end_loss),
    "train_loss": Quantity("loss on all training images", _final("train_loss")),
    "test_accuracy": Quantity("test accuracy", _final("test_accuracy"), 100, " %"),
    "test_error": Quantity("share of test images mistaken", _error("test_accuracy"), 100, " %"),
    "averaged_loss": Quantity("training loss of averaged weights", _averaged),
    "averaged_test_error": Quantity("share of test images mistaken, weights averaged", _error("averaged_test_accuracy"), 100, " %"),
    "similarity": Quantity("cosine with FOOF's update", _mean_of("similarity", first=0.5)),
    "decrease": Quantity("share of the batch's loss removed per update", _mean_of("decrease"), 100, " %"),
    "decrease_without": Quantity("the same without the second factor", _mean_of("decrease_without"), 100, " %"),
    "test_loss": Quantity("loss on the test images", _final("test_loss")),
    "cpu_to_loss": Quantity(
        f"time on one core to a loss of {SOON:g}", _steps_to_loss, unit=" s", never="did not get there", timed=True
    ),
    "damping": Quantity("λ", _damping),
    "lambda_A": Quantity("λ_A, geometric mean over layers", _mean_of("lambda_A", first=0.5)),
    "lambda_A_first": Quantity("λ_A in the first tenth of the run", _mean_of("lambda_A", last=0.1)),
    "sigma_drift": Quantity("relative change of Σ in 100 steps", _mean_of("sigma_drift", first=0.5)),
    "sigma_noise": Quantity("relative error of one mini-batch's Σ", _mean_of("sigma_noise", first=0.5)),
    "inverse_seconds": Quantity("time of an inverse", _final("inverse_seconds"), 1000, " ms"),
    "svd_seconds": Quantity("time of a singular value decomposition", _final("svd_seconds"), 1000, " ms"),
    "posterior_both": Quantity("test loss of the posterior with both factors", _final("posterior_both")),
    "posterior_first": Quantity("test loss of the posterior with the first factor alone", _final("posterior_first")),
    "cpu_per_step": Quantity("time per step on one core", _final("cpu_per_step"), 1000, " ms"),
}
LOSSES = ("loss", "averaged_loss")  # what settings are chosen by


def seconds_per_step(found: Found, label: str) -> float:
    """Of one core, from a curve's timed runs, of the seeds that all timed curves have: others may be of another machine."""
    seeds = [{r.setting.seed for r in found[short].records} for short in map(timed, found) if short in found]
    times = [r.cost.get("cpu_per_step", math.nan) for r in found[timed(label)].records if r.setting.seed in set.intersection(*seeds)]
    return statistics.fmean(times) if times else math.nan


@dataclass(frozen=True)
class Term:
    """A quantity of one of an experiment's curves."""

    label: str
    quantity: str = "loss"

    @property
    def needs(self) -> tuple[str, ...]:
        """The curves it is measured of."""
        return (self.label, timed(self.label)) if QUANTITIES[self.quantity].timed else (self.label,)

    def values(self, found: Found, until: int | None) -> dict[int, float]:
        """By seed."""
        quantity = QUANTITIES[self.quantity]
        scale = seconds_per_step(found, self.label) if quantity.timed else quantity.scale
        return {r.setting.seed: scale * quantity.value(r, until) for r in found[self.label].records}

    def counted(self, found: Found, until: int | None) -> dict[int, float]:
        """The same, as ratios count it: where some runs diverged, and not all, each of them counts as if it had just exploded."""
        values = self.values(found, until)
        if self.quantity in LOSSES and not all(map(math.isinf, values.values())):
            first = {r.setting.seed: (r.series.get("loss") or [math.inf])[0] for r in found[self.label].records}
            values = {seed: EXPLODED * first[seed] if math.isinf(x) else x for seed, x in values.items()}
        return values

    def spread(self, found: Found, until: int | None) -> Spread:
        return spread(self.values(found, until).values())

    def say(self, found: Found, until: int | None) -> str:
        found_here = self.spread(found, until)
        if math.isinf(found_here.mean):
            lost = sum(map(math.isinf, self.values(found, until).values()))
            return f"{self.label} {QUANTITIES[self.quantity].never} on {lost} of {found_here.n} seeds"
        return f"{self.label}: {found_here.say(QUANTITIES[self.quantity].unit)}"


@dataclass(frozen=True)
class Measured:
    """A condition after measurement."""

    text: str
    ruling: Ruling
    conditions: tuple[Condition, ...] = ()


class Rule(Protocol):
    """A condition: which curves it needs, what it says, and how records decide it."""

    @property
    def needs(self) -> tuple[str, ...]: ...
    def text(self) -> str: ...
    def judge(self, found: Found, until: int | None) -> Measured: ...


def _both(a: Term, b: Term, found: Found, until: int | None) -> int | None:
    """Curves of different lengths are compared where the shorter one ends; of different batch sizes, each at its own end, after as many
    epochs."""
    bests = [found[term.label].best for term in (a, b)]
    ends = {best.steps for best in bests}
    return until if len(ends) == 1 or len({best.batch_size for best in bests}) > 1 else min(*ends, until or min(ends))


def _at(term: Term, until: int | None) -> str:
    """Which step losses are of, where it is not the last one of both."""
    return f"; at step {until:,}" if until and term.quantity in LOSSES else ""


@dataclass(frozen=True)
class Between:
    """b is between `low` and `high` times a."""

    a: Term
    b: Term
    low: float = 1.0
    high: float = math.inf
    open_above: bool = False  # above `high` nothing is said: b may have been tuned badly

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.a.needs, *self.b.needs)))

    def text(self) -> str:
        if self.a.label == self.b.label:
            over = f"{QUANTITIES[self.b.quantity].title} over {QUANTITIES[self.a.quantity].title} of {self.a.label}"
        else:
            over = f"{QUANTITIES[self.a.quantity].title}: {self.b.label} over {self.a.label}"
        if self.high == math.inf:
            return f"{over} above {self.low:.3g}; refuted below"
        if self.low == 0:
            return f"{over} below {self.high:.3g}; refuted above"
        refuted = "refuted below, undecided above" if self.open_above else "refuted below and above"
        return f"{over} between {self.low:.3g} and {self.high:.3g}; {refuted}"

    def judge(self, found: Found, until: int | None) -> Measured:
        until = _both(self.a, self.b, found, until)
        e = effect(self.a.counted(found, until), self.b.counted(found, until))
        says = [t.say(found, until) if self.a.label != self.b.label else self._unlabelled(t, found, until) for t in (self.a, self.b)]
        condition = Condition(e, self.low, self.high, self.open_above)
        may_change = self.a.quantity in LOSSES and (self._may_still_gain(condition, found) or self._chosen_elsewhere(condition, found))
        ruling = Ruling.UNDECIDED if may_change else condition.ruling
        return Measured(f"{'; '.join(says)}; ratio {e}{_at(self.a, until)}", ruling, (condition,))

    def _may_still_gain(self, condition: Condition, found: Found) -> bool:
        """Would the ruling be another if the worse of the two, found at the edge of its grid, were twice as good?"""
        e = condition.effect
        worse, gain = (self.b, 1 / EDGE) if e.ratio > 1 else (self.a, EDGE)
        gained = replace(condition, effect=Effect(e.ratio * gain, e.low * gain, e.high * gain, e.n))
        return found[worse.label].on_edge and gained.ruling is not condition.ruling

    def _chosen_elsewhere(self, condition: Condition, found: Found) -> bool:
        """Of one there are beginnings only; would the ruling be another if the other had been chosen there too, not at the end?"""
        a, b = found[self.a.label], found[self.b.label]
        if a.to_the_end == b.to_the_end:
            return False
        gain = a.early_gain if a.to_the_end else 1 / b.early_gain
        e = condition.effect
        return replace(condition, effect=Effect(e.ratio * gain, e.low * gain, e.high * gain, e.n)).ruling is not condition.ruling

    def _unlabelled(self, term: Term, found: Found, until: int | None) -> str:
        quantity = QUANTITIES[term.quantity]
        return f"{quantity.title}: {term.spread(found, until).say(quantity.unit)}"


def lower(a: Term, b: Term, by: float = 1.0) -> Between:
    """`by` times a lies below b."""
    return Between(a, b, by)


def similar(a: Term, b: Term, factor: float) -> Between:
    """a and b differ by no more than a factor, in either direction."""
    return Between(a, b, 1 / factor, factor)


@dataclass(frozen=True)
class Widens:
    """b loses more by a change of setting than a does: ``b/b₀`` lies above ``a/a₀``, zeros being before the change."""

    a: Term
    b: Term
    a_0: Term
    b_0: Term

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.a, self.b, self.a_0, self.b_0

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(label for term in self.terms for label in term.needs))

    def text(self) -> str:
        title = QUANTITIES[self.a.quantity].title
        return f"{title}: {self.b.label} over {self.b_0.label}, above {self.a.label} over {self.a_0.label}; refuted below"

    def judge(self, found: Found, until: int | None) -> Measured:
        (a, costs_a), (b, costs_b) = (self._cost(*pair, found, until) for pair in ((self.a, self.a_0), (self.b, self.b_0)))
        e = effect(a, b)
        condition = Condition(e, 1.0, math.inf)
        sure = not any(found[t.label].on_edge for t in self.terms) and len({found[t.label].to_the_end for t in self.terms}) == 1
        says = f"{self.b.label}: {costs_b} times its loss at {self.b_0.label}; {self.a.label}: {costs_a} times that at {self.a_0.label}"
        return Measured(f"{says}; ratio {e}{_at(self.a, until)}", condition.ruling if sure else Ruling.UNDECIDED, (condition,))

    def _cost(self, after: Term, before: Term, found: Found, until: int | None) -> tuple[dict[int, float], Effect]:
        x, y = after.counted(found, until), before.counted(found, until)
        return {seed: x[seed] / y[seed] for seed in x.keys() & y.keys()}, effect(y, x)


@dataclass(frozen=True)
class Provided:
    """A rule that holds only where what is `given` does: where all methods are alike, that two of them are is no finding."""

    rule: Rule
    given: Rule

    @property
    def needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.rule.needs, *self.given.needs)))

    def text(self) -> str:
        return f"{self.rule.text()}; undecided unless {self.given.text().partition(';')[0]}"

    def judge(self, found: Found, until: int | None) -> Measured:
        measured, provided = self.rule.judge(found, until), self.given.judge(found, until)
        if measured.ruling is not Ruling.HOLDS or provided.ruling is Ruling.HOLDS:
            return measured
        return replace(measured, text=f"{measured.text} (but {provided.text})", ruling=Ruling.UNDECIDED)


@dataclass(frozen=True)
class Bound:
    """A quantity lies on the right side of a number."""

    a: Term
    value: float
    at_least: bool

    @property
    def needs(self) -> tuple[str, ...]:
        return self.a.needs

    def text(self) -> str:
        side = "at least" if self.at_least else "at most"
        return f"{QUANTITIES[self.a.quantity].title} of {self.a.label} {side} {self.value:g}{QUANTITIES[self.a.quantity].unit}"

    def judge(self, found: Found, until: int | None) -> Measured:
        values = self.a.values(found, until)
        e = effect(dict.fromkeys(values, self.value), values)
        condition = Condition(e, 1.0, math.inf) if self.at_least else Condition(e, 0.0, 1.0)
        return Measured(f"{self.a.say(found, until)}; ratio to it {e}", condition.ruling, (condition,))


@dataclass(frozen=True)
class ExplodesMore:
    """Of b's trials a larger share diverges or explodes than of a's.

    The ratio is that of the odds, conditional on how many explode of both, with Fisher's exact 95 % interval. Every trial of either search
    counts as one, by what it does in as many steps as all of them have, so searches should be alike.
    """

    a: str
    b: str

    @property
    def needs(self) -> tuple[str, ...]:
        return self.a, self.b

    def text(self) -> str:
        return f"odds of a trial to diverge or explode: {self.b} over {self.a} above 1; refuted below"

    def judge(self, found: Found, until: int | None) -> Measured:
        until = min((r.setting.steps for label in self.needs for r in found[label].tried), default=0)
        lost, kept = zip(*(self._count(found[label], until) for label in (self.b, self.a)), strict=True)
        e = self._effect(lost, kept)
        says = [f"{label}: {x} of {x + y} trials" for label, x, y in zip((self.b, self.a), lost, kept, strict=True)]
        condition = Condition(e, 1.0, math.inf)
        said = f"{'; '.join(says)} diverge or explode within {until:,} steps; ratio of the odds {e}"
        return Measured(said, condition.ruling, (condition,))

    def _count(self, tuned: Tuned, until: int) -> tuple[int, int]:
        lost = sum(exploded_until(record, until) for record in tuned.tried)
        return lost, len(tuned.tried) - lost

    def _effect(self, lost: tuple[int, ...], kept: tuple[int, ...]) -> Effect:
        n = min(x + y for x, y in zip(lost, kept, strict=True))
        if not sum(lost) or not sum(kept):
            return Effect(math.nan, 0.0, math.inf, n)
        found = odds_ratio([lost, kept])
        interval = found.confidence_interval(CONFIDENCE)
        return Effect(float(found.statistic), float(interval.low), float(interval.high), n)


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
        conditions = tuple(c for part in parts for c in part.conditions)
        return Measured("\n".join(part.text for part in parts), together([part.ruling for part in parts]), conditions)


def together(rulings: list[Ruling]) -> Ruling:
    """One that fails fails all; all must hold for all to hold."""
    if Ruling.FAILS in rulings:
        return Ruling.FAILS
    return Ruling.HOLDS if all(r is Ruling.HOLDS for r in rulings) else Ruling.UNDECIDED


def decide(rule: Rule, found: Found, until: int | None) -> Measured:
    """Judge a rule with whatever there is: without records it is not run; by a part of a search or of its seeds, or by the seed that
    selected, undecided."""
    missing = [label for label in rule.needs if label not in found]
    if missing:
        return Measured(f"not run at this preset: no records of {', '.join(missing)}", Ruling.NOT_RUN)
    measured = rule.judge(found, until)
    there = {label: found[label] for label in rule.needs}
    for why, labels in (
        ("only the seed that selects has been run", [k for k, t in there.items() if t.selecting]),
        ("the search for settings is not finished", [k for k, t in there.items() if not (t.searched and t.grid_done)]),
        ("not all seeds that report have been run", [k for k, t in there.items() if len(t.records) < t.seeds]),
    ):
        if labels:
            return replace(measured, text=f"{measured.text} ({why}: {', '.join(labels)})", ruling=Ruling.UNDECIDED)
    notes = {
        "at the edge of its grid": [k for k, t in there.items() if t.on_edge],
        "not run to the end of training": [k for k, t in there.items() if not t.to_the_end],
    }
    said = "".join(f" ({note}: {', '.join(labels)})" for note, labels in notes.items() if labels)
    return replace(measured, text=measured.text + said)
