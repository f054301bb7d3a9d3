"""Records: one JSON line for each unit that was measured, with the machine and the versions it was measured on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from foof.bench.machine import environment

Record = dict[str, Any]
FORMAT = 1


def read(path: Path) -> list[Record]:
    """All records of a file; none where there is no file."""
    if not path.exists():
        return []
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(
                f"{path}, line {number}: a record of `foof bench` in format {FORMAT} was needed; take the line out, or name another file"
            )
        records.append(record)
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    """All of these, in place of what is there; whoever is stopped in between leaves that."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".part")
    beside.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records), encoding="utf-8")
    beside.replace(path)


class Store:
    """The records of one run. A unit that is there for this machine, these versions and this setup is not measured again."""

    def __init__(self, path: Path, setup: Record, fresh: bool = False) -> None:
        self.path, self.setup = path, _plain({"format": FORMAT, "setup": setup, **environment()})
        read(path)  # or an error, before anything is measured
        self.fresh = set[str]() if fresh else None  # units of this very run, if earlier ones do not count

    def protect(self, units: Iterable[str]) -> None:
        """Raise a ``ValueError`` where a run that is quick, or of some rounds or methods, would replace what a full one has measured."""
        if _full(self.setup["setup"]):
            return
        held = {record["unit"] for record in read(self.path) if _full(record["setup"])}.intersection(units)
        if held:
            raise ValueError(
                f"{self.path} has {len(held)} of these measurements of a full run ({', '.join(sorted(held)[:3])}), which this would "
                f"replace: name another file with --out, or leave out --quick, --rounds and --method."
            )

    def get(self, unit: str, timed: bool = True) -> Record | None:
        """The record of a unit, if it holds for this run. What is not ``timed`` holds on any machine."""
        if timed and self.fresh is not None and unit not in self.fresh:
            return None
        same = [r for r in read(self.path) if r["unit"] == unit and (not timed or all(r[key] == self.setup[key] for key in self.setup))]
        return same[-1] if same else None

    def measured(self, unit: str, measure: Callable[[], Record], timed: bool = True) -> tuple[Record, bool]:
        """The record of a unit, and whether it was measured just now: it then stands in place of any older one."""
        if known := self.get(unit, timed):
            return known, False
        start = time.time()
        record = {"unit": unit, **self.setup, **_plain(measure()), "taken": round(time.time() - start, 1)}
        record["when"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start))
        write(self.path, [*(r for r in read(self.path) if r["unit"] != unit), record])
        if self.fresh is not None:
            self.fresh.add(unit)
        return record, True


def _full(setup: Record) -> bool:
    """Of all methods, in all their rounds?"""
    return not (setup["quick"] or setup["rounds"] or setup["methods"])


def _plain(value: Any) -> Any:
    """What JSON can say, numbers to six digits: NaN and infinities become null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
