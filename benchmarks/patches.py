"""Second moments of a convolution's patches, without them and by unfolding: ``python benchmarks/patches.py [rounds]``.

64 channels, 3 × 3, 32 × 32, batch 100: seconds on one thread and on all, interleaved; and the memory each needs besides its input.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from foof.layers import Conv
from foof.patches import second_moment

CHANNELS, KERNEL, SIZE, BATCH = 64, 3, 32, 100


def unfold_and_multiply(layer: Conv, x: Tensor) -> Tensor:
    rows = layer.input_rows(x).flatten(-3, -2)
    return rows.mT @ rows


WAYS: dict[str, Callable[[Conv, Tensor], Tensor]] = {"unfolded": unfold_and_multiply, "without patches": second_moment}


def case(batch: int = BATCH) -> tuple[Conv, Tensor]:
    torch.manual_seed(0)
    return Conv("", nn.Conv2d(CHANNELS, CHANNELS, KERNEL, padding=1, bias=False)), torch.randn(batch, CHANNELS, SIZE, SIZE)


def seconds(rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round."""
    layer, x = case()
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for k in range(rounds + 1):
        for name, way in WAYS.items():
            start = time.perf_counter()
            way(layer, x)
            if k:  # the first is to warm up
                taken[name].append(time.perf_counter() - start)
    return taken


def extra_memory(name: str) -> float:
    """MB that a call needs at its peak (Linux), in a process that has done nothing else but a small one before."""
    WAYS[name](*case(batch=2))
    layer, x = case()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = _peak()
    WAYS[name](layer, x)
    return _peak() - before


def _peak() -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


def extra_memory_elsewhere(name: str) -> float:
    return float(subprocess.run([sys.executable, __file__, "memory", name], check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    if sys.argv[1:2] == ["memory"]:
        print(extra_memory(sys.argv[2]))
        sys.exit()
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    layer, x = case()
    error = (second_moment(layer, x) - unfold_and_multiply(layer, x)).norm() / unfold_and_multiply(layer, x).norm()
    print(f"torch {torch.__version__}, {platform.machine()}; {CHANNELS} channels, {KERNEL} × {KERNEL}, {SIZE} × {SIZE}, batch {BATCH};")
    print(f"float32, relative difference {error:.1e}; median (quartiles) of {rounds} interleaved rounds")
    for threads in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(threads)
        taken = seconds(rounds)
        for name, values in taken.items():
            low, middle, high = statistics.quantiles(values, n=4)
            print(f"  {threads} thread{'s' * (threads > 1)}, {name:<16} {1e3 * middle:7.0f} ms ({1e3 * low:.0f} to {1e3 * high:.0f})")
        ratios = [old / new for old, new in zip(*taken.values(), strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {threads} thread{'s' * (threads > 1)}, ratio {middle:.1f} ({low:.1f} to {high:.1f})   asked for: ≥ 4")
    old, new = (extra_memory_elsewhere(name) for name in WAYS)
    print(f"  extra memory: unfolded {old:.0f} MB, without patches {new:.0f} MB: {new / old:.2f}   asked for: ≤ 0.33")
