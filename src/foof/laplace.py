"""Laplace posteriors: exact with full covariance, or Kronecker-factored (Appendices C.1, F and G).

Around the trained weights θ*, with a prior of precision Λ and c datapoints, the posterior is ``N(θ*, (Λ + c F/σ²)⁻¹)``, σ being the
observation noise of regression and 1 otherwise. With the exact subsampled Fisher its samples, its log determinant and the variance
of linearised predictions come from one factor.

>>> posterior = foof.laplace.fit(model, x, y)                      # or (model, loader); prior precision by marginal likelihood
>>> for network in posterior.sample_networks(10): network(x_test)
>>> posterior.predict(x_test)                                      # class probabilities of the linearised model
>>> posterior = foof.laplace.fit(model, x, y, likelihood="gaussian", sigma_noise=None)   # regression; noise by marginal likelihood
>>> mean, variance = posterior.predictive(x_test)

Who knows laplace-torch finds ``posterior(x, pred_type, link_approx)``, ``predictive_samples``, ``functional_variance``,
``log_marginal_likelihood``, ``optimize_prior_precision``, ``prior_precision`` and ``sigma_noise`` under these names.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from foof import linalg
from foof.covering import names_of
from foof.fisher import Fisher, fisher_layers, warn_of_training_mode
from foof.gradients import Call, Columns, blocks_of
from foof.gram import GramOperator
from foof.kronecker import EigenInverse
from foof.layers import Layer
from foof.likelihood import Categorical, Gaussian, Labels, Likelihood, likelihood_named, seeded
from foof.notices import warn
from foof.passes import buffers_kept, call_model, pieces, record, recorded
from foof.statistics import wide
from foof.vectors import Diagonal, ParameterSpace

__all__ = ["Calibration", "ExactPosterior", "KroneckerPosterior", "Predictive", "calibration", "fit", "fit_kronecker"]

NOISES = 1e-4, 1e4  # where the observation noise is looked for


class Predictive(NamedTuple):
    """Of observations at test inputs: their mean and variance, both in the shape of the outputs ``(N, ..., C)``."""

    mean: Tensor
    variance: Tensor


@dataclass(frozen=True)
class Evidence:
    """``log p(y|θ*)`` of c datapoints as if the noise were 1, and how many numbers y are."""

    log_likelihood: float
    numbers: float

    def at(self, sigma: float) -> float:
        """For Gaussian observations with this noise: ``-|y - f|²/2σ² - n log(σ √2π)``."""
        normalisation = 0.5 * self.numbers * math.log(2 * math.pi)
        return (self.log_likelihood + normalisation) / sigma**2 - normalisation - self.numbers * math.log(sigma)


class Posterior(ABC):
    """What any Gaussian posterior around trained weights gives. The model is a snapshot of the one that was fitted: all its
    parameters, buffers and its mode are as they were then, whatever becomes of that one."""

    def __init__(self, model: nn.Module, layers: list[Layer], params: list[nn.Parameter], likelihood: Likelihood, evidence: Evidence,
                 datapoints: float, prior_precision: Diagonal) -> None:  # fmt: skip
        self.model = copy.deepcopy(model)
        names = {id(p): name for name, p in model.named_parameters()}
        parameters, modules = dict(self.model.named_parameters()), dict(self.model.named_modules())
        self.names = [names[id(p)] for p in params]
        self.params = [parameters[name] for name in self.names]
        self.layers = [type(layer)(layer.name, modules[layer.name], with_bias=layer.has_bias) for layer in layers]
        self.likelihood, self.evidence, self.datapoints = likelihood, evidence, datapoints
        self.prior_precision, self.sigma_noise = prior_precision, 1.0

    # --- what each kind of posterior has of its own -------------------------------------------------------------------------

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        """n deviations from the trained weights, ``(n, *p.shape)`` for each parameter."""

    @abstractmethod
    def log_marginal_likelihood(self, prior_precision: Any = None, sigma_noise: float | None = None) -> Tensor:
        """``log p(y|θ*) - ½ θ*ᵀΛθ* + ½ log det Λ - ½ log det (Λ + c F/σ²)``, a float64 number."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """Those of F that may not be 0."""

    @abstractmethod
    def variance(self, jacobian: GramOperator) -> Tensor:
        """Each datapoint's own ``J (Λ + c F/σ²)⁻¹ Jᵀ``, ``(N, K, K)``."""

    dtype: torch.dtype  # of what is computed with F
    by_layer: bool

    # --- prior precision and noise by marginal likelihood -------------------------------------------------------------------

    @property
    def log_likelihood(self) -> float:
        """``log p(y|θ*)`` of ``datapoints`` datapoints."""
        return self._log_likelihood(self.sigma_noise)

    def _log_likelihood(self, sigma: float) -> float:
        return self.evidence.at(sigma) if isinstance(self.likelihood, Gaussian) else self.evidence.log_likelihood

    def tune_prior(self, low: float = 1e-4, high: float = 1e6) -> float:
        """The λ of ``Λ = λI`` with the largest log marginal likelihood, by golden-section search over log λ; sets and returns it.

        Only F's eigenvalues μ are needed: ``log det (λ + c F) = P log λ + Σ log(1 + c μ/λ)``.
        """
        best, _ = self._tuned_prior(low, high)(self.sigma_noise)
        _check_range(best, low, high, "prior precisions", "tune_prior(low, high)", "prior_precision")
        self.prior_precision = best
        return best

    def optimize_prior_precision(self, low: float = 1e-4, high: float = 1e6) -> float:
        """``tune_prior``, by the name it has elsewhere."""
        return self.tune_prior(low, high)

    def tune_noise(self, low: float = NOISES[0], high: float = NOISES[1], prior: bool = True) -> float:
        """The observation noise σ of regression with the largest log marginal likelihood, together with the λ that is best for it
        (``prior=False``: for the prior as it is); sets both, and returns σ."""
        if not isinstance(self.likelihood, Gaussian):
            raise ValueError('observation noise is for regression: likelihood="gaussian".')
        tuned = self._tuned_prior(1e-4, 1e6) if prior else None

        def negative(log_sigma: float) -> float:
            sigma = math.exp(log_sigma)
            if tuned is not None:
                return tuned(sigma)[1] - self.evidence.at(sigma)
            return -float(self.log_marginal_likelihood(sigma_noise=sigma))

        sigma = math.exp(golden_section(negative, math.log(low), math.log(high)))
        _check_range(sigma, low, high, "noises", "tune_noise(low, high)", "sigma_noise")
        self.sigma_noise = sigma
        if prior:
            self.tune_prior()
        return sigma

    def _tuned_prior(self, low: float, high: float) -> Callable[[float], tuple[float, float]]:
        """For a noise σ: the best λ, and what it is best in, ``½ λ|θ*|² + ½ Σ log(1 + c μ/(σ²λ))``."""
        mu = self.eigenvalues().double().cpu()
        scatter = sum(float(w.detach().double().square().sum()) for w in self.params)

        def tuned(sigma: float) -> tuple[float, float]:
            def negative(log_lambda: float) -> float:
                log_ratio = float(torch.log1p(self.datapoints / sigma**2 * mu * math.exp(-log_lambda)).sum())
                return 0.5 * math.exp(log_lambda) * scatter + 0.5 * log_ratio

            best = golden_section(negative, math.log(low), math.log(high))
            return math.exp(best), negative(best)

        return tuned

    # --- sampled networks ---------------------------------------------------------------------------------------------------

    def sample_networks(self, n: int, generator: torch.Generator | None = None) -> Iterator[nn.Module]:
        """n copies of the model with weights drawn from the posterior, one at a time."""
        for _ in range(n):
            network = copy.deepcopy(self.model)
            parameters = dict(network.named_parameters())
            with torch.no_grad():
                for name, deviation in zip(self.names, self.sample(1, generator), strict=True):
                    parameters[name].add_(deviation[0].to(parameters[name].dtype))
            yield network

    @torch.no_grad()
    def predict_sampled(self, x: Any, n: int = 20, generator: torch.Generator | None = None) -> Tensor:
        """Predictions averaged over n sampled networks: class probabilities, or means for the Gaussian."""
        return self.predictive_samples(x, n, "nn", generator=generator).mean(0)

    # --- the linearised (GLM) predictive ------------------------------------------------------------------------------------

    @torch.no_grad()
    def functional_variance(self, x: Any, batch_size: int = 100) -> tuple[Tensor, Tensor]:
        """Outputs ``(N, ..., C)`` and the covariance ``J (Λ + c F/σ²)⁻¹ Jᵀ`` of the linearised outputs, ``(N, K, K)`` for all K of each.

        J is the Jacobian at ``x``: all of it products of gradients.
        """
        outputs, variances = [], []
        with buffers_kept(self.model):
            for part, _ in pieces(x, None, batch_size, self.params[0].device):
                outputs.append(call_model(self.model, part))
                calls, N, K = record(self.model, self.layers, part, None, Labels("full"), Gaussian(), None, None)
                variances.append(self.variance(GramOperator(self.params, calls, N, K, self.by_layer, self.dtype)))
        return torch.cat(outputs), torch.cat(variances)

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
        return _mean_prediction(self.likelihood, _draws(out, variance, samples, generator)).mean(0)

    def predictive(self, x: Any, batch_size: int = 100, noise: bool = True) -> Predictive:
        """Regression: mean and variance of observations at ``x``; ``noise=False``: of the function without observation noise."""
        if not isinstance(self.likelihood, Gaussian):
            raise ValueError('a predictive variance is for regression, likelihood="gaussian"; class probabilities are predict(x).')
        mean, variance = self.functional_variance(x, batch_size)
        marginal = variance.diagonal(dim1=1, dim2=2).reshape(mean.shape)
        return Predictive(mean, marginal + self.sigma_noise**2 if noise else marginal)

    @torch.no_grad()
    def predictive_samples(self, x: Any, n_samples: int = 100, pred_type: str = "glm", *, batch_size: int = 100,
                           generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
        """n predictions ``(n, N, ..., C)`` (class probabilities, or means for the Gaussian) of the linearised model (``"glm"``), or of
        networks with sampled weights (``"nn"``)."""
        if pred_type == "nn":
            networks = self.sample_networks(n_samples, generator)
            device = self.params[0].device
            outputs = [torch.cat([call_model(network, part) for part, _ in pieces(x, None, None, device)]) for network in networks]
            return _mean_prediction(self.likelihood, torch.stack(outputs))
        if pred_type != "glm":
            raise ValueError(f'pred_type must be "glm" or "nn", got {pred_type!r}.')
        out, variance = self.functional_variance(x, batch_size)
        return _mean_prediction(self.likelihood, _draws(out, variance, n_samples, generator))

    def __call__(self, x: Any, pred_type: str = "glm", link_approx: str = "probit", n_samples: int = 100,
                 generator: torch.Generator | None = None) -> Any:  # fmt: skip
        """As laplace-torch's: class probabilities; for regression the outputs and their covariance ``(N, K, K)``, without noise."""
        if pred_type == "nn":
            return self.predict_sampled(x, n_samples, generator)
        if pred_type != "glm":
            raise ValueError(f'pred_type must be "glm" or "nn", got {pred_type!r}.')
        return self.functional_variance(x) if isinstance(self.likelihood, Gaussian) else self.predict(x, link_approx, n_samples,
                                                                                                     generator=generator)  # fmt: skip


class ExactPosterior(Posterior):
    """``N(θ*, (Λ + c F/σ²)⁻¹)`` with the exact subsampled Fisher: full covariance, or one block per layer. Made by ``fit``."""

    def __init__(self, model: nn.Module, fisher: Fisher, likelihood: Likelihood, evidence: Evidence, datapoints: float,
                 prior_precision: Diagonal) -> None:  # fmt: skip
        super().__init__(model, fisher.layers, fisher.params, likelihood, evidence, datapoints, prior_precision)
        self.fisher, self.by_layer, self.dtype = fisher, fisher.by_layer, fisher.operator.dtype

    @property
    def _strength(self) -> float:
        """``c/σ²``."""
        return self.datapoints / self.sigma_noise**2

    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        draws = self.fisher.sample(n, self.prior_precision, datapoints=self._strength, generator=generator)
        pieces = draws.split([p.numel() for p in self.params])
        return [piece.mT.reshape(n, *p.shape) for piece, p in zip(pieces, self.params, strict=True)]

    def log_marginal_likelihood(self, prior_precision: Diagonal | None = None, sigma_noise: float | None = None) -> Tensor:
        """``log p(y|θ*) - ½ θ*ᵀΛθ* + ½ log det Λ - ½ log det (Λ + c F/σ²)``, a float64 number."""
        prior = self.prior_precision if prior_precision is None else prior_precision
        sigma = self.sigma_noise if sigma_noise is None else sigma_noise
        precision = self.fisher.precision(prior, "prior_precision")
        scatter = sum(float((v * w.detach().double().square()).sum()) for v, w in zip(precision.values, self.params, strict=True))
        log_det = self.fisher.logdet(prior, datapoints=self.datapoints / sigma**2)
        return self._log_likelihood(sigma) - 0.5 * scatter + 0.5 * precision.logdet(self.params) - 0.5 * log_det

    def eigenvalues(self) -> Tensor:
        return self.fisher.eigenvalues()

    def variance(self, jacobian: GramOperator) -> Tensor:
        return self.fisher.damped(self.prior_precision, datapoints=self._strength).variance(jacobian)

    def posterior_covariance(self) -> Tensor:
        """``(Λ + c F/σ²)⁻¹`` as a ``(P, P)`` matrix: for small models."""
        identity = torch.eye(self.fisher.P, dtype=self.dtype, device=self.params[0].device)
        return self.fisher.posterior_solve(identity, self.prior_precision, datapoints=self._strength)


def fit(model: nn.Module, x: Any, y: Tensor | None = None, *, labels: str = "mc", likelihood: str | Likelihood = "categorical",
        blocks: str = "full", prior_precision: Diagonal | None = None, sigma_noise: float | None = 1.0,
        datapoints: float | None = None, **options: Any) -> ExactPosterior:  # fmt: skip
    """The exact Laplace posterior around a trained model's weights.

    x, y: the data whose Fisher it is, or a ``DataLoader`` of both; all of it or a subsample of a training set of ``datapoints`` (then
    the log likelihood is scaled up as the Fisher is). ``prior_precision``: a number, one per parameter, a flat diagonal; None chooses
    one number by marginal likelihood. ``sigma_noise``: the standard deviation of observations in regression; None chooses it by
    marginal likelihood. Further options are those of ``foof.Fisher``. Categorical positions with label -100 count nowhere.
    """
    kind = likelihood_named(likelihood)
    check_data(x, y)
    check_noise(kind, sigma_noise)
    fisher = Fisher(model, x, labels, y, likelihood=kind, blocks=blocks, **options)
    c = float(fisher.N if datapoints is None else datapoints)
    prior = 1.0 if prior_precision is None else prior_precision
    fisher.damped(fisher.precision(prior, "prior_precision"), datapoints=c)  # or an error
    evidence = gather_evidence(model, kind, x, y, options.get("batch_size"), c / fisher.N)
    posterior = ExactPosterior(model, fisher, kind, evidence, c, prior)
    return tuned(posterior, prior_precision, sigma_noise)


# --- Kronecker posteriors: Appendix G -------------------------------------------------------------------------------------


@dataclass(eq=False)
class LayerPosterior:
    """One layer's ``N(W*, (λI + c·Σ_E ⊗ Σ)⁻¹)``."""

    columns: Columns  # of no datapoints: its parameters, and where they are in the matrix
    layer: Layer
    inverse: EigenInverse  # of the second moments themselves

    def damped(self, prior: float, c: float) -> EigenInverse:
        """``(λI + c·Σ_E ⊗ Σ)⁻¹``."""
        return self.inverse.with_damping(prior, c)

    def sample(self, n: int, prior: float, c: float, generator: torch.Generator | None) -> list[Tensor]:
        """n deviations, ``(n, *p.shape)`` for each of the layer's parameters."""
        draws = self.damped(prior, c).sample(n, generator).flatten(1)
        flat = torch.empty_like(draws)
        flat[:, self.columns.positions(self.layer)] = draws
        return self.columns.pieces(flat)

    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.inverse.state_dict().values() if isinstance(t, Tensor))


class KroneckerPosterior(Posterior):
    """Each layer ``N(W*, (Λ + c·Σ_E ⊗ Σ/σ²)⁻¹)`` (Ritter et al. 2018), or with the first factor only, Σ_E a multiple of I.

    ``W = W* + U_E [Z / √(c s_E s_Aᵀ/σ² + λ)] U_Aᵀ`` with Z standard normal, in the factors' eigenbases; see ``fit_kronecker``. Of the
    data only second moments are kept.
    """

    by_layer = True

    def __init__(self, model: nn.Module, layers: list[Layer], params: list[nn.Parameter], matrices: list[LayerPosterior],
                 likelihood: Likelihood, evidence: Evidence, datapoints: float, prior_precision: float) -> None:  # fmt: skip
        super().__init__(model, layers, params, likelihood, evidence, datapoints, prior_precision)
        position = {id(p): i for i, p in enumerate(params)}
        ours = {layer.name: layer for layer in self.layers}
        self.matrices = [
            LayerPosterior(Columns([self.params[position[id(p)]] for p in m.columns.params], [], 0, 1), ours[m.layer.name], m.inverse)
            for m in matrices
        ]
        self.dtype = matrices[0].inverse.s_A.dtype

    @property
    def _prior(self) -> float:
        return float(self.prior_precision)  # type: ignore[arg-type]

    def sample(self, n: int, generator: torch.Generator | None = None) -> list[Tensor]:
        drawn: dict[int, Tensor] = {}
        for matrix in self.matrices:
            draws = matrix.sample(n, self._prior, self.datapoints / self.sigma_noise**2, generator)
            drawn.update({id(p): draw for p, draw in zip(matrix.columns.params, draws, strict=True)})
        return [drawn[id(p)] for p in self.params]

    def log_marginal_likelihood(self, prior_precision: float | None = None, sigma_noise: float | None = None) -> Tensor:
        """As the exact posterior's, with the Kronecker curvature."""
        prior = self._prior if prior_precision is None else prior_precision
        sigma = self.sigma_noise if sigma_noise is None else sigma_noise
        scatter = prior * sum(float(w.detach().double().square().sum()) for w in self.params)
        log_ratio = sum(float(matrix.damped(prior, self.datapoints / sigma**2).logdet()) for matrix in self.matrices)
        log_ratio -= sum(w.numel() for w in self.params) * math.log(prior)
        return torch.tensor(self._log_likelihood(sigma) - 0.5 * scatter - 0.5 * log_ratio, dtype=torch.float64)

    def eigenvalues(self) -> Tensor:
        return torch.cat([matrix.inverse.with_damping(0.0).eigenvalues.flatten() for matrix in self.matrices])

    def variance(self, jacobian: GramOperator) -> Tensor:
        total = torch.zeros((), dtype=self.dtype, device=self.params[0].device)
        strength = self.datapoints / self.sigma_noise**2
        blocks = {id(block.params[0]): block for part in jacobian.parts for block in part.blocks}
        for matrix in self.matrices:
            layer = matrix.layer
            J = blocks[id(layer.weight)].flat(self.dtype)[:, matrix.columns.positions(layer)]  # (K·N, G·n·m)
            half = matrix.damped(self._prior, strength).whitened(J.unflatten(1, (layer.groups, layer.n, layer.m)))
            half = half.flatten(1).unflatten(0, (jacobian.K, jacobian.N))
            total = total + torch.einsum("kip,lip->ikl", half, half)
        return total

    def memory(self) -> int:
        """Bytes kept besides the trained model: eigenvalues and eigenvectors of second moments."""
        return sum(matrix.bytes() for matrix in self.matrices)


def fit_kronecker(model: nn.Module, x: Any, y: Tensor | None = None, *, labels: str = "mc", likelihood: str | Likelihood = "categorical",
                  first_factor_only: bool = False, prior_precision: float | None = None, sigma_noise: float | None = 1.0,
                  datapoints: float | None = None, samples: int = 1, batch_size: int | None = None,
                  generator: torch.Generator | int | None = None, exclude: Iterable[str] = ()) -> KroneckerPosterior:  # fmt: skip
    """The Kronecker-factored Laplace posterior; ``first_factor_only``: Appendix G's test, which keeps Σ and drops Σ_E.

    One number for ``prior_precision``, or None for the one with the largest marginal likelihood; the others as in ``fit`` and
    ``foof.Fisher``. Of a ``DataLoader`` only one batch is in memory at a time.
    """
    kind = likelihood_named(likelihood)
    check_data(x, y)
    check_noise(kind, sigma_noise)
    layers, params = fisher_layers(model, names_of(exclude))
    warn_of_training_mode(model)
    prior = ParameterSpace(params, params[0].dtype).precision(1.0 if prior_precision is None else prior_precision, "prior_precision")
    if prior.scalar is None:
        raise ValueError("a Kronecker posterior has one prior_precision for all parameters: give a number.")
    if datapoints is not None and not 0 < datapoints < float("inf"):
        raise ValueError(f"datapoints must be a positive number, got {datapoints}.")
    moments = _SecondMoments(params)
    for calls, N in recorded(model, layers, x, y, Labels(labels, samples), kind, seeded(generator, params[0].device), batch_size):
        moments.add(calls, N)
    c = float(moments.N if datapoints is None else datapoints)
    evidence = gather_evidence(model, kind, x, y, batch_size, c / moments.N)
    posterior = KroneckerPosterior(model, layers, params, moments.posteriors(first_factor_only), kind, evidence, c, prior.scalar)
    return tuned(posterior, prior_precision, sigma_noise)


class _SecondMoments:
    """``Σ = 1/N Σ a aᵀ`` and ``Σ_E = 1/(N R) Σ e eᵀ`` of each matrix of a model, gathered piece by piece."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.N = params, 0
        self.sums: dict[int, list[Any]] = {}  # by the weight's id: layer, rows, the two sums

    def add(self, calls: list[Call], N: int) -> None:
        self.N += N
        K = len(calls[0].errors) if calls else 1
        for block in blocks_of(self.params, calls, N, K):
            if not block.one_matrix or not block.calls:
                raise ValueError("a Kronecker posterior needs layers that are all used and tie no weights across layouts.")
            layer = block.layer
            found = block.second_moments(wide(layer.weight.dtype))
            kept = self.sums.setdefault(id(layer.weight), [layer, 0, *(torch.zeros_like(S) for S in found)])
            kept[1] += N * block.R
            kept[2] += found[0]
            kept[3] += found[1]

    def posteriors(self, first_factor_only: bool) -> list[LayerPosterior]:
        """With the first factor alone, Σ_E becomes its mean eigenvalue times I."""
        made = []
        for layer, rows, Sigma, Sigma_E in self.sums.values():
            Sigma, Sigma_E = Sigma / self.N, Sigma_E / rows
            inverse = EigenInverse.make(Sigma, Sigma_E, 1.0, layer.label, (0, 0))
            if first_factor_only:
                inverse.s_E = inverse.s_E.mean(-1, keepdim=True).expand_as(inverse.s_E)
                inverse.U_E = torch.eye(layer.n, dtype=Sigma_E.dtype, device=Sigma_E.device)
            made.append(LayerPosterior(Columns(layer.parameters, [], 0, 1), layer, inverse))
        return made


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


def check_data(x: Any, y: Tensor | None) -> None:
    """Raise unless there are labels."""
    if y is None and not isinstance(x, DataLoader):
        raise ValueError(
            "a posterior needs the data's labels, since it weighs how well the model fits them: fit(model, x, y), or a DataLoader of "
            f"(inputs, labels) for x; got y=None with x of type {type(x).__name__}."
        )


def check_noise(likelihood: Likelihood, sigma_noise: float | None) -> None:
    """Raise for a noise that is none, or where there is none."""
    if sigma_noise is not None and not 0 < sigma_noise < float("inf"):
        raise ValueError(f"sigma_noise must be a positive number, or None to fit it; got {sigma_noise}.")
    if sigma_noise != 1.0 and not isinstance(likelihood, Gaussian):
        raise ValueError('sigma_noise is the observation noise of regression: likelihood="gaussian".')


def gather_evidence(model: nn.Module, likelihood: Likelihood, x: Any, y: Tensor | None, batch_size: int | None, scale: float) -> Evidence:
    """``scale`` times ``log p(y|θ)`` summed over datapoints, by passes as the Fisher's; the model stays as it is."""
    total, numbers = 0.0, 0
    device = next(model.parameters()).device
    with torch.no_grad(), buffers_kept(model):
        for part, targets in pieces(x, y, batch_size, device):
            if targets is None:
                raise ValueError("the DataLoader of a posterior must give pairs (inputs, labels), or mappings with \"labels\".")
            out = call_model(model, part)
            total -= float(likelihood.negative_log_likelihood(out, targets))
            numbers += out.numel()
    return Evidence(total * scale, numbers * scale)


AnyPosterior = TypeVar("AnyPosterior", bound=Posterior)


def tuned(posterior: AnyPosterior, prior_precision: Diagonal | None, sigma_noise: float | None) -> AnyPosterior:
    """The posterior with what was given, and what was not by marginal likelihood."""
    if sigma_noise is None:
        posterior.tune_noise(prior=prior_precision is None)
    else:
        posterior.sigma_noise = float(sigma_noise)
        if prior_precision is None:
            posterior.tune_prior()
    return posterior


def _check_range(found: float, low: float, high: float, what: str, wider: str, argument: str) -> None:
    """A warning where the best is at an end of the range."""
    if not 2e-3 < math.log(found / low) < math.log(high / low) - 2e-3:
        warn(
            f"the marginal likelihood still grows at the end of the range [{low:g}, {high:g}] of {what}: widen it with "
            f"{wider}, or give {argument} (is the model trained?)."
        )


def _draws(out: Tensor, variance: Tensor, n: int, generator: torch.Generator | None) -> Tensor:
    """n draws of the outputs ``(n, *out.shape)``."""
    L = linalg.damped_cholesky(variance, 1e-6, "the predictive covariance")
    noise = torch.randn(n, *L.shape[:2], 1, dtype=L.dtype, device=out.device, generator=generator)
    return out + (L @ noise).reshape(n, *out.shape)


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
