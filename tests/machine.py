"""A training loop at random, beside a slow twin: ``python tests/machine.py 2000`` runs that many loops.

``Loop`` is a training loop taken apart: forward and backward passes, ``zero_grad``, ``update_curvature``, steps, checkpoints and all that
people do in between, in any order. Each of its methods does the same to an optimizer of the library and to a ``Twin`` (plain autograd
on a copy of the model, dense second moments, dense solves, float64), which then must agree: weights, gradients, second moments.
``machine_of`` lets hypothesis draw such loops.

The twin says what a step is, a transaction:

- What backward passes bring is pending, per matrix, for as long as its gradient is there. ``step()`` commits it: the update by the inverse
  at hand (a first one is made of what the step has seen); then Algorithm 1: invert if due, fold in what the step has seen if it was
  due, count the step. ``zero_grad()`` drops it.
- ``torch.autograd.grad`` is no part of it, unless its gradients are assigned by hand and no backward pass came.
- An estimate of the Fisher belongs to the graph of its outputs: it counts when a backward pass through that graph does.
"""

from __future__ import annotations

import copy
import io
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import foof
import oracle

TOLERANCE = 1e-9

# --- models ---------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Tokens ``(N, 2)`` → logits ``(N, 2, 5)``; the head's weight is the embedding's. The norm is left to the fallback optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        return self.head(self.norm(h + self.middle(h.flip(1)).tanh()))


class Shared(nn.Module):
    """One layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.layer(x).tanh()).tanh())


class Mixture(nn.Module):
    """Two experts, each for the datapoints far out on its side; the left one is called also with none, the right one is not."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x[:, 0] < -0.5, x[:, 0] > 1
        h = x.clone()
        h[left] = self.left(x[left])
        if right.any():
            h[right] = self.right(x[right])
        return self.head(h.tanh())


class Recomputed(nn.Module):
    """An MLP whose middle, which calls the first layer again, is an activation checkpoint; in the twin it is not (``reentrant = None``)."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 3)
        self.reentrant: bool | None = reentrant

    def forward(self, x: Tensor) -> Tensor:
        def middle(h: Tensor) -> Tensor:
            return self.middle(self.first(h.tanh()).tanh()).tanh()

        h = self.first(x)
        return self.head(middle(h) if self.reentrant is None else checkpoint(middle, h, use_reentrant=self.reentrant))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False), nn.Tanh(), nn.Linear(2, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.Conv2d(2, 2, 2, stride=2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
    )


@dataclass(frozen=True)
class Case:
    """A model, the shape of one of its inputs (None: tokens), and the layers that may be frozen."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] | None = (3,)
    freezable: tuple[str, ...] = ()
    graph_only: bool = False  # does torch refuse autograd.grad through it?

    def batch(self, seed: int, size: int) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(seed)
        if self.shape is None:
            return torch.randint(0, 5, (size, 2), generator=g), torch.randint(0, 5, (size, 2), generator=g)
        x = torch.randn(size, *self.shape, generator=g, dtype=torch.float64)
        return x, torch.randint(0, 3, (size,), generator=g)


CASES = {
    "mlp": Case(mlp, freezable=("0", "2")),
    "cnn": Case(cnn, (1, 4, 4), freezable=("0", "2")),
    "tied": Case(Tied, None, freezable=("middle",)),
    "shared": Case(Shared, freezable=("layer",)),
    "mixture": Case(Mixture, freezable=("left", "right")),
    "checkpointed": Case(lambda: Recomputed(False), freezable=("first", "middle")),
    "reentrant": Case(lambda: Recomputed(True), freezable=("middle",), graph_only=True),
}

# --- optimizers -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """One line of the table of optimizers: how it is made, and what the twin has to know of it."""

    kind: str  # of curvature: "foof", "muon", "heuristic", "standard", "natural"
    over: str = "own"  # whose update rule: the library's own, or "sgd", "adamw" of torch
    fisher: str = "full"
    by_layer: bool = False
    spread: bool = False  # over the steps of a round, in parts of one row

    @property
    def cases(self) -> list[str]:
        """Without those that it, or torch, refuses."""
        left_out = {"foof": [], "muon": [], "natural": ["mixture", "reentrant"]}.get(self.kind, ["reentrant"])
        return [name for name in CASES if name not in left_out]

    @property
    def from_inputs(self) -> bool:
        """Are its statistics those of the training passes' inputs alone?"""
        return self.kind in ("foof", "muon")

    def optimizer(self, model: nn.Module, s: Setting) -> Any:
        options: dict[str, Any] = {"damping": s.damping, "T": s.T}
        if self.kind == "natural":
            options |= {"fisher": self.fisher, "blocks": "layer" if self.by_layer else "full", "generator": 1}
        else:
            options |= {"ema": s.ema, "S": s.S, "spread": self.spread}
        if self.kind in ("heuristic", "standard"):
            options |= {"fisher": self.fisher, "damping_mode": self.kind, "generator": 1}
        if self.over == "own":
            make = {"foof": foof.FOOF, "muon": foof.Muon, "natural": foof.NaturalGradient}.get(self.kind, foof.KFAC)
            return make(model, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay, **options)
        method = "foof" if self.kind == "foof" else "kfac"
        return foof.precondition(torch_optimizer(self.over, list(model.parameters()), s), model, method=method, **options)


METHODS = {
    "foof": Method("foof"),
    "muon": Method("muon"),
    "kfac": Method("heuristic"),
    "kfac-mc": Method("heuristic", fisher="mc"),
    "kfac-standard": Method("standard", fisher="empirical"),
    "kfac-standard-mc": Method("standard", fisher="mc"),
    "natural": Method("natural"),
    "natural-layer-mc": Method("natural", fisher="mc", by_layer=True),
    "foof-spread": Method("foof", spread=True),
    "muon-spread": Method("muon", spread=True),
    "kfac-spread": Method("heuristic", spread=True),
    "kfac-standard-spread": Method("standard", spread=True),
    "foof-sgd": Method("foof", over="sgd"),
    "foof-adamw": Method("foof", over="adamw"),
    "kfac-adamw": Method("heuristic", over="adamw", fisher="empirical"),
}


@dataclass(frozen=True)
class Setting:
    T: int = 1
    S: int = 1
    ema: float = 0.5
    lr: float = 0.05
    damping: float = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.0


def torch_optimizer(name: str, params: list[nn.Parameter], s: Setting) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(params, lr=s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
    return torch.optim.AdamW(params, lr=s.lr, weight_decay=s.weight_decay)


def second_moments(opt: Any) -> dict[str, dict[str, Tensor]]:
    """Those of the library, by the name of the layer."""
    if hasattr(opt, "second_moments"):
        return opt.second_moments()
    return {b.layer.name: {k: m.value for k, m in b.moments.items() if m.value is not None} for b in opt.preconditioner.blocks}


# --- the twin -------------------------------------------------------------------------------------------------------------------


@dataclass
class Moment:
    """A sum over rows, and over how many datapoints: what a pass, a step or an estimate has seen. Sums are ``(G, m, m)``."""

    total: Tensor | None = None
    datapoints: int = 0

    def __add__(self, other: Moment) -> Moment:
        """With other datapoints."""
        total = other.total if self.total is None else self.total if other.total is None else self.total + other.total
        return Moment(total, self.datapoints + other.datapoints)


@dataclass
class Average:
    """``x̂_t = Σ_s m^(t-s) x_s / Σ_s m^(t-s)``, from all that has ever been folded in."""

    decay: float
    history: list[Tensor] = field(default_factory=list)
    value: Tensor | None = None

    def fold(self, seen: Moment) -> None:
        if seen.total is not None and seen.datapoints and bool(seen.total.isfinite().all()):
            self.history.append(seen.total / seen.datapoints)
            weights = [self.decay ** (len(self.history) - 1 - s) for s in range(len(self.history))]  # 0⁰ = 1
            self.value = sum(w * x for w, x in zip(weights, self.history, strict=True)) / sum(weights)


@dataclass(eq=False)
class Matrix:
    """One weight matrix of the twin's model: the modules that use it, its averages, its inverse."""

    name: str
    modules: list[nn.Module]
    averages: dict[str, Average]
    inverse: Callable[[Tensor], Tensor] | None = None
    with_bias: bool = True
    making: float | None = None  # the damping of an inverse that is being made, while its averages stand still

    @property
    def parameters(self) -> list[nn.Parameter]:
        bias = getattr(self.modules[0], "bias", None)
        return [self.modules[0].weight] + ([bias] if self.with_bias and bias is not None else [])

    @property
    def frozen(self) -> bool:
        return not self.modules[0].weight.requires_grad

    @property
    def gradient(self) -> Tensor:
        """``.grad`` of weight and bias as ``(G, n, m)``."""
        return oracle.gradient_matrix(self.modules[0], *(p.grad for p in self.parameters), *[None] * (2 - len(self.parameters)))

    def shaped(self, matrix: Tensor) -> list[Tensor]:
        """``(G, n, m)`` as one tensor per parameter."""
        module = self.modules[0]
        if isinstance(module, nn.Embedding):
            return [matrix[0].mT]
        if len(self.parameters) == 1:
            return [matrix.reshape(module.weight.shape)]
        return [matrix[..., :-1].reshape(module.weight.shape), matrix[..., -1].flatten()]


@dataclass
class Call:
    """One call of a covered layer: its inputs as rows ``(G, N, R, m)``, and its output, in the graph."""

    matrix: Matrix
    a: Tensor
    b: Tensor

    def errors(self, e: Tensor) -> Tensor:
        """The gradient of the output as rows ``(G, N, R, n)``."""
        return rows(self.matrix.modules[0], e)


def rows(module: nn.Module, b: Tensor) -> Tensor:
    if isinstance(module, nn.Conv2d):
        return oracle.as_rows(module, b)
    return b.reshape(1, len(b), math.prod(b.shape[1:-1]), b.shape[-1])


def input_rows(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        a = rows(module, x)
        return a if module.bias is None else torch.cat([a, torch.ones_like(a[..., :1])], -1)
    return oracle.input_rows(module, x)


def product(a: Tensor) -> Tensor:
    return torch.einsum("girk,girl->gkl", a, a)


Estimate = dict[Matrix, dict[str, Moment]]  # what update_curvature has seen


@dataclass(eq=False)
class Graph:
    """A forward pass of both models, still to be differentiated."""

    x: Tensor
    y: Tensor
    out: Tensor  # of the model with the optimizer
    twin_x: Tensor
    twin_out: Tensor
    calls: list[Call]
    estimates: list[Any] = field(default_factory=list)

    def loss(self, out: Tensor, share: float) -> Tensor:
        return nn.functional.cross_entropy(out.flatten(0, -2), self.y.flatten()) * share


@dataclass
class Pending:
    """What the step in the making knows of one matrix."""

    seen: dict[str, Moment] = field(default_factory=dict)
    estimates: list[Any] = field(default_factory=list)
    raw: bool = False  # is its gradient still to be preconditioned?
    inverse: Callable[[Tensor], Tensor] | None = None  # made for this step, where that cannot wait for the whole of it

    def add(self, key: str, moment: Moment) -> None:
        self.seen[key] = self.seen.get(key, Moment()) + moment


class Twin:
    """An optimizer by the book: slow, dense, on a model without hooks of the library."""

    def __init__(self, model: nn.Module, method: Method, s: Setting) -> None:
        self.model, self.method, self.setting = model, method, s
        self.damping, self.generator = s.damping, torch.Generator().manual_seed(1)
        self.t, self.warming_up = 0, True
        self.moments = {"foof": ("Sigma",), "muon": ("Sigma",), "natural": ()}.get(method.kind, ("Sigma", "Sigma_E"))
        self.matrices = self._matrices()
        covered = {id(p) for matrix in self.matrices for p in matrix.parameters}
        self.covered = [p for p in model.parameters() if id(p) in covered]
        rest = [p for p in model.parameters() if id(p) not in covered]
        if method.over == "own":
            self.lr, self.velocity = s.lr, {p: torch.zeros_like(p) for p in self.covered}
            options = {"lr": 3e-3, "betas": (0.9, 0.95)} if method.kind == "muon" else {"lr": 1e-3}
            self.rest = torch.optim.AdamW(rest, weight_decay=s.weight_decay, **options) if rest else None
        else:
            self.rest = torch_optimizer(method.over, list(model.parameters()), s)
        self.landed: dict[Matrix, Pending] = {}  # by backward()
        self.captured: dict[Matrix, Pending] = {}  # by autograd.grad()
        self.fisher: Tensor | None = None  # the natural gradient's (P, P), over the covered parameters
        self.next_fisher: Tensor | None = None  # pending, like anything else
        self.fisher_used = False  # has a backward pass followed it?
        self._calls: list[Call] | None = None
        for matrix in self.matrices:
            for module in matrix.modules:
                module.register_forward_hook(self._see(matrix))

    def _matrices(self) -> list[Matrix]:
        """Tied weights are one matrix, but for an embedding, which is another one than the linear layer it shares its weight with."""
        found: dict[tuple[int, bool], Matrix] = {}
        for name, module in self.model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv2d, nn.Embedding)):
                key = id(module.weight), isinstance(module, nn.Embedding)
                made = found.setdefault(key, Matrix(name, [], {k: Average(self.setting.ema) for k in self.moments}))
                made.modules.append(module)
        return [matrix for matrix in found.values() if self.method.kind != "muon" or self._is_muons(matrix)]

    def _is_muons(self, matrix: Matrix) -> bool:
        """Muon is for the weights inside a network that are matrices: not for biases, the head, and what is tied to an embedding."""
        matrix.with_bias = False
        layers = [module for module in self.model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        embedded = [module.weight for module in self.model.modules() if isinstance(module, nn.Embedding)]
        left_out = [layers[-1].weight, *embedded]
        return min(oracle.matrix_shape(matrix.modules[0])[1:]) > 1 and not any(matrix.modules[0].weight is weight for weight in left_out)

    def _see(self, matrix: Matrix) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
            calls, self._calls = self._calls, None  # the oracle calls the module, too
            if calls is not None:
                a = input_rows(module, args[0].detach())
                calls.append(Call(matrix, a if matrix.with_bias or getattr(module, "bias", None) is None else a[..., :-1], out))
            self._calls = calls

        return hook

    def partner(self, matrix: Matrix) -> bool:
        """Does another matrix share its weight?"""
        return any(other is not matrix and other.modules[0].weight is matrix.modules[0].weight for other in self.matrices)

    # --- passes -----------------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, also_frozen: bool = False) -> tuple[Tensor, list[Call]]:
        self._calls = []
        out = self.model(x)
        calls, self._calls = self._calls, None
        return out, [call for call in calls if also_frozen or not call.matrix.frozen]

    def gathers(self, matrix: Matrix | None = None) -> bool:
        """Spread, every matrix has S steps of its own, before its turn; but an estimate of the Fisher is for all."""
        T, S = self.setting.T, self.setting.S
        own = matrix is not None and self.method.spread and self.method.from_inputs
        begins = self.turn(matrix, starting=False)[1] if own else 0
        return (self.t - begins + S) % T in range(S) or self.starting()

    def starting(self) -> bool:
        return self.warming_up and self.t < self.setting.T

    def turn(self, matrix: Matrix, starting: bool) -> tuple[int, int, int]:
        """The step of this round, and on which ones the matrix's turn begins and ends: the cost of the step is to be that of any other."""
        T, powers = self.setting.T, (0, 1, 2, 4, 8)
        start = max(p for p in powers if p <= self.t) if starting else self.t - self.t % T
        length = min(p for p in (*powers, T) if p > start) - start if starting else T
        longest = max(1, length // 2) if starting else max(1, T // 2, T - self.setting.S + 1)
        if not starting and not self.method.from_inputs:
            length = longest  # the last S steps feed all averages
        costs = [self.cost(other) for other in self.matrices]
        before = sum(costs[: self.matrices.index(matrix)])
        first, end = before * length // sum(costs), -(-(before + self.cost(matrix)) * length // sum(costs))
        alone = isinstance(matrix.modules[0], nn.Embedding) and self.method.from_inputs
        if alone or self.method.kind == "standard":  # a diagonal, an eigenbasis
            return self.t - start, first, first
        return self.t - start, first, max(first, min(end - 1, first + longest - 1))

    def cost(self, matrix: Matrix) -> int:
        G, n, m = oracle.matrix_shape(matrix.modules[0])
        m += len(matrix.parameters) - 1  # the bias
        inputs = m if isinstance(matrix.modules[0], nn.Embedding) else G * m**3
        return inputs + (G * n**3 if "Sigma_E" in self.moments else 0)

    def take_turns(self) -> None:
        for matrix in self.matrices:
            step, first, last = self.turn(matrix, self.starting())
            if not first <= step <= last or not self.known(matrix):
                matrix.making = None
                continue
            if first == step or matrix.making is None:
                matrix.making = self.damping
            if step == last:
                values = {key: average.value for key, average in matrix.averages.items()}
                matrix.inverse, matrix.making = self.invert(matrix, values, matrix.making), None

    def inverts(self) -> bool:
        T = self.setting.T
        return self.t % T == 0 or (self.starting() and self.t in (1, 2, 4, 8, 16))

    def gradients(self, graph: Graph, share: float) -> tuple[dict[Matrix, Tensor], dict[nn.Parameter, Tensor]]:
        """The plain gradient of every matrix in the graph, ``(G, n, m)``, and of every parameter that belongs to none."""
        loss = graph.loss(graph.twin_out, share)
        outputs = [call.b for call in graph.calls]
        found = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True) if outputs else ()
        plain: dict[Matrix, Tensor] = {}
        for call, e in zip(graph.calls, found, strict=True):
            assert e is not None
            G = torch.einsum("girn,girm->gnm", call.errors(e), call.a)
            plain[call.matrix] = plain[call.matrix] + G if call.matrix in plain else G
        covered = {id(p) for p in self.covered}
        others = [p for p in self.model.parameters() if id(p) not in covered and p.requires_grad]
        rest = torch.autograd.grad(loss, others, retain_graph=True, allow_unused=True) if others else ()
        return plain, {p: g for p, g in zip(others, rest, strict=True) if g is not None}

    def differentiate(self, graph: Graph, share: float, pending: dict[Matrix, Pending]) -> dict[nn.Parameter, Tensor]:
        """What a pass returns for every parameter, and what it leaves in ``pending``."""
        plain, answer = self.gradients(graph, share)
        self.fisher_used |= pending is self.landed and self.next_fisher is not None
        for matrix, G in plain.items():
            mine = pending.setdefault(matrix, Pending())
            self._observe(mine, matrix, graph)
            if matrix.inverse is None and mine.inverse is None and self.moments and pending is self.landed and self.partner(matrix):
                mine.inverse = self._first_inverse(matrix, mine)  # two matrices' gradients cannot be told apart later
            inverse = matrix.inverse or mine.inverse  # the natural gradient has none: it is solved for when the step is taken
            mine.raw |= inverse is None or self.method.kind == "muon"
            for p, g in zip(matrix.parameters, matrix.shaped(G if mine.raw else inverse(G)), strict=True):
                answer[p] = answer[p] + g if p in answer else g
        return answer

    def _observe(self, mine: Pending, matrix: Matrix, graph: Graph) -> None:
        if self.method.from_inputs and (self.gathers(matrix) or matrix.inverse is None):
            mine.add("Sigma", self._inputs(matrix, graph.calls))
        for estimate in graph.estimates:
            if not any(estimate is counted for counted in mine.estimates):
                mine.estimates.append(estimate)
                for key, moment in estimate.get(matrix, {}).items():
                    mine.add(key, moment)

    def _inputs(self, matrix: Matrix, calls: list[Call]) -> Moment:
        """Σ of one pass: calls add rows, and see the same datapoints. Muon's is a mean over rows."""
        mine = [call.a for call in calls if call.matrix is matrix]
        if self.method.kind == "muon":
            return Moment(sum(map(product, mine)), sum(a.shape[1] * a.shape[2] for a in mine)) if mine else Moment()
        return Moment(sum(map(product, mine)), max((a.shape[1] for a in mine), default=0)) if mine else Moment()

    def backward(self, graph: Graph, share: float) -> None:
        for p, g in self.differentiate(graph, share, self.landed).items():
            p.grad = g if p.grad is None else p.grad + g

    # --- estimates of the Fisher ----------------------------------------------------------------------------------------------

    def update_curvature(self, graph: Graph) -> None:
        """Estimate the Fisher if it is due, or for layers that have no inverse yet."""
        wanted = [call.matrix for call in graph.calls if self.gathers() or call.matrix.inverse is None]
        if wanted and self.method.kind in ("heuristic", "standard"):
            found = self.estimate(graph.twin_out, graph.y, graph.calls)
            graph.estimates.append({matrix: seen for matrix, seen in found.items() if matrix in wanted})
        if self.method.kind == "natural" and (self.fisher is None or self.t % self.setting.T == 0) and not self.fisher_used:
            self.next_fisher = self.dense_fisher(graph.twin_out, graph.y)

    def dense_fisher(self, out: Tensor, y: Tensor) -> Tensor | None:
        """``1/N Σ_i Σ_k g gᵀ`` with g the gradient of datapoint i's loss for its k-th output error; by blocks, if that is asked for."""
        if not out.isfinite().all():
            return self.next_fisher
        P, trained = sum(p.numel() for p in self.covered), [p for p in self.covered if p.requires_grad]
        F = torch.zeros(P, P, dtype=torch.float64)
        for s in self.errors(out, y):
            for i in range(len(out)):
                alone = torch.zeros_like(s)
                alone[i] = s[i]
                found = torch.autograd.grad(out, trained, alone, retain_graph=True, allow_unused=True)
                of = dict(zip(trained, found, strict=True))
                g = torch.cat([torch.zeros(p.numel()).double() if of.get(p) is None else of[p].flatten() for p in self.covered])
                F += torch.outer(g, g) / len(out)
        if self.method.by_layer:
            owner = torch.cat([torch.full((p.numel(),), self._owner(p)) for p in self.covered])
            F = F * (owner.unsqueeze(0) == owner.unsqueeze(1))
        return F

    def _owner(self, p: nn.Parameter) -> int:
        return next(number for number, matrix in enumerate(self.matrices) if any(p is mine for mine in matrix.parameters))

    def _solve(self) -> None:
        """``(F + λI)⁻¹ g`` in place of g, all layers at once."""
        assert self.fisher is not None
        g = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.covered])
        natural = torch.linalg.solve(self.fisher + self.damping * torch.eye(len(g), dtype=g.dtype), g)
        for p, part in zip(self.covered, natural.split([p.numel() for p in self.covered]), strict=True):
            if p.grad is not None:
                p.grad = part.reshape(p.shape)

    def errors(self, out: Tensor, y: Tensor) -> list[Tensor]:
        """The output errors, one per backward pass."""
        out, fisher = out.detach(), self.method.fisher
        p = out.softmax(-1)
        if fisher == "full":
            roots = torch.stack(oracle.output_errors("categorical", out.flatten(0, -2)))
            return one_position_each(roots, out.shape)
        if fisher == "mc":
            y = torch.multinomial(p.flatten(0, -2), 1, generator=self.generator).reshape(y.shape)
        return [p - nn.functional.one_hot(y, p.shape[-1])]

    def estimate(self, out: Tensor, y: Tensor, calls: list[Call]) -> Estimate:
        if not out.isfinite().all():
            return {}
        found: Estimate = {}
        for matrix in {call.matrix for call in calls}:
            found[matrix] = {"Sigma": self._inputs(matrix, calls), "Sigma_E": Moment()}
        for number, s in enumerate(self.errors(out, y)):
            errors = torch.autograd.grad(out, [call.b for call in calls], s, retain_graph=True, allow_unused=True)
            for call, error in zip(calls, errors, strict=True):
                e = call.errors(error)
                count = e.shape[1] * e.shape[2] if number == 0 else 0  # every call's rows count, once for all passes
                found[call.matrix]["Sigma_E"] += Moment(product(e), count)
        return found

    # --- the step ---------------------------------------------------------------------------------------------------------------

    def invert(self, matrix: Matrix, moments: dict[str, Tensor], damping: float | None = None) -> Callable[[Tensor], Tensor]:
        damping, kind = self.damping if damping is None else damping, self.method.kind

        def inverse(G: Tensor) -> Tensor:
            if kind == "foof":
                return oracle.foof_update(G, moments["Sigma"], damping)
            if kind == "muon":
                return oracle.foof_update(G, moments["Sigma"] / mean_eigenvalue(moments["Sigma"]), damping)
            pairs = zip(G, moments["Sigma"], moments["Sigma_E"], strict=True)
            if kind == "heuristic":
                return torch.stack([oracle.kfac_heuristic(*each, damping)[0] for each in pairs])
            return torch.stack([oracle.kfac_standard(*each, damping) for each in pairs])

        return inverse

    def _first_inverse(self, matrix: Matrix, mine: Pending) -> Callable[[Tensor], Tensor] | None:
        """From the averages with what this step has seen; None if that is nothing."""
        averages = copy.deepcopy(matrix.averages)
        for key, average in averages.items():
            average.fold(mine.seen.get(key, Moment()))
        values = {key: average.value for key, average in averages.items()}
        return None if any(value is None for value in values.values()) else self.invert(matrix, values)

    def known(self, matrix: Matrix) -> bool:
        return bool(self.moments) and all(average.value is not None for average in matrix.averages.values())

    def ready(self) -> dict[Matrix, Pending]:
        """What the step at hand is made of."""
        found = {}
        for matrix in self.matrices:
            mine = self.landed.get(matrix) or self.captured.get(matrix)
            if mine is not None and matrix.modules[0].weight.grad is not None:
                found[matrix] = mine
        return found

    def unseen(self) -> list[str]:
        """Matrices with a gradient, but without any statistics to precondition it with. (Where no row came by, the gradient is zero.)"""
        if not self.moments:
            return [matrix.name for matrix in self.ready()] if self.fisher is None and self.next_fisher is None else []
        return [
            matrix.name
            for matrix, mine in self.ready().items()
            if matrix.inverse is None and self._first_inverse(matrix, mine) is None and bool((matrix.modules[0].weight.grad != 0).any())
        ]

    def step(self) -> None:
        ready = self.ready()
        if ready and not self.moments:
            self.fisher = self.fisher if self.next_fisher is None else self.next_fisher
            self._solve()
        for matrix, mine in ready.items() if self.moments else ():
            if matrix.inverse is None:
                matrix.inverse = self._first_inverse(matrix, mine)
                if matrix.inverse is not None:
                    self._fold(matrix, mine)
            if mine.raw and matrix.inverse is not None and self.method.kind != "muon":
                for p, g in zip(matrix.parameters, matrix.shaped(matrix.inverse(matrix.gradient)), strict=True):
                    p.grad = g
        self._update()
        if ready:
            if self.method.spread:
                self.take_turns()
            elif self.inverts():
                self._refresh()
            for matrix, mine in ready.items():
                if matrix.making is None:
                    self._fold(matrix, mine)
            self.t += 1
            self.next_fisher, self.fisher_used = None, False
        self.landed, self.captured = {}, {}

    def _refresh(self) -> None:
        for matrix in self.matrices:
            matrix.making = None
            if self.known(matrix):
                matrix.inverse = self.invert(matrix, {key: average.value for key, average in matrix.averages.items()})

    def _fold(self, matrix: Matrix, mine: Pending) -> None:
        for key, seen in mine.seen.items():
            matrix.averages[key].fold(seen)
        mine.seen = {}

    def _update(self) -> None:
        s = self.setting
        if self.method.kind == "muon":
            for matrix in self.matrices:
                p = matrix.modules[0].weight
                if p.grad is not None:
                    self.velocity[p] = s.momentum * self.velocity[p] + (1 - s.momentum) * p.grad
                    nesterov = s.momentum * self.velocity[p] + (1 - s.momentum) * p.grad
                    M = oracle.gradient_matrix(matrix.modules[0], nesterov, None)
                    update = orthogonalised(M if matrix.inverse is None else matrix.inverse(M))
                    p.data = (1 - self.lr * s.weight_decay) * p.data - self.lr * matrix.shaped(update)[0]
        elif self.method.over == "own":
            for p in self.covered:
                if p.grad is not None:
                    self.velocity[p] = s.momentum * self.velocity[p] + p.grad
                    p.data = (1 - self.lr * s.weight_decay) * p.data - self.lr * self.velocity[p]
        if self.rest is not None:
            self.rest.step()

    def drop(self) -> None:
        self.landed, self.captured = {}, {}
        if self.fisher_used:  # the one before it is not kept, for want of memory: a new one has to be made
            self.fisher, self.next_fisher, self.fisher_used = None, None, False

    def resume(self) -> None:
        """What a checkpoint does not hold: all that is pending, and a Fisher that is due to be replaced."""
        self.landed, self.captured, self.next_fisher, self.fisher_used = {}, {}, None, False
        if self.t % self.setting.T == 0:
            self.fisher = None

    def initialise(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """From forward passes: the inputs of frozen layers, too. The Fisher has no errors for those."""
        for x, y in batches:
            out, calls = self.forward(x, also_frozen=self.method.from_inputs)
            if self.method.from_inputs:
                seen: Estimate = {matrix: {"Sigma": self._inputs(matrix, calls)} for matrix in {call.matrix for call in calls}}
            else:
                seen = self.estimate(out, y, calls)
            for matrix, moments in seen.items():
                for key, moment in moments.items():
                    matrix.averages[key].fold(moment)
        self._refresh()
        self.warming_up = not all(map(self.known, self.matrices))


def mean_eigenvalue(S: Tensor) -> Tensor:
    return (S.diagonal(dim1=-2, dim2=-1).mean(-1))[..., None, None]


def orthogonalised(M: Tensor) -> Tensor:
    """Muon's update ``√max(1, n/m) U p(…p(s/‖M‖)) Vᵀ``, five times the polynomial p, by the singular values. M ``(G, n, m)``."""
    U, s, V = torch.linalg.svd(M / M.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return max(1.0, M.shape[-2] / M.shape[-1]) ** 0.5 * (U * s.unsqueeze(-2)) @ V


def one_position_each(errors: Tensor, shape: torch.Size) -> list[Tensor]:
    """Errors ``(K, N·R, C)`` of outputs ``(N, ..., C)``: labels of different positions are independent, so each has a pass of its own."""
    found = []
    for error in errors.reshape(len(errors), shape[0], -1, shape[-1]):
        for position in range(error.shape[1]):
            alone = torch.zeros_like(error)
            alone[:, position] = error[:, position]
            found.append(alone.reshape(shape))
    return found


# --- the loop -------------------------------------------------------------------------------------------------------------------


class Mismatch(AssertionError):
    """The optimizer and its twin have parted."""


class Loop:
    """A training loop taken apart. Every method does one thing to both, and then they must agree."""

    def __init__(self, method: str, case: str, s: Setting) -> None:
        self.method, self.case, self.setting = METHODS[method], CASES[case], s
        self.model, self.opt = self._new()
        copied = self._model(0)
        copied.reentrant = None
        self.twin = Twin(copied, self.method, s)
        self.graphs: list[Graph] = []

    def _model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.case.make().double()

    def _new(self, seed: int = 0) -> tuple[nn.Module, Any]:
        model = self._model(seed)
        return model, self.method.optimizer(model, self.setting)

    @property
    def engine(self) -> Any:
        return self.opt if hasattr(self.opt, "initialise") else self.opt.preconditioner

    def _pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        for (name, ours), (_, theirs) in zip(self.model.named_parameters(), self.twin.model.named_parameters(), strict=True):
            yield name, ours, theirs

    # --- what must agree ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for name, ours, theirs in self._pairs():
            agree(f"weight {name}", ours.detach(), theirs.detach())
            agree(f"gradient {name}", ours.grad, theirs.grad)
        found = second_moments(self.opt)
        for matrix in self.twin.matrices:
            for key, average in matrix.averages.items():
                agree(f"{key} of {matrix.name}", dense(found.get(matrix.name, {}).get(key)), average.value)

    # --- passes ---------------------------------------------------------------------------------------------------------------

    def forward(self, seed: int, size: int, poison: bool = False) -> Graph:
        x, y = self.case.batch(seed, size)
        if poison and x.is_floating_point():
            x[0] = float("nan")
        twin_x = x.clone()
        for each in (x, twin_x):
            each.requires_grad_(x.is_floating_point())
        out, (twin_out, calls) = self.model(x), self.twin.forward(twin_x)
        graph = Graph(x, y, out, twin_x, twin_out, calls)
        self.graphs.append(graph)
        return graph

    def update_curvature(self, graph: Graph) -> None:
        self.opt.update_curvature(graph.out, graph.y)
        self.twin.update_curvature(graph)

    def update_curvature_from_inputs(self, seed: int, size: int) -> None:
        """The natural gradient's Fisher from a batch of its own."""
        x, y = self.case.batch(seed, size)
        self.opt.update_curvature(inputs=x, y=y)
        twin_out, calls = self.twin.forward(x)
        self.twin.update_curvature(Graph(x, y, twin_out, x, twin_out, calls))

    def backward(self, graph: Graph, share: float = 1.0, retain: bool = False) -> None:
        graph.loss(graph.out, share).backward(retain_graph=retain)
        self.twin.backward(graph, share)
        if not retain:
            self.graphs.remove(graph)
            with torch.no_grad():
                graph.x.zero_()  # a buffer for the next batch

    def saliency(self, graph: Graph) -> None:
        """The gradient of the inputs, which passes the weights by."""
        if graph.x.requires_grad:
            ours, theirs = torch.autograd.grad(graph.loss(graph.out, 1.0), graph.x, retain_graph=True), graph.loss(graph.twin_out, 1.0)
            agree("gradient of the inputs", ours[0], torch.autograd.grad(theirs, graph.twin_x, retain_graph=True)[0])

    def autograd_grad(self, graph: Graph, assign: bool = False) -> None:
        """Gradients that are looked at and thrown away, or assigned by hand."""
        if assign:
            self.zero_grad()
        params = [p for p in self.model.parameters() if p.requires_grad]
        ours = torch.autograd.grad(graph.loss(graph.out, 1.0), params, retain_graph=True, allow_unused=True)
        theirs = self.twin.differentiate(graph, 1.0, self.twin.captured)
        answer = {id(p): g for p, g in zip(params, ours, strict=True)}
        for name, mine, other in self._pairs():
            agree(f"autograd.grad of {name}", answer.get(id(mine)), theirs.get(other))
            if assign:
                mine.grad, other.grad = answer.get(id(mine)), theirs.get(other)

    @property
    def may_assign(self) -> bool:
        """On a first step the plain gradient of a weight with two matrices (tied) is a sum that nobody can take apart."""
        return all(matrix.inverse is not None or not self.twin.partner(matrix) for matrix in self.twin.matrices)

    def evaluate(self, seed: int, size: int) -> None:
        x, _ = self.case.batch(seed, size)
        with torch.no_grad():
            agree("outputs", self.model(x), self.twin.model(x))

    # --- gradients ------------------------------------------------------------------------------------------------------------

    def zero_grad(self, whose: str = "optimizer", to_none: bool = True) -> None:
        (self.opt if whose == "optimizer" else self.model).zero_grad(set_to_none=to_none)
        self.twin.model.zero_grad(set_to_none=to_none)
        self.twin.drop()

    def forget(self, which: int) -> None:
        """The gradient of one layer alone is thrown away."""
        matrix = self.twin.matrices[which % len(self.twin.matrices)]
        mine = {id(p) for p in matrix.parameters}
        for _, ours, theirs in self._pairs():
            if id(theirs) in mine:
                ours.grad = theirs.grad = None
        for other in self.twin.matrices:
            if other.modules[0].weight is matrix.modules[0].weight and self.twin.landed.pop(other, None) and not self.twin.landed:
                self.twin.drop()  # not one gradient of a backward pass is left: as after zero_grad()

    def clip(self, norm: float) -> None:
        """Not where a layer still has the gradient of an earlier step: once changed, that counts as assigned by hand, from elsewhere."""
        ready = self.twin.ready()
        if any(matrix not in ready and matrix.modules[0].weight.grad is not None for matrix in self.twin.matrices):
            return
        for model in (self.model, self.twin.model):
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    # --- steps ----------------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        unseen, refusal = self.twin.unseen(), None
        if self.method.kind == "natural" and self.twin.fisher is None and not self.twin.ready():
            return  # with zeroed gradients and no Fisher: refused or not, it does not matter
        try:
            self.opt.step()
        except (ValueError, RuntimeError) as error:
            refusal = error
        if unseen and refusal is None:
            raise Mismatch(f"a step without statistics of {', '.join(unseen)} was taken.")
        if refusal is not None and not unseen:
            raise Mismatch(f"the step was refused: {refusal}") from refusal
        if refusal is not None:
            return  # and nothing has changed
        self.twin.step()
        self.graphs = []  # their weights have changed

    def train_on_nan(self, seed: int) -> None:
        """The step is taken on a batch that is partly NaN, once its gradients have been mended. (On a first step zeros are a mask.)"""
        started = all(matrix.inverse is not None for matrix in self.twin.matrices)
        if self.method.kind not in ("natural", "muon") and started:
            self.zero_grad()
            graph = self.forward(seed, 2, poison=True)
            self.update_curvature(graph)
            self.backward(graph)
            for p in (*self.model.parameters(), *self.twin.model.parameters()):
                if p.grad is not None:
                    p.grad.nan_to_num_(0.0)
            self.step()

    def step_with_closure(self, seed: int, size: int) -> None:
        """The closure zeroes gradients, calls the model and goes backward."""

        def closure() -> Tensor:
            self.zero_grad()
            graph = self.forward(seed, size)
            self.update_curvature(graph)
            self.backward(graph)
            return graph.loss(graph.out.detach(), 1.0)

        self.opt.step(closure)
        self.twin.step()
        self.graphs = []

    # --- settings -------------------------------------------------------------------------------------------------------------

    def freeze(self, name: str, frozen: bool) -> None:
        for model in (self.model, self.twin.model):
            for p in model.get_submodule(name).parameters():
                p.requires_grad_(not frozen)
                p.grad = None
        for matrix in self.twin.matrices:
            if matrix.name == name:
                self.twin.landed.pop(matrix, None)
                self.twin.captured.pop(matrix, None)
        self.graphs = []

    def set_lr(self, factor: float) -> None:
        for group in self.opt.param_groups:
            group["lr"] *= factor
        if self.twin.rest is not None:
            for group in self.twin.rest.param_groups:
                group["lr"] *= factor
        if self.method.over == "own":
            self.twin.lr *= factor

    def set_damping(self, damping: float) -> None:
        for group in self.opt.param_groups:
            if "damping" in group:
                group["damping"] = self.twin.damping = damping

    def checkpoint(self) -> None:
        """Go on with new objects, from what a file holds."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict()}, file)
        file.seek(0)
        state, frozen = torch.load(file, weights_only=True), [p.requires_grad for p in self.model.parameters()]
        self.model, self.opt = self._new(seed=99)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        for p, requires_grad in zip(self.model.parameters(), frozen, strict=True):
            p.requires_grad_(requires_grad)
        self.twin.model.zero_grad()
        self.twin.resume()
        self.graphs = []

    def initialise(self, seeds: list[int], size: int) -> None:
        batches = [self.case.batch(seed, size) for seed in seeds]
        self.engine.initialise(batches)
        self.twin.initialise(batches)


def dense(moment: Tensor | None) -> Tensor | None:
    """As the twin keeps it, ``(G, m, m)``."""
    if moment is None:
        return None
    return moment.diag().unsqueeze(0) if moment.dim() == 1 else moment if moment.dim() == 3 else moment.unsqueeze(0)


def agree(what: str, ours: Tensor | None, theirs: Tensor | None) -> None:
    if ours is None or theirs is None:
        if ours is not theirs:
            raise Mismatch(f"{what}: there is {'none' if ours is None else 'one'}, the twin has {'none' if theirs is None else 'one'}.")
        return
    if torch.equal(ours, theirs):
        return
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    error = (ours - theirs).abs().masked_fill(same, 0).nan_to_num(math.inf).max().item() if ours.numel() else 0.0
    scale = max(1.0, theirs[theirs.isfinite()].abs().max().item() if theirs.isfinite().any() else 1.0)
    if not error <= TOLERANCE * scale:
        raise Mismatch(f"{what}: differs by {error:.3g} at a scale of {scale:.3g}.")


# --- loops drawn by hypothesis --------------------------------------------------------------------------------------------------

SEEDS, SIZES = st.integers(0, 99), st.integers(1, 4)
WHICH, WHOSE = st.integers(0, 2), st.sampled_from(["optimizer", "model"])
BETWEEN = ["nothing", "nothing", "another graph's gradient", "another graph's estimate", "evaluate", "initialise"]  # forward and backward
BEFORE_STEP = ["nothing", *BETWEEN, "clip", "forget", "freeze", "lr", "damping", "checkpoint"]
MEANWHILE = [
    "evaluate", "initialise", "freeze", "thaw", "lr", "damping", "checkpoint", "step with a closure", "train on NaN",
    "a Fisher from inputs",
]  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One step of training, taken or not."""

    seed: int
    size: int
    parts: int  # batches accumulated
    estimate: bool  # is update_curvature called?
    zero: str  # gradients are zeroed first, late (between the first forward and backward pass), or last
    between: str  # the first forward and backward pass, something else happens
    before_step: str  # likewise
    end: str  # a step; or it is skipped, after the backward passes, or at once
    poison: bool  # if it is skipped: was that for a NaN?
    number: int  # of what happens in between


STEPS = st.lists(
    st.builds(
        Plan, SEEDS, SIZES, parts=st.integers(1, 2), estimate=st.sampled_from([True, True, True, False]),
        zero=st.sampled_from(["first", "late", "last"]), between=st.sampled_from(BETWEEN), before_step=st.sampled_from(BEFORE_STEP),
        end=st.sampled_from(["step", "step", "step", "skip", "skip at once"]), poison=st.booleans(), number=SEEDS,
    ),
    min_size=1, max_size=3,
)  # fmt: skip


def machine_of(method: str, cases: list[str] | None = None) -> type[RuleBasedStateMachine]:
    """Loops with one optimizer, over its models and settings."""

    class Machine(RuleBasedStateMachine):
        loop: Loop

        @initialize(
            case=st.sampled_from(cases or METHODS[method].cases),
            schedule=st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 2), (4, 4)]),
            ema=st.sampled_from([0.5, 0.9, 0.0]),
            momentum=st.sampled_from([0.0, 0.9]),
            weight_decay=st.sampled_from([0.0, 0.1]),
            whose=WHOSE,
        )
        def start(self, case: str, schedule: tuple[int, int], ema: float, momentum: float, weight_decay: float, whose: str) -> None:
            self.whose = whose  # zero_grad() is usually called
            self.loop = Loop(method, case, Setting(*schedule, ema=ema, momentum=momentum, weight_decay=weight_decay))

        def graph(self, which: int) -> Graph:
            return self.loop.graphs[which % len(self.loop.graphs)]

        def has_graph(self) -> bool:
            return bool(self.loop.graphs)

        # Whole steps, as people write them, with something in between. Hypothesis leaves out some rules in every loop: so there are three.

        @rule(steps=STEPS)
        def train(self, steps: list[Plan]) -> None:
            self.take(steps)

        @rule(steps=STEPS)
        def train_on(self, steps: list[Plan]) -> None:
            self.take(steps)

        @rule(steps=STEPS)
        def train_further(self, steps: list[Plan]) -> None:
            self.take(steps)

        def take(self, steps: list[Plan]) -> None:
            loop = self.loop
            for plan in steps:
                if plan.zero == "first":
                    loop.zero_grad(self.whose)
                skipped = plan.end != "step"
                graphs = [loop.forward(plan.seed + part, plan.size + part, plan.poison and skipped) for part in range(plan.parts)]
                for part, graph in enumerate(graphs):
                    if plan.estimate:
                        loop.update_curvature(graph)
                    if plan.zero == "late" and part == 0:
                        loop.zero_grad(self.whose)
                    if part == 0:
                        self.intrude(plan.between, plan.number)
                    if plan.end == "skip at once":
                        loop.graphs.remove(graph)
                    else:
                        loop.backward(graph, 1 / plan.parts)
                if not skipped:
                    self.intrude(plan.before_step, plan.number)
                    loop.step()
                if plan.zero == "last" or (skipped and plan.poison):
                    loop.zero_grad(self.whose)
                loop.check()

        def intrude(self, what: str, number: int) -> None:
            """Something else that happens during training. What is changed of the model must wait for the end of a backward pass."""
            loop, layers = self.loop, self.loop.case.freezable
            if what in ("another graph's gradient", "another graph's estimate") and not loop.case.graph_only:
                graph = loop.forward(number, 2)
                (loop.autograd_grad if what.endswith("gradient") else loop.update_curvature)(graph)
                loop.graphs.remove(graph)
            elif what == "evaluate":
                loop.evaluate(number, 3)
            elif what == "initialise" and METHODS[method].kind != "natural":
                loop.initialise([number], 3)
            elif what == "clip":
                loop.clip(0.1)
            elif what == "forget":
                loop.forget(number)
            elif what in ("freeze", "thaw"):
                loop.freeze(layers[number % len(layers)], what == "freeze")
            elif what == "lr":
                loop.set_lr((0.5, 2.0)[number % 2])
            elif what == "damping":
                loop.set_damping((0.2, 0.5, 1.0)[number % 3])
            elif what == "checkpoint":
                loop.checkpoint()
            elif what == "step with a closure":
                loop.step_with_closure(number, 3)
            elif what == "train on NaN":
                loop.train_on_nan(number)
            elif what == "a Fisher from inputs" and METHODS[method].kind == "natural":
                loop.update_curvature_from_inputs(number, 3)
            loop.check()

        # Their parts, in any order.

        @precondition(lambda self: len(self.loop.graphs) < 3)
        @rule(seed=SEEDS, size=SIZES, estimate=st.booleans())
        def forward(self, seed: int, size: int, estimate: bool) -> None:
            graph = self.loop.forward(seed, size)
            if estimate:
                self.loop.update_curvature(graph)
            self.loop.check()

        @precondition(has_graph)
        @rule(which=WHICH)
        def update_curvature(self, which: int) -> None:
            self.loop.update_curvature(self.graph(which))
            self.loop.check()

        @precondition(has_graph)
        @rule(which=WHICH, share=st.sampled_from([1.0, 0.5]), retain=st.booleans())
        def backward(self, which: int, share: float, retain: bool) -> None:
            self.loop.backward(self.graph(which), share, retain)
            self.loop.check()

        @precondition(lambda self: self.loop.graphs and not self.loop.case.graph_only)
        @rule(which=WHICH, what=st.sampled_from(["looked at", "assigned", "of the inputs"]))
        def autograd_grad(self, which: int, what: str) -> None:
            if what == "of the inputs":
                self.loop.saliency(self.graph(which))
            else:
                self.loop.autograd_grad(self.graph(which), what == "assigned" and self.loop.may_assign)
            self.loop.check()

        @rule()
        def step(self) -> None:
            self.loop.step()
            self.loop.check()

        @rule(whose=WHOSE, to_none=st.booleans())
        def zero_grad(self, whose: str, to_none: bool) -> None:
            self.loop.zero_grad(whose, to_none or whose == "model")
            self.loop.check()

        @precondition(lambda self: self.loop.twin.landed)
        @rule(which=WHICH, norm=st.sampled_from([None, 0.1, 1.0]))
        def change_gradients(self, which: int, norm: float | None) -> None:
            """They are clipped, or those of one layer thrown away."""
            if norm is None:
                self.loop.forget(which)
            else:
                self.loop.clip(norm)
            self.loop.check()

        # What else happens during training.

        @rule(what=st.sampled_from(MEANWHILE), number=SEEDS)
        def meanwhile(self, what: str, number: int) -> None:
            self.intrude(what, number)

    Machine.__name__ = Machine.__qualname__ = f"{method} loops"
    return Machine


def run(method: str, loops: int, cases: list[str] | None = None, **options: Any) -> None:
    """Draw so many loops of up to 40 rules; raises the shortest one on which the optimizer and its twin part."""
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    chosen = settings(
        max_examples=loops, stateful_step_count=40, deadline=None, database=None, suppress_health_check=quiet,
        **{"derandomize": True, "phases": [Phase.generate, Phase.shrink], **options},
    )  # fmt: skip
    with warnings.catch_warnings(), mock.patch("foof.sweep.PANEL", 1):
        warnings.simplefilter("ignore")
        run_state_machine_as_test(machine_of(method, cases), settings=chosen)


def main() -> int:
    """``python tests/machine.py LOOPS [METHOD ...]``: so many loops, shared out among the methods."""
    torch.set_num_threads(1)
    loops, methods = int(sys.argv[1]), sys.argv[2:] or list(METHODS)
    failed = 0
    for method in methods:
        share = math.ceil(loops / len(methods))
        try:
            run(method, share, derandomize=False)
            print(f"{method}: {share} loops without a mismatch", flush=True)
        except Exception as error:  # the other methods are still to be run
            failed += 1
            for each in getattr(error, "exceptions", [error]):
                print(f"{method}: {type(each).__name__}: {each}", *getattr(each, "__notes__", []), sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
