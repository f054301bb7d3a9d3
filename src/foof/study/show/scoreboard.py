"""All verdicts at one look: every claim a cell, coloured, with its effect and interval as a small bar."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from foof.study.paper.claims import ABOUT
from foof.study.paper.notes import RELEASED
from foof.study.paper.verdicts import Condition, Ruling, Verdict, deciding

CAVEATS = {"released": RELEASED}  # of a group of claims
MARKS = {Ruling.HOLDS: "✓", Ruling.FAILS: "✕", Ruling.UNDECIDED: "?", Ruling.NOT_RUN: "–"}
CLASSES = {Ruling.HOLDS: "holds", Ruling.FAILS: "fails", Ruling.UNDECIDED: "undecided", Ruling.NOT_RUN: "not-run"}
BAR, TALL = 96, 14  # of a bar
DECADES = 2.0  # a bar shows ratios from 1/100 to 100
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; } .name { font-weight: 600; } .muted { fill: #57606a; }
.title { font-size: 14px; font-weight: 600; }
.cell.holds { fill: #d3f0df; } .cell.fails { fill: #fadbd8; } .cell.undecided { fill: #f7ebc8; }
.want { fill: #24292f; opacity: .13; } .axis { stroke: #57606a; stroke-width: .8; } .interval { stroke: #24292f; stroke-width: 2; }
.ratio { fill: #24292f; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .muted { fill: #9da7b1; }
.cell.holds { fill: #17402a; } .cell.fails { fill: #55201c; } .cell.undecided { fill: #453712; }
.want { fill: #e6edf3; } .interval { stroke: #e6edf3; } .ratio { fill: #e6edf3; } .axis { stroke: #9da7b1; } }
"""


@dataclass(frozen=True)
class Group:
    """Claims of one kind: what they are about, and their cells; what has not been run is counted, not shown."""

    title: str
    verdicts: list[Verdict]
    not_run: int
    note: str = ""  # what is to be said with each of them

    @property
    def counts(self) -> str:
        """As in "5 hold, 1 not, 2 undecided, 3 not run"."""
        n = {r: sum(v.ruling is r for v in self.verdicts) for r in Ruling}
        said = [f"{n[Ruling.HOLDS]} hold", f"{n[Ruling.FAILS]} not", f"{n[Ruling.UNDECIDED]} undecided"]
        return ", ".join([*said, *([f"{self.not_run} not run"] if self.not_run else [])])


def groups(verdicts: Sequence[Verdict]) -> list[Group]:
    """By whose claim it is; the order of the paper within."""
    found = []
    for about, title in ABOUT.items():
        mine = [v for v in verdicts if v.about == about]
        run = [v for v in mine if v.ruling is not Ruling.NOT_RUN]
        if mine:
            found.append(Group(title, run, len(mine) - len(run), CAVEATS.get(about, "")))
    return found


def bar(c: Condition, x: float = 0.0, y: float = 0.0) -> str:
    """A ratio and its interval on a logarithmic axis with 1 in the middle; where the claim wants it is shaded."""

    def px(ratio: float) -> float:
        decades = -DECADES if ratio <= 0 else DECADES if math.isinf(ratio) else math.log10(ratio)
        return x + BAR * min(max(0.5 + decades / (2 * DECADES), 0.0), 1.0)

    e, middle = c.effect, y + TALL / 2
    parts = [
        f'<rect class="want" x="{px(c.low):.1f}" y="{y:.1f}" width="{px(c.high) - px(c.low):.1f}" height="{TALL}"/>',
        f'<line class="axis" x1="{x + BAR / 2:.1f}" x2="{x + BAR / 2:.1f}" y1="{y:.1f}" y2="{y + TALL:.1f}"/>',
        f'<line class="interval" x1="{px(e.low):.1f}" x2="{px(e.high):.1f}" y1="{middle:.1f}" y2="{middle:.1f}"/>',
    ]
    if not math.isnan(e.ratio):
        parts.append(f'<circle class="ratio" cx="{px(e.ratio):.1f}" cy="{middle:.1f}" r="3.5"/>')
    return "".join(parts)


def bar_svg(c: Condition | None) -> str:
    """A bar alone, for a page; empty where nothing was measured."""
    if c is None:
        return ""
    size = f'viewBox="-4 0 {BAR + 8} {TALL}" width="{BAR + 8}" height="{TALL}"'
    return f'<svg class="effect" {size} role="img" aria-label="{escape(str(c.effect))}">{bar(c)}</svg>'


def brief(c: Condition | None, interval: bool = True) -> str:
    """A ratio, and its interval, in few letters."""
    if c is None or math.isnan(c.effect.ratio):
        return ""
    e = c.effect
    if e.low == e.high and (math.isinf(e.ratio) or not e.ratio):
        return "diverges" if e.ratio else "other diverges"
    ratio, low, high = e.numbers(2)
    return f"{ratio}×" + ((f" ({low}–{high})" if e.n > 1 else " (n = 1)") if interval else "")


WIDTH, COLUMNS, CELL, GAP = 880, 3, 50, 6


LETTER = 7.2  # width of one, at most, of a name and of a place


def scoreboard_svg(verdicts: Sequence[Verdict], heading: str) -> str:
    """The whole board as one file. A place that would run into a name is left to the tooltip."""
    wide = (WIDTH - (COLUMNS + 1) * GAP) / COLUMNS
    parts, y = [f'<text class="title" x="{GAP}" y="20">{escape(heading)}</text>'], 32.0
    for group in groups(verdicts):
        parts.append(f'<text x="{GAP}" y="{y + 16}"><tspan class="name">{escape(group.title)}</tspan>: {escape(group.counts)}</text>')
        y += 24
        for i, v in enumerate(group.verdicts):
            x, top = GAP + (i % COLUMNS) * (wide + GAP), y + (i // COLUMNS) * (CELL + GAP)
            c, name, place = deciding(v), v.id.replace("-", " "), _place(v.where)
            fits = LETTER * (len(name) + len(place) + 4) < wide
            parts += [
                f"<g><title>{escape(v.where)}: {escape(v.claim)} ({escape(v.ruling)})</title>",
                f'<rect class="cell {CLASSES[v.ruling]}" x="{x:.1f}" y="{top:.1f}" width="{wide:.1f}" height="{CELL}" rx="6"/>',
                f'<text class="name" x="{x + 8:.1f}" y="{top + 19:.1f}">{MARKS[v.ruling]} {escape(name)}</text>',
                f'<text class="muted" x="{x + wide - 8:.1f}" y="{top + 19:.1f}" text-anchor="end">{escape(place if fits else "")}</text>',
                f'<text class="muted" x="{x + 8:.1f}" y="{top + 39:.1f}">{escape(brief(c))}</text>',
                bar(c, x + wide - BAR - 10, top + 28) if c else "", "</g>",
            ]  # fmt: skip
        y += math.ceil(len(group.verdicts) / COLUMNS) * (CELL + GAP) + 8
    box = f'viewBox="0 0 {WIDTH} {y:.0f}" role="img" aria-label="{escape(heading)}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', f"<style>{STYLE}</style>", *parts, "</svg>", ""])


def _place(where: str) -> str:
    """The figure alone, or else the section; of which size a board is stands above it."""
    parts = where.removesuffix(" (reduced)").split(", ")
    return next((part for part in reversed(parts) if part.startswith("Fig")), parts[0])
