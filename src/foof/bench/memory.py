"""Peak memory of training: each method in a process of its own, which does nothing else. ``python -m foof.bench.memory CASE METHOD``."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from foof.bench.cases import CASES, Case
from foof.bench.machine import elsewhere, growth
from foof.bench.methods import BASELINE, METHODS, Training

T, S, STEPS = 2, 1, 3  # gathered, inverted and used


def peak(case: Case, name: str) -> int:
    """Bytes by which memory grows while a network is trained from its making on, its schedule run through once."""

    def train(case: Case) -> None:
        training = Training(BASELINE if name == BASELINE.name else METHODS[name], replace(case, T=T, S=S))
        for x, y in case.batches(STEPS):
            training.step(x, y)
        training.close()

    train(case)  # what is imported and compiled once is nobody's memory: kernels of oneDNN, half a mebibyte for each shape of a product
    gc.collect()
    return growth(lambda: train(case), torch.device(case.device))


def unit(case: Case, names: Iterable[str], threads: int) -> dict[str, Any]:
    """One case as a record: bytes beside SGD with momentum."""

    def peak_of(name: str) -> int:
        return int(elsewhere("foof.bench.memory", case.name, name, case.device, threads))

    plain, found, failed = peak_of(BASELINE.name), dict[str, int](), dict[str, str]()
    for name in names:
        try:
            found[name] = peak_of(name) - plain
        except RuntimeError as problem:
            failed[name] = str(problem)[:300]
    title = case.title.replace(f"T = {case.T}, S = {case.S}", f"T = {T}, S = {S}")
    return {"kind": "memory", "case": case.name, "title": title, "sgd": plain, "beside": found, "failed": failed}


if __name__ == "__main__":
    case_name, method_name, device, threads_ = sys.argv[1:]
    torch.set_num_threads(int(threads_))
    print(json.dumps(peak(replace(CASES[case_name], device=device), method_name)))
