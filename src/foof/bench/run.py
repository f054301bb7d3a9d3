"""Which units a run of the benchmark has, and how each is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from foof import cost
from foof.bench import fisher, loss, memory, roofline, steps
from foof.bench.cases import CASES, QUICK, Case
from foof.bench.methods import BASELINE, METHODS, chosen, entered
from foof.bench.records import Record, Store

KINDS = ("steps", "memory", "loss", "fisher", "laplace")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Setup:
    """What a run is: how large, on what."""

    quick: bool = False
    threads: int = 2
    device: str = "cpu"
    rounds: int | None = None
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.threads < 1 or (self.rounds is not None and self.rounds < 1):
            raise ValueError(f"threads and rounds are at least 1, but {self.threads} and {self.rounds} were given")
        there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        if self.device.partition(":")[0] not in there:
            raise ValueError(f"device must be one that torch has here, {' or '.join(there)}, but {self.device!r} was given")
        chosen(self.methods)  # or an error


@dataclass(frozen=True)
class Unit:
    """One measurement. ``timed``: does it hold for one machine only?"""

    name: str
    measure: Callable[[Store, Say], Record]
    timed: bool = True


def plan(setup: Setup, what: Iterable[str] = ()) -> list[Unit]:
    """The units of these kinds and cases; without names, of all."""
    wanted = list(what)
    for name in wanted:
        if name not in (*KINDS, *CASES):
            raise ValueError(f"nothing of the benchmark is called {name!r}; there are {', '.join((*KINDS, *CASES))}")
    named = [name for name in wanted if name in CASES]
    kinds = {name for name in wanted if name in KINDS}
    if named and not kinds & {"steps", "memory"}:  # those that have cases
        kinds.add("steps")
    cases = [_case(CASES[name], setup) for name in named or (QUICK if setup.quick else CASES)]
    of_kind = {
        "steps": [_steps(case, setup) for case in cases],
        "loss": _loss(setup),
        "fisher": [_fisher(width, D, setup) for width, D in (fisher.QUICK if setup.quick else fisher.SIZES)],
        "laplace": [_laplace(*fit, setup) for fit in (fisher.LAPLACE[-1:] if setup.quick else fisher.LAPLACE)],
        "memory": [_memory(case, setup) for case in cases if case.T > 1][: 1 if setup.quick else None],
    }
    return [_machine(setup), *(unit for kind, units in of_kind.items() if kind in (kinds or KINDS) for unit in units)]


def _case(case: Case, setup: Setup) -> Case:
    rounds = setup.rounds or (min(case.rounds, 2) if setup.quick else case.rounds)
    return replace(case, rounds=rounds, device=setup.device)


def _machine(setup: Setup) -> Unit:
    device = torch.device(setup.device)
    return Unit("machine", lambda store, say: {"kind": "machine", "rates": asdict(roofline.calibrate(device))})


def _steps(case: Case, setup: Setup) -> Unit:
    """Measured, beside what the rates measured at the beginning of the run predict."""

    def measure(store: Store, say: Say) -> Record:
        record = steps.unit(case, entered(case, setup.methods), say, steps.BUDGET / 2 if setup.quick else steps.BUDGET)
        known = store.get("machine")
        assert known is not None  # the first unit of every plan
        machine = cost.Machine(**known["rates"])
        return roofline.beside(record, roofline.predictions(case, machine), machine)

    return Unit(f"steps/{case.name}", measure)


def _fisher(width: int, D: int, setup: Setup) -> Unit:
    return Unit(f"fisher/{width}-{D}", lambda store, say: fisher.unit(width, D, (width, D) in fisher.COMPARED, say, setup.device))


def _laplace(width: int, D: int, structure: str, setup: Setup) -> Unit:
    return Unit(f"laplace/{structure}-{width}", lambda store, say: fisher.laplace_unit(width, D, structure, setup.device))


def _memory(case: Case, setup: Setup) -> Unit:
    """All methods on the paper's network, elsewhere ours."""
    everyone = case.name == QUICK[0] and not setup.quick
    names = [name for name, method in entered(case, setup.methods).items() if everyone or method.ours]

    def measure(store: Store, say: Say) -> Record:
        return {**memory.unit(case, names, setup.threads), "predicted": roofline.memory(case)}

    return Unit(f"memory/{case.name}", measure)


def _loss(setup: Setup) -> list[Unit]:
    """Learning rates first, of those that are installed, then the race."""
    names = [name for name in chosen(setup.methods) if name in loss.DOCUMENTED or name in loss.STUDY or name in loss.NO_LR]

    def task() -> loss.Task:
        return loss.fashion_mnist("embedded", 250, 2, setup.device) if setup.quick else loss.fashion_mnist(device=setup.device)

    def race(store: Store, say: Say) -> Record:
        searched = {name: found["best"] for name in names if (found := store.get(f"search/{name}", timed=False))}
        lrs = {**loss.DOCUMENTED, **dict.fromkeys(loss.NO_LR, 0.0), **loss.STUDY, **searched}
        return loss.unit(task(), {name: lrs[name] for name in (BASELINE.name, *names)}, say=say)

    def searching(name: str) -> Unit:
        return Unit(f"search/{name}", lambda store, say: loss.search(task(), name), timed=False)

    searches = [] if setup.quick else [searching(name) for name in names if name in loss.DOCUMENTED and METHODS[name].installed]
    return [*searches, Unit("loss", race)]


def run(units: Sequence[Unit], store: Store, before: Callable[[Unit], Say], after: Callable[[Unit, Record, bool], None]) -> list[Record]:
    """Measure what is not there yet; ``before`` is told of each unit and hears of its progress, ``after`` gets its record."""
    records = []
    for unit in units:
        say = before(unit)
        record, new = store.measured(unit.name, lambda unit=unit, say=say: unit.measure(store, say), unit.timed)  # type: ignore[misc]
        after(unit, record, new)
        records.append(record)
    return records
