"""Time and memory of the exact Fisher against datapoints D and width, beside curvlinops and laplace-torch where they can do it at all.

    python benchmarks/fisher_scale.py            # every row in a process of its own; writes fisher_scale.md

Models: 784-w-w-w-10 without biases (w = 1000: 2.8 million parameters) and a ResNet-20 for CIFAR images. Damping 0.1, labels drawn from
the model, float32. "build": forward and backward passes; "first": the first solve, with Gram matrix and Cholesky factor; "extra": peak
memory of the process beyond what it had with the model and the data in place. Times are wall clock, the least of three where it can be
repeated, with CPU seconds in brackets: on a machine shared with other work the latter are what a free core would need.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import foof
from foof.study.train.models import mlp

ROWS = [
    ("foof", "mlp", 10, 1000), ("foof", "mlp", 100, 1000), ("foof", "mlp", 300, 1000), ("foof", "mlp", 1000, 100),
    ("foof", "mlp", 1000, 1000), ("foof", "mlp", 1000, 4000), ("foof", "resnet", 20, 100), ("foof", "resnet", 20, 1000),
    ("curvlinops", "mlp", 10, 1000), ("curvlinops", "mlp", 1000, 1000),
    ("laplace-torch", "mlp", 10, 1000), ("laplace-torch", "mlp", 1000, 1000),
]  # fmt: skip
COLUMNS = ["library", "model", "parameters", "D", "build", "F @ v", "first", "solve", "sample", "extra MiB", "note"]
DAMPING = 0.1


class Residual(nn.Module):
    """Two 3 × 3 convolutions and a shortcut."""

    def __init__(self, m: int, n: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(m, n, 3, stride, 1, bias=False), nn.ReLU(inplace=True), nn.Conv2d(n, n, 3, 1, 1, bias=False)
        )
        self.shortcut = nn.Conv2d(m, n, 1, stride, bias=False) if m != n else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(0.5 * self.body(x) + self.shortcut(x))


def resnet20() -> nn.Module:
    """19 convolutions of 16, 32 and 64 channels, and a linear layer (He et al. 2016), without batch normalisation."""
    sizes = [(16, 16, 1)] * 3 + [(16, 32, 2)] + [(32, 32, 1)] * 2 + [(32, 64, 2)] + [(64, 64, 1)] * 2
    blocks = [Residual(*size) for size in sizes]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.ReLU(inplace=True), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
    )


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def seconds(f: Callable[[], Any], repeats: int = 1) -> tuple[str, Any]:
    wall, cpu = [], []
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        answer = f()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return f"{min(wall):.2f} ({min(cpu):.2f})", answer


def problem(kind: str, width: int, D: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    model = mlp(784, [width] * 3, 10) if kind == "mlp" else resnet20()
    x = torch.randn(D, 784) if kind == "mlp" else torch.randn(D, 3, 32, 32)
    y = torch.randint(0, 10, (D,))
    nn.functional.cross_entropy(model(x[:100]), y[:100]).backward()  # what training on mini-batches has at hand
    model.zero_grad()
    foof.Fisher(model, x[:2]).sample(1, 1.0)  # torch imports parts of itself on the first tapped forward pass
    return model, x, y, torch.randn(sum(p.numel() for p in model.parameters()))


def measure_foof(kind: str, width: int, D: int) -> dict[str, Any]:
    model, x, _, v = problem(kind, width, D)
    before, row = peak_mib(), {}
    row["build"], F = seconds(lambda: foof.Fisher(model, x, batch_size=None if kind == "mlp" else 100))
    row["F @ v"], _ = seconds(lambda: F @ v, 3)
    row["first"], _ = seconds(lambda: F.solve(v, DAMPING))
    row["solve"], _ = seconds(lambda: F.solve(v, DAMPING), 3)
    row["sample"], _ = seconds(lambda: F.sample(1, DAMPING * D), 3)  # the first one factorises for its own λ
    held = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in F.memory().items())
    return {**row, "extra MiB": round(peak_mib() - before), "note": f"held, MiB: {held}"}


def measure_curvlinops(kind: str, width: int, D: int) -> dict[str, Any]:
    from curvlinops import FisherMCLinearOperator
    from scipy.sparse.linalg import LinearOperator, cg

    model, x, y, v = problem(kind, width, D)
    before, row, count = peak_mib(), {}, [0]
    params = list(model.parameters())
    row["build"], F = seconds(
        lambda: FisherMCLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False)
    )
    row["F @ v"], _ = seconds(lambda: F @ v, 3)

    def product(u: Any) -> Any:
        count[0] += 1
        return (F @ torch.as_tensor(u, dtype=v.dtype)).numpy() + DAMPING * u

    row["solve"], _ = seconds(lambda: cg(LinearOperator((len(v), len(v)), matvec=product), v.numpy(), rtol=1e-4, maxiter=200))
    return {**row, "extra MiB": round(peak_mib() - before), "note": f"SciPy's CG to 1e-4: {count[0]} products; no samples"}


def measure_laplace_torch(kind: str, width: int, D: int) -> dict[str, Any]:
    from laplace import Laplace
    from laplace.curvature import BackPackGGN
    from torch.utils.data import DataLoader, TensorDataset

    model, x, y, v = problem(kind, width, D)
    if len(v) > 20_000:
        return {"note": f"full covariance needs {len(v)} × {len(v)} numbers, {len(v) ** 2 * 4 / 2**40:.0f} TiB: impossible"}
    before, row = peak_mib(), {}
    posterior = Laplace(model, "classification", "all", "full", prior_precision=DAMPING * D, backend=BackPackGGN)
    row["build"], _ = seconds(lambda: posterior.fit(DataLoader(TensorDataset(x, y), batch_size=100)))
    row["first"], _ = seconds(lambda: posterior.sample(1))
    row["sample"], _ = seconds(lambda: posterior.sample(1), 3)
    return {**row, "extra MiB": round(peak_mib() - before), "note": "labels enumerated; first: the first sample"}


MEASURE = {"foof": measure_foof, "curvlinops": measure_curvlinops, "laplace-torch": measure_laplace_torch}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        lines.append("| " + " | ".join(str(row.get(column, "–")) for column in COLUMNS) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=4, help="library, model, width, D: measure this row alone, print it as JSON")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.one:
        library, kind, width, D = args.one[0], args.one[1], int(args.one[2]), int(args.one[3])
        parameters = sum(p.numel() for p in (mlp(784, [width] * 3, 10) if kind == "mlp" else resnet20()).parameters())
        name = f"{kind} 3 × {width}" if kind == "mlp" else f"{kind}-{width}"
        print(json.dumps({"library": library, "model": name, "parameters": f"{parameters:,}", "D": D, **MEASURE[library](kind, width, D)}))
        return
    rows = []
    for row in ROWS:
        command = [sys.executable, __file__, "--threads", str(args.threads), "--one", *map(str, row)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        failed = {"library": row[0], "model": str(row[1:]), "note": ran.stderr[-200:]}
        rows.append(json.loads(ran.stdout.splitlines()[-1]) if ran.returncode == 0 else failed)
        print(rows[-1], flush=True)
    made = f"torch {torch.__version__}, {args.threads} thread(s). {' '.join(__doc__.split('Models: ')[1].split())}"
    heading = f"# The exact Fisher: time (seconds) and memory\n\n{made}\n\n"
    Path(__file__).with_suffix(".md").write_text(heading + table(rows) + "\n")


if __name__ == "__main__":
    main()
