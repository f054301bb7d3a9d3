"""How far a step would move the outputs of each layer, and what to multiply its updates by so that it moves them as far as it may."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from foof import distributed
from foof._torch import foreach_norm
from foof.kronecker import in_blocks
from foof.optim.base import NeuronOptimizer
from foof.optim.block import Block
from foof.optim.engine import Engine
from foof.optim.rules import at_most, descend_by, paced, reach_powers, relative_change
from foof.statistics import wide

MEMORY = 0.999  # decay of the mean square of changes so far, as Adam's β₂
TINY = torch.finfo(torch.float64).tiny
State = MutableMapping[Tensor, dict[str, Any]]  # of an optimizer, by parameter


class Bound(Protocol):
    """Says what a step is multiplied by."""

    def factors(self, state: State) -> dict[Tensor, Tensor]:
        """For each parameter, where any has a bound."""


class BoundedSteps(NeuronOptimizer):
    """Steps ``f · lr · U`` with a factor f for each parameter of a group that has a ``max_change``; those of other groups are plain."""

    _bound: Bound | None = None
    _factor_of: Mapping[Tensor, Tensor] = {}

    def _update(self, group: dict[str, Any]) -> None:
        if self._bound is not None and group is self.param_groups[0]:
            self._factor_of = self._bound.factors(self.state)
        params = [p for p in group["params"] if p.grad is not None]
        if group["max_change"] is None or not params:
            super()._update(group)
            return
        buffers = [distributed.local(self._momentum(p)) for p in params] if group["momentum"] else []
        sign, factors = -1.0 if self.maximize else 1.0, [self._factor_of[p] for p in params]
        gradients = [distributed.local(p.grad) for p in params]
        for i, (g, factor) in enumerate(zip(gradients, factors, strict=True)):
            if wide(g.dtype) != g.dtype:  # 1/ρ may be beyond half precision, the step is not
                gradients[i], factors[i] = (g.to(factor.dtype) * factor).to(g.dtype), torch.ones_like(factor, dtype=g.dtype)
            elif factor.dtype != g.dtype:
                factors[i] = factor.to(g.dtype)
        params = [distributed.local(p) for p in params]
        descend_by(params, gradients, buffers, factors, sign * group["lr"], group["momentum"], sign * group["weight_decay"])

    def _latest_changes(self) -> tuple[dict[str, str], str]:
        return self._bound.latest() if isinstance(self._bound, Changes) else super()._latest_changes()


class Changes:
    """By how much of their size the outputs of each block would move: ``ρ = reach · ‖U‖``.

    The reach ``ρ(U)/‖U‖`` is measured with each new inverse: it follows Σ, while a norm follows the step. All that is known is in vectors
    with one entry for each block, so that a step costs a few operations, and not a few for each layer. The entries are views in the
    optimizer's state, which checkpoints carry.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocks: list[Block] = []  # that had a bound in the latest step
        self.norms = self.rho = torch.zeros(0)  # ‖U‖ and ρ of each of these
        self._latest = torch.zeros(0)  # what their updates were multiplied by
        self._counts: list[float] = []  # steps of each
        self._packed: dict[str, tuple[list[Tensor], Tensor]] = {}  # entries in the state, and the vector that they are views of

    def factors(self, state: State) -> dict[Tensor, Tensor]:
        """What to multiply the update of each parameter by, where any has a bound; and a word where a gradient is not finite."""
        blocks = [block for block in self.engine.blocks if block.weight.grad is not None]
        bounded = {block.weight: i for i, block in enumerate(blocks) if block.options.get("max_change") is not None}  # last of tied ones
        at_all = self.engine.schedule.inverts()  # is it looked at even where nothing is bounded?
        if not (bounded or (at_all and blocks)):
            return {}
        norms = norms_of(blocks)
        if at_all or norms.device.type == "cpu":  # a look at the device costs nothing, or is taken now and then
            self._warn_of_infinity(blocks, norms)
        if not bounded:
            return {}
        if len(bounded) < len(blocks):
            norms = norms[list(bounded.values())]
        self.blocks = [blocks[i] for i in bounded.values()]
        self.norms = norms
        self.rho = norms * self._reaches(state)
        self._latest = self._factors(state)
        of_weight = dict(zip(bounded, self._latest.unbind(), strict=True))
        if len(of_weight) < len(blocks):  # a bias may have a bound where its weight has none
            of_weight = {block.weight: of_weight.get(block.weight, torch.ones_like(norms[0])) for block in blocks}
        return {p: of_weight[block.weight] for block in blocks for p in block.parameters}

    def _reaches(self, state: State) -> Tensor:
        """``ρ(U)/‖U‖``, measured anew where the inverses are; 1 where no row has come yet, and so no gradient."""
        due = [block for block in self.blocks if "reach" not in state[block.weight] or self.engine.fresh(block)]
        if due:
            powers, masses = [powers_of(block) for block in due], [block.moments["Sigma"].mass for block in due]
            if (group := distributed.group_of(self.engine.process_group)) is not None:  # Σ of all ranks, in which the powers are linear
                powers, masses, _ = distributed.weighted_mean(powers, masses, [], group)
            for block, of_block, mass in zip(due, powers, masses, strict=True):
                if mass:
                    state[block.weight]["reach"] = relative_change(*of_block.unbind())
        return self._vector(state, "reach", 1.0)

    def _factors(self, state: State) -> Tensor:
        """By lr·U of each block. The largest sum that momentum can make of bounded updates is theirs over 1 - μ: so it is bounded."""
        options, rho = [block.options for block in self.blocks], self.rho
        fresh = like([1 - group["momentum"] for group in options], rho)
        if options[0].get("paced"):
            factors = paced(rho, self._usual(state))
            return factors * fresh
        tau = fresh * like([group["max_change"] / whole_lr(group) for group in options], rho)
        return at_most(tau, rho)

    def _usual(self, state: State) -> Tensor:
        """``ρ̄``, the root of the normalised moving average of ρ²."""
        rho = self.rho
        change, steps = self._vector(state, "change", 0.0), self._vector(state, "step", 0.0)
        change.lerp_(rho.square(), 1 - MEMORY)
        steps.add_(1)
        self._counts = [count + 1 for count in self._counts]
        return (change / like([1 - MEMORY**count for count in self._counts], change)).sqrt_()

    def _vector(self, state: State, key: str, default: float) -> Tensor:
        """What the state says of each block, as one vector that it has views of, in the norms' precision."""
        entries, vector = self._packed.get(key, ([], self.norms))
        found = [state[block.weight].get(key) for block in self.blocks]
        here = (vector.dtype, vector.device) == (self.norms.dtype, self.norms.device)
        if not here or len(found) != len(entries) or not all(map(operator.is_, found, entries)):
            vector = torch.stack([torch.full_like(self.norms[0], default) if entry is None else entry.to(self.norms) for entry in found])
            entries = [vector[i] for i in range(len(found))]
            for block, before, entry in zip(self.blocks, found, entries, strict=True):
                if before is not None or key != "reach":  # one that could not be measured yet is not known
                    state[block.weight][key] = entry
            self._packed[key] = entries, vector
            if key == "step":
                self._counts = vector.tolist()
        return vector

    def latest(self) -> tuple[dict[str, str], str]:
        """By how much the latest step moved the outputs of each layer (with momentum: would, were the gradient to stay), and what another
        ``max_change`` would change."""
        if not self.blocks:
            return {}, ""
        names, said = {id(p): name for name, p in self.engine.model.named_parameters()}, dict[str, str]()
        over = list[float]()  # how far each would have gone, over its bound
        for block, rho, factor in zip(self.blocks, self.rho.tolist(), self._latest.tolist(), strict=True):
            group = block.options
            free, moved = (group["lr"] * x * rho / (1 - group["momentum"]) for x in (1.0, factor))
            bound = group["lr"] if group.get("paced") else group["max_change"] * group["lr"] / whole_lr(group)
            over.append((moved if group.get("paced") else free) / max(bound, TINY))
            said[names[id(block.weight)]] = f"{moved:.2%}" + (f", bounded: {free:.2%}" if free > bound and not group.get("paced") else "")
        total, options = len(over), self.blocks[0].options
        if options.get("paced"):
            full = sum(x > 1 - 1e-6 for x in over)
            return said, (
                f"The latest step moved the outputs of {full} of {total} layers by {options['lr']:.2%} of their size, and of the others by "
                "less, as their errors have become smaller than half of what they used to be. Twice the max_change moves all twice as far."
            )
        at = {scale: sum(x > scale for x in over) for scale in (0.5, 1.0, 2.0)}
        return said, (
            f"max_change bounded {at[1.0]} of {total} layers in the latest step; half of it would have bounded {at[0.5]}, twice of it "
            f"{at[2.0]}."
        )

    def _warn_of_infinity(self, blocks: list[Block], norms: Tensor) -> None:
        """Say which layers have lost their gradient."""
        lost = [block.name for block, norm in zip(blocks, norms.tolist(), strict=True) if not math.isfinite(norm)]
        if lost:
            every = "every layer" if len(lost) == len(self.engine.blocks) else ", ".join(lost[:5])
            paced = blocks[0].options.get("paced")
            remedy = "a smaller max_change" if paced else "a smaller lr, a larger damping, or no lr at all (FOOF(model))"
            self.engine.warn(
                f"step {self.engine.schedule.t + 1}: the neuron gradient of {every} is not finite, and after this step the weights are "
                f"not, either. If the loss was finite, go back to a checkpoint and try {remedy}; if it was not, look for what made it so.",
                once="infinity",
            )


def whole_lr(group: Mapping[str, Any]) -> float:
    """The learning rate at which ``max_change`` bounds a step: the initial one of a scheduler, if that has lowered it.

    So a decayed step is smaller also where it is bounded, and momentum that has been gathered in a warm-up is not too large after it.
    """
    return max(group["lr"], group.get("initial_lr", 0.0), TINY)


def norms_of(blocks: Sequence[Block]) -> Tensor:
    """``‖U‖`` of each block, over the gradients of its weight and its bias: ``(B,)``."""
    gradients = [[distributed.full(g) for g in block.gradients()] for block in blocks]
    flat = [g for of_block in gradients for g in of_block]
    norms = torch.stack(foreach_norm(flat, dtype=functools.reduce(torch.promote_types, {g.dtype for g in flat}, torch.float32)))
    if len(norms) == len(blocks) * len(gradients[0]):  # all have a bias, or none has
        return norms.view(len(blocks), -1).norm(dim=1)
    owner = torch.tensor([i for i, of_block in enumerate(gradients) for _ in of_block], device=norms.device)
    return norms.new_zeros(len(blocks)).index_add_(0, owner, norms.square()).sqrt_()


def powers_of(block: Block) -> Tensor:
    """`foof.optim.rules.reach_powers` of a block's gradient; zeros where this rank has seen no row yet."""
    Sigma, layer, U = block.moments["Sigma"].value, block.layer, block.raw()
    bias = None if layer.bias is None else distributed.full(layer.bias)
    W = layer.join(distributed.full(block.weight), bias)  # gathered on all ranks alike
    if Sigma is None:
        return torch.zeros(3, dtype=wide(U.dtype), device=U.device)
    U = U.to(Sigma.dtype)
    if Sigma.dim() > U.dim():  # diagonal in blocks of inputs
        return reach_powers(in_blocks(U, len(Sigma)), Sigma, in_blocks(W, len(Sigma)), inputs=layer.m)
    return reach_powers(U, Sigma, W)


def like(values: list[float], vector: Tensor) -> float | Tensor:
    """One number where all are the same, which no device waits for; else a vector like this one."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=vector.dtype, device=vector.device)
