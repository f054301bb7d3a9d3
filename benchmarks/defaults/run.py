"""``foof.FOOF(model)``, no number given, against AdamW, default and tuned, and SGD: ``python benchmarks/defaults/run.py [table]``.

Every method has the same model, batches and number of steps, and a constant step. What is chosen is chosen on seed 0 (``CHOICE``): AdamW's
learning rate of ``LEARNING_RATES`` by training loss, the weight decay of either by test metric, and FOOF's constants when they were
made. What is reported are means over the seeds 1, 2, 3, which nothing was chosen on. A weight decay is given as the part of the weights
that one step takes away, lr · weight_decay, so that it is the same for both. The training loss is the mean of the last tenth of the
steps. What is in ``results.jsonl`` is not run again. A run whose loss is not finite counts as diverged: its numbers are null.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tasks import FURTHER, TASKS, Task
from torch import nn

import foof
from foof.optim.foof import ADAMW, MAX_CHANGE

RESULTS = Path(__file__).with_name("results.jsonl")
CHOICE, SEEDS = 0, (1, 2, 3)
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)  # 1e-3 is torch's default
DECAYS = (0.0, 1e-3, 1e-2)  # lr · weight_decay: the part of the weights that a step takes away
ALL = TASKS | FURTHER
SHORT = {name: task for name, task in TASKS.items() if "resnet" not in name}
Make = Callable[[nn.Module], torch.optim.Optimizer]
Record = dict[str, Any]


def adamw(lr: float, **options: Any) -> Make:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, **options)


def decayed(decay: float) -> Make:
    rest = {**ADAMW, "weight_decay": decay / ADAMW["lr"]}
    return lambda model: foof.FOOF(model, weight_decay=decay / MAX_CHANGE, rest=rest)


METHODS: dict[str, Make] = {
    "FOOF": foof.FOOF,
    **{f"AdamW {lr:g}": adamw(lr) for lr in (*LEARNING_RATES, 5e-4, 2e-3)},
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "FOOF, half": lambda model: foof.FOOF(model, max_change=MAX_CHANGE / 2),
    "FOOF, double": lambda model: foof.FOOF(model, max_change=MAX_CHANGE * 2),
    **{f"FOOF, decay {decay:g}": decayed(decay) for decay in DECAYS},
    **{f"AdamW {lr:g}, decay {decay:g}": adamw(lr, weight_decay=decay / lr) for lr in LEARNING_RATES for decay in DECAYS},
}
SENSITIVITY = ("FOOF, half", "FOOF", "FOOF, double", "AdamW 0.0005", "AdamW 0.001", "AdamW 0.002")


def run(task: Task, make: Make, seed: int) -> Record:
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


def records() -> list[Record]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def plan() -> Iterator[tuple[str, str, int]]:
    """Task, method and seed of each run; what depends on earlier ones is looked up in the records when it is its turn."""
    yield from against(TASKS, "SGD")
    for name in SHORT:
        yield from ((name, method, seed) for method in SENSITIVITY for seed in SEEDS)
    for seed in (CHOICE, *SEEDS):
        for name in SHORT:
            yield from ((name, decaying(method, decay), seed) for method in ("FOOF", tuned(records(), name)) for decay in DECAYS)
        if seed == SEEDS[0]:
            yield from against(FURTHER)


def against(names: Iterable[str], *others: str) -> Iterator[tuple[str, str, int]]:
    """FOOF against AdamW by default and tuned, and others."""
    for name in names:
        yield from ((name, f"AdamW {lr:g}", CHOICE) for lr in LEARNING_RATES)
        yield from ((name, method, seed) for method in ("FOOF", "AdamW 0.001", tuned(records(), name), *others) for seed in SEEDS)


def main() -> None:
    for name, method, seed in plan():
        if any((r["task"], r["method"], r["seed"]) == (name, method, seed) for r in records()):
            continue
        record = {"task": name, "method": method, "seed": seed, "steps": ALL[name].steps, **run(ALL[name], METHODS[method], seed)}
        with RESULTS.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, flush=True)


def decaying(method: str, decay: float) -> str:
    """The name of a method with a weight decay. FOOF has none by default."""
    return method if method == "FOOF" and not decay else f"{method}, decay {decay:g}"


# --- the tables ------------------------------------------------------------------------------------------------------------------


def mean(found: list[Record], task: str, method: str, key: str = "loss", seeds: tuple[int, ...] = SEEDS) -> float:
    """Over the seeds; infinite where one diverged, NaN where one is missing."""
    values = [r[key] for r in found if r["task"] == task and r["method"] == method and r["seed"] in seeds]
    if len(values) < len(seeds):
        return math.nan
    return math.inf if None in values else statistics.mean(values)


def tuned(found: list[Record], task: str) -> str:
    """AdamW with the best of the five learning rates; none where one is missing."""
    losses = {f"AdamW {lr:g}": mean(found, task, f"AdamW {lr:g}", "loss", (CHOICE,)) for lr in LEARNING_RATES}
    return "" if any(map(math.isnan, losses.values())) else min(losses, key=losses.__getitem__)


def cell(found: list[Record], task: str, method: str) -> str:
    """Training loss and test metric over the seeds there are, and how many these are if not all."""
    seeds = tuple(seed for seed in SEEDS if not math.isnan(mean(found, task, method, "loss", (seed,))))
    if not seeds:
        return "–"
    loss, test = (mean(found, task, method, key, seeds) for key in ("loss", "test"))
    said = "diverged" if math.isinf(loss) else f"{loss:.3f} / {metric(task, test)}"
    return said + (f", n = {len(seeds)}" if len(seeds) < len(SEEDS) else "")


def metric(task: str, value: float) -> str:
    return "–" if math.isnan(value) else "diverged" if math.isinf(value) else f"{value:.1f} %" if ALL[task].accuracy else f"{value:.3f}"


def table(found: list[Record], tasks: dict[str, Task], *others: str) -> str:
    """Every method by task, and in how many tasks FOOF's training loss is at or below another's."""
    tasks = {name: task for name, task in tasks.items() if any(r["task"] == name and r["seed"] in SEEDS for r in found)}
    columns = ("AdamW, default", "AdamW, best of five", *others)
    lines = [f"| training loss / test | `foof.FOOF(model)` | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    wins: dict[str, list[bool]] = {column: [] for column in columns}
    for name, task in tasks.items():
        best = tuned(found, name)
        methods = ("AdamW 0.001", best, *others)
        cells = [cell(found, name, method) for method in ("FOOF", *methods)]
        cells[2] += f" ({best.removeprefix('AdamW ')})" if best else ""
        lines.append(f"| {task.title}, {task.steps} steps | " + " | ".join(cells) + " |")
        for column, method in zip(columns, methods, strict=True):
            losses = mean(found, name, "FOOF"), mean(found, name, method)
            if not any(map(math.isnan, losses)):
                wins[column].append(losses[0] <= losses[1])
    if not tasks:
        return ""
    said = "; ".join(f"{sum(won)} of {len(won)} tasks against {column}" for column, won in wins.items())
    return "\n".join([*lines, "", f"FOOF's training loss is at or below: {said}."])


def sensitivity(found: list[Record]) -> str:
    """Mean rank over the tasks, by training loss, of both methods at half, once and twice their step; and the loss beside the best."""
    ranks, ratios = ({method: list[float]() for method in SENSITIVITY} for _ in range(2))
    for task in SHORT:
        losses = {method: mean(found, task, method) for method in SENSITIVITY}
        if any(map(math.isnan, losses.values())):
            continue  # not all of them have been run
        for method in SENSITIVITY:
            ranks[method].append(1 + sum(other < losses[method] for other in losses.values()))
            ratios[method].append(losses[method] / min(losses.values()))
    head = "| of the six | " + " | ".join(SENSITIVITY) + " |"
    rows = [
        (f"mean rank over {len(ranks['FOOF'])} tasks", ranks, statistics.mean),
        ("loss over the best of the six, geometric mean", ratios, statistics.geometric_mean),
    ]
    lines = [f"| {title} | " + " | ".join(f"{of(values[m]):.2f}" for m in SENSITIVITY) + " |" for title, values, of in rows]
    return "\n".join([head, "|---" * (len(SENSITIVITY) + 1) + "|", *lines])


def decays(found: list[Record]) -> str:
    """Test metrics at equal weight decays, and at the best of them for either, chosen on a seed of its own; over seeds that all have."""
    head = [f"{method}, {decay:g}" for decay in DECAYS for method in ("FOOF", "AdamW")]
    lines = [f"| test | {' | '.join(head)} | FOOF, best | AdamW, best |", "|---" * (len(head) + 3) + "|"]
    wins, all_of = list[bool](), {(r["task"], r["method"], r["seed"]) for r in found}
    for name, task in SHORT.items():
        methods = ("FOOF", tuned(found, name))
        decayed = [decaying(method, decay) for decay in DECAYS for method in methods]
        seeds = tuple(seed for seed in SEEDS if all((name, method, seed) in all_of for method in decayed))
        if not (seeds and all((name, method, CHOICE) in all_of for method in decayed)):
            continue  # not run yet
        cells = [mean(found, name, method, "test", seeds) for method in decayed]
        best = [mean(found, name, best_decay(found, name, method), "test", seeds) for method in methods]
        lines.append(f"| {task.title}, n = {len(seeds)} | " + " | ".join(metric(name, value) for value in (*cells, *best)) + " |")
        wins.append(best[0] >= best[1] if task.accuracy else best[0] <= best[1])
    if not wins:
        return ""
    return "\n".join([*lines, "", f"At the best weight decay FOOF's test metric is at least as good in {sum(wins)} of {len(wins)} tasks."])


def best_decay(found: list[Record], task: str, method: str) -> str:
    """With the decay whose test metric is best on the seed for choices."""
    sign = 1 if ALL[task].accuracy else -1
    values = {name: mean(found, task, name, "test", (CHOICE,)) for name in (decaying(method, decay) for decay in DECAYS)}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    return max(finite, key=lambda name: sign * finite[name]) if finite else ""


def tables() -> dict[str, str]:
    """What the documentation shows, by name."""
    found = records()
    of_tasks, of_further = table(found, TASKS, "SGD"), table(found, FURTHER)
    return {"tasks": of_tasks, "sensitivity": sensitivity(found), "decays": decays(found), "further": of_further}


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if sys.argv[1:] == ["table"]:
        print("\n\n".join(tables().values()))
    else:
        main()
