"""FOOF against the dense oracle in float64, over random layers of every kind."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foof
from cases import KINDS, Twice, cnn, mlp
from oracle import as_rows, foof_update, gradient_matrix, input_rows, relative_error, second_moment

SEEDS = st.integers(0, 2**31 - 1)
DAMPINGS = st.sampled_from([1e-2, 1.0, 30.0])


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def loss_of(out, seed=0):
    """A loss with errors that differ everywhere."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=out.dtype)
    return (out.sin() * weights).sum()


def gradients_of(module):
    bias = getattr(module, "bias", None)
    return gradient_matrix(module, module.weight.grad, None if bias is None else bias.grad)


def plain_gradient(module, *inputs):
    module.zero_grad()
    loss_of(module(*inputs)).backward()
    layer = module.layer if isinstance(module, Twice) else module
    matrix = gradients_of(layer).clone()
    module.zero_grad()
    return matrix


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(data=st.data())
def test_neuron_gradient_equals_the_dense_one(kind, data):
    """After ``initialise`` on one batch, ``.grad`` of another batch is ``Eᵀ A (Σ + λI)⁻¹``: 600 configurations in all."""
    torch.manual_seed(data.draw(SEEDS))
    layer, x = data.draw(KINDS[kind])
    damping = data.draw(DAMPINGS)
    before = x[torch.randperm(len(x))] if x.dtype == torch.int64 else torch.randn_like(x)
    expected = foof_update(plain_gradient(layer, x), second_moment(input_rows(layer, before)), damping)
    opt = foof.FOOF(layer, lr=0.3, damping=damping)
    opt.initialise([before])
    loss_of(layer(x)).backward()
    assert relative_error(gradients_of(layer), expected) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_first_step_without_initialisation(kind, data):
    """Nobody called ``initialise``: the first step uses the first batch's own second moment."""
    torch.manual_seed(data.draw(SEEDS))
    layer, x = data.draw(KINDS[kind])
    start = [p.detach().clone() for p in layer.parameters()]
    expected = foof_update(plain_gradient(layer, x), second_moment(input_rows(layer, x)), 0.5)
    opt = foof.FOOF(layer, lr=1.0, damping=0.5)
    loss_of(layer(x)).backward()
    opt.step()
    moved = [before - p.detach() for before, p in zip(start, layer.parameters(), strict=True)]
    ours = gradient_matrix(layer, moved[0], moved[1] if len(moved) > 1 else None)
    assert relative_error(ours, expected) <= 1e-10


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(data=st.data())
def test_a_layer_called_twice(kind, data):
    """Two calls in one forward: gradients add, and the second moment sums over the rows of both calls."""
    torch.manual_seed(data.draw(SEEDS))
    layer, x = data.draw(KINDS[kind])
    x2 = x.flip(0) if x.dtype == torch.int64 else torch.randn_like(x)
    model = Twice(layer)
    Sigma = second_moment(input_rows(layer, x)) + second_moment(input_rows(layer, x2))
    expected = foof_update(plain_gradient(model, x, x2), Sigma, 0.3)
    opt = foof.FOOF(model, lr=0.3, damping=0.3)
    opt.initialise([((x, x2), None)])
    loss_of(model(x, x2)).backward()
    assert relative_error(gradients_of(layer), expected) <= 1e-10


@settings(max_examples=40)
@given(seed=SEEDS, n=st.integers(1, 12), m=st.integers(1, 12), rows=st.integers(1, 12))
def test_same_result_whichever_side_is_preconditioned(seed, n, m, rows):
    """``Eᵀ (A P) = (Eᵀ A) P``, and a Cholesky factor does what the inverse does."""
    torch.manual_seed(seed)
    A, E, S = torch.randn(rows, m), torch.randn(rows, n), torch.randn(m, m)
    inverse = foof.kronecker.InputInverse.make(S @ S.mT, 0.1, "S")
    cholesky = foof.kronecker.InputInverse.make(S @ S.mT, 0.1, "S", uses=0)
    assert (inverse.held, cholesky.held) == ("inverse", "cholesky")
    on_gradient = inverse.apply(E.mT @ A)
    assert relative_error(E.mT @ inverse.apply(A), on_gradient) <= 1e-10
    assert relative_error(cholesky.apply(E.mT @ A), on_gradient) <= 1e-9


@pytest.mark.parametrize("rows", [3, 50])
def test_both_sides_are_chosen(rows, monkeypatch):
    """Few rows precondition the activations, many rows the gradient."""
    shapes = []
    apply = foof.kronecker.InputInverse.apply
    monkeypatch.setattr(foof.kronecker.InputInverse, "apply", lambda self, X: shapes.append(X.shape) or apply(self, X))
    layer = nn.Linear(6, 10, bias=False)
    opt = foof.FOOF(layer, lr=0.3, damping=1.0)
    opt.initialise([torch.randn(20, 6)])
    layer(torch.randn(rows, 6)).sum().backward()
    assert shapes == [(min(rows, 10), 6)]


def test_toy_example_of_appendix_e():
    """Inputs (3, 1) and (1, 0), labels 1 and -1: SGD moves along (2, 1), undamped FOOF along (-1, 4), which solves the task."""
    x, y = torch.tensor([[3.0, 1.0], [1.0, 0.0]]), torch.tensor([[1.0], [-1.0]])
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)

    def loss():
        return 0.5 * (model(x) - y).pow(2).sum(1).mean()  # ½|Wa - y|²: the gradient is (prediction - label) a

    loss().backward()
    assert torch.allclose(-2 * model.weight.grad, torch.tensor([[2.0, 1.0]]))
    model.zero_grad()
    opt = foof.FOOF(model, lr=1.0, damping=1e-14)
    loss().backward()
    opt.step()
    assert torch.allclose(model.weight, torch.tensor([[-1.0, 4.0]]), atol=1e-10)
    assert loss().item() < 1e-20


def test_infinite_damping_is_sgd():
    """``λ · P → I`` as λ → ∞."""
    torch.manual_seed(0)
    model, x = cnn(), torch.randn(5, 2, 8, 8)
    loss_of(model(x)).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    opt = foof.FOOF(model, lr=0.3, damping=1e12)
    opt.initialise([x])
    loss_of(model(x)).backward()
    for p, g in zip(model.parameters(), plain, strict=True):
        assert relative_error(p.grad * 1e12, g) < 1e-8


def test_solves_the_ridge_problem_of_eq_5():
    """``min |ΔW A - E|² + λ|ΔW|²`` by ``torch.linalg.lstsq`` on the stacked problem; its sums over the batch are N × our means."""
    torch.manual_seed(0)
    N, m, n, damping = 20, 6, 4, 0.7
    layer, x, y = nn.Linear(m, n, bias=False), torch.randn(N, m), torch.randn(N, n)
    E = (layer(x) - y).detach()  # errors of ½|Wa - y|² per datapoint
    stacked_inputs = torch.cat([x, math.sqrt(N * damping) * torch.eye(m)])
    ridge = torch.linalg.lstsq(stacked_inputs, torch.cat([E, torch.zeros(m, n)])).solution.mT
    opt = foof.FOOF(layer, lr=0.3, damping=damping)
    opt.initialise([x])
    (0.5 * (layer(x) - y).pow(2).sum() / N).backward()
    assert relative_error(layer.weight.grad, ridge) < 1e-10


@pytest.mark.parametrize("repeat", [2, 7])
def test_batch_size_invariance(repeat):
    """The same data several times over, under a mean loss: the same (lr, λ) gives the same step."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    weights = []
    for k in (1, repeat):
        torch.manual_seed(1)
        model = mlp(5, 8, 3)
        opt = foof.FOOF(model, lr=0.5, damping=0.1, T=1)
        for _ in range(4):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x.repeat(k, 1)), y.repeat(k)).backward()
            opt.step()
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert relative_error(weights[1], weights[0]) < 1e-10


def test_per_datapoint_variant():
    """Appendix F: FOOF on single datapoints, averaged; for one row per datapoint, SGD with its own rate for each."""
    torch.manual_seed(0)
    a, e = torch.randn(5, 3, 4), torch.randn(5, 3, 2)
    expected = sum(foof_update((E.mT @ A)[None], (A.mT @ A)[None], 0.2)[0] for A, E in zip(a, e, strict=True)) / 5
    assert relative_error(foof.per_datapoint_gradient(a, e, 0.2), expected) < 1e-10
    rates = 1 / (a[:, 0].pow(2).sum(1) + 0.2)
    one_row = torch.einsum("i,in,im->nm", rates, e[:, 0], a[:, 0]) / 5
    assert relative_error(foof.per_datapoint_gradient(a[:, :1], e[:, :1], 0.2), one_row) < 1e-10


def test_tied_weights_share_one_second_moment():
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model, x = nn.Sequential(first, nn.Tanh(), second), torch.randn(6, 4)
    loss_of(model(x)).backward()
    plain = first.weight.grad[None].clone()
    Sigma = second_moment(input_rows(first, x)) + second_moment(input_rows(second, first(x).tanh().detach()))
    model.zero_grad()
    opt = foof.FOOF(model, lr=0.3, damping=0.1)
    assert len(opt.preconditioner.blocks) == 1
    opt.initialise([x])
    loss_of(model(x)).backward()
    assert relative_error(first.weight.grad[None], foof_update(plain, Sigma, 0.1)) < 1e-10


def test_tied_embedding_and_head_add_their_neuron_gradients():
    """Opposite orientations of one parameter: each use is preconditioned by its own second moment."""
    torch.manual_seed(0)
    embed, head = nn.Embedding(6, 3), nn.Linear(3, 6, bias=False)
    head.weight = embed.weight
    model, x = nn.Sequential(embed, nn.Tanh(), head), torch.randint(0, 6, (4, 5))
    hidden = embed(x).detach().requires_grad_()
    loss_of(nn.functional.linear(hidden.tanh(), embed.weight)).backward()
    head_part, e = embed.weight.grad.clone(), hidden.grad
    model.zero_grad()
    embed_part = torch.zeros(6, 3).index_add_(0, x.reshape(-1), e.reshape(-1, 3))
    head_Sigma, embed_Sigma = second_moment(as_rows(embed, hidden.detach().tanh())), second_moment(input_rows(embed, x))
    expected = foof_update(head_part[None], head_Sigma, 0.1)[0] + foof_update(embed_part.mT[None], embed_Sigma, 0.1)[0].mT
    for warm in (True, False):
        opt = foof.FOOF(model, lr=0.0, damping=0.1)
        if warm:
            opt.initialise([x])
        loss_of(model(x)).backward()
        assert relative_error(embed.weight.grad, expected) < 1e-10
        opt.remove()
        model.zero_grad()


def test_frozen_layers_and_biases_are_left_alone():
    torch.manual_seed(0)
    model, x = mlp(4, 5, 3), torch.randn(6, 4)
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    opt = foof.FOOF(model, lr=0.1, damping=0.1)
    frozen = model[0].weight.clone(), model[2].bias.clone()
    assert [block.layer.m for block in opt.preconditioner.blocks] == [5]
    assert list(opt.preconditioner.rest) == ["0.bias"]
    before = model[0].bias.detach().clone()
    loss_of(model(x)).backward()
    opt.step()
    assert torch.equal(model[0].weight, frozen[0])
    assert torch.equal(model[2].bias, frozen[1])
    assert not torch.equal(model[0].bias, before)
