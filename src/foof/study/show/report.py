"""One self-contained HTML page: verdicts first, then each experiment with its figures, settings and how to rerun it."""

from __future__ import annotations

import csv
import html
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from foof.study.paper.answers import Answer, answers
from foof.study.paper.catalogue import CATALOGUE
from foof.study.paper.changes import UNTIL, Change, changes
from foof.study.paper.experiments import Experiment, Outcome, recall, remembered
from foof.study.paper.left import Left, left, total
from foof.study.paper.notes import note
from foof.study.paper.rules import Term
from foof.study.paper.searches import timed
from foof.study.paper.trials import Trials, trials
from foof.study.paper.verdicts import Ruling, Verdict, deciding, of, spread
from foof.study.search.grids import Tuned
from foof.study.search.presets import PRESETS, Preset
from foof.study.search.store import Store
from foof.study.show.drawings import compare, draw
from foof.study.show.headline import Headline, headline
from foof.study.show.plots import row_name
from foof.study.show.scoreboard import MARKS, Group, bar_svg, brief, groups
from foof.study.show.svg import side_by_side
from foof.study.train.setting import Record, Setting


@dataclass(frozen=True)
class Section:
    """One part of the report. `rows` is a table of what was run, `comparisons` one of published curves and ours."""

    id: str
    title: str
    where: str
    claimed: str
    figures: Sequence[go.Figure]
    rows: Sequence[dict[str, str]]
    rerun: str
    note: str = ""
    comparisons: Sequence[dict[str, str]] = field(default_factory=list)

    @property
    def short(self) -> str:
        """For the bar at the top: the figure's number, or the title."""
        figure, _, dataset = self.id.partition("-")
        return f"{figure[3:].upper()}{' ' + dataset.upper() if dataset else ''}" if figure.startswith("fig") else self.title


def _row(label: str, tuned: Tuned, until: int | None) -> dict[str, str]:
    """What a method was run with and what came of it."""
    best, loss = tuned.best, Term(label).spread({label: tuned}, until)
    alone = not best.measure  # what a run measures takes time too
    times = [1000 * r.cost["cpu_per_step"] for r in tuned.records if alone and r.cost.get("cpu_per_step")]
    return {
        "curve": label,
        "training loss": "–" if math.isnan(loss.mean) else str(loss),
        "learning rate": f"{best.lr:g}" + (" (edge of grid)" if tuned.on_edge else ""),
        "damping λ": _damping(best) or "–",
        "tried, one seed": _tried(tuned),
        "test accuracy": _percent(of(tuned.records, "test_accuracy").mean),
        "ms per step, one core": str(spread(times)) if times else "–",
        "options": ", ".join(f"{k} = {v}" for k, v in best.options) or "–",
    }


def _percent(share: float) -> str:
    """Nothing where there are no classes."""
    return "–" if math.isnan(share) else f"{100 * share:.2f} %"


def _network(s: Setting) -> str:
    """What a setting trains, in words."""
    if s.model == "mlp":
        return "-".join(map(str, ("pixels", *s.hidden, "classes")))
    if s.model == "autoencoder":
        return "-".join(map(str, ("pixels", *s.hidden, *reversed(s.hidden[:-1]), "pixels")))
    return f"{s.model.removesuffix('-no-norm')} of width {s.hidden[0]}" + (" without batch norm" if s.model.endswith("no-norm") else "")


def _damping(s: Setting) -> str:
    return f"{s.damping:g}" if isinstance(s.damping, float) else s.damping or ""


def _tried(tuned: Tuned) -> str:
    """Learning rates by row, those that diverged marked."""
    if len(tuned.tried) < 2:
        return "–" if tuned.grid_done else "no grid yet"
    rows: dict[str, list[str]] = {}
    for r in sorted(tuned.tried, key=lambda r: r.setting.lr):
        rows.setdefault(row_name(r.setting), []).append(f"{r.setting.lr:g}" + (" (diverged)" if r.status == "diverged" else ""))
    said = "; ".join("lr " + ", ".join(lrs) + (f" at {name}" if name else "") for name, lrs in rows.items())
    short = f", compared at step {tuned.grid_steps:,}" if tuned.grid_steps else ""
    return said + short + ("" if tuned.grid_done else f", {len(tuned.tried)} of {tuned.planned}")


def _setup(outcome: Outcome) -> str:
    """What the runs of an experiment have in common: data, network, batch, steps."""
    bests = [t.best for t in _trained(outcome).values()]
    if not bests:
        return ""

    def each(values: Iterable[object]) -> str:
        return " or ".join(dict.fromkeys(str(v) for v in values))

    images = each(f"{r.environment.get('train_records', 0):,}" for t in outcome.found.values() for r in t.records[:1])
    return (
        f"{images} images{_of(outcome)}, network {each(map(_network, bests))}, "
        f"batches of {each(s.batch_size or 'all' for s in bests)}, {each(f'{s.steps:,}' for s in bests)} steps."
    )


def _trained(outcome: Outcome) -> dict[str, Tuned]:
    """Its curves, but those of runs by which another is timed."""
    return {label: t for label, t in outcome.found.items() if label not in map(timed, outcome.found)}


def _of(outcome: Outcome) -> str:
    """Of which data set, where that does not go without saying."""
    names = dict.fromkeys(t.best.dataset for t in outcome.found.values())
    return f" of {' or '.join(names)}" if CATALOGUE[outcome.experiment.figure].nets else ""


def section(outcome: Outcome) -> Section:
    """The section of an experiment's outcome."""
    e, preset = outcome.experiment, outcome.preset
    rows = [_row(label, tuned, None if preset.centred else e.early(preset)) for label, tuned in _trained(outcome).items()]
    compared = [
        {"panel": f"Fig. {c.panel}", "curve": c.curve, "step": f"{c.step:g}", "published": f"{c.published:.4g}", "ours": str(c.ours),
         "ours / published": f"{c.ratio:.3g}"}
        for c in (compare(e.figure, e.dataset, outcome.found) if preset.centred else [])
    ]  # fmt: skip
    figures = [d.figure() for d in draw(outcome)]
    runs_here = e.figure == "toy" or e.searches(preset)
    rerun = f"foof reproduce {e.id} --preset {preset.name if runs_here else 'paper'}"
    said = " ".join(filter(None, (_setup(outcome), note(e.figure, e.dataset, preset, bool(outcome.found)))))
    mark = preset.mark or e.mark(preset)
    title = f"{e.title} ({mark})" if mark else e.title
    return Section(e.id, title, e.where, e.claimed, figures, rows, rerun, said, compared)


def _records(outcomes: Iterable[Outcome]) -> list[Record]:
    return [r for o in outcomes for t in o.found.values() for r in (*t.tried, *t.records)]


def facts(outcomes: Sequence[Outcome], preset: Preset) -> dict[str, str]:
    """What the numbers come from: how many runs, of which source, on which machine."""
    records = list({r.key: r for r in _records(outcomes)}.values())
    said: dict[str, str] = {"preset": f"{preset.name}: {preset.about}", "runs": f"{len(records)}"}
    if records:
        said["training time"] = f"{sum(r.cost['seconds'] for r in records) / 60:.1f} minutes on one core, shared with others"
        for name in ("foof", "source", "torch", "python", "processor", "data", "train_records", "test_records"):
            values = sorted({str(r.environment.get(name, "")) for r in records} - {""})
            said[name.replace("_", " ")] = ", ".join(values) or "unknown"
    return said


@dataclass(frozen=True)
class Line:
    """A row of the table of claims: a verdict, and the same claim's verdict at the paper's scale where this report is smaller."""

    verdict: Verdict
    paper: Verdict | None = None

    @property
    def shown(self) -> bool:
        return self.verdict.ruling is not Ruling.NOT_RUN or self.paper is not None


def lines(outcomes: Sequence[Outcome], beside: Sequence[Outcome]) -> list[Line]:
    """Verdicts in the paper's order; what has not been run comes last."""
    there = {v.id: v for o in beside for v in o.verdicts if v.ruling is not Ruling.NOT_RUN and v.section != "toy"}
    found = [Line(v, there.get(v.id)) for o in outcomes for v in o.verdicts]
    return sorted(found, key=lambda line: line.verdict.ruling is Ruling.NOT_RUN and line.paper is None)


@dataclass(frozen=True)
class FirstScreen:
    """What is seen first: the board, the answers, and of which preset they are."""

    preset: str
    groups: list[Group]
    answers: list[Answer]
    changes: list[Change] = field(default_factory=list)  # at the paper's scale
    left: list[Left] = field(default_factory=list)
    total: tuple[int, float] = (0, 0.0)  # runs that are left, and their core-hours


def first_screen(preset: Preset, outcomes: Sequence[Outcome], beside: Sequence[Outcome]) -> FirstScreen:
    """Of the paper's scale where there are records of it."""
    shown, at = (beside, PRESETS["paper"]) if beside else (outcomes, preset)
    verdicts = [v for o in shown for v in o.verdicts]
    found = FirstScreen(at.name, groups(verdicts), answers(shown))
    return replace(found, changes=changes(verdicts), left=left(shown), total=total(shown)) if at.centred else found


def render(
    found: Sequence[Line], sections: Sequence[Section], said: dict[str, str], first: FirstScreen, top: Headline | None = None,
    waiting: Sequence[Section] = (), tuning: Sequence[Trials] = (), mark: str = "",
) -> str:  # fmt: skip
    """The page as text. It loads nothing from the network."""
    env = Environment(loader=PackageLoader("foof.study.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    counts = Counter(line.verdict.ruling for line in found)
    return env.get_template("report.html").render(
        lines=found, sections=sections, waiting=waiting, facts=said, rulings=[(r, counts[r]) for r in Ruling], headline=top,
        figure_json=_figure_json, label=_label, plotly_js=get_plotlyjs(), groups=first.groups, answers=first.answers,
        board_preset=first.preset, brief=brief, bar=bar_svg, deciding=deciding, marks=MARKS, trials=tuning, mark=mark,
        drawn={s.id for s in sections}, rows={line.verdict.id for line in found if line.shown},
        not_run=sum(not line.shown for line in found), changes=first.changes, left=first.left, total=first.total, until=UNTIL,
    )  # fmt: skip


def _figure_json(figure: go.Figure) -> str:
    """The figure for a script element: `</` must not end it."""
    return figure.to_json(engine="json").replace("</", "<\\/")


def _label(figure: go.Figure) -> str:
    """What a screen reader says for a figure."""
    names = dict.fromkeys(html.unescape(t.name) for t in figure.data if t.name)
    return f"{figure.layout.title.text}: {', '.join(names)}"


def write(path: Path, outcomes: Sequence[Outcome], preset: Preset, beside: Sequence[Outcome] = ()) -> Path:
    """Write the report of `outcomes` to `path`, complete or not at all. `beside`: outcomes of the preset paper, if it is not that."""
    sections = [section(o) for o in outcomes]
    shown, waiting = [s for s in sections if s.figures], [s for s in sections if not s.figures]
    top = headline(((PRESETS["paper"], beside), (preset, outcomes)))
    first, tuning = first_screen(preset, outcomes, beside), trials(outcomes)
    text = render(lines(outcomes, beside), shown, facts(outcomes, preset), first, top, waiting, tuning, preset.mark)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)


def write_claims(path: Path, outcomes: Sequence[Outcome]) -> Path:
    """Every claim as a row of a CSV file: its group, rule and verdict, and each condition's ratio with its interval and n."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["claim", "about", "where", "says", "holds if", "verdict", "ratio", "low", "high", "n", "measured", "rule changed"])
        for v in (v for o in outcomes for v in o.verdicts):
            c = deciding(v)
            numbers = [c.effect.ratio, c.effect.low, c.effect.high, c.effect.n] if c else [""] * 4
            writer.writerow([v.id, v.about, v.where, v.claim, v.rule, v.ruling, *numbers, v.measured, v.changed])
    return path


def write_svgs(folder: Path, outcomes: Sequence[Outcome]) -> list[Path]:
    """Every drawing that has one as an SVG file, and the panels of each figure together, for papers and pages without scripts."""
    folder.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str] = {}
    figures: dict[str, dict[str, str]] = {}
    for o in outcomes:
        drawn = [text for d in draw(o) if (text := d.svg())]
        texts |= {o.experiment.id + (f"-{i + 1}" if len(drawn) > 1 else ""): text for i, text in enumerate(drawn)}
        panel, _, dataset = o.experiment.id.partition("-")
        if (parts := re.fullmatch(r"(figj?\d+)([a-d])", panel)) and drawn:
            figures.setdefault(parts[1] + (f"-{dataset}" if dataset else ""), {})[parts[2].upper()] = drawn[0]
    texts |= {name: side_by_side(panels) for name, panels in figures.items()}
    for name, text in texts.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    return [folder / f"{name}.svg" for name in texts]


def recalled(experiments: Sequence[Experiment], preset: Preset, dump: Path) -> list[Outcome]:
    """The outcomes of a dump of records; none if there is no dump."""
    if not dump.exists():
        return []
    with Store(":memory:") as records:
        records.load_dump(dump)
        return recall(experiments, preset, remembered(records))
