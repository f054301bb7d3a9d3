"""The flops that a step must do, what the machine's products deliver, and what step that predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from foof import cost
from foof.bench.cases import Case, fully_connected
from foof.bench.machine import fastest
from foof.bench.methods import BASELINE, METHODS, Training
from foof.covering import covered_layers
from foof.linalg import damped_cholesky, damped_inverse, solve_right, times_transposed

PREDICTED = ("FOOF", "KFAC")


def calibrate(device: torch.device) -> cost.Machine:
    """How fast this machine multiplies, moves, inverts and calls: each from a piece of a step, in a few seconds."""
    rows, W = torch.randn(100, 1000, device=device), torch.randn(1000, 1000, device=device)
    multiplied = fastest(lambda: (rows @ W.mT, rows @ W, rows.mT @ rows), device)
    with torch.no_grad():
        own = fastest(lambda: times_transposed(rows, W), device)
        L = damped_cholesky(W @ W.mT / 1000, 1.0)
        solved = fastest(lambda: solve_right(rows, L), device)
    update = torch.optim.SGD([nn.Parameter(W.clone()) for _ in range(3)], lr=1e-9, momentum=0.9)
    for p in update.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    moved = fastest(update.step, device)
    anew = fastest(lambda: torch.empty(4000, 4000, device=device).zero_(), device)
    inverted = {m: _inversion(m, device) for m in (500, 1500)}
    memory = 8 * 3 * W.numel() * cost.FLOAT / moved
    per_entry = (inverted[500] / 500**3 - inverted[1500] / 1500**3) / (1 / 500 - 1 / 1500)  # t = m³ / rate + m² · per_entry
    rate = 1 / (inverted[1500] / 1500**3 - per_entry / 1500)
    plain, tapped, work = _small(device)
    return cost.Machine(
        products=3 * 2 * 100 * 1000**2 / multiplied, own_products=2 * 100 * 1000**2 / own, solves=2 * 100 * 1000**2 / solved, memory=memory,
        pages=4 * 4000**2 / anew, inverse=rate, inverse_bytes=max(per_entry, 0.0) * memory, operation=plain / work.operations,
        tap=max(tapped - plain, 0.0) / len(work.layers),
    )  # fmt: skip


def _inversion(m: int, device: torch.device) -> float:
    S = torch.randn(m, 2 * m, device=device)
    S = S @ S.mT / m
    return fastest(lambda: damped_inverse(S, 1.0), device, 0.5)


def _small(device: torch.device) -> tuple[float, float, cost.Work]:
    """Seconds of a step of SGD and of FOOF where there is nothing to compute, and the work."""
    case = replace(fully_connected(16, 4), device=str(device))
    (x, y), *_ = case.batches(1)
    seconds = []
    for method in (BASELINE, METHODS["FOOF"]):
        training = Training(method, replace(case, T=10**6, S=1))
        training.step(x, y)
        seconds.append(fastest(lambda training=training: training.step(x, y), device))  # type: ignore[misc]
        training.close()
    return seconds[0], seconds[1], work_of(case)


def work_of(case: Case) -> cost.Work:
    """The work of one forward pass of a case."""
    model, ((x, _), *_) = case.model(), case.batches(1)
    exclude = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return cost.work_of(model, covered_layers(model, exclude)[0], x)


def predictions(case: Case, machine: cost.Machine) -> dict[str, dict[str, float]]:
    """For FOOF and KFAC the ratio to SGD and the flops of a step; for SGD its seconds and flops."""
    work = work_of(case)
    found = {BASELINE.name: {"flops": cost.flops(work, "SGD", case.T, case.S), "seconds": cost.sgd_seconds(work, machine)}}
    for method in PREDICTED:
        ratio = cost.ratio(work, machine, method, case.T, case.S)
        found[method] = {"ratio": ratio, "flops": cost.flops(work, method, case.T, case.S)}
    return found


def memory(case: Case) -> dict[str, float]:
    """Bytes beside SGD by the formula, for FOOF and KFAC; nothing for networks with convolutions, which need room for patches."""
    if any(isinstance(module, nn.Conv2d) for module in case.model().modules()):
        return {}
    work = work_of(case)
    return {method: cost.memory(work, method) for method in PREDICTED}


def beside(record: dict[str, Any], predicted: dict[str, dict[str, float]], machine: cost.Machine) -> dict[str, Any]:
    """A record of steps with what was predicted, and the part of the machine's product rate that each reaches."""
    reached = {
        name: of["flops"] / (record["methods"][name]["mean_ms"] / 1e3 * machine.products)
        for name, of in predicted.items() if name in record["methods"]
    }  # fmt: skip
    return {**record, "predicted": predicted, "reached": reached}
