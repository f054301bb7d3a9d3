"""Muon on neurons: momentum, then the damped inverse of Σ, then orthogonalisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foof import distributed
from foof._torch import foreach_mul_
from foof.covering import names_of
from foof.explain import Explanation, Row
from foof.layers import Layer
from foof.optim.base import NeuronOptimizer
from foof.optim.block import Block
from foof.optim.checks import Fallback
from foof.optim.engine import Engine, unwrapped
from foof.optim.estimators import InputMoments
from foof.optim.rules import MUON_SCALES, POWERS, momentum_of, muon_scale, orthogonalised, relative, relative_inverse
from foof.optim.split import split
from foof.optim.step import Ledger
from foof.statistics import Schedule
from foof.sweep import Gradual, Sweep

ADAMW = {"name": "adamw", "lr": 3e-3, "betas": (0.9, 0.95)}


class RelativeInverse:
    """``X ↦ X P`` with ``P = (Σ/s̄ + ridge·I)^power`` ``(..., m, m)``, s̄ the mean eigenvalue of Σ."""

    def __init__(self, P: Tensor) -> None:
        self.P = P

    def apply(self, X: Tensor) -> Tensor:
        return X.to(self.P.dtype) @ self.P

    def state_dict(self) -> dict[str, Any]:
        return {"P": self.P.clone()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> RelativeInverse:
        return cls(state["P"])


class InputsForMomentum(InputMoments):
    """Σ as FOOF's, as a mean over rows; gradients stay plain, since the rule applies the inverse to their momentum."""

    name = "muon"
    plain, watches = True, False

    def __init__(self, power: float, row_stride: int = 1, neurons: Sequence[str] | None = None) -> None:
        """neurons: names of the layers that are stepped on neurons; None: all."""
        super().__init__(mean_over_rows=True, row_stride=row_stride)
        self.power, self.neurons = power, neurons

    def moments_of(self, layers: Sequence[Layer]) -> tuple[str, ...]:
        return self.moments if self.neurons is None or any(called(layers, name) for name in self.neurons) else ()

    def leaves_plain(self, block: Block) -> bool:
        return True

    def invert(self, block: Block, T: int) -> RelativeInverse:  # type: ignore[override]
        Sigma = block.moments["Sigma"].value
        assert Sigma is not None
        return RelativeInverse(relative_inverse(Sigma, float(block.damping.value), self.power, block.name).contiguous())

    def parts(self, block: Block) -> int:
        return super().parts(block) if self.power == -1.0 else 1

    def begin(self, block: Block) -> Gradual:
        Sigma = block.moments["Sigma"].value
        assert Sigma is not None
        return Gradual([Sweep(relative(Sigma), float(block.damping.value))], RelativeInverse)

    def inverse_from(self, state: dict[str, Any]) -> RelativeInverse:  # type: ignore[override]
        return RelativeInverse.from_state_dict(state)

    def precondition(self, ledgers: dict[Block, Ledger | None]) -> None:
        """Nothing: see above."""


class Muon(NeuronOptimizer):
    """Momentum on neurons, orthogonalised, for the matrices inside a network; AdamW for all else. One line for a whole model.

        B ← μ B + (1 − μ) G,   M = μ B + (1 − μ) G          on raw gradients (Nesterov)
        W ← (1 − lr·decay) W − lr · scale · orth(M (Σ/s̄ + λI)^power)

    ``orth`` is Newton-Schulz with Muon's coefficients, ``s̄`` the mean eigenvalue of Σ, the second moment of the layer's inputs. The
    embeddings, the output layer, norms and biases are stepped by the fallback optimizer; ``opt.explain()`` says which and why.

    Args:
        model: its linear and convolution layers are covered, except the output layer and what is tied to an embedding.
        lr: learning rate of the matrices, on Muon's scale.
        damping: λ, relative to the mean eigenvalue of Σ; 0.02 to 1 differ little. Large λ is Muon without neurons.
        power: −1, or −1/2.
        momentum, nesterov, weight_decay: as in ``torch.optim.Muon``; the decay is decoupled.
        scale: ``"original"``, ``√max(1, n/m)``, or ``"match_rms_adamw"``, ``0.2 √max(n, m)``, to use a learning rate of AdamW's size.
        orthogonalisation: how many steps of Newton-Schulz.
        ema, T, S: Σ is inverted every T steps, and fed on the S steps before (default ``min(T, 2)``).
        spread: as for ``foof.FOOF``; at power −1/2 one layer after the other, but each at once.
        row_stride: Σ is estimated from every k-th token, which ones moves on with every batch.
        neurons: the layers that P acts on, by names of modules or the end of their names; the others are Muon's, without P. None:
            all. In a transformer those do best that no norm stands right before (attention's output and the second layer of the MLP):
            ``["out", "down"]``, ``["c_proj"]``, ``["o_proj", "down_proj"]``.
        stacked: layers whose weight holds several matrices, one above the other, and how many: ``{"qkv": 3}``. Each is orthogonalised by
            itself, as it would be in a layer of its own. Names of modules, or the end of them, of which the longest that fits counts:
            ``{"attn.c_attn": 3, "crossattention.c_attn": 2}``.
        head: names of the output layers; None: the one the model names (``get_output_embeddings``), else the last one defined.
        rest: the fallback optimizer, as for ``foof.FOOF``; by default AdamW with lr 3e-3 and betas (0.9, 0.95).
        groups, exclude, maximize, process_group: as for ``foof.FOOF``.
    """

    group_options = ("lr", "damping", "momentum", "weight_decay")

    def __init__(self, model: nn.Module, lr: float = 0.02, damping: float = 0.1, *, power: float = -1.0, momentum: float = 0.95,
                 nesterov: bool = True, weight_decay: float = 0.0, scale: str = "original", orthogonalisation: int = 5,
                 ema: float = 0.9, T: int = 32, S: int | None = None, spread: bool = False, row_stride: int = 1,
                 neurons: Iterable[str] | None = None, stacked: Mapping[str, int] | None = None, head: Iterable[str] | None = None,
                 rest: Fallback = ADAMW, groups: Sequence[Mapping[str, Any]] = (), exclude: Iterable[str] = (), maximize: bool = False,
                 process_group: Any = None) -> None:  # fmt: skip
        check_rule(damping, power, scale)
        if not isinstance(orthogonalisation, int) or orthogonalisation < 1:
            raise ValueError(f"orthogonalisation is how many steps of Newton-Schulz: a whole number from 1 on, got {orthogonalisation!r}.")
        self.nesterov, self.scale, self.orthogonalisation = nesterov, scale, orthogonalisation
        named = None if neurons is None else names_of(neurons)
        inputs, schedule = InputsForMomentum(power, row_stride, named), Schedule.of(T, S, 2, spread)
        engine = engine_for_matrices(model, inputs, schedule, ema, exclude, head, process_group)
        defaults = {"lr": lr, "damping": damping, "relative": True, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(engine, defaults, groups, rest, maximize)
        try:
            check_named(engine.blocks, named)
            self._stacked = stacked_in(engine.blocks, stacked or {})
        except BaseException:
            self.remove()
            raise

    def explain(self, inputs: Any = None) -> Explanation:
        """As for any optimizer of the library; and which matrices are without neurons, or several in one weight."""
        said, plain, several = super().explain(inputs), set[int](), dict[int, int]()
        for block in self.preconditioner.blocks:
            several[id(block.weight)] = self._stacked.get(block, 1)
            if not block.moments:
                plain.add(id(block.weight))
        weight_of = {name: id(p) for name, p in self.preconditioner.model.named_parameters()}

        def row(of: Row) -> Row:
            count, without = several.get(weight_of[of.parameter], 1), weight_of[of.parameter] in plain
            how = of.covered + (f", {count} stacked" if count > 1 else "") + (", without neurons" if without else "")
            return replace(of, covered=how, flops=0.0, memory=0) if without else replace(of, covered=how)

        return replace(said, rows=tuple(map(row, said.rows)))

    def _update(self, group: dict[str, Any]) -> None:
        sign = -1.0 if self.maximize else 1.0
        lr, decay = sign * group["lr"], sign * group["weight_decay"]  # decay shrinks the weights either way
        blocks = [block for block in self.preconditioner.blocks if block.options is group and block.weight.grad is not None]
        if not blocks:
            return
        if decay:
            foreach_mul_([block.weight for block in blocks], 1 - lr * decay)
        with torch.autocast(blocks[0].weight.device.type, enabled=False):
            for block in blocks:
                gradient: Tensor = block.weight.grad  # type: ignore[assignment]
                M = momentum_of(self._momentum(block.weight), gradient, group["momentum"], self.nesterov)
                self._descend(block, distributed.full(M), lr)

    def _descend(self, block: Block, M: Tensor, lr: float) -> None:
        """``W ← W − lr · scale · orth(M P)``, the momentum M whole and in the shape of the weight."""
        weight, inverse, stacked = block.weight, None if block.inverse is None else block.inverse.P, self._stacked.get(block, 1)
        orthogonal = orthogonalised(block.layer.join(M, None), inverse, self.orthogonalisation, stacked)
        update = block.layer.split(orthogonal)[0]
        if distributed.is_sharded(weight):
            whole, update = update, torch.empty_like(weight)
            distributed.write(update, whole)
        weight.add_(update, alpha=-lr * muon_scale(orthogonal.shape[-2] // stacked, orthogonal.shape[-1], self.scale))


def engine_for_matrices(model: nn.Module, estimator: InputMoments, schedule: Schedule, ema: float, exclude: Iterable[str],
                        head: Iterable[str] | None, process_group: Any) -> Engine:  # fmt: skip
    """An engine for the weights that `split` chooses, which knows why not the others."""
    exclude = names_of(exclude)
    chosen = split(unwrapped(model), exclude, head)
    if not chosen.weights:
        said = "; ".join(f"{name}: {why}" for name, why in list(chosen.why_not.items())[:5])
        raise ValueError(f"the model has no matrix inside it to cover ({said}). If it is all one layer, say that it is no output: head=[].")
    engine = Engine(model, lambda _: estimator, schedule, ema, exclude=exclude, owned=chosen.weights, functional=True,
                    process_group=process_group)  # fmt: skip
    engine.rest.update(chosen.why_not)
    return engine


def called(layers: Iterable[Layer], name: str) -> bool:
    """Is this the name of one of these layers, or the end of it: ``"h.0.attn.c_attn"``, ``"attn.c_attn"``, ``"c_attn"``?"""
    return any(f".{layer.name}".endswith(f".{name}") for layer in layers)


def check_named(blocks: Iterable[Block], neurons: Sequence[str] | None) -> None:
    for name in neurons or ():
        if not any(called(block.layers, name) for block in blocks):
            raise ValueError(f"neurons: no layer that Muon steps is called {name!r}; `opt.explain()` without it lists them.")
    if neurons is not None and not neurons:
        raise ValueError("neurons: names of the layers that P acts on, got none. Muon without neurons is torch.optim.Muon.")


def stacked_in(blocks: Iterable[Block], stacked: Mapping[str, int]) -> dict[Block, int]:
    """How many matrices stand one above the other in the weights of these blocks, by names of their layers or ends of these: the longest
    that fits says."""
    if not isinstance(stacked, Mapping):
        raise TypeError(f'stacked says how many matrices a layer\'s weight holds: {{"qkv": 3}}, got {stacked!r}.')
    found: dict[Block, int] = {}
    for name in sorted(stacked, key=len):
        count, those = stacked[name], [block for block in blocks if called(block.layers, name)]
        if not those:
            raise ValueError(f"stacked: no layer that Muon steps is called {name!r}; `opt.explain()` without it lists them.")
        for layer in (block.layer for block in those):
            if layer.groups > 1:
                raise ValueError(f"stacked: {layer.name} is taken for {layer.groups} matrices as it is; leave it out.")
            if not isinstance(count, int) or count < 1 or layer.n % count or layer.n == count:
                raise ValueError(f"stacked: the {layer.n} outputs of {layer.name} are not those of {count!r} matrices.")
        found |= dict.fromkeys(those, count)
    return found


def check_rule(damping: float, power: float, scale: str) -> None:
    if isinstance(damping, str):
        raise ValueError(f"damping is relative to the mean eigenvalue here: a positive number, got {damping!r}.")
    if power not in POWERS:
        raise ValueError(f"power must be one of {POWERS}, got {power}.")
    if scale not in MUON_SCALES:
        raise ValueError(f"scale must be one of {MUON_SCALES}, got {scale!r}.")
