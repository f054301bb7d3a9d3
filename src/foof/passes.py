"""Calling a model on batches in pieces; recording the inputs and errors of a pass, and nothing else.

One forward pass, then one backward pass per label, and one more that makes sure that each row of the outputs is a datapoint of its
own: otherwise there are no gradients of datapoints to be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from foof import _torch
from foof.gradients import Call, chunks
from foof.layers import Layer, Linear
from foof.likelihood import Labels, Likelihood
from foof.statistics import wide
from foof.tap import Visit, inputs_seen, tapped

MIXING = (nn.RNNBase, nn.MultiheadAttention)  # modules not covered that make rows depend on one another, along some dimension


# --- calling a model --------------------------------------------------------------------------------------------------------


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, a mapping of keyword arguments, or a tuple of arguments; of what it returns, the ``logits``, if any."""
    if isinstance(inputs, Mapping):
        out = model(**inputs)
    else:
        out = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    return out if isinstance(out, Tensor) else getattr(out, "logits", out)  # a ModelOutput of transformers


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """After the context the model's buffers (running averages) are what they were before."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def check_output(out: Any) -> None:
    """Raise unless this is a tensor ``(N, ...)`` of at least one datapoint that depends on the model's parameters."""
    if not isinstance(out, Tensor):
        raise TypeError(
            f"the model must return one tensor (N, ..., C), or an output with .logits, got {type(out).__name__}; wrap it in a module "
            "that does."
        )
    if out.dim() < 2 or len(out) == 0:
        raise ValueError(f"the model's outputs must be (N, ..., C) with at least one datapoint, got {tuple(out.shape)}.")
    if not out.requires_grad:
        raise ValueError("the model's outputs do not depend on its parameters (were they made under no_grad?).")


def pieces(inputs: Any, y: Tensor | None, batch_size: int | None,
           device: torch.device | None = None) -> Iterator[tuple[Any, Tensor | None]]:  # fmt: skip
    """Inputs as a model takes them (see ``call_model``) and their labels, ``batch_size`` datapoints at a time.

    ``inputs`` may be a ``DataLoader`` of inputs, of pairs (inputs, labels), or of mappings with or without ``"labels"``; its batches
    are moved to ``device``, and it shows its progress if that takes long and tqdm is installed.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    if not isinstance(inputs, DataLoader):
        yield from _cut(inputs, y, batch_size)
        return
    if y is not None:
        raise ValueError("the labels of a DataLoader come in its batches: leave out y.")
    for batch in _with_progress(inputs):
        yield from _cut(*_split_batch(batch, device), batch_size)


def _cut(inputs: Any, y: Tensor | None, batch_size: int | None) -> Iterator[tuple[Any, Tensor | None]]:
    if batch_size is None:
        yield inputs, y
        return
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs if isinstance(inputs, (tuple, list)) else [inputs]
    shapes = [tuple(t.shape) for t in values if _has_datapoints(t)]
    if len({shape[0] for shape in shapes}) != 1:
        raise ValueError(f"batch_size needs inputs with one first dimension, got {shapes}.")
    for chunk in chunks(shapes[0][0], batch_size):
        cut = [t[chunk] if _has_datapoints(t) else t for t in values]
        if isinstance(inputs, Mapping):
            part: Any = dict(zip(inputs, cut, strict=True))
        else:
            part = tuple(cut) if isinstance(inputs, (tuple, list)) else cut[0]
        yield part, None if y is None else y[chunk]


def _has_datapoints(value: Any) -> bool:
    """Is this a tensor over datapoints, or an option (a flag, a number, None) that is the same for all?"""
    return isinstance(value, Tensor) and value.dim() > 0


def _split_batch(batch: Any, device: torch.device | None) -> tuple[Any, Tensor | None]:
    """Inputs and labels of a DataLoader's batch: a mapping's ``"labels"``; of a pair the second; of more the last."""

    def here(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return {k: here(v) for k, v in batch.items() if k != "labels"}, here(batch.get("labels"))
    if isinstance(batch, (tuple, list)) and len(batch) > 1:
        *inputs, y = map(here, batch)
        if not isinstance(y, Tensor):
            raise TypeError(f"the last entry of a DataLoader's batch must be the labels, a tensor; got {type(y).__name__}.")
        return inputs[0] if len(inputs) == 1 else tuple(inputs), y
    return here(batch[0]) if isinstance(batch, (tuple, list)) else here(batch), None


def _with_progress(batches: DataLoader[Any]) -> Iterable[Any]:
    """The batches, with a bar on a terminal once that has taken two seconds, where tqdm is installed."""
    try:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return batches
    total = len(batches) if isinstance(batches.dataset, Sized) else None
    return tqdm(batches, total=total, desc="foof", unit="batch", delay=2.0, disable=None, leave=False)


# --- recording --------------------------------------------------------------------------------------------------------------


class NotTheirs(ValueError):
    """The rows of a layer's input are not the datapoints."""

    def __init__(self, layer: Layer, x: Tensor, message: str) -> None:
        super().__init__(message)
        self.key = id(layer), x.dim()


class Recorder:
    """A receiver that keeps ``x`` and ``e`` of every call and asks for no weight gradient.

    Inputs that no operation of the graph has made are the caller's, who may write other data into them: these are copied.
    ``model``: the one whose layers these are. If it normalises by batch statistics, its datapoints do depend on one another, and nothing
    can be said about the order of its dimensions.
    """

    mask: Tensor | None = None

    def __init__(self, model: nn.Module) -> None:
        self.passes: list[list[tuple[Layer, Tensor, Tensor]]] = []
        self._common: Callable[[Layer, Tensor], bool] = lambda layer, x: False  # see to_each
        self._batch_statistics = any(
            isinstance(m, _torch.BatchNorm) and (m.training or m.running_mean is None) for m in model.modules()
        )

    def receive(self, visit: Visit) -> None:
        if not self._common(visit.layer, visit.x):
            self._keep(visit.layer, visit.x, visit.e)

    def _keep(self, layer: Layer, x: Tensor, e: Tensor) -> None:
        first = len(self.passes) == 1  # whose x is the one that is kept
        self.passes[-1].append((layer, x.detach().clone() if first and _torch.origin(x).grad_fn is None else x.detach(), e.detach()))

    @contextmanager
    def to_each(self, layers: Iterable[Layer], N: int, common: Callable[[Layer, Tensor], bool]) -> Iterator[None]:
        """Forward passes in which outputs of these layers for an input x that all N datapoints have in common are given to each of
        them, so that the error of each can be had, instead of the sum over all."""

        def hook(layer: Layer) -> Any:
            def spread(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
                x = args[0] if args else next(iter(kwargs.values()))
                if not (common(layer, x) and out.requires_grad):
                    return None
                copies = _copies(out, N).clone()  # which the model may write into
                copies.register_hook(lambda e: self._keep(layer, _copies(x, N), e))
                return copies

            return layer.module.register_forward_hook(spread, with_kwargs=True)

        self._common = common
        handles = [hook(layer) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def backward(self, out: Tensor, errors: Iterable[Tensor], layers: list[Layer], inputs: Iterable[Tensor] = ()) -> list[Call]:
        """The calls behind ``out`` ``(N, ...)``, one backward pass per output error. The passes visit one graph, hence in one order.

        inputs: further tensors of the graph whose rows must be datapoints.
        """
        weights = list({id(layer.weight): layer.weight for layer in layers if layer.weight.requires_grad}.values())
        self.passes, N, inputs = [], len(out), list(inputs)
        first: tuple[Tensor, list[Tensor | None]] | None = None
        for s in errors:
            wanted = [*weights, *(inputs if first is None else ())]
            self.passes.append([])
            grads = torch.autograd.grad(out, wanted, s.to(out.dtype), retain_graph=True, allow_unused=True)
            self._check_all_recorded(grads, weights, layers)
            first = (s, list(grads[len(weights) :])) if first is None else first
        self._check_shapes(N)
        if first is not None:
            self._check_datapoints(out, *first, weights, inputs)
        calls = [Call(same[0][0], same[0][1], [e for _, _, e in same]) for same in zip(*self.passes, strict=True)]
        self.passes = []
        return calls

    def _check_shapes(self, N: int) -> None:
        for layer, x, e in self.passes[0] if self.passes else ():
            if x.shape[:1] != (N,) or e.shape[:1] != (N,):
                raise not_theirs(layer, x, N)

    def _check_datapoints(self, out: Tensor, s: Tensor, of_inputs: list[Tensor | None], weights: list[nn.Parameter],
                          inputs: list[Tensor]) -> None:  # fmt: skip
        """Each datapoint's output error times a number of its own must bring its errors ``e``, times that number, and nothing else.

        The numbers are powers of two, so that rounding is the same.
        """
        N = len(out)
        if N == 1 or self._batch_statistics:
            return
        r = _factors(N).to(out)
        self.passes.append([])
        scaled = s.to(out.dtype) * r.reshape(-1, *[1] * (out.dim() - 1))
        grads = torch.autograd.grad(out, [*weights, *inputs], scaled, retain_graph=True, allow_unused=True)[len(weights) :]
        for (layer, x, e), (_, _, probed) in zip(self.passes[0], self.passes.pop(), strict=True):
            if not _told_apart(e, probed, r):
                raise NotTheirs(
                    layer, x,
                    f"{layer.label}: the first dimension of its input {tuple(x.shape)} is as long as the datapoints are many, but is not "
                    "theirs, or they depend on one another (time first? a batch sorted inside the model, a graph, similarities within "
                    "the batch?), so their gradients cannot be told apart. Put the datapoints first, one output for each, or pass "
                    f"exclude=[{layer.name!r}].",
                )  # fmt: skip
        for e_x, probed_x in zip(of_inputs, grads, strict=True):
            if e_x is not None and probed_x is not None and len(e_x) == N and not _told_apart(e_x, probed_x, r):
                raise ValueError(
                    f"the outputs {tuple(out.shape)} at one place of the first dimension depend on inputs {tuple(e_x.shape)} at others, "
                    "so that it is not the datapoints (time first? nn.RNN, nn.MultiheadAttention and nn.TransformerEncoderLayer have "
                    "batch_first=False unless told otherwise). Put the datapoints first, at inputs and outputs."
                )

    @staticmethod
    def _check_all_recorded(grads: tuple[Tensor | None, ...], weights: list[nn.Parameter], layers: list[Layer]) -> None:
        for grad, weight in zip(grads, weights, strict=False):
            if grad is not None and grad.any():
                names = " = ".join(layer.label for layer in layers if layer.weight is weight)
                raise ValueError(
                    f"{names}: its weight is also used outside its layer's forward(), where its inputs are not seen; exclude it. (Or "
                    "the model was compiled and run before: call torch._dynamo.reset().)"
                )


def not_theirs(layer: Layer, x: Tensor, N: int) -> NotTheirs:
    return NotTheirs(
        layer, x,
        f"{layer.label}: the first dimension of its input {tuple(x.shape)} is not the {N} datapoints, so their gradients cannot be told "
        f"apart. Expand its input to ({N}, ...), or pass exclude=[{layer.name!r}]. (Tables of positions are given to each datapoint where "
        "the passes are ours: foof.Fisher(model, inputs), update_curvature(inputs=...).)",
    )  # fmt: skip


def _copies(t: Tensor, N: int) -> Tensor:
    """``(1, ...)``, or ``(...)`` that is broadcast, as ``(N, ...)``."""
    return t.expand(N, *t.shape[1:]) if t.dim() > 1 and len(t) == 1 else t.unsqueeze(0).expand(N, *t.shape)


def _told_apart(e: Tensor, probed: Tensor, r: Tensor) -> bool:
    """Is ``probed`` e, times r datapoint by datapoint, up to rounding?"""
    tolerance, dtype = torch.finfo(e.dtype).eps ** 0.5, wide(e.dtype)
    e, probed = e.flatten(1).to(dtype) * r.to(dtype).unsqueeze(1), probed.flatten(1).to(dtype)
    largest = e.norm(dim=1).max()
    return not bool(((probed - e).norm(dim=1) > tolerance * largest).any())  # NaN stays NaN


def _factors(N: int) -> Tensor:
    """Numbers ``±2^k``, no two of ten alike."""
    values = torch.tensor([1.0, -1.0, 2.0, -2.0, 4.0, -4.0, 0.5, -0.5, 0.25, -0.25])
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(len(values), generator=generator) for _ in range(-(-N // len(values)))]
    return values[torch.cat(orders)[:N]]


def recorded(model: nn.Module, layers: list[Layer], inputs: Any, y: Tensor | None, labels: Labels, likelihood: Likelihood,
             generator: torch.Generator | None, batch_size: int | None) -> Iterator[tuple[list[Call], int]]:  # fmt: skip
    """Calls and number of datapoints of each piece of ``inputs``, ``batch_size`` datapoints at a time. Buffers stay as they were.

    An input that all datapoints have in common (a table of positions, with input ``(L,)`` or ``(1, L)``) is seen by its length; where
    that is the number of datapoints by chance, by the errors, in a second attempt.
    """
    watch = any(isinstance(m, MIXING) for m in model.modules())
    with buffers_kept(model):
        for part, targets in pieces(inputs, y, batch_size, layers[0].weight.device):
            common: set[tuple[int, int]] = set()  # layers, and dimensions of inputs in common that are as long as datapoints are many
            refused: NotTheirs | None = None
            while True:
                random, recorder = _Random(layers[0].weight.device, generator), Recorder(model)
                try:
                    with torch.enable_grad(), tapped(layers, recorder):
                        x, watched = _watched(part) if watch else (part, [])
                        out = _forward(model, x, layers, recorder, common, random)
                        N, errors = len(out), labels.errors(likelihood, out, targets, generator)
                        calls = recorder.backward(out, errors, layers, watched)
                    break
                except Exception as error:
                    if refused is None and not isinstance(error, NotTheirs):
                        raise
                    if not isinstance(error, NotTheirs) or error.key in common:
                        raise (refused or error) from None
                    refused = refused or error
                    common.add(error.key)
                    random.restore()
            del out, x, watched
            yield calls, N


def _forward(model: nn.Module, inputs: Any, layers: list[Layer], recorder: Recorder, common: set[tuple[int, int]],
             random: _Random) -> Tensor:  # fmt: skip
    """The outputs ``(N, ...)``.

    Inputs that all datapoints have in common take a second forward pass, in which the layer's output is given to each of them: the
    outputs must be those of the first.
    """
    seen: list[tuple[Layer, Tensor]] = []
    with inputs_seen(layers, lambda layer, x: seen.append((layer, x))):
        out = call_model(model, inputs)
    check_output(out)
    N = len(out)

    def in_common(layer: Layer, x: Tensor) -> bool:
        one_row = isinstance(layer, Linear) and x.dim() == 1
        return (id(layer), x.dim()) in common or one_row or x.shape[:1] != (N,)

    alike = {id(layer): (layer, x) for layer, x in seen if in_common(layer, x)}
    if not alike:
        return out
    random.restore()
    try:
        with recorder.to_each([layer for layer, _ in alike.values()], N, in_common):
            again = call_model(model, inputs)
        same = again.shape == out.shape and torch.allclose(again, out, rtol=1e-3, atol=1e-3 * float(out.detach().abs().max()))
    except (RuntimeError, ValueError, IndexError, TypeError):  # shapes that do not fit
        same = False
    if not same:
        raise not_theirs(*next(iter(alike.values())), N)
    return again


class _Random:
    """Where torch's generators, and one of our own, are: ``restore`` takes them back there."""

    def __init__(self, device: torch.device, generator: torch.Generator | None) -> None:
        self.device, self.generator = device, generator
        self.states = torch.get_rng_state(), None if generator is None else generator.get_state()
        self.on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        torch.set_rng_state(self.states[0])
        if self.generator is not None and self.states[1] is not None:
            self.generator.set_state(self.states[1])
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


def _watched(inputs: Any) -> tuple[Any, list[Tensor]]:
    """Inputs of which gradients can be had, and those."""
    watched: list[Tensor] = []

    def watch(value: Any) -> Any:
        if not (_has_datapoints(value) and value.is_floating_point()):
            return value
        watched.append(value.detach().requires_grad_())
        return watched[-1].clone()  # a model may write into its inputs

    if isinstance(inputs, Mapping):
        return {k: watch(v) for k, v in inputs.items()}, watched
    if isinstance(inputs, (tuple, list)):
        return tuple(map(watch, inputs)), watched
    return watch(inputs), watched


def record(model: nn.Module, layers: list[Layer], inputs: Any, y: Tensor | None, labels: Labels, likelihood: Likelihood,
           generator: torch.Generator | None, batch_size: int | None) -> tuple[list[Call], int, int]:  # fmt: skip
    """Calls, N datapoints and K labels of ``inputs``, all pieces together."""
    parts = list(recorded(model, layers, inputs, y, labels, likelihood, generator, batch_size))
    if not parts:
        raise ValueError("there is no batch in these inputs, so there is no datapoint to take gradients at.")
    calls = _joined([calls for calls, _ in parts])
    return calls, sum(N for _, N in parts), len(calls[0].errors) if calls else 1


def _joined(parts: list[list[Call]]) -> list[Call]:
    """The same calls of several batches as one, freeing each as it goes."""
    if len(parts) == 1:
        return parts[0]
    if len({tuple(id(call.layer) for call in calls) for calls in parts}) > 1:
        raise ValueError("datapoints of different batches take different paths through the model's layers; use batch_size=None.")
    joined = []
    for number in range(len(parts[0])):
        same = [calls[number] for calls in parts]
        if len({(call.x.shape[1:], call.errors[0].shape[1:]) for call in same}) > 1:
            raise ValueError(
                f"{same[0].layer.label}: batches with inputs of different shapes ({', '.join(str(tuple(c.x.shape)) for c in same[:4])}) "
                "cannot be joined: pad them to one length, with labels -100 where there is no loss."
            )
        errors = [torch.cat(each) for each in zip(*(call.errors for call in same), strict=True)]
        joined.append(Call(same[0].layer, torch.cat([call.x for call in same]), errors))
        for call in same:
            call.x, call.errors = call.x[:0], []
    return joined
