"""Damped inverses and solves against dense ones, and what happens when rounding makes them fail."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foof import _torch, linalg


def semidefinite(m, rank, batch=(), dtype=torch.float64):
    root = torch.randn(*batch, m, rank, dtype=dtype)
    return root @ root.mT


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), m=st.integers(1, 8), rank=st.integers(1, 8), groups=st.sampled_from([(), (3,)]))
def test_inverse_and_solve(seed, m, rank, groups):
    torch.manual_seed(seed)
    S, X = semidefinite(m, rank, groups), torch.randn(*groups, 5, m, dtype=torch.float64)
    dense = torch.linalg.inv(S + 0.1 * torch.eye(m, dtype=torch.float64))
    assert torch.allclose(linalg.damped_inverse(S, 0.1), dense, rtol=1e-9, atol=1e-10)
    assert torch.allclose(linalg.solve_right(X, linalg.damped_cholesky(S, 0.1)), X @ dense, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [0, 1, 10, linalg.FEW_ROWS - 1, linalg.FEW_ROWS, linalg.SOME_ROWS - 1, linalg.SOME_ROWS])
@pytest.mark.parametrize("groups", [(), (3,)])
def test_solves_are_the_same_from_either_side(rows, groups, threads):
    S, X = semidefinite(40, 40, groups, torch.float32), torch.randn(*groups, rows, 40)
    dense = X.double() @ torch.linalg.inv(S.double() + 10 * torch.eye(40, dtype=torch.float64))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        ours = linalg.solve_right(X, linalg.damped_cholesky(S, 10.0))
    finally:
        torch.set_num_threads(before)
    assert ours.shape == X.shape
    assert ours.dtype == torch.float32
    assert torch.allclose(ours.double(), dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("groups", [(), (3,)])
def test_factorisations_in_place_leave_what_they_were_given(groups):
    S = semidefinite(12, 12, groups, torch.float32)
    before, eye = S.clone(), 0.5 * torch.eye(12)
    assert torch.equal(linalg.damped_cholesky(S, 0.5), torch.linalg.cholesky(S + eye))
    assert torch.equal(linalg.damped_inverse(S, 0.5), torch.cholesky_inverse(torch.linalg.cholesky(S + eye)))
    assert torch.equal(S, before)


def test_inverses_have_derivatives():
    S = semidefinite(4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda X: linalg.damped_inverse((X + X.mT) / 2, 0.5), S)
    assert torch.autograd.gradcheck(lambda X: linalg.damped_cholesky((X + X.mT) / 2, 0.5), S)
    D = semidefinite(4, 2)
    L, dL = torch.func.jvp(lambda X: linalg.damped_cholesky(X, 0.5), (S.detach(),), (D,))
    assert torch.allclose(dL @ L.mT + L @ dL.mT, D)  # that of `torch.cholesky_inverse` is wrong in forward mode


def test_an_inverse_pays_where_solves_of_few_rows_would_be_many():
    assert not linalg.inverse_pays(1000, linalg.uses(1, 10))
    assert linalg.inverse_pays(4000, linalg.uses(100, 10))
    assert not linalg.inverse_pays(4000, 100 * 10)
    assert linalg.inverse_pays(300, linalg.uses(1, 100))
    assert not linalg.inverse_pays(303, linalg.uses(1, 100))


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 6), m=st.integers(1, 6))
def test_kronecker_solve(seed, n, m):
    """``(S_A ⊗ S_E + λI) vec(X) = vec(G)`` with column-stacking vec, by a dense solve."""
    torch.manual_seed(seed)
    S_E, S_A, G = semidefinite(n, 3), semidefinite(m, 4), torch.randn(n, m, dtype=torch.float64)
    dense = torch.kron(S_A, S_E) + 0.3 * torch.eye(n * m, dtype=torch.float64)
    expected = torch.linalg.solve(dense, G.mT.reshape(-1)).reshape(m, n).mT
    ours = linalg.kronecker_solve(G, linalg.eigh(S_E), linalg.eigh(S_A), 0.3)
    assert torch.allclose(ours, expected, rtol=1e-9, atol=1e-10)


def test_damping_per_group():
    S, damping = semidefinite(4, 2, (3,)), torch.tensor([0.1, 1.0, 10.0], dtype=torch.float64)
    ours = linalg.damped_inverse(S, damping)
    for k in range(3):
        assert torch.allclose(ours[k], linalg.damped_inverse(S[k], damping[k].item()))


@pytest.mark.parametrize(
    ("S", "damping"),
    [
        (lambda: semidefinite(200, 3, dtype=torch.float32) * 1e4, 1e-9),
        (lambda: (lambda a: a.mT @ a / 100)(torch.rand(100, 784)), 3e-6),
        (lambda: semidefinite(300, 8, dtype=torch.float32), 1e-7),
    ],
)
def test_the_damping_is_the_one_asked_for_whatever_rounding_spoiled(S, damping):
    """``L Lᵀ = S + λI`` to the rounding of S, and along a direction S does not know the inverse is 1/λ: no jitter."""
    torch.manual_seed(0)
    S = S()
    m, eps = S.shape[-1], torch.finfo(S.dtype).eps
    assert torch.linalg.cholesky_ex(linalg.add_damping(S, damping)).info, "this case should need more than float32"
    L = linalg.damped_cholesky(S, damping, "layer").double()
    off = torch.linalg.matrix_norm(L @ L.mT - linalg.add_damping(S.double(), damping), 2)
    assert off <= m * eps * torch.linalg.matrix_norm(S.double(), 2)
    P = linalg.damped_inverse(S, damping, "layer").double()
    unknown = torch.linalg.eigh(S.double()).eigenvectors[:, m // 4]  # within the null space of what S was made of
    assert 0.2 / damping < unknown @ P @ unknown < 5 / damping


def test_error_names_the_layer_and_a_damping_that_works():
    S = torch.diag(torch.tensor([100.0, 1.0, -5.0]))
    with pytest.raises(torch.linalg.LinAlgError, match=r"blocks\.3\.fc.*Try damping ≥ 1e\+01"):
        linalg.damped_cholesky(S, 0.1, "blocks.3.fc")
    linalg.damped_cholesky(S, 1e1, "blocks.3.fc")
    with pytest.raises(torch.linalg.LinAlgError, match="holds NaN"):
        linalg.damped_cholesky(torch.full((2, 2), float("nan")), 1.0)


@pytest.mark.parametrize("product", [None, _torch.onednn_linear], ids=["MKL", "oneDNN"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_product_is_the_product(dtype, transposed, product, monkeypatch):
    monkeypatch.setattr(linalg, "ONEDNN", product)
    monkeypatch.setattr(linalg, "WIDE", product is not None)
    X, Y = torch.randn(40, 700, dtype=dtype), torch.randn(700, 700, dtype=dtype)
    Y = Y.mT if transposed else Y
    assert len(X) * Y.numel() >= linalg.LARGE
    with torch.no_grad():
        found, other = linalg.times_transposed(X, Y), linalg.product(X, Y.mT)
    expected = X.double() @ Y.double().mT
    assert (found - expected).norm() / expected.norm() < 10 * torch.finfo(dtype).eps
    assert (other - expected).norm() / expected.norm() < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("part", [slice(None), slice(0, 600), slice(0, 1200, 2)])
def test_onednn_is_given_dense_matrices_alone(part, monkeypatch):
    """For the rows of a part of a larger matrix, as of one of several heads, it has no kernel but a slow one."""
    given = []
    monkeypatch.setattr(linalg, "WIDE", True)
    monkeypatch.setattr(linalg, "ONEDNN", lambda X, Y, *_: given.append(Y) or X @ Y.mT)
    E, A = torch.randn(100, 300), torch.randn(100, 1200)[:, part]
    with torch.no_grad():
        torch.testing.assert_close(linalg.product(E.mT, A), E.mT @ A)
    assert [Y.is_contiguous() or Y.mT.is_contiguous() for Y in given] == [True]


@pytest.mark.parametrize("rows", ["dense", "sliced", "expanded"])
def test_products_by_onednn_take_any_strides(rows, monkeypatch):
    """As they come in a backward pass: errors of a sum are one number, expanded."""
    monkeypatch.setattr(linalg, "ONEDNN", _torch.onednn_linear)
    monkeypatch.setattr(linalg, "WIDE", _torch.onednn_linear is not None)
    E = {"dense": torch.randn(100, 300), "sliced": torch.randn(100, 700)[:, 3:603:2], "expanded": torch.randn(1, 1).expand(100, 300)}[rows]
    A = torch.randn(100, 3, 600)[:, 1]
    with torch.no_grad():
        found = linalg.product(E.mT, A)
    expected = E.double().mT @ A.double()
    assert (found - expected).norm() / expected.norm() < 10 * torch.finfo(torch.float32).eps


def test_a_product_with_derivatives_has_them():
    X, Y = torch.randn(40, 700, requires_grad=True), torch.randn(700, 700)
    linalg.times_transposed(X, Y).sum().backward()
    assert torch.allclose(X.grad, Y.sum(0).expand_as(X), atol=1e-3)
