"""What is tested over: random layers with inputs that fit them, small networks, and optimizers with a loop to train them."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import foof
from foof.study.train import ablations

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def linear(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A linear layer over zero to two dimensions of rows."""
    inputs, outputs = draw(st.integers(1, 7)), draw(st.integers(1, 6))
    layer = nn.Linear(inputs, outputs, bias=draw(st.booleans()))
    shape = [draw(st.integers(1, 5))] + draw(st.lists(st.integers(1, 4), max_size=2))
    return layer, torch.randn(*shape, inputs)


@st.composite
def convolution(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A convolution in one to three dimensions: stride, dilation, groups (depthwise included), every padding."""
    spatial = draw(st.integers(1, 3))
    groups = draw(st.integers(1, 3))
    inputs, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))
    kernel = [draw(st.integers(1, 3)) for _ in range(spatial)]
    dilation = [draw(st.integers(1, 2)) for _ in range(spatial)]
    stride: list[int] = [draw(st.integers(1, 2)) for _ in range(spatial)]
    padding: str | list[int] = draw(st.sampled_from(["same", "valid", "number"]))
    if padding == "same":
        stride = [1] * spatial
    elif padding == "number":
        padding = [draw(st.integers(0, 2)) for _ in range(spatial)]
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[spatial - 1]
    layer = conv(
        inputs, outputs, tuple(kernel), tuple(stride), padding if isinstance(padding, str) else tuple(padding), tuple(dilation),
        groups, bias=draw(st.booleans()), padding_mode=draw(st.sampled_from(PADDING_MODES)),
    )  # fmt: skip
    size = [d * (k - 1) + 1 + draw(st.integers(2, 3)) for d, k in zip(dilation, kernel, strict=True)]
    return layer, torch.randn(draw(st.integers(1, 3)), inputs, *size)


@st.composite
def embedding(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """An embedding of one or more indices per datapoint, with or without a padding index."""
    entries, features = draw(st.integers(2, 8)), draw(st.integers(1, 5))
    layer = nn.Embedding(entries, features, padding_idx=draw(st.one_of(st.none(), st.integers(0, entries - 1))))
    shape = [draw(st.integers(1, 4))] + draw(st.lists(st.integers(1, 4), max_size=2))
    return layer, torch.randint(0, entries, shape)


KINDS = {"linear": linear(), "convolution": convolution(), "embedding": embedding()}


class Twice(nn.Module):
    """One layer called twice in a forward, on different inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, x2: Tensor) -> Tensor:
        return torch.stack([self.layer(x), self.layer(x2)])


def mlp(*sizes: int, bias: bool = True, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    """A small fully connected network."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), activation()]
    return nn.Sequential(*layers[:-1])


def cnn(channels: int = 2, classes: int = 3) -> nn.Sequential:
    """A small convolutional network for 8 × 8 images."""
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, classes),
    )  # fmt: skip


def flat(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


OPTIMIZERS = {
    "foof": lambda model: foof.FOOF(model, lr=0.1, damping=0.1, momentum=0.9, weight_decay=0.01, T=4, S=2),
    "foof-cholesky": lambda model: foof.FOOF(model, lr=0.3, damping=0.1, T=1),
    "sgd": lambda model: foof.precondition(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, damping=0.1, T=4),
    "adamw": lambda model: foof.precondition(torch.optim.AdamW(model.parameters(), lr=0.03), model, damping=0.1, T=3, S=1),
    "muon": lambda model: foof.precondition(
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1), model, damping=0.1, T=3
    ),
    "foof.Muon": lambda model: foof.Muon(model, lr=0.1, weight_decay=0.01, T=4, S=2, rest={"lr": 0.03}),
    "foof.AdamW": lambda model: foof.AdamW(model, lr=0.03, T=3, S=1),
    "kfac": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, momentum=0.9, weight_decay=0.01, T=4, S=2),
    "kfac-cholesky": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, T=1),
    "kfac-standard": lambda model: foof.KFAC(model, lr=0.1, damping=0.1, damping_mode="standard", T=3, S=1),
    "kfac-full": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, fisher="full", T=3),
    "kfac-empirical": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, fisher="empirical", T=3),
    "kfac-subsampled": lambda model: foof.KFAC(model, lr=0.3, damping=0.1, ema=0.0, samples=2, datapoints=4, T=2),
    "kfac-adaptive": lambda model: foof.KFAC(model, damping=0.1, T=2, adaptive=True),
    "kfac-deferred": lambda model: ablations.kfac(model, lr=0.3, damping=0.1, T=3, deferred=True),
    "kfac-drop-scaled": lambda model: ablations.kfac(model, lr=0.2, damping=0.1, T=3, second_factor="drop-scaled"),
    "kfac-drop-rescaled": lambda model: ablations.kfac(model, lr=0.3, damping=0.1, T=3, second_factor="drop-rescaled"),
    "kfac-adamw": lambda model: foof.precondition(
        torch.optim.AdamW(model.parameters(), lr=0.03), model, method="kfac", damping=0.1, T=3
    ),
}


def batch(number, size=6):
    g = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=g), torch.randint(0, 3, (size,), generator=g)


def step(model, opt, x, y):
    opt.zero_grad()
    out = model(x)
    opt.update_curvature(out, y)
    nn.functional.cross_entropy(out, y).backward()
    opt.step()


def train(model, opt, steps, start=0):
    for t in range(start, start + steps):
        step(model, opt, *batch(t))


def net(seed=0):
    torch.manual_seed(seed)
    return mlp(4, 7, 5, 3)


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
