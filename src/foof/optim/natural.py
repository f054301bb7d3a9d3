"""Exact natural gradients, from a Fisher subsampled on a mini-batch (Appendix I)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.conjugate import ConjugateGradients, solver_named
from foof.gradients import Call
from foof.gram import GramOperator, by_layer_named
from foof.layers import Layer
from foof.likelihood import Labels, Likelihood, likelihood_named, make_generator, restore
from foof.optim.adaptive import Adaptive, QuadraticModelSteps, check_adaptive
from foof.optim.block import Block, Damping
from foof.optim.change import State, whole_lr
from foof.optim.checks import Fallback
from foof.optim.engine import Engine
from foof.optim.estimators import Estimator, Host
from foof.optim.rules import at_most
from foof.optim.step import Ledger, Step
from foof.passes import Recorder, check_output, record
from foof.statistics import Schedule
from foof.tap import Visit
from foof.vectors import Precision
from foof.woodbury import Woodbury


@dataclass(frozen=True)
class ExactFisherSettings:
    """Which Fisher: its labels, its likelihood, full or block-diagonal, the precision of its Gram matrix."""

    labels: Labels
    likelihood: Likelihood
    by_layer: bool
    dtype: torch.dtype | None
    batch_size: int | None
    solver: type[Woodbury] | type[ConjugateGradients]


class ExactFisher(Estimator):
    """Turns gradients into ``(F + λI)⁻¹ g``, all blocks at once. F is replaced when it is due; in between it stays as it is."""

    plain = True

    def __init__(self, settings: ExactFisherSettings, generator: torch.Generator | int | None, device: torch.device) -> None:
        self.settings = settings
        self.name = f"natural ({'layer' if settings.by_layer else 'full'})"
        self.generator = make_generator(generator, device)
        self.operator: GramOperator | None = None
        self.damped: Woodbury | ConjugateGradients | None = None  # of the operator, for the λ of the last step
        self.params: list[nn.Parameter] = []
        self.layers: list[Layer] = []
        self._block_of: list[Block] = []  # of each parameter
        self._schedule = Schedule(1, 1)
        self._fresh = False  # has F been renewed since the last step?
        self._step: Step | None = None
        self._followed_by: list[Ledger] = []  # the training passes since then. None: its batch may have been skipped

    def tie(self, engine: Engine) -> None:
        """The layers whose Fisher it is, and when it is to be renewed."""
        self._schedule, self._step = engine.schedule, engine.step
        self.params, self.layers = engine.params, [layer for block in engine.blocks for layer in block.layers]
        owner = {id(p): block for block in engine.blocks for layer in block.layers for p in layer.parameters}
        self._block_of = [owner[id(p)] for p in self.params]

    def leaves_plain(self, block: Block) -> bool:
        return True

    @property
    def due(self) -> bool:
        """Is a new Fisher wanted for the coming step?"""
        self._forget_skipped()
        return self.operator is None or (self._schedule.t % self._schedule.T == 0 and not self._fresh)

    @property
    def replaceable(self) -> bool:
        """Is it due, or has no training pass followed it yet, so that its batch must have been skipped when another one comes?"""
        return self.due or (self._fresh and not self._followed_by)

    def _forget_skipped(self) -> None:
        """A Fisher whose training passes have all been thrown away was made for a step not taken; the one before it is gone."""
        if self._followed_by and self._step is not None and not self._step.holds(self._followed_by):
            self.operator, self._fresh, self._followed_by = None, False, []

    def renew(self, engine: Engine, out: Tensor | None, y: Tensor | None, inputs: Any) -> None:
        """A new Fisher from the outputs of a training forward pass, or from inputs of its own; outputs that are not finite make none."""
        s = self.settings
        if out is None:
            calls, N, K = record(engine.model, self.layers, inputs, y, s.labels, s.likelihood, self.generator, s.batch_size)
        else:
            check_output(out)
            if not torch.isfinite(out.detach()).all():
                engine.warn("NaN or inf in the outputs given to update_curvature: there is no Fisher of this batch.")
                return
            calls, N, K = self._from_outputs(engine, out, y)
        self.operator = self.damped = None  # free the old ones first
        self.operator = GramOperator(self.params, calls, N, K, s.by_layer, s.dtype)
        self._fresh, self._followed_by = True, []

    def _from_outputs(self, engine: Engine, out: Tensor, y: Tensor | None) -> tuple[list[Call], int, int]:
        recorder = Recorder(engine.model)
        with engine.recording(recorder):
            errors = self.settings.labels.errors(self.settings.likelihood, out, y, self.generator)
            calls = recorder.backward(out, errors, self.layers)
        if not calls:
            raise ValueError("these outputs do not come from a forward pass of this model, made after the optimizer was.")
        return calls, len(out), len(calls[0].errors)

    def observe(self, block: Block, ledger: Ledger, visit: Visit, due: bool) -> None:
        if visit.lands and self._fresh:
            self._forget_skipped()
            self._followed_by.append(ledger)

    def precision(self) -> Precision:
        """λ of each parameter, from the optimizer's groups."""
        return Precision(tuple(block.damping.absolute("natural gradients need") for block in self._block_of))

    # --- the step -----------------------------------------------------------------------------------------------------------

    def prepare(self, host: Host, ledgers: dict[Block, Ledger]) -> None:
        self._forget_skipped()
        if self.operator is None:
            raise RuntimeError("there is no Fisher yet: call opt.update_curvature(inputs=...), or (out), before step().")
        if ledgers and self._schedule.t % self._schedule.T == 0 and not self._fresh:
            host.warn("a new Fisher is due, but update_curvature was not called before step(): the old one is used again.", once=True)

    def precondition(self, ledgers: dict[Block, Ledger | None]) -> None:
        operator = self.operator
        if operator is None or not ledgers:
            return
        masks = {block: ledger.masked(block.raw()) for block, ledger in ledgers.items() if ledger is not None}
        g = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        precision = self.precision()
        if self.damped is None or self.damped.precision != precision:
            self.damped = None  # free the old one first
            self.damped = self.settings.solver(operator, precision)
        solved = self.damped.solve(g)
        for p, natural in zip(self.params, solved, strict=True):
            if p.grad is not None:
                p.grad.copy_(natural)
        for block, masked in masks.items():
            if masked is not None and masked.any():
                block.write(block.raw().masked_fill(masked, 0))

    def finish(self, host: Host, ledgers: dict[Block, Ledger], due: bool) -> None:
        self._fresh, self._followed_by = False, []

    # --- checkpoints --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """G and its factor are only needed where the next step would still use them; those of a step in the making are not kept."""
        kept = self.operator if not (self.due or self._fresh) else None
        return {"generator": self.generator.get_state(), "operator": None if kept is None else self._operator_state(kept)}

    def _operator_state(self, operator: GramOperator) -> dict[str, Any]:
        position = {id(layer): i for i, layer in enumerate(self.layers)}
        calls = [call for part in operator.parts for block in part.blocks for call in block.calls]
        return {
            "N": operator.N,
            "K": operator.K,
            "calls": [{"layer": position[id(c.layer)], "x": c.x.clone(), "errors": [e.clone() for e in c.errors]} for c in calls],
            "damped": self.damped.state_dict() if isinstance(self.damped, Woodbury) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self.generator, state["generator"])
        self._fresh, self._followed_by, saved = bool(state.get("fresh")), [], state["operator"]
        self.damped = None
        self.operator = None if saved is None else self._operator_from(saved)

    def _operator_from(self, saved: Mapping[str, Any]) -> GramOperator:
        def here(tensor: Tensor) -> Tensor:
            return tensor.to(self.params[0].device, copy=True)

        calls = [Call(self.layers[c["layer"]], here(c["x"]), [here(e) for e in c["errors"]]) for c in saved["calls"]]
        operator = GramOperator(self.params, calls, saved["N"], saved["K"], self.settings.by_layer, self.settings.dtype)
        damped = saved["damped"] if "damped" in saved else before_woodbury(saved["factors"])
        self.damped = Woodbury.from_state_dict(operator, damped) if damped is not None and self.settings.solver is Woodbury else None
        return operator


def before_woodbury(factors: Sequence[Any]) -> dict[str, Any] | None:
    """The state of a ``Woodbury`` from checkpoints of 0.1, which kept a factor by columns for each part."""
    if any(factor is None for factor in factors):
        return None
    parts = [{"side": "columns", "factor": factor["tensor"]} for factor in factors]
    return {"precision": factors[0]["damping"], "datapoints": factors[0]["c"], "parts": parts}


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
        max_change: τ, how far a step δ may move the model's predictions: ``δ ← δ · min(1, τ/ρ)`` with ``ρ² = δᵀFδ``, which is twice the
            divergence KL that F predicts (and for squared error the mean square of the change of the outputs). At the initial lr of
            a scheduler, which scales what is bounded. None: no bound.
        fisher: labels drawn from the model, ``samples`` per input (``"mc"``), all of them weighted by their probability
            (``"full"``: one backward pass per class, a Gram matrix of (inputs · classes)²), or the data's (``"empirical"``).
        likelihood: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``, of the model's outputs; classes last, ``(N, ..., C)``.
        blocks: ``"full"``, or ``"layer"`` for the block-diagonal Fisher.
        T: F is renewed every T steps; in between, calls of ``update_curvature`` do nothing.
        adaptive: an ``Adaptive``, or True for all of it: damping, step size and momentum of Martens & Grosse (2015).
        dtype: precision of the Gram matrix and the solve; ``torch.float64`` for tiny λ.
        batch_size: datapoints per forward pass over ``inputs``.
        solver: ``"cholesky"``, or ``"cg"`` for conjugate gradients to a residual of 1e-6: for small models with the full Fisher
            (one linear layer, 1,000 datapoints, ten classes: 7 to 15 times faster).
        generator: a seed or ``torch.Generator`` for sampled labels; by default one seeded as torch is.
    """

    def __init__(self, model: nn.Module, lr: float = 1e-3, damping: float = 1e-2, *, max_change: float | None = None,
                 fisher: str = "mc", samples: int = 1,
                 likelihood: str | Likelihood = "categorical", blocks: str = "full", momentum: float = 0.0,
                 weight_decay: float = 0.0, T: int = 1, adaptive: Adaptive | bool = False, dtype: torch.dtype | None = None,
                 batch_size: int | None = None, solver: str = "cholesky", generator: torch.Generator | int | None = None,
                 rest: Fallback = "adamw", groups: Sequence[Mapping[str, Any]] = (),
                 exclude: Iterable[str] = (), maximize: bool = False) -> None:  # fmt: skip
        settings = ExactFisherSettings(
            Labels(fisher, samples), likelihood_named(likelihood), by_layer_named(blocks), dtype, batch_size, solver_named(solver)
        )
        for options in ({"damping": damping}, *groups):
            Damping(options.get("damping", damping), options.get("relative", False)).absolute("natural gradients need")
        self.adaptive = check_adaptive(adaptive, weight_decay, groups, maximize, max_change)
        if distributed.group_of(None) is not None:
            raise NotImplementedError(
                "NaturalGradient solves with the Gram matrix of one process's batch: the ranks would part. Use FOOF or KFAC here."
            )
        engine = Engine(model, lambda device: ExactFisher(settings, generator, device), Schedule.of(T, None), 0.0, exclude=exclude)
        defaults = {"lr": lr, "damping": damping, "relative": False, "max_change": max_change, "momentum": momentum,
                    "weight_decay": weight_decay}  # fmt: skip
        super().__init__(engine, defaults, groups, rest, maximize)
        self._fisher.tie(engine)
        self._bound = self
        engine.keeps_plain = self.adaptive is not None

    @property
    def _fisher(self) -> ExactFisher:
        estimator = self.preconditioner.estimator
        assert isinstance(estimator, ExactFisher)
        return estimator

    @property
    def curvature_due(self) -> bool:
        """Will ``update_curvature`` make a new Fisher, or is the old one still to be used?"""
        return self._fisher.due

    def mask(self, rows: Tensor) -> Any:
        """Not here: the exact Fisher leaves out what the labels leave out."""
        raise NotImplementedError("NaturalGradient takes no mask: give update_curvature(out, y) labels of -100 where nothing is to count.")

    def update_curvature(self, out: Tensor | None = None, y: Tensor | None = None, *, inputs: Any = None) -> None:
        """A new Fisher, if one is due: from ``inputs`` (a batch of its own), or from ``out``, outputs of the training pass.

        y: the labels, for the empirical Fisher; with others, those with label -100 are left out (categorical).
        """
        if (out is None) == (inputs is None):
            raise ValueError("update_curvature needs outputs of the model, or inputs=... for a pass of its own: one of them.")
        if self._fisher.replaceable:
            self._fisher.renew(self.preconditioner, out, y, inputs)

    def factors(self, _: State) -> dict[Tensor, Tensor]:
        """``min(1, τ/ρ)`` with ``ρ² = δᵀFδ`` of the step δ to come, the same for all; of several groups' τ the smallest holds."""
        groups = [group for group in self.param_groups if group.get("max_change") is not None]
        if not groups:
            return {}
        lr_of, params = {p: whole_lr(group) for group in self.param_groups for p in group["params"]}, self.preconditioner.params
        steps = [torch.zeros_like(p) if p.grad is None else lr_of[p] * p.grad for p in params]
        rho = self._fisher_in([torch.stack([step, torch.zeros_like(step)]) for step in steps])[0, 0].clamp_min(0).sqrt()
        return dict.fromkeys(params, at_most(min(group["max_change"] * (1 - group["momentum"]) for group in groups), rho))

    def _fisher_in(self, plane: list[Tensor]) -> Tensor:
        """``tᵢᵀ tⱼ`` with ``t = Gᵀδ``, for the F of the update itself."""
        operator = self._fisher.operator
        assert operator is not None
        projected = [operator.project(part, [u.to(operator.dtype) for u in plane]).double() for part in operator.parts]
        return sum((t.mT @ t for t in projected), torch.zeros(2, 2, dtype=torch.float64, device=operator.device))
