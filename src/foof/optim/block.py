"""One weight matrix (with its bias) and what is known of it: moving averages, their damped inverse, and how strongly it is damped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foof import distributed
from foof.kronecker import InputInverse
from foof.layers import Layer
from foof.statistics import MovingAverage, wide

PAPER_BATCH = 100  # the batch for which Appendix K reads the damping as the precision of the initialisation


@dataclass(frozen=True)
class Damping:
    """How strong λ is: a number, a fraction of the mean eigenvalue of Σ (``relative``), or ``"auto"``.

    "auto" is Appendix K's Bayesian reading: the precision of the usual weight initialisation (fan_in / 2) for a batch of 100, in
    the library's scale ``fan_in / 200``; nothing but the learning rate is left to tune.
    """

    value: float | str
    relative: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.value, str) and self.value != "auto":
            raise ValueError(f'damping must be a positive number or "auto", got {self.value!r}.')
        if not isinstance(self.value, str) and not 0 < self.value < float("inf"):
            raise ValueError(f"damping λ must be a positive, finite number, got {self.value}; Σ alone may be singular.")
        if self.value == "auto" and self.relative:
            raise ValueError('damping="auto" is absolute: give relative=True a number.')

    def strength(self, layer: Layer, Sigma: Tensor) -> float | Tensor:
        """λ for this layer: a number, or one per group."""
        if isinstance(self.value, str):
            return layer.prior_precision / PAPER_BATCH
        if not self.relative:
            return float(self.value)
        mean = (Sigma if layer.diagonal else Sigma.diagonal(dim1=-2, dim2=-1)).mean(-1)
        if Sigma.dim() == 3 and layer.groups == 1:  # diagonal in blocks of inputs, of which the last may be filled up with zeros
            first = torch.arange(0, mean.numel() * Sigma.shape[-1], Sigma.shape[-1], device=mean.device)
            mean = mean * (Sigma.shape[-1] / (layer.m - first).clamp(1, Sigma.shape[-1]))
        floor = torch.finfo(Sigma.dtype).eps * mean.max()  # a group that has seen zeros only has no gradient: any finite 1/λ will do
        return self.value * torch.where(floor > 0, mean.clamp_min(floor), 1.0)

    def absolute(self, whose: str) -> float:
        """λ as a number, for methods in whose scale there is nothing for it to be relative to."""
        if isinstance(self.value, str) or self.relative:
            raise ValueError(f'{whose} damping as a positive number: damping="auto" and relative=True are FOOF\'s.')
        return float(self.value)


@dataclass(eq=False)
class Block:
    """One weight matrix: every layer that uses it, the moving averages of its second moments, and their damped inverse."""

    layers: list[Layer]
    moments: dict[str, MovingAverage]
    options: Mapping[str, Any] = field(default_factory=dict)  # the group of the optimizer it belongs to: its damping
    inverse: Any = None
    made_of: tuple[Any, ...] = ()  # what the inverse was made of
    rows: int = 0  # rows of the latest backward pass
    shares_weight: bool = False  # with a block of another layout (tied embedding and head)
    begins: int = 0  # how many steps into a round its inversion begins, where it is fed on the steps before that

    def __post_init__(self) -> None:
        self.layer, self.name = self.layers[0], " = ".join(layer.label for layer in self.layers)
        self.parameters = self.layer.parameters  # as they were when this was made; within a pass under FSDP a module has others
        self.weight = self.parameters[0]
        self._here = self.weight.device, wide(self.weight.dtype)

    @property
    def damping(self) -> Damping:
        return Damping(self.options["damping"], self.options.get("relative", False))

    @property
    def known(self) -> bool:
        """Has every second moment been seen at least once?"""
        return all(moment.value is not None for moment in self.moments.values())

    def gradients(self) -> list[Tensor]:
        """``.grad`` of the weight and of the bias, where they have one."""
        return [p.grad for p in self.parameters if p.grad is not None]

    def raw(self) -> Tensor:
        """``.grad`` as the matrix ``(n, m)`` or ``(G, n, m)``."""
        weight, *bias = [torch.zeros_like(p) if p.grad is None else distributed.full(p.grad) for p in self.parameters]
        return self.layer.join(weight, bias[0] if bias else None)

    def precondition(self) -> None:
        """``.grad ← inverse(.grad)``. Where the rows of a weight are sharded and each has its own neuron gradient, shard by shard."""
        gradients = self.gradients()
        if isinstance(self.inverse, InputInverse) and self.layer.rows_first and all(map(distributed.sharded_by_rows, gradients)):
            rows = [distributed.local(g).flatten(1) if g.dim() > 1 else distributed.local(g).unsqueeze(1) for g in gradients]
            pieces = self.inverse.apply(torch.cat(rows, 1)).split([r.shape[1] for r in rows], dim=1)
            for gradient, piece in zip(gradients, pieces, strict=True):
                own = distributed.local(gradient)
                own.copy_(piece.reshape(own.shape))
        else:
            self.write(self.inverse.apply(self.raw()))

    def write(self, matrix: Tensor) -> None:
        """``.grad ← matrix``, in the shapes of the parameters."""
        for p, whole in zip(self.parameters, self.layer.split(matrix), strict=False):
            if p.grad is not None and whole is not None:
                distributed.write(p.grad, whole)

    def follow_weight(self) -> None:
        """Averages and inverse go where their weight has gone: ``model.double()``, ``model.to("cuda")``."""
        here = self.weight.device, wide(self.weight.dtype)
        if here != self._here:
            self._here = here
            if sum(moment.moved(*here) for moment in self.moments.values()) and self.inverse is not None:
                self.inverse = type(self.inverse).from_state_dict(moved(self.inverse.state_dict(), *here))


def made_of(block: Block) -> tuple[Any, ...]:
    """What an inverse of this block would be made of now."""
    return block.options["damping"], block.options.get("relative"), *[moment.updates for moment in block.moments.values()]


def moved(state: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of an inverse's state, with its tensors on this device and in this precision."""

    def here(value: Any) -> Any:
        if isinstance(value, Mapping):
            return moved(value, device, dtype)
        return value.to(device, dtype, copy=True) if isinstance(value, Tensor) else value

    return {key: here(value) for key, value in state.items()}
