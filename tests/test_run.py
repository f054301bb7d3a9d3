"""Settings, runs and what they measure."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import foof
from foof.conjugate import solver_named
from foof.study.paper.toy import toy
from foof.study.train import models
from foof.study.train.batches import Batches
from foof.study.train.methods import METHODS, method
from foof.study.train.run import environment, evaluate, run
from foof.study.train.setting import Record, Setting

TINY = Setting(train_size=300, hidden=(12,), batch_size=50, steps=15, log_every=5)
EACH = {
    "sgd": TINY.but(options=(("momentum", 0.9),)),
    "adam": TINY.but(optimizer="adam", lr=1e-3),
    "foof": TINY.but(optimizer="foof", lr=0.3, damping=1.0, options=(("T", 2), ("initialise", 3))),
    "kfac": TINY.but(optimizer="kfac", lr=0.1, damping=1.0, options=(("T", 2), ("initialise", 3))),
    "natural": TINY.but(optimizer="natural", lr=0.01, damping=0.1, options=(("fisher_batch", 20), ("T", 2))),
    "kfac-transposed": TINY.but(optimizer="kfac-transposed", lr=0.1, damping=1.0, options=(("T", 2), ("initialise", 3))),
    "foof-per-datapoint": TINY.but(optimizer="foof-per-datapoint", lr=1.0, damping=1.0),
}


def test_every_method_is_tested():
    assert set(EACH) == set(METHODS)


def test_the_key_of_a_setting_never_changes():
    """Stored records are found by it: a new key for an old setting would orphan them all."""
    assert Setting().key == "5030452cc0bd5883"
    assert EACH["foof"].key == "93e2937de082a10b"


def test_equal_settings_are_equal_however_they_are_written():
    a = Setting(lr=1, damping=1, options=(("b", 2), ("a", 1)), hidden=[3, 4])
    b = Setting(lr=1.0, damping=1.0, options=(("a", 1), ("b", 2)), hidden=(3, 4))
    assert (a, hash(a), a.key) == (b, hash(b), b.key)
    assert Setting.from_dict(a.to_dict()) == a
    assert a.but(seed=3).curve == a


@pytest.mark.parametrize("field", ["lr", "damping", "steps", "batch_size", "log_every", "train_size"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_impossible_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} must be a positive number"):
        Setting(**{field: value})


def test_options_must_be_finite():
    with pytest.raises(ValueError, match="option momentum must be finite"):
        Setting(options=(("momentum", math.inf),))


def test_runs_in_threads_of_one_process_are_those_run_alone():
    settings = [EACH["kfac"].but(seed=i, steps=8) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(run, settings))
    assert [r.series["loss"] for r in together] == [run(s).series["loss"] for s in settings]


@pytest.mark.parametrize("name", METHODS)
def test_a_run_depends_on_its_setting_alone(name):
    torch.manual_seed(123)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    first = run(EACH[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    torch.manual_seed(7)
    second = run(EACH[name])
    assert (first.series, first.final) == (second.series, second.final)
    assert first.series["step"] == [1, 6, 11]
    assert first.final["train_loss"] < first.series["loss"][0]
    assert run(EACH[name].but(seed=1)).series != first.series


@pytest.mark.parametrize("name", METHODS)
def test_a_short_run_is_the_beginning_of_a_long_one(name):
    """So that a grid of short runs can be compared with longer ones."""
    short, long = run(EACH[name].but(steps=6)), run(EACH[name])
    assert short.series["loss"] == long.series["loss"][: len(short.series["loss"])]
    assert short.end_loss() == long.end_loss(until=6)


def test_the_environment_names_libraries_that_the_loader_puts_before_others(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    assert "preloaded" not in environment.__wrapped__()
    monkeypatch.setenv("LD_PRELOAD", "/somewhere/libfirst.so:./libsecond.so")
    assert environment.__wrapped__()["preloaded"] == "libfirst.so libsecond.so"


def test_a_record_survives_the_way_to_text_and_back():
    record = run(TINY.but(measure=("progress",)))
    assert Record.from_dict(record.to_dict()) == record
    assert record.environment["train_records"] == 300
    odd = replace(record, final={"a": math.inf, "b": -math.inf})
    assert Record.from_dict(odd.to_dict()) == odd


@pytest.mark.parametrize("name", METHODS)
def test_divergence_is_an_outcome(name):
    record = run(EACH[name].but(lr=1e30, steps=60))
    assert record.status == "diverged"
    assert record.score == math.inf
    assert record.final["steps"] < 60 or not math.isfinite(record.final["train_loss"])


def test_progress_is_the_fall_of_the_batch_loss():
    """Full batch: the loss after one step is the loss before the next."""
    record = run(TINY.but(batch_size=None, log_every=1, steps=5, measure=("progress",)))
    loss, progress = record.series["loss"], record.series["progress"]
    assert progress[:-1] == pytest.approx([a - b for a, b in pairwise(loss)], abs=1e-6)


def test_sgd_run_equals_the_loop_written_out():
    from foof.study.data import load

    d = load("fashion-mnist", "embedded", 300)
    model = models.mlp(784, (12,), 10, torch.Generator().manual_seed(0))
    order, losses = torch.Generator().manual_seed(1), []
    for _ in range(3):
        for rows in torch.randperm(300, generator=order).split(50):
            loss = torch.nn.functional.cross_entropy(model(d.train_x[rows]), d.train_y[rows])
            losses.append(loss.item())
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.01 * g
    assert run(TINY).series["loss"] == pytest.approx([losses[i] for i in (0, 5, 10)], rel=1e-6)


def test_batches_cover_an_epoch_once():
    from foof.study.data import load

    d = load("fashion-mnist", "embedded", 300)
    source = Batches(d, 100, seed=0)
    epoch = torch.cat([next(source)[0] for _ in range(3)]).sum((1, 2, 3)).sort().values
    torch.testing.assert_close(epoch, d.train_x.sum((1, 2, 3)).sort().values)
    with pytest.raises(ValueError, match="batches of 301"):
        Batches(d, 301, seed=0)


def test_evaluate_is_the_mean_over_all_records():
    x, y = torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    loss, accuracy = evaluate(torch.nn.Identity(), x, y, chunk=3)
    assert loss == pytest.approx(torch.nn.functional.cross_entropy(x, y).item(), rel=1e-5)
    assert accuracy == pytest.approx((x.argmax(1) == y).double().mean().item())


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no optimizer is called 'sdg'; there are sgd"):
        method(TINY.but(optimizer="sdg"))
    with pytest.raises(ValueError, match="needs a damping"):
        method(TINY.but(optimizer="foof"))
    with pytest.raises(ValueError, match="has no damping"):
        method(TINY.but(damping=1.0))
    with pytest.raises(ValueError, match="no model is called 'vgg'"):
        run(TINY.but(model="vgg"))


def test_the_network_is_that_of_the_paper():
    model = models.mlp(784, (1000, 1000), 10, torch.Generator().manual_seed(0))
    weights = list(model.parameters())
    assert [tuple(w.shape) for w in weights] == [(1000, 784), (1000, 1000), (10, 1000)]
    for w in weights:
        assert w.std().item() == pytest.approx(math.sqrt(2 / w.shape[1]), rel=0.05)
    assert len(list(models.mlp(784, (), 10).parameters())) == 1  # Fig. 2A: one layer


def test_toy_example_gives_the_paper_s_numbers():
    example = toy()
    assert example.gradients.tolist() == [[3, 1], [-1, 0]]
    assert example.sgd.tolist() == [2, 1]
    torch.testing.assert_close(example.foof, torch.tensor([-1.0, 4.0], dtype=torch.float64), atol=1e-12, rtol=0)
    assert example.losses["FOOF"][-1].max() < 1e-24
    assert (example.losses["SGD"][1:, 1] > example.losses["SGD"][0, 1]).all()


def test_the_library_takes_the_toy_step():
    """`foof.FOOF` with hardly any damping lands where the undamped update of the toy example does."""
    import foof

    A = torch.tensor([[3.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = foof.FOOF(model, lr=1.0, damping=1e-12, T=1)
    (0.5 * (model(A) - y) ** 2).mean(0).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), toy().foof[None], atol=1e-6, rtol=0)


KFAC = TINY.but(optimizer="kfac", lr=0.1, damping=1.0, options=(("T", 2), ("S", 2), ("initialise", 3)))


def test_the_decrease_of_kfac_s_own_update_is_its_progress():
    """Fig. 4C's quantity, taken before the step, against the loss after it."""
    record = run(KFAC.but(measure=("decrease", "decrease_without", "progress", "similarity")))
    relative = [p / loss for p, loss in zip(record.series["progress"], record.series["loss"], strict=True)]
    assert record.series["decrease"] == pytest.approx(relative, abs=1e-5)
    assert record.series["decrease_without"] != pytest.approx(relative, abs=1e-5)
    assert all(0 < s < 1 for s in record.series["similarity"])


def test_measuring_changes_nothing_and_may_be_rarer_than_logging():
    plain, measured = run(KFAC), run(KFAC.but(measure=("similarity",), options=(*KFAC.options, ("measure_every", 10))))
    assert measured.series["loss"] == pytest.approx(plain.series["loss"], rel=1e-4)
    assert (measured.series["step"], measured.series["measured_at"]) == ([1, 6, 11], [1, 11])


def test_similarity_is_one_where_the_second_factor_is_nearly_a_multiple_of_the_identity():
    """Much damping: (Σ_E + λ_E I)⁻¹ → I/λ_E."""
    low, high = (run(KFAC.but(damping=x, lr=0.01 * x, measure=("similarity",))).series["similarity"][-1] for x in (1e-3, 1e8))
    assert low < high
    assert high == pytest.approx(1, abs=1e-3)


def test_similarity_is_of_kfac_alone():
    with pytest.raises(ValueError, match="trajectories of KFAC"):
        run(TINY.but(measure=("similarity",)))


def test_the_transposed_damping_is_the_oracle_s_counter_example():
    import foof
    from foof.study.train.methods import METHODS
    from oracle import kfac_standard_transposed

    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4, bias=False)
    setting = Setting(optimizer="kfac-transposed", lr=1.0, damping=0.1, options=(("T", 1), ("S", 1)))
    optimizer = METHODS["kfac-transposed"].build(model, setting)
    assert isinstance(optimizer, foof.KFAC)
    out = model(torch.randn(30, 5))
    optimizer.update_curvature(out)
    before = model.weight.detach().clone()
    optimizer.preconditioner.estimator.plain = True
    out.square().mean().backward()
    raw = model.weight.grad.clone()
    optimizer.step()
    block = optimizer.preconditioner.blocks[0]  # one batch, no decay yet: its averages are what the update was made of
    expected = kfac_standard_transposed(raw, block.moments["Sigma"].value, block.moments["Sigma_E"].value, 0.1)
    torch.testing.assert_close(before - model.weight.detach(), expected, rtol=1e-4, atol=1e-6)


def test_per_datapoint_foof_is_sgd_with_a_rate_per_datapoint():
    """One layer, one row per datapoint: 1/N Σ_i e_i a_iᵀ / (|a_i|² + λ)."""
    from foof.study.train.methods import PerDatapointFOOF

    model, x, y = torch.nn.Linear(6, 3, bias=False), torch.randn(8, 6), torch.randint(3, (8,))
    before = model.weight.detach().clone()
    e = (model(x).softmax(1) - torch.nn.functional.one_hot(y, 3)).detach()
    optimizer = PerDatapointFOOF(model, lr=2.0, damping=0.5)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    rates = 1 / (x.square().sum(1) + 0.5)
    torch.testing.assert_close(before - model.weight.detach(), 2 * (e * rates[:, None]).T @ x / 8, rtol=1e-4, atol=1e-6)


def test_natural_gradients_take_their_fisher_where_they_are_told_to():
    base = TINY.but(optimizer="natural", lr=0.01, damping=0.1)
    own, same, larger = (run(base.but(options=o)).series["loss"] for o in ((), (("same_batch", True),), (("fisher_batch", 200),)))
    assert own[0] == same[0] == larger[0]
    assert len({own[-1], same[-1], larger[-1]}) == 3


@pytest.mark.parametrize(("hidden", "damping", "solver"), [((), 1e-3, "cg"), ((), 1e-4, "cholesky"), ((12,), 1e-3, "cholesky")])
def test_the_full_fisher_of_one_layer_is_solved_by_conjugate_gradients_where_they_converge(hidden, damping, solver):
    setting = TINY.but(optimizer="natural", hidden=hidden, lr=0.1, damping=damping, steps=3, options=(("fisher", "full"),))
    opt = method(setting).build(models.build("mlp", (784,), hidden, 10), setting)
    assert opt.preconditioner.estimator.settings.solver is solver_named(solver)
    given = setting.but(options=(*setting.options, ("solver", "cholesky")))
    assert run(setting).series["loss"] == pytest.approx(run(given).series["loss"], rel=1e-4)


@pytest.mark.parametrize("name", ["kfac", "natural"])
def test_adaptive_runs_change_their_damping_by_the_loss_after_the_step(name, monkeypatch):
    """Every five steps with the loss of the same batch before and after; the learning rate plays no part."""
    seen = []
    cls = {"kfac": foof.KFAC, "natural": foof.NaturalGradient}[name]
    adapt = cls.adapt_damping

    def watched(self, before, after):
        ratio = adapt(self, before, after)
        seen.append((before, after, ratio))
        return ratio

    monkeypatch.setattr(cls, "adapt_damping", watched)
    setting = TINY.but(optimizer=name, lr=1.0, damping=10.0, batch_size=None, log_every=1, options=(("T", 1), ("adaptive", True)))
    record = run(setting)
    losses = record.series["loss"]
    assert [(before, after) for before, after, _ in seen[:2]] == [(losses[4], losses[5]), (losses[9], losses[10])]
    assert all(math.isfinite(ratio) for *_, ratio in seen)
    assert run(setting.but(lr=3.0)).series == record.series


def test_what_foof_is_made_of_can_be_looked_at():
    """On full batches without a moving average, Σ is that of the weights one step before: what a batch is off by is what Σ moves by
    next. The inverse is made before steps 1 and 4 are folded in, and Σ moves on from it until then."""
    options = (("T", 3), ("S", 3), ("ema", 0.0))
    setting = TINY.but(optimizer="foof", lr=0.1, damping=1.0, batch_size=None, steps=6, log_every=1, options=options)
    record = run(setting.but(measure=("sigma_drift", "sigma_noise", "inversion", "posterior")))
    drift, noise = record.series["sigma_drift"], record.series["sigma_noise"]
    assert [drift[0], drift[1], noise[0]] == pytest.approx([0, 0, 0], abs=1e-6)
    assert [drift[2], drift[4]] == pytest.approx([noise[1], noise[3]], rel=0.05)
    assert drift[3] > 1.5 * drift[2] < drift[5]
    assert 0 < record.final["inverse_seconds"] < record.final["svd_seconds"]
    plain = run(setting)
    assert record.series["loss"] == plain.series["loss"]
    assert record.final["test_loss"] == plain.final["test_loss"]
    assert record.final["posterior_both"] == pytest.approx(plain.final["test_loss"], rel=0.2)
    assert record.final["posterior_first"] == pytest.approx(plain.final["test_loss"], rel=0.2)
    with pytest.raises(ValueError, match="trajectories of FOOF"):
        run(TINY.but(measure=("sigma_noise",)))


def test_kfac_s_damping_of_sigma_is_that_of_its_heuristic():
    """λ_A = √(λ · n tr Σ / (m tr Σ_E)): it grows with the root of λ, exactly, as long as nothing has been learnt."""
    setting = TINY.but(optimizer="kfac", lr=1e-9, steps=1, options=(("T", 1), ("S", 1)), measure=("lambda_A",))
    small, large = (run(setting.but(damping=damping)).series["lambda_A"][0] for damping in (1e-2, 1.0))
    assert large / small == pytest.approx(10, rel=1e-5)


def test_a_run_is_judged_by_the_mean_of_its_last_losses_and_a_short_one_by_the_last_that_was_logged():
    losses = [float(x) for x in range(40, 0, -1)]
    record = Record(Setting(steps=40, log_every=1), "finished", {"step": [*range(1, 41)], "loss": losses}, {"train_loss": 100.0})
    assert record.score == record.end_loss() == pytest.approx(2.5)
    assert record.end_loss(until=20) == pytest.approx(21.5)
    assert Record(Setting(steps=20), "finished", {"step": [1, 11], "loss": [3.0, 2.0]}).score == 2.0
    assert Record(Setting(steps=20), "diverged", {"step": [1, 11], "loss": [3.0, 2.0]}).score == math.inf
