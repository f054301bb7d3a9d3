"""What people write as options of an optimizer, checked: an error says what was needed, what came and what to do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from foof.optim.block import Block, Damping

FALLBACKS: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
COVERED_OPTIONS = ("lr", "damping", "relative", "momentum", "weight_decay")
Fallback = str | Mapping[str, Any] | Callable[[list[nn.Parameter]], Optimizer]


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for a learning rate, momentum, decay or damping that cannot be meant."""
    for name in ("lr", "momentum", "weight_decay"):
        if not isinstance(options[name], (int, float, Tensor)):
            raise TypeError(f"{name} must be a number, got {options[name]!r}.")
    if (most := options.get("max_change")) is not None and not 0 < most < float("inf"):
        raise ValueError(f"max_change must be a positive, finite number, or None for no bound, got {most}.")
    if not 0 <= options["lr"] < float("inf"):
        raise ValueError(f"lr must be a finite number ≥ 0, got {options['lr']}.")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), got {options['momentum']}.")
    if not 0 <= options["weight_decay"] < float("inf"):
        raise ValueError(f"weight_decay must be a finite number ≥ 0, got {options['weight_decay']}.")
    Damping(options["damping"], options["relative"])


def fallback_named(rest: Fallback) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class and options of a fallback optimizer that is not given as a factory."""
    options: dict[str, Any] = {"name": rest} if isinstance(rest, str) else dict(rest)  # type: ignore[arg-type]
    name = options.pop("name", "adamw")
    if name not in FALLBACKS:
        raise ValueError(f'rest must be one of {sorted(FALLBACKS)}, a mapping with such a "name", or a factory, got {name!r}.')
    return FALLBACKS[name], options


def make_fallback(rest: Fallback, groups: list[dict[str, Any]], weight_decay: float, maximize: bool) -> Optimizer:
    """The optimizer of what is not covered, from ``"adamw"``, ``"sgd"``, a mapping ``{"name": "sgd", "lr": 0.01}``, or a factory.

    Its weight decay is, if not given, that of the covered layers: torch's AdamW would decay where nobody has asked for it.
    """
    if callable(rest):
        made = rest(groups)  # type: ignore[arg-type]  # any torch optimizer takes groups as it takes parameters
        if not isinstance(made, Optimizer):
            raise TypeError(f"rest=... as a factory must return a torch optimizer of the parameters given, got {type(made).__name__}.")
        return made
    kind, options = fallback_named(rest)
    return kind(groups, maximize=maximize, **{"lr": 1e-3, "weight_decay": weight_decay, **options})  # type: ignore[call-arg]


def check_group(group: Mapping[str, Any], model: nn.Module, options: Collection[str] = COVERED_OPTIONS) -> dict[str, Any]:
    """One entry of ``groups=``: ``params`` of this model (also as pairs of ``named_parameters()``), and what is different for them."""
    if not isinstance(group, Mapping):
        raise TypeError(f'groups: each is a mapping {{"params": [...], "lr": ...}}, got {type(group).__name__}.')
    given = [group["params"]] if isinstance(group.get("params"), Tensor) else list(group.get("params", ()))
    params = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in given]
    if not params:
        raise ValueError('groups: a group has an empty parameter list; give each its "params".')
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for p in params):
        raise ValueError("groups: a parameter is not one of this model's.")
    unknown = group.keys() - {"params", *options}
    if unknown:
        raise ValueError(f"groups: unknown options {sorted(unknown)}; a group may set {', '.join(options)}.")
    return {**group, "params": params}


def check_distinct(groups: Sequence[Mapping[str, Any]]) -> None:
    given = [id(p) for group in groups for p in group["params"]]
    if len(given) > len(set(given)):
        raise ValueError("groups: a parameter stands in more than one group, or twice in one.")


def covered_groups(covered: Sequence[nn.Parameter], groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The user's groups, reduced to covered parameters, then one with all others."""
    left = {id(p): p for p in covered}
    made = []
    for group in groups:
        mine = [left.pop(id(p)) for p in group["params"] if id(p) in left]
        options = {**defaults, **{k: v for k, v in group.items() if k != "params"}}
        check_options(options)
        if mine:
            made.append({**options, "params": mine})
    if left:
        made.append({**defaults, "params": list(left.values())})
    return made


def fallback_groups(rest: Sequence[nn.Parameter], groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The user's groups, reduced to what is not covered, then one with all others.

    Their weight decay holds there, too; a learning rate does if the group has no covered parameter, for which it would be meant.
    """
    left = {id(p): p for p in rest}
    made = []
    for group in groups:
        mine = [left.pop(id(p)) for p in group["params"] if id(p) in left]
        names = ("weight_decay", "lr") if len(mine) == len(group["params"]) else ("weight_decay",)
        if mine:
            made.append({"params": mine, **{name: group[name] for name in names if name in group}})
    return made + ([{"params": list(left.values())}] if left else [])


def check_one_damping(block: Block, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a weight and its bias, which have one damped inverse, are in groups of different damping."""
    if len({(group["damping"], group["relative"]) for group in groups}) > 1:
        raise ValueError(f"groups: {block.name}: its weight and bias have one damping; put both into groups with the same.")


def check_learning_rates(groups: Sequence[Mapping[str, Any]], ratio: float) -> None:
    """Raise where covered layers and fallback, made with learning rates ``ratio`` ≠ 1 apart, have been given one and the same.

    A single ``max_lr`` of ``OneCycleLR``, ``CyclicLR`` or ``SWALR`` does that.
    """
    covered, fallback = ([g["lr"] for g in groups if g["kind"] == kind] for kind in ("neurons", "rest"))
    told = any(name in group for group in groups for name in ("max_lr", "swa_lr", "initial_lr"))
    alike = any(len({group.get(name) for group in groups}) == 1 and name in groups[0] for name in ("max_lr", "swa_lr", "initial_lr"))
    if ratio != 1 and told and alike and covered and fallback and all(lr == covered[0] != 0 for lr in (*covered, *fallback)):
        raise ValueError(
            f"covered layers and the fallback optimizer now have the same learning rate {covered[0]:g}, but were made with rates a factor "
            f"of {ratio:g} apart: a scheduler's single max_lr (OneCycleLR, CyclicLR, SWALR) sets all groups to one value. Give it one for "
            f"each of the {len(groups)} groups, max_lr=[group['lr'] for group in opt.param_groups], or make the optimizer with "
            f'rest={{"name": "adamw", "lr": ...}} as you mean it.'
        )


def mean_over_rows(loss_average: str) -> bool:
    """Is the loss a mean over a datapoint's rows, too?"""
    if loss_average not in ("batch", "batch+sequence"):
        raise ValueError(f'loss_average must be "batch" or "batch+sequence", got {loss_average!r}.')
    return loss_average == "batch+sequence"


def refuse_moved(names: Mapping[str, Any], moved: Mapping[str, str], whose: str) -> None:
    """Raise for options that are elsewhere now, and for those that never were."""
    for name in names:
        raise TypeError(f"{whose} has no option {name!r}{': ' + moved[name] if name in moved else ''}.")
