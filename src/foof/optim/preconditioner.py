"""What an optimizer on neurons has besides an update rule: taps, statistics, factors, and the schedule that ties them together.

A ``Preconditioner`` is attached to a model (its gradients become neuron gradients) and to an optimizer (whose steps drive the
schedule and whose state dict carries the statistics). ``FOOF`` and ``KFAC`` own one; ``precondition`` gives one to any optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof.covering import covered_layers
from foof.kronecker import InputInverse
from foof.layers import Embedding, Layer
from foof.optim.attach import attach
from foof.optim.block import (
    Block,
    Bypass,
    Damping,
    bypassed,
    check_architecture,
    check_free,
    check_frozen,
    differing_datapoints,
    gather_inputs,
    has_gradient,
    inputs_of,
    inversion_cost,
    moved,
    precondition_gradient,
    random_numbers_kept,
    thrown_away,
    unwrapped,
    value_or_zeros,
    without_statistics,
)
from foof.passes import buffers_kept, call_model
from foof.statistics import Gathered, MovingAverage, Schedule, exact, wide
from foof.tap import Tap, backward_pass_id, inputs_seen

__all__ = ["Block", "Damping", "Preconditioner", "gather_inputs", "inputs_of"]


class Preconditioner:
    """FOOF's statistics and factors for all covered layers of a model; ``KFAC`` adds the second factor."""

    method = "foof"
    moment_names: tuple[str, ...] = ("Sigma",)
    deferred = False  # are gradients left as they are in the backward pass and preconditioned all at once when the step is taken?

    def __init__(self, model: nn.Module, damping: Callable[[Block], Damping], ema: float, T: int, S: int | None,
                 exclude: Iterable[str] = (), process_group: Any = None, owned: Container[int] | None = None) -> None:  # fmt: skip
        if not 0 <= ema < 1:
            raise ValueError(f"ema is the decay m of the moving averages: it must be in [0, 1), got {ema}.")
        self.schedule = Schedule(T, min(T, 10) if S is None else S)
        model = unwrapped(model)
        layers, self.rest = covered_layers(model, tuple(exclude), owned)
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("the model has no trainable parameters (an empty parameter list).")
        if not layers:
            kinds = "; ".join(f"{name}: {why}" for name, why in list(self.rest.items())[:5])
            raise ValueError(f"the model has no layer to cover (linear, convolution, embedding). Its parameters: {kinds}.")
        check_free(layers)
        self.model, self.ema, self._damping, self.process_group = model, ema, damping, process_group
        self.blocks = self._group(layers)
        self._block_of = {id(layer): block for block in self.blocks for layer in block.layers}
        self.taps = [Tap(layer, self) for layer in layers]
        self._handles: list[Any] = []
        self._sharded = any(distributed.is_sharded(block.layer.weight) for block in self.blocks)
        self._latest_pass: int | None = None
        self._warned: set[str] = set()

    @property
    def device(self) -> torch.device:
        return self.blocks[0].layer.weight.device

    # --- set up ---------------------------------------------------------------------------------------------------------

    def _group(self, layers: list[Layer]) -> list[Block]:
        """One block per weight and orientation: layers that tie their weight share statistics and factor."""
        blocks: dict[tuple[int, bool], Block] = {}
        for layer in layers:
            key = (id(layer.weight), isinstance(layer, Embedding))
            if key in blocks:
                blocks[key].layers.append(layer)
            else:
                names = self.moment_names
                blocks[key] = Block([layer], {k: MovingAverage() for k in names}, {k: Gathered() for k in names})
        for weight, is_embedding in blocks:
            blocks[weight, is_embedding].shares_weight = (weight, not is_embedding) in blocks
        return list(blocks.values())

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """See ``foof.optim.attach``."""
        self._handles += attach(optimizer, self)

    def remove(self) -> None:
        """Take every hook off the model and the optimizer: gradients are plain again."""
        for handle in [*self.taps, *self._handles]:
            handle.remove()
        self.taps, self._handles = [], []
        bypassed(self.blocks)

    # --- the backward pass ----------------------------------------------------------------------------------------------

    def receive(self, layer: Layer, x: Tensor, e: Tensor) -> Tensor | None:
        """The neuron gradient of one call of one layer; see ``foof.tap.Receiver``."""
        self.enter_pass(backward_pass_id())
        block = self._block_of[id(layer)]
        self._follow(block)
        block.reached, block.rows = True, layer.rows(e)
        self.observe(block, layer, x, e)
        if block.factor is None and block.shares_weight:
            self.start([block])  # the sum of two differently preconditioned gradients cannot be told apart later
        if self.waits(block):
            gradient = layer.weight_gradient(x if layer.diagonal else x.to(e.dtype), e)
        else:
            gradient = block.factor.gradient(layer, x, e)
        if not (self.deferred or self._sharded or block.shares_weight):
            block.bypass = block.bypass or Bypass(layer.weight)
            block.bypass.add(layer, gradient, backward_pass_id())
        return gradient

    def _follow(self, block: Block) -> None:
        """Statistics and factor go where their weight has gone: ``model.double()``, ``model.to("cuda")``."""
        here = block.layer.weight.device, wide(block.layer.weight.dtype)
        if sum(moment.moved(*here) for moment in block.moments.values()) and block.factor is not None:
            block.factor = self.factor_from_state_dict(moved(block.factor.state_dict(), *here))

    def enter_pass(self, pass_id: int) -> None:
        """When a training pass begins: if the gradients of earlier ones are gone (``model.zero_grad()``), so is what they gathered."""
        if pass_id != self._latest_pass and not self._sharded and thrown_away(self.blocks):  # FSDP keeps gradients elsewhere meanwhile
            self.discard()
        self._latest_pass = pass_id

    def observe(self, block: Block, layer: Layer, x: Tensor, e: Tensor) -> None:
        """Gather what the statistics need from a training backward pass; a layer reached for the first time starts at once."""
        if self.schedule.gathers() or block.factor is None:
            gather_inputs(block.gathered["Sigma"], layer, x, backward_pass_id())

    def waits(self, block: Block) -> bool:
        """Is this block's gradient preconditioned in ``before_update``: on the very first step, once all of its batch is seen?"""
        return block.factor is None or (self.deferred and not block.shares_weight)

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Outputs (and labels) that estimate the Fisher. FOOF has no use for them."""

    # --- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    @exact
    def before_update(self) -> None:
        """Make ``.grad`` of every covered weight the neuron gradient, where it is not yet; complain of what never arrived."""
        alone = distributed.group_of(self.process_group) is None
        self._check_gradients(alone)
        if not any(block.reached for block in self.blocks):
            return
        # Which weights have a gradient is the same on all ranks; which layers this rank's batch has reached need not be.
        waiting = [block for block in self.blocks if self.waits(block) and (block.reached if alone else has_gradient(block))]
        self.start(waiting)
        for block in waiting:
            if block.factor is not None:
                precondition_gradient(block)
        if names := bypassed(self.blocks):
            self._warn(f"{', '.join(names[:5])}: part of the gradient does not come through forward() (a penalty on the weight, or a use "
                       "of it elsewhere). After the first step that part is not preconditioned; exclude=[...] leaves a layer to the rest.")

    def start(self, blocks: list[Block]) -> None:
        """Factors for those of these blocks that have none yet, from what has been gathered."""
        new = [block for block in blocks if block.factor is None]
        if not new:
            return
        self._fold(new)
        self.synchronise(new)
        for block in new:
            self._check_block(block)
        self._make_factors([block for block in new if block.reached])

    @torch.no_grad()
    def after_update(self) -> None:
        """Algorithm 1 after the update: invert if due, fold in this step's batch if due, and count the step.

        A step without a backward pass through any layer (``torch.distributed.checkpoint`` takes one to have the optimizer make
        its state) does not count.
        """
        if not any(block.reached for block in self.blocks):
            return
        if self.schedule.inverts():
            self.refresh()
        self._fold(self.blocks)
        for block in self.blocks:
            block.reached = False
        self.schedule.advance()

    def discard(self) -> None:
        """Forget what has been gathered since the last step (its gradients are being thrown away)."""
        self.clear()

    def clear(self) -> None:
        for block in self.blocks:
            block.reached = False
            for seen in block.gathered.values():
                seen.clear()

    def refresh(self) -> None:
        """Invert every block whose statistics or damping have changed."""
        self.synchronise()
        self._make_factors([block for block in self.blocks if all(moment.value is not None for moment in block.moments.values())])

    @torch.no_grad()
    def synchronise(self, blocks: list[Block] | None = None) -> None:
        """Average the statistics over the process group, ``Σ_r mass_r value_r / Σ_r mass_r``, by one all-reduce. Alone: nothing.

        Every rank goes on with the same averages and an equal share of the mass, so their weighted mean stays what it was: this
        may be called at any time, by all ranks. Without it, a checkpoint holds what its own rank has seen since the last refresh.
        """
        group, blocks = distributed.group_of(self.process_group), self.blocks if blocks is None else blocks
        if group is None or not blocks:
            return
        keyed = [(block, key) for block in blocks for key in block.moments]
        masses = [block.moments[key].mass for block, key in keyed]
        counts = [float(count) for block in blocks for count in (block.reached, block.rows)]
        values = [value_or_zeros(block, key) for block, key in keyed]
        means, masses, counts = distributed.weighted_mean(values, masses, counts, group)
        ranks = distributed.size(group)
        for (block, key), mean, mass in zip(keyed, means, masses, strict=True):
            block.moments[key].value, block.moments[key].mass = (mean if mass else None), mass / ranks
        for block, reached, rows in zip(blocks, counts[::2], counts[1::2], strict=True):
            block.reached, block.rows = reached > 0, round(rows / ranks)

    @exact
    def _make_factors(self, blocks: list[Block]) -> None:
        """Factors from the averages as they are; in a process group each rank makes its share and all get the same bits."""
        group = distributed.group_of(self.process_group)
        if group is None or not blocks:
            for block in blocks:
                self._make_factor(block)
            return
        owners = distributed.share_out([inversion_cost(block) for block in blocks], distributed.size(group))
        mine, failure = dict[int, Any](), None
        try:
            mine = {
                job: self.factor(block, self._damping(block))
                for job, block in enumerate(blocks)
                if owners[job] == distributed.rank(group)
            }
        except Exception as error:  # the others must hear of it before it is raised
            failure = error
        states = {job: factor.state_dict() for job, factor in mine.items()}
        made = distributed.exchange(states, owners, failure, self.device, group)
        for job, block in enumerate(blocks):
            block.factor = self.factor_from_state_dict(moved(made[job], self.device, wide(block.layer.weight.dtype)))
            block.made_of = ()

    def _make_factor(self, block: Block) -> None:
        damping = self._damping(block)
        made_of = (damping, *(moment.updates for moment in block.moments.values()))
        if block.factor is None or made_of != block.made_of:
            block.factor, block.made_of = self.factor(block, damping), made_of

    def factor(self, block: Block, damping: Damping) -> Any:
        """The factor of one block from its moving averages."""
        Sigma = block.moments["Sigma"].value
        assert Sigma is not None
        uses = self.schedule.T * min(block.rows or block.layer.n, block.layer.n)
        return InputInverse.make(Sigma, damping.strength(block.layer, Sigma), block.name, uses)

    @exact
    def _fold(self, blocks: list[Block]) -> None:
        """Fold what was gathered into the moving averages; a batch with NaN or inf is left out, with a warning."""
        due = [(block, key) for block in blocks for key, seen in block.gathered.items() if seen]
        if not due:
            return
        if message := differing_datapoints([block for block, key in due if key == "Sigma"]):
            self._warn(message, once="datapoints")
        finite = torch.stack([block.gathered[key].sound().to(self.device) for block, key in due]).tolist()
        for (block, key), good in zip(due, finite, strict=True):
            if good:
                block.moments[key].update(block.gathered[key], self.ema)
            else:
                self._warn(f"{block.name}: NaN or inf in what {key} is made of (or its inputs were overwritten before step()); "
                           "this batch is left out of the statistics.")
            block.gathered[key].clear()

    def _check_gradients(self, alone: bool) -> None:
        check_frozen(self.blocks)
        if not any(has_gradient(block) for block in self.blocks):
            raise RuntimeError(
                "no gradient has reached any covered layer: call loss.backward() on a loss computed by this model before step()."
            )
        for block in self.blocks:
            if not has_gradient(block):
                if block.layer.weight.requires_grad:
                    self._warn(f"{block.name}: the loss does not reach this layer; it is not updated.", once=True)
            elif alone:  # otherwise once all ranks know what the others have seen
                self._check_block(block)

    def _check_block(self, block: Block) -> None:
        if block.factor is not None:
            return
        if block.reached:
            if any(block.moments[k].value is None and not seen for k, seen in block.gathered.items()):
                raise ValueError(self.explain_unseen(block))
        elif bool(distributed.local(block.layer.weight.grad).any()):  # type: ignore[arg-type]
            raise RuntimeError(
                f"{block.name}: its gradient did not come through its forward(). If the weight is used functionally, pass "
                f"exclude=[{block.layer.name!r}] to leave it to the rest; if the model was compiled and run before the optimizer was "
                "made, call torch._dynamo.reset()."
            )

    def explain_unseen(self, block: Block) -> str:
        """Why a block that has a gradient has no statistics."""
        return f"{block.name}: the first batch is empty, or not finite; statistics need at least one datapoint."

    def _warn(self, message: str, once: bool | str = False) -> None:
        """``once``: not if this has been said, or anything else of the kind it names."""
        kind = once if isinstance(once, str) else message
        if not (once and kind in self._warned):
            warnings.warn(message, stacklevel=3)
        self._warned.add(kind)

    # --- initialisation before training -----------------------------------------------------------------------------------

    def initialise(self, batches: Iterable[Any]) -> None:
        """Statistics from some batches before training (Appendix K: 50), then one inversion; the model stays as it is.

        A batch is the model's input (a tensor, a tuple of arguments' first entry, or a mapping of keyword arguments), or a pair
        (inputs, labels).
        """
        number = -1
        with buffers_kept(self.model), random_numbers_kept(self.device):
            for number, batch in enumerate(batches):
                self.observe_batch(batch, -1 - number)
                self._fold(self.blocks)
        self.synchronise()
        missing = [block.name for block in self.blocks if any(moment.value is None for moment in block.moments.values())]
        if number < 0 and len(missing) == len(self.blocks):
            raise ValueError("initialise needs at least one batch of inputs, got none.")
        if missing:
            self._warn(f"initialise saw nothing of {', '.join(missing)}: these start from the first training batch.")
        self.refresh()
        self.schedule.warming_up = bool(missing)

    def observe_batch(self, batch: Any, pass_id: int) -> None:
        """Gather the statistics of one batch outside training; for FOOF a forward pass without gradients."""
        with torch.no_grad(), inputs_seen(
            [layer for block in self.blocks for layer in block.layers],
            lambda layer, x: gather_inputs(self._block_of[id(layer)].gathered["Sigma"], layer, x, pass_id),
        ):
            call_model(self.model, inputs_of(batch))

    # --- checkpoints --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on bit for bit: plain containers and tensors only, of the same layout before the first step."""
        return {
            "method": self.method,
            "t": self.schedule.t,
            "warming_up": self.schedule.warming_up,
            "blocks": {
                block.layer.name: {
                    "shape": [block.layer.groups, block.layer.n, block.layer.m],
                    "moments": {
                        key: moment.state_dict() | {"value": value_or_zeros(block, key).clone()}
                        for key, moment in block.moments.items()
                    },
                    "factor": self._factor_or_blank(block).state_dict() if block.moments else None,
                    "has_factor": block.factor is not None,
                    "rows": block.rows,
                }
                for block in self.blocks
            },
        }

    def _factor_or_blank(self, block: Block) -> Any:
        return block.factor if block.factor is not None else self.factor(without_statistics(block), self._damping(block))

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if this state is of another method or architecture, before anything is changed."""
        if state.get("method") != self.method:
            raise ValueError(f"this checkpoint is of method {state.get('method')!r}; this optimizer is {self.method!r}.")
        check_architecture({name: list(block["shape"]) for name, block in state["blocks"].items()}, self.blocks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        self.schedule.t, self.schedule.warming_up = int(state["t"]), bool(state["warming_up"])
        for block in self.blocks:
            saved, here = state["blocks"][block.layer.name], (block.layer.weight.device, wide(block.layer.weight.dtype))
            for key, moment in block.moments.items():
                moment.load_state_dict(saved["moments"][key], *here)
            block.factor = self.factor_from_state_dict(moved(saved["factor"], *here)) if saved["has_factor"] else None
            block.rows, block.made_of = int(saved["rows"]), ()
        self.clear()

    def factor_from_state_dict(self, state: dict[str, Any]) -> Any:
        return InputInverse.from_state_dict(state)
