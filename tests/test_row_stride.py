"""Statistics from a part of the rows, against the same rows taken by hand, in float64."""

import pytest
import torch
from torch import nn

import foof
from cases import cnn, flat, mlp
from oracle import input_rows, relative_error

K = 3  # every third row


def tokens(seed, n=4, length=6):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, 5, generator=g, dtype=torch.float64), torch.randint(0, 3, (n * length,), generator=g)


def taken(rows, shift):
    """Every third of the rows ``(k, m)``, in the scale of all."""
    some = rows[shift % K :: K]
    return some.mT @ some * (len(rows) / len(some))


def rows_of(model, x):
    """The inputs of each linear layer as rows, with a one for the bias."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            def see(_, args, out, name=name):
                a = args[0].detach().flatten(0, -2)
                found[name] = torch.cat([a, torch.ones_like(a[:, :1])], 1)
            hooks.append(module.register_forward_hook(see))
    model(x)
    for hook in hooks:
        hook.remove()
    return found


def train_one(model, opt, x, y):
    opt.zero_grad()
    out = model(x)
    opt.update_curvature(out, y)
    nn.functional.cross_entropy(out.flatten(0, -2), y).backward()
    opt.step()


MADE = {
    "foof": (lambda m: foof.FOOF(m, lr=0.01, damping=0.5, ema=0.5, T=1, row_stride=K), False),
    "foof over rows": (lambda m: foof.FOOF(m, lr=0.01, damping=0.5, ema=0.5, T=1, row_stride=K, loss_average="batch+sequence"), True),
    "precondition": (
        lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.01), m, damping=0.5, ema=0.5, T=1, row_stride=K), False,
    ),
    "kfac": (lambda m: foof.KFAC(m, lr=0.01, damping=0.5, ema=0.5, T=1, row_stride=K, fisher="full"), False),
    "kfac over rows": (lambda m: foof.KFAC(m, lr=0.01, damping=0.5, ema=0.5, T=1, row_stride=K, loss_average="batch+sequence"), True),
    "kfac, precondition": (
        lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.01), m, method="kfac", damping=0.5, ema=0.5, T=1, row_stride=K),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_the_average_is_of_every_third_row_from_one_later_each_time(name):
    torch.manual_seed(0)
    model = mlp(5, 4, 3).double()
    opt, of_rows = MADE[name][0](model), MADE[name][1]
    history = {"0": [], "2": []}
    for t in range(5):
        x, y = tokens(t)
        for layer, rows in rows_of(model, x).items():
            history[layer].append(taken(rows, t) / (len(rows) if of_rows else len(x)))
        train_one(model, opt, x, y)
        for layer, values in history.items():
            weights = [0.5 ** (t - s) for s in range(t + 1)]
            expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            assert relative_error(opt.preconditioner.second_moments()[layer]["Sigma"], expected) < 1e-12


def test_muon_and_adamw():
    for make in (foof.Muon, foof.AdamW):
        torch.manual_seed(0)
        model = mlp(5, 4, 4, 3).double()
        opt = make(model, T=1, ema=0.0, row_stride=K)
        for t in range(4):
            x, y = tokens(t)
            rows = rows_of(model, x)["2"][:, :-1]
            train_one(model, opt, x, y)
            assert relative_error(opt.second_moments()["2"]["Sigma"], taken(rows, t) / len(rows)) < 1e-12


def test_errors_of_the_same_rows_feed_the_other_factor():
    """One linear layer, gaussian: the errors of the full Fisher are the identity's columns, in every row."""
    model = nn.Linear(5, 3).double()
    opt = foof.KFAC(model, lr=0.01, damping=0.5, T=1, row_stride=K, fisher="full", likelihood="gaussian")
    x, _ = tokens(0)
    out = model(x)
    opt.update_curvature(out)
    out.square().sum().backward()
    opt.step()
    assert relative_error(opt.second_moments()[""]["Sigma_E"], torch.eye(3, dtype=torch.float64)) < 1e-12


def test_masked_rows_are_not_among_them():
    torch.manual_seed(0)
    model = mlp(5, 3).double()
    opt = foof.FOOF(model, lr=0.01, damping=0.5, T=1, row_stride=K)
    x, y = tokens(0)
    mask = torch.rand(x.shape[:2]) < 0.6
    rows = rows_of(model, x)["0"][mask.flatten()]
    with opt.mask(mask):
        out = model(x)
    nn.functional.cross_entropy(out.flatten(0, -2), y).backward()
    opt.step()
    assert relative_error(opt.second_moments()["0"]["Sigma"], taken(rows, 0) / len(x)) < 1e-12


def test_of_convolutions_every_third_datapoint():
    torch.manual_seed(0)
    model = cnn().double()
    opt = foof.FOOF(model, lr=0.01, damping=0.5, T=1, ema=0.0, row_stride=K)
    for t in range(4):
        x, y = torch.randn(7, 2, 8, 8, dtype=torch.float64), torch.randint(0, 3, (7,))
        a = input_rows(model[0], x)[0, t % K :: K]  # (N, R, m)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        assert relative_error(opt.second_moments()["0"]["Sigma"], torch.einsum("irk,irl->kl", a, a) / len(a)) < 1e-12


def test_initialise_and_resume():
    ends = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = mlp(5, 4, 3).double()
        opt = foof.FOOF(model, lr=0.1, damping=0.5, T=4, S=2, row_stride=K)
        opt.initialise([tokens(100)[0]])
        for t in range(9):
            if interrupted and t == 6:
                state, other = opt.state_dict(), mlp(5, 4, 3).double()
                other.load_state_dict(model.state_dict())
                model, opt = other, foof.FOOF(other, lr=0.1, damping=0.5, T=4, S=2, row_stride=K)
                opt.load_state_dict(state)
            train_one(model, opt, *tokens(t))
        ends.append(flat(model))
    assert torch.equal(*ends)
