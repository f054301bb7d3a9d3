"""How far a step would move the outputs of each layer, and what to multiply its updates by so that it moves them as far as it may."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foof import distributed
from foof._torch import foreach_norm
from foof.kronecker import in_blocks
from foof.optim.block import Block
from foof.optim.engine import Engine
from foof.optim.rules import paced, reach
from foof.statistics import wide

MEMORY = 0.999  # decay of the mean square of changes so far, as Adam's β₂
TINY = torch.finfo(torch.float64).tiny
State = MutableMapping[Tensor, dict[str, Any]]  # of an optimizer, by parameter


class Changes:
    """By how much of their size the outputs of each block would move: ``ρ = reach · ‖U‖``.

    The reach ``ρ(U)/‖U‖`` is measured with each new inverse: it follows Σ, while a norm follows the step. All that is known is in vectors
    with one entry for each block, so that a step costs a few operations, and not a few for each layer. The entries are views in the
    optimizer's state, which checkpoints carry.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.blocks: list[Block] = []  # that had a bound in the latest step
        self.rho = torch.zeros(0)  # of each of these
        self._packed: dict[str, tuple[list[Tensor], Tensor]] = {}  # entries in the state, and the vector that they are views of

    def factors(self, state: State) -> dict[Tensor, Tensor]:
        """For each parameter of a block with a bound what to multiply its update by; and a word where a gradient is not finite."""
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
        self.rho = norms * self._reaches(state).to(norms)
        factors = self._factors(state).unbind()
        return {p: factor for block, factor in zip(self.blocks, factors, strict=True) for p in block.parameters}

    def _reaches(self, state: State) -> Tensor:
        """``ρ(U)/‖U‖``, measured anew where the inverses are; 1 where no row has come yet, and so no gradient."""
        fresh = self.engine.schedule.fresh()
        for block in self.blocks:
            if (fresh or "reach" not in state[block.weight]) and block.moments["Sigma"].value is not None:
                state[block.weight]["reach"] = measured_reach(block)
        return self._vector(state, "reach", torch.ones(()))

    def _factors(self, state: State) -> Tensor:
        """By lr·U of each block. The largest sum that momentum can make of bounded updates is theirs over 1 - μ: so it is bounded."""
        options, rho = [block.options for block in self.blocks], self.rho
        fresh = like([1 - group["momentum"] for group in options], rho)
        if options[0].get("paced"):
            return fresh * paced(rho, self._usual(state))
        tau = fresh * like([group["max_change"] / max(group["lr"], TINY) for group in options], rho)
        return torch.where(rho <= tau, torch.ones_like(rho), tau / rho)  # NaN stays NaN

    def _usual(self, state: State) -> Tensor:
        """``ρ̄``, the root of the normalised moving average of ρ²."""
        change, steps = (self._vector(state, key, torch.zeros_like(self.rho[0])) for key in ("change", "step"))
        change.lerp_(self.rho.square().to(change), 1 - MEMORY)
        steps.add_(1)
        mass = -torch.expm1(steps * math.log(MEMORY))  # 1 - mᵗ
        return (change / mass.to(change)).sqrt().to(self.rho)

    def _vector(self, state: State, key: str, default: Tensor) -> Tensor:
        """What the state says of each block, as one vector that it has views of."""
        entries, vector = self._packed.get(key, ([], default))
        found = [state[block.weight].get(key, default) for block in self.blocks]
        if len(found) != len(entries) or any(one is not other for one, other in zip(found, entries, strict=True)):
            vector = torch.stack([entry.to(self.rho.device if key == "step" else found[0]) for entry in found])
            entries = [vector[i] for i in range(len(found))]
            for block, entry in zip(self.blocks, entries, strict=True):
                state[block.weight][key] = entry
            self._packed[key] = entries, vector
        return vector

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


def norms_of(blocks: Sequence[Block]) -> Tensor:
    """``‖U‖`` of each block, over the gradients of its weight and its bias: ``(B,)``."""
    gradients = [[distributed.full(g) for g in block.gradients()] for block in blocks]
    flat = [g.to(wide(g.dtype)) for of_block in gradients for g in of_block]
    squares = torch.stack([norm.to(flat[0].device) for norm in foreach_norm(flat)]).square()
    if len(squares) == len(blocks):
        return squares.sqrt()
    owner = torch.tensor([i for i, of_block in enumerate(gradients) for _ in of_block], device=squares.device)
    return squares.new_zeros(len(blocks)).index_add_(0, owner, squares).sqrt()


def measured_reach(block: Block) -> Tensor:
    """`foof.optim.rules.reach` of a block's gradient."""
    Sigma, layer = block.moments["Sigma"].value, block.layer
    assert Sigma is not None
    U, bias = block.raw().to(Sigma.dtype), layer.bias
    W = layer.join(distributed.full(block.weight), None if bias is None else distributed.full(bias))
    if Sigma.dim() > U.dim():  # diagonal in blocks of inputs
        return reach(in_blocks(U, len(Sigma)), Sigma, in_blocks(W, len(Sigma)), blocks=len(Sigma))
    return reach(U, Sigma, W)


def like(values: list[float], vector: Tensor) -> float | Tensor:
    """One number where all are the same, which no device waits for; else a vector like this one."""
    return values[0] if len(set(values)) == 1 else torch.tensor(values, dtype=vector.dtype, device=vector.device)
