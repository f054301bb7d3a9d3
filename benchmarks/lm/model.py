"""A plain GPT on bytes: no biases, RMS norms, learned positions, the head apart from the embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from foof.bench.cases import Block


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    heads: int
    length: int  # tokens of context
    batch: int  # windows per step


SIZES = {
    "tiny": Size(32, 2, 2, 16, 2),  # 42 thousand parameters, for the tests
    "small": Size(128, 4, 4, 128, 4),  # 0.87 million
    "base": Size(192, 5, 6, 128, 16),  # 2.3 million
}


class GPT(nn.Module):
    def __init__(self, size: Size, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.depth))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * size.depth) ** (0.5 * name.endswith(("out.weight", "down.weight"))))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(N, R, vocabulary)`` for ids ``(N, R)``."""
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Mean over tokens, in nats."""
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
