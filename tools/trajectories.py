"""Do the optimizers still go where they went? ``python tools/trajectories.py record FILE``, change the library, ``... compare FILE``.

Every optimizer on an MLP, a convolutional network with groups and batch norm, and a small GPT whose head is tied to its embedding, in
float32 and float64, 40 steps: some of two accumulated batches, some after a backward pass whose step is skipped, with a resume from state
dicts into new objects halfway. Weights after every step are recorded; ``compare`` says of each trajectory whether it is equal bit for bit,
or where it leaves the recorded one and by how much. Uses public names of the library alone. One thread, seeded.
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import foof

STEPS, RESUME = 40, 20
ACCUMULATED = {0, 5, 6, 17, 30}  # steps of two batches
SKIPPED = {3, 9, 24}  # before these steps a backward pass is thrown away
BATCH = 12

Make = Callable[[nn.Module], Any]


def muon(m: nn.Module) -> Any:
    return torch.optim.Muon([p for p in m.parameters() if p.dim() == 2], lr=0.1)


OPTIMIZERS: dict[str, Make] = {
    "foof": lambda m: foof.FOOF(m, lr=0.1, damping=0.1, momentum=0.9, weight_decay=0.01, T=4, S=2),
    "foof-every-step": lambda m: foof.FOOF(m, lr=0.1, damping=0.1, T=1),
    "foof-latest-batch": lambda m: foof.FOOF(m, lr=0.1, damping=0.1, ema=0.0, T=3),
    "foof-relative": lambda m: foof.FOOF(m, lr=0.01, damping=0.5, relative=True, T=5, S=1),
    "foof-auto": lambda m: foof.FOOF(m, lr=0.1, damping="auto", T=5, rest={"name": "sgd", "lr": 0.01, "momentum": 0.9}),
    "sgd": lambda m: foof.precondition(torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), m, damping=0.1, T=4),
    "adamw": lambda m: foof.precondition(torch.optim.AdamW(m.parameters(), lr=0.01), m, damping=0.1, T=3, S=1),
    "muon": lambda m: foof.precondition(muon(m), m, damping=0.1, T=3),
    "kfac": lambda m: foof.KFAC(m, lr=0.02, damping=0.1, momentum=0.9, weight_decay=0.01, T=4, S=2, generator=1),
    "kfac-every-step": lambda m: foof.KFAC(m, lr=0.05, damping=0.1, T=1, generator=1),
    "kfac-full": lambda m: foof.KFAC(m, lr=0.05, damping=0.1, fisher="full", T=3),
    "kfac-empirical": lambda m: foof.KFAC(m, lr=0.05, damping=0.1, fisher="empirical", T=3, S=2),
    "kfac-subsampled": lambda m: foof.KFAC(m, lr=0.05, damping=0.1, ema=0.0, samples=2, datapoints=4, T=2, generator=1),
    "kfac-standard": lambda m: foof.KFAC(m, lr=0.02, damping=0.1, damping_mode="standard", momentum=0.9, T=4, S=2, generator=1),
    "kfac-standard-full": lambda m: foof.KFAC(m, lr=0.05, damping=0.1, damping_mode="standard", fisher="full", T=3),
    "kfac-standard-empirical": lambda m: foof.KFAC(m, lr=0.05, damping=0.1, damping_mode="standard", fisher="empirical", T=1),
    "kfac-adaptive": lambda m: foof.KFAC(m, damping=1.0, T=2, adaptive=True, generator=1),
    "kfac-standard-adaptive": lambda m: foof.KFAC(m, damping=1.0, damping_mode="standard", T=2, adaptive=True, generator=1),
    "kfac-sgd": lambda m: foof.precondition(
        torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9), m, method="kfac", damping=0.1, T=3, damping_mode="standard", generator=1
    ),
    "kfac-adamw": lambda m: foof.precondition(
        torch.optim.AdamW(m.parameters(), lr=0.01), m, method="kfac", damping=0.1, T=3, generator=1
    ),
    "natural": lambda m: foof.NaturalGradient(m, lr=0.02, damping=0.1, momentum=0.9, weight_decay=0.01, generator=1),
    "natural-layer": lambda m: foof.NaturalGradient(m, lr=0.02, damping=0.1, blocks="layer", T=3, generator=1),
    "natural-full": lambda m: foof.NaturalGradient(m, lr=0.02, damping=0.1, fisher="full", T=2),
    "natural-layer-full": lambda m: foof.NaturalGradient(m, lr=0.02, damping=0.1, fisher="full", blocks="layer"),
    "natural-empirical": lambda m: foof.NaturalGradient(m, lr=0.02, damping=0.1, fisher="empirical"),
    "natural-adaptive": lambda m: foof.NaturalGradient(m, damping=1.0, adaptive=True, generator=1),
}  # fmt: skip
INITIALISED = {"foof-latest-batch", "kfac-full", "kfac-standard-full", "foof-relative"}  # with statistics from two batches beforehand


class GPT(nn.Module):
    """Two blocks of causal attention over five tokens; the head's weight is the embedding's."""

    def __init__(self, vocabulary: int = 7, length: int = 5, width: int = 8, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(width), "attention": nn.Linear(width, 3 * width, bias=False), "project": nn.Linear(width, width),
                "norm2": nn.LayerNorm(width), "up": nn.Linear(width, 2 * width), "down": nn.Linear(2 * width, width),
            })
            for _ in range(2)
        )  # fmt: skip
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril().log().to(x.dtype)
        for block in self.blocks:
            q, k, v = block["attention"](block["norm"](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
            attended = (q @ k.mT / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v
            x = x + block["project"](attended.transpose(1, 2).flatten(-2))
            x = x + block["down"](nn.functional.gelu(block["up"](block["norm2"](x))))
        return self.head(self.norm(x))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8, bias=False), nn.ReLU(inplace=True), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2, groups=2),
        nn.ReLU(), nn.Flatten(), nn.Linear(36, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], tuple[Tensor, Tensor]]]] = {
    "mlp": (mlp, lambda g: (torch.randn(BATCH, 6, generator=g), torch.randint(0, 3, (BATCH,), generator=g))),
    "cnn": (cnn, lambda g: (torch.randn(BATCH, 2, 8, 8, generator=g), torch.randint(0, 3, (BATCH,), generator=g))),
    "gpt": (GPT, lambda g: tuple(torch.randint(0, 7, (BATCH, 5), generator=g) for _ in range(2))),  # type: ignore[dict-item, return-value]
}


class Run:
    """One optimizer on one model, step by step."""

    def __init__(self, optimizer: str, model: str, dtype: torch.dtype) -> None:
        self.optimizer, (self.make_model, self.draw), self.dtype = optimizer, MODELS[model], dtype
        self.model, self.opt = self.new()
        if optimizer in INITIALISED:
            self.opt.initialise([self.batch(2000), self.batch(2001)])

    def new(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = self.make_model().to(self.dtype)
        return model, OPTIMIZERS[self.optimizer](model)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        x, y = self.draw(torch.Generator().manual_seed(number))
        return x.to(self.dtype) if x.is_floating_point() else x, y

    def backward(self, number: int, share: float = 1.0) -> None:
        x, y = self.batch(number)
        out = self.model(x)
        self.opt.update_curvature(out, y)
        (nn.functional.cross_entropy(out.flatten(0, -2), y.flatten()) * share).backward()

    def step(self, t: int) -> None:
        if t in SKIPPED:
            self.backward(1000 + t)
            self.opt.zero_grad()
        parts = (t, 3000 + t) if t in ACCUMULATED else (t,)
        for number in parts:
            self.backward(number, 1 / len(parts))
        self.opt.step()
        self.opt.zero_grad()

    def resume(self) -> None:
        """Go on with new objects, from what a file holds."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "opt": self.opt.state_dict()}, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        self.model, self.opt = self.new()
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])

    def trajectory(self) -> Tensor:
        """``(steps, weights)``."""
        weights = []
        for t in range(STEPS):
            if t == RESUME:
                self.resume()
            self.step(t)
            weights.append(torch.cat([p.detach().flatten() for p in self.model.parameters()]).clone())
        return torch.stack(weights)


def trajectories() -> dict[str, Tensor | str]:
    """By name, the weights after every step; where an optimizer refuses a model, what it says."""
    made: dict[str, Tensor | str] = {}
    for optimizer in OPTIMIZERS:
        for model in MODELS:
            for dtype in (torch.float32, torch.float64):
                name = f"{optimizer} / {model} / {str(dtype).removeprefix('torch.')}"
                try:
                    made[name] = Run(optimizer, model, dtype).trajectory()
                except (ValueError, RuntimeError, NotImplementedError, TypeError) as refusal:
                    made[name] = f"{type(refusal).__name__}: {refusal}"
    return made


def difference(before: Tensor | str | None, after: Tensor | str | None) -> str:
    """Empty where two trajectories are equal bit for bit."""
    if before is None or after is None:
        return "only recorded" if after is None else "new"
    if isinstance(before, str) or isinstance(after, str):
        if isinstance(before, str) and isinstance(after, str):
            return ""
        return f"refused before: {before}" if isinstance(before, str) else f"refused now: {after}"
    same = (before == after) | (before.isnan() & after.isnan())
    if bool(same.all()):
        return ""
    first = int((~same.all(1)).nonzero()[0])

    def apart(t: int) -> str:
        return f"{float((after[t] - before[t]).norm() / before[t].norm()):.1e}"

    return f"differs from step {first} on, relative error {apart(first)} there, {apart(STEPS - 1)} at the end"


def record(file: str) -> int:
    made = trajectories()
    torch.save(made, file)
    refused = {name: each for name, each in made.items() if isinstance(each, str)}
    for name, why in refused.items():
        print(f"left out: {name}: {why}")
    lost = [name for name, each in made.items() if isinstance(each, Tensor) and not bool(each.isfinite().all())]
    print(*(f"not finite: {name}" for name in lost), sep="\n", end="\n" if lost else "")
    print(f"{len(made) - len(refused)} trajectories recorded, {len(refused)} left out, {len(lost)} not finite")
    return 0


def compare(file: str) -> int:
    before, after = torch.load(file, weights_only=True), trajectories()
    differences = {name: difference(before.get(name), after.get(name)) for name in {**before, **after}}
    for name, what in differences.items():
        if what:
            print(f"{name}: {what}")
    ran = [name for name in differences if isinstance(before.get(name), Tensor)]
    print(f"{sum(not differences[name] for name in ran)} of {len(ran)} trajectories are equal bit for bit")
    return 1 if any(differences.values()) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return (record if arguments.action == "record" else compare)(arguments.file)


if __name__ == "__main__":
    raise SystemExit(main())
