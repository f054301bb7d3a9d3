"""One self-contained HTML page: verdicts first, then each experiment with its figures, settings and how to rerun it."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined
from plotly.offline import get_plotlyjs

from foof.study.experiments import Outcome, Preset
from foof.study.setting import Record
from foof.study.tune import Tuned
from foof.study.verdict import Ruling, Verdict, of


@dataclass(frozen=True)
class Section:
    """One part of the report. `rows` is a table of what was run, with the same keys in each."""

    id: str
    title: str
    where: str
    claimed: str
    figures: Sequence[go.Figure]
    rows: Sequence[dict[str, str]]
    rerun: str


def _row(label: str, tuned: Tuned) -> dict[str, str]:
    """What a method was run with and what came of it."""
    best, diverged = tuned.best, sum(r.status == "diverged" for r in tuned.tried)
    damping = f"{best.damping:g}" if isinstance(best.damping, float) else best.damping or "–"
    return {
        "method": label,
        "learning rate": f"{best.lr:g}" + (" (edge of grid)" if tuned.on_edge else ""),
        "damping λ": damping,
        "options": ", ".join(f"{k} = {v}" for k, v in best.options) or "–",
        "tried": f"{len(tuned.tried)}" + (f", {diverged} diverged" if diverged else ""),
        "training loss": str(of(tuned.records, "train_loss")),
        "test accuracy": f"{100 * of(tuned.records, 'test_accuracy').mean:.2f} %",
        "ms per step": f"{1000 * of(tuned.records, 'seconds_per_step').mean:.1f}",
    }


def section(outcome: Outcome, preset: Preset) -> Section:
    """The section of an experiment's outcome."""
    e = outcome.experiment
    rows = [_row(label, tuned) for label, tuned in outcome.found.items()]
    return Section(e.id, e.title, e.where, e.claimed, outcome.figures, rows, f"foof reproduce {e.id} --preset {preset.name}")


def _records(outcomes: Iterable[Outcome]) -> list[Record]:
    return [r for o in outcomes for t in o.found.values() for r in (*t.tried, *t.records)]


def facts(outcomes: Sequence[Outcome], preset: Preset) -> dict[str, str]:
    """What the numbers come from: how many runs, of which source, on which machine."""
    records = list({r.key: r for r in _records(outcomes)}.values())
    said: dict[str, str] = {"preset": f"{preset.name}: {preset.about}", "runs": f"{len(records)}"}
    if records:
        said["training time"] = f"{sum(r.cost['seconds'] for r in records) / 60:.1f} minutes on one core"
        for name in ("foof", "source", "torch", "python", "processor", "train_records"):
            values = sorted({str(r.environment.get(name, "")) for r in records} - {""})
            said[name.replace("_", " ")] = ", ".join(values) or "unknown"
    return said


def render(verdicts: Sequence[Verdict], sections: Sequence[Section], said: dict[str, str]) -> str:
    """The page as text. It loads nothing from the network."""
    env = Environment(loader=PackageLoader("foof.study"), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    counts = Counter(v.ruling for v in verdicts)
    return env.get_template("report.html").render(
        verdicts=verdicts, sections=sections, facts=said, rulings=[(r, counts[r]) for r in Ruling],
        figure_json=_figure_json, label=_label, plotly_js=get_plotlyjs(),
    )  # fmt: skip


def _figure_json(figure: go.Figure) -> str:
    """The figure for a script element: `</` must not end it."""
    return figure.to_json(engine="json").replace("</", "<\\/")


def _label(figure: go.Figure) -> str:
    """What a screen reader says for a figure."""
    names = dict.fromkeys(html.unescape(t.name) for t in figure.data if t.name)
    return f"{figure.layout.title.text}: {', '.join(names)}"


def write(path: Path, outcomes: Sequence[Outcome], preset: Preset) -> Path:
    """Write the report of `outcomes` to `path`, complete or not at all."""
    verdicts = [v for o in outcomes for v in o.verdicts]
    text = render(verdicts, [section(o, preset) for o in outcomes], facts(outcomes, preset))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)


def table(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """Verdicts as plain rows, for the terminal and for files."""
    return [{"id": v.id, "where": v.where, "claim": v.claim, "measured": v.measured, "ruling": str(v.ruling)} for v in verdicts]
