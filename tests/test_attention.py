"""``nn.MultiheadAttention``, covered from the gradient's side: as one that is written with ``nn.Linear``, in float64."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foof

WIDTH, HEADS = 8, 2


class Written(nn.Module):
    """The same as ``nn.MultiheadAttention(batch_first=True)``, layer by layer."""

    def __init__(self, attention):
        super().__init__()
        packed = attention.in_proj_weight is not None
        weights = attention.in_proj_weight.chunk(3) if packed else [getattr(attention, f"{k}_proj_weight") for k in "qkv"]
        self.q, self.k, self.v = (nn.Linear(w.shape[1], w.shape[0]) for w in weights)
        self.out = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for layer, weight, bias in zip((self.q, self.k, self.v), weights, attention.in_proj_bias.chunk(3), strict=True):
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
        self.out.load_state_dict(attention.out_proj.state_dict())
        self.double()

    def forward(self, query, key, value, **_):
        heads = [f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f, x in ((self.q, query), (self.k, key), (self.v, value))]
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)), None


class Model(nn.Module):
    """Queries are read from x, keys and values from z, through layers before; or all three from x."""

    def __init__(self, written=False, kdim=None, crossed=True):
        super().__init__()
        torch.manual_seed(0)
        width = WIDTH if kdim is None else kdim
        self.crossed, self.before, self.other = crossed, nn.Linear(5, WIDTH), nn.Linear(3, width) if crossed else None
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, kdim=kdim, vdim=kdim, batch_first=True)
        nn.init.normal_(self.attention.in_proj_bias)
        self.after = nn.Linear(WIDTH, 4)
        if written:
            self.attention = Written(self.attention)
        self.double()

    def forward(self, x, z):
        query = self.before(x).tanh()
        key = self.other(z).tanh() if self.crossed else query
        return self.after(self.attention(query, key, key, need_weights=False)[0].tanh())


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    draw = {"dtype": torch.float64, "generator": generator}
    return torch.randn(6, 3, 5, **draw), torch.randn(6, 7, 3, **draw), torch.randint(4, (6, 3), generator=generator)


def train(model, opt, steps, passes=1):
    for t in steps:
        opt.zero_grad()
        for k in range(passes):
            x, z, y = batch(passes * t + k)
            (F.cross_entropy(model(x, z).flatten(0, 1), y.flatten()) / passes).backward()
        opt.step()


def projected(model):
    """The weights of q, k and v, then their biases, in either way of writing."""
    attention = model.attention
    if isinstance(attention, Written):
        parts = (attention.q, attention.k, attention.v)
        return [*[p.weight for p in parts], *[p.bias for p in parts]]
    packed = attention.in_proj_weight is not None
    weights = attention.in_proj_weight.chunk(3) if packed else [getattr(attention, f"{k}_proj_weight") for k in "qkv"]
    return [*weights, *attention.in_proj_bias.chunk(3)]


OUT = {False: "attention.out_proj", True: "attention.out"}
MAKE = {
    "foof": lambda m, out: foof.FOOF(m, lr=0.1, damping=0.1, momentum=0.9, T=2, S=1, exclude=[out]),
    "foof, by the change of outputs": lambda m, out: foof.FOOF(m, T=2, S=1, exclude=[out], loss_average="batch+sequence"),
    "muon": lambda m, out: foof.Muon(m, T=2, S=1, exclude=[out]),
    "adamw": lambda m, out: foof.AdamW(m, T=2, S=1, exclude=[out]),
    "precondition": lambda m, out: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.1), m, damping=0.1, T=2, S=1, power=-0.5,
                                                     exclude=[out]),
}  # fmt: skip


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("crossed", [True, False])
@pytest.mark.parametrize("name", [name for name in MAKE if "change" not in name])
def test_it_trains_as_one_that_is_written_out(name, crossed, passes):
    models = [Model(written, crossed=crossed) for written in (False, True)]
    for written, model in enumerate(models):
        train(model, MAKE[name](model, OUT[bool(written)]), range(5), passes)
    for ours, theirs in zip(*map(projected, models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(projected(models[0])[0], projected(Model())[0])


@pytest.mark.parametrize("name", ["foof", "muon", "adamw"])
def test_keys_of_another_width_have_weights_of_their_own(name):
    """Their common bias belongs to three weights, and so to the fallback optimizer; here it is frozen."""
    model, twin = Model(kdim=6), Model(written=True, kdim=6)
    ours = MAKE[name](model, OUT[False])
    assert {"attention.q_proj", "attention.k_proj", "attention.v_proj"} <= {block.name for block in ours.preconditioner.blocks}
    assert "not of one weight alone" in ours.preconditioner.rest["attention.in_proj_bias"]
    ours.remove()
    for bias in (model.attention.in_proj_bias, *(getattr(twin.attention, k).bias for k in "qkv")):
        bias.requires_grad_(False)
    ours = MAKE[name](model, OUT[False])
    train(model, ours, range(5))
    train(twin, MAKE[name](twin, OUT[True]), range(5))
    for a, b in zip(projected(model)[:3], projected(twin)[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_a_step_that_is_set_by_the_change_of_outputs_trains():
    """Its thirds are one block, whose outputs are measured together."""
    model = Model()
    opt = MAKE["foof, by the change of outputs"](model, OUT[False])
    x, z, y = batch(0)
    losses = []
    for _ in range(60):
        opt.zero_grad()
        loss = F.cross_entropy(model(x, z).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", MAKE)
def test_resumed_in_the_middle_is_uninterrupted(name):
    model = Model()
    opt = MAKE[name](model, OUT[False])
    train(model, opt, range(3))
    other = Model()
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = MAKE[name](other, OUT[False])
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt, range(3, 6))
    train(other, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_seen_counts_only_where_a_step_is_taken():
    model = Model()
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=1, ema=0.0)
    x, z, _ = batch(0)
    with torch.no_grad():
        model(x, z)
    model(x, z)
    model(x, z).sum().backward()
    opt.zero_grad()
    torch.autograd.grad(model(x, z).sum(), model.after.weight)
    assert "Sigma" not in opt.second_moments()["attention.in_proj"]
    model(x, z).sum().backward()
    opt.step()
    assert opt.second_moments()["attention.in_proj"]["Sigma"].shape == (3, WIDTH + 1, WIDTH + 1)


@pytest.mark.parametrize(("N", "R"), [(3, 5), (4, 4)])
@pytest.mark.parametrize("kind", [foof.FOOF, foof.Muon])
def test_padding_stays_out_also_where_the_sequence_comes_first(kind, N, R):
    """As it does in torch's attention, unless told otherwise. Of the MLP with N = R nobody can know."""
    torch.manual_seed(0)
    net, x = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0).double(), torch.randn(R, N, 6, dtype=torch.float64)
    mask = torch.rand(N, R) < 0.6
    found = []
    for noise in (0.0, 1e3):
        opt = kind(net, exclude=["linear2"] if N != R else ["linear1", "linear2"])
        with opt.mask(mask):
            net(x + noise * ~mask.T.unsqueeze(-1), src_key_padding_mask=~mask)[mask.T].square().sum().backward()
        opt.preconditioner.start()
        found.append(opt.second_moments()["self_attn.in_proj"]["Sigma"])
        if N != R:
            found.append(opt.second_moments()["linear1"]["Sigma"])
        opt.zero_grad()
        opt.remove()
    half = len(found) // 2
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(found[:half], found[half:], strict=True))


def test_sigma_is_that_of_query_key_and_value_and_masks_hold():
    model = Model(crossed=False)
    opt = foof.Muon(model)
    x, z, _ = batch(0)
    mask = torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) < 0.6
    rows = model.before(x).tanh().detach()[mask]
    with opt.mask(mask):
        out = model(x, z)
    out.sum().backward()
    opt.step()
    for Sigma in opt.second_moments()["attention.in_proj"]["Sigma"]:
        torch.testing.assert_close(Sigma, rows.T @ rows / len(rows), rtol=1e-12, atol=1e-12)


def test_a_loss_of_the_attention_weights_counts_and_one_of_both_outputs_counts_once():
    model, (x, z, _) = Model(), batch(0)
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=1, ema=0.0)
    for both in (False, True):
        query, key = model.before(x).tanh(), model.other(z).tanh()
        out, weights = model.attention(query, key, key)
        opt.zero_grad()
        (weights.square().sum() + (out.sum() if both else 0.0)).backward()
        opt.step()
        rows = torch.cat([query.detach().flatten(0, 1), torch.ones(18, 1, dtype=torch.float64)], 1)
        torch.testing.assert_close(opt.second_moments()["attention.in_proj"]["Sigma"][0], rows.T @ rows / 6, rtol=1e-12, atol=1e-12)


def test_sigma_of_some_rows_is_that_of_them_in_its_scale():
    model = Model()
    opt = foof.Muon(model, row_stride=3)
    x, z, _ = batch(0)
    model(x, z).sum().backward()
    query, key = (f(i).tanh().detach().flatten(0, 1)[::3] for f, i in ((model.before, x), (model.other, z)))
    opt.step()
    for Sigma, rows in zip(opt.second_moments()["attention.in_proj"]["Sigma"], (query, key, key), strict=True):
        torch.testing.assert_close(Sigma, rows.T @ rows / len(rows), rtol=1e-12, atol=1e-12)


def test_initialise_sees_it():
    model = Model()
    opt = foof.FOOF(model, lr=0.1, damping=0.1)
    x, z, _ = batch(0)
    opt.initialise([{"x": x, "z": z}])
    query, key = ((f(i).tanh().detach()).flatten(0, 1) for f, i in ((model.before, x), (model.other, z)))
    ones = [torch.cat([a, torch.ones(len(a), 1)], 1).double() for a in (query, key, key)]
    expected = torch.stack([a.T @ a / 6 for a in ones])
    torch.testing.assert_close(opt.second_moments()["attention.in_proj"]["Sigma"], expected, rtol=1e-12, atol=1e-12)


def test_who_covers_it_and_who_does_not():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.0, batch_first=True), 2)
    model = nn.Sequential(nn.Linear(5, WIDTH), encoder, nn.Linear(WIDTH, 4))
    name = "1.layers.0.self_attn.in_proj_weight"
    for kind in (foof.FOOF, foof.Muon, foof.AdamW):
        opt = kind(model)
        assert name not in opt.preconditioner.rest
        assert "functionally" in opt.preconditioner.rest["1.layers.0.self_attn.out_proj.weight"]
        assert "Projection, 8×" in str(opt.explain())
        opt.remove()
    opt = foof.FOOF(model, exclude=["1.layers.0.self_attn"])
    assert opt.preconditioner.rest[name] == "excluded by request"
    opt.remove()
    opt = foof.KFAC(model, lr=0.1, damping=0.1)
    assert "need no errors" in opt.preconditioner.rest[name]
    opt.remove()
    assert foof.explain(model, torch.randn(2, 3, 5)).covered


@pytest.mark.parametrize("kind", [foof.FOOF, foof.Muon, foof.AdamW])
def test_encoders_train_without_a_word(kind):
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, dropout=0.1, batch_first=True), 2)
    model = nn.Sequential(nn.Embedding(5, WIDTH), encoder, nn.Linear(WIDTH, 5))
    opt, tokens, losses = kind(model), torch.randint(0, 5, (8, 6)), []
    before = encoder.layers[0].self_attn.in_proj_weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(30):
            opt.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert not torch.equal(before, encoder.layers[0].self_attn.in_proj_weight)


def test_copies_and_pickles_carry_no_hook():
    model = Model()
    opt = foof.FOOF(model, lr=0.1, damping=0.1)
    x, z, y = batch(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        F.cross_entropy(other(x, z).flatten(0, 1), y.flatten()).backward()
        assert other.attention.in_proj_weight.grad.any()
    assert not opt.preconditioner.ledgers
    opt.remove()
    assert not model.attention._forward_hooks


def test_evaluation_takes_the_fused_kernel_of_attention_as_ever(monkeypatch):
    """That of a whole encoder layer is given up by torch for any hook on it, and so for foof's on its linear layers."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), 1, enable_nested_tensor=False).eval()
    x, calls, fused = torch.randn(4, 6, WIDTH), [], torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *args, **kwargs: (calls.append("fused"), fused(*args, **kwargs))[1])
    with torch.no_grad():
        before = encoder(x)
        opt = foof.Muon(encoder)
        assert torch.allclose(encoder(x), before, rtol=1e-6, atol=1e-6)
    assert calls == ["fused"]
    assert not opt.preconditioner.taps[0].fired
