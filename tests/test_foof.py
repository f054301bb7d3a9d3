"""FOOF and precondition as optimizers: schedule, options, the training stack."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foof
from cases import OPTIMIZERS, batch, cnn, flat, mlp, norm_net, step, train
from oracle import relative_error


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
    opt = foof.FOOF(model, lr=0.3, damping=1.0, T=20, S=2)
    made, held = [], None
    for t in range(45):
        train(model, opt, 1, t)
        factor = opt.preconditioner.blocks[0].inverse
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
    opt = foof.FOOF(model, lr=0.3, damping=1.0, T=1)
    train(model, opt, 3)
    before = opt.preconditioner.blocks[0].moments["Sigma"].value.clone()
    with torch.no_grad():
        model(torch.randn(6, 4))
    model(torch.randn(6, 4))  # with gradients, but no backward pass
    opt.zero_grad()
    assert torch.equal(opt.preconditioner.blocks[0].moments["Sigma"].value, before)
    assert not opt.preconditioner.step.settle()


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
    opt = foof.FOOF(model, lr=0.3, T=2, damping=0.1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        opt.initialise([x, x])
    ones = torch.cat([x, torch.ones(size, 1)], 1)
    Sigma = opt.preconditioner.blocks[0].moments["Sigma"].value
    assert Sigma.dtype == torch.float32
    assert torch.allclose(Sigma, ones.mT @ ones / size, rtol=1e-6, atol=1e-6)


def test_a_batch_with_nan_is_left_out_with_a_warning():
    model = mlp(4, 5, 3).double()
    opt = foof.FOOF(model, damping=1.0, T=1, lr=0.0)
    train_x = batch(0)[0].double()
    opt.initialise([train_x])
    before = opt.preconditioner.blocks[0].moments["Sigma"].value.clone()
    bad = train_x.clone()
    bad[2, 1] = float("nan")
    model(bad).sum().backward()
    with pytest.warns(UserWarning, match=r"^0: NaN or inf"):
        opt.step()
    assert torch.equal(opt.preconditioner.blocks[0].moments["Sigma"].value, before)
    assert torch.isfinite(opt.preconditioner.blocks[0].inverse.tensor).all()


@pytest.mark.parametrize("kind", [foof.FOOF, foof.KFAC])
def test_the_input_buffer_may_be_filled_again_before_the_step(kind):
    """With accumulation, statistics are those of the batches that came, not of what the buffer holds in the end."""
    batches, moments = [batch(t, 3)[0] for t in range(3)], []
    for buffer in (torch.empty_like(batches[0]), None):
        torch.manual_seed(0)
        model = mlp(4, 20, 3, bias=False)
        opt = kind(model, T=1, lr=0.0)
        for x in batches:
            out = model(x if buffer is None else buffer.copy_(x))
            opt.update_curvature(out)
            out.sum().backward()
        if buffer is not None:
            buffer.zero_()
        opt.step()
        moments.append(opt.preconditioner.blocks[0].moments["Sigma"].value)
    assert torch.equal(*moments)


def test_a_skipped_step_leaves_no_trace():
    """What GradScaler does on overflow: no step, then zero_grad."""
    models = []
    for skip in (True, False):
        torch.manual_seed(0)
        model = mlp(4, 5, 3)
        opt = foof.FOOF(model, lr=0.3, T=2, damping=0.1)
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
    opt, plain = foof.FOOF(model, lr=0.3, damping=0.1, T=1), foof.FOOF(twin, lr=0.3, damping=0.1, T=1)
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
    opt = foof.FOOF(model, lr=0.3, damping=0.1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x).sum().backward()
        plain = [p.grad.clone() for p in twin.parameters()]
        foof.FOOF(twin, lr=0.3, damping=1.0)  # a new optimizer may be attached to the copy
        opt.zero_grad()
        opt.remove()
        model(x).sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain, strict=True))
        assert not any(module._forward_hooks for module in model.modules())
        opt = foof.FOOF(model, lr=0.3, damping=0.1)


def test_a_forgotten_optimizer_lets_go_of_its_model():
    model = mlp(4, 5, 3)
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    with pytest.raises(ValueError, match="already has an optimizer on its neurons"):
        foof.FOOF(model, lr=0.3, damping=1.0)
    del opt
    foof.FOOF(model, lr=0.3, damping=1.0)


def test_groups_schedulers_closures_and_maximize():
    torch.manual_seed(0)
    model, (x, y) = mlp(4, 5, 3), batch(0)
    opt = foof.FOOF(model, damping=1.0, lr=0.1, groups=[{"params": model[2].parameters(), "lr": 0.5, "damping": 7.0}])
    assert [(g["lr"], g["damping"], len(g["params"])) for g in opt.param_groups] == [(0.5, 7.0, 2), (0.1, 1.0, 2)]
    assert [b.damping.value for b in opt.preconditioner.blocks] == [1.0, 7.0]
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
    ascent = foof.FOOF(model, damping=1.0, lr=0.1, maximize=True)
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
        opt = foof.FOOF(model, lr=0.3, damping=1.0, rest=rest)
        assert set(opt.preconditioner.rest) == {"1.weight", "1.bias"}
        before = model[1].weight.detach().clone()
        train(model, opt, 2)
        assert not torch.equal(model[1].weight, before)
        assert sum(len(g["params"]) for g in opt.param_groups) == len(list(model.parameters()))


@pytest.mark.parametrize("rest", ["adamw", "sgd"])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_the_rest_decays_as_the_covered_layers_do_unless_told_otherwise(rest, decay):
    opt = foof.FOOF(norm_net(), lr=0.3, damping=1.0, weight_decay=decay, rest=rest)
    assert [group["weight_decay"] for group in opt.param_groups] == [decay, decay]
    opt = foof.FOOF(norm_net(), lr=0.3, damping=1.0, weight_decay=decay, rest={"name": rest, "weight_decay": 0.3})
    assert [group["weight_decay"] for group in opt.param_groups] == [decay, 0.3]


def test_damping_auto_and_relative():
    model = mlp(4, 6, 3, bias=False).double()
    x = batch(0)[0].double()
    opt = foof.FOOF(model, lr=0.3, damping="auto")
    opt.initialise([x])
    Sigma = x.mT @ x / len(x)
    assert torch.allclose(opt.preconditioner.blocks[0].inverse.tensor, torch.linalg.inv(Sigma + 4 / 200 * torch.eye(4)))
    opt.remove()
    opt = foof.FOOF(model, lr=0.3, damping=0.1, relative=True)
    opt.initialise([x])
    expected = torch.linalg.inv(Sigma + 0.1 * Sigma.trace() / 4 * torch.eye(4))
    assert torch.allclose(opt.preconditioner.blocks[0].inverse.tensor, expected)


def test_initialise_keeps_model_and_chance_as_they_were():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(), nn.Linear(5, 3))
    opt = foof.FOOF(model, lr=0.3, damping=1.0)
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    opt.initialise([batch(k) for k in range(3)])
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert opt.preconditioner.blocks[0].moments["Sigma"].updates == 3


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


def test_a_relative_damping_of_zeros_is_no_division_by_zero():
    """A channel that is dead, an input that is zero: no gradient, so any λ will do."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1, groups=3, bias=False), nn.Flatten(), nn.Linear(12, 2, bias=False))
    opt = foof.FOOF(model, lr=0.3, relative=True, damping=0.1, T=1)
    x = torch.randn(4, 3, 2, 2)
    x[:, 1] = 0
    for _ in range(3):
        model(x).square().sum().backward()
        opt.step()
        opt.zero_grad()
    assert all(p.isfinite().all() for p in model.parameters())
    still = model[0].weight.detach().clone()
    model(torch.zeros_like(x)).sum().backward()
    opt.step()
    assert torch.equal(model[0].weight, still)


@pytest.mark.parametrize("method", ["foof", "kfac"])
def test_statistics_follow_a_model_to_another_precision(method):
    model = mlp(12, 10, 3)
    opt = OPTIMIZERS[method](model)
    x, y = torch.randn(4, 12), torch.randint(3, (4,))
    for dtype in (torch.float32, torch.float64, torch.float32):
        model.to(dtype)
        step(model, opt, x.to(dtype), y)
        assert {m.value.dtype for block in opt.preconditioner.blocks for m in block.moments.values()} == {dtype}
