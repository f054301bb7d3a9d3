"""``foof.FOOF(model)``, no number given, against AdamW, default and tuned, and SGD: ``python benchmarks/defaults/run.py [table]``.

Every method has the same model, batches and number of steps, a constant learning rate and no further tuning; "tuned" is the best of
``LEARNING_RATES`` by the training loss of the first seed, then run with the others. The training loss is the mean of the last tenth of
the steps. What is in ``results.jsonl`` is not run again. A run whose loss is not finite counts as diverged: its numbers are null.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tasks import TASKS, Task
from torch import nn

import foof
from foof.optim.foof import MAX_CHANGE

RESULTS = Path(__file__).with_name("results.jsonl")
SEEDS = (0, 1, 2)
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # 1e-3 is torch's default
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(lr: float) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr)


METHODS: dict[str, Make] = {
    "FOOF": foof.FOOF,
    **{f"AdamW {lr:g}": adamw(lr) for lr in (*LEARNING_RATES, 5e-4, 2e-3)},
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "FOOF, half": lambda model: foof.FOOF(model, max_change=MAX_CHANGE / 2),
    "FOOF, double": lambda model: foof.FOOF(model, max_change=MAX_CHANGE * 2),
}
SENSITIVITY = ("FOOF, half", "FOOF", "FOOF, double", "AdamW 0.0005", "AdamW 0.001", "AdamW 0.002")


def run(task: Task, make: Make, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model, losses = task.model(), list[float]()
    opt, batches, start = make(model), task.batches(seed), time.process_time()
    for _ in range(task.steps):
        x, y = next(batches)
        opt.zero_grad()
        loss = task.loss(model(x), y)
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return {"loss": None, "test": None, "seconds": None}
        opt.step()
    seconds = time.process_time() - start
    return {"loss": round(statistics.mean(losses[-max(10, task.steps // 10) :]), 4), "test": round(task.test(model), 4),
            "seconds": round(seconds, 2)}  # fmt: skip


def records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def complete(method: str, seed: int, name: str) -> None:
    """Run one, unless it is in the results."""
    if any((r["task"], r["method"], r["seed"]) == (name, method, seed) for r in records()):
        return
    record = {"task": name, "method": method, "seed": seed, "steps": TASKS[name].steps, **run(TASKS[name], METHODS[method], seed)}
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(record, flush=True)


def main() -> None:
    """The two defaults first, then the others, then how much the step matters."""
    for seed in SEEDS:
        for name in TASKS:
            complete("FOOF", seed, name)
            complete("AdamW 0.001", seed, name)
    for seed in SEEDS:
        for name in TASKS:
            tried = [f"AdamW {lr:g}" for lr in LEARNING_RATES] if seed == SEEDS[0] else ["AdamW 0.001", tuned(records(), name)]
            for method in ("FOOF", *tried, "SGD"):
                complete(method, seed, name)
    for name in TASKS:
        for method in SENSITIVITY:
            complete(method, SEEDS[0], name)


# --- the table -------------------------------------------------------------------------------------------------------------------


def mean(found: list[dict[str, Any]], task: str, method: str, key: str, seeds: tuple[int, ...] = SEEDS) -> float:
    """Over the seeds; infinite where one diverged, NaN where one is missing."""
    values = [r[key] for r in found if r["task"] == task and r["method"] == method and r["seed"] in seeds]
    if len(values) < len(seeds):
        return math.nan
    return math.inf if None in values else statistics.mean(values)


def tuned(found: list[dict[str, Any]], task: str) -> str:
    """The best of the five; none where one is missing."""
    losses = [mean(found, task, f"AdamW {lr:g}", "loss", SEEDS[:1]) for lr in LEARNING_RATES]
    if any(map(math.isnan, losses)):
        return ""
    return min((f"AdamW {lr:g}" for lr in LEARNING_RATES), key=lambda method: mean(found, task, method, "loss", SEEDS[:1]))


def seeds_of(found: list[dict[str, Any]], task: str, method: str) -> tuple[int, ...]:
    return tuple(seed for seed in SEEDS if not math.isnan(mean(found, task, method, "loss", (seed,))))


def cell(found: list[dict[str, Any]], task: str, method: str) -> str:
    """Training loss and test metric over the seeds there are, and how many these are if not all."""
    seeds = seeds_of(found, task, method)
    loss, test = (mean(found, task, method, key, seeds) if seeds else math.nan for key in ("loss", "test"))
    if not seeds or math.isinf(loss):
        return "diverged" if seeds else "–"
    metric = f"{test:.1f} %" if TASKS[task].accuracy else f"{test:.3f}"
    return f"{loss:.3f} / {metric}" + (f", n = {len(seeds)}" if len(seeds) < len(SEEDS) else "")


def table(found: list[dict[str, Any]]) -> str:
    """Every method by task, and in how many tasks FOOF's training loss is at or below another's, over the seeds of both."""
    lines = ["| training loss / test | `foof.FOOF(model)` | AdamW, default | AdamW, best of five | SGD, 0.1 |", "|---|---|---|---|---|"]
    wins: dict[str, list[bool]] = {"AdamW, default": [], "AdamW, best of five": [], "SGD": []}
    for name, task in TASKS.items():
        best = tuned(found, name)
        others = dict(zip(wins, ("AdamW 0.001", best, "SGD"), strict=True))
        cells = [cell(found, name, method) for method in ("FOOF", *others.values())]
        cells[2] += f" ({best.removeprefix('AdamW ')})" if best else ""
        lines.append(f"| {task.title}, {task.steps} steps | " + " | ".join(cells) + " |")
        for column, method in others.items():
            if both := tuple(sorted({*seeds_of(found, name, method)} & {*seeds_of(found, name, "FOOF")})):
                wins[column].append(mean(found, name, "FOOF", "loss", both) <= mean(found, name, method, "loss", both))
    said = "; ".join(f"{sum(won)} of {len(won)} tasks against {column}" for column, won in wins.items())
    return "\n".join([*lines, "", f"FOOF's training loss is at or below: {said}.", "", sensitivity(found)])


def sensitivity(found: list[dict[str, Any]]) -> str:
    """Mean rank over the tasks, by the training loss of the first seed, of both methods at half, once and twice their step."""
    ranks: dict[str, list[int]] = {method: [] for method in SENSITIVITY}
    if any(not seeds_of(found, task, method) for task in TASKS for method in SENSITIVITY):
        return "Half and twice the step: not run yet."
    for task in TASKS:
        losses = {method: mean(found, task, method, "loss", SEEDS[:1]) for method in SENSITIVITY}
        for method in SENSITIVITY:
            ranks[method].append(1 + sum(other < losses[method] for other in losses.values()))
    return "Mean rank of six, first seed: " + ", ".join(f"{method} {statistics.mean(r):.1f}" for method, r in ranks.items()) + "."


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(table(records())) if sys.argv[1:] == ["table"] else main()
