"""KFAC's factors equal those of curvlinops, in the weight-sharing setting "expand".

Scale: with a mean-reduced loss and one loss term per datapoint there is no factor between the two operators. curvlinops divides Σ
by the number of rows N·R and sums Σ_E over rows; we sum Σ over rows (as FOOF does) and divide Σ_E by N·R: the product is the same.
"""

import pytest
import torch
from torch import nn

import foof
from cases import mlp
from oracle import relative_error

curvlinops = pytest.importorskip("curvlinops")


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def small_cnn():
    return nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(18, 3))


def kronecker_matrix(opt):
    """``Σ ⊗ Σ_E`` of all layers in the order of the model's parameters: each weight's entries, then its bias's."""
    blocks = []
    for block in opt.preconditioner.blocks:
        F = torch.kron(block.moments["Sigma_E"].value, block.moments["Sigma"].value)
        order = torch.arange(len(F)).reshape(block.layer.n, block.layer.m)
        order = torch.cat([order[:, :-1].flatten(), order[:, -1]])
        blocks.append(F[order][:, order])
    return torch.block_diag(*blocks)


LOSSES = {
    # our likelihood: curvlinops' loss, and its operator over ours (full, empirical). Over C = 3 outputs it takes means where ours
    # are sums, and nn.MSELoss is twice ½|y - f|², which enters the empirical Fisher squared.
    "categorical": (nn.CrossEntropyLoss(), {"full": 1.0, "empirical": 1.0}),
    "gaussian": (nn.MSELoss(), {"full": 2 / 3, "empirical": 4 / 3}),
    "bernoulli": (nn.BCEWithLogitsLoss(), {"full": 1 / 3, "empirical": 1 / 3}),
}


@pytest.mark.parametrize("fisher", ["full", "empirical"])
@pytest.mark.parametrize("likelihood", LOSSES)
@pytest.mark.parametrize("net", ["mlp", "cnn"])
def test_equals_curvlinops(net, likelihood, fisher):
    torch.manual_seed(0)
    model, x = (mlp(5, 4, 3), torch.randn(6, 5)) if net == "mlp" else (small_cnn(), torch.randn(6, 2, 7, 7))
    y = torch.randint(0, 3, (6,)) if likelihood == "categorical" else torch.rand(6, 3).round()
    loss, factors = LOSSES[likelihood]
    theirs = curvlinops.KFACLinearOperator(
        model, loss, list(model.parameters()), [(x, y)], check_deterministic=False, separate_weight_and_bias=False,
        fisher_type={"full": "type-2", "empirical": "empirical"}[fisher], kfac_approx="expand",
    )  # fmt: skip
    expected = theirs @ torch.eye(sum(p.numel() for p in model.parameters()))
    opt = foof.KFAC(model, fisher=fisher, likelihood=likelihood)
    opt.initialise([(x, y)])
    assert relative_error(factors[fisher] * kronecker_matrix(opt), expected) <= 1e-10
