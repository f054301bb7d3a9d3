"""KFAC's dampings on Fashion-MNIST (Fig. 3A), 1,800 steps: ``python benchmarks/kfac_damping.py NAME[:LR:DAMPING] ...``.

MLP 784-1000-1000-1000-10 without biases, batch 100, the paper's preprocessing, factors inverted every T (10) steps from data of
the 10 steps before, initialised from 50 batches: from 11, as in the released code, standard damping diverges at once at its best
(lr, λ). (For T > 10: by the library's own start, inversions at growing intervals.) LR and DAMPING in the paper's scale, which at
batch B is B times the library's. NAME is one of

- ``heuristic``: Eq. (4), at the paper's (0.3, 1);
- ``standard``: Eq. (3), solved exactly;
- ``transposed``: Eq. (3) with the released code's rotations, at the paper's (0.1, 1): a counter-example, not in the library;
- ``drop-scaled``, ``drop-rescaled``: without the second factor;
- ``foof`` (30, 100) and ``sgd`` with momentum (0.01, no damping).

Each run is added to ``benchmarks/kfac_damping.json``; ``--table`` prints that as a table.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from timing import mlp
from torch import Tensor, nn

import foof
from foof.curvature import EigenFactor
from foof.optim import kfac
from foof.study.data import load

STEPS, BATCH, INITIAL = 1800, 100, 50
RESULTS = Path(__file__).with_suffix(".json")
PUBLISHED = {"heuristic": (0.3, 1.0), "transposed": (0.1, 1.0), "standard": (0.03, 0.1), "foof": (30.0, 100.0), "sgd": (0.01, 0.0),
             "drop-scaled": (0.3, 1.0), "drop-rescaled": (0.3, 1.0)}  # fmt: skip


class Transposed(EigenFactor):
    """The released code's rotation: ``U_Eᵀ [(U_E Eᵀ A U_A) / (s_E s_Aᵀ + λ)] U_Aᵀ``."""

    def left(self, X: Tensor) -> Tensor:
        return X @ self.U_E.mT

    def finish(self, G: Tensor) -> Tensor:
        assert self.U_A is not None
        return self.U_E.mT @ (G / (self.s_E.unsqueeze(-1) * self.s_A.unsqueeze(-2) + self.damping)) @ self.U_A.mT


kfac.FACTORS["transposed", "keep"] = Transposed


def make(name: str, lr: float, damping: float, T: int, model: nn.Module, seed: int) -> torch.optim.Optimizer:
    """The optimizer, from the paper's lr and λ."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    scaled: dict[str, Any] = {"lr": lr / BATCH, "damping": damping / BATCH, "T": T}
    if name == "foof":
        return foof.FOOF(model, **scaled)
    mode, second = ("heuristic", name) if name.startswith("drop") else (name, "keep")
    return foof.KFAC(model, damping_mode=mode, second_factor=second, generator=seed, **scaled)


def train(name: str, lr: float, damping: float, T: int, seed: int, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """One run: the mean loss of the steps 800-900 and 1,700-1,800, and the settings it belongs to."""
    torch.manual_seed(seed)
    model = mlp()
    order = torch.Generator().manual_seed(seed + 1)
    opt = make(name, lr, damping, T, model, seed)
    if name != "sgd" and T <= 10:  # for longer periods the library's own start, with inversions at growing intervals, is safer
        opt.initialise([images[torch.randint(len(images), (BATCH,), generator=order)] for _ in range(INITIAL)])
    losses: list[float] = []
    start = time.perf_counter()
    while len(losses) < STEPS and (not losses or math.isfinite(losses[-1])):
        for batch in torch.randperm(len(images), generator=order).split(BATCH):
            opt.zero_grad()
            out = model(images[batch])
            if name != "sgd":
                opt.update_curvature(out)
            loss = nn.functional.cross_entropy(out, labels[batch])
            loss.backward()
            opt.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                break
    end = statistics.mean(losses[1700:1800]) if len(losses) >= STEPS else float("inf")
    middle = statistics.mean(losses[800:900]) if len(losses) >= 900 else float("inf")
    return {"name": name, "lr": lr, "damping": damping, "seed": seed, "T": T, "initial": INITIAL,
            "loss_800_900": middle, "loss_1700_1800": end,
            "seconds": round(time.perf_counter() - start, 1), "torch": torch.__version__, "foof": foof_version()}  # fmt: skip


def foof_version() -> str:
    import subprocess

    here = Path(__file__).parent
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()


def record(run: dict[str, Any]) -> None:
    """Add a run to the results, in place of an earlier one of the same setting; one process at a time."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _record(run)


def _record(run: dict[str, Any]) -> None:
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    same = ("name", "lr", "damping", "seed", "T")
    runs = [r for r in runs if any(r[k] != run[k] for k in same)] + [run]
    runs.sort(key=lambda r: [r[k] for k in same])
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(r) for r in runs) + "\n]\n")


def table() -> str:
    """Markdown: every setting with its mean and spread over seeds."""
    found: dict[tuple[str, float, float, int], list[float]] = {}
    for run in json.loads(RESULTS.read_text()):
        found.setdefault((run["name"], run["lr"], run["damping"], run["T"]), []).append(run["loss_1700_1800"])
    lines = ["| method | lr (paper's scale) | λ (paper's scale) | T | seeds | loss, steps 1,700-1,800 |", "|---|---|---|---|---|---|"]
    for (name, lr, damping, T), ends in sorted(found.items()):
        spread = f" ± {statistics.stdev(ends):.4f}" if len(ends) > 1 else ""
        lines.append(f"| {name} | {lr:g} | {damping:g} | {T} | {len(ends)} | {statistics.mean(ends):.4f}{spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="NAME[:LR:DAMPING]")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--T", type=int, default=10)
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table())
        return
    data = load("fashion-mnist")
    images, labels = data.train_x.flatten(1), data.train_y
    for text in args.runs or list(PUBLISHED):
        name, *numbers = text.split(":")
        lr, damping = map(float, numbers) if numbers else PUBLISHED[name]
        for seed in args.seeds:
            run = train(name, lr, damping, args.T, seed, images, labels)
            record(run)
            print(f"{name:<14} lr {lr:g} λ {damping:g} seed {seed}: {run['loss_1700_1800']:.4f} ({run['seconds']} s)", flush=True)


if __name__ == "__main__":
    main()
