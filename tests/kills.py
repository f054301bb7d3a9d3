"""Sweeps killed at random moments, then continued: ``python tests/kills.py 50`` for fifty (and ten Dask workers); the tests do a few.

The sweep is all of the preset *smoke*. A kill is SIGKILL: to the sweeping process alone, to all of its process group, or to a worker
of a Dask cluster. Afterwards every record must equal that of an undisturbed sweep.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from foof.study.paper.experiments import experiments_of
from foof.study.search.presets import PRESETS
from foof.study.search.store import Store
from foof.study.search.sweep import WorkerDied, sweep
from foof.study.train.setting import Setting

RESULT = Path(__file__).parents[1] / "benchmarks" / "sweep_kills.json"


def smoke() -> list[Setting]:
    """Every run of the preset smoke, which has one grid point and two seeds for each curve."""
    preset = PRESETS["smoke"]
    searches = [s for e in experiments_of(preset).values() for s in e.searches(preset).values()]
    return list(dict.fromkeys(s.grid[0].but(seed=seed) for s in searches for seed in range(s.seeds)))


def contents(path: Path) -> dict[str, str]:
    """What must be equal: all of a record but cost and machine. As text, since NaN is not equal to itself."""
    with Store(path) as store:
        return {r.key: repr((r.setting, r.status, r.series, r.final)) for r in store}


def run_to_the_end(path: Path, settings: list[Setting], **how) -> dict[str, str]:
    with Store(path) as store:
        sweep(settings, store, **how)
    return contents(path)


def start(path: Path, count: int, lines: int) -> subprocess.Popen:
    """This file as a process of its own that sweeps the first `count` settings; back once it has said `lines` lines.

    It says one when it begins, its imports done, and one for each record that it stores.
    """
    command = [sys.executable, __file__, "--sweep", str(path), str(count)]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout
    for _ in range(lines):
        process.stdout.readline()
    return process


def kill_sweeps(kills: int, folder: Path, expected: dict[str, str], count: int, longest: float, seed: int = 0) -> dict[str, int]:
    """Kill a sweep `kills` times at random moments, continuing each time; a sweep that gets to its end is begun anew.

    The moment: after as many of the records still to come as chance says (it may be none), and up to `longest` seconds.
    """
    chance, sweeps, done, kept = random.Random(seed), 1, 0, []
    path = folder / "killed-1.sqlite"
    while done < kills:
        stored = len(contents(path)) if path.exists() else 0
        process = start(path, count, lines=1 + chance.randrange(max(1, count - stored)))
        try:
            process.wait(chance.uniform(0, longest))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL) if chance.random() < 0.5 else process.kill()
            process.wait()
            done += 1
            kept.append(len(contents(path)))
            continue
        assert contents(path) == expected
        sweeps += 1
        assert sweeps < 10 * (kills + 1), "sweeps end before they are killed: make `longest` smaller"
        path = folder / f"killed-{sweeps}.sqlite"
    last = run_to_the_end(path, smoke()[:count], workers=2)
    assert last == expected
    return {"kills": done, "sweeps": sweeps, "runs per sweep": count, "kills with records in the store": sum(n > 0 for n in kept)}


@contextmanager
def two_dask_workers() -> Iterator[Any]:
    """A cluster on this machine. Dask waits without end for a worker that died while it was being closed; here, for a while."""
    from distributed import LocalCluster

    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    try:
        yield cluster
    finally:
        with suppress(TimeoutError):
            cluster.close(timeout=60)


def kill_dask_workers(kills: int, folder: Path, expected: dict[str, str], count: int, seed: int = 0) -> dict[str, int | str]:
    """Sweep on a cluster of two workers, killing one of them after every tenth record or so; as many sweeps as the kills take."""
    chance, done, sweeps = random.Random(seed), 0, 0
    with two_dask_workers() as cluster:

        def perhaps_kill(*_: object) -> None:
            nonlocal done
            pids = [nanny.pid for nanny in cluster.workers.values() if nanny.pid]  # none while it is being restarted
            if done < kills and pids and chance.random() < 0.1:
                os.kill(chance.choice(pids), signal.SIGKILL)
                done += 1

        assert run_to_the_end(folder / "dask.sqlite", smoke()[:count], scheduler=cluster.scheduler_address) == expected
        while done < kills:
            sweeps += 1
            records: dict[str, str] = {}
            while len(records) < count:
                with suppress(WorkerDied):  # one run was unlucky four times: go on from there
                    path = folder / f"dask-{sweeps}.sqlite"
                    records = run_to_the_end(path, smoke()[:count], scheduler=cluster.scheduler_address, notify=perhaps_kill)
            assert records == expected
    return {"kills": done, "sweeps": sweeps, "runs per sweep": count, "undisturbed sweep on two Dask workers": "identical"}


def main(kills: int, dask: bool = True) -> None:
    count = len(smoke())
    with tempfile.TemporaryDirectory() as name:
        folder, begun = Path(name), time.monotonic()
        expected = run_to_the_end(folder / "undisturbed.sqlite", smoke(), workers=2)
        took = time.monotonic() - begun
        print(f"an undisturbed sweep of {count} runs took {took:.0f} s", flush=True)
        results = {"local": kill_sweeps(kills, folder, expected, count, longest=3)}
        print(results, flush=True)
        RESULT.write_text(json.dumps(results, indent=1) + "\n")
        if not dask:
            return
        results["dask"] = kill_dask_workers(max(1, kills // 5), folder, expected, count)
    print(results)
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "--sweep":
        with Store(sys.argv[2]) as into:
            print("begun", flush=True)
            sweep(smoke()[: int(sys.argv[3])], into, workers=2, notify=lambda _, new: new and print("stored", flush=True))
    else:
        main(int(sys.argv[1]), dask="local" not in sys.argv)
