"""Gradient descent on neurons."""

import sys
from typing import TYPE_CHECKING

from foof import _moved, ewc, implicit, laplace
from foof.explain import explain
from foof.fisher import Fisher
from foof.kronecker import per_datapoint_gradient
from foof.optim import EKFAC, FOOF, KFAC, AdamW, Adaptive, Muon, NaturalGradient, precondition

__all__ = [
    "EKFAC", "FOOF", "KFAC", "AdamW", "Adaptive", "Fisher", "Muon", "NaturalGradient", "ewc", "explain", "implicit", "laplace",
    "per_datapoint_gradient", "precondition",
]  # fmt: skip

sys.meta_path.append(_moved.Finder)
if not TYPE_CHECKING:  # for which any name would be one

    def __getattr__(name):
        raise AttributeError(_moved.explain(f"foof.{name}"))
