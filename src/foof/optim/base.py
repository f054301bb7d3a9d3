"""What the optimizers on neurons share: parameter groups, momentum, decoupled decay, the rest, and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from foof.optim.attach import COPIED
from foof.optim.block import unwrapped
from foof.optim.preconditioner import Block, Damping, Preconditioner

REST: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
COVERED_OPTIONS = ("lr", "damping", "relative", "momentum", "weight_decay")


def descend(params: list[Tensor], gradients: list[Tensor], buffers: list[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
    """``v ← μ v + g;  w ← (1 - lr·decay) w - lr·v``, in place; without momentum v = g."""
    if momentum:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        gradients = buffers
    if weight_decay:
        torch._foreach_mul_(params, 1 - lr * weight_decay)
    torch._foreach_add_(params, gradients, alpha=-lr)


class NeuronOptimizer(Optimizer):
    """Gradient descent with momentum and decoupled weight decay on covered layers; the rest by SGD or AdamW.

    ``param_groups`` holds the covered groups (``kind = "neurons"``) followed by those of the rest (``kind = "rest"``), so that
    schedulers see them all. Subclasses say how gradients become neuron gradients by the preconditioner they make.
    """

    def __init__(self, model: nn.Module, defaults: dict[str, Any], groups: Sequence[Mapping[str, Any]], rest: str | Mapping[str, Any],
                 maximize: bool, make_preconditioner: Callable[[Callable[[Block], Damping]], Preconditioner]) -> None:  # fmt: skip
        check_options(defaults)
        rest_class, rest_options = check_rest(rest, defaults["weight_decay"])
        own_groups = [check_group(group, unwrapped(model)) for group in groups]
        self.preconditioner = make_preconditioner(self._damping_of)
        try:
            covered = [p for block in self.preconditioner.blocks for layer in block.layers for p in layer.parameters]
            remaining = {p: name for name, p in self.preconditioner.model.named_parameters() if name in self.preconditioner.rest}
            check_covered(own_groups, remaining)
            super().__init__(_covered_groups(covered, own_groups, defaults), {**defaults, "kind": "neurons"})
            self.maximize = maximize
            self._rest = rest_class(list(remaining), maximize=maximize, **rest_options) if remaining else None  # type: ignore[call-arg]
            if self._rest is not None:
                for group in self._rest.param_groups:
                    group["kind"] = "rest"
                    self.param_groups.append(group)
            number = {id(p): i for i, group in enumerate(self.param_groups) for p in group["params"]}
            self._frozen = {name: p for name, p in self.preconditioner.model.named_parameters() if not p.requires_grad}
            # Now: within a backward pass under FSDP a layer's weight is another tensor.
            self._group_of = {id(block): number[id(block.layer.weight)] for block in self.preconditioner.blocks}
            for block in self.preconditioner.blocks:
                check_one_damping(block, [self.param_groups[number[id(p)]] for p in block.layer.parameters])
        except BaseException:
            self.preconditioner.remove()
            raise
        self._attached = True
        self.preconditioner.attach(self)

    def _damping_of(self, block: Block) -> Damping:
        group = self.param_groups[self._group_of[id(block)]]
        return Damping(group["damping"], group["relative"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. The step's hooks make the gradients neuron gradients before it and drive the schedule after it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._warn_of_thawed()
        for group in self.param_groups:
            if group["kind"] == "neurons":
                self._update(group)
        if self._rest is not None:
            self._rest.param_groups = [group for group in self.param_groups if group["kind"] == "rest"]
            self._rest.state = self.state
            self._rest.step()
        return loss

    def _warn_of_thawed(self) -> None:
        """Once: parameters that were frozen when this was made are in no group."""
        thawed = [name for name, p in self._frozen.items() if p.grad is not None]
        if thawed:
            self._frozen = {}
            warnings.warn(
                f"{', '.join(thawed[:5])}: frozen when the optimizer was made, with a gradient now; not updated. Call remove() and "
                "make a new optimizer to have them trained.",
                stacklevel=3,
            )

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        buffers = [self._momentum(p) for p in params] if group["momentum"] else []
        sign = -1.0 if self.maximize else 1.0
        lr, decay = sign * group["lr"], sign * group["weight_decay"]  # decay shrinks the weights either way
        descend(params, [p.grad for p in params], buffers, lr, group["momentum"], decay)

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]

    def initialise(self, batches: Iterable[Any]) -> None:
        """Statistics from batches before training (Appendix K uses 50): inputs, or pairs (inputs, labels). Then one inversion."""
        self.preconditioner.initialise(batches)

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Call between the forward pass and ``backward()`` with the model's outputs. FOOF needs nothing: a no-op."""
        self.preconditioner.update_curvature(out, y)

    def remove(self) -> None:
        """Take the hooks off the model: its gradients are plain again and another optimizer may be attached."""
        self.preconditioner.remove()

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(COPIED)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_attached", False):
            raise ValueError("parameters cannot join later: call remove() and make a new optimizer for the changed model.")
        super().add_param_group(param_group)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise for a learning rate, momentum, decay or damping that cannot be meant."""
    if not 0 <= options["lr"] < float("inf"):
        raise ValueError(f"lr must be a finite number ≥ 0, got {options['lr']}.")
    if not 0 <= options["momentum"] < 1:
        raise ValueError(f"momentum must be in [0, 1), got {options['momentum']}.")
    if not 0 <= options["weight_decay"] < float("inf"):
        raise ValueError(f"weight_decay must be a finite number ≥ 0, got {options['weight_decay']}.")
    Damping(options["damping"], options["relative"])


def check_rest(rest: str | Mapping[str, Any], weight_decay: float) -> tuple[type[Optimizer], dict[str, Any]]:
    """The optimizer of the rest from ``"adamw"``, ``"sgd"`` or a mapping such as ``{"name": "sgd", "lr": 0.01, "momentum": 0.9}``.

    Its weight decay is, if not given, that of the covered layers: torch's AdamW would decay where nobody has asked for it.
    """
    options: dict[str, Any] = {"name": rest} if isinstance(rest, str) else dict(rest)
    name = options.pop("name", "adamw")
    if name not in REST:
        raise ValueError(f'rest must be one of {sorted(REST)} or a mapping with such a "name", got {name!r}.')
    options = {"lr": 1e-3, "weight_decay": weight_decay, **options}
    return REST[name], options


def check_group(group: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """One entry of ``groups=``: ``params`` of this model, and what is different for them."""
    params = [group["params"]] if isinstance(group.get("params"), Tensor) else list(group.get("params", ()))
    if not params:
        raise ValueError('groups: a group has an empty parameter list; give each its "params".')
    known = {id(p) for p in model.parameters()}
    if any(id(p) not in known for p in params):
        raise ValueError("groups: a parameter is not one of this model's.")
    unknown = group.keys() - {"params", *COVERED_OPTIONS}
    if unknown:
        raise ValueError(f"groups: unknown options {sorted(unknown)}; a group may set {', '.join(COVERED_OPTIONS)}.")
    return {**group, "params": params}


def check_covered(groups: Sequence[Mapping[str, Any]], rest: Mapping[nn.Parameter, str]) -> None:
    """Raise for a group with parameters that are not covered: its options would not be theirs."""
    outside = [rest[p] for group in groups for p in group["params"] if p in rest]
    if outside:
        raise ValueError(f"groups: {', '.join(outside[:5])} not covered; leave them out, and say with rest=... how they are stepped.")


def check_one_damping(block: Block, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise where a weight and its bias, which have one damped factor, are in groups of different damping."""
    if len({(group["damping"], group["relative"]) for group in groups}) > 1:
        raise ValueError(f"groups: {block.name}: its weight and bias have one damping; put both into groups with the same.")


def _covered_groups(covered: list[nn.Parameter], groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The user's groups, reduced to covered parameters, then one with all others."""
    left = {id(p): p for p in covered}
    given = [id(p) for group in groups for p in group["params"]]
    if len(given) > len(set(given)):
        raise ValueError("groups: a parameter stands in more than one group, or twice in one.")
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
