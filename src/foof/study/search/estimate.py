"""How long a run will take on one core, from counting its multiplications: good to a factor of two, enough to plan with.

Plans are made with one RATE for all machines, so that they are the same everywhere; `pace` says what that is worth on this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from time import perf_counter

import torch

from foof.study.search.grids import SELECTS, Get, Search, look
from foof.study.train.methods import by_conjugate_gradients
from foof.study.train.setting import Setting

RATE = 7e10  # multiplications and additions per second of one core in large products
TOUCH = 3e-9  # seconds per parameter and step that no product explains
ITERATIONS = 200  # of conjugate gradients, twice as many as there are, since they are in float64
EIGEN = 8  # products of the matrix's size that its eigenvectors cost
PIXELS = {"fashion-mnist": 784, "mnist": 784, "olivetti": 4096, "cifar-10": 3072, "cifar-100": 3072, "svhn": 3072,
          "faces": 625}  # fmt: skip
IMAGES = {"embedded": 6000}


# Of convolutional networks: multiplications and additions of one image's forward pass at width 1, where all layers have few channels, and
# how much slower than large products they are done
CONVOLUTIONS = {"resnet18": 1.4e5, "resnet18-no-norm": 1.4e5, "vgg11": 3.7e4}
CONVOLUTION_RATE = 1.7e10
OVER_SGD = {"foof": 1.25, "kfac": 1.5, "natural": 4.0}  # a convolutional step of other methods


def core_seconds(setting: Setting) -> float:
    """A run's training time on one core."""
    if setting.model in CONVOLUTIONS:
        work = 3 * CONVOLUTIONS[setting.model] * setting.hidden[0] ** 2 * (setting.batch_size or setting.train_size or 1)
        return setting.steps * OVER_SGD.get(setting.optimizer.partition("-")[0], 1.0) * work / CONVOLUTION_RATE
    pixels = PIXELS.get(setting.dataset, 784)
    sizes = (pixels, *setting.hidden, 10)
    if setting.model == "autoencoder":
        sizes = (pixels, *setting.hidden, *reversed(setting.hidden[:-1]), pixels)
    layers = list(pairwise(sizes))
    N = setting.batch_size or setting.train_size or IMAGES.get(setting.source, 60_000)
    weights = sum(m * n for m, n in layers)
    work = 6.0 * N * weights
    kind, T = setting.optimizer.partition("-")[0], setting.option("T", 1 if setting.optimizer == "natural" else 100)
    S = setting.option("S", min(T, 10))
    if kind in ("foof", "kfac"):
        work += sum(4 * N * m * m + 2 * m**3 / T for m, _ in layers)
    if kind == "kfac":
        labels = 9 if setting.option("fisher") == "full" else 1
        work += labels * 4 * N * weights * S / T + sum(4 * N * n * n + 2 * n**3 / T for _, n in layers)
    if setting.option("damping_mode") == "standard" or setting.optimizer == "kfac-transposed":
        work += sum(2 * m * n * (m + n) + EIGEN * (m**3 + n**3) / T for m, n in layers)
    if kind == "natural":
        columns = setting.option("fisher_batch", N) * (9 if setting.option("fisher") == "full" else 1)
        solved = ITERATIONS * 4 * N * weights if by_conjugate_gradients(setting) else _natural(setting, layers, N, columns)
        work += 4 * columns * weights + solved / T
    return setting.steps * (work / RATE + TOUCH * weights)


def _natural(setting: Setting, layers: list[tuple[int, int]], N: int, columns: int) -> float:
    """Per new Fisher: passes over its datapoints, the Gram matrix of all columns, and its factorisation, by layer one for each."""
    D = setting.option("fisher_batch", N)
    gram = sum(columns * columns * (n + m * D / columns) for m, n in layers)
    factors = len(layers) if setting.option("blocks") == "layer" else 1
    return 6 * columns * sum(m * n for m, n in layers) + gram + factors * columns**3 / 3


def remaining(search: Search, get: Get) -> list[Setting]:
    """The runs that a search lacks, as it looks now: what comes next, the other trials, and the seeds of what seems to win.

    Trials that are still to be chosen are those of its first grid, filled; what goes on to the end of training comes on top.
    """
    found = look(search, get)
    if not found.missing:
        return []
    grid = search.filled({}).grid
    tried = {s for s in grid if search.trial(s, get)}
    next_ = {s for s in found.missing if s.seed == SELECTS and s == search.short(s)}
    to_come = len(grid) - len(next_) - max(len(tried), len(found.tuned.tried) if found.tuned else 0)
    others = [s for s in map(search.short, (s for s in grid if s not in tried and s != search.middle)) if s not in next_]
    winner = search.middle or search.grid[0]
    if found.tuned:
        winner = found.tuned.best.but(steps=search.base.steps, measure=search.base.measure)
    wanted = (*found.missing, *others[: max(to_come, 0)], *search.vetting(winner)[1:], *search.reports(winner))
    return [s for s in dict.fromkeys(wanted) if get(s) is None]


def pace(size: int = 1000, times: int = 10) -> float:
    """How many times as fast as RATE this machine is, from the best of a few products of large matrices on one core."""
    threads, A = torch.get_num_threads(), torch.ones(size, size)
    torch.set_num_threads(1)
    try:
        began = [perf_counter()]
        for _ in range(times):
            A @ A
            began.append(perf_counter())
    finally:
        torch.set_num_threads(threads)
    return 2 * size**3 / min(b - a for a, b in pairwise(began)) / RATE


def hours(runs: Iterable[Setting]) -> float:
    """Of one core."""
    return sum(map(core_seconds, runs)) / 3600
