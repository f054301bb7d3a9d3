"""``Λ + c F`` factorised once, by columns and by parameters, against dense matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foof
import oracle
from cases import mlp
from foof.gram import GramOperator
from foof.likelihood import Gaussian, Labels
from foof.passes import record
from foof.woodbury import ByColumns, ByParameters, Woodbury
from test_fisher import CASES, case, close

C = 30.0  # datapoints


@pytest.fixture(params=["columns", "parameters"])
def side(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Either way, whatever it costs."""
    monkeypatch.setattr(GramOperator, "columns_are_cheaper", lambda *_: request.param == "columns")
    return request.param


def diagonal(F: foof.Fisher, kind: str) -> tuple[object, Tensor]:
    """A prior in the form people give it, and as a dense diagonal."""
    flat = torch.rand(F.P, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    if kind == "any":
        return flat, flat.diag()
    per_tensor = [0.7 if kind == "number" else float(d.mean()) for d in F.as_list(flat)]
    dense = torch.cat([torch.full((p.numel(),), v, dtype=torch.float64) for p, v in zip(F.params, per_tensor, strict=True)]).diag()
    return (0.7 if kind == "number" else per_tensor), dense


@pytest.mark.parametrize("blocks", ["full", "layer"])
@pytest.mark.parametrize("kind", ["number", "per tensor", "any"])
@pytest.mark.parametrize("name", CASES)
def test_either_side_is_the_dense_one(name: str, kind: str, blocks: str, side: str) -> None:
    model, x, _ = case(name)
    F = foof.Fisher(model, x, "full", blocks=blocks)
    prior, Lambda = diagonal(F, kind)
    D = F.damped(prior, datapoints=C)
    assert {part.side for part in D.parts} == {side}
    dense, v = Lambda + C * F.dense(), torch.randn(F.P, 2, dtype=torch.float64)
    close(D.solve(v), torch.linalg.solve(dense, v))
    close(D.solve(v, refine=1), torch.linalg.solve(dense, v))
    close(D.logdet(), torch.logdet(dense))
    calls, N, K = record(model, F.layers, x[:3], None, Labels("full"), Gaussian(), None, None)
    J = GramOperator(F.params, calls, N, K, F.by_layer, torch.float64)
    jacobian = oracle.per_datapoint_jacobian(model, x[:3], F.params)
    close(D.variance(J), jacobian @ torch.linalg.inv(dense) @ jacobian.mT)


@pytest.mark.parametrize("kind", ["number", "any"])
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_samples_by_parameters_are_a_linear_map_of_noise(kind: str, blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GramOperator, "columns_are_cheaper", lambda *_: False)
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x, "full", blocks=blocks)
    prior, Lambda = diagonal(F, kind)
    units = iter(torch.eye(F.P, dtype=torch.float64).split([p.numel() for p in F.params]))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "randn", lambda *shape, **_: next(units).mT.reshape(shape))
        M = F.damped(prior, datapoints=C).sample(F.P)
    close(M @ M.T, torch.linalg.inv(Lambda + C * F.dense()))


def test_the_smaller_side_is_chosen_and_is_more_exact() -> None:
    """15 parameters on 600 columns: in float32 Woodbury's difference of large numbers loses what a direct solve keeps."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 3), torch.randn(200, 4)
    exact = foof.Fisher(model.double(), x.double(), "full", likelihood="gaussian")
    v = torch.randn(exact.P, dtype=torch.float64)
    expected = exact.solve(v, 1e-5)
    F = foof.Fisher(model.float(), x, "full", likelihood="gaussian")
    assert isinstance(F.damped(1e-5).parts[0], ByParameters)
    ours = oracle.relative_error(F.solve(v, 1e-5), expected)
    by_columns = Woodbury(F.operator, 1e-5)
    by_columns.parts = [ByColumns(F.operator, part, by_columns.precision, 1.0) for part in F.operator.parts]
    assert ours < 0.01 * oracle.relative_error(by_columns.solve(v), expected)
    assert isinstance(foof.Fisher(model.float(), x[:5], "full").damped(1e-5).parts[0], ByColumns)


@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_it_is_factorised_once_and_the_latest_is_kept(blocks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    cholesky = foof.linalg.damped_cholesky
    monkeypatch.setattr(foof.linalg, "damped_cholesky", lambda *args: made.append(args[1]) or cholesky(*args))
    model, x, sizes = case("mlp")
    F = foof.Fisher(model, x, blocks=blocks)
    parts = 1 if blocks == "full" else len(sizes)
    v, prior = torch.randn(F.P, dtype=torch.float64), torch.rand(F.P, dtype=torch.float64) + 0.5
    assert F.damped(0.3) is F.damped(0.3)
    for _ in range(2):
        F.solve(v, 0.3, refine=2)
    assert made == [0.3] * parts
    for _ in range(2):
        F.solve(v, prior)
        F.damped(prior.clone()).logdet()
    assert len(made) == 2 * parts
    prior += 1  # the caller's own
    F.solve(v, prior)
    F.posterior_solve(v, prior)
    assert len(made) == 4 * parts


def test_the_state_of_one_goes_on_elsewhere(side: str) -> None:
    model, x, _ = case("mlp")
    F = foof.Fisher(model, x, "full", blocks="layer")
    D, v = F.damped(0.2, datapoints=C), torch.randn(F.P, dtype=torch.float64)
    solved, state = D.solve(v), D.state_dict()
    twin = Woodbury.from_state_dict(F.operator, state)
    assert all(torch.equal(a.held, b.held) and a.side == side for a, b in zip(twin.parts, D.parts, strict=True))
    assert torch.equal(twin.solve(v), solved)
    assert D.memory() == sum(part.held.numel() * 8 for part in D.parts)


def test_what_it_cannot_be_made_of() -> None:
    F = foof.Fisher(mlp(3, 4, 2), torch.randn(6, 3))
    for call, message in [
        (lambda: F.damped(0.0), "precision must be positive"),
        (lambda: F.damped(1.0, datapoints=-1), "datapoints must be a positive number, got -1"),
        (lambda: F.damped(1.0).sample(0), "at least 1"),
        (lambda: F.damped(1.0).solve(torch.randn(3)), "a flat vector must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("blocks", ["full", "layer"])
def test_the_moment_is_the_fisher_itself(name: str, blocks: str) -> None:
    model, x, _ = case(name)
    F = foof.Fisher(model, x, "full", blocks=blocks)
    dense = F.dense()
    at = dict(zip(map(id, F.params), torch.arange(F.P).split([p.numel() for p in F.params]), strict=True))
    for part in F.operator.parts:
        rows = torch.cat([at[id(F.params[i])] for i in part.where])[part.order()]
        close(F.operator.moment(part), dense[rows][:, rows])
