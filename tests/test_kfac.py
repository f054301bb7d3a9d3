"""KFAC as an optimizer: when the Fisher is estimated, from what, the ablations, the measures, bad input."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import foof
from cases import batch, cnn, flat, net, step, train
from foof.study.train import ablations, updates
from foof.tap import _taps_behind
from oracle import relative_error


def averages(opt):
    return [moment.value.clone() for block in opt.preconditioner.blocks for moment in block.moments.values()]


# --- when and from what the Fisher is estimated ---------------------------------------------------------------------------------


def passes(opt, monkeypatch):
    """Counts the Fisher's backward passes."""
    seen = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **kw: seen.append(1) or grad(*args, **kw))
    return seen


@pytest.mark.parametrize(("options", "expected"), [({}, 1), ({"samples": 4}, 4), ({"fisher": "full"}, 2), ({"fisher": "empirical"}, 1)])
def test_one_backward_pass_per_output_error_and_only_when_due(options, expected, monkeypatch):
    model = net()
    opt = foof.KFAC(model, T=4, S=1, **options)
    opt.initialise([batch(9)])
    seen = passes(opt, monkeypatch)
    counts = []
    for t in range(9):
        seen.clear()
        step(model, opt, *batch(t))
        counts.append(len(seen))
    assert counts == [0, 0, 0, expected, 0, 0, 0, expected, 0]


@pytest.mark.parametrize("spare", ["never called", "not of the outputs", "called later"])
def test_a_layer_without_statistics_asks_for_them_once(spare, monkeypatch):
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "spare": nn.Linear(4, 3)})
    opt = foof.KFAC(model, lr=0.1, damping=0.1, T=4, S=1)
    seen, counts = passes(opt, monkeypatch), []
    for t in range(12):
        seen.clear()
        x, y = batch(t)
        opt.zero_grad()
        out = model["used"](x)
        if spare == "not of the outputs":
            model["spare"](x)
        if spare == "called later" and t >= 9:
            out = out + model["spare"](x)
        opt.update_curvature(out)
        nn.functional.cross_entropy(out, y).backward()
        opt.step()
        counts.append(len(seen))
    assert counts == [1, 1, 1, 1, 0, 0, 0, 1, 0, int(spare == "called later"), 0, 1]


def test_the_fisher_pass_computes_no_weight_gradient_and_leaves_gradients_alone(monkeypatch):
    model = cnn()
    opt = foof.KFAC(model)
    out = model(torch.randn(3, 2, 8, 8))
    from foof.layers import Conv, Layer

    for kind in (Layer, Conv):
        monkeypatch.setattr(kind, "weight_gradient", lambda *_: pytest.fail("a weight gradient in the Fisher's pass"))
    opt.update_curvature(out)
    assert all(p.grad is None for p in model.parameters())


def test_positions_that_the_labels_leave_out_have_no_error():
    """``Σ_E = 1/(N R) Σ (diag(p) - p pᵀ)`` over the positions that have a loss."""
    model, x, y = nn.Linear(4, 3).double(), torch.randn(5, 2, 4).double(), torch.randint(0, 3, (5, 2))
    y[1:, 1] = -100
    opt = foof.KFAC(model, fisher="full")
    opt.update_curvature(out := model(x), y)
    p = out.detach().softmax(-1)[y != -100]
    nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()).backward()
    opt.step()
    expected = (torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)).sum(0) / 10
    torch.testing.assert_close(opt.preconditioner.blocks[0].moments["Sigma_E"].value, expected)


def test_categorical_outputs_without_a_class_dimension_are_refused():
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    with pytest.raises(ValueError, match="categorical outputs must be logits"):
        foof.KFAC(model).update_curvature(model(torch.randn(6, 4)))


def test_subsampled_kfac_uses_this_batch_only():
    """ema = 0: the factors of a step are those of the batch before it alone (T = 1)."""
    model = net()
    opt = foof.KFAC(model, lr=0.0, ema=0.0, T=1, fisher="full")
    train(model, opt, 3)
    fresh = foof.KFAC(copy.deepcopy(model), ema=0.0, T=1, fisher="full")
    fresh.initialise([batch(2)])
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(averages(opt), averages(fresh), strict=True))


def test_datapoints_limits_what_feeds_the_factors():
    model, (x, _) = net(), batch(0, 10)
    some = foof.KFAC(model, fisher="full", datapoints=4)
    some.initialise([x])
    found = averages(some)
    some.remove()
    few = foof.KFAC(model, fisher="full")
    few.initialise([x[:4]])
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(found, averages(few), strict=True))


def test_gradient_accumulation_equals_the_joined_batch():
    (x, y), models = batch(0, 8), [net(), net()]
    for model, pieces in zip(models, (1, 4), strict=True):
        opt = foof.KFAC(model, lr=0.1, damping=0.1, fisher="full")
        for xs, ys in zip(x.chunk(pieces), y.chunk(pieces), strict=True):
            out = model(xs)
            opt.update_curvature(out)
            (nn.functional.cross_entropy(out, ys) / pieces).backward()
        opt.step()
    assert relative_error(flat(models[1]), flat(models[0])) < 1e-5


def test_summed_rows_are_r_times_averaged_ones():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8, 8)
    found = []
    for rows in ("mean", "sum"):
        torch.manual_seed(0)
        opt = ablations.kfac(cnn(), fisher="full", rows=rows)
        opt.initialise([x])
        found.append([block.moments["Sigma_E"].value for block in opt.preconditioner.blocks])
    for mean, total, R in zip(*found, (64, 9, 1), strict=True):
        assert relative_error(total, R * mean) < 1e-6


@pytest.mark.parametrize("zero_first", [True, False])
def test_zero_grad_may_stand_anywhere_before_backward(zero_first):
    model, (x, y) = net(), batch(0)
    opt = foof.KFAC(model)
    if zero_first:
        opt.zero_grad()
    out = model(x)
    opt.update_curvature(out)
    if not zero_first:
        opt.zero_grad()
    nn.functional.cross_entropy(out, y).backward()
    opt.step()
    assert all(block.moments["Sigma_E"].updates == 1 for block in opt.preconditioner.blocks)


def test_a_skipped_step_leaves_no_trace():
    model, (x, y) = net(), batch(0)
    opt = foof.KFAC(model, T=1, fisher="full")
    train(model, opt, 2)
    before = averages(opt)
    out = model(x * 100)
    opt.update_curvature(out)
    nn.functional.cross_entropy(out, y).backward()
    opt.zero_grad()  # thrown away
    assert all(torch.equal(a, b) for a, b in zip(before, averages(opt), strict=True))
    assert not opt.preconditioner.step.settle()


def test_missing_update_curvature_is_an_error_at_first_and_a_warning_later():
    model, (x, y) = net(), batch(0)
    opt = foof.KFAC(model, T=1)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(ValueError, match=r"update_curvature\(out\)"):
        opt.step()
    step(model, opt, x, y)
    before = averages(opt)
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.warns(UserWarning, match="update_curvature"):
        opt.step()
    assert all(torch.equal(a, b) for a, b in zip(before, averages(opt), strict=True))
    with warnings.catch_warnings():  # and only once
        warnings.simplefilter("error")
        nn.functional.cross_entropy(model(x), y).backward()
        opt.step()


def test_outputs_with_nan_are_left_out_with_a_warning():
    """A diverged model stays diverged, but update_curvature does not fall over it."""
    model, (x, y) = net(), batch(0)
    opt = foof.KFAC(model, T=1)
    step(model, opt, x, y)
    before = averages(opt)
    with pytest.warns(UserWarning, match="NaN or inf in the outputs"):
        step(model, opt, x * float("nan"), y)
    assert all(torch.equal(a, b) for a, b in zip(before, averages(opt), strict=True))
    assert torch.isnan(flat(model)).any()


def test_large_float16_outputs_are_finite():
    model = net()
    nn.init.constant_(model[-1].bias, 1e4)  # 6 datapoints: their sum is not
    opt = foof.KFAC(model, T=1)
    with torch.autocast("cpu", torch.float16), warnings.catch_warnings():
        warnings.simplefilter("error")
        opt.update_curvature(model(batch(0)[0]))


def test_sampled_labels_have_a_generator_of_their_own():
    """Neither drawing labels nor making the optimizer touches torch's own generator; the same seed gives the same run."""
    runs = []
    for seed in (1, 1, 2):
        model = net()
        state = torch.get_rng_state()
        opt = foof.KFAC(model, T=1, generator=seed)
        train(model, opt, 3)
        assert torch.equal(torch.get_rng_state(), state)
        runs.append(flat(model))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


def test_initialise_keeps_parameters_buffers_and_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    opt = foof.KFAC(model, fisher="empirical")
    opt.initialise([batch(k) for k in range(3)])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert all(block.moments["Sigma_E"].updates == 3 for block in opt.preconditioner.blocks)


def test_tied_embedding_and_head():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.embedding(x).tanh())

    torch.manual_seed(0)
    model, x = Tied(), torch.randint(0, 6, (5, 3))
    opt = foof.KFAC(model, lr=0.1, damping=0.1)
    for _ in range(3):
        opt.zero_grad()
        out = model(x)
        opt.update_curvature(out)
        nn.functional.cross_entropy(out.flatten(0, 1), x.flatten()).backward()
        opt.step()
    assert torch.isfinite(model.head.weight).all()
    opt.remove()
    with pytest.raises(ValueError, match="keep apart"):
        foof.KFAC(model, adaptive=True)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    with pytest.raises(RuntimeError, match="keep apart"):
        updates.updates(ablations.kfac(model, deferred=True))


def test_activation_checkpointing_changes_nothing():
    class Net(nn.Module):
        def __init__(self, checkpointed):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.body, self.last, self.checkpointed = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3), checkpointed

        def forward(self, x):
            h = self.first(x).tanh()
            body = checkpoint(self.body, h, use_reentrant=False) if self.checkpointed else self.body(h)
            return self.last(body.tanh())

    ends = []
    for checkpointed in (False, True):
        model = Net(checkpointed)
        opt = foof.KFAC(model, lr=0.1, damping=0.1, T=2, generator=0)
        train(model, opt, 5)
        ends.append(flat(model))
    assert torch.equal(*ends)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_under_autocast_are_float32(dtype):
    model = net()
    opt = foof.KFAC(model, lr=0.1, damping=0.1, T=2)
    for t in range(3):
        x, y = batch(t)
        opt.zero_grad()
        with torch.autocast("cpu", dtype):
            out = model(x)
            opt.update_curvature(out)
            loss = nn.functional.cross_entropy(out, y)
        loss.backward()
        opt.step()
    assert all(value.dtype == torch.float32 and torch.isfinite(value).all() for value in averages(opt))
    assert torch.isfinite(flat(model)).all()


# --- any optimizer, bad input ---------------------------------------------------------------------------------------------------


def test_precondition_with_kfac_equals_kfac():
    models = [net(), net()]
    options = {"damping": 0.1, "damping_mode": "standard", "T": 2, "generator": 3}
    opts = [
        foof.KFAC(models[0], lr=0.1, **options),
        foof.precondition(torch.optim.SGD(models[1].parameters(), lr=0.1), models[1], method="kfac", **options),
    ]
    for model, opt in zip(models, opts, strict=True):
        train(model, opt, 5)
    assert relative_error(flat(models[1]), flat(models[0])) < 1e-6


BAD = {
    "KFAC needs damping as a positive number": lambda m: foof.KFAC(m, damping="auto"),
    "damping λ must be a positive": lambda m: foof.KFAC(m, damping=0.0),
    "KFAC needs damping as a positive": lambda m: foof.KFAC(m, groups=[{"params": [m[0].weight], "relative": True}]),
    "damping_mode must be one of": lambda m: foof.KFAC(m, damping_mode="exact"),
    "second_factor='drop-scaled'; there is": lambda m: ablations.kfac(m, damping_mode="standard", second_factor="drop-scaled"),
    "the labels of a Fisher": lambda m: foof.KFAC(m, fisher="true"),
    "samples must be at least 1": lambda m: foof.KFAC(m, samples=0),
    "likelihood must be one of": lambda m: foof.KFAC(m, likelihood="poisson"),
    "datapoints is how many": lambda m: foof.KFAC(m, datapoints=0),
    "knows neither decay nor ascent": lambda m: foof.KFAC(m, adaptive=True, weight_decay=0.1),
    "knows neither decay nor": lambda m: foof.KFAC(m, adaptive=True, groups=[{"params": [m[0].weight], "weight_decay": 0.1}]),
    'rows must be "mean" or "sum"': lambda m: ablations.kfac(m, rows="max"),
    "FOOF has no option 'fisher'": lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=1), m, fisher="mc"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_refused_and_nothing_is_half_changed(message):
    model = net()
    with pytest.raises((ValueError, TypeError), match=message):
        BAD[message](model)
    assert all(not module._forward_hooks for module in model.modules())


def test_bad_outputs_are_refused():
    model, (x, y) = net(), batch(0)
    opt = foof.KFAC(model, fisher="empirical")
    with torch.no_grad(), pytest.raises(ValueError, match="gradients enabled"):
        opt.update_curvature(model(x))
    with pytest.raises(ValueError, match="needs the data's labels"):
        opt.update_curvature(model(x))
    with pytest.raises(ValueError, match="categorical labels must be integers"):
        opt.update_curvature(model(x), y.float())


def test_a_checkpoint_of_another_damping_is_refused():
    opts = [foof.KFAC(net(), damping_mode=mode) for mode in ("heuristic", "standard")]
    with pytest.raises(ValueError, match="this checkpoint is of method"):
        opts[0].load_state_dict(opts[1].state_dict())


def test_rows_of_a_batch_go_with_its_step():
    """Not when the garbage collector comes by: until then two batches' rows would be in memory."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    opt = foof.KFAC(model, lr=0.1, damping=1.0)
    gc.collect()
    gc.disable()
    try:
        out = model(torch.randn(4, 6))
        opt.update_curvature(out)
        held = [weakref.ref(note) for node in _taps_behind(out) for note in node.notes]
        nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 0])).backward()
        del out
        opt.step()
        assert len(held) == 2
        assert not any(note() for note in held)
    finally:
        gc.enable()
