"""What a run minimises: cross entropy of its labels, or how well an autoencoder gives its images back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from foof.study.data import Data
from foof.study.train.setting import Setting

Batch = tuple[Tensor, Tensor]  # images and labels


@dataclass(frozen=True)
class Objective:
    """A likelihood: the loss of a datapoint is ``-log p(target | outputs)``, summed over outputs, up to a constant; of a batch, the mean.

    ``per_output`` is what the loss of one output is multiplied by to be logged, as the paper shows it: 0 logs the sum as it is, 2 makes
    ``½ |x - f|²`` of d pixels the mean squared error, 1 the mean cross entropy of a pixel. It changes what is shown, not what is trained.
    """

    likelihood: str
    target: Callable[[Batch], Tensor]
    reduced: Callable[[Tensor, Tensor, str], Tensor]  # outputs (N, C) and targets to the "mean" over datapoints, or the "sum"
    per_output: float = 0.0

    def loss(self, out: Tensor, batch: Batch) -> Tensor:
        return self.reduced(out, self.target(batch), "mean")

    def total(self, out: Tensor, batch: Batch) -> Tensor:
        """Summed over datapoints, in float64."""
        return self.reduced(out.double(), self.target(batch), "sum")

    def shown(self, loss: float, out: Tensor) -> float:
        return loss * self.per_output / out[0].numel() if self.per_output else loss

    def right(self, out: Tensor, batch: Batch) -> float:
        """How many of a batch are classified as labelled; NaN where there are no classes."""
        return float((out.argmax(1) == batch[1]).sum()) if self.likelihood == "categorical" else math.nan


def _labels(batch: Batch) -> Tensor:
    return batch[1]


def _cross_entropy(out: Tensor, y: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(out, y, reduction=reduction)


def _squares(out: Tensor, x: Tensor, reduction: str) -> Tensor:
    total = 0.5 * F.mse_loss(out, x.to(out.dtype), reduction="sum")
    return total / len(out) if reduction == "mean" else total


def _bits(out: Tensor, x: Tensor, reduction: str) -> Tensor:
    total = F.binary_cross_entropy_with_logits(out, x.to(out.dtype), reduction="sum")
    return total / len(out) if reduction == "mean" else total


CROSS_ENTROPY = Objective("categorical", _labels, _cross_entropy)


def objective(setting: Setting, data: Data) -> Objective:
    """Of labels, or of images where the model is an autoencoder: normalised ones (``likelihood="gaussian"``) or brightness from 0 to 1
    (``"bernoulli"``)."""
    if setting.model != "autoencoder":
        return CROSS_ENTROPY
    wanted = setting.option("likelihood", "gaussian")
    if wanted == "gaussian":
        return Objective("gaussian", lambda batch: batch[0].flatten(1), _squares, 2.0)
    if wanted == "bernoulli":
        return Objective("bernoulli", lambda batch: data.brightness(batch[0]).flatten(1), _bits, 1.0)
    raise ValueError(f"the likelihood of an autoencoder is gaussian or bernoulli, but {wanted!r} was given")
