"""The networks of the study by name, for the shape of one input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from foof.study.train.networks import autoencoder, resnet18, vgg11

FIRST_ORDER = ("sgd", "adam")  # methods that train batch norm's parameters; the paper's others leave them as they are


def mlp(inputs: int, hidden: Sequence[int], outputs: int, generator: torch.Generator | None = None) -> nn.Sequential:
    """A fully connected ReLU network without biases, weights from N(0, 2/m), m the layer's inputs (Kaiming-He).

    No hidden sizes give the one-layer network of Fig. 2A. Inputs `(N, ...)` are flattened.
    """
    layers: list[nn.Module] = [nn.Flatten()]
    for m, n in pairwise((inputs, *hidden, outputs)):
        linear = nn.Linear(m, n, bias=False)
        nn.init.normal_(linear.weight, std=math.sqrt(2 / m), generator=generator)
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _width(name: str, hidden: Sequence[int]) -> int:
    """Of a convolutional network `hidden` is one number, the channels of its first layer."""
    if len(hidden) != 1:
        raise ValueError(f"{name} takes one hidden size, the channels of its first layer, but {tuple(hidden)} was given")
    return hidden[0]


Build = Callable[[Sequence[int], Sequence[int], int, bool, torch.Generator | None], nn.Module]
MODELS: dict[str, Build] = {
    "mlp": lambda shape, hidden, outputs, _, g: mlp(math.prod(shape), hidden, outputs, g),
    "resnet18": lambda shape, hidden, outputs, norm, g: resnet18(shape[0], outputs, _width("resnet18", hidden), True, norm, g),
    "resnet18-no-norm": lambda shape, hidden, outputs, _, g: resnet18(shape[0], outputs, _width("resnet18", hidden), False, True, g),
    "vgg11": lambda shape, hidden, outputs, _, g: vgg11(shape[0], outputs, _width("vgg11", hidden), g),
    "autoencoder": lambda shape, hidden, _, __, g: autoencoder(math.prod(shape), hidden, g),
}


def build(name: str, shape: Sequence[int], hidden: Sequence[int], outputs: int, generator: torch.Generator | None = None,
          train_norm: bool = True) -> nn.Module:  # fmt: skip
    """The network called `name` for inputs of `shape` (C, H, W). `train_norm`: are batch norm's parameters trained, if it has any?"""
    if name not in MODELS:
        raise ValueError(f"no model is called {name!r}; there are {', '.join(MODELS)}")
    model = MODELS[name](shape, hidden, outputs, train_norm, generator)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # convolutions are a quarter faster so


def trains_norm(optimizer: str, wanted: bool | None) -> bool:
    """The option `train_norm`, or else the paper's choice: FOOF and KFAC leave batch norm's parameters as they are."""
    return optimizer in FIRST_ORDER if wanted is None else wanted
