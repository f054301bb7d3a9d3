"""The published curves, as recovered from the paper's vector graphics, and which of ours each belongs to."""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foof.study.paper import networks as n
from foof.study.paper import searches as r
from foof.study.paper.catalogue import NUMBERS

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
# The convolutional half: figure, panel, and published label to ours. Curves over epochs are shown over steps, as ours are.
ALL = {"FOOF": r.FOOF, "KFAC": r.KFAC, "SGD+M": r.SGD, "Adam": r.ADAM}
SUBSAMPLED = {"KFAC SubS": r.KFAC_ONE_BATCH, "KFAC Sub-S.": r.KFAC_ONE_BATCH, "Nat SubS": r.NATURAL, "Natural SubS": r.NATURAL}
DAMPED = {"KFAC correct damp.": r.RELEASED, "KFAC correct damp": r.RELEASED, "KFAC heuristic": r.KFAC}
PANELS = {"a": "left", "b": "middle", "c": "right"}
BATCH_SIZES = dict(zip((128, 256, 512, 1024), n.BATCHES, strict=True))
NETS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    **{f"fig5{x}": [("5", x.upper(), ALL)] for x in "bcd"},
    **{f"figj12{x}": [("J.12", side, {**ALL, **SUBSAMPLED})] for x, side in (("a", "left"), ("b", "right"))},
    **{f"figj14{x}": [("J.14", side, {**ALL, **DAMPED})] for x, side in (("a", "left"), ("b", "right"))},
    **{f"figj16{x}": [("J.16", side, ALL)] for x, side in (("a", "left"), ("b", "right"))},
    **{f"figj13{x}": [("J.13", side, {**ALL, **SUBSAMPLED})] for x, side in PANELS.items()},
    **{f"figj15{x}": [("J.15", side, {**ALL, **DAMPED})] for x, side in PANELS.items()},
    **{f"figj22{x}": [("J.22", side, {**ALL, **dict.fromkeys(("KFAC Emp.", "KFAC Emp. (solid)", "KFAC Emp. (dotted)"), n.EMPIRICAL)})]
       for x, side in PANELS.items()},
    **{f"figj{k}a": [(f"J.{k}", "A", ALL)] for k in NUMBERS.values()},
    **{f"figj{k}c": [(f"J.{k}", x, {"KFAC": r.KFAC, "FOOF (lambda_A from KFAC)": r.FOOF_LAMBDA_A}) for x in "BC"]
       for k in NUMBERS.values()},
    "figj17": [("J.17", f"batch {size}", {name: n.label_17(ours, b) for name, ours in ALL.items()}) for size, b in BATCH_SIZES.items()],
    "figj18": [("J.18", name, {f"batch {size}": n.label_17(ALL[name], b) for size, b in BATCH_SIZES.items()})
               for name in ("SGD+M", "KFAC", "FOOF")],
}  # fmt: skip
PER_EPOCH = {"FACES": 104, "MNIST": 60, "CURVES": 20}  # updates, by the spacing of published points
SVHN_IMAGES = 73_257
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
    if figure in NETS:
        return [_net_panel(*which) for which in NETS[figure]]
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


def _net_panel(number: str, panel: str, ours: dict[str, str]) -> Panel:
    found = _panels()[number, panel]
    series = tuple(
        Series(ours[s["label"]], s["label"], _steps(found, s), s["y"], s.get("y_lo", []), s.get("y_hi", []))
        for s in found["series"] if s["label"] in ours
    )  # fmt: skip
    return Panel(f"{number} {panel}" if len(panel) > 1 else f"{number}{panel}", 0.0, series)


def _steps(panel: dict, series: dict) -> list[float]:
    """Published epochs, of autoencoders and of SVHN, as updates."""
    name = panel["dataset"].partition(" ")[0]
    if name in PER_EPOCH:
        return [PER_EPOCH[name] * x for x in series["x"]]
    if name == "SVHN,":
        size = int((panel["panel"] if panel["figure"] == "J.17" else series["label"]).removeprefix("batch "))
        return [x * SVHN_IMAGES / size for x in series["x"]]
    return series["x"]


def _from_one(steps: list[float]) -> list[float]:
    """Published steps that count from 0 by ones, as those of full batches, are our 1, 2, ..."""
    return [x + 1 for x in steps] if steps[:2] == [0, 1] else steps


def labels(figure: str, dataset: str) -> set[str]:
    """Our names of the published curves of a figure."""
    if figure in ("fig4a", "fig5a"):
        return set(seconds_per_epoch(dataset))
    return {series.label for panel in panels(figure, dataset) for series in panel.series}


def mean(figure: str, label: str, first: float, last: float) -> float:
    """The mean of a published Fashion-MNIST curve over the steps from `first` to `last`."""
    (panel,) = panels(figure, "fashion-mnist")
    values = [y for s in panel.series if s.label == label for x, y in zip(s.x, s.y, strict=True) if first < x <= last]
    return statistics.fmean(values)


def seconds_per_epoch(dataset: str) -> dict[str, float]:
    """The bars of Fig. 4A, or of Fig. 5A."""
    if dataset == "cifar-10":
        return {ALL.get(s["label"], r.SGD): s["y"][0] for s in _panels()["5", "A"]["series"]}
    found = _panels()["J.11" if dataset == "mnist" else "4", "A"]
    bars = {(s["label"], at): y for s in found["series"] for at, y in zip(s["x"], s["y"], strict=True)}
    named = {f"{m}, T = {at.removeprefix('T=')}": y for (m, at), y in bars.items() if m != "SGD"}
    return {r.SGD: bars["SGD", "SGD"], **named}
