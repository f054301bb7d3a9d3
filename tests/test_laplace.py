"""Laplace posteriors against dense ones."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import foof
import foof.laplace
import oracle
from cases import cnn, mlp


def problem(kind: str = "mlp") -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model, shape = (mlp(5, 6, 3), (5,)) if kind == "mlp" else (cnn(), (2, 8, 8))
    model = model.double()
    return model, torch.randn(20, *shape).double(), torch.randint(0, 3, (20,)), torch.randn(7, *shape).double()


def dense_posterior(model: nn.Module, x: Tensor, prior: Tensor, c: float) -> Tensor:
    params = list(model.parameters())
    return torch.linalg.inv(prior.diag() + c * oracle.full_fisher(model, x, params, "categorical"))


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("prior", ["number", "per tensor", "diagonal"])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_the_linearised_predictive_is_the_dense_one(kind: str, prior: str, blocks: str) -> None:
    model, x, y, test = problem(kind)
    P = sum(p.numel() for p in model.parameters())
    flat = torch.rand(P, dtype=torch.float64) + 0.5
    values = {"number": 0.7, "diagonal": flat, "per tensor": [0.5 + i for i, _ in enumerate(model.parameters())]}[prior]
    if prior != "diagonal":
        entries = values if isinstance(values, list) else [values] * 99
        pairs = zip(model.parameters(), entries, strict=False)
        flat = torch.cat([torch.full((p.numel(),), float(v), dtype=torch.float64) for p, v in pairs])
    posterior = foof.laplace.fit(model, x, y, labels="full", prior_precision=values, datapoints=100, blocks=blocks)
    out, variance = posterior.functional_variance(test, batch_size=3)
    J = oracle.per_datapoint_jacobian(model, test, list(model.parameters()))
    F = oracle.full_fisher(model, x, list(model.parameters()), "categorical")
    if blocks == "layer":
        F = oracle.block_diagonal(F, [sum(p.numel() for p in m.parameters()) for m in model if list(m.parameters())])
    expected = J @ torch.linalg.inv(flat.diag() + 100 * F) @ J.mT
    assert oracle.relative_error(variance, expected) < 1e-9
    assert torch.equal(out, torch.cat([model(part) for part in test.split(3)]))


def test_predictions_are_probabilities_and_mc_approaches_the_probit() -> None:
    model, x, y, test = problem()
    posterior = foof.laplace.fit(model, x, y, labels="full")
    probit, mc = posterior.predict(test), posterior.predict(test, "mc", samples=2000)
    sampled = posterior.predict_sampled(test, 50)
    for p in (probit, mc, sampled):
        torch.testing.assert_close(p.sum(1), torch.ones(7, dtype=torch.float64))
    assert (probit - mc).abs().max() < 0.1


@pytest.mark.parametrize("method", ["probit", "mc"])
def test_predictions_of_a_float32_model_with_a_float64_posterior(method: str) -> None:
    model, x, y, test = problem()
    model, x, test = model.float(), x.float(), test.float()
    found, expected = (
        foof.laplace.fit(model, x, y, labels="full", prior_precision=1.0, dtype=dtype).predict(
            test, method, samples=5000, generator=torch.Generator().manual_seed(0)
        )
        for dtype in (torch.float64, None)
    )
    assert (found - expected).abs().max() < 0.03


@pytest.mark.parametrize("form", ["tuple", "mapping"])
def test_inputs_in_any_form_that_the_model_takes(form: str) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 3).double()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.linear(a + b)

    _, x, y, test = problem()
    model = Sum()

    def split(x: Tensor) -> tuple[Tensor, Tensor] | dict[str, Tensor]:
        return (0.5 * x, 0.5 * x) if form == "tuple" else {"a": 0.5 * x, "b": 0.5 * x}

    found = foof.laplace.fit(model, split(x), y, labels="full", prior_precision=1.0).predict(split(test), batch_size=3)
    expected = foof.laplace.fit(model.linear, x, y, labels="full", prior_precision=1.0).predict(test, batch_size=3)
    torch.testing.assert_close(found, expected)


def test_the_prior_has_the_largest_marginal_likelihood() -> None:
    model, x, y, _ = problem()
    posterior = foof.laplace.fit(model, x, y, labels="full")
    best = posterior.prior_precision
    values = [posterior.log_marginal_likelihood(best * factor).item() for factor in (0.9, 1.0, 1.1)]
    assert values[1] == max(values)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    F = oracle.full_fisher(model, x, list(model.parameters()), "categorical")
    identity = torch.eye(len(theta), dtype=torch.float64)
    log_likelihood = -nn.functional.cross_entropy(model(x), y, reduction="sum")
    log_det = torch.logdet(best * identity + 20 * F) - len(theta) * math.log(best)
    expected = log_likelihood - 0.5 * best * theta @ theta - 0.5 * log_det
    assert values[1] == pytest.approx(expected.item(), rel=1e-9)


def test_networks_are_sampled_around_the_trained_weights_whatever_the_model_does_next() -> None:
    model, x, y, _ = problem()
    posterior = foof.laplace.fit(model, x, y, prior_precision=1e8)
    trained = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        model[0].weight.add_(1.0)
    network = next(posterior.sample_networks(1))
    assert all((p - t).abs().max() < 1e-2 for p, t in zip(network.parameters(), trained, strict=True))
    assert posterior.functional_variance(x)[0].isfinite().all()


@pytest.mark.parametrize("fit", [foof.laplace.fit, foof.laplace.fit_kronecker])
@pytest.mark.filterwarnings("ignore:the Fisher does not cover")
def test_a_posterior_is_of_the_model_as_it_was_fitted(fit: Any) -> None:
    """Not only of the weights that it covers: norms, running averages, the mode, whatever is trained or frozen since."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    x, y = torch.randn(12, 4).double(), torch.randint(0, 3, (12,))
    model(x)  # running averages
    model.eval()
    posterior = fit(model, x, y, labels="full", prior_precision=1.0)

    def seen() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        return [posterior.predict(x), *posterior.functional_variance(x), posterior.predict_sampled(x, 2, generator),
                *next(posterior.sample_networks(1, generator)).state_dict().values(),
                posterior.log_marginal_likelihood()]  # fmt: skip

    before = seen()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
    model.requires_grad_(False)
    trained_on = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(map(torch.equal, seen(), before))
    assert all(torch.equal(value, trained_on[name]) for name, value in model.state_dict().items())
    assert model.training
    assert not any(p.requires_grad for p in model.parameters())


class Tokens(nn.Module):
    """Logits ``(N, 3, 2)`` for three tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mid, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(torch.tanh(self.mid(h + h.mean(1, keepdim=True))))


def test_outputs_with_positions() -> None:
    """Variances of all outputs of a datapoint together; predictions in the shape of the outputs."""
    torch.manual_seed(0)
    model, x, y, test = Tokens().double(), torch.randint(0, 5, (6, 3)), torch.randint(0, 2, (6, 3)), torch.randint(0, 5, (4, 3))
    params = list(model.parameters())
    posterior = foof.laplace.fit(model, x, y, labels="full", prior_precision=1.0)
    out, variance = posterior.functional_variance(test, batch_size=3)
    J = oracle.per_datapoint_jacobian(model, test, params)
    P = dense_posterior(model, x, torch.ones(J.shape[-1], dtype=torch.float64), 6)
    assert oracle.relative_error(variance, J @ P @ J.mT) < 1e-9
    spread = (J @ P @ J.mT).diagonal(dim1=1, dim2=2).reshape(out.shape)
    torch.testing.assert_close(posterior.predict(test), (out / (1 + math.pi / 8 * spread).sqrt()).softmax(-1))
    assert (posterior.predict(test, "mc", samples=2000) - posterior.predict(test)).abs().max() < 0.1


def test_labels_that_leave_out_positions_count_neither_in_the_likelihood_nor_in_the_fisher() -> None:
    torch.manual_seed(0)
    model, x, y = Tokens().double(), torch.randint(0, 5, (6, 3)), torch.randint(0, 2, (6, 3))
    y[:, 2] = -100
    posterior = foof.laplace.fit(model, x, y, labels="full", prior_precision=1.0)
    first_two = foof.Fisher(nn.Sequential(model, Leading(2)), x, "full")
    torch.testing.assert_close(posterior.fisher.dense(), first_two.dense())
    assert posterior.log_likelihood == pytest.approx(-nn.functional.cross_entropy(model(x).mT, y, reduction="sum").item())


class Leading(nn.Module):
    def __init__(self, positions: int) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.positions]


def test_predictions_of_a_model_frozen_since() -> None:
    model, x, y, test = problem()
    posterior = foof.laplace.fit(model, x, y, labels="full", prior_precision=1.0)
    expected = posterior.predict(test)
    model.requires_grad_(False)
    assert torch.equal(posterior.predict(test), expected)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("fit", [foof.laplace.fit, foof.laplace.fit_kronecker])
def test_the_model_is_left_as_it_was_and_passes_are_cut(fit: Any) -> None:
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), torch.randn(8, 4), torch.randint(0, 3, (8,))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sizes = []
    model.register_forward_hook(lambda _, args, out: sizes.append(len(out)))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        posterior = fit(model, x, y, exclude=["1"], batch_size=4, prior_precision=1.0)
    if fit is foof.laplace.fit:
        posterior.predict(x, batch_size=2)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert max(sizes) == 4


@pytest.mark.parametrize("fit", [foof.laplace.fit, foof.laplace.fit_kronecker])
def test_a_prior_at_the_end_of_its_range_is_told_of(fit: Any) -> None:
    model, x, y, _ = problem()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        posterior = fit(model, x, y, labels="full")
    best = posterior.prior_precision
    with pytest.warns(UserWarning, match="still grows at the end of the range"):
        assert posterior.tune_prior(high=best / 2) == pytest.approx(best / 2, rel=1e-2)
    with pytest.warns(UserWarning, match="still grows at the end of the range"):
        assert posterior.tune_prior(low=2 * best) == pytest.approx(2 * best, rel=1e-2)


# --- Kronecker ---


@pytest.mark.parametrize("first_factor_only", [False, True])
def test_the_covariance_of_kronecker_samples(first_factor_only: bool) -> None:
    model, x, y, _ = problem()
    posterior = foof.laplace.fit_kronecker(
        model, x, y, labels="full", prior_precision=0.5, datapoints=30, first_factor_only=first_factor_only
    )
    n = 20_000
    draws = posterior.sample(n, torch.Generator().manual_seed(0))
    with torch.no_grad():
        h = model[1](model[0](x))
        A = torch.cat([h, torch.ones(20, 1, dtype=torch.float64)], dim=1)  # the last layer: J = [a, 1] ⊗ I
        p = model(x).softmax(1)
    Sigma_E = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).mean(0)
    if first_factor_only:
        Sigma_E = Sigma_E.trace() / 3 * torch.eye(3, dtype=torch.float64)
    precision = 30 * torch.kron(Sigma_E, A.T @ A / 20) + 0.5 * torch.eye(21, dtype=torch.float64)
    expected = torch.linalg.inv(precision)
    last = torch.cat([draws[2], draws[3].unsqueeze(2)], dim=2).flatten(1)
    d = expected.diagonal()
    z = (last.T @ last / n - expected) / ((expected**2 + torch.outer(d, d)) / n).sqrt()
    assert z.abs().max() < 5


def test_kronecker_is_exact_for_one_layer_and_one_datum() -> None:
    """Then F = Σ ⊗ Σ_E, so both posteriors have one marginal likelihood, hence one best prior."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3).double(), torch.randn(1, 4).double(), torch.tensor([1])
    exact = foof.laplace.fit(model, x, y, labels="full", datapoints=50)
    kronecker = foof.laplace.fit_kronecker(model, x, y, labels="full", datapoints=50)
    for prior in (0.1, 1.0, 10.0):
        assert kronecker.log_marginal_likelihood(prior).item() == pytest.approx(exact.log_marginal_likelihood(prior).item())
    assert kronecker.prior_precision == pytest.approx(exact.prior_precision, rel=1e-6)


def test_a_kronecker_posterior_keeps_second_moments_only() -> None:
    """As much for 1,000 datapoints as for 10, gathered in pieces or at once."""
    torch.manual_seed(0)
    model, x, y = mlp(5, 6, 3).double(), torch.randn(1000, 5).double(), torch.randint(0, 3, (1000,))
    few, many = (foof.laplace.fit_kronecker(model, x[:n], y[:n], labels="full", prior_precision=1.0) for n in (10, 1000))
    pieces = foof.laplace.fit_kronecker(model, x, y, labels="full", prior_precision=1.0, batch_size=300)
    assert abs(len(pickle.dumps(few)) - len(pickle.dumps(many))) < 100
    assert many.memory() == 8 * sum(m + m * m + n + n * n for m, n in [(6, 6), (7, 3)])
    for ours, theirs in zip(pieces.matrices, many.matrices, strict=True):
        assert oracle.relative_error(ours.inverse.eigenvalues, theirs.inverse.eigenvalues) < 1e-9
    assert pieces.log_marginal_likelihood().item() == pytest.approx(many.log_marginal_likelihood().item())


def test_an_embedding_s_diagonal_second_moment_stays_diagonal(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(300, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)).double(), torch.randint(0, 300, (20, 3))
    orders, eigh = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda S: orders.append(S.shape[-1]) or eigh(S))
    posterior = foof.laplace.fit_kronecker(model, x, torch.randint(0, 3, (20,)), labels="full", prior_precision=0.5)
    assert max(orders) == 13
    embedding = posterior.matrices[0].inverse
    counts = torch.bincount(x.flatten(), minlength=300).double() * (torch.arange(300) > 0)
    torch.testing.assert_close(embedding.s_A, counts / 20)
    G = torch.randn(4, 300, dtype=torch.float64)
    precision = torch.kron((embedding.U_E * embedding.s_E[0]) @ embedding.U_E[0].mT, embedding.s_A.diag())[0]
    precision = precision + 0.5 * torch.eye(1200, dtype=torch.float64)
    inverse = embedding.with_damping(0.5)
    torch.testing.assert_close(inverse.apply(G)[0].flatten(), torch.linalg.solve(precision, G.flatten()))
    torch.testing.assert_close(inverse.logdet(), torch.logdet(precision))
    torch.testing.assert_close(inverse.whitened(G).square().sum(), G.flatten() @ torch.linalg.solve(precision, G.flatten()))


def test_the_linearised_predictive_of_a_kronecker_posterior() -> None:
    model, x, y, test = problem("cnn")
    posterior = foof.laplace.fit_kronecker(model, x, y, labels="full", prior_precision=0.5, datapoints=30)
    out, variance = posterior.functional_variance(test, batch_size=3)
    n = 4000
    deviations = torch.cat([d.flatten(1) for d in posterior.sample(n, torch.Generator().manual_seed(0))], dim=1)
    J = oracle.per_datapoint_jacobian(model, test, list(model.parameters()))
    f = torch.einsum("icp,sp->sic", J, deviations)
    sampled = torch.einsum("sic,sid->icd", f, f) / n
    assert oracle.relative_error(sampled, variance) < 0.05
    scale = (1 + math.pi / 8 * variance.diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(posterior.predict(test), (out / scale).softmax(-1))


# --- regression ---


def line(N: int = 60, noise: float = 0.3) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """Observations of a linear function, its weights at the maximum of their posterior under a unit prior: Bayes without Laplace."""
    torch.manual_seed(0)
    x, w = torch.randn(N, 3).double(), torch.randn(2, 3).double()
    y = x @ w.T + noise * torch.randn(N, 2).double()
    model = nn.Linear(3, 2, bias=False).double()
    model.weight.data = torch.linalg.solve(x.T @ x / noise**2 + torch.eye(3).double(), x.T @ y / noise**2).T.clone()
    return model, x, y, torch.randn(5, 3).double()


@pytest.mark.parametrize("fit", [foof.laplace.fit, foof.laplace.fit_kronecker])
def test_bayesian_linear_regression_exactly(fit: Any) -> None:
    """Then Laplace is exact, and so is one Kronecker product. Evidence: ``y ~ N(0, σ²I + x xᵀ/λ)`` for each output."""
    model, x, y, test = line()
    posterior = fit(model, x, y, labels="full", likelihood="gaussian", prior_precision=1.0, sigma_noise=0.3)
    mean, variance = posterior.predictive(test)
    S = torch.linalg.inv(x.T @ x / 0.09 + torch.eye(3).double())
    torch.testing.assert_close(mean, model(test).detach())
    torch.testing.assert_close(variance, ((test @ S * test).sum(1, keepdim=True) + 0.09).expand(5, 2))
    torch.testing.assert_close(posterior.predictive(test, noise=False).variance, variance - 0.09)
    evidence = torch.distributions.MultivariateNormal(torch.zeros(60).double(), 0.09 * torch.eye(60).double() + x @ x.T)
    assert posterior.log_marginal_likelihood().item() == pytest.approx(evidence.log_prob(y.T).sum().item())
    samples = posterior.sample(20_000, torch.Generator().manual_seed(0))[0]
    assert oracle.relative_error(torch.cov(samples[:, 0].T), S) < 0.05
    outputs = posterior.predictive_samples(test, 5000, generator=torch.Generator().manual_seed(0))
    assert oracle.relative_error(outputs.var(0), variance - 0.09) < 0.1


@pytest.mark.parametrize("fit", [foof.laplace.fit, foof.laplace.fit_kronecker])
@pytest.mark.parametrize("prior", [None, 1.0])
def test_observation_noise_by_marginal_likelihood(fit: Any, prior: float | None) -> None:
    model, x, y, _ = line(400)
    posterior = fit(model, x, y, labels="full", likelihood="gaussian", prior_precision=prior, sigma_noise=None)
    sigma, best = posterior.sigma_noise, posterior.log_marginal_likelihood().item()
    assert sigma == pytest.approx(0.3, rel=0.1)
    assert posterior.log_marginal_likelihood(sigma_noise=sigma).item() == best
    for factor in (0.98, 1.02):
        assert posterior.log_marginal_likelihood(sigma_noise=factor * sigma).item() < best
        if prior is None:
            assert posterior.log_marginal_likelihood(factor * posterior.prior_precision).item() < best
    assert prior is None or posterior.prior_precision == prior


def test_noise_belongs_to_regression() -> None:
    model, x, y, test = problem()
    for options, said in [
        ({"sigma_noise": 0.5}, "observation noise of regression"),
        ({"sigma_noise": -1.0, "likelihood": "gaussian"}, "positive number, or None"),
    ]:
        with pytest.raises(ValueError, match=said):
            foof.laplace.fit(model, x, y, **options)
    posterior = foof.laplace.fit(model, x, y, prior_precision=1.0)
    with pytest.raises(ValueError, match=r"class probabilities are predict\(x\)"):
        posterior.predictive(test)
    with pytest.raises(ValueError, match="noise is for regression"):
        posterior.tune_noise()
    with pytest.raises(ValueError, match='"glm" or "nn"'):
        posterior(test, pred_type="mc")


def test_calibration_by_hand() -> None:
    p = torch.tensor([[0.8, 0.2], [0.6, 0.4], [0.3, 0.7], [0.9, 0.1]])
    c = foof.laplace.calibration(p, torch.tensor([0, 1, 1, 0]), bins=10)
    assert c.accuracy == 0.75
    assert c.nll == pytest.approx(-(math.log(0.8) + math.log(0.4) + math.log(0.7) + math.log(0.9)) / 4)
    assert c.brier == pytest.approx((2 * 0.04 + 2 * 0.36 + 2 * 0.09 + 2 * 0.01) / 4)
    assert c.ece == pytest.approx((0.2 + 0.6 + 0.3 + 0.1) / 4)


def test_bad_input_is_explained() -> None:
    model, x, y, test = problem()
    with pytest.raises(ValueError, match="prior_precision must be positive"):
        foof.laplace.fit(model, x, y, prior_precision=0.0)
    with pytest.raises(ValueError, match="prior_precision must be positive"):
        foof.laplace.fit_kronecker(model, x, y, prior_precision=-1.0)
    with pytest.raises(ValueError, match="one prior_precision for all"):
        foof.laplace.fit_kronecker(model, x, y, prior_precision=[1.0, 2.0, 3.0, 4.0])  # type: ignore[arg-type]
    for fit in (foof.laplace.fit, foof.laplace.fit_kronecker):
        with pytest.raises(ValueError, match="datapoints must be a positive number, got -5"):
            fit(model, x, y, datapoints=-5)
    with pytest.raises(ValueError, match='"probit" or "mc"'):
        foof.laplace.fit(model, x, y).predict(test, "exact")
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.2"):
        foof.laplace.fit(model, x, y + 3)


def test_copies_of_a_fisher_are_fishers():
    F = foof.Fisher(mlp(3, 4, 2).double(), torch.randn(6, 3, dtype=torch.float64))
    for twin in (copy.deepcopy(F), pickle.loads(pickle.dumps(F))):
        assert torch.equal(twin.dense(), F.dense())
        assert all(map(torch.equal, twin.diagonal(), F.diagonal()))


@pytest.mark.parametrize("damping", [1.0, 1e-3, 1e-6])
def test_the_log_determinant_in_float32_where_there_are_more_columns_than_parameters(damping):
    """Rounding errors of eigenvalues that are zero must not count, however small λ is."""
    model, x = mlp(4, 3, 2), torch.randn(200, 4)
    logdets = [float(foof.Fisher(model.to(dtype), x.to(dtype), labels="full").logdet(damping)) for dtype in (torch.float32, torch.float64)]
    assert logdets[0] == pytest.approx(logdets[1], abs=0.02)


def test_refinement_never_makes_a_solution_worse():
    torch.manual_seed(0)
    model, x = mlp(4, 3, 2), torch.randn(200, 4)
    v = torch.randn(sum(p.numel() for p in model.parameters()))
    exact = foof.Fisher(copy.deepcopy(model).double(), x.double(), labels="full").solve(v.double(), damping=1e-8)
    F = foof.Fisher(model, x, labels="full")
    errors = [float((F.solve(v, damping=1e-8, refine=n).double() - exact).norm() / exact.norm()) for n in (0, 3)]
    assert errors[1] <= 1.01 * errors[0]


def test_a_diagonal_prior_of_another_precision_can_be_refined_with():
    F = foof.Fisher(mlp(3, 4, 2), torch.randn(6, 3))
    v, prior = torch.randn(F.shape[0]), torch.rand(F.shape[0], dtype=torch.float64) + 0.5
    assert torch.allclose(F.solve(v, damping=prior, refine=1), F.solve(v, damping=prior), rtol=1e-3, atol=1e-5)
