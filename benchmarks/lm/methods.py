"""The methods that are compared, by name: how the optimizers are made for a learning rate and a value of the method's main knob, and
what is tried of both.

Each method has three learning rates to choose from, its authors' or this field's usual one in the middle, and three values of its knob,
the usual one first. Variants have the setting of the method they vary. What is not a matrix inside the network (embeddings, norms, and
under Muon the head) is stepped by AdamW at lr 3e-3 in every method of Muon's kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from neurons import MatrixOptimizer, linears
from torch import nn

import foof

Optimizers = list[torch.optim.Optimizer]
BETAS, DECAY, OTHER_LR = (0.9, 0.95), 0.01, 3e-3
ADAM_LRS, MUON_LRS = (1e-3, 3e-3, 1e-2), (0.01, 0.02, 0.04)


@dataclass(frozen=True)
class Knob:
    """What a method has to choose beside its learning rate: an option of its optimizer, the usual value, and two others that are tried."""

    name: str
    usual: float
    others: tuple[float, float]


@dataclass(frozen=True)
class Method:
    make: Callable[[nn.Module, float, float], Optimizers]  # from a model, a learning rate, a value of the knob
    lrs: tuple[float, ...]
    knob: Knob
    setting_of: str | None = None  # a variant has no trials of its own, but learning rate and knob of this method


MOMENTUM, RIDGE, PERIOD = Knob("momentum", 0.95, (0.9, 0.98)), Knob("ridge", 0.1, (0.02, 0.5)), Knob("T", 16, (4, 64))
QKV = {"qkv": 3}  # one weight, three matrices


def nowhere(name: str) -> bool:
    return False


def everywhere(name: str) -> bool:
    return True


def ends(*names: str) -> Callable[[str], bool]:
    return lambda name: name.endswith(names)


def adamw(params: Any, lr: float, beta2: float = BETAS[1]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, betas=(BETAS[0], beta2), weight_decay=DECAY)


def others(model: nn.Module, *taken: torch.optim.Optimizer) -> list[nn.Parameter]:
    inside = {id(p) for opt in taken for group in opt.param_groups for p in group["params"]}
    return [p for p in model.parameters() if id(p) not in inside]


BEHIND_NO_NORM = ends("out", "down")  # layers of a block that do not read what a norm has put out


def muon(on_neurons: Callable[[str], bool] = BEHIND_NO_NORM, knob: Knob = RIDGE, setting_of: str | None = "Muon on neurons",
         **options: Any) -> Method:  # fmt: skip
    """Muon for the matrices of the blocks, AdamW for the others."""

    def make(model: nn.Module, lr: float, value: float) -> Optimizers:
        first = MatrixOptimizer(linears(model, ["blocks"]), "muon", on_neurons, lr, DECAY, **{knob.name: value, **options})
        return [first, adamw(others(model, first), OTHER_LR)]

    return Method(make, MUON_LRS, knob, setting_of)


def muon_with_head(on_neurons: Callable[[str], bool], knob: Knob, setting_of: str) -> Method:
    """Muon as it is, or on neurons, and the head by Adam in the eigenbasis of its inputs."""

    def make(model: nn.Module, lr: float, value: float) -> Optimizers:
        first = MatrixOptimizer(linears(model, ["blocks"]), "muon", on_neurons, lr, DECAY, **{knob.name: value})
        head = MatrixOptimizer(linears(model, ["head"]), "adam", everywhere, OTHER_LR, DECAY)
        return [first, head, adamw(others(model, first, head), OTHER_LR)]

    return Method(make, MUON_LRS, knob, setting_of)


def library_muon(**options: Any) -> Method:
    """The library's own, with T = 32 as it comes."""

    def make(model: nn.Module, lr: float, damping: float) -> Optimizers:
        return [foof.Muon(model, lr, damping, weight_decay=DECAY, **options)]

    of = "Muon on neurons" + (", q, k and v apart" if "stacked" in options else "")
    return Method(make, MUON_LRS, Knob("damping", 0.1, (0.02, 0.5)), of)


def adam_in_basis(on_neurons: Callable[[str], bool] = everywhere, setting_of: str | None = None) -> Method:
    """AdamW, in the eigenbasis of Σ for the linear layers named; embeddings and norms by AdamW at the same learning rate."""

    def make(model: nn.Module, lr: float, T: float) -> Optimizers:
        first = MatrixOptimizer(linears(model, ["blocks", "head"]), "adam", on_neurons, lr, DECAY, T=int(T))
        return [first, adamw(others(model, first), lr)]

    return Method(make, ADAM_LRS, PERIOD, setting_of)


def foof_(model: nn.Module, lr: float, damping: float) -> Optimizers:
    """As it comes: the learning rate is τ, by how much of their size a step moves a layer's outputs. Embeddings and head by AdamW."""
    return [foof.FOOF(model, damping=damping, relative=True, max_change=lr, weight_decay=DECAY)]


def soap(model: nn.Module, lr: float, frequency: float) -> Optimizers:
    """From PyPI (``pip install --no-deps pytorch_optimizer==4.1.0``), at its authors' settings, which are its defaults."""
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=lr, betas=(0.95, 0.95), weight_decay=DECAY, precondition_frequency=int(frequency))]


def shampoo(model: nn.Module, lr: float, T: float) -> Optimizers:
    """From PyPI as above: its scalable form, grafted to RMSProp, momentum as a moving average, new roots every T steps."""
    from pytorch_optimizer import ScalableShampoo
    from pytorch_optimizer.optimizer.utils.graft import LayerWiseGrafting

    return [ScalableShampoo(model.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=DECAY, decoupled_weight_decay=True,
                            preconditioning_compute_steps=int(T), moving_average_for_momentum=True,
                            graft_type=LayerWiseGrafting.RMSPROP)]  # fmt: skip


METHODS: dict[str, Method] = {
    "AdamW": Method(lambda model, lr, beta2: [adamw(model.parameters(), lr, beta2)], ADAM_LRS, Knob("beta2", 0.95, (0.99, 0.9))),
    "AdamW in the eigenbasis": adam_in_basis(),
    "AdamW, head in the eigenbasis": adam_in_basis(ends("head"), "AdamW in the eigenbasis"),
    "Muon": muon(nowhere, MOMENTUM, None),
    "Muon on neurons": muon(setting_of=None),
    "Muon, q, k and v apart": muon(nowhere, MOMENTUM, None, stacked=QKV),
    "Muon on neurons, q, k and v apart": muon(setting_of=None, stacked=QKV),
    "Muon, head in the eigenbasis": muon_with_head(nowhere, MOMENTUM, "Muon"),
    "Muon on neurons, head in the eigenbasis": muon_with_head(BEHIND_NO_NORM, RIDGE, "Muon on neurons"),
    "foof.Muon": library_muon(neurons=["out", "down"]),
    "foof.Muon, q, k and v apart": library_muon(neurons=["out", "down"], stacked=QKV),
    "foof.AdamW": Method(lambda model, lr, T: [foof.AdamW(model, lr, weight_decay=DECAY, T=int(T))], ADAM_LRS, Knob("T", 32, (8, 128))),
    "FOOF": Method(foof_, (0.01, 0.03, 0.1), Knob("damping", 0.1, (0.01, 1.0))),
    "SOAP": Method(soap, ADAM_LRS, Knob("precondition_frequency", 10, (3, 30))),
    "Shampoo": Method(shampoo, ADAM_LRS, Knob("preconditioning_compute_steps", 20, (5, 80))),
    # Ablations of Muon on neurons (power −1, T = 16, all tokens, layers that no norm stands before, on the momentum), at its lr and ridge
    "Muon, neuron gradients into momentum": muon(where="gradient"),
    "Muon on neurons, power -1/2": muon(power=-0.5),
    "Muon on neurons, T = 4": muon(T=4),
    "Muon on neurons, T = 64": muon(T=64),
    "Muon on neurons, one token in four": muon(stride=4),
    "Muon on neurons, square blocks": muon(square=True),
    "Muon on neurons, all layers": muon(everywhere),
    "Muon on neurons, layers behind norms": muon(ends("qkv", "up")),
    "Muon on neurons, attention's out only": muon(ends("out")),
    "Muon on neurons, MLP's down only": muon(ends("down")),
}  # fmt: skip
