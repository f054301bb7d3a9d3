"""What tests with several ranks train: models, optimizers, batches and each rank's share of them."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import foof
from cases import mlp
from foof import sweep

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


class Attention(nn.Module):
    """``nn.MultiheadAttention``, whose projections are covered from their gradients."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(5, 6), nn.Linear(6, 3)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.before(x).tanh().unsqueeze(1) * torch.arange(1, 4, dtype=x.dtype)[:, None]
        return self.after(self.attention(x, x, x, need_weights=False)[0].mean(1))


MODELS = {"mlp": lambda: mlp(5, 9, 7, 3), "conv": conv, "tied": Tied, "attention": Attention}


def in_small_parts(make):
    """Spread inversions of tiny matrices, two rows at a time."""

    def made(model):
        sweep.PANEL = 2
        return make(model)

    return made


OPTIMIZERS = {
    "foof": lambda m: foof.FOOF(m, lr=0.1, damping=0.5, momentum=0.9, weight_decay=0.01, T=7, S=3),
    "foof paced": lambda m: foof.FOOF(m, momentum=0.9, weight_decay=0.01, T=7, S=3),
    "foof paced, spread": in_small_parts(lambda m: foof.FOOF(m, T=7, S=3, spread=True)),
    "foof bounded": lambda m: foof.FOOF(m, lr=1.0, max_change=0.01, T=7, S=3),
    "foof T=1": lambda m: foof.FOOF(m, lr=0.1, damping=0.5, T=1),
    "adamw": lambda m: foof.precondition(torch.optim.AdamW(m.parameters(), lr=0.01), m, damping=0.5, T=5),
    "muon": lambda m: foof.precondition(
        torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.01), m, damping=0.5, T=5
    ),
    "foof.Muon": lambda m: foof.Muon(m, lr=0.01, weight_decay=0.01, T=7, S=3),
    "foof.Muon, some neurons": in_small_parts(lambda m: foof.Muon(m, lr=0.01, T=7, S=3, spread=True, neurons=["2"], stacked={"0": 3})),
    "foof.AdamW": lambda m: foof.AdamW(m, lr=0.01, T=7, S=3),
    "kfac": lambda m: foof.KFAC(m, lr=0.02, damping=0.1, fisher="full", T=7, S=3),
    "kfac standard": lambda m: foof.KFAC(m, lr=0.02, damping=0.1, damping_mode="standard", fisher="empirical", T=4),
    "foof spread": in_small_parts(lambda m: foof.FOOF(m, lr=0.1, damping=0.5, momentum=0.9, T=9, S=3, spread=True)),
    "kfac spread": in_small_parts(lambda m: foof.KFAC(m, lr=0.02, damping=0.1, fisher="full", T=9, S=3, spread=True)),
}


def batch(t, name, dtype=torch.float64, size=2 * BATCH):
    g = torch.Generator().manual_seed(t)
    if name == "tied":
        x = torch.randint(0, 7, (size, 4), generator=g)
        return x, torch.randint(0, 7, (size, 4), generator=g)
    shape = (size, 5) if name in ("mlp", "attention") else (size, 2, 8, 8)
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
