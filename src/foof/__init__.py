"""Gradient descent on neurons."""

from foof.curvature import per_datapoint_gradient
from foof.explain import explain
from foof.optim import FOOF, precondition

__all__ = ["FOOF", "explain", "per_datapoint_gradient", "precondition"]
