"""Write what README and docs take from the committed records: pictures, caption, findings; the claims of Figs. 1 to 4 and the trials behind
them; which verdicts changed and why; what is left to run; the convolutional half at the reduced scale, beside the published curves."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

from foof.study.paper.answers import Answer, answers
from foof.study.paper.catalogue import CATALOGUE
from foof.study.paper.changes import UNTIL, changes
from foof.study.paper.experiments import EARLIER, Outcome, committed, experiments_of
from foof.study.paper.left import left, total
from foof.study.paper.notes import NOT_REPRODUCED, RELEASED
from foof.study.paper.rules import Term
from foof.study.paper.searches import FOOF_10, KFAC, SGD, STANDARD
from foof.study.paper.searches import RELEASED as RELEASED_CODE
from foof.study.paper.trials import trials
from foof.study.paper.verdicts import Ruling, Verdict
from foof.study.search.estimate import RATE, core_seconds
from foof.study.search.presets import PRESETS
from foof.study.search.store import read_dump
from foof.study.show.drawings import Curves, draw
from foof.study.show.report import recalled
from foof.study.show.scoreboard import MARKS, brief, groups, scoreboard_svg
from foof.study.show.svg import curves_svg, side_by_side

ROOT = Path(__file__).parents[1]
PICTURE, BOARD, README = ROOT / "docs/img/loss.svg", ROOT / "docs/img/scoreboard.svg", ROOT / "README.md"
JUDGING, SMALL, SMALL_BOARD = ROOT / "docs/judging.md", ROOT / "docs/img/reduced.svg", ROOT / "docs/img/scoreboard-reduced.svg"
PAPER, REDUCED = PRESETS["paper"], PRESETS["reduced"]


def outcomes() -> list[Outcome]:
    return recalled(list(experiments_of(PAPER).values()), PAPER, committed(PAPER))


def reduced_outcomes() -> list[Outcome]:
    return recalled(list(experiments_of(REDUCED).values()), REDUCED, committed(REDUCED))


def block(name: str) -> re.Pattern[str]:
    """What stands between two comments of a page."""
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


def board(found: list[Outcome]) -> str:
    """Every claim that has been run, as a cell. The convolutional half, which the paper's scale has no runs of, has a board of its own."""
    return scoreboard_svg(_verdicts([o for o in found if not _net(o)]), "The paper's claims at its own scale, Fashion-MNIST and MNIST")


def small_board(there: list[Outcome]) -> str:
    """The same of the reduced scale."""
    return scoreboard_svg(_verdicts(there), f"The convolutional half, {REDUCED.mark}")


def _verdicts(found: list[Outcome]) -> list[Verdict]:
    return [v for o in found for v in o.verdicts if o.experiment.id != "toy"]


def findings(found: list[Outcome]) -> str:
    """The three answers, how many claims hold in each part of the paper, and the board."""
    small = reduced_outcomes()
    lines = [
        "We ran it again. ✓: the 95 % interval of a ratio of losses lies where the claim wants it; ✕: none of it does; ?: neither, or runs "
        "are missing. 2× (1.8–2.3): the other's final training loss is twice as high, with its interval.", "",
        *_answered(found, small), "",
        *_counted(found, small), "",
        "*Heuristic damping* is KFAC's own: a λ for each of its two factors, where standard damping adds λ to the whole. "
        + _others(found, small), "",
        f"![Every claim as a cell with its verdict, its ratio and interval]({BOARD.relative_to(ROOT)})",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _answered(found: list[Outcome], small: list[Outcome]) -> list[str]:
    """A table: what was measured for each question, in either half of the study."""
    conv = {a.question: a for a in answers(small)}
    rows = [(f"**{a.question}**", _each(a), _each(conv[a.question])) for a in answers(found)]
    elsewhere = "[Convolutions and autoencoders](docs/study.md#the-convolutional-half), smaller than the paper's"
    return _table(("", "Fully connected, the paper's size", elsewhere), rows)


def _counted(found: list[Outcome], small: list[Outcome]) -> list[str]:
    """A table: how many of the paper's claims hold in each part of it."""
    parts = {
        "Figs. 1 to 4, Fashion-MNIST": _core(found),
        "Sections 5 and 6, appendices": _appendices(found),
        "MNIST": [o for o in found if o.experiment.dataset == "mnist" and not _net(o)],
        "Convolutions and autoencoders, smaller": small,
    }
    rows = []
    for part, those in parts.items():
        n = Counter(v.ruling for v in _verdicts(those) if v.about == "paper")
        rows.append((part, *(str(n[r]) for r in Ruling)))
    return _table(("The paper's claims", *(str(r) for r in Ruling)), rows)


def _others(found: list[Outcome], small: list[Outcome]) -> str:
    """The verdicts that are not on the paper's claims."""
    n = Counter((v.about, v.ruling) for v in _verdicts([*(o for o in found if not _net(o)), *small]))
    said = [
        f"{who} {n[about, Ruling.HOLDS]} hold, {n[about, Ruling.FAILS]} do not, {n[about, Ruling.UNDECIDED]} are undecided"
        for about, who in (("released", "of the claims on its released code"), ("ours", "of our own questions"))
    ]
    return f"Beside the paper's claims, {'; '.join(said)}."


def _standard(found: list[Outcome]) -> str:
    """Fig. 3A in a sentence: where each damping ends."""
    a = next(o for o in found if o.experiment.id == "fig3a").found
    ends = {label: Term(label).spread(a, None) for label in (STANDARD, RELEASED_CODE, KFAC, SGD)}
    return (
        f"*Fig. 3A*: at step {PAPER.base.steps:,} KFAC with standard damping is at {ends[STANDARD]} with the system solved as Eq. (3) "
        f"says, at {ends[RELEASED_CODE]} with the released code's transposed rotation, SGD at {ends[SGD]}, KFAC with heuristic damping at "
        f"{ends[KFAC]}. The paper's figure ends at step {PAPER.early:,}."
    )


def beside_published(there: list[Outcome]) -> str:
    """Each figure of the convolutional half whose curves have all been run, panel by panel, and the published one to its right.

    Where ours is one panel and theirs are several views of one, theirs is the last.
    """
    panels = []
    for o in there:
        drawn = [d for d in draw(o) if isinstance(d, Curves)]
        theirs = [d for d in drawn if d.heading.startswith("Published")]
        ours = drawn[: len(drawn) - len(theirs)]
        if theirs and o.found.keys() == o.experiment.searches(REDUCED).keys():
            for mine, other in zip(ours, theirs[-len(ours) :], strict=True):
                panel = f", beside {other.heading.rpartition(': ')[2]}" if len(ours) > 1 else ""
                title = f"{o.experiment.where}: {o.experiment.title}{panel} ({REDUCED.mark})"
                panels += [replace(mine, heading=title).svg(), other.svg()]
    return side_by_side({f"{i}": panel for i, panel in enumerate(panels)}, titled=False)


def _each(answer: Answer) -> str:
    """What every comparison of a question says, marked as on the board, and by which ratio."""
    ran = [(setting.removesuffix(", reduced"), m) for setting, m in answer.parts if m.ruling is not Ruling.NOT_RUN]
    return "<br>".join(f"{MARKS[m.ruling]} {setting}: {brief(m.conditions[0])}" for setting, m in ran) or "not run"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)]


def _core(found: list[Outcome]) -> list[Outcome]:
    """Figs. 1 to 4 on Fashion-MNIST."""
    return [o for o in found if o.experiment.figure[:4] in ("fig1", "fig2", "fig3", "fig4") and o.experiment.dataset == "fashion-mnist"]


def _net(o: Outcome) -> bool:
    """Is it of the convolutional half?"""
    return CATALOGUE[o.experiment.figure].nets


def _appendices(found: list[Outcome]) -> list[Outcome]:
    """What is asked of Fashion-MNIST beside Figs. 1 to 4."""
    core = _core(found)
    return [o for o in found if o.experiment.dataset == "fashion-mnist" and o not in core and not _net(o)]


def claims(found: list[Outcome]) -> str:
    """Verdict, ratios and rule of every claim of Figs. 1 to 4."""
    judged = _verdicts(_core(found))
    counts = "; ".join(f"{g.title.lower()}: {g.counts}" for g in groups(judged))
    rows = [(f"`{v.id}`", v.where, v.claim, str(v.ruling), _ratios(v), v.rule) for v in judged]
    header = ("Claim", "Where", "It says", "Verdict", "Ratio", "Holds if")
    caveats = [_standard(found), "", f"*As released*: {RELEASED}", "", f"*Fig. 3B*: {NOT_REPRODUCED}"]
    return "\n".join([f"Of {len(judged)}, {counts}.", "", *_table(header, rows), "", *caveats]) + "\n"


def _ratios(v: Verdict) -> str:
    """Of all conditions; of figures that end before training does, as of there, too."""
    then = re.search(rf"{EARLIER} .*", v.measured)
    return "; ".join(str(c.effect) for c in v.conditions) + (f"; {then[0]}" if then else "")


def tuned(found: list[Outcome]) -> str:
    """How each curve of Figs. 1 to 4 came by its settings."""
    rows = [
        (t.where.rpartition(", ")[2], t.curve, f"{t.run}/{t.planned}", str(t.lost), str(t.to_the_end), t.best, t.state, str(t.seeds))
        for t in trials(_core(found))
    ]
    header = ("Figure", "Curve", "Trials", "Lost", "To the end", "Best (lr, λ)", "State", "Seeds")
    return "\n".join(_table(header, rows)) + "\n"


def changed(found: list[Outcome]) -> str:
    """The verdicts that were others, and why."""
    rows = [(f"`{c.verdict.id}`", c.was, c.ratio, str(c.verdict.ruling), c.now, c.why) for c in changes(_verdicts(found))]
    lines = [f"Judged otherwise than until {UNTIL}: {len(rows)} claims.", ""]
    return "\n".join([*lines, *_table(("Claim", "Before", "Ratio", "Now", "Ratio", "Why"), rows)]) + "\n"


def lacking(found: list[Outcome]) -> str:
    """What is not decided, and what the runs would cost that are missing; of networks that want a GPU, in one sentence."""
    mine, nets = [o for o in found if not _net(o)], [o for o in found if _net(o)]
    rows = [(f"`{x.experiment}`", x.where, x.said, f"{x.runs}", f"{x.hours:.1f}") for x in left(mine)]
    (runs, hours), (net_runs, net_hours), pace = total(mine), total(nets), _as_measured()
    lines = [
        f"Of the fully connected half {runs:,} runs are left, estimated at {hours:,.0f} hours of one core; a run that several experiments "
        f"lack is counted in each row, and once in this sum. The estimate supposes {RATE / 1e9:.0f} billion multiplications and additions "
        f"a second. Runs with AVX-512 took {pace:.2f} of it, which makes {pace * hours:,.1f} hours. The convolutional half at the paper's "
        f"own scale is {net_runs:,} runs more, {net_hours:,.0f} hours of a core: work for a GPU.", "",
    ]  # fmt: skip
    return "\n".join([*lines, *_table(("Experiment", "Where", "Statements", "Runs", "Core-hours"), rows)]) + "\n"


def _as_measured() -> float:
    """Seconds of their own core that the records with AVX-512 took, over what had been estimated for them."""
    fast = [r for r in read_dump(committed(PAPER)) if "preloaded" in r.environment and r.status == "finished"]
    return sum(r.cost["cpu_per_step"] * r.setting.steps for r in fast) / sum(core_seconds(r.setting) for r in fast)


BLOCKS = {
    README: {"caption": caption, "findings": findings},
    JUDGING: {"claims": claims, "trials": tuned, "changed": changed, "left": lacking},
}


if __name__ == "__main__":
    found = outcomes()
    PICTURE.write_text(picture(found), encoding="utf-8")
    BOARD.write_text(board(found), encoding="utf-8")
    small = reduced_outcomes()
    SMALL.write_text(beside_published(small), encoding="utf-8")
    SMALL_BOARD.write_text(small_board(small), encoding="utf-8")
    for page, blocks in BLOCKS.items():
        text = page.read_text(encoding="utf-8")
        for name, write in blocks.items():
            new = write(found)
            text = block(name).sub(lambda _, new=new: new, text)
        page.write_text(text, encoding="utf-8")
