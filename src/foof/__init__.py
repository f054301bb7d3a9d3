"""Gradient descent on neurons."""

from foof.curvature import per_datapoint_gradient
from foof.optim import FOOF, precondition

__all__ = ["FOOF", "per_datapoint_gradient", "precondition"]
