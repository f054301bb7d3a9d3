"""Runs of convolutional networks and autoencoders: what they minimise, and that an interrupted one goes on as if it had not been."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from foof.study.data import load
from foof.study.train import checkpoints
from foof.study.train.averages import Average
from foof.study.train.batches import Batches
from foof.study.train.models import build
from foof.study.train.networks import resnet18
from foof.study.train.objectives import objective
from foof.study.train.run import run
from foof.study.train.setting import Setting

CONV = Setting(train_size=60, model="resnet18", hidden=(2,), batch_size=20, steps=7, log_every=1,
               options=(("augment", True), ("momentum", 0.9), ("momentum_after", 1), ("polyak", 0.9)))  # fmt: skip
CODES = Setting(train_size=60, model="autoencoder", hidden=(12, 4), batch_size=20, steps=7, log_every=1)
SCHEDULE = (("T", 3), ("S", 2), ("initialise", 2))


def methods(base: Setting) -> dict[str, Setting]:
    return {
        "sgd": base.but(lr=1e-3),
        "adam": base.but(optimizer="adam", lr=1e-3, options=tuple((k, v) for k, v in base.options if k != "momentum")),
        "foof": base.but(optimizer="foof", lr=1e-2, damping=1.0, options=(*base.options, *SCHEDULE)),
        "kfac": base.but(optimizer="kfac", lr=1e-3, damping=0.1, options=(*base.options, *SCHEDULE)),
        "standard": base.but(optimizer="kfac", lr=1e-3, damping=0.1, options=(*base.options, *SCHEDULE, ("damping_mode", "standard"))),
        "natural": base.but(optimizer="natural", lr=1e-3, damping=1.0, options=(*base.options, ("T", 2))),
    }


RUNS = {
    **{f"resnet18 {name}": s for name, s in methods(CONV).items()},
    **{f"without norm {name}": s.but(model="resnet18-no-norm") for name, s in methods(CONV).items() if name in ("foof", "kfac", "natural")},
    "resnet18 norm trained": methods(CONV)["foof"].but(options=(*methods(CONV)["foof"].options, ("train_norm", True))),
    **{f"autoencoder {name}": s for name, s in methods(CODES).items()},
    "autoencoder empirical": methods(CODES)["kfac"].but(options=(*SCHEDULE, ("fisher", "empirical"))),
    "autoencoder bernoulli": methods(CODES)["kfac"].but(options=(*SCHEDULE, ("likelihood", "bernoulli"))),
}


class Stop(Exception):
    pass


@pytest.mark.parametrize("name", RUNS)
def test_an_interrupted_run_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    """Stopped within the second epoch and at its end; augmentation, averages, momentum, labels drawn for the Fisher included."""
    setting = RUNS[name]
    whole = run(setting)
    assert whole.status == "finished"
    monkeypatch.setattr(checkpoints, "EVERY", 0.0)

    def stop(at):
        def watch(step, _):
            if step > at:
                raise Stop

        return watch

    for at in (4, 6):
        with pytest.raises(Stop):
            run(setting, stop(at), unfinished=tmp_path)
    seen = []
    rest = run(setting, lambda step, _: seen.append(step), unfinished=tmp_path)
    assert seen == [7]  # it did not begin again
    assert (rest.series, rest.final) == (whole.series, whole.final)
    assert len(whole.series["loss"]) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_state_of_other_code_is_not_gone_on_from(tmp_path):
    checkpoints.Checkpoint(tmp_path, "key", "one").save({"number": 3})
    assert checkpoints.Checkpoint(tmp_path, "key", "one").load() == {"number": 3}
    assert checkpoints.Checkpoint(tmp_path, "key", "another").load() is None
    (tmp_path / "key.pt").write_bytes(b"broken")
    assert checkpoints.Checkpoint(tmp_path, "key", "one").load() is None


@pytest.mark.parametrize("served", range(9))
def test_batches_go_on_where_they_were_left(served):
    data = load("fashion-mnist", "embedded", 70)
    whole, left, on = (Batches(data, 20, seed=5, augmented=True) for _ in range(3))
    for _ in range(served):
        next(whole), next(left)
    on.load_state_dict(left.state_dict())
    for _ in range(5):
        (x, y), (again, labels) = next(whole), next(on)
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


def test_the_logged_loss_of_an_autoencoder_is_its_error_per_pixel():
    data = load("fashion-mnist", "embedded", 60)
    out, batch = torch.randn(60, 784), (data.train_x, data.train_y)
    gaussian, bernoulli = (objective(CODES.but(options=(("likelihood", name),)), data) for name in ("gaussian", "bernoulli"))
    loss = gaussian.loss(out, batch)
    torch.testing.assert_close(loss, 0.5 * (out - data.train_x.flatten(1)).square().sum(1).mean())
    assert gaussian.shown(loss.item(), out) == pytest.approx(F.mse_loss(out, data.train_x.flatten(1)).item(), rel=1e-5)
    pixels = data.train_x.flatten(1) * 0.3081 + 0.1307
    assert bernoulli.shown(bernoulli.loss(out, batch).item(), out) == pytest.approx(
        F.binary_cross_entropy_with_logits(out, pixels.clamp(0, 1)).item(), rel=1e-5
    )
    with pytest.raises(ValueError, match="gaussian or bernoulli"):
        objective(CODES.but(options=(("likelihood", "poisson"),)), data)


@pytest.mark.parametrize("likelihood", ["gaussian", "bernoulli"])
def test_the_fisher_of_kfac_is_that_of_the_autoencoder_s_loss(likelihood):
    """The errors of the outputs, with targets drawn from the model, are those of the loss that is trained: Σ_E of the last layer is H."""
    from foof.study.train.methods import optimizer_of

    setting = CODES.but(optimizer="kfac", damping=1.0, options=(("likelihood", likelihood), ("T", 1), ("S", 1)))
    data = load("fashion-mnist", "embedded", 60)
    model = build("autoencoder", (1, 28, 28), (12, 4), 10, torch.Generator().manual_seed(0))
    optimizer, of = optimizer_of(setting, model), objective(setting, data)
    out = model(data.train_x)
    optimizer.update_curvature(out)
    of.loss(out, (data.train_x, data.train_y)).backward()
    optimizer.step()
    diagonal = optimizer.preconditioner.blocks[-1].moments["Sigma_E"].value.diagonal()
    expected = 1.0 if likelihood == "gaussian" else (out.sigmoid() * (1 - out.sigmoid())).mean().item()
    assert diagonal.mean().item() == pytest.approx(expected, rel=0.05)


def test_autoencoders_have_a_loss_and_no_accuracy():
    final = run(CODES).final
    assert {"train_loss", "test_loss"} <= set(final)
    assert "test_accuracy" not in final


def test_momentum_is_switched_on_after_the_first_epoch():
    """Three steps of plain SGD, then SGD with momentum: the loop written out."""
    setting = Setting(train_size=60, hidden=(8,), batch_size=20, steps=7, log_every=1, lr=0.05,
                      options=(("momentum", 0.9), ("momentum_after", 1)))  # fmt: skip
    data = load("fashion-mnist", "embedded", 60)
    model = build("mlp", (1, 28, 28), (8,), 10, torch.Generator().manual_seed(0))
    source, velocity, losses = Batches(data, 20, seed=1), [torch.zeros_like(p) for p in model.parameters()], []
    for step in range(1, 8):
        x, y = next(source)
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        for p, v, g in zip(model.parameters(), velocity, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            v.mul_(0.9 if step > 4 else 0.0).add_(g)
            p.data -= 0.05 * v
    assert run(setting).series["loss"] == pytest.approx(losses, rel=1e-5)


def test_the_average_is_polyak_s_and_leaves_the_run_as_it_is():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    average, values = Average(model, 0.9), [float(k**2) for k in range(1, 31)]
    expected = 0.0
    for k, value in enumerate(values, 1):
        model.weight.data.fill_(value)
        average.update(model)
        kept = min(1 - 1 / k, 0.9)
        expected = kept * expected + (1 - kept) * value
    assert average.model.weight.item() == pytest.approx(expected, rel=1e-6)
    without = CONV.but(options=tuple((k, v) for k, v in CONV.options if k != "polyak"))
    assert run(CONV).series["loss"] == run(without).series["loss"]
    with pytest.raises(ValueError, match="decay of an average"):
        Average(model, 1.0)


def test_looking_at_the_average_does_not_change_its_norms():
    model = resnet18(1, 10, 2)
    average = Average(model, 0.9)
    average.update(model)
    before = {k: v.clone() for k, v in average.model.state_dict().items() if v.is_floating_point()}
    average.model(torch.randn(8, 1, 28, 28))
    assert all(torch.equal(v, average.model.state_dict()[k]) for k, v in before.items())


@pytest.mark.parametrize(("name", "trained"), [("resnet18 sgd", True), ("resnet18 foof", False), ("resnet18 norm trained", True)])
def test_batch_norm_is_trained_by_first_order_methods_or_on_demand(name, trained, monkeypatch):
    from foof.study.train import run as module

    models = []
    monkeypatch.setattr(module, "_final", lambda loop: models.append(loop.model) or {"train_loss": 1.0})
    run(RUNS[name].but(steps=3))
    norms = [m for m in models[0].modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(m.weight.requires_grad == trained for m in norms)
    assert any((m.weight != 1).any() for m in norms) == trained
    assert all(m.running_mean.any() for m in norms)


def test_a_width_is_one_number():
    with pytest.raises(ValueError, match="one hidden size"):
        build("vgg11", (3, 32, 32), (4, 4), 10)


def test_what_augmented_runs_are_chosen_by():
    record = run(methods(CONV)["sgd"])
    assert record.score == record.final["last_loss"] == record.series["loss"][-1]
    assert math.isfinite(record.final["averaged_test_accuracy"])
