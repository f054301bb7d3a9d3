"""Verdicts at the paper's scale that are not what they were before searches were equal, settings chosen at the end of training, and claims
judged by intervals: which, and why, from the records."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foof.study.paper.verdicts import Ruling, Verdict, deciding

UNTIL = "2026-11-16, 15:20 UTC"  # of which `before.json` is: rulings, and ratios of means over the seeds, one of which had chosen
NOTES = re.compile(r"\((the search for settings is not finished|only the seed that selects has been run|not run to the end of training|"
                   r"not all seeds that report have been run):")


@cache
def before() -> dict[str, dict[str, str | bool]]:
    """Ruling and ratio of every claim then, by id; `early`: settings were chosen, and losses compared, at step 1,800."""
    return json.loads(Path(__file__).with_name("before.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Change:
    """A verdict that was another."""

    verdict: Verdict
    was: str
    ratio: str  # then
    why: str

    @property
    def now(self) -> str:
        c = deciding(self.verdict)
        return str(c.effect) if c else ""


def changes(verdicts: Sequence[Verdict]) -> list[Change]:
    """Of claims that were judged then, and are judged now, those whose ruling is another."""
    found = []
    for v in verdicts:
        then = before().get(v.id)
        if then and v.ruling is not Ruling.NOT_RUN and then["ruling"] != v.ruling:
            found.append(Change(v, str(then["ruling"]), str(then["ratio"]), " ".join(_reasons(v, bool(then["early"])))))
    return found


def _reasons(v: Verdict, early: bool) -> list[str]:
    """What is different now, as far as the verdict tells."""
    said = [f"The rule is another. {v.changed}"] if v.changed else []
    if early:
        said.append("Settings were chosen at step 1,800.")
    c, open_ = deciding(v), dict.fromkeys(NOTES.findall(v.measured))
    if open_:
        said.append(f"{'; '.join(open_).capitalize()}.")
    elif c and c.open_above and c.effect.low > c.high:
        said.append("What is as much worse decides nothing.")
    elif v.ruling is Ruling.UNDECIDED and c and c.ruling is Ruling.UNDECIDED:
        said.append(f"The interval of {c.effect.n} seeds that have not chosen reaches to both sides.")
    elif v.ruling is Ruling.UNDECIDED:
        said.append("The worse side was found at the edge of its grid, or compared before the end, and could still gain as much.")
    elif not v.changed:
        said.append("Settings from searches of equal size, other seeds, an interval in place of deviations.")
    return said
