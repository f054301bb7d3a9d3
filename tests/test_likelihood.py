"""Output errors against the covariance they must have, and labels that cannot be."""

import pytest
import torch
from torch.autograd.functional import hessian

from foof.likelihood import IGNORED, LIKELIHOODS, Labels, likelihood_named


def labels_for(name, out):
    if name == "categorical":
        return torch.randint(0, out.shape[-1], out.shape[:-1])
    return torch.rand_like(out)


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_enumerated_errors_have_the_covariance_of_the_likelihood(name, shape):
    """``Σ_k s_k s_kᵀ`` of a datapoint is the Hessian of its loss, for these likelihoods the same for every label."""
    torch.manual_seed(0)
    likelihood, out = LIKELIHOODS[name], torch.randn(shape, dtype=torch.float64)
    errors = torch.stack(list(Labels("full").errors(likelihood, out))).flatten(2)
    y = labels_for(name, out)
    for i in range(shape[0]):
        H = hessian(lambda f, i=i: likelihood.negative_log_likelihood(f.unsqueeze(0), y[i : i + 1]), out[i])
        assert torch.allclose(errors[:, i].mT @ errors[:, i], H.reshape(errors.shape[2], -1), atol=1e-12)


@pytest.mark.parametrize("name", ["bernoulli", "gaussian"])
def test_one_output_per_datapoint_needs_no_dimension(name):
    out = torch.randn(5, dtype=torch.float64)
    (flat,), (column,) = (list(Labels("full").errors(LIKELIHOODS[name], each)) for each in (out, out.unsqueeze(1)))
    assert torch.equal(flat, column.squeeze(1))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_given_errors_are_the_gradient_of_the_loss(name):
    torch.manual_seed(0)
    likelihood, out = LIKELIHOODS[name], torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    y = labels_for(name, out.detach())
    likelihood.negative_log_likelihood(out, y).backward()
    assert torch.allclose(next(Labels("empirical").errors(likelihood, out, y)), out.grad)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_sampled_errors_have_it_in_expectation(name):
    torch.manual_seed(0)
    likelihood, out = LIKELIHOODS[name], torch.randn(1, 3, dtype=torch.float64)
    many = out.expand(200_000, 3)
    s = next(Labels("mc").errors(likelihood, many))
    full = torch.stack(list(Labels("full").errors(likelihood, out)))[:, 0]
    assert torch.allclose(s.mT @ s / len(s), full.mT @ full, atol=0.02)
    several = torch.stack(list(Labels("mc", samples=4).errors(likelihood, many[:50_000])))
    assert torch.allclose(torch.einsum("kia,kib->ab", several, several) / 50_000, full.mT @ full, atol=0.02)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_nan_stays_nan_where_it_is(name):
    """A diverged network is told by its loss, not by an exception in the sampling of labels."""
    out = torch.randn(3, 4)
    out[1] = float("nan")
    s = LIKELIHOODS[name].sampled(out)
    assert torch.isfinite(s[[0, 2]]).all()
    assert name == "gaussian" or torch.isnan(s[1]).all()


def test_ignored_positions_have_no_error():
    out = torch.randn(2, 3, 4)
    y = torch.tensor([[0, IGNORED, 2], [1, 1, IGNORED]])
    s = LIKELIHOODS["categorical"].given(out, y)
    assert s[0, 1].abs().sum() == s[1, 2].abs().sum() == 0


@pytest.mark.parametrize("source", ["mc", "full"])
def test_ignored_positions_have_no_error_whatever_the_labels(source):
    """Where the data's labels are given; those that are of no form that could say so are not looked at."""
    out = torch.randn(2, 3, 4, dtype=torch.float64)
    y = torch.tensor([[0, IGNORED, 2], [1, 1, IGNORED]])

    def errors(y):
        drawn = Labels(source).errors(LIKELIHOODS["categorical"], out, y, torch.Generator().manual_seed(0))
        return torch.stack(list(drawn))

    assert torch.equal(errors(y), errors(None) * (y != IGNORED).unsqueeze(-1))
    for other in (y.clamp_min(0), torch.zeros(2, dtype=torch.int64), torch.rand(2, 3), torch.rand(2, 3, 4)):
        assert torch.equal(errors(other), errors(None))


def test_outputs_without_classes_last_are_refused():
    with pytest.raises(ValueError, match=r"logits \(N, ..., C\), got \(3,\)"):
        next(Labels("mc").errors(LIKELIHOODS["categorical"], torch.randn(3)))
    with pytest.raises(ValueError, match="move the classes last"):
        next(Labels("mc").errors(LIKELIHOODS["categorical"], torch.randn(2, 4, 5, 6), torch.zeros(2, 5, 6, dtype=torch.int64)))


def test_what_cannot_be():
    out = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"must be in 0\.\.3"):
        LIKELIHOODS["categorical"].given(out, torch.tensor([0, 4, 1]))
    with pytest.raises(ValueError, match="must be integers of shape"):
        LIKELIHOODS["categorical"].given(out, torch.rand(3))
    with pytest.raises(ValueError, match="targets must have the outputs' shape"):
        LIKELIHOODS["gaussian"].given(out, torch.rand(3))
    with pytest.raises(ValueError, match="likelihood must be one of"):
        likelihood_named("poisson")
    with pytest.raises(ValueError, match="the labels of a Fisher are"):
        Labels("true")
    with pytest.raises(ValueError, match="needs the data's labels"):
        next(Labels("empirical").errors(LIKELIHOODS["categorical"], out))


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_the_log_likelihood_of_many_does_not_overflow_in_half_precision(name):
    out = torch.zeros(60_000, 10)
    y = torch.zeros(60_000, dtype=torch.long) if name == "categorical" else torch.ones(60_000, 10)
    exact, half = (LIKELIHOODS[name].negative_log_likelihood(out.to(dtype), y) for dtype in (torch.float32, torch.float16))
    assert half.item() == pytest.approx(exact.item(), rel=1e-3)
