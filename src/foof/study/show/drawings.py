"""What is drawn of an experiment: curves or bars of ours, the published ones behind them, and how the two compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import plotly.graph_objects as go

from foof.study.paper import published
from foof.study.paper.catalogue import CATALOGUE
from foof.study.paper.experiments import Outcome
from foof.study.paper.rules import LOSSES, Found, Term, seconds_per_step
from foof.study.paper.searches import FOOF, FOOF_BEST, FOOF_LAMBDA_A, KFAC, timed
from foof.study.paper.toy import Toy, toy
from foof.study.paper.verdicts import Spread, spread
from foof.study.search.presets import Preset
from foof.study.show import plots
from foof.study.show.plots import Curve, curve, curves_figure, map_figure
from foof.study.show.svg import bars_svg, curves_svg
from foof.study.train.setting import Record

POINTS_TO_SMOOTH = 100  # over fewer points, smoothing would show itself alone


class Drawing(Protocol):
    """Something to be seen, on a page (Plotly) or in a file (SVG, empty if there is none)."""

    @property
    def heading(self) -> str: ...
    def figure(self) -> go.Figure: ...
    def svg(self) -> str: ...


@dataclass(frozen=True)
class Curves:
    """Curves over steps."""

    heading: str
    curves: Sequence[Curve]
    published: Sequence[Curve] = ()
    y: str = "training loss"
    log: bool = True
    x: str = "step"
    keep: float = 0.0  # how much the curves are smoothed

    def figure(self) -> go.Figure:
        return curves_figure(self.curves, self.heading, self.y, self.log, self.published, self.x)

    def svg(self) -> str:
        return curves_svg(self.curves, self.heading, self.y, self.log, self.published, self.x)


@dataclass(frozen=True)
class Bars:
    """One bar for each method, the published one beside it."""

    heading: str
    y: str
    ours: dict[str, Spread]
    published: dict[str, float] = field(default_factory=dict)
    log: bool = False

    def figure(self) -> go.Figure:
        return plots.bars_figure(self.ours, self.published, self.heading, self.y, self.log)

    def svg(self) -> str:
        return bars_svg(self.ours, self.heading, self.y, self.published)


@dataclass(frozen=True)
class Map:
    """Loss over learning rate and λ of everything that was tried."""

    searches: Found
    heading: str = "Loss over learning rate and λ: all trials, one seed"

    def figure(self) -> go.Figure:
        return map_figure(self.searches, self.heading)

    def svg(self) -> str:
        return ""


@dataclass(frozen=True)
class Toy_:
    """The toy example of Appendix F."""

    example: Toy
    heading: str = "Loss of each datapoint along one update"

    def figure(self) -> go.Figure:
        return plots.toy_figure(self.example)

    def svg(self) -> str:
        x, names = self.example.step_sizes.tolist(), ("first", "second")
        both = [(f"{method}, {name} datapoint", losses[:, i].tolist()) for method, losses in self.example.losses.items()
                for i, name in enumerate(names)]  # fmt: skip
        return curves_svg([Curve(label, x, y, y, y, 1) for label, y in both], self.heading, "loss", log=False, x="step size")


def _behind(panel: published.Panel | None) -> list[Curve]:
    """Published curves as ours: without a band where the paper draws none."""
    if panel is None:
        return []
    return [Curve(s.label, s.x, s.y, s.low or s.y, s.high or s.y, 3, s.published_as) for s in panel.series]


def _marked(heading: str, preset: Preset) -> str:
    """A heading that says of its own that this is smaller than the paper's figure."""
    return f"{heading} ({preset.mark})" if preset.mark else heading


def _published_alone(figure: str, dataset: str, preset: Preset, y: str, log: bool = True) -> list[Drawing]:
    """The published panels as drawings of their own, beside runs of another size: neither steps nor losses are to be compared."""
    if not preset.reduced:
        return []
    return [Curves(f"Published, at the paper's scale: Fig. {panel.name}", _behind(panel), y=y, log=log)
            for panel in published.panels(figure, dataset)]  # fmt: skip


def _searched(found: Found, preset: Preset) -> list[Drawing]:
    grids = {label: t for label, t in found.items() if len(t.tried) > 1}
    return [Map(grids, _marked(Map.heading, preset))] if grids else []


def losses(figure: str, dataset: str, found: Found, preset: Preset, series: str = "loss") -> list[Drawing]:
    """Mini-batch losses, processed as the published ones were; one drawing for each published panel."""
    until = preset.early if CATALOGUE[figure].early else None
    several = len(published.panels(figure, dataset)) > 1
    panels: list[published.Panel | None] = [*published.panels(figure, dataset)] if preset.centred or (preset.reduced and several) else []
    drawn: list[Drawing] = []
    for panel in panels or [None]:
        names = {s.label for s in panel.series} if panel and len(panels) > 1 else set(found)
        mine = {label: t for label, t in found.items() if label in names}
        if not mine:
            continue
        keep = panel.keep if panel else 0.0 if CATALOGUE[figure].nets else 0.9
        long = mine and min(len(r.series["step"]) for t in mine.values() for r in t.records) >= POINTS_TO_SMOOTH
        keep = keep if long else 0.0
        curves = [curve(t.records, label, series, keep, until) for label, t in mine.items()]
        what = "Training loss" if figure in ("fig1d", "fig2a", "fig2c") else "Training loss of mini-batches"
        heading = what + (", weights averaged" if series != "loss" else "") + (f", smoothed as in the paper ({keep:g})" if keep else "")
        heading = _marked(heading + (f", as in Fig. {panel.name}" if len(panels) > 1 and panel else ""), preset)
        drawn.append(Curves(heading, curves, _behind(panel) if preset.centred else [], keep=keep))
    return [*drawn, *_published_alone(figure, dataset, preset, "training loss"), *_searched(found, preset)]


def averaged(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    """Losses of averaged weights; how they were chosen stands with the plain ones."""
    return [d for d in losses(figure, dataset, found, preset, "averaged_loss") if not isinstance(d, Map)]


def similarities(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    curves = [curve(t.records, label, "similarity", x="measured_at") for label, t in found.items() if "similarity" in t.records[0].series]
    behind = _behind(published.panels(figure, dataset)[0]) if preset.centred else []
    return [Curves("Cosine between the updates of KFAC and FOOF", curves, behind, "cosine similarity", log=False)]


def decreases(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    records = found[KFAC].records
    curves = [curve(records, KFAC, "decrease", x="measured_at"),
              curve(records, FOOF_LAMBDA_A, "decrease_without", x="measured_at")]  # fmt: skip
    behind = _behind(published.panels(figure, dataset)[-1]) if preset.centred else []
    heading = _marked("Share of the mini-batch's loss that one update removes", preset)
    alone = _published_alone(figure, dataset, preset, "relative decrease", log=False)
    return [Curves(heading, curves, behind, "relative decrease", log=False), *alone]


def times(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    """Time per step relative to SGD: the paper's was measured on a GPU, ours on one core."""
    each = {label: Term(label, "cpu_per_step").values(found, None) for label in found}
    sgd = next((values for label, values in each.items() if label.startswith("SGD")), {})  # seeds may be of different machines
    ratios = {label: [x / sgd[seed] for seed, x in values.items() if seed in sgd] for label, values in each.items()}
    ours = {label: spread(of) for label, of in ratios.items() if of}
    paper = published.seconds_per_epoch(dataset)
    theirs = {label: value / next(iter(paper.values())) for label, value in paper.items()}
    heading = _marked("Time per step, relative to SGD (ours: one core; published: a GPU)", preset)
    return [Bars(heading, "times SGD", ours, theirs, log=True)] if ours else []


def seconds(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    """Losses over time: the steps of a curve times the mean time per step of its timed runs."""
    there = {label: t.records for label, t in found.items() if timed(label) in found and math.isfinite(seconds_per_step(found, label))}
    keep = 0.9 if min((len(r.series["step"]) for records in there.values() for r in records), default=0) >= POINTS_TO_SMOOTH else 0.0
    over_steps = [curve(records, label, keep=keep) for label, records in there.items()]
    curves = [replace(c, steps=[seconds_per_step(found, c.label) * step for step in c.steps]) for c in over_steps]
    return [Curves("Training loss of mini-batches over time on one core", curves, x="seconds of one core")] if curves else []


def accuracies(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    ours = {label: Term(label, "test_accuracy").spread(found, None) for label in found}
    losses_ = {label: Term(label, "test_loss").spread(found, None) for label in found}
    return [
        Bars("Accuracy on the test images at the end of training", "test accuracy in %", ours),
        Bars("Loss on the test images at the end of training", "test loss", losses_),
    ]


def insides(figure: str, dataset: str, found: Found, preset: Preset) -> list[Drawing]:
    """Along FOOF's run Σ as it changes and as a mini-batch estimates it; along KFAC's λ_A, beside the λ that FOOF's search has found."""
    drawn: list[Drawing] = []
    if FOOF in found:
        records, names = found[FOOF].records, {"sigma_drift": "since 100 steps before", "sigma_noise": "of one mini-batch's estimate"}
        curves = [curve(records, f"{FOOF}: {said}", name, x="measured_at") for name, said in names.items()]
        drawn.append(Curves("Relative distance from Σ", curves, (), "relative distance", log=False))
    if KFAC in found:
        split = curve(found[KFAC].records, "KFAC: λ_A", "lambda_A", x="measured_at")
        chosen = Term(FOOF_BEST, "damping").spread(found, None).mean if FOOF_BEST in found else math.nan
        level = [chosen] * len(split.steps)
        own = [Curve("FOOF: λ", split.steps, level, level, level, 1)] if math.isfinite(chosen) else []
        drawn.append(Curves("Damping of Σ: KFAC's λ_A and FOOF's λ", [split, *own], (), "damping", log=True))
    return drawn


DRAW: dict[str, Callable[[str, str, Found, Preset], list[Drawing]]] = {
    "loss": losses,
    "similarity": similarities,
    "decrease": decreases,
    "time": times,
    "accuracy": accuracies,
    "seconds": seconds,
    "inside": insides,
    "averaged": averaged,
}


def draw(outcome: Outcome) -> list[Drawing]:
    """All drawings of an experiment's outcome; none of one that has not been run."""
    e = outcome.experiment
    if e.figure == "toy":
        return [Toy_(toy())]
    return DRAW[CATALOGUE[e.figure].draws](e.figure, e.dataset, outcome.found, outcome.preset) if outcome.found else []


@dataclass(frozen=True)
class Comparison:
    """One published curve and ours at the last published step that ours has, processed the same way."""

    panel: str
    curve: str
    step: float
    published: float
    ours: Spread

    @property
    def ratio(self) -> float:
        return self.ours.mean / self.published


DECREASES = {KFAC: "decrease", FOOF_LAMBDA_A: "decrease_without"}
SERIES = {"fig3b": {"": "similarity"}, "fig4c": DECREASES, "fig5d": {"": "averaged_loss"},
          **dict.fromkeys(("figj19c", "figj20c", "figj21c"), DECREASES)}  # fmt: skip


def compare(figure: str, dataset: str, found: Found) -> list[Comparison]:
    """Our end value for each published curve there are records of."""
    rows = []
    for panel in published.panels(figure, dataset):
        for series in panel.series:
            tuned = found.get(KFAC if SERIES.get(figure) is DECREASES else series.label)
            if tuned is None:
                continue
            names = SERIES.get(figure, {"": "loss"})
            name = names.get(series.label, names.get("", "loss"))
            step, theirs = [(x, y) for x, y in zip(series.x, series.y, strict=True) if x <= max(tuned.best.steps, series.x[0])][-1]
            if name not in LOSSES:
                theirs = statistics.fmean(y for x, y in zip(series.x, series.y, strict=True) if 0.9 * step < x <= step)
            if not all(name in r.series for r in tuned.records):  # the run that selected stands for those in which it is measured
                continue
            values = spread(_at(r, name, step, panel.keep) for r in tuned.records)
            rows.append(Comparison(panel.name, series.label, step, theirs, values))
    return rows


def _at(record: Record, name: str, step: float, keep: float) -> float:
    """A record's processed value at a step, or at the last one before it; of measured quantities the mean of the tenth before."""
    xs, ys = record.series["step" if name in LOSSES else "measured_at"], record.series.get(name, [])
    if record.status != "finished" and (not xs or xs[-1] < step - record.setting.log_every):
        return math.inf
    if name not in LOSSES:
        return statistics.fmean([y for x, y in zip(xs, ys, strict=True) if 0.9 * step < x <= step] or [math.nan])
    upto = [y for x, y in zip(xs, plots.smooth(ys, keep), strict=True) if x <= max(step, 1)]
    return upto[-1] if upto else math.nan
