"""Conjugate gradients with ``Λ + c F`` against dense solves, and against the factor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import foof
import oracle
from cases import flat, mlp
from foof.conjugate import BlockInverse, ConjugateGradients
from test_fisher import CASES, case, close
from test_woodbury import C, diagonal


@pytest.mark.parametrize("blocks", ["full", "layer"])
@pytest.mark.parametrize("kind", ["number", "per tensor", "any"])
@pytest.mark.parametrize("name", CASES)
def test_the_dense_solution(name: str, kind: str, blocks: str) -> None:
    model, x, _ = case(name)
    F = foof.Fisher(model, x, "full", blocks=blocks)
    prior, Lambda = diagonal(F, kind)
    v = torch.randn(F.P, 3, dtype=torch.float64)
    v[:, 1] = 0
    solved = ConjugateGradients(F.operator, prior, C, tolerance=1e-12).solve(v)
    close(solved, torch.linalg.solve(Lambda + C * F.dense(), v))
    assert not solved[:, 1].any()
    as_list = [u.clone() for u in F.as_list(v[:, 0])]
    close(F.as_flat(F.solve(as_list, prior, solver="cg", tolerance=1e-12)), torch.linalg.solve(Lambda + F.dense(), v[:, 0]))


def test_a_preconditioner_that_is_the_inverse_takes_one_step() -> None:
    """KFAC is exact for one layer without bias whose errors are the same for each datapoint: here Gaussian, Σ_E = I; λ → 0."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3, bias=False).double(), torch.randn(20, 6).double()
    F = foof.Fisher(model, x, "full", likelihood="gaussian")
    solver = ConjugateGradients(F.operator, 1e-9, tolerance=1e-3)
    solver.solve(torch.randn(F.P, dtype=torch.float64))
    assert solver.taken == 1


def test_preconditioning_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(30, 5).double(), torch.randn(200, 30).double() * torch.logspace(-1, 1, 30).double()
    F = foof.Fisher(model, x, "full")
    v, solver = torch.randn(F.P, dtype=torch.float64), ConjugateGradients(F.operator, 1e-4)
    solver.solve(v)
    with_kfac = solver.taken
    monkeypatch.setattr(BlockInverse, "apply", lambda self, us, into: None)
    solver.solve(v)
    assert with_kfac < 0.5 * solver.taken


def test_in_float32_it_is_nearer_than_the_factor() -> None:
    torch.manual_seed(0)
    model, x = mlp(30, 40, 10), torch.randn(100, 30)
    reference = foof.Fisher(model.double(), x.double(), "full")
    v = (reference @ torch.randn(reference.P, dtype=torch.float64)).float()
    expected = reference.solve(v.double(), 1e-4, refine=1)
    F = foof.Fisher(model.float(), x, "full")
    by_cg, by_factor = (oracle.relative_error(F.solve(v, 1e-4, solver=solver), expected) for solver in ("cg", "cholesky"))
    assert by_cg < 0.3 * by_factor


def test_natural_gradients_by_conjugate_gradients() -> None:
    def trained(solver: str) -> Tensor:
        torch.manual_seed(0)
        model, x, y = mlp(4, 7, 3).double(), torch.randn(20, 4).double(), torch.randint(0, 3, (20,))
        opt = foof.NaturalGradient(model, lr=0.1, damping=0.1, fisher="full", solver=solver, T=2)
        for _ in range(5):
            opt.zero_grad()
            out = model(x)
            opt.update_curvature(out)
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
            opt.load_state_dict(opt.state_dict())
        return flat(model)

    assert oracle.relative_error(trained("cg"), trained("cholesky")) < 1e-6


def test_what_cannot_be_solved_is_said() -> None:
    F = foof.Fisher(mlp(4, 7, 3).double(), torch.randn(20, 4).double(), "full")
    v = torch.randn(F.P, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"have not reached a residual of 1e-10 in 2 iterations, but of .*larger damping"):
        ConjugateGradients(F.operator, 1e-6, tolerance=1e-10, iterations=2).solve(v)
    for call, message in [
        (lambda: F.solve(v, 0.1, solver="qr"), "solver must be one of"),
        (lambda: F.solve(v, 0.0, solver="cg"), "damping must be positive"),
        (lambda: F.solve(v, 0.1, solver="cg", tolerance=0.0), "between 0 and 1"),
        (lambda: ConjugateGradients(F.operator, 0.1, -1.0), "datapoints must be a positive number"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert F.solve(v * float("nan"), 0.1, solver="cg").isnan().all()
