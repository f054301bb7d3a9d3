"""The experiments of the study: what each needs to be run, how its claims are judged, what is drawn.

An experiment is data and two functions from records: one to verdicts, one to figures. `conduct` brings them together with
whatever gives records for settings: a sweep that trains, or a store that remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from foof.study import figures
from foof.study.setting import Record, Setting
from foof.study.store import Store
from foof.study.toy import toy
from foof.study.tune import RunAll, Search, Tuned, lr_grid, tune_all
from foof.study.verdict import Ruling, Verdict, lower, of

Found = Mapping[str, Tuned]  # what each search of an experiment found


@dataclass(frozen=True)
class Preset:
    """How large the study is."""

    name: str
    about: str
    base: Setting
    seeds: int
    fine: bool  # whole grids of learning rates; otherwise one value


MOMENTUM = (("momentum", 0.9),)
EVERY_TEN = (("T", 10), ("S", 10))  # inverted every ten steps, statistics from all of them
PRESETS: dict[str, Preset] = {
    "smoke": Preset(
        "smoke", "seconds: tiny networks, to see that everything works",
        Setting(train_size=500, hidden=(16,), batch_size=50, steps=20, log_every=2), seeds=2, fine=False,
    ),
    "quick": Preset(
        "quick", "a few minutes: the paper's network at half its width on the embedded 6,000 images, 5 epochs",
        Setting(hidden=(500, 500, 500), steps=300), seeds=3, fine=True,
    ),
    "paper": Preset(
        "paper", "hours: the paper's network on all of Fashion-MNIST, 10 epochs",
        Setting(source="full", steps=6000), seeds=3, fine=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Experiment:
    """One question to the paper."""

    id: str
    title: str
    where: str  # in the paper
    claimed: str
    judge: Callable[[Found], list[Verdict]]
    draw: Callable[[Found], list[go.Figure]]
    searches: Callable[[Preset], dict[str, Search]] = lambda preset: {}


@dataclass(frozen=True)
class Outcome:
    """An experiment after it was run."""

    experiment: Experiment
    found: Found
    verdicts: list[Verdict]
    figures: list[go.Figure]


class NotRun(LookupError):
    """Records were asked for that are not stored."""


RESULTS = Path(__file__).parent / "results"  # records of this repository, one dump per preset


def committed(preset: Preset) -> Path:
    """The dump of the records that came with the package, if there is one for this preset."""
    return RESULTS / f"{preset.name}.jsonl.gz"


def remembered(store: Store) -> RunAll:
    """Records from the store alone, for figures and reports, which never train."""

    def look_up(settings: Sequence[Setting]) -> list[Record]:
        found = [store.get(setting) for setting in settings]
        if missing := sum(record is None for record in found):
            raise NotRun(f"{missing} of {len(found)} runs are not in {store.path}; run `foof reproduce` first")
        return [record for record in found if record]

    return look_up


def conduct(experiments: Sequence[Experiment], preset: Preset, run_all: RunAll) -> list[Outcome]:
    """Run all searches of all experiments side by side, then judge and draw each."""
    searches = {(e.id, label): search for e in experiments for label, search in e.searches(preset).items()}
    tuned = tune_all({"\n".join(key): search for key, search in searches.items()}, run_all)
    outcomes = []
    for e in experiments:
        found = {label: tuned[f"{e.id}\n{label}"] for id_, label in searches if id_ == e.id}
        outcomes.append(Outcome(e, found, e.judge(found), e.draw(found)))
    return outcomes


# Appendix E -----------------------------------------------------------------------------------------------------------


def _judge_toy(_: Found) -> list[Verdict]:
    example = toy()
    sgd, foof = example.losses["SGD"], example.losses["FOOF"]
    rises, optimum = bool((sgd[1:, 1] > sgd[0, 1]).all()), float(foof[-1].sum())
    falls = bool((foof[1:] < foof[0]).all())

    def row(id_: str, claim: str, measured: str, rule: str, holds: bool) -> Verdict:
        return Verdict(id_, "Appendix E", claim, measured, rule, Ruling.HOLDS if holds else Ruling.FAILS, "toy")

    def vector(v: Sequence[float]) -> str:
        return "(" + ", ".join(f"{x:.6g}" for x in v) + ")"

    return [
        row("toy-sgd", "SGD's update raises the loss of the second datapoint whatever the step size.",
            f"direction {vector(example.sgd.tolist())}; loss {sgd[0, 1]:.3g} → {sgd[-1, 1]:.3g} at step size 1",
            "loss of the second datapoint higher at every step size in (0, 1]", rises),
        row("toy-foof", "Undamped FOOF lowers both losses, and one step of size 1 is a global optimum.",
            f"direction {vector(example.foof.tolist())}; total loss {float(foof[0].sum()):.3g} → {optimum:.2g}",
            "both losses lower at every step size in (0, 1], and total loss at 1 below 1e-20", falls and optimum < 1e-20),
    ]  # fmt: skip


TOY = Experiment(
    "toy", "Two datapoints that disagree", "Appendix E",
    "Gradients of different datapoints can conflict. SGD adds them up, so one can overwrite the other; FOOF finds the update "
    "that serves both.",
    _judge_toy, lambda _: [figures.toy_figure(toy())],
)  # fmt: skip


# Fig. 4B: FOOF against the others --------------------------------------------------------------------------------


def _all_methods(preset: Preset) -> dict[str, Search]:
    base, seeds = preset.base, preset.seeds

    def search(setting: Setting, low: float, high: float, damping: float | None = None) -> Search:
        lrs = lr_grid(low, high) if preset.fine else lr_grid(low, high)[1:2]
        return Search(setting, lrs, (damping,), seeds=seeds)

    return {
        "SGD + momentum": search(base.but(optimizer="sgd", options=MOMENTUM), 0.003, 0.03),
        "Adam": search(base.but(optimizer="adam"), 1e-4, 1e-3),
        "KFAC": search(base.but(optimizer="kfac", options=EVERY_TEN), 0.003, 0.03, 0.01),
        "FOOF": search(base.but(optimizer="foof", options=EVERY_TEN), 0.3, 3.0, 1.0),
    }


def _judge_all_methods(found: Found) -> list[Verdict]:
    foof = of(found["FOOF"].records, "train_loss")
    searched = all(len(tuned.tried) > 1 for tuned in found.values())
    verdicts = []
    for other in ("SGD + momentum", "Adam", "KFAC"):
        loss = of(found[other].records, "train_loss")
        verdicts.append(Verdict(
            f"foof-vs-{found[other].best.optimizer}", "Section 4, Fig. 4B",
            f"FOOF reaches a lower training loss than {other} in the same number of steps.",
            f"FOOF {foof}; {other} {loss}; ratio {loss.mean / foof.mean:.3g}",
            "learning rates were searched, and mean final training loss is lower by more than both standard deviations together",
            lower(foof, loss) if searched else Ruling.UNDECIDED, "methods",
        ))  # fmt: skip
    return verdicts


def _draw_all_methods(found: Found) -> list[go.Figure]:
    long = min(len(r.series["step"]) for t in found.values() for r in t.records) >= 300  # the paper logs 600 points
    keep = 0.9 if long else 0.0  # over few points, smoothing would show itself alone
    curves = [figures.curve(t.records, label, keep=keep) for label, t in found.items()]
    heading = "Training loss of mini-batches" + (", smoothed as in the paper (0.9)" if long else "")
    drawn = [figures.curves_figure(curves, heading)]
    if any(len(t.tried) > 1 for t in found.values()):
        drawn.append(figures.tuning_figure({label: t.tried for label, t in found.items()}, "The search behind it, one seed"))
    return drawn


METHODS_COMPARED = Experiment(
    "methods", "FOOF against SGD, Adam and KFAC", "Section 4, Fig. 4B",
    "Gradient descent on neurons (FOOF) trains faster than SGD with momentum and Adam, and also than KFAC, each tuned by its own "
    "search.",
    _judge_all_methods, _draw_all_methods, _all_methods,
)  # fmt: skip

EXPERIMENTS: dict[str, Experiment] = {e.id: e for e in (TOY, METHODS_COMPARED)}
