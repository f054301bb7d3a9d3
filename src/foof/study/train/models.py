"""The networks of the study. Each builder takes the shape of one input, the number of outputs and a generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


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


def build(name: str, shape: Sequence[int], hidden: Sequence[int], outputs: int, generator: torch.Generator | None = None) -> nn.Module:
    """The network called `name` for inputs of `shape` (C, H, W)."""
    if name == "mlp":
        return mlp(math.prod(shape), hidden, outputs, generator)
    raise ValueError(f"no model is called {name!r}; there is mlp")
