"""What is said where something cannot be meant: refusals and warnings that no other test hears. ``docs/problems.md`` lists them all."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import foof
from cases import batch, net, step
from foof import distributed


def tied():
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


def labels():
    return torch.zeros(4, dtype=torch.long)


OPTIONS = {
    r"betas must be in \[0, 1\)": lambda: foof.AdamW(net(), betas=(0.9, 1.0)),
    "blocks is into how many diagonal blocks": lambda: foof.FOOF(net(), blocks=0),
    "row_stride: statistics are of every k-th row": lambda: foof.KFAC(net(), row_stride=0),
    'loss_average must be "batch" or': lambda: foof.FOOF(net(), loss_average="tokens"),
    "groups: each is a mapping": lambda: foof.FOOF(net(), groups=[["weight"]]),
    'damping="auto" is absolute': lambda: foof.FOOF(net(), damping="auto", relative=True),
    'damping="auto" and relative=True are FOOF': lambda: foof.EKFAC(net(), damping="auto"),
    "it needs step=True": lambda: foof.Adaptive(step=False, momentum=True),
    "period must be at least 1": lambda: foof.Adaptive(period=0),
    "adapt_damping is for adaptive=True": lambda: foof.KFAC(net()).adapt_damping(1.0, 0.5),
    "KFAC has no option 'second_factor'.*study.train.ablations.kfac": lambda: foof.KFAC(net(), second_factor="drop-scaled"),
    "KFAC has no option 'rows'.*study.train.ablations.kfac": lambda: foof.KFAC(net(), rows="sum"),
    "KFAC has no option 'deferred'.*study.train.updates": lambda: foof.KFAC(net(), deferred=True),
    "KFAC has no option 'lamda'": lambda: foof.KFAC(net(), lamda=0.1),
    r"has no 'updates'.*study\.train\.updates": lambda: foof.KFAC(net()).updates(),
}


@pytest.mark.parametrize("message", OPTIONS)
def test_options(message):
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        OPTIONS[message]()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, other=None):
        return self.fc(x if other is None else x + other.mean(0))


def fisher(model=None, x=None, **options):
    return foof.Fisher(net() if model is None else model, torch.randn(4, 4) if x is None else x, **options)


def posterior():
    return foof.laplace.fit(net(), torch.randn(4, 4), labels(), prior_precision=1.0)


def odd_labels():
    return DataLoader([(torch.randn(4), "cat"), (torch.randn(4), "dog")], batch_size=2)


FISHERS = {
    "outputs do not depend on its parameters": lambda: fisher(Cut()),
    "batch_size needs inputs with one first dimension": lambda: fisher(Pair(), (torch.randn(4, 4), torch.randn(5, 4)), batch_size=2),
    "must be the labels, a tensor; got": lambda: fisher(x=odd_labels()),
    "must be a number or": lambda: (F := fisher()).solve(torch.randn(F.P), [torch.ones(2, 2), *[1.0] * 5]),
    "tie no weights across layouts": lambda: foof.laplace.fit_kronecker(tied(), labels(), labels()),
    '"glm" or "nn"': lambda: posterior().predictive_samples(torch.randn(2, 4), 3, "mc"),
}


class Cut(Pair):
    def forward(self, x):
        return self.fc(x).detach()


@pytest.mark.parametrize("message", FISHERS)
def test_fishers(message):
    with pytest.raises((ValueError, TypeError), match=message):
        FISHERS[message]()


def test_adaptive_steps_need_their_batch():
    model = net()
    opt = foof.KFAC(model, adaptive=True, T=100)
    step(model, opt, *batch(0))
    opt.zero_grad()
    cross_entropy(model(batch(1)[0]), batch(1)[1]).backward()
    with pytest.raises(RuntimeError, match=r"needs update_curvature\(out\) on every step"):
        opt.step()


def test_initialise_names_what_it_has_not_seen():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    model.forward = lambda x: model["used"](x)
    with pytest.warns(UserWarning, match="initialise saw nothing of spare"):
        foof.FOOF(model).initialise([batch(0)[0]])


def test_outputs_that_are_not_finite_make_no_exact_fisher():
    model = net()
    opt = foof.NaturalGradient(model)
    with pytest.warns(UserWarning, match="there is no Fisher of this batch"):
        opt.update_curvature(model(batch(0)[0] * float("nan")))


def test_ekfac_is_of_one_process(monkeypatch):
    monkeypatch.setattr(distributed, "group_of", lambda _: object())
    with pytest.raises(NotImplementedError, match="Use KFAC here"):
        foof.EKFAC(net())


def test_the_engine_s_state_is_what_the_optimizer_carries():
    model, other = net(), net()
    opt, again = foof.FOOF(model, T=1), foof.FOOF(other, T=1)
    step(model, opt, *batch(0))
    again.preconditioner.load_state_dict(opt.preconditioner.state_dict())
    carried = opt.state_dict()["neurons"]
    assert opt.preconditioner.state_dict().keys() == carried.keys()
    for name, moments in opt.second_moments().items():
        assert torch.equal(moments["Sigma"], again.second_moments()[name]["Sigma"])
