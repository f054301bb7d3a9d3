"""What to gather on which pass, and which damped inverse to make of it: FOOF's estimator and KFAC's.

An estimator knows no schedule, no optimizer and no other estimator. The engine asks it; a new one is a sibling of these.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foof import linalg
from foof._torch import origin
from foof.kronecker import EigenInverse, InputInverse, KroneckerInverse, in_blocks
from foof.layers import Conv, Embedding, Layer, Projection
from foof.likelihood import Labels, Likelihood, make_generator, restore
from foof.optim.block import Block
from foof.optim.step import Ledger
from foof.passes import call_model
from foof.patches import Subset, better_than_rows, second_moment
from foof.statistics import EACH_ROW, EVERY_ROW, Gathered, Schedule, Stride, wide
from foof.sweep import Gradual, Sweep, parts_of
from foof.tap import Receiver, Visit, inputs_seen, layers_behind

STATISTICS_LIMIT = 2**30  # bytes that Σ of one layer and its inverse may take without a word
Seen = dict[Block, dict[str, Gathered]]


class Host(Protocol):
    """What an estimator may ask of the engine it works for."""

    blocks: list[Block]
    schedule: Schedule

    def recording(self, receiver: Receiver) -> AbstractContextManager[None]:
        """Until the context ends, passes go to this receiver and are not part of any step."""

    def warn(self, message: str, once: bool | str = False) -> None: ...


class Estimator:
    """What the engine asks of any estimator; those that keep no second moments leave out what is about them."""

    name: str  # in checkpoints
    former_names: tuple[str, ...] = ()  # in checkpoints of earlier versions
    moments: tuple[str, ...] = ()
    plain = False  # are gradients left as they are in the backward pass, and preconditioned when the step is taken?
    watches = True  # are plain gradients watched for masks that are laid over them before the step?
    together = True  # are all averages fed on the same steps, or may each be on steps of its own?

    def moments_of(self, layers: Sequence[Layer]) -> tuple[str, ...]:
        """Which second moments are kept of the matrix that these layers use; none: it is stepped without an inverse."""
        return self.moments

    def leaves_plain(self, block: Block) -> bool:
        """Not where a weight is tied to one of another layout: the sum of their gradients could not be told apart later."""
        return self.plain and not block.shares_weight

    def observe(self, block: Block, ledger: Ledger, visit: Visit, due: bool) -> None:
        """A training pass comes by. Are the statistics due for data?"""

    def update_curvature(self, host: Host, due: bool, out: Tensor, y: Tensor | None) -> None:
        """Outputs (and labels) that estimate the Fisher. Most have no use for them."""

    def invert(self, block: Block, T: int) -> Any:
        """The damped inverse from the block's moving averages, to be used for T steps."""
        raise NotImplementedError

    def parts(self, block: Block) -> int:
        """Into how many parts making that inverse can be divided; 1: it cannot."""
        return 1

    def begin(self, block: Block) -> Gradual:
        """The same inverse in so many parts, from the averages as they are now."""
        raise NotImplementedError

    def inverse_from(self, state: dict[str, Any]) -> Any:
        """The inverse from its ``state_dict``."""
        raise NotImplementedError

    def adopt(self, block: Block, old: Any) -> None:
        """The block has a new inverse in place of an old one (None: its first)."""

    def folded(self, ledgers: dict[Block, Ledger]) -> None:
        """What these had to say has been folded into the moving averages."""

    def prepare(self, host: Host, ledgers: dict[Block, Ledger]) -> None:
        """A step begins: these blocks have gradients."""

    def finish(self, host: Host, ledgers: dict[Block, Ledger], due: bool) -> None:
        """It has been taken. Were the statistics due for data?"""

    def precondition(self, ledgers: dict[Block, Ledger | None]) -> None:
        """Make plain gradients those of the method. Each block alone, unless a method knows better."""
        for block, ledger in ledgers.items():
            masked = None if ledger is None or ledger.nonzero is None else ledger.masked(block.raw())
            block.precondition()
            if masked is not None and masked.any():
                block.write(block.raw().masked_fill(masked, 0))

    def see(self, host: Host, model: nn.Module, batch: Any) -> Seen:
        """The second moments of one batch outside training."""
        raise NotImplementedError("this method keeps no averages to initialise; call update_curvature(inputs=...).")

    def moment_shape(self, layer: Layer, key: str) -> tuple[int, ...]:
        """The shape of a second moment: ``(m, m)`` or ``(m,)`` of the inputs, ``(n, n)`` of the errors, one per group."""
        if key == "Sigma" and layer.diagonal:
            return (layer.m,)
        size = layer.m if key == "Sigma" else layer.n
        return (layer.groups, size, size) if layer.groups > 1 else (size, size)

    def explain_unseen(self, block: Block) -> str:
        """Why a block that has a gradient has no statistics."""
        return f"{block.name}: the first batch is empty, or not finite; statistics need at least one datapoint."

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``."""


class InputMoments(Estimator):
    """FOOF's: ``Σ`` from the inputs of the training passes themselves, ``P = (Σ + λI)⁻¹``."""

    name = "foof"
    moments = ("Sigma",)
    together = False

    def __init__(self, mean_over_rows: bool = False, blocks: int | str = 1, row_stride: int = 1) -> None:
        if blocks != "auto" and not (isinstance(blocks, int) and blocks >= 1):
            raise ValueError(f'blocks is into how many diagonal blocks a layer\'s inputs are split: at least 1, or "auto", got {blocks!r}.')
        self.mean_over_rows, self.blocks, self.row_stride = mean_over_rows, blocks, checked_stride(row_stride)

    def splits(self, layer: Layer) -> int:
        """Into how many blocks this layer's inputs are split: the fewest that keep Σ and its inverse within a gibibyte, for "auto"."""
        if layer.diagonal or layer.groups > 1:
            return 1
        auto = -(-2 * layer.m**2 * wide(layer.weight.dtype).itemsize // STATISTICS_LIMIT)
        return min(auto if isinstance(self.blocks, str) else self.blocks, layer.m)

    def moment_shape(self, layer: Layer, key: str) -> tuple[int, ...]:
        k = self.splits(layer)
        return (k, -(-layer.m // k), -(-layer.m // k)) if k > 1 else super().moment_shape(layer, key)

    def observe(self, block: Block, ledger: Ledger, visit: Visit, due: bool) -> None:
        if block.moments and (due or block.inverse is None):
            k = 1 if self.blocks == 1 else self.splits(visit.layer)
            some = Stride(self.row_stride, block.moments["Sigma"].updates)
            gather_inputs(ledger.seen["Sigma"], visit.layer, visit.x, visit.mask, visit.pass_id, self.mean_over_rows, k, some)

    def invert(self, block: Block, T: int) -> InputInverse:
        Sigma, layer = block.moments["Sigma"].value, block.layer
        assert Sigma is not None
        uses = linalg.uses(T, min(block.rows or layer.n, layer.n))
        return InputInverse.make(Sigma, block.damping.strength(layer, Sigma), block.name, uses)

    def parts(self, block: Block) -> int:
        return 1 if block.layer.diagonal else parts_of(self.moment_shape(block.layer, "Sigma")[-1])

    def begin(self, block: Block) -> Gradual:
        Sigma = block.moments["Sigma"].value
        assert Sigma is not None
        return Gradual([Sweep(Sigma, block.damping.strength(block.layer, Sigma))], lambda P: InputInverse("inverse", P))

    def inverse_from(self, state: dict[str, Any]) -> InputInverse:
        return InputInverse.from_state_dict(state)

    def see(self, host: Host, model: nn.Module, batch: Any) -> Seen:
        """A forward pass without gradients."""
        block_of = {id(layer): block for block in host.blocks for layer in block.layers if block.moments}
        seen: Seen = {block: {"Sigma": Gathered()} for block in block_of.values()}

        def gather(layer: Layer, x: Tensor) -> None:
            block = block_of[id(layer)]
            some = Stride(self.row_stride, block.moments["Sigma"].updates)
            gather_inputs(seen[block]["Sigma"], layer, x, None, 0, self.mean_over_rows, self.splits(layer), some)

        with torch.no_grad(), inputs_seen([layer for block in seen for layer in block.layers], gather):
            call_model(model, batch[0] if isinstance(batch, (tuple, list)) else batch)
        return seen


def checked_stride(row_stride: int) -> int:
    if not isinstance(row_stride, int) or row_stride < 1:
        raise ValueError(f"row_stride: statistics are of every k-th row, k a whole number, at least 1, got {row_stride!r}.")
    return row_stride


def gather_inputs(gathered: Gathered, layer: Layer, x: Any, mask: Tensor | None, pass_id: int, mean_over_rows: bool,
                  blocks: int = 1, some: Stride = EVERY_ROW) -> None:  # fmt: skip
    """Add a layer's inputs of one call to what the step has seen of ``Σ = 1/N Σ_i Σ_r a_ir a_irᵀ``.

    mask: rows to count, ``(N, R)``. mean_over_rows: ``Σ = 1/(N R) Σ_i Σ_r``, for losses that are means over rows, too.
    blocks: how many diagonal blocks of Σ are wanted. some: which rows to look at; of a convolution: which datapoints.
    """
    if isinstance(layer, Projection) and layer.groups > 1:
        gather_projections(gathered, layer, x, mask, pass_id, mean_over_rows, some)
        return
    callers = origin(x).grad_fn is None  # made by no operation: a buffer that may be filled again before step()
    x = x.detach()
    if isinstance(layer, Embedding):
        rows = x if mask is None or x.numel() != mask.numel() else x[mask.reshape(x.shape)]
        datapoints = rows.numel() if mean_over_rows else len(x) if x.dim() else 1
        gathered.add_moment(layer.counts(rows), datapoints, EACH_ROW if mean_over_rows else pass_id)
        return
    if isinstance(layer, Conv) and mask is None and blocks == 1 and (some.every > 1 or better_than_rows(layer, x)):
        datapoints = len(layer.batched(x))
        count, of = (datapoints * layer.locations(x), EACH_ROW) if mean_over_rows else (datapoints, pass_id)
        subset = Subset(some.every, shift=some.shift)
        gathered.add_moment(second_moment(layer, x, subset), count, of)  # by patches or without, whichever is cheaper
        return
    a = layer.input_rows(x)
    if callers and a.data_ptr() == x.data_ptr() and some.every == 1:
        a = a.clone()
    rows, datapoints, counted = a.flatten(-3, -2), a.shape[-3], _counted(a, layer, mask)
    if counted is not None:
        rows = rows[counted]
    count, of = (rows.shape[-2], EACH_ROW) if mean_over_rows else (datapoints, pass_id)
    rows = some.of(rows)
    if blocks > 1:
        rows = in_blocks(rows, blocks)
    with torch.autocast(x.device.type, enabled=False):
        gathered.add_rows(rows, count, of)


def gather_projections(gathered: Gathered, layer: Projection, inputs: tuple[Tensor, ...], mask: Tensor | None, pass_id: int,
                       mean_over_rows: bool, some: Stride) -> None:  # fmt: skip
    """One Σ ``(3, m, m)`` of query, key and value ``(N, R, m)``; keys may have other rows than queries, in number and kind."""
    moments, of = [], dict[int, Tensor]()
    rows = 0
    for x in inputs:
        if id(x) not in of:  # self-attention: one tensor for all three
            a = layer.input_matrix(x.detach())
            shape = x.shape[:-1] if x.dim() == 3 else (1, len(a))
            swapped = x.dim() == 3 and not layer.module.batch_first
            counted = None if mask is None else over_rows(mask.mT, *shape) if swapped and mask.dim() == 2 else over_rows(mask, *shape)
            if counted is not None:
                a = a[counted]
            rows = rows or len(a)
            scale, a = rows / max(len(a), 1) if mean_over_rows else 1.0, some.of(a.to(wide(a.dtype)))
            with torch.autocast(x.device.type, enabled=False):
                of[id(x)] = a.mT @ a * scale
        moments.append(of[id(x)])
    gathered.add_moment(torch.stack(moments), rows if mean_over_rows else len(inputs[0]), EACH_ROW if mean_over_rows else pass_id)


def _counted(a: Tensor, layer: Layer, mask: Tensor | None) -> Tensor | None:
    """Which rows of ``(N, R, k)`` count: the mask, flat, where it is one over just these rows."""
    return None if mask is None or layer.groups > 1 else over_rows(mask, a.shape[-3], a.shape[-2])


def over_rows(mask: Tensor, first: int, second: int) -> Tensor | None:
    """A mask ``(N, R)`` in the order of rows ``(N, R)``, ``(N·R, 1)`` or, sequence first, ``(R, N)``; None where rows are not these.

    Where N = R, datapoints are taken to come first.
    """
    shape = (*mask.shape, 1)[:2]
    if (first, second) == shape or (1 in (first, second) and first * second == mask.numel()):
        return mask.flatten()
    return mask.mT.flatten() if (second, first) == shape else None


# --- KFAC -----------------------------------------------------------------------------------------------------------------

KroneckerKind = type[KroneckerInverse] | type[EigenInverse]
DAMPING_MODES: dict[str, KroneckerKind] = {"heuristic": KroneckerInverse, "standard": EigenInverse}


@dataclass(frozen=True)
class FisherSettings:
    """How the Fisher is estimated: which labels, under which likelihood, from how many datapoints of a batch.

    ``average_rows``: is Σ_E the mean over the rows (locations, tokens) of a datapoint, or their sum?
    """

    labels: Labels
    likelihood: Likelihood
    datapoints: int | None = None
    average_rows: bool = True
    mean_over_rows: bool = False
    row_stride: int = 1

    def __post_init__(self) -> None:
        checked_stride(self.row_stride)
        if self.datapoints is not None and self.datapoints < 1:
            raise ValueError(f"datapoints is how many of each batch feed the factors: at least 1, got {self.datapoints}.")


class FisherRows:
    """What one estimate of the Fisher has recorded at one call of a layer. It stays with that call, and goes with its graph."""

    def __init__(self, estimate: FisherPasses) -> None:
        self.estimate = estimate
        self.seen = {"Sigma": Gathered(), "Sigma_E": Gathered()}

    def record(self, visit: Visit, settings: FisherSettings, first: bool) -> None:
        """Rows for Σ on the first pass, and for Σ_E on each; their number counts once."""
        layer, x, e, mask, used = visit.layer, visit.x, visit.e, visit.mask, settings.datapoints
        if used is not None and len(x) == self.estimate.batch:
            x, e, mask = x[:used], e[:used], None if mask is None else mask[:used]
        if first:
            gather_inputs(self.seen["Sigma"], layer, x, mask, visit.pass_id, settings.mean_over_rows, some=self.estimate.some)
        rows, seen = layer.error_rows(e), self.seen["Sigma_E"]
        datapoints, counted, rows = rows.shape[-3], _counted(rows, layer, mask), rows.flatten(-3, -2)
        if counted is not None:
            rows = rows[counted]
        count = 0 if not first else rows.shape[-2] if settings.average_rows else datapoints
        seen.add_rows(self.estimate.some.of(rows), count, EACH_ROW if settings.average_rows else visit.pass_id)


class FisherPasses:
    """A receiver of the Fisher's own backward passes: leaves with every call what it has recorded there."""

    mask: Tensor | None = None

    def __init__(self, settings: FisherSettings, batch: int, layers: Container[Layer], note: Callable[[FisherPasses], FisherRows],
                 some: Stride) -> None:  # fmt: skip
        self.settings, self.batch, self._layers, self._note, self.some = settings, batch, layers, note, some
        self.first = True  # the inputs, and how many datapoints there are, are counted once for all passes
        self.recorded: list[tuple[Layer, FisherRows]] = []

    def receive(self, visit: Visit) -> None:
        if visit.layer not in self._layers:
            return
        note = next((note for note in visit.notes if isinstance(note, FisherRows) and note.estimate is self), None)
        if note is None:
            note = self._note(self)
            visit.notes.append(note)
            self.recorded.append((visit.layer, note))
        note.record(visit, self.settings, self.first)


class KroneckerFisher(Estimator):
    """KFAC's: ``Σ`` as FOOF's, and ``Σ_E = 1/(N R) Σ_i Σ_k Σ_r e eᵀ`` from backward passes of the Fisher's own.

    Both are recorded there and left with the graph of the outputs: they count if a training pass through that graph does.
    """

    moments: tuple[str, ...] = ("Sigma", "Sigma_E")
    note: type[FisherRows] = FisherRows

    def __init__(self, settings: FisherSettings, kind: KroneckerKind, generator: torch.Generator | int | None,
                 device: torch.device) -> None:  # fmt: skip
        self.settings, self.kind = settings, kind
        self.plain = not kind.linear
        self.generator = make_generator(generator, device)
        self._asked = False  # for an estimate, since the last step

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"kfac ({self.kind.__name__})"

    @property
    def former_names(self) -> tuple[str, ...]:  # type: ignore[override]
        return (f"kfac ({self.kind.__name__.removesuffix('Inverse')}Factor)",)

    def update_curvature(self, host: Host, due: bool, out: Tensor, y: Tensor | None) -> None:
        """Estimate the Fisher at these outputs, if it is due; otherwise for those layers behind them that have no inverse yet."""
        layers = {layer for block in host.blocks for layer in block.layers if due or block.inverse is None}
        if due or (layers and isinstance(out, Tensor) and (layers := layers & layers_behind(out))):
            self._estimate(host, out, y, layers)

    def _estimate(self, host: Host, out: Tensor, y: Tensor | None, layers: Container[Layer]) -> list[tuple[Layer, FisherRows]]:
        """One backward pass for each output error; what they have recorded of these layers, call by call."""
        if not (isinstance(out, Tensor) and out.requires_grad):
            raise ValueError("update_curvature needs the outputs of the model, a tensor computed with gradients enabled.")
        self._asked = True
        if not torch.isfinite(out.detach()).all():  # their sum may overflow in float16
            host.warn("NaN or inf in the outputs given to update_curvature: this batch is left out of the statistics.")
            return []
        weights = [block.weight for block in host.blocks if block.weight.requires_grad]  # it may be frozen by now
        errors = self.settings.labels.errors(self.settings.likelihood, out, y, self.generator)
        first = next(errors, torch.zeros_like(out))  # a single class has no error at all
        some = Stride(self.settings.row_stride, max(block.moments["Sigma"].updates for block in host.blocks))
        passes = FisherPasses(self.settings, len(out), layers, self.note, some)
        with host.recording(passes):
            for error in chain([first], errors) if weights else ():
                torch.autograd.grad(out, weights, error.to(out.dtype), retain_graph=True, allow_unused=True)
                passes.first = False
        recorded, passes.recorded = passes.recorded, []  # else notes and passes would hold each other, and rows, until collected
        return recorded

    def observe(self, block: Block, ledger: Ledger, visit: Visit, due: bool) -> None:
        """What the Fisher's passes have left with this call; the training pass's own errors are not the Fisher's."""
        for note in ledger.take(visit.notes):
            if isinstance(note, FisherRows):
                for key, seen in note.seen.items():
                    ledger.seen[key].merge(seen)

    def invert(self, block: Block, T: int) -> KroneckerInverse | EigenInverse:
        Sigma, Sigma_E = self.second_moments(block)
        layer = block.layer
        rows = float("inf") if self.plain else block.rows or layer.n
        uses = linalg.uses(T, min(rows, layer.n)), linalg.uses(T, min(rows, layer.m))  # of each side, until the next inversion
        return self.kind.make(Sigma, Sigma_E, block.damping.absolute("KFAC needs"), block.name, uses)

    def parts(self, block: Block) -> int:
        if self.kind is not KroneckerInverse:
            return 1
        return parts_of(block.layer.n) + (0 if block.layer.diagonal else parts_of(block.layer.m))

    def begin(self, block: Block) -> Gradual:
        return KroneckerInverse.begin(*self.second_moments(block), block.damping.absolute("KFAC needs"), block.name)

    def inverse_from(self, state: dict[str, Any]) -> KroneckerInverse | EigenInverse:
        return self.kind.from_state_dict(state)

    def finish(self, host: Host, ledgers: dict[Block, Ledger], due: bool) -> None:
        if due and not self._asked:
            host.warn(
                "KFAC's factors are due for data, but update_curvature(out) was not called before backward(): they stay as they are.",
                once=True,
            )
        self._asked = False

    def second_moments(self, block: Block) -> tuple[Tensor, Tensor]:
        """Σ and Σ_E as the moving averages have them now."""
        Sigma, Sigma_E = (block.moments[key].value for key in ("Sigma", "Sigma_E"))
        if Sigma is None or Sigma_E is None:
            raise ValueError(self.explain_unseen(block))
        return Sigma, Sigma_E

    def see(self, host: Host, model: nn.Module, batch: Any) -> Seen:
        """A forward pass and the Fisher's backward passes."""
        labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
        with torch.enable_grad():
            out = call_model(model, batch[0] if isinstance(batch, (tuple, list)) else batch)
            block_of = {layer: block for block in host.blocks for layer in block.layers}
            recorded = self._estimate(host, getattr(out, "logits", out), labels, block_of)
        seen: Seen = {}
        for layer, note in recorded:
            into = seen.setdefault(block_of[layer], {key: Gathered() for key in note.seen})
            for key, gathered in note.seen.items():
                into[key].merge(gathered)
        return seen

    def explain_unseen(self, block: Block) -> str:
        return (
            f"{block.name}: KFAC has no estimate of the Fisher for this layer. Call opt.update_curvature(out) between the forward "
            "pass and backward(), with outputs that depend on this layer, or opt.initialise(batches) before training."
        )

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        restore(self.generator, state["generator"])
