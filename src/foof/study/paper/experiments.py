"""The experiments of the study: what each needs to be run, and which claims it decides.

`conduct` brings them together with whatever gives records for settings, a sweep that trains; `recall` with a store that
remembers, and makes the best of what is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from foof.study.paper import networks, published, searches
from foof.study.paper.catalogue import CATALOGUE
from foof.study.paper.claims import Claim, claims_of
from foof.study.paper.rules import Found, decide
from foof.study.paper.searches import SGD
from foof.study.paper.toy import toy
from foof.study.paper.verdicts import Ruling, Verdict
from foof.study.search.estimate import remaining
from foof.study.search.grids import Get, RunAll, Search, look, tune_all
from foof.study.search.presets import Preset
from foof.study.search.store import Store
from foof.study.train.run import missing_data
from foof.study.train.setting import Setting

RUNS = {**searches.RUNS, **networks.RUNS}
EARLIER = "where the published figure ends"
TOY_CLAIMS = ("toy-sgd", "toy-foof")  # computed, not run
OTHER_DATA_LATER = 10  # urgency: all of Fashion-MNIST comes before MNIST


@dataclass(frozen=True)
class Experiment:
    """One figure of the paper, or one question to it, on one data set."""

    id: str
    figure: str  # in RUNS, CATALOGUE and claims
    dataset: str = "fashion-mnist"
    claims: tuple[Claim, ...] = ()
    labels: tuple[str, ...] | None = None  # only these curves; None: all

    @property
    def again(self) -> bool:
        """Is it a figure of Fashion-MNIST that the paper has for MNIST, too? Those of the convolutional half have data of their own."""
        return self.dataset == "mnist" and not CATALOGUE[self.figure].nets

    @property
    def title(self) -> str:
        return CATALOGUE[self.figure].title + (" (MNIST)" if self.again and self.figure != "one-hidden" else "")

    @property
    def where(self) -> str:
        entry = CATALOGUE[self.figure]
        return entry.mnist if self.again else entry.where

    @property
    def claimed(self) -> str:
        return CATALOGUE[self.figure].claimed

    def searches(self, preset: Preset) -> dict[str, Search]:
        found = RUNS[self.figure](preset, self.dataset) if self.figure in RUNS else {}
        if self.again:  # on Fashion-MNIST, for which alone the paper gives its settings
            shown = {*needed(self.claims), *published.labels(self.figure, self.dataset)}
            found = {k: s for k, s in found.items() if k in shown}
            found = {k: replace(s, urgency=s.urgency + OTHER_DATA_LATER, known=len(s.grid) == 1, trials=0) for k, s in found.items()}
        return {k: s for k, s in found.items() if self.labels is None or k in self.labels}

    def mark(self, preset: Preset) -> str:
        """What is to be said with every verdict on it: that it is much smaller than the paper's, or on other images than the paper's."""
        if preset.reduced:
            return "reduced"
        other = {s.base.dataset for s in self.searches(preset).values()} - {self.dataset} if CATALOGUE[self.figure].nets else set()
        return f"small, on {', '.join(sorted(other))}" if other else ""

    def early(self, preset: Preset) -> int | None:
        """Where the published figure ends, if that is before the end of training. Claims are judged at the end."""
        return preset.early if CATALOGUE[self.figure].early else None


@dataclass(frozen=True)
class Outcome:
    """An experiment after it was run, or as far as it was."""

    experiment: Experiment
    preset: Preset
    found: Found
    verdicts: list[Verdict]
    left: tuple[Setting, ...] = ()  # runs that are still to be done, as far as can be told


class NotRun(LookupError):
    """Records were asked for that are not stored."""


RESULTS = Path(__file__).parents[1] / "results"  # records of this repository, one dump per preset


def committed(preset: Preset) -> Path:
    """The dump of the records that came with the package, if there is one for this preset."""
    return RESULTS / f"{preset.name}.jsonl.gz"


def experiments_of(preset: Preset) -> dict[str, Experiment]:
    """All experiments of a preset by id: `toy`, `fig1a`, ..., `fig1a-mnist` where MNIST belongs to it, and its convolutional half."""
    found = []
    for dataset in preset.datasets:
        for figure, entry in CATALOGUE.items():
            if not entry.nets and (entry.mnist if dataset == "mnist" else entry.where):
                id_ = figure if dataset == "fashion-mnist" else f"{figure}-{dataset}"
                found.append(Experiment(id_, figure, dataset, tuple(claims_of(figure, dataset == "mnist"))))
    if preset.nets:
        figures = preset.nets.figures or [figure for figure, entry in CATALOGUE.items() if entry.nets]
        found += [Experiment(figure, figure, networks.NEEDS[figure], tuple(claims_of(figure, again=False))) for figure in figures]
    return {e.id: e for e in found}


def chosen(names: Iterable[str], preset: Preset) -> list[Experiment]:
    """Experiments by name: an id (`fig3a`, `fig3a-mnist`), the beginning of some (`fig3`), or a claim (`foof-vs-kfac`: what it needs)."""
    there = experiments_of(preset)
    picked: dict[str, Experiment] = {}
    for name in names:
        beginning = [e for id_, e in there.items() if name.startswith("fig") and id_.startswith(name)]
        matching = [there[name]] if name in there else beginning
        claiming = [_only(e, c) for e in there.values() for c in e.claims if name == claim_id(c, e.again)]
        claiming += [there["toy"]] if name in TOY_CLAIMS and "toy" in there else []
        if not matching and not claiming:
            known = ", ".join(there) + ", and the claims that `foof claims` lists"
            raise ValueError(f"no experiment and no claim of the preset {preset.name} is called {name!r}; there are {known}")
        for e in matching or claiming:
            before = picked.get(e.id)
            picked[e.id] = e if before is None or e.labels is None else _join(before, e)
    return list(picked.values())


def _only(e: Experiment, claim: Claim) -> Experiment:
    beside = (SGD,) if CATALOGUE[e.figure].draws == "time" else ()  # what times are relative to
    return replace(e, claims=(claim,), labels=(*claim.rule.needs, *beside))


def _join(a: Experiment, b: Experiment) -> Experiment:
    if a.labels is None or b.labels is None:
        return a if a.labels is None else b
    return replace(a, claims=tuple(dict.fromkeys((*a.claims, *b.claims))), labels=tuple(dict.fromkeys((*a.labels, *b.labels))))


def lacking(e: Experiment, preset: Preset) -> str:
    """What an experiment needs that is not here, in words; empty if it can be run: its data, and a GPU for networks of the paper's size."""
    if preset.centred and CATALOGUE[e.figure].nets and not torch.cuda.is_available():
        return "a GPU"
    return next((what for search in e.searches(preset).values() if (what := missing_data(search.base))), "")


def needed(claims: Iterable[Claim]) -> set[str]:
    """The curves that some claims are decided by."""
    return {label for claim in claims for label in claim.rule.needs}


def conduct(experiments: Sequence[Experiment], preset: Preset, run_all: RunAll, stored: Get = lambda _: None) -> list[Outcome]:
    """Run all searches of all experiments side by side, except for what is stored, then judge each."""
    searches = {(e.id, label): search for e in experiments for label, search in e.searches(preset).items()}
    tuned = tune_all({"\n".join(key): search for key, search in searches.items()}, run_all, stored)
    return [outcome(e, preset, {label: tuned[f"{e.id}\n{label}"] for id_, label in searches if id_ == e.id}) for e in experiments]


def recall(experiments: Sequence[Experiment], preset: Preset, get: Get) -> list[Outcome]:
    """Judge from records alone, as far as they go. Nothing is trained."""
    outcomes = []
    for e in experiments:
        searches_ = e.searches(preset)
        looks = {label: look(search, get).tuned for label, search in searches_.items()}
        left = dict.fromkeys(s for search in searches_.values() for s in remaining(search, get))
        outcomes.append(replace(outcome(e, preset, {label: tuned for label, tuned in looks.items() if tuned}), left=tuple(left)))
    return outcomes


def begun(preset: Preset, get: Get) -> bool:
    """Is there a record of anything this preset runs?"""
    return any(look(search, get).tuned for e in experiments_of(preset).values() for search in e.searches(preset).values())


def remembered(store: Store) -> Get:
    """Records from the store, read once each."""
    seen: dict = {}

    def get(setting):  # type: ignore[no-untyped-def]
        if setting not in seen:
            seen[setting] = store.get(setting)
        return seen[setting]

    return get


def outcome(e: Experiment, preset: Preset, found: Found) -> Outcome:
    """The verdicts of an experiment from what its searches found."""
    if e.figure == "toy":
        return Outcome(e, preset, found, _judge_toy())
    return Outcome(e, preset, found, [verdict(c, e, preset, found) for c in e.claims])


def claim_id(claim: Claim, again: bool) -> str:
    """A claim's name: with the data set's where it is made for Fashion-MNIST and again for MNIST."""
    return f"{claim.id}-mnist" if again and claim.where else claim.id


def verdict(claim: Claim, e: Experiment, preset: Preset, found: Found) -> Verdict:
    measured = decide(claim.rule, found, None)
    early = e.early(preset)
    if early and measured.conditions and all(found[label].best.steps > early for label in claim.rule.needs):
        then = ", ".join(str(c.effect) for c in decide(claim.rule, found, early).conditions)
        measured = replace(measured, text=f"{measured.text}\n{EARLIER} (step {early:,}): ratio {then}")
    says = claim.says + (" (MNIST)" if e.again and claim.where else "")
    where = claim.mnist if e.again else claim.where
    where += f" ({mark})" if (mark := e.mark(preset)) else ""
    id_, rule = claim_id(claim, e.again), claim.rule.text()
    return Verdict(id_, where, says, measured.text, rule, measured.ruling, e.id, claim.about, measured.conditions, claim.changed)


# Appendix F -----------------------------------------------------------------------------------------------------------


def _judge_toy() -> list[Verdict]:
    example = toy()
    sgd, foof = example.losses["SGD"], example.losses["FOOF"]
    rises, optimum = bool((sgd[1:, 1] > sgd[0, 1]).all()), float(foof[-1].sum())
    falls = bool((foof[1:] < foof[0]).all())

    def row(id_: str, claim: str, measured: str, rule: str, holds: bool) -> Verdict:
        return Verdict(id_, "Appendix F", claim, measured, rule, Ruling.HOLDS if holds else Ruling.FAILS, "toy")

    def vector(v: Sequence[float]) -> str:
        return "(" + ", ".join(f"{x:.6g}" for x in v) + ")"

    return [
        row(TOY_CLAIMS[0], "SGD's update raises the loss of the second datapoint whatever the step size.",
            f"direction {vector(example.sgd.tolist())}; loss {sgd[0, 1]:.3g} → {sgd[-1, 1]:.3g} at step size 1",
            "loss of the second datapoint higher at every step size in (0, 1]", rises),
        row(TOY_CLAIMS[1], "Undamped FOOF lowers both losses, and one step of size 1 is a global optimum.",
            f"direction {vector(example.foof.tolist())}; total loss {float(foof[0].sum()):.3g} → {optimum:.2g}",
            "both losses lower at every step size in (0, 1], and total loss at 1 below 1e-20", falls and optimum < 1e-20),
    ]  # fmt: skip
