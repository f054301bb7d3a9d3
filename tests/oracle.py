"""Slow, legible, dense: what every algorithm is compared with. Nothing here uses the library."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call


def matrix_shape(module: nn.Module) -> tuple[int, int, int]:
    """(groups, n, m) of a module seen as ``b = W a``, without the bias input."""
    weight = module.weight
    if isinstance(module, nn.Embedding):
        return 1, weight.shape[1], weight.shape[0]
    groups = getattr(module, "groups", 1)
    return groups, weight.shape[0] // groups, weight[0].numel()


def one_hot_weight(module: nn.Module, j: int) -> Tensor:
    """The weight for which the first output of every group is the j-th input of that group."""
    groups, n, _ = matrix_shape(module)
    weight = torch.zeros_like(module.weight)
    if isinstance(module, nn.Embedding):
        weight[j, 0] = 1
    else:
        weight.view(groups, n, -1)[:, 0, j] = 1
    return weight


def as_rows(module: nn.Module, b: Tensor) -> Tensor:
    """A module's output (or its gradient) as ``(G, N, R, n)``."""
    groups, n, _ = matrix_shape(module)
    if isinstance(module, (nn.Linear, nn.Embedding)):
        return b.reshape(1, len(b), -1, n)
    return b.reshape(len(b), groups, n, -1).permute(1, 0, 3, 2)


def input_rows(module: nn.Module, x: Tensor) -> Tensor:
    """Inputs ``(G, N, R, m)`` of a module, read off its own forward with one-hot weights; a bias appends a 1."""
    columns = []
    for j in range(matrix_shape(module)[2]):
        weights = {"weight": one_hot_weight(module, j)}
        if getattr(module, "bias", None) is not None:
            weights["bias"] = torch.zeros_like(module.bias)
        columns.append(as_rows(module, functional_call(module, weights, (x,)))[..., 0])
    if getattr(module, "bias", None) is not None:
        columns.append(torch.ones_like(columns[0]))
    a = torch.stack(columns, dim=-1).detach()
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        a[..., module.padding_idx] = 0
    return a


def gradient_matrix(module: nn.Module, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Weight and bias gradients as one matrix per group ``(G, n, m)``."""
    groups, n, _ = matrix_shape(module)
    if isinstance(module, nn.Embedding):
        return weight.mT.unsqueeze(0)
    matrix = weight.reshape(groups, n, -1)
    return matrix if bias is None else torch.cat([matrix, bias.reshape(groups, n, 1)], dim=-1)


def second_moment(rows: Tensor) -> Tensor:
    """``1/N Σ_i Σ_r a_ir a_irᵀ`` for rows ``(G, N, R, m)``: ``(G, m, m)``."""
    return torch.einsum("girk,girl->gkl", rows, rows) / rows.shape[1]


def foof_update(gradient: Tensor, Sigma: Tensor, damping: float) -> Tensor:
    """``Eᵀ A (Σ + λI)⁻¹`` (Eq. 6) for each group. gradient ``(G, n, m)``, Sigma ``(G, m, m)``."""
    identity = torch.eye(Sigma.shape[-1], dtype=Sigma.dtype)
    return gradient @ torch.linalg.inv(Sigma + damping * identity)


def per_datapoint_jacobian(model: nn.Module, x: Tensor, params: list[nn.Parameter]) -> Tensor:
    """``J[i, c, :] = ∂f_c(x_i)/∂θ`` over these parameters flattened in order: ``(N, C, P)``, one backward pass per output."""
    rows = []
    for i in range(len(x)):
        out = model(x[i : i + 1])[0].reshape(-1)
        for value in out:
            grads = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
            pairs = zip(params, grads, strict=True)
            rows.append(torch.cat([torch.zeros(p.numel()).to(p) if g is None else g.reshape(-1) for p, g in pairs]))
    return torch.stack(rows).reshape(len(x), -1, rows[0].numel()).detach()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """``|ours - theirs| / |theirs|`` in the Frobenius norm."""
    scale = theirs.norm().item()
    return (ours - theirs).norm().item() / scale if scale > 0 else (ours - theirs).norm().item()


# --- the Fisher, dense ---------------------------------------------------------------------------------------------------------


def output_hessian(likelihood: str, f: Tensor) -> Tensor:
    """``H = -∇² log p(y|f)`` for one output vector f ``(C,)``: the covariance of ``∂(-log p)/∂f`` under the model."""
    if likelihood == "categorical":
        p = f.softmax(0)
        return torch.diag(p) - torch.outer(p, p)
    if likelihood == "bernoulli":
        p = f.sigmoid()
        return torch.diag(p * (1 - p))
    return torch.eye(len(f), dtype=f.dtype)


def full_fisher(model: nn.Module, x: Tensor, params: list[nn.Parameter], likelihood: str) -> Tensor:
    """``1/N Σ_i J_iᵀ H_i J_i`` ``(P, P)``: the Fisher, and the generalised Gauss-Newton matrix."""
    J = per_datapoint_jacobian(model, x, params)
    out = model(x).detach()  # (N, ..., C): every position has a label of its own
    positions = J.unflatten(1, out.shape[1:]).reshape(len(x), -1, out.shape[-1], J.shape[-1])
    F = torch.zeros(J.shape[-1], J.shape[-1], dtype=J.dtype)
    for J_i, f_i in zip(positions.flatten(0, 1), out.reshape(-1, out.shape[-1]), strict=True):
        F += J_i.T @ output_hessian(likelihood, f_i) @ J_i / len(x)
    return F


def fisher_of_errors(model: nn.Module, x: Tensor, params: list[nn.Parameter], errors: Tensor) -> Tensor:
    """``1/N Σ_i g_i g_iᵀ`` with ``g_i = J_iᵀ s_i`` for given output errors ``(N, ..., C)``."""
    J = per_datapoint_jacobian(model, x, params)
    g = torch.einsum("icp,ic->ip", J, errors.reshape(len(x), -1))
    return g.T @ g / len(x)


def block_diagonal(F: Tensor, sizes: list[int]) -> Tensor:
    """F with everything outside the diagonal blocks of these sizes set to zero."""
    blocks, start = [], 0
    for size in sizes:
        blocks.append(F[start : start + size, start : start + size])
        start += size
    return torch.block_diag(*blocks)


# --- KFAC ----------------------------------------------------------------------------------------------------------------------


def output_errors(likelihood: str, out: Tensor) -> list[Tensor]:
    """Columns of a square root of each datapoint's H as output errors ``(N, C)``: the full Fisher's, by eigendecomposition."""
    roots = []
    for f in out.detach():
        s, U = torch.linalg.eigh(output_hessian(likelihood, f))
        roots.append(U * s.clamp_min(0).sqrt())
    return list(torch.stack(roots).unbind(-1))


def kronecker_factors(model: nn.Module, module: nn.Module, x: Tensor, errors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """``Σ = 1/N Σ_i Σ_r a aᵀ`` ``(G, m, m)`` and ``Σ_E = 1/(N R) Σ_i Σ_k Σ_r e e ᵀ`` ``(G, n, n)`` of one module, by hooks.

    ``errors``: output errors ``(N, C)`` of the per-datapoint losses, one backward pass each.
    """
    seen: dict[str, Tensor] = {}

    def hook(_module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        seen["x"], seen["b"] = args[0], out

    handle = module.register_forward_hook(hook)
    out = model(x)
    handle.remove()
    Sigma_E = torch.zeros(())
    for s in errors:
        e = as_rows(module, torch.autograd.grad(out, seen["b"], s, retain_graph=True)[0])
        Sigma_E = Sigma_E + torch.einsum("girk,girl->gkl", e, e) / (e.shape[1] * e.shape[2])
    return second_moment(input_rows(module, seen["x"].detach())), Sigma_E


def kfac_heuristic(gradient: Tensor, Sigma: Tensor, Sigma_E: Tensor, damping: float) -> tuple[Tensor, float, float]:
    """``(Σ_E + λ_E I)⁻¹ G (Σ + λ_A I)⁻¹`` (Eq. 2) for one matrix ``(n, m)``, with λ_A and λ_E."""
    n, m = gradient.shape
    ratio = n * Sigma.trace().item() / (m * Sigma_E.trace().item())
    lambda_A, lambda_E = (damping * ratio) ** 0.5, (damping / ratio) ** 0.5
    right = torch.linalg.inv(Sigma + lambda_A * torch.eye(m, dtype=Sigma.dtype))
    left = torch.linalg.inv(Sigma_E + lambda_E * torch.eye(n, dtype=Sigma.dtype))
    return left @ gradient @ right, lambda_A, lambda_E


def kfac_standard(gradient: Tensor, Sigma: Tensor, Sigma_E: Tensor, damping: float) -> Tensor:
    """``(Σ_E ⊗ Σ + λI)⁻¹ vec(G)`` (Eq. 3) for one matrix ``(n, m)`` and row-major vec, with the ``nm × nm`` matrix written out."""
    F = torch.kron(Sigma_E, Sigma)
    return torch.linalg.solve(F + damping * torch.eye(len(F), dtype=F.dtype), gradient.reshape(-1)).reshape(gradient.shape)


def kfac_standard_transposed(gradient: Tensor, Sigma: Tensor, Sigma_E: Tensor, damping: float) -> Tensor:
    """The paper's released code: it rotates with ``U_E`` where ``U_Eᵀ`` belongs. A counter-example."""
    (s_A, U_A), (s_E, U_E) = torch.linalg.eigh(Sigma), torch.linalg.eigh(Sigma_E)
    return U_E.T @ ((U_E @ gradient @ U_A) / (torch.outer(s_E, s_A) + damping)) @ U_A.T
