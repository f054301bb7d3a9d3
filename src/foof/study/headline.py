"""What stands at the top of the report: the standard damping of Fig. 3, solved as Eq. (3) says and as in the released code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foof.study.experiments import Outcome
from foof.study.presets import Preset
from foof.study.rules import Found, Term
from foof.study.runs import DAMPINGS, KFAC, RELEASED, SGD, STANDARD, label_3
from foof.study.verdict import Verdict

PUBLISHED_LOSS = {KFAC: 0.1046, RELEASED: 0.2459, SGD: 0.2668}  # Fig. 3A at update 1,791
PUBLISHED_COSINE = {KFAC: 0.7565, RELEASED: 0.09537}  # Fig. 3B at update 1,800
NAMES = {
    KFAC: "KFAC, heuristic damping", STANDARD: "KFAC, standard damping as in Eq. (3)",
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


def headline(candidates: Sequence[tuple[Preset, Sequence[Outcome]]]) -> Headline | None:
    """From the first preset that has records of both dampings; None if there is none."""
    for preset, outcomes in candidates:
        by_id = {o.experiment.id: o for o in outcomes}
        if {"fig3a", "fig3b"} <= set(by_id) and {STANDARD, RELEASED, SGD} <= set(by_id["fig3a"].found):
            return _headline(preset, by_id["fig3a"], by_id["fig3b"])
    return None


def _headline(preset: Preset, a: Outcome, b: Outcome) -> Headline:
    until = a.experiment.until(preset)
    losses = {label: Term(label).spread(a.found, until) for label in NAMES if label in a.found}
    cosines = {label: Term(by, "similarity").spread(b.found, until) for label, by in _cosine_of(b.found).items()}
    rows = [
        {
            "": NAMES[label],
            "training loss": _beside(str(loss), PUBLISHED_LOSS.get(label), preset),
            "cosine with FOOF's update": _beside(str(cosines.get(label, "–")), PUBLISHED_COSINE.get(label), preset),
        }
        for label, loss in losses.items()
    ]
    standard, released, sgd = (losses[label].mean for label in (STANDARD, RELEASED, SGD))
    sentence = (
        f"The paper finds that KFAC with standard damping performs like SGD (Fig. 3A). The released code for that damping rotates "
        f"with a transposed matrix. Run as released, KFAC ends at a loss of {released:.3g}, SGD at {sgd:.3g}. With the damped system "
        f"solved as Eq. (3) says it ends at {standard:.3g}"
        + (f", {sgd / standard:.2g} times below SGD" if standard < sgd else f", {standard / sgd:.2g} times SGD's")
        + (f"; heuristic damping ends at {losses[KFAC].mean:.3g}." if KFAC in losses else ".")
    )
    ids = ("standard-worse", "standard-like-sgd", "released-worse", "released-like-sgd", "heuristic-similarity", "released-similarity")
    verdicts = [v for o in (a, b) for v in o.verdicts if v.id in ids]
    about = preset.about + ("" if preset.centred else ". At the paper's scale there are no records of both dampings yet")
    return Headline(preset.name, about, sentence, rows, verdicts)


def _beside(ours: str, published: float | None, preset: Preset) -> str:
    """Published values stand beside runs of the paper's size only."""
    return ours if published is None or not preset.centred else f"{ours}; published {published:.3g}"


def _cosine_of(found: Found) -> dict[str, str]:
    """Whose similarity stands for which method: heuristic damping's is that of the strongest of Fig. 3B."""
    wanted = {KFAC: label_3(KFAC, DAMPINGS[0]), STANDARD: STANDARD, RELEASED: RELEASED}
    return {label: by for label, by in wanted.items() if by in found}
