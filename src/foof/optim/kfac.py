"""KFAC (Martens & Grosse 2015), on the same engine as FOOF."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.likelihood import Labels, Likelihood, likelihood_named
from foof.optim.adaptive import Adaptive, Calls, ModelCall, QuadraticModelSteps, check_adaptive, fisher_in
from foof.optim.block import Damping
from foof.optim.change import Changes
from foof.optim.checks import Fallback, mean_over_rows, refuse_moved
from foof.optim.engine import Engine
from foof.optim.estimators import DAMPING_MODES, FisherSettings, KroneckerFisher
from foof.statistics import Schedule
from foof.tap import leave_note

MOVED = {  # options once
    "second_factor": "the ablations of Appendix D.9 are the study's: foof.study.train.ablations.kfac",
    "rows": "Σ_E is the mean over rows; the study's KFAC for the paper's convolutions has their sum: foof.study.train.ablations.kfac",
    "deferred": "what other updates would have been is the study's business: foof.study.train.ablations.kfac, and foof.study.train.updates",
}


class KFAC(QuadraticModelSteps):
    """``W ← W - lr · (Σ_E + λ_E I)⁻¹ Eᵀ A (Σ + λ_A I)⁻¹`` for every covered layer (Eq. 2), a ``torch.optim.Optimizer``.

    >>> out = model(x)
    >>> opt.update_curvature(out)  # which outputs estimate the Fisher; runs only when it is due
    >>> loss_fn(out, y).backward()
    >>> opt.step(); opt.zero_grad()

    ``Σ`` is FOOF's; ``Σ_E`` the moving average of ``1/(N R) Σ_i Σ_k Σ_r e_ikr e_ikrᵀ`` for errors e of the per-datapoint loss with
    labels from the model. ``Σ ⊗ Σ_E`` then approximates the Fisher of a layer's weights, exactly for deep linear networks with
    squared error and for one datapoint; for layers with R > 1 rows per datapoint (convolutions, sequences) it is KFAC-expand.

    Scale: the paper's released code sums Σ over the batch and averages Σ_E, so in fully connected networks its (lr, λ) at batch B
    is (lr/B, λ/B) here, for either damping: (0.3, 1) at batch 100 is (0.003, 0.01).

    Args:
        model, lr, momentum, weight_decay, ema, T, S, spread, rest, groups, exclude, maximize, process_group: as in ``FOOF``;
            ema = 0 is subsampled KFAC.
        damping: λ > 0, added to the approximate Fisher.
        max_change: by how much of their size a step may move a layer's outputs, as in ``FOOF`` with an lr; None for no bound.
        damping_mode: ``"heuristic"``: each factor is damped by itself, λ_A λ_E = λ and λ_A/λ_E = n Tr(Σ) / (m Tr(Σ_E)) (Eq. 4).
            ``"standard"``: ``(Σ ⊗ Σ_E + λI)⁻¹`` exactly (Eq. 3).
        fisher: labels from the model, ``samples`` for each input (``"mc"``), all of them weighted by their probability
            (``"full"``, one backward pass per class), or the data's (``"empirical"``: ``update_curvature(out, y)``).
        likelihood: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``, of the model's outputs; classes last, ``(N, ..., C)``.
        datapoints: how many of each batch feed the factors; None for all.
        row_stride: both factors are estimated from every k-th row, as in ``FOOF``.
        loss_average: as in ``FOOF``.
        adaptive: an ``Adaptive``, or True for all of it: damping, step size and momentum of Martens & Grosse (2015), from exact
            Fisher-vector products on each step's batch; lr and momentum are then not used. Call ``update_curvature`` on every
            step, and for the damping ``adapt_damping(loss_before, loss_after)`` after steps where ``adaptation_due``.
        generator: a seed or ``torch.Generator`` for sampled labels; by default one seeded as torch is.
    """

    estimator = KroneckerFisher

    def __init__(self, model: nn.Module, lr: float = 0.003, damping: float = 0.01, *, max_change: float | None = None,
                 damping_mode: str = "heuristic", fisher: str = "mc", samples: int = 1,
                 likelihood: str | Likelihood = "categorical", datapoints: int | None = None, row_stride: int = 1,
                 loss_average: str = "batch", adaptive: Adaptive | bool = False,
                 generator: torch.Generator | int | None = None, momentum: float = 0.0, weight_decay: float = 0.0,
                 ema: float = 0.95, T: int = 100, S: int | None = None, spread: bool = False, rest: Fallback = "adamw",
                 groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (), maximize: bool = False,
                 process_group: Any = None, **moved: Any) -> None:  # fmt: skip
        refuse_moved(moved, MOVED, "KFAC")
        for options in ({"damping": damping}, *groups):
            Damping(options.get("damping", damping), options.get("relative", False)).absolute("KFAC needs")
        self.adaptive = check_adaptive(adaptive, weight_decay, groups, maximize, max_change)
        make = kronecker_fisher(damping_mode, fisher, samples, likelihood, datapoints, generator, self.estimator, loss_average, row_stride)
        engine = Engine(model, make, Schedule.of(T, S, spread=spread), ema, exclude=exclude, process_group=process_group)
        self._calls: Calls | None = None
        check_unsharded(engine)
        defaults = {"lr": lr, "damping": damping, "relative": False, "max_change": max_change, "momentum": momentum,
                    "weight_decay": weight_decay}  # fmt: skip
        self._bound = Changes(engine)
        super().__init__(engine, defaults, groups, rest, maximize)
        if self.adaptive is not None:
            self._keep_for_adaptation(engine)

    def _keep_for_adaptation(self, engine: Engine) -> None:
        """From now on, keep each step's plain gradients and the model's arguments."""
        if any(block.shares_weight for block in engine.blocks):
            engine.remove()
            raise ValueError("adaptive=... needs raw gradients, which an embedding tied to a linear layer does not keep apart.")
        engine.estimator.plain = engine.keeps_plain = True
        self._calls = Calls(engine.model, engine)
        engine.handles.append(self._calls)

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Call between the forward pass and ``backward()`` with the model's outputs (and labels, for the empirical Fisher).

        For other Fishers, too, categorical positions with label -100 are left out where labels aligned with the outputs are given.
        On S of every T steps it runs one backward pass per output error, recording errors only; on the others it does nothing.
        What it records belongs to the graph of ``out``: it counts when a ``backward()`` through it and a ``step()`` follow.
        """
        if self._calls is not None and isinstance(out, Tensor) and (arguments := self._calls.behind(out)) is not None:
            leave_note(out, ModelCall(*arguments, out.shape))
        super().update_curvature(out, y)

    def _fisher_in(self, plane: list[Tensor]) -> Tensor:
        engine = self.preconditioner
        batches = [note for ledger in engine.ledgers.values() for note in ledger.notes if isinstance(note, ModelCall)]
        if not batches:
            raise RuntimeError("adaptive=... needs update_curvature(out) on every step: the quadratic model is of this step's batch.")
        estimator = engine.estimator
        assert isinstance(estimator, KroneckerFisher)
        return fisher_in(engine.model, batches, engine.params, plane, estimator.settings.likelihood)


def kronecker_fisher(damping_mode: str, fisher: str, samples: int, likelihood: str | Likelihood, datapoints: int | None,
                     generator: torch.Generator | int | None, estimator: type[KroneckerFisher] = KroneckerFisher,
                     loss_average: str = "batch", row_stride: int = 1) -> Any:  # fmt: skip
    """KFAC's estimator for a device, from what people write."""
    if damping_mode not in DAMPING_MODES:
        raise ValueError(f"damping_mode must be one of {', '.join(map(repr, DAMPING_MODES))}, got {damping_mode!r}.")
    of_rows = mean_over_rows(loss_average)
    settings = FisherSettings(Labels(fisher, samples), likelihood_named(likelihood), datapoints, mean_over_rows=of_rows,
                              row_stride=row_stride)  # fmt: skip
    return lambda device: estimator(settings, DAMPING_MODES[damping_mode], generator, device)


def check_unsharded(engine: Engine) -> None:
    """Raise under FSDP, after taking the engine off."""
    if any(distributed.is_sharded(block.weight) for block in engine.blocks):
        engine.remove()
        raise NotImplementedError(
            "KFAC needs backward passes of its own, which end at weights that FSDP has sharded away: use FOOF, or DistributedDataParallel."
        )
