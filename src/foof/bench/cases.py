"""What is trained: a network, batches for it, its loss, and the schedule T, S that every method with one is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foof.study.train.models import mlp
from foof.study.train.networks import autoencoder, resnet18

Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """The plain GPT of the language benchmark: no biases, RMS norms, learned positions, the head apart from the embedding.

    Logits ``(N·R, vocabulary)`` for ids ``(N, R)``.
    """

    def __init__(self, width: int, depth: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Block(nn.Module):
    """Causal attention and a GELU network of four times the width, each on a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class Case:
    """One setting of the comparison. ``rows``: tokens per datapoint where the loss is a mean over them, too."""

    name: str
    title: str
    build: Callable[[], nn.Module]
    draw: Callable[[], Batch]
    loss: nn.Module
    likelihood: str = "categorical"
    rows: int = 1
    T: int = 100
    S: int = 10
    rounds: int = 2
    variants: tuple[str, ...] = ()  # of our methods that are measured here, too
    without: tuple[tuple[str, str], ...] = ()  # peers that are not tried here, and why
    initial: int = 1  # batches of statistics before training
    device: str = "cpu"

    def model(self) -> nn.Module:
        """The network, the same for every method."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.build().to(self.device)

    def batches(self, count: int = 10) -> list[Batch]:
        """Random data, the same for every method: what a step costs does not depend on it."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            drawn = [self.draw() for _ in range(count)]
        return [(x.to(self.device), y.to(self.device)) for x, y in drawn]


def fully_connected(width: int, batch: int = 100, T: int = 100, S: int = 10, rounds: int = 2, variants: tuple[str, ...] = (),
                    without: tuple[tuple[str, str], ...] = ()) -> Case:  # fmt: skip
    """The paper's network 784-w-w-w-10 without biases."""
    name = f"mlp-{width}" + (f"-b{batch}" if batch != 100 else "") + (f"-T{T}" if T != 100 else "")
    return Case(
        name, f"MLP, width {width:,}, batch {batch:,}, T = {T}, S = {S}", lambda: mlp(784, [width] * 3, 10),
        lambda: (torch.randn(batch, 784), torch.randint(0, 10, (batch,))), nn.CrossEntropyLoss(), T=T, S=S, rounds=rounds,
        variants=variants, without=without,
    )  # fmt: skip


def deep_autoencoder(hidden: tuple[int, ...] = (1000, 500, 250, 30), batch: int = 500) -> Case:
    return Case(
        "autoencoder", f"Autoencoder 784-{'-'.join(map(str, hidden))}-…-784, batch {batch}", lambda: autoencoder(784, hidden),
        lambda: (torch.rand(batch, 784),) * 2, nn.BCEWithLogitsLoss(), likelihood="bernoulli",
    )  # fmt: skip


def residual(width: int = 16, batch: int = 64) -> Case:
    """The paper's: batch norms normalise, their parameters stay as they are."""
    return Case(
        "resnet", f"ResNet18, width {width}, batch {batch}", lambda: resnet18(3, 10, width, train_norm=False),
        lambda: (torch.randn(batch, 3, 32, 32), torch.randint(0, 10, (batch,))), nn.CrossEntropyLoss(),
    )  # fmt: skip


def language(width: int = 128, depth: int = 4, length: int = 128, batch: int = 4) -> Case:
    return Case(
        "gpt", f"GPT, width {width}, depth {depth}, {batch} × {length} tokens", lambda: GPT(width, depth, 4, length, 256),
        lambda: (torch.randint(0, 256, (batch, length)), torch.randint(0, 256, (batch * length,))), nn.CrossEntropyLoss(),
        rows=length, rounds=4,
    )  # fmt: skip


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        fully_connected(1000, rounds=5, variants=("FOOF, spread", "KFAC, spread", "FOOF, no lr")),
        fully_connected(4000, rounds=5, variants=("FOOF, spread", "KFAC, spread"),
                        without=(("SOAP", "left out for its time: its first step decomposes six matrices of order 4,000"),)),
        fully_connected(1000, T=1, S=1, rounds=6),
        fully_connected(250, rounds=5), fully_connected(2000, variants=("FOOF, spread", "KFAC, spread")),
        fully_connected(1000, 32, rounds=3), fully_connected(1000, 320), fully_connected(1000, 1000),
        deep_autoencoder(), residual(), language(),
    )
}  # fmt: skip
QUICK = ("mlp-1000", "mlp-250")
