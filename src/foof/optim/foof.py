"""FOOF, Algorithm 1 of the paper: gradient descent on neurons; and steps that are measured by how far they move the outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from foof.covering import names_of
from foof.optim.change import BoundedSteps, Changes
from foof.optim.checks import Fallback, mean_over_rows
from foof.optim.engine import Engine, unwrapped
from foof.optim.estimators import InputMoments
from foof.optim.split import of_vocabulary
from foof.statistics import Schedule

MAX_CHANGE = 0.03  # τ, where nothing is said
DAMPING = 0.1  # λ as a fraction of the mean eigenvalue of Σ, where nothing is said
ADAMW = {"name": "adamw", "lr": 3e-3}


class FOOF(BoundedSteps):
    """``W ← W - lr · Eᵀ A (Σ + λI)⁻¹`` for every covered layer (Eq. 6), a drop-in ``torch.optim.Optimizer``.

    ``FOOF(model)`` needs no number. FOOF moves a layer's outputs, so its step is set by how far it moves them: with
    ``ρ² = tr(U Σ Uᵀ) / tr(W Σ Wᵀ)`` for the neuron gradient U, every step moves the outputs of every layer by the part ``max_change`` of
    their size, and by less as the errors shrink:

        W ← W - τ · U / max(ρ, ρ̄/2)           ρ̄² the moving average of ρ²

    That is the same for any scale of the loss and of a layer's inputs (a bias is one of them), any batch size, and any number of tokens.

    ``FOOF(model, lr=0.3, damping=1.0)`` is the paper's form: ``Σ`` is the normalised moving average of ``1/N Σ_i Σ_r a_ir a_irᵀ``, mean
    over datapoints, sum over rows. In this scale the paper's fully connected setting (lr 30, λ 100 at batch 100) is (0.3, 1).

    Args:
        model: its linear, convolution and embedding layers are covered; ``foof.explain(model)`` shows which.
        lr: learning rate η in the paper's form. None: the step is set by ``max_change``, which is then the groups' ``lr``, for schedulers
            to change.
        damping: λ > 0; or ``"auto"``: the precision of the weight initialisation (Appendix K); None: 0.1 of the mean eigenvalue of Σ.
        relative: λ is ``damping`` times the mean eigenvalue of Σ, layer by layer: for inputs of very different scales.
        max_change: τ, by how much of their size a step may move a layer's outputs. None: 0.03, or with an lr without any bound, as in the
            paper. Given together with an lr it bounds the step, ``ΔW ← ΔW · min(1, τ/ρ)``, at the initial lr of a scheduler, which then
            scales what is bounded. With it, embeddings, and in models that have some the output layer, are left to the fallback
            optimizer: their inputs or outputs are a vocabulary.
        momentum, weight_decay: of the neuron gradient; the decay is decoupled. The bound holds for the sum that momentum makes.
        ema: decay m of the moving averages; 0 uses the latest batch only.
        T, S: Σ is inverted every T steps and fed on the S steps before (default ``min(T, 10)``); at S = T on every step.
        spread: the inversions of a period are spread over its steps, one layer after the other and part by part, so that no step pays for
            all of them. Each layer's Σ is then fed on the S steps before its own turn.
        rest: the fallback optimizer of parameters that are not covered: ``"adamw"`` (lr 1e-3, weight_decay as above), ``"sgd"``, a
            mapping with options, ``{"name": "sgd", "lr": 0.01, "momentum": 0.9}``, or a factory,
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``.
        groups: parameters with their own lr, damping, relative, max_change, momentum or weight_decay: ``[{"params": ..., "lr": ...}]``. For
            those that are not covered the weight_decay holds, and the lr where the whole group is not.
        blocks: into how many diagonal blocks Σ is split, for layers with very many inputs; ``"auto"``: as few as keep a layer's
            statistics within a gibibyte.
        row_stride: Σ is estimated from every k-th row: of the tokens of a batch, or its datapoints; of convolutions from every k-th
            datapoint. Which ones they are moves on with every batch.
        loss_average: ``"batch"``: the loss is a mean over datapoints; ``"batch+sequence"``: over their rows (tokens), too, as language
            losses are. Then Σ is such a mean as well, and lr and damping mean the same at any length.
        exclude: names of modules to leave to the fallback optimizer.
        maximize: ascend instead.
        process_group: with whom to share statistics and inversions; None: everyone in the default group, False: nobody.
    """

    def __init__(self, model: nn.Module, lr: float | None = None, damping: float | str | None = None, *, relative: bool = False,
                 max_change: float | None = None, momentum: float = 0.0, weight_decay: float = 0.0, ema: float = 0.95, T: int = 100,
                 S: int | None = None, spread: bool = False, blocks: int | str = 1, row_stride: int = 1, loss_average: str = "batch",
                 rest: Fallback | None = None, groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (),
                 maximize: bool = False, process_group: Any = None) -> None:  # fmt: skip
        of_change = lr is None  # is the step set by how far it moves the outputs, or merely bounded?
        if lr is None:
            lr = max_change = MAX_CHANGE if max_change is None else max_change
            groups = [{**g, "lr": g["max_change"], "paced": g["max_change"]} if "max_change" in g else g for g in groups]
        if damping is None:
            damping, relative = DAMPING, True
        vocabulary = {} if max_change is None else of_vocabulary(unwrapped(model), exclude)
        exclude, estimator = (*names_of(exclude), *vocabulary), InputMoments(mean_over_rows(loss_average), blocks, row_stride)
        schedule = Schedule.of(T, S, spread=spread)
        engine = Engine(model, lambda _: estimator, schedule, ema, exclude=exclude, functional=True, process_group=process_group)
        for name in engine.rest:
            engine.rest[name] = vocabulary.get(name.rpartition(".")[0], engine.rest[name])
        defaults = {"lr": lr, "damping": damping, "relative": relative, "max_change": max_change, "momentum": momentum,
                    "weight_decay": weight_decay, "paced": max_change if of_change else False}  # fmt: skip
        self._bound = Changes(engine)
        super().__init__(engine, defaults, groups, rest or (ADAMW if of_change else "adamw"), maximize)

    def _update(self, group: dict[str, Any]) -> None:
        if group is self.param_groups[0]:
            for each in self.param_groups:
                if each.get("paced", False) not in (False, True, each.get("max_change")):  # True: of an early checkpoint
                    raise ValueError(
                        f"max_change was {each['paced']:g} when FOOF(model) was made, and is {each['max_change']} in its param_groups now, "
                        'which nothing reads: without a learning rate the step is the group\'s "lr". Change that.'
                    )
        super()._update(group)
