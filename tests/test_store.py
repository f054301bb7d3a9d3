"""The store: what was put is got, whatever happens to the process."""

import csv
import math
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foof.study.search.store import Store, StoreError, dump, export, read_dump
from foof.study.train.setting import Record, Setting

number = st.floats(allow_nan=False)
finite = st.floats(allow_nan=False, allow_infinity=False)
value = st.booleans() | finite | st.text(max_size=5)


@st.composite
def records(draw):
    setting = Setting(
        lr=draw(st.floats(1e-6, 1e3)), damping=draw(st.none() | st.floats(1e-6, 1e6)), seed=draw(st.integers(0, 9)),
        hidden=tuple(draw(st.lists(st.integers(1, 2000), max_size=4))),
        options=tuple(draw(st.dictionaries(st.text(max_size=5), value, max_size=3)).items()),
    )  # fmt: skip
    loss = draw(st.lists(number, max_size=5))
    status = draw(st.sampled_from(["finished", "diverged"]))
    return Record(setting, status, {"loss": loss}, {"train_loss": draw(number)}, {"seconds": 1.5}, {"torch": "2"})


def record(seed=0, loss=0.5):
    return Record(Setting(seed=seed), "finished", {"step": [1], "loss": [loss]}, {"train_loss": loss}, {"seconds": 2.0}, {})


@given(records())
def test_what_is_put_is_got(it):
    with Store(":memory:") as store:
        assert it.setting not in store
        store.put(it)
        assert store.get(it.setting) == it
        assert it.setting in store
        store.put(it)
        assert list(store) == [it]


def test_a_later_record_of_a_setting_replaces_the_earlier(tmp_path):
    with Store(tmp_path / "a" / "records.sqlite") as store:
        store.put(record(loss=0.5))
        store.put(record(loss=0.25))
        assert len(store) == 1
        assert store.get(Setting()).score == 0.25
        assert store.get(Setting(seed=9)) is None


def test_no_store_is_made_of_another_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("these are notes, not records " * 100)
    with pytest.raises(StoreError, match=r"notes\.txt should be a store.*move the file away"):
        Store(path)
    assert path.read_text().startswith("these are notes")


WRITER = """
import sys
from foof.study.train.setting import Record, Setting
from foof.study.search.store import Store
with Store(sys.argv[1]) as store:
    for seed in range(100_000):
        store.put(Record(Setting(seed=seed), "finished", {"loss": [0.5] * 500}, {"train_loss": 0.5}, {}, {}))
        print(seed, flush=True)
"""


@pytest.mark.parametrize("kill_after", [1, 7, 40])
def test_a_killed_writer_loses_nothing_it_had_written(tmp_path, kill_after):
    path = tmp_path / "records.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        for line in writer.stdout:
            if int(line) >= kill_after:
                break
        time.sleep(0.003 * kill_after % 0.01)
        writer.send_signal(signal.SIGKILL)
        seen = [kill_after, *(int(x) for x in writer.stdout.read().splitlines())]
    with Store(path) as store:
        assert [r.setting.seed for r in store] == list(range(len(store)))
        assert len(store) >= max(seen) + 1
        store.put(record(seed=10**6))  # and it goes on


def test_a_dump_is_the_same_bytes_for_the_same_records_and_keeps_keys(tmp_path):
    its = [record(seed, loss) for seed, loss in enumerate([1 / 3, 1e-9 / 7, math.inf])]
    dump(its, tmp_path / "a.jsonl.gz")
    dump(reversed(its), tmp_path / "b.jsonl.gz")
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()
    back = {r.key: r for r in read_dump(tmp_path / "a.jsonl.gz")}
    for it in its:
        assert back[it.key].score == pytest.approx(it.score, rel=1e-5)
    with Store(tmp_path / "records.sqlite") as store:
        store.put(its[0])
        assert store.load_dump(tmp_path / "a.jsonl.gz") == 2
        assert store.get(its[0].setting) == its[0]  # what was there stays, unrounded
        assert len(store) == 3


def test_a_damaged_dump_adds_nothing(tmp_path):
    import gzip

    dump([record()], tmp_path / "a.jsonl.gz")
    text = gzip.decompress((tmp_path / "a.jsonl.gz").read_bytes()) + b'{"status": "finished"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    with Store(tmp_path / "records.sqlite") as store:
        with pytest.raises(StoreError, match="line 2 of"):
            store.load_dump(tmp_path / "a.jsonl.gz")
        assert len(store) == 0


def test_export_to_csv_and_parquet(tmp_path):
    its = [record(0, 0.5), record(1, 0.25)]
    export(its, tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["seed"], r["final_train_loss"]) for r in rows] == [("0", "0.5"), ("1", "0.25")]
    parquet = pytest.importorskip("pyarrow.parquet")
    auto = Record(Setting(optimizer="foof", damping="auto"), "finished")
    export([*its, auto, Record(Setting(optimizer="foof", damping=0.5), "finished")], tmp_path / "r.parquet")
    table = parquet.read_table(tmp_path / "r.parquet")
    assert table["final_train_loss"].to_pylist() == [0.5, 0.25, None, None]
    assert table["damping"].to_pylist() == [None, None, "auto", "0.5"]
    with pytest.raises(ValueError, match=r"\.csv or \.parquet"):
        export(its, tmp_path / "r.xlsx")
