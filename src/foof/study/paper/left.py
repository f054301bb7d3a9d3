"""What is not decided at a preset, and what it would take to run the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foof.study.paper.experiments import Outcome
from foof.study.paper.verdicts import Ruling
from foof.study.search.estimate import hours


@dataclass(frozen=True)
class Left:
    """An experiment with statements that are not decided, and the runs that it lacks."""

    experiment: str
    where: str
    not_run: tuple[str, ...]  # ids of claims
    undecided: tuple[str, ...]
    runs: int
    hours: float  # of one core

    @property
    def said(self) -> str:
        """The statements in a few words."""
        parts = [f"{kind}: {', '.join(ids)}" for kind, ids in (("not run", self.not_run), ("undecided", self.undecided)) if ids]
        return "; ".join(parts)


def left(outcomes: Sequence[Outcome]) -> list[Left]:
    """By experiment. A run that several lack is counted in each; `total` counts it once."""
    found = []
    for o in outcomes:
        not_run, undecided = (tuple(v.id for v in o.verdicts if v.ruling is r) for r in (Ruling.NOT_RUN, Ruling.UNDECIDED))
        if not_run or undecided:
            found.append(Left(o.experiment.id, o.experiment.where, not_run, undecided, len(o.left), hours(o.left)))
    return found


def total(outcomes: Sequence[Outcome]) -> tuple[int, float]:
    """Runs that are left, and their core-hours."""
    runs = tuple(dict.fromkeys(s for o in outcomes for s in o.left))
    return len(runs), hours(runs)
