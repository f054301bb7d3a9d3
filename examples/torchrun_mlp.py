"""Data-parallel training of the study's network on Fashion-MNIST:

    torchrun --nproc-per-node=2 examples/torchrun_mlp.py [steps] [--fsdp]

Nothing but the usual lines of DistributedDataParallel (or FSDP2): FOOF shares its statistics and inversions by itself.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import foof
from foof.study.data import load

BATCH = 100  # of all processes together


def main(steps: int = 300, sharded: bool = False) -> float:
    dist.init_process_group()  # nccl on GPUs, gloo on CPUs
    rank, world = dist.get_rank(), dist.get_world_size()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    data = load("fashion-mnist", "embedded")
    x, y = data.train_x.flatten(1).to(device), data.train_y.to(device)

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)).to(device)
    if sharded:
        mesh = torch.distributed.init_device_mesh(device.type, (world,))
        for layer in model.children():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    opt = foof.FOOF(model, lr=0.3, damping=1.0, T=10)

    order = torch.Generator().manual_seed(1)
    for step in range(steps):
        rows = torch.randint(len(x), (BATCH,), generator=order).to(device).chunk(world)[rank]
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and (step + 1) % 50 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    with torch.no_grad():
        accuracy = (model(data.test_x.flatten(1).to(device)).argmax(1) == data.test_y.to(device)).float().mean().item()
    if rank == 0:
        print(f"test accuracy {accuracy:.3f} after {steps} steps on {world} processes", flush=True)
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    numbers = [int(a) for a in sys.argv[1:] if a.isdigit()]
    main(*numbers, sharded="--fsdp" in sys.argv)
