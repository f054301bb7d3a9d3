"""Records on disk: one SQLite file, one row per setting, written in one transaction each.

A process killed at any moment loses at most the run it was in. `dump` and `load_dump` move records to and from a
compact text form (gzip, one JSON object per line), which is what the repository carries.
"""

from __future__ import annotations

import csv
import gzip
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from foof.study.train.setting import Record, Setting

SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    key TEXT PRIMARY KEY,
    status TEXT NOT NULL,
    body TEXT NOT NULL,
    written TEXT NOT NULL DEFAULT (datetime('now'))
)
"""
DIGITS = 6  # significant digits in dumps: finer than any claim needs


class StoreError(RuntimeError):
    """A file that is no store of records, or one that SQLite cannot read or write."""


class Store:
    """The records of a study: `put`, `get`, `in`, `len`, iteration in order of writing. Use as a context manager."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # autocommit: every statement is its own transaction; timeout: a second writer waits for its turn
        self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None)
        self._execute(SCHEMA)

    def _execute(self, statement: str, values: tuple[str, ...] = ()) -> list[tuple]:
        try:
            return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.path} should be a store of records, but SQLite cannot use it ({error}). "
                f"Make room if the disk is full, or move the file away and run again, or name another."
            ) from error

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    def put(self, record: Record) -> None:
        """Write a record, in place of an earlier one of the same setting."""
        self._execute(
            "INSERT OR REPLACE INTO records (key, status, body) VALUES (?, ?, ?)",
            (record.key, record.status, json.dumps(record.to_dict(), allow_nan=False)),
        )

    def get(self, setting: Setting) -> Record | None:
        rows = self._execute("SELECT body FROM records WHERE key = ?", (setting.key,))
        return Record.from_dict(json.loads(rows[0][0])) if rows else None

    def __contains__(self, setting: Setting) -> bool:
        return bool(self._execute("SELECT 1 FROM records WHERE key = ?", (setting.key,)))

    def __len__(self) -> int:
        return self._execute("SELECT count(*) FROM records")[0][0]

    def __iter__(self) -> Iterator[Record]:
        for (body,) in self._execute("SELECT body FROM records ORDER BY written, rowid"):
            yield Record.from_dict(json.loads(body))

    def load_dump(self, path: Path | str, wanted: Callable[[Record], bool] = lambda record: True) -> int:
        """Add the records of a dump that are wanted and not here yet, all or none; returns how many there were."""
        return self.put_all(record for record in read_dump(path) if record.setting not in self and wanted(record))

    def put_all(self, records: Iterable[Record]) -> int:
        """Write records, all or none; returns how many."""
        new = list(records)
        self._execute("BEGIN")
        try:
            for record in new:
                self.put(record)
        except BaseException:
            self._execute("ROLLBACK")
            raise
        self._execute("COMMIT")
        return len(new)


def _rounded(x: Any) -> Any:
    if isinstance(x, float):
        return float(f"{x:.{DIGITS}g}")
    if isinstance(x, dict):
        # a setting is exact: rounding it would change its key
        return {k: v if k == "setting" else _rounded(v) for k, v in x.items()}
    return [_rounded(v) for v in x] if isinstance(x, list) else x


def dump(records: Iterable[Record], path: Path | str) -> None:
    """Write records as gzipped JSON lines, sorted by key: the same records give the same bytes."""
    rows = sorted((r.key, json.dumps(_rounded(r.to_dict()), separators=(",", ":"), sort_keys=True)) for r in records)
    text = "".join(f"{row}\n" for _, row in rows)
    Path(path).write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))


def read_dump(path: Path | str) -> Iterator[Record]:
    """The records of a dump, exact up to the digits it keeps."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield Record.from_dict(json.loads(line))
            except (KeyError, TypeError, ValueError) as error:
                raise StoreError(f"line {number} of {path} should be a record, but reading it failed ({error!r})") from error


def rows(records: Iterable[Record]) -> list[dict[str, Any]]:
    """One flat row per record: key, status, the setting's fields, final values and cost."""
    return [
        {
            "key": r.key,
            "status": r.status,
            **{k: json.dumps(v) if isinstance(v, list) else v for k, v in r.setting.to_dict().items()},
            **{f"final_{k}": v for k, v in r.final.items()},
            **{f"cost_{k}": v for k, v in r.cost.items()},
        }
        for r in records
    ]


def _one_type(values: list[Any]) -> list[Any]:
    """A column of text and numbers, as λ with its "auto", becomes text."""
    return [v if v is None else str(v) for v in values] if any(isinstance(v, str) for v in values) else values


def export(records: Iterable[Record], path: Path | str) -> None:
    """Write `rows` to a `.csv` or `.parquet` file (the latter needs pyarrow: `pip install 'foof[parquet]'`)."""
    path, table = Path(path), rows(records)
    names = list(dict.fromkeys(name for row in table for name in row))
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, names)
            writer.writeheader()
            writer.writerows(table)
    elif path.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ModuleNotFoundError as error:
            raise ValueError("a .parquet file needs pyarrow, which is missing: pip install 'foof[parquet]'") from error
        columns = {name: _one_type([row.get(name) for row in table]) for name in names}
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    else:
        raise ValueError(f"records can be exported to .csv or .parquet, not to {path.name!r}")
