"""FOOF and precondition as optimizers: schedule, checkpoints, the training stack, bad input."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foof
from cases import cnn, flat, mlp
from oracle import relative_error

OPTIMIZERS = {
    "foof": lambda model: foof.FOOF(model, lr=0.1, damping=0.1, momentum=0.9, weight_decay=0.01, T=4, S=2),
    "foof-cholesky": lambda model: foof.FOOF(model, lr=0.3, damping=0.1, T=1),
    "sgd": lambda model: foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, damping=0.1, T=4),
    "adamw": lambda model: foof.precondition(torch.optim.AdamW(model.parameters(), lr=0.03), model, damping=0.1, T=3, S=1),
    "muon": lambda model: foof.precondition(
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1), model, damping=0.1, T=3
    ),
    "kfac": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, momentum=0.9, weight_decay=0.01, T=4, S=2),
    "kfac-cholesky": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, T=1),
    "kfac-standard": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, damping_mode="standard", T=3, S=1),
    "kfac-full": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, fisher="full", T=3),
    "kfac-empirical": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, fisher="empirical", T=3),
    "kfac-subsampled": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, ema=0.0, samples=2, datapoints=4, T=2),
    "kfac-adaptive": lambda model: foof.KFAC(model, damping=0.1, T=2, adaptive=True),
    "kfac-deferred": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, T=3, deferred=True),
    "kfac-drop-scaled": lambda model: foof.KFAC(model, lr=0.2, damping=0.1, T=3, second_factor="drop-scaled"),
    "kfac-drop-rescaled": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, T=3, second_factor="drop-rescaled"),
    "kfac-adamw": lambda model: foof.precondition(
        torch.optim.AdamW(model.parameters(), lr=0.03), model, method="kfac", damping=0.1, T=3
    ),
}


def batch(number, size=6):
    g = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=g), torch.randint(0, 3, (size,), generator=g)


def train(model, opt, steps, start=0):
    for t in range(start, start + steps):
        x, y = batch(t)
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out, y)
        nn.functional.cross_entropy(out, y).backward()
        opt.step()


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def save_and_load(state):
    """Through a file, with nothing but tensors and plain containers allowed."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("initialised", [True, False])
def test_resume_is_bitwise_at_any_step(name, initialised):
    straight = norm_net()
    opt = OPTIMIZERS[name](straight)
    attached = opt.preconditioner
    if initialised:
        attached.initialise([batch(100 + k) for k in range(3)])
    saved = []
    for t in range(11):
        saved.append(save_and_load({"model": straight.state_dict(), "opt": opt.state_dict()}))
        train(straight, opt, 1, t)
    for t, state in enumerate(saved):
        model = norm_net()
        resumed = OPTIMIZERS[name](model)
        model.load_state_dict(state["model"])
        resumed.load_state_dict(state["opt"])
        train(model, resumed, 11 - t, t)
        assert torch.equal(flat(model), flat(straight)), f"resumed at step {t}"


ENUMERATED = {  # another precision would draw other labels
    "foof": OPTIMIZERS["foof"],
    "foof-cholesky": OPTIMIZERS["foof-cholesky"],
    "kfac": OPTIMIZERS["kfac-full"],
    "kfac-standard": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, fisher="full", damping_mode="standard", T=3, S=1),
    "kfac-deferred": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, fisher="full", deferred=True, T=3, S=1),
    "natural": lambda model: foof.NaturalGradient(model, lr=0.05, damping=0.1, fisher="full", T=4),
}


@pytest.mark.parametrize("name", ENUMERATED)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float64), (torch.float64, torch.float32)], ids=str)
def test_a_checkpoint_of_another_precision_goes_on_in_that_of_the_model(name, dtypes):
    state, ends = None, []
    for dtype in (*dtypes, dtypes[0]):  # saved by the first, resumed by the other two
        model = norm_net().to(dtype)
        opt = ENUMERATED[name](model)
        if state is not None:
            model.load_state_dict(state["model"])
            opt.load_state_dict(state["opt"])
        for t in range(2) if state is None else range(2, 7):
            x, y = batch(t)
            opt.zero_grad()
            out = model(x.to(dtype))
            opt.update_curvature(out, y)
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
        state = state or save_and_load({"model": model.state_dict(), "opt": opt.state_dict()})
        ends.append(flat(model).double())
    assert relative_error(ends[1], ends[2]) < 1e-3


def test_a_checkpoint_from_another_kind_of_device_starts_new_labels():
    model = norm_net()
    opt = foof.KFAC(model, T=2)
    train(model, opt, 3)
    state = opt.state_dict()
    state["neurons"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # what a CUDA generator saves
    with pytest.warns(UserWarning, match="another kind of device"):
        opt.load_state_dict(state)
    train(model, opt, 3, 3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_lowers_the_loss(name):
    model = norm_net()
    opt = OPTIMIZERS[name](model)
    x, y = batch(0, 30)

    def loss():
        return nn.functional.cross_entropy(model(x), y)

    before = loss().item()
    for _ in range(30):
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out, y)
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
    assert loss().item() < 0.5 * before


@pytest.mark.parametrize(("T", "S"), [(1, 1), (3, 1), (4, 2), (5, 5)])
def test_slow_twin_of_algorithm_1(T, S):
    """Algorithm 1 line by line on a linear model, beside FOOF, step by step."""
    torch.manual_seed(0)
    m, lr, damping, decay = 4, 0.1, 0.2, 0.95
    model = nn.Linear(4, 3, bias=False).double()
    W, inits, eye = model.weight.detach().clone(), [batch(50 + k)[0].double() for k in range(3)], torch.eye(m).double()
    opt = foof.FOOF(model, lr=lr, damping=damping, ema=decay, T=T, S=S)
    opt.initialise(inits)
    history = [x.mT @ x / len(x) for x in inits]

    def average():  # normalised: Σ m^k x_{t-k} / Σ m^k
        weights = torch.tensor([decay ** (len(history) - 1 - k) for k in range(len(history))], dtype=torch.float64)
        return torch.einsum("k,kij->ij", weights, torch.stack(history)) / weights.sum()

    P = torch.linalg.inv(average() + damping * eye)
    for t in range(13):
        x, y = batch(t)
        x = x.double()
        W.requires_grad_()
        (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(x @ W.mT, y), W)
        W = W.detach() - lr * gradient @ P
        if t % T == 0:
            P = torch.linalg.inv(average() + damping * eye)
        if (t + S) % T in range(S):
            history.append(x.mT @ x / len(x))
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()
        assert relative_error(model.weight.detach(), W) < 1e-12


def test_start_without_initialisation_inverts_at_growing_intervals():
    model = mlp(4, 5, 3)
    opt = foof.FOOF(model, T=20, S=2)
    made, held = [], None
    for t in range(45):
        train(model, opt, 1, t)
        factor = opt.preconditioner.blocks[0].factor
        if factor is not held:
            made.append(t)
            held = factor
    assert made == [0, 2, 4, 8, 16, 20, 40]


def test_gradient_accumulation_equals_the_joined_batch():
    (x1, y1), (x2, y2) = batch(1), batch(2)
    results = []
    for accumulate in (True, False):
        torch.manual_seed(0)
        model = mlp(4, 6, 3).double()
        opt = foof.FOOF(model, lr=0.3, damping=0.1, T=1)
        for _ in range(5):
            opt.zero_grad()
            if accumulate:
                for x, y in ((x1, y1), (x2, y2)):
                    (nn.functional.cross_entropy(model(x.double()), y) / 2).backward()
            else:
                nn.functional.cross_entropy(model(torch.cat([x1, x2]).double()), torch.cat([y1, y2])).backward()
            opt.step()
        results.append(flat(model))
    assert relative_error(results[0], results[1]) < 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(reentrant):
    weights = []
    for use in (True, False):
        torch.manual_seed(0)
        head, body = nn.Linear(4, 6), mlp(6, 6, 3)
        model = nn.ModuleList([head, body]).double()
        opt = foof.FOOF(model, lr=0.3, damping=0.1, T=2)
        for t in range(6):
            x, y = batch(t)
            hidden = head(x.double()).tanh()
            out = checkpoint(body, hidden, use_reentrant=reentrant) if use else body(hidden)
            opt.zero_grad()
            nn.functional.cross_entropy(out, y).backward()
            opt.step()
        weights.append((flat(model), opt.preconditioner.blocks[1].moments["Sigma"].value))
    assert torch.equal(weights[0][0], weights[1][0])
    assert torch.equal(weights[0][1], weights[1][1])


def test_evaluation_never_touches_the_statistics():
    model = mlp(4, 5, 3)
    opt = foof.FOOF(model, T=1)
    train(model, opt, 3)
    before = opt.preconditioner.blocks[0].moments["Sigma"].value.clone()
    with torch.no_grad():
        model(torch.randn(6, 4))
    model(torch.randn(6, 4))  # with gradients, but no backward pass
    opt.zero_grad()
    assert torch.equal(opt.preconditioner.blocks[0].moments["Sigma"].value, before)
    assert not any(opt.preconditioner.blocks[0].gathered.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_under_autocast_are_float32(dtype):
    """Under autocast ``aᵀa`` would be half precision: the second moment must be the float32 one of the inputs."""
    torch.manual_seed(0)
    model, (x, y) = mlp(4, 6, 3), batch(0, 64)
    opt = foof.FOOF(model, T=1, damping=0.1, lr=0.1)
    with torch.autocast("cpu", dtype=dtype):
        loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
    ones = torch.cat([x, torch.ones(64, 1)], 1)
    Sigma = opt.preconditioner.blocks[0].moments["Sigma"].value
    assert Sigma.dtype == torch.float32
    assert torch.allclose(Sigma, ones.mT @ ones / 64, rtol=1e-6, atol=1e-6)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("size", [4, 64])  # few rows are kept as they are, many multiplied out at once
def test_initialise_under_autocast_keeps_float32_statistics(size):
    model, x = mlp(4, 6, 3), batch(0, size)[0]
    opt = foof.FOOF(model, T=2, damping=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opt.initialise([x, x])
    ones = torch.cat([x, torch.ones(size, 1)], 1)
    Sigma = opt.preconditioner.blocks[0].moments["Sigma"].value
    assert Sigma.dtype == torch.float32
    assert torch.allclose(Sigma, ones.mT @ ones / size, rtol=1e-6, atol=1e-6)


def test_a_batch_with_nan_is_left_out_with_a_warning():
    model = mlp(4, 5, 3).double()
    opt = foof.FOOF(model, T=1, lr=0.0)
    train_x = batch(0)[0].double()
    opt.initialise([train_x])
    before = opt.preconditioner.blocks[0].moments["Sigma"].value.clone()
    bad = train_x.clone()
    bad[2, 1] = float("nan")
    model(bad).sum().backward()
    with pytest.warns(UserWarning, match=r"^0: NaN or inf"):
        opt.step()
    assert torch.equal(opt.preconditioner.blocks[0].moments["Sigma"].value, before)
    assert torch.isfinite(opt.preconditioner.blocks[0].factor.tensor).all()


def test_inputs_overwritten_before_the_step_are_left_out():
    """A reused input buffer: what the statistics would see is no longer what the backward pass saw."""
    model = mlp(4, 20, 3, bias=False)
    opt = foof.FOOF(model, T=1, lr=0.0)
    x = batch(0, 3)[0]
    opt.initialise([x])
    before = opt.preconditioner.blocks[0].moments["Sigma"].value.clone()
    model(x).sum().backward()
    x.zero_()
    with pytest.warns(UserWarning, match="overwritten before step"):
        opt.step()
    assert torch.equal(opt.preconditioner.blocks[0].moments["Sigma"].value, before)


def test_a_skipped_step_leaves_no_trace():
    """What GradScaler does on overflow: no step, then zero_grad."""
    models = []
    for skip in (True, False):
        torch.manual_seed(0)
        model = mlp(4, 5, 3)
        opt = foof.FOOF(model, T=2, damping=0.1)
        train(model, opt, 2)
        if skip:
            opt.zero_grad()
            model(torch.full((6, 4), 1e3)).sum().backward()
        train(model, opt, 4, 2)
        models.append(flat(model))
    assert torch.equal(*models)


def test_grad_scaler_runs_and_unscales():
    model, (x, y) = mlp(4, 5, 3), batch(0)
    twin = copy.deepcopy(model)
    opt, plain = foof.FOOF(model, damping=0.1, T=1), foof.FOOF(twin, damping=0.1, T=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(3):
        for o, m, scaled in ((opt, model, True), (plain, twin, False)):
            o.zero_grad()
            loss = nn.functional.cross_entropy(m(x), y)
            if scaled:
                scaler.scale(loss).backward()
                scaler.step(o)
                scaler.update()
            else:
                loss.backward()
                o.step()
    assert torch.allclose(flat(model), flat(twin), rtol=1e-5, atol=1e-6)


def test_nothing_is_left_on_parameters_and_optimizer():
    model, (x, y) = norm_net(), batch(0)
    opt = OPTIMIZERS["adamw"](model)
    (nn.functional.cross_entropy(model(x), y) * float("inf")).backward()
    opt.preconditioner.remove()
    assert not any(p._backward_hooks for p in model.parameters())
    assert "zero_grad" not in vars(opt)


def test_copies_and_pickles_of_the_model_have_no_taps():
    model, x = cnn(), torch.randn(2, 2, 8, 8)
    opt = foof.FOOF(model, damping=0.1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x).sum().backward()
        plain = [p.grad.clone() for p in twin.parameters()]
        foof.FOOF(twin)  # a new optimizer may be attached to the copy
        opt.zero_grad()
        opt.remove()
        model(x).sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
        assert not any(module._forward_hooks for module in model.modules())
        opt = foof.FOOF(model, damping=0.1)


def test_a_forgotten_optimizer_lets_go_of_its_model():
    model = mlp(4, 5, 3)
    opt = foof.FOOF(model)
    with pytest.raises(ValueError, match="already has an optimizer on its neurons"):
        foof.FOOF(model)
    del opt
    foof.FOOF(model)


def test_groups_schedulers_closures_and_maximize():
    torch.manual_seed(0)
    model, (x, y) = mlp(4, 5, 3), batch(0)
    opt = foof.FOOF(model, lr=0.1, groups=[{"params": model[2].parameters(), "lr": 0.5, "damping": 7.0}])
    assert [(g["lr"], g["damping"], len(g["params"])) for g in opt.param_groups] == [(0.5, 7.0, 2), (0.1, 1.0, 2)]
    assert [opt.preconditioner._damping(b).value for b in opt.preconditioner.blocks] == [1.0, 7.0]
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)

    def closure():
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    first = opt.step(closure)
    scheduler.step()
    assert opt.param_groups[1]["lr"] == 0.05
    assert opt.step(closure) < first
    opt.remove()
    ascent = foof.FOOF(model, lr=0.1, maximize=True)
    before = closure().item()
    ascent.step()
    assert nn.functional.cross_entropy(model(x), y).item() > before


def test_weight_decay_is_decoupled_and_momentum_is_heavy_ball():
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=False).double()
    twin = copy.deepcopy(model)
    opt = foof.FOOF(model, lr=0.1, damping=0.1, momentum=0.9, weight_decay=0.5)
    plain = foof.FOOF(twin, lr=0.0, damping=0.1)
    W, v = model.weight.detach().clone(), 0
    for t in range(4):
        x, y = batch(t)
        for m, o in ((twin, plain), (model, opt)):
            with torch.no_grad():
                twin.weight.copy_(W) if m is twin else None
            o.zero_grad()
            nn.functional.cross_entropy(m(x.double()), y).backward()
            o.step()
        v = 0.9 * v + twin.weight.grad
        W = (1 - 0.1 * 0.5) * W - 0.1 * v
        assert relative_error(model.weight.detach(), W) < 1e-12


def test_rest_is_stepped_and_saved():
    for rest in ("adamw", "sgd", {"name": "sgd", "lr": 0.1, "momentum": 0.9}):
        model = norm_net()
        opt = foof.FOOF(model, rest=rest)
        assert set(opt.preconditioner.rest) == {"1.weight", "1.bias"}
        before = model[1].weight.detach().clone()
        train(model, opt, 2)
        assert not torch.equal(model[1].weight, before)
        assert sum(len(g["params"]) for g in opt.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_the_rest_decays_as_the_covered_layers_do_unless_told_otherwise(rest, decay):
    opt = foof.FOOF(norm_net(), weight_decay=decay, rest=rest)
    assert [group["weight_decay"] for group in opt.param_groups] == [decay, decay]
    opt = foof.FOOF(norm_net(), weight_decay=decay, rest={"name": rest, "weight_decay": 0.3})
    assert [group["weight_decay"] for group in opt.param_groups] == [decay, 0.3]


def test_damping_auto_and_relative():
    model = mlp(4, 6, 3, bias=False).double()
    x = batch(0)[0].double()
    opt = foof.FOOF(model, damping="auto")
    opt.initialise([x])
    Sigma = x.mT @ x / len(x)
    assert torch.allclose(opt.preconditioner.blocks[0].factor.tensor, torch.linalg.inv(Sigma + 4 / 200 * torch.eye(4)))
    opt.remove()
    opt = foof.FOOF(model, damping=0.1, relative=True)
    opt.initialise([x])
    expected = torch.linalg.inv(Sigma + 0.1 * Sigma.trace() / 4 * torch.eye(4))
    assert torch.allclose(opt.preconditioner.blocks[0].factor.tensor, expected)


def test_initialise_keeps_model_and_chance_as_they_were():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    opt = foof.FOOF(model)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    opt.initialise([batch(k) for k in range(3)])
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert opt.preconditioner.blocks[0].moments["Sigma"].updates == 3


BAD = {
    "damping λ must be a positive": lambda m: foof.FOOF(m, damping=0.0),
    "damping λ must be a positive, finite number, got -1": lambda m: foof.FOOF(m, damping=-1.0),
    'positive number or "auto"': lambda m: foof.FOOF(m, damping="lots"),
    "T is the number of steps": lambda m: foof.FOOF(m, T=0),
    "S is how many of every T = 5": lambda m: foof.FOOF(m, T=5, S=6),
    "ema is the decay": lambda m: foof.FOOF(m, ema=1.0),
    "lr must be": lambda m: foof.FOOF(m, lr=-0.1),
    "momentum must be": lambda m: foof.FOOF(m, momentum=1.0),
    "weight_decay must be": lambda m: foof.FOOF(m, weight_decay=-1.0),
    "rest must be one of": lambda m: foof.FOOF(m, rest="lion"),
    "empty parameter list; give": lambda m: foof.FOOF(m, groups=[{"params": []}]),
    "not one of this model's": lambda m: foof.FOOF(m, groups=[{"params": [nn.Parameter(torch.zeros(2))]}]),
    "unknown options": lambda m: foof.FOOF(m, groups=[{"params": m[0].parameters(), "lrr": 1}]),
    "groups: 1.weight, 1.bias not covered": lambda m: foof.FOOF(n := norm_net(), groups=[{"params": n[:2].parameters(), "lr": 1.0}]),
    "no module named 'head'": lambda m: foof.FOOF(m, exclude=["head"]),
    "no layer to cover": lambda m: foof.FOOF(nn.LayerNorm(3)),
    "no trainable parameters": lambda m: foof.FOOF(m.requires_grad_(False)),
    "lazy layer": lambda m: foof.FOOF(nn.LazyLinear(3)),
    'method must be "foof"': lambda m: foof.precondition(torch.optim.SGD(m.parameters()), m, method="shampoo"),
    "at least one batch": lambda m: foof.FOOF(m).initialise([]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_and_nothing_is_half_changed(message):
    model = mlp(4, 5, 3)
    with pytest.raises(ValueError, match=message):
        BAD[message](model)
    assert not any(module._forward_hooks for module in model.modules()) or "batch" in message


def test_complex_weights_are_refused():
    with pytest.raises(TypeError, match="real floating-point weights"):
        foof.FOOF(nn.Linear(2, 2, dtype=torch.complex64))


def test_integer_weights_are_not_covered():
    model = mlp(4, 5, 3)
    model[0].weight = nn.Parameter(torch.zeros(5, 4, dtype=torch.int8), requires_grad=False)
    assert "0.weight" not in foof.explain(model).covered


def test_step_without_a_backward_pass():
    with pytest.raises(RuntimeError, match="no gradient has reached any covered layer"):
        foof.FOOF(mlp(4, 5, 3)).step()


def test_a_layer_the_loss_does_not_reach_is_named():
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    opt = foof.FOOF(model)
    before = model["spare"].weight.detach().clone()
    model["used"](batch(0)[0]).sum().backward()
    with pytest.warns(UserWarning, match="spare: the loss does not reach this layer"):
        opt.step()
    assert torch.equal(model["spare"].weight, before)


@pytest.mark.parametrize("name", ["foof", "adamw"])
def test_a_layer_first_reached_late_starts_from_that_batch(name):
    torch.manual_seed(0)
    model = nn.ModuleDict({"always": nn.Linear(4, 3), "late": nn.Linear(4, 3)})
    opt = OPTIMIZERS[name](model)
    for t in range(8):
        x, y = batch(t)
        opt.zero_grad()
        out = model["always"](x) + (model["late"](x) if t >= 4 else 0)  # step 4 is none on which Σ is fed
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
        if t == 4:
            ones = torch.cat([x, torch.ones(6, 1)], 1)
            assert torch.allclose(opt.preconditioner.blocks[1].moments["Sigma"].value, ones.mT @ ones / 6)


def test_a_layer_used_functionally_is_refused():
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "raw": nn.Linear(4, 3)})
    opt = foof.FOOF(model)
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


def test_an_empty_first_batch_is_refused():
    model = mlp(4, 5, 3)
    opt = foof.FOOF(model)
    model(torch.zeros(0, 4)).sum().backward()
    before = flat(model)
    with pytest.raises(ValueError, match="first batch is empty"):
        opt.step()
    assert torch.equal(flat(model), before)


def test_a_checkpoint_of_another_architecture_changes_nothing():
    opt = foof.FOOF(mlp(4, 5, 3), T=2)
    model = mlp(4, 6, 3)
    other = foof.FOOF(model, T=2)
    train(model, other, 3)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="another architecture"):
        other.load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match="no statistics"):
        other.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())
    after = other.state_dict()
    assert after["neurons"]["t"] == before["neurons"]["t"]
    assert torch.equal(
        after["neurons"]["blocks"]["0"]["moments"]["Sigma"]["value"], before["neurons"]["blocks"]["0"]["moments"]["Sigma"]["value"]
    )


def test_parameters_cannot_join_later():
    opt = foof.FOOF(mlp(4, 5, 3))
    with pytest.raises(ValueError, match="cannot join later"):
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
