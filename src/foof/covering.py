"""Which layers of a model gradient descent on neurons covers, why not the others, and which of them use the same matrix."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import Any

from torch import nn

from foof import _torch
from foof.layers import Conv, Embedding, Layer, Linear, Projection, TransposedLinear

KINDS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: Linear,
    nn.Conv1d: Conv,
    nn.Conv2d: Conv,
    nn.Conv3d: Conv,
    nn.Embedding: Embedding,
}
KINDS_BY_NAME: dict[str, type[Layer]] = {"transformers.pytorch_utils.Conv1D": TransposedLinear}  # kinds of libraries we do not import
FORWARDS = {"forward", _torch.CONV_FORWARD}  # what computes a module's output


def kind_of(module: nn.Module) -> type[Layer] | None:
    """The kind of a module, or None. A subclass, and an instance, counts while it keeps the ``forward`` of that kind."""
    cls = type(module)
    if not FORWARDS.isdisjoint(vars(module)):
        return None
    for base in cls.__mro__:
        if (kind := KINDS_BY_NAME.get(f"{base.__module__}.{base.__qualname__}")) and getattr(cls, "forward", None) is base.forward:  # type: ignore[attr-defined]
            return kind
    for known, kind in KINDS.items():
        if isinstance(module, known) and all(getattr(cls, name, None) is getattr(known, name, None) for name in FORWARDS):
            return kind
    return None


def is_matrix(module: nn.Module) -> bool:
    """Is it a linear layer or a convolution, whether or not it can be covered?"""
    kind = kind_of(module)
    return isinstance(module, tuple(KINDS)[:-1]) if kind is None else kind is not Embedding


def names_of(given: str | Iterable[str]) -> tuple[str, ...]:
    """Names of modules; a single one may stand by itself."""
    return (given,) if isinstance(given, str) else tuple(given)


def refusal(name: str, module: nn.Module, parent: nn.Module | None) -> str | None:
    """Why a module of a known kind cannot be covered all the same; None if it can. Complex weights are an error."""
    weight = _torch.own_parameter(module, "weight")
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention calls its projections functionally, past their hooks; write q, k, v and out as nn.Linear"
    return _no_weight(name, module, weight)


def _no_weight(name: str, module: nn.Module, weight: nn.Parameter | None) -> str | None:
    """Why a module with this weight cannot be covered; None if it can."""
    if weight is None:
        return "its weight is computed (parametrization), not a parameter"
    if isinstance(weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"{name or 'the model'}: a lazy layer has no shape yet; run one batch through the model first.")
    if not weight.requires_grad:
        return "the layer's weight is frozen (requires_grad=False)"
    if weight.is_complex():
        raise TypeError(f"{name or 'the model'}: foof needs real floating-point weights, got {weight.dtype}; exclude this layer.")
    if isinstance(module, nn.Embedding):
        for option in ("sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                return f"nn.Embedding with {option}=True"
        if module.max_norm is not None:
            return "nn.Embedding with max_norm renormalises its weight in the forward pass"
    return None


def projections(name: str, attention: nn.MultiheadAttention, owned: Container[int]) -> list[Layer]:
    """The projections of an attention's inputs that can be covered from their gradients."""
    if type(attention).forward is not nn.MultiheadAttention.forward or not FORWARDS.isdisjoint(vars(attention)):
        return []
    found: list[Layer] = []
    for which in Projection.READS:
        weight = _torch.own_parameter(attention, f"{which}_weight")
        if weight is not None and id(weight) in owned and _no_weight(name, attention, weight) is None:
            with_bias = id(_torch.own_parameter(attention, "in_proj_bias")) in owned
            found.append(Projection(f"{name}.{which}", attention, with_bias))
    return found


def covered_layers(model: nn.Module, exclude: Iterable[str] = (), owned: Container[int] | None = None, share_biases: bool = False,
                   functional: bool = False) -> tuple[list[Layer], dict[str, str]]:  # fmt: skip
    """The layers of a model that gradient descent on neurons can cover, and for each other trainable parameter why not.

    ``exclude`` names modules (with all inside them) to leave alone; ``owned`` holds the ids of the parameters to choose from.
    ``functional``: also weights that a module computes with past its hooks (attention), which need no errors.
    ``share_biases``: may a bias belong to several weights? Then there is no one matrix ``[W, bias]`` that it is part of.
    """
    excluded, owned = names_of(exclude), {id(p) for p in model.parameters()} if owned is None else owned
    modules = dict(model.named_modules())
    for name in excluded:
        if name not in modules:
            raise ValueError(f"exclude: the model has no module named {name!r}; names are those of model.named_modules().")
    layers: list[Layer] = []
    why: dict[int, str] = {}
    for name, module in modules.items():
        reason: str | None = "excluded by request"
        if not any(name == other or name.startswith(other + ".") for other in excluded):
            kind = kind_of(module)
            reason = refusal(name, module, modules.get(name.rpartition(".")[0])) if kind else _no_kind(module)
            if kind and reason is None and id(module.weight) in owned:
                layers.append(kind(name, module, with_bias=id(_torch.own_parameter(module, "bias")) in owned))
                continue
            if functional and isinstance(module, nn.MultiheadAttention) and (found := projections(name, module, owned)):
                layers += found
                reason = "of nn.MultiheadAttention, but not of one weight alone"
        why.update({id(p): reason or "its weight is not a parameter of the optimizer" for p in module.parameters(recurse=False)})
    layers = _without_rival_biases(layers, why, share_biases)
    covered = {id(p) for layer in layers for p in layer.parameters}
    rest = {
        name: why.get(id(p), "not of the form b = W a") if id(p) in owned else "not a parameter of the optimizer"
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in covered
    }
    return layers, rest


def matrix_key(layer: Layer) -> tuple[Any, ...]:
    """What layers that use the same matrix have in common: the weight, and how it is read.

    A tied embedding and head, or convolutions with different groups on one weight, use different matrices of one weight.
    """
    return id(layer.weight), *layer.layout


def by_matrix(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Layers that use the same matrix, together."""
    found = defaultdict[Any, list[Layer]](list)
    for layer in layers:
        found[matrix_key(layer)].append(layer)
    return list(found.values())


def _without_rival_biases(layers: list[Layer], why: dict[int, str], share_biases: bool) -> list[Layer]:
    """Layers that tie one of weight and bias but not the other have no one matrix ``[W, bias]``, so their biases go to the rest."""
    biases, weights = defaultdict[Any, set[int]](set), defaultdict[int, set[int]](set)
    for layer in layers:
        biases[matrix_key(layer)].add(id(layer.bias))
        weights[id(layer.bias)].add(id(layer.weight))
    kept = []
    for layer in layers:
        torn = len(biases[matrix_key(layer)]) > 1
        if layer.bias is not None and (torn or (len(weights[id(layer.bias)]) > 1 and not share_biases)):
            why[id(layer.bias)] = "its weight is tied to a layer with another bias" if torn else "shared by layers with other weights"
            layer = layer.without_bias()
        kept.append(layer)
    return kept


def _no_kind(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention calls its projections functionally, past their hooks: FOOF, Muon and AdamW, which need no errors, cover "
            "them, others do not; write q, k, v and out as nn.Linear"
        )
    if not FORWARDS.isdisjoint(vars(module)):
        return "its forward() has been replaced on the instance"
    if isinstance(module, tuple(KINDS)):
        return f"{type(module).__name__} overrides {type(module).__mro__[1].__name__}.forward or what it calls"
    return f"{type(module).__name__} is not of the form b = W a"
