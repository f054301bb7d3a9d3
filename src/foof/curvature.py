"""Curvature as operators: what a matrix is, kept apart from how a layer's gradient is formed.

A *factor* preconditions one layer. It is made once from second moments (``make``: factorise) and applied often (``apply`` to a
gradient, ``gradient`` from the inputs and errors at hand, by the cheaper way).
"""

from __future__ import annotations

import torch
from torch import Tensor

from foof import linalg
from foof.layers import Layer
from foof.statistics import wide


class InputFactor:
    """FOOF's preconditioner: ``X ↦ X (Σ + λI)⁻¹`` (Eq. 6), for rows ``X = A`` as for a gradient ``X = Eᵀ A``.

    Held as the inverse P ``(..., m, m)``, or as the Cholesky factor L where it is used too seldom to pay for the inverse,
    or as a diagonal ``(m,)``.
    """

    def __init__(self, held: str, tensor: Tensor) -> None:
        self.held, self.tensor = held, tensor

    @classmethod
    def make(cls, Sigma: Tensor, damping: float | Tensor, name: str, uses: float = float("inf")) -> InputFactor:
        """From the second moment ``(..., m, m)``, or its diagonal ``(m,)``; ``uses``: rows to be multiplied before the next one.

        An inverse costs 2/3·m³ more than a Cholesky factor and saves about 2·m² per row, since triangular solves run at about
        half the speed of products: it pays once ``uses`` exceeds m/3.
        """
        if Sigma.dim() == 1:
            return cls("diagonal", 1 / (Sigma + damping))
        if uses < Sigma.shape[-1] / 3:
            return cls("cholesky", linalg.damped_cholesky(Sigma, damping, name))
        return cls("inverse", linalg.damped_inverse(Sigma, damping, name))

    def apply(self, X: Tensor) -> Tensor:
        """``X (Σ + λI)⁻¹`` for X ``(..., r, m)``."""
        X = X.to(self.tensor.dtype)
        if self.held == "diagonal":
            return X * self.tensor
        return linalg.solve_right(X, self.tensor) if self.held == "cholesky" else X @ self.tensor

    def gradient(self, layer: Layer, x: Tensor, e: Tensor) -> Tensor:
        """``Eᵀ (A P)`` costs 2·rows·m², ``(Eᵀ A) P`` costs 2·n·m²: the neuron gradient ``(..., n, m)`` by the cheaper one."""
        e = e.to(wide(e.dtype))
        if not layer.diagonal:
            x = x.to(e.dtype)
            if layer.rows(e) < layer.n:
                A, E = layer.input_rows(x).flatten(-3, -2), layer.error_rows(e).flatten(-3, -2)
                return E.mT @ self.apply(A)
        return self.apply(layer.weight_gradient(x, e))

    def state_dict(self) -> dict[str, str | Tensor]:
        return {"held": self.held, "tensor": self.tensor.clone()}

    @classmethod
    def from_state_dict(cls, state: dict[str, str | Tensor], device: torch.device) -> InputFactor:
        held, tensor = state["held"], state["tensor"]
        assert isinstance(held, str) and isinstance(tensor, Tensor)
        return cls(held, tensor.to(device, copy=True))


def per_datapoint_gradient(a: Tensor, e: Tensor, damping: float) -> Tensor:
    """Appendix E: FOOF applied to each datapoint alone, then averaged. a ``(N, R, m)``, e ``(N, R, n)`` of per-datapoint losses.

    ``1/N Σ_i E_iᵀ A_i (A_iᵀ A_i + λI)⁻¹ = 1/N Σ_i E_iᵀ (A_i A_iᵀ + λI)⁻¹ A_i``, the right side with R × R solves only. For R = 1
    this is SGD with a learning rate ``1/(|a_i|² + λ)`` of its own for each datapoint. Returns ``(n, m)``.
    """
    K = linalg.add_damping(a @ a.mT, damping)
    weighted = torch.linalg.solve(K, a)
    return torch.einsum("irn,irm->nm", e, weighted) / len(a)
