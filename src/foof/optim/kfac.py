"""KFAC (Martens & Grosse 2015) in all the forms of the paper, on the same engine as FOOF."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.kronecker import EigenInverse, InputInverse, KroneckerInverse, RescaledInputInverse, ScaledInputInverse, split_damping
from foof.layers import Layer
from foof.likelihood import Labels, Likelihood, likelihood_named, make_generator, restore
from foof.optim.adaptive import Adaptive, Calls, ModelCall, QuadraticModelSteps, fisher_in
from foof.optim.preconditioner import Block, Damping, Preconditioner, gather_inputs, inputs_of
from foof.passes import call_model
from foof.statistics import Gathered, exact
from foof.tap import backward_pass_id

AnyFactor = KroneckerInverse | EigenInverse
FACTORS: dict[tuple[str, str], type[AnyFactor]] = {
    ("heuristic", "keep"): KroneckerInverse,
    ("heuristic", "drop-scaled"): ScaledInputInverse,
    ("heuristic", "drop-rescaled"): RescaledInputInverse,
    ("standard", "keep"): EigenInverse,
}


def factor_named(damping_mode: str, second_factor: str = "keep") -> type[AnyFactor]:
    """The kind of factor for ``damping_mode`` and ``second_factor``, or an error that says what there is."""
    if (damping_mode, second_factor) not in FACTORS:
        choices = "; ".join(f"damping_mode={mode!r} with second_factor={second!r}" for mode, second in FACTORS)
        raise ValueError(f"there is no KFAC with damping_mode={damping_mode!r} and second_factor={second_factor!r}; there is {choices}.")
    return FACTORS[damping_mode, second_factor]


@dataclass(frozen=True)
class FisherEstimate:
    """How the Fisher's factors are estimated: which labels, under which likelihood, from how many datapoints of a batch.

    ``average_rows``: is Σ_E the mean over the rows (locations, tokens) of a datapoint, or their sum? See ``KFAC``.
    """

    labels: Labels
    likelihood: Likelihood
    datapoints: int | None = None
    average_rows: bool = True

    def __post_init__(self) -> None:
        if self.datapoints is not None and self.datapoints < 1:
            raise ValueError(f"datapoints is how many of each batch feed the factors: at least 1, got {self.datapoints}.")


@dataclass
class _Pass:
    """One of the backward passes of a Fisher estimate."""

    first: bool  # the inputs, and how many datapoints there are, are counted once for all passes
    batch: int


class KroneckerPreconditioner(Preconditioner):
    """The statistics and factors of KFAC: ``Σ`` as FOOF's, and ``Σ_E`` from backward passes of the Fisher's own.

    Both are gathered in ``update_curvature``, where taps record inputs and errors and no weight gradient is computed. A step on
    which they were due but ``update_curvature`` was not called leaves the averages as they are, with a warning.
    """

    moment_names = ("Sigma", "Sigma_E")
    _adapts = False

    def __init__(self, model: nn.Module, damping: Callable[[Block], Damping], ema: float, T: int, S: int | None,
                 exclude: Iterable[str], kind: type[AnyFactor], estimate: FisherEstimate, deferred: bool,
                 generator: torch.Generator | int | None, process_group: Any = None,
                 owned: Container[int] | None = None) -> None:  # fmt: skip
        super().__init__(model, damping, ema, T, S, exclude, process_group, owned)
        if any(distributed.is_sharded(block.layer.weight) for block in self.blocks):
            self.remove()
            raise NotImplementedError(
                "KFAC needs backward passes of its own, which end at weights that FSDP has sharded away: use FOOF, or "
                "DistributedDataParallel."
            )
        self.kind, self.estimate = kind, estimate
        self.deferred = deferred or not kind.linear
        self.generator = make_generator(generator, self.device)
        self.method = f"kfac ({kind.__name__})"
        self._pass: _Pass | None = None
        self._staged: defaultdict[tuple[Block, str], Gathered] = defaultdict(Gathered)  # until the backward pass they belong to
        self._beyond_outputs: set[Block] = set()  # in use when a Fisher pass did not come by
        self._estimated = False  # since the last step
        self.params = list({id(p): p for block in self.blocks for p in block.layer.parameters}.values())
        self.raw: list[Tensor] = []  # the gradients before preconditioning, where something is to be adapted to them
        self.batches: list[ModelCall] = []  # the model's arguments on this step, likewise
        self._staged_batches: list[ModelCall] = []
        self._calls: Calls | None = None

    # --- the Fisher's backward passes -------------------------------------------------------------------------------------

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Estimate the Fisher at these outputs, if it is due, sharing the forward pass with the loss."""
        if self._calls is not None and (arguments := self._calls.behind(out)) is not None:
            self._staged_batches.append(ModelCall(*arguments, out.shape))
        if self.schedule.gathers() or self._new_blocks():
            self.gather(out, y)
            if self._staged:
                self._beyond_outputs.update(block for block in self._new_blocks() if (block, "Sigma_E") not in self._staged)

    def _new_blocks(self) -> list[Block]:
        """Blocks in use, but without a factor, that outputs may depend on for all we know."""
        used = {self._block_of[id(tap.layer)] for tap in self.taps if tap.fired}
        return [block for block in used if block.factor is None and block not in self._beyond_outputs]

    def gather(self, out: Tensor, y: Tensor | None) -> None:
        """``Σ = 1/N Σ_i Σ_r a aᵀ`` and ``Σ_E = 1/(N R) Σ_i Σ_k Σ_r e e ᵀ`` of this batch, one backward pass for each output error k."""
        if not (isinstance(out, Tensor) and out.requires_grad):
            raise ValueError("update_curvature needs the outputs of the model, a tensor computed with gradients enabled.")
        self._estimated = True
        if not torch.isfinite(out.detach()).all():  # their sum may overflow in float16
            self._warn("NaN or inf in the outputs given to update_curvature: this batch is left out of the statistics.")
            return
        weights = [block.layer.weight for block in self.blocks if block.layer.weight.requires_grad]  # it may be frozen by now
        errors = self.estimate.labels.errors(self.estimate.likelihood, out, y, self.generator)
        first = next(errors, torch.zeros_like(out))  # a single class has no error at all
        for number, error in enumerate(chain([first], errors) if weights else ()):
            with self._recording(_Pass(number == 0, len(out))):
                torch.autograd.grad(out, weights, error.to(out.dtype), retain_graph=True, allow_unused=True)

    @contextmanager
    def _recording(self, fisher_pass: _Pass) -> Iterator[None]:
        self._pass = fisher_pass
        try:
            yield
        finally:
            self._pass = None

    def receive(self, layer: Layer, x: Tensor, e: Tensor) -> Tensor | None:
        if self._pass is None:
            return super().receive(layer, x, e)
        self._record(self._pass, layer, x, e)
        return None

    def _record(self, fisher_pass: _Pass, layer: Layer, x: Tensor, e: Tensor) -> None:
        """Rows for Σ on the first pass, and for Σ_E on each; their number counts once."""
        used, block, pass_id = self.estimate.datapoints, self._block_of[id(layer)], backward_pass_id()
        if used is not None and len(x) == fisher_pass.batch:
            x, e = x[:used], e[:used]
        if fisher_pass.first:
            gather_inputs(self._staged[block, "Sigma"], layer, x, pass_id)
        rows, seen = layer.error_rows(e), self._staged[block, "Sigma_E"]
        datapoints, per_datapoint = rows.shape[-3:-1]
        if not fisher_pass.first:
            datapoints = 0
        elif self.estimate.average_rows:
            datapoints, pass_id = datapoints * per_datapoint, -seen.datapoints - 1  # a new id for every call: all their rows count
        seen.add_rows(rows.flatten(-3, -2), datapoints, pass_id)

    def enter_pass(self, pass_id: int) -> None:
        super().enter_pass(pass_id)
        self._commit()

    def _commit(self) -> None:
        """What the Fisher's passes have recorded belongs to the gradients that now arrive, and would be thrown away with them."""
        for (block, key), seen in self._staged.items():
            block.gathered[key].merge(seen)
        self._staged.clear()
        self.batches += self._staged_batches
        self._staged_batches = []

    def _fold(self, blocks: list[Block]) -> None:
        self._commit()
        super()._fold(blocks)

    def observe(self, block: Block, layer: Layer, x: Tensor, e: Tensor) -> None:
        """Nothing: the training pass's errors are not the Fisher's."""

    def observe_batch(self, batch: Any, pass_id: int) -> None:
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        with torch.enable_grad():
            out = call_model(self.model, inputs_of(batch))
            self.gather(getattr(out, "logits", out), labels)

    def keep_for_adaptation(self) -> None:
        """From now on, keep each step's raw gradients and the model's arguments."""
        if any(block.shares_weight for block in self.blocks):
            raise ValueError("adaptive=... needs raw gradients, which an embedding tied to a linear layer does not keep apart.")
        self.deferred, self._adapts, self._calls = True, True, Calls(self.model, self)
        self._handles.append(self._calls)

    # --- factors and steps --------------------------------------------------------------------------------------------------

    def factor(self, block: Block, damping: Damping) -> AnyFactor:
        return self.kind.make(*self._moments(block), absolute(damping), block.name, self._uses(block))

    def _moments(self, block: Block) -> tuple[Tensor, Tensor]:
        Sigma, Sigma_E = (block.moments[key].value for key in self.moment_names)
        if Sigma is None or Sigma_E is None:
            raise ValueError(self.explain_unseen(block))
        return Sigma, Sigma_E

    def _uses(self, block: Block) -> tuple[float, float]:
        """Rows that each side multiplies until the next inversion."""
        layer = block.layer
        rows = float("inf") if self.deferred else block.rows or layer.n
        return self.schedule.T * min(rows, layer.n), self.schedule.T * min(rows, layer.m)

    @torch.no_grad()
    def before_update(self) -> None:
        if self._adapts:
            self.raw = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.params]
        self._commit()
        super().before_update()

    def after_update(self) -> None:
        self.raw, self.batches = [], []
        if self._calls is not None:
            self._calls.latest = None
        if self.schedule.gathers() and not self._estimated:
            self._warn(
                "KFAC's factors are due for data, but update_curvature(out) was not called before backward(): they stay as they are.",
                once=True,
            )
        self._estimated = False
        super().after_update()

    def discard(self) -> None:
        """As FOOF's; what ``update_curvature`` has recorded for a backward pass still to come stays."""
        if any(block.reached for block in self.blocks):
            self.batches, self._estimated = [], bool(self._staged)
        super().discard()

    def explain_unseen(self, block: Block) -> str:
        return (
            f"{block.name}: KFAC has no estimate of the Fisher for this layer. Call opt.update_curvature(out) between the forward "
            "pass and backward(), with outputs that depend on this layer, or opt.initialise(batches) before training."
        )

    # --- what the update would be ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    @exact
    def updates(self, second_factor: str = "keep", foof_damping: float | None = None) -> dict[str, Tensor]:
        """What ``step()`` would subtract lr times of, per layer ``(n, m)``, from the gradients at hand; needs ``deferred``.

        With the optimizer's own damping mode (``"keep"``), or without the second factor (``"drop-scaled"``, ``"drop-rescaled"``;
        see ``KFAC``). With ``foof_damping``: FOOF's update at this λ. Changes nothing but that factors still missing are made.
        """
        if not self.deferred:
            raise RuntimeError("updates() needs raw gradients: make the optimizer with deferred=True.")
        if any(block.shares_weight for block in self.blocks):
            raise RuntimeError("updates() needs raw gradients, which an embedding tied to a linear layer does not keep apart.")
        reached = [block for block in self.blocks if block.reached]
        self.start(reached)
        return {block.layer.name: self._hypothetical(block, second_factor, foof_damping).apply(_raw(block)) for block in reached}

    def _hypothetical(self, block: Block, second_factor: str, foof_damping: float | None) -> Any:
        Sigma, Sigma_E = self._moments(block)
        if foof_damping is not None:
            return InputInverse.make(Sigma, foof_damping, block.name, uses=block.layer.n)
        if second_factor == "keep" and isinstance(block.factor, EigenInverse):
            return block.factor
        other: Any = factor_named("heuristic", second_factor)
        if isinstance(block.factor, KroneckerInverse):
            return other(block.factor.inputs, block.factor.errors, block.factor.lambda_E)
        return other.make(Sigma, Sigma_E, absolute(self._damping(block)), block.name, (block.layer.n, block.layer.m))

    def lambda_A(self) -> dict[str, Tensor]:
        """KFAC's λ_A of each layer, from the averages as they are now."""
        return {
            block.layer.name: split_damping(*self._moments(block), absolute(self._damping(block)))[0] for block in self.blocks
        }

    # --- checkpoints --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        restore(self.generator, state["generator"])

    def factor_from_state_dict(self, state: dict[str, Any]) -> AnyFactor:
        return self.kind.from_state_dict(state)


def absolute(damping: Damping) -> float:
    """λ as a number; KFAC splits it over its factors by their traces, so there is nothing for it to be relative to."""
    if isinstance(damping.value, str) or damping.relative:
        raise ValueError('KFAC needs damping as a positive number: damping="auto" and relative=True are FOOF\'s.')
    return float(damping.value)


def _raw(block: Block) -> Tensor:
    """The block's gradient as a matrix ``(n, m)`` or ``(G, n, m)``."""
    weight, bias = block.layer.weight.grad, block.layer.bias.grad if block.layer.bias is not None else None
    if weight is None:
        raise RuntimeError(f"{block.name}: no gradient; updates() is for between backward() and step().")
    return block.layer.join(weight, bias)


class KFAC(QuadraticModelSteps):
    """``W ← W - lr · (Σ_E + λ_E I)⁻¹ Eᵀ A (Σ + λ_A I)⁻¹`` for every covered layer (Eq. 2), a ``torch.optim.Optimizer``.

    >>> out = model(x)
    >>> opt.update_curvature(out)  # which outputs estimate the Fisher; runs only when it is due
    >>> loss_fn(out, y).backward()
    >>> opt.step(); opt.zero_grad()

    ``Σ`` is FOOF's; ``Σ_E`` the moving average of ``1/(N R) Σ_i Σ_k Σ_r e_ikr e_ikrᵀ`` for errors e of the per-datapoint loss with
    labels from the model. ``Σ ⊗ Σ_E`` then approximates the Fisher of a layer's weights, exactly for deep linear networks with
    squared error and for one datapoint; for layers with R > 1 rows per datapoint (convolutions, sequences) it is KFAC-expand.

    Scale: the paper's released code sums Σ over the batch and averages Σ_E, so in fully connected networks its (lr, λ) at batch B
    is (lr/B, λ/B) here, for either damping: (0.3, 1) at batch 100 is (0.003, 0.01). In convolutions it averages Σ over the batch
    and sums both over locations: take (lr, λ) as they are, with ``rows="sum"``.

    Args:
        model, lr, momentum, weight_decay, ema, T, S, rest, groups, exclude, maximize, process_group: as in ``FOOF``;
            ema = 0 is subsampled KFAC.
        damping: λ > 0, added to the approximate Fisher.
        damping_mode: ``"heuristic"``: each factor is damped by itself, λ_A λ_E = λ and λ_A/λ_E = n Tr(Σ) / (m Tr(Σ_E)) (Eq. 4).
            ``"standard"``: ``(Σ ⊗ Σ_E + λI)⁻¹`` exactly (Eq. 3).
        fisher: labels from the model, ``samples`` for each input (``"mc"``), all of them weighted by their probability
            (``"full"``, one backward pass per class), or the data's (``"empirical"``: ``update_curvature(out, y)``).
        likelihood: ``"categorical"``, ``"bernoulli"`` or ``"gaussian"``, of the model's outputs; classes last, ``(N, ..., C)``.
        datapoints: how many of each batch feed the factors; None for all.
        rows: ``"mean"``, or ``"sum"``: Σ_E is R times as large, as in the paper's convolutions.
        second_factor: ``"keep"``, or an ablation of Appendix D.9, FOOF with KFAC's λ_A: ``"drop-scaled"`` times λ_E⁻¹ = λ_A/λ,
            ``"drop-rescaled"`` rescaled to the norm of each layer's KFAC update.
        adaptive: an ``Adaptive``, or True for all of it: damping, step size and momentum of Martens & Grosse (2015), from exact
            Fisher-vector products on each step's batch; lr and momentum are then not used. Call ``update_curvature`` on every
            step, and for the damping ``adapt_damping(loss_before, loss_after)`` after steps where ``adaptation_due``.
        deferred: leave gradients raw until ``step()``, so that ``opt.updates(...)`` can tell what other updates would have been.
        generator: a seed or ``torch.Generator`` for sampled labels; by default one seeded as torch is.
    """

    preconditioner: KroneckerPreconditioner

    def __init__(self, model: nn.Module, lr: float = 0.003, damping: float = 0.01, *, damping_mode: str = "heuristic",
                 fisher: str = "mc", samples: int = 1, likelihood: str | Likelihood = "categorical", datapoints: int | None = None,
                 rows: str = "mean", second_factor: str = "keep", adaptive: Adaptive | bool = False, deferred: bool = False,
                 generator: torch.Generator | int | None = None, momentum: float = 0.0, weight_decay: float = 0.0,
                 ema: float = 0.95, T: int = 100, S: int | None = None, rest: str | Mapping[str, Any] = "adamw",
                 groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (), maximize: bool = False,
                 process_group: Any = None) -> None:  # fmt: skip
        kind, estimate = factor_named(damping_mode, second_factor), fisher_estimate(fisher, samples, likelihood, datapoints, rows)
        for options in ({"damping": damping}, *groups):
            absolute(Damping(options.get("damping", damping), options.get("relative", False)))
        self.adaptive = self.check_adaptive(adaptive, weight_decay, groups, maximize)
        defaults = {"lr": lr, "damping": damping, "relative": False, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(
            model, defaults, groups, rest, maximize,
            lambda damping_of: KroneckerPreconditioner(
                model, damping_of, ema, T, S, exclude, kind, estimate, deferred, generator, process_group
            ),
        )  # fmt: skip
        if self.adaptive is not None:
            try:
                self.preconditioner.keep_for_adaptation()
            except ValueError:
                self.remove()
                raise

    def _fisher_in(self, plane: list[Tensor]) -> Tensor:
        attached = self.preconditioner
        if not attached.batches:
            raise RuntimeError("adaptive=... needs update_curvature(out) on every step: the quadratic model is of this step's batch.")
        return fisher_in(attached.model, attached.batches, attached.params, plane, attached.estimate.likelihood)

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Call between the forward pass and ``backward()`` with the model's outputs (and labels, for the empirical Fisher).

        For other Fishers, too, categorical positions with label -100 are left out where labels aligned with the outputs are given.
        On S of every T steps it runs one backward pass per output error, recording errors only; on the others it does nothing.
        """
        super().update_curvature(out, y)

    def updates(self, second_factor: str = "keep", foof_damping: float | None = None) -> dict[str, Tensor]:
        """See ``KroneckerPreconditioner.updates``."""
        return self.preconditioner.updates(second_factor, foof_damping)


def fisher_estimate(fisher: str, samples: int, likelihood: str | Likelihood, datapoints: int | None, rows: str) -> FisherEstimate:
    """The settings of a Fisher estimate from what people write."""
    if rows not in ("mean", "sum"):
        raise ValueError(f'rows must be "mean" or "sum", got {rows!r}.')
    return FisherEstimate(Labels(fisher, samples), likelihood_named(likelihood), datapoints, rows == "mean")
