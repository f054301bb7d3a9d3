"""The benchmark: every measurement on something tiny, its records, what they say, and the predictions against counting by hand."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import foof
from foof import cost, linalg
from foof.bench import fisher, loss, machine, memory, records, roofline, run, show, steps
from foof.bench.cases import CASES, deep_autoencoder, fully_connected, language, residual
from foof.bench.methods import BASELINE, METHODS, Method, Training, chosen
from foof.covering import covered_layers
from test_cli import foof as foof_command

TINY = {
    "mlp": replace(fully_connected(8, 4), T=3, S=2, rounds=2),
    "autoencoder": replace(deep_autoencoder((8, 4), 5), T=3, S=2),
    "resnet": replace(residual(2, 3), T=3, S=2),
    "gpt": replace(language(8, 1, 6, 2), T=3, S=2),
}
PACKAGES = {"curvlinops": "curvlinops", "SINGD": "singd", "SOAP": "pytorch_optimizer", "Shampoo": "pytorch_optimizer"}
MACHINE = cost.Machine()


def needs(name):
    """Skip where a peer is not installed."""
    for beginning, package in PACKAGES.items():
        if name.startswith(beginning):
            pytest.importorskip(package)


@pytest.mark.parametrize("name", [BASELINE.name, *METHODS])
@pytest.mark.parametrize("case", TINY)
def test_every_method_steps_on_every_case(name, case):
    needs(name)
    method = METHODS.get(name, BASELINE)
    if (case, name) == ("resnet", "Muon (torch)"):
        with pytest.raises(ValueError, match="hidden weights that are matrices"):
            Training(method, TINY[case])
        return
    training = Training(method, TINY[case], lr=1e-3)
    before = [p.detach().clone() for p in training.model.parameters()]
    losses = [training.step(x, y).item() for x, y in TINY[case].batches(4)]
    moved = [not torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True) if p.requires_grad]
    assert all(map(math.isfinite, losses))
    assert all(moved)
    training.close()


def test_foof_of_curvlinops_takes_our_steps():
    """The same mathematics, so that the comparison is of speed alone: T = S = 1, no memory, the same damping."""
    pytest.importorskip("curvlinops")
    case = replace(fully_connected(8, 4), T=1, S=1)
    x, y = case.batches(1)[0]
    theirs, ours = Training(METHODS["curvlinops FOOF"], case, lr=0.5), Training(METHODS["FOOF"], case, lr=0.5)
    for training in (theirs, ours):
        training.step(x, y)
    for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5)


def test_steps_are_ratios_of_one_run():
    failing = Method("failing", lambda model, case, lr: [][0])
    record = steps.unit(TINY["mlp"], {"FOOF": METHODS["FOOF"], "AdamW": METHODS["AdamW"], "failing": failing})
    assert record["failed"] == {"failing": "IndexError: list index out of range"}
    assert set(record["methods"]) == {BASELINE.name, "FOOF", "AdamW"}
    of = record["methods"]["FOOF"]
    assert (of["rounds"], of["steps"], of["cut"]) == (2, steps.BLOCK, 0)
    assert 0 < of["median_ms"] <= of["worst_ms"] <= of["worst_of_all_ms"]
    assert of["quartiles"][0] <= of["ratio"] <= of["quartiles"][1]


def test_the_worst_step_is_the_schedules_not_the_machines():
    times = steps.Times([[1, 1, 6, 1], [1, 9, 6, 1], [1, 1, 6, 1]], [1.0, 1.0, 1.0])
    of = times.summary()
    assert (of["ratio"], of["worst_ms"], of["worst_of_all_ms"], of["median_ms"]) == (2.25, 6000, 9000, 1000)


def test_a_method_that_fails_later_on_is_left_out_too():
    late = Method("late", lambda model, case, lr: [Late(model.parameters(), lr=lr)])
    record = steps.unit(replace(TINY["mlp"], without=(("SOAP", "slow"), ("late", "slow"))), {"FOOF": METHODS["FOOF"], "late": late})
    assert set(record["methods"]) == {BASELINE.name, "FOOF"}
    assert record["failed"] == {"late": "RuntimeError: singular", "SOAP": "slow"}
    assert steps.unit(replace(TINY["mlp"], without=(("FOOF", "slow"),)), {"FOOF": METHODS["FOOF"]})["failed"] == {}  # by its name


class Late(torch.optim.SGD):
    taken = 0

    def step(self, closure=None):
        self.taken += 1
        if self.taken > steps.WARM_UP + 3:
            raise RuntimeError("singular")
        super().step(closure)


def test_a_period_that_takes_too_long_is_a_lower_bound(monkeypatch):
    slow = Method("slow", lambda model, case, lr: [Slow(model.parameters(), lr=lr)])
    times, _ = steps.measure(replace(TINY["mlp"], rounds=2), {"slow": slow}, lambda _: None, budget=0.05)
    assert 2 <= times["slow"].cut < steps.BLOCK
    assert len(times["slow"].rounds) == 1
    monkeypatch.setattr(steps, "CLEAR", 1e6)  # where its steps do not say that it is slower, its period is finished
    times, _ = steps.measure(replace(TINY["mlp"], rounds=2), {"slow": slow}, lambda _: None, budget=0.05)
    assert times["slow"].cut == 0


class Slow(torch.optim.SGD):
    def step(self, closure=None):
        torch.linalg.eigh(torch.eye(200))
        torch.linalg.eigh(torch.eye(400))
        super().step(closure)


# --- predictions ----------------------------------------------------------------------------------------------------------------


def test_flops_are_those_counted_by_hand():
    """784-8-8-8-10 at batch 4: forward, weights and inputs, the latter not for the first layer; then Eᵀ(AP) or (EᵀA)P."""
    work = roofline.work_of(replace(fully_connected(8, 4)))
    matrices = [(8, 784), (8, 8), (8, 8), (10, 8)]
    assert [(w.n, w.m) for w in work.layers] == matrices
    plain = sum(2 * 4 * n * m * (2 if m == 784 else 3) for n, m in matrices)
    assert work.sgd_flops == plain
    extra = sum(2 * min(4, n) * m**2 + 0.1 * 1.5 * 4 * m**2 + m**3 / 100 for n, m in matrices)
    assert cost.flops(work, "FOOF", 100, 10) == pytest.approx(plain + extra)
    errors = sum(2 * min(4, m) * n**2 + 0.1 * 1.5 * 4 * n**2 + n**3 / 100 + 0.1 * 2 * 4 * n * m * (m != 784) for n, m in matrices)
    assert cost.flops(work, "KFAC", 100, 10) == pytest.approx(plain + extra + errors)


def test_where_a_cholesky_factor_does_only_it_is_counted():
    (w,) = roofline.work_of(fully_connected(8, 4)).layers[:1]
    work = cost.Work((w,), 0.0, 0.0, 1, ())
    assert cost.flops(work, "FOOF", 1, 1) - work.sgd_flops == pytest.approx(2 * 4 * 784**2 + 1.5 * 4 * 784**2 + 784**3 / 3)
    row = foof.explain(nn.Linear(784, 8, bias=False), torch.randn(4, 784), T=1).rows[0]
    assert row.flops == pytest.approx(cost.flops(work, "FOOF", 1, 1) - work.sgd_flops)


@pytest.mark.parametrize(("layer", "shape", "rows"), [
    (nn.Linear(6, 3), (6,), 1), (nn.Linear(6, 3), (2, 5, 6), 10),
    (nn.Conv2d(4, 6, 3, groups=2), (4, 6, 5), 12), (nn.Conv1d(4, 3, 3), (7, 4, 9), 49),
])  # fmt: skip
def test_rows_with_and_without_a_dimension_of_datapoints(layer, shape, rows):
    work = cost.work_of(layer, covered_layers(layer)[0], torch.randn(shape))
    assert [w.rows for w in work.layers] == [rows]
    assert foof.explain(layer, torch.randn(shape)).ratio > 0


def test_attention_counts_its_products():
    """In evaluation mode one fused kernel would compute them all."""
    model, (N, R, d) = nn.MultiheadAttention(8, 2, batch_first=True), (3, 5, 8)
    work = cost.work_of(model, covered_layers(model, functional=True)[0], (torch.randn(N, R, d),) * 3)
    projections, attention = 2 * N * R * d * 4 * d, 2 * 2 * N * R * R * d
    assert work.flops == projections + attention
    assert torch.backends.mha.get_fastpath_enabled()


def test_convolutions_count_their_locations_and_the_model_stays_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    work = cost.work_of(model, covered_layers(model)[0], torch.randn(2, 3, 6, 6))
    assert [(w.n, w.m, w.rows, w.inner) for w in work.layers] == [(5, 28, 72, False), (4, 46, 32, True)]
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_ratio_falls_to_its_flops_as_a_network_grows():
    """At a large width only products count: FOOF adds 2·B·m² to 6·B·m², a third."""
    layers = (cost.LayerWork(10**5, 10**5, 1, 100, 1),)
    work, machine = cost.Work(layers, 2 * 100 * 1e10, 0.0, 1, ()), replace(MACHINE, own_products=MACHINE.products)
    assert cost.ratio(work, machine, "FOOF", T=10**9, S=1) == pytest.approx(4 / 3, abs=1e-3)
    assert cost.ratio(work, machine, "KFAC", T=10**9, S=1) == pytest.approx(5 / 3, abs=1e-3)
    assert cost.ratio(work, machine, "FOOF", T=1, S=1) > 2
    faster = replace(machine, own_products=2 * machine.products)  # with the inverse, and of errors passed on: two products at half the time
    assert cost.ratio(work, faster, "FOOF", T=10**9, S=1) == pytest.approx(1, abs=1e-3)


def test_explain_says_what_is_predicted():
    model = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10))
    explained = foof.explain(model, torch.randn(100, 500))
    assert 1 < explained.ratio < 3
    assert f"Predicted: {explained.ratio:.2f} times the time of a step of SGD with momentum" in str(explained)
    assert foof.explain(model).ratio is None
    slower = foof.explain(model, torch.randn(100, 500), T=1)
    assert slower.ratio > explained.ratio


def test_an_optimizer_predicts_its_own_step():
    model, x = nn.Sequential(nn.Linear(500, 500), nn.ReLU(), nn.Linear(500, 10)), torch.randn(100, 500)
    ratios = {}
    for name, options in (("FOOF", {}), ("KFAC", {}), ("KFAC", {"damping_mode": "standard"}), ("AdamW", {})):
        opt = getattr(foof, name)(model, **options)
        ratios[name, *options] = opt.explain(x).ratio
        opt.remove()
    assert ratios["FOOF",] == foof.explain(model, x).ratio
    assert ratios["KFAC",] == foof.explain(model, x, method="KFAC").ratio > ratios["FOOF",]
    assert ratios["KFAC", "damping_mode"] is ratios["AdamW",] is None  # by eigenvectors: not predicted


def test_the_machine_is_measured():
    machine = roofline.calibrate(torch.device("cpu"))
    assert all(value > 0 for name, value in vars(machine).items() if name not in ("inverse_bytes", "factor_bytes", "turning", "tap"))


# --- memory ---------------------------------------------------------------------------------------------------------------------


def test_memory_beside_sgd_is_that_of_the_formula():
    """In processes of their own, on the network of width 1,000; `foof bench memory` has the other cases."""
    record = memory.unit(CASES["mlp-1000"], ["FOOF"], 1)
    assert record["title"] == "MLP, width 1,000, batch 100, T = 2, S = 1"  # as it was measured
    work = roofline.work_of(CASES["mlp-1000"])
    squares = [784**2, 1000**2, 1000**2, 1000**2]
    weights, errors = 784 * 1000 + 2 * 1000**2 + 10 * 1000, 2 * 100 * 1000
    assert cost.memory(work, "FOOF") == 4 * (2 * sum(squares) + 1000**2 - weights - errors)
    assert record["beside"]["FOOF"] == pytest.approx(cost.memory(work, "FOOF"), rel=0.1)


def test_memory_is_the_same_where_inverses_are_held():
    """At a T as short as that of the measurement Cholesky factors do: here T is such that inverses pay."""
    case = CASES["mlp-1000"]
    work = roofline.work_of(case)
    assert linalg.inverse_pays(1000, linalg.uses(11, 10))
    program = "import foof.bench.memory as m, sys; m.T, m.STEPS = 11, 12; print(m.peak(m.CASES['mlp-1000'], sys.argv[1]))"
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(Path(foof.__file__).parents[1])}

    def peak(name):
        ran = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, check=True, env=environment)
        return int(ran.stdout)

    assert peak("FOOF") - peak(BASELINE.name) == pytest.approx(cost.memory(work, "FOOF"), rel=0.1)


def test_where_activations_are_many_inverting_is_not_what_needs_most():
    """Then FOOF keeps moments and inverses where SGD keeps momentum, and a gradient before and after: 2Q - W + 2G."""
    work = cost.Work((cost.LayerWork(20, 30, 1, 1000, 1),), 0.0, 0.0, 1, (600,), kept=1e9)
    assert cost.memory(work, "FOOF") == 4 * (2 * 900 - 600 + 2 * 600)
    assert cost.memory(work, "KFAC") == 4 * (2 * (900 + 400) + (900 + 400) - 600 + 2 * 600)  # of many rows their products are kept
    assert roofline.memory(TINY["resnet"]) == {}


def test_a_method_that_fails_elsewhere_says_why(monkeypatch):
    def child(module, case, name, *_):
        if name == "SOAP":
            raise RuntimeError("ModuleNotFoundError: pytorch_optimizer")
        return {BASELINE.name: 100, "FOOF": 130}[name]

    monkeypatch.setattr(memory, "elsewhere", child)
    record = memory.unit(CASES["resnet"], ["FOOF", "SOAP"], 1)
    assert (record["sgd"], record["beside"]) == (100, {"FOOF": 30})
    assert record["failed"] == {"SOAP": "ModuleNotFoundError: pytorch_optimizer"}


# --- time to a loss ---------------------------------------------------------------------------------------------------------------


def small_task():
    return replace(loss.fashion_mnist("embedded", 8, 1), slice=0.01, judged=100)


def test_the_race_ends_with_sgd_and_says_who_was_there_first():
    record = loss.unit(small_task(), {BASELINE.name: 0.01, "FOOF": 0.3, "AdamW": 1e-2}, floor=0.0)
    sgd, adamw = record["methods"][BASELINE.name], record["methods"]["AdamW"]
    assert (sgd["steps"], sgd["of_sgd"], record["failed"]) == (60, 1.0, {})
    last = [value for _, step, value in sgd["curve"] if step > 57]
    assert record["goal"] == pytest.approx(sum(last) / len(last))
    assert adamw["reached"] is None or adamw["reached"] <= adamw["seconds"]
    assert all(m["steps"] <= 60 for m in record["methods"].values())


def test_a_loss_is_reached_when_three_takings_are_there():
    of = loss.Run(None, None, 0.0, curve=[(1.0, 10, 5.0), (2.0, 20, 1.0), (3.0, 30, 1.0), (4.0, 40, 1.0)])  # type: ignore[arg-type]
    assert of.reaches(1.0) == (4.0, 40)
    assert of.reaches(2.5) == (3.0, 30)
    assert of.reaches(0.5) is None


def test_a_search_goes_on_where_the_best_is_at_an_end():
    record = loss.search(small_task(), "AdamW", steps=8)
    rates = [lr for lr, _ in record["tried"]]
    assert record["best"] in rates
    assert len(rates) == (3 if record["best"] == loss.DOCUMENTED["AdamW"] else 4)


def test_a_peer_that_cannot_be_trained_is_searched_in_vain(monkeypatch):
    monkeypatch.setitem(METHODS, "SINGD", Method("SINGD", lambda model, case, lr: [][0], package="singd_that_is_not_there"))
    record = loss.search(small_task(), "SINGD", steps=2)
    assert record["best"] == loss.DOCUMENTED["SINGD"]
    assert all(math.isnan(value) for _, value in record["tried"])
    planned = [unit.name for unit in run.plan(run.Setup(), ["loss"])]
    assert "search/SINGD" not in planned  # what is not installed is not searched, and fails in the race
    assert planned[-1] == "loss"


# --- the Fisher -----------------------------------------------------------------------------------------------------------------


def test_the_fisher_beside_its_peers(monkeypatch):
    pytest.importorskip("curvlinops")
    monkeypatch.setattr(fisher, "elsewhere", lambda module, width, D, threads, device: fisher.memory(width, D, device))
    monkeypatch.setattr(fisher, "LARGEST", 1)
    record = fisher.unit(8, 20)
    mine, theirs = record["ours"], record["peers"]["curvlinops + CG"]
    assert mine["residual"] < 1e-4
    assert theirs["residual"] < 10 * max(mine["residual"], 1e-6)  # the same matrix, to the same accuracy
    assert mine["bytes"] >= 0


def test_what_does_not_fit_is_listed(monkeypatch):
    monkeypatch.setattr(fisher, "LARGEST", 1)
    record = fisher.laplace_unit(4, 10, "full")
    assert record["failed"]["laplace-torch"].startswith("MemoryError: its covariance has 3,208 × 3,208 numbers")
    assert record["ours"]["fit"] > 0


# --- records, tables, the command -----------------------------------------------------------------------------------------------


def test_what_is_recorded_is_not_measured_again(tmp_path):
    path, calls = tmp_path / "records.jsonl", []

    def measure():
        calls.append(1)
        return {"kind": "x", "value": math.nan, "pair": (1, 2.0)}

    store = records.Store(path, {"threads": 1})
    record, new = store.measured("a", measure)
    assert (new, record["value"], record["pair"], record["unit"]) == (True, None, [1, 2.0], "a")
    assert record["machine"]["cores"] >= 1
    assert record["versions"]["torch"] == torch.__version__
    assert json.loads(path.read_text()) == record
    assert records.Store(path, {"threads": 1}).measured("a", measure) == (record, False)
    assert records.Store(path, {"threads": 2}).get("a") is None  # another setup
    assert records.Store(path, {"threads": 2}).get("a", timed=False) == record
    again, new = records.Store(path, {"threads": 1}, fresh=True).measured("a", measure)
    assert (new, len(calls), records.read(path)) == (True, 2, [again])


def test_a_part_of_the_benchmark_does_not_replace_a_full_run(tmp_path):
    full, path = {"quick": False, "rounds": None, "methods": ()}, tmp_path / "bench.jsonl"
    records.Store(path, {**full, "quick": True}).measured("a", dict)
    records.Store(path, full).protect(["a"])  # a full run may replace a quick one
    records.Store(path, full).measured("a", dict)
    for part in ({"quick": True}, {"rounds": 1}, {"methods": ("FOOF",)}):
        store = records.Store(path, {**full, **part})
        with pytest.raises(ValueError, match="--out"):
            store.protect(["a", "b"])
        store.protect(["b"])


def test_the_command_asks_for_another_file_before_it_measures(tmp_path, capsys):
    path = tmp_path / "bench.jsonl"
    records.Store(path, {"quick": False, "rounds": None, "methods": ()}).measured("steps/mlp-1000", dict)
    status, _, said = foof_command(capsys, "bench", "mlp-1000", "--quick", "--out", path)
    assert status == 1
    assert "name another file with --out" in " ".join(said.split())


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"format": 99}\n')
    with pytest.raises(ValueError, match=r"line 1: a record of `foof bench` in format 1 was needed"):
        records.Store(tmp_path / "x.jsonl", {})


def test_names_that_are_none():
    with pytest.raises(ValueError, match="no method of the benchmark is called soup"):
        chosen(["soup"])
    with pytest.raises(ValueError, match="nothing of the benchmark is called 'stpes'"):
        run.plan(run.Setup(), ["stpes"])
    with pytest.raises(ValueError, match="at least 1"):
        run.Setup(threads=0)
    for device in ["gpu", *([] if torch.cuda.is_available() else ["cuda", "cuda:1"])]:
        with pytest.raises(ValueError, match=f"device must be one that torch has here, cpu.* but '{device}' was given"):
            run.Setup(device=device)
    assert list(chosen(["foof", "soap"])) == ["FOOF", "SOAP"]
    with pytest.raises(ValueError, match=r"this process may use \d+, but 1000000 threads were asked for"):
        machine.pin(10**6)


@pytest.mark.parametrize(("what", "units"), [
    (["mlp-250"], ["steps/mlp-250"]), (["mlp-250", "memory"], ["memory/mlp-250"]),
    (["mlp-250", "laplace"], ["steps/mlp-250", "laplace/full-4", "laplace/kron-300"]),
])  # fmt: skip
def test_what_is_named_is_measured(what, units):
    assert [unit.name for unit in run.plan(run.Setup(), what)] == ["machine", *units]


def test_changed_files_are_another_source(tmp_path, monkeypatch):
    package = tmp_path / "foof"
    (package / "bench").mkdir(parents=True)
    (package / "py.typed").touch()
    (package / "a.py").write_text("1")
    monkeypatch.setattr(machine, "__file__", str(package / "bench" / "machine.py"))
    assert machine._commit() is None

    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x@x", *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = machine._commit()
    (package / "a.py").write_text("2")
    changed = machine._commit()
    (package / "a.py").write_text("3")
    assert len({clean, changed, machine._commit()}) == 3
    assert changed.startswith(f"{clean}-dirty-")


def test_a_race_without_foof_or_without_others_is_judged_by_what_is_there():
    def judged(**reached):
        methods = {name: {"reached": seconds} for name, seconds in {BASELINE.name: 60.0, **reached}.items()}
        return [check.asked for check in show.checks([{"kind": "loss", "unit": "loss", "setup": {"quick": False}, "methods": methods}])]

    assert judged(AdamW=30.0) == []
    assert judged(FOOF=15.0) == ["FOOF at SGD's last loss in a third of its seconds"]


def test_every_line_that_was_asked_for_is_judged():
    def timed(case, **ratios):
        of = {"quartiles": [1, 1], "rounds": 2, "steps": 9, "mean_ms": 1, "median_ms": 1, "worst_ms": 2.5, "cut": 0}
        methods = {name: {"ratio": value, **of} for name, value in {BASELINE.name: 1.0, **ratios}.items()}
        common = {"kind": "steps", "unit": f"steps/{case}", "case": case, "title": case, "T": 100, "failed": {}}
        return {**common, "methods": methods, "predicted": {"FOOF": {"ratio": 1.4}, "KFAC": {"ratio": 2.0}}}

    race = {BASELINE.name: 60.0, "FOOF": 15.0, "AdamW": 30.0, "SOAP": None}
    found = show.checks([
        timed("mlp-1000", FOOF=1.36, KFAC=1.8, SOAP=1.5, **{"FOOF, spread": 1.4}),
        {"kind": "loss", "unit": "loss", "setup": {"quick": False}, "methods": {name: {"reached": value} for name, value in race.items()}},
        {"kind": "memory", "unit": "memory/x", "title": "x", "predicted": {"FOOF": 120}, "beside": {"FOOF": 100}},
        {"kind": "fisher", "unit": "fisher/1000-4000", "ours": {"bytes": 2**30}},
    ])  # fmt: skip
    assert {check.asked: check.holds for check in found} == {
        "mlp-1000: FOOF ≤ 1.38 × SGD": True,
        "mlp-1000: KFAC ≤ 1.75 × SGD": False,
        "mlp-1000: FOOF below every second-order peer": True,
        "mlp-1000: KFAC below every second-order peer": False,
        "mlp-1000: no step of FOOF, spread over 2 × its median": False,
        "mlp-1000: FOOF predicted within 15 %": True,
        "mlp-1000: KFAC predicted within 15 %": True,
        "x: FOOF's memory within 10 % of the formula": False,
        "FOOF at SGD's last loss in a third of its seconds": True,
        "FOOF there before every other method": True,
        "the Fisher of 2.8 M parameters, D = 4,000: ≤ 2 GiB beside the model": True,
    }


def test_pictures_need_two_places():
    def timed(case, ratio):
        return {"kind": "steps", "case": case, "T": 100, "methods": {BASELINE.name: {"ratio": 1.0}, "FOOF": {"ratio": ratio}}}

    assert show.cost_against([timed("mlp-250", 1.5)], "width") == ""
    widths = show.cost_against([timed("mlp-250", 1.5), timed("mlp-4000", 1.2), timed("mlp-1000-b32", 3.0)], "width")
    assert widths.count("<polyline") == 1
    assert ">4,000<" in widths
    assert ">FOOF<" in widths
    assert show.cost_against([timed("mlp-1000", 1.5), timed("mlp-1000-b32", 1.2)], "batch").count("<polyline") == 1


def test_the_command(capsys, tmp_path, monkeypatch):
    """One case from end to end; the second time nothing is measured."""
    monkeypatch.setitem(CASES, "mlp-250", TINY["mlp"])
    monkeypatch.setattr("foof.cli.pin", lambda threads: None)
    monkeypatch.setattr(roofline, "calibrate", lambda device: MACHINE)
    command = ["bench", "mlp-250", "--method", "foof", "--method", "AdamW", "--out", tmp_path / "bench.jsonl"]
    status, said, _ = foof_command(capsys, *command)
    assert status == 0
    for words in ("ratio to SGD", "FOOF", "AdamW", "predicted within 15 %", f"torch {torch.__version__}"):
        assert words in said
    status, said, _ = foof_command(capsys, *command)
    assert (status, said.count("measured before")) == (0, 2)

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "run", stopped)
    status, said, _ = foof_command(capsys, *command)
    assert (status, "the same command goes on from there" in said) == (130, True)
    status, _, err = foof_command(capsys, "bench", "nonsense")
    assert (status, "nothing of the benchmark is called 'nonsense'" in err) == (1, True)
