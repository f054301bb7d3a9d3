"""Checkpoints: the statistics of an optimizer on neurons travel in its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from foof.optim.block import Block, moved
from foof.optim.estimators import Estimator
from foof.optim.sharing import value_or_zeros
from foof.optim.step import Step
from foof.optim.turns import Turns
from foof.statistics import MovingAverage, Schedule, wide


class Saved(Protocol):
    """What is saved."""

    estimator: Estimator
    schedule: Schedule
    blocks: list[Block]
    step: Step
    turns: Turns | None


def attach(optimizer: Optimizer, engine: Saved) -> list[Any]:
    """Have the optimizer's state dict carry the engine's; returns handles whose ``remove()`` undoes it."""
    staged: list[dict[str, Any]] = []

    def check(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        plain, neurons = without_neurons(state)
        check_state_dict(engine, neurons)
        staged[:] = [neurons]
        return plain

    return [
        optimizer.register_state_dict_post_hook(lambda _, state: state.update(with_neurons(state, state_dict(engine)))),
        optimizer.register_load_state_dict_pre_hook(check),
        optimizer.register_load_state_dict_post_hook(lambda _: load_state_dict(engine, staged.pop())),
    ]


def state_dict(engine: Saved) -> dict[str, Any]:
    """Everything needed to go on bit for bit: plain containers and tensors only, of the same layout before the first step."""
    return {
        "method": engine.estimator.name,
        "t": engine.schedule.t,
        "warming_up": engine.schedule.warming_up,
        "blocks": {block.layer.name: _block_state(block, engine) for block in engine.blocks},
        **engine.estimator.state_dict(),
    }


def _block_state(block: Block, engine: Saved) -> dict[str, Any]:
    inverse = block.inverse
    if inverse is None and block.moments:
        inverse = engine.estimator.invert(_with_identities(block, engine.estimator), engine.schedule.T)
    return {
        "shape": _shape(block),
        "moments": {
            key: moment.state_dict() | {"value": value_or_zeros(block, key, engine.estimator).clone()}
            for key, moment in block.moments.items()
        },
        "factor": None if inverse is None else inverse.state_dict(),
        "has_factor": block.inverse is not None,
        "made_of": list(block.made_of),
        "rows": block.rows,
        **({} if engine.turns is None else {"making": engine.turns.state_dict(block)}),
    }


def _with_identities(block: Block, estimator: Estimator) -> Block:
    """The same block with identities for moments: its inverse has the layout of any later one."""
    blank = Block(block.layers, {key: MovingAverage() for key in block.moments}, block.options)
    for key, moment in blank.moments.items():
        zeros = value_or_zeros(blank, key, estimator)
        moment.value = zeros + (1 if zeros.dim() == 1 else torch.eye(*zeros.shape[-2:], dtype=zeros.dtype, device=zeros.device))
    return blank


def check_state_dict(engine: Saved, state: Mapping[str, Any]) -> None:
    """Raise if this state is of another method or architecture, before anything is changed."""
    if state.get("method") not in (engine.estimator.name, *engine.estimator.former_names):
        raise ValueError(f"this checkpoint is of method {state.get('method')!r}; this optimizer is {engine.estimator.name!r}.")
    saved = {name: list(block["shape"]) for name, block in state["blocks"].items()}
    ours = {block.layer.name: _shape(block) for block in engine.blocks}
    if saved != ours:
        differing = sorted({name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)})
        lines = "; ".join(f"{name or 'model'}: saved {saved.get(name)}, model {ours.get(name)}" for name in differing[:5])
        raise ValueError(f"this checkpoint is of another architecture ({lines} as [groups, outputs, inputs]).")
    of_neurons = {block.layer.name: list(block.moments) for block in engine.blocks}
    differing = sorted(name for name, block in state["blocks"].items() if list(block["moments"]) != of_neurons[name])
    if differing:
        raise ValueError(f"this checkpoint has other layers on neurons ({', '.join(differing[:5])}): give neurons= as it was.")


def _shape(block: Block) -> list[int]:
    return [block.layer.groups, block.layer.n, block.layer.m]


def load_state_dict(engine: Saved, state: dict[str, Any]) -> None:
    """Go on from ``state_dict``. What is pending stays with the gradients that it came with."""
    check_state_dict(engine, state)
    engine.schedule.t, engine.schedule.warming_up = int(state["t"]), bool(state["warming_up"])
    for block in engine.blocks:
        saved, here = state["blocks"][block.layer.name], (block.weight.device, wide(block.weight.dtype))
        for key, moment in block.moments.items():
            moment.load_state_dict(saved["moments"][key], *here)
        block.inverse = engine.estimator.inverse_from(moved(saved["factor"], *here)) if saved["has_factor"] else None
        block.rows, block.made_of = int(saved["rows"]), tuple(saved.get("made_of", ()))
        if engine.turns is not None:
            engine.turns.resume(block, saved.get("making", {}))
    engine.estimator.load_state_dict(state)


def with_neurons(state: Mapping[str, Any], neurons: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with the engine's: by itself, and with the first parameter's state.

    Per-parameter state is all that ``torch.distributed.checkpoint`` keeps, and it wants some for every parameter. A file holds
    both as one.
    """
    params = [p for group in state["param_groups"] for p in group["params"]]
    own = {p: dict(state["state"].get(p, {})) for p in params}
    own[params[0]]["neurons"] = neurons
    return {**state, "neurons": neurons, "state": own}


def without_neurons(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The inverse of ``with_neurons``: the optimizer's own state dict, and the engine's."""
    first = state["param_groups"][0]["params"][0]
    own = dict(state["state"].get(first, {}))
    inside = own.pop("neurons", None)
    neurons = state.get("neurons", inside)
    if neurons is None:
        raise ValueError("this state dict was not saved from an optimizer on neurons: it has no statistics ('neurons').")
    kept = {k: v for k, v in {**state["state"], first: own}.items() if v}
    return {**{k: v for k, v in state.items() if k != "neurons"}, "state": kept}, neurons
