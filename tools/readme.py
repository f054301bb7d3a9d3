"""Write what the README takes from the committed records at the paper's scale: docs/img/loss.svg and the section on findings."""

import re
from collections import Counter
from pathlib import Path

from foof.study.drawings import Curves
from foof.study.experiments import Outcome, committed, experiments_of
from foof.study.headline import headline
from foof.study.presets import PRESETS
from foof.study.report import recalled
from foof.study.runs import FOOF_10
from foof.study.svg import curves_svg
from foof.study.verdict import Ruling

ROOT = Path(__file__).parents[1]
PICTURE, README = ROOT / "docs/img/loss.svg", ROOT / "README.md"
BLOCK = re.compile(r"(?<=<!-- findings -->\n).*?(?=<!-- end of findings -->)", flags=re.S)
PAPER = PRESETS["paper"]


def outcomes() -> list[Outcome]:
    return recalled(list(experiments_of(PAPER).values()), PAPER, committed(PAPER))


def picture(found: list[Outcome]) -> str:
    """The training loss of each method at its best setting, mean ± deviation over seeds."""
    drawn = next(o for o in found if o.experiment.id == "fig4b").drawings[0]
    assert isinstance(drawn, Curves)
    sizes = "-".join(map(str, (784, *PAPER.base.hidden, 10)))
    return curves_svg([c for c in drawn.curves if c.label != FOOF_10], f"Fashion-MNIST, {sizes}, batch {PAPER.base.batch_size}")


def findings(found: list[Outcome]) -> str:
    """How many claims hold, what became of the standard damping, and every claim that does not hold."""
    verdicts = [v for o in found for v in o.verdicts]
    counts, top = Counter(v.ruling for v in verdicts), headline([(PAPER, found)])
    assert top is not None
    decided = sum(counts[r] for r in (Ruling.HOLDS, Ruling.FAILS, Ruling.UNDECIDED))
    lines = [
        f"At the paper's scale {decided} claims have been run: {counts[Ruling.HOLDS]} hold, {counts[Ruling.FAILS]} do not, "
        f"{counts[Ruling.UNDECIDED]} are undecided. {top.sentence}", "", "What does not hold:", "",
        *(f"- *{v.claim}* ({v.where}) " + "; ".join(v.measured.splitlines()) for v in verdicts if v.ruling is Ruling.FAILS),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    found = outcomes()
    PICTURE.write_text(picture(found), encoding="utf-8")
    README.write_text(BLOCK.sub(lambda _: findings(found), README.read_text(encoding="utf-8")), encoding="utf-8")
