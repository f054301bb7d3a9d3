"""Every private name of torch that the library leans on, each behind one of our own.

``tests/test_torch.py`` has a test for each that says what is gone, or means something else, when a new torch breaks it.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

disable_dynamo = _disable_dynamo  # one clean break of a compiled graph; the public decorator would import the compiler with foof
foreach_mul_, foreach_add_ = torch._foreach_mul_, torch._foreach_add_  # one call for a list of tensors, in place
foreach_addcmul_, foreach_norm = torch._foreach_addcmul_, torch._foreach_norm
fused_sgd_ = torch._fused_sgd_  # momentum and step in one pass over memory; reads tensors as they lie there, whatever their strides
onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # x Wᵀ (+ bias, ...); None where torch was built without oneDNN
DispatchMode = TorchDispatchMode  # sees every operation within a context
CONV_FORWARD = "_conv_forward"  # what a convolution's ``forward`` calls to compute its output
Dropout, BatchNorm = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm  # of any number of dimensions


class Destination(Enum):
    """What a backward pass does with the gradient that a node hands on."""

    NOWHERE = "not computed: nobody has asked for it"
    GRAD = "accumulated into .grad, or used further on"
    CAPTURED = "returned by autograd.grad()"


def destination(node: Any, position: int) -> Destination:
    """Where the running backward pass takes the gradient of this node's input at ``position``.

    ``ctx.needs_input_grad`` tells what requires gradients, not what they are wanted of.
    """
    following = node.next_functions[position][0] if position < len(node.next_functions) else None
    return Destination.NOWHERE if following is None else _executes(following)


def destination_of(weight: Tensor) -> Destination:
    """Where the running backward pass takes the gradient of a leaf."""
    return _executes(torch.autograd.graph.get_gradient_edge(weight).node)


def _executes(following: Any) -> Destination:
    try:
        return Destination.GRAD if torch._C._will_engine_execute_node(following) else Destination.NOWHERE
    except RuntimeError:  # torch's answer for a leaf that autograd.grad() has been asked for
        return Destination.CAPTURED


def backward_pass_id() -> int:
    """A number that all nodes of one backward pass share, and no other pass has; -1 outside of any."""
    return torch._C._current_graph_task_id()


def inside_transform() -> bool:
    """Within ``torch.func`` transforms (vmap, grad), forward-mode derivatives and traces."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0 or torch._C._is_tracing()


def batched(e: Tensor) -> bool:
    """Does this gradient stand for many at once (``is_grads_batched=True``, ``torch.func.vmap``)?"""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(e) or functorch.is_legacy_batchedtensor(e))


def node_class(function: type[torch.autograd.Function]) -> type:
    """The class of the graph's nodes that a custom function makes."""
    return function._backward_cls


def forward_hooks(module: nn.Module) -> OrderedDict[int, Any]:
    """A module's forward hooks in the order they run, by the keys of their handles."""
    return module._forward_hooks  # type: ignore[return-value]


def own_parameter(module: nn.Module, name: str) -> nn.Parameter | None:
    """A module's own parameter of this name; None where it has none, or computes it (parametrizations)."""
    return module._parameters.get(name)


def has_hooks(x: Tensor) -> bool:
    """Has somebody registered hooks on the gradient of this tensor?"""
    return bool(x._backward_hooks)


def origin(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x."""
    return x if x._base is None else x._base


def version(x: Tensor) -> int:
    """Grows with every write into the tensor."""
    return x._version


def padding_of_both_sides(conv: nn.Module) -> list[int]:
    """A convolution's padding as ``F.pad`` takes it: last dimension first, both ends of each."""
    return list(conv._reversed_padding_repeated_twice)  # type: ignore[arg-type]


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """The model that ``torch.compile`` has wrapped in this one, if it has."""
    return getattr(model, "_orig_mod", None)


def joins_uneven_inputs(model: nn.Module) -> bool:
    """Is this DistributedDataParallel model inside its ``join()``?"""
    return isinstance(model, nn.parallel.DistributedDataParallel) and bool(model._join_config.enable)
