"""Warnings that point at the line of the program that uses the library, not into it."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

INSIDE = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


def warn(message: str) -> None:
    """A ``UserWarning`` of the nearest caller outside of foof and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
