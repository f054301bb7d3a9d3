"""The exact Fisher: build, product, first solve (with Gram matrix and factor), further solves, samples; beside curvlinops with conjugate
gradients on the same matrix to the same residual, and laplace-torch where its matrix fits. ``python -m foof.bench.fisher WIDTH D``: memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import foof
from foof.bench.machine import elsewhere, growth
from foof.bench.methods import reason
from foof.study.train.models import mlp

DAMPING, PRIOR = 0.1, 1.0
LARGEST = 2**31  # bytes of a peer's dense matrix that is still tried
SIZES = ((1000, 1000), (1000, 100), (1000, 4000), (100, 1000), (300, 1000), (2000, 1000))  # width, D
COMPARED = ((1000, 1000), (100, 1000), (300, 1000))  # those that peers are measured on, too
QUICK = ((300, 1000),)
LAPLACE = ((4, 300, "full"), (300, 300, "kron"))  # width, datapoints, structure
Say = Callable[[str], None]


def problem(width: int, D: int, device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """The network 784-w-w-w-10, D random datapoints, and a vector."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(784, [width] * 3, 10)
        x, y, v = torch.randn(D, 784), torch.randint(0, 10, (D,)), torch.randn(sum(p.numel() for p in model.parameters()))
    return model.to(device), x.to(device), y.to(device), v.to(device)


def seconds(call: Callable[[], Any], repeats: int = 1) -> tuple[float, Any]:
    """The shortest of some calls, and the last one's answer."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        answer = call()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken), answer


def ours(width: int, D: int, device: str) -> tuple[dict[str, Any], foof.Fisher, Tensor, float]:
    """Seconds of each, the Fisher, the vector, and the residual of the solve."""
    model, x, y, v = problem(width, D, device)
    row: dict[str, Any] = {}
    row["build"], F = seconds(lambda: foof.Fisher(model, x, "empirical", y))
    row["product"], _ = seconds(lambda: F @ v, 3)
    row["first"], _ = seconds(lambda: F.solve(v, DAMPING))
    row["solve"], solution = seconds(lambda: F.solve(v, DAMPING), 3)
    row["sample"], _ = seconds(lambda: F.sample(1, DAMPING * D), 3)
    row["residual"] = residual(F, solution, v)
    return row, F, v, row["residual"]


def residual(F: foof.Fisher, solution: Tensor, v: Tensor) -> float:
    """``|(F + λI) u − v| / |v|``."""
    return float((F @ solution + DAMPING * solution - v).norm() / v.norm())


def by_conjugate_gradients(width: int, D: int, F: foof.Fisher, v: Tensor, accuracy: float) -> dict[str, Any]:
    """curvlinops' empirical Fisher of the same data, and SciPy's conjugate gradients to this residual."""
    from curvlinops import EFLinearOperator
    from scipy.sparse.linalg import LinearOperator, cg

    model, x, y, _ = problem(width, D, str(v.device))
    count, row = 0, dict[str, Any]()
    params = list(model.parameters())
    row["build"], theirs = seconds(lambda: EFLinearOperator(model, nn.CrossEntropyLoss(), params, [(x, y)], check_deterministic=False))
    row["product"], _ = seconds(lambda: theirs @ v, 2)

    def product(u: Any) -> Any:
        nonlocal count
        count += 1
        return (theirs @ torch.as_tensor(u, dtype=v.dtype, device=v.device)).cpu().numpy() + DAMPING * u

    damped = LinearOperator((len(v), len(v)), matvec=product, dtype="float32")
    row["solve"], (solution, _) = seconds(lambda: cg(damped, v.cpu().numpy(), rtol=accuracy, maxiter=500))
    row["residual"], row["products"] = residual(F, torch.as_tensor(solution, dtype=v.dtype, device=v.device), v), count
    return row


def by_laplace_torch(width: int, D: int, device: str) -> dict[str, Any]:
    """The posterior with all of its covariance, whose samples are what ``Fisher.sample`` draws."""
    return laplace_torch(width, D, "full", device)


def unit(width: int, D: int, peers: bool = True, say: Say = lambda _: None, device: str = "cpu") -> dict[str, Any]:
    """One size as a record."""
    foof.Fisher(*problem(4, 8, device)[:2]).sample(1, 1.0)  # torch imports parts of itself on the first tapped pass
    row, F, v, reached = ours(width, D, device)
    failed: dict[str, str] = {}
    record = {"kind": "fisher", "width": width, "D": D, "parameters": len(v), "damping": DAMPING, "ours": row, "failed": failed}
    others: dict[str, Any] = {}
    if peers:
        say("curvlinops and conjugate gradients")
        for name, measure in (
            ("curvlinops + CG", lambda: by_conjugate_gradients(width, D, F, v, max(reached, 1e-6))),
            ("laplace-torch", lambda: by_laplace_torch(width, D, device)),
        ):
            try:
                others[name] = measure()
            except Exception as error:  # a peer may fail in any way: the table says how
                failed[name] = reason(error)
    row["bytes"] = int(elsewhere("foof.bench.fisher", width, D, torch.get_num_threads(), device))  # in a process of its own
    return {**record, "peers": others}


def memory(width: int, D: int, device: str = "cpu") -> int:
    """Bytes by which memory grows at most, beyond the model and the data: build, solve and sample."""
    foof.Fisher(*problem(4, 8, device)[:2]).sample(1, 1.0)
    model, x, y, v = problem(width, D, device)

    def use() -> None:
        F = foof.Fisher(model, x, "empirical", y)
        F.solve(v, DAMPING)
        F.sample(1, DAMPING * D)

    return growth(use, torch.device(device))


# --- Laplace fits ---------------------------------------------------------------------------------------------------------


def laplace_torch(width: int, D: int, structure: str, device: str) -> dict[str, Any]:
    """laplace-torch's posterior over all weights: seconds of the fit and of the first sample."""
    model, x, y, v = problem(width, D, device)
    if structure == "full" and 4 * len(v) ** 2 > LARGEST:
        raise MemoryError(f"its covariance has {len(v):,} × {len(v):,} numbers, {4 * len(v) ** 2 / 2**40:.3g} TiB")
    from laplace import Laplace
    from torch.utils.data import DataLoader, TensorDataset

    def fit(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        posterior = Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure, prior_precision=PRIOR)
        posterior.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
        return posterior

    fit(*problem(1, 8, device)[:3]).sample(1)  # warmed up, as ours is
    fitted, posterior = seconds(lambda: fit(model, x, y))
    drawn, _ = seconds(lambda: posterior.sample(1))
    return {"fit": fitted, "sample": drawn}


def laplace_unit(width: int, D: int, structure: str, device: str = "cpu") -> dict[str, Any]:
    """A Laplace posterior of all weights, labels enumerated, as a record."""
    model, x, y, v = problem(width, D, device)
    fit = foof.laplace.fit if structure == "full" else foof.laplace.fit_kronecker
    fit(*problem(4, 8, device)[:3], labels="full", prior_precision=PRIOR)
    fitted, posterior = seconds(lambda: fit(model, x, y, labels="full", prior_precision=PRIOR))
    drawn, _ = seconds(lambda: posterior.sample(1))
    peers, failed = dict[str, Any](), dict[str, str]()
    try:
        peers["laplace-torch"] = laplace_torch(width, D, structure, device)
    except Exception as error:  # a peer may fail in any way: the table says how
        failed["laplace-torch"] = reason(error)
    size = {"width": width, "D": D, "parameters": len(v)}
    return {"kind": "laplace", "structure": structure, **size, "ours": {"fit": fitted, "sample": drawn}, "peers": peers, "failed": failed}


if __name__ == "__main__":
    width_, D_, threads = map(int, sys.argv[1:4])
    torch.set_num_threads(threads)
    print(json.dumps(memory(width_, D_, sys.argv[4])))
