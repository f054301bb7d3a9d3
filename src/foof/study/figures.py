"""Figures from records. Nothing here trains; every function takes records or numbers and gives a Plotly figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from foof.study.methods import title
from foof.study.setting import Record, Setting
from foof.study.toy import Toy

# One colour per method, the same in every figure; told apart by people who see colours differently (Okabe & Ito),
# and readable on light and dark ground.
COLOURS = {
    "SGD": "#8a8f98", "SGD + momentum": "#8a8f98", "Adam": "#e69f00", "FOOF": "#d5513e", "KFAC": "#0a84c6",
    "Natural gradient": "#009e73",
}  # fmt: skip
OTHERS = ("#cc79a7", "#56b4e9", "#b8a200", "#7f5af0")


@dataclass(frozen=True)
class Curve:
    """A quantity over steps for one setting: mean over seeds, and mean ± deviation."""

    label: str
    steps: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]
    seeds: int


def colour(label: str) -> str:
    return COLOURS.get(label) or OTHERS[sum(label.encode()) % len(OTHERS)]


def smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """s ← keep·s + (1 − keep)·value from the first value on: how the published loss curves were processed."""
    out: list[float] = []
    for value in values:
        out.append(keep * out[-1] + (1 - keep) * value if out else value)
    return out


def curve(records: Sequence[Record], label: str | None = None, name: str = "loss", keep: float = 0.0) -> Curve:
    """One curve of records that differ in their seed alone. Seeds that diverged shorten it to where all still ran."""
    series = [smooth(r.series[name], keep) for r in records]
    n = min(map(len, series))
    mean = [statistics.fmean(s[i] for s in series) for i in range(n)]
    dev = [statistics.stdev([s[i] for s in series]) if len(series) > 1 else 0.0 for i in range(n)]
    low, high = [m - d for m, d in zip(mean, dev, strict=True)], [m + d for m, d in zip(mean, dev, strict=True)]
    return Curve(label or title(records[0].setting), records[0].series["step"][:n], mean, low, high, len(records))


def by_setting(records: Iterable[Record]) -> dict[Setting, list[Record]]:
    """Records grouped by everything but the seed, in order of appearance."""
    groups: dict[Setting, list[Record]] = {}
    for record in records:
        groups.setdefault(record.setting.curve, []).append(record)
    return groups


def style(figure: go.Figure, heading: str, height: int = 420) -> go.Figure:
    """What all figures share. Colours of text and grid come from the page, which knows whether it is dark."""
    return figure.update_layout(
        title={"text": heading, "x": 0, "xref": "paper", "font": {"size": 15}},
        height=height, margin={"l": 56, "r": 16, "t": 40, "b": 44}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, font={"size": 13},
    )  # fmt: skip


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis, labelled at powers of ten, and at 2 and 5 times these where it spans little."""
    shown = [v for v in values if 0 < v < math.inf]
    if not shown or max(shown) > 300 * min(shown):
        return {"type": "log", "dtick": 1, "exponentformat": "power"}
    decades = range(math.floor(math.log10(min(shown))) - 1, math.ceil(math.log10(max(shown))) + 1)
    ticks = [float(f"{digit}e{i}") for i in decades for digit in (1, 2, 5)]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}


def _rgba(hex_: str, alpha: float) -> str:
    r, g, b = (int(hex_[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{alpha})"


def curves_figure(
    curves: Iterable[Curve], heading: str, y: str = "training loss", log: bool = True, published: Iterable[Curve] = ()
) -> go.Figure:
    """Mean over seeds as a line, mean ± deviation as a band; the published curves dotted behind."""
    figure, curves = go.Figure(), list(curves)
    for c in published:
        figure.add_scatter(x=c.steps, y=c.mean, name=f"{c.label}, published", mode="lines",
                           line={"color": colour(c.label), "dash": "dot", "width": 1.5}, opacity=0.7)  # fmt: skip
    for c in curves:
        # a log axis cannot show what lies at or below zero: the band ends at a tenth of the mean
        low = [max(lo, m / 10) if log else lo for lo, m in zip(c.low, c.mean, strict=True)]
        figure.add_scatter(
            x=[*c.steps, *c.steps[::-1]], y=[*c.high, *low[::-1]], fill="toself", mode="lines", hoverinfo="skip",
            fillcolor=_rgba(colour(c.label), 0.18), line={"width": 0}, showlegend=False, legendgroup=c.label,
        )  # fmt: skip
        figure.add_scatter(
            x=c.steps, y=c.mean, name=c.label, mode="lines", legendgroup=c.label,
            line={"color": colour(c.label), "width": 2.5}, hovertemplate="%{y:.4g}",
        )  # fmt: skip
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=y, **(log_axis([v for c in curves for v in c.mean]) if log else {}))
    return style(figure, heading)


def tuning_figure(tried: dict[str, Sequence[Record]], heading: str) -> go.Figure:
    """Final training loss over learning rate, one line per method (and damping); diverged runs are left out."""
    figure = go.Figure()
    for label, records in tried.items():
        dampings = list(dict.fromkeys(r.setting.damping for r in records))
        for damping in dampings:
            row = [r for r in records if r.setting.damping == damping and r.score < float("inf")]
            row.sort(key=lambda r: r.setting.lr)
            name = f"{label}, λ = {damping:g}" if len(dampings) > 1 and isinstance(damping, float) else label
            figure.add_scatter(
                x=[r.setting.lr for r in row], y=[r.score for r in row], name=name, mode="lines+markers",
                line={"color": colour(label), "width": 2}, marker={"size": 8}, hovertemplate="%{y:.4g}",
            )  # fmt: skip
    figure.update_xaxes(title="learning rate", **log_axis([t for trace in figure.data for t in trace.x]))
    figure.update_yaxes(title="final training loss", **log_axis([t for trace in figure.data for t in trace.y]))
    return style(figure, heading)


def toy_figure(example: Toy) -> go.Figure:
    """The loss of each datapoint along the direction of each method."""
    figure = make_subplots(1, 2, subplot_titles=("(3, 1) → 1", "(1, 0) → −1"), shared_yaxes=True)
    for label, losses in example.losses.items():
        for point in range(2):
            figure.add_scatter(
                x=example.step_sizes.tolist(), y=losses[:, point].tolist(), name=label, mode="lines", row=1, col=point + 1,
                legendgroup=label, showlegend=point == 0, line={"color": colour(label), "width": 2.5}, hovertemplate="%{y:.3g}",
            )  # fmt: skip
    figure.update_xaxes(title="step size")
    figure.update_yaxes(title="loss", range=[0, 2], col=1)
    style(figure, "Loss of each datapoint along one update", height=360)
    return figure.update_layout(legend={"y": 1.14}, margin={"t": 72})
