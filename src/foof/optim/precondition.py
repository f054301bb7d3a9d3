"""Any torch optimizer, on neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from foof.optim.base import NeuronOptimizer
from foof.optim.block import Damping
from foof.optim.checks import refuse_moved
from foof.optim.ekfac import ekfac_fisher
from foof.optim.engine import Engine
from foof.optim.estimators import Estimator, InputMoments
from foof.optim.kfac import MOVED, check_unsharded, kronecker_fisher
from foof.statistics import Schedule

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def precondition(optimizer: AnyOptimizer, model: nn.Module, *, method: str = "foof", damping: float | str = 1.0, relative: bool = False,
                 ema: float = 0.95, T: int = 100, S: int | None = None, spread: bool = False, exclude: Iterable[str] = (),
                 process_group: Any = None, **options: Any) -> AnyOptimizer:  # fmt: skip
    """Let ``optimizer`` see neuron gradients ``Eᵀ A (Σ + λI)⁻¹`` in place of the gradients of ``model``'s covered layers.

    Returns the same optimizer, with ``optimizer.preconditioner`` added: ``optimizer.preconditioner.initialise(batches)`` gathers
    statistics before training, ``.remove()`` takes everything off again. Its state dict carries the statistics along. Parameters
    that are not covered, and those that are not the optimizer's (now: not those that join later), keep their plain gradients.

    ``method="kfac"`` and ``"ekfac"`` take the further options of ``foof.KFAC`` (``fisher``, ``likelihood``, ``samples``,
    ``datapoints``, ``generator``; KFAC's ``damping_mode``) and need ``optimizer.update_curvature(out)`` between the forward pass
    and ``backward()``; for FOOF that is a no-op.

    >>> opt = precondition(torch.optim.AdamW(model.parameters(), lr=1e-3), model, damping=1.0)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}.")
    before = getattr(optimizer, "preconditioner", None)
    if isinstance(optimizer, NeuronOptimizer) or (before is not None and before.taps):
        raise ValueError("this optimizer is on neurons already; call optimizer.preconditioner.remove() and make a new one.")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strength = Damping(damping, relative)
    make = METHODS[method](strength, ema, **options)
    engine = Engine(model, make, Schedule.of(T, S, spread=spread), ema, exclude=exclude, owned=owned, process_group=process_group)
    if method != "foof":
        check_unsharded(engine)
    for block in engine.blocks:
        block.options = {"damping": damping, "relative": relative}
    engine.attach(optimizer)
    optimizer.preconditioner = engine  # type: ignore[attr-defined]
    optimizer.update_curvature = engine.update_curvature  # type: ignore[attr-defined]
    return optimizer


def _foof(damping: Damping, ema: float, **unknown: Any) -> Callable[[Any], Estimator]:
    refuse_moved(unknown, {}, "FOOF")
    return lambda _: InputMoments()


def _kfac(damping: Damping, ema: float, *, damping_mode: str = "heuristic", fisher: str = "mc", samples: int = 1,
          likelihood: Any = "categorical", datapoints: int | None = None, generator: Any = None,
          **unknown: Any) -> Callable[[Any], Estimator]:  # fmt: skip
    refuse_moved(unknown, MOVED, "KFAC")
    damping.absolute("KFAC needs")
    return kronecker_fisher(damping_mode, fisher, samples, likelihood, datapoints, generator)


def _ekfac(damping: Damping, ema: float, **options: Any) -> Callable[[Any], Estimator]:
    damping.absolute("EKFAC needs")
    return ekfac_fisher(ema, **options)


METHODS: dict[str, Callable[..., Callable[[Any], Estimator]]] = {"foof": _foof, "kfac": _kfac, "ekfac": _ekfac}
