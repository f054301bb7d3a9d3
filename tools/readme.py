"""Write what the README takes from the committed records at the paper's scale: its picture, the caption, and the section on findings."""

import re
from collections import Counter
from pathlib import Path

from foof.study.paper.experiments import Outcome, committed, experiments_of
from foof.study.paper.searches import FOOF_10
from foof.study.paper.verdicts import Ruling
from foof.study.search.presets import PRESETS
from foof.study.show.drawings import Curves, draw
from foof.study.show.headline import headline
from foof.study.show.report import recalled
from foof.study.show.svg import curves_svg

ROOT = Path(__file__).parents[1]
PICTURE, README = ROOT / "docs/img/loss.svg", ROOT / "README.md"
PAPER = PRESETS["paper"]


def outcomes() -> list[Outcome]:
    return recalled(list(experiments_of(PAPER).values()), PAPER, committed(PAPER))


def block(name: str) -> re.Pattern[str]:
    """What stands between two comments of the README."""
    return re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", flags=re.S)


def picture(found: list[Outcome]) -> str:
    """The training loss of each method at its best setting, mean ± deviation over seeds."""
    drawn = draw(_fig4b(found))[0]
    assert isinstance(drawn, Curves)
    sizes = "-".join(map(str, (784, *PAPER.base.hidden, 10)))
    return curves_svg([c for c in drawn.curves if c.label != FOOF_10], f"Fashion-MNIST, {sizes}, batch {PAPER.base.batch_size}")


def _fig4b(found: list[Outcome]) -> Outcome:
    return next(o for o in found if o.experiment.id == "fig4b")


def caption(found: list[Outcome]) -> str:
    """What the picture shows, and of how many seeds."""
    seeds = Counter(len(t.records) for label, t in _fig4b(found).found.items() if label != FOOF_10)
    of = " or ".join(str(n) for n in sorted(seeds))
    return (
        f"*Training loss over {PAPER.base.steps:,} steps, each method at the best learning rate and damping of those tried, smoothed as in "
        f"the paper; mean and standard deviation over seeds ({of}). Drawn by `tools/readme.py` from the records in this repository.*\n"
    )


def findings(found: list[Outcome]) -> str:
    """How many claims hold, what became of the standard damping, and every claim that does not hold."""
    verdicts = [v for o in found for v in o.verdicts if o.experiment.id != "toy"]
    counts, top = Counter(v.ruling for v in verdicts), headline([(PAPER, found)])
    assert top is not None
    decided = sum(counts[r] for r in (Ruling.HOLDS, Ruling.FAILS, Ruling.UNDECIDED))
    lines = [
        f"Of {len(verdicts)} statements on Fashion-MNIST and MNIST, {decided} have been run at the paper's scale so far: "
        f"{counts[Ruling.HOLDS]} hold, {counts[Ruling.FAILS]} not, {counts[Ruling.UNDECIDED]} are undecided.", "", top.sentence, "",
    ]  # fmt: skip
    failing = [f"- *{v.claim}* ({v.where}) " + "; ".join(v.measured.splitlines()) for v in verdicts if v.ruling is Ruling.FAILS]
    return "\n".join([*lines, *(["What does not hold:", "", *failing] if failing else [])]) + "\n"


if __name__ == "__main__":
    found = outcomes()
    PICTURE.write_text(picture(found), encoding="utf-8")
    text = README.read_text(encoding="utf-8")
    for name, write in (("caption", caption), ("findings", findings)):
        new = write(found)
        text = block(name).sub(lambda _, new=new: new, text)
    README.write_text(text, encoding="utf-8")
