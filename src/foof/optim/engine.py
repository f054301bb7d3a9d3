"""The engine: taps, the step in the making, an estimator and a schedule, tied to a model and to an optimizer.

The way of one batch: tap → ``receive`` (gather, and hand back the neuron gradient) → ``prepare`` before the optimizer's update
(what is still plain is preconditioned) → ``commit`` after it (Algorithm 1: invert if due, fold in the step's batch, count the step).
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from foof import _torch, distributed, notices
from foof.covering import by_matrix, covered_layers, names_of
from foof.layers import Layer
from foof.optim import checkpoint, sharing
from foof.optim.block import Block, made_of
from foof.optim.estimators import STATISTICS_LIMIT, Estimator, Seen
from foof.optim.step import Bypass, Ledger, Step
from foof.optim.turns import Making, Turns
from foof.passes import buffers_kept
from foof.statistics import MovingAverage, Schedule, exact
from foof.tap import Receiver, Visit, existing_tap, tap

FORGOTTEN = 100  # backward passes without a step after which one may be told that nobody takes any


class Engine:
    """Makes the gradients of a model's covered layers neuron gradients, by the inverses its estimator makes.

    ``attach`` ties it to the optimizer whose steps drive the schedule and whose state dict carries the statistics.
    """

    def __init__(self, model: nn.Module, estimator: Callable[[torch.device], Estimator], schedule: Schedule, ema: float, *,
                 exclude: Iterable[str] = (), owned: Container[int] | None = None, functional: bool = False,
                 process_group: Any = None) -> None:  # fmt: skip
        if not 0 <= ema < 1:
            raise ValueError(f"ema is the decay m of the moving averages: it must be in [0, 1), got {ema}.")
        self.schedule, self.ema, self.process_group = schedule, ema, process_group
        self.wrapper, self.model = model, unwrapped(model)
        self.exclude = names_of(exclude)
        layers, self.rest = covered_layers(self.model, self.exclude, owned, functional=functional)
        check_coverable(self.model, layers, self.rest)
        self.estimator = estimator(layers[0].weight.device)
        self.blocks = [Block(same, {key: MovingAverage() for key in self.estimator.moments_of(same)}) for same in by_matrix(layers)]
        for block in self.blocks:
            block.shares_weight = any(other.weight is block.weight for other in self.blocks if other is not block)
        self._block_of = {id(layer): block for block in self.blocks for layer in block.layers}
        self._warned: set[str] = set()
        self._warn_of_memory()
        self.step = Step(self.blocks, self.estimator.moments)
        self.ledgers: dict[Block, Ledger] = {}  # of the step that is being taken
        self.mask: Tensor | None = None  # which rows of the inputs count, in forward passes from now on
        self.turns = Turns(self.blocks, self.estimator, schedule, process_group) if schedule.spread else None
        self.keeps_plain = False  # are gradients kept as they were before preconditioning, until the step has been taken?
        self.plain_gradients: list[Tensor] = []
        self.taps = [tap(layer, self) for layer in layers if self._block_of[id(layer)].moments or not self.estimator.moments]
        self._recording: Receiver | None = None
        self._sharded = any(distributed.is_sharded(block.weight) for block in self.blocks)
        self._bypass: dict[Block, Bypass] | None = {}  # None: one step has told
        self.handles: list[Any] = []

    @property
    def device(self) -> torch.device:
        return self.blocks[0].weight.device

    @property
    def params(self) -> list[nn.Parameter]:
        """The covered parameters, in the order of ``model.parameters()``."""
        covered = {id(p) for block in self.blocks for layer in block.layers for p in layer.parameters}
        return [p for p in self.model.parameters() if id(p) in covered]

    def _warn_of_memory(self) -> None:
        """Of layers so wide that their statistics take more memory than anybody would expect."""
        for block in self.blocks:
            dtype = torch.promote_types(block.weight.dtype, torch.float32)
            shapes = [self.estimator.moment_shape(block.layer, key) for key in block.moments]
            needed = 2 * dtype.itemsize * sum(math.prod(shape) for shape in shapes)
            if needed > STATISTICS_LIMIT:
                self.warn(f"{block.name}: its second moments {', '.join(map(str, shapes))} and inverse take {needed / 2**30:.1f} GiB. "
                          f'FOOF(blocks="auto") splits its inputs into diagonal blocks; exclude=[{block.layer.module_name!r}] leaves it to '
                          "the fallback optimizer.")

    # --- the backward pass ----------------------------------------------------------------------------------------------

    def receive(self, visit: Visit) -> Tensor | None:
        """The neuron gradient of one call of one layer; see ``foof.tap.Receiver``."""
        if self._recording is not None:
            return self._recording.receive(visit)
        if not self.taps:  # removed since the forward pass
            return visit.plain_gradient(visit.e.dtype)
        block = self._block_of[id(visit.layer)]
        block.follow_weight()
        ledger = self.step.ledger(block, visit.pass_id, visit.lands)
        if self.step.passes == FORGOTTEN:
            self.warn(f"{FORGOTTEN} backward passes since the last step of the optimizer on these neurons. While it is attached, gradients "
                      "of its layers are neuron gradients: call its step(), or its remove() if it is no longer wanted.", once=True)
        layer, x, e = visit.layer, visit.x, visit.e
        block.rows = layer.rows(e)
        self.estimator.observe(block, ledger, visit, self.schedule.gathers(block.begins))
        if block.inverse is None and ledger.inverse is None and block.moments and block.shares_weight and visit.lands:
            ledger.inverse = self._provisional_inverse(block, ledger)
        inverse = block.inverse or ledger.inverse
        if inverse is None or ledger.plain or self.estimator.leaves_plain(block):
            gradient = visit.plain_gradient(e.dtype)
            ledger.leave_plain(gradient, watch=self.estimator.watches and not self._sharded)
        else:
            gradient = inverse.gradient(layer, x, e, visit.plain_gradient)
        if self._bypass is not None and not (self._sharded or self.estimator.plain or block.shares_weight):
            if block not in self._bypass:
                self._bypass[block] = Bypass(block.weight)
            self._bypass[block].add(layer, gradient)
        return gradient

    def witness(self, visit: Visit) -> None:
        """A pass comes by a layer whose gradient is plain, and is left to the step; see ``foof.tap.Receiver``."""
        if self._recording is None:
            block = self._block_of[id(visit.layer)]
            block.follow_weight()
            ledger = self.step.ledger(block, visit.pass_id, visit.lands)
            ledger.plain = True
            self.estimator.observe(block, ledger, visit, self.schedule.gathers(block.begins))

    @contextmanager
    def recording(self, receiver: Receiver) -> Iterator[None]:
        """Until the context ends, passes go to this receiver and are not part of any step."""
        before, self._recording = self._recording, receiver
        try:
            yield
        finally:
            self._recording = before

    @contextmanager
    def masking(self, rows: Tensor) -> Iterator[None]:
        """Forward passes within the context have rows ``(N, R)`` that count and rows that do not; see ``NeuronOptimizer.mask``."""
        before, self.mask = self.mask, rows.detach().bool()
        try:
            yield
        finally:
            self.mask = before

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Outputs (and labels) that estimate the Fisher. FOOF has no use for them."""
        self.estimator.update_curvature(self, self.schedule.gathers(), out, y)

    # --- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @exact
    def prepare(self) -> None:
        """Before the update: make every covered ``.grad`` that is not yet the method's gradient so."""
        check_unchanged(self.blocks)
        if self.wrapper is not self.model and _torch.joins_uneven_inputs(self.wrapper):
            raise RuntimeError(
                "inside DistributedDataParallel's join() ranks that have run out of data do not take part in averaging the statistics: "
                "give all ranks equally many batches (DistributedSampler pads), and leave join() out."
            )
        self.ledgers, plain = self.step.settle(), dict[Block, Ledger | None]()
        for block in self.blocks:
            if block.weight.grad is None:
                self._warn_of_no_gradient(block)
            elif self._is_plain(block):
                plain[block] = self.ledgers.get(block)
        if all(block.weight.grad is None for block in self.blocks):
            return
        self.estimator.prepare(self, self.ledgers)
        if self.keeps_plain:
            self.plain_gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.params]
        provisional = {block: ledger for block, ledger in self.ledgers.items() if ledger.inverse is not None}
        if plain or provisional:
            self._start({block: ledger for block, ledger in (plain | provisional).items() if block.inverse is None})
            able = {block: ledger for block, ledger in plain.items() if block.inverse is not None or not block.moments}
            self.estimator.precondition(able)
        if self._bypass:
            self._warn_of_bypasses(self._bypass)

    def _warn_of_no_gradient(self, block: Block) -> None:
        if block.weight.requires_grad and self.ledgers:
            gone = not any(module is block.layer.module for module in self.model.modules())
            why = "has been taken out of the model since the optimizer was made" if gone else "is not reached by the loss"
            self.warn(f"{block.name}: this layer {why}; it is not updated.", once=True)

    def _is_plain(self, block: Block) -> bool:
        """Is this block's ``.grad`` still the plain gradient?"""
        if block in self.ledgers:
            return self.ledgers[block].plain
        if distributed.group_of(self.process_group) is not None:  # brought by other ranks, which have the same inverses
            return block.inverse is None or self.estimator.leaves_plain(block) or block.layer.functional
        return not self.step.spent(block)  # assigned by hand, from passes that no tap has seen

    def start(self) -> list[Block]:
        """First inverses from what the step in the making has brought so far; the blocks that it has reached."""
        ledgers = self.step.settle()
        self._start({block: ledger for block, ledger in ledgers.items() if block.inverse is None})
        return list(ledgers)

    def _start(self, ledgers: Mapping[Block, Ledger | None]) -> None:
        """First inverses, from what this step has brought."""
        new = {block: ledger for block, ledger in ledgers.items() if block.moments}
        if not new:
            return
        if distributed.group_of(self.process_group) is None:  # an error comes before anything has changed
            for block, ledger in new.items():
                if not all(moment.updates or (ledger and ledger.sound(key)) for key, moment in block.moments.items()):
                    self._can_start(block, ledger is not None)
        self._fold({block: ledger.seen for block, ledger in new.items() if ledger is not None})
        reached = {block for block, ledger in new.items() if ledger is not None}
        reached = sharing.synchronise(list(new), reached, self.process_group, self.estimator)
        startable = [block for block in new if self._can_start(block, block in reached)]
        self._invert(startable)
        self.estimator.folded({block: ledger for block in startable if (ledger := new[block]) is not None})

    def _provisional_inverse(self, block: Block, ledger: Ledger) -> Any:
        """An inverse for a weight tied to one of another layout on its first step, from what has come so far; None if that is nothing.

        It cannot wait: the sum of the two plain gradients could not be told apart later. The averages do not hear of it yet.
        """
        trial = replace(block, moments=deepcopy(block.moments))
        self._fold({trial: dict(ledger.seen)})
        sharing.synchronise([trial], {trial}, self.process_group, self.estimator)
        if trial.known:
            self._invert([trial])
        return trial.inverse

    def _can_start(self, block: Block, reached: bool) -> bool:
        """Has enough been seen of this block? If not: is its gradient zero (an expert that no row was sent to), or is this an error?"""
        if block.known:
            return True
        if not bool(distributed.local(block.weight.grad).any()):  # type: ignore[arg-type]
            return False
        if reached:
            raise ValueError(self.estimator.explain_unseen(block))
        raise RuntimeError(
            f"{block.name}: its gradient did not come through its forward(). If the weight is used functionally, pass "
            f"exclude=[{block.layer.module_name!r}] to leave it to the fallback optimizer; if the layer's forward() was called directly, "
            "call the layer; if the model was compiled and run before the optimizer was made, call torch._dynamo.reset()."
        )

    @torch.no_grad()
    @exact
    def commit(self) -> None:
        """After the update, Algorithm 1: invert if due, fold in this step's batch if it was gathered, count the step.

        A step without a backward pass through any layer (``torch.distributed.checkpoint`` takes one to have the optimizer make
        its state) does not count.
        """
        ledgers, self.ledgers, self.plain_gradients = self.ledgers, {}, []
        if ledgers:
            self.estimator.finish(self, ledgers, self.schedule.gathers())
            if self.turns is not None:
                self._invert_in_turn(self.turns)
            elif self.schedule.inverts():
                self._refresh()
            self._fold({block: ledger.seen for block, ledger in ledgers.items() if block not in self.making})
            self.estimator.folded(ledgers)
            self.schedule.advance()
        self.step.commit()

    def drop(self) -> None:
        """The gradients are being thrown away, and with them what they came with."""
        self.step.drop()

    @torch.no_grad()
    @exact
    def refresh(self) -> None:
        """Invert every block whose statistics or damping have changed."""
        self._refresh()

    def _refresh(self) -> None:
        self.making.clear()
        if self.estimator.moments:
            self.synchronise()
            self._invert([block for block in self.blocks if block.moments and block.known])

    def _invert_in_turn(self, turns: Turns) -> None:
        ended = turns.take()
        made = {block: turns.making.pop(block) for block in ended if block in turns.making}
        self._invert(ended, made, [turns.owner[block] for block in ended])

    @property
    def making(self) -> dict[Block, Making]:
        """Inverses that are being made in parts, while their averages stand still."""
        return {} if self.turns is None else self.turns.making

    def fresh(self, block: Block) -> bool:
        """Is this the first step with the block's inverse at hand?"""
        return self.schedule.fresh() if self.turns is None else self.turns.fresh(block)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Average the statistics over the process group; see ``foof.optim.sharing``. Alone: nothing."""
        sharing.synchronise(self.blocks, set(), self.process_group, self.estimator)

    def _invert(self, blocks: list[Block], ended: Mapping[Block, Making] | None = None, owners: list[int] | None = None) -> None:
        """New inverses from the averages as they are, where those or the damping have changed; or those that have been made in parts."""
        ended = ended or {}
        if distributed.group_of(self.process_group) is None:
            blocks = [block for block in blocks if block in ended or block.inverse is None or block.made_of != made_of(block)]
        T = self.schedule.T

        def make(block: Block) -> Any:
            return ended[block].result(self.estimator, T) if block in ended else self.estimator.invert(block, T)

        for block, inverse in sharing.inverses(blocks, self.process_group, make, owners):
            old, block.inverse = block.inverse, inverse
            block.made_of = made_of(ended[block].block if block in ended else block)
            self.estimator.adopt(block, old)
            del old, inverse  # before there is another

    def _fold(self, seen: Seen) -> None:
        """Fold what was gathered into the moving averages; a batch with NaN or inf is left out, with a warning."""
        due = [(block, key, gathered) for block, by_key in seen.items() for key, gathered in by_key.items() if gathered]
        if not due:
            return
        if message := differing_datapoints([(block, gathered.of_pass) for block, key, gathered in due if key == "Sigma"]):
            self.warn(message, once="datapoints")
        finite = torch.stack([gathered.sound().to(self.device) for _, _, gathered in due]).tolist()
        for (block, key, gathered), good in zip(due, finite, strict=True):
            if good:
                block.moments[key].update(gathered, self.ema)
            else:
                self.warn(f"{block.name}: NaN or inf in what {key} is made of (or its inputs were overwritten before step()); "
                          "this batch is left out of the statistics.")
            seen[block][key] = type(gathered)()

    def _warn_of_bypasses(self, bypasses: dict[Block, Bypass]) -> None:
        """Once: one step is enough to tell whether a gradient comes by other ways, too."""
        self._bypass = None
        found = [block.name for block, bypass in bypasses.items() if bypass.found]
        for bypass in bypasses.values():
            bypass.remove()
        if found:
            self.warn(f"{', '.join(found[:5])}: part of the gradient does not come through forward() (a penalty on the weight, or a use "
                      "of it elsewhere). After the first step that part is not preconditioned; exclude=[...] leaves a layer to the "
                      "fallback optimizer.")

    def warn(self, message: str, once: bool | str = False) -> None:
        """``once``: not if this has been said, or anything else of the kind it names. The warning points at the caller's line."""
        kind = once if isinstance(once, str) else message
        if not (once and kind in self._warned):
            notices.warn(message)
        self._warned.add(kind)

    # --- before training --------------------------------------------------------------------------------------------------

    def initialise(self, batches: Iterable[Any]) -> None:
        """Statistics from some batches before training (Appendix K: 50), then one inversion; the model stays as it is.

        A batch is the model's input (a tensor, a tuple of arguments' first entry, or a mapping of keyword arguments), or a pair
        (inputs, labels).
        """
        if isinstance(batches, (Tensor, Mapping)):
            raise TypeError("initialise takes an iterable of batches, and this is one batch: write initialise([batch]).")
        any_batch = False
        with buffers_kept(self.model), random_numbers_kept(self.device):
            for batch in batches:
                any_batch = True
                seen = self.estimator.see(self, self.model, batch)
                with torch.autocast(self.device.type, enabled=False):
                    self._fold(seen)
        self.synchronise()
        missing = [block.name for block in self.blocks if not block.known]
        if not any_batch and len(missing) == len(self.blocks):
            raise ValueError("initialise needs at least one batch of inputs, got none.")
        if missing:
            self.warn(f"initialise saw nothing of {', '.join(missing)}: these start from the first training batch.")
        self.refresh()
        self.schedule.warming_up = bool(missing)

    def second_moments(self) -> dict[str, dict[str, Tensor]]:
        """The moving averages by layer: ``{"fc": {"Sigma": (m, m)}}``, and with KFAC ``"Sigma_E": (n, n)``. Copies."""
        return {
            layer.name: {key: moment.value.clone() for key, moment in block.moments.items() if moment.value is not None}
            for block in self.blocks for layer in block.layers
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Statistics, inverses and schedule: what the optimizer's state dict has under ``"neurons"``."""
        return checkpoint.state_dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``; what is pending is dropped."""
        checkpoint.load_state_dict(self, state)

    # --- ties -------------------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Optimizer) -> None:
        """From now on the optimizer's steps, its ``zero_grad`` and its state dict drive this engine."""

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None:
                self.prepare()
                return None

            def prepared_closure() -> Any:
                loss = closure()
                self.prepare()
                return loss

            return args[:1], {"closure": prepared_closure}

        def drop_and_zero(zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
            self.drop()
            zero_grad(*args, **kwargs)

        self.handles += [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda *_: self.commit()),
            Replaced(optimizer, "zero_grad", drop_and_zero),
            Replaced(optimizer, "__reduce_ex__", refuse_copies),
            *checkpoint.attach(optimizer, self),
        ]

    def remove(self) -> None:
        """Take every hook off the model and the optimizer: gradients are plain again."""
        for handle in [*self.taps, *self.handles, *(self._bypass or {}).values(), self.step]:
            handle.remove()
        self.taps, self.handles, self._bypass = [], [], None


class Replaced:
    """A method of one optimizer, for which torch has no hook, replaced by ``new(old, *args)`` until removed."""

    def __init__(self, optimizer: Optimizer, name: str, new: Callable[..., Any]) -> None:
        self.optimizer, self.name, self.own = optimizer, name, vars(optimizer).get(name)
        old = getattr(optimizer, name)
        vars(optimizer)[name] = lambda *args, **kwargs: new(old, *args, **kwargs)

    def remove(self) -> None:
        del vars(self.optimizer)[self.name]  # that of its class is there again
        if self.own is not None:
            vars(self.optimizer)[self.name] = self.own


def refuse_copies(*_: Any) -> Any:
    raise TypeError(
        "an optimizer on neurons is tied to its model: copy or save the model, make a new optimizer for the copy, and give it this one's "
        "state with load_state_dict(state_dict())."
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel or torch.compile, whose names are those without the wrapper."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"an optimizer on neurons needs the layers, not only their parameters: pass the model, got {type(model).__name__}.")
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else _torch.inside_compiled(model)
        if inner is None:
            return model
        model = inner


def check_coverable(model: nn.Module, layers: list[Layer], rest: Mapping[str, str]) -> None:
    """Raise where there is nothing to train or nothing to cover, or where a layer has an optimizer already."""
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError("the model has no trainable parameters (an empty parameter list).")
    if not layers:
        kinds = "; ".join(f"{name}: {why}" for name, why in list(rest.items())[:5])
        raise ValueError(f"the model has no layer to cover (linear, convolution, embedding). Its parameters: {kinds}.")
    if any(existing_tap(layer.module) for layer in layers):
        gc.collect()  # a forgotten optimizer lets go of its model only now: it holds itself by its hooks
    for layer in layers:
        if existing_tap(layer.module) is not None:
            raise ValueError(f"{layer.label}: the model already has an optimizer on its neurons; call its remove() before making another.")


def check_unchanged(blocks: list[Block]) -> None:
    """Raise, before anything moves, where a weight has been replaced, or given a damping that cannot be meant, or where one of a weight
    and its bias, which are preconditioned together, has been frozen by itself."""
    for block in blocks:
        if block.layer.weight is not block.weight:
            raise RuntimeError(
                f"{block.name}: its weight is another one than when the optimizer was made (resize_token_embeddings(), weight_norm, "
                "load_state_dict(assign=True)?), which no step would train: call remove() and make a new optimizer."
            )
        block.damping  # noqa: B018  # or an error
        if len(block.parameters) > 1 and block.parameters[0].requires_grad != block.parameters[1].requires_grad:
            raise RuntimeError(
                f"{block.name}: of its weight and bias, which have one neuron gradient, one was frozen after the optimizer was made. "
                "Freeze both, or call remove() and make a new optimizer."
            )


def differing_datapoints(passes: list[tuple[Block, dict[int, int]]]) -> str | None:
    """A warning where layers count different datapoints on one pass: the first dimension of an input, of which Σ is the mean.

    One that is 1 stands for all datapoints, in Σ but not in Σ_E.
    """
    counts: dict[int, dict[int, str]] = {}
    for block, of_pass in passes:
        pass_id, n = list(of_pass.items())[-1]
        if pass_id >= 0 and (n > 1 or "Sigma_E" in block.moments):
            counts.setdefault(pass_id, {}).setdefault(n, block.name)
    for there in counts.values():
        if len(there) > 1:
            said = ", ".join(f"{n} in {name}" for n, name in sorted(there.items(), reverse=True)[:3])
            return (
                f"layers see different numbers of datapoints, the first dimension of their inputs: {said}. Σ is a mean over datapoints, "
                "so lr and damping mean something else for each: give all of them inputs (N, ..., features), or leave some out with "
                "exclude=[...]."
            )
    return None


def random_numbers_kept(device: torch.device) -> AbstractContextManager[None]:
    """After the context torch's generators, the CPU's and the device's, are where they were."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)
