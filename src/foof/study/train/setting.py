"""What a run is, before it runs (`Setting`), and what it gave (`Record`)."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

Value = bool | int | float | str


def _plain(x: Any) -> Any:
    """JSON has no infinities and no NaN: write them as strings, so that any reader can read the records."""
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, list | tuple) else x


def _number(x: Any) -> Any:
    """The inverse of `_plain` for numbers."""
    if isinstance(x, list):
        return [_number(v) for v in x]
    return float(x) if x in ("inf", "-inf", "nan") else x


@dataclass(frozen=True)
class Setting:
    """Everything a run depends on. Learning rate and damping are in the library's scale: means over the batch."""

    dataset: str = "fashion-mnist"
    source: str = "embedded"
    train_size: int | None = None  # None: all there are
    model: str = "mlp"
    hidden: tuple[int, ...] = (1000, 1000, 1000)
    optimizer: str = "sgd"
    lr: float = 0.01
    damping: float | str | None = None  # λ, or "auto" (Appendix K); None for methods without
    options: tuple[tuple[str, Value], ...] = ()  # sorted pairs
    batch_size: int | None = 100  # None: full batch
    steps: int = 600
    seed: int = 0
    log_every: int = 10
    measure: tuple[str, ...] = ()  # further quantities to log, see `measuring`

    def __post_init__(self) -> None:
        canonical = tuple(sorted((str(k), v) for k, v in dict(self.options).items()))
        object.__setattr__(self, "options", canonical)
        object.__setattr__(self, "hidden", tuple(int(n) for n in self.hidden))
        object.__setattr__(self, "measure", tuple(sorted(set(self.measure))))
        object.__setattr__(self, "lr", float(self.lr))  # 1 and 1.0 are the same setting and must have the same key
        if self.damping not in (None, "auto"):
            object.__setattr__(self, "damping", float(self.damping))
        for option, given in self.options:
            if isinstance(given, float) and not math.isfinite(given):
                raise ValueError(f"the option {option} must be finite, but is {given!r}")
        positive = {"steps": self.steps, "log_every": self.log_every, "lr": self.lr, "damping": self.damping,
                    "batch_size": self.batch_size, "train_size": self.train_size}  # fmt: skip
        for name, value in positive.items():
            if isinstance(value, int | float) and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, but is {value!r}")

    @property
    def key(self) -> str:
        """A stable name: the same in every process, on every machine, and for as long as the fields mean the same."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def but(self, **changes: Any) -> Setting:
        """This setting with some fields changed."""
        return replace(self, **changes)

    @property
    def curve(self) -> Setting:
        """The setting of the curve this run belongs to: all but the seed."""
        return replace(self, seed=0)

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Setting:
        given = dict(fields)
        given["options"] = tuple((k, v) for k, v in given["options"])
        return cls(**{**given, "hidden": tuple(given["hidden"]), "measure": tuple(given["measure"])})


@dataclass(frozen=True)
class Record:
    """What a run gave. `series` and `final` depend on the setting alone; `cost` and `environment` on the machine too."""

    setting: Setting
    status: str  # "finished" or "diverged"
    series: dict[str, list[float]] = field(default_factory=dict)  # "step", "loss", and what `measure` names
    final: dict[str, float] = field(default_factory=dict)  # train_loss, train_accuracy, test_loss, test_accuracy, ...
    cost: dict[str, float] = field(default_factory=dict)  # seconds, seconds_per_step, peak_memory_mb
    environment: dict[str, Value] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.setting.key

    @property
    def score(self) -> float:
        """What settings are chosen by: the loss at the end, which claims compare, too. Divergence is the worst score.

        Not the loss on all images at the last step: with a constant learning rate that differs much from step to step.
        """
        loss = self.end_loss()
        return loss if self.status == "finished" and math.isfinite(loss) else math.inf

    def end_loss(self, until: int | None = None) -> float:
        """Mean of the logged mini-batch losses over the last tenth of the steps (up to `until`); infinite if the run diverged before.

        NaN of a run that was to stop before `until`; where none of these was logged, it is the last one before. Losses are logged before
        the update, every ten steps; the last tenth is what `paper/figures.md` gives for each published curve.
        """
        steps, losses = self.series["step"], self.series["loss"]
        last = until or self.setting.steps
        if self.status != "finished" and (not steps or steps[-1] <= last):
            return math.inf
        if last > self.setting.steps:
            return math.nan
        until_then = [(x, y) for x, y in zip(steps, losses, strict=True) if x <= last]
        tail = [y for x, y in until_then if x > 0.9 * last] or [y for _, y in until_then[-1:]]
        return statistics.fmean(tail) if tail else math.nan

    def to_dict(self) -> dict[str, Any]:
        return _plain(asdict(self))

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Record:
        numbers = {name: {k: _number(v) for k, v in fields[name].items()} for name in ("series", "final", "cost")}
        return cls(Setting.from_dict(fields["setting"]), fields["status"], **numbers, environment=dict(fields["environment"]))
