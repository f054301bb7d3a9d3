"""Any torch optimizer, on neurons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn
from torch.optim.optimizer import Optimizer

from foof.covering import names_of
from foof.kronecker import InputInverse
from foof.optim.base import NeuronOptimizer
from foof.optim.block import Block, Damping
from foof.optim.checks import mean_over_rows, refuse_moved
from foof.optim.ekfac import ekfac_fisher
from foof.optim.engine import Engine, unwrapped
from foof.optim.estimators import Estimator, Host, InputMoments
from foof.optim.kfac import MOVED, check_unsharded, kronecker_fisher
from foof.optim.rules import POWERS, blended, damped_power
from foof.optim.step import Ledger
from foof.statistics import Schedule

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Scheduled = Callable[[int], float]  # of the steps taken


def precondition(optimizer: AnyOptimizer, model: nn.Module, *, method: str = "foof", damping: float | str | Scheduled = 1.0,
                 relative: bool = False, ema: float = 0.95, T: int = 100, S: int | None = None, spread: bool = False,
                 include: Iterable[str] | None = None, exclude: Iterable[str] = (), process_group: Any = None,
                 **options: Any) -> AnyOptimizer:  # fmt: skip
    """Let ``optimizer`` see neuron gradients ``Eᵀ A (Σ + λI)⁻¹`` in place of the gradients of ``model``'s covered layers.

    Returns the same optimizer, with ``optimizer.preconditioner`` added: ``optimizer.preconditioner.initialise(batches)`` gathers
    statistics before training, ``.remove()`` takes everything off again. Its state dict carries the statistics along. Parameters
    that are not covered, and those that are not the optimizer's (now: not those that join later), keep their plain gradients.
    ``with optimizer.mask(rows):`` leaves padding out of the statistics, as for ``foof.FOOF``.

    The inverse acts on the gradient. What the optimizer remembers (momentum, second moments) is then of neuron gradients, each seen
    through the inverse of its day. ``foof.Muon`` has the inverse on the momentum of raw gradients instead; the docs compare the two.

    Args:
        damping: λ, or a function of the number of steps taken, ``lambda t: max(0.05, 0.15 - t / 10_000)``, asked when inverses are made.
        relative: λ is ``damping`` times the mean eigenvalue of Σ, layer by layer.
        include: names of modules; only what is in them is covered. None: everything.
        power, graft, blend (FOOF's): with ``N = G (Σ + λI)^power``, power −1 or −1/2, the optimizer sees ``(1 − β) G + β N``, β = blend a
            number or a function of the steps taken; graft=True: with ``N · ‖G‖/‖N‖`` in place of N, so that gradients keep their norm.
        spread, row_stride (FOOF's and KFAC's), blocks, loss_average (FOOF's): as for ``foof.FOOF``.

    ``method="kfac"`` and ``"ekfac"`` take the further options of ``foof.KFAC`` (``fisher``, ``likelihood``, ``samples``,
    ``datapoints``, ``generator``; KFAC's ``damping_mode`` and ``loss_average``) and need ``optimizer.update_curvature(out)`` between the
    forward pass and ``backward()``; for FOOF that is a no-op.

    >>> opt = precondition(torch.optim.AdamW(model.parameters(), lr=1e-3), model, damping=1.0)
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(map(repr, METHODS))}, got {method!r}.")
    before = getattr(optimizer, "preconditioner", None)
    if isinstance(optimizer, NeuronOptimizer) or (before is not None and before.taps):
        raise ValueError("this optimizer is on neurons already; call optimizer.preconditioner.remove() and make a new one.")
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    schedule = Schedule.of(T, S, spread=spread)
    strength = ScheduledDamping(damping, relative, schedule)
    make = METHODS[method](Damping(strength["damping"], relative), ema, **options)
    exclude = (*names_of(exclude), *(outside(unwrapped(model), include) if include is not None else ()))
    engine = Engine(model, make, schedule, ema, exclude=exclude, owned=owned, functional=method == "foof", process_group=process_group)
    if method != "foof":
        check_unsharded(engine)
    for block in engine.blocks:
        block.options = strength
    if isinstance(engine.estimator, NeuronGradients):
        engine.estimator.check(engine)
    engine.attach(optimizer)
    optimizer.preconditioner = engine  # type: ignore[attr-defined]
    optimizer.update_curvature, optimizer.mask = engine.update_curvature, engine.masking  # type: ignore[attr-defined]
    return optimizer


class ScheduledDamping(Mapping[str, Any]):
    """What a block reads its damping in: a number, or a function of the steps taken."""

    def __init__(self, damping: float | str | Scheduled, relative: bool, schedule: Schedule) -> None:
        self.damping, self.relative, self.schedule = damping, relative, schedule

    def __getitem__(self, name: str) -> Any:
        if name == "damping":
            return self.damping(self.schedule.t) if callable(self.damping) else self.damping
        return {"relative": self.relative}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(("damping", "relative"))

    def __len__(self) -> int:
        return 2


def outside(model: nn.Module, include: Iterable[str]) -> list[str]:
    """The modules (names) that are neither in one of these nor around one."""
    names, chosen = list(dict(model.named_modules())), tuple(include)
    for name in chosen:
        if name not in names:
            raise ValueError(f"include: the model has no module named {name!r}; names are those of model.named_modules().")

    def within(name: str, other: str) -> bool:
        return not other or name == other or name.startswith(other + ".")

    return [name for name in names if not any(within(name, other) or within(other, name) for other in chosen)]


class NeuronGradients(InputMoments):
    """FOOF's estimator with ``N = G (Σ + λI)^power``, of which the optimizer sees ``(1 − β) G + β N``, or N with the norm of G."""

    def __init__(self, power: float, graft: bool, blend: float | Scheduled, loss_average: str, blocks: int | str,
                 row_stride: int) -> None:  # fmt: skip
        super().__init__(mean_over_rows(loss_average), blocks, row_stride)
        if power not in POWERS:
            raise ValueError(f"power must be one of {POWERS}, got {power}.")
        self.power, self.graft, self.blend = power, graft, blend
        self.plain = graft or blend != 1.0  # the whole gradient is wanted, so it is done when the step is taken
        self.beta = self._beta(0)

    def _beta(self, t: int) -> float:
        beta = self.blend(t) if callable(self.blend) else self.blend
        if not 0 <= beta <= 1:
            raise ValueError(f"blend is how much of the neuron gradient is mixed with the plain one: it must be in [0, 1], got {beta}.")
        return beta

    def check(self, engine: Engine) -> None:
        """Raise where plain gradients of one weight could not be told apart."""
        for block in engine.blocks if self.plain else ():
            others = readers(engine.model, block)
            if not others:
                continue
            engine.remove()
            raise ValueError(
                f"{block.name}: its weight is read by {' and '.join(others)}, too, in another way or not covered, and has one plain "
                "gradient, so that graft and blend cannot treat each by itself: untie them, or leave out graft and blend."
            )

    def invert(self, block: Block, T: int) -> InputInverse:
        if self.power == -1.0:
            return super().invert(block, T)
        Sigma = block.moments["Sigma"].value
        assert Sigma is not None
        damping = block.damping.strength(block.layer, Sigma)
        if Sigma.dim() == 1:
            return InputInverse("diagonal", (Sigma + damping).pow(self.power))
        return InputInverse("inverse", damped_power(Sigma, damping, self.power))

    def parts(self, block: Block) -> int:
        return super().parts(block) if self.power == -1.0 else 1

    def prepare(self, host: Host, ledgers: dict[Block, Ledger]) -> None:
        self.beta = self._beta(host.schedule.t)

    def precondition(self, ledgers: dict[Block, Ledger | None]) -> None:
        plain = {block: block.raw().clone() for block in ledgers} if self.plain else {}
        super().precondition(ledgers)
        for block, G in plain.items():
            block.write(blended(G, block.raw(), self.beta, self.graft))


def readers(model: nn.Module, block: Block) -> list[str]:
    """The modules (names) that have this block's weight, and are not of this block."""
    own = {id(layer.module) for layer in block.layers}
    others = [(name, module) for name, module in model.named_modules() if id(module) not in own]
    return [name for name, module in others if any(p is block.weight for p in module.parameters(recurse=False))]


def _foof(damping: Damping, ema: float, *, power: float = -1.0, graft: bool = False, blend: float | Scheduled = 1.0,
          loss_average: str = "batch", blocks: int | str = 1, row_stride: int = 1,
          **unknown: Any) -> Callable[[Any], Estimator]:  # fmt: skip
    refuse_moved(unknown, {}, "FOOF")
    estimator = NeuronGradients(power, graft, blend, loss_average, blocks, row_stride)
    return lambda _: estimator


def _kfac(damping: Damping, ema: float, *, damping_mode: str = "heuristic", fisher: str = "mc", samples: int = 1,
          likelihood: Any = "categorical", datapoints: int | None = None, generator: Any = None, loss_average: str = "batch",
          row_stride: int = 1, **unknown: Any) -> Callable[[Any], Estimator]:  # fmt: skip
    refuse_moved(unknown, MOVED, "KFAC")
    damping.absolute("KFAC needs")
    return kronecker_fisher(damping_mode, fisher, samples, likelihood, datapoints, generator, loss_average=loss_average,
                            row_stride=row_stride)  # fmt: skip


def _ekfac(damping: Damping, ema: float, **options: Any) -> Callable[[Any], Estimator]:
    damping.absolute("EKFAC needs")
    return ekfac_fisher(ema, **options)


METHODS: dict[str, Callable[..., Callable[[Any], Estimator]]] = {"foof": _foof, "kfac": _kfac, "ekfac": _ekfac}
