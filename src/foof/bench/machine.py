"""The machine: what it is, which versions ran on it, its threads, its memory, and how fast it multiplies."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PEERS = ("curvlinops-for-pytorch", "singd", "pytorch_optimizer", "laplace-torch", "scipy")


@cache
def environment() -> dict[str, Any]:
    """The class of the machine, and the versions that a timing depends on."""
    found = {"foof": _version("foof"), "source": _commit(), "torch": torch.__version__, "python": platform.python_version()}
    return {
        "machine": {
            "processor": _processor(), "cores": os.cpu_count() or 1, "memory_gib": _memory_gib(), "system": platform.system(),
            "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        },
        "versions": found | {name: _version(name) for name in PEERS},
    }  # fmt: skip


def usable_cores() -> list[int]:
    """Those that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def pin(threads: int) -> None:
    """Compute on this many threads, on as many cores of their own: the first of those this process may use.

    Numbers too small to be normal are zero, if nothing has been computed before: errors become such where a method has learnt its few
    random batches by heart, and some processors take a hundred times as long for them.
    """
    there = usable_cores()
    if threads > len(there):
        raise ValueError(f"each thread has a core of its own: this process may use {len(there)}, but {threads} threads were asked for")
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, there[:threads])


def synchronise(device: torch.device) -> None:
    """Until all that was asked of the device has been done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device) -> int:
    """The most memory that tensors (CUDA) or the whole process (CPU) have taken so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)


def growth(call: Callable[[], Any], device: torch.device) -> int:
    """By how many bytes memory grows at most during a call. Without Linux's /proc: beyond the most it has been so far."""
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    elif status.exists():
        forget.write_text("5")  # the peak so far
        before = 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    else:
        before = peak_bytes(device)
    call()
    if device.type != "cuda" and status.exists():
        return 1024 * next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM")) - before
    return peak_bytes(device) - before


def elsewhere(module: str, *arguments: object) -> Any:
    """What ``python -m module arguments`` prints as JSON: this very source, in a process where what is freed is given back at once."""
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MALLOC_MMAP_THRESHOLD_": "65536"}
    ran = subprocess.run([sys.executable, "-m", module, *map(str, arguments)], capture_output=True, text=True, check=False, env=env)
    if ran.returncode:
        raise RuntimeError((ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1])
    return json.loads(ran.stdout.splitlines()[-1])


def seconds_in_turns(calls: Mapping[str, Callable[[], Any]], device: torch.device, rounds: int = 7) -> dict[str, float]:
    """Seconds of each of these, the median over rounds in which each has its turn: a machine is not equally fast all the time."""
    taken = [{name: seconds_of(call, device, 0.05) for name, call in calls.items()} for _ in range(rounds)]
    return {name: statistics.median(of[name] for of in taken) for name in calls}


def seconds_of(call: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """Seconds of one call, the median of as many as fit into this time (at least three), after one to warm up."""
    call()
    taken: list[float] = []
    begun = time.perf_counter()
    while len(taken) < 3 or time.perf_counter() - begun < seconds:
        synchronise(device)
        start = time.perf_counter()
        call()
        synchronise(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The last commit of the package's source, with a digest of the files where they differ from it; None where no repository has this."""
    package = Path(__file__).parents[1]

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "py.typed")  # an environment inside somebody's repository is not of it
        changed = git("status", "--porcelain", "--", ".")
        return git("log", "-1", "--format=%h", "--abbrev=12", "--", ".") + (f"-dirty-{_digest(package)}" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _digest(package: Path) -> str:
    return sha256(b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))).hexdigest()[:8]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
