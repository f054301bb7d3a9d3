"""Data-parallel training of a small GPT, with checkpoints that survive a killed process:

    torchrun --nproc-per-node=2 --max-restarts=3 examples/torchrun_gpt.py [steps] [checkpoint]

AdamW on neurons. Start it again with the same checkpoint file and it goes on where it stopped.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_gpt import GPT, batch, loss_of, tokens
from torch.nn.parallel import DistributedDataParallel

import foof

SIZE, LENGTH, EVERY = 16, 64, 20  # windows per step of all processes together, their length, steps between checkpoints


def main(steps: int = 200, checkpoint: str = "") -> float:
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    train, validation, vocabulary = tokens()
    torch.manual_seed(0)
    gpt = GPT(vocabulary, width=64, depth=2, length=LENGTH)
    model = DistributedDataParallel(gpt)
    # The loss is a mean over tokens, Σ a sum over them: damping grows with their number, see "Choosing" in the docs.
    opt = foof.precondition(torch.optim.AdamW(model.parameters(), lr=3e-3), model, damping=0.01 * LENGTH, T=20)
    start = 0
    if checkpoint and Path(checkpoint).exists():
        state = torch.load(checkpoint, weights_only=True)
        gpt.load_state_dict(state["model"])
        opt.load_state_dict(state["optimizer"])
        start = state["step"]
    for step in range(start, steps):
        ids, targets = batch(train, SIZE, LENGTH, torch.Generator().manual_seed(step))
        loss = loss_of(model, ids.chunk(world)[rank], targets.chunk(world)[rank])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if (step + 1) % EVERY == 0:
            opt.preconditioner.synchronise()  # on all ranks: the file then holds what all of them have seen
            if rank == 0:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
                if checkpoint:
                    torch.save({"model": gpt.state_dict(), "optimizer": opt.state_dict(), "step": step + 1}, checkpoint)
    with torch.no_grad():
        final = loss_of(gpt, *batch(validation, 64, LENGTH, torch.Generator().manual_seed(0))).item()
    if rank == 0:
        print(f"validation loss {final:.3f} nats per character after {steps} steps on {world} processes", flush=True)
    dist.destroy_process_group()
    return final


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:]))
