"""One setting → one record."""

from __future__ import annotations

import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foof.study import data, models
from foof.study.data import Data
from foof.study.methods import method
from foof.study.setting import Record, Setting, Value

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # exported, but not typed so
Batch = tuple[Tensor, Tensor]
Watch = Callable[[int, float], None]  # called with the step and its loss, whenever a point is logged
INITIAL_BATCHES = 50  # Appendix K: statistics of 50 mini-batches before training


@dataclass
class Progress:
    """A step that has just been made, for the functions in `MEASURES` to look at."""

    model: nn.Module
    batch: Batch
    loss: float  # of the batch, before the step


def _progress(step: Progress) -> float:
    """How far one update brought the loss of its own batch down."""
    with torch.no_grad():
        return step.loss - cross_entropy(step.model(step.batch[0]), step.batch[1]).item()


MEASURES: dict[str, Callable[[Progress], float]] = {"progress": _progress}


@dataclass
class _Log:
    series: dict[str, list[float]]
    seconds: list[float] = field(default_factory=list)
    diverged: bool = False


def batches(train: Data, size: int | None, generator: torch.Generator) -> Iterator[Batch]:
    """Mini-batches without end: a fresh order every epoch, an incomplete last batch dropped. None: the full batch."""
    n = len(train.train_y)
    if size is not None and size > n:
        raise ValueError(f"batches of {size:,} were asked for, but there are {n:,} training records")
    while True:
        if size is None:
            yield train.train_x, train.train_y
            continue
        order = torch.randperm(n, generator=generator)
        for start in range(0, n - size + 1, size):
            rows = order[start : start + size]
            yield train.train_x[rows], train.train_y[rows]


@contextmanager
def _fixed(seed: int, threads: int) -> Iterator[None]:
    """Seed torch's global generator and fix the number of threads (sums depend on it); put both back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of NaN in statistics: the record tells of divergence
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(before)


def run(setting: Setting, watch: Watch | None = None, threads: int = 1) -> Record:
    """Train as `setting` says. Divergence is an outcome (`status`), not an error."""
    start = time.perf_counter()
    train = data.load(setting.dataset, setting.source, setting.train_size)
    with _fixed(setting.seed, threads):
        model = models.build(
            setting.model, train.train_x.shape[1:], setting.hidden, train.classes,
            torch.Generator().manual_seed(setting.seed),
        )  # fmt: skip
        log = _train(model, train, setting, watch)
        final = _final(model, train, log)
    cost = {
        "seconds": time.perf_counter() - start,
        "seconds_per_step": statistics.median(log.seconds) if log.seconds else math.nan,
        # of the whole process: a worker that ran something larger before keeps that peak
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20),
    }
    return Record(
        setting, "diverged" if log.diverged else "finished", log.series, final, cost,
        {**environment(), "threads": threads, "data": train.source, "train_records": len(train.train_y)},
    )  # fmt: skip


def _train(model: nn.Module, train: Data, setting: Setting, watch: Watch | None) -> _Log:
    """The training loop; points are logged at steps 1, 1 + log_every, ... with the loss before the update."""
    optimizer = method(setting).build(model, setting)
    order = batches(train, setting.batch_size, torch.Generator().manual_seed(setting.seed + 1))
    log = _Log({name: [] for name in ("step", "loss", *setting.measure)})
    try:
        if hasattr(optimizer, "initialise"):
            first = batches(train, setting.batch_size, torch.Generator().manual_seed(setting.seed + 2))
            count = INITIAL_BATCHES if setting.batch_size else 1  # every full batch is the same
            optimizer.initialise(islice(first, setting.option("initialise", count)))
        for step, batch in enumerate(islice(order, setting.steps), 1):
            begun = time.perf_counter()
            loss = _step(model, optimizer, batch)
            log.seconds.append(time.perf_counter() - begun)
            if not math.isfinite(loss):
                log.diverged = True
            if log.diverged or (step - 1) % setting.log_every == 0:
                _note(log, step, Progress(model, batch, loss), setting.measure, watch)
            if log.diverged:
                break
    except (LinAlgError, ArithmeticError):  # the weights grew until a factor could not be inverted
        log.diverged = True
    return log


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One update; returns the loss before it. A loss that is not finite ends the run, so nothing is made of it."""
    x, y = batch
    out = model(x)
    loss = cross_entropy(out, y)
    if not torch.isfinite(loss):
        return loss.item()
    if hasattr(optimizer, "update_curvature"):
        optimizer.update_curvature(out)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _note(log: _Log, step: int, made: Progress, measure: tuple[str, ...], watch: Watch | None) -> None:
    log.series["step"].append(step)
    log.series["loss"].append(made.loss)
    for name in measure:
        log.series[name].append(MEASURES[name](made))
    if watch:
        watch(step, made.loss)


def _final(model: nn.Module, train: Data, log: _Log) -> dict[str, float]:
    """Loss and accuracy on all training and test records, and the mean of the last tenth of the logged losses."""
    tail = log.series["loss"][-max(1, len(log.series["loss"]) // 10) :]
    final = {"last_loss": statistics.fmean(tail) if tail else math.nan, "steps": len(log.seconds)}
    for name, x, y in (("train", train.train_x, train.train_y), ("test", train.test_x, train.test_y)):
        final[f"{name}_loss"], final[f"{name}_accuracy"] = evaluate(model, x, y)
    if not math.isfinite(final["train_loss"]):
        log.diverged = True
    return final


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, chunk: int = 2000) -> tuple[float, float]:
    """Mean loss and accuracy over all records, summed in float64."""
    loss, right = 0.0, 0
    for rows in range(0, len(y), chunk):
        out, target = model(x[rows : rows + chunk]), y[rows : rows + chunk]
        loss += cross_entropy(out.double(), target, reduction="sum").item()
        right += int((out.argmax(1) == target).sum())
    return loss / len(y), right / len(y)


@cache
def environment() -> dict[str, Value]:
    """What the outcome may depend on besides the setting, and what its timing surely does."""
    return {
        "foof": _version("foof"), "source": _commit(), "torch": torch.__version__,
        "python": platform.python_version(), "system": platform.system(), "processor": _processor(),
        "cores": os.cpu_count() or 1,
    }  # fmt: skip


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit of the source this runs from, marked if files differ from it; empty outside a repository."""
    here = Path(__file__).parent
    try:
        git = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
