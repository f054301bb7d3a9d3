"""Damping, step size and momentum from a quadratic model of the loss (Martens & Grosse 2015, Sections 6.4 to 7; Appendix A).

With the gradient g of the loss h and the exact Fisher F, the model of an update δ is ``M(δ) = gᵀδ + ½ δᵀ(F + λI)δ``.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.utils.weak import WeakIdKeyDictionary

from foof import _torch
from foof.likelihood import Likelihood
from foof.optim.change import BoundedSteps
from foof.optim.engine import random_numbers_kept
from foof.tap import Hook


@dataclass(frozen=True)
class Adaptive:
    """Which of the three are adapted. ``period`` steps between changes of λ, each by a factor ``decay ** period``."""

    step: bool = True  # α minimises M along the update direction; the learning rate is not used
    momentum: bool = True  # α and μ minimise M over the plane of the direction and the previous update
    damping: bool = True  # λ follows the reduction ratio
    period: int = 5
    decay: float = 19 / 20

    def __post_init__(self) -> None:
        if self.momentum and not self.step:
            raise ValueError("adaptive momentum is found together with the step size: it needs step=True.")
        if self.period < 1 or not 0 < self.decay < 1:
            raise ValueError(f"period must be at least 1 and decay in (0, 1), got {self.period} and {self.decay}.")

    def adapted(self, damping: float, ratio: float) -> float:
        """λ for the next ``period`` steps: smaller where the model was right (ρ > 3/4), larger where not (ρ < 1/4, or NaN)."""
        if ratio > 0.75:
            return damping * self.decay**self.period
        return damping if ratio >= 0.25 else damping / self.decay**self.period


def minimise(curvature: Tensor, slope: Tensor) -> tuple[Tensor, float]:
    """Coefficients c ``(j,)`` that minimise ``slopeᵀc + ½ cᵀCc``, and the minimum; the curvature C ``(j, j)`` may be singular.

    On the CPU, which alone has a driver for singular C. NaN stays NaN.
    """
    C, g = curvature.double().cpu(), slope.double().cpu()
    if not (torch.isfinite(C).all() and torch.isfinite(g).all()):
        return torch.full_like(g, float("nan")), float("nan")
    c = -torch.linalg.lstsq(C, g.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return c, float(0.5 * g @ c)


def reduction_ratio(before: float, after: float, predicted: float) -> float:
    """``ρ = (h(θ+δ) - h(θ)) / M(δ)``: 1 where the model predicts the loss's change exactly."""
    return (after - before) / predicted if predicted != 0 else float("nan")


def check_adaptive(adaptive: Adaptive | bool, weight_decay: float, groups: Sequence[Mapping[str, Any]], maximize: bool,
                   max_change: float | None = None) -> Adaptive | None:  # fmt: skip
    """The settings from what people write; True stands for all of it."""
    settings = (Adaptive() if adaptive else None) if isinstance(adaptive, bool) else adaptive
    decays = weight_decay or any(group.get("weight_decay") for group in groups)
    if settings is not None and (max_change is not None or any(group.get("max_change") is not None for group in groups)):
        raise ValueError("adaptive=... finds the size of a step by its quadratic model, which max_change would change: give one of them.")
    if settings is not None and (decays or maximize):
        raise ValueError("the quadratic model of adaptive=... knows neither decay nor ascent: no weight_decay, no maximize.")
    return settings


class QuadraticModelSteps(BoundedSteps, ABC):
    """Steps ``δ = -αΔ + μδ₀`` by the quadratic model: Δ is the preconditioned gradient, δ₀ the previous step.

    A subclass says what the Fisher is (``_fisher_in``).
    """

    adaptive: Adaptive | None = None
    _coefficients: tuple[float, float] | None = None  # α and μ of the step being taken
    _predicted = 0.0

    @abstractmethod
    def _fisher_in(self, plane: list[Tensor]) -> Tensor:
        """``(δ_iᵀ F δ_j)`` ``(2, 2)`` in float64 for two vectors, given as one ``(2, *p.shape)`` per parameter."""

    def _update(self, group: dict[str, Any]) -> None:
        if self.adaptive is None:
            super()._update(group)
            return
        if group is self.param_groups[0]:
            self._coefficients = self._model_step()
        assert self._coefficients is not None
        alpha, mu = self._coefficients if self.adaptive.step else (group["lr"], group["momentum"])
        for p in group["params"]:
            if p.grad is not None:
                previous = self._momentum(p)
                previous.mul_(mu).sub_(p.grad, alpha=alpha)
                p.add_(previous)

    def _model_step(self) -> tuple[float, float]:
        """(α, μ) for all groups, and what the quadratic model expects of the step: ``M(δ) = gᵀδ + ½ δᵀ(F + λI)δ``."""
        settings, attached = self.adaptive, self.preconditioner
        assert settings is not None
        params = attached.params
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        plane = [torch.stack([torch.zeros_like(p) if p.grad is None else -p.grad, self._momentum(p)]) for p in params]
        if not settings.step:  # each group's own lr and momentum: the step is the sum of the two
            for p, u in zip(params, plane, strict=True):
                u[0] *= group_of[id(p)]["lr"]
                u[1] *= group_of[id(p)]["momentum"]
        C = self._fisher_in(plane)
        slope = C.new_zeros(2)
        for p, u, g in zip(params, plane, attached.plain_gradients, strict=True):
            flat = u.flatten(1).double()
            C = C + group_of[id(p)]["damping"] * (flat @ flat.mT)
            slope = slope + flat @ g.flatten().double()
        if settings.momentum:
            c, self._predicted = minimise(C, slope)
            return float(c[0]), float(c[1])
        alpha, mu = (float(minimise(C[:1, :1], slope[:1])[0]), 0.0) if settings.step else (1.0, 1.0)
        c = torch.tensor([alpha, mu], dtype=torch.float64, device=C.device)
        self._predicted = float(slope @ c + 0.5 * c @ C @ c)
        return alpha, mu

    @property
    def adaptation_due(self) -> bool:
        """Is it time for ``adapt_damping``, after this step?"""
        return self.adaptive is not None and self.adaptive.damping and self.preconditioner.schedule.t % self.adaptive.period == 0

    def adapt_damping(self, before: float, after: float) -> float:
        """Change λ by the reduction ratio ρ of the step just taken, from the loss on its batch before and after it. Returns ρ.

        Does nothing to λ unless ``adaptation_due``.
        """
        if self.adaptive is None:
            raise ValueError("adapt_damping is for adaptive=True.")
        ratio = reduction_ratio(before, after, self._predicted)
        if self.adaptation_due:
            for group in self.param_groups:
                if group["kind"] == "neurons":
                    group["damping"] = self.adaptive.adapted(group["damping"], ratio)
        return ratio


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class ModelCall:
    """The arguments of a model, and the shape of those of its outputs that the loss is of."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shape: torch.Size

    def check(self, out: Any) -> None:
        """The quadratic model is of what the model itself returns; the Fisher given to update_curvature must be too."""
        if not isinstance(out, Tensor) or out.shape != self.shape:
            returned = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"adaptive=... needs update_curvature to be given what the model returns, but it was given {tuple(self.shape)} and the "
                f"model returns {returned}: move the selection or reshaping into the model (wrap it in a module)."
            )


class Calls(Hook):
    """A forward hook that knows the arguments of a model's calls by their outputs, for as long as these, and its owner, live."""

    def __init__(self, model: nn.Module, owner: object) -> None:
        self.latest: Arguments | None = None
        self._by_output = WeakIdKeyDictionary()
        self._owner = weakref.ref(owner)
        self._handle = model.register_forward_hook(self, with_kwargs=True)

    @_torch.disable_dynamo
    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if torch.is_grad_enabled() and self._owner() is not None:
            self.latest = args, kwargs
            if isinstance(out, Tensor):
                self._by_output[out] = self.latest

    def behind(self, out: Tensor) -> Arguments | None:
        """The arguments of the call that returned ``out``; of the latest, where ``out`` is only part of what was returned."""
        return self._by_output.get(out, self.latest)

    def remove(self) -> None:
        self._handle.remove()


def fisher_in(model: nn.Module, batches: Sequence[ModelCall], params: list[nn.Parameter], plane: list[Tensor], likelihood: Likelihood
              ) -> Tensor:  # fmt: skip
    """``δ_iᵀ F δ_j = 1/N Σ_n (J_n δ_i)ᵀ H_n (J_n δ_j)`` ``(k, k)``, exactly, by one forward-mode pass per vector and batch.

    plane: ``(k, *p.shape)`` per parameter. Buffers and random numbers stay as they are, and dropout is the same in all passes.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    values = {names[id(p)]: p.detach() for p in params}
    C, N = torch.zeros(len(plane[0]), len(plane[0]), dtype=torch.float64, device=params[0].device), 0
    for call in batches:

        def outputs(weights: dict[str, Tensor], call: ModelCall = call) -> Tensor:
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            out = functional_call(model, {**buffers, **weights}, call.args, dict(call.kwargs))
            call.check(out)
            return out

        tangents = []
        for k in range(len(plane[0])):
            direction = {names[id(p)]: u[k].to(p.dtype) for p, u in zip(params, plane, strict=True)}
            with torch.autocast(C.device.type, enabled=False), random_numbers_kept(C.device):
                out, tangent = jvp(outputs, (values,), (direction,))[:2]
            tangents.append(tangent.detach())
        images = [likelihood.hessian_product(out.detach(), t) for t in tangents]
        C += torch.stack([t.flatten() for t in tangents]).double() @ torch.stack([i.flatten() for i in images]).double().mT
        N += len(out)
    return C / N
