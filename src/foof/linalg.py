"""Damped factorisations, inverses and solves: tensors in, tensors out.

Every matrix here is symmetric positive semi-definite before damping; leading dimensions are batch dimensions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foof import _torch

CPU: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # what torch knows of the processor; older ones nothing
ONEDNN = None if "Intel" in str(CPU.get("cpu_name")) else _torch.onednn_linear
WIDE = ONEDNN is not None and bool(CPU.get("avx512_f"))  # MKL leaves half of such a processor unused if it is not Intel's
LARGE = 2**21 if WIDE else 2**24  # multiplications, from which on a call of oneDNN costs less than it saves
FEW_ROWS = 32  # as many rows as a triangular solve needs for its full speed
SOME_ROWS = 320  # as many as several threads need to share it well
LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # exported, but not typed so


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.to(dtype)``, without the call where x has this precision already: in a backward pass it is asked for every layer."""
    return x if x.dtype == dtype else x.to(dtype)


def times_transposed(X: Tensor, Y: Tensor) -> Tensor:
    """``X Yᵀ`` for X ``(..., r, k)`` and Y ``(..., c, k)``.

    Without derivatives, large and in single precision on a CPU that torch does not know as Intel's, by oneDNN: 5 to 30 % faster for few
    rows than ``@``, which is MKL's, on an AMD EPYC, and twice as fast where it has AVX-512; on an Intel Xeon 0 to 20 % slower.
    """
    if (
        ONEDNN is not None and X.dim() == Y.dim() == 2 and X.dtype == Y.dtype == torch.float32 and X.is_cpu and Y.is_cpu
        and type(X) is Tensor and len(X) * Y.numel() >= LARGE and not torch.is_grad_enabled()
    ):  # fmt: skip
        dense = Y.is_contiguous() or Y.mT.is_contiguous()  # of a part of a larger matrix it would take a thousand times as long
        return ONEDNN(X, Y if dense else Y.contiguous(), None, "none", [], "")
    return X @ Y.mT


def product(X: Tensor, Y: Tensor) -> Tensor:
    """``X Y`` for X ``(..., r, k)`` and Y ``(..., k, c)``; by oneDNN where that is faster for any number of rows."""
    return times_transposed(X, Y.mT) if WIDE else X @ Y


def add_damping(S: Tensor, damping: float | Tensor) -> Tensor:
    """``S + λI`` as a new tensor. S ``(..., m, m)``; λ a number, or one per batch entry ``(...)``."""
    damped = S.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping.unsqueeze(-1) if isinstance(damping, Tensor) else damping)
    return damped


def damped_cholesky(S: Tensor, damping: float | Tensor, name: str = "matrix") -> Tensor:
    """Lower ``L`` with ``L Lᵀ = S + λI`` for the λ that was asked for, in the precision of S ``(..., m, m)``.

    Where rounding leaves ``S + λI`` indefinite: in float64; then for the semi-definite matrix nearest to S, if S differs from it by
    no more than its rounding; else a ``LinAlgError`` that says what to do. λ itself is never changed.
    """
    L, info = _cholesky(add_damping(S, damping))
    return L if not info.any() else _wide_cholesky(S, damping, name).to(S.dtype)


def damped_inverse(S: Tensor, damping: float | Tensor, name: str = "matrix") -> Tensor:
    """``P = (S + λI)⁻¹``, by Cholesky. S, P ``(..., m, m)``."""
    L, info = _cholesky(add_damping(S, damping))
    L = L if not info.any() else _wide_cholesky(S, damping, name)
    return torch.cholesky_inverse(L, out=None if _differentiated(L) else L).to(S.dtype)


def _cholesky(A: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.linalg.cholesky_ex`` of a symmetric A ``(..., m, m)``, in A's own memory unless derivatives are wanted: new memory takes as
    long as a third of the factorisation.
    """
    if _differentiated(A):
        return torch.linalg.cholesky_ex(A)
    by_columns = A.mT  # as LAPACK wants it
    info = torch.empty(A.shape[:-2], dtype=torch.int32, device=A.device)
    return torch.linalg.cholesky_ex(by_columns, out=(by_columns, info))


def _differentiated(X: Tensor) -> bool:
    return X.requires_grad or _torch.inside_transform()


def _wide_cholesky(S: Tensor, damping: float | Tensor, name: str) -> Tensor:
    """The Cholesky factor in float64, of S or else of the semi-definite matrix nearest to it."""
    if not torch.isfinite(S).all():
        raise LinAlgError(f"{name}: the {tuple(S.shape)} second moment holds NaN or inf; damping cannot mend that.")
    wide, damping = S.double(), damping.double() if isinstance(damping, Tensor) else damping
    L, info = torch.linalg.cholesky_ex(add_damping(wide, damping))
    if not info.any():
        return L
    s, U = torch.linalg.eigh(wide)
    rounding = S.shape[-1] * torch.finfo(S.dtype).eps * s[..., -1]
    if not (s[..., 0] < -rounding).any():
        nearest = U @ (s.clamp_min(0).unsqueeze(-1) * U.mT)
        L, info = torch.linalg.cholesky_ex(add_damping(nearest, damping))
        if not info.any():
            return L
    raise LinAlgError(_explain_failure(s, damping, name))


def _explain_failure(eigenvalues: Tensor, damping: float | Tensor, name: str) -> str:
    smallest, largest = eigenvalues.min().item(), eigenvalues.max().item()
    used = float(damping.min()) if isinstance(damping, Tensor) else damping
    enough = 10.0 ** math.ceil(math.log10(max(largest * 1e-5, -2 * smallest, 1e-30)))
    return (
        f"{name}: S + λI with S {tuple(eigenvalues.shape)[-1:] * 2} is not positive definite, even in float64 "
        f"(eigenvalues of S from {smallest:.3g} to {largest:.3g}, λ = {used:.3g}). Try damping ≥ {enough:.0e}."
    )


def solve_right(X: Tensor, L: Tensor) -> Tensor:
    """``X (L Lᵀ)⁻¹`` without forming the inverse. X ``(..., r, m)``, L ``(..., m, m)`` lower triangular.

    From the left, for ``Xᵀ``, where that is faster: MKL takes half the time for ten rows on a CPU, and two thirds for a hundred on
    several threads.
    """
    if X.is_cpu and X.shape[-2] < (FEW_ROWS if torch.get_num_threads() == 1 else SOME_ROWS):
        half = torch.linalg.solve_triangular(L, X.mT, upper=False)
        return torch.linalg.solve_triangular(L.mT, half, upper=True).mT
    half = torch.linalg.solve_triangular(L.mT, X, upper=True, left=False)
    return torch.linalg.solve_triangular(L, half, upper=False, left=False)


def inverse_pays(m: int, uses: float) -> bool:
    """Does the inverse of a matrix ``(m, m)`` pay, beside its Cholesky factor, for so many ``uses``, rows to be multiplied?

    It costs 2/3·m³ more and saves about 2·m² for each row, since triangular solves run at about half the speed of products.
    """
    return uses >= m / 3


def uses(times: float, rows: float) -> float:
    """So many rows, so many times, for ``inverse_pays``: a solve for few rows counts as one for ``FEW_ROWS``."""
    return times * max(rows, FEW_ROWS)


def eigh(S: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues ``s ≥ 0`` ``(..., m)`` and eigenvectors in the *columns* of ``U``: ``S = U diag(s) Uᵀ``."""
    s, U = torch.linalg.eigh(S)
    return s.clamp_min(0), U


def kronecker_solve(G: Tensor, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], damping: float | Tensor) -> Tensor:
    """``X`` with ``S_E X S_A + λX = G``: Eq. (3) of the paper, solved exactly in the eigenbases.

    ``X = U_E [(U_Eᵀ G U_A) / (s_E s_Aᵀ + λ)] U_Aᵀ``. G, X ``(..., n, m)``; left = (s_E, U_E), right = (s_A, U_A).
    """
    (s_E, U_E), (s_A, U_A) = left, right
    rotated = U_E.mT @ G @ U_A
    return U_E @ (rotated / (s_E.unsqueeze(-1) * s_A.unsqueeze(-2) + damping)) @ U_A.mT
