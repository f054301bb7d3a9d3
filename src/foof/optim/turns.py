"""Inversions spread over the steps of a round, one block after the other and part by part, so that no step pays for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from foof import distributed
from foof.optim import sharing
from foof.optim.block import Block
from foof.optim.estimators import Estimator
from foof.statistics import Schedule, Turn
from foof.sweep import Gradual


class Making:
    """An inverse that is being made in parts: of a block's averages, which stand still meanwhile, and of its damping at the beginning."""

    def __init__(self, block: Block, damping: Mapping[str, Any]) -> None:
        self.damping = {"damping": damping["damping"], "relative": damping.get("relative", False)}
        self.block = replace(block, options=self.damping)
        self._gradual: Gradual | None = None
        self._there: Any = None  # where it was begun

    def advance(self, estimator: Estimator, to: int) -> None:
        """Until so many parts are done; from the first on, where none is yet (after a checkpoint) or the model has moved."""
        values = [moment.value for moment in self.block.moments.values()]
        here = [(value.device, value.dtype) for value in values if value is not None]
        if self._gradual is None or here != self._there:
            self._gradual, self._there = estimator.begin(self.block), here
        self._gradual.advance(to)

    def result(self, estimator: Estimator, T: int) -> Any:
        """The inverse, all parts done; where rounding forbids to make it so, at once, with all the care that takes."""
        made = None if self._gradual is None else self._gradual.result()
        return estimator.invert(self.block, T) if made is None else made


class Turns:
    """Whose turn it is.

    An inverse is of the averages as they are when its turn comes, and of the damping then. While it is made they stand still: so a
    checkpoint holds nothing of it but the damping, since it can be made again. When its turn ends it takes its place. Where averages need
    not all be fed on the same steps, each is fed on the S steps before its turn: every block follows Algorithm 1 at a phase of its own.
    """

    def __init__(self, blocks: list[Block], estimator: Estimator, schedule: Schedule, process_group: Any) -> None:
        self._estimator, self._schedule, self._process_group = estimator, schedule, process_group
        costs, group = [sharing.inversion_cost(block) for block in blocks], distributed.group_of(process_group)
        befores = [0, *accumulate(costs[:-1])]
        shares = zip(blocks, befores, costs, strict=True)
        self.turn = {block: Turn(before, cost, sum(costs), estimator.parts(block)) for block, before, cost in shares}
        owners = [0] * len(blocks) if group is None else sharing.share_out(blocks, group)
        self.owner = dict(zip(blocks, owners, strict=True))  # the rank that makes its inverse
        self.making: dict[Block, Making] = {}
        if not estimator.together:
            for block in blocks:
                block.begins = self._steps(block, replace(schedule, warming_up=False))[0]

    def _steps(self, block: Block, schedule: Schedule) -> tuple[int, int]:
        return self.turn[block].steps(schedule, self._estimator.together)

    def take(self) -> list[Block]:
        """Go on with the inverses whose turn it is; the blocks whose turn ends with this step."""
        step, _ = self._schedule.round()
        steps = {block: self._steps(block, self._schedule) for block in self.turn}
        begun = [block for block, (first, _) in steps.items() if first == step]
        sharing.synchronise(begun, set(), self._process_group, self._estimator)
        here = {block: ends for block, ends in steps.items() if ends[0] <= step <= ends[1] and block.moments and block.known}
        self.making = {block: making for block, making in self.making.items() if block in here and block not in begun}
        for block, (first, last) in here.items():
            if first < last:
                if block not in self.making:
                    self.making[block] = Making(block, block.options)
                if self._mine(block):
                    self.making[block].advance(self._estimator, self.turn[block].done(step, first, last))
        return [block for block, (_, last) in here.items() if last == step]

    def _mine(self, block: Block) -> bool:
        """Is it this rank that makes its inverse?"""
        group = distributed.group_of(self._process_group)
        return group is None or self.owner[block] == distributed.rank(group)

    def state_dict(self, block: Block) -> dict[str, Any]:
        """Is an inverse in the making, and with which damping? That is all a checkpoint has to hold of it."""
        making = self.making.get(block)
        return {"begun": making is not None, **(making or Making(block, block.options)).damping}

    def resume(self, block: Block, saved: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``: what was in the making is made again from the averages."""
        self.making.pop(block, None)
        if saved.get("begun"):
            self.making[block] = Making(block, saved)

    def fresh(self, block: Block) -> bool:
        """Is this the first step with the inverse at hand?"""
        before = replace(self._schedule, t=self._schedule.t - 1)
        return before.t < 0 or self._steps(block, before)[1] == before.round()[0]
