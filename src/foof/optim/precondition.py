"""Any torch optimizer, on neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from foof.optim.base import NeuronOptimizer
from foof.optim.kfac import KroneckerPreconditioner, absolute, factor_named, fisher_estimate
from foof.optim.preconditioner import Damping, Preconditioner

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def precondition(optimizer: AnyOptimizer, model: nn.Module, *, method: str = "foof", damping: float | str = 1.0, relative: bool = False,
                 ema: float = 0.95, T: int = 100, S: int | None = None, exclude: Iterable[str] = (),
                 process_group: Any = None, **kfac: Any) -> AnyOptimizer:  # fmt: skip
    """Let ``optimizer`` see neuron gradients ``Eᵀ A (Σ + λI)⁻¹`` in place of the gradients of ``model``'s covered layers.

    Returns the same optimizer, with ``optimizer.preconditioner`` added: ``optimizer.preconditioner.initialise(batches)`` gathers
    statistics before training, ``.remove()`` takes everything off again. Its state dict carries the statistics along. Parameters
    that are not covered, and those that are not the optimizer's (now: not those that join later), keep their plain gradients.

    ``method="kfac"`` takes KFAC's further options (``damping_mode``, ``fisher``, ``likelihood``, ...) and needs
    ``optimizer.update_curvature(out)`` between the forward pass and ``backward()``; for FOOF that is a no-op.

    >>> opt = precondition(torch.optim.AdamW(model.parameters(), lr=1e-3), model, damping=1.0)
    """
    if method not in METHODS:
        raise ValueError(f'method must be "foof" or "kfac", got {method!r}.')
    before = getattr(optimizer, "preconditioner", None)
    if isinstance(optimizer, NeuronOptimizer) or (before is not None and before.taps):
        raise ValueError("this optimizer is on neurons already; call optimizer.preconditioner.remove() and make a new one.")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    attached = METHODS[method](model, Damping(damping, relative), ema, T, S, exclude, process_group, owned, **kfac)
    attached.attach(optimizer)
    optimizer.preconditioner = attached  # type: ignore[attr-defined]
    optimizer.update_curvature = attached.update_curvature  # type: ignore[attr-defined]
    return optimizer


def _foof(model: nn.Module, damping: Damping, ema: float, T: int, S: int | None, exclude: Iterable[str],
          process_group: Any, owned: set[int], **unknown: Any) -> Preconditioner:  # fmt: skip
    if unknown:
        raise TypeError(f"FOOF has no options {', '.join(sorted(unknown))}.")
    return Preconditioner(model, lambda _: damping, ema, T, S, exclude, process_group, owned)


def _kfac(model: nn.Module, damping: Damping, ema: float, T: int, S: int | None, exclude: Iterable[str],
          process_group: Any, owned: set[int], *,
          damping_mode: str = "heuristic", fisher: str = "mc", samples: int = 1, likelihood: Any = "categorical",
          datapoints: int | None = None, rows: str = "mean", second_factor: str = "keep", deferred: bool = False,
          generator: Any = None) -> Preconditioner:  # fmt: skip
    absolute(damping)
    estimate = fisher_estimate(fisher, samples, likelihood, datapoints, rows)
    kind = factor_named(damping_mode, second_factor)
    options = kind, estimate, deferred, generator, process_group, owned
    return KroneckerPreconditioner(model, lambda _: damping, ema, T, S, exclude, *options)


METHODS: dict[str, Callable[..., Preconditioner]] = {"foof": _foof, "kfac": _kfac}
