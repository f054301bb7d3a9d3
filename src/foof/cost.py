"""What a training step costs: flops and bytes counted on one forward pass of a model, and from them seconds and memory beside SGD.

The flops are what a step must do; a ``Machine`` turns them into seconds. Ratios of such seconds are what ``foof.explain`` predicts and
`foof bench` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from foof import linalg
from foof._torch import DispatchMode
from foof.layers import Conv, Layer, Linear
from foof.passes import call_model
from foof.tap import inputs_seen

FLOAT = 4  # bytes; statistics and weights in single precision
LARGE = 2**25  # bytes beyond which the C library gives memory back when it is freed, to be had anew, page by page


@dataclass(frozen=True)
class Machine:
    """What one thread of a processor with wide vectors does; `foof bench` measures another's."""

    products: float = 84e9  # flops per second in products of matrices
    own_products: float = 92e9  # the same of `foof.linalg.times_transposed`: with inverses, and of errors passed on
    gradients: float = 84e9  # the same of `foof.linalg.product`: of errors and inputs, and second moments
    turning: float = 0.0  # seconds that it takes before, for each number of a matrix that it must turn first
    solves: float = 50e9  # flops per second of the two triangular solves with a Cholesky factor
    memory: float = 38e9  # bytes per second read or written by elementwise operations
    pages: float = 2.1e9  # bytes per second into memory that is had anew
    inverse: float = 65e9  # m³ per second of a damped inverse by Cholesky, beside
    inverse_bytes: float = 190.0  # bytes moved for each of its m² entries
    factor: float = 195e9  # m³ per second of its Cholesky factor alone, beside
    factor_bytes: float = 95.0  # bytes moved for each of its entries
    operation: float = 4e-5  # seconds that an operation takes, forward and backward, however small
    tap: float = 1.2e-4  # seconds that a call of a covered layer adds

    def threads(self, count: int) -> Machine:
        """Of so many threads: they multiply faster, but share the memory and the interpreter."""
        faster = {name: count * getattr(self, name) for name in ("products", "own_products", "gradients", "solves", "inverse", "factor")}
        return replace(self, **faster)

    def inverted(self, m: int) -> float:
        """Seconds of ``(Σ + λI)⁻¹`` for Σ ``(m, m)``."""
        return m**3 / self.inverse + m**2 * self.inverse_bytes / self.memory

    def factorised(self, m: int) -> float:
        """Seconds of its Cholesky factor alone."""
        return m**3 / self.factor + m**2 * self.factor_bytes / self.memory


@dataclass(frozen=True)
class LayerWork:
    """One covered matrix ``(n, m)``, ``groups`` of them, and the rows that a forward pass sends through it."""

    n: int
    m: int
    groups: int
    rows: int
    calls: int
    diagonal: bool = False
    inner: bool = True  # is the gradient of its inputs wanted? Not where they are data
    bias: bool = False  # then its rows are copies of its inputs, with ones
    linear: bool = True  # is it no convolution?


@dataclass(frozen=True)
class Work:
    """One forward pass of a model."""

    layers: tuple[LayerWork, ...]
    flops: float  # of all products, convolutions and attention
    traffic: float  # bytes that all else reads and writes
    operations: int
    sizes: tuple[int, ...]  # of all trainable parameters
    kept: float = 0.0  # bytes of what its operations return, most of it kept for the backward pass

    @property
    def sgd_flops(self) -> float:
        """Forward, gradients of weights and of inputs; the latter not where inputs are data."""
        return 3 * self.flops - sum(2 * w.rows * w.n * w.m * w.groups for w in self.layers if not (w.inner or w.diagonal))


class _Counter(DispatchMode):
    """Counts flops of products, bytes of all else, and operations."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.traffic, self.operations, self.kept = 0.0, 0.0, 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch.utils.flop_counter import flop_registry

        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        self.operations += 1
        self.kept += sum(t.numel() * t.element_size() for t in _tensors(out))
        if formula := flop_registry.get(func.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        else:
            self.traffic += sum(t.numel() * t.element_size() for t in _tensors((args, out)))
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def work_of(model: nn.Module, layers: Iterable[Layer], inputs: Any) -> Work:
    """Count one forward pass of a batch, without gradients and in evaluation mode, so that the model stays as it is."""
    layers, seen = list(layers), dict[int, list[Tensor]]()
    data = {t.untyped_storage().data_ptr() for t in _tensors(inputs)}

    def see(layer: Layer, x: Any) -> None:
        query = x[0] if isinstance(x, tuple) else x  # of query, key and value
        seen.setdefault(id(layer), []).append(query.detach())

    modes = {module: module.training for module in model.modules()}
    fused = torch.backends.mha.get_fastpath_enabled()  # kernels of whole attentions, in evaluation mode only: their products are not seen
    model.eval()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad(), inputs_seen(layers, see), _Counter() as counted:
            call_model(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, was_training in modes.items():
            module.training = was_training
    found = []
    for layer in layers:
        if calls := seen.get(id(layer)):
            rows = sum(x.numel() if layer.diagonal else _rows(layer, x) for x in calls)
            inner = not all(x.untyped_storage().data_ptr() in data for x in calls)
            found.append(LayerWork(layer.n, layer.m, layer.groups, rows, len(calls), layer.diagonal, inner, layer.has_bias,
                                   isinstance(layer, Linear)))  # fmt: skip
    sizes = tuple(p.numel() for p in model.parameters() if p.requires_grad)
    return Work(tuple(found), counted.flops, counted.traffic, counted.operations, sizes, counted.kept)


def _rows(layer: Layer, x: Tensor) -> int:
    return len(layer.batched(x)) * layer.locations(x) if isinstance(layer, Conv) else x.numel() // x.shape[-1]


# --- seconds --------------------------------------------------------------------------------------------------------------


def sgd_seconds(work: Work, machine: Machine) -> float:
    """A step of SGD with momentum: products, three times the forward pass's other traffic, and an update that touches each weight
    eight times and writes its gradient once."""
    touched = sum(9 * FLOAT * size for size in work.sizes)
    return (
        work.sgd_flops / machine.products + (3 * work.traffic + touched) / machine.memory + _anew(work, machine)
        + work.operations * machine.operation
    )  # fmt: skip


def _anew(work: Work, machine: Machine) -> float:
    """Gradients are freed after a step, and large ones are had anew."""
    return sum(FLOAT * size for size in work.sizes if FLOAT * size > LARGE) / machine.pages


def flops(work: Work, method: str, T: int, S: int) -> float:
    """Flops that a step of ``"SGD"``, ``"FOOF"`` or ``"KFAC"`` must do, in the mean over a period."""
    return work.sgd_flops + (0.0 if method == "SGD" else sum(_extra_flops(w, method, T, S) for w in work.layers))


def _extra_flops(w: LayerWork, method: str, T: int, S: int) -> float:
    sides = _sides(w, method)
    applied = sum(2 * rows * m**2 for rows, m in sides)
    gathered = sum(1.5 * w.rows * m**2 for _, m in sides)
    inverted = sum(m**3 if linalg.inverse_pays(m, linalg.uses(T, rows)) else m**3 / 3 for rows, m in sides)
    fisher = 2 * w.rows * w.n * w.m if method == "KFAC" and w.inner else 0
    return w.groups * (applied + S / T * (gathered + fisher) + inverted / T)


def _sides(w: LayerWork, method: str) -> list[tuple[int, int]]:
    """(rows to be multiplied, size) of the inverse of the inputs and, for KFAC, of the errors; see ``foof.kronecker``."""
    inputs = [] if w.diagonal else [(min(w.rows, w.n), w.m)]
    return inputs + ([(min(w.rows, w.m), w.n)] if method == "KFAC" else [])


def extra_seconds(work: Work, machine: Machine, method: str, T: int, S: int) -> float:
    """What FOOF or KFAC (without momentum) adds to a step of SGD with momentum, in the mean over a period."""
    total = -sum(5 * FLOAT * size for size in work.sizes) / machine.memory  # the momentum
    for w in work.layers:
        total += w.calls * machine.tap * (1 if method == "FOOF" else 1.3)
        for rows, m in _sides(w, method):
            if linalg.inverse_pays(m, linalg.uses(T, rows)):
                applied, made = 2 * rows * m**2 / machine.own_products, machine.inverted(m)
            else:
                applied, made = 2 * linalg.uses(1, rows) * m**2 / machine.solves, machine.factorised(m)
            gathered = 1.5 * w.rows * m**2 / (machine.gradients if w.linear else machine.products) + 3 * FLOAT * m**2 / machine.memory
            gathered += w.rows * m * machine.turning if w.linear else 0.0
            total += w.groups * (applied + S / T * gathered + made / T)
        forward = w.groups * 2 * w.rows * w.n * w.m
        errors = machine.own_products if w.linear else machine.products  # the rate at which they are passed on
        if w.linear and not w.diagonal:
            total += forward * (1 / machine.gradients - 1 / machine.products) + w.groups * w.rows * w.n * machine.turning
        if w.inner:
            total += forward * (1 / errors - 1 / machine.products)
        if method == "KFAC" and w.inner:
            total += S / T * forward / errors
    return total


def ratio(work: Work, machine: Machine, method: str = "FOOF", T: int = 100, S: int = 10) -> float:
    """The time of a step over that of SGD with momentum, as predicted."""
    return 1 + extra_seconds(work, machine, method, T, S) / sgd_seconds(work, machine)


# --- memory ---------------------------------------------------------------------------------------------------------------


def memory(work: Work, method: str) -> float:
    """Bytes at most beside SGD with momentum, for FOOF or KFAC without, on networks of linear layers.

    SGD needs ``2W + max(K, W + E)``: weights W, momentum, and what a forward pass keeps, K, or gradients and two layers' errors E on their
    way. With Q all second moments, FOOF and KFAC need ``W + 2Q`` for weights, moments and inverses, and the largest of

        W + room         when they invert: gradients, and room to make one of the inverses anew
        K + F + 2G       when a backward pass begins; F: rows that KFAC has kept of a pass of the Fisher's, G: the largest layer's gradient
        W + R + G + E    when it ends; R: rows for the statistics; KFAC has another G between its two sides

    Of many rows the product is kept, and inputs without a bias are their own rows, which are in K.
    """
    weights, errors = FLOAT * sum(work.sizes), max((2 * FLOAT * w.groups * w.rows * max(w.n, w.m) for w in work.layers), default=0)
    squares = sum(FLOAT * w.groups * m**2 for w in work.layers for _, m in _sides(w, method))
    gradients = [FLOAT * w.groups * min(w.rows, w.n) * w.m for w in work.layers if not w.diagonal] or [0]
    inverts = weights + max((_room(w, method) for w in work.layers), default=0)
    fisher = sum(_rows_kept(w, method, beside_activations=True) for w in work.layers) if method == "KFAC" else 0
    begins = work.kept + fisher + 2 * max(gradients)
    ends = weights + sum(_rows_kept(w, method) for w in work.layers) + (2 if method == "KFAC" else 1) * max(gradients) + errors
    return 2 * squares + max(inverts, begins, ends) - weights - max(work.kept, weights + errors)


def _room(w: LayerWork, method: str) -> float:
    """To make an inverse while the last one is in use: that of ``Σ + λI``, which becomes its Cholesky factor and the inverse in place."""
    return sum(FLOAT * w.groups * m**2 for _, m in _sides(w, method))


def _rows_kept(w: LayerWork, method: str, beside_activations: bool = False) -> float:
    own = beside_activations and w.rows <= w.m and not (w.bias or w.diagonal)
    return sum(FLOAT * w.groups * m * min(w.rows, m) for _, m in _sides(w, method)[1 if own else 0 :])
