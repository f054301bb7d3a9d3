"""Who steps a parameter that several layers share, or that the optimizer does not own: plain gradients, once."""

import copy

import pytest
import torch
from torch import nn

import foof
from cases import batch, flat, mlp
from foof.study.train import ablations


def step_beside_twin(model, opt, t):
    """One step; returns a copy of the model before it, with plain gradients of the same loss."""
    x, y = batch(t)
    x, twin = x.double(), copy.deepcopy(model)
    nn.functional.cross_entropy(twin(x), y).backward()
    opt.zero_grad()
    out = model(x)
    opt.update_curvature(out)
    nn.functional.cross_entropy(out, y).backward()
    opt.step()
    return twin


class TiedWeights(nn.Module):
    """Two layers with one weight and a bias each, or with one of them."""

    def __init__(self, biases):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(4, 4, bias="a" in biases), nn.Linear(4, 4, bias="b" in biases), nn.Linear(4, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.mark.parametrize("biases", ["ab", "a", "b"])
@pytest.mark.parametrize("name", ["foof", "kfac", "kfac-deferred", "natural", "sgd"])
def test_biases_of_layers_that_tie_only_their_weight_are_stepped_by_the_rest(name, biases):
    """Their gradients are plain, on the first step and on later ones."""
    rest = {"name": "sgd", "lr": 0.1}
    make = {
        "foof": lambda m: foof.FOOF(m, lr=0.3, damping=1.0, rest=rest),
        "kfac": lambda m: foof.KFAC(m, rest=rest),
        "kfac-deferred": lambda m: ablations.kfac(m, rest=rest, deferred=True),
        "natural": lambda m: foof.NaturalGradient(m, rest=rest),
        "sgd": lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.1), m),
    }
    model = TiedWeights(biases).double()
    opt = make[name](model)
    assert sorted(opt.preconditioner.rest) == [f"{each}.bias" for each in biases]
    for t in range(3):
        twin = step_beside_twin(model, opt, t)
        for each in biases:
            ours, theirs = model.get_submodule(each).bias, twin.get_submodule(each).bias
            torch.testing.assert_close(ours, theirs - 0.1 * theirs.grad)


class SharedBias(nn.Module):
    """Two layers with one bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)
        self.b.bias = self.a.bias

    def forward(self, x):
        return self.a(x) * self.b(x)


@pytest.mark.parametrize("name", ["foof", "kfac-deferred"])
def test_a_bias_of_two_layers_is_stepped_once_by_the_rest(name):
    model, rest = SharedBias().double(), {"name": "sgd", "lr": 0.1}
    opt = foof.FOOF(model, lr=0.3, damping=1.0, rest=rest) if name == "foof" else ablations.kfac(model, rest=rest, deferred=True)
    for t in range(3):
        twin = step_beside_twin(model, opt, t)
        torch.testing.assert_close(model.a.bias, twin.a.bias - 0.1 * twin.a.bias.grad)


@pytest.mark.parametrize("method", ["foof", "kfac"])
def test_precondition_leaves_what_the_optimizer_does_not_own(method):
    """Of the first layer it owns the weight alone, of the last nothing; what is not cleared there changes nothing here."""
    ends = []
    for cleared in (True, False):
        torch.manual_seed(0)
        model = mlp(4, 5, 5, 3).double()
        sgd = torch.optim.SGD([model[0].weight, *model[2].parameters()], lr=0.1)
        opt = foof.precondition(sgd, model, method=method, T=1, **({"fisher": "full"} if method == "kfac" else {}))
        opt.preconditioner.estimator.plain = method == "kfac"
        for t in range(3):
            x, y = batch(t)
            x, twin = x.double(), copy.deepcopy(model)
            nn.functional.cross_entropy(twin(x), y).backward()
            (model if cleared else opt).zero_grad()
            out = model(x)
            opt.update_curvature(out)
            nn.functional.cross_entropy(out, y).backward()
            for p, plain in zip(model.parameters(), twin.parameters(), strict=True):
                if cleared and not any(p is q for q in sgd.param_groups[0]["params"]):
                    torch.testing.assert_close(p.grad, plain.grad)
            opt.step()
        ends.append(flat(model))
    assert torch.equal(*ends)
    with pytest.raises(ValueError, match=r"no layer to cover.*not a parameter of the optimizer"):
        foof.precondition(torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1), mlp(4, 5, 3))
