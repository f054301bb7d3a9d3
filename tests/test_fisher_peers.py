"""The Fisher against independent libraries: curvlinops, BackPACK and laplace-torch."""

from __future__ import annotations

import backpack
import pytest
import torch
from backpack.extensions import DiagGGNExact, SqrtGGNExact
from curvlinops import EFLinearOperator, GGNLinearOperator
from laplace import Laplace
from laplace.curvature import BackPackGGN
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import foof
import oracle
from cases import cnn, mlp

LOSSES = {"categorical": nn.CrossEntropyLoss, "gaussian": nn.MSELoss}


def problem(kind: str, likelihood: str = "categorical") -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model, x = (mlp(5, 6, 3), torch.randn(12, 5)) if kind == "mlp" else (cnn(), torch.randn(12, 2, 8, 8))
    y = torch.randint(0, 3, (12,)) if likelihood == "categorical" else torch.randn(12, 3).double()
    return model.double(), x.double(), y


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("likelihood", ["categorical", "gaussian"])
def test_the_full_fisher_is_the_ggn_of_curvlinops(kind: str, likelihood: str) -> None:
    """The mean loss's GGN; ``MSELoss`` is 2/C times the Gaussian's ``½|y - f|²`` per datapoint."""
    model, x, y = problem(kind, likelihood)
    F = foof.Fisher(model, x, "full", likelihood=likelihood)
    theirs = GGNLinearOperator(model, LOSSES[likelihood](), F.params, [(x, y)])
    scale = 1.0 if likelihood == "categorical" else 2 / 3
    identity = torch.eye(F.P, dtype=torch.float64)
    assert oracle.relative_error(F.dense() * scale, theirs @ identity) < 1e-9


def test_solve_agrees_with_curvlinops_by_conjugate_gradients() -> None:
    """Their products, SciPy's conjugate gradients (those of their own CGInverseLinearOperator stop at a residual of 3e-8)."""
    model, x, y = problem("cnn")
    F = foof.Fisher(model, x, "full")
    ggn = GGNLinearOperator(model, nn.CrossEntropyLoss(), F.params, [(x, y)]).to_scipy()
    v = torch.randn(F.P, dtype=torch.float64)
    damped = LinearOperator(F.shape, matvec=lambda u: ggn @ u + 0.1 * u)
    by_cg, info = cg(damped, v.numpy(), rtol=1e-12)
    assert info == 0
    assert oracle.relative_error(F.solve(v, 0.1), torch.as_tensor(by_cg)) < 1e-9


def test_the_empirical_fisher_is_that_of_curvlinops() -> None:
    model, x, y = problem("cnn")
    F = foof.Fisher(model, x, "empirical", y)
    theirs = EFLinearOperator(model, nn.CrossEntropyLoss(), F.params, [(x, y)])
    assert oracle.relative_error(F.dense(), theirs @ torch.eye(F.P, dtype=torch.float64)) < 1e-9


def test_the_full_fisher_and_its_diagonal_are_those_of_backpack() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    x, y = torch.randn(8, 2, 4, 4).double(), torch.randint(0, 3, (8,))
    F = foof.Fisher(model, x, "full")
    extended, loss = backpack.extend(model), backpack.extend(nn.CrossEntropyLoss())
    with backpack.backpack(SqrtGGNExact(), DiagGGNExact()):
        loss(extended(x), y).backward()
    V = torch.cat([p.sqrt_ggn_exact.flatten(0, 1).flatten(1) for p in F.params], dim=1).T  # (P, labels · datapoints)
    assert oracle.relative_error(F.dense(), V @ V.T) < 1e-9
    spectrum = torch.linalg.eigvalsh(V.T @ V)  # they keep one column per class, of which one is superfluous
    assert oracle.relative_error(F.eigenvalues(), spectrum[-F.D :]) < 1e-9
    assert oracle.relative_error(F.as_flat(F.diagonal()), torch.cat([p.diag_ggn_exact.flatten() for p in F.params])) < 1e-9


def test_the_log_marginal_likelihood_and_covariance_are_those_of_laplace_torch() -> None:
    from foof.laplace import fit

    torch.manual_seed(0)
    model, prior = mlp(4, 6, 3), 0.8
    x, y = torch.randn(40, 4), torch.randint(0, 3, (40,))
    theirs = Laplace(model, "classification", "all", "full", prior_precision=prior, backend=BackPackGGN)
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    ours = fit(model, x, y, labels="full", prior_precision=prior)
    assert ours.log_marginal_likelihood(prior).item() == pytest.approx(theirs.log_marginal_likelihood().item(), rel=1e-5)
    assert ours.log_marginal_likelihood(3.0).item() == pytest.approx(
        theirs.log_marginal_likelihood(torch.tensor(3.0)).item(), rel=1e-5
    )
    covariance = ours.fisher.posterior_solve(torch.eye(ours.fisher.P), prior)
    theirs.prior_precision = prior
    assert oracle.relative_error(covariance, theirs.posterior_covariance) < 1e-3  # theirs is inverted in float32


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_posterior_of_regression_is_that_of_laplace_torch(structure: str) -> None:
    """Names, evidence, outputs and their covariance. With Kronecker factors without bias, which theirs has a block of its own for."""
    torch.manual_seed(0)
    model = mlp(4, 6, 2).double() if structure == "full" else mlp(4, 6, 2, bias=False).double()
    x, y, test = torch.randn(40, 4).double(), torch.randn(40, 2).double(), torch.randn(5, 4).double()
    theirs = Laplace(model, "regression", "all", structure, prior_precision=0.8, sigma_noise=0.4, backend=BackPackGGN)
    theirs.fit(DataLoader(TensorDataset(x, y), batch_size=40))
    fit = foof.laplace.fit if structure == "full" else foof.laplace.fit_kronecker
    ours = fit(model, x, y, labels="full", likelihood="gaussian", prior_precision=0.8, sigma_noise=0.4)
    assert ours.log_marginal_likelihood().item() == pytest.approx(theirs.log_marginal_likelihood().item(), rel=1e-6)
    for posterior in (ours, theirs):
        assert float(posterior.sigma_noise) == pytest.approx(0.4)
        assert float(posterior.prior_precision) == pytest.approx(0.8)
    (our_mean, our_variance), (their_mean, their_variance) = ours(test), theirs(test)
    assert oracle.relative_error(our_mean, their_mean) < 1e-9
    assert oracle.relative_error(our_variance, their_variance) < 1e-6
    assert ours.predictive_samples(test, n_samples=7).shape == theirs.predictive_samples(test, n_samples=7).shape
    theirs.optimize_prior_precision(method="marglik", pred_type="glm", n_steps=2000, lr=1e-2)
    assert ours.optimize_prior_precision() == pytest.approx(float(theirs.prior_precision), rel=2e-2)


def test_class_probabilities_are_those_of_laplace_torch() -> None:
    torch.manual_seed(0)
    model, test = mlp(4, 6, 3).double(), torch.randn(5, 4).double()
    x, y = torch.randn(40, 4).double(), torch.randint(0, 3, (40,))
    theirs = Laplace(model, "classification", "all", "full", prior_precision=0.8, backend=BackPackGGN)
    loader = DataLoader(TensorDataset(x, y), batch_size=10)
    theirs.fit(loader)
    ours = foof.laplace.fit(model, loader, labels="full", prior_precision=0.8)
    torch.testing.assert_close(ours(test), theirs(test), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.posterior_covariance(), theirs.posterior_covariance, rtol=1e-4, atol=1e-6)
