"""Past one process: averages of second moments by one all-reduce, and inversions shared out over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from foof import distributed
from foof.optim.block import Block, moved
from foof.optim.estimators import Estimator
from foof.statistics import wide


def synchronise(blocks: list[Block], reached: set[Block], process_group: Any, estimator: Estimator,
                keys: Iterable[str] | None = None) -> set[Block]:  # fmt: skip
    """Average the statistics over the process group, ``Σ_r mass_r value_r / Σ_r mass_r``, by one all-reduce. Alone: nothing.

    Every rank goes on with the same averages and an equal share of the mass, so their weighted mean stays what it was: this
    may be called at any time, by all ranks. Without it, a checkpoint holds what its own rank has seen since the last refresh.
    Returns which of the blocks any rank has reached.
    """
    group = distributed.group_of(process_group)
    keyed = [(block, key) for block in blocks for key in (block.moments if keys is None else keys)]
    if group is None or not keyed:
        return reached
    masses = [block.moments[key].mass for block, key in keyed]
    counts = [float(count) for block in blocks for count in (block in reached, block.rows)]
    values = [value_or_zeros(block, key, estimator) for block, key in keyed]
    means, masses, counts = distributed.weighted_mean(values, masses, counts, group)
    ranks = distributed.size(group)
    for (block, key), mean, mass in zip(keyed, means, masses, strict=True):
        block.moments[key].value, block.moments[key].mass = (mean if mass else None), mass / ranks
    for block, rows in zip(blocks, counts[1::2], strict=True):
        block.rows = round(rows / ranks)
    return {block for block, count in zip(blocks, counts[::2], strict=True) if count > 0}


def inverses(blocks: list[Block], process_group: Any, make: Callable[[Block], Any],
             owners: list[int] | None = None) -> Iterator[tuple[Block, Any]]:  # fmt: skip
    """New inverses of these blocks; in a process group each rank makes its share and all get the same bits.

    owners: which rank makes which; None: shared out by cost. Alone, each is made when it is asked for: there is room for one at a time.
    """
    group = distributed.group_of(process_group)
    if group is None or not blocks:
        yield from ((block, make(block)) for block in blocks)
        return
    owners, mine = owners or share_out(blocks, group), distributed.rank(group)
    made, failure = dict[int, Any](), None
    try:
        made = {job: make(block) for job, block in enumerate(blocks) if owners[job] == mine}
    except Exception as error:  # the others must hear of it before it is raised
        failure = error
    states = {job: {"kind": type(inverse), **inverse.state_dict()} for job, inverse in made.items()}
    device = blocks[0].weight.device
    everyone = distributed.exchange(states, owners, failure, device, group)
    for job, block in enumerate(blocks):
        kind = everyone[job].pop("kind")
        yield block, kind.from_state_dict(moved(everyone[job], device, wide(block.weight.dtype)))


def share_out(blocks: list[Block], group: Any) -> list[int]:
    """Which rank inverts which block."""
    return distributed.share_out([inversion_cost(block) for block in blocks], distributed.size(group))


def inversion_cost(block: Block) -> int:
    """What inverting a block costs, up to a constant: m³ for each side of each group."""
    if not block.moments:
        return 0
    layer = block.layer
    inputs = layer.m if layer.diagonal else layer.groups * layer.m**3
    return inputs + (layer.groups * layer.n**3 if "Sigma_E" in block.moments else 0)


def value_or_zeros(block: Block, key: str, estimator: Estimator) -> Tensor:
    """The moving average of one moment, as zeros of its shape before the first update."""
    value, weight = block.moments[key].value, block.weight
    if value is not None:
        return value
    return torch.zeros(estimator.moment_shape(block.layer, key), dtype=wide(weight.dtype), device=weight.device)
