"""What may go wrong with several ranks: empty shards, NaN on one, layers that only one reaches, what is refused."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import foof
from cases import mlp
from oracle import relative_error
from ranks import BATCH, batch, ddp, flat, fsdp, make, share, train
from workers import run


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
    weights = flat(model)
    model(torch.zeros(0, 5, dtype=torch.float64)).sum().backward()
    opt.step()
    found["all empty changes nothing"] = torch.allclose(flat(model), (1 - 0.1 * 0.01) * weights)  # but for the decay
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
    opt.preconditioner.estimator.invert = lambda block, T: (_ for _ in ()).throw(torch.linalg.LinAlgError(f"{block.name} is ill"))
    try:
        train(model, opt, "mlp", 0, 1, rank, 2)
    except torch.linalg.LinAlgError as error:
        found["failed"] = str(error)
    return found


def test_faults_are_the_same_on_all_ranks():
    ours, theirs = run(faults, 2)
    for found in (ours, theirs):
        assert found["all empty changes nothing"]
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
    blocks = {block.name: block.inverse is not None for block in opt.preconditioner.blocks}
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
        foof.FOOF(model, lr=0.3, damping=1.0)  # no hook was left behind
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    parallel = parallelize_module(mlp(5, 4, 3), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    opt = foof.FOOF(parallel, lr=0.3, damping=1.0)
    with pytest.raises(NotImplementedError) as error:
        parallel(torch.randn(2, 5))
    told.append(str(error.value))
    opt.remove()
    uneven = ddp(mlp(5, 4, 3))
    opt = foof.FOOF(uneven, T=1)
    with pytest.raises(RuntimeError) as error, uneven.join():  # noqa: PT012
        for _ in range(2 + rank):
            opt.zero_grad()
            uneven(torch.randn(2, 5)).sum().backward()
            opt.step()
    told.append(str(error.value))
    return told


def test_what_cannot_be_done_is_refused():
    for kfac, natural, parallel, joined in run(refuse, 2):
        assert "use FOOF, or DistributedDataParallel" in kfac
        assert "Use FOOF or KFAC here" in natural
        assert "exclude=['0']" in parallel
        assert "leave join() out" in joined
