"""What stands at the top of the report: the standard damping of Fig. 3, solved as Eq. (3) says and as in the released code."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import plotly.graph_objects as go

from foof.study.paper import published
from foof.study.paper.experiments import Outcome
from foof.study.paper.rules import Term
from foof.study.paper.searches import HEURISTIC, KFAC, RELEASED, SGD, STANDARD
from foof.study.paper.verdicts import Spread, Verdict, spread
from foof.study.search.grids import Tuned
from foof.study.search.presets import Preset
from foof.study.show.drawings import Curves, draw
from foof.study.show.plots import curve, smooth
from foof.study.train.setting import Record, Setting

NAMES = {
    KFAC: "KFAC, heuristic damping, λ of Fig. 1A", HEURISTIC: "KFAC, heuristic damping, λ of Fig. 3C",
    STANDARD: "KFAC, standard damping as in Eq. (3)",
    RELEASED: "KFAC, standard damping as released (transposed)", SGD: "SGD with momentum",
}  # fmt: skip


@dataclass(frozen=True)
class Headline:
    """A sentence, the numbers behind it, and the verdicts it comes to."""

    preset: str
    about: str
    sentence: str
    rows: list[dict[str, str]]
    verdicts: list[Verdict]
    figure: go.Figure


def headline(candidates: Sequence[tuple[Preset, Sequence[Outcome]]]) -> Headline | None:
    """From the first preset that has records of both dampings; None if there is none."""
    for preset, outcomes in candidates:
        by_id = {o.experiment.id: o for o in outcomes}
        if {"fig3a", "fig3b"} <= set(by_id) and {STANDARD, RELEASED, SGD} <= set(by_id["fig3a"].found):
            return _headline(preset, by_id["fig3a"], by_id["fig3b"])
    return None


def _headline(preset: Preset, a: Outcome, b: Outcome) -> Headline:
    until = a.experiment.early(preset) or preset.base.steps
    losses = {label: Term(label).spread(a.found, until) for label in NAMES if label in a.found}
    cosines = {label: Term(label, "similarity").spread(b.found, until) for label in NAMES if label in b.found}
    rows = [
        {
            "": NAMES[label],
            "lr, λ": _pair(a.found[label].best),
            f"training loss at step {until:,}": _beside(loss, "fig3a", label, 0.9 * until, until, preset, a.found[label].records),
            "cosine with FOOF's update": _beside(cosines.get(label), "fig3b", label, 0.5 * until, until, preset),
        }
        for label, loss in losses.items()
    ]
    ids = ("standard-worse", "standard-worse-1a", "standard-like-sgd", "released-worse", "released-like-sgd", "heuristic-similarity",
           "released-similarity")  # fmt: skip
    verdicts = [v for o in (a, b) for v in o.verdicts if v.id in ids]
    about = preset.about + ("" if preset.centred else ". At the paper's scale there are no records of both dampings yet")
    sentence = _sentence(a, losses, until) + _at_the_end(a, until, preset.base.steps)
    return Headline(preset.name, about, sentence, rows, verdicts, _figure(a))


def _figure(a: Outcome) -> go.Figure:
    """All methods from the first step to the last, the published ones, which end earlier, behind them."""
    panel = next(d for d in draw(a) if isinstance(d, Curves))
    whole = [curve(tuned.records, label, keep=panel.keep) for label, tuned in a.found.items()]
    return replace(panel, curves=whole, heading=f"{panel.heading}, to the end of training").figure()


def _sentence(a: Outcome, losses: dict[str, Spread], until: int) -> str:
    standard, released = a.found[STANDARD], a.found[RELEASED]
    same = at_setting_of(standard, released.best, until) if _pair(standard.best) != _pair(released.best) else None
    sgd, ends = losses[SGD].mean, losses[STANDARD].mean
    heuristic = min((losses[label] for label in (KFAC, HEURISTIC) if label in losses), key=lambda s: s.mean, default=None)
    return (
        "The paper finds that KFAC with standard damping performs like SGD (Fig. 3A). The released code for that damping rotates "
        f"with a transposed matrix, so that it depends on the signs of eigenvectors; the paper's figures were made by other code. "
        f"After {until:,} steps, run as released, KFAC is at a loss of {losses[RELEASED]}, SGD with momentum at {losses[SGD]}. "
        f"With the damped system solved as Eq. (3) says, KFAC is at "
        + (f"{same} with the same lr and λ, and at {losses[STANDARD]} at its best of those tried" if same else f"{losses[STANDARD]}")
        + (f", {sgd / ends:.2g} times below SGD" if ends < sgd else f", {ends / sgd:.2g} times SGD's")
        + (f"; with heuristic damping it is at {heuristic}." if heuristic else ".")
    )


def _at_the_end(a: Outcome, until: int, steps: int) -> str:
    """The same where the paper selects, if runs have gone on until there: what holds in Fig. 3A, which ends early, need not hold then."""
    if until >= steps or not all(a.found[label].to_the_end for label in (STANDARD, SGD)):
        return ""
    ends = {label: Term(label).spread(a.found, None) for label in (STANDARD, SGD, KFAC) if label in a.found and a.found[label].to_the_end}
    heuristic = f", with heuristic damping at {ends[KFAC]}" if KFAC in ends else ""
    return (
        f" At the end, after {steps:,} steps, by which all settings are chosen, KFAC with standard damping is at {ends[STANDARD]}, SGD at "
        f"{ends[SGD]}{heuristic}."
    )


def at_setting_of(tuned: Tuned, other: Setting, until: int) -> Spread | None:
    """The loss of a search's runs at another method's lr and λ, if there are any."""
    wanted = tuned.best.but(lr=other.lr, damping=other.damping)
    there = {r.key: r for r in (*tuned.tried, *tuned.records) if r.setting.curve == wanted.curve}
    return spread(r.end_loss(until) for r in there.values()) if there else None


def _pair(s: Setting) -> str:
    return f"{s.lr:g}, –" if s.damping is None else f"{s.lr:g}, {s.damping:g}"


def _beside(
    ours: Spread | None, figure: str, label: str, first: float, last: float, preset: Preset, losses: Sequence[Record] = ()
) -> str:
    """Published values, averaged over the same steps, stand beside runs of the paper's size only, with ours smoothed as they are."""
    if ours is None:
        return "–"
    if not preset.centred or label in (KFAC, STANDARD):
        return str(ours)
    (panel,) = published.panels(figure, "fashion-mnist")
    smoothed = [zip(r.series["step"], smooth(r.series["loss"], panel.keep), strict=True) for r in losses]
    alike = [statistics.fmean(y for x, y in points if first < x <= last) for points in smoothed]
    also = f" (ours, smoothed as it is, {statistics.fmean(alike):.3g})" if alike else ""
    return f"{ours}; published {published.mean(figure, label, first, last):.3g}{also}"
