"""Two processes over gloo do what one does with the joined batch: DDP, FSDP2, checkpoints, and what may go wrong."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import foof
from cases import mlp
from foof.distributed import share_out
from oracle import relative_error
from workers import free_port, run

BATCH = 8  # of one rank


class Tied(nn.Module):
    """Tokens in, next tokens out: a tied embedding and head around linear layers and a norm."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.body = nn.Embedding(7, 6), nn.LayerNorm(6), mlp(6, 9, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.norm(self.embed(x)))).flatten(0, 1)


def conv():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


MODELS = {"mlp": lambda: mlp(5, 9, 7, 3), "conv": conv, "tied": Tied}
OPTIMIZERS = {
    "foof": lambda m: foof.FOOF(m, lr=0.1, damping=0.5, momentum=0.9, weight_decay=0.01, T=7, S=3),
    "foof T=1": lambda m: foof.FOOF(m, lr=0.1, damping=0.5, T=1),
    "adamw": lambda m: foof.precondition(torch.optim.AdamW(m.parameters(), lr=0.01), m, damping=0.5, T=5),
    "muon": lambda m: foof.precondition(
        torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01), m, damping=0.5, T=5
    ),
    "kfac": lambda m: foof.KFAC(m, lr=0.02, damping=0.1, fisher="full", T=7, S=3),
    "kfac standard": lambda m: foof.KFAC(m, lr=0.02, damping=0.1, damping_mode="standard", fisher="empirical", T=4),
}


def batch(t, name, dtype=torch.float64, size=2 * BATCH):
    g = torch.Generator().manual_seed(t)
    if name == "tied":
        x = torch.randint(0, 7, (size, 4), generator=g)
        return x, torch.randint(0, 7, (size, 4), generator=g)
    shape = (size, 5) if name == "mlp" else (size, 2, 8, 8)
    return torch.randn(*shape, generator=g, dtype=dtype), torch.randint(0, 3, (size,), generator=g)


def share(tensor, rank, world):
    return tensor if world == 1 else tensor.chunk(world)[rank]


def make(name, optimizer, dtype=torch.float64, wrap=None):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    called = wrap(model) if wrap else model
    return called, OPTIMIZERS[optimizer](called)


def train(model, opt, name, start, stop, rank=0, world=1, dtype=torch.float64):
    for t in range(start, stop):
        x, y = (share(each, rank, world) for each in batch(t, name, dtype))
        opt.zero_grad()
        out = model(x)
        if hasattr(opt, "update_curvature"):
            opt.update_curvature(out, y.flatten())
        nn.functional.cross_entropy(out, y.flatten()).backward()
        opt.step()


def flat(model):
    model = getattr(model, "module", model)
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def ddp(model):
    return DistributedDataParallel(model)


def fsdp(model):
    """Every layer that holds parameters is a unit of its own, except tied ones, which must be in one unit."""
    mesh = torch.distributed.init_device_mesh("cpu", (dist.get_world_size(),))
    if not isinstance(model, Tied):
        for module in model.children():
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train_on_each(rank, cases, wrap, steps):
    found = []
    for name, optimizer, dtype in cases:
        model, opt = make(name, optimizer, dtype, wrap)
        train(model, opt, name, 0, steps, rank, dist.get_world_size(), dtype)
        found.append(flat(model))
        opt.preconditioner.remove()
    return found


EXACT = [("mlp", optimizer, torch.float64) for optimizer in OPTIMIZERS]
EXACT += [(name, optimizer, torch.float64) for name in ("conv", "tied") for optimizer in ("foof", "kfac")]
ROUNDED = [("mlp", "foof", torch.float32), ("mlp", "kfac", torch.float32)]


def compare(cases, wrap, steps=50):
    ranks = run(train_on_each, 2, cases, wrap, steps)
    for number, (name, optimizer, dtype) in enumerate(cases):
        model, opt = make(name, optimizer, dtype)
        train(model, opt, name, 0, steps, dtype=dtype)
        ours = [each[number] for each in ranks]
        assert torch.equal(*ours), f"{name}, {optimizer}: the ranks differ"
        bound = 1e-12 if dtype == torch.float64 else 1e-6
        error = relative_error(ours[0], flat(model))
        assert error < bound, f"{name}, {optimizer}, {dtype}: off by {error:.1e}"


def test_ddp_equals_one_process_with_the_joined_batch():
    compare(EXACT + ROUNDED, ddp)


def test_fsdp2_equals_one_process_with_the_joined_batch():
    compare([case for case in EXACT + ROUNDED if case[1] not in ("muon", "kfac", "kfac standard")], fsdp)


# --- communication ---------------------------------------------------------------------------------------------------------


def count_calls(rank, steps):
    """How often each collective is called in each step, DDP's own not counted (they do not pass through here)."""
    counts, names = [], ("all_reduce", "broadcast", "broadcast_object_list", "all_gather", "barrier")
    originals = {name: getattr(dist, name) for name in names}

    def counting(name):
        def call(*args, **kwargs):
            counts[-1][name] = counts[-1].get(name, 0) + 1
            return originals[name](*args, **kwargs)

        return call

    torch.manual_seed(0)
    model = ddp(mlp(5, 9, 7, 3))
    opt = foof.FOOF(model, T=100, S=10)
    for name in names:
        setattr(dist, name, counting(name))
    try:
        for t in range(steps):
            counts.append({})
            train(model, opt, "mlp", t, t + 1, rank, 2, torch.float32)
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return counts


def test_one_all_reduce_per_refresh_and_nothing_in_between():
    counts = run(count_calls, 2, 301)[0]
    refreshes = [0, 1, 2, 4, 8, 16, 32, 64, 100, 200, 300]  # those of the start without initialisation included
    communicating = {t: c for t, c in enumerate(counts) if c}
    assert list(communicating) == refreshes
    assert communicating.pop(0)["all_reduce"] == 2  # the start, and the refresh that belongs to step 0
    for calls in communicating.values():
        assert calls.pop("all_reduce") == 1
        assert set(calls) == {"broadcast", "broadcast_object_list"}
        assert calls["broadcast"] == 2  # one per rank that owns a share, and no more however many layers there are


def test_work_is_shared_out_by_cost():
    assert share_out([8, 1, 1, 1, 5], 2) == [0, 1, 1, 1, 1]
    assert share_out([1, 1, 1], 5) == [0, 1, 2]
    costs = [float(k % 13 + 1) for k in range(40)]
    load = [sum(c for c, o in zip(costs, share_out(costs, 4), strict=True) if o == w) for w in range(4)]
    assert max(load) <= 1.05 * min(load)


# --- checkpoints -----------------------------------------------------------------------------------------------------------


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


SAVED = [("mlp", "foof"), ("tied", "foof T=1"), ("mlp", "adamw"), ("mlp", "kfac")]


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


# --- what may go wrong -------------------------------------------------------------------------------------------------------


def step(model, opt, x, y):
    opt.zero_grad()
    out = model(x)
    if hasattr(opt, "update_curvature"):
        opt.update_curvature(out, y.flatten())
    nn.functional.cross_entropy(out, y.flatten(), reduction="sum").div(BATCH).backward()
    opt.step()


UNEVEN = [("mlp", "foof T=1"), ("conv", "foof"), ("tied", "foof"), ("mlp", "kfac")]


def with_an_empty_shard(rank):
    """Rank 1 has no data on any even step, the first included."""
    found = []
    for name, optimizer in UNEVEN:
        model, opt = make(name, optimizer, wrap=ddp)
        for t in range(12):
            x, y = (share(each, rank, 2) for each in batch(t, name))
            step(model, opt, *((x[:0], y[:0]) if rank == 1 and t % 2 == 0 else (x, y)))
            if t == 0:
                first = opt.preconditioner.blocks[0].moments["Sigma"].value.clone()
        found.append((flat(model), first))
    return found


def test_an_empty_shard():
    for (name, optimizer), (ours, first), (theirs, other) in zip(UNEVEN, *run(with_an_empty_shard, 2), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.isfinite(ours).all()
        assert torch.equal(first, other)
        model, opt = make(name, optimizer)  # what rank 0 saw on the first step is all there was
        step(model, opt, *(share(each, 0, 2) for each in batch(0, name)))
        assert torch.allclose(first, opt.preconditioner.blocks[0].moments["Sigma"].value, rtol=1e-12)


def faults(rank):
    """Each in turn; what every rank finds."""
    found = {}
    model, opt = make("mlp", "foof", wrap=ddp)  # nobody has any data
    try:
        model(torch.zeros(0, 5, dtype=torch.float64)).sum().backward()
        opt.step()
    except ValueError as error:
        found["all empty"] = str(error)
    model, opt = make("mlp", "foof T=1", wrap=ddp)  # rank 1 has a batch with NaN
    train(model, opt, "mlp", 0, 3, rank, 2)
    before, weights = opt.preconditioner.blocks[0].moments["Sigma"].value.clone(), flat(model)
    x, y = (share(each, rank, 2).clone() for each in batch(3, "mlp"))
    if rank == 1:
        x[0, 0] = float("nan")
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    found["gradient is NaN on all ranks"] = not torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item()
    opt.zero_grad()  # the usual answer: skip the step
    found["statistics untouched by a skipped step"] = torch.equal(before, opt.preconditioner.blocks[0].moments["Sigma"].value)
    found["weights untouched"] = torch.equal(weights, flat(model))
    train(model, opt, "mlp", 4, 8, rank, 2)
    found["goes on"] = flat(model)
    model, opt = make("mlp", "foof T=1", wrap=ddp)  # a batch of zeros
    train(model, opt, "mlp", 0, 2, rank, 2)
    for _ in range(3):
        opt.zero_grad()
        model(torch.zeros(4, 5, dtype=torch.float64)).pow(2).sum().backward()
        opt.step()
    found["zeros"] = flat(model)
    model, opt = make("mlp", "foof T=1", wrap=ddp)  # an inversion that fails on the rank that owns it
    opt.preconditioner.factor = lambda block, damping: (_ for _ in ()).throw(torch.linalg.LinAlgError(f"{block.name} is ill"))
    try:
        train(model, opt, "mlp", 0, 1, rank, 2)
    except torch.linalg.LinAlgError as error:
        found["failed"] = str(error)
    return found


def test_faults_are_the_same_on_all_ranks():
    ours, theirs = run(faults, 2)
    for found in (ours, theirs):
        assert "the first batch is empty" in found["all empty"]
        assert found["gradient is NaN on all ranks"]
        assert found["statistics untouched by a skipped step"]
        assert found["weights untouched"]
        assert "is ill" in found["failed"]
    for key in ("goes on", "zeros"):
        assert torch.equal(ours[key], theirs[key])
        assert torch.isfinite(ours[key]).all()


class Sometimes(nn.Module):
    """A layer that only one rank's data reach, and one that nobody's do."""

    def __init__(self):
        super().__init__()
        self.first, self.extra, self.never, self.last = (nn.Linear(5, 5).double() for _ in range(4))

    def forward(self, x, extra):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.extra(x)) if extra else x)


def reach_unequally(rank):
    torch.manual_seed(0)
    model = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    opt = foof.FOOF(model, lr=0.1, damping=0.1, T=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the loss never reaches one of them
        for t in range(6):
            x, y = (share(each, rank, 2) for each in batch(t, "mlp"))
            opt.zero_grad()
            nn.functional.cross_entropy(model(x, extra=rank == 0), y).backward()
            opt.step()
    blocks = {block.name: block.factor is not None for block in opt.preconditioner.blocks}
    return flat(model), blocks


def test_layers_that_only_one_rank_reaches():
    (ours, blocks), (theirs, others) = run(reach_unequally, 2)
    assert torch.equal(ours, theirs)
    assert blocks == others == {"first": True, "extra": True, "never": False, "last": True}


def apart_or_initialised(rank):
    torch.manual_seed(0)
    model = mlp(5, 9, 3).double()
    opt = foof.FOOF(model, lr=0.1, damping=0.1, process_group=False)
    train(model, opt, "mlp", 0, 2, rank, 2)
    apart = opt.preconditioner.blocks[0].moments["Sigma"].value
    opt.remove()
    opt = foof.FOOF(ddp(model), lr=0.1, damping=0.1)
    opt.initialise([share(batch(k, "mlp")[0], rank, 2) for k in range(3)] if rank == 0 else [])
    return apart, opt.preconditioner.blocks[0].moments["Sigma"].value, opt.preconditioner.schedule.warming_up


def test_ranks_may_stay_apart_and_initialise_together():
    (ours, shared, warming), (theirs, other, also) = run(apart_or_initialised, 2)
    assert not torch.equal(ours, theirs)
    assert torch.equal(shared, other)
    assert not warming
    assert not also


def accumulate_scaled_and_clipped(rank):
    """Gradient accumulation under no_sync, a GradScaler and clipping, all at once."""
    model, opt = make("mlp", "foof", torch.float32, wrap=ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for t in range(10):
        opt.zero_grad()
        x, y = (share(each, rank, 2) for each in batch(t, "mlp", torch.float32))
        with model.no_sync():
            scaler.scale(nn.functional.cross_entropy(model(x[:4]), y[:4]) / 2).backward()
        scaler.scale(nn.functional.cross_entropy(model(x[4:]), y[4:]) / 2).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
    return flat(model)


def test_accumulation_scaling_and_clipping_under_ddp():
    ours, theirs = run(accumulate_scaled_and_clipped, 2)
    assert torch.equal(ours, theirs)
    model, opt = make("mlp", "foof", torch.float32)
    for t in range(10):
        x, y = batch(t, "mlp", torch.float32)
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    assert relative_error(ours, flat(model)) < 1e-4


def refuse(rank):
    told = []
    for wrap, optimizer in ((fsdp, foof.KFAC), (ddp, foof.NaturalGradient)):
        model = mlp(5, 4, 3)
        with pytest.raises(NotImplementedError) as error:
            optimizer(wrap(model))
        told.append(str(error.value))
        foof.FOOF(model)  # no hook was left behind
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    parallel = parallelize_module(mlp(5, 4, 3), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    opt = foof.FOOF(parallel)
    with pytest.raises(NotImplementedError) as error:
        parallel(torch.randn(2, 5))
    told.append(str(error.value))
    opt.remove()
    return told


def test_what_cannot_be_done_is_refused():
    for kfac, natural, parallel in run(refuse, 2):
        assert "use FOOF, or DistributedDataParallel" in kfac
        assert "Use FOOF or KFAC here" in natural
        assert "exclude=['0']" in parallel


def examples(rank, ports, checkpoint):
    """Both examples for torchrun, the second interrupted and started again; whoever starts them sets what torchrun would."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import torchrun_gpt
    import torchrun_mlp

    runs = [
        lambda: torchrun_mlp.main(60), lambda: torchrun_mlp.main(60, sharded=True), lambda: torchrun_gpt.main(40),
        lambda: torchrun_gpt.main(20, checkpoint), lambda: torchrun_gpt.main(40, checkpoint),
    ]  # fmt: skip
    found = []
    for port, each in zip(ports, runs, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        found.append(each())
    return found


def test_examples_for_torchrun(tmp_path):
    ours, theirs = run(examples, 2, [free_port() for _ in range(5)], str(tmp_path / "gpt.pt"), initialise=False)
    assert ours == theirs
    data_parallel, sharded, straight, _, resumed = ours
    assert data_parallel > 0.7
    assert abs(data_parallel - sharded) < 0.01  # they differ by rounding
    assert abs(straight - resumed) < 1e-5
