"""Adam in the eigenbasis of Σ: the coordinates in which a layer's inputs are uncorrelated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.linalg import eigh
from foof.optim.base import NeuronOptimizer
from foof.optim.block import Block
from foof.optim.checks import Fallback
from foof.optim.estimators import InputMoments
from foof.optim.muon import engine_for_matrices
from foof.optim.rules import adam_in_basis, carry_moments, descend
from foof.optim.step import Ledger
from foof.statistics import Schedule, wide


class Eigenbasis:
    """The eigenvectors of Σ in the columns of ``U (..., m, m)``: an orthogonal change of coordinates, ``X ↦ X U``."""

    def __init__(self, U: Tensor) -> None:
        self.U = U

    def state_dict(self) -> dict[str, Any]:
        return {"U": self.U.clone()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Eigenbasis:
        return cls(state["U"])


class InputBasis(InputMoments):
    """Σ as FOOF's, as a mean over rows, and its eigenvectors in place of an inverse; gradients stay plain."""

    name = "adamw"
    plain, watches = True, False

    def __init__(self, row_stride: int = 1) -> None:
        super().__init__(mean_over_rows=True, row_stride=row_stride)
        self.state_of: Callable[[Tensor], dict[str, Any] | None] = lambda weight: None  # the optimizer's, whose moments follow the basis

    def leaves_plain(self, block: Block) -> bool:
        return True

    def invert(self, block: Block, T: int) -> Eigenbasis:  # type: ignore[override]
        Sigma = block.moments["Sigma"].value
        assert Sigma is not None
        return Eigenbasis(eigh(Sigma)[1].contiguous())  # as after a checkpoint: another layout would round differently

    def parts(self, block: Block) -> int:
        return 1

    def inverse_from(self, state: dict[str, Any]) -> Eigenbasis:  # type: ignore[override]
        return Eigenbasis.from_state_dict(state)

    def adopt(self, block: Block, old: Eigenbasis | None) -> None:
        state, same = self.state_of(block.weight), old is not None and torch.equal(old.U, block.inverse.U)  # refreshed after a checkpoint
        if state and not same:  # UᵀU is the identity up to rounding only
            with joined(block, state) as (first, second):
                carry_moments(first, second, None if old is None else old.U, block.inverse.U)

    def precondition(self, ledgers: dict[Block, Ledger | None]) -> None:
        """Nothing: the rule does the rotating."""


class joined:
    """A weight's two moments as matrices ``(..., n, m)`` to change in place; then back in the shape and the shards they have."""

    def __init__(self, block: Block, state: dict[str, Any]) -> None:
        self.layer, self.kept = block.layer, (state["exp_avg"], state["exp_avg_sq"])
        self.whole = [self.layer.join(distributed.full(moment), None).to(wide(moment.dtype)) for moment in self.kept]

    def __enter__(self) -> tuple[Tensor, Tensor]:
        return self.whole[0], self.whole[1]

    def __exit__(self, *_: object) -> None:
        for moment, whole in zip(self.kept, self.whole, strict=True):
            if distributed.is_sharded(moment) or whole.data_ptr() != moment.data_ptr():
                distributed.write(moment, self.layer.split(whole)[0])


class AdamW(NeuronOptimizer):
    """Adam with decoupled decay in the eigenbasis U of Σ, layer by layer; plain AdamW for all else, at the same learning rate.

        G' = G U,   m ← β₁ m + (1 − β₁) G',   v ← β₂ v + (1 − β₂) G'∘G'
        W ← (1 − lr·decay) W − lr · [m̂ / (√v̂ + ε)] Uᵀ

    When the basis is refreshed the moments follow it: m exactly, v as second moments of uncorrelated coordinates.

    Args:
        model: its linear and convolution layers are covered, except what is tied to an embedding.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        ema, T, S: the basis is refreshed every T steps, and Σ fed on the S steps before.
        spread: as for ``foof.FOOF``; one layer after the other, but each at once.
        row_stride: as for ``foof.Muon``.
        rest: the fallback optimizer; None: ``torch.optim.AdamW`` with the same lr, betas, eps and decay.
        groups, exclude, maximize, process_group: as for ``foof.FOOF``.
    """

    group_options = ("lr", "weight_decay")

    def __init__(self, model: nn.Module, lr: float = 3e-3, *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
                 weight_decay: float = 0.01, ema: float = 0.9, T: int = 32, S: int | None = None, spread: bool = False, row_stride: int = 1,
                 rest: Fallback | None = None, groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (),
                 maximize: bool = False, process_group: Any = None) -> None:  # fmt: skip
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas must be in [0, 1), two of them, got {betas}.")
        self.betas, self.eps = betas, eps
        basis = InputBasis(row_stride)
        engine = engine_for_matrices(model, basis, Schedule.of(T, S, 2, spread), ema, exclude, (), process_group)
        defaults = {"lr": lr, "damping": 1.0, "relative": True, "momentum": 0.0, "weight_decay": weight_decay}
        fallback = {"name": "adamw", "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay} if rest is None else rest
        super().__init__(engine, defaults, groups, fallback, maximize)
        basis.state_of = lambda weight: self.state.get(weight)

    def _update(self, group: dict[str, Any]) -> None:
        sign = -1.0 if self.maximize else 1.0
        lr, decay = sign * group["lr"], sign * group["weight_decay"]
        for block in self.preconditioner.blocks:
            if block.options is group and block.weight.grad is not None:
                descend([block.weight], [self._direction(block, block.weight.grad)], [], lr, 0.0, decay)

    def _direction(self, block: Block, gradient: Tensor) -> Tensor:
        """Adam's update in the eigenbasis, in the shape of the weight, and sharded as it is."""
        state, basis = self.state[block.weight], block.inverse
        if "exp_avg" not in state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(block.weight), exp_avg_sq=torch.zeros_like(block.weight))
        state["step"] += 1
        with torch.autocast(gradient.device.type, enabled=False), joined(block, state) as (first, second):
            G = block.layer.join(distributed.full(gradient), None).to(first.dtype)
            matrix = adam_in_basis(first, second, G, None if basis is None else basis.U, int(state["step"]), self.betas, self.eps)
        update = torch.empty_like(gradient)
        distributed.write(update, block.layer.split(matrix)[0])
        return update
