"""The flops that a step must do, what the machine's products deliver, and what step that predicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from foof import cost
from foof.bench.cases import Case, fully_connected
from foof.bench.machine import seconds_in_turns
from foof.bench.methods import BASELINE, METHODS, Training
from foof.covering import covered_layers
from foof.linalg import WIDE, damped_cholesky, damped_inverse, product, solve_right, times_transposed

PREDICTED = ("FOOF", "KFAC")


def calibrate(device: torch.device) -> cost.Machine:
    """How fast this machine multiplies, moves, inverts and calls: each from a piece of a step, in turns, in a few seconds."""
    rows, W = torch.randn(100, 1000, device=device), torch.randn(1000, 1000, device=device)
    L = damped_cholesky(W @ W.mT / 1000, 1.0)
    update = torch.optim.SGD([nn.Parameter(W.clone()) for _ in range(3)], lr=1e-9, momentum=0.9)
    for p in update.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    small = replace(fully_connected(16, 4), T=10**6, S=1, device=str(device))  # where there is nothing to compute
    (x, y), *_ = small.batches(1)
    sgd, foof = Training(BASELINE, small), Training(METHODS["FOOF"], small)
    narrow, broad = _moment(500, device), _moment(1500, device)
    seconds = seconds_in_turns(
        {
            "products": lambda: (rows @ W.mT, rows @ W, rows.mT @ rows), "own": torch.no_grad()(lambda: times_transposed(rows, W)),
            "gradients": torch.no_grad()(lambda: product(rows.mT, rows)), "turn": lambda: rows.mT.contiguous(),
            "solve": lambda: solve_right(rows, L), "update": update.step, "anew": lambda: torch.empty(4000, 4000, device=device).zero_(),
            "invert 500": lambda: damped_inverse(narrow, 1.0), "invert 1500": lambda: damped_inverse(broad, 1.0),
            "factor 500": lambda: damped_cholesky(narrow, 1.0), "factor 1500": lambda: damped_cholesky(broad, 1.0),
            "SGD": lambda: sgd.step(x, y), "FOOF": lambda: foof.step(x, y),
        }, device
    )  # fmt: skip
    sgd.close()
    foof.close()
    work, flops = work_of(small), 2 * 100 * 1000**2
    turn = min(seconds["turn"], seconds["gradients"] / 2) if WIDE and device.type == "cpu" else 0.0  # by oneDNN
    memory = 8 * 3 * W.numel() * cost.FLOAT / seconds["update"]
    inverse, inverse_entry = _cubic(seconds["invert 500"], seconds["invert 1500"])
    factor, factor_entry = _cubic(seconds["factor 500"], seconds["factor 1500"])
    return cost.Machine(
        products=3 * flops / seconds["products"], own_products=flops / seconds["own"],
        gradients=flops / (seconds["gradients"] - turn), turning=turn / rows.numel(), solves=flops / seconds["solve"], memory=memory,
        pages=4 * 4000**2 / seconds["anew"], inverse=inverse, inverse_bytes=inverse_entry * memory,
        factor=factor, factor_bytes=factor_entry * memory,
        operation=seconds["SGD"] / work.operations, tap=max(seconds["FOOF"] - seconds["SGD"], 0.0) / len(work.layers),
    )  # fmt: skip


def _cubic(at_500: float, at_1500: float) -> tuple[float, float]:
    """The rate and the seconds per entry of ``t = m³ / rate + m² · per_entry``, from two times; the second part is at most two thirds at
    1,500, on a busy machine, too.
    """
    cubes = at_500 / 500**3, at_1500 / 1500**3
    per_entry = min(max((cubes[0] - cubes[1]) / (1 / 500 - 1 / 1500), 0.0), 1000 * cubes[1])
    return 1 / (cubes[1] - per_entry / 1500), per_entry


def _moment(m: int, device: torch.device) -> torch.Tensor:
    A = torch.randn(m, 2 * m, device=device)
    return A @ A.mT / m


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
