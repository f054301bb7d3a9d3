"""How each curve came by its settings, counted from the records: equal searches can be seen to be equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foof.study.paper.experiments import Outcome
from foof.study.search.grids import Tuned, exploded


@dataclass(frozen=True)
class Trials:
    """One curve's search: its settings tried, out of those planned, and how they fared."""

    experiment: str
    where: str
    curve: str
    planned: int
    run: int
    lost: int  # diverged or exploded
    to_the_end: int  # of those tried, as long as the longest
    compared_at: int | None  # step; None: at their ends
    on_edge: bool
    best: str
    seeds: int  # that report
    decided: bool = True  # not: what leads is still to be vetted, or others to be run to the end

    @property
    def state(self) -> str:
        if self.run < self.planned:
            return f"{self.planned - self.run} to do"
        if not self.decided:
            return "not decided yet"
        return "best at an edge" if self.on_edge else "best inside"


def trials(outcomes: Sequence[Outcome]) -> list[Trials]:
    """Of every curve whose settings were searched."""
    return [_trials(o, label, t) for o in outcomes for label, t in o.found.items() if t.planned > 1]


def _trials(o: Outcome, label: str, t: Tuned) -> Trials:
    best = f"{t.best.lr:g}" + ("" if t.best.damping is None else f", {t.best.damping:g}" if isinstance(t.best.damping, float) else ", auto")
    longest = max((t.best.steps, *(r.setting.steps for r in t.tried)))
    momentum = t.best.option("momentum") if t.best.optimizer == "sgd" else None
    return Trials(
        o.experiment.id, o.experiment.where, label, t.planned, len(t.tried), sum(map(exploded, t.tried)),
        sum(r.setting.steps == longest for r in t.tried), t.grid_steps, t.on_edge,
        best + (f", momentum {momentum:g}" if momentum else ""), 0 if t.selecting else len(t.records),
        t.grid_done,
    )  # fmt: skip
