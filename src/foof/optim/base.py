"""What the optimizers on neurons share: parameter groups, momentum, decoupled decay, and a fallback optimizer for what is not covered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from foof import notices
from foof.explain import Explanation, explain
from foof.optim.checks import (
    Fallback,
    check_distinct,
    check_group,
    check_learning_rates,
    check_one_damping,
    check_options,
    covered_groups,
    fallback_groups,
    fallback_named,
    make_fallback,
)
from foof.optim.engine import Engine, refuse_copies
from foof.optim.rules import descend

MOVED = {  # public once, and where it is now
    "updates": "what other updates would have been is the study's business: foof.study.train.updates.updates(opt, ...)",
}


class NeuronOptimizer(Optimizer):
    """Gradient descent with momentum and decoupled weight decay on covered layers; what is not covered by a fallback optimizer.

    ``param_groups`` holds the covered groups (``kind = "neurons"``) followed by those of the fallback (``kind = "rest"``), so that
    schedulers see them all. A method is an engine with its estimator, and a rule: ``_update``.
    """

    group_options: tuple[str, ...] = ()  # what a group may set; empty: all that the optimizer has

    def __init__(self, engine: Engine, defaults: dict[str, Any], groups: Sequence[Mapping[str, Any]], rest: Fallback,
                 maximize: bool) -> None:  # fmt: skip
        self.preconditioner = engine
        try:
            check_options(defaults)
            if not callable(rest):
                fallback_named(rest)  # or an error, also where everything is covered
            own_groups = [check_group(group, engine.model, self.group_options or defaults) for group in groups]
            check_distinct(own_groups)
            covered = list(dict.fromkeys(p for block in engine.blocks for layer in block.layers for p in layer.parameters))
            uncovered = [p for name, p in engine.model.named_parameters() if name in engine.rest]
            super().__init__(covered_groups(covered, own_groups, defaults), {**defaults, "kind": "neurons"})
            self.maximize = maximize
            self._fallback = None
            if uncovered:
                self._fallback = make_fallback(rest, fallback_groups(uncovered, own_groups), defaults["weight_decay"], maximize)
                for group in self._fallback.param_groups:
                    group["kind"] = "rest"
                    self.param_groups.append(group)
            self._frozen = {name: p for name, p in engine.model.named_parameters() if not p.requires_grad}
            self._tie_groups()
            self._ratio = self.param_groups[-1]["lr"] / self.param_groups[0]["lr"] if self.param_groups[0]["lr"] else 1.0
        except BaseException:
            engine.remove()
            raise
        self._attached = True
        self.register_step_pre_hook(lambda *_: self._tie_new_groups())
        engine.attach(self)
        self.register_load_state_dict_post_hook(lambda _: self._tie_groups())

    def _tie_groups(self) -> None:
        """Every block reads its damping in the group its weight is in."""
        for group in self.param_groups:
            if group.get("kind") == "neurons":  # of a checkpoint that did not know some of the options: as this optimizer was made
                for name, value in self.defaults.items():
                    group.setdefault(name, None if name == "max_change" else False if name == "paced" else value)
        self._tied = [id(group) for group in self.param_groups]
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        for block in self.preconditioner.blocks:
            check_one_damping(block, [group_of[id(p)] for p in block.layer.parameters])
            block.options = group_of[id(block.weight)]

    def _tie_new_groups(self) -> None:
        """Where somebody has put other groups in place of ours."""
        if self._tied != [id(group) for group in self.param_groups]:
            self._tie_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update. The step's hooks make the gradients neuron gradients before it and drive the schedule after it."""
        if not self.preconditioner.taps:
            raise RuntimeError("this optimizer was taken off its model by remove(): its gradients are plain now. Make a new one to go on.")
        if self._fallback is not None:
            check_learning_rates(self.param_groups, self._ratio)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._frozen:
            self._warn_of_thawed()
        for group in self.param_groups:
            if group["kind"] == "neurons":
                self._update(group)
        if self._fallback is not None:
            self._fallback.param_groups = [group for group in self.param_groups if group["kind"] == "rest"]
            self._fallback.state = self.state
            self._fallback.step()
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        """The rule: what is done with the neuron gradients of one group."""
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        buffers = [self._momentum(p) for p in params] if group["momentum"] else []
        sign = -1.0 if self.maximize else 1.0
        lr, decay = sign * group["lr"], sign * group["weight_decay"]  # decay shrinks the weights either way
        descend(params, [p.grad for p in params], buffers, lr, group["momentum"], decay)

    def _momentum(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        return state["momentum_buffer"]

    def _warn_of_thawed(self) -> None:
        """Once: parameters that were frozen when this was made are in no group."""
        thawed = [name for name, p in self._frozen.items() if p.grad is not None]
        if thawed:
            self._frozen = {}
            notices.warn(
                f"{', '.join(thawed[:5])}: frozen when the optimizer was made, with a gradient now; not updated. Call remove() and "
                "make a new optimizer to have them trained."
            )

    # --- for people -------------------------------------------------------------------------------------------------------

    def initialise(self, batches: Iterable[Any]) -> None:
        """Statistics from batches before training (Appendix K uses 50): inputs, or pairs (inputs, labels). Then one inversion."""
        self.preconditioner.initialise(batches)

    def update_curvature(self, out: Tensor, y: Tensor | None = None) -> None:
        """Call between the forward pass and ``backward()`` with the model's outputs. FOOF needs nothing: a no-op."""
        self.preconditioner.update_curvature(out, y)

    def second_moments(self) -> dict[str, dict[str, Tensor]]:
        """The moving averages by layer: ``{"fc": {"Sigma": (m, m)}}``, and with KFAC ``"Sigma_E": (n, n)``. Copies."""
        return self.preconditioner.second_moments()

    def mask(self, rows: Tensor) -> AbstractContextManager[None]:
        """Forward passes within the context have rows that count and rows that do not: padding stays out of the statistics.

        rows: ``(N, R)``, true (or 1) where a token is one; an attention mask, or ``labels != -100``. Layers whose inputs are
        not over these rows are not affected.

        >>> with opt.mask(batch["attention_mask"]):
        ...     loss = model(**batch).loss
        >>> loss.backward(); opt.step()
        """
        return self.preconditioner.masking(rows)

    def explain(self, inputs: Any = None) -> Explanation:
        """Which parameters this optimizer covers, which it leaves to its fallback and why, in which group each is, and what it costs; and,
        where steps are bounded, how far the latest one moved the outputs of each layer."""
        engine = self.preconditioner
        T, S = engine.schedule.T, engine.schedule.S
        (changes, note), groups = self._latest_changes(), self.param_groups
        names = {"foof": "FOOF", "kfac (KroneckerInverse)": "KFAC", "kfac (EigenInverse)": "KFAC with standard damping"}
        method = names.get(engine.estimator.name, type(self).__name__)
        return explain(engine.model, inputs, T, S, exclude=engine.exclude, groups=groups, left=engine.rest, changes=changes, note=note,
                       method=method)  # fmt: skip

    def _latest_changes(self) -> tuple[dict[str, str], str]:
        """What `explain` says of the latest step: by weight, and in one sentence."""
        return {}, ""

    def remove(self) -> None:
        """Take the hooks off the model: its gradients are plain again and another optimizer may be attached. This one is done."""
        self.preconditioner.remove()

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's, with the statistics under ``"neurons"``."""
        if not self.preconditioner.taps:
            raise RuntimeError("this optimizer was taken off its model by remove(), and its statistics with it: save its state before.")
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        refuse_copies()
        raise AssertionError

    def __getattr__(self, name: str) -> Any:
        if name in MOVED:
            raise AttributeError(f"{type(self).__name__} has no {name!r}: {MOVED[name]}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_attached", False):
            raise ValueError("parameters cannot join later: call remove() and make a new optimizer for the changed model.")
        super().add_param_group(param_group)


