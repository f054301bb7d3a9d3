"""What the records say: tables, the rule for a win, curves. Needs nothing but the records."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDS, RACES, SELECTED = (Path(__file__).with_name(f"{name}.jsonl") for name in ("records", "races", "selected"))
OF = "Muon on neurons"  # what ablations are of
TRIAL_STEPS = 1000  # of the runs that choose: shorter ones that are in the records choose nothing
SEEDS = (0, 1, 2, 3, 4)  # those that are reported;
SELECTION_SEED = 100  # learning rates and knobs are chosen on another
PAIRS = (
    ("Muon on neurons", "Muon"), ("Muon on neurons, q, k and v apart", "Muon, q, k and v apart"),
    ("Muon on neurons, q, k and v apart", "Muon"), ("AdamW in the eigenbasis", "AdamW"),
)  # fmt: skip
QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}  # t, 97.5 %, n − 1 degrees
Record = dict[str, Any]
Runs = dict[tuple[str, int], dict[int, Record]]  # by method and steps, then by seed


def records(file: Path = RECORDS) -> list[Record]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def reported(size: str, file: Path = RECORDS) -> Runs:
    """The runs of a size on the seeds that are reported, in the order of their steps and losses; diverged ones come last.

    Those at the setting that all trials of a method have chosen count; at another value of the knob they are variants of it.
    """
    runs, chosen = Runs(), {r["method"]: r for r in records(file.with_name(SELECTED.name)) if r["size"] == size}
    for r in records(file):
        if r["size"] == size and r["seed"] in SEEDS and r["method"] in chosen and r["lr"] == chosen[r["method"]]["lr"]:
            name = r["method"] if r["knob"] == chosen[r["method"]]["knob"] else f"{r['method']}, {said(r['knob'])}"
            runs.setdefault((name, r["steps"]), {})[r["seed"]] = r
    return dict(sorted(runs.items(), key=lambda item: (item[0][1], statistics.mean(losses(item[1], math.inf)))))


def losses(by_seed: dict[int, Record], diverged: float | None = None) -> list[float]:
    """Final validation losses; of runs that diverged, this in their place, or nothing."""
    found = [diverged if r["validation"] is None else r["validation"] for r in by_seed.values()]
    return [loss for loss in found if loss is not None]


def is_trial(record: Record, size: str) -> bool:
    return record["size"] == size and record["seed"] == SELECTION_SEED and record["steps"] == TRIAL_STEPS


def said(knob: dict[str, float]) -> str:
    """``ridge 0.02``."""
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in knob.items())


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half-width of the 95 % t-interval."""
    if len(values) < 2:
        return values[0], math.nan
    return statistics.mean(values), QUANTILE[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def is_ablation(method: str) -> bool:
    """Of Muon on neurons: these run at its setting but for what they vary, some on few seeds."""
    if method.endswith(("head in the eigenbasis", "apart")) and "all layers" not in method:  # variants that stand beside the methods
        return False
    return method.startswith(("Muon on neurons, ", "Muon, neuron gradients into momentum"))


def table(size: str, file: Path = RECORDS) -> str:
    """Per method and number of steps: seeds, loss with its interval, seconds per step, learning rate and knob, and what was tried."""
    tried: dict[str, list[Record]] = {}
    for r in records(file):
        if is_trial(r, size):
            tried.setdefault(r["method"], []).append(r)
    of_trials = ("lr", "knob", "trials", "lr tried", "knob tried")
    lines = [_head("method", "steps", "seeds", "validation loss (nats per byte)", "CPU ms per step", *of_trials)]
    for (name, steps), by_seed in reported(size, file).items():
        if is_method(name, by_seed):
            seconds = statistics.mean(r["seconds"] / r["steps"] for r in by_seed.values())
            first, trials = next(iter(by_seed.values())), tried.get(name, [])
            lrs = ", ".join(f"{lr:g}" for lr in sorted({r["lr"] for r in trials}))
            knobs = ", ".join(f"{value:g}" for value in sorted({value for r in trials for value in r["knob"].values()}))
            lost = sum(r["validation"] is None for r in by_seed.values())
            seeds = f"{len(by_seed)}, {lost} diverged" if lost else len(by_seed)
            cells = (name, f"{steps:,}", seeds, spread(losses(by_seed)), f"{1000 * seconds:.0f}", f"{first['lr']:g}", said(first["knob"]),
                     len(trials), lrs, knobs)  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _head(*titles: str) -> str:
    return f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"


def is_method(name: str, by_seed: dict[int, Record]) -> bool:
    """Neither an ablation nor a method at another value of its knob."""
    return not is_ablation(name) and name == next(iter(by_seed.values()))["method"]


def spread(values: list[float], sign: str = "") -> str:
    """Mean, and the half-width of its interval where there is one."""
    if not values:
        return "–"
    mean, half = interval(values)
    return f"{mean:{sign}.4f} ± {half:.4f}" if len(values) > 1 else f"{mean:{sign}.4f}"


def ablations(size: str, file: Path = RECORDS, of: str = OF) -> str:
    """Per variant: its loss, and how far it is above (+) or below (−) what it is a variant of, on the same seeds."""
    runs = reported(size, file)
    lines = [_head("variant", "steps", "seeds", "validation loss", f"against {of}, same seeds")]
    for (name, steps), by_seed in runs.items():
        base = runs.get((of, steps), {})
        if is_ablation(name) or name == "Muon":
            differences = [loss for seed, r in by_seed.items() if seed in base for loss in _difference(r, base[seed])]
            if differences:
                lines.append(f"| {name} | {steps:,} | {len(by_seed)} | {spread(losses(by_seed))} | {spread(differences, '+')} |")
    return "\n".join(lines) if len(lines) > 1 else ""


def _difference(a: Record, b: Record) -> list[float]:
    """a's loss minus b's, where neither diverged."""
    return [] if None in (a["validation"], b["validation"]) else [a["validation"] - b["validation"]]


def verdicts(size: str, file: Path = RECORDS) -> Iterator[str]:
    """The pairs by the rule for a win that stands in ``run.py``."""
    runs = reported(size, file)
    for a, b in PAIRS:
        for steps in sorted({s for name, s in runs if name == a} & {s for name, s in runs if name == b}):
            ours, theirs = runs[a, steps], runs[b, steps]
            shared = sorted(ours.keys() & theirs.keys())
            gains = [gain for s in shared for gain in _difference(theirs[s], ours[s])]
            if len(gains) > 1:
                mean, half = interval(gains)
                wins = len(gains) == len(shared) >= 5 and mean > half
                said = "below, by the rule" if wins else "no win by the rule"
                yield f"{a} against {b}, {steps:,} steps, {len(gains)} seeds: {mean:+.4f} ± {half:.4f} nats: {said}."
        for steps in sorted({s for name, s in runs if name == b}):
            yield from _fractions(runs, a, b, steps)


def _fractions(runs: Runs, a: str, b: str, steps: int) -> Iterator[str]:
    """Shorter runs of a beside b's."""
    goal, _ = interval(losses(runs[b, steps], math.inf))
    for name, fewer in runs:
        if name == a and fewer < steps and len(runs[a, fewer]) >= 5 and len(runs[b, steps]) >= 5:
            mean, _ = interval(losses(runs[a, fewer], math.inf))
            reached = "reached" if mean <= goal else "not reached"
            yield f"{a} with {fewer / steps:.2f} of {b}'s {steps:,} steps: {mean:.4f} against {goal:.4f}: {reached}."


def races(file: Path = RACES) -> str:
    """Runs of two methods that took turns in one process, each with its own number of steps: losses, and CPU seconds to them."""
    of_each = ("method", "steps", "validation loss", "CPU s")
    lines = [_head("parameters", "seed", *of_each, *of_each, "steps, ratio", "seconds, ratio")]
    for race in records(file):
        a, b = race["runs"]
        cells = [f"{race['parameters'] / 1e6:.2f} M", race["seed"]]
        for run in (a, b):
            cells += [run["method"], f"{run['steps']:,}", f"{run['validation']:.4f}", f"{run['seconds']:.0f}"]
        cells += [f"{a['steps'] / b['steps']:.2f}", f"{a['seconds'] / b['seconds']:.3f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) if len(lines) > 1 else ""


COLOURS = ("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


def curves(size: str, file: Path = RECORDS, width: int = 640, height: int = 360) -> str:
    """Mean validation loss over seeds against steps, of the longest runs, as an SVG; the best is on top of the legend."""
    runs = reported(size, file)
    longest = max((steps for _, steps in runs), default=0)
    means = {name: _mean_curve(by_seed) for (name, steps), by_seed in runs.items() if steps == longest and is_method(name, by_seed)}
    points = [loss for curve in means.values() for _, loss in curve[1:]]
    if not points:
        return ""
    low, high, left, right = min(points) - 0.02, max(points) + 0.02, 50, 230

    def at(step: float, loss: float) -> str:
        return f"{left + (width - left - right) * step / longest:.1f},{20 + (height - 60) * (high - loss) / (high - low):.1f}"

    parts = [f'<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" font-size="12" fill="currentColor" role="img">']
    for k in range(5):
        loss, step = low + (high - low) * k / 4, longest * k // 4
        x, y = at(step, loss).split(",")
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{loss:.2f}</text>')
        parts.append(f'<text x="{x}" y="{height - 20}" text-anchor="middle">{step:,}</text>')
    for k, (name, curve) in enumerate(means.items()):
        colour, last = COLOURS[k % len(COLOURS)], at(*curve[-1]).split(",")[0]
        line = " ".join(at(step, loss) for step, loss in curve[1:])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{float(last) + 8}" y="{40 + 18 * k}" fill="{colour}">{name}</text>')
    parts.append(f'<text x="{(width - right + left) / 2}" y="{height - 4}" text-anchor="middle">steps</text></svg>')
    return "".join(parts)


def _mean_curve(by_seed: dict[int, Record]) -> list[tuple[int, float]]:
    each = [{step: loss for step, _, loss in r["curve"]} for r in by_seed.values()]
    return [(step, statistics.mean(c[step] for c in each)) for step in sorted(set.intersection(*(set(c) for c in each)))]
