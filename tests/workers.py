"""Several processes over gloo for a test: ``run(worker, 2, ...)`` returns what each rank returned."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "foof"])  # so that a worker starts at once


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(rank: int, world: int, port: int, initialise: bool, worker: Callable[..., Any], args: tuple[Any, ...], answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    try:
        if initialise:
            dist.init_process_group("gloo", rank=rank, world_size=world)
        file = io.BytesIO()  # tensors in a queue would need their sender to stay alive
        torch.save(worker(rank, *args), file)
        answers.put((rank, file.getvalue(), None))
        if initialise:
            dist.destroy_process_group()
    except Exception:
        answers.put((rank, None, traceback.format_exc()))


def run(worker: Callable[..., Any], world: int, *args: Any, timeout: float = 240, initialise: bool = True) -> list[Any]:
    """``worker(rank, *args)`` in each of ``world`` processes; an exception of any is raised here.

    Without ``initialise`` the worker makes the process group itself, from the variables that torchrun would set.
    """
    answers = _context.Queue()
    port = free_port()
    processes = [
        _context.Process(target=_start, args=(r, world, port, initialise, worker, args, answers), daemon=True) for r in range(world)
    ]
    for process in processes:
        process.start()
    results: list[Any] = [None] * world
    patience = 5.0
    try:
        for _ in range(world):
            rank, result, error = answers.get(timeout=timeout)
            if error:
                raise RuntimeError(f"rank {rank}:\n{error}")
            results[rank] = torch.load(io.BytesIO(result), weights_only=False)
        patience = 30.0
    finally:
        for process in processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
    return results
