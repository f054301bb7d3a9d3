"""The paper's protocol for hyperparameters (Appendix D.2).

Learning rates from {1, 3}·10^i, damping from 10^(2i) (or 10^i); grids extended while the best lies on an edge, and filled between their
learning rates up to as many trials as others have; best by the training loss at the end of training, of what explodes on no seed that
selects. Those seeds (0, and 100, 101, ... for what leads) are not among those that report (1, 2, ...): what explodes on these is
reported so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from foof.study.train.setting import Record, Setting, Value

Get = Callable[[Setting], Record | None]  # the record of a setting, if there is one
RunAll = Callable[[Sequence[Setting]], list[Record]]  # settings to their records in order, e.g. a sweep with its store
CHALLENGERS = 2  # of a centre
SELECTS = 0  # the seed that settings are chosen with
VETS = 100  # the first of the other seeds that what is chosen must not explode on
EXPLODED = 10.0  # times the first loss
FLAT = 1.01  # times the best loss: what the same lr/λ comes to at the next λ inside, where nothing is left to gain outside
OPEN = 2.0  # times the best loss: up to which a row beside it, whose best trial is at an end, may still come to win
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


def between(low: float, high: float) -> float:
    """The learning rate half-way between two of the ladder: 2 between 1 and 3, 5 between 3 and 10."""
    return float(f"{math.sqrt(low * high):.0e}")


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
class Row:
    """A ladder of learning rates at one λ, or with options of its own (SGD's momentum)."""

    lrs: tuple[float, ...]
    damping: float | str | None = None
    options: tuple[tuple[str, Value], ...] = ()
    halves: tuple[float, ...] = ()  # learning rates half-way between those of the ladder, see `Search.filled`

    def settings(self, base: Setting) -> list[Setting]:
        own = {**dict(base.options), **dict(self.options)}
        return [base.but(lr=lr, damping=self.damping, options=tuple(own.items())) for lr in (*self.lrs, *self.halves)]

    def refined(self, lr: float, outside: bool = False) -> Row | None:
        """One more half-way learning rate: the nearest to `lr` inside the ladder, or just `outside` its ends. None if none is left."""
        below, above = (lr_at(lr_index(end) + way) for end, way in ((self.lrs[0], -1), (self.lrs[-1], 1)))
        gaps = ((below, self.lrs[0]), (self.lrs[-1], above)) if outside else pairwise(self.lrs)
        left = [half for half in (between(*gap) for gap in gaps) if half not in self.halves]
        nearest = min(left, key=lambda x: abs(math.log(x / lr)), default=None)
        return None if nearest is None else replace(self, halves=(*self.halves, nearest))

    def grown(self, lr: float) -> Row:
        """One more learning rate on the side where the best one lies, if it is an end. A single one is a choice, and stays."""
        if len(self.lrs) < 2:
            return self
        before = (lr_at(lr_index(self.lrs[0]) - 1),) if lr <= self.lrs[0] else ()
        after = (lr_at(lr_index(self.lrs[-1]) + 1),) if lr >= self.lrs[-1] else ()
        return replace(self, lrs=(*before, *self.lrs, *after))

    def lowered(self) -> Row:
        """One more learning rate below the others."""
        return replace(self, lrs=(lr_at(lr_index(self.lrs[0]) - 1), *self.lrs))

    def moved(self, decades: int, by: int) -> Row:
        """The same ladder at another λ, `by` places further."""
        assert isinstance(self.damping, float)
        lrs = tuple(lr_at(lr_index(lr) + by) for lr in self.lrs)
        return replace(self, damping=damping_at(self.damping, decades), lrs=lrs, halves=())


def rectangle(lrs: Sequence[float], dampings: Sequence[float | str | None] = (None,)) -> tuple[Row, ...]:
    """The same learning rates at each λ."""
    return tuple(Row(tuple(lrs), damping) for damping in dampings)


@dataclass(frozen=True)
class Search:
    """One method's own search: a base setting, a first grid, and how many seeds report its winner.

    The grid is made of rows, each a ladder of learning rates at one λ. It grows by one learning rate where the best (or what wins in the
    end) lies at an end of its row, and by one row where it lies in the first or last of several λ. A row beside it is a bound only if its
    own best trial lies inside, or is twice as bad: else it grows, too, and gets a smaller learning rate if no trial of it lives. A single
    value is a choice, not a grid.
    With a `centre` (lr, λ), it is run first, and stands until the grid around it is complete. It is `known` if a
    search before this one has found it, as the paper's; otherwise it is a guess, and nothing is concluded from it alone.

    With `trials`, it grows up to as many, and what has not come to them gets learning rates half-way between its own: no method is tuned
    more than another.

    With `grid_steps`, runs of the grid stop there, and are compared by their mini-batch losses just before (longer runs too: a
    short run is the beginning of a long one). The best of them go on to the end, beside a known centre if they are clearly better, and so
    does the best of each other row that is not OPEN times worse: small λ lead early, and may end above large ones. What ends lowest
    replaces the centre.
    """

    base: Setting
    rows: tuple[Row, ...]
    damping_every: int = 2  # 10^(2i)
    extend: int = 3  # how often the grid may grow, where no `trials` are given
    trials: int = 0  # in all; 0: as many as there are after it has grown
    seeds: int = 3  # that report
    vets: int = 0  # more seeds, which do not report, that what wins must not explode on
    centre: tuple[float, float | str | None] | None = None
    known: bool = True
    urgency: int = 0  # of several searches, lower ones are run first
    grid_steps: int | None = None  # None: all steps
    stand_ins: tuple[Setting, ...] = ()  # bases of runs that are as good as the grid's own: same method, more measured
    chosen_before: bool = False  # its one setting comes from another search, with the seed that selects: others report it
    shown: Setting | None = None  # base of the runs that report, where they are not those of the grid: shorter ones, with more measured

    @property
    def grid(self) -> list[Setting]:
        return list(dict.fromkeys(s for row in self.rows for s in row.settings(self.base)))

    @property
    def middle(self) -> Setting | None:
        """The setting that is run first."""
        if self.centre is None:
            return None
        lr, damping = self.centre
        return next((s for s in self.grid if (s.lr, s.damping) == self.centre), self.base.but(lr=lr, damping=damping))

    def short(self, setting: Setting) -> Setting:
        """A setting of the grid as it is run there."""
        return setting.but(steps=min(setting.steps, self.grid_steps or setting.steps))

    def trial(self, setting: Setting, get: Get) -> Record | None:
        """What is known of a setting of the grid: its run to the end, its short one, or that of a stand-in."""
        others = (b.but(lr=setting.lr, damping=setting.damping, seed=setting.seed) for b in self.stand_ins)
        return next((record for s in (setting, self.short(setting), *others) if (record := get(s))), None)

    def reports(self, setting: Setting) -> list[Setting]:
        """The runs that report a setting: none of them was looked at to choose it. Of a single setting nothing is chosen here."""
        first = SELECTS + 1 if len(self.grid) > 1 or self.chosen_before else SELECTS
        return [self.reported(setting).but(seed=first + i) for i in range(self.seeds)]

    def reported(self, setting: Setting) -> Setting:
        """A setting of the grid as it is run to be reported."""
        return self.shown.but(lr=setting.lr, damping=setting.damping) if self.shown else setting

    def vetting(self, setting: Setting) -> list[Setting]:
        """The runs none of which may explode, if a setting of several is to win."""
        return [setting, *(setting.but(seed=VETS + i) for i in range(self.vets if len(self.grid) > 1 else 0))]

    @property
    def searched(self) -> bool:
        """Whether its settings come from a search once its grid is done."""
        return len(self.grid) > 1 or (self.centre is not None and self.known)

    def _row(self, best: Setting) -> Row:
        return next(row for row in self.rows if best in row.settings(self.base))

    def _dampings(self) -> list[float]:
        return sorted({row.damping for row in self.rows if isinstance(row.damping, float)})

    def _beside(self, row: Row) -> list[Row]:
        """The rows of the next smaller and the next larger λ."""
        dampings = self._dampings()
        if row.damping not in dampings or len(row.lrs) < 2:
            return []
        i = dampings.index(row.damping)
        return [r for r in self.rows if r.damping in (*dampings[max(i - 1, 0) : i], *dampings[i + 1 : i + 2])]

    def around(self, best: Setting, losses: Mapping[Setting, float]) -> Search:
        """This search with its grid extended where `best` lies on an edge; equal to it where there is nothing to extend.

        A row beside that of the best is no bound, and extended as well, if its own best trial lies at an end and is not OPEN times
        worse, or if all of its trials exploded, which are `losses` of inf. If everything exploded, every row gets a smaller one.
        """
        if best not in self.grid:
            return self
        row, dampings = self._row(best), self._dampings()
        if all(losses.get(s) == math.inf for s in self.grid):
            return replace(self, rows=tuple(r.lowered() if len(r.lrs) > 1 else r for r in self.rows))
        beside_best = self._beside(row)
        within = OPEN * losses.get(best, math.inf)
        rows = tuple(r.grown(best.lr) if r is row else self._opened(r, losses, within) if r in beside_best else r for r in self.rows)
        if len(dampings) > 1 and best.damping in (dampings[0], dampings[-1]):
            way = -1 if best.damping == dampings[0] else 1
            beside = next(r for r in self.rows if r.damping == dampings[1 if way < 0 else -2])
            by = round(statistics.fmean(map(lr_index, row.lrs)) - statistics.fmean(map(lr_index, beside.lrs)))
            new = row.moved(way * self.damping_every, by)  # as far from this row as this one is from the next
            rows = (new, *rows) if way < 0 else (*rows, new)
        return replace(self, rows=rows)

    def may_become(self, wider: Search, rounds: int) -> bool:
        """May it grow to another grid, after so many rounds of growth?"""
        return wider != self and (len(wider.grid) <= self.trials if self.trials else rounds < self.extend)

    def leaders(self, order: Sequence[Setting], losses: Mapping[Setting, float]) -> list[Setting]:
        """The best setting of each row but the centre's, unless it is OPEN times worse than the first in `order`, which is best first."""
        there = [{*row.settings(self.base)} for row in self.rows]
        best = (next((s for s in order if s in row), None) for row in there if self.middle not in row)
        return [s for s in best if s and losses[s] <= OPEN * losses[order[0]]]

    def filled(self, losses: Mapping[Setting, float]) -> Search:
        """This search with `trials` settings: half-way between the learning rates of its rows, the best row and the nearest to its best
        first; then beyond their ends."""
        rows, left = dict(enumerate(self.rows)), self.trials - len(self.grid)
        best = {i: min(row.settings(self.base), key=lambda s: losses.get(s, math.inf)) for i, row in rows.items() if len(row.lrs) > 1}
        for outside in (False, True):
            for i in sorted(best, key=lambda i: losses.get(best[i], math.inf)):
                while left > 0 and (finer := rows[i].refined(best[i].lr, outside)):
                    rows[i], left = finer, left - 1
        return replace(self, rows=tuple(rows.values()))

    def _opened(self, row: Row, losses: Mapping[Setting, float], within: float) -> Row:
        """A row beside the best one, grown where it could still come `within` a loss; as it is while trials of it are missing."""
        known = {s: losses[s] for s in row.settings(self.base) if s in losses}
        if len(known) < len(row.settings(self.base)) or len(row.lrs) < 2:
            return row
        best = min(known, key=known.__getitem__)
        if known[best] == math.inf:
            return row.lowered()
        return row.grown(best.lr) if known[best] <= within else row


@dataclass(frozen=True)
class Tuned:
    """What a search found: the best setting, the records that report it, and everything that was tried with the seed that selects."""

    best: Setting
    records: tuple[Record, ...]
    tried: tuple[Record, ...]
    on_edge: bool  # the best lies on an edge of the grid that was not extended further
    searched: bool = True  # the settings come from a search, here or in the paper
    grid_done: bool = True  # all of the grid has been run
    grid_steps: int | None = None  # where `tried` were compared; None: at their ends
    planned: int = 0  # settings of the grid, when it is full
    selecting: bool = False  # none of the seeds that report has been run: `records` is the one that selects
    to_the_end: bool = True  # `records` are of whole runs, not of beginnings that stand in for them
    seeds: int = 0  # that report it, once all have been run
    early_gain: float = 1.0  # how many times lower the best of `tried` was where they were compared: what choosing it there had gained


@dataclass(frozen=True)
class Look:
    """A search as far as records go: what is still to be run, and what is known already, if anything is."""

    missing: tuple[Setting, ...]
    tuned: Tuned | None


def look(search: Search, get: Get) -> Look:
    """The protocol as a function of what is known: centre, grid, winner's seeds.

    The grid grows where its best trial lies on an edge; then, where the winner does, or what was passed over for exploding on a seed.
    Last it is filled up to as many trials as others have: what has won until then stands, unless one of these is clearly better.
    """
    centre, at = search.middle, search.grid_steps
    if centre is not None and get(centre) is None:
        return replace(_report(search, centre, get, search.known), missing=(centre,))
    current, rounds = search, 0
    sent: dict[Setting, None] = {}  # to the end of training
    standing: Tuned | None = None  # what has won so far, `winner`, against the trials `behind` it
    winner, behind = centre, dict[Setting, Record]()
    while True:
        trials, missing = _trials(current, get)
        early = {s: _trial_loss(record, at) for s, record in trials.items()}
        order = sorted(early, key=early.__getitem__)
        clear = _clearly_better(order, centre, early, get)
        known = standing and winner and _with_grid(standing, current, winner, trials)
        if known and winner and _overtaken(winner, [s for s in order if s not in behind], early, get):
            known = replace(known, searched=False)
        if not known and centre is not None and (so_far := _report(search, centre, get, search.known and not clear).tuned):
            known = _with_grid(so_far, current, centre, trials)
        if missing:
            leads = _report(search, order[0], get, searched=False).tuned if rounds and not known else None
            return Look(missing, known or (leads and _with_grid(leads, current, order[0], trials)))
        wider = current.around(order[0], early)
        growing = current.may_become(wider, rounds)
        if not growing:
            alive = [s for s in order if early[s] < math.inf]
            challengers = [*(clear if centre and search.known else alive)[:CHALLENGERS], *current.leaders(alive, early)]
            contest = _contest(search, centre, challengers, alive, sent, get)
            winner = contest.winner
            if contest.missing:
                leads = _report(search, winner, get, searched=False).tuned
                return Look(contest.missing, known or (leads and _with_grid(leads, current, winner, trials)))
            ended = _losses(trials, at)
            grown = (current.around(s, ended) for s in (*contest.passed, winner))
            wider = next((w for w in grown if current.may_become(w, rounds)), current)
            growing = wider != current
            if not growing and (wider := current.filled(early)) == current:
                break
            standing, behind = _report(search, winner, get, not growing and search.searched).tuned, trials
        current, rounds = wider, rounds + growing
    found = _report(search, winner, get, search.searched)
    done = found.tuned and replace(_with_grid(found.tuned, current, winner, trials), grid_done=True, planned=len(current.grid))
    return Look(found.missing, done)


def _with_grid(found: Tuned, grid: Search, best: Setting, trials: Mapping[Setting, Record]) -> Tuned:
    """What was found, with all that was tried."""
    at = grid.grid_steps
    losses = _losses(trials, at)
    edge = best not in grid.grid or (grid.around(best, losses) != grid and not _flat(grid, best, losses))
    gain = _trial_loss(trials[best], at) / min(_trial_loss(r, at) for r in trials.values()) if at and best in trials else 1.0
    planned = max(len(grid.grid), grid.trials)
    return replace(found, tried=tuple(trials.values()), on_edge=edge, grid_steps=at, planned=planned, early_gain=gain)


def _flat(grid: Search, best: Setting, losses: Mapping[Setting, float]) -> bool:
    """Does what wins at an end of λ, and inside its learning rates, do as well at the next λ inside with the same lr/λ?

    Then nothing is to be gained outside, where lr/λ is all that matters: of natural gradients as λ → 0, of all damped methods as λ → ∞.
    Beside a row without a living trial λ is at an end, too.
    """
    if losses.get(best, math.inf) == math.inf:
        return False
    row = grid._row(best)
    alive = [r for r in grid._beside(row) if any(losses.get(s, math.inf) < math.inf for s in r.settings(grid.base))]
    if len(alive) != 1 or row.grown(best.lr) != row or grid._opened(alive[0], losses, OPEN * losses[best]) != alive[0]:
        return False
    assert isinstance(row.damping, float)
    assert isinstance(alive[0].damping, float)
    rung = min((s for s in row.settings(grid.base) if s.lr in row.lrs), key=lambda s: losses.get(s, math.inf))  # which both rows have
    twin = best.but(lr=lr_at(lr_index(rung.lr) + 2 * round(math.log10(alive[0].damping / row.damping))), damping=alive[0].damping)
    return losses.get(twin, math.inf) <= FLAT * losses.get(rung, math.inf) < math.inf


def _clearly_better(order: Sequence[Setting], centre: Setting | None, early: Mapping[Setting, float], get: Get) -> list[Setting]:
    """The trials that did clearly better than the centre, best first; not those that have gone on and ended above it."""
    if centre is None or centre not in early:
        return list(order)
    ahead = [s for s in order if CLEARLY * early[s] < early[centre]]
    return [s for s in ahead if (ended := get(s)) is None or ended.score < _score(get(centre))]


def _overtaken(winner: Setting, by: Sequence[Setting], early: Mapping[Setting, float], get: Get) -> bool:
    """Is one of these clearly better, at the end of training as far as that has been run?"""
    return bool(_clearly_better(by, winner, early, get)) or any(CLEARLY * _score(get(s)) < _score(get(winner)) for s in by)


@dataclass(frozen=True)
class _Contest:
    winner: Setting
    missing: tuple[Setting, ...] = ()  # what must be run before it is decided
    passed: tuple[Setting, ...] = ()  # what ended lower, but explodes on some seed


def _contest(
    search: Search, centre: Setting | None, challengers: Sequence[Setting], order: Sequence[Setting], sent: dict[Setting, None], get: Get
) -> _Contest:
    """The lowest loss at the end of training, with the seed that selects, among those that explode on no seed that vets them.

    Without short runs all of the grid is there. With them, the centre and its challengers are run to the end, and, should the centre
    have exploded on the way, the best of the grid in its place; should all of these explode on some seed, the next best, one by one.
    All that is `sent` competes, in this contest and later ones; runs that were made for other ends do not.
    """
    first = centre or next(iter(order), search.grid[0])
    sent |= dict.fromkeys((first, *challengers))
    if search.grid_steps is None:
        sent |= dict.fromkeys(order)
    elif centre is not None and (ended := get(centre)) is not None and ended.score > ended.end_loss(search.grid_steps):
        sent |= dict.fromkeys(order[: CHALLENGERS + 1])
    while True:
        if unseen := tuple(s for s in sent if get(s) is None):
            return _Contest(first, unseen)
        there = sorted(sent, key=lambda s: _score(get(s)))
        for i, s in enumerate(there):
            runs = {run: get(run) for run in search.vetting(s)}
            if not any(map(exploded, filter(None, runs.values()))):
                to_vet = tuple(run for run, record in runs.items() if record is None)
                return _Contest(s, to_vet, passed=tuple(there[:i]))
        left = [s for s in order if s not in sent]
        if not left:
            return _Contest(first)
        sent[left[0]] = None


def _score(record: Record | None) -> float:
    return math.inf if record is None else record.score


def exploded(record: Record) -> bool:
    """Did it diverge, or was its loss ever ten times what it began with?"""
    return not math.isfinite(record.score) or _blew_up(record.series.get("loss") or [math.inf])


def exploded_until(record: Record, step: int) -> bool:
    """Had it diverged, or been at ten times what its loss began with, by this step?"""
    steps = [s for s in record.series["step"] if s <= step]
    ended = record.status == "diverged" and len(steps) == len(record.series["step"])
    return ended or _blew_up(record.series["loss"][: len(steps)])


def _blew_up(losses: Sequence[float]) -> bool:
    return max(losses) > EXPLODED * losses[0]


def _losses(trials: Mapping[Setting, Record], grid_steps: int | None) -> dict[Setting, float]:
    """What trials came to, inf for those that exploded at any time."""
    return {s: math.inf if exploded(record) else _trial_loss(record, grid_steps) for s, record in trials.items()}


def _trials(search: Search, get: Get) -> tuple[dict[Setting, Record], tuple[Setting, ...]]:
    """Records of a grid by setting, and the runs that are missing."""
    found = {setting: record for setting in search.grid if (record := search.trial(setting, get))}
    return found, tuple(search.short(setting) for setting in search.grid if setting not in found)


def _trial_loss(record: Record, grid_steps: int | None) -> float:
    if grid_steps is None:
        return record.score
    return math.inf if exploded(record) and record.setting.steps <= grid_steps else record.end_loss(min(grid_steps, record.setting.steps))


def _report(search: Search, setting: Setting, get: Get, searched: bool) -> Look:
    """The seeds that report a setting, which a search has found or not.

    While there are none: those of its beginning, if that has been run for other ends; or else the one that selected it.
    """
    wanted, whole = search.reports(setting), search.reported(setting)
    missing = tuple(s for s in wanted if get(s) is None)
    beginnings = [] if search.shown else [b.but(lr=setting.lr, damping=setting.damping) for b in search.stand_ins]

    def seeds(of: Setting) -> tuple[Record, ...]:
        return tuple(record for s in wanted if (record := get(of.but(seed=s.seed))))

    best = next((s for s in (whole, *beginnings) if seeds(s)), None)
    reported = seeds(best) if best else ()
    best = best or next((s for s in (whole, *beginnings, setting) if get(s)), None)
    if best is None:
        return Look(missing, None)
    alone = tuple(filter(None, [get(best)]))
    to_the_end = best.steps in (whole.steps, setting.steps)
    tuned = Tuned(best, reported or alone, alone, False, searched, False, None, len(search.grid), not reported, to_the_end, len(wanted))
    return Look(missing, tuned)


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
