"""Muon and AdamW with and without neurons, from ``foof.optim.rules``: one optimizer, so that a comparison differs in one thing only.

A forward pre-hook per layer accumulates ``Sigma``, the mean over tokens of ``a aᵀ``, on `feeds` of every T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foof.linalg import eigh
from foof.optim import rules


class InputMoments:
    """The moving average ``Σ ← m Σ + (1 − m) · mean over tokens of a aᵀ`` of a linear layer's inputs, while `on`; normalised."""

    def __init__(self, layer: nn.Linear, ema: float, stride: int) -> None:
        self.ema, self.stride, self.on, self.weight = ema, stride, False, 0.0
        self.raw = torch.zeros(layer.in_features, layer.in_features)
        layer.register_forward_pre_hook(self._see)

    def _see(self, layer: nn.Module, arguments: tuple[Tensor]) -> None:
        if self.on and torch.is_grad_enabled():
            a = arguments[0].detach().flatten(0, -2)[:: self.stride]
            self.raw.mul_(self.ema).addmm_(a.mT, a, alpha=(1 - self.ema) / len(a))
            self.weight = self.ema * self.weight + 1 - self.ema

    @property
    def Sigma(self) -> Tensor:
        return self.raw / self.weight


class MatrixOptimizer(torch.optim.Optimizer):
    """Muon's or AdamW's rule for the weights of linear layers, on neurons for those of them that `on_neurons` names.

    stacked: how many matrices stand one above the other in the weights of layers of these names, as q, k and v do.
    square: of Σ only diagonal blocks no wider than the layer has outputs.
    where "momentum": the inverse stands between momentum and orthogonalisation; "gradient": before momentum.
    Refreshes are spread: layer k of K is due k T / K steps after the first, so that no step pays for all of them.
    """

    def __init__(self, layers: dict[str, nn.Linear], rule: str, on_neurons: Callable[[str], bool], lr: float, weight_decay: float = 0.01,
                 ridge: float = 0.1, power: float = -1.0, T: int = 16, feeds: int = 2, ema: float = 0.9, stride: int = 1,
                 where: str = "momentum", square: bool = False, momentum: float = 0.95,
                 stacked: Mapping[str, int] | None = None) -> None:  # fmt: skip
        super().__init__([layer.weight for layer in layers.values()], {"lr": lr, "weight_decay": weight_decay})
        self.rule, self.ridge, self.power, self.T, self.feeds, self.where, self.square = rule, ridge, power, T, feeds, where, square
        self.momentum = momentum
        self.stacked = {layer.weight: (stacked or {}).get(name.rpartition(".")[2], 1) for name, layer in layers.items()}
        chosen = [layer for name, layer in layers.items() if on_neurons(name)]
        self.moments = {layer.weight: InputMoments(layer, ema, stride) for layer in chosen}
        self.offset = {layer.weight: k * T // len(chosen) for k, layer in enumerate(chosen)}
        self.turned: dict[Tensor, Tensor] = {}  # the inverse of a weight's Σ, or its eigenbasis
        self.t = 0
        self._switch()

    def _due(self, p: Tensor) -> bool:
        return self.t == 0 or (self.t - self.offset[p]) % self.T == 0

    def _switch(self) -> None:
        """Statistics are fed on the last `feeds` steps up to the next refresh."""
        for p, moments in self.moments.items():
            moments.on = self.t == 0 or (self.offset[p] - self.t) % self.T < self.feeds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.moments and self._due(p):
                    self._refresh(p)
                rules.descend([p], [self._update(p)], [], group["lr"], 0.0, group["weight_decay"])
        self.t += 1
        self._switch()

    def _refresh(self, p: Tensor) -> None:
        Sigma = self.moments[p].Sigma
        if self.square:
            Sigma = torch.block_diag(*(Sigma[i : i + len(p), i : i + len(p)] for i in range(0, len(Sigma), len(p))))
        if self.rule == "muon":
            self.turned[p] = rules.relative_inverse(Sigma, self.ridge, self.power)
            return
        basis = eigh(Sigma)[1]
        if p in self.turned:
            rules.carry_moments(self.state[p]["first"], self.state[p]["second"], self.turned[p], basis)
        self.turned[p] = basis

    def _update(self, p: Tensor) -> Tensor:
        state, turned = self.state[p], self.turned.get(p)
        if self.rule == "muon":
            buffer = state.setdefault("buffer", torch.zeros_like(p))
            if turned is not None and self.where == "gradient":
                return rules.muon_update(buffer, p.grad @ turned, momentum=self.momentum, stacked=self.stacked[p])
            return rules.muon_update(buffer, p.grad, turned, self.momentum, stacked=self.stacked[p])
        first, second = (state.setdefault(name, torch.zeros_like(p)) for name in ("first", "second"))
        return rules.adam_in_basis(first, second, p.grad, turned, self.t + 1)


def linears(model: nn.Module, inside: Iterable[str]) -> dict[str, nn.Linear]:
    """The linear layers whose names begin with one of these."""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name.startswith(tuple(inside))}
