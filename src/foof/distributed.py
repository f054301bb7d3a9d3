"""Past one process: moving averages shared by one all-reduce, inversions shared out by cost, shards of gradients.

Every decision here follows from what all ranks know alike, so that every rank makes the same calls in the same order, and every
rank ends with the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_of(process_group: Any) -> Any:
    """The process group to share with, or None when alone. ``None`` means the default group, ``False`` none."""
    if process_group is False or not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if process_group is None else process_group
    return group if dist.get_world_size(group) > 1 else None


def size(group: Any) -> int:
    return dist.get_world_size(group)


def rank(group: Any) -> int:
    return dist.get_rank(group)


def weighted_mean(values: Sequence[Tensor], masses: Sequence[float], counts: Sequence[float],
                  group: Any) -> tuple[list[Tensor], list[float], list[float]]:  # fmt: skip
    """``Σ_r mass_r value_r / Σ_r mass_r`` over the ranks r of a group, and the sums of masses and counts: one all-reduce for all.

    A rank that has seen nothing of a value passes zeros with mass 0. Where no rank has, the mean is zeros.
    """
    numbers = torch.tensor([*masses, *counts], dtype=_promoted(values), device=values[0].device)
    flat = torch.cat([*(value.reshape(-1) * mass for value, mass in zip(values, masses, strict=True)), numbers])
    dist.all_reduce(flat, group=group)
    *sums, numbers = flat.split([*(value.numel() for value in values), len(numbers)])
    total = numbers.tolist()
    total_masses, total_counts = total[: len(masses)], total[len(masses) :]
    means = [
        (s / mass if mass else s).to(value.dtype).view(value.shape)
        for s, mass, value in zip(sums, total_masses, values, strict=True)
    ]
    return means, total_masses, total_counts


def share_out(costs: Sequence[float], workers: int) -> list[int]:
    """Who does which job: the dearest first, each to the worker with the least to do."""
    load, owner = [0.0] * workers, [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        owner[job] = load.index(min(load))
        load[owner[job]] += costs[job]
    return owner


def exchange(results: dict[int, dict[str, Any]], owners: Sequence[int], failure: Exception | None, device: torch.device,
             group: Any) -> dict[int, dict[str, Any]]:  # fmt: skip
    """The results of all jobs, from the ranks that own them: per owner a description and one broadcast of its tensors.

    A result is a dictionary of tensors, plain values and dictionaries of such. ``failure`` is what stopped this rank's jobs, if
    anything did: then all ranks raise.
    """
    everything, failed = dict[int, dict[str, Any]](), ""
    for owner in sorted(set(owners)):
        mine = owner == rank(group)
        told: list[Any] = [None]
        if mine:
            told = [f"{failure}" if failure is not None else {job: _outline(result) for job, result in results.items()}]
        dist.broadcast_object_list(told, group=group, group_src=owner, device=device)
        if isinstance(told[0], str):
            failed = failed or f"rank {owner} could not invert its share of the layers: {told[0]}"
            continue
        outline: dict[int, dict[str, Any]] = told[0]
        empty = _tensors(outline)
        flat = torch.cat([t.reshape(-1) for t in _tensors(results)]) if mine else torch.empty(
            sum(t.numel() for t in empty), dtype=_promoted(empty), device=device
        )  # fmt: skip
        dist.broadcast(flat, group=group, group_src=owner)
        pieces = zip(empty, flat.split([t.numel() for t in empty]), strict=True)
        # The owner, too, goes on with what was sent: another layout in memory would round differently.
        everything.update(_filled(outline, iter([f.to(t.dtype).view(t.shape) for t, f in pieces])))
    if failed:
        raise failure or torch.linalg.LinAlgError(failed)  # type: ignore[attr-defined]
    return everything


def _outline(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same with tensors that have a shape and a type but no values."""
    return {k: _outline(v) if isinstance(v, Mapping) else v.to("meta") if isinstance(v, Tensor) else v for k, v in state.items()}


def _tensors(state: Mapping[Any, Any]) -> list[Tensor]:
    found = [_tensors(v) if isinstance(v, Mapping) else [v] if isinstance(v, Tensor) else [] for v in state.values()]
    return [t for each in found for t in each]


def _filled(outline: Mapping[Any, Any], tensors: Iterator[Tensor]) -> dict[Any, Any]:
    return {
        key: _filled(value, tensors) if isinstance(value, Mapping) else next(tensors) if isinstance(value, Tensor) else value
        for key, value in outline.items()
    }


def _promoted(tensors: Iterable[Tensor]) -> torch.dtype:
    return functools.reduce(torch.promote_types, (t.dtype for t in tensors))


# --- sharded gradients (FSDP2) ---------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose module not every build of torch has


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered from its shards if it has any."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard, sharing memory with the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_by_rows(tensor: Tensor) -> bool:
    """Is each rank's shard made of whole entries of the first dimension?"""
    return is_sharded(tensor) and all(p.is_replicate() or p.is_shard(0) for p in tensor.placements)  # type: ignore[attr-defined]


def write(target: Tensor, whole: Tensor) -> None:
    """Copy a whole tensor, the same on all ranks, into a tensor that may be sharded."""
    if not is_sharded(target):
        target.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = target.device_mesh  # type: ignore[attr-defined]
    replicated = DTensor.from_local(whole.to(target.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
    target.copy_(replicated.redistribute(mesh, target.placements))  # type: ignore[attr-defined]
