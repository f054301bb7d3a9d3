"""Exact natural gradients, from a Fisher subsampled on a mini-batch (Appendix I)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.gradients import Call
from foof.gram import GramOperator, Precision, by_layer_named
from foof.layers import Layer
from foof.likelihood import Labels, Likelihood, likelihood_named, make_generator, restore
from foof.optim.adaptive import Adaptive, QuadraticModelSteps
from foof.optim.block import check_frozen, thrown_away
from foof.optim.preconditioner import Block, Damping, Preconditioner
from foof.passes import Recorder, check_output, record
from foof.tap import backward_pass_id


@dataclass(frozen=True)
class FisherSettings:
    """Which Fisher: its labels, its likelihood, full or block-diagonal, the precision of its Gram matrix."""

    labels: Labels
    likelihood: Likelihood
    by_layer: bool
    dtype: torch.dtype | None
    batch_size: int | None


class NaturalPreconditioner(Preconditioner):
    """Turns gradients into ``(F + λI)⁻¹ g``. F is replaced every T steps; in between it, and its factor, stay as they are."""

    moment_names = ()

    def __init__(self, model: nn.Module, damping: Callable[[Block], Damping], T: int, exclude: Iterable[str],
                 settings: FisherSettings, generator: torch.Generator | int | None) -> None:  # fmt: skip
        super().__init__(model, damping, 0.0, T, None, exclude)
        if distributed.group_of(None) is not None:
            self.remove()
            raise NotImplementedError(
                "NaturalGradient solves with the Gram matrix of one process's batch: the ranks would part. Use FOOF or KFAC here."
            )
        self.settings = settings
        self.method = f"natural ({'layer' if settings.by_layer else 'full'})"
        self.layers = [layer for block in self.blocks for layer in block.layers]
        covered = {id(p): block for block in self.blocks for layer in block.layers for p in layer.parameters}
        self.params = [p for p in model.parameters() if id(p) in covered]
        self._block_of_param = [covered[id(p)] for p in self.params]
        self.generator = make_generator(generator, self.device)
        self.operator: GramOperator | None = None
        self.keeps_raw = False
        self.raw: list[Tensor] = []  # the gradient before the solve, if kept
        self._recorder: Recorder | None = None
        self._solved: list[tuple[Tensor, weakref.ref[Tensor], int]] = []  # parameters, their gradients as the last step left them
        self._fresh = False  # has F been renewed since the last step?

    # --- the Fisher ---------------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Is a new Fisher wanted for the coming step?"""
        return self.operator is None or (self.schedule.t % self.schedule.T == 0 and not self._fresh)

    def receive(self, layer: Layer, x: Tensor, e: Tensor) -> Tensor | None:
        if self._recorder is not None:
            return self._recorder.receive(layer, x, e)
        self.enter_pass(backward_pass_id())
        self._block_of[id(layer)].reached = True
        return layer.weight_gradient(x if layer.diagonal else x.to(e.dtype), e)

    def update_curvature(self, out: Tensor | None, y: Tensor | None = None, inputs: Any = None) -> None:
        """A new Fisher, if it is due, from the outputs of a training forward pass or from inputs of its own."""
        if (out is None) == (inputs is None):
            raise ValueError("update_curvature needs outputs of the model, or inputs=... for a pass of its own: one of them.")
        if thrown_away(self.blocks):
            self.discard()
        if not self.due:
            return
        self.operator = None  # free the old one first
        if out is None:
            s = self.settings
            calls, N, K = record(self.model, self.layers, inputs, y, s.labels, s.likelihood, self.generator, s.batch_size)
        else:
            calls, N, K = self._from_outputs(out, y)
        self.operator = GramOperator(self.params, calls, N, K, self.settings.by_layer, self.settings.dtype)
        self._fresh = True

    def _from_outputs(self, out: Tensor, y: Tensor | None) -> tuple[list[Call], int, int]:
        check_output(out)
        self._recorder = recorder = Recorder()
        try:
            errors = self.settings.labels.errors(self.settings.likelihood, out, y, self.generator)
            calls = recorder.backward(out, errors, self.layers, len(out))
        finally:
            self._recorder = None
        if not calls:
            raise ValueError("these outputs do not come from a forward pass of this model, made after the optimizer was.")
        return calls, len(out), len(calls[0].errors)

    def precision(self) -> Precision:
        """λ of each parameter, from the optimizer's groups."""
        return Precision(tuple(number(self._damping(block)) for block in self._block_of_param))

    # --- the step -----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self) -> None:
        self._check_reached()
        check_frozen(self.blocks)
        if self.operator is None:
            raise RuntimeError("there is no Fisher yet: call opt.update_curvature(inputs=...), or (out), before step().")
        if self.due:
            self._warn("a new Fisher is due, but update_curvature was not called before step(): the old one is used again.", once=True)
        if self._solved and all(p.grad is not None and at() is p.grad and p.grad._version == version for p, at, version in self._solved):
            return  # a second step on the same gradients, which have been solved with
        g = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.raw = [each.clone() for each in g] if self.keeps_raw else []
        solved = self.operator.solve([each.to(self.operator.dtype).unsqueeze(0) for each in g], self.precision())
        self._solved = []
        for p, natural in zip(self.params, solved, strict=True):
            if p.grad is not None:
                p.grad.copy_(natural[0])
                self._solved.append((p, weakref.ref(p.grad), p.grad._version))

    def _check_reached(self) -> None:
        if all(p.grad is None for p in self.params):
            raise RuntimeError(
                "no gradient has reached any covered layer: call loss.backward() on a loss computed by this model before step()."
            )

    def after_update(self) -> None:
        self._fresh = False
        for block in self.blocks:
            block.reached = False
        self.schedule.advance()

    def discard(self) -> None:
        """A Fisher that came with gradients now thrown away was made for a step not taken: the next one wants its own."""
        if any(block.reached for block in self.blocks):
            self._fresh = False
        super().discard()

    def initialise(self, batches: Iterable[Any]) -> None:
        raise NotImplementedError("natural gradients keep no averages to initialise; call update_curvature(inputs=...).")

    # --- checkpoints --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """G and its factor are only needed where the next step would still use them."""
        return {
            **super().state_dict(),
            "generator": self.generator.get_state(),
            "fresh": self._fresh,
            "operator": None if self.operator is None or self.due else self._operator_state(self.operator),
        }

    def _operator_state(self, operator: GramOperator) -> dict[str, Any]:
        position = {id(layer): i for i, layer in enumerate(self.layers)}
        calls = [call for part in operator.parts for block in part.blocks for call in block.calls]
        return {
            "N": operator.N,
            "K": operator.K,
            "calls": [{"layer": position[id(c.layer)], "x": c.x.clone(), "errors": [e.clone() for e in c.errors]} for c in calls],
            "factors": [
                None if part.factor is None or part.factor_of is None
                else {"tensor": part.factor.clone(), "damping": list(part.factor_of[0].values), "c": part.factor_of[1]}
                for part in operator.parts
            ],
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        restore(self.generator, state["generator"])
        self._fresh, saved = bool(state["fresh"]), state["operator"]
        self.operator = None if saved is None else self._operator_from(saved)

    def _operator_from(self, saved: Mapping[str, Any]) -> GramOperator:
        def here(tensor: Tensor) -> Tensor:
            return tensor.to(self.device, copy=True)

        calls = [Call(self.layers[c["layer"]], here(c["x"]), [here(e) for e in c["errors"]]) for c in saved["calls"]]
        operator = GramOperator(self.params, calls, saved["N"], saved["K"], self.settings.by_layer, self.settings.dtype)
        for part, factor in zip(operator.parts, saved["factors"], strict=True):
            if factor is not None:
                part.factor = here(factor["tensor"]).to(operator.dtype)
                part.factor_of = (Precision(tuple(factor["damping"])), factor["c"])
        return operator


def number(damping: Damping) -> float:
    """λ as a number: the Fisher's scale is the model's own, there is nothing to be relative to."""
    if isinstance(damping.value, str) or damping.relative:
        raise ValueError('natural gradients need damping as a positive number: damping="auto" and relative=True are FOOF\'s.')
    return float(damping.value)


class NaturalGradient(QuadraticModelSteps):
    """``θ ← θ - lr · (F + λI)⁻¹ g`` with the exact subsampled Fisher F over all covered layers at once, by Woodbury's identity.

    >>> opt = foof.NaturalGradient(model, lr=1e-3, damping=1e-2, T=1)
    >>> if opt.curvature_due:
    ...     opt.update_curvature(inputs=other_batch)  # independent of the gradient's batch: less biased (Appendix I.5); any size
    >>> loss_fn(model(x), y).backward()
    >>> opt.step(); opt.zero_grad()

    The Fisher may come from the gradient's own batch, too, without a second forward pass: ``opt.update_curvature(out)`` before
    ``backward()``. With all the data as batch and ``fisher="full"`` this is the natural gradient without any approximation.

    Scale: ``F = 1/N Σ g gᵀ`` is a mean over datapoints, as is the gradient of a mean loss.

    Args:
        model, lr, momentum, weight_decay, rest, groups, exclude, maximize: as in ``FOOF``.
        damping: λ > 0.
        fisher: labels drawn from the model, ``samples`` per input (``"mc"``), all of them weighted by their probability
            (``"full"``: one backward pass per class, a Gram matrix of (inputs · classes)²), or the data's (``"empirical"``).
        likelihood: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``, of the model's outputs; classes last, ``(N, ..., C)``.
        blocks: ``"full"``, or ``"layer"`` for the block-diagonal Fisher.
        T: F is renewed every T steps; in between, calls of ``update_curvature`` do nothing.
        adaptive: an ``Adaptive``, or True for all of it: damping, step size and momentum of Martens & Grosse (2015).
        dtype: precision of the Gram matrix and the solve; ``torch.float64`` for tiny λ.
        batch_size: datapoints per forward pass over ``inputs``.
        generator: a seed or ``torch.Generator`` for sampled labels; by default one seeded as torch is.
    """

    preconditioner: NaturalPreconditioner

    def __init__(self, model: nn.Module, lr: float = 1e-3, damping: float = 1e-2, *, fisher: str = "mc", samples: int = 1,
                 likelihood: str | Likelihood = "categorical", blocks: str = "full", momentum: float = 0.0,
                 weight_decay: float = 0.0, T: int = 1, adaptive: Adaptive | bool = False, dtype: torch.dtype | None = None,
                 batch_size: int | None = None, generator: torch.Generator | int | None = None,
                 rest: str | Mapping[str, Any] = "adamw", groups: Sequence[Mapping[str, Any]] = (),
                 exclude: Iterable[str] = (), maximize: bool = False) -> None:  # fmt: skip
        by_layer = by_layer_named(blocks)
        settings = FisherSettings(Labels(fisher, samples), likelihood_named(likelihood), by_layer, dtype, batch_size)
        for options in ({"damping": damping}, *groups):
            number(Damping(options.get("damping", damping), options.get("relative", False)))
        self.adaptive = self.check_adaptive(adaptive, weight_decay, groups, maximize)
        defaults = {"lr": lr, "damping": damping, "relative": False, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            model, defaults, groups, rest, maximize,
            lambda damping_of: NaturalPreconditioner(model, damping_of, T, exclude, settings, generator),
        )  # fmt: skip
        self.preconditioner.keeps_raw = self.adaptive is not None

    @property
    def curvature_due(self) -> bool:
        """Will ``update_curvature`` make a new Fisher, or is the old one still to be used?"""
        return self.preconditioner.due

    def update_curvature(self, out: Tensor | None = None, y: Tensor | None = None, *, inputs: Any = None) -> None:
        """A new Fisher, if one is due: from ``inputs`` (a batch of its own), or from ``out``, outputs of the training pass.

        y: the labels, for the empirical Fisher; with others, those with label -100 are left out (categorical).
        """
        self.preconditioner.update_curvature(out, y, inputs)

    def _fisher_in(self, plane: list[Tensor]) -> Tensor:
        """``tᵢᵀ tⱼ`` with ``t = Gᵀδ``, for the F of the update itself."""
        operator = self.preconditioner.operator
        assert operator is not None
        projected = [operator.project(part, [u.to(operator.dtype) for u in plane]).double() for part in operator.parts]
        return sum((t.mT @ t for t in projected), torch.zeros(2, 2, dtype=torch.float64, device=operator.device))
