"""Which layers are covered, and what is said of the others."""

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foof
from cases import KINDS, mlp
from foof.covering import covered_layers
from foof.layers import TransposedLinear
from oracle import input_rows


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_rows_are_those_of_the_forward_pass(kind, data):
    """The inputs read off the module's own forward with one-hot weights; and weight and bias survive join and split."""
    torch.manual_seed(data.draw(st.integers(0, 10**6)))
    module, x = data.draw(KINDS[kind])
    (layer,), _ = covered_layers(module)
    ours, theirs = layer.input_rows(x), input_rows(module, x)
    assert torch.allclose(ours if layer.groups > 1 else ours[None], theirs, atol=1e-6)
    weight, bias = layer.split(layer.join(module.weight, layer.bias))
    assert torch.equal(weight, module.weight)
    assert bias is None or torch.equal(bias, module.bias)
    if layer.diagonal:
        assert torch.equal(layer.counts(x), theirs.sum((0, 1, 2)))


class Wrapped(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class Standardised(nn.Conv2d):
    """Weight standardisation the usual way: past ``forward``."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def test_a_layer_that_computes_something_else_is_not_covered():
    patched = nn.Linear(4, 4)
    patched.forward = lambda x, forward=patched.forward: 2 * forward(x)
    layers, rest = covered_layers(nn.ModuleDict({"conv": Standardised(2, 3, 3), "patched": patched, "plain": nn.Conv2d(2, 3, 3)}))
    assert [layer.name for layer in layers] == ["plain"]
    assert "Standardised overrides Conv2d.forward or what it calls" in rest["conv.weight"]
    assert "replaced on the instance" in rest["patched.bias"]


def test_every_uncovered_parameter_has_a_reason():
    model = nn.ModuleDict({
        "attention": nn.MultiheadAttention(4, 2), "norm": nn.LayerNorm(4), "wrapped": Wrapped(4, 4), "lstm": nn.LSTM(4, 4),
        "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "bag": nn.Embedding(5, 4, sparse=True),
        "up": nn.ConvTranspose2d(2, 2, 2), "plain": nn.Linear(4, 4), "clipped": nn.Embedding(5, 4, max_norm=1.0),
    })  # fmt: skip
    layers, rest = covered_layers(model)
    assert [layer.name for layer in layers] == ["plain"]
    assert rest.keys() | {"plain.weight", "plain.bias"} == {name for name, _ in model.named_parameters()}
    assert "functionally" in rest["attention.in_proj_weight"]
    assert "functionally" in rest["attention.out_proj.weight"]
    assert "LayerNorm is not of the form" in rest["norm.weight"]
    assert "overrides Linear.forward" in rest["wrapped.weight"]
    assert "sparse=True" in rest["bag.weight"]
    assert "max_norm" in rest["clipped.weight"]


def test_excluded_modules_take_all_inside_with_them():
    model = nn.Sequential(mlp(4, 5, 3), nn.Linear(3, 2))
    layers, rest = covered_layers(model, ("0",))
    assert [layer.name for layer in layers] == ["1"]
    assert set(rest.values()) == {"excluded by request"}


def test_tied_layers_with_their_own_biases():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    layers, rest = covered_layers(nn.Sequential(first, second))
    assert [layer.m for layer in layers] == [4, 4]
    assert set(rest) == {"0.bias", "1.bias"}


def test_a_bias_of_two_weights_is_part_of_neither():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.bias = first.bias
    model = nn.Sequential(first, second)
    layers, rest = covered_layers(model)
    assert [layer.m for layer in layers] == [4, 4]
    assert rest == {"0.bias": "shared by layers with other weights"}
    assert [layer.m for layer in covered_layers(model, share_biases=True)[0]] == [5, 5]


def test_only_owned_parameters_are_covered():
    model = mlp(4, 5, 3)
    layers, rest = covered_layers(model, owned={id(model[0].weight), id(model[2].bias)})
    assert [(layer.name, layer.m) for layer in layers] == [("0", 4)]
    assert rest["0.bias"] == rest["2.weight"] == "not a parameter of the optimizer"
    assert rest["2.bias"] == "its weight is not a parameter of the optimizer"


def test_transposed_linear_is_a_linear_layer():
    """What transformers' Conv1D computes, ``x W + b`` with W (in, out), by hand."""
    torch.manual_seed(0)

    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x @ self.weight + self.bias

    module, linear, x = Conv1D(), nn.Linear(4, 3), torch.randn(5, 2, 4)
    linear.weight.data, linear.bias.data = module.weight.data.mT, module.bias.data
    ours, theirs = TransposedLinear("", module), covered_layers(linear)[0][0]
    e = torch.randn(5, 2, 3)
    assert torch.allclose(ours.weight_gradient(x, e), theirs.weight_gradient(x, e))
    assert torch.allclose(ours.input_gradient(x, e, module.weight), theirs.input_gradient(x, e, linear.weight))
    weight, bias = ours.split(ours.join(module.weight, module.bias))
    assert torch.equal(weight, module.weight)
    assert torch.equal(bias, module.bias)


def test_explain_is_a_readable_table():
    embed = nn.Embedding(6, 4)
    head = nn.Linear(4, 6, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.LayerNorm(4), nn.Linear(4, 4), head)
    table = foof.explain(model, torch.randint(0, 6, (3, 5)))
    assert table.covered == ["0.weight", "2.weight", "2.bias"]
    assert set(table.rest) == {"1.weight", "1.bias"}
    text = str(table)
    for part in ("tied: Linear", "one more input of 2.weight", "LayerNorm is not of the form b = W a", "3 of 5 trainable parameters"):
        assert part in text


@pytest.mark.parametrize("width", [4, 5])  # one that the model takes, one that it does not
def test_explain_leaves_every_module_in_its_mode(width):
    model = mlp(4, 5, 3)
    model[0].eval()  # a frozen part of a model in training
    with contextlib.suppress(RuntimeError):
        foof.explain(model, torch.randn(2, width))
    assert [module.training for module in model] == [False, True, True]


def test_explain_counts_what_is_kept():
    """Statistics: Σ and its inverse in float32."""
    model = nn.Linear(10, 4, bias=False)
    (row,) = foof.explain(model).rows
    assert row.memory == 2 * 10 * 10 * 4
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    opt.initialise([torch.randn(20, 10)])
    kept = [opt.preconditioner.blocks[0].moments["Sigma"].value, opt.preconditioner.blocks[0].inverse.tensor]
    assert sum(t.numel() * t.element_size() for t in kept) == row.memory


def test_explain_warns_of_layers_that_are_never_called():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.raw = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            return nn.functional.linear(self.used(x), self.raw.weight)

    model = Lazy()
    with pytest.warns(UserWarning, match="raw is covered, but its forward is never called"):
        foof.explain(model, torch.randn(2, 4))
    opt = foof.FOOF(model, lr=0.3, damping=1.0, exclude=["raw"])
    opt.remove()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    model(torch.randn(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="raw is covered, but its forward is never called"):
        foof.explain(model)
