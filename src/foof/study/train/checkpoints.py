"""The state of a run that is under way, on disk: one file for each setting, written whole or not at all, removed at the end."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch

EVERY = 60.0  # seconds between states


class Checkpoint:
    """Where one run's state is kept. What other code has written is not gone on from: the record is to be of one source."""

    def __init__(self, folder: Path, key: str, source: str) -> None:
        self.path, self.source, self.last = folder / f"{key}.pt", source, time.monotonic()

    @property
    def due(self) -> bool:
        return time.monotonic() - self.last >= EVERY

    def save(self, state: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.part")
        torch.save({"source": self.source, "torch": torch.__version__, "state": state}, partial)
        partial.replace(self.path)
        self.last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The state, if there is one of this source and this torch."""
        try:
            found = torch.load(self.path, weights_only=False)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError):
            return None
        return found["state"] if (found["source"], found["torch"]) == (self.source, torch.__version__) else None

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
