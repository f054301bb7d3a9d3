"""What a run can log besides its loss: quantities of one step, each a function of the moment it is taken."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import foof
from foof.kronecker import InputInverse
from foof.optim import KFAC
from foof.study.data import Data
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


def _lambda_A(moment: Moment) -> float:
    """KFAC's λ_A, geometric mean over layers."""
    return math.exp(statistics.fmean(math.log(float(x)) for x in updates.lambda_A(_kfac(moment)).values()))


def _foof(moment: Moment) -> foof.FOOF:
    if not isinstance(moment.optimizer, foof.FOOF):
        raise ValueError(f"this is measured on trajectories of FOOF, but the optimizer is {type(moment.optimizer).__name__}")
    return moment.optimizer


def _distance(A: Tensor, B: Tensor) -> float:
    """``|A - B| / |B|`` in the Frobenius norm."""
    return float((A - B).norm() / B.norm())


def _sigma_drift(moment: Moment) -> float:
    """How far Σ has moved since the inverse in use was made of it, mean over layers: the Σ of then is ``P⁻¹ - λI``."""
    drifts = []
    for block in _foof(moment).preconditioner.blocks:
        now, inverse = block.moments["Sigma"].value, block.inverse
        assert now is not None
        assert isinstance(inverse, InputInverse)
        held = inverse.tensor.double()
        then = held @ held.mT if inverse.held == "cholesky" else torch.linalg.inv(held)
        then.diagonal().sub_(block.damping.absolute("FOOF needs"))
        drifts.append(_distance(then, now.double()))
    return statistics.fmean(drifts)


@torch.no_grad()
def _sigma_noise(moment: Moment) -> float:
    """How far this mini-batch's own ``AᵀA/N`` is from Σ, mean over layers."""
    inputs: dict[str, Tensor] = {}
    layers = {name: m for name, m in moment.model.named_modules() if isinstance(m, nn.Linear)}
    handles = [m.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]})) for name, m in layers.items()]
    moment.model(moment.batch[0])
    for handle in handles:
        handle.remove()
    Sigma = updates.second_moments(_foof(moment).preconditioner)
    return statistics.fmean(_distance(a.mT @ a / len(a), Sigma[name]) for name, a in inputs.items())


BEFORE: dict[str, Callable[[Moment], float]] = {
    "similarity": _similarity,
    "similarity_euclidean": _similarity_euclidean,
    "similarity_by_layer": _similarity_by_layer,
    "lambda_A": _lambda_A,
    "sigma_drift": _sigma_drift,
    "sigma_noise": _sigma_noise,
    "decrease": _decrease("keep"),
    "decrease_without": _decrease("drop-rescaled"),
}
AFTER: dict[str, Callable[[Moment], float]] = {"progress": _progress}


def needs_raw_gradients(names: tuple[str, ...]) -> bool:
    """Whether the gradients of a step that is measured must be left as they are until the update."""
    return any(name in BEFORE for name in names)


# At the end of a run -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def _inversion(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> dict[str, float]:
    """Seconds of this core for the damped inverses of all Σ, as FOOF makes them, and for their singular value decompositions (H.2)."""
    assert isinstance(optimizer, foof.FOOF)
    moments = updates.second_moments(optimizer.preconditioner)
    damping = optimizer.param_groups[0]["damping"]

    def seconds(make: Callable[[str, Tensor], object]) -> float:
        begun = time.thread_time()
        for name, Sigma in moments.items():
            make(name, Sigma)
        return time.thread_time() - begun

    def inverse(name: str, Sigma: Tensor) -> object:
        return InputInverse.make(Sigma, damping, name)

    seconds(inverse)  # the first one loads libraries
    return {"inverse_seconds": seconds(inverse), "svd_seconds": seconds(lambda _, Sigma: torch.linalg.svd(Sigma))}


PRIORS = tuple(10.0**i for i in range(1, 8))  # precisions that are tried of a posterior
DRAWS, FITTED = 5, 2000  # networks drawn from a posterior; images its second moments are of
CHOSEN_ON, JUDGED_ON = 500, 2000  # test images


def _posterior(model: nn.Module, optimizer: torch.optim.Optimizer, data: Data) -> dict[str, float]:
    """Appendix G's test: the loss of predictions averaged over networks drawn from a Laplace posterior around the trained weights, with
    both Kronecker factors or the first alone. The prior's precision is the best of `PRIORS` on other test images than the loss is of."""
    x, y, n = data.test_x, data.test_y, len(data.train_y)

    def loss(posterior: foof.laplace.KroneckerPosterior, prior: float, rows: slice) -> float:
        posterior.prior_precision = prior
        chances = posterior.predict_sampled(x[rows], DRAWS, torch.Generator().manual_seed(0))
        return float(-chances.double().gather(1, y[rows, None]).clamp_min(1e-12).log().mean())

    found = {}
    for name, first in (("both", False), ("first", True)):
        fitted = slice(min(n, FITTED))
        posterior = foof.laplace.fit_kronecker(
            model, data.train_x[fitted], data.train_y[fitted], first_factor_only=first, prior_precision=1.0,
            datapoints=float(n), generator=0,
        )  # fmt: skip
        best = min(PRIORS, key=lambda prior: loss(posterior, prior, slice(CHOSEN_ON)))
        found[f"posterior_{name}"] = loss(posterior, best, slice(CHOSEN_ON, CHOSEN_ON + JUDGED_ON))
        found[f"posterior_{name}_prior"] = best
    return found


AT_END: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Data], dict[str, float]]] = {"inversion": _inversion, "posterior": _posterior}
