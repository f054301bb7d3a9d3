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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from foof import KFAC, NaturalGradient
from foof.study.data import Data, load
from foof.study.train import models
from foof.study.train.measurements import AFTER, BEFORE, Moment, needs_raw_gradients
from foof.study.train.methods import method, optimizer_of
from foof.study.train.setting import Record, Setting, Value

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # exported, but not typed so
Batch = tuple[Tensor, Tensor]
Watch = Callable[[int, float], None]  # called with the step and its loss, whenever a point is logged
INITIAL_BATCHES = 50  # Appendix K: statistics of 50 mini-batches before training
_ONE_AT_A_TIME = Lock()  # torch's seed and threads belong to the whole process, and a Dask worker may have several threads


@dataclass
class _Log:
    series: dict[str, list[float]]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # the same, without the time other processes had the core
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
    with _ONE_AT_A_TIME:
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
    train = load(setting.dataset, setting.source, setting.train_size)
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
        # the mean, so that inversions on every T-th step count; of this thread alone, so that a busy machine does not
        "cpu_per_step": statistics.fmean(log.cpu) if log.cpu else math.nan,
        # of the whole process: a worker that ran something larger before keeps that peak
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20),
    }
    return Record(
        setting, "diverged" if log.diverged else "finished", log.series, final, cost,
        {**environment(), "threads": threads, "data": train.source, "train_records": len(train.train_y)},
    )  # fmt: skip


def _train(model: nn.Module, train: Data, setting: Setting, watch: Watch | None) -> _Log:
    """The training loop; points are logged at steps 1, 1 + log_every, ... with the loss before the update."""
    optimizer = optimizer_of(setting, model)
    order = batches(train, setting.batch_size, torch.Generator().manual_seed(setting.seed + 1))
    extra = batches(train, setting.batch_size, torch.Generator().manual_seed(setting.seed + 2))
    loop = _Loop(model, optimizer, setting, batches(train, _fisher_batch(setting), torch.Generator().manual_seed(setting.seed + 3)))
    try:
        if method(setting).initialised:
            count = INITIAL_BATCHES if setting.batch_size else 1  # every full batch is the same
            optimizer.initialise(islice(extra, setting.option("initialise", count)))  # type: ignore[attr-defined]
        for step, batch in enumerate(islice(order, setting.steps), 1):
            loop.step(step, batch)
            if watch and (step - 1) % setting.log_every == 0:
                watch(step, loop.loss)
            if loop.log.diverged:
                break
    except (LinAlgError, ArithmeticError):  # the weights grew until a factor could not be inverted
        loop.log.diverged = True
    return loop.log


def _fisher_batch(setting: Setting) -> int | None:
    return setting.option("fisher_batch", setting.batch_size)


class _Loop:
    """A run's state from step to step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, setting: Setting, fisher: Iterator[Batch]) -> None:
        self.model, self.optimizer, self.setting, self.fisher = model, optimizer, setting, fisher
        measured = ("measured_at", *setting.measure) if setting.measure else ()
        self.log = _Log({name: [] for name in ("step", "loss", *measured)})
        self.loss = math.nan
        self.every = setting.option("measure_every", setting.log_every)

    def step(self, number: int, batch: Batch) -> None:
        """One update, and what is to be logged of it. A loss that is not finite ends the run: nothing is made of it."""
        log, measures = self.log, bool(self.setting.measure) and (number - 1) % self.every == 0
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        out = self.model(batch[0])
        loss = cross_entropy(out, batch[1])
        self.loss = loss.item()
        log.diverged = not math.isfinite(self.loss)
        if log.diverged or (number - 1) % self.setting.log_every == 0:
            log.series["step"].append(number)
            log.series["loss"].append(self.loss)
        if log.diverged:
            return
        with _raw_gradients(self.optimizer, measures and needs_raw_gradients(self.setting.measure)):
            self._estimate_fisher(out)
            loss.backward()
            moment = Moment(self.model, self.optimizer, batch, self.loss)
            if measures:
                self._measure(BEFORE, moment, number)
            self.optimizer.step()
        log.seconds.append(time.perf_counter() - begun)
        log.cpu.append(time.thread_time() - begun_cpu)
        if measures:
            self._measure(AFTER, moment, None)
        self.optimizer.zero_grad()

    def _estimate_fisher(self, out: Tensor) -> None:
        """Natural gradients take a batch of their own (Appendix I.5), unless told otherwise; KFAC this step's outputs."""
        if not isinstance(self.optimizer, NaturalGradient):
            if hasattr(self.optimizer, "update_curvature"):
                self.optimizer.update_curvature(out)
        elif self.setting.option("same_batch") or self.setting.batch_size is None:
            self.optimizer.update_curvature(out)
        elif self.optimizer.curvature_due:
            self.optimizer.update_curvature(inputs=next(self.fisher)[0])

    def _measure(self, table: Mapping[str, Callable[[Moment], float]], moment: Moment, number: int | None) -> None:
        if number is not None:
            self.log.series["measured_at"].append(number)
        for name in self.setting.measure:
            if name in table:
                self.log.series[name].append(table[name](moment))


@contextmanager
def _raw_gradients(optimizer: torch.optim.Optimizer, wanted: bool) -> Iterator[None]:
    """Have KFAC leave gradients as they are until the update, for this step: measurements start from them."""
    if not (wanted and isinstance(optimizer, KFAC)):
        yield
        return
    estimator = optimizer.preconditioner.estimator
    before, estimator.plain = estimator.plain, True
    try:
        yield
    finally:
        estimator.plain = before


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
    """The commit of the source this runs from, marked if files differ from it; empty where no repository has this file."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # an environment inside somebody's repository is not of it
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
