"""Figures from records. Nothing here trains; every function takes records or numbers and gives a Plotly figure."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from foof.study.paper.toy import Toy
from foof.study.paper.verdicts import Spread
from foof.study.search.grids import Tuned, exploded_until
from foof.study.train.methods import title
from foof.study.train.setting import Record, Setting

# One colour per method, the same in every figure; told apart by people who see colours differently (Okabe & Ito),
# and readable on light and dark ground. A variant has a shade of its family's colour.
FAMILIES = {
    "SGD": ("#8a8f98", "#5d636d"),
    "Adam": ("#e69f00",),
    "FOOF": ("#d5513e", "#a32a1d", "#f0876f", "#b5179e", "#e85d9e", "#7a1f12"),
    "KFAC": ("#0a84c6", "#5bb5ea", "#0b4f8a", "#2f6fdd"),
    "Natural": ("#009e73", "#56c9a4", "#00664b"),
    "independent": ("#009e73", "#00664b"),
    "same": ("#cc79a7", "#8f3f6c"),
}
SPECIAL = {
    "KFAC, standard damping": "#7f5af0", "KFAC, standard damping as released": "#b8a200", "KFAC, subsampled": "#5bb5ea",
    "FOOF with KFAC's λ_A": "#d5513e", "KFAC, λ = 0.0001": "#0b4f8a", "KFAC, λ = 1e-06": "#2f8fd8", "KFAC, λ = 1e-08": "#8cc8f0",
    "FOOF with KFAC's λ_A, λ = 0.0001": "#8f1f12", "FOOF with KFAC's λ_A, λ = 1e-06": "#d5513e",
    "FOOF with KFAC's λ_A, λ = 1e-08": "#f3a08e",
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
    name: str = ""  # what the legend calls it, if not its label


def colour(label: str) -> str:
    """The colour of a label: its family's own for the plain method, a shade for variants."""
    if label in SPECIAL:
        return SPECIAL[label]
    for family, shades in FAMILIES.items():
        if label.startswith(family):
            plain = label in (family, f"{family} + momentum", f"{family} gradient") or len(shades) == 1
            return shades[0] if plain else shades[1 + sum(label.encode()) % (len(shades) - 1)]
    return OTHERS[sum(label.encode()) % len(OTHERS)]


def family_colour(label: str) -> str:
    """One colour for all variants of a method, where their names stand beside it."""
    return next((shades[0] for family, shades in FAMILIES.items() if label.startswith(family)), OTHERS[0])


def smooth(values: Sequence[float], keep: float = 0.9) -> list[float]:
    """s ← keep·s + (1 − keep)·value from the first value on: how the published loss curves were processed."""
    out: list[float] = []
    for value in values:
        out.append(keep * out[-1] + (1 - keep) * value if out else value)
    return out


def curve(
    records: Sequence[Record], label: str | None = None, name: str = "loss", keep: float = 0.0, until: int | None = None, x: str = "step"
) -> Curve:
    """One curve of records that differ in their seed alone. Seeds that diverged shorten it to where all still ran."""
    series = [smooth(list(takewhile(math.isfinite, r.series[name])), keep) for r in records]
    steps = records[0].series[x]
    n = min([*map(len, series), sum(s <= (until or math.inf) for s in steps)])
    mean = [statistics.fmean(s[i] for s in series) for i in range(n)]
    dev = [statistics.stdev([s[i] for s in series]) if len(series) > 1 else 0.0 for i in range(n)]
    low, high = [m - d for m, d in zip(mean, dev, strict=True)], [m + d for m, d in zip(mean, dev, strict=True)]
    return Curve(label or title(records[0].setting), steps[:n], mean, low, high, len(records))


LEGEND_ROW = 16  # pixels


def style(figure: go.Figure, heading: str, height: int = 420) -> go.Figure:
    """What all figures share; long legends get room of their own. Colours of text and grid come from the page, which may be dark."""
    names = sum(bool(trace.name) and trace.showlegend is not False for trace in figure.data)
    height += LEGEND_ROW * max(0, names - 4)
    return figure.update_layout(
        title={"text": heading, "x": 0, "xref": "paper", "font": {"size": 15}},
        height=height, margin={"l": 56, "r": 16, "t": 40, "b": 44}, template="none",
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}, font={"size": 13},
    )  # fmt: skip


def log_axis(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis, labelled at powers of ten, and at 2 and 5 times these where it spans little, and more where very little."""
    shown = [v for v in values if 0 < v < math.inf]
    if not shown or max(shown) > 300 * min(shown):
        return {"type": "log", "dtick": 1, "exponentformat": "power"}
    decades = range(math.floor(math.log10(min(shown))) - 1, math.ceil(math.log10(max(shown))) + 1)
    digits = (1, 2, 5) if max(shown) > 4 * min(shown) else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    ticks = [float(f"{digit}e{i}") for i in decades for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{t:g}" for t in ticks]}


def _rgba(hex_: str, alpha: float) -> str:
    r, g, b = (int(hex_[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{alpha})"


def curves_figure(
    curves: Iterable[Curve], heading: str, y: str = "training loss", log: bool = True, published: Iterable[Curve] = (), x: str = "step"
) -> go.Figure:
    """Mean over seeds as a line, mean ± deviation as a band; the published curves dotted behind."""
    figure, curves, published = go.Figure(), list(curves), list(published)
    for c in published:
        figure.add_scatter(x=c.steps, y=c.mean, name=f"{c.name or c.label}, published", mode="lines",
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
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, **({**log_axis([v for c in curves for v in c.mean]), **_in_view(curves, published)} if log else {}))
    return style(figure, heading)


def top_of(curves: Sequence[Curve]) -> float:
    """Where a curve that explodes leaves a picture with a log axis: at ten times where curves begin."""
    return 10 * max((c.mean[0] for c in curves if c.mean), default=math.inf)


def _in_view(curves: Sequence[Curve], published: Sequence[Curve]) -> dict[str, Any]:
    """A range for a log axis from which exploding curves are cut; none where there are none."""
    shown, top = [v for c in (*curves, *published) for v in c.mean if 0 < v < math.inf], top_of(curves)
    return {"range": [math.log10(min(shown)) - 0.1, math.log10(top)]} if shown and max(shown) > top else {}


def bars_figure(ours: Mapping[str, Spread], published: Mapping[str, float], heading: str, y: str, log: bool) -> go.Figure:
    """One bar for each method with its deviation; published values as diamonds."""
    figure = go.Figure()
    figure.add_bar(
        x=list(ours), y=[s.mean for s in ours.values()], name="ours", marker={"color": [family_colour(label) for label in ours]},
        error_y={"type": "data", "array": [s.deviation for s in ours.values()]}, hovertemplate="%{y:.3g}",
    )  # fmt: skip
    there = {label: published[label] for label in ours if label in published}
    if there:
        figure.add_scatter(x=list(there), y=list(there.values()), name="published", mode="markers", hovertemplate="%{y:.3g}",
                           marker={"symbol": "diamond", "size": 11, "color": "#8a8f98", "line": {"width": 1}})  # fmt: skip
    values = [*(s.mean for s in ours.values()), *there.values()]
    limits = {"range": [min(values) - 3, min(100, max(values) + 1)]} if not log and values and min(values) > 50 else {}
    figure.update_yaxes(title=y, **(log_axis(values) if log else limits))
    return style(figure, heading).update_layout(showlegend=bool(there))


def row_name(s: Setting) -> str:
    """What a row of a grid has in common: its λ, or SGD's momentum."""
    if isinstance(s.damping, float):
        return f"λ = {s.damping:g}"
    return f"momentum {s.option('momentum', 0.0):g}" if s.optimizer == "sgd" else str(s.damping or "")


ROW = 22  # pixels of a row of a map


def map_figure(searches: Mapping[str, Tuned], heading: str) -> go.Figure:
    """The loss over learning rate and λ, one row for each λ of each method: colours are losses at the last step that all trials of a
    method have, crosses have diverged or exploded, a ring marks what was chosen."""
    figure, rows = go.Figure(), []
    for label, tuned in searches.items():
        step = min(r.setting.steps for r in tuned.tried)
        trials = sorted(tuned.tried, key=lambda r: (r.setting.damping or 0.0 if r.setting.damping != "auto" else 0.0, r.setting.lr))
        rows += [_map_point(label, tuned, r, step) for r in trials]
    lost = [row for row in rows if not row["loss"] < math.inf]
    kept = [row for row in rows if row["loss"] < math.inf]
    logs = [math.log10(row["loss"] or sys.float_info.min) for row in kept]
    figure.add_scatter(
        x=[row["lr"] for row in kept], y=[row["name"] for row in kept], mode="markers+text", showlegend=False,
        text=[f"{row['loss']:.2g}" for row in kept], textposition="middle right", textfont={"size": 10},
        marker={"symbol": "square", "size": 15, "color": logs, "colorscale": "Viridis", "reversescale": True,
                "cmax": min(1.0, max(logs, default=1.0)), "line": {"width": [3 if row["best"] else 0 for row in kept], "color": "#d5513e"}},
        customdata=[row["loss"] for row in kept], hovertemplate="lr %{x}: %{customdata:.4g}<extra>%{y}</extra>",
    )  # fmt: skip
    if lost:
        figure.add_scatter(
            x=[row["lr"] for row in lost], y=[row["name"] for row in lost], mode="markers", name="diverged or exploded",
            marker={"symbol": "x", "size": 10, "color": "#8a8f98"}, hovertemplate="lr %{x}: diverged or exploded<extra>%{y}</extra>",
        )  # fmt: skip
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure.update_xaxes(title="learning rate", type="log", dtick=1, exponentformat="power")
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True)
    # the page writes names above their rows where it is narrow
    return style(figure, heading, height=120 + ROW * len(names)).update_layout(hovermode="closest", meta={"rows": names})


def _map_point(label: str, tuned: Tuned, r: Record, step: int) -> dict[str, Any]:
    loss = r.end_loss(step)
    chosen = (r.setting.lr, r.setting.damping, r.setting.option("momentum")) == (
        tuned.best.lr, tuned.best.damping, tuned.best.option("momentum"),
    )  # fmt: skip
    row = row_name(r.setting)
    name = label if not row or row in label else f"{label}, {row}"
    return {"lr": r.setting.lr, "name": name, "loss": math.inf if exploded_until(r, step) or math.isnan(loss) else loss, "best": chosen}


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
