"""Hypergradients by implicit differentiation, with ``(λI + F)⁻¹ v`` for the inverse Hessian (Appendix C.3).

At a minimum θ*(h) of an inner loss L(θ, h), with an outer loss V(θ), the implicit function theorem gives

    dV(θ*(h))/dh = - ∂_h ( ∂_θ L(θ*, h) · v ),    v = (∂²_θ L)⁻¹ ∂_θ V.

The Hessian is taken as ``λI + F``, λ the L2 strength of the inner loss and F the Fisher, which is the generalised Gauss–Newton
matrix: exact where the outputs are linear in θ, and where the residuals vanish.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from foof.fisher import Fisher
from foof.tap import behind_a_tap
from foof.vectors import Diagonal

__all__ = ["hypergradient"]


def hypergradient(fisher: Fisher, inner_loss: Tensor, outer_loss: Tensor, hyperparameters: Tensor | Sequence[Tensor], *,
                  damping: Diagonal, scale: float = 1.0, refine: int = 1) -> list[Tensor]:  # fmt: skip
    """``dV/dh`` for each hyperparameter h, at a minimum of the inner loss.

    Both losses need plain gradients: build them while no optimizer on neurons is attached to the model (``opt.remove()``).

    Args:
        fisher: of the inner problem at its minimum. Its labels should be ``"full"``; for weighted datapoints see ``scale``.
        inner_loss: the loss that was minimised, as a graph over ``fisher.params`` and the hyperparameters.
        outer_loss: what the hyperparameters should lower; where it depends on them directly too, that part is added.
        hyperparameters: tensors that require gradients.
        damping: the part of the inner Hessian that is diagonal: the strength λ of ``½ λ |θ|²`` in the inner loss.
        scale: of the Fisher in the Hessian, where the inner loss is not a plain mean over datapoints.
        refine: corrections of the solve by its residual.
    """
    if behind_a_tap(inner_loss, outer_loss):
        raise ValueError(
            "the losses go through an optimizer on neurons, whose gradients are neuron gradients and cannot be differentiated again: "
            "call opt.remove() before building the losses."
        )
    hs = [hyperparameters] if isinstance(hyperparameters, Tensor) else list(hyperparameters)
    params = fisher.params
    outer = torch.autograd.grad(outer_loss, [*params, *hs], retain_graph=True, allow_unused=True)
    direct = outer[len(params) :]
    v = [torch.zeros_like(p) if g is None else g for p, g in zip(params, outer, strict=False)]
    solved = fisher.damped(damping, datapoints=scale).solve(v, refine)
    inner = torch.autograd.grad(inner_loss, params, create_graph=True, allow_unused=True)
    product = sum((g * s).sum() for g, s in zip(inner, solved, strict=True) if g is not None)
    if not isinstance(product, Tensor) or not product.requires_grad:
        raise ValueError("the inner loss's gradient does not depend on the hyperparameters: nothing to differentiate.")
    mixed = torch.autograd.grad(product, hs, allow_unused=True, retain_graph=True)
    zeros = [torch.zeros_like(h) for h in hs]
    return [(z if d is None else d) - (z if m is None else m) for z, d, m in zip(zeros, direct, mixed, strict=True)]
