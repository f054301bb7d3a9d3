"""The command `foof`, as a user meets it."""

import csv
import subprocess
import sys
from dataclasses import replace

import pytest

from foof import cli
from foof.study import data
from foof.study.paper import experiments
from foof.study.paper.verdicts import Ruling
from foof.study.search.presets import PRESETS
from foof.study.search.store import Store, dump
from foof.study.search.sweep import Interrupted
from foof.study.train.setting import Record, Setting


def foof(capsys, *arguments) -> tuple[int, str, str]:
    """Exit status, output and errors of `foof ARGUMENTS`, run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["foof", *map(str, arguments)])
        patch.setattr(cli.console, "_width", 200)
        try:
            cli.main()
            status = 0
        except SystemExit as stop:
            status = stop.code or 0
    out, err = capsys.readouterr()
    return status, out, err


def test_reproduce_ends_in_a_report_and_does_nothing_twice(capsys, tmp_path):
    out = tmp_path / "out"
    status, said, _ = foof(capsys, "reproduce", "--preset", "smoke", "--out", out)
    assert status == 0
    assert "core-minutes" in said
    assert "FOOF reaches a lower training loss than Adam" in said
    runs = said.count(", seed ")
    assert runs > 80
    assert (out / "report.html").stat().st_size > 10**6
    with (out / "records.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == runs
    status, said, _ = foof(capsys, "reproduce", "toy-sgd", "fig4b", "--preset", "smoke", "--out", out)
    assert (status, said.count(", seed "), "runs to do" in said) == (0, 0, False)

    (out / "report.html").unlink()
    assert foof(capsys, "report", "--preset", "smoke", "--out", out, "--svg")[0] == 0
    assert (out / "report.html").exists()
    assert (out / "figures" / "fig4b.svg").exists()
    assert foof(capsys, "export", tmp_path / "all.jsonl.gz", "--out", out)[1].startswith(f"{runs} records")
    assert (tmp_path / "all.jsonl.gz").exists()


def test_records_of_other_files_than_are_here_are_not_taken_over(capsys, tmp_path, monkeypatch):
    def record(dataset, source, used):
        return Record(Setting(dataset=dataset, source=source), "finished", {}, {}, {}, {"test_records": used})

    kept = [record("cifar-10", "full", 2000), record("fashion-mnist", "embedded", 1000)]
    dump([*kept, record("cifar-100", "full", 2000)], tmp_path / "a.jsonl.gz")
    here = {"cifar-10": 2000, "cifar-100": 10_000}
    monkeypatch.setattr(cli.data, "test_records", here.__getitem__)
    with Store(":memory:") as into:
        cli._take_over(tmp_path / "a.jsonl.gz", into)
        assert {r.setting for r in into} == {r.setting for r in kept}
    said = " ".join(capsys.readouterr().out.split())
    assert "1 records that came with the package are left out" in said
    assert "cifar-100 with 2000 test records, not 10000" in said


def test_with_the_official_files_none_of_the_package_s_records_of_a_part_is_taken_over(monkeypatch):
    parts = {"cifar-10", "cifar-100", "svhn"}
    monkeypatch.setattr(cli.data, "test_records", lambda name: data.SPECS[name].counts[1])
    with Store(":memory:") as into:
        cli._take_over(experiments.committed(PRESETS["reduced"]), into)
        assert not parts & {r.setting.dataset for r in into}
        assert len(into) > 50
    monkeypatch.setattr(cli.data, "test_records", lambda name: 2000 if name in parts else data.SPECS[name].counts[1])
    with Store(":memory:") as into:
        cli._take_over(experiments.committed(PRESETS["reduced"]), into)
        assert parts <= {r.setting.dataset for r in into}


def test_test_records_are_those_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setenv("FOOF_DATA", str(tmp_path))
    assert data.test_records("cifar-10") == 10_000  # which would be fetched
    assert data.test_records("curves") == 10_000  # which would be made
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(bytes(3073 * 4))
    (folder / "test_batch.bin").write_bytes(bytes(3073 * 3))
    assert data.test_records("cifar-10") == 3


def test_one_claim_runs_only_what_it_needs(capsys, tmp_path):
    status, said, _ = foof(capsys, "reproduce", "foof-vs-sgd", "--preset", "smoke", "--out", tmp_path, "--workers", 1)
    assert (status, said.count(", seed ")) == (0, 4)
    assert "FOOF" in said
    assert "Adam" not in said


def test_claims_are_listed_with_their_rules(capsys, tmp_path):
    status, said, _ = foof(capsys, "claims", "--preset", "smoke", "--out", tmp_path)
    assert status == 0
    assert "foof-vs-kfac" in said
    assert "not run" in said


def test_a_search_of_its_own(capsys, tmp_path):
    search = ["sweep", "foof", "--lr", "1", "--damping", "1", "--seeds", 2, "--option", "T=5"]
    status, said, _ = foof(capsys, *search, "--preset", "smoke", "--out", tmp_path, "--workers", 1)
    assert status == 0
    assert "best: " in said


def test_a_single_damping_is_taken_as_it_is(capsys, tmp_path):
    search = ["sweep", "foof", "--lr", "1", "--damping", "0.5", "--seeds", 1, "--preset", "smoke", "--out", tmp_path, "--workers", 1]
    assert foof(capsys, *search)[0] == 0
    with Store(tmp_path / "records.sqlite") as store:
        assert [r.setting.damping for r in store] == [0.5]


def test_a_search_that_cannot_run_leaves_nothing_behind(capsys, tmp_path):
    status, _, err = foof(capsys, "sweep", "foof", "--preset", "smoke", "--out", tmp_path / "none")
    assert (status, "FOOF needs a damping" in err) == (1, True)
    assert not (tmp_path / "none").exists()


def test_report_without_records_says_what_to_do(capsys, tmp_path):
    status, _, err = foof(capsys, "report", "--preset", "smoke", "--out", tmp_path / "none")
    assert status == 1
    assert "run `foof reproduce --preset smoke` first" in err
    assert not (tmp_path / "none").exists()


def test_records_of_other_presets_do_not_hide_those_of_the_package(capsys, tmp_path):
    with Store(tmp_path / "records.sqlite") as store:
        store.put(Record(Setting(), "finished"))
    status, said, _ = foof(capsys, "claims", "--out", tmp_path)
    assert (status, "No records of the preset quick in" in said) == (0, True)
    assert "holds" in said


@pytest.mark.parametrize(("strict", "status"), [(False, 0), (True, 1)])
def test_strict_makes_a_claim_that_does_not_hold_an_error(capsys, monkeypatch, tmp_path, strict, status):
    outcome = experiments.outcome(experiments.experiments_of(PRESETS["smoke"])["toy"], PRESETS["smoke"], {})
    fails = replace(outcome, verdicts=[replace(v, ruling=Ruling.FAILS) for v in outcome.verdicts])
    monkeypatch.setattr(cli, "conduct", lambda *_: [fails])
    assert foof(capsys, "reproduce", "toy", "--preset", "smoke", "--out", tmp_path, *(["--strict"] if strict else []))[0] == status


def test_a_damaged_store_is_told_in_one_line(capsys, tmp_path):
    with Store(tmp_path / "records.sqlite") as store:
        store.put_all(Record(Setting(seed=i), "finished", {"step": list(range(200))}) for i in range(200))
    whole = (tmp_path / "records.sqlite").read_bytes()
    (tmp_path / "records.sqlite").write_bytes(whole[:8192] + b"x" * (len(whole) - 8192))
    status, _, err = foof(capsys, "claims", "--out", tmp_path)
    assert (status, "Traceback" in err, "should be a store of records" in err) == (1, False, True)


def test_export_without_records_or_folder_says_so(capsys, tmp_path):
    status, _, err = foof(capsys, "export", tmp_path / "x.csv", "--out", tmp_path)
    assert (status, list(tmp_path.iterdir())) == (1, [])
    assert "there are none; run `foof reproduce` first" in err
    with Store(tmp_path / "records.sqlite") as store:
        store.put(Record(Setting(), "finished"))
    status, _, err = foof(capsys, "export", tmp_path / "nowhere" / "x.csv", "--out", tmp_path)
    assert (status, "Traceback" in err, "nowhere" in err) == (1, False, True)


def test_data_lists_what_is_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FOOF_DATA", str(tmp_path))
    status, said, _ = foof(capsys, "data")
    assert status == 0
    assert "6,000" in said
    assert "not there" in said
    assert str(tmp_path) in said


def test_train_shows_one_run(capsys):
    options = ["--hidden", "8", "--steps", "5", "--option", "T=1"]
    status, said, _ = foof(capsys, "train", "foof", *options)
    assert status == 0
    assert "FOOF: finished" in said
    assert "test accuracy" in said
    momentum = ["--hidden", "8", "--steps", "5", "--lr", "0.01", "--option", "momentum=0.9"]
    assert "SGD + momentum: finished" in foof(capsys, "train", "sgd", *momentum)[1]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["train", "sdg"], 1, "no optimizer is called 'sdg'"),
        (["train", "sgd", "--damping", "1"], 1, "has no damping"),
        (["train", "sgd", "--lr", "-1"], 1, "lr must be a positive number"),
        (["train", "sgd", "--dataset", "mnits"], 1, "no data set is called 'mnits'"),
        (["train", "sgd", "--option", "momentum"], 2, "NAME=VALUE"),
        (["train", "sgd", "--option", "bogus=1"], 1, "SGD does not take the options {'bogus': 1}"),
        (["train", "sgd", "--hidden", "8,0"], 2, "positive whole numbers separated by commas, but '8,0'"),
        (["train", "sgd", "--hidden", "a"], 2, "positive whole numbers separated by commas, but 'a'"),
        (["sweep", "sgd", "--lr", "1:0.1"], 2, "low first, but '1:0.1' was given"),
        (["sweep", "foof", "--damping", "0:1"], 2, "--damping is LOW:HIGH"),
        (["sweep", "foof", "--damping", "0.05:1"], 1, "every power of ten that is 2 decades further"),
        (["sweep", "foof", "--damping", "0.01:0.1"], 1, "but 0.01 to 0.1 was given"),
        (["train", "natural", "--option", "fisher_batch=1.5"], 1, "fisher_batch should be a whole number, but it is 1.5"),
        (["train", "foof-per-datapoint", "--option", "momentum=0.9"], 1, "FOOF per datapoint does not take the options"),
        (["sweep", "sgd", "--lr", "abc"], 2, "--lr is LOW:HIGH or one value"),
        (["reproduce", "fig9"], 2, "no experiment and no claim of the preset quick is called 'fig9'"),
        (["reproduce", "--preset", "huge"], 2, "no preset is called 'huge'"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, arguments, status, said):
    code, _, err = foof(capsys, *arguments)
    assert code == status
    assert said in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_ctrl_c_says_how_to_continue(capsys, monkeypatch, tmp_path):
    def stopped(*_, **__):
        raise Interrupted(2, 5)

    monkeypatch.setattr(cli.sweep, "sweep", stopped)
    status, said, _ = foof(capsys, "reproduce", "--preset", "smoke", "--out", tmp_path)
    assert status == 130
    assert "2 of 5 runs are stored; the same command continues" in said


def test_explain_shows_the_network_of_the_study(capsys):
    status, said, _ = foof(capsys, "explain", "--hidden", "20,30")
    assert status == 0
    assert "3 of 3 trainable parameters covered" in said


def test_without_the_extra_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import foof.cli"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'foof[study]'" in done.stderr
