"""Time per step as a ratio to SGD with momentum: interleaved rounds of the same run, median over rounds."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import nn

BATCH, SIZES = 100, (784, 1000, 1000, 1000, 10)
Make = Callable[[nn.Module], torch.optim.Optimizer]


def mlp(sizes: tuple[int, ...] = SIZES) -> nn.Sequential:
    """The paper's fully connected network: no biases, Kaiming-He initialisation."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs, bias=False)
        nn.init.kaiming_normal_(linear.weight)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def time_steps(model: nn.Module, opt: torch.optim.Optimizer, data: list[tuple[torch.Tensor, torch.Tensor]], steps: int) -> float:
    """Seconds per training step."""
    start = time.perf_counter()
    for k in range(steps):
        x, y = data[k % len(data)]
        opt.zero_grad()
        out = model(x)
        if hasattr(opt, "update_curvature"):
            opt.update_curvature(out)
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
    return (time.perf_counter() - start) / steps


def ratios_to_sgd(methods: Mapping[str, tuple[Make, int]], rounds: int = 15) -> dict[str, tuple[float, float, float]]:
    """For each method (how to make it, steps per round): its time per step over SGD's, as (median, lower, upper quartile).

    Each round times SGD, then every method, so that a slow moment of the machine weighs on both sides of a ratio.
    """
    torch.manual_seed(0)
    data = [(torch.randn(BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (BATCH,))) for _ in range(10)]
    runs = {}
    for name, (make, steps) in methods.items():
        model = mlp()
        runs[name] = (model, make(model), steps)
        time_steps(model, runs[name][1], data, min(steps, 20))  # warm up
    baseline = mlp()
    plain = sgd(baseline)
    time_steps(baseline, plain, data, 20)
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name, (model, opt, steps) in runs.items():
            before = time_steps(baseline, plain, data, 25)
            seconds = time_steps(model, opt, data, steps)
            after = time_steps(baseline, plain, data, 25)
            ratios[name].append(seconds / ((before + after) / 2))
    return {name: (statistics.median(r), *statistics.quantiles(r, n=4)[::2]) for name, r in ratios.items()}


def report(ratios: Mapping[str, tuple[float, float, float]], bounds: Mapping[str, float], rounds: int) -> None:
    """Print a table with the machine it was measured on."""
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()};")
    print(f"MLP {'-'.join(map(str, SIZES))}, batch {BATCH};")
    print(f"time per step over SGD with momentum in the same run: median (quartiles) of {rounds} interleaved rounds")
    for name, (median, low, high) in ratios.items():
        bound = f"   asked for: ≤ {bounds[name]}" if name in bounds else ""
        print(f"  {name:<24} {median:5.2f}  ({low:.2f} to {high:.2f}){bound}")
