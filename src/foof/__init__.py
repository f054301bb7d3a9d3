"""Gradient descent on neurons."""

from foof import ewc, implicit, laplace
from foof.explain import explain
from foof.fisher import Fisher
from foof.kronecker import per_datapoint_gradient
from foof.optim import EKFAC, FOOF, KFAC, AdamW, Adaptive, Muon, NaturalGradient, precondition

__all__ = [
    "EKFAC", "FOOF", "KFAC", "AdamW", "Adaptive", "Fisher", "Muon", "NaturalGradient", "ewc", "explain", "implicit", "laplace",
    "per_datapoint_gradient", "precondition",
]  # fmt: skip
