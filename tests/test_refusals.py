"""Bad input, and gradients that pass a layer by: what is refused or warned of, and that nothing is half changed."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import foof
from cases import OPTIMIZERS, batch, flat, mlp
from foof.study.train import ablations

BAD = {
    "damping λ must be a positive": lambda m: foof.FOOF(m, lr=0.3, damping=0.0),
    "damping λ must be a positive, finite number, got -1": lambda m: foof.FOOF(m, lr=0.3, damping=-1.0),
    'positive number or "auto"': lambda m: foof.FOOF(m, lr=0.3, damping="lots"),
    "T is the number of steps": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, T=0),
    "S is how many of every T = 5": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, T=5, S=6),
    "ema is the decay": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, ema=1.0),
    "lr must be": lambda m: foof.FOOF(m, damping=1.0, lr=-0.1),
    "momentum must be": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, momentum=1.0),
    "weight_decay must be": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, weight_decay=-1.0),
    "rest must be one of": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, rest="lion"),
    "empty parameter list; give": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, groups=[{"params": []}]),
    "not one of this model's": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, groups=[{"params": [nn.Parameter(torch.zeros(2))]}]),
    "unknown options": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, groups=[{"params": m[0].parameters(), "lrr": 1}]),
    "0: its weight and bias have one damping": lambda m: foof.FOOF(m, groups=[{"params": [m[0].bias], "damping": 7.0}]),
    "2: its weight and bias have one damping": lambda m: foof.NaturalGradient(m, groups=[{"params": [m[2].weight], "damping": 7.0}]),
    "no module named 'head'": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, exclude=["head"]),
    "no layer to cover": lambda m: foof.FOOF(nn.LayerNorm(3), lr=0.3, damping=1.0),
    "no trainable parameters": lambda m: foof.FOOF(m.requires_grad_(False), lr=0.3, damping=1.0),
    "lazy layer": lambda m: foof.FOOF(nn.LazyLinear(3), lr=0.3, damping=1.0),
    'method must be one of': lambda m: foof.precondition(torch.optim.SGD(m.parameters()), m, method="shampoo"),
    "at least one batch": lambda m: foof.FOOF(m, lr=0.3, damping=1.0).initialise([]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_and_nothing_is_half_changed(message):
    model = mlp(4, 5, 3)
    with pytest.raises(ValueError, match=message):
        BAD[message](model)
    assert not any(module._forward_hooks for module in model.modules()) or "batch" in message


@pytest.mark.parametrize("make", [
    lambda m: foof.FOOF(m.parameters()), lambda m: foof.KFAC(list(m.parameters())), lambda m: foof.NaturalGradient(m.parameters()),
    lambda m: foof.FOOF(m.parameters(), groups=[{"params": m[0].weight}]),
    lambda m: foof.precondition(torch.optim.SGD(m.parameters()), m.parameters()),
    lambda m: foof.precondition(torch.optim.SGD(m.parameters()), m.parameters(), method="kfac"),
])  # fmt: skip
def test_parameters_in_place_of_the_model_are_refused(make):
    with pytest.raises(TypeError, match="pass the model, got"):
        make(mlp(4, 5, 3))


def test_a_preconditioned_optimizer_is_not_copied():
    """A copy would be the plain optimizer; once its preconditioner is removed, it is one."""
    model = mlp(4, 5, 3)
    opt = foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="tied to its model"):
            copied(opt)
    opt.preconditioner.remove()
    assert copy.deepcopy(opt).param_groups[0]["lr"] == 0.1


def test_complex_weights_are_refused():
    with pytest.raises(TypeError, match="real floating-point weights"):
        foof.FOOF(nn.Linear(2, 2, dtype=torch.complex64), lr=0.3, damping=1.0)


def test_integer_weights_are_not_covered():
    model = mlp(4, 5, 3)
    model[0].weight = nn.Parameter(torch.zeros(5, 4, dtype=torch.int8), requires_grad=False)
    assert "0.weight" not in foof.explain(model).covered


@pytest.mark.parametrize("make", [foof.FOOF, foof.KFAC, foof.NaturalGradient, foof.EKFAC])
def test_step_without_a_backward_pass_does_nothing(make):
    """As in torch; and it does not count as a step."""
    model = mlp(4, 5, 3)
    opt, before = make(model), flat(model)
    opt.step()
    assert torch.equal(flat(model), before)
    assert opt.preconditioner.schedule.t == 0


def test_a_layer_the_loss_does_not_reach_is_named():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    before = model["spare"].weight.detach().clone()
    model["used"](batch(0)[0]).sum().backward()
    with pytest.warns(UserWarning, match="spare: this layer is not reached by the loss"):
        opt.step()
    assert torch.equal(model["spare"].weight, before)


def test_a_layer_used_functionally_is_refused():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "raw": nn.Linear(4, 3)})
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    nn.functional.linear(model["used"](batch(0)[0]), model["raw"].weight).sum().backward()
    before = flat(model)
    with pytest.raises(RuntimeError, match=r"exclude=\['raw'\]"):
        opt.step()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("way", ["penalty", "functional", "none"])
@pytest.mark.parametrize("name", ["foof", "adamw", "kfac"])
@pytest.mark.parametrize("initialised", [True, False])
def test_a_gradient_that_passes_a_layer_by_is_named(name, way, initialised):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = OPTIMIZERS[name](model)
    if initialised:
        opt.preconditioner.initialise([batch(9)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for t in range(3):
            x, y = batch(t)
            opt.zero_grad()
            out = model(model[0](x))  # called twice: both come through its forward
            opt.update_curvature(out, y)
            if way == "functional":
                out = out + (x @ model[0].weight.T)[:, :3]
            loss = nn.functional.cross_entropy(out, y)
            if way == "penalty":
                loss = loss + 0.01 * model[0].weight.square().sum()
            loss.backward()
            opt.step()
    assert ["0: part of the gradient does not come through forward()" in str(each.message) for each in told] == [True] * (way != "none")
    assert not any(p._backward_hooks for p in model.parameters())


def test_an_empty_first_batch_changes_nothing():
    """Its gradient is zero; statistics begin with the first batch that has a datapoint."""
    model = mlp(4, 5, 3)
    opt, before = foof.FOOF(model, lr=0.3, damping=1.0), flat(model)
    model(torch.zeros(0, 4)).sum().backward()
    opt.step()
    assert torch.equal(flat(model), before)
    assert not any(opt.second_moments().values())
    opt.zero_grad()
    model(batch(0)[0]).sum().backward()
    opt.step()
    assert not torch.equal(flat(model), before)


CHANGING = {
    "foof": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, T=1),
    "kfac": lambda m: foof.KFAC(m, T=1),
    "kfac-deferred": lambda m: ablations.kfac(m, T=1, deferred=True),
    "natural": foof.NaturalGradient,
    "sgd": lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.1), m, T=1),
    "kfac-sgd": lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.1), m, method="kfac", T=1),
}


def one_step(model, opt, number):
    x, y = batch(number)
    opt.zero_grad()
    out = model(x)
    opt.update_curvature(out)
    nn.functional.cross_entropy(out, y).backward()
    opt.step()


@pytest.mark.parametrize("name", ["foof", "kfac", "natural"])
@pytest.mark.parametrize("what", ["0", "2.bias"])
def test_what_was_frozen_when_the_optimizer_was_made_is_named_when_it_has_a_gradient(name, what):
    model = mlp(4, 5, 3)
    thawed = [p for key, p in model.named_parameters() if key.startswith(what)]
    for p in thawed:
        p.requires_grad_(False)
    opt = CHANGING[name](model)
    for p in thawed:
        p.requires_grad_()
    before = [p.detach().clone() for p in thawed]
    with pytest.warns(UserWarning, match=f"{what}.*frozen when the optimizer was made.*make a new optimizer"):
        one_step(model, opt, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_step(model, opt, 1)  # told once
    assert all(torch.equal(p, b) for p, b in zip(thawed, before, strict=True))
    assert all(p.grad is not None for p in thawed)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("what", ["weight", "bias"])
@pytest.mark.parametrize("name", CHANGING)
def test_a_weight_or_bias_frozen_by_itself_is_refused(name, what, started):
    """They have one neuron gradient; what is left of it is that of neither."""
    model = mlp(4, 5, 3)
    opt = CHANGING[name](model)
    if started:
        one_step(model, opt, 0)
    getattr(model[0], what).requires_grad_(False)
    before = flat(model)
    with pytest.raises(RuntimeError, match=r"0: of its weight and bias.*Freeze both"):
        one_step(model, opt, 1)
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_a_layer_frozen_in_mid_training_stays_and_the_others_go_on(name, started):
    model = mlp(4, 5, 5, 3)
    opt = CHANGING[name](model)
    if started:
        one_step(model, opt, 0)
    opt.zero_grad()
    model[2].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody needs to be told
        for t in range(1, 4):
            one_step(model, opt, t)
    assert [not torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)] == [True, True, False, False, True, True]


def test_parameters_cannot_join_later():
    opt = foof.FOOF(mlp(4, 5, 3), lr=0.3, damping=1.0)
    with pytest.raises(ValueError, match="cannot join later"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_a_parameter_in_two_groups_is_refused():
    model = mlp(4, 5, 3)
    both = [{"params": [model[0].weight, model[0].bias], "lr": 1.0}, {"params": [model[0].weight], "lr": 2.0}]
    with pytest.raises(ValueError, match="a parameter stands in more than one group"):
        foof.FOOF(model, lr=0.3, damping=1.0, groups=both)


def test_an_optimizer_may_be_put_on_neurons_again_after_remove():
    model = mlp(4, 5, 3)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    foof.precondition(opt, model)
    with pytest.raises(ValueError, match="on neurons already"):
        foof.precondition(opt, model)
    opt.preconditioner.remove()
    assert foof.precondition(opt, model, damping=2.0).preconditioner.taps


@pytest.mark.parametrize(("positions", "kfac", "warns"), [("(L,)", False, True), ("(1, L)", False, False), ("(1, L)", True, True)])
def test_layers_that_count_other_datapoints_are_warned_of(positions, kfac, warns):
    """Σ is a mean over the first dimension: a table of positions would have L datapoints, or, rightly for FOOF, one that all share."""
    table, head, opt_of = nn.Embedding(5, 4), nn.Linear(4, 3), foof.KFAC if kfac else foof.FOOF
    opt = opt_of(nn.ModuleList([table, head]))
    at = torch.arange(5) if positions == "(L,)" else torch.arange(5)[None]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            out = head(torch.randn(6, 5, 4) + table(at))
            opt.update_curvature(out)
            out.square().mean().backward()
            opt.step()
            opt.zero_grad()
    assert sum("different numbers of datapoints" in str(w.message) for w in said) == warns
