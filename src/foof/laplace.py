"""Laplace posteriors: exact with full covariance, or Kronecker-factored (Appendices C.1 and F).

Around the trained weights θ*, with a prior of precision Λ and c datapoints, the posterior is ``N(θ*, (Λ + c F)⁻¹)``. With the
exact subsampled Fisher its samples, its log determinant and the variance of linearised predictions come from one D × D factor.

>>> posterior = foof.laplace.fit(model, x, y)                      # prior precision by marginal likelihood
>>> for network in posterior.sample_networks(10): network(x_test)
>>> posterior.predict(x_test)                                      # class probabilities of the linearised model
"""

from __future__ import annotations

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foof import linalg
from foof.fisher import Diagonal, Fisher
from foof.gradients import Columns
from foof.gram import GramOperator, Precision
from foof.likelihood import Categorical, Gaussian, Labels, Likelihood, likelihood_named
from foof.passes import buffers_kept, call_model, pieces, record

__all__ = ["Calibration", "ExactPosterior", "KroneckerPosterior", "calibration", "fit", "fit_kronecker"]


class SampledNetworks(ABC):
    """What any posterior one can sample from gives: networks, and their averaged predictions."""

    model: nn.Module
    params: list[nn.Parameter]
    trained: list[Tensor]
    likelihood: Likelihood

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """n deviations from the trained weights, ``(n, *p.shape)`` for each parameter."""

    def sample_networks(self, n: int, generator: torch.Generator | None = None) -> Iterator[nn.Module]:
        """n copies of the model with weights drawn from the posterior, one at a time."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        for _ in range(n):
            network = copy.deepcopy(self.model)
            parameters = dict(network.named_parameters())
            with torch.no_grad():
                for p, centre, deviation in zip(self.params, self.trained, self.sample(1, generator), strict=True):
                    parameters[names[id(p)]].copy_(centre + deviation[0].to(p.dtype))
            yield network

    @torch.no_grad()
    def predict_sampled(self, x: Any, n: int = 20, generator: torch.Generator | None = None) -> Tensor:
        """Predictions averaged over n sampled networks: class probabilities, or means for the Gaussian."""
        networks = self.sample_networks(n, generator)
        return torch.stack([_mean_prediction(self.likelihood, call_model(network, x)) for network in networks]).mean(0)


class ExactPosterior(SampledNetworks):
    """``N(θ*, (Λ + c F)⁻¹)`` with the exact subsampled Fisher: full covariance, or one block per layer. Made by ``fit``."""

    def __init__(self, model: nn.Module, fisher: Fisher, likelihood: Likelihood, log_likelihood: float, datapoints: float,
                 prior_precision: Diagonal) -> None:  # fmt: skip
        self.model, self.fisher, self.likelihood, self.datapoints = model, fisher, likelihood, datapoints
        self.params = fisher.params
        self.log_likelihood = log_likelihood
        self.prior_precision = prior_precision
        self.trained = [p.detach().clone() for p in self.params]

    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        draws = self.fisher.sample(n, self.prior_precision, datapoints=self.datapoints, generator=generator)
        pieces = draws.split([p.numel() for p in self.params])
        return [piece.mT.reshape(n, *p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    # --- prior precision by marginal likelihood ---------------------------------------------------------------------------

    def log_marginal_likelihood(self, prior_precision: Diagonal | None = None) -> Tensor:
        """``log p(y|θ*) - ½ θ*ᵀΛθ* + ½ log det Λ - ½ log det (Λ + c F)``, a float64 number."""
        prior = self.prior_precision if prior_precision is None else prior_precision
        precision = self.fisher.precision(prior, "prior_precision")
        scatter = sum(float((v * w.double().square()).sum()) for v, w in zip(precision.values, self.trained, strict=True))
        log_det = self.fisher.operator.logdet(precision, self.datapoints)
        return self.log_likelihood - 0.5 * scatter + 0.5 * precision.logdet(self.params) - 0.5 * log_det

    def tune_prior(self, low: float = 1e-4, high: float = 1e6) -> float:
        """The λ of ``Λ = λI`` with the largest log marginal likelihood, by golden-section search over log λ; sets and returns it.

        Only the eigenvalues μ of the Gram matrix are needed: ``log det (λ + c F) = P log λ + Σ log(1 + c μ/λ)``.
        """
        mu = self.fisher.eigenvalues().double().cpu()
        scatter = sum(float(w.double().square().sum()) for w in self.trained)

        def negative(log_lambda: float) -> float:
            log_ratio = float(torch.log1p(self.datapoints * mu * math.exp(-log_lambda)).sum())
            return 0.5 * math.exp(log_lambda) * scatter + 0.5 * log_ratio

        self.prior_precision = _tuned(negative, low, high)
        return self.prior_precision

    # --- the linearised (GLM) predictive ----------------------------------------------------------------------------------

    @torch.no_grad()
    def functional_variance(self, x: Any, batch_size: int = 100) -> tuple[Tensor, Tensor]:
        """Outputs ``(N, ..., C)`` and the covariance ``J (Λ + c F)⁻¹ Jᵀ`` of the linearised outputs, ``(N, K, K)`` for all K of each.

        J is the Jacobian at ``x``: by Woodbury, ``J Λ⁻¹ Jᵀ - (J Λ⁻¹ G) U⁻¹ (Gᵀ Λ⁻¹ Jᵀ)``, all of it products of gradients.
        """
        outputs, variances = [], []
        precision = self.fisher.precision(self.prior_precision, "prior_precision")
        with _weights(self.params, self.trained), buffers_kept(self.model):
            for part, _ in pieces(x, None, batch_size):
                outputs.append(call_model(self.model, part))
                variances.append(self._variance(part, precision))
        return torch.cat(outputs), torch.cat(variances)

    def _variance(self, x: Any, precision: Precision) -> Tensor:
        operator = self.fisher.operator
        jacobian = _jacobian(self.fisher, self.model, x)
        weights = [1 / v for v in precision.values]
        total = torch.zeros((), dtype=operator.dtype, device=operator.device)
        for part, theirs in zip(operator.parts, jacobian.parts, strict=True):
            where = iter(part.where)
            for block in theirs.blocks:
                total = total + block.own([weights[next(where)] for _ in block.params], operator.dtype)
            cross = operator.cross(part, jacobian, theirs, precision) * math.sqrt(jacobian.N)  # GᵀΛ⁻¹Jᵀ: (D, C·N)
            L = operator.factor(part, precision, self.datapoints)
            half = torch.linalg.solve_triangular(L, cross, upper=False).unflatten(1, (jacobian.K, jacobian.N))
            explained = torch.einsum("dki,dli->ikl", half, half) * (precision.scalar or 1.0)  # L Lᵀ is λU where Λ = λI
            total = total - explained
        return total

    def predict(self, x: Any, method: str = "probit", samples: int = 100, batch_size: int = 100,
                generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
        """Predictions of the linearised model ``f(x) + J(x)(θ - θ*)``: class probabilities, or means for the Gaussian.

        ``"probit"``: ``softmax(f / √(1 + π/8 · diag))``; ``"mc"``: averaged over samples of the outputs.
        """
        if method not in ("probit", "mc"):
            raise ValueError(f'method must be "probit" or "mc", got {method!r}.')
        out, variance = self.functional_variance(x, batch_size)
        if isinstance(self.likelihood, Gaussian):
            return out
        if method == "probit":
            scale = (1 + math.pi / 8 * variance.diagonal(dim1=1, dim2=2)).sqrt()
            return _mean_prediction(self.likelihood, out / scale.reshape(out.shape))
        L = linalg.damped_cholesky(variance, 1e-6, "the predictive covariance")
        noise = torch.randn(samples, *L.shape[:2], 1, dtype=L.dtype, device=out.device, generator=generator)
        return _mean_prediction(self.likelihood, out + (L @ noise).reshape(samples, *out.shape)).mean(0)


def fit(model: nn.Module, x: Any, y: Tensor, *, labels: str = "mc", likelihood: str | Likelihood = "categorical",
        blocks: str = "full", prior_precision: Diagonal | None = None, datapoints: float | None = None,
        **options: Any) -> ExactPosterior:  # fmt: skip
    """The exact Laplace posterior around a trained model's weights.

    x, y: the data whose Fisher it is, all of it or a subsample of a training set of ``datapoints`` (then the log likelihood is
    scaled up as the Fisher is). ``prior_precision``: a number, one per parameter, a flat diagonal; None chooses one number by
    marginal likelihood. Further options are those of ``foof.Fisher``. Categorical positions with label -100 count nowhere.
    """
    kind = likelihood_named(likelihood)
    fisher = Fisher(model, x, labels, y, likelihood=kind, blocks=blocks, **options)
    log_likelihood = _log_likelihood(model, kind, x, y, options.get("batch_size"))
    c = fisher._count(datapoints)
    prior = 1.0 if prior_precision is None else prior_precision
    fisher.precision(prior, "prior_precision")  # or an error
    posterior = ExactPosterior(model, fisher, kind, log_likelihood * c / fisher.N, c, prior)
    if prior_precision is None:
        posterior.tune_prior()
    return posterior


# --- Kronecker posteriors: Appendix G -------------------------------------------------------------------------------------


class KroneckerPosterior(SampledNetworks):
    """Each layer ``N(W*, (Λ + c·Σ_E ⊗ Σ)⁻¹)`` (Ritter et al. 2018), or with the first factor only, Σ_E a multiple of I.

    ``W = W* + U_E [Z / √(c s_E s_Aᵀ + λ)] U_Aᵀ`` with Z standard normal, in the factors' eigenbases; see ``fit_kronecker``.
    """

    def __init__(self, model: nn.Module, fisher: Fisher, likelihood: Likelihood, log_likelihood: float, datapoints: float,
                 first_factor_only: bool, prior_precision: float) -> None:  # fmt: skip
        self.model, self.likelihood, self.datapoints = model, likelihood, datapoints
        self.params, self.log_likelihood, self.prior_precision = fisher.params, log_likelihood, prior_precision
        self.factors: list[_LayerFactors] = []
        for part in fisher.operator.parts:
            for block in part.blocks:
                if not block.one_matrix or not block.calls:
                    raise ValueError("a Kronecker posterior needs layers that are all used and tie no weights across layouts.")
                self.factors.append(_LayerFactors.make(block, first_factor_only))
        self.trained = [p.detach().clone() for p in self.params]

    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        drawn: dict[int, Tensor] = {}
        for factors in self.factors:
            block, layer = factors.block, factors.block.layer
            shape = (n, layer.groups, layer.n, layer.m)
            Z = torch.randn(shape, dtype=factors.s_A.dtype, device=factors.s_A.device, generator=generator)
            deviations = factors.U_E @ (Z / factors.precision(self.datapoints, self.prior_precision).sqrt()) @ factors.U_A.mT
            flat = torch.empty(n, block.size, dtype=Z.dtype, device=Z.device)
            flat[:, block.positions(layer)] = deviations.flatten(1)
            drawn.update({id(p): piece for p, piece in zip(block.params, block.pieces(flat), strict=True)})
        return [drawn[id(p)] for p in self.params]

    def log_marginal_likelihood(self, prior_precision: float | None = None) -> Tensor:
        """As the exact posterior's, with the Kronecker curvature."""
        prior = self.prior_precision if prior_precision is None else prior_precision
        scatter = prior * sum(float(w.double().square().sum()) for w in self.trained)
        log_ratio = sum(float((f.precision(self.datapoints, prior).double() / prior).log().sum()) for f in self.factors)
        return torch.tensor(self.log_likelihood - 0.5 * scatter - 0.5 * log_ratio, dtype=torch.float64)

    def tune_prior(self, low: float = 1e-4, high: float = 1e6) -> float:
        """The λ with the largest log marginal likelihood; sets and returns it."""

        def negative(log_lambda: float) -> float:
            return -float(self.log_marginal_likelihood(math.exp(log_lambda)))

        self.prior_precision = _tuned(negative, low, high)
        return self.prior_precision


@dataclass(eq=False)
class _LayerFactors:
    """Eigenvalues and eigenvectors of one layer's Σ ``(G, m, m)`` and Σ_E ``(G, n, n)``."""

    block: Columns
    s_A: Tensor
    U_A: Tensor
    s_E: Tensor
    U_E: Tensor

    @classmethod
    def make(cls, block: Columns, first_factor_only: bool) -> _LayerFactors:
        """``Σ = 1/N Σ a aᵀ``, ``Σ_E = 1/(N R) Σ e eᵀ``; for the first factor alone, Σ_E becomes its mean eigenvalue times I."""
        dtype = torch.promote_types(block.params[0].dtype, torch.float32)
        A, E = block.dense_rows(slice(0, block.N), dtype)
        A, E = A.flatten(1, 2), E.flatten(1, 3)
        s_A, U_A = linalg.eigh(A.mT @ A / block.N)
        s_E, U_E = linalg.eigh(E.mT @ E / (block.N * block.R))
        if first_factor_only:
            s_E = s_E.mean(-1, keepdim=True).expand_as(s_E)
            U_E = torch.eye(s_E.shape[-1], dtype=dtype, device=s_E.device).expand_as(U_E)
        return cls(block, s_A, U_A, s_E, U_E)

    def precision(self, c: float, prior: float) -> Tensor:
        """Eigenvalues ``c s_E s_Aᵀ + λ`` of the posterior precision, ``(G, n, m)``."""
        return c * self.s_E.unsqueeze(-1) * self.s_A.unsqueeze(-2) + prior


def fit_kronecker(model: nn.Module, x: Any, y: Tensor, *, labels: str = "mc", likelihood: str | Likelihood = "categorical",
                  first_factor_only: bool = False, prior_precision: float | None = None, datapoints: float | None = None,
                  **options: Any) -> KroneckerPosterior:  # fmt: skip
    """The Kronecker-factored Laplace posterior; ``first_factor_only``: Appendix G's test, which keeps Σ and drops Σ_E."""
    kind = likelihood_named(likelihood)
    fisher = Fisher(model, x, labels, y, likelihood=kind, **options)
    log_likelihood = _log_likelihood(model, kind, x, y, options.get("batch_size"))
    c = fisher._count(datapoints)
    prior = fisher.precision(1.0 if prior_precision is None else prior_precision, "prior_precision").scalar
    if prior is None:
        raise ValueError("a Kronecker posterior has one prior_precision for all parameters: give a number.")
    posterior = KroneckerPosterior(model, fisher, kind, log_likelihood * c / fisher.N, c, first_factor_only, prior)
    if prior_precision is None:
        posterior.tune_prior()
    return posterior


# --- calibration ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Calibration:
    """How good probabilities are: accuracy, negative log likelihood, Brier score, expected calibration error."""

    accuracy: float
    nll: float
    brier: float
    ece: float


def calibration(probabilities: Tensor, y: Tensor, bins: int = 15) -> Calibration:
    """Calibration numbers of class probabilities ``(N, C)`` for labels ``(N,)``; the ECE over equally wide bins of confidence."""
    confidence, predicted = probabilities.max(-1)
    right = (predicted == y).to(probabilities.dtype)
    of_label = probabilities.gather(-1, y.unsqueeze(-1)).squeeze(-1)
    brier = (probabilities.square().sum(-1) - 2 * of_label + 1).mean()
    which = (confidence * bins).long().clamp_max(bins - 1)
    gaps = torch.zeros(bins, dtype=probabilities.dtype, device=probabilities.device).index_add_(0, which, confidence - right)
    nll = -of_label.clamp_min(torch.finfo(probabilities.dtype).tiny).log().mean()
    return Calibration(float(right.mean()), float(nll), float(brier), float(gaps.abs().sum() / len(y)))


# --- inside ---------------------------------------------------------------------------------------------------------------


def _log_likelihood(model: nn.Module, likelihood: Likelihood, x: Any, y: Tensor, batch_size: int | None) -> float:
    """``log p(y|θ)`` summed over datapoints, by passes as the Fisher's; the model stays as it is."""
    total = 0.0
    with torch.no_grad(), buffers_kept(model):
        for part, targets in pieces(x, y, batch_size):
            assert targets is not None
            total -= float(likelihood.negative_log_likelihood(call_model(model, part), targets))
    return total


def _tuned(f: Any, low: float, high: float) -> float:
    """The λ between low and high for which ``f(log λ)`` is least; at an end of the range with a warning."""
    log_lambda = golden_section(f, math.log(low), math.log(high))
    if not 2e-3 < log_lambda - math.log(low) < math.log(high / low) - 2e-3:
        warnings.warn(
            f"the marginal likelihood still grows at the end of the range [{low:g}, {high:g}] of prior precisions: widen it with "
            "tune_prior(low, high), or give prior_precision (is the model trained?).",
            stacklevel=4,
        )
    return math.exp(log_lambda)


def golden_section(f: Any, low: float, high: float, tolerance: float = 1e-3) -> float:
    """Where a unimodal function of one variable is least."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = f(a), f(b)
    while high - low > tolerance:
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = f(b)
    return (low + high) / 2


def _mean_prediction(likelihood: Likelihood, out: Tensor) -> Tensor:
    if isinstance(likelihood, Categorical):
        return out.softmax(-1)
    return out if isinstance(likelihood, Gaussian) else out.sigmoid()


def _jacobian(fisher: Fisher, model: nn.Module, x: Any) -> GramOperator:
    """The Jacobian of the outputs at x as an operator: column (k, i) is ``∂f_k(x_i)/∂θ`` (over √N, as for any)."""
    calls, N, K = record(model, fisher.layers, x, None, Labels("full"), Gaussian(), None, None)
    return GramOperator(fisher.params, calls, N, K, fisher.by_layer, fisher.operator.dtype)


class _weights:
    """The trained weights for as long as the context lasts, whatever has become of the model since."""

    def __init__(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        self.params, self.values = params, values

    def __enter__(self) -> None:
        self.current = [(p.detach().clone(), p.requires_grad) for p in self.params]
        with torch.no_grad():
            for p, value in zip(self.params, self.values, strict=True):
                p.copy_(value)
                p.requires_grad_()  # for the Jacobian

    def __exit__(self, *_: object) -> None:
        with torch.no_grad():
            for p, (value, required) in zip(self.params, self.current, strict=True):
                p.copy_(value)
                p.requires_grad_(required)
