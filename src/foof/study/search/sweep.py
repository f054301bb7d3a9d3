"""Many settings → their records, on all cores of this machine or on a Dask cluster.

Workers train, the calling process alone writes. What the store has is not run again, so a sweep that was stopped, in
whatever way, continues by being called again.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_all_start_methods, get_context, parent_process
from pathlib import Path
from threading import Thread

import torch

from foof.study.search.store import Store
from foof.study.train.run import run
from foof.study.train.setting import Record, Setting

UNFINISHED = "unfinished"  # beside the store: states of runs of more than a minute, which go on from there
ATTEMPTS = 3  # how often a setting may be in the hands of a worker that dies
Notify = Callable[[Record, bool], None]  # called with every record, and whether it was run just now


class Interrupted(RuntimeError):
    """Ctrl-C during a sweep: everything that had finished is stored."""

    def __init__(self, done: int, total: int):
        super().__init__(f"stopped: {done} of {total} runs are stored; the same command continues from there")


class WorkerDied(RuntimeError):
    """A setting whose workers died every time."""


def sweep(
    settings: Iterable[Setting],
    store: Store,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    notify: Notify | None = None,
) -> list[Record]:
    """The records of `settings`, in their order; runs what the store lacks and stores each record as it comes.

    `workers` processes (default: one per core, one torch thread each), or the Dask cluster at `scheduler`.
    """
    wanted = list(dict.fromkeys(settings))
    missing = []
    for setting in wanted:
        record = store.get(setting)
        if record is None:
            missing.append(setting)
        elif notify:
            notify(record, False)
    unfinished = None if str(store.path) == ":memory:" else store.path.parent / UNFINISHED
    results = _on_dask(missing, scheduler) if scheduler else _on_cores(missing, workers or os.cpu_count() or 1, unfinished)
    try:
        for record in results:
            store.put(record)
            if notify:
                notify(record, True)
    except KeyboardInterrupt:
        raise Interrupted(sum(s in store for s in wanted), len(wanted)) from None
    finally:
        results.close()
    found = [store.get(setting) for setting in wanted]
    return [record for record in found if record is not None]


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that holds the store
    torch.set_num_threads(1)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A sweep that is killed cannot stop its workers, and they would wait for work forever."""
    if parent := parent_process():
        parent.join()
        os._exit(1)


def _pool(workers: int) -> ProcessPoolExecutor:
    # a forked copy of a busy torch can hang; a server that has imported torch and done nothing else is safe to fork,
    # and spares every worker the import
    context = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    context.set_forkserver_preload(["foof.study.train.run"])
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)


def _stop(pool: ProcessPoolExecutor) -> None:
    """End the pool now: running runs are given up, not waited for."""
    processes = list((getattr(pool, "_processes", None) or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()
        process.join()


def _on_cores(settings: Sequence[Setting], workers: int, unfinished: Path | None) -> Generator[Record, None, None]:
    """Records as they finish. A worker that dies breaks its pool: a new one does again what was lost."""
    left = dict.fromkeys(settings)
    attempts: Counter[Setting] = Counter()
    while left:
        pool = _pool(min(workers, len(left)))
        try:
            yield from _drain(pool, left, attempts, workers, unfinished)
        except BrokenProcessPool:
            hopeless = [s for s in left if attempts[s] >= ATTEMPTS]
            if hopeless:
                raise WorkerDied(
                    f"a worker died {ATTEMPTS} times while running {hopeless[0]}. Most often memory ran out: "
                    f"try fewer workers, or run this setting alone to see its error."
                ) from None
        finally:
            _stop(pool)


def _drain(
    pool: ProcessPoolExecutor, left: dict[Setting, None], attempts: Counter[Setting], workers: int, unfinished: Path | None
) -> Iterator[Record]:
    """Keep one setting per worker in flight, so that a death is blamed only on settings that were running."""
    flying: dict[Future[Record], Setting] = {}
    queue = iter(list(left))
    while True:
        while len(flying) < workers and (setting := next(queue, None)) is not None:
            attempts[setting] += 1
            flying[pool.submit(run, setting, unfinished=unfinished)] = setting
        if not flying:
            return
        for future in wait(flying, return_when=FIRST_COMPLETED).done:
            record = future.result()
            del left[flying.pop(future)]
            yield record


def _on_dask(settings: Sequence[Setting], scheduler: str) -> Generator[Record, None, None]:
    """Records as they finish. Dask itself gives the runs of a dead worker to another."""
    from distributed import Client, KilledWorker, as_completed

    if not settings:
        return
    with Client(scheduler) as client:
        waiting = set(client.map(run, settings, key=[s.key for s in settings], retries=ATTEMPTS, pure=False))
        try:
            for future in as_completed(list(waiting)):
                try:
                    record = future.result()
                except KilledWorker as error:
                    raise WorkerDied(f"{error} What had finished is stored; the same command continues from there.") from None
                # let go of it at once: what is kept would be run again when the worker that holds it dies
                waiting.discard(future)
                future.release()
                yield record
        finally:
            client.cancel(list(waiting))
