"""The published curves, as recovered from the paper's vector graphics, and which of ours each belongs to."""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foof.study.paper import searches as r

DATA = Path(__file__).parent / "published.json.gz"


@dataclass(frozen=True)
class Series:
    """A published curve: `label` is ours, `low` and `high` the edges of its band, if it has one."""

    label: str
    published_as: str
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Panel:
    """A published panel. `keep` is the coefficient its losses were smoothed with, s ← keep·s + (1 − keep)·loss; 0: not."""

    name: str
    keep: float
    series: tuple[Series, ...]


def _damped(method: str, names: str) -> dict[str, str]:
    """Panels of Figs. 3B-D: the paper's damping names for ours, which are a hundredth."""
    return {names.format(name): r.label_3(method, x) for name, x in zip(("1e-2", "1e-4", "1e-6"), r.DAMPINGS, strict=True)}


SGD_NAMES = dict.fromkeys(("SGD+Mom.", "SGD+M.", "SGD+M", "(S)GD+M", "SGD+Mom. (full batch)"), r.SGD)
NATURALS = {"Natural, MC Fisher": r.NATURAL_MC, "Natural, Full Fisher": r.NATURAL_FULL, "Nat. (MC Fisher)": r.NATURAL_MC,
            "Nat. (Full Fisher; dotted, not in legend)": r.NATURAL_FULL}  # fmt: skip
# Published label to ours, panel by panel. Published standard damping stands behind the released code's, which its losses fit.
OURS: dict[str, dict[str, str]] = {
    "fig1a": {"Adam": r.ADAM, "KFAC": r.KFAC, "Natural-Sub-S.": r.NATURAL, **SGD_NAMES},
    "fig1b": {"KFAC Sub-S.": r.KFAC_ONE_BATCH, "Natural Sub-S.": r.NATURAL},
    "fig1c": {"Nat D=1000": r.LARGER, "Nat D=4000": r.LARGEST},
    "fig1d": {"KFAC": r.KFAC, **NATURALS, **SGD_NAMES},
    "fig2a": {"KFAC": r.KFAC, "GD (no mom.)": r.GD, **NATURALS, **SGD_NAMES},
    "fig2b": {"KFAC": r.KFAC, "Nat. Block-Diag": r.BY_LAYER},
    "fig2c": {"KFAC": r.KFAC, "Nat. Block-Diag, MC Fisher": r.BY_LAYER_MC, "Nat. Block-Diag, Full Fisher": r.BY_LAYER_FULL},
    "fig3a": {"KFAC standard damp.": r.RELEASED, "KFAC correct damp.": r.RELEASED, "KFAC heuristic": r.HEURISTIC, **SGD_NAMES},
    "fig3b": {"standard damp.": r.RELEASED, "correct damp.": r.RELEASED, **_damped(r.KFAC, "heuristic damp {}"),
              "heuristic (damp 1e-2)": r.HEURISTIC},
    "fig3c": _damped(r.KFAC, "KFAC damp {}"),
    "fig3d": _damped(r.FOOF_LAMBDA_A, "FOOF damp {}"),
    "fig4b": {"KFAC T=1": r.KFAC, "FOOF T=1": r.FOOF_10, "FOOF T=100": r.FOOF, **SGD_NAMES},
    "fig4c": {"KFAC": r.KFAC, "FOOF (lambda_A from KFAC)": r.FOOF_LAMBDA_A},
}  # fmt: skip
MNIST_FIGURES = {"1": "J.8", "2": "J.9", "3": "J.10", "4": "J.11", "I.6": "I.7"}
SMOOTHED = 0.9  # where the coefficient could not be determined, curves behave like this one


@cache
def _panels() -> dict[tuple[str, str], dict]:
    return {(p["figure"], p["panel"]): p for p in json.loads(gzip.decompress(DATA.read_bytes()))}


def panels(figure: str, dataset: str) -> list[Panel]:
    """The published panels of a figure (`fig1a`, `batches`) for a data set; none where the paper has none."""
    if figure == "batches":
        names = {"A": "independent", "B": "same"}
        return [_panel("I.6", letter, dataset, {"damp 1e-4": r.label_i(batch, "low"), "damp 1e2": r.label_i(batch, "high")}, SMOOTHED)
                for letter, batch in names.items()]  # fmt: skip
    if figure not in OURS:
        return []
    number, letter = figure[3], figure[4].upper()
    unsmoothed = figure in ("fig1d", "fig2a", "fig2c", "fig3b", "fig4c")
    return [_panel(number, letter, dataset, OURS[figure], 0.0 if unsmoothed else SMOOTHED)]


def _panel(number: str, letter: str, dataset: str, ours: dict[str, str], keep: float) -> Panel:
    number = MNIST_FIGURES[number] if dataset == "mnist" else number
    found = _panels()[number, letter]
    series = tuple(
        Series(ours[s["label"]], s["label"], _from_one(s["x"]), s["y"], s.get("y_lo", []), s.get("y_hi", []))
        for s in found["series"]
        if s["label"] in ours
    )
    return Panel(f"{number}{letter}", found["keep"] or keep, series)


def _from_one(steps: list[float]) -> list[float]:
    """Published steps that count from 0 by ones, as those of full batches, are our 1, 2, ..."""
    return [x + 1 for x in steps] if steps[:2] == [0, 1] else steps


def labels(figure: str, dataset: str) -> set[str]:
    """Our names of the published curves of a figure."""
    if figure == "fig4a":
        return set(seconds_per_epoch(dataset))
    return {series.label for panel in panels(figure, dataset) for series in panel.series}


def mean(figure: str, label: str, first: float, last: float) -> float:
    """The mean of a published Fashion-MNIST curve over the steps from `first` to `last`."""
    (panel,) = panels(figure, "fashion-mnist")
    values = [y for s in panel.series if s.label == label for x, y in zip(s.x, s.y, strict=True) if first < x <= last]
    return statistics.fmean(values)


def seconds_per_epoch(dataset: str) -> dict[str, float]:
    """The bars of Fig. 4A."""
    found = _panels()["J.11" if dataset == "mnist" else "4", "A"]
    bars = {(s["label"], at): y for s in found["series"] for at, y in zip(s["x"], s["y"], strict=True)}
    named = {f"{m}, T = {at.removeprefix('T=')}": y for (m, at), y in bars.items() if m != "SGD"}
    return {r.SGD: bars["SGD", "SGD"], **named}
