"""What a run can log besides its loss: quantities of one step, each a function of the moment it is taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foof.optim import KFAC
from foof.study.train import updates
from foof.study.train.objectives import Objective


@dataclass
class Moment:
    """One step of a run: before the update (gradients are there), or just after it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    loss: float  # of the batch, before the update
    objective: Objective

    @torch.no_grad()
    def batch_loss(self) -> Tensor:
        return self.objective.loss(self.model(self.batch[0]), self.batch)


def _progress(moment: Moment) -> float:
    """How far the update brought the loss of its own batch down."""
    return moment.loss - moment.batch_loss().item()


def _kfac(moment: Moment) -> KFAC:
    if not isinstance(moment.optimizer, KFAC):
        raise ValueError(f"this is measured on trajectories of KFAC, but the optimizer is {type(moment.optimizer).__name__}")
    return moment.optimizer


def _similarity(moment: Moment) -> float:
    """Cosine of KFAC's update and that of FOOF with KFAC's λ_A, in the inner product of Σ (Fig. 3B)."""
    optimizer = _kfac(moment)
    Sigma = updates.second_moments(optimizer.preconditioner)
    return updates.cosine(updates.updates(optimizer), updates.updates(optimizer, "drop-scaled"), Sigma)


def _similarity_euclidean(moment: Moment) -> float:
    """The same in the Euclidean inner product."""
    optimizer = _kfac(moment)
    return updates.cosine(updates.updates(optimizer), updates.updates(optimizer, "drop-scaled"))


def _similarity_by_layer(moment: Moment) -> float:
    """The mean of the layers' own cosines, each in the inner product of its Σ."""
    optimizer = _kfac(moment)
    Sigma, u, v = (
        updates.second_moments(optimizer.preconditioner), updates.updates(optimizer), updates.updates(optimizer, "drop-scaled"),
    )  # fmt: skip
    return statistics.fmean(updates.cosine({name: u[name]}, {name: v[name]}, Sigma) for name in u)


def _decrease(second_factor: str) -> Callable[[Moment], float]:
    """The share of the batch's loss that KFAC's update would remove, with or without its second factor (Fig. 4C)."""

    def measure(moment: Moment) -> float:
        optimizer = _kfac(moment)
        lr = optimizer.param_groups[0]["lr"]
        after = updates.loss_after(optimizer.preconditioner, updates.updates(optimizer, second_factor), lr, moment.batch_loss)
        return updates.relative_decrease(moment.loss, after)

    return measure


BEFORE: dict[str, Callable[[Moment], float]] = {
    "similarity": _similarity,
    "similarity_euclidean": _similarity_euclidean,
    "similarity_by_layer": _similarity_by_layer,
    "decrease": _decrease("keep"),
    "decrease_without": _decrease("drop-rescaled"),
}
AFTER: dict[str, Callable[[Moment], float]] = {"progress": _progress}


def needs_raw_gradients(names: tuple[str, ...]) -> bool:
    """Whether the gradients of a step that is measured must be left as they are until the update."""
    return any(name in BEFORE for name in names)
