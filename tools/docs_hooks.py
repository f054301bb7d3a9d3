"""Fills ``<!-- results: name -->`` in the documentation with tables from the committed results of benchmarks and study."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foof.bench import show
from foof.bench.records import Record, read
from foof.study.paper.experiments import Outcome, committed, experiments_of
from foof.study.paper.verdicts import spread
from foof.study.search.presets import PRESETS, Preset
from foof.study.show.headline import headline
from foof.study.show.report import recalled

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def records(name: str) -> list[dict[str, Any]]:
    file = BENCHMARKS / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else []


def char_gpt() -> str:
    """Per method the run with the best learning rate."""
    found = records("char_gpt")
    if not found:
        return ""
    steps = max(r["steps"] for r in found)
    rows = []
    for method in dict.fromkeys(r["method"] for r in found):
        runs = [r for r in found if r["method"] == method and r["steps"] == steps and math.isfinite(r["train_loss"])]
        if runs:
            best = min(runs, key=lambda r: r["validation_loss"])
            tried = ", ".join(f"{lr:g}" for lr in sorted({r["lr"] for r in found if r["method"] == method and r["steps"] == steps}))
            per_step = 1000 * best["cpu_seconds"] / steps
            losses = [f"{best['validation_loss']:.3f}", f"{best['train_loss']:.3f}"]
            rows.append([method, *losses, f"{per_step:.0f}", f"{best['lr']:g}", tried])
    first = found[0]
    batch = f"{first['batch'][0]} windows of {first['batch'][1]} characters"
    about = f"{first['parameters'] / 1e6:.2f} M parameters, {steps} steps of {batch}, one seed, torch {first['torch']}.\n\n"
    head = ["method", "validation loss (nats per character)", "training loss, last 50 steps", "CPU ms per step", "best lr", "lr tried"]
    return about + table(head, rows)


def language_results() -> Any:
    """The module that reads the records of the language-model benchmark."""
    spec = importlib.util.spec_from_file_location("lm_results", BENCHMARKS / "lm" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lm(part: str) -> str:
    """One part (curves, losses and verdicts, ablations) for each size of model that was run."""
    results, parts = language_results(), []
    for size in dict.fromkeys(r["size"] for r in results.records()):
        if runs := results.reported(size):
            first = next(iter(next(iter(runs.values())).values()))
            batch = f"{first['batch'][0]} windows of {first['batch'][1]} bytes"
            about = f"{first['parameters'] / 1e6:.2f} M parameters, steps of {batch}, one thread, torch {first['torch']}."
            parts += {
                "curves": [f"<div>{results.curves(size)}</div>", about],
                "losses": [results.table(size), *results.verdicts(size)],
                "ablations": [results.ablations(size)],
            }[part]
    return "\n\n".join(parts)


def lm_races() -> str:
    """Two methods in turns, the first with fewer steps."""
    return str(language_results().races())


def bf16_loss() -> str:
    found = records("bf16_loss")
    rows = []
    for seed in sorted({r["seed"] for r in found}):
        pair = {r["autocast"]: r["loss"] for r in found if r["seed"] == seed}
        if len(pair) == 2:
            rows.append([seed, pair["none"], pair["bfloat16"], f"{100 * (pair['bfloat16'] / pair['none'] - 1):+.1f} %"])
    if not rows:
        return ""
    mean = statistics.mean(float(row[3].split()[0]) for row in rows)
    return table(["seed", "float32", "bfloat16 autocast", "difference"], rows) + f"\n\nMean difference {mean:+.1f} %."


def guidance_lr() -> str:
    """Loss by learning rate and damping."""
    found = {(r["lr"], r["damping"]): r["loss"] for r in records("guidance") if (r["T"], r["S"], r["ema"]) == (10, 10, 0.95)}
    lrs, dampings = sorted({lr for lr, _ in found}), sorted({damping for _, damping in found})
    rows = [[f"**{damping:g}**", *(_loss(found.get((lr, damping))) for lr in lrs)] for damping in dampings]
    return table(["damping ↓, lr →", *(f"{lr:g}" for lr in lrs)], rows) if rows else ""


def guidance_schedule() -> str:
    """Loss and time by T, S and ema, at lr 0.3 and damping 1."""
    found = [r for r in records("guidance") if (r["lr"], r["damping"]) == (0.3, 1.0)]
    rows = [[r["T"], r["S"], r["ema"], _loss(r["loss"]), f"{r['ms']:.1f}"] for r in found if r["ms"] is not None]
    return table(["T", "S", "ema", "training loss", "CPU ms per step"], rows) if rows else ""


def _loss(values: list[float | None] | None) -> str:
    if not values:
        return ""
    numbers = [v for v in values if v is not None]
    return f"{statistics.mean(numbers):.3f}" if len(numbers) == len(values) else "diverged"


def outcomes(preset: Preset) -> list[Outcome]:
    """What the records in the package say at this preset."""
    return recalled(list(experiments_of(preset).values()), preset, committed(preset))


def kfac_damping() -> str:
    """Fig. 3A: every setting that was run, with its loss over seeds, the best first."""
    paper = PRESETS["paper"]
    outcome = next(o for o in outcomes(paper) if o.experiment.id == "fig3a")
    found: dict[tuple[str, float, Any], dict[int, float]] = {}
    for label, tuned in outcome.found.items():
        for r in (r for r in (*tuned.tried, *tuned.records) if r.setting.steps >= paper.early):  # short trials are no rows of this
            found.setdefault((label, r.setting.lr, r.setting.damping), {})[r.setting.seed] = r.end_loss(paper.early)
    rows = []
    for (label, lr, damping), losses in sorted(found.items(), key=lambda item: statistics.mean(item[1].values())):
        scale = paper.base.batch_size or 1
        pair = [f"{lr:g}", "–"] if damping is None else [f"{lr * scale:g}", f"{damping * scale:g}"]
        rows.append([label, *pair, len(losses), spread(losses.values())])
    return table(["method", "lr", "λ", "seeds", f"training loss at {paper.early:,} steps"], rows)


def study() -> str:
    """Verdicts of every claim that the records in the package decide, preset by preset, the largest first."""
    parts = []
    for preset in reversed(PRESETS.values()):
        if not committed(preset).exists():
            continue
        found = outcomes(preset)
        top = headline([(preset, found)])
        verdicts = [v for outcome in found for v in outcome.verdicts if v.ruling != "not run"]
        rows = [[v.claim, v.where, v.measured.replace("\n", "<br>"), f"**{v.ruling}**"] for v in verdicts]
        parts.append(f"### Preset `{preset.name}`\n\n{preset.about[0].upper()}{preset.about[1:]}.\n\n"
                     + (f"{top.sentence}\n\n" if top else "")
                     + table(["claim", "where", "measured", ""], rows))  # fmt: skip
    return "\n\n".join(parts)


def defaults_module() -> Any:
    """The study of FOOF's defaults, which reads its own records; it imports its tasks by name."""
    folder = BENCHMARKS / "defaults"
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module("run")


def defaults_table(which: str) -> Callable[[], str]:
    return lambda: defaults_module().tables()[which]


def speed(kind: str) -> list[Record]:
    """The records of `foof bench` of one kind; all for "all"."""
    return [r for r in read(BENCHMARKS / "speed.jsonl") if kind in ("all", r["kind"])]


def speed_steps() -> str:
    """One table for each case, and who measured."""
    found = speed("steps")
    tables = [f"**{r['title']}**, {r['parameters']:,} parameters\n\n{show.markdown(show.steps(r))}" for r in found]
    return "\n\n".join([*tables, show.about([r for r in speed("all") if r["kind"] != "search"])]) if found else ""


def speed_plots() -> str:
    found = speed("all")
    pictures = [show.cost_against(found, "width"), show.cost_against(found, "batch")]
    return "\n\n".join(f"<div>{picture}</div>" for picture in pictures if picture)


def speed_memory() -> str:
    return "\n\n".join(f"**{r['title']}**\n\n{show.markdown(show.memory(r))}" for r in speed("memory"))


def speed_loss() -> str:
    return "\n\n".join(f"**{r['title']}**\n\n{show.markdown(show.loss(r))}" for r in speed("loss"))


def speed_fisher() -> str:
    found = speed("fisher")
    picture = show.fisher_against_D(found)
    return show.markdown(show.fisher(found)) + (f"\n\n<div>{picture}</div>" if picture else "") if found else ""


def speed_laplace() -> str:
    return show.markdown(show.laplace(found)) if (found := speed("laplace")) else ""


def speed_checks() -> str:
    rows = [[check.asked, check.measured, "holds" if check.holds else "**does not hold**"] for check in show.checks(speed("all"))]
    return table(["asked for", "measured", ""], rows) if rows else ""


TABLES: dict[str, Callable[[], str]] = {
    "bf16_loss": bf16_loss,
    "char_gpt": char_gpt,
    "defaults": defaults_table("tasks"),
    "defaults_decays": defaults_table("decays"),
    "defaults_further": defaults_table("further"),
    "defaults_sensitivity": defaults_table("sensitivity"),
    "guidance_lr": guidance_lr,
    "guidance_schedule": guidance_schedule,
    "kfac_damping": kfac_damping,
    "lm_ablations": functools.partial(lm, "ablations"),
    "lm_curves": functools.partial(lm, "curves"),
    "lm_losses": functools.partial(lm, "losses"),
    "lm_races": lm_races,
    "speed_checks": speed_checks,
    "speed_fisher": speed_fisher,
    "speed_laplace": speed_laplace,
    "speed_loss": speed_loss,
    "speed_memory": speed_memory,
    "speed_plots": speed_plots,
    "speed_steps": speed_steps,
    "study": study,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    def fill(match: re.Match[str]) -> str:
        return TABLES[match[1]]() or "*Not measured yet.*"

    return re.sub(r"<!-- results: (\w+) -->", fill, markdown)
