"""A character-level GPT trained by AdamW, Muon, FOOF, FOOF + AdamW and FOOF + Muon: ``python benchmarks/char_gpt.py [steps]``.

The text is the Python reference manual (``examples/small_gpt.py``). Each method gets the same number of steps, the same batches and
initialisation, a linear warm-up over 5 % of the steps and a cosine to a tenth of the learning rate, and three learning rates (a
factor of three apart) to choose from by validation loss; where the best is at an edge, the search goes on beyond it. Muon steps the
matrices inside the blocks; embedding, head and norms are AdamW's there, as in its own recipe. Damping is not
part of the search: 0.1 per token for FOOF (0.01 diverged in 80 steps), 0.1 relative under AdamW and Muon (better than 0.01 and
0.001 in 80 steps of AdamW). Muon's Newton-Schulz iteration runs in float32 here: its bfloat16 is emulated on many CPUs, and would
take ten times the time of the rest.

Every run is added to ``benchmarks/char_gpt.json``; ``--table`` prints that as a table.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from small_gpt import GPT, batch, loss_of, tokens

import foof

WIDTH, DEPTH, HEADS, LENGTH, SIZE = 160, 4, 4, 64, 8
RESULTS = Path(__file__).with_suffix(".json")
Optimizers = list[torch.optim.Optimizer]


def orthogonalise(G: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """What torch.optim.Muon does in bfloat16, in the precision of G."""
    a, b, c = coefficients
    X = G.T if G.size(0) > G.size(1) else G
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.T if G.size(0) > G.size(1) else X


torch.optim._muon._zeropower_via_newtonschulz = orthogonalise  # type: ignore[attr-defined]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and name.startswith("blocks")]


def others(model: nn.Module) -> list[nn.Parameter]:
    inside = {id(p) for p in matrices(model)}
    return [p for p in model.parameters() if id(p) not in inside]


def adamw(params: Iterator[nn.Parameter] | list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), weight_decay=0.01)


def muon(model: nn.Module, lr: float) -> Optimizers:
    return [torch.optim.Muon(matrices(model), lr=lr, weight_decay=0.01), adamw(others(model), 3e-3)]


def foof_muon(model: nn.Module, lr: float) -> Optimizers:
    first, second = muon(model, lr)
    outside = ["embed", "place", "head"]
    return [foof.precondition(first, model, damping=0.1, relative=True, T=20, exclude=outside), second]


METHODS: dict[str, tuple[Callable[[nn.Module, float], Optimizers], tuple[float, ...]]] = {
    "AdamW": (lambda m, lr: [adamw(m.parameters(), lr)], (1e-3, 3e-3, 1e-2)),
    "Muon": (muon, (3e-3, 1e-2, 3e-2)),
    "FOOF": (
        lambda m, lr: [foof.FOOF(m, lr=lr * LENGTH, damping=0.1 * LENGTH, momentum=0.9, T=20, rest={"name": "adamw", "lr": 3e-3})],
        (3e-3, 1e-2, 3e-2),
    ),
    "FOOF + AdamW": (
        lambda m, lr: [foof.precondition(adamw(m.parameters(), lr), m, damping=0.1, relative=True, T=20)], (1e-3, 3e-3, 1e-2)
    ),
    "FOOF + Muon": (foof_muon, (3e-3, 1e-2, 3e-2)),
}  # fmt: skip


def factor(step: int, steps: int) -> float:
    """Of the learning rate: linear warm-up, then a cosine down to a tenth."""
    warm = max(1, steps // 20)
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


def run(name: str, lr: float, steps: int, seed: int = 0) -> dict[str, object]:
    train, validation, vocabulary = tokens()
    torch.manual_seed(seed)
    model = GPT(vocabulary, WIDTH, DEPTH, HEADS, LENGTH)
    optimizers = METHODS[name][0](model, lr)
    schedules = [torch.optim.lr_scheduler.LambdaLR(opt, lambda step: factor(step, steps)) for opt in optimizers]
    order, start, cpu, last = torch.Generator().manual_seed(seed + 1), time.perf_counter(), time.process_time(), []
    for step in range(steps):
        loss = loss_of(model, *batch(train, SIZE, LENGTH, order))
        for opt in optimizers:
            opt.zero_grad()
        loss.backward()
        for opt, schedule in zip(optimizers, schedules, strict=True):
            opt.step()
            schedule.step()
        if step >= steps - 50:
            last.append(loss.item())
        if not math.isfinite(loss.item()) or loss.item() > 20:
            last = [math.nan]
            break
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    with torch.no_grad():
        held = [loss_of(model, *batch(validation, 32, LENGTH, torch.Generator().manual_seed(k))).item() for k in range(16)]
    return {
        "method": name, "lr": lr, "steps": steps, "seed": seed, "parameters": sum(p.numel() for p in model.parameters()),
        "batch": [SIZE, LENGTH], "train_loss": round(sum(last) / len(last), 4), "validation_loss": round(sum(held) / len(held), 4),
        "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1), "torch": torch.__version__,
    }  # fmt: skip


def load() -> list[dict[str, object]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def measured(name: str, lr: float, steps: int) -> float:
    """The validation loss of one run, from the file if it is there; infinite if the run diverged."""
    records = load()
    for record in records:
        if (record["method"], record["lr"], record["steps"]) == (name, lr, steps):
            break
    else:
        record = run(name, lr, steps)
        RESULTS.write_text(json.dumps([*load(), record], indent=1) + "\n")
        print(record, flush=True)
    loss = float(record["validation_loss"])  # type: ignore[arg-type]
    return loss if math.isfinite(loss) and math.isfinite(float(record["train_loss"])) else math.inf  # type: ignore[arg-type]


def search(name: str, steps: int) -> None:
    """Three learning rates, and on beyond an edge while that is the best (at most twice)."""
    found = {lr: measured(name, lr, steps) for lr in METHODS[name][1]}
    for _ in range(2):
        best = min(found, key=found.__getitem__)
        if best not in (min(found), max(found)):
            return
        further = float(f"{best * (3.0 if best == max(found) else 1 / 3.0):.1g}")
        found[further] = measured(name, further, steps)


def table(steps: int) -> None:
    print(f"{'method':<14}{'best lr':>9}{'validation':>12}{'training':>10}{'CPU s':>8}   validation loss of each lr")
    for name in METHODS:
        runs = sorted((r for r in load() if r["method"] == name and r["steps"] == steps), key=lambda r: r["lr"])  # type: ignore[arg-type, return-value]
        good = [r for r in runs if r["train_loss"] == r["train_loss"]]
        if good:
            best = min(good, key=lambda r: r["validation_loss"])  # type: ignore[arg-type, return-value]
            each = ", ".join(f"{r['lr']:g}: {r['validation_loss']}" for r in runs)
            print(f"{name:<14}{best['lr']:>9}{best['validation_loss']:>12}{best['train_loss']:>10}{best['cpu_seconds']:>8}   {each}")


if __name__ == "__main__":
    count = next((int(a) for a in sys.argv[1:] if a.isdigit()), 150)
    if "--table" not in sys.argv:
        for method in METHODS:
            search(method, count)
    table(count)
