"""Curves and bars as a small SVG file, for pages that cannot run a script: it follows the reader's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from foof.study.paper.verdicts import Spread
from foof.study.show.plots import Curve, colour, family_colour, top_of

WIDTH, HEIGHT = 860, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 250, 44, 48
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .title { font-size: 15px; font-weight: 600; }
.grid { stroke: #d0d7de; stroke-width: 1; } .mark { stroke: #24292f; stroke-width: 1.5; } .muted { fill: #57606a; }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3; } .grid { stroke: #30363d; } .mark { stroke: #e6edf3; } .muted { fill: #9da7b1; } }
"""


@dataclass(frozen=True)
class Scale:
    """Values to vertical places."""

    low: float  # of the logarithm, if log
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float], log: bool) -> Scale:
        shown = [math.log10(v) if log else v for v in values if math.isfinite(v) and (v > 0 or not log)] or [0.0, 1.0]
        return cls(min(shown), max(shown), log)

    def at(self, value: float) -> float:
        v = (math.log10(value) if value > 0 else self.low) if self.log else value
        share = (v - self.low) / (self.high - self.low or 1)
        return HEIGHT - BOTTOM - min(max(share, 0), 1) * (HEIGHT - TOP - BOTTOM)

    def ticks(self) -> list[float]:
        """{1, 3}·10^i (powers alone over many decades), or about five round numbers."""
        if self.log:
            digits = (1, 3) if self.high - self.low < 4 else (1,)
            all_ = [d * 10.0**i for i in range(math.floor(self.low), math.ceil(self.high) + 1) for d in digits]
            return [v for v in all_ if self.low - 1e-9 <= math.log10(v) <= self.high + 1e-9]
        step = next((d * 10.0**k for k in range(-6, 9) for d in (1, 2, 5) if (self.high - self.low) / (d * 10.0**k) <= 6), 1.0)
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, int(self.high // step) + 1)]


def curves_svg(
    curves: Sequence[Curve], heading: str, y: str = "training loss", log: bool = True, published: Sequence[Curve] = (), x: str = "step"
) -> str:
    """Means as lines and mean ± deviation as bands, published curves dotted; labels at the ends of the lines. What explodes runs along the
    top of a log axis."""
    curves, published = [c for c in curves if c.steps], [c for c in published if c.steps]
    everything = [*curves, *published]
    top = top_of(curves) if log else math.inf
    scale = Scale.over([min(v, top) for c in everything for v in c.mean], log)
    last = max((c.steps[-1] for c in everything), default=1)

    def px(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def points(xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{px(a):.1f},{scale.at(b):.1f}" for a, b in zip(xs, ys, strict=True))

    parts = [*_frame(heading, y, scale), *_steps(last, px, x)]
    for c in published:
        line = points(c.steps, c.mean)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour(c.label)}" stroke-width="1.5" stroke-dasharray="2 4"/>')
    for c in curves:
        band = points([*c.steps, *c.steps[::-1]], [*c.high, *c.low[::-1]])
        parts.append(f'<polygon points="{band}" fill="{colour(c.label)}" opacity="0.18"/>')
        parts.append(f'<polyline points="{points(c.steps, c.mean)}" fill="none" stroke="{colour(c.label)}" stroke-width="2.5"/>')
    parts += _labels(curves, px(last) + 8, scale)
    return "\n".join([*parts, "</svg>", ""])


def bars_svg(ours: Mapping[str, Spread], heading: str, y: str, published: Mapping[str, float] | None = None) -> str:
    """One bar for each method, from zero, its value above it, its deviation as a line; the published value dotted across it."""
    theirs = published or {}
    scale = Scale(0.0, max((s.mean + s.deviation for s in ours.values()), default=1.0), log=False)
    scale = Scale(0.0, max(scale.high, *theirs.values()), log=False) if theirs else scale
    wide = (WIDTH - LEFT - 20) / max(1, len(ours))
    parts = _frame(heading, y, scale, WIDTH - 20)
    for i, (label, s) in enumerate(ours.items()):
        x, top = LEFT + i * wide, scale.at(s.mean)
        parts.append(f'<rect x="{x + 0.15 * wide:.1f}" width="{0.7 * wide:.1f}" y="{top:.1f}" height="{HEIGHT - BOTTOM - top:.1f}" '
                     f'fill="{family_colour(label)}"/>')  # fmt: skip
        middle, low, high = x + wide / 2, scale.at(s.mean - s.deviation), scale.at(s.mean + s.deviation)
        parts.append(f'<line class="mark" x1="{middle:.1f}" x2="{middle:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>')
        if label in theirs:
            at = f'y1="{scale.at(theirs[label]):.1f}" y2="{scale.at(theirs[label]):.1f}"'
            parts.append(f'<line class="mark" stroke-dasharray="2 4" x1="{x + 0.08 * wide:.1f}" x2="{x + 0.92 * wide:.1f}" {at}/>')
        parts.append(f'<text x="{middle:.1f}" y="{high - 5:.1f}" text-anchor="middle">{s.mean:.3g}</text>')
        parts.append(f'<text x="{x + wide / 2:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _frame(heading: str, y: str, scale: Scale, right: float = WIDTH - RIGHT) -> list[str]:
    """Heading, grid lines and the name of the vertical axis."""
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(heading)}">',
        f"<style>{STYLE}</style>", f'<text class="title" x="{LEFT}" y="24">{escape(heading)}</text>',
    ]  # fmt: skip
    for v in scale.ticks():
        out.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{scale.at(v):.1f}" y2="{scale.at(v):.1f}"/>')
        out.append(f'<text class="muted" x="{LEFT - 8}" y="{scale.at(v) + 4:.1f}" text-anchor="end">{v:.4g}</text>')
    turned = f'transform="translate(16 {HEIGHT / 2}) rotate(-90)"'
    return [*out, f'<text class="muted" {turned} text-anchor="middle">{escape(y)}</text>']


def _steps(last: float, px: Callable[[float], float], name: str) -> list[str]:
    """Round numbers along the bottom."""
    apart = next(d * 10.0**k for k in range(-2, 9) for d in (1, 2, 5) if last / (d * 10.0**k) <= 6)
    marks, at = [i * apart for i in range(int(last / apart + 1e-9) + 1)], HEIGHT - BOTTOM + 20
    out = [f'<text class="muted" x="{px(t):.1f}" y="{at}" text-anchor="middle">{t:g}</text>' for t in marks]
    return [*out, f'<text class="muted" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{name}</text>']


def _labels(curves: Sequence[Curve], x: float, scale: Scale) -> list[str]:
    """Names at the ends of the lines, moved apart where they would overlap."""
    out, previous = [], -math.inf
    for c in sorted(curves, key=lambda c: scale.at(c.mean[-1])):
        at = max(scale.at(c.mean[-1]) + 4, previous + 16)
        out.append(f'<text x="{x:.1f}" y="{at:.1f}" style="fill:{colour(c.label)};font-weight:600">{escape(c.label)}</text>')
        previous = at
    return out


def side_by_side(panels: Mapping[str, str], columns: int = 2, titled: bool = True) -> str:
    """The panels A, B, ... of one figure in one file, their letters with them if `titled`."""
    places = [(WIDTH * (i % columns), HEIGHT * (i // columns)) for i in range(len(panels))]
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * min(columns, len(panels))} {places[-1][1] + HEIGHT}">']
    for (x, y), (letter, panel) in zip(places, panels.items(), strict=True):
        placed = panel.replace("<svg ", f'<svg x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" ', 1)
        parts += [placed, *([f'<text class="title" x="{x + 16}" y="{y + 24}">{letter}</text>'] if titled else [])]
    return "\n".join([*parts, "</svg>", ""])
