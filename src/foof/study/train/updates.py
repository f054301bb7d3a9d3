"""What the study measures of updates: how similar two of them are, and how far one gets on its own mini-batch.

Updates are mappings from layer names to matrices ``(n, m)`` or ``(G, n, m)``, as ``updates`` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foof.kronecker import EigenInverse, InputInverse, KroneckerInverse, split_damping
from foof.optim import KFAC
from foof.optim.block import Block
from foof.optim.engine import Engine
from foof.study.train.ablations import kind_named, kronecker_fisher

Update = Mapping[str, Tensor]


@torch.no_grad()
def updates(optimizer: KFAC, second_factor: str = "keep", foof_damping: float | None = None) -> dict[str, Tensor]:
    """What ``step()`` would subtract lr times of, per layer ``(n, m)``, from the gradients at hand, which must be plain.

    With the optimizer's own damping mode (``"keep"``), or without the second factor (``"drop-scaled"``, ``"drop-rescaled"``;
    see ``ablations.kfac``). With ``foof_damping``: FOOF's update at this λ. Changes nothing but that inverses still missing are made.
    """
    engine = optimizer.preconditioner
    if not engine.estimator.plain:
        raise RuntimeError("updates() needs plain gradients: make the optimizer with ablations.kfac(..., deferred=True).")
    if any(block.shares_weight for block in engine.blocks):
        raise RuntimeError("updates() needs plain gradients, which an embedding tied to a linear layer does not keep apart.")
    return {block.layer.name: _inverse(optimizer, block, second_factor, foof_damping).apply(block.raw()) for block in engine.start()}


def _inverse(optimizer: KFAC, block: Block, second_factor: str, foof_damping: float | None) -> Any:
    Sigma, Sigma_E = kronecker_fisher(optimizer).second_moments(block)
    if foof_damping is not None:
        return InputInverse.make(Sigma, foof_damping, block.name, uses=block.layer.n)
    if second_factor == "keep" and isinstance(block.inverse, EigenInverse):
        return block.inverse
    kind: Any = kind_named("heuristic", second_factor)
    if isinstance(block.inverse, KroneckerInverse):
        return kind(block.inverse.inputs, block.inverse.errors, block.inverse.lambda_E)
    return kind.make(Sigma, Sigma_E, block.damping.absolute("KFAC needs"), block.name, (block.layer.n, block.layer.m))


def lambda_A(optimizer: KFAC) -> dict[str, Tensor]:
    """KFAC's λ_A of each layer, from the averages as they are now."""
    moments = {block: kronecker_fisher(optimizer).second_moments(block) for block in optimizer.preconditioner.blocks}
    return {block.layer.name: split_damping(*pair, block.damping.absolute("KFAC needs"))[0] for block, pair in moments.items()}


def inner(u: Update, v: Update, Sigma: Mapping[str, Tensor] | None = None) -> float:
    """``Σ_layers ⟨u, v⟩_Σ = Σ_layers Tr(u Σ vᵀ)``; Euclidean without Sigma. Sigma ``(..., m, m)`` or its diagonal ``(m,)`` by layer."""
    if u.keys() != v.keys():
        raise ValueError(f"the updates are of different layers: {sorted(u.keys() ^ v.keys())}.")
    total = 0.0
    for name, matrix in u.items():
        S = None if Sigma is None else Sigma[name]
        image = matrix if S is None else matrix * S if S.dim() == 1 else matrix @ S
        total += (image * v[name]).sum().item()
    return total


def cosine(u: Update, v: Update, Sigma: Mapping[str, Tensor] | None = None) -> float:
    """Cosine similarity of two updates in the inner product of Σ (Fig. 3B), or in the Euclidean one."""
    return inner(u, v, Sigma) / (inner(u, u, Sigma) * inner(v, v, Sigma)) ** 0.5


def second_moments(preconditioner: Engine) -> dict[str, Tensor]:
    """Σ of every layer as the moving averages have it now."""
    found = {block.layer.name: block.moments["Sigma"].value for block in preconditioner.blocks}
    return {name: Sigma for name, Sigma in found.items() if Sigma is not None}


def relative_decrease(before: float, after: float) -> float:
    """``(before - after) / before``: the share of the loss that a step removed (Fig. 4C)."""
    return (before - after) / before


@torch.no_grad()
def loss_after(preconditioner: Engine, update: Update, lr: float, loss: Callable[[], Tensor]) -> float:
    """``loss()`` at the parameters minus ``lr`` times an update; the parameters are then put back, bit for bit.

    Buffers (running means) see this evaluation as any other: put the model in evaluation mode where that matters.
    """
    moved: list[tuple[Tensor, Tensor]] = []
    for block in preconditioner.blocks:
        if block.layer.name in update:
            pieces = block.layer.split(update[block.layer.name])
            for p, piece in zip(block.layer.parameters, pieces, strict=False):
                if piece is not None:
                    moved.append((p, p.clone()))
                    p.sub_(piece.to(p.dtype), alpha=lr)
    try:
        return float(loss())
    finally:
        for parameter, kept in moved:
            parameter.copy_(kept)
