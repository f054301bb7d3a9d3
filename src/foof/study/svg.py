"""Curves as a small SVG file, for pages that cannot run a script: it follows the reader's light or dark theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from foof.study.figures import Curve, colour

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 44, 48
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; } .title { font-size: 15px; font-weight: 600; }
.grid { stroke: #d0d7de; stroke-width: 1; } .muted { fill: #57606a; }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3; } .grid { stroke: #30363d; } .muted { fill: #9da7b1; } }
"""


def curves_svg(curves: Sequence[Curve], heading: str, y: str = "training loss") -> str:
    """Means as lines and mean ± deviation as bands, over a logarithmic vertical axis; labels at the ends of the lines."""
    values = [v for c in curves for v in c.mean if v > 0]
    low, high = math.log10(min(values)), math.log10(max(values))
    last = max(c.steps[-1] for c in curves)

    def px(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def py(value: float) -> float:
        at = (math.log10(max(value, 10**low)) - low) / (high - low or 1)
        return HEIGHT - BOTTOM - min(at, 1) * (HEIGHT - TOP - BOTTOM)

    def points(xs: Sequence[float], ys: Sequence[float]) -> str:
        return " ".join(f"{px(a):.1f},{py(b):.1f}" for a, b in zip(xs, ys, strict=True))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(heading)}">',
        f"<style>{STYLE}</style>", f'<text class="title" x="{LEFT}" y="24">{escape(heading)}</text>',
        *_axes(low, high, last, px, py, y),
    ]  # fmt: skip
    for c in curves:
        band = points([*c.steps, *c.steps[::-1]], [*c.high, *c.low[::-1]])
        parts.append(f'<polygon points="{band}" fill="{colour(c.label)}" opacity="0.18"/>')
        parts.append(f'<polyline points="{points(c.steps, c.mean)}" fill="none" stroke="{colour(c.label)}" stroke-width="2.5"/>')
    parts += _labels(curves, px(last) + 8, py)
    return "\n".join([*parts, "</svg>", ""])


def _axes(low: float, high: float, last: float, px, py, y: str) -> list[str]:  # type: ignore[no-untyped-def]
    """Grid lines at {1, 3}·10^i, and round steps along the bottom."""
    out = []
    for i in range(math.floor(low), math.ceil(high) + 1):
        for digit in (1, 3):
            v = digit * 10.0**i
            if low - 1e-9 <= math.log10(v) <= high + 1e-9:
                out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(v):.1f}" y2="{py(v):.1f}"/>')
                out.append(f'<text class="muted" x="{LEFT - 8}" y="{py(v) + 4:.1f}" text-anchor="end">{v:g}</text>')
    apart = next(d * 10**k for k in range(9) for d in (1, 2, 5) if last / (d * 10**k) <= 6)
    ticks = range(0, int(last) + 1, apart)
    out += [
        f'<text class="muted" x="{px(t):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{t:g}</text>' for t in ticks
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    out.append(f'<text class="muted" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    turned = f'transform="translate(16 {HEIGHT / 2}) rotate(-90)"'
    out.append(f'<text class="muted" {turned} text-anchor="middle">{escape(y)}</text>')
    return out


def _labels(curves: Sequence[Curve], x: float, py) -> list[str]:  # type: ignore[no-untyped-def]
    """Names at the ends of the lines, moved apart where they would overlap."""
    out, previous = [], -math.inf
    for c in sorted(curves, key=lambda c: py(c.mean[-1])):
        at = max(py(c.mean[-1]) + 4, previous + 16)
        out.append(f'<text x="{x:.1f}" y="{at:.1f}" style="fill:{colour(c.label)};font-weight:600">{escape(c.label)}</text>')
        previous = at
    return out
