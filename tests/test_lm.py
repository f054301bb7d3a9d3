"""The language-model benchmark runs, resumes and judges by its rule: on a tiny model and made-up text."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks" / "lm"
PEERS = ("SOAP", "Shampoo")
MODULES = ("run", "data", "methods", "model", "neurons", "results")


@pytest.fixture
def lm(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:  # of another benchmark that has been imported before
        monkeypatch.delitem(sys.modules, name, raising=False)
    run = importlib.import_module("run")
    words = torch.randint(97, 123, (40, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    text = words[torch.randint(40, (2000,), generator=torch.Generator().manual_seed(1))].flatten()
    monkeypatch.setattr(run, "splits", lambda: (text[:9000], text[9000:]))
    monkeypatch.setattr(run, "RECORDS", tmp_path / "records.jsonl")
    monkeypatch.setattr(run, "SELECTED", tmp_path / "selected.jsonl")
    yield run
    for name in MODULES:
        sys.modules.pop(name, None)


def names():
    source = (FOLDER / "methods.py").read_text(encoding="utf-8").partition("METHODS: dict")[2]
    return [line.split('"')[1] for line in source.splitlines() if line.startswith('    "')]


@pytest.mark.parametrize("method", names())
def test_every_method_learns(lm, method):
    if method in PEERS:
        pytest.importorskip("pytorch_optimizer")
    record = lm.recorded(method, "tiny", lm.METHODS[method].lrs[1], lm.METHODS[method].knob.usual, 25, 0)
    assert record["curve"][-1][0] == 25
    assert record["validation"] < record["curve"][0][2] < 5.6  # log 256 = 5.55
    assert json.loads(lm.RECORDS.read_text()) == record


def test_a_run_that_is_recorded_is_not_run_again(lm, monkeypatch):
    first = lm.recorded("Muon on neurons", "tiny", 0.02, 0.1, 4, 0)
    again = lm.train("Muon on neurons", "tiny", 0.02, 0.1, 4, 0)
    assert (again["validation"], again["training"]) == (first["validation"], first["training"])  # and a run is reproducible
    monkeypatch.setattr(lm, "train", None)
    assert lm.recorded("Muon on neurons", "tiny", 0.02, 0.1, 4, 0) == first


def write(lm, method, seed, loss, ridge=0.1):
    record = {"method": method, "size": "small", "steps": 1000, "lr": 0.02, "knob": {"ridge": ridge}, "seed": seed, "validation": loss,
              "seconds": 1.0}  # fmt: skip
    with lm.RECORDS.open("a") as file:
        file.write(json.dumps(record) + "\n")


def choose(lm, *methods):
    chosen = [{"method": method, "size": "small", "lr": 0.02, "knob": {"ridge": 0.1}} for method in methods]
    lm.SELECTED.write_text("".join(json.dumps(each) + "\n" for each in chosen))


@pytest.mark.parametrize(
    ("gains", "wins"), [((0.03, 0.04, 0.03, 0.05, 0.04), True), ((0.03, -0.04, 0.03, 0.05, -0.04), False), ((0.03,) * 4, False)]
)
def test_the_rule_for_a_win(lm, gains, wins):
    for seed, gain in enumerate(gains):
        for method, loss in (("Muon", 1.6 + 0.1 * seed), ("Muon on neurons", 1.6 + 0.1 * seed - gain)):
            write(lm, method, seed, loss)
    assert not list(lm.verdicts("small", lm.RECORDS))  # no trials have chosen these settings
    choose(lm, "Muon", "Muon on neurons")
    verdict = list(lm.verdicts("small", lm.RECORDS))[-1]
    assert verdict.endswith("below, by the rule.") == wins
    assert f"{len(gains)} seeds" in verdict


def test_the_search_goes_one_beyond_an_edge_and_then_turns_the_knob(lm, monkeypatch):
    losses, better = {0.005: 2.0, 0.01: 1.0, 0.02: 1.1, 0.04: None}, {0.95: 0.0, 0.9: 0.1, 0.98: 0.2}
    trial = lambda method, size, lr, knob, steps, seed: {"validation": losses[lr] and losses[lr] + better[knob]}  # noqa: E731
    monkeypatch.setattr(lm, "recorded", trial)
    assert lm.selected("Muon", "tiny", 10) == (0.01, 0.95)
    losses.update({0.01: 3.0, 0.04: 0.5, 0.08: 0.4})
    better[0.98] = -0.1
    assert lm.selected("Muon", "tiny", 10) == (0.08, 0.98)


def test_runs_that_diverged_are_counted_and_win_nothing(lm):
    for seed in range(5):
        write(lm, "Muon", seed, 2.5)
        write(lm, "Muon on neurons", seed, None if seed == 3 else 2.0)
    choose(lm, "Muon", "Muon on neurons")
    assert "| Muon on neurons | 1,000 | 5, 1 diverged | 2.0000 ± 0.0000 |" in lm.table("small", lm.RECORDS)
    assert [line.endswith("no win by the rule.") for line in lm.verdicts("small", lm.RECORDS)] == [True]
    assert lm.table("small", lm.RECORDS).index("| Muon |") < lm.table("small", lm.RECORDS).index("| Muon on neurons |")


def test_what_trials_have_chosen_is_noted_once(lm, monkeypatch):
    monkeypatch.setattr(lm, "recorded", lambda method, size, lr, knob, steps, seed: {"validation": lr + knob})
    for _ in range(2):
        assert lm.settle("Muon, head in the eigenbasis", "tiny", "tiny") == (0.005, 0.9)
    assert [json.loads(line) for line in lm.SELECTED.read_text().splitlines()] == [
        {"method": "Muon, head in the eigenbasis", "size": "tiny", "lr": 0.005, "knob": {"momentum": 0.9}, "of": "Muon"}
    ]


def test_a_race_takes_the_fraction_and_all_of_the_steps(lm, monkeypatch, tmp_path):
    monkeypatch.setattr(lm, "RACES", tmp_path / "races.jsonl")
    record = lm.race({"foof.Muon": (0.02, 0.1), "Muon": (0.02, 0.95)}, "tiny", 10, 0.8, 0)
    assert [(run["method"], run["steps"], run["knob"]) for run in record["runs"]] == [
        ("foof.Muon", 8, {"damping": 0.1}), ("Muon", 10, {"momentum": 0.95})
    ]  # fmt: skip
    assert "| foof.Muon | 8 | " in lm.races(lm.RACES)
    assert " | 0.80 | " in lm.races(lm.RACES)


def test_variants_are_compared_on_the_same_seeds(lm):
    for method, losses in (("Muon on neurons", (2.0, 2.2)), ("Muon on neurons, T = 64", (2.1,)), ("Muon", (2.3, 2.4))):
        for seed, loss in enumerate(losses):
            write(lm, method, seed, loss)
    choose(lm, "Muon", "Muon on neurons", "Muon on neurons, T = 64")
    write(lm, "Muon on neurons", 0, 2.05, ridge=1.0)
    said = lm.ablations("small", lm.RECORDS)
    assert "| Muon on neurons, T = 64 | 1,000 | 1 | 2.1000 | +0.1000 |" in said
    assert "| Muon on neurons, ridge 1 | 1,000 | 1 | 2.0500 | +0.0500 |" in said
    assert "| Muon | 1,000 | 2 |" in said
    assert "T = 64" not in lm.table("small", lm.RECORDS)
    assert "ridge 1 |" not in lm.table("small", lm.RECORDS)
