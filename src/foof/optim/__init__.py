"""Optimizers on neurons."""

from foof.optim.foof import FOOF
from foof.optim.precondition import precondition

__all__ = ["FOOF", "precondition"]
