"""One forward pass, then one backward pass per label, keeping every covered layer's inputs and errors and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from foof._torch import origin
from foof.gradients import Call, chunks
from foof.layers import Embedding, Layer, Linear
from foof.likelihood import Labels, Likelihood
from foof.tap import Visit, tapped


class Recorder:
    """A receiver that keeps ``x`` and ``e`` of every call and asks for no weight gradient.

    Inputs that no operation of the graph has made are the caller's, who may write other data into them: these are copied.
    """

    mask: Tensor | None = None

    def __init__(self) -> None:
        self.passes: list[list[tuple[Layer, Tensor, Tensor]]] = []

    def receive(self, visit: Visit) -> None:
        x, first = visit.x, len(self.passes) == 1  # whose x is the one that is kept
        kept = x.detach().clone() if first and origin(x).grad_fn is None else x.detach()
        self.passes[-1].append((visit.layer, kept, visit.e.detach()))

    def backward(self, out: Tensor, errors: Iterable[Tensor], layers: list[Layer], N: int) -> list[Call]:
        """The calls behind ``out``, one backward pass per output error. The passes visit one graph, hence in one order."""
        weights = list({id(layer.weight): layer.weight for layer in layers if layer.weight.requires_grad}.values())
        self.passes = []
        for s in errors:
            self.passes.append([])
            grads = torch.autograd.grad(out, weights, s.to(out.dtype), retain_graph=True, allow_unused=True)
            self._check_all_recorded(grads, weights, layers)
        if self.passes and any(_ambiguous(layer, x, N) for layer, x, _ in self.passes[0]):
            self._check_datapoints_come_first(out, weights)
        calls = []
        for same in zip(*self.passes, strict=True):
            layer, x, e = same[0]
            if x.shape[0] != N or e.shape[0] != N:
                raise ValueError(
                    f"{layer.label}: the first dimension of its input {tuple(x.shape)} and output {tuple(e.shape)} is not the "
                    f"{N} datapoints, so the gradients of datapoints cannot be told apart. Expand its input to ({N}, ...) or "
                    f"pass exclude=[{layer.name!r}]."
                )
            calls.append(Call(layer, x, [error for _, _, error in same]))
        self.passes = []
        return calls

    def _check_datapoints_come_first(self, out: Tensor, weights: list[nn.Parameter]) -> None:
        """Errors of the first datapoint alone must stay at the first place of every layer's output."""
        passes, probe = self.passes, torch.zeros_like(out)
        probe[0] = torch.linspace(1, 2, out[0].numel(), device=out.device).reshape(out[0].shape)
        self.passes = [[]]
        torch.autograd.grad(out, weights, probe, retain_graph=True, allow_unused=True)
        for layer, x, e in self.passes[0]:
            if e[1:].any():
                raise ValueError(
                    f"{layer.label}: the first dimension of its input {tuple(x.shape)} is as long as the datapoints are many, but is not "
                    f"theirs, so their gradients cannot be told apart. Put the datapoints first, or pass exclude=[{layer.name!r}]."
                )
        self.passes = passes

    @staticmethod
    def _check_all_recorded(grads: tuple[Tensor | None, ...], weights: list[nn.Parameter], layers: list[Layer]) -> None:
        for grad, weight in zip(grads, weights, strict=True):
            if grad is not None:
                names = " = ".join(layer.label for layer in layers if layer.weight is weight)
                raise ValueError(
                    f"{names}: its weight is also used outside its layer's forward(), where its inputs are not seen; exclude it. (Or "
                    "the model was compiled and run before: call torch._dynamo.reset().)"
                )


def _ambiguous(layer: Layer, x: Tensor, N: int) -> bool:
    """Might the first dimension be another than the datapoints, of the same length by chance? (time, or a table of positions)"""
    lengths = x.shape if isinstance(layer, Embedding) else x.shape[:-1] if isinstance(layer, Linear) else x.shape[:1]
    return N > 1 and lengths[0] == N and (lengths.count(N) > 1 or (isinstance(layer, Embedding) and x.dim() == 1))


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a tensor, a mapping of keyword arguments, or a tuple of arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def record(model: nn.Module, layers: list[Layer], inputs: Any, y: Tensor | None, labels: Labels, likelihood: Likelihood,
           generator: torch.Generator | None, batch_size: int | None) -> tuple[list[Call], int, int]:  # fmt: skip
    """Calls, N datapoints and K labels of ``inputs``, ``batch_size`` datapoints at a time. Buffers stay as they were."""
    parts: list[list[Call]] = []
    N = 0
    with buffers_kept(model):
        for part, targets in pieces(inputs, y, batch_size):
            recorder = Recorder()
            with torch.enable_grad(), tapped(layers, recorder):
                out = call_model(model, part)
                check_output(out)
                errors = labels.errors(likelihood, out, targets, generator)
                parts.append(recorder.backward(out, errors, layers, len(out)))
            N += len(out)
            del out
    calls = _joined(parts)
    return calls, N, len(calls[0].errors) if calls else 1


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
        raise TypeError(f"the model must return one tensor (N, ..., C), got {type(out).__name__}; wrap it in a module that does.")
    if out.dim() < 2 or len(out) == 0:
        raise ValueError(f"the model's outputs must be (N, ..., C) with at least one datapoint, got {tuple(out.shape)}.")
    if not out.requires_grad:
        raise ValueError("the model's outputs do not depend on its parameters (were they made under no_grad?).")


def pieces(inputs: Any, y: Tensor | None, batch_size: int | None) -> Iterable[tuple[Any, Tensor | None]]:
    """Inputs as a model takes them (see ``call_model``) and their labels, ``batch_size`` datapoints at a time."""
    if batch_size is None:
        yield inputs, y
        return
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
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


def _joined(parts: list[list[Call]]) -> list[Call]:
    """The same calls of several batches as one, freeing each as it goes."""
    if len(parts) == 1:
        return parts[0]
    if len({tuple(id(call.layer) for call in calls) for calls in parts}) > 1:
        raise ValueError("datapoints of different batches take different paths through the model's layers; use batch_size=None.")
    joined = []
    for number in range(len(parts[0])):
        same = [calls[number] for calls in parts]
        errors = [torch.cat(each) for each in zip(*(call.errors for call in same), strict=True)]
        joined.append(Call(same[0].layer, torch.cat([call.x for call in same]), errors))
        for call in same:
            call.x, call.errors = call.x[:0], []
    return joined
