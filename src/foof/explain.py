"""``foof.explain(model)``: which parameters are covered, which are not and why, and what covering them costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foof import cost, linalg, notices
from foof.covering import by_matrix, covered_layers, names_of
from foof.layers import Layer
from foof.passes import call_model
from foof.tap import existing_tap, inputs_seen

EIGENVECTORS = 4.5  # times the flops of an inverse


@dataclass(frozen=True)
class Row:
    """One trainable parameter. Cost and memory are those of its layer, shown with the weight."""

    parameter: str
    shape: tuple[int, ...]
    covered: str  # how, or "" if it goes to the rest
    why_not: str = ""
    flops: float = 0.0  # extra per step
    memory: int = 0  # bytes of statistics and inverse
    group: str = ""  # of the optimizer
    change: str = ""  # by how much of their size the latest step moved the layer's outputs


@dataclass(frozen=True)
class Explanation:
    """A readable table; ``rows`` holds it as data."""

    rows: tuple[Row, ...]
    T: int
    S: int
    measured: bool
    note: str = ""  # on the steps of an optimizer
    method: str = "FOOF"
    ratio: float | None = None  # of the time of a step to that of SGD with momentum, as predicted

    @property
    def covered(self) -> list[str]:
        return [row.parameter for row in self.rows if row.covered]

    @property
    def rest(self) -> dict[str, str]:
        return {row.parameter: row.why_not for row in self.rows if not row.covered}

    def __str__(self) -> str:
        head: tuple[str, ...] = ("parameter", "shape", "covered", "extra cost/step", "statistics")
        may = {"group": "group", "latest change": "change"}
        optional = {name: key for name, key in may.items() if any(getattr(row, key) for row in self.rows)}
        lines = [(*head, *optional)] + [(*self._line(row), *(getattr(row, key) for key in optional.values())) for row in self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
        table.insert(1, "-" * len(table[0]))
        flops, memory = sum(row.flops for row in self.rows), sum(row.memory for row in self.rows)
        bound = "" if self.measured else " at most (give inputs= for the batch at hand)"
        summary = (
            f"{len(self.covered)} of {len(self.rows)} trainable parameters covered; {self.method} adds {_si(flops, 'flop')} per step at "
            f"T={self.T}, S={self.S}{bound} and keeps {_si(memory, 'B')} of statistics."
            + (f" Predicted: {self.ratio:.2f} times the time of a step of SGD with momentum." if self.ratio else "")
        )
        return "\n".join([*table, "", summary, *([self.note] if self.note else [])])

    @staticmethod
    def _line(row: Row) -> tuple[str, ...]:
        shape = "×".join(map(str, row.shape)) or "1"
        if not row.covered:
            return row.parameter, shape, f"no, rest: {row.why_not}", "", ""
        cost, memory = (_si(row.flops, "flop"), _si(row.memory, "B")) if row.flops else ("", "")
        return row.parameter, shape, row.covered, cost, memory


def explain(model: nn.Module, inputs: Any = None, T: int = 100, S: int | None = None, *, exclude: Iterable[str] = (),
            groups: Sequence[Mapping[str, Any]] = (), left: Mapping[str, str] | None = None, changes: Mapping[str, str] | None = None,
            note: str = "", method: str = "FOOF") -> Explanation:  # fmt: skip
    """Which parameters of a model gradient descent on neurons covers, and what that costs per step.

    ``opt.explain()`` explains an optimizer, with what it excludes, its groups, what it has ``left`` to its fallback, and why; and how far
    its latest step moved the outputs of each layer (``changes``, by the name of the weight; ``note``), where that is bounded.

    ``inputs`` (a batch as the model takes it) makes the costs those of that batch, and finds covered layers that the model never
    calls; and how much longer than one of SGD with momentum a step takes is predicted, of the ``method`` ``"FOOF"`` or ``"KFAC"``, without
    momentum (of others nothing is). Without it, costs are upper bounds over batch sizes. On a model with an optimizer attached that has
    been trained, layers whose hook never fired are warned of, too.
    """
    S = min(T, 10) if S is None else S
    owned = None if left is None else {id(p) for name, p in model.named_parameters() if name not in left}
    layers, why_not = covered_layers(model, names_of(exclude), owned, functional=True)
    why_not = why_not if left is None else {**why_not, **left}
    rows_of = _rows_seen(model, layers, inputs) if inputs is not None else {}
    _warn_unused(layers, rows_of, inputs is not None)
    names = {id(p): name for name, p in model.named_parameters()}
    group_of = {id(p): f"group {i}" for i, group in enumerate(groups) for p in group["params"]}
    rows: dict[str, Row] = {}
    for same in by_matrix(layers):  # one Σ and one inverse, whatever layers use it
        layer, seen = same[0], [rows_of[id(each)] for each in same if id(each) in rows_of]
        flops, memory = _cost(layer, sum(seen) if seen else None, T, S, method)
        how = "; tied: ".join(_kind(each) for each in same)
        weight, shape = names[id(layer.weight)], tuple(layer.weight.shape)
        if weight in rows:  # tied to a matrix of another layout, which has a Σ and an inverse of its own
            before = rows[weight]
            how, flops, memory = f"{before.covered}; tied: {how}", before.flops + flops, before.memory + memory
        rows[weight] = Row(weight, shape, how, "", flops, memory, group_of.get(id(layer.weight), ""), (changes or {}).get(weight, ""))
        if layer.bias is not None:
            bias, name = layer.bias, names[id(layer.bias)]
            rows[name] = Row(name, tuple(bias.shape), f"one more input of {weight}", group=group_of.get(id(bias), ""))
    for name, reason in why_not.items():
        parameter = model.get_parameter(name)
        rows[name] = Row(name, tuple(parameter.shape), "", reason, group=group_of.get(id(parameter), ""))
    ordered = [rows[name] for name, p in model.named_parameters() if name in rows]
    ratio = None if inputs is None or method not in ("FOOF", "KFAC") else _ratio(model, layers, inputs, method, T, S)
    return Explanation(tuple(ordered), T, S, inputs is not None, note, method, ratio)


def _ratio(model: nn.Module, layers: list[Layer], inputs: Any, method: str, T: int, S: int) -> float | None:
    """As predicted for a processor; nothing is predicted for accelerators, nor for shards."""
    if any(p.device.type != "cpu" or type(p) is not nn.Parameter for p in model.parameters()):
        return None
    return cost.ratio(cost.work_of(model, layers, inputs), cost.Machine().threads(torch.get_num_threads()), method, T, S)


def _kind(layer: Layer) -> str:
    return f"{type(layer).__name__}, {layer.n}×{layer.m}" + (f" in {layer.groups} groups" if layer.groups > 1 else "")


def _rows_seen(model: nn.Module, layers: list[Layer], inputs: Any) -> dict[int, int]:
    seen: dict[int, int] = {}

    def see(layer: Layer, x: Any) -> None:
        x = x[0] if isinstance(x, tuple) else x  # of query, key and value
        rows = x.numel() if layer.diagonal else layer.input_matrix(x).shape[-2]
        seen[id(layer)] = seen.get(id(layer), 0) + rows

    modes = {module: module.training for module in model.modules()}
    model.eval()  # no running average of the model changes
    try:
        with torch.no_grad(), inputs_seen(layers, see):
            call_model(model, inputs)
    finally:
        for module, was_training in modes.items():
            module.training = was_training
    return seen


def _warn_unused(layers: list[Layer], rows_of: dict[int, int], measured: bool) -> None:
    taps = [tap for layer in layers if (tap := existing_tap(layer.module)) is not None]
    silent = [tap.layer.label for tap in taps if not tap.fired] if any(tap.fired for tap in taps) else []
    if measured:
        silent += [layer.label for layer in layers if id(layer) not in rows_of and layer.label not in silent]
    for label in silent:
        notices.warn(f"{label} is covered, but its forward is never called (used functionally, or not at all?): exclude it.")


def _cost(layer: Layer, rows: int | None, T: int, S: int, method: str = "FOOF") -> tuple[float, int]:
    """Extra flops per step (precondition, second moment S of T times, inversion every T) and bytes (Σ and its inverse).

    Muon's acts on the momentum, ``(n, m)``; AdamW rotates gradients there and back, and has eigenvectors for an inverse.
    """
    n, m, groups = layer.n, layer.m, layer.groups
    width = torch.promote_types(layer.weight.dtype, torch.float32).itemsize
    if layer.diagonal:
        return float(n * m), 2 * m * width
    if method in ("Muon", "AdamW"):
        turns, inverted = (1, m**3) if method == "Muon" else (2, EIGENVECTORS * m**3)
        return groups * (turns * 2 * n * m**2 + (S / T) * 1.5 * (rows or n) * m**2 + inverted / T), groups * 2 * m * m * width
    applied = n if rows is None else min(rows, n)
    inverted = m**3 if linalg.inverse_pays(m, linalg.uses(T, applied)) else m**3 / 3
    flops = groups * (2 * applied * m**2 + (S / T) * 1.5 * (rows or n) * m**2 + inverted / T)
    return flops, groups * 2 * m * m * width


def _si(value: float, unit: str) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
