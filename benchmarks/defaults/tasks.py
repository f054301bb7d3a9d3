"""Fourteen small tasks, a few seconds each on one thread, and variations of some: a model, batches, a loss, a test metric.

Models have PyTorch's own initialisation; where it is Kaiming's (ResNets and the tasks that say so) weights are N(0, 2/m), biases 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foof.study.data import load
from foof.study.train.networks import kaiming, resnet18

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from small_gpt import GPT, batch, tokens

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """``metric`` is a percentage of right answers, or for regressions and language the test loss."""

    title: str
    model: Callable[[], nn.Module]
    data: Callable[[], tuple[Pair, Pair]]
    size: int  # of a batch
    steps: int
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    accuracy: bool = True
    windows: int = 0  # of text, where the data are characters

    def batches(self, seed: int) -> Iterator[Pair]:
        """The same for every method."""
        order, (x, y) = torch.Generator().manual_seed(seed + 1000), self.data()[0]
        while True:
            if self.windows:
                yield batch(x, self.size, self.windows, order)
            else:
                for rows in torch.randperm(len(x), generator=order).split(self.size):
                    if len(rows) == self.size:
                        yield x[rows], y[rows]

    @torch.no_grad()
    def test(self, model: nn.Module) -> float:
        model.eval()
        x, y = self.data()[1]
        if self.windows:
            x, y = batch(x, 256, self.windows, torch.Generator().manual_seed(0))
        out = model(x)
        return 100 * (out.argmax(1) == y).float().mean().item() if self.accuracy else self.loss(out, y).item()


# --- data ------------------------------------------------------------------------------------------------------------------------


@lru_cache
def images(name: str, flat: bool, targets: str = "labels") -> tuple[Pair, Pair]:
    data = load(name, "embedded" if name == "fashion-mnist" else "full")
    train_x, test_x = data.train_x[:6000], data.test_x[:1000]
    if flat:
        train_x, test_x = train_x.flatten(1), test_x.flatten(1)
    if targets == "images":
        return (train_x, train_x), (test_x, test_x)
    return (train_x, data.train_y[:6000]), (test_x, data.test_y[:1000])


@lru_cache
def characters() -> tuple[Pair, Pair]:
    train, test, _ = tokens()
    return (train, train), (test, test)


@lru_cache
def diabetes() -> tuple[Pair, Pair]:
    """scikit-learn's: ten measurements of 442 patients, and how the disease went on after a year; all standardised."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
    x, y = (x - x.mean(0)) / x.std(0), ((y - y.mean()) / y.std()).unsqueeze(1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x[order[:342]], y[order[:342]]), (x[order[342:]], y[order[342:]])


@lru_cache
def upside_down() -> tuple[Pair, Pair]:
    """Fashion-MNIST upside down: what adapters have to learn."""
    (x, y), (test_x, test_y) = images("fashion-mnist", True)
    return (x.flip(1).contiguous(), y), (test_x.flip(1).contiguous(), test_y)


# --- models ----------------------------------------------------------------------------------------------------------------------


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), *([nn.BatchNorm2d(after)] if norm else []), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


class LSTM(nn.Module):
    """One layer, its four gates written as one ``nn.Linear``."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.gates, self.head = nn.Embedding(vocabulary, width), nn.Linear(2 * width, 4 * width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        h = c = x.new_zeros(len(ids), x.shape[-1])
        outputs = []
        for t in range(ids.shape[1]):
            i, f, g, o = self.gates(torch.cat([x[:, t], h], 1)).chunk(4, 1)
            c = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            outputs.append(h)
        return self.head(torch.stack(outputs, 1))


class Mixer(nn.Module):
    """One transformer block without a causal mask, projections as ``nn.Linear``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """Patches of 8 × 8 of a 32 × 32 image."""

    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.patches, self.place = nn.Linear(192, width), nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Mixer(width, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(len(x), 16, 192)
        return self.head(self.norm(self.blocks(self.patches(rows) + self.place)).mean(1))


class Adapted(nn.Module):
    """LoRA: a frozen linear layer and ``B A x``, with B = 0 to begin with."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@lru_cache
def trained() -> dict[str, Tensor]:
    """An MLP that knows Fashion-MNIST: 200 steps of AdamW."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, (x, y) = mlp(784, 128, 128, 10), images("fashion-mnist", True)[0]
        opt = torch.optim.AdamW(model.parameters())
        for rows in torch.randint(len(x), (200, 100)):
            opt.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            opt.step()
        return model.state_dict()


def adapters() -> nn.Module:
    model = mlp(784, 128, 128, 10)
    model.load_state_dict(trained())
    return nn.Sequential(*(Adapted(layer) if isinstance(layer, nn.Linear) else layer for layer in model))


def with_kaiming(model: nn.Module) -> nn.Module:
    kaiming(model)
    return model


def by_token(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def vocabulary() -> int:
    return tokens()[2]


FASHION, CIFAR = lambda: images("fashion-mnist", True), lambda: images("cifar-10", False)
TASKS = {
    "mlp-32": Task("MLP 128, batch 32", lambda: mlp(784, 128, 128, 10), FASHION, 32, 200),
    "mlp-1000": Task("MLP 128, batch 1,000", lambda: mlp(784, 128, 128, 10), FASHION, 1000, 60),
    "narrow": Task("MLP 5 × 64, batch 100", lambda: mlp(784, 64, 64, 64, 64, 64, 10), FASHION, 100, 150),
    "wide": Task("MLP 1,000, batch 64", lambda: mlp(784, 1000, 1000, 10), FASHION, 64, 60),
    "cnn": Task("CNN, CIFAR-10", lambda: cnn(False), CIFAR, 64, 80),
    "cnn-bn": Task("CNN with batch norm", lambda: cnn(True), CIFAR, 64, 80),
    "autoencoder": Task("Autoencoder, MNIST", lambda: mlp(784, 128, 16, 128, 784), lambda: images("mnist", True, "images"), 100, 120,
                        F.mse_loss, False),
    "diabetes": Task("Regression, diabetes", lambda: mlp(10, 50, 50, 1), diabetes, 32, 150, F.mse_loss, False),
    "gpt": Task("GPT, characters", lambda: GPT(vocabulary(), 64, 2, 4, 32), characters, 16, 150, by_token, False, 32),
    "lstm": Task("LSTM, characters", lambda: LSTM(vocabulary(), 64), characters, 32, 100, by_token, False, 20),
    "vit": Task("ViT, CIFAR-10", ViT, CIFAR, 64, 100),
    "lora": Task("LoRA adapters, MLP", adapters, upside_down, 100, 150),
    "resnet": Task("ResNet18 of width 8, no norm", lambda: resnet18(3, 10, 8, norm=False), CIFAR, 64, 60),
    "resnet-bn": Task("ResNet18 of width 8", lambda: resnet18(3, 10, 8), CIFAR, 64, 60),
}  # fmt: skip
BATCHES, WIDTHS = (16, 64, 250, 1000), (64, 250, 1000, 2000)
FURTHER = {
    "mlp-kaiming": Task("MLP 128, batch 32, Kaiming", lambda: with_kaiming(mlp(784, 128, 128, 10)), FASHION, 32, 200),
    "narrow-kaiming": Task("MLP 5 × 64, Kaiming", lambda: with_kaiming(mlp(784, 64, 64, 64, 64, 64, 10)), FASHION, 100, 150),
    "cnn-kaiming": Task("CNN, Kaiming", lambda: with_kaiming(cnn(False)), CIFAR, 64, 80),
    **{f"batch-{size}": Task(f"MLP 128, batch {size:,}", lambda: mlp(784, 128, 128, 10), FASHION, size, 80) for size in BATCHES},
    **{f"width-{n}": Task(f"MLP {n:,}, batch 100", lambda n=n: mlp(784, n, n, 10), FASHION, 100, 60) for n in WIDTHS},
}  # fmt: skip
