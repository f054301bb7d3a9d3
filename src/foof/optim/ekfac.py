"""EKFAC (George et al. 2018): KFAC's eigenbasis, with the second moments that gradients really have in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.gradients import BUDGET, chunks
from foof.kronecker import EigenInverse
from foof.likelihood import Labels, Likelihood, likelihood_named
from foof.optim.block import Block, Damping
from foof.optim.change import BoundedSteps, Changes
from foof.optim.checks import Fallback
from foof.optim.engine import Engine
from foof.optim.estimators import FisherPasses, FisherRows, FisherSettings, KroneckerFisher
from foof.optim.kfac import check_unsharded
from foof.optim.step import Ledger
from foof.statistics import Schedule, wide
from foof.tap import Visit


class ScaledEigenInverse(EigenInverse):
    """``U_E [(U_Eᵀ Eᵀ A U_A) / (S + λ)] U_Aᵀ`` with S ``(..., n, m)`` the second moments of gradients in the eigenbases.

    S begins as KFAC's ``s_E s_Aᵀ``, which the first batch replaces; then it is a normalised moving average with the given mass.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.scale, self.mass = self.s_E.unsqueeze(-1) * self.s_A.unsqueeze(-2), 0.0

    def finish(self, G: Tensor) -> Tensor:
        G = self.U_E @ (G / (self.scale + self.damping))
        return G if self.U_A is None else G @ self.U_A.mT

    def update(self, squares: Tensor, ema: float) -> None:
        """``S ← (1-α) S + α squares``, as ``foof.statistics.MovingAverage``."""
        self.mass = ema * self.mass + (1 - ema)
        alpha = (1 - ema) / self.mass
        self.scale = (1 - alpha) * self.scale + alpha * squares

    def follow(self, old: ScaledEigenInverse) -> None:
        """S as the diagonal, in this basis, of the approximation in the old one: ``(U_E'ᵀU_E)^∘2 S (U_AᵀU_A')^∘2``."""
        scale = (self.U_E.mT @ old.U_E).square() @ old.scale
        if self.U_A is not None and old.U_A is not None:
            scale = scale @ (old.U_A.mT @ self.U_A).square()
        self.scale, self.mass = scale, old.mass

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale.clone(), "mass": self.mass}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> ScaledEigenInverse:
        made = super().from_state_dict(state)
        assert isinstance(made, cls)
        made.scale, made.mass = state["scale"], float(state["mass"])
        return made


class FisherGradients(FisherRows):
    """Beside Σ and Σ_E the rows themselves, of which per-datapoint gradients are made: ``a`` (..., N, R, m), each ``e`` (..., N, R, n)."""

    def __init__(self, estimate: FisherPasses) -> None:
        super().__init__(estimate)
        self.a: Tensor | None = None
        self.e: list[Tensor] = []

    def record(self, visit: Visit, settings: FisherSettings, first: bool) -> None:
        super().record(visit, settings, first)
        layer, used, dtype = visit.layer, settings.datapoints, wide(visit.e.dtype)
        if layer.diagonal:  # one-hot inputs: the gradients of an embedding would be dense; it keeps KFAC's scale
            return
        part = slice(used if len(visit.x) == self.estimate.batch else None)
        if first:
            self.a = layer.input_rows(visit.x.detach()[part].to(dtype)).clone()
        e = layer.error_rows(visit.e[part].to(dtype))
        if visit.mask is not None and layer.groups == 1 and visit.mask[part].numel() == e.shape[-3] * e.shape[-2]:
            e = e * visit.mask[part].reshape(*e.shape[:-1], 1)
        self.e.append(e)


def projected_squares(inverse: EigenInverse, a: Tensor, errors: Sequence[Tensor]) -> Tensor:
    """``Σ_i Σ_k (U_Eᵀ E_ikᵀ A_i U_A)^∘2`` ``(..., n, m)``. a ``(..., N, R, m)``, each of the errors ``(..., N, R, n)``."""
    A = inverse.right(a.flatten(-3, -2)).unflatten(-2, a.shape[-3:-1])
    total = torch.zeros((), dtype=A.dtype, device=A.device)
    for e in errors:
        E = inverse.left(e.flatten(-3, -2)).unflatten(-2, e.shape[-3:-1])
        if A.shape[-2] == 1:  # (e aᵀ)² = e² (a²)ᵀ
            total = total + E.squeeze(-2).square().mT @ A.squeeze(-2).square()
            continue
        for some in chunks(A.shape[-3], BUDGET // (8 * E.shape[-1] * A.shape[-1])):
            total = total + (E[..., some, :, :].mT @ A[..., some, :, :]).square().sum(-3)
    return total


class EigenFisher(KroneckerFisher):
    """EKFAC's estimator: KFAC's, and in the eigenbasis at hand a moving average of squared per-datapoint gradients of the Fisher."""

    note = FisherGradients

    def __init__(self, settings: FisherSettings, generator: torch.Generator | int | None, device: torch.device, ema: float) -> None:
        super().__init__(settings, ScaledEigenInverse, generator, device)
        self.ema = ema

    def adopt(self, block: Block, old: Any) -> None:
        if old is not None:
            block.inverse.follow(old)

    def folded(self, ledgers: dict[Block, Ledger]) -> None:
        for block, ledger in ledgers.items():
            calls = defaultdict[FisherPasses, list[FisherGradients]](list)  # several calls on one batch add rows to its datapoints
            for note in ledger.notes:
                if isinstance(note, FisherGradients) and note.a is not None:
                    calls[note.estimate].append(note)
            if not calls or block.inverse is None:
                continue
            squares, datapoints = torch.zeros_like(block.inverse.scale), 0
            for notes in calls.values():
                a = torch.cat([note.a for note in notes if note.a is not None], dim=-2)
                errors = [torch.cat(same, dim=-2) for same in zip(*(note.e for note in notes), strict=True)]
                squares, datapoints = squares + projected_squares(block.inverse, a, errors), datapoints + a.shape[-3]
                for note in notes:
                    note.a, note.e = None, []
            if datapoints and bool(torch.isfinite(squares).all()):
                block.inverse.update(squares / datapoints, self.ema)


class EKFAC(BoundedSteps):
    """``W ← W - lr · U_E [(U_Eᵀ Eᵀ A U_A) / (S + λ)] U_Aᵀ``: KFAC's eigenbases, rescaled (George et al. 2018).

    ``S`` is the moving average of ``1/N Σ_i Σ_k (U_Eᵀ g_ik U_A)^∘2`` over per-datapoint gradients g of the Fisher: the best diagonal in
    KFAC's basis, which itself is renewed every T steps; S follows it. Where S is ``s_E s_Aᵀ`` this is KFAC with standard damping.
    Embeddings keep KFAC's scale. Use it as ``foof.KFAC``: ``opt.update_curvature(out)`` before ``backward()``.

    Args:
        model, lr, damping, max_change, fisher, samples, likelihood, datapoints, generator, ema, T, S, spread, momentum, weight_decay, rest,
            groups, exclude, maximize: as in ``foof.KFAC``.
    """

    def __init__(self, model: nn.Module, lr: float = 0.003, damping: float = 0.01, *, max_change: float | None = None,
                 fisher: str = "mc", samples: int = 1,
                 likelihood: str | Likelihood = "categorical", datapoints: int | None = None,
                 generator: torch.Generator | int | None = None, momentum: float = 0.0, weight_decay: float = 0.0,
                 ema: float = 0.95, T: int = 100, S: int | None = None, spread: bool = False, rest: Fallback = "adamw",
                 groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (), maximize: bool = False) -> None:  # fmt: skip
        for options in ({"damping": damping}, *groups):
            Damping(options.get("damping", damping), options.get("relative", False)).absolute("EKFAC needs")
        make = ekfac_fisher(ema, fisher=fisher, samples=samples, likelihood=likelihood, datapoints=datapoints, generator=generator)
        engine = Engine(model, make, Schedule.of(T, S, spread=spread), ema, exclude=exclude)
        check_unsharded(engine)
        defaults = {"lr": lr, "damping": damping, "relative": False, "max_change": max_change, "momentum": momentum,
                    "weight_decay": weight_decay}  # fmt: skip
        self._bound = Changes(engine)
        super().__init__(engine, defaults, groups, rest, maximize)


def ekfac_fisher(ema: float, *, fisher: str = "mc", samples: int = 1, likelihood: str | Likelihood = "categorical",
                 datapoints: int | None = None, generator: torch.Generator | int | None = None) -> Callable[[torch.device], EigenFisher]:
    """EKFAC's estimator for a device, from what people write."""
    if distributed.group_of(None) is not None:
        raise NotImplementedError("EKFAC rescales by the gradients of one process's batch: the ranks would part. Use KFAC here.")
    settings = FisherSettings(Labels(fisher, samples), likelihood_named(likelihood), datapoints)
    return lambda device: EigenFisher(settings, generator, device, ema)
