"""FOOF inside what people already have: autocast, clipping, schedulers, torch.compile, averaged models, frozen bases."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.optim import lr_scheduler, swa_utils

import foof
from cases import cnn, flat, mlp
from oracle import relative_error


def data(number, size=32):
    g = torch.Generator().manual_seed(number)
    x = torch.randn(size, 6, generator=g)
    return x, (x[:, :3] + 0.5 * x[:, 3:]).argmax(1)


def train(model, opt, steps, start=0, after_backward=lambda: None):
    for t in range(start, start + steps):
        x, y = data(t)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        after_backward()
        opt.step()
    return loss.item()


def net():
    torch.manual_seed(0)
    return mlp(6, 16, 16, 3, activation=nn.ReLU)


# --- mixed precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_loss_of_float32(dtype):
    losses = []
    for enabled in (True, False):
        model = net()
        opt = foof.FOOF(model, lr=0.3, damping=0.1, T=5)
        for t in range(80):
            x, y = data(t)
            opt.zero_grad()
            with torch.autocast("cpu", dtype=dtype, enabled=enabled):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            opt.step()
        losses.append(nn.functional.cross_entropy(model(data(999, 500)[0]), data(999, 500)[1]).item())
        assert all(block.inverse.tensor.dtype == torch.float32 for block in opt.preconditioner.blocks)
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert losses[1] < 0.5
    assert abs(losses[0] - losses[1]) < 0.05 * losses[1]


def test_grad_scaler_skips_an_overflowing_step_and_nothing_else():
    """With a scale that overflows float16 at first, the run equals one that starts where the scale has come down."""
    weights = []
    for scale in (2.0**40, None):
        model = net()
        opt = foof.FOOF(model, lr=0.1, damping=0.1, T=2)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=1000)
        taken, attempts = 0, 0
        while taken < 6:
            x, y = data(taken)
            opt.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            before = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            attempts += 1
            taken += scaler.get_scale() == before
        assert (attempts > 6) == (scale is not None)
        assert opt.preconditioner.schedule.t == 6
        weights.append((flat(model), opt.preconditioner.blocks[0].moments["Sigma"]))
    assert weights[0][1].updates == weights[1][1].updates
    assert relative_error(weights[0][1].value, weights[1][1].value) < 1e-2
    assert relative_error(weights[0][0], weights[1][0]) < 2e-2  # float16 rounds differently at another scale


def test_bfloat16_weights_keep_float32_statistics():
    model = net().bfloat16()
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=2, momentum=0.9)
    for t in range(5):
        x, y = data(t)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        opt.step()
    assert all(p.dtype == torch.bfloat16 and torch.isfinite(p).all() for p in model.parameters())
    assert all(b.moments["Sigma"].value.dtype == b.inverse.tensor.dtype == torch.float32 for b in opt.preconditioner.blocks)


# --- clipping and schedulers ---------------------------------------------------------------------------------------------------


def test_clipping_acts_on_neuron_gradients():
    model = net()
    opt = foof.FOOF(model, lr=1.0, damping=0.1, T=1)
    train(model, opt, 1)
    norms = []
    before = flat(model)
    train(model, opt, 1, 1, lambda: norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01).item()))
    assert norms[0] > 0.01
    assert math.isclose((flat(model) - before).norm().item(), 0.01, rel_tol=1e-3)  # lr 1: the step is the clipped neuron gradient
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
    assert max(p.grad.abs().max().item() for p in model.parameters()) <= 1e-4


SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.1, 0.01], total_steps=12),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_the_neurons_and_the_rest(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    opt = foof.FOOF(model, lr=0.1, damping=0.1, momentum=0.9, rest={"name": "adamw", "lr": 0.01})
    scheduler, seen = SCHEDULERS[name](opt), []
    for t in range(10):
        loss = train(model, opt, 1, t)
        seen.append([group["lr"] for group in opt.param_groups])
        scheduler.step(1.0) if name == "plateau" else scheduler.step()
    assert len(opt.param_groups) == 2
    assert math.isfinite(loss)
    assert all(len({round(lr, 12) for lr in column}) > 1 for column in zip(*seen, strict=True))


def test_loss_that_is_not_a_number():
    """NaN stays NaN, as with any optimizer; a user who looks at the loss may skip the step, and nothing has happened."""
    model = net()
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=1)
    train(model, opt, 3)
    weights, Sigma = flat(model), opt.preconditioner.blocks[1].moments["Sigma"].value.clone()
    x, y = data(3)
    opt.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y) * float("nan")
    loss.backward()
    assert not torch.isfinite(loss)
    opt.zero_grad()
    assert torch.equal(flat(model), weights)
    (model(x).sum() * float("nan")).backward()
    opt.step()
    assert torch.isnan(model[0].weight).any()
    assert torch.isfinite(opt.preconditioner.blocks[1].moments["Sigma"].value).all()  # the inputs of this batch were sound
    assert not torch.equal(opt.preconditioner.blocks[1].moments["Sigma"].value, Sigma)
    with pytest.warns(UserWarning, match="NaN or inf in what Sigma is made of"):
        train(model, opt, 1, 4)  # from now on the hidden activations are NaN: they stay out of the statistics
    assert torch.isfinite(opt.preconditioner.blocks[1].moments["Sigma"].value).all()


def test_a_first_batch_that_is_not_finite_is_refused():
    model = net()
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    model(torch.full((4, 6), float("nan"))).sum().backward()
    before = flat(model)
    with pytest.raises(ValueError, match="or not finite"):
        opt.step()
    assert torch.equal(flat(model), before)


def test_a_batch_of_zeros():
    """Σ = 0: the inverse is I/λ, the weights of the first layer have no gradient, its bias has."""
    model = net()
    opt = foof.FOOF(model, lr=0.1, damping=0.5)
    before = [p.detach().clone() for p in model[0].parameters()]
    nn.functional.cross_entropy(model(torch.zeros(8, 6)), data(0, 8)[1]).backward()
    opt.step()
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[0].bias, before[1])
    assert torch.allclose(opt.preconditioner.blocks[0].inverse.tensor[:6, :6], torch.eye(6) / 0.5)


# --- torch.compile, functional_call, averaged models -----------------------------------------------------------------------


@pytest.mark.parametrize("make", [net, cnn])
def test_compiled_models_train_the_same(make):
    """A tap is a break of the graph, and the only one: n covered layers make n graphs where they follow one another."""
    inputs = torch.randn(8, 2, 8, 8) if make is cnn else data(0, 8)[0]
    weights = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = make()
        opt = foof.FOOF(model, lr=0.1, damping=0.1, T=2)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        for _ in range(5):
            opt.zero_grad()
            called(inputs).pow(2).mean().backward()
            opt.step()
        weights.append(flat(model))
        if compiled:
            breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            layers = len(opt.preconditioner.blocks)
            expected = (layers,) if torch.__version__ >= "2.13" else (layers, 0)  # before, torch may leave such a model uncompiled
            assert breaks == 1, dict(torch._dynamo.utils.counters["graph_break"])  # each place counts once
            assert graphs in expected
    assert relative_error(*weights) < 1e-5


def test_an_optimizer_may_be_made_from_a_compiled_model():
    model = net()
    opt = foof.FOOF(torch.compile(model, backend="eager"), lr=0.3, damping=1.0)
    assert [block.name for block in opt.preconditioner.blocks] == ["0", "2", "4"]  # a checkpoint fits either way


def test_functional_call_gives_neuron_gradients():
    model = net().double()
    opt = foof.FOOF(model, lr=0.3, damping=0.1)
    x, y = data(0)
    opt.initialise([x.double()])
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    nn.functional.cross_entropy(functional_call(model, weights, (x.double(),)), y).backward()
    ours = [w.grad.clone() for w in weights.values()]
    opt.zero_grad()
    nn.functional.cross_entropy(model(x.double()), y).backward()
    assert all(torch.allclose(a, p.grad, rtol=1e-12) for a, p in zip(ours, model.parameters(), strict=True))


def test_averaged_models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=2)
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    ema = []
    for t in range(8):
        train(model, opt, 1, t)
        averaged.update_parameters(model)
        now = [p.detach().clone() for p in model.parameters()]
        ema = now if t == 0 else [0.9 * a + 0.1 * p for a, p in zip(ema, now, strict=True)]
    assert all(torch.allclose(a, p, atol=1e-6) for a, p in zip(ema, averaged.module.parameters(), strict=True))
    before = copy.deepcopy(opt.state_dict()["neurons"])
    swa_utils.update_bn([data(k)[0] for k in range(3)], averaged)
    averaged(data(0)[0]).sum().backward()  # a copy has no tap: plain gradients, and no statistics
    after = opt.state_dict()["neurons"]
    assert torch.equal(before["blocks"]["0"]["moments"]["Sigma"]["value"], after["blocks"]["0"]["moments"]["Sigma"]["value"])


def test_deepcopy_in_the_middle_of_training():
    """A copied model and a new optimizer with the old one's state go on as the original does."""
    model = net()
    opt = foof.FOOF(model, lr=0.1, damping=0.1, momentum=0.9, T=3)
    train(model, opt, 7)
    twin = copy.deepcopy(model)
    again = foof.FOOF(twin, lr=0.1, damping=0.1, momentum=0.9, T=3)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (twin, again)):
        train(m, o, 5, 7)
    assert torch.equal(flat(model), flat(twin))
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="load_state_dict"):
            copied(opt)


@pytest.mark.parametrize("removed", [True, False])
def test_a_whole_model_saved_and_loaded(removed):
    model = net()
    opt = foof.FOOF(model, lr=0.1, damping=0.1)
    train(model, opt, 2)
    if removed:
        opt.remove()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x, y = data(5)
    assert torch.equal(model(x), loaded(x))
    nn.functional.cross_entropy(loaded(x), y).backward()
    opt.remove()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    nn.functional.cross_entropy(plain(x), y).backward()
    assert all(torch.allclose(a.grad, b.grad) for a, b in zip(loaded.parameters(), plain.parameters(), strict=True))
    train(loaded, foof.FOOF(loaded, damping=1.0, lr=0.1), 1)


# --- frozen bases and transformers --------------------------------------------------------------------------------------------


class LoRA(nn.Module):
    """A frozen layer and a trained detour of low rank."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def test_low_rank_adapters_on_a_frozen_base():
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(6, 16)), nn.ReLU(), LoRA(nn.Linear(16, 3)))
    base = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    opt = foof.FOOF(model, lr=0.3, damping=0.1, T=5)
    assert [block.name for block in opt.preconditioner.blocks] == ["0.down", "0.up", "2.down", "2.up"]
    first = train(model, opt, 1)
    assert train(model, opt, 60, 1) < 0.7 * first
    assert all(torch.equal(a, p) for a, p in zip(base, (p for p in model.parameters() if not p.requires_grad), strict=True))
    assert sum(len(group["params"]) for group in opt.param_groups) == 4


def test_fused_projections_are_exact():
    """One Linear for q, k and v has the same inputs as three: FOOF's updates are those of the three."""
    torch.manual_seed(0)
    fused = nn.Linear(5, 9).double()
    apart = nn.ModuleList(nn.Linear(5, 3).double() for _ in range(3))
    for part, weight, bias in zip(apart, fused.weight.chunk(3), fused.bias.chunk(3), strict=True):
        part.weight.data, part.bias.data = weight.detach().clone(), bias.detach().clone()
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    models = {"fused": (fused, lambda: fused(x)), "apart": (apart, lambda: torch.cat([part(x) for part in apart], -1))}
    for model, forward in models.values():
        opt = foof.FOOF(model, lr=0.1, damping=0.1, T=1)
        for _ in range(3):
            opt.zero_grad()
            forward().sin().sum().backward()
            opt.step()
    assert torch.allclose(fused.weight, torch.cat([part.weight for part in apart]), rtol=1e-12)
    assert torch.allclose(fused.bias, torch.cat([part.bias for part in apart]), rtol=1e-12)


def test_torch_transformer_layers_train_and_say_what_goes_to_the_rest():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.Embedding(5, 8), encoder, nn.Linear(8, 5))
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=3, rest={"name": "adamw", "lr": 0.01})
    why = opt.preconditioner.rest
    assert "1.self_attn.in_proj_weight" not in why
    assert "functionally" in why["1.self_attn.out_proj.weight"]
    assert "LayerNorm" in why["1.norm1.weight"]
    tokens = torch.randint(0, 5, (8, 6))
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(40):
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            opt.step()
            losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
