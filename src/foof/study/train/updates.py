"""What the study measures of updates: how similar two of them are, and how far one gets on its own mini-batch.

Updates are mappings from layer names to matrices ``(n, m)`` or ``(G, n, m)``, as ``KFAC.updates`` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from foof.optim.preconditioner import Preconditioner

Update = Mapping[str, Tensor]


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


def second_moments(preconditioner: Preconditioner) -> dict[str, Tensor]:
    """Σ of every layer as the moving averages have it now."""
    found = {block.layer.name: block.moments["Sigma"].value for block in preconditioner.blocks}
    return {name: Sigma for name, Sigma in found.items() if Sigma is not None}


def relative_decrease(before: float, after: float) -> float:
    """``(before - after) / before``: the share of the loss that a step removed (Fig. 4C)."""
    return (before - after) / before


@torch.no_grad()
def loss_after(preconditioner: Preconditioner, update: Update, lr: float, loss: Callable[[], Tensor]) -> float:
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
