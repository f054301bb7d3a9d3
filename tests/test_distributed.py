"""Several ranks train as one process would with the joined batch, and speak to each other only where they must."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import foof
from cases import mlp
from foof import sweep
from foof.distributed import share_out
from oracle import relative_error
from ranks import OPTIMIZERS, ddp, flat, fsdp, make, train
from workers import free_port, run


def train_on_each(rank, cases, wrap, steps):
    found = []
    for name, optimizer, dtype in cases:
        model, opt = make(name, optimizer, dtype, wrap)
        train(model, opt, name, 0, steps, rank, dist.get_world_size(), dtype)
        found.append(flat(model))
        opt.preconditioner.remove()
    return found


@pytest.fixture(autouse=True)
def panels_as_they_were(monkeypatch):
    """Optimizers in small parts set the size of parts, for their process."""
    monkeypatch.setattr(sweep, "PANEL", sweep.PANEL)


EXACT = [("mlp", optimizer, torch.float64) for optimizer in OPTIMIZERS]
EXACT += [(name, optimizer, torch.float64) for name in ("conv", "tied") for optimizer in ("foof", "foof paced", "foof bounded", "kfac")]
EXACT += [("attention", "foof", torch.float64)]
EXACT += [(name, "foof.Muon", torch.float64) for name in ("conv", "tied")]  # an eigenbasis is unique only where eigenvalues are apart
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
    compare([case for case in EXACT + ROUNDED if case[1] not in ("muon", "kfac", "kfac standard", "kfac spread")], fsdp)


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
    opt = foof.FOOF(model, lr=0.3, damping=1.0, T=100, S=10)
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
