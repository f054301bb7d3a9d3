"""The paper's other networks: ResNet18 and VGG11 for images of 32 × 32, and the deep autoencoder of Hinton & Salakhutdinov (2006).

All weights are drawn from N(0, 2/m), m the inputs of a neuron (Kaiming-He), and all biases are zero. The paper does not say which
layers have biases: here all do but convolutions before a batch norm, which would take them away again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VGG11 = (1, "pool", 2, "pool", 4, 4, "pool", 8, 8, "pool", 8, 8, "pool")  # channels, in multiples of the first layer's
CODE = (1000, 500, 250, 30)


def kaiming(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Weights of all linear layers and convolutions from N(0, 2/m), biases zero; batch norms start as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=math.sqrt(2 / module.weight[0].numel()), generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


class BasicBlock(nn.Module):
    """``relu(x' + norm(conv(relu(norm(conv(x))))))``, where x' is x, or its projection if stride or channels change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, bias=not norm)
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride, 1), _norm(outputs, norm)
        self.conv2, self.norm2 = conv(outputs, outputs, 3, 1, 1), _norm(outputs, norm)
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Sequential(conv(inputs, outputs, 1, stride), _norm(outputs, norm)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def resnet18(channels: int, outputs: int, width: int = 64, norm: bool = True, train_norm: bool = True,
             generator: torch.Generator | None = None) -> nn.Sequential:  # fmt: skip
    """ResNet18 for small images: a 3 × 3 convolution, four stages of two blocks with 1, 2, 4, 8 times ``width`` channels, a linear layer.

    ``train_norm=False``: batch norms normalise, but their parameters stay as they are, as in the paper with FOOF and KFAC.
    """
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, 1, 1, bias=not norm), _norm(width, norm), nn.ReLU()]
    inputs = width
    for stage in range(4):
        for stride in (1 if stage == 0 else 2, 1):
            layers.append(BasicBlock(inputs, width * 2**stage, stride, norm))
            inputs = width * 2**stage
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, outputs))
    kaiming(model, generator)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(train_norm)
    return model


def vgg11(channels: int, outputs: int, width: int = 64, generator: torch.Generator | None = None) -> nn.Sequential:
    """VGG11 without batch norm for images of 32 × 32: eight convolutions and five poolings, which leave one pixel, and a linear layer."""
    layers: list[nn.Module] = []
    for entry in VGG11:
        if isinstance(entry, int):
            layers += [nn.Conv2d(channels, entry * width, 3, padding=1), nn.ReLU()]
            channels = entry * width
        else:
            layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels, outputs))
    kaiming(model, generator)
    return model


def autoencoder(inputs: int, hidden: Sequence[int] = CODE, generator: torch.Generator | None = None) -> nn.Sequential:
    """(d, 1000, 500, 250, 30, 250, 500, 1000, d), with tanh after all hidden layers but the code, which is linear like the output.

    Inputs ``(N, ...)`` are flattened. The outputs ``(N, d)`` are logits of pixels (Bernoulli) or pixels (Gaussian): the likelihood says.
    """
    sizes = (inputs, *hidden, *reversed(hidden[:-1]), inputs)
    layers: list[nn.Module] = [nn.Flatten()]
    for k, (m, n) in enumerate(pairwise(sizes), 1):
        layers += [nn.Linear(m, n)] + [nn.Tanh()] * (k not in (len(hidden), len(sizes) - 1))
    model = nn.Sequential(*layers)
    kaiming(model, generator)
    return model


def _norm(channels: int, norm: bool) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm else nn.Identity()
