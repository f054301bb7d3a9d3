"""Muon on neurons and Adam in the eigenbasis: whole training runs against a slow twin that follows the formulas, in float64."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foof
from foof.statistics import Schedule

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class TinyGPT(nn.Module):
    """Tied embedding and head, a bias here and there, a norm."""

    def __init__(self, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down, self.norm = nn.Linear(6, 8), nn.Linear(8, 6, bias=False), nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches(steps, passes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(11, (4, 8), generator=generator) for _ in range(passes)] for _ in range(steps)]


def make(tied=True):
    torch.manual_seed(1)
    return TinyGPT(tied).double()


def train(model, opt, data):
    for step in data:
        opt.zero_grad()
        for ids in step:
            (loss_of(model, ids) / len(step)).backward()
        opt.step()
    return [p.detach().clone() for p in model.parameters()]


def orthogonalised(M):
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    s, (a, b, c) = s / s.norm(), COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ Vh


class Twin:
    """Plain autograd, inputs by forward hooks, Algorithm 1's order: update, invert if due, fold in the batch if due."""

    def __init__(self, model, layers, T, S, ema):
        self.model, self.layers, self.ema, self.schedule = model, layers, ema, Schedule(T, S)
        self.inputs = {name: [] for name in layers}
        for name in layers:
            model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: self.inputs[name].append(args[0].detach()))
        self.sums, self.masses, self.at_hand, self.state = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0), {}, {}
        others = {id(model.get_submodule(name).weight) for name in layers}
        self.others = [p for p in model.parameters() if id(p) not in others]

    def fold(self, name, rows):
        self.sums[name] = self.ema * self.sums[name] + (1 - self.ema) * rows.T @ rows / len(rows)
        self.masses[name] = self.ema * self.masses[name] + 1 - self.ema

    def train(self, data, fallback, update, made):
        for t, step in enumerate(data):
            self.model.zero_grad()
            for ids in step:
                (loss_of(self.model, ids) / len(step)).backward()
            for name in self.layers:
                rows = torch.cat([x.flatten(0, -2) for x in self.inputs[name]])
                self.inputs[name].clear()
                if t == 0:
                    self.fold(name, rows)
                    self.at_hand[name] = made(self.sums[name] / self.masses[name], None, self.state.setdefault(name, {}))
                weight = self.model.get_submodule(name).weight
                with torch.no_grad():
                    update(weight, self.at_hand[name], self.state[name], t + 1)
                if t > 0 and self.schedule.inverts():
                    self.at_hand[name] = made(self.sums[name] / self.masses[name], self.at_hand[name], self.state[name])
                if t > 0 and self.schedule.gathers():
                    self.fold(name, rows)
            fallback.step()
            self.schedule.advance()
        return [p.detach().clone() for p in self.model.parameters()]


def muon_twin(model, layers, data, T, S, ema, lr=0.02, ridge=0.1, power=-1.0, momentum=0.95, decay=0.1, stacked=None, neurons=None):
    def made(Sigma, old, state):
        mean = Sigma.trace() / len(Sigma)
        s, U = torch.linalg.eigh(Sigma / mean + ridge * torch.eye(len(Sigma), dtype=Sigma.dtype))
        return U @ torch.diag(s**power) @ U.T

    def update(weight, P, state, t):
        state["B"] = momentum * state.get("B", 0) + (1 - momentum) * weight.grad
        M = momentum * state["B"] + (1 - momentum) * weight.grad
        parts = M.chunk(stacked["up"] if stacked and weight is model.up.weight else 1)
        n, m = parts[0].shape
        if neurons and weight is model.up.weight:
            P = torch.eye(m, dtype=weight.dtype)
        weight.mul_(1 - lr * decay).sub_(lr * max(1, n / m) ** 0.5 * torch.cat([orthogonalised(part @ P) for part in parts]))

    twin = Twin(model, layers, T, S, ema)
    return twin.train(data, torch.optim.AdamW(twin.others, lr=3e-3, betas=(0.9, 0.95), weight_decay=decay), update, made)


def adamw_twin(model, layers, data, T, S, ema, lr=3e-3, decay=0.1):
    def made(Sigma, old, state):
        U = torch.linalg.eigh(Sigma)[1]
        if "V" in state:
            state["V"] = state["V"] @ (old.T @ U) ** 2
        return U

    def update(weight, U, state, t):
        state["M"] = 0.9 * state.get("M", 0) + 0.1 * weight.grad  # not rotated: it is linear
        state["V"] = 0.95 * state.get("V", 0) + 0.05 * (weight.grad @ U) ** 2
        step = (state["M"] @ U / (1 - 0.9**t)) / ((state["V"] / (1 - 0.95**t)).sqrt() + 1e-8)
        weight.mul_(1 - lr * decay).sub_(lr * step @ U.T)

    twin = Twin(model, layers, T, S, ema)
    return twin.train(data, torch.optim.AdamW(twin.others, lr=lr, betas=(0.9, 0.95), weight_decay=decay), update, made)


RULES = {
    "muon": (foof.Muon, muon_twin, ["up", "down"], {}),
    "muon, power -1/2": (foof.Muon, muon_twin, ["up", "down"], {"power": -0.5}),
    "muon, some neurons": (foof.Muon, muon_twin, ["up", "down"], {"neurons": ["down"]}),
    "muon, stacked": (foof.Muon, muon_twin, ["up", "down"], {"stacked": {"up": 2}}),
    "adamw": (foof.AdamW, adamw_twin, ["up", "down"], {}),
}


def equal(a, b, tolerance=1e-10):
    return all(torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("T", "S", "ema"), [(1, 1, 0.0), (3, 2, 0.9)])
@pytest.mark.parametrize("rule", RULES)
def test_training_equals_the_formulas(rule, T, S, ema, passes):
    """With tied embedding and head, and with accumulation over two passes."""
    kind, twin, layers, options = RULES[rule]
    data, model = batches(7, passes), make()
    ours = train(model, kind(model, weight_decay=0.1, T=T, S=S, ema=ema, **options), data)
    assert equal(ours, twin(make(), layers, data, T, S, ema, **options))


@pytest.mark.parametrize("rule", RULES)
def test_resumed_in_the_middle_is_uninterrupted(rule):
    kind, _, _, options = RULES[rule]
    data, model = batches(8, 1), make()
    opt = kind(model, T=3, S=2, **options)
    train(model, opt, data[:4])
    other = make()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = kind(other, T=3, S=2, **options)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    whole, piece = train(model, opt, data[4:]), train(other, resumed, data[4:])
    assert all(torch.equal(a, b) for a, b in zip(whole, piece, strict=True))


def test_who_gets_what_and_why():
    opt = foof.Muon(make())
    assert opt.preconditioner.rest == {
        "embed.weight": "an embedding", "up.bias": "a bias",
        "norm.weight": "LayerNorm is not of the form b = W a", "norm.bias": "LayerNorm is not of the form b = W a",
    }  # fmt: skip
    covered = [p for group in opt.param_groups if group["kind"] == "neurons" for p in group["params"]]
    assert {id(p) for p in covered} == {id(opt.preconditioner.model.up.weight), id(opt.preconditioner.model.down.weight)}
    assert "up.bias" in str(opt.explain())
    assert opt.explain().rest == opt.preconditioner.rest


def test_the_output_layer_is_found_or_named():
    assert foof.Muon(make(tied=False)).preconditioner.rest["head.weight"] == "the output layer"
    opt = foof.Muon(make(tied=False), head=["down"])
    assert opt.preconditioner.rest["down.weight"] == "the output layer"
    assert "head.weight" not in opt.preconditioner.rest
    with pytest.raises(ValueError, match="head: the model has no module named 'tail'"):
        foof.Muon(make(), head=["tail"])
    with pytest.raises(ValueError, match=r"no matrix inside it.*head=\[\]"):
        foof.Muon(nn.Linear(3, 4))
    assert len(foof.Muon(nn.Linear(3, 4), head=[]).preconditioner.blocks) == 1


def test_stacked_matrices_are_named_by_their_layers():
    attention = {name: nn.ModuleDict({"qkv": nn.Linear(4, 12)}) for name in "ab"}
    model = nn.ModuleDict({**attention, "head": nn.Linear(4, 2)})
    opt = foof.Muon(model, stacked={"qkv": 3})
    assert {block.name: count for block, count in opt._stacked.items()} == {"a.qkv": 3, "b.qkv": 3}
    opt.remove()
    opt = foof.Muon(model, stacked={"b.qkv": 3})
    assert [block.name for block in opt._stacked] == ["b.qkv"]
    opt.remove()
    opt = foof.Muon(model, stacked={"qkv": 3, "b.qkv": 2})  # the longest name that fits
    assert {block.name: count for block, count in opt._stacked.items()} == {"a.qkv": 3, "b.qkv": 2}
    opt.remove()
    for stacked, said in (({"head": 2}, "no layer that Muon steps is called 'head'"), ({"qkv": 5}, "of a.qkv are not those of 5"),
                          ({"qkv": 12}, "not those of 12"), (["qkv"], "how many matrices"), (3, "got 3")):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=said):
            foof.Muon(model, stacked=stacked)
        assert not model.a.qkv._forward_hooks
    attention = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"0.in_proj is taken for 3 matrices as it is; leave it out"):
        foof.Muon(attention, stacked={"in_proj": 3})


def test_layers_without_neurons_keep_no_statistics():
    model = make()
    opt = foof.Muon(model, neurons=["down"], stacked={"up": 2}, spread=True, T=4, S=1)
    opt.initialise([ids for step in batches(1, 2) for ids in step])
    train(model, opt, batches(6, 1))
    up, down = opt.preconditioner.blocks
    assert (up.name, up.moments, up.inverse) == ("up", {}, None)
    assert not model.up._forward_hooks  # nor is anything to be seen of them
    assert down.inverse is not None
    rows = {row.parameter: row for row in opt.explain().rows}
    assert rows["up.weight"].covered == "Linear, 8×6, 2 stacked, without neurons"
    assert (rows["up.weight"].memory, rows["down.weight"].memory) == (0, 2 * 8 * 8 * 8)
    state = opt.state_dict()
    opt.remove()
    with pytest.raises(ValueError, match=r"other layers on neurons \(up\): give neurons= as it was"):
        foof.Muon(model, spread=True, T=4, S=1).load_state_dict(state)


@pytest.mark.parametrize(("names", "said"), [(["tail"], "no layer that Muon steps is called 'tail'"), ([], "got none")])
def test_layers_on_neurons_are_named(names, said):
    model = make()
    with pytest.raises(ValueError, match=said):
        foof.Muon(model, neurons=names)
    assert not model.up._forward_hooks


@pytest.mark.parametrize("how", ["excluded", "frozen", "parametrized"])
def test_the_output_layer_is_the_last_one_also_where_it_is_not_covered(how):
    model = make(tied=False)
    if how == "frozen":
        model.head.weight.requires_grad_(False)
    elif how == "parametrized":
        nn.utils.parametrizations.weight_norm(model.head)
    opt = foof.Muon(model, exclude="head" if how == "excluded" else ())
    assert [block.name for block in opt.preconditioner.blocks] == ["up", "down"]


def test_all_inside_a_head_is_output():
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 3)))
    for head in (["2"], "2"):
        opt = foof.Muon(net, head=head)
        assert [block.name for block in opt.preconditioner.blocks] == ["0", "1"]
        opt.remove()


@pytest.mark.parametrize("factor", [1e-6, 1e-15])
def test_a_tiny_loss_gives_the_same_update(factor):
    found = []
    for scale in (1.0, factor):
        model = make()
        opt = foof.Muon(model, exclude=["embed", "head", "norm"])
        (scale * loss_of(model, batches(1, 1)[0][0])).backward()
        opt.step()
        found.append(model.down.weight.detach().clone())
    assert equal([found[0]], [found[1]])


def test_what_it_costs_is_told_of_each_by_its_name():
    net, x = nn.Sequential(nn.Linear(64, 192, bias=False), nn.ReLU(), nn.Linear(192, 3, bias=False)), torch.randn(128, 64)
    inputs = 2 / 32 * 1.5 * 128 * 64**2
    expected = {foof.Muon: 2 * 192 * 64**2 + inputs + 64**3 / 32, foof.AdamW: 4 * 192 * 64**2 + inputs + 4.5 * 64**3 / 32}
    for kind, flops in expected.items():
        opt = kind(net)
        said = opt.explain(x)
        assert said.rows[0].flops == flops
        assert f"{kind.__name__} adds" in str(said)
        assert said.ratio is None
        opt.remove()


def test_groups_may_set_what_is_read():
    model = make()
    with pytest.raises(ValueError, match=r"unknown options \['relative'\]; a group may set lr, damping, momentum, weight_decay"):
        foof.Muon(model, groups=[{"params": model.up.weight, "relative": False}])
    with pytest.raises(ValueError, match=r"unknown options \['damping'\]; a group may set lr, weight_decay"):
        foof.AdamW(model, groups=[{"params": model.up.weight, "damping": 0.1}])
    with pytest.raises(ValueError, match="absolute"):
        foof.Muon(model, groups=[{"params": model.up.weight, "damping": "auto"}])


def test_convolutions_are_orthogonalised_as_matrices():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU(), nn.Conv2d(4, 6, 2), nn.Flatten(), nn.Linear(54, 3)).double()
    before = [p.detach().clone() for p in net.parameters()]
    opt = foof.Muon(net, lr=0.1)
    x, y = torch.randn(8, 2, 6, 6, dtype=torch.float64), torch.randint(3, (8,))
    F.cross_entropy(net(x), y).backward()
    opt.step()
    grouped, plain = (before[i] - p.detach() for i, p in ((0, net[0].weight), (2, net[2].weight)))
    for moved in (*grouped.reshape(2, 2, 9), plain.reshape(6, 16)):
        singular = torch.linalg.svdvals(moved) / 0.1
        assert 0.5 < singular.min() <= singular.max() < 1.3  # orthogonal, up to what five steps of Newton-Schulz leave


@pytest.mark.parametrize("kind", [foof.Muon, foof.AdamW])
def test_a_weight_stored_transposed_moves_as_one_that_is_not(kind):
    """``Conv1D`` of transformers' GPT-2."""
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    stored = nn.Sequential(conv1d(8, 5), nn.Tanh(), nn.Linear(8, 3)).double()
    with torch.no_grad():
        stored[0].weight.copy_(usual[0].weight.T)
        stored[0].bias.copy_(usual[0].bias)
    stored[2].load_state_dict(usual[2].state_dict())
    for net in (usual, stored):
        opt = kind(net, T=2, S=1)
        for t in range(5):
            x = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    assert equal([usual[0].weight.T, *list(usual.parameters())[1:]], list(stored.parameters()))


@pytest.mark.parametrize("kind", [foof.Muon, foof.AdamW])
def test_it_ascends_where_asked(kind):
    found = []
    for sign, maximize in ((1, False), (-1, True)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        opt = kind(net, weight_decay=0.1, maximize=maximize)
        for t in range(3):
            opt.zero_grad()
            x = torch.randn(20, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
            (sign * net(x).square().mean()).backward()
            opt.step()
        found.append(list(net.parameters()))
    assert equal(*found)


@pytest.mark.parametrize("kind", [foof.Muon, foof.AdamW])
def test_bfloat16_weights_keep_wide_statistics(kind):
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).bfloat16()
    before = [p.detach().clone() for p in net.parameters()]
    opt = kind(net, T=2, S=1)
    for _ in range(4):
        opt.zero_grad()
        net(torch.randn(20, 5, dtype=torch.bfloat16)).square().mean().backward()
        opt.step()
    assert all(p.isfinite().all() and not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert all(moment["Sigma"].dtype == torch.float32 for moment in opt.second_moments().values())


@pytest.mark.parametrize(("options", "message"), [
    ({"power": -0.25}, "power must be one of"), ({"scale": "big"}, "scale must be one of"), ({"damping": "auto"}, "damping is relative"),
    ({"damping": 0.0}, "damping"), ({"momentum": 1.0}, "momentum must be in"), ({"orthogonalisation": 2.5}, "how many steps of Newton"),
    ({"orthogonalisation": 0}, "a whole number from 1 on"), ({"lr": None}, "lr must be a number, got None"),
])  # fmt: skip
def test_options_that_cannot_be_meant(options, message):
    model = make()
    with pytest.raises((ValueError, TypeError), match=message):
        foof.Muon(model, **options)
    foof.Muon(model)  # and nothing was left behind on the model


@pytest.mark.parametrize("kind", [foof.Muon, foof.AdamW])
def test_length_and_scale_of_the_loss_do_not_matter(kind):
    """The same tokens twice, as longer sequences, and a loss times 100: the same updates at the same lr."""
    found = []
    for repeat, factor in ((1, 1.0), (2, 1.0), (1, 100.0)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 6), nn.GELU(), nn.Linear(6, 3)).double()
        opt = kind(net, T=2, S=1, **({"eps": 1e-15} if kind is foof.AdamW else {"rest": {"name": "adamw", "eps": 1e-15}}))
        for t in range(4):
            generator = torch.Generator().manual_seed(t)
            x, y = torch.randn(4, 6, 5, dtype=torch.float64, generator=generator), torch.randint(3, (4, 6), generator=generator)
            opt.zero_grad()
            out = net(x.repeat(1, repeat, 1))
            (factor * F.cross_entropy(out.flatten(0, 1), y.repeat(1, repeat).flatten())).backward()
            opt.step()
        found.append([p.detach() for p in net.parameters()])
    assert equal(found[0], found[1], 1e-9)
    assert equal(found[0], found[2], 1e-9)
