"""What an optimizer on neurons has besides an update rule: taps, statistics, factors, and the schedule that ties them together.

A ``Preconditioner`` is attached to a model (its gradients become neuron gradients) and to an optimizer (whose steps drive the
schedule and whose state dict carries the statistics). ``FOOF`` and ``KFAC`` own one; ``precondition`` gives one to any optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foof.curvature import InputFactor
from foof.layers import Embedding, Layer, covered_layers
from foof.statistics import Gathered, MovingAverage, Schedule
from foof.tap import Tap, backward_pass_id, call_model, existing_tap, inputs_seen

PAPER_BATCH = 100  # the batch for which Appendix K reads the damping as the precision of the initialisation


@dataclass(frozen=True)
class Damping:
    """How strong λ is: a number, a fraction of the mean eigenvalue of Σ (``relative``), or ``"auto"``.

    "auto" is Appendix K's Bayesian reading: the precision of the usual weight initialisation (fan_in / 2) for a batch of 100, in
    the library's scale ``fan_in / 200``; nothing but the learning rate is left to tune.
    """

    value: float | str
    relative: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.value, str) and self.value != "auto":
            raise ValueError(f'damping must be a positive number or "auto", got {self.value!r}.')
        if not isinstance(self.value, str) and not 0 < self.value < float("inf"):
            raise ValueError(f"damping λ must be a positive, finite number, got {self.value}; Σ alone is singular for small batches.")
        if self.value == "auto" and self.relative:
            raise ValueError('damping="auto" is absolute: give relative=True a number.')

    def strength(self, layer: Layer, Sigma: Tensor) -> float | Tensor:
        """λ for this layer: a number, or one per group."""
        if isinstance(self.value, str):
            return layer.prior_precision / PAPER_BATCH
        if not self.relative:
            return float(self.value)
        eigenvalues = Sigma if layer.diagonal else Sigma.diagonal(dim1=-2, dim2=-1)
        tiny = torch.finfo(Sigma.dtype).tiny
        return self.value * eigenvalues.mean(-1).clamp_min(tiny)


@dataclass(eq=False)
class Block:
    """One weight matrix (with its bias): every layer that uses it, its statistics, its factor."""

    layers: list[Layer]
    moments: dict[str, MovingAverage]
    gathered: dict[str, Gathered]
    factor: Any = None
    reached: bool = False  # has a gradient come through a tap since the last step?
    rows: int = 0  # rows of the latest backward pass
    made_of: tuple[Any, ...] = ()  # what the factor was made of
    shares_weight: bool = False  # with a block of another orientation (tied embedding and head)

    @property
    def layer(self) -> Layer:
        return self.layers[0]

    @property
    def name(self) -> str:
        return " = ".join(layer.label for layer in self.layers)


class Preconditioner:
    """FOOF's statistics and factors for all covered layers of a model; ``KFAC`` adds the second factor."""

    method = "foof"
    moment_names: tuple[str, ...] = ("Sigma",)
    deferred = False  # are gradients left as they are in the backward pass and preconditioned all at once when the step is taken?

    def __init__(self, model: nn.Module, damping: Callable[[Block], Damping], ema: float, T: int, S: int | None,
                 exclude: Iterable[str] = ()) -> None:  # fmt: skip
        if not 0 <= ema < 1:
            raise ValueError(f"ema is the decay m of the moving averages: it must be in [0, 1), got {ema}.")
        self.schedule = Schedule(T, min(T, 10) if S is None else S)
        layers, self.rest = covered_layers(model, tuple(exclude))
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError("the model has no trainable parameters (an empty parameter list).")
        if not layers:
            kinds = "; ".join(f"{name}: {why}" for name, why in list(self.rest.items())[:5])
            raise ValueError(f"the model has no layer to cover (linear, convolution, embedding). Its parameters: {kinds}.")
        for layer in layers:
            if existing_tap(layer.module) is not None:
                raise ValueError(
                    f"{layer.label}: the model already has an optimizer on its neurons; call its remove() before attaching another."
                )
        self.model, self.ema, self._damping = model, ema, damping
        self.blocks = self._group(layers)
        self._block_of = {id(layer): block for block in self.blocks for layer in block.layers}
        self.taps = [Tap(layer, self) for layer in layers]
        self._handles: list[Any] = []
        self._warned: set[str] = set()

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
        """Let an optimizer's steps drive the schedule, and its state dict carry the statistics."""
        staged: list[dict[str, Any]] = []

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
            if closure is None:
                self.before_update()
                return None

            def prepared_closure() -> Any:
                loss = closure()
                self.before_update()
                return loss

            return args[:1], {"closure": prepared_closure}

        def save(_: Any, state: dict[str, Any]) -> None:
            state["neurons"] = self.state_dict()

        def check(_: Any, state: dict[str, Any]) -> dict[str, Any]:
            if "neurons" not in state:
                raise ValueError("this state dict was not saved from an optimizer on neurons: it has no statistics ('neurons').")
            self.check_state_dict(state["neurons"])
            staged[:] = [state["neurons"]]
            return {k: v for k, v in state.items() if k != "neurons"}

        self._handles += [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(lambda *_: self.after_update()),
            optimizer.register_state_dict_post_hook(save),
            optimizer.register_load_state_dict_pre_hook(check),
            optimizer.register_load_state_dict_post_hook(lambda _: self.load_state_dict(staged.pop())),
        ]

    def remove(self) -> None:
        """Take every hook off the model and the optimizer: gradients are plain again."""
        for handle in [*self.taps, *self._handles]:
            handle.remove()
        self.taps, self._handles = [], []

    # --- the backward pass ----------------------------------------------------------------------------------------------

    def receive(self, layer: Layer, x: Tensor, e: Tensor) -> Tensor | None:
        """The neuron gradient of one call of one layer; see ``foof.tap.Receiver``."""
        block = self._block_of[id(layer)]
        block.reached, block.rows = True, layer.rows(e)
        self.observe(block, layer, x, e)
        if block.factor is None and block.shares_weight:
            self._start(block)  # the sum of two differently preconditioned gradients cannot be told apart later
        if self.waits(block):
            return layer.weight_gradient(x if layer.diagonal else x.to(e.dtype), e)
        return block.factor.gradient(layer, x, e)  # type: ignore[no-any-return]

    def observe(self, block: Block, layer: Layer, x: Tensor, e: Tensor) -> None:
        """Gather what the statistics need from a training backward pass."""
        if self.schedule.gathers():
            gather_inputs(block.gathered["Sigma"], layer, x, backward_pass_id())

    def waits(self, block: Block) -> bool:
        """Is this block's gradient preconditioned in ``before_update``: on the very first step, once all of its batch is seen?"""
        return block.factor is None or (self.deferred and not block.shares_weight)

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Outputs (and labels) that estimate the Fisher. FOOF has no use for them."""

    def _start(self, block: Block) -> None:
        if any(block.gathered.values()):
            self._fold([block])
        self._make_factor(block)

    # --- the step -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self) -> None:
        """Make ``.grad`` of every covered weight the neuron gradient, where it is not yet; complain of what never arrived."""
        self._check_gradients()
        waiting = [block for block in self.blocks if block.reached and self.waits(block)]
        self.start(waiting)
        for block in waiting:
            layer = block.layer
            assert layer.weight.grad is not None
            matrix = block.factor.apply(layer.join(layer.weight.grad, layer.bias.grad if layer.bias is not None else None))
            for p, gradient in zip(layer.parameters, layer.split(matrix), strict=False):
                assert p.grad is not None and gradient is not None
                p.grad.copy_(gradient)

    def start(self, blocks: list[Block]) -> None:
        """Factors for those of these blocks that have none yet, from what has been gathered."""
        new = [block for block in blocks if block.factor is None]
        if new:
            self._fold(new)
            self.synchronise()
            for block in new:
                self._make_factor(block)

    @torch.no_grad()
    def after_update(self) -> None:
        """Algorithm 1 after the update: invert if due, fold in this step's batch if due, and count the step."""
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
        for block in self.blocks:
            if all(moment.value is not None for moment in block.moments.values()):
                self._make_factor(block)

    def synchronise(self) -> None:
        """Average the statistics over the workers of a process group."""

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
        return InputFactor.make(Sigma, damping.strength(block.layer, Sigma), block.name, uses)

    def _fold(self, blocks: list[Block]) -> None:
        """Fold what was gathered into the moving averages; a batch with NaN or inf is left out, with a warning."""
        due = [(block, key) for block in blocks for key, seen in block.gathered.items() if seen]
        if not due:
            return
        finite = torch.stack([block.gathered[key].sound().cpu() for block, key in due]).tolist()
        for (block, key), good in zip(due, finite, strict=True):
            if good:
                block.moments[key].update(block.gathered[key], self.ema)
            else:
                self._warn(f"{block.name}: NaN or inf in what {key} is made of (or its inputs were overwritten before step()); "
                           "this batch is left out of the statistics.")
            block.gathered[key].clear()

    def _check_gradients(self) -> None:
        with_gradient = [block for block in self.blocks if block.layer.weight.grad is not None]
        if not with_gradient:
            raise RuntimeError(
                "no gradient has reached any covered layer: call loss.backward() on a loss computed by this model before step()."
            )
        for block in self.blocks:
            if block.reached:
                if block.factor is None and any(block.moments[k].value is None and not seen for k, seen in block.gathered.items()):
                    raise ValueError(self.explain_unseen(block))
            elif block.layer.weight.grad is None:
                self._warn(f"{block.name}: the loss does not reach this layer; it is not updated.", once=True)
            elif block.factor is None and bool(block.layer.weight.grad.any()):
                raise RuntimeError(
                    f"{block.name}: its gradient did not come through its forward() (the weight is used functionally?). "
                    f"Pass exclude=[{block.layer.name!r}] to leave it to the rest."
                )

    def explain_unseen(self, block: Block) -> str:
        """Why a block that has a gradient has no statistics."""
        return f"{block.name}: the first batch is empty; statistics need at least one datapoint."

    def _warn(self, message: str, once: bool = False) -> None:
        if not (once and message in self._warned):
            warnings.warn(message, stacklevel=3)
        self._warned.add(message)

    # --- initialisation before training -----------------------------------------------------------------------------------

    def initialise(self, batches: Iterable[Any]) -> None:
        """Statistics from some batches before training (Appendix K: 50), then one inversion. Parameters and buffers stay as they are.

        A batch is the model's input (a tensor, a tuple of arguments' first entry, or a mapping of keyword arguments), or a pair
        (inputs, labels).
        """
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        seen_any = False
        device = self.blocks[0].layer.weight.device
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_accelerator(device)):
            for number, batch in enumerate(batches):
                seen_any = True
                self.observe_batch(batch, -1 - number)
                self._fold(self.blocks)
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(buffers[name])
        if not seen_any:
            raise ValueError("initialise needs at least one batch of inputs, got none.")
        missing = [block.name for block in self.blocks if any(moment.value is None for moment in block.moments.values())]
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
        """Everything needed to go on bit for bit: plain containers and tensors only."""
        return {
            "method": self.method,
            "t": self.schedule.t,
            "warming_up": self.schedule.warming_up,
            "blocks": {
                block.layer.name: {
                    "shape": [block.layer.groups, block.layer.n, block.layer.m],
                    "moments": {key: moment.state_dict() for key, moment in block.moments.items()},
                    "factor": None if block.factor is None else block.factor.state_dict(),
                    "rows": block.rows,
                }
                for block in self.blocks
            },
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise if this state is of another method or architecture, before anything is changed."""
        if state.get("method") != self.method:
            raise ValueError(f"this checkpoint is of method {state.get('method')!r}; this optimizer is {self.method!r}.")
        saved = {name: list(block["shape"]) for name, block in state["blocks"].items()}
        ours = {block.layer.name: [block.layer.groups, block.layer.n, block.layer.m] for block in self.blocks}
        if saved != ours:
            differing = sorted({name for name in saved.keys() | ours.keys() if saved.get(name) != ours.get(name)})
            lines = "; ".join(f"{name or 'model'}: saved {saved.get(name)}, model {ours.get(name)}" for name in differing[:5])
            raise ValueError(f"this checkpoint is of another architecture ({lines} as [groups, outputs, inputs]).")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state_dict(state)
        self.schedule.t, self.schedule.warming_up = int(state["t"]), bool(state["warming_up"])
        for block in self.blocks:
            saved, device = state["blocks"][block.layer.name], block.layer.weight.device
            for key, moment in block.moments.items():
                moment.load_state_dict(saved["moments"][key], device)
            block.factor = None if saved["factor"] is None else self.factor_from_state_dict(saved["factor"], device)
            block.rows, block.made_of = int(saved["rows"]), ()
        self.clear()

    def factor_from_state_dict(self, state: dict[str, Any], device: torch.device) -> Any:
        return InputFactor.from_state_dict(state, device)


def gather_inputs(gathered: Gathered, layer: Layer, x: Tensor, pass_id: int) -> None:
    """Add a layer's inputs of one call to what the step has seen of ``Σ = 1/N Σ_i Σ_r a_ir a_irᵀ``."""
    x = x.detach()
    if isinstance(layer, Embedding):
        gathered.add_moment(layer.counts(x), len(x) if x.dim() else 1, pass_id)
        return
    a = layer.input_rows(x)
    gathered.add_rows(a.flatten(-3, -2), a.shape[-3], pass_id)


def _accelerator(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # fork_rng always keeps the CPU's state


def inputs_of(batch: Any) -> Any:
    """The inputs of a batch that is either inputs or a pair (inputs, labels)."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch
