"""Language models on enwik8: which optimizer reaches the lowest validation loss. ``python benchmarks/lm/run.py --help``.

Every method gets the same steps, initialisations and batches, a linear warm-up over 5 % of the steps and a cosine to a tenth of the
learning rate, three learning rates to choose from (``methods.py``), where the best of them is at an edge one more beyond it, and at the
best of these two more values of its main knob (Muon's momentum, AdamW's β₂, the ridge of neurons, how often a basis is renewed).
They are chosen by the final validation loss of runs as long as those reported, on a seed that is not. (Until 2026-11-18 the trials
were of 300 steps, which favour small ridges that lose in the end; those are in the records, and choose nothing.) Variants of a method
(of its head, with q, k and v apart, ablations) have its learning rate and knob. Validation is on the same 128 windows
always. All in float32 on one thread; seconds are CPU seconds of training alone.

**The rule for a win**, written down before the runs: A is below B when, over at least five seeds that both ran, the mean of the
paired differences of their final validation losses, B − A, exceeds the half-width of its 95 % t-interval. A reaches B's loss in a
fraction f of the steps when A's runs of f times the steps (with a schedule of their own length) have a mean at or below B's.

Records are lines of ``records.jsonl``; a run that is there is not run again. Commands:

    select NAME ...      learning rate and knob of these methods
    run NAME ...         the reported seeds, at what was selected
    time NAME ...        CPU seconds per step, the methods' steps interleaved in one process
    race A B             B's full number of steps beside A's `--fraction` of them, interleaved: final losses, and CPU seconds to them;
                         records of these are in ``races.jsonl``
    table                all of it as a table
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time

import torch
from data import batch, splits
from methods import METHODS
from model import GPT, SIZES, loss_of, parameters
from results import RACES, RECORDS, SEEDS, SELECTED, SELECTION_SEED, TRIAL_STEPS, Record, ablations, races, records, table, verdicts
from torch import Tensor


def factor(step: int, steps: int) -> float:
    """Of the learning rate: linear warm-up, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


class Training:
    """One model under one method, a step at a time."""

    def __init__(self, method: str, size: str, lr: float, knob: float, steps: int, seed: int, text: Tensor) -> None:
        torch.manual_seed(seed)
        self.size, self.steps, self.text, self.model = SIZES[size], steps, text, GPT(SIZES[size])
        self.optimizers = METHODS[method].make(self.model, lr, knob)
        self.schedules = [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: factor(step, steps)) for opt in self.optimizers]
        self.order, self.done, self.seconds = torch.Generator().manual_seed(seed + 1), 0, 0.0

    def step(self) -> float:
        """One step; the training loss before it."""
        start = time.process_time()
        loss = loss_of(self.model, *batch(self.text, self.size.batch, self.size.length, self.order))
        for opt in self.optimizers:
            opt.zero_grad()
        loss.backward()
        for opt, schedule in zip(self.optimizers, self.schedules, strict=True):
            opt.step()
            schedule.step()
        self.done += 1
        self.seconds += time.process_time() - start
        return loss.item()


@torch.no_grad()
def validate(training: Training, text: Tensor) -> float:
    """The mean loss over 128 windows, the same for everyone."""
    windows = torch.Generator().manual_seed(2026)
    losses = [loss_of(training.model, *batch(text, 16, training.size.length, windows)).item() for _ in range(8)]
    return sum(losses) / len(losses)


def train(method: str, size: str, lr: float, knob: float, steps: int, seed: int) -> Record:
    """One run and what came of it; ``validation`` is None where it diverged."""
    text, held_out = splits()
    training = Training(method, size, lr, knob, steps, seed, text)
    curve, last, points = [], [], {max(1, round(steps * k / 10)) for k in range(1, 11)}
    for step in range(1, steps + 1):
        loss = training.step()
        if not math.isfinite(loss) or loss > 20:
            curve.append([step, round(training.seconds, 2), None])
            break
        if step > steps * 0.9:
            last.append(loss)
        if step in points:
            curve.append([step, round(training.seconds, 2), round(validate(training, held_out), 5)])
    return {
        "method": method, "size": size, "lr": lr, "knob": named(method, knob), "steps": steps, "seed": seed, "validation": curve[-1][2],
        "training": round(sum(last) / len(last), 5) if curve[-1][2] is not None else None, "seconds": round(training.seconds, 1),
        "curve": curve, "parameters": parameters(training.model), "batch": [training.size.batch, training.size.length],
        "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
    }  # fmt: skip


def named(method: str, knob: float) -> dict[str, float]:
    return {METHODS[method].knob.name: knob}


def recorded(method: str, size: str, lr: float, knob: float, steps: int, seed: int) -> Record:
    """From the file, or run now and added to it."""
    key = {"method": method, "size": size, "lr": lr, "knob": named(method, knob), "steps": steps, "seed": seed}
    for record in records(RECORDS):
        if all(record[name] == value for name, value in key.items()):
            return record
    record = train(method, size, lr, knob, steps, seed)
    with RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print({k: record[k] for k in (*key, "validation", "seconds")}, flush=True)
    return record


def selected(method: str, size: str, steps: int = TRIAL_STEPS) -> tuple[float, float]:
    """The learning rate with the lowest validation loss on the seed of the selection, one more beyond an edge; then the knob at it."""
    knob = METHODS[method].knob

    def loss(lr: float, value: float) -> float:
        found = recorded(method, size, lr, value, steps, SELECTION_SEED)["validation"]
        return math.inf if found is None else found

    of_lr = {lr: loss(lr, knob.usual) for lr in METHODS[method].lrs}
    best = min(of_lr, key=of_lr.__getitem__)
    if best in (min(of_lr), max(of_lr)):
        further = float(f"{best * best / sorted(of_lr)[1]:.1g}")
        of_lr[further] = loss(further, knob.usual)
    best = min(of_lr, key=of_lr.__getitem__)
    of_knob = {value: loss(best, value) for value in (knob.usual, *knob.others)}
    return best, min(of_knob, key=of_knob.__getitem__)


def settle(method: str, size: str, selected_at: str) -> tuple[float, float]:
    """Learning rate and knob of a method at a size, once all trials for them have been run; noted in a file, for the tables."""
    lr, knob = selected(METHODS[method].setting_of or method, selected_at)
    line = json.dumps({"method": method, "size": size, "lr": lr, "knob": named(method, knob), "of": METHODS[method].setting_of})
    if line not in (SELECTED.read_text(encoding="utf-8").splitlines() if SELECTED.exists() else ()):
        with SELECTED.open("a") as file:
            file.write(line + "\n")
    return lr, knob


WARM_UP = 33  # steps, after which an optimizer of the library with T = 32 is in its regular round


def step_times(names: list[str], size: str, rounds: int) -> dict[str, float]:
    """Mean CPU seconds per step over `rounds` steps of each (multiples of 32), interleaved, at the middle learning rate."""
    text, _ = splits()
    runs = {name: Training(name, size, METHODS[name].lrs[1], METHODS[name].knob.usual, WARM_UP + rounds, 0, text) for name in names}
    for step in range(WARM_UP + rounds):
        for training in runs.values():
            training.seconds *= step != WARM_UP
            training.step()
    return {name: training.seconds / rounds for name, training in runs.items()}


def race(settings: dict[str, tuple[float, float]], size: str, steps: int, fraction: float, seed: int) -> Record:
    """Two runs to their ends, interleaved so that both see the same machine; a step of the shorter one is left out now and then.

    settings: of each method, its learning rate and knob."""
    text, held_out = splits()
    lengths = [round(fraction * steps), steps]
    runs = [Training(name, size, *chosen, length, seed, text) for (name, chosen), length in zip(settings.items(), lengths, strict=True)]
    for step in range(1, steps + 1):
        for training in runs:
            while training.done * steps < step * training.steps:
                training.step()
    each = [
        {"method": name, "lr": lr, "knob": named(name, knob), "steps": run.done, "seconds": round(run.seconds, 3),
         "validation": validate(run, held_out)}
        for (name, (lr, knob)), run in zip(settings.items(), runs, strict=True)
    ]  # fmt: skip
    record = {"size": size, "seed": seed, "runs": each, "parameters": parameters(runs[0].model), "torch": torch.__version__}
    with RACES.open("a") as file:
        file.write(json.dumps(record) + "\n")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["select", "run", "time", "race", "table"])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--fraction", type=float, default=0.8, help="of the steps, for the first method of a race")
    parser.add_argument("--knob", type=float, help="in place of the value selected: for ablations")
    parser.add_argument("--selected-at", choices=SIZES, help="the size that learning rate and knob were selected at; default: the same")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.command == "table":
        print("\n\n".join([table(options.size), *verdicts(options.size), ablations(options.size), races()]))
    elif options.command == "time":
        for name, seconds in step_times(options.names, options.size, options.steps).items():
            print(f"{seconds:.4f} s  {name}")
    else:
        best = {name: settle(name, options.size, options.selected_at or options.size) for name in options.names}
        for seed in options.seeds if options.command != "select" else ():  # seeds outside: all methods have run as many at any time
            if options.command == "race":
                print(race(best, options.size, options.steps, options.fraction, seed), flush=True)
                continue
            for name, (lr, knob) in best.items():
                recorded(name, options.size, lr, knob if options.knob is None else options.knob, options.steps, seed)


if __name__ == "__main__":
    main()
