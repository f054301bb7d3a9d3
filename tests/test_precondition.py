"""The options of ``foof.precondition``: what the optimizer sees, against the formulas written out densely, in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foof


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6, bias=False), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(seed, length=None):
    generator = torch.Generator().manual_seed(seed)
    shape = (10,) if length is None else (10, length)
    return torch.randn(*shape, 5, dtype=torch.float64, generator=generator), torch.randint(3, shape, generator=generator)


def loss_of(net, x, y):
    return F.cross_entropy(net(x).flatten(0, -2), y.flatten())


def seen_by(net, opt, seeds, length=None):
    """The gradients that an optimizer sees on a step of these batches, accumulated; weights are left where they are."""
    opt.zero_grad()
    for seed in seeds:
        (loss_of(net, *batch(seed, length)) / len(seeds)).backward()
    opt.step()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def dense(net, seeds, length=None):
    """Per linear layer: the inputs, with a one where there is a bias, and the plain gradient of ``[W, bias]``."""
    found, rows = {}, {name: [] for name, m in net.named_modules() if isinstance(m, nn.Linear)}
    twin = copy.deepcopy(net)
    for name in rows:
        twin.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: rows[name].append(args[0].detach()))
    for seed in seeds:
        (loss_of(twin, *batch(seed, length)) / len(seeds)).backward()
    for name in rows:
        layer, A = twin.get_submodule(name), torch.cat(rows[name]).flatten(0, -2)
        G = layer.weight.grad
        if layer.bias is not None:
            A, G = torch.cat([A, torch.ones(len(A), 1)], 1).double(), torch.cat([G, layer.bias.grad[:, None]], 1)
        found[name] = A, G
    return found


def matrix(seen, name):
    weight, bias = seen[f"{name}.weight"], seen.get(f"{name}.bias")
    return weight if bias is None else torch.cat([weight, bias[:, None]], 1)


def powered(Sigma, damping, power):
    s, U = torch.linalg.eigh(Sigma)
    return U @ torch.diag((s + damping) ** power) @ U.T


def on_neurons(net, **options):
    return foof.precondition(torch.optim.SGD(net.parameters(), lr=0.0), net, **{"damping": 0.3, "T": 1, "ema": 0.0, **options})


@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("blend", [1.0, 0.3])
@pytest.mark.parametrize("graft", [False, True])
@pytest.mark.parametrize("power", [-1.0, -0.5])
def test_power_graft_and_blend_equal_the_formulas(power, graft, blend, relative, seeds):
    net = make()
    opt = on_neurons(net, power=power, graft=graft, blend=blend, relative=relative)
    for k in range(2):  # the second step has an inverse when the backward pass comes by; the weights do not move, nor do the data
        seen = seen_by(net, opt, seeds)
        for name, (A, G) in dense(net, seeds).items():
            Sigma = A.T @ A / len(A)
            N = G @ powered(Sigma, 0.3 * (Sigma.trace() / len(Sigma) if relative else 1.0), power)
            if graft:
                N = N * G.norm() / N.norm()
            torch.testing.assert_close(matrix(seen, name), (1 - blend) * G + blend * N, rtol=1e-10, atol=1e-12, msg=f"{name}, step {k}")


def test_in_diagonal_blocks_of_the_inputs():
    net = make()
    seen = seen_by(net, on_neurons(net, power=-0.5, blocks=2, graft=True), (0,))
    A, G = dense(net, (0,))["2"]
    Sigma = torch.block_diag(A[:, :4].T @ A[:, :4], A[:, 4:].T @ A[:, 4:]) / len(A)
    N = G @ powered(Sigma, 0.3, -0.5)
    torch.testing.assert_close(matrix(seen, "2"), N * G.norm() / N.norm(), rtol=1e-10, atol=1e-12)


def test_damping_and_blend_follow_their_schedules_also_after_a_checkpoint():
    """Both are functions of the steps taken: 0.5, 0.4, ... when an inverse is made, and 0, 0.1, ... when it is used."""
    options = {"damping": lambda t: 0.5 - 0.1 * t, "blend": lambda t: 0.1 * t}
    net = make()
    opt = on_neurons(net, **options)
    made_at = [0, 0, 1, 2]  # Algorithm 1: step t inverts after its update; the first has an inverse of its own
    for t in range(4):
        if t == 2:
            state = copy.deepcopy(opt.state_dict())
            opt.preconditioner.remove()
            opt = on_neurons(net, **options)
            opt.load_state_dict(state)
        seen = seen_by(net, opt, (0,))
        for name, (A, G) in dense(net, (0,)).items():
            N = G @ powered(A.T @ A / len(A), 0.5 - 0.1 * made_at[t], -1.0)
            torch.testing.assert_close(matrix(seen, name), G + 0.1 * t * (N - G), rtol=1e-10, atol=1e-12, msg=f"{name}, step {t}")


def test_only_what_is_included_is_covered():
    model = nn.ModuleDict({"inside": make(), "head": nn.Linear(3, 3)})
    opt = foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, include=["inside.2", "head"])
    assert [block.name for block in opt.preconditioner.blocks] == ["inside.2", "head"]
    assert opt.preconditioner.rest["inside.0.weight"] == "excluded by request"
    opt.preconditioner.remove()
    opt = foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, include=["inside"], exclude=["inside.0"])
    assert [block.name for block in opt.preconditioner.blocks] == ["inside.2", "inside.4"]
    with pytest.raises(ValueError, match="include: the model has no module named 'tail'"):
        foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1), model, include=["tail"])


def test_padding_stays_out_under_a_mask():
    net, (x, y) = make(), batch(0, 4)
    opt = on_neurons(net, loss_average="batch+sequence")
    mask = torch.rand(10, 4, generator=torch.Generator().manual_seed(1)) < 0.6
    with opt.mask(mask):
        loss = F.cross_entropy(net(x)[mask], y[mask])
    loss.backward()
    opt.step()
    rows = torch.cat([x[mask], torch.ones(int(mask.sum()), 1)], 1).double()
    torch.testing.assert_close(opt.preconditioner.second_moments()["0"]["Sigma"], rows.T @ rows / len(rows), rtol=1e-12, atol=1e-12)


def test_the_same_lr_at_any_length():
    found = []
    for repeat in (1, 2):
        net, (x, y) = make(), batch(0, 4)
        opt = foof.precondition(torch.optim.SGD(net.parameters(), lr=0.1), net, damping=0.1, T=1, loss_average="batch+sequence")
        for _ in range(3):
            opt.zero_grad()
            loss_of(net, x.repeat(1, repeat, 1), y.repeat(1, repeat)).backward()
            opt.step()
        found.append([p.detach() for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_a_dead_layer_keeps_its_zero_gradient():
    net = make()
    with torch.no_grad():
        net[4].weight.zero_()  # no error reaches the layers before
    seen = seen_by(net, on_neurons(net, graft=True, blend=0.5), (0,))
    assert not seen["0.weight"].any()
    assert seen["4.weight"].isfinite().all()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(("options", "message"), [
    ({"power": -0.25}, "power must be one of"), ({"blend": 1.5}, "blend is how much of the neuron gradient"),
    ({"blend": lambda t: -1.0}, "blend is how much"), ({"damping": lambda t: -1.0}, "damping λ must be a positive"),
    ({"graft": True}, "graft and blend cannot treat each by itself"), ({"graft": True, "include": ["head"]}, "is read by embed, too"),
    ({"blend": 0.5, "exclude": ["embed"]}, "is read by embed, too"),
])  # fmt: skip
def test_options_that_cannot_be_meant(options, message):
    net = Tied()
    with pytest.raises(ValueError, match=message):
        foof.precondition(torch.optim.SGD(net.parameters(), lr=0.1), net, **options)
    foof.precondition(torch.optim.SGD(net.parameters(), lr=0.1), net)  # and nothing was left behind on the model
