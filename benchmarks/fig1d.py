"""Fig. 1D: 1,000 random images of Fashion-MNIST, full batch, 100 steps, three hidden layers of 1,000, no biases.

    python benchmarks/fig1d.py --method natural-full --lr 1 --damping 0.1        # one run, added to fig1d.json
    python benchmarks/fig1d.py --table                                           # what has been run

The gradient, the Fisher (``natural-full``) and the inversion are exact: natural gradients without any approximation.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import foof
from foof.study.data import load
from foof.study.train.models import mlp

RESULTS = Path(__file__).with_suffix(".json")
PAPER = {"sgd+m": 0.01275, "natural-mc": 0.03596, "natural-full": 0.002798, "kfac": 4.58e-07}  # loss at update 99, figures.md


def optimizer(method: str, model: torch.nn.Module, lr: float, damping: float, seed: int, ema: float) -> Any:
    if method == "sgd+m":
        return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if method == "kfac":
        return foof.KFAC(model, lr=lr, damping=damping, ema=ema, T=1, generator=seed)
    return foof.NaturalGradient(model, lr=lr, damping=damping, fisher=method.removeprefix("natural-"), generator=seed)


def run(method: str, lr: float, damping: float, seed: int, images: int, width: int, steps: int, ema: float) -> dict[str, Any]:
    data, generator = load("fashion-mnist"), torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(data.train_x), generator=generator)[:images]
    x, y = data.train_x[chosen], data.train_y[chosen]
    model = mlp(784, [width] * 3, 10, generator)
    opt = optimizer(method, model, lr, damping, seed, ema)
    losses, start = [], time.perf_counter()
    for step in range(steps + 1):
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        losses.append(float(f"{loss.item():.4g}"))
        if step == steps or not loss.isfinite() or loss > 1e3:
            break
        if isinstance(opt, (foof.NaturalGradient, foof.KFAC)):
            opt.update_curvature(out)
        loss.backward()
        opt.step()
        opt.zero_grad()
    seconds = (time.perf_counter() - start) / max(1, len(losses) - 1)
    settings = {"method": method, "lr": lr, "damping": damping, "ema": ema, "seed": seed, "images": images, "width": width}
    return {**settings, "steps": len(losses) - 1, "seconds_per_step": round(seconds, 3), "loss": losses}


def table(runs: list[dict[str, Any]]) -> str:
    """The best end value of each method at full size (the paper's selection), of how many settings, and how many of them diverged."""
    lines = ["| method | lr | λ | settings (diverged) | seeds | loss at update 99 | paper | s/step |", "|---|---|---|---|---|---|---|---|"]
    for method, paper in PAPER.items():
        mine = [r for r in runs if r["method"] == method and r["images"] == r["width"] == 1000]
        finished = [r for r in mine if r["steps"] >= 99]
        if not finished:
            continue
        best = min(finished, key=lambda r: r["loss"][99])
        settings = {(round(r["lr"], 9), r["damping"], r.get("ema") or 0.0) for r in mine}
        good = {(round(r["lr"], 9), r["damping"], r.get("ema") or 0.0) for r in finished}
        lines.append(
            f"| {method} | {best['lr']:g} | {best['damping']:g} | {len(settings)} ({len(settings - good)}) "
            f"| {len({r['seed'] for r in finished})} | {best['loss'][99]:.3g} | {paper:.3g} | {best['seconds_per_step']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=list(PAPER))
    parser.add_argument("--lr", type=float, nargs="+", default=[0.1])
    parser.add_argument("--damping", type=float, nargs="+", default=[1.0])
    parser.add_argument("--ratio", action="store_true", help="lr is given as a multiple of the damping")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ema", type=float, default=0.0, help="of KFAC's factors; 0: subsampled, the batch at hand alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dry", action="store_true", help="print, keep nothing")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for damping in args.damping if args.method else []:
        for lr in args.lr:
            record = run(args.method, lr * damping if args.ratio else lr, damping, args.seed, args.images, args.width, args.steps, args.ema)
            losses = record["loss"]
            print(args.method, f"lr {record['lr']:g} λ {damping:g}", *(f"{losses[i]:.3g}" for i in range(0, len(losses), 10)),
                  f"end {losses[-1]:.3g} {record['seconds_per_step']} s/step", flush=True)  # fmt: skip
            if not args.dry:
                runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
                RESULTS.write_text("[\n" + ",\n".join(json.dumps(r) for r in [*runs, record]) + "\n]\n")
    if args.table:
        print(table(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
