"""Sharded checkpoints, from any number of ranks to any other, and workers that die."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from oracle import relative_error
from ranks import ddp, flat, fsdp, make, train
from workers import run


def state_of(model, opt):
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, opt)}


def save(model, opt, path):
    opt.preconditioner.synchronise()  # without it, the other rank's share since the last refresh would be lost
    dcp.save(state_of(model, opt), checkpoint_id=path)


def load(model, opt, path):
    state = state_of(model, opt)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["optimizer"])


SAVED = [("mlp", "foof"), ("tied", "foof T=1"), ("mlp", "adamw"), ("mlp", "kfac"), ("tied", "foof.Muon"), ("mlp", "foof.AdamW")]


def train_from_and_to(rank, start, stop, source, target):
    """Sharded over all ranks (KFAC: replicated): load a checkpoint if there is one, train, save if asked."""
    found = []
    for name, optimizer in SAVED:
        model, opt = make(name, optimizer, wrap=ddp if optimizer == "kfac" else fsdp)
        if source:
            load(model, opt, f"{source} {name} {optimizer}")
        train(model, opt, name, start, stop, rank, dist.get_world_size())
        if target:
            save(model, opt, f"{target} {name} {optimizer}")
        found.append(flat(model))
    return found


def test_a_sharded_checkpoint_goes_from_two_ranks_to_one_and_back(tmp_path):
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    run(train_from_and_to, 2, 0, 10, None, two)
    for name, optimizer in SAVED:
        model, opt = make(name, optimizer)  # one process, nothing sharded
        load(model, opt, f"{two} {name} {optimizer}")
        train(model, opt, name, 10, 20)
        save(model, opt, f"{one} {name} {optimizer}")
    ours, theirs = run(train_from_and_to, 2, 20, 30, one, None)
    for number, (name, optimizer) in enumerate(SAVED):
        straight, opt = make(name, optimizer)
        train(straight, opt, name, 0, 30)
        assert torch.equal(ours[number], theirs[number])
        assert relative_error(ours[number], flat(straight)) < 1e-12


def test_asking_for_the_state_is_no_training_step(tmp_path):
    """torch.distributed.checkpoint steps an optimizer without state once, with zero gradients and lr 0."""
    weights = []
    for ask in (True, False):
        model, opt = make("mlp", "foof T=1")
        for t in range(6):
            train(model, opt, "mlp", t, t + 1)
            opt.zero_grad()
            if ask:
                get_optimizer_state_dict(model, opt)
        weights.append(flat(model))
        assert opt.preconditioner.schedule.t == 6
    assert torch.equal(*weights)


def die_in_the_middle(rank, optimizer, path, steps):
    model, opt = make("mlp", optimizer, wrap=ddp)
    for t in range(steps):
        train(model, opt, "mlp", t, t + 1, rank, 2)
        if t == 6:
            opt.preconditioner.synchronise()
            if rank == 0:
                torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "t": t + 1}, path)
            dist.barrier()
        if t == 9 and rank == 1:
            os._exit(9)


def restart(rank, optimizer, path, steps):
    model, opt = make("mlp", optimizer, wrap=ddp)
    state = torch.load(path, weights_only=True)
    model.module.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    train(model, opt, "mlp", state["t"], steps, rank, 2)
    return flat(model)


@pytest.mark.parametrize("optimizer", ["foof", "kfac", "adamw"])
def test_a_killed_worker_and_a_restart_from_the_last_checkpoint(optimizer, tmp_path):
    path = str(tmp_path / "last.pt")
    with pytest.raises(RuntimeError, match="rank 0"):
        run(die_in_the_middle, 2, optimizer, path, 20)  # the survivor is told, it does not hang
    resumed = run(restart, 2, optimizer, path, 20)
    model, opt = make("mlp", optimizer)
    train(model, opt, "mlp", 0, 20)
    assert relative_error(resumed[0], flat(model)) < 1e-12
    assert torch.equal(*resumed)
