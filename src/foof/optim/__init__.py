"""Optimizers on neurons."""

from typing import TYPE_CHECKING

from foof import _moved
from foof.optim.adamw import AdamW
from foof.optim.adaptive import Adaptive
from foof.optim.ekfac import EKFAC
from foof.optim.foof import FOOF
from foof.optim.kfac import KFAC
from foof.optim.muon import Muon
from foof.optim.natural import NaturalGradient
from foof.optim.precondition import precondition

__all__ = ["EKFAC", "FOOF", "KFAC", "AdamW", "Adaptive", "Muon", "NaturalGradient", "precondition"]

if not TYPE_CHECKING:  # for which any name would be one

    def __getattr__(name):
        raise AttributeError(_moved.explain(f"foof.optim.{name}"))
