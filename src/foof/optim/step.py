"""A step is a transaction: what backward passes bring for it is pending here, until it is taken or not.

``commit`` hands over what counts, ``drop`` forgets it; nothing else ever writes into the statistics. What counts is what ``.grad``
came from: passes whose gradients were accumulated there and are there still. Passes of ``torch.autograd.grad`` are kept apart, and
count only where gradients were assigned by hand, so that no other pass can have brought them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foof import _torch, distributed
from foof.layers import Layer
from foof.optim.block import Block
from foof.statistics import Gathered


class Ledger:
    """What has arrived for one matrix."""

    def __init__(self, moments: Iterable[str]) -> None:
        self.seen = {key: Gathered() for key in moments}
        self.notes: list[Any] = []  # taken from calls of the layer, each once
        self.plain = False  # is its gradient the plain one, for the step to precondition?
        self.inverse: Any = None  # what has preconditioned it, where that could not wait for the step
        self.nonzero: Tensor | None = None  # where that plain gradient was not zero when it left the taps, ``(..., n, m)``

    def leave_plain(self, gradient: Tensor, watch: bool) -> None:
        """A tap returns the plain gradient. Is it to be watched for masks that are laid over it later?"""
        self.plain = True
        if watch:
            nonzero = gradient != 0
            self.nonzero = nonzero if self.nonzero is None else self.nonzero | nonzero

    def masked(self, gradient: Tensor) -> Tensor | None:
        """Where somebody has set the plain gradient to zero since (pruning): the update is to be zero there, too."""
        return None if self.nonzero is None else self.nonzero & (gradient == 0)

    def sound(self, key: str) -> bool:
        """Has anything been seen of this second moment, and is all of it finite?"""
        return bool(self.seen[key]) and bool(self.seen[key].sound())

    def take(self, notes: list[Any]) -> list[Any]:
        """Those of these notes that have not been taken before."""
        new = [note for note in notes if not any(note is taken for taken in self.notes)]
        self.notes += new
        return new


class Step:
    """The step in the making."""

    def __init__(self, blocks: list[Block], moments: tuple[str, ...]) -> None:
        self.blocks, self._moments = blocks, moments
        self.passes = 0  # that have come by since the last step
        self._landing: dict[Block, Ledger] = {}  # of passes that accumulate into ``.grad``
        self._captured: dict[Block, Ledger] = {}  # of autograd.grad()
        self._arrived: set[Block] = set()  # whose gradient is in ``.grad`` by now
        self._latest_pass: int | None = None
        self._left: dict[Block, tuple[weakref.ref[Tensor], int]] = {}  # gradients as the last step left them
        self._sharded = any(distributed.is_sharded(block.weight) for block in blocks)  # FSDP keeps gradients elsewhere meanwhile
        self._handles = [] if self._sharded else [self._watch(block) for block in blocks]

    def _watch(self, block: Block) -> Any:
        """Be told when a pass has written into the weight's ``.grad``."""
        step, of = weakref.ref(self), weakref.ref(block)

        def arrived(_: Tensor) -> None:
            here, there = step(), of()
            if here is not None and there is not None and there in here._landing:
                here._arrived.add(there)

        return block.weight.register_post_accumulate_grad_hook(arrived)

    def ledger(self, block: Block, pass_id: int, lands: bool) -> Ledger:
        """Where to write what a pass brings for a block.

        When a new pass comes by, what earlier ones brought is dropped where its gradient is gone (``model.zero_grad()``).
        """
        if pass_id != self._latest_pass:
            self._latest_pass = pass_id
            self.passes += 1
            self._drop_lost()
        ledgers = self._landing if lands else self._captured
        if block not in ledgers:
            ledgers[block] = Ledger(self._moments)
        return ledgers[block]

    def settle(self) -> dict[Block, Ledger]:
        """What the step at hand is made of: for each block with a gradient, the ledger of the passes it came from."""
        self._drop_lost()
        found = {}
        for block in self.blocks:
            ledger = self._landing.get(block) or self._captured.get(block)
            if ledger is not None and block.weight.grad is not None:
                found[block] = ledger
        return found

    def holds(self, ledgers: list[Ledger]) -> bool:
        """Is the gradient of any of these passes still there?"""
        self._drop_lost()
        return any(ledger is mine for ledger in ledgers for mine in self._landing.values())

    def spent(self, block: Block) -> bool:
        """Is the gradient of this block the very one that the last step has used?

        Also where it has been clipped or scaled since, along with those that backward passes have brought for others.
        """
        gradient, left = block.weight.grad, self._left.get(block)
        if gradient is None or left is None or left[0]() is not gradient:
            return False
        return left[1] == _torch.version(gradient) or bool(self._landing)

    def commit(self) -> None:
        """The step was taken."""
        self.drop()
        self.passes = 0
        self._left = {}
        for block in self.blocks:
            if (gradient := block.weight.grad) is not None:
                self._left[block] = weakref.ref(gradient), _torch.version(gradient)

    def drop(self) -> None:
        """Forget what has come since the last step."""
        self._landing, self._captured, self._arrived = {}, {}, set()

    def _drop_lost(self) -> None:
        lost = [block for block in self._arrived if block.weight.grad is None]
        for block in lost:
            del self._landing[block]
            self._arrived.remove(block)
        if lost and not self._arrived:  # not one gradient is left
            self.drop()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


class Bypass:
    """Does a weight's gradient come through its taps alone? Compares all of it, on one backward pass, with what the taps returned."""

    def __init__(self, weight: Tensor) -> None:
        self.found = False
        self._through: Tensor | None = None
        self._pass: int | None = None
        self._handle: Any = weight.register_hook(self._compare)  # sees the sum over all ways to the weight

    def add(self, layer: Layer, gradient: Tensor) -> None:
        """What a tap returns for the layer's matrix on this pass."""
        if self._handle is not None:
            mine, pass_id = layer.split(gradient)[0], _torch.backward_pass_id()
            self._through = mine if self._through is None or pass_id != self._pass else self._through + mine
            self._pass = pass_id

    @torch.no_grad()
    def _compare(self, whole: Tensor) -> None:
        if self._through is not None and self._pass == _torch.backward_pass_id():
            size, rounding = whole.norm(), torch.finfo(whole.dtype).eps ** 0.5
            if size.isfinite():  # otherwise this step will hardly be taken
                self.found = bool((whole - self._through).norm() > rounding * size)
                self.remove()

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = self._through = None
