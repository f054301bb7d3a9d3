"""A small character-level GPT and real English text to train it on: shared by the examples and ``benchmarks/char_gpt.py``.

The text is the Python documentation that comes with every Python (what ``help()`` prints): about half a million characters.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def text() -> str:
    """Prose from the reference manual, in a fixed order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def tokens() -> tuple[Tensor, Tensor, int]:
    """(training, validation, vocabulary size): characters as numbers; the last tenth is for validation."""
    characters = text()
    number = {c: i for i, c in enumerate(sorted(set(characters)))}
    ids = torch.tensor([number[c] for c in characters])
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(number)


def batch(ids: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows at random places and the same shifted by one: ``(size, length)`` each."""
    starts = torch.randint(len(ids) - length, (size, 1), generator=generator)
    windows = ids[starts + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


class Attention(nn.Module):
    """Causal self-attention with q, k and v in one projection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Embedding and head share their weight, as in GPT-2."""

    def __init__(self, vocabulary: int, width: int = 128, depth: int = 4, heads: int = 4, length: int = 128) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * depth) ** (0.5 * name.endswith(("out.weight", "down.weight"))))
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(N, R, vocabulary)`` for ids ``(N, R)``."""
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device)[None])  # (1, L): one that all datapoints share
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
