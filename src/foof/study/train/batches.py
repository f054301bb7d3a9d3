"""Mini-batches in an order that a seed decides, and that can be left and taken up again at any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from foof.study.data import Data
from foof.study.train.augmentation import augment

Batch = tuple[Tensor, Tensor]


class Batches:
    """Mini-batches without end: a fresh order every epoch, an incomplete last batch dropped. None: the full batch.

    With ``augmented``, images are flipped and cropped at random, by the seed and the number of the batch alone.
    """

    def __init__(self, train: Data, size: int | None, seed: int, augmented: bool = False) -> None:
        self.train, self.size, self.seed, self.augmented = train, size, seed, augmented
        self.n = len(train.train_y)
        if size is not None and size > self.n:
            raise ValueError(f"batches of {size:,} were asked for, but there are {self.n:,} training records")
        self.generator = torch.Generator().manual_seed(seed)
        self.before = self.generator.get_state()  # when the epoch began
        self.order: Tensor | None = None  # of the epoch
        self.served = 0

    @property
    def per_epoch(self) -> int:
        return 1 if self.size is None else self.n // self.size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        place = self.served % self.per_epoch
        self.served += 1
        if self.size is None:
            return self._seen(self.train.train_x, self.train.train_y)
        if place == 0 or self.order is None:
            self.before = self.generator.get_state()
            self.order = torch.randperm(self.n, generator=self.generator)
        rows = self.order[place * self.size : (place + 1) * self.size]
        return self._seen(self.train.train_x[rows], self.train.train_y[rows])

    def _seen(self, x: Tensor, y: Tensor) -> Batch:
        return (augment(x, self.seed, self.served) if self.augmented else x), y

    def state_dict(self) -> dict[str, Any]:
        return {"before": self.before, "served": self.served}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was left: its next batch comes next."""
        self.before, self.served = state["before"], state["served"]
        self.generator.set_state(self.before)
        if self.size is not None and self.served:
            self.order = torch.randperm(self.n, generator=self.generator)
