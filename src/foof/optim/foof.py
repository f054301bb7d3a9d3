"""FOOF, Algorithm 1 of the paper: gradient descent on neurons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from foof.optim.base import NeuronOptimizer
from foof.optim.checks import Fallback, mean_over_rows
from foof.optim.engine import Engine
from foof.optim.estimators import InputMoments
from foof.statistics import Schedule


class FOOF(NeuronOptimizer):
    """``W ← W - lr · Eᵀ A (Σ + λI)⁻¹`` for every covered layer (Eq. 6), a drop-in ``torch.optim.Optimizer``.

    ``Σ`` is the normalised moving average of ``1/N Σ_i Σ_r a_ir a_irᵀ``: mean over datapoints, sum over rows. In this scale the
    paper's fully connected setting (lr 30, λ 100 at batch 100) is (0.3, 1).

    Args:
        model: its linear, convolution and embedding layers are covered; ``foof.explain(model)`` shows which.
        lr: learning rate η. Since a larger λ shortens the step, search over lr/λ.
        damping: λ > 0, or ``"auto"``: the precision of the weight initialisation (Appendix K), so that only lr is left to tune.
        relative: λ is ``damping`` times the mean eigenvalue of Σ, layer by layer: for inputs of very different scales.
        momentum, weight_decay: of the neuron gradient; the decay is decoupled.
        ema: decay m of the moving averages; 0 uses the latest batch only.
        T, S: Σ is inverted every T steps and fed on the S steps before (default ``min(T, 10)``); at S = T on every step.
        rest: the fallback optimizer of parameters that are not covered: ``"adamw"`` (lr 1e-3, weight_decay as above), ``"sgd"``, a
            mapping with options, ``{"name": "sgd", "lr": 0.01, "momentum": 0.9}``, or a factory,
            ``functools.partial(torch.optim.AdamW, lr=1e-3)``.
        groups: parameters with their own lr, damping, relative, momentum or weight_decay: ``[{"params": ..., "lr": ...}]``. For those
            that are not covered the weight_decay holds, and the lr where the whole group is not.
        blocks: into how many diagonal blocks Σ is split, for layers with very many inputs; ``"auto"``: as few as keep a layer's
            statistics within a gibibyte.
        loss_average: ``"batch"``: the loss is a mean over datapoints; ``"batch+sequence"``: over their rows (tokens), too, as language
            losses are. Then Σ is such a mean as well, and lr and damping mean the same at any length.
        exclude: names of modules to leave to the fallback optimizer.
        maximize: ascend instead.
        process_group: with whom to share statistics and inversions; None: everyone in the default group, False: nobody.
    """

    def __init__(self, model: nn.Module, lr: float = 0.3, damping: float | str = 1.0, *, relative: bool = False,
                 momentum: float = 0.0, weight_decay: float = 0.0, ema: float = 0.95, T: int = 100, S: int | None = None,
                 blocks: int | str = 1, loss_average: str = "batch", rest: Fallback = "adamw",
                 groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (), maximize: bool = False,
                 process_group: Any = None) -> None:  # fmt: skip
        estimator = InputMoments(mean_over_rows(loss_average), blocks)
        engine = Engine(model, lambda _: estimator, Schedule.of(T, S), ema, exclude=exclude, process_group=process_group)
        defaults = {"lr": lr, "damping": damping, "relative": relative, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(engine, defaults, groups, rest, maximize)
