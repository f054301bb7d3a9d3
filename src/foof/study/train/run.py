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
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from foof import KFAC, NaturalGradient
from foof.study.data import SPECS, Data, load, there
from foof.study.train import models
from foof.study.train.averages import Average
from foof.study.train.batches import Batch, Batches
from foof.study.train.checkpoints import Checkpoint
from foof.study.train.measurements import AFTER, AT_END, BEFORE, Moment, needs_raw_gradients
from foof.study.train.methods import method, optimizer_of
from foof.study.train.objectives import CROSS_ENTROPY, Objective, objective
from foof.study.train.setting import Record, Setting, Value

LinAlgError = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # exported, but not typed so
Watch = Callable[[int, float], None]  # called with the step and its loss, whenever a point is logged
INITIAL_BATCHES = 50  # Appendix K: statistics of 50 mini-batches before training
_ONE_AT_A_TIME = Lock()  # torch's seed and threads belong to the whole process, and a Dask worker may have several threads


@dataclass
class _Log:
    series: dict[str, list[float]]
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # the same, without the time other processes had the core
    diverged: bool = False


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


def run(
    setting: Setting, watch: Watch | None = None, threads: int = 1, unfinished: Path | None = None, device: str | None = None
) -> Record:
    """Train as `setting` says. Divergence is an outcome (`status`), not an error.

    unfinished: a folder where a run of more than a minute leaves its state from time to time; if there is some, it goes on from it, to the
    same record, bit for bit. device: where to train; None: on a GPU, if there is one and the network is not fully connected.
    """
    start = time.perf_counter()
    place = torch.device(device or ("cuda" if torch.cuda.is_available() and setting.model != "mlp" else "cpu"))
    train = load(setting.dataset, setting.source, setting.train_size)
    checkpoint = Checkpoint(unfinished, setting.key, str(environment()["source"])) if unfinished else None
    with _fixed(setting.seed, threads):
        model = models.build(
            setting.model, train.train_x.shape[1:], setting.hidden, train.classes, torch.Generator().manual_seed(setting.seed),
            models.trains_norm(setting.optimizer, setting.option("train_norm")),
        ).to(place)  # fmt: skip
        loop = _Loop(model, train, setting)
        log = _train(loop, watch, checkpoint)
        final = _final(loop)
    cost = {
        "seconds": time.perf_counter() - start + loop.before,
        "seconds_per_step": statistics.median(log.seconds) if log.seconds else math.nan,
        # the mean, so that inversions on every T-th step count; of this thread alone, so that a busy machine does not
        "cpu_per_step": statistics.fmean(log.cpu) if log.cpu else math.nan,
        # of the whole process: a worker that ran something larger before keeps that peak
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 2**20),
    }
    if checkpoint:
        checkpoint.remove()
    where = {"device": torch.cuda.get_device_name(place)} if place.type == "cuda" else {}
    return Record(
        setting, "diverged" if log.diverged else "finished", log.series, final, cost,
        {**environment(), "threads": threads, "data": train.source, "train_records": len(train.train_y),
         "test_records": len(train.test_y), **where},
    )  # fmt: skip


def _train(loop: _Loop, watch: Watch | None, checkpoint: Checkpoint | None) -> _Log:
    """The training loop; points are logged at steps 1, 1 + log_every, ... with the loss before the update."""
    setting, log = loop.setting, loop.log
    try:
        if checkpoint and (state := checkpoint.load()):
            loop.load_state_dict(state)
        else:
            loop.initialise()
        while loop.number < setting.steps and not log.diverged:
            loop.step()
            if watch and (loop.number - 1) % setting.log_every == 0:
                watch(loop.number, loop.loss)
            if checkpoint and checkpoint.due:
                checkpoint.save(loop.state_dict())
    except (LinAlgError, ArithmeticError):  # the weights grew until a factor could not be inverted
        log.diverged = True
    return log


class _Loop:
    """A run's state from step to step."""

    def __init__(self, model: nn.Module, train: Data, setting: Setting) -> None:
        self.begun, self.before = time.perf_counter(), 0.0  # seconds that earlier parts of this run took
        self.model, self.train, self.setting = model, train, setting
        self.device = next(model.parameters()).device
        self.average = Average(model, setting.option("polyak")) if setting.option("polyak") else None
        self.optimizer = optimizer_of(setting, model)
        self.objective: Objective = objective(setting, train)
        augmented = bool(setting.option("augment"))
        self.batches = Batches(train, setting.batch_size, setting.seed + 1, augmented)
        self.extra = Batches(train, setting.batch_size, setting.seed + 2, augmented)
        self.fisher = Batches(train, setting.option("fisher_batch", setting.batch_size), setting.seed + 3, augmented)
        series = [name for name in setting.measure if name not in AT_END]
        measured = ("measured_at", *series) if series else ()
        averaged = ("averaged_loss",) if self.average else ()
        self.log = _Log({name: [] for name in ("step", "loss", *averaged, *measured)})
        self.number = 0  # of the last step
        self.loss = math.nan  # of the last batch, as it is shown
        self.every = setting.option("measure_every", setting.log_every)

    def initialise(self) -> None:
        """Statistics of some batches before training, for methods that want them."""
        if method(self.setting).initialised:
            count = INITIAL_BATCHES if self.setting.batch_size else 1  # every full batch is the same
            seen = (self._here(batch) for batch in islice(self.extra, self.setting.option("initialise", count)))
            self.optimizer.initialise((batch[0], self.objective.target(batch)) for batch in seen)  # type: ignore[attr-defined]

    def _here(self, batch: Batch) -> Batch:
        return batch[0].to(self.device), batch[1].to(self.device)

    def step(self) -> None:
        """One update, and what is to be logged of it. A loss that is not finite ends the run: nothing is made of it."""
        self.number += 1
        batch = self._here(next(self.batches))
        self._set_momentum()
        log, measures = self.log, "measured_at" in self.log.series and (self.number - 1) % self.every == 0
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        self._own_fisher()
        out = self.model(batch[0])
        loss = self.objective.loss(out, batch)
        self.loss = self.objective.shown(loss.item(), out)
        log.diverged = not math.isfinite(self.loss)
        if log.diverged or (self.number - 1) % self.setting.log_every == 0:
            self._log_loss(batch)
        if log.diverged:
            return
        with _raw_gradients(self.optimizer, measures and needs_raw_gradients(self.setting.measure)):
            self._estimate_fisher(out, batch)
            loss.backward()
            moment = Moment(self.model, self.optimizer, batch, loss.item(), self.objective)
            if measures:
                self._measure(BEFORE, moment, self.number)
            self.optimizer.step()
        self._adapt(moment)
        log.seconds.append(time.perf_counter() - begun)
        log.cpu.append(time.thread_time() - begun_cpu)
        if measures:
            self._measure(AFTER, moment, None)
        self.optimizer.zero_grad()
        if self.average:
            self.average.update(self.model)

    def _adapt(self, moment: Moment) -> None:
        """λ by how well the quadratic model foresaw the step, from the loss of its batch before and after (Appendix A)."""
        if getattr(self.optimizer, "adaptation_due", False):
            self.optimizer.adapt_damping(moment.loss, moment.batch_loss().item())  # type: ignore[attr-defined]

    def _set_momentum(self) -> None:
        """Momentum is switched on after some epochs, where the setting says so."""
        if epochs := self.setting.option("momentum_after", 0):
            on = self.number > epochs * self.batches.per_epoch
            for group in self.optimizer.param_groups:
                if "momentum" in group:
                    group["momentum"] = self.setting.option("momentum", 0.0) if on else 0.0

    @torch.no_grad()
    def _log_loss(self, batch: Batch) -> None:
        self.log.series["step"].append(self.number)
        self.log.series["loss"].append(self.loss)
        if self.average:
            out = self.average.model(batch[0])
            self.log.series["averaged_loss"].append(self.objective.shown(self.objective.loss(out, batch).item(), out))

    def _own_fisher(self) -> None:
        """Natural gradients take a batch of their own (Appendix I.5), unless told otherwise, before the step's: batch norms whose moments
        it moves, and puts back, are then not between a forward pass and its backward."""
        if isinstance(self.optimizer, NaturalGradient) and not self._same_batch and self.optimizer.curvature_due:
            self.optimizer.update_curvature(inputs=self._here(next(self.fisher))[0])

    @property
    def _same_batch(self) -> bool:
        return bool(self.setting.option("same_batch")) or self.setting.batch_size is None

    def _estimate_fisher(self, out: Tensor, batch: Batch) -> None:
        """KFAC takes this step's outputs, and its targets for the empirical Fisher."""
        own = isinstance(self.optimizer, NaturalGradient) and not self._same_batch
        if hasattr(self.optimizer, "update_curvature") and not own:
            targets = (self.objective.target(batch),) if self.setting.option("fisher") == "empirical" else ()
            self.optimizer.update_curvature(out, *targets)

    def _measure(self, table: Mapping[str, Callable[[Moment], float]], moment: Moment, number: int | None) -> None:
        if number is not None:
            self.log.series["measured_at"].append(number)
        for name in self.setting.measure:
            if name in table:
                self.log.series[name].append(table[name](moment))

    def state_dict(self) -> dict[str, Any]:
        """All that the rest of the run depends on."""
        return {
            "number": self.number, "loss": self.loss, "log": asdict(self.log), "seconds": self.before + time.perf_counter() - self.begun,
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "random": torch.get_rng_state(),
            "batches": self.batches.state_dict(), "fisher": self.fisher.state_dict(),
            "average": (self.average.model.state_dict(), self.average.steps) if self.average else None,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number, self.loss, self.before = state["number"], state["loss"], state["seconds"]
        self.log.__dict__.update(state["log"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.batches.load_state_dict(state["batches"])
        self.fisher.load_state_dict(state["fisher"])
        if self.average:
            self.average.model.load_state_dict(state["average"][0])
            self.average.steps = state["average"][1]
        torch.set_rng_state(state["random"])


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


def _final(loop: _Loop) -> dict[str, float]:
    """Loss and accuracy on all training and test records, and the mean of the last tenth of the logged losses.

    Of augmented runs the training loss is that mean: images that are never shown as they are say little of what is trained.
    """
    log, train, model = loop.log, loop.train, loop.model
    tail = log.series["loss"][-max(1, len(log.series["loss"]) // 10) :]
    final = {"last_loss": statistics.fmean(tail) if tail else math.nan, "steps": len(log.seconds)}
    for name, x, y in (("train", train.train_x, train.train_y), ("test", train.test_x, train.test_y)):
        if name == "train" and loop.setting.option("augment"):
            final["train_loss"] = final["last_loss"]
            continue
        final |= {f"{name}_{what}": value for what, value in _judged(model, x, y, loop).items()}
    if loop.average and not log.diverged:
        judged = _judged(loop.average.model, train.test_x, train.test_y, loop)
        final |= {f"averaged_test_{what}": value for what, value in judged.items()}
    if not math.isfinite(final["train_loss"]):
        log.diverged = True
    for name in loop.setting.measure if not log.diverged else ():
        final |= AT_END[name](model, loop.optimizer, train) if name in AT_END else {}
    return final


def _judged(model: nn.Module, x: Tensor, y: Tensor, loop: _Loop) -> dict[str, float]:
    """Of autoencoders there is a loss alone."""
    chunk = 2000 if loop.setting.model == "mlp" else 250
    loss, accuracy = evaluate(model, x, y, chunk, loop.objective)
    return {"loss": loss} if math.isnan(accuracy) else {"loss": loss, "accuracy": accuracy}


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, y: Tensor, chunk: int = 2000, of: Objective = CROSS_ENTROPY) -> tuple[float, float]:
    """Mean loss, as it is shown, and accuracy over all records, summed in float64; batch norms use their running moments."""
    device = next((p.device for p in model.parameters()), x.device)
    loss, right, training = 0.0, 0.0, model.training
    model.eval()
    for rows in range(0, len(y), chunk):
        batch = x[rows : rows + chunk].to(device), y[rows : rows + chunk].to(device)
        out = model(batch[0])
        loss += of.shown(of.total(out, batch).item(), out)
        right += of.right(out, batch)
    model.train(training)
    return loss / len(y), right / len(y)


def missing_data(setting: Setting) -> str:
    """The data set that a setting needs and that can only be had from the network; empty if it is here."""
    local = setting.source in ("embedded", "debian") or there(setting.dataset)
    return "" if local else SPECS[setting.dataset].title


@cache
def environment() -> dict[str, Value]:
    """What the outcome may depend on besides the setting, and what its timing surely does."""
    return {
        "foof": _version("foof"), "source": _commit(), "torch": torch.__version__,
        "python": platform.python_version(), "system": platform.system(), "processor": _processor(),
        "cores": os.cpu_count() or 1, **_preloaded(),
    }  # fmt: skip


def _preloaded() -> dict[str, Value]:
    """Libraries that the loader was told to put before all others, by name: they may change how matrices are multiplied."""
    names = [Path(library).name for library in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()]
    return {"preloaded": " ".join(names)} if names else {}


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
