"""Sweeps: the same records by whatever way, nothing run twice, dead workers replaced. And the paper's search protocol."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import kills
from foof.study.search import estimate
from foof.study.search import sweep as module
from foof.study.search.estimate import core_seconds, hours, remaining
from foof.study.search.grids import VETS, Row, Search, between, damping_grid, look, lr_at, lr_grid, lr_index, rectangle, tune, tune_all
from foof.study.search.store import Store
from foof.study.search.sweep import WorkerDied, sweep
from foof.study.train.run import run
from foof.study.train.setting import Record, Setting

TINY = Setting(train_size=200, hidden=(8,), batch_size=50, steps=8, log_every=2)
SETTINGS = [TINY.but(seed=seed) for seed in range(3)] + [TINY.but(lr=1e30)]


def outcome(records):
    return [(r.setting, r.status, r.series, r.final) for r in records]


@pytest.fixture(scope="module")
def expected():
    return outcome(run(s) for s in SETTINGS)


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "records.sqlite") as it:
        yield it


def same(a, b):
    return repr(a) == repr(b)  # NaN is not equal to itself


def test_the_pool_gives_what_single_runs_give_and_runs_nothing_twice(store, expected):
    seen = []
    records = sweep(SETTINGS, store, workers=2, notify=lambda r, new: seen.append((r.setting, new)))
    assert same(outcome(records), expected)
    assert sorted(s.key for s, _ in seen) == sorted(s.key for s in SETTINGS)
    assert all(new for _, new in seen)
    seen.clear()
    assert same(outcome(sweep(SETTINGS, store, notify=lambda r, new: seen.append(new))), expected)
    assert seen == [False] * 4


def dies_once(setting: Setting, mark: Path, **_: object) -> Record:
    """As `run`, but the first worker to take seed 1 is killed, as by a machine short of memory."""
    if setting.seed == 1 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run(setting)


def dies_always(setting: Setting, **_: object) -> Record:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def test_a_worker_that_dies_has_its_runs_done_again(store, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "run", partial(dies_once, mark=tmp_path / "mark"))
    assert same(outcome(sweep(SETTINGS, store, workers=2)), expected)
    assert (tmp_path / "mark").exists()


def test_a_setting_whose_workers_always_die_is_given_up(store, monkeypatch):
    monkeypatch.setattr(module, "run", dies_always)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    with pytest.raises(WorkerDied, match=r"died 2 times while running Setting"):
        sweep(SETTINGS[:1], store, workers=1)


def test_an_error_in_a_run_is_raised_and_the_rest_is_kept(store):
    with pytest.raises(ValueError, match="no optimizer is called"):
        sweep([TINY, TINY.but(optimizer="nothing")], store, workers=1)
    assert TINY in store


SCRIPT = """
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
from foof.study.train.setting import Setting
from foof.study.search.store import Store
from foof.study.search.sweep import Interrupted, sweep
if __name__ == "__main__":
    tiny = Setting(train_size=200, hidden=(8,), batch_size=50, steps=8, log_every=2)
    with Store(sys.argv[1]) as store:
        try:
            sweep([tiny.but(seed=s) for s in range(1000)], store, workers=2, notify=lambda r, new: print("done", flush=True))
        except Interrupted as stop:
            print(stop)
            sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_sweep_keeps_what_had_finished(tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = tmp_path / "records.sqlite"
    command = [sys.executable, tmp_path / "script.py", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        for _ in range(3):
            assert process.stdout.readline() == "done\n"
        process.send_signal(how)
        rest = process.stdout.read()
    if how == signal.SIGINT:
        assert process.returncode == 130
        assert "of 1000 runs are stored; the same command continues" in rest
    with Store(path) as store:
        assert len(store) >= 3 + rest.count("done")
        assert all(r.status == "finished" for r in store)
        first = next(iter(store))
        assert (first.series, first.final) == ((again := run(first.setting)).series, again.final)


def test_workers_end_with_a_killed_sweep(tmp_path):
    """A pool's workers notice that nobody is left to give them work."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "records.sqlite"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        process.stdout.readline()
        process.kill()
        process.wait()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("workers outlived their sweep")


def test_a_dask_cluster_gives_the_same_records(store, expected):
    pytest.importorskip("distributed")
    with kills.two_dask_workers() as cluster:
        assert same(outcome(sweep(SETTINGS, store, scheduler=cluster.scheduler_address)), expected)


def test_kill_9_at_random_moments_changes_no_record(tmp_path):
    """Three times here; fifty times with `python tests/kills.py 50`."""
    kills_expected = kills.run_to_the_end(tmp_path / "undisturbed.sqlite", kills.smoke()[:12], workers=2)
    assert kills.kill_sweeps(3, tmp_path, kills_expected, count=12, longest=0.3)["kills"] == 3


def test_a_dask_worker_killed_changes_no_record(tmp_path):
    pytest.importorskip("distributed")
    expected = kills.run_to_the_end(tmp_path / "undisturbed.sqlite", kills.smoke()[:12], workers=2)
    assert kills.kill_dask_workers(1, tmp_path, expected, count=12)["kills"] == 1


def test_the_ladders_of_the_paper():
    assert lr_grid(3e-4, 0.1) == (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    assert damping_grid(1e-6, 1e6) == (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4, 1e6)
    assert damping_grid(0.1, 10, every=1) == (0.1, 1.0, 10.0)
    assert [lr_index(lr_at(i)) for i in range(-20, 20)] == list(range(-20, 20))
    with pytest.raises(ValueError, match="of the form"):
        lr_index(0.02)


def ended(setting, loss, status="finished"):
    """A record of which nothing is known but its loss."""
    return Record(setting, status, {"step": [1], "loss": [loss]}, {"train_loss": loss})


def bowl(lr: float, damping: float | None = None):
    """Records whose loss is least at the given place, without training."""

    def run_all(settings):
        def loss(s):
            return abs(math.log10(s.lr / lr)) + (abs(math.log10(s.damping / damping)) if damping else 0) + 0.01 * s.seed

        return [ended(s, loss(s)) for s in settings]

    return run_all


def test_rows_have_learning_rates_of_their_own_and_grow_along_their_ridge():
    rows = (Row((0.1, 0.3, 1.0), 1e-2), Row((1.0, 3.0, 10.0), 1.0))
    found = tune(Search(TINY, rows, extend=1), bowl(lr=0.03, damping=1e-4))
    assert {(r.setting.lr, r.setting.damping) for r in found.tried} == {
        *((lr, 1e-4) for lr in (0.01, 0.03, 0.1)), *((lr, 1e-2) for lr in (0.03, 0.1, 0.3, 1.0)), *((lr, 1.0) for lr in (1.0, 3.0, 10.0)),
    }  # fmt: skip
    assert (found.best.lr, found.best.damping, found.on_edge, found.planned) == (0.03, 1e-4, True, 10)


def test_a_row_may_have_options_of_its_own():
    rows = (Row((0.01, 0.03), None, (("momentum", 0.9),)), Row((0.1, 0.3)))
    assert [(s.lr, s.options) for s in Search(TINY, rows).grid] == [
        (0.01, (("momentum", 0.9),)), (0.03, (("momentum", 0.9),)), (0.1, ()), (0.3, ()),
    ]  # fmt: skip


def test_a_grid_grows_until_its_best_lies_inside():
    run_all = bowl(lr=3.0, damping=1e-4)
    found = tune(Search(TINY, rectangle(lr_grid(0.1, 1), (1.0, 1e2)), extend=5), run_all)
    assert (found.best.lr, found.best.damping, found.on_edge) == (3.0, 1e-4, False)
    assert [r.setting.seed for r in found.records] == [1, 2, 3]  # seed 0 has selected
    assert {r.setting.damping for r in found.tried} == {1e-6, 1e-4, 1e-2, 1.0, 1e2}


def test_a_search_that_may_not_grow_says_its_best_is_on_the_edge():
    run_all = bowl(lr=3.0)
    assert tune(Search(TINY, rectangle(lr_grid(0.1, 1)), extend=0), run_all).on_edge
    assert not tune(Search(TINY, rectangle((1.0,))), run_all).on_edge  # a single value is a choice


def two_phases(settings):
    """Losses that are lowest at lr 1 in the beginning, and from step 100 on at lr 0.3."""

    def record(s):
        losses = [1 + abs(math.log10(s.lr / (1.0 if step < 100 else 0.3))) for step in range(1, s.steps + 1)]
        return Record(s, "finished", {"step": list(range(1, s.steps + 1)), "loss": losses}, {"train_loss": losses[-1] + 0.01 * s.seed})

    return [record(s) for s in settings]


def test_what_wins_a_short_grid_must_win_at_full_length_too():
    asked = []

    def run_all(settings):
        asked.extend(settings)
        return two_phases(settings)

    long = TINY.but(steps=200)
    around = Search(long, rectangle(lr_grid(0.1, 1)), extend=0, centre=(0.3, None), grid_steps=50)
    found = tune(around, run_all)
    assert (found.best.lr, found.on_edge, [r.setting.seed for r in found.records]) == (0.3, False, [1, 2, 3])
    assert {(r.setting.lr, r.setting.steps) for r in found.tried} == {(0.1, 50), (0.3, 200), (1.0, 200)}
    assert sorted((s.lr, s.steps, s.seed) for s in asked) == [
        (0.1, 50, 0), (0.3, 200, 0), (0.3, 200, 1), (0.3, 200, 2), (0.3, 200, 3), (1.0, 50, 0), (1.0, 200, 0),
    ]  # fmt: skip

    def bursting(settings):  # on the seed that vets
        return [replace(r, status="diverged") if (r.setting.lr, r.setting.seed) == (1.0, VETS) else r for r in two_phases(settings)]

    ended = replace(around, base=long.but(steps=90), vets=1)
    assert tune(ended, bursting).best.lr == 0.3
    better = tune(ended, run_all)
    assert (better.best.lr, better.on_edge, len(better.records)) == (1.0, True, 3)


def test_a_centre_that_explodes_late_gives_way_to_what_reaches_the_end():
    """As KFAC's at step 1,800: it leads the grid, and is lost before the end of training."""
    around = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0)), extend=0, centre=(0.3, None), grid_steps=50)
    asked = []

    def run_all(settings):
        asked.extend(settings)

        def record(s):
            at = [{0.1: 2.0, 0.3: 1.0, 1.0: math.inf}[s.lr] if step < 100 or s.lr != 0.3 else 5.0 for step in range(1, s.steps + 1)]
            status = "diverged" if s.lr == 1.0 else "finished"
            return Record(s, status, {"step": list(range(1, s.steps + 1)), "loss": at}, {"train_loss": at[-1]})

        return [record(s) for s in settings]

    found = tune(around, run_all)
    assert found.best.lr == 0.1
    assert (1.0, 200) not in {(s.lr, s.steps) for s in asked}  # what has diverged by step 50 is not run again to the end
    assert found.early_gain == pytest.approx(2.0)


def test_a_grid_grows_around_what_wins_if_what_leads_it_explodes_on_another_seed():
    def run_all(settings):
        def record(s):
            status = "diverged" if s.lr == 0.3 and s.seed else "finished"
            return ended(s, abs(math.log10(s.lr / 0.3)), status)

        return [record(s) for s in settings]

    found = tune(Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=1, vets=1), run_all)
    assert sorted(r.setting.lr for r in found.tried) == [0.03, 0.1, 0.3, 1.0]
    assert (found.best.lr, found.on_edge) == (0.1, False)


def exploding(losses, *bad, seed=VETS):
    """Records of these losses by learning rate, without training; of the learning rates in `bad` one seed diverges."""

    def run_all(settings):
        def record(s):
            status = "diverged" if s.lr in bad and s.seed == seed else "finished"
            steps = list(range(1, s.steps + 1))
            return Record(s, status, {"step": steps, "loss": [losses[s.lr]] * s.steps}, {"train_loss": losses[s.lr]})

        return [record(s) for s in settings]

    return run_all


LOSSES = {0.01: 5.0, 0.03: 2.5, 0.1: 2.0, 0.3: 1.0, 1.0: 3.0, 3.0: 4.0}


def test_what_was_tried_around_a_winner_that_exploded_is_not_forgotten():
    found = tune(Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, vets=1), exploding(LOSSES, 0.3, 0.1))
    assert (found.best.lr, found.on_edge) == (0.03, False)
    assert sorted(r.setting.lr for r in found.tried) == [0.01, 0.03, 0.1, 0.3, 1.0]


def test_while_a_grid_grows_around_its_winner_the_winner_is_shown_and_decides_nothing():
    grid, second = Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, vets=1), TINY.but(lr=0.1)
    there = {s: r for s in (*grid.grid, TINY.but(lr=0.3, seed=VETS), *grid.vetting(second), *grid.reports(second))
             for r in exploding(LOSSES, 0.3)([s])}  # fmt: skip
    found = look(grid, there.get)
    assert [s.lr for s in found.missing] == [0.03]
    assert (found.tuned.best.lr, len(found.tuned.records), found.tuned.searched, found.tuned.grid_done) == (0.1, 3, False, False)
    assert (len(found.tuned.tried), found.tuned.planned) == (3, 4)


def test_while_a_grid_grows_what_leads_is_shown_and_decides_nothing():
    grid = Search(TINY, rectangle((0.3, 1.0, 3.0)), extend=2)
    there = {s: r for s in grid.grid for r in exploding(LOSSES)([s])}
    first = look(replace(grid, rows=rectangle((0.1, 0.3, 1.0, 3.0))), there.get)
    assert ([s.lr for s in first.missing], first.tuned) == ([0.1], None)  # of a first grid nothing is shown before it is done
    found = look(grid, there.get)
    assert [s.lr for s in found.missing] == [0.1]
    assert (found.tuned.best.lr, found.tuned.selecting, found.tuned.searched, found.tuned.grid_done) == (0.3, True, False, False)


def test_a_row_whose_trials_all_explode_is_no_bound_of_damping():
    """λ = 0.01 lives at 0.01 alone, below its row: and is best there."""

    def run_all(settings):
        def record(s):
            dead = s.damping == 0.01 and s.lr > 0.01
            loss = abs(math.log10(s.lr / 0.01)) + (0 if s.damping == 0.01 else 10 * abs(math.log10(s.damping) - 0.1))
            return ended(s, loss, "diverged" if dead else "finished")

        return [record(s) for s in settings]

    grid = Search(TINY, rectangle((0.1, 0.3, 1.0), (0.01, 1.0, 100.0)), extend=5)
    found = tune(grid, run_all)
    assert (found.best.lr, found.best.damping) == (0.01, 0.01)
    assert sorted(r.setting.lr for r in found.tried if r.setting.damping == 0.01) == [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    given_up = tune(replace(grid, extend=1), run_all)
    assert (given_up.best.damping, given_up.on_edge) == (1.0, True)  # λ = 0.01 has been tried down to 0.03, in vain


def test_a_row_beside_the_best_is_a_bound_if_its_own_best_lies_inside_or_is_twice_as_bad():
    grid = Search(TINY, rectangle((0.1, 0.3, 1.0), (0.01, 1.0, 100.0)))
    best = TINY.but(lr=0.3, damping=1.0)

    def beside(*losses):
        """The learning rates of the row at λ = 0.01 next time, if its trials so far had these losses."""
        own = {TINY.but(lr=lr, damping=0.01): loss for lr, loss in zip((0.1, 0.3, 1.0), losses, strict=False)}
        return grid.around(best, {best: 1.0, **own}).rows[0].lrs

    assert beside(3.0, 1.2, 1.5) == (0.1, 0.3, 1.0)
    assert beside(3.0, 2.0, 1.5) == (0.1, 0.3, 1.0, 3.0)  # still falling: as a ladder that stops below its best
    assert beside(1.5, 2.0, 3.0) == (0.03, 0.1, 0.3, 1.0)
    assert beside(5.0, 4.0, 2.1) == (0.1, 0.3, 1.0)
    assert beside(math.inf, math.inf, math.inf) == (0.03, 0.1, 0.3, 1.0)
    assert beside(math.inf, math.inf) == beside(3.0, 1.5) == (0.1, 0.3, 1.0)  # nothing grows for want of records


def test_a_single_row_whose_trials_all_explode_goes_down_until_something_lives():
    """As KFAC at λ = 1e-8: its centre leads at step 50, and is lost before the end."""

    def run_all(settings):
        def record(s):
            losses = [math.inf if s.lr > 0.01 and (step > 100 or s.lr != 0.3) else abs(math.log10(s.lr / 0.01)) + 1
                      for step in range(1, s.steps + 1)]  # fmt: skip
            return Record(s, "diverged" if math.inf in losses else "finished", {"step": list(range(1, s.steps + 1)), "loss": losses},
                          {"train_loss": losses[-1]})  # fmt: skip

        return [record(s) for s in settings]

    grid = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0)), extend=4, centre=(0.3, None), known=False, grid_steps=50)
    found = tune(grid, run_all)
    assert (found.best.lr, found.on_edge, len(found.records)) == (0.01, False, 3)
    assert sorted(r.setting.lr for r in found.tried) == [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    assert not look(replace(grid, rows=(Row((0.3,)),)), lambda s: run_all([s])[0]).missing  # a single value is a choice, and stays


def test_learning_rates_half_way_between_those_of_the_ladder():
    assert [between(*ends) for ends in ((1.0, 3.0), (3.0, 10.0), (1e-5, 3e-5), (3e-8, 1e-7))] == [2.0, 5.0, 2e-5, 5e-8]
    row = Row((0.1, 0.3, 1.0), 1e-2)
    finer = row.refined(1.0)
    assert (finer.halves, finer.refined(1.0).halves, finer.refined(1.0).refined(1.0)) == ((0.5,), (0.5, 0.2), None)
    assert row.refined(0.1, outside=True).halves == (0.05,)
    assert row.refined(1.0, outside=True).refined(1.0, outside=True).halves == (2.0, 0.05)
    assert (row.grown(0.2), row.grown(2.0).lrs, row.grown(0.05).lrs) == (row, (0.1, 0.3, 1.0, 3.0), (0.03, 0.1, 0.3, 1.0))
    assert finer.moved(2, 4).halves == ()


@pytest.mark.parametrize("best", [0.3, 0.2, 0.05])
def test_a_grid_is_filled_up_to_as_many_trials_as_others_have(best):
    """First where the best row's best lies, then in the next best row; and what is found there is a trial like any other."""
    rows = rectangle((0.1, 0.3, 1.0), (0.01, 1.0, 100.0))
    found = tune(Search(TINY, rows, extend=2, trials=14), bowl(lr=best, damping=1.0))
    tried = {damping: sorted(r.setting.lr for r in found.tried if r.setting.damping == damping) for damping in (0.01, 1.0, 100.0)}
    assert (found.best.lr, found.best.damping, found.on_edge, found.grid_done) == (best, 1.0, False, True)
    assert len(found.tried) == found.planned == 14
    assert tried[1.0] == ([0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3, 1.0] if best == 0.05 else [0.1, 0.2, 0.3, 0.5, 1.0])


def test_a_grid_is_filled_beyond_its_ends_when_nothing_is_left_between_them_and_single_values_stay():
    full = tune(Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, trials=7), bowl(lr=0.3))
    assert sorted(r.setting.lr for r in full.tried) == [0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0]
    more = tune(Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, trials=20), bowl(lr=0.3))
    assert len(more.tried) == 7  # no more than that
    single = tune(Search(TINY, rectangle((1.0,), (0.1, 1.0, 10.0)), damping_every=1, extend=2, trials=20), bowl(lr=1.0, damping=1.0))
    assert len(single.tried) == 3


@pytest.mark.parametrize(("gain", "concluded"), [(1.05, True), (1.5, False)])
def test_while_a_grid_is_filled_what_has_won_stands_unless_something_is_clearly_better(gain, concluded):
    grid = Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, trials=5)
    losses = {0.1: 2.0, 0.3: 1.0, 1.0: 3.0, 0.2: 1 / gain}
    there = {r.setting: r for r in exploding(losses)([*grid.grid, *grid.reports(TINY.but(lr=0.3)), TINY.but(lr=0.2)])}
    found = look(grid, there.get)
    assert [s.lr for s in found.missing] == [0.5]
    assert (found.tuned.best.lr, len(found.tuned.records), found.tuned.searched, found.tuned.grid_done) == (0.3, 3, concluded, False)
    assert (len(found.tuned.tried), found.tuned.planned) == (4, 5)


def courses(early, late, turn=100):
    """Records of runs whose loss is `early` up to a step, and `late` after it, both by (lr, λ); those of infinite loss diverge."""

    def run_all(settings):
        def record(s):
            losses = [(early if step <= turn else late)(s.lr, s.damping) for step in range(1, s.steps + 1)]
            status = "diverged" if math.inf in losses else "finished"
            return Record(s, status, {"step": list(range(1, s.steps + 1)), "loss": losses}, {"train_loss": losses[-1]})

        return [record(s) for s in settings]

    return run_all


def test_within_its_trials_a_grid_grows_as_far_as_it_must():
    far = tune(Search(TINY, rectangle(lr_grid(0.01, 100)), extend=1, trials=18), bowl(lr=1e-4))
    assert (far.best.lr, far.on_edge, len(far.tried)) == (1e-4, False, 18)
    cut = tune(Search(TINY, rectangle(lr_grid(0.01, 100)), trials=10), bowl(lr=1e-4))
    assert (cut.best.lr, cut.on_edge, len(cut.tried)) == (0.003, True, 10)


@pytest.mark.parametrize("alive", [0.01, 1.0, 100.0])
def test_where_everything_explodes_every_damping_gets_smaller_learning_rates(alive):
    def run_all(settings):
        return [ended(s, 1.0 + abs(math.log10(s.lr / 0.03)), "finished" if s.damping == alive and s.lr < 0.1 else "diverged")
                for s in settings]  # fmt: skip

    found = tune(Search(TINY, rectangle((0.1, 0.3, 1.0), (0.01, 1.0, 100.0)), centre=(0.3, 1.0), trials=18), run_all)
    assert (found.best.damping, {r.status for r in found.records}) == (alive, {"finished"})


@pytest.mark.parametrize("known", [False, True])
def test_beside_a_centre_that_is_a_guess_the_best_go_on_even_if_not_clearly_better(known):
    early, late = {0.1: 1.0, 0.3: 1.02, 1.0: 2.0}, {0.1: 0.1, 0.3: 1.0, 1.0: 2.0}
    grid = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0)), grid_steps=50, extend=0, centre=(0.3, None), known=known)
    assert tune(grid, courses(lambda lr, _: early[lr], lambda lr, _: late[lr])).best.lr == (0.3 if known else 0.1)


def test_what_explodes_late_changes_no_grid_that_it_led():
    """λ = 1 leads at step 50 and is lost at lr 0.3 and above; its neighbours, five times worse there, are not opened for that."""

    def early(lr, damping):
        return 1 + abs(math.log10(lr / 0.3)) if damping == 1.0 else 5 + abs(math.log10(lr / 0.01))

    asked = []
    run_all = courses(early, lambda lr, damping: math.inf if damping == 1.0 and lr >= 0.3 else early(lr, damping))
    grid = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0), (0.01, 1.0, 100.0)), trials=18, grid_steps=50)
    found = tune(grid, lambda settings: asked.extend(settings) or run_all(settings))
    assert {(s.lr, s.damping) for s in asked} == {(r.setting.lr, r.setting.damping) for r in found.tried}
    assert (found.best.lr, found.best.damping, found.on_edge, len(found.tried)) == (0.2, 1.0, False, 18)


def test_runs_that_others_made_do_not_change_what_a_search_chooses():
    early, late = {0.1: 1.3, 0.3: 1.0, 1.0: 1.1, 3.0: 1.2}, {0.1: 0.1, 0.3: 1.0, 1.0: 0.9, 3.0: 1.1}
    run_all = courses(lambda lr, _: early[lr], lambda lr, _: late[lr])
    grid, elsewhere = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0, 3.0)), grid_steps=50, extend=0), TINY.but(steps=200, lr=0.1)
    there = {elsewhere: run_all([elsewhere])[0]}
    assert tune(grid, run_all).best.lr == tune_all({"": grid}, run_all, there.get)[""].best.lr == 1.0


def test_what_has_ended_clearly_lower_leaves_nothing_decided_while_it_is_vetted():
    early, late = {0.1: 2.0, 0.3: 1.0, 1.0: 3.0, 0.2: 0.99, 0.5: 2.0}, {0.1: 2.0, 0.3: 1.0, 1.0: 3.0, 0.2: 0.2, 0.5: 2.0}
    run_all = courses(lambda lr, _: early[lr], lambda lr, _: late[lr])
    grid = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0)), grid_steps=50, trials=5, vets=1)
    there: dict[Setting, Record] = {}
    while (found := look(grid, there.get)).missing and (0.2, VETS) not in {(s.lr, s.seed) for s in found.missing}:
        there |= {r.setting: r for r in run_all(found.missing)}
    assert (found.tuned.best.lr, found.tuned.searched) == (0.3, False)


@pytest.mark.parametrize("filled", [False, True])
def test_while_a_grid_is_filled_stand_ins_are_where_they_were(filled):
    long, early = TINY.but(steps=200), TINY.but(steps=100, measure=("similarity",))
    grid = Search(long, rectangle((0.1, 0.3, 1.0)), trials=5, centre=(0.3, None), grid_steps=50, stand_ins=(early,))
    there = {*(early.but(lr=lr, seed=i) for lr in (0.1, 0.3, 1.0) for i in range(4)), long.but(lr=0.3)}
    there |= {long.but(lr=0.2, steps=50)} if filled else set()
    found = look(grid, lambda s: ended(s, 1 + abs(math.log10(s.lr / 0.3))) if s in there else None)
    assert (found.tuned.best, found.tuned.searched, found.tuned.on_edge) == (early.but(lr=0.3), True, False)
    assert len(found.missing) == 2 - filled


@pytest.mark.parametrize("extend", [0, 1, 3])
def test_a_centre_of_a_row_that_explodes_gives_way_to_the_row_that_lives(extend):
    def run_all(settings):
        return [ended(s, 1 + abs(math.log10(s.lr / 0.3)), "finished" if s.damping == 100.0 else "diverged") for s in settings]

    found = tune(Search(TINY, rectangle((0.1, 0.3, 1.0), (0.01, 1.0, 100.0)), centre=(0.3, 1.0), extend=extend), run_all)
    assert (found.best.lr, found.best.damping) == (0.3, 100.0)


@pytest.mark.parametrize(
    ("gained", "lr", "same", "edge"),
    [(0.005, 0.3, "lr/λ", False), (0.05, 0.3, "lr/λ", True), (0.005, 1.0, "lr/λ", True), (0.005, 0.3, "lr", True)],
    ids=["nothing to gain", "still gaining", "the learning rate gains", "by chance"],
)
def test_where_the_same_ratio_does_as_well_at_the_next_damping_inside_there_is_nothing_to_gain_outside(gained, lr, same, edge):
    """The loss falls by `gained` with each factor of 100 in λ, and is lowest at `lr` for λ = 0.01, elsewhere at the same ratio, or lr."""

    def run_all(settings):
        def record(s):
            lowest = lr * (s.damping / 0.01 if same == "lr/λ" else 1)
            loss = 1 + gained * math.log10(s.damping) / 2 + abs(math.log10(s.lr / lowest))
            return ended(s, loss)

        return [record(s) for s in settings]

    shift = 1e2 if same == "lr/λ" else 1.0
    rows = [Row(tuple(lr_at(lr_index(v) + 2 * i * round(math.log10(shift))) for v in (0.1, 0.3, 1.0)), damping)
            for i, damping in enumerate((0.01, 1.0, 100.0))]  # fmt: skip
    found = tune(Search(TINY, tuple(rows), extend=0), run_all)
    assert (found.best.damping, found.on_edge) == (0.01, edge)


@pytest.mark.parametrize("vets", [0, 2])
def test_seeds_that_report_have_no_say_in_what_is_chosen(vets):
    grid = Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, vets=vets)
    found = tune(grid, exploding(LOSSES, 0.3, seed=1))
    assert (found.best.lr, [r.status for r in found.records]) == (0.3, ["diverged", "finished", "finished"])


def test_seeds_that_vet_pass_over_what_explodes():
    grid = Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, vets=2)
    vetoed = tune(grid, exploding(LOSSES, 0.3, seed=101))
    assert (vetoed.best.lr, [r.setting.seed for r in vetoed.records]) == (0.1, [1, 2, 3])


def test_what_leads_is_shown_and_decides_nothing_until_it_is_vetted():
    grid = Search(TINY, rectangle((0.1, 0.3, 1.0)), extend=2, vets=2)
    run_all = exploding(LOSSES)
    there = {r.setting: r for r in run_all([*grid.grid, TINY.but(lr=0.3, seed=1)])}
    found = look(grid, there.get)
    assert [(s.lr, s.seed) for s in found.missing] == [(0.3, 100), (0.3, 101)]
    assert [(s.lr, s.seed) for s in remaining(grid, there.get)] == [(0.3, 100), (0.3, 101), (0.3, 2), (0.3, 3)]
    assert (found.tuned.best.lr, len(found.tuned.records), found.tuned.searched, found.tuned.grid_done) == (0.3, 1, False, False)
    there |= {r.setting: r for r in run_all(found.missing)}
    found = look(grid, there.get)
    assert [(s.lr, s.seed) for s in found.missing] == [(0.3, 2), (0.3, 3)]
    assert (found.tuned.searched, found.tuned.grid_done) == (True, True)


def test_a_search_of_one_setting_vets_nothing():
    asked = []

    def run_all(settings):
        asked.extend(s.seed for s in settings)
        return exploding(LOSSES)(settings)

    tune(Search(TINY, rectangle((0.3,)), vets=2), run_all)
    assert sorted(asked) == [0, 1, 2]


def test_when_all_that_went_to_the_end_explode_on_a_seed_the_next_goes_there():
    losses = {0.1: 1.2, 0.3: 1.0, 1.0: 1.3, 0.03: 9.0}
    around = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0)), extend=0, centre=(0.3, None), grid_steps=50, vets=1)
    found = tune(around, exploding(losses, 0.3))
    assert (found.best.lr, [r.status for r in found.records]) == (0.1, ["finished"] * 3)


def test_beginnings_stand_in_for_runs_that_have_not_been_made():
    long, early = TINY.but(steps=200), TINY.but(steps=100, measure=("similarity",))
    search = Search(long, rectangle((0.1, 0.3, 1.0)), extend=0, centre=(0.3, None), grid_steps=50, stand_ins=(early,))
    there = {early.but(lr=0.3, seed=i) for i in range(3)}
    found = look(search, lambda s: ended(s, 1.0) if s in there else None)
    assert (found.tuned.best.steps, found.tuned.to_the_end, len(found.tuned.records)) == (100, False, 2)
    assert found.missing == (long.but(lr=0.3),)


def test_a_winner_may_be_reported_by_runs_of_its_beginning():
    """It is chosen by whole runs; the seeds are of others, in which more is measured. Until one of these is there, the run that selected
    stands for them."""
    long, early = TINY.but(steps=200), TINY.but(steps=100, measure=("similarity",))
    search = Search(long, rectangle((0.1, 0.3, 1.0)), extend=0, seeds=2, shown=early)
    known = {s: ended(s, s.lr) for s in search.grid}
    known |= {long.but(lr=0.1, seed=1): ended(long, 0.1)}  # a whole run of a seed that reports is none of these
    first = look(search, known.get)
    assert first.missing == tuple(early.but(lr=0.1, seed=i) for i in (1, 2))
    assert (first.tuned.best, first.tuned.selecting, first.tuned.seeds) == (long.but(lr=0.1), True, 2)
    known |= {s: ended(s, 0.5) for s in first.missing[:1]}
    found = look(search, known.get).tuned
    assert [r.setting for r in found.records] == [early.but(lr=0.1, seed=1)]
    assert (found.selecting, found.to_the_end, found.grid_done, len(found.tried)) == (False, True, True, 3)


def test_a_setting_that_another_search_has_chosen_is_reported_by_other_seeds():
    one = Search(TINY, rectangle((0.1,)), seeds=2)
    assert [s.seed for s in one.reports(one.grid[0])] == [0, 1]
    assert [s.seed for s in replace(one, chosen_before=True).reports(one.grid[0])] == [1, 2]


@pytest.mark.parametrize(("gain", "concluded", "asked"), [(1.05, True, 0.3), (1.5, False, 1.0)])
def test_nothing_is_concluded_while_a_clearly_better_challenger_waits(gain, concluded, asked):
    """Within what seeds differ by, the centre stands and gets its seeds; beyond it, the challenger is run at full length first."""
    around = Search(TINY.but(steps=200), rectangle(lr_grid(0.1, 1)), extend=0, centre=(0.3, None), grid_steps=50)

    def get(s):
        if s.seed or (s.lr != 0.3 and s.steps == 200):
            return None
        loss = {0.1: 2.0, 0.3: 1.0, 1.0: 1 / gain}[s.lr]
        return Record(s, "finished", {"step": list(range(1, s.steps + 1)), "loss": [loss] * s.steps}, {"train_loss": loss})

    found = look(around, get)
    assert (found.tuned.searched, {(s.lr, s.steps) for s in found.missing}) == (concluded, {(asked, 200)})


def test_what_remains_counts_seeds_in_full_and_the_rest_of_a_grid_in_short():
    around = Search(TINY, rectangle(lr_grid(0.1, 1)), centre=(0.3, None), grid_steps=2)
    seeds, trials = [TINY.but(lr=0.3, seed=i) for i in range(4)], [TINY.but(lr=lr, steps=2) for lr in (0.1, 1.0)]
    left = remaining(around, lambda s: None)
    assert (len(left), hours(left)) == (6, pytest.approx(sum(map(core_seconds, [*seeds, *trials])) / 3600))
    there = {s: ended(s, 2 - (s.lr == 0.3)) for s in [*seeds, TINY.but(lr=1.0)]}
    assert remaining(around, there.get) == [TINY.but(lr=0.1, steps=2)]
    assert len(remaining(Search(TINY, rectangle((0.1, 0.3))), lambda s: None)) == 5


def test_the_pace_of_a_machine_is_that_of_its_products(monkeypatch):
    """By hand: products that take a second each, on a machine as fast as the estimates suppose, have the matrix's size to match."""
    threads, clock = torch.get_num_threads(), iter(range(100))
    monkeypatch.setattr(estimate, "perf_counter", lambda: float(next(clock)))
    assert estimate.pace(size=100) == pytest.approx(2 * 100**3 / estimate.RATE)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("trials", [3, 9])
def test_what_remains_counts_the_trials_that_fill_a_grid(trials):
    """Of which only the number is known before: where they lie is seen when the others are there."""
    grid = Search(TINY, rectangle(lr_grid(0.03, 1), (0.1,)), trials=trials)
    assert len(remaining(grid, lambda s: None)) == max(trials, 4) + 3
    known = {}

    def count(settings):
        known.update((s, ended(s, s.lr)) for s in settings)
        return [known[s] for s in settings]

    count(grid.grid)
    assert len(remaining(grid, known.get)) == max(trials - 4, 0) + 3
    tune(grid, count)
    assert remaining(grid, known.get) == []


def test_divergence_never_wins():
    def run_all(settings):
        return [ended(s, 1 / s.lr, "diverged" if s.lr > 0.2 else "finished") for s in settings]

    assert tune(Search(TINY, rectangle(lr_grid(0.1, 1)), extend=2), run_all).best.lr == 0.1


def test_the_best_of_each_damping_goes_on_to_the_end_since_small_ones_lead_early():
    """As standard damping in Fig. 3A: the smallest λ leads at first, and stalls. A λ that is OPEN times worse there stays behind."""
    early, late = {0.01: 1.0, 0.1: 1.5, 1.0: 2.5}, {0.01: 0.9, 0.1: 0.1, 1.0: 0.05}
    asked = []

    def run_all(settings):
        asked.extend(settings)

        def record(s):
            best = 1 + abs(math.log10(s.lr / 0.3))
            losses = [best * (early if step < 100 else late)[s.damping] for step in range(1, s.steps + 1)]
            return Record(s, "finished", {"step": list(range(1, s.steps + 1)), "loss": losses}, {"train_loss": losses[-1]})

        return [record(s) for s in settings]

    grid = Search(TINY.but(steps=200), rectangle((0.1, 0.3, 1.0), (0.01, 0.1, 1.0)), extend=0, centre=(0.3, 0.01), grid_steps=50)
    found = tune(grid, run_all)
    assert (found.best.lr, found.best.damping) == (0.3, 0.1)
    assert {(s.lr, s.damping) for s in asked if s.steps == 200 and not s.seed} == {(0.3, 0.01), (0.3, 0.1)}
