"""How a preconditioner is tied to an optimizer: its steps drive the schedule, its state dict carries the statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.optim.optimizer import Optimizer


class Attachable(Protocol):
    """What an optimizer's steps, its ``zero_grad`` and its state dict call."""

    def before_update(self) -> None: ...
    def after_update(self) -> None: ...
    def discard(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def check_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def attach(optimizer: Optimizer, attached: Attachable) -> list[Any]:
    """Tie these together; returns handles whose ``remove()`` unties them."""
    staged: list[dict[str, Any]] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if closure is None:
            attached.before_update()
            return None

        def prepared_closure() -> Any:
            loss = closure()
            attached.before_update()
            return loss

        return args[:1], {"closure": prepared_closure}

    def save(_: Any, state: dict[str, Any]) -> None:
        state.update(with_neurons(state, attached.state_dict()))

    def check(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        plain, neurons = without_neurons(state)
        attached.check_state_dict(neurons)
        staged[:] = [neurons]
        return plain

    return [
        optimizer.register_step_pre_hook(before),
        optimizer.register_step_post_hook(lambda *_: attached.after_update()),
        optimizer.register_state_dict_post_hook(save),
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(lambda _: attached.load_state_dict(staged.pop())),
        ZeroGradHook(optimizer, attached.discard),
        NoCopies(optimizer),
    ]


class ZeroGradHook:
    """Calls ``discard`` before an optimizer's ``zero_grad``, for which torch has no hook, until removed."""

    def __init__(self, optimizer: Optimizer, discard: Callable[[], None]) -> None:
        self.optimizer, self.own = optimizer, vars(optimizer).get("zero_grad")
        zero_grad = optimizer.zero_grad

        def discard_and_zero(*args: Any, **kwargs: Any) -> None:
            discard()
            zero_grad(*args, **kwargs)

        vars(optimizer)["zero_grad"] = discard_and_zero

    def remove(self) -> None:
        del vars(self.optimizer)["zero_grad"]  # that of its class is there again
        if self.own is not None:
            vars(self.optimizer)["zero_grad"] = self.own


COPIED = (
    "an optimizer on neurons is tied to its model: copy or save the model, make a new optimizer for the copy, and give it this one's "
    "state with load_state_dict(state_dict())."
)


class NoCopies:
    """Refuses copies and pickles of an optimizer, which would lack all that is attached to it, until removed."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

        def refuse(*_: Any) -> Any:
            raise TypeError(COPIED)

        vars(optimizer)["__reduce_ex__"] = refuse

    def remove(self) -> None:
        del vars(self.optimizer)["__reduce_ex__"]  # that of its class is there again


def with_neurons(state: Mapping[str, Any], neurons: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with the preconditioner's: by itself, and with the first parameter's state.

    Per-parameter state is all that ``torch.distributed.checkpoint`` keeps, and it wants some for every parameter. A file holds
    both as one.
    """
    params = [p for group in state["param_groups"] for p in group["params"]]
    own = {p: dict(state["state"].get(p, {})) for p in params}
    own[params[0]]["neurons"] = neurons
    return {**state, "neurons": neurons, "state": own}


def without_neurons(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of ``with_neurons``: the optimizer's own state dict, and the preconditioner's."""
    first = state["param_groups"][0]["params"][0]
    own = dict(state["state"].get(first, {}))
    inside = own.pop("neurons", None)
    neurons = state.get("neurons", inside)
    if neurons is None:
        raise ValueError("this state dict was not saved from an optimizer on neurons: it has no statistics ('neurons').")
    kept = {k: v for k, v in {**state["state"], first: own}.items() if v}
    return {**{k: v for k, v in state.items() if k != "neurons"}, "state": kept}, neurons
