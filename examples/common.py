"""What the examples share: the embedded Fashion-MNIST, a small network, plain training, and where pictures go."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import torch
from torch import Tensor, nn

from foof.study.data import load


def data(train: int, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The first images of the embedded subset, as vectors: training images and labels, test images and labels."""
    found = load("fashion-mnist", "embedded")
    return found.train_x[:train].flatten(1), found.train_y[:train], found.test_x[:test].flatten(1), found.test_y[:test]


def network(inputs: int, *hidden: int) -> nn.Sequential:
    """A fully connected ReLU network with ten outputs."""
    sizes, layers = (inputs, *hidden), []
    for m, n in pairwise(sizes):
        layers += [nn.Linear(m, n), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int, penalty: Callable[[], Tensor] | None = None, lr: float = 1e-3) -> None:
    """Adam on mini-batches of 100, with an optional penalty on the weights."""
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        batch = torch.randint(len(x), (100,))
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        if penalty is not None:
            loss = loss + penalty()
        opt.zero_grad()
        loss.backward()
        opt.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def output_file(name: str) -> Path:
    """Where the picture goes: the one argument an example takes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path(f"{name}.html"))
    return parser.parse_args().out  # type: ignore[no-any-return]


def save(figure: go.Figure, path: Path) -> None:
    figure.update_layout(template="plotly_white", font={"size": 14}, width=900, height=460)
    figure.write_html(path, include_plotlyjs=True)
    print(f"picture: {path}")
