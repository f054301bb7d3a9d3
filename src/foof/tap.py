"""The tap: the one place where a layer's inputs ``a`` and errors ``e`` meet.

A forward hook hands the layer's output on through an autograd node of our own. Its backward receives ``e = dL/db``, has the
inputs at hand, computes the input gradient as usual and asks a *receiver* for the weight gradient: the plain ``Eᵀ A``, a
preconditioned one, or none at all (a Fisher pass only records). The layer's own backward never runs, so nothing is computed twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foof import _torch
from foof._torch import Destination, destination
from foof.layers import Layer
from foof.linalg import cast

Backward = Callable[..., tuple[Tensor | None, ...]]


@dataclass(slots=True)
class Visit:
    """A backward pass comes by one call of one layer."""

    layer: Layer
    x: Tensor  # the module's input, in the shape the module uses
    e: Tensor  # the gradient of its output, likewise, in its own precision
    lands: bool  # is the weight's gradient accumulated into ``.grad``? Otherwise ``autograd.grad`` returns it
    notes: list[Any]  # kept with this call for as long as its graph lives: what one pass leaves for another
    mask: Tensor | None  # which rows count, as set when the layer was called
    pass_id: int  # of the backward pass; within a checkpoint that runs one of its own (``use_reentrant=True``), of the pass around it
    weight: Tensor | None = None  # where the gradient of x is wanted, too
    grad_x: Tensor | None = None  # that gradient, once it has come along with the weight's

    def plain_gradient(self, dtype: torch.dtype) -> Tensor:
        """``Eᵀ A`` in this precision. In the precision of e, a gradient of x that is wanted comes along."""
        layer, x, e = self.layer, self.x if self.layer.diagonal else cast(self.x, dtype), cast(self.e, dtype)
        if self.weight is None or dtype != self.e.dtype:
            return layer.weight_gradient(x, e)
        self.grad_x, gradient = layer.gradients(x, e, cast(self.weight, dtype))
        return gradient


class Receiver(Protocol):
    """What stands behind a tap."""

    mask: Tensor | None

    def receive(self, visit: Visit) -> Tensor | None:
        """The gradient for ``[W, bias]`` as a matrix ``(n, m)`` or ``(G, n, m)``, or None for no gradient."""


class Witness(Receiver, Protocol):
    """One that layers whose module computes with their weight past any hook can be shown to, too."""

    def witness(self, visit: Visit) -> None:
        """A pass comes by such a layer; its gradient is autograd's, the plain one."""


class _Refused(torch.autograd.Function):
    """Hands tensors on; differentiating them again, by whatever they came from, is an error."""

    @staticmethod
    def forward(ctx: Any, why: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The first ``count`` tensors; the others are what they were computed from."""
        ctx.why = why
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ctx.why)


def differentiable_once(why: str) -> Callable[[Backward], Backward]:
    """For the backward of an ``autograd.Function``: what it returns has no derivatives, and asking for them is an error that says why.

    torch's own ``once_differentiable`` lets it pass, as zero, where nothing of the incoming gradient leads to what is asked for.
    """

    def decorate(backward: Backward) -> Backward:
        @wraps(backward)
        def once(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            if not torch.is_grad_enabled():  # no create_graph
                return backward(ctx, *grads)
            with torch.no_grad():
                answers = backward(ctx, *grads)
            sources = [t for t in (*ctx.saved_tensors, *grads) if isinstance(t, Tensor) and t.requires_grad]
            given = [a for a in answers if a is not None]
            refusing = iter(_Refused.apply(why, len(given), *given, *(sources or [torch.zeros((), requires_grad=True)])) if given else ())
            return tuple(None if a is None else next(refusing) for a in answers)

        return once

    return decorate


class _Junction(torch.autograd.Function):
    """Identity on the (detached) output; the backward is the layer's."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer, receiver: Receiver) -> Tensor:
        ctx.mark_dirty(out)  # so that an in-place activation may follow
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.receiver, ctx.bias_dtype = layer, receiver, None if bias is None else bias.dtype
        ctx.notes, ctx.mask = [], receiver.mask
        ctx.within = _torch.backward_pass_id()  # of a pass: this is a checkpoint's recomputation
        return out

    @staticmethod
    @differentiable_once("gradients of layers with an optimizer of foof on them cannot be differentiated again (a gradient penalty?): "
                         "call the optimizer's remove() first, or leave the layers out with exclude=[...]")
    def backward(ctx: Any, e: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        _, needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        layer: Layer = ctx.layer
        if _torch.batched(e):
            raise NotImplementedError(
                f"{layer.label}: many gradients at once (is_grads_batched=True, vmap over a backward pass) cannot come through a layer "
                "with an optimizer of foof on it: ask for one at a time, or call the optimizer's remove() first."
            )
        device = e.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            grad_x = grad_weight = grad_bias = None
            to_weight = destination(ctx, WEIGHT) if needs_weight else Destination.NOWHERE
            to_bias = destination(ctx, BIAS) if needs_bias else Destination.NOWHERE
            if to_weight != Destination.NOWHERE or (needs_weight and layer.has_bias and to_bias != Destination.NOWHERE):
                lands = Destination.GRAD in (to_weight, to_bias)
                pass_id = _torch.backward_pass_id() if ctx.within < 0 else ctx.within
                visit = Visit(layer, x, e, lands, ctx.notes, ctx.mask, pass_id, weight if needs_x else None)
                matrix, grad_x = ctx.receiver.receive(visit), visit.grad_x
                if matrix is None and _torch.has_hooks(weight):  # which expect a gradient
                    grad_weight = torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
                if matrix is not None:
                    grad_weight, grad_bias = layer.split(cast(matrix, weight.dtype))
                    if grad_bias is not None:
                        grad_bias = cast(grad_bias, ctx.bias_dtype) if needs_bias else None
            if not layer.has_bias and to_bias != Destination.NOWHERE:  # somebody else's: its gradient is plain
                grad_bias = cast(layer.bias_gradient(e), ctx.bias_dtype)
            if needs_x:
                if grad_x is None:
                    grad_x = layer.input_gradient(cast(x, e.dtype), e, cast(weight, e.dtype))
                grad_x = cast(grad_x, x.dtype)
        return None, grad_x, grad_weight, grad_bias, None, None


WEIGHT, BIAS = 2, 3  # positions among the inputs of a tap's node


class Hook:
    """A hook that does nothing in copies and pickles of its module: these can be used, and loaded, without foof."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes anything and returns None


def _does_nothing(hook: Any) -> bool:
    return isinstance(getattr(hook, "__self__", None), nullcontext)


class Tap(Hook):
    """A forward hook that opens one layer to a receiver. Copies and pickles of the model carry no tap.

    The receiver is held weakly, so that an optimizer nobody keeps lets go of its model.
    """

    def __init__(self, layer: Layer, receiver: Receiver) -> None:
        self.layer = layer
        self.fired = False  # has the layer been called in training?
        self._receiver = weakref.ref(receiver)
        hooks = _torch.forward_hooks(layer.module)
        for key in [key for key, hook in hooks.items() if _does_nothing(hook)]:  # of the model this one is a copy of
            del hooks[key]
        earlier = [key for key, hook in hooks.items() if isinstance(hook, Tap)]
        # First in line: before FSDP reshards the weight, and before hooks that change the output.
        self._handle = layer.module.register_forward_hook(self, with_kwargs=True, prepend=True)
        for key in reversed(earlier):  # but on top of any other tap
            hooks.move_to_end(key, last=False)

    @_torch.disable_dynamo
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        receiver, layer = self.receiver, self.layer
        weight: Tensor = module.weight  # type: ignore[assignment]
        if receiver is None or not (torch.is_grad_enabled() and weight.requires_grad) or _torch.inside_transform():
            return None
        if hasattr(weight, "full_tensor"):  # FSDP has gathered its shards by now; what is still sharded is so on purpose
            raise NotImplementedError(
                f"{layer.label}: its weight is split for tensor parallelism, so no rank sees the whole layer; leave it out with "
                f"exclude=[{layer.name!r}]."
            )
        self._check_first(module)
        x = layer.inputs_of(args, kwargs)
        if x.layout != torch.strided or x.is_nested:
            kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
            raise TypeError(
                f"{layer.label}: its input is {kind}, and foof needs rows that it can multiply: make it dense (to_dense(), "
                f"to_padded_tensor(0)) or leave the layer out with exclude=[{layer.name!r}]."
            )
        self.fired = True
        return _Junction.apply(out.detach(), x, weight, getattr(module, "bias", None), layer, receiver)

    def _check_first(self, module: nn.Module) -> None:
        for hook in _torch.forward_hooks(module).values():
            if hook is self:
                return
            if not isinstance(hook, Hook):
                raise RuntimeError(
                    f"{self.layer.label}: a forward hook registered with prepend=True stands before foof's, which has to see the "
                    "layer's own output. Register it without prepend, or before the optimizer is made."
                )

    @property
    def receiver(self) -> Receiver | None:
        return self._receiver()

    def remove(self) -> None:
        """Leave the module as it was."""
        self._handle.remove()


class Watch(Tap):
    """A forward hook on a module that computes with a layer's weight past any hook: it sees the inputs, autograd makes the gradient.

    A backward pass that comes by any output of the module is told to the receiver's ``witness``, once.
    """

    _receiver: weakref.ref[Witness]  # type: ignore[assignment]

    @_torch.disable_dynamo
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        receiver, layer = self._receiver(), self.layer
        weight: Tensor = layer.weight
        if receiver is None or not (torch.is_grad_enabled() and weight.requires_grad) or _torch.inside_transform():
            return
        x, mask, notes, within = layer.inputs_of(args, kwargs), receiver.mask, list[Any](), _torch.backward_pass_id()
        self.fired, told = True, set[int]()

        def passed(e: Tensor) -> None:
            to, here = _torch.destination_of(weight), _torch.backward_pass_id()
            if to != Destination.NOWHERE and here not in told:
                told.add(here)
                receiver.witness(Visit(layer, x, e, to == Destination.GRAD, notes, mask, here if within < 0 else within))

        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(passed)


def tap(layer: Layer, receiver: Witness) -> Tap:
    """What a layer of this kind is seen by."""
    return (Watch if layer.functional else Tap)(layer, receiver)


def existing_tap(module: nn.Module) -> Tap | None:
    """The live tap on a module, if any."""
    for hook in _torch.forward_hooks(module).values():
        if isinstance(hook, Tap) and hook.receiver is not None:
            return hook
    return None


def _taps_behind(*outputs: Tensor) -> Iterator[Any]:
    """The nodes of taps that a backward pass from these goes through."""
    left, seen, junction = [out.grad_fn for out in outputs], set[Any](), _torch.node_class(_Junction)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
            if isinstance(node, junction):
                yield node


def behind_a_tap(*outputs: Tensor) -> bool:
    """Would a backward pass from these go through a tap, so that gradients are what its receiver makes of them?"""
    return any(True for _ in _taps_behind(*outputs))


def layers_behind(out: Tensor) -> set[Layer]:
    """The layers whose taps a backward pass from ``out`` goes through."""
    return {node.layer for node in _taps_behind(out)}


def leave_note(out: Tensor, note: Any) -> None:
    """Leave a note with the graph of ``out``, for the receiver of a later pass; nothing where it goes through no tap."""
    for node in _taps_behind(out):
        node.notes.append(note)
        return


@contextmanager
def tapped(layers: Iterable[Layer], receiver: Receiver) -> Iterator[None]:
    """Tap these layers for as long as the context lasts, on top of any taps they have."""
    taps = [Tap(layer, receiver) for layer in layers]
    try:
        yield
    finally:
        for tap in taps:
            tap.remove()


@contextmanager
def inputs_seen(layers: Iterable[Layer], see: Callable[[Layer, Tensor], None]) -> Iterator[None]:
    """Call ``see(layer, x)`` with the input of each of these layers, in forward passes within the context."""

    def hook(layer: Layer) -> Any:
        return layer.module.register_forward_hook(
            lambda _module, args, kwargs, _out: see(layer, layer.inputs_of(args, kwargs)), with_kwargs=True
        )

    handles = [hook(layer) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
