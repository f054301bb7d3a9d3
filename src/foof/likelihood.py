"""Labels and likelihoods: the output errors whose backward pass gives the errors ``e_F`` of the Fisher.

For one datapoint with network output ``f`` the Fisher is ``Jᵀ H J``, with J the Jacobian of f and ``H = Cov_y[∂(-log p(y|f))/∂f]``.
Everything here returns *output errors*: tensors ``s_k`` of the shape of the outputs ``(N, ..., C)``, for the loss of each datapoint
alone (no 1/N), with ``Σ_k s_k s_kᵀ = H``, exactly (full) or in expectation (mc); with the data's labels (empirical) the sum is the
empirical Fisher's. The class dimension is the last; dimensions between are positions (tokens) whose losses add. Where the data's
labels are given, categorical positions that these leave out (label -100) have no error, wherever the labels of the Fisher come from.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foof.notices import warn
from foof.statistics import wide

IGNORED = -100  # the label of a position that has no loss, as in torch's cross entropy


class Likelihood(ABC):
    """p(y | f)."""

    @abstractmethod
    def sampled(self, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``∂(-log p(y|f))/∂f`` for one label per position drawn from the model, in the shape of ``out``."""

    @abstractmethod
    def enumerated(self, out: Tensor) -> Iterator[Tensor]:
        """Output errors ``s_k`` with ``Σ_k s_k s_kᵀ = H`` exactly."""

    def hessian_product(self, out: Tensor, u: Tensor) -> Tensor:
        """``H u`` for each datapoint and position, in the shape of ``out``."""
        image = torch.zeros_like(u)
        for s in self.enumerated(out):
            image += s * (s * u).flatten(1).sum(1).reshape(-1, *[1] * (u.dim() - 1))
        return image

    def kept(self, out: Tensor, y: Tensor | None) -> Tensor | None:
        """Which positions have a loss by the data's labels, ``(N, ..., 1)``; None: all of them. Raises for outputs of a wrong form."""
        return None

    @abstractmethod
    def given(self, out: Tensor, y: Tensor) -> Tensor:
        """``∂(-log p(y|f))/∂f`` for these labels."""

    @abstractmethod
    def negative_log_likelihood(self, out: Tensor, y: Tensor) -> Tensor:
        """``-log p(y|f)`` summed over datapoints and positions."""


class Categorical(Likelihood):
    """Logits ``(N, ..., C)``, labels ``(N, ...)``: cross entropy. ``H = diag(p) - p pᵀ``."""

    def sampled(self, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = out.softmax(-1)
        drawable = torch.where(p.isfinite().all(-1, keepdim=True), p, 1.0)  # NaN outputs give NaN errors, not an exception
        y = torch.multinomial(drawable.reshape(-1, p.shape[-1]), 1, generator=generator).reshape(p.shape[:-1])
        return p - F.one_hot(y, p.shape[-1])

    def enumerated(self, out: Tensor) -> Iterator[Tensor]:
        """C - 1 errors for C classes, since H has that rank: with ``q = √p``, ``H = diag(q) (I - q qᵀ) diag(q)``.

        The first C - 1 columns of the reflection ``I - v vᵀ/(1 + q_C)``, ``v = q + one_hot(C)``, are a basis B of q's complement,
        so ``diag(q) B`` is a root of H: its columns are ``s_j = q_j (one_hot(j) - (p + q_C one_hot(C)) / (1 + q_C))``.
        """
        p = out.softmax(-1)
        q = p.sqrt()
        last = q[..., -1:]
        common = p.clone()
        common[..., -1:] += last
        common /= 1 + last
        for j in range(p.shape[-1] - 1):
            error = -common
            error[..., j] += 1
            yield from _one_position_at_a_time(error * q[..., j : j + 1])

    def hessian_product(self, out: Tensor, u: Tensor) -> Tensor:
        p = out.softmax(-1)
        return p * (u - (p * u).sum(-1, keepdim=True))

    def kept(self, out: Tensor, y: Tensor | None) -> Tensor | None:
        if out.dim() < 2:
            raise ValueError(f"categorical outputs must be logits (N, ..., C), got {tuple(out.shape)}: without classes, use bernoulli.")
        if not isinstance(y, Tensor) or y.is_floating_point():
            return None
        if y.shape != out.shape[:-1]:
            if y.shape == out.shape[:1] + out.shape[2:]:
                raise ValueError(
                    f"categorical outputs must be logits (N, ..., C), got {tuple(out.shape)} with labels {tuple(y.shape)}: move the "
                    "classes last, out.movedim(1, -1)."
                )
            return None
        return (y != IGNORED).to(out.device).unsqueeze(-1)

    def given(self, out: Tensor, y: Tensor) -> Tensor:
        kept = self._check(out, y)
        error = out.softmax(-1) - F.one_hot(torch.where(kept, y, 0), out.shape[-1])
        return error * kept.unsqueeze(-1)

    def negative_log_likelihood(self, out: Tensor, y: Tensor) -> Tensor:
        self._check(out, y)
        out = out.to(wide(out.dtype))
        return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1), reduction="sum", ignore_index=IGNORED)

    @staticmethod
    def _check(out: Tensor, y: Tensor) -> Tensor:
        if y.shape != out.shape[:-1] or y.is_floating_point():
            raise ValueError(f"categorical labels must be integers of shape {tuple(out.shape[:-1])}, got {y.dtype} {tuple(y.shape)}.")
        kept = y != IGNORED
        if ((y < 0) & kept).any() or (y >= out.shape[-1]).any():
            raise ValueError(
                f"labels must be in 0..{out.shape[-1] - 1} (or {IGNORED} to ignore), got {int(y.min())}..{int(y.max())}."
            )
        return kept


class Bernoulli(Likelihood):
    """Logits and labels in [0, 1], both ``(N, ..., C)``: binary cross entropy, summed over outputs. ``H = diag(p (1-p))``."""

    def sampled(self, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
        p = out.sigmoid()
        return p - torch.bernoulli(p.nan_to_num(0.5), generator=generator)

    def enumerated(self, out: Tensor) -> Iterator[Tensor]:
        p = out.sigmoid()
        yield from _one_output_at_a_time((p * (1 - p)).sqrt())

    def hessian_product(self, out: Tensor, u: Tensor) -> Tensor:
        p = out.sigmoid()
        return p * (1 - p) * u

    def given(self, out: Tensor, y: Tensor) -> Tensor:
        return out.sigmoid() - _like_outputs(out, y)

    def negative_log_likelihood(self, out: Tensor, y: Tensor) -> Tensor:
        out = out.to(wide(out.dtype))
        return F.binary_cross_entropy_with_logits(out, _like_outputs(out, y), reduction="sum")


class Gaussian(Likelihood):
    """Means and targets ``(N, ..., C)`` with unit variance: the loss ``½ |y - f|²``. ``H = I``.

    ``nn.MSELoss`` is twice this, divided by the number of outputs. Posteriors know observation noise σ: there all of it is over σ².
    """

    def sampled(self, out: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(out.shape, dtype=out.dtype, device=out.device, generator=generator)

    def enumerated(self, out: Tensor) -> Iterator[Tensor]:
        yield from _one_output_at_a_time(torch.ones_like(out))

    def hessian_product(self, out: Tensor, u: Tensor) -> Tensor:
        return u

    def given(self, out: Tensor, y: Tensor) -> Tensor:
        return out - _like_outputs(out, y)

    def negative_log_likelihood(self, out: Tensor, y: Tensor) -> Tensor:
        out = out.to(wide(out.dtype))
        return 0.5 * (out - _like_outputs(out, y)).pow(2).sum() + 0.5 * math.log(2 * math.pi) * out.numel()


def _like_outputs(out: Tensor, y: Tensor) -> Tensor:
    if y.shape != out.shape:
        raise ValueError(f"targets must have the outputs' shape {tuple(out.shape)}, got {tuple(y.shape)}.")
    return y.to(out.dtype)


def _one_position_at_a_time(error: Tensor) -> Iterator[Tensor]:
    """Labels of different positions are independent, so their errors must not meet in one backward pass."""
    if error.dim() == 2:
        yield error
        return
    for position in range(math.prod(error.shape[1:-1])):
        alone = torch.zeros_like(error).flatten(1, -2)
        alone[:, position] = error.flatten(1, -2)[:, position]
        yield alone.reshape(error.shape)


def _one_output_at_a_time(diagonal: Tensor) -> Iterator[Tensor]:
    """The columns of a diagonal square root of H; outputs ``(N,)`` have one."""
    if diagonal.dim() == 1:
        yield diagonal
        return
    for k in range(diagonal[0].numel()):
        alone = torch.zeros_like(diagonal).flatten(1)
        alone[:, k] = diagonal.flatten(1)[:, k]
        yield alone.reshape(diagonal.shape)


LIKELIHOODS: dict[str, Likelihood] = {"categorical": Categorical(), "bernoulli": Bernoulli(), "gaussian": Gaussian()}


def likelihood_named(name: str | Likelihood) -> Likelihood:
    """The likelihood of this name; a ``Likelihood`` stands for itself."""
    if isinstance(name, Likelihood):
        return name
    if name not in LIKELIHOODS:
        raise ValueError(f"likelihood must be one of {sorted(LIKELIHOODS)}, got {name!r}.")
    return LIKELIHOODS[name]


@dataclass(frozen=True)
class Labels:
    """Where the labels of the Fisher come from: the model (``"mc"``, ``samples`` draws per input), all of them weighted by their
    probability (``"full"``), or the data (``"empirical"``)."""

    source: str = "mc"
    samples: int = 1

    def __post_init__(self) -> None:
        if self.source not in ("mc", "full", "empirical"):
            raise ValueError(f'the labels of a Fisher are "mc", "full" or "empirical", got {self.source!r}.')
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}.")

    def errors(self, likelihood: Likelihood, out: Tensor, y: Tensor | None = None,
               generator: torch.Generator | None = None) -> Iterator[Tensor]:  # fmt: skip
        """The output errors, one tensor ``(N, ..., C)`` per backward pass, with ``F = 1/N Σ_i Σ_k J_iᵀ s_ik s_ikᵀ J_i``."""
        out = out.detach()
        kept = likelihood.kept(out, y)
        if self.source == "full":
            for error in likelihood.enumerated(out):
                yield error if kept is None else error * kept
        elif self.source == "mc":
            for _ in range(self.samples):
                error = likelihood.sampled(out, generator) / math.sqrt(self.samples)
                yield error if kept is None else error * kept
        elif y is None:
            raise ValueError('the empirical Fisher needs the data\'s labels: pass y, or use labels "mc" or "full".')
        else:
            yield likelihood.given(out, y)


def seeded(generator: torch.Generator | int | None, device: torch.device) -> torch.Generator | None:
    """A generator, or one made of a seed; None stands for torch's own."""
    return torch.Generator(device).manual_seed(generator) if isinstance(generator, int) else generator


def make_generator(generator: torch.Generator | int | None, device: torch.device) -> torch.Generator:
    """The source of an optimizer's sampled labels: its own, so that batches and dropout are the same with KFAC as without."""
    if isinstance(generator, torch.Generator):
        return generator
    return torch.Generator(device).manual_seed(torch.initial_seed() if generator is None else generator)


def restore(generator: torch.Generator, state: Tensor) -> None:
    """Go on where a generator was; one of another kind of device has another state, and draws other labels anyway."""
    if state.numel() == generator.get_state().numel():
        generator.set_state(state.cpu())
    else:
        warn("the checkpoint was saved on another kind of device: sampled labels go on from a new seed.")
