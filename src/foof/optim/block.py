"""One weight matrix and what is known of it: the pieces a preconditioner works on."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.kronecker import InputInverse
from foof.layers import Embedding, Layer
from foof.statistics import Gathered, MovingAverage, wide
from foof.tap import backward_pass_id, existing_tap

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
        floor = torch.finfo(Sigma.dtype).eps * mean.max()  # a group that has seen zeros only has no gradient: any finite 1/λ will do
        return self.value * torch.where(floor > 0, mean.clamp_min(floor), 1.0)


class Bypass:
    """Does a weight's gradient come through its taps alone? Compares all of it, on one backward pass, with what the taps returned."""

    def __init__(self, weight: Tensor) -> None:
        self.found = False
        self._through: Tensor | None = None
        self._pass: int | None = None
        self._handle: Any = weight.register_hook(self._compare)  # sees the sum over all ways to the weight

    def add(self, layer: Layer, gradient: Tensor, pass_id: int) -> None:
        """What a tap returns for the layer's matrix on this pass."""
        if self._handle is not None:
            mine = layer.split(gradient)[0]
            self._through = mine if self._through is None or pass_id != self._pass else self._through + mine
            self._pass = pass_id

    @torch.no_grad()
    def _compare(self, whole: Tensor) -> None:
        if self._through is not None and self._pass == backward_pass_id():
            size, rounding = whole.norm(), torch.finfo(whole.dtype).eps ** 0.5
            if size.isfinite():  # otherwise this step will hardly be taken
                self.found = bool((whole - self._through).norm() > rounding * size)
                self.remove()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._through = None


@dataclass(eq=False)
class Block:
    """One weight matrix (with its bias): every layer that uses it, its statistics, its factor."""

    layers: list[Layer]
    moments: dict[str, MovingAverage]
    gathered: dict[str, Gathered]
    factor: Any = None
    reached: bool = False  # has a gradient come through a tap since the last step?
    rows: int = 0  # rows of the latest backward pass
    made_of: tuple[Any, ...] = ()  # what the factor was made of
    shares_weight: bool = False  # with a block of another orientation (tied embedding and head)
    bypass: Bypass | None = None

    @property
    def layer(self) -> Layer:
        return self.layers[0]

    @property
    def name(self) -> str:
        return " = ".join(layer.label for layer in self.layers)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or torch.compile, whose names are those without the wrapper."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"an optimizer on neurons needs the layers, not only their parameters: pass the model, got {type(model).__name__}.")
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    return model


def check_free(layers: list[Layer]) -> None:
    """Raise where a layer has an optimizer already."""
    if any(existing_tap(layer.module) for layer in layers):
        gc.collect()  # a forgotten optimizer lets go of its model only now: it holds itself by its hooks
    for layer in layers:
        if existing_tap(layer.module) is not None:
            raise ValueError(f"{layer.label}: the model already has an optimizer on its neurons; call its remove() before making another.")


def has_gradient(block: Block) -> bool:
    return block.layer.weight.grad is not None


def check_frozen(blocks: list[Block]) -> None:
    """Raise where one of a weight and its bias, which are preconditioned together, has been frozen by itself since."""
    for block in blocks:
        if len({p.requires_grad for p in block.layer.parameters}) > 1:
            raise RuntimeError(
                f"{block.name}: of its weight and bias, which have one neuron gradient, one was frozen after the optimizer was made. "
                "Freeze both, or call remove() and make a new optimizer."
            )


def thrown_away(blocks: list[Block]) -> bool:
    """Have backward passes since the last step left no gradient at all?"""
    reached = [block for block in blocks if block.reached]
    return bool(reached) and not any(map(has_gradient, reached))


def bypassed(blocks: list[Block]) -> list[str]:
    """Names of blocks whose gradient came by other ways, too. One step is enough to tell: it is told once."""
    watches = {block.name: block.bypass for block in blocks if block.bypass is not None}
    found = [name for name, watch in watches.items() if watch.found]
    for watch in watches.values():
        watch.remove()
        watch.found = False
    return found


def value_or_zeros(block: Block, key: str) -> Tensor:
    """The moving average of one moment, as zeros of its shape before the first update."""
    value, layer = block.moments[key].value, block.layer
    if value is not None:
        return value
    size = layer.m if key == "Sigma" else layer.n
    shape = (size,) if layer.diagonal and key == "Sigma" else (layer.groups, size, size) if layer.groups > 1 else (size, size)
    return torch.zeros(shape, dtype=wide(layer.weight.dtype), device=layer.weight.device)


def without_statistics(block: Block) -> Block:
    """The same block with identities for moments: its factor has the layout of any later one."""
    blank = {key: MovingAverage() for key in block.moments}
    for key, moment in blank.items():
        zeros = value_or_zeros(Block(block.layers, {key: moment}, {}), key)
        moment.value = zeros + (1 if zeros.dim() == 1 else torch.eye(zeros.shape[-1], dtype=zeros.dtype, device=zeros.device))
    return Block(block.layers, blank, {})


def inversion_cost(block: Block) -> float:
    """What inverting a block costs, up to a constant: m³ for each factor of each group."""
    layer = block.layer
    return sum((layer.m if layer.diagonal else layer.groups * layer.m**3) if key == "Sigma" else layer.groups * layer.n**3
               for key in block.moments)  # fmt: skip


def precondition_gradient(block: Block) -> None:
    """``.grad ← factor(.grad)``. Where the rows of a weight are sharded and each has its own neuron gradient, shard by shard."""
    layer, gradients = block.layer, [p.grad for p in block.layer.parameters if p.grad is not None]
    by_rows = isinstance(block.factor, InputInverse) and layer.rows_first and all(map(distributed.sharded_by_rows, gradients))
    if by_rows:
        rows = [distributed.local(g).flatten(1) if g.dim() > 1 else distributed.local(g).unsqueeze(1) for g in gradients]
        pieces = block.factor.apply(torch.cat(rows, 1)).split([r.shape[1] for r in rows], dim=1)
        for gradient, piece in zip(gradients, pieces, strict=True):
            own = distributed.local(gradient)
            own.copy_(piece.reshape(own.shape))
        return
    matrix = block.factor.apply(layer.join(*[distributed.full(g) for g in gradients], *[None] * (2 - len(gradients))))
    for gradient, whole in zip(gradients, layer.split(matrix), strict=False):
        assert whole is not None
        distributed.write(gradient, whole)


def gather_inputs(gathered: Gathered, layer: Layer, x: Tensor, pass_id: int) -> None:
    """Add a layer's inputs of one call to what the step has seen of ``Σ = 1/N Σ_i Σ_r a_ir a_irᵀ``."""
    callers = (x if x._base is None else x._base).grad_fn is None  # made by no operation: a buffer that may be filled again before step()
    x = x.detach()
    if isinstance(layer, Embedding):
        gathered.add_moment(layer.counts(x), len(x) if x.dim() else 1, pass_id)
        return
    a = layer.input_rows(x)
    if callers and a.data_ptr() == x.data_ptr():
        a = a.clone()
    with torch.autocast(x.device.type, enabled=False):
        gathered.add_rows(a.flatten(-3, -2), a.shape[-3], pass_id)


def differing_datapoints(blocks: list[Block]) -> str | None:
    """A warning where layers count different datapoints on one pass: the first dimension of an input, of which Σ is the mean.

    One that is 1 stands for all datapoints, in Σ but not in Σ_E.
    """
    counts: dict[int | None, dict[int, str]] = {}
    for block in blocks:
        pass_id, n = block.gathered["Sigma"].latest
        if n > 1 or "Sigma_E" in block.moments:
            counts.setdefault(pass_id, {}).setdefault(n, block.name)
    for there in counts.values():
        if len(there) > 1:
            said = ", ".join(f"{n} in {name}" for n, name in sorted(there.items(), reverse=True)[:3])
            return (
                f"layers see different numbers of datapoints, the first dimension of their inputs: {said}. Σ is a mean over datapoints, "
                "so lr and damping mean something else for each: give all of them inputs (N, ..., features), or leave some out with "
                "exclude=[...]."
            )
    return None


def check_architecture(saved: Mapping[str, list[int]], blocks: list[Block]) -> None:
    """Raise if a checkpoint's matrices, by name, are not these blocks'."""
    ours = {block.layer.name: [block.layer.groups, block.layer.n, block.layer.m] for block in blocks}
    if saved != ours:
        differing = sorted({name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)})
        lines = "; ".join(f"{name or 'model'}: saved {saved.get(name)}, model {ours.get(name)}" for name in differing[:5])
        raise ValueError(f"this checkpoint is of another architecture ({lines} as [groups, outputs, inputs]).")


def moved(state: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of a factor's state, with its tensors on this device and in this precision."""

    def here(value: Any) -> Any:
        if isinstance(value, Mapping):
            return moved(value, device, dtype)
        return value.to(device, dtype, copy=True) if isinstance(value, Tensor) else value

    return {key: here(value) for key, value in state.items()}


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch that is either inputs or a pair (inputs, labels)."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """After the context torch's generators, the CPU's and the device's, are where they were."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)
