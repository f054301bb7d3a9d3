"""Moving averages of second moments, and when they are due.

``Sigma ← normalised moving average of 1/N Σ_i Σ_r a_ir a_irᵀ``: mean over datapoints, sum over rows (DESIGN, "Scale").
What one step sees is gathered first and folded in when the step is taken, so that a skipped step leaves no trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from foof import _torch
from foof.linalg import product


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision statistics are kept in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


Method = TypeVar("Method", bound=Callable[..., Any])


def exact(method: Method) -> Method:
    """A method of something with a ``device`` that computes in the precision of its tensors, whatever autocast is on around it."""

    @functools.wraps(method)
    def exactly(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = self.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            return method(self, *args, **kwargs)

    return exactly  # type: ignore[return-value]


EACH_ROW = -1  # instead of a backward pass: every row counts, for means over rows


class Gathered:
    """What one step has seen of one second moment: the sum over rows, and over how many datapoints.

    Several calls of a layer within one backward pass add rows to the same datapoints; several backward passes
    (gradient accumulation) add datapoints.
    """

    def __init__(self) -> None:
        self.rows: Tensor | None = None  # (..., k, m), not yet multiplied out
        self.moment: Tensor | None = None  # (..., m, m) or (m,)
        self.of_pass: dict[int, int] = {}  # datapoints by backward pass
        self._written = 0  # of the rows when they came
        self._overwritten = False  # has somebody written into rows before they were multiplied out?

    @property
    def datapoints(self) -> int:
        return sum(self.of_pass.values())

    def __bool__(self) -> bool:
        return self.datapoints > 0

    def add_rows(self, rows: Tensor, datapoints: int, pass_id: int) -> None:
        """Rows ``(..., k, m)``. Kept as they are while that is smaller than their product, and they are alone."""
        self._count(datapoints, pass_id)
        rows = rows.to(wide(rows.dtype))
        if self.rows is None and self.moment is None and rows.shape[-2] <= rows.shape[-1]:
            self.rows, self._written = rows, _torch.version(rows)
        else:
            self._add(product(rows.mT, rows))

    def add_moment(self, moment: Tensor, datapoints: int, pass_id: int) -> None:
        """A second moment already summed over its rows, ``(..., m, m)`` or its diagonal ``(m,)``."""
        self._count(datapoints, pass_id)
        self._add(moment.to(wide(moment.dtype)))

    def product(self) -> Tensor:
        """The sum over rows ``Σ a aᵀ``, multiplied out."""
        self._overwritten |= self.rows is not None and _torch.version(self.rows) != self._written
        moment = product(self.rows.mT, self.rows) if self.rows is not None else self.moment
        assert moment is not None
        return moment

    def merge(self, other: Gathered) -> None:
        """Add all that another has seen, which itself stays as it is."""
        empty = self.rows is None and self.moment is None
        if empty and other.rows is not None:
            self.rows, self._written = other.rows, other._written
        elif other.rows is not None or other.moment is not None:
            self.moment, self.rows = other.product().clone() if empty else self.product() + other.product(), None
        self._overwritten |= other._overwritten
        for pass_id, datapoints in other.of_pass.items():
            self._count(datapoints, pass_id)

    def sound(self) -> Tensor:
        """Is all of it finite, and still what it was? A boolean tensor, so that one look at the device serves all layers.

        The sum shows it: a NaN or inf stays in it, and entries so large that only the sum overflows would overflow when squared.
        """
        seen = self.rows if self.rows is not None else self.moment
        assert seen is not None
        if self._overwritten or (self.rows is not None and _torch.version(self.rows) != self._written):  # since the backward pass
            return torch.zeros((), dtype=torch.bool, device=seen.device)  # made there: nothing waits
        return torch.isfinite(seen.sum())

    def _count(self, datapoints: int, pass_id: int) -> None:
        """Calls of one pass see the same datapoints, though not each of them all; rows that count one by one are of no pass."""
        before = self.of_pass.pop(pass_id, 0)  # so that the latest pass comes last
        self.of_pass[pass_id] = before + datapoints if pass_id == EACH_ROW else max(before, datapoints)

    def _add(self, moment: Tensor) -> None:
        if self.rows is not None:
            self.moment, self.rows = self.product(), None
        self.moment = moment if self.moment is None else self.moment.add_(moment)


@dataclass(frozen=True)
class Stride:
    """Every so-manieth row, from ``shift`` on. Counted up from batch to batch, that comes by all rows in turn."""

    every: int = 1
    shift: int = 0

    def of(self, rows: Tensor) -> Tensor:
        """These of the rows ``(..., k, m)``, so scaled that their ``Σ_r a_r a_rᵀ`` is an unbiased estimate of that of all."""
        there = rows.shape[-2]
        if self.every == 1 or there < 2:
            return rows
        some = rows[..., self.shift % min(self.every, there) :: self.every, :]
        return some.to(wide(some.dtype)) * (there / some.shape[-2]) ** 0.5


EVERY_ROW = Stride()


class MovingAverage:
    """Normalised exponential moving average ``x̂_t = Σ_s m^(t-s) x_s / Σ_s m^(t-s)``; of one batch it is that batch's value.

    Kept as ``x̂ ← (1-α) x̂ + α x`` with ``α = (1-m)/w`` and the mass ``w ← m w + (1-m)``. Since ``x̂`` is symmetric, updates of a
    large one leave out its upper right quarter, which is mirrored when the value is read.
    """

    def __init__(self) -> None:
        self._value: Tensor | None = None
        self._mirrored = True
        self.mass = 0.0
        self.updates = 0

    @property
    def value(self) -> Tensor | None:
        """``(..., m, m)`` or ``(m,)``; None before the first update."""
        if self._value is not None and not self._mirrored:
            half = self._value.shape[-1] // 2
            self._value[:half, half:] = self._value[half:, :half].mT
            self._mirrored = True
        return self._value

    @value.setter
    def value(self, value: Tensor | None) -> None:
        self._value, self._mirrored = value, True

    def moved(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Move the average there; False if it is there already, or there is none."""
        if self._value is None or (self._value.device, self._value.dtype) == (device, dtype):
            return False
        self._value = self._value.to(device, dtype)
        return True

    def update(self, seen: Gathered, decay: float) -> None:
        """Fold in what one step saw: ``x = (sum over rows) / datapoints``."""
        self.mass = decay * self.mass + (1 - decay)
        self.updates += 1
        alpha = (1 - decay) / self.mass
        scale = alpha / seen.datapoints
        if self._value is None:
            self.value = seen.product() * scale
        elif seen.rows is not None and seen.rows.dim() == 2:
            half = self._value.shape[-1] // 2
            left, right = seen.rows[:, :half], seen.rows[:, half:]
            self._value[:half, :half].addmm_(left.mT, left, beta=1 - alpha, alpha=scale)
            self._value[half:].addmm_(right.mT, seen.rows, beta=1 - alpha, alpha=scale)
            self._mirrored = False
        else:
            self._value.mul_(1 - alpha).add_(seen.product(), alpha=scale)

    def state_dict(self) -> dict[str, Tensor | float | int | None]:
        return {"value": None if self.value is None else self.value.clone(), "mass": self.mass, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Tensor | float | int | None], device: torch.device, dtype: torch.dtype) -> None:
        value = state["value"]
        self.value = value.to(device, dtype, copy=True) if isinstance(value, Tensor) and state["mass"] else None
        self.mass, self.updates = float(state["mass"]), int(state["updates"])  # type: ignore[arg-type]


@dataclass
class Schedule:
    """When statistics are gathered and when they are inverted: S of every T steps, as in Algorithm 1.

    In Algorithm 1's order, step t first updates the parameters with the inverse at hand, then inverts if ``inverts()``, then
    folds the step's batch into the averages if ``gathers()``. Without an initialisation before training (``warming_up``), every
    one of the first T steps is gathered and inversions come after steps 0, 1, 2, 4, 8, ... until the period T is reached (after
    step 1 nothing has changed since the very first inverse, so that nothing needs to be done).

    ``spread``: the inversions that come after one step are spread over the steps until the next (a *round*), see `Turn`.
    """

    T: int
    S: int
    t: int = 0
    warming_up: bool = True
    spread: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.T, int) or self.T < 1:
            raise ValueError(f"T is the number of steps between inversions: it must be a whole number, at least 1, got {self.T!r}.")
        if not isinstance(self.S, int) or not 1 <= self.S <= self.T:
            raise ValueError(f"S is how many of every T = {self.T} steps feed the averages: it must be in 1..{self.T}, got {self.S!r}.")

    @classmethod
    def of(cls, T: int, S: int | None, fed: int = 10, spread: bool = False) -> Schedule:
        """S of every T steps; by default ``fed`` of them, or all where there are fewer."""
        return cls(T, S if S is not None else min(T, fed) if isinstance(T, int) else 1, spread=spread)

    def gathers(self, begins: int = 0) -> bool:
        """``((t - begins + S) mod T) ∈ {0, ..., S-1}``: the S steps before an inversion, which begins so many steps into its round."""
        return (self.t - begins + self.S) % self.T < self.S or self.starting()

    def inverts(self) -> bool:
        """``(t mod T) = 0``."""
        return self.t % self.T == 0 or (self.starting() and self.t.bit_count() == 1)

    def fresh(self) -> bool:
        """Is this the first step with the inverses at hand?"""
        return self.t == 0 or replace(self, t=self.t - 1).inverts()

    def starting(self) -> bool:
        """Is this one of the first T steps, without an initialisation before?"""
        return self.warming_up and self.t < self.T

    def round(self) -> tuple[int, int]:
        """How many steps of this round of inversions lie behind, and how many it has in all."""
        if self.starting():
            first = 1 << (self.t.bit_length() - 1) if self.t else 0
            return self.t - first, min(2 * first or 1, self.T) - first
        return self.t % self.T, self.T

    def advance(self) -> None:
        self.t += 1


@dataclass(frozen=True)
class Turn:
    """When in a round one matrix is inverted: after those that take ``before`` of the ``total`` cost of all, in ``parts`` of its own.

    So all steps of a round cost about the same. Averages stand still while they are inverted; so that they are fed nevertheless, that
    takes no more steps than are left by S, or half of the round where S leaves fewer (and in the first rounds, which are all gathered).
    """

    before: int
    cost: int
    total: int
    parts: int = 1

    def steps(self, schedule: Schedule, together: bool) -> tuple[int, int]:
        """On which steps of the round the inversion begins and ends. ``together``: are all averages fed on the same steps of a round, the
        last S?"""
        length = schedule.round()[1]
        longest = max(1, length // 2, 0 if schedule.starting() else schedule.T - schedule.S + 1)
        if together and not schedule.starting():
            length = longest
        first, end = self.before * length // self.total, -(-(self.before + self.cost) * length // self.total)
        return first, max(first, min(end - 1, first + longest - 1)) if self.parts > 1 else first

    def done(self, step: int, first: int, last: int) -> int:
        """How many parts are done after a step of the round."""
        return self.parts * (step - first + 1) // (last - first + 1)
