"""The three questions a reader comes with, and the numbers that answer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foof.study.paper import searches as r
from foof.study.paper.catalogue import CATALOGUE
from foof.study.paper.experiments import Outcome
from foof.study.paper.rules import Measured, Term, decide, lower
from foof.study.paper.verdicts import Ruling


@dataclass(frozen=True)
class Comparison:
    """Is `a` better than `b` in an experiment?"""

    experiment: str
    a: str
    b: str
    setting: str  # in words

    def measured(self, outcomes: dict[str, Outcome]) -> Measured:
        found = outcomes[self.experiment].found if self.experiment in outcomes else {}
        return decide(lower(Term(self.a), Term(self.b)), found, None)


@dataclass(frozen=True)
class Question:
    """Its first comparisons decide it, of those that have been run; the others stand beside them."""

    text: str
    comparisons: tuple[Comparison, ...]
    deciding: int = 1
    why: str = ""  # what decides it, in words, where the paper's scale has been run


QUESTIONS = (
    Question("Does KFAC beat exact natural gradients when both are tuned?", (
        Comparison("fig2a", r.KFAC, r.NATURAL_FULL, "one layer, full batch, full Fisher (Fig. 2A)"),
        Comparison("fig1d", r.KFAC, r.NATURAL_FULL, "the whole network, full batch, full Fisher (Fig. 1D)"),
        Comparison("fig2c", r.KFAC, r.BY_LAYER_FULL, "layer by layer, full batch, full Fisher (Fig. 2C, step 50)"),
        Comparison("fig1a", r.KFAC, r.NATURAL, "mini-batches, each Fisher of one (Fig. 1A)"),
        Comparison("figj12a", r.KFAC_ONE_BATCH, r.NATURAL, "a ResNet18 without batch norm, both subsampled (Fig. J.12)"),
        Comparison("figj13b", r.KFAC_ONE_BATCH, r.NATURAL, "an autoencoder on MNIST, both subsampled (Fig. J.13)"),
    ), deciding=2, why=(
        "With the exact Fisher the gap is a small factor or none, and what limits either is how large a constant step it bears on every"
        " seed: at settings that explode on some, both end far lower (Figs. 1D and 2A). The gap of an order of magnitude is "
        "that of Fishers from one mini-batch (Fig. 1A)."
    )),
    Question("Is heuristic damping needed?", (
        Comparison("fig3a", r.KFAC, r.STANDARD, "KFAC at its best λ with either damping (Fig. 3A)"),
        Comparison("fig3a", r.HEURISTIC, r.STANDARD, "heuristic damping at the λ of Fig. 3C (Fig. 3A)"),
        Comparison("fig3a", r.STANDARD, r.SGD, "but standard damping, too, is ahead of SGD (Fig. 3A)"),
        Comparison("figj14a", r.KFAC, r.STANDARD, "a ResNet18 without batch norm (Fig. J.14)"),
        Comparison("figj15b", r.KFAC, r.STANDARD, "an autoencoder on MNIST (Fig. J.15)"),
    ), why=(
        "With standard damping, solved as Eq. (3) says, small λ lead early, and then stall or diverge, and large ones are slow;"
        " the heuristic goes on. What the paper shows for it, a curve like SGD's over 1,800 steps, is what the released, "
        "transposed rotation gives at the paper's setting."
    )),
    Question("Does FOOF beat KFAC?", (
        Comparison("fig4b", r.FOOF, r.KFAC, "mini-batches (Fig. 4B)"),
        Comparison("fig3d", r.label_3(r.FOOF_LAMBDA_A, r.DAMPINGS[1]), r.label_3(r.KFAC, r.DAMPINGS[1]), "at the same small λ_A (Fig. 3D)"),
        Comparison("fig5b", r.FOOF, r.KFAC, "a ResNet18 without batch norm (Fig. 5B)"),
        Comparison("fig5c", r.FOOF, r.KFAC, "a ResNet18 with batch norm (Fig. 5C)"),
        Comparison("figj20a", r.FOOF, r.KFAC, "an autoencoder on MNIST (Fig. J.20)"),
    ), why=(
        "In training loss, and in less time per step (Fig. 4A). On unseen images it makes slightly more errors than KFAC "
        "(Section 5). At the reduced scale it is ahead on a ResNet18 without batch norm, and behind with it and in "
        "autoencoders."
    )),
)  # fmt: skip
WORDS = {Ruling.HOLDS: "Yes", Ruling.FAILS: "No", Ruling.UNDECIDED: "Not decided", Ruling.NOT_RUN: "Not run"}


@dataclass(frozen=True)
class Answer:
    """A question, the word for the comparisons that decide it, and what was measured of each."""

    question: str
    rulings: frozenset[Ruling]  # of those that decide it
    parts: tuple[tuple[str, Measured], ...]  # setting in words, and what came out
    why: str = ""

    @property
    def ruling(self) -> Ruling:
        return next(iter(self.rulings)) if len(self.rulings) == 1 else Ruling.UNDECIDED

    @property
    def word(self) -> str:
        decided = self.rulings & {Ruling.HOLDS, Ruling.FAILS}
        if len(self.rulings) < 2 or not decided:
            return WORDS[self.ruling]
        return "In part" if len(decided) > 1 else f"In part, {WORDS[next(iter(decided))].lower()}"

    @property
    def sentence(self) -> str:
        """All of it in a few words, for pages without the report."""
        said = [f"{setting}: {_ratio(measured)}" for setting, measured in self.parts if measured.ruling is not Ruling.NOT_RUN]
        return f"{self.word}: {'; '.join(said)}." if said else f"{self.word}."


def _ratio(measured: Measured) -> str:
    losses, _, rest = measured.text.partition("; ratio ")
    return f"{losses.replace('; ', ' against ')}, a ratio of {rest}"


def _where(c: Comparison, there: dict[str, Outcome]) -> str:
    """In which setting, and, where that is smaller than the paper's, that it is."""
    mark = there[c.experiment].experiment.mark(there[c.experiment].preset)
    return f"{c.setting}, {mark}" if mark else c.setting


def answers(outcomes: Sequence[Outcome]) -> list[Answer]:
    """The answers that these outcomes give. What lacks runs is named where they are asked for; of the convolutional half, what was run."""
    there = {o.experiment.id: o for o in outcomes}
    found = []
    for question in QUESTIONS:
        asked = [(c, c.measured(there)) for c in question.comparisons]
        wanted = {c for c in question.comparisons if c.experiment in there and not CATALOGUE[c.experiment].nets}
        parts = tuple((_where(c, there), m) for c, m in asked if m.ruling is not Ruling.NOT_RUN or c in wanted)
        ran = [(c, m.ruling) for c, m in asked if m.ruling is not Ruling.NOT_RUN]
        deciding = [ruling for c, ruling in ran if c in question.comparisons[: question.deciding]] or [ruling for _, ruling in ran[:1]]
        why = question.why if any(o.preset.centred for o in outcomes) else ""
        found.append(Answer(question.text, frozenset(deciding) or frozenset({Ruling.NOT_RUN}), parts, why))
    return found
