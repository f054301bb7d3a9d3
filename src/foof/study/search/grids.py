"""The paper's protocol for hyperparameters (Appendix D.2).

Learning rates from {1, 3}·10^i, damping from 10^(2i) (or 10^i); grids extended while the best lies on an edge; best by
final training loss; then three seeds for the winner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from foof.study.train.setting import Record, Setting

Get = Callable[[Setting], Record | None]  # the record of a setting, if there is one
RunAll = Callable[[Sequence[Setting]], list[Record]]  # settings to their records in order, e.g. a sweep with its store
CHALLENGERS = 2  # of a centre
CLEARLY = 1.1  # a challenger's loss in the grid is lower by this factor: about as much as seeds differ by


def lr_at(i: int) -> float:
    """The i-th value of the ladder ..., 0.1, 0.3, 1, 3, 10, ...; `lr_at(0)` is 1."""
    decade, half = divmod(i, 2)
    return float(f"{'3' if half else '1'}e{decade}")  # the exact decimal: 3e-4, not 0.00030000000000000003


def lr_index(lr: float) -> int:
    """The inverse of `lr_at`, for values on the ladder."""
    decade = math.floor(math.log10(lr) + 1e-9)
    i = 2 * decade + (lr / 10**decade > 2)
    if not math.isclose(lr_at(i), lr, rel_tol=1e-6):
        raise ValueError(f"learning rates are of the form {{1, 3}}·10^i, but {lr} was given")
    return i


def lr_grid(low: float, high: float) -> tuple[float, ...]:
    """All values of the form {1, 3}·10^i from `low` to `high`."""
    return tuple(lr_at(i) for i in range(lr_index(low), lr_index(high) + 1))


def damping_at(damping: float, decades: int) -> float:
    """A power of ten some decades further, as the exact decimal."""
    return float(f"1e{round(math.log10(damping)) + decades}")


def damping_grid(low: float, high: float, every: int = 2) -> tuple[float, ...]:
    """Powers of ten from `low` to `high`, every second one as in the paper, or every one."""
    first, last = (round(math.log10(x)) for x in (low, high))
    if (last - first) % every or any(not math.isclose(10.0**i, x, rel_tol=1e-6) for i, x in ((first, low), (last, high))):
        apart = "every power of ten" if every == 1 else f"every power of ten that is {every} decades further"
        raise ValueError(f"a range of λ is {apart} from its low to its high end, but {low:g} to {high:g} was given")
    return tuple(float(f"1e{i}") for i in range(first, last + 1, every))


@dataclass(frozen=True)
class Search:
    """One method's own search: a base setting, a first grid, and how many seeds its winner gets.

    A single damping is a choice, not a grid: it is never extended. So is a single learning rate.
    With a `centre` (lr, λ), one seed is run there first, and it stands until the grid around it is complete. It is `known` if a
    search before this one has found it, as the paper's; otherwise it is a guess, and nothing is concluded from it alone.

    With `grid_steps`, runs of the grid stop there, and are compared by their mini-batch losses just before (longer runs too: a
    short run is the beginning of a long one). The best of them replaces the centre if it ends below it, over all seeds.
    """

    base: Setting
    lrs: tuple[float, ...]
    dampings: tuple[float | str | None, ...] = (None,)
    damping_every: int = 2  # 10^(2i)
    extend: int = 3  # how often the grid may grow
    seeds: int = 3
    centre: tuple[float, float | str | None] | None = None
    known: bool = True
    urgency: int = 0  # of several searches, lower ones are run first
    also: tuple[tuple[float, float | str | None], ...] = ()  # pairs (lr, λ) beyond the grid's rectangle
    grid_steps: int | None = None  # None: all steps

    @property
    def grid(self) -> list[Setting]:
        pairs = [(lr, damping) for damping in self.dampings for lr in self.lrs]
        return [self.base.but(lr=lr, damping=damping) for lr, damping in dict.fromkeys([*pairs, *self.also])]

    @property
    def short_grid(self) -> list[Setting]:
        """The grid's settings as they are run: none longer than `grid_steps`."""
        return [s.but(steps=min(s.steps, self.grid_steps or s.steps)) for s in self.grid]

    @property
    def searched(self) -> bool:
        """Whether its settings come from a search once its grid is done."""
        return len(self.grid) > 1 or (self.centre is not None and self.known)

    def on_edge(self, best: Setting) -> bool:
        """Is its λ the smallest or largest of the grid, or its learning rate that of those at its λ? A single value is no grid."""
        lrs = {s.lr for s in self.grid if s.damping == best.damping}
        dampings = {s.damping for s in self.grid if isinstance(s.damping, float)}
        some_lrs, some_dampings = len({s.lr for s in self.grid}) > 1, len(dampings) > 1
        return (some_lrs and best.lr in (min(lrs), max(lrs))) or (some_dampings and best.damping in (min(dampings), max(dampings)))

    def around(self, best: Setting) -> Search:
        """This search with its grids extended where `best` lies on an edge; equal to it where there is nothing to extend."""
        by = self.damping_every
        return replace(
            self,
            lrs=_grow(self.lrs, best.lr, lambda x, way: lr_at(lr_index(x) + way)),
            dampings=_grow(self.dampings, best.damping, lambda x, way: damping_at(x, way * by)),
        )


@dataclass(frozen=True)
class Tuned:
    """What a search found: the best setting, its records over seeds, and everything that was tried with one seed."""

    best: Setting
    records: tuple[Record, ...]
    tried: tuple[Record, ...]
    on_edge: bool  # the best lies on an edge of the grid that was not extended further
    searched: bool = True  # the settings come from a search, here or in the paper
    grid_done: bool = True  # all of the grid has been run
    grid_steps: int | None = None  # where `tried` were compared; None: at their ends


@dataclass(frozen=True)
class Look:
    """A search as far as records go: what is still to be run, and what is known already, if anything is."""

    missing: tuple[Setting, ...]
    tuned: Tuned | None


def _grow(values: tuple, best: object, move: Callable[[float, int], float]) -> tuple:
    """`values` with one more on the side where the best lies."""
    if len(values) < 2:
        return values
    before = (move(values[0], -1),) if best == values[0] else ()
    after = (move(values[-1], 1),) if best == values[-1] else ()
    return (*before, *values, *after)


def look(search: Search, get: Get) -> Look:
    """The protocol as a function of what is known: centre, grid (extended where its best lies on an edge), winner's seeds."""
    centre = None
    if search.centre is not None:
        lr, damping = search.centre
        centre = search.base.but(lr=lr, damping=damping)
        found = _seeds(search, centre, get, search.known)
        if get(centre) is None:
            return replace(found, missing=(centre,))

    def loss(setting: Setting) -> float:
        return _trial_loss(trials[setting], search.grid_steps)

    current, rounds = search, 0
    while True:
        trials, missing = _trials(current, get)
        clear = [s for s in sorted(trials, key=loss) if centre not in trials or CLEARLY * loss(s) < loss(centre)]
        known = found.tuned and replace(found.tuned, tried=tuple(trials.values()), grid_steps=search.grid_steps) if centre else None
        if known and clear:  # something does better so far: nothing is concluded from the centre
            known = replace(known, searched=False)
        if missing:
            return Look(missing, known)
        best = min(trials, key=loss)
        wider = current.around(best)
        if wider == current or rounds == search.extend:
            break
        current, rounds = wider, rounds + 1
    if centre:
        contest = _contest(search, centre, clear[:CHALLENGERS], get)
        if contest.missing:
            return Look(contest.missing, known)
        best = contest.winner
    found, edge = _seeds(search, best, get, search.searched), current.on_edge(best) and not (search.known and best == centre)
    tried = tuple(trials.values())
    done = found.tuned and replace(found.tuned, tried=tried, on_edge=edge, grid_done=True, grid_steps=search.grid_steps)
    return Look(found.missing, done)


@dataclass(frozen=True)
class _Contest:
    winner: Setting
    missing: tuple[Setting, ...] = ()  # what must be run before it is decided


def _contest(search: Search, centre: Setting, challengers: Sequence[Setting], get: Get) -> _Contest:
    """Does a better trial replace the centre? One run at full length must end below that of the centre, then the mean over all seeds.

    Challengers come in the order of the grid's losses, those alone that did clearly better than the centre.
    """
    for challenger in challengers:
        first, before = get(challenger), get(centre)
        if first is None:
            return _Contest(centre, (challenger,))
        if before is None or first.score < before.score:
            runs = _seeds(search, challenger, get, True)
            mean = statistics.fmean(record.score for record in runs.tuned.records) if runs.tuned else math.inf
            if runs.missing and math.isfinite(mean):  # one that has diverged settles it
                return _Contest(centre, runs.missing)
            if before is None or mean < before.score:
                return _Contest(challenger)
    return _Contest(centre)


def _trials(search: Search, get: Get) -> tuple[dict[Setting, Record], tuple[Setting, ...]]:
    """Records of a grid by setting, full ones where there are, and the runs that are missing."""
    found = {full: record for full, short in zip(search.grid, search.short_grid, strict=True) if (record := get(full) or get(short))}
    return found, tuple(short for full, short in zip(search.grid, search.short_grid, strict=True) if full not in found)


def _trial_loss(record: Record, grid_steps: int | None) -> float:
    return record.score if grid_steps is None else record.end_loss(min(grid_steps, record.setting.steps))


def _seeds(search: Search, setting: Setting, get: Get, searched: bool) -> Look:
    """All seeds of one setting, which a search has found or not."""
    settings = [setting.but(seed=i) for i in range(search.seeds)]
    there = tuple(record for s in settings if (record := get(s)))
    tuned = Tuned(settings[0], there, there[:1], False, searched, grid_done=False) if there else None
    return Look(tuple(s for s in settings if get(s) is None), tuned)


def tune_all(searches: Mapping[str, Search], run_all: RunAll, stored: Get = lambda _: None) -> dict[str, Tuned]:
    """Run searches side by side, round by round, until nothing is missing: urgent ones first, first seeds first.

    What is `stored` already need not be run, nor a short run where there is a long one of the same setting.
    """
    known: dict[Setting, Record] = {}

    def get(setting: Setting) -> Record | None:
        if setting not in known and (record := stored(setting)):
            known[setting] = record
        return known.get(setting)

    while True:
        looks = {name: look(search, get) for name, search in searches.items()}
        wanted = [(search.urgency, s.seed, s) for name, search in searches.items() for s in looks[name].missing]
        if not wanted:
            return {name: found.tuned for name, found in looks.items() if found.tuned}
        wanted.sort(key=lambda job: job[:2])
        known |= {r.setting: r for r in run_all(list(dict.fromkeys(s for *_, s in wanted)))}


def tune(search: Search, run_all: RunAll) -> Tuned:
    """Run one search."""
    return tune_all({"": search}, run_all)[""]
