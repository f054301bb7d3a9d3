"""Which matrices of a model belong to an optimizer of matrices, and which parameters to its fallback optimizer, and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from foof.covering import by_matrix, covered_layers, is_matrix, names_of
from foof.layers import Embedding


@dataclass(frozen=True)
class Split:
    """The weights to be covered, and for each other trainable parameter why not."""

    weights: frozenset[int]  # ids
    why_not: dict[str, str]


def split(model: nn.Module, exclude: Iterable[str] = (), head: Iterable[str] | None = ()) -> Split:
    """The weights of linear and convolution layers that are matrices in their own right; ``head`` names output layers to leave out.

    Left out are embeddings and what is tied to them (their inputs are one-hot: a matrix with a coordinate system of its own), matrices
    of a single row or column, and biases. head None: the output layer is found by `output_layers`.
    """
    layers, why_not = covered_layers(model, exclude, functional=True)
    heads = output_layers(model) if head is None else named(model, names_of(head))
    embedded = {id(layer.weight) for layer in layers if isinstance(layer, Embedding)}
    matrices = by_matrix(layers)
    read = [id(same[0].weight) for same in matrices]
    chosen, why = set[int](), dict[int, str]()
    for same in matrices:
        layer = same[0]
        if isinstance(layer, Embedding):
            reason = "an embedding"
        elif id(layer.weight) in embedded:
            reason = "tied to an embedding"
        elif any(id(other.module) in heads for other in same):
            reason = "the output layer"
        elif min(layer.n, layer.m - layer.has_bias) == 1:
            reason = "a matrix of one row or column"
        elif read.count(id(layer.weight)) > 1:
            reason = "one weight that is read as different matrices"
        else:
            chosen.add(id(layer.weight))
            continue
        why.setdefault(id(layer.weight), reason)
    why.update({id(layer.bias): "a bias" for layer in layers if layer.bias is not None})
    reasons = {name: why[id(p)] for name, p in model.named_parameters() if id(p) in why}
    return Split(frozenset(chosen), {**why_not, **reasons})


def of_vocabulary(model: nn.Module, exclude: Iterable[str] = ()) -> dict[str, str]:
    """The modules (names) whose inputs or outputs are a vocabulary, and which of the two: embeddings, what is tied to them, and in a
    model that has some its output layer. Empty where nothing else could be covered."""
    layers, _ = covered_layers(model, exclude, functional=True)
    embedded = {id(layer.weight) for layer in layers if isinstance(layer, Embedding)}
    heads = output_layers(model) if embedded else set()
    why = {}
    for layer in layers:
        if isinstance(layer, Embedding):
            why[layer.name] = "an embedding"
        elif id(layer.weight) in embedded:
            why[layer.name] = "tied to an embedding"
        elif id(layer.module) in heads:
            why[layer.name] = "the output layer of a model with embeddings"
    return why if len(why) < len(layers) else {}


def output_layers(model: nn.Module) -> set[int]:
    """The module (id) that makes the model's outputs: the one the model names itself, as Hugging Face's do, else the last defined,
    whether or not it is trained or covered."""
    named_by_model = getattr(model, "get_output_embeddings", None)
    if callable(named_by_model) and (module := named_by_model()) is not None:
        return {id(module)}
    modules = dict(model.named_modules())
    around = {name: modules.get(name.rpartition(".")[0]) for name in modules}
    found = [m for name, m in modules.items() if is_matrix(m) and not isinstance(around[name], nn.MultiheadAttention)]
    return {id(module) for module in found[-1:]}


def named(model: nn.Module, names: Iterable[str]) -> set[int]:
    """The modules (ids) of these names, and all inside them."""
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise ValueError(f"head: the model has no module named {name!r}; names are those of model.named_modules().")
    return {id(inside) for name in names for inside in modules[name].modules()}
