"""Damped inverses from second moments: of the inputs only, of both sides, in the eigenbases; made once, applied often.

An *inverse* preconditions one layer. It is made once from second moments (``make``: factorise) and applied often (``apply`` to a
gradient, ``gradient`` from the inputs and errors at hand, by the cheaper way).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from foof import linalg
from foof.layers import Layer
from foof.statistics import wide
from foof.sweep import Gradual, Sweep

Plain = Callable[[torch.dtype], Tensor]  # the plain gradient ``Eᵀ A`` in a precision


class InputInverse:
    """FOOF's preconditioner: ``X ↦ X (Σ + λI)⁻¹`` (Eq. 6), for rows ``X = A`` as for a gradient ``X = Eᵀ A``.

    Held as the inverse P ``(..., m, m)``, or as the Cholesky factor L where it is used too seldom to pay for the inverse,
    or as a diagonal ``(m,)``. For wide layers Σ may be diagonal in k blocks of inputs, ``(k, ⌈m/k⌉, ⌈m/k⌉)``: see ``in_blocks``.
    """

    def __init__(self, held: str, tensor: Tensor) -> None:
        self.held, self.tensor = held, tensor

    @classmethod
    def make(cls, Sigma: Tensor, damping: float | Tensor, name: str, uses: float = float("inf")) -> InputInverse:
        """From the second moment ``(..., m, m)``, or its diagonal ``(m,)``; ``uses`` (`foof.linalg.uses`): rows to be multiplied before
        the next one, which decide whether the inverse pays.
        """
        if Sigma.dim() == 1:
            return cls("diagonal", 1 / (Sigma + damping))
        if linalg.inverse_pays(Sigma.shape[-1], uses):
            return cls("inverse", linalg.damped_inverse(Sigma, damping, name))
        return cls("cholesky", linalg.damped_cholesky(Sigma, damping, name))

    def apply(self, X: Tensor) -> Tensor:
        """``X (Σ + λI)⁻¹`` for X ``(..., r, m)``."""
        X = linalg.cast(X, self.tensor.dtype)
        if self.held == "diagonal":
            return X * self.tensor
        if X.dim() < self.tensor.dim():  # one matrix, in blocks of its inputs
            return self.apply(in_blocks(X, len(self.tensor))).transpose(0, 1).flatten(1)[:, : X.shape[1]]
        return linalg.solve_right(X, self.tensor) if self.held == "cholesky" else linalg.times_transposed(X, self.tensor)

    def gradient(self, layer: Layer, x: Tensor, e: Tensor, plain: Plain | None = None) -> Tensor:
        """``Eᵀ (A P)`` costs 2·rows·m², ``(Eᵀ A) P`` costs 2·n·m²: the neuron gradient ``(..., n, m)`` by the cheaper one, the cost of
        cutting out rows included.

        plain: who computes ``Eᵀ A``, if it is needed; without, the layer.
        """
        e = linalg.cast(e, wide(e.dtype))
        if not layer.diagonal:
            x = linalg.cast(x, e.dtype)
            rows = layer.rows(e)
            if layer.m * (layer.n - rows) > layer.cutting * rows:
                return linalg.product(layer.error_matrix(e).mT, self.apply(layer.input_matrix(x)))
        return self.apply(plain(e.dtype) if plain else layer.weight_gradient(x, e))

    def state_dict(self) -> dict[str, str | Tensor]:
        return {"held": self.held, "tensor": self.tensor.clone()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> InputInverse:
        return cls(state["held"], state["tensor"])


def in_blocks(X: Tensor, k: int) -> Tensor:
    """Rows ``(r, m)`` as k blocks of inputs ``(k, r, ⌈m/k⌉)``, the last filled up with zeros."""
    size = -(-X.shape[1] // k)
    return nn.functional.pad(X, (0, k * size - X.shape[1])).unflatten(1, (k, size)).transpose(0, 1)


def per_datapoint_gradient(a: Tensor, e: Tensor, damping: float) -> Tensor:
    """Appendix F: FOOF applied to each datapoint alone, then averaged. a ``(N, R, m)``, e ``(N, R, n)`` of per-datapoint losses.

    ``1/N Σ_i E_iᵀ A_i (A_iᵀ A_i + λI)⁻¹ = 1/N Σ_i E_iᵀ (A_i A_iᵀ + λI)⁻¹ A_i``, the right side with R × R solves only. For R = 1
    this is SGD with a learning rate ``1/(|a_i|² + λ)`` of its own for each datapoint. Returns ``(n, m)``.
    """
    K = linalg.add_damping(a @ a.mT, damping)
    weighted = torch.linalg.solve(K, a)
    return torch.einsum("irn,irm->nm", e, weighted) / len(a)


# --- both sides: KFAC -------------------------------------------------------------------------------------------------------


def split_damping(Sigma: Tensor, Sigma_E: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """λ_A, λ_E with ``λ_A λ_E = λ`` and ``λ_A/λ_E = n Tr(Σ) / (m Tr(Σ_E))`` (below Eq. 2); one each, or one per group ``(G,)``.

    A dead layer (a trace of 0) gets an extreme but finite ratio: its gradient is 0 anyway.
    """
    mean_A, mean_E = (_mean_eigenvalue(S).clamp_min(torch.finfo(S.dtype).tiny).sqrt() for S in (Sigma, Sigma_E))
    root = damping**0.5
    return root * mean_A / mean_E, root * mean_E / mean_A


def _mean_eigenvalue(S: Tensor) -> Tensor:
    return S.mean() if S.dim() == 1 else S.diagonal(dim1=-2, dim2=-1).mean(-1)


class TwoSided(ABC):
    """A preconditioner with a factor on either side of the gradient: ``finish(left · Eᵀ A · right)``, X ↦ X·right acting on rows.

    ``A·right`` costs 2·rows·m² on the rows and 2·n·m² on the gradient, ``E·left`` 2·rows·n² and 2·m·n²: each side has its choice, unless
    that saves less than it costs to have rows at all.
    """

    linear = True  # does the update of a sum of gradients equal the sum of the updates?

    @abstractmethod
    def right(self, X: Tensor) -> Tensor:
        """For X ``(..., r, m)``: rows of inputs, or a gradient."""

    @abstractmethod
    def left(self, X: Tensor) -> Tensor:
        """For X ``(..., r, n)``: rows of errors, or a transposed gradient."""

    def finish(self, G: Tensor) -> Tensor:
        """What is left to do on the gradient ``(..., n, m)`` once both sides are done."""
        return G

    def apply(self, G: Tensor) -> Tensor:
        """The update for a gradient ``(..., n, m)``."""
        return self.finish(self.right(self.left(G.mT).mT))

    def gradient(self, layer: Layer, x: Tensor, e: Tensor, plain: Plain | None = None) -> Tensor:
        """The update ``(..., n, m)`` from a layer's input and the gradient of its output, by the cheapest way; plain as above."""
        e = linalg.cast(e, wide(e.dtype))
        rows = layer.rows(e)
        errors_first, inputs_first = rows < layer.m, rows < layer.n and not layer.diagonal
        saved = errors_first * layer.n**2 * (layer.m - rows) + inputs_first * layer.m**2 * (layer.n - rows)
        if not layer.diagonal:
            x = linalg.cast(x, e.dtype)
        if saved <= layer.cutting * rows * layer.m:
            return self.apply(plain(e.dtype) if plain else layer.weight_gradient(x, e))
        E = layer.error_matrix(e)
        if errors_first:
            E = self.left(E)
        if layer.diagonal:
            G = layer.weight_gradient(x, E)
        else:
            A = layer.input_matrix(x)
            G = linalg.product(E.mT, self.right(A) if inputs_first else A)
        if not errors_first:
            G = self.left(G.mT).mT
        return self.finish(G if inputs_first else self.right(G))


class KroneckerInverse(TwoSided):
    """KFAC with heuristic damping: ``(Σ_E + λ_E I)⁻¹ Eᵀ A (Σ + λ_A I)⁻¹`` (Eqs. 2 and 4)."""

    def __init__(self, inputs: InputInverse, errors: InputInverse, lambda_E: Tensor) -> None:
        self.inputs, self.errors, self.lambda_E = inputs, errors, lambda_E

    @classmethod
    def make(cls, Sigma: Tensor, Sigma_E: Tensor, damping: float, name: str, uses: tuple[float, float]) -> KroneckerInverse:
        """Sigma ``(..., m, m)`` or ``(m,)``, Sigma_E ``(..., n, n)``; ``uses``: rows each side will multiply, see ``InputInverse.make``."""
        lambda_A, lambda_E = split_damping(Sigma, Sigma_E, damping)
        inputs = InputInverse.make(Sigma, lambda_A, f"{name} (inputs)", uses[0])
        return cls(inputs, InputInverse.make(Sigma_E, lambda_E, f"{name} (errors)", uses[1]), lambda_E)

    @classmethod
    def begin(cls, Sigma: Tensor, Sigma_E: Tensor, damping: float, name: str) -> Gradual:
        """The same in parts, both sides held as inverses."""
        lambda_A, lambda_E = split_damping(Sigma, Sigma_E, damping)
        errors = Sweep(Sigma_E, lambda_E)
        if Sigma.dim() == 1:
            inputs = InputInverse.make(Sigma, lambda_A, name)
            return Gradual([errors], lambda P_E: cls(inputs, InputInverse("inverse", P_E), lambda_E))
        return Gradual(
            [Sweep(Sigma, lambda_A), errors],
            lambda P, P_E: cls(InputInverse("inverse", P), InputInverse("inverse", P_E), lambda_E),
        )

    def right(self, X: Tensor) -> Tensor:
        return self.inputs.apply(X)

    def left(self, X: Tensor) -> Tensor:
        return self.errors.apply(X)

    def state_dict(self) -> dict[str, Any]:
        return {"inputs": self.inputs.state_dict(), "errors": self.errors.state_dict(), "lambda_E": self.lambda_E.clone()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> KroneckerInverse:
        inputs, errors = (InputInverse.from_state_dict(state[side]) for side in ("inputs", "errors"))
        return cls(inputs, errors, state["lambda_E"])


class EigenInverse(TwoSided):
    """KFAC with standard damping: ``(Σ ⊗ Σ_E + λI)⁻¹`` (Eq. 3), exactly, in the eigenbases of the factors.

    ``U_E [(U_Eᵀ Eᵀ A U_A) / (s_E s_Aᵀ + λ)] U_Aᵀ``; the rotations are done on rows or gradient as for any two sides. For a diagonal
    Σ, U_A = I and is not held.
    """

    def __init__(self, s_A: Tensor, U_A: Tensor | None, s_E: Tensor, U_E: Tensor, damping: float) -> None:
        self.s_A, self.U_A, self.s_E, self.U_E, self.damping = s_A, U_A, s_E, U_E, damping

    @classmethod
    def make(cls, Sigma: Tensor, Sigma_E: Tensor, damping: float, name: str, uses: tuple[float, float]) -> EigenInverse:
        """Sigma ``(..., m, m)`` or ``(m,)``, Sigma_E ``(..., n, n)``; an eigenbasis serves any number of uses."""
        s_A, U_A = (Sigma.clone(), None) if Sigma.dim() == 1 else linalg.eigh(Sigma)
        return cls(s_A, U_A, *linalg.eigh(Sigma_E), damping)

    def with_damping(self, damping: float, scale: float = 1.0) -> EigenInverse:
        """``(c Σ ⊗ Σ_E + λI)⁻¹`` for another λ, and c = ``scale``: an eigenbasis serves every one."""
        return type(self)(self.s_A, self.U_A, scale * self.s_E, self.U_E, damping)

    @property
    def eigenvalues(self) -> Tensor:
        """``s_E s_Aᵀ + λ`` of the matrix that is inverted, ``(..., n, m)``."""
        return self.s_E.unsqueeze(-1) * self.s_A.unsqueeze(-2) + self.damping

    def right(self, X: Tensor) -> Tensor:
        return X if self.U_A is None else linalg.product(linalg.cast(X, self.U_A.dtype), self.U_A)

    def left(self, X: Tensor) -> Tensor:
        return linalg.product(linalg.cast(X, self.U_E.dtype), self.U_E)

    def back(self, G: Tensor) -> Tensor:
        """``U_E G U_Aᵀ``: out of the eigenbases."""
        G = linalg.product(self.U_E, G)
        return G if self.U_A is None else linalg.product(G, self.U_A.mT)

    def finish(self, G: Tensor) -> Tensor:
        return self.back(G / self.eigenvalues)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws from ``N(0, (Σ ⊗ Σ_E + λI)⁻¹)``, each as a matrix: ``U_E [Z / √(s_E s_Aᵀ + λ)] U_Aᵀ``, ``(n, ..., n, m)``."""
        roots = self.eigenvalues.sqrt()
        return self.back(torch.randn(n, *roots.shape, dtype=roots.dtype, device=roots.device, generator=generator) / roots)

    def whitened(self, G: Tensor) -> Tensor:
        """``X`` with ``⟨X, Y⟩ = Gᵀ (Σ ⊗ Σ_E + λI)⁻¹ H`` for the X of G and the Y of H ``(..., n, m)``."""
        return self.right(self.left(G.mT).mT) / self.eigenvalues.sqrt()

    def logdet(self) -> Tensor:
        """``log det (Σ ⊗ Σ_E + λI)``, a float64 number."""
        return self.eigenvalues.double().log().sum()

    def state_dict(self) -> dict[str, Any]:
        tensors = {"s_A": self.s_A, "U_A": self.U_A, "s_E": self.s_E, "U_E": self.U_E}
        return {**{k: None if v is None else v.clone() for k, v in tensors.items()}, "damping": self.damping}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> EigenInverse:
        return cls(*(state[k] for k in ("s_A", "U_A", "s_E", "U_E", "damping")))
