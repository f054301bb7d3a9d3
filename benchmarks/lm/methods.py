"""The methods that are compared, by name: how the optimizers are made for a learning rate, and the learning rates that are tried.

Each method has three learning rates to choose from, its authors' or this field's usual one in the middle. What is not a matrix
inside the network (embeddings, norms, and under Muon the head) is stepped by AdamW at lr 3e-3 in every method of Muon's kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from model import Size
from neurons import MatrixOptimizer, linears
from torch import nn

import foof

Optimizers = list[torch.optim.Optimizer]
BETAS, DECAY, OTHER_LR = (0.9, 0.95), 0.01, 3e-3
ADAM_LRS, MUON_LRS = (1e-3, 3e-3, 1e-2), (0.01, 0.02, 0.04)


@dataclass(frozen=True)
class Method:
    make: Callable[[nn.Module, float, Size], Optimizers]
    lrs: tuple[float, ...]


def nowhere(name: str) -> bool:
    return False


def everywhere(name: str) -> bool:
    return True


def ends(*names: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(names)


def adamw(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=BETAS, weight_decay=DECAY)


def others(model: nn.Module, taken: torch.optim.Optimizer) -> list[nn.Parameter]:
    inside = {id(p) for group in taken.param_groups for p in group["params"]}
    return [p for p in model.parameters() if id(p) not in inside]


def muon(on_neurons: Callable[[str], bool] = everywhere, **options: Any) -> Method:
    """Muon for the matrices of the blocks, AdamW for the others."""

    def make(model: nn.Module, lr: float, size: Size) -> Optimizers:
        first = MatrixOptimizer(linears(model, ["blocks"]), "muon", on_neurons, lr, DECAY, **options)
        return [first, adamw(others(model, first), OTHER_LR)]

    return Method(make, MUON_LRS)


def muon_with_head(on_neurons: Callable[[str], bool]) -> Method:
    """Muon as it is, or on neurons, and the head by Adam in the eigenbasis of its inputs."""

    def make(model: nn.Module, lr: float, size: Size) -> Optimizers:
        first = MatrixOptimizer(linears(model, ["blocks"]), "muon", on_neurons, lr, DECAY)
        head = MatrixOptimizer(linears(model, ["head"]), "adam", everywhere, OTHER_LR, DECAY)
        left = {id(p) for p in others(model, first)} & {id(p) for p in others(model, head)}
        return [first, head, adamw([p for p in model.parameters() if id(p) in left], OTHER_LR)]

    return Method(make, MUON_LRS)


def adam_in_basis(on_neurons: Callable[[str], bool] = everywhere, **options: Any) -> Method:
    """AdamW, in the eigenbasis of Σ for the linear layers named; embeddings and norms by AdamW at the same learning rate."""

    def make(model: nn.Module, lr: float, size: Size) -> Optimizers:
        first = MatrixOptimizer(linears(model, ["blocks", "head"]), "adam", on_neurons, lr, DECAY, **options)
        return [first, adamw(others(model, first), lr)]

    return Method(make, ADAM_LRS)


def foof_(model: nn.Module, lr: float, size: Size) -> Optimizers:
    """As it comes: the learning rate is τ, by how much of their size a step moves a layer's outputs. Embeddings and head by AdamW."""
    return [foof.FOOF(model, max_change=lr)]


def soap(model: nn.Module, lr: float, size: Size) -> Optimizers:
    """From PyPI (``pip install --no-deps pytorch_optimizer==4.1.0``), at its authors' settings, which are its defaults."""
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=lr, betas=(0.95, 0.95), weight_decay=DECAY, precondition_frequency=10)]


def shampoo(model: nn.Module, lr: float, size: Size) -> Optimizers:
    """From PyPI as above: its scalable form, grafted to RMSProp, momentum as a moving average, new roots every 20 steps."""
    from pytorch_optimizer import ScalableShampoo
    from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

    return [ScalableShampoo(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=DECAY, decoupled_weight_decay=True,
                            preconditioning_compute_steps=20, moving_average_for_momentum=True,
                            graft_type=LayerWiseGrafting.RMSPROP)]  # fmt: skip


METHODS: dict[str, Method] = {
    "AdamW": Method(lambda model, lr, size: [adamw(model.parameters(), lr)], ADAM_LRS),
    "AdamW in the eigenbasis": adam_in_basis(),
    "AdamW, head in the eigenbasis": adam_in_basis(ends("head")),
    "Muon": muon(nowhere),
    "Muon on neurons": muon(),
    "Muon, head in the eigenbasis": muon_with_head(nowhere),
    "Muon on neurons, head in the eigenbasis": muon_with_head(everywhere),
    "foof.Muon": Method(lambda model, lr, size: [foof.Muon(model, lr, weight_decay=DECAY)], MUON_LRS),  # the library's, T = 32
    "foof.AdamW": Method(lambda model, lr, size: [foof.AdamW(model, lr, weight_decay=DECAY)], ADAM_LRS),
    "FOOF": Method(foof_, (0.01, 0.03, 0.1)),
    "SOAP": Method(soap, ADAM_LRS),
    "Shampoo": Method(shampoo, ADAM_LRS),
    # Ablations of Muon on neurons (ridge 0.1, power −1, T = 16, all tokens, all layers of the blocks, on the momentum)
    "Muon, neuron gradients into momentum": muon(where="gradient"),
    "Muon on neurons, ridge 0.02": muon(ridge=0.02),
    "Muon on neurons, ridge 1": muon(ridge=1.0),
    "Muon on neurons, power -1/2": muon(power=-0.5),
    "Muon on neurons, T = 32": muon(T=32),
    "Muon on neurons, T = 64": muon(T=64),
    "Muon on neurons, one token in four": muon(stride=4),
    "Muon on neurons, square blocks": muon(square=True),
    "Muon on neurons, attention only": muon(ends("qkv", "out")),
    "Muon on neurons, MLP only": muon(ends("up", "down")),
}  # fmt: skip
