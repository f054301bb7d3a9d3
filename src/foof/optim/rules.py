"""What is done with gradients and second moments to make an update: tensors in, tensors out. The optimizer classes only loop.

A gradient ``G``, an update ``U`` and a weight ``W`` are ``(..., n, m)``, ``Sigma`` and its inverse ``P`` are ``(..., m, m)``; leading
dimensions are batch dimensions (the groups of a convolution). State (momentum, moments) is changed in place, gradients never.
"""

from __future__ import annotations

import math
from itertools import compress
from operator import not_

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from foof._torch import foreach_add_, foreach_addcmul_, foreach_mul_, fused_sgd_
from foof.linalg import damped_inverse, eigh
from foof.statistics import wide

MUON_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # K. Jordan's: the steepest slope at zero that keeps singular values near one
MUON_SCALES = ("original", "match_rms_adamw")
POWERS = (-1.0, -0.5)
FLOOR = 0.1  # of the output power of weights of variance 1/m
NEURONS = 128  # on whose outputs the reach of an update is measured


def descend(params: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
    """``v ← μ v + g;  w ← (1 - lr·decay) w - lr·v``, in place; without momentum v = g."""
    if weight_decay:
        foreach_mul_(params, 1 - lr * weight_decay)
    if momentum:
        (some, of_some, theirs), (params, gradients, buffers) = _lie_alike(params, gradients, buffers)
        _in_one_pass(some, of_some, theirs, lr, momentum)
        if not params:
            return
        foreach_mul_(buffers, momentum)
        foreach_add_(buffers, gradients)
        gradients = buffers
    foreach_add_(params, gradients, alpha=-lr)


def _lie_alike(*lists: list[Tensor]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Of lists of parameters, gradients, buffers (and more): those whose step one pass over memory can take, and the others.

    On a CPU it saves a third of the time. It rounds the same in whole cache lines, and in what is left over at the end it does not.
    """
    alike = [
        type(g) is Tensor and p.is_cpu and p.dtype == g.dtype == v.dtype == wide(p.dtype) and p.numel() * p.itemsize % 64 == 0
        and p.is_contiguous() and g.is_contiguous() and v.is_contiguous()
        for p, g, v in zip(*lists[:3], strict=True)
    ]  # fmt: skip
    return [list(compress(tensors, alike)) for tensors in lists], [list(compress(tensors, map(not_, alike))) for tensors in lists]


def _in_one_pass(params: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], lr: float, momentum: float, f: float = 1.0) -> None:
    """``v ← μ v + f g;  w ← w - lr·v``. torch is told 1 - f: an f that it would not find again is multiplied by first."""
    if 1 - (1 - f) != f:
        gradients, f = [g * f for g in gradients], 1.0
    if params:
        fused_sgd_(params, gradients, buffers, weight_decay=0.0, momentum=momentum, lr=lr, dampening=1 - f, nesterov=False,
                   maximize=False, is_first_step=False)  # fmt: skip
        increment_version([*params, *buffers])  # so that autograd knows, which it does not of this one


# --- Neurons ---------------------------------------------------------------------------------------------------------------------


def relative(Sigma: Tensor) -> Tensor:
    """``Σ/s̄`` with ``s̄ = tr(Σ)/m``, the mean eigenvalue; Σ = 0 stays. Σ ``(..., m, m)``."""
    mean = Sigma.diagonal(dim1=-2, dim2=-1).mean(-1)
    return Sigma / torch.where(mean == 0, torch.ones_like(mean), mean)[..., None, None]


def relative_inverse(Sigma: Tensor, ridge: float, power: float = -1.0, name: str = "Sigma") -> Tensor:
    """``P = (Σ/s̄ + ridge·I)^power`` with ``s̄ = tr(Σ)/m``, the mean eigenvalue: the same for ``c Σ``. Σ, P ``(..., m, m)``.

    Power −1 by Cholesky, −1/2 in the eigenbasis. Gradients keep their scale under P; where no input was ever active, Σ = 0, all are
    treated alike.
    """
    if power not in POWERS:
        raise ValueError(f"power must be one of {POWERS}, got {power}.")
    scaled = relative(Sigma)
    if power == -1.0:
        return damped_inverse(scaled, ridge, name)
    return damped_power(scaled, ridge, power)


def damped_power(Sigma: Tensor, damping: float | Tensor, power: float) -> Tensor:
    """``(Σ + λI)^power`` in the eigenbasis. Σ ``(..., m, m)``, λ a number or ``(...)``."""
    s, U = eigh(Sigma)
    ridge = damping.unsqueeze(-1) if isinstance(damping, Tensor) else damping
    return (U * (s + ridge).pow(power).unsqueeze(-2)) @ U.mT


def blended(G: Tensor, N: Tensor, beta: float, graft: bool) -> Tensor:
    """``(1 − β) G + β N`` of a gradient and its neuron gradient; grafted with ``N ‖G‖/‖N‖`` in place of N. Where N = 0 it stays 0."""
    if graft:
        size = N.norm()
        N = N * torch.where(size == 0, size, G.norm() / size)
    return G.lerp(N, beta)


# --- Muon ------------------------------------------------------------------------------------------------------------------------


def newton_schulz(M: Tensor, steps: int = 5) -> Tensor:
    """About ``U Vᵀ`` of ``M = U S Vᵀ`` ``(..., n, m)``: singular values s ↦ p(p(…p(s/‖M‖))), ``p(s) = a s + b s³ + c s⁵``.

    In the precision that is fast where M is: bfloat16 on CUDA, float32 elsewhere; float64 stays. The answer has M's dtype.
    """
    a, b, c = MUON_COEFFICIENTS
    tall = M.shape[-2] > M.shape[-1]
    X = (M.mT if tall else M).to(_fast_dtype(M))
    X = X.flatten(end_dim=-3) if X.dim() > 3 else X
    X = X / X.norm(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(X.dtype).tiny ** 0.5)  # a loss of any scale; zeros stay
    fused = torch.addmm if X.dim() == 2 else torch.baddbmm
    for _ in range(steps):
        gram = X @ X.mT
        X = fused(X, fused(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return (X.mT if tall else X).reshape(M.shape).to(M.dtype)


def _fast_dtype(M: Tensor) -> torch.dtype:
    if M.dtype == torch.float64:
        return M.dtype
    return torch.bfloat16 if M.is_cuda else torch.float32


def muon_scale(n: int, m: int, kind: str = "original") -> float:
    """What an orthogonal ``(n, m)`` update is multiplied by, as in ``torch.optim.Muon``.

    ``"original"``: ``√max(1, n/m)``; ``"match_rms_adamw"``: ``0.2 √max(n, m)``, with which an entry is about 0.2, as under AdamW.
    """
    if kind not in MUON_SCALES:
        raise ValueError(f"scale must be one of {MUON_SCALES}, got {kind!r}.")
    return math.sqrt(max(1.0, n / m)) if kind == "original" else 0.2 * math.sqrt(max(n, m))


def momentum_of(buffer: Tensor, gradient: Tensor, momentum: float = 0.95, nesterov: bool = True) -> Tensor:
    """``B ← μ B + (1 − μ) G`` in place; then ``μ B + (1 − μ) G`` (Nesterov), or B. Entry by entry: any shape, sharded or not."""
    buffer.lerp_(gradient, 1 - momentum)
    return gradient.lerp(buffer, momentum) if nesterov else buffer


def orthogonalised(M: Tensor, inverse: Tensor | None = None, steps: int = 5, stacked: int = 1) -> Tensor:
    """``orth(M P)``. M ``(..., n, m)``, inverse ``P (..., m, m)``; None is the identity.

    stacked: so many matrices ``(n/stacked, m)`` stand one above the other in M, and each is orthogonalised by itself.
    """
    X = M if inverse is None else M.to(inverse.dtype) @ inverse
    return newton_schulz(X.unflatten(-2, (stacked, -1)), steps).flatten(-3, -2) if stacked > 1 else newton_schulz(X, steps)


def muon_update(buffer: Tensor, gradient: Tensor, inverse: Tensor | None = None, momentum: float = 0.95, nesterov: bool = True,
                steps: int = 5, scale: str = "original", stacked: int = 1) -> Tensor:  # fmt: skip
    """Momentum on neurons, orthogonalised. buffer and gradient ``(..., n, m)``, inverse ``P (..., m, m)``; None is Muon itself.

        B ← μ B + (1 − μ) G                in place, on raw gradients
        M = μ B + (1 − μ) G                Nesterov; else M = B
        update = scale · orth(M P)             of each matrix that is stacked in M by itself

    P stands between momentum and orthogonalisation: P is refreshed while B remembers, and B of neuron gradients would mix
    gradients seen through one P with those seen through another.
    """
    M = momentum_of(buffer, gradient, momentum, nesterov)
    return orthogonalised(M, inverse, steps, stacked) * muon_scale(M.shape[-2] // stacked, M.shape[-1], scale)


# --- Adam in the eigenbasis ------------------------------------------------------------------------------------------------------


def adam_in_basis(first: Tensor, second: Tensor, gradient: Tensor, basis: Tensor | None, step: int,
                  betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8) -> Tensor:  # fmt: skip
    """Adam's update with the coordinates of the inputs rotated by ``U``, the eigenvectors of Σ in columns ``(..., m, m)``.

        G' = G U,  m ← β₁ m + (1 − β₁) G',  v ← β₂ v + (1 − β₂) G'∘G'       both in the basis, in place
        update = [(m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)] Uᵀ

    step is t = 1, 2, ...; basis None is U = I, which is Adam. Decay is left to `descend`, and so decoupled.
    """
    rotated = gradient if basis is None else gradient @ basis
    first.lerp_(rotated, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(rotated, rotated, value=1 - betas[1])
    update = (first / (1 - betas[0] ** step)) / ((second / (1 - betas[1] ** step)).sqrt_().add_(eps))
    return update if basis is None else update @ basis.mT


def carry_moments(first: Tensor, second: Tensor, old: Tensor | None, new: Tensor) -> None:
    """Adam's moments from the basis ``U_old`` to ``U_new``, in place: with ``R = U_oldᵀ U_new``, ``m ← m R`` and ``v ← v (R∘R)``.

    The first is exact, as m is linear in the gradients. The second is exact where gradients are uncorrelated in the old basis;
    it ignores signs of eigenvectors, keeps each row's sum and follows a permutation exactly. old None is the identity.
    """
    R = new if old is None else old.mT @ new
    first.copy_(first @ R)
    second.copy_(second @ (R * R))


# --- How far an update moves the outputs -----------------------------------------------------------------------------------------


def output_power(W: Tensor, Sigma: Tensor) -> Tensor:
    """``tr(W Σ Wᵀ)``, the second moment of the outputs ``W a``: ``(...)``. Σ ``(..., m, m)``, or its diagonal ``(m,)``."""
    return ((W * Sigma if Sigma.dim() == 1 else W @ Sigma) * W).sum(dim=(-2, -1))


def output_change(update: Tensor, Sigma: Tensor, weight: Tensor) -> Tensor:
    """``ρ = √(tr(ΔW Σ ΔWᵀ) / tr(W Σ Wᵀ))``: by how much an update moves a layer's outputs, relative to their size; ``(...)``."""
    return relative_change(output_power(update, Sigma), output_power(weight, Sigma), unit_power(Sigma, weight.shape[-2]))


def unit_power(Sigma: Tensor, n: int) -> Tensor:
    """``n tr(Σ)/m``, the second moment of the outputs of weights of variance 1/m: ``(...)``."""
    return n * (Sigma if Sigma.dim() == 1 else Sigma.diagonal(dim1=-2, dim2=-1)).mean(-1)


def relative_change(change: Tensor, size: Tensor, unit: Tensor) -> Tensor:
    """``√(change / size)`` of output powers ``(...)``. Where weights are (nearly) zero (LoRA's B, a zeroed head), any update is
    infinitely far from them: no size counts as less than ``FLOOR`` of ``unit``, `unit_power`. Neither moved: 0."""
    size = torch.maximum(size, FLOOR * unit)
    return torch.where((change == 0) & (size == 0), change, change / size).clamp_min(0).sqrt()


def reach(update: Tensor, Sigma: Tensor, weight: Tensor, inputs: int | None = None) -> Tensor:
    """``ρ(U)/‖U‖``, one number for all groups: what to multiply an update's norm by to know how far it moves the outputs.

    Where Σ is diagonal in blocks of inputs, the leading dimension is over these, their outputs add up, and ``inputs`` is how many of them
    there are in all: the last block may be filled up.

    For U = 0 that of an update alike in all directions. ``U Σ Uᵀ`` costs 2·n·m² where a norm costs n·m: so that it can be measured now and
    then, the trace is over no more than ``NEURONS`` of the n, evenly spread.
    """
    return relative_change(*reach_powers(update, Sigma, weight, inputs).unbind())


def reach_powers(update: Tensor, Sigma: Tensor, weight: Tensor, inputs: int | None = None) -> Tensor:
    """What `relative_change` makes a `reach` of: the change of the outputs over ``‖U‖²``, their size, its unit; ``(3,)``. Linear in Σ."""
    n = update.shape[-2]
    some = slice(None, None, max(1, -(-n // NEURONS)))
    U, W = update[..., some, :], weight[..., some, :].to(update.dtype)
    power, size = U.square().sum(), output_power(W, Sigma).sum() * (n / U.shape[-2])
    unit = unit_power(Sigma, n).sum() * (1 if inputs is None else Sigma.shape[-1] / inputs)
    groups = 1 if inputs is not None else Sigma.shape[:-2].numel()
    change = torch.where(power == 0, unit / (n * groups), output_power(U, Sigma).sum() / power)
    return torch.stack([change, size, unit])


def paced(rho: Tensor, usual: Tensor) -> Tensor:
    """``1 / max(ρ, ρ̄/2)``: an update that would move the outputs by ρ, times this, moves them by 1, in their own size; ``(...)``.

    It moves them by less where ρ is below half of ``ρ̄``, the root mean square of all so far: as a network's errors shrink, so do its steps.
    Where nothing would move it is 0. NaN stays NaN.
    """
    largest = torch.maximum(rho, usual / 2)
    return torch.where(largest == 0, largest, 1 / largest)


def descend_by(params: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], factors: list[Tensor], lr: float, momentum: float,
               weight_decay: float) -> None:  # fmt: skip
    """`descend` with each gradient multiplied by a factor of its own, a tensor of one number: ``v ← μ v + f g``."""
    if weight_decay:
        foreach_mul_(params, 1 - lr * weight_decay)
    if not momentum:
        foreach_addcmul_(params, gradients, factors, value=-lr)
        return
    alike, (params, gradients, buffers, factors) = _lie_alike(params, gradients, buffers, factors)
    for p, g, v, factor in zip(*alike, strict=True):
        _in_one_pass([p], [g], [v], lr, momentum, factor.item())
    if params:
        foreach_mul_(buffers, momentum)
        foreach_addcmul_(buffers, gradients, factors)
        foreach_add_(params, buffers, alpha=-lr)


def at_most(tau: float | Tensor, rho: Tensor) -> Tensor:
    """``min(1, τ/ρ)``: what a step that moves the outputs by ρ is multiplied by where it may move them by τ; ``(...)``. NaN stays NaN."""
    return torch.where(rho <= tau, torch.ones_like(rho), tau / rho)
