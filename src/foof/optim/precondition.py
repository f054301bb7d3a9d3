"""Any torch optimizer, on neurons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from foof.optim.preconditioner import Damping, Preconditioner

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def precondition(optimizer: AnyOptimizer, model: nn.Module, *, method: str = "foof", damping: float | str = 1.0, relative: bool = False,
                 ema: float = 0.95, T: int = 100, S: int | None = None, exclude: Iterable[str] = ()) -> AnyOptimizer:  # fmt: skip
    """Let ``optimizer`` see neuron gradients ``Eᵀ A (Σ + λI)⁻¹`` in place of the gradients of ``model``'s covered layers.

    Returns the same optimizer, with ``optimizer.preconditioner`` added: ``optimizer.preconditioner.initialise(batches)`` gathers
    statistics before training, ``.remove()`` takes everything off again. Its state dict carries the statistics along. Parameters
    that are not covered, and covered ones the optimizer does not own, are untouched by this.

    >>> opt = precondition(torch.optim.AdamW(model.parameters(), lr=1e-3), model, damping=1.0)
    """
    if method != "foof":
        raise ValueError(f'method must be "foof", got {method!r}.')
    if hasattr(optimizer, "preconditioner"):
        raise ValueError("this optimizer is on neurons already; call optimizer.preconditioner.remove() and make a new one.")
    strength = Damping(damping, relative)
    attached = Preconditioner(model, lambda _: strength, ema, T, S, exclude)
    attached.attach(optimizer)
    optimizer.preconditioner = attached  # type: ignore[attr-defined]
    return optimizer
