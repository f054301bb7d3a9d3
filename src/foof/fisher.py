"""The Fisher information of a model on some datapoints, as an operator for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foof import _torch
from foof.conjugate import ConjugateGradients, solver_named
from foof.covering import covered_layers, names_of
from foof.gram import GramOperator, by_layer_named
from foof.layers import Layer
from foof.likelihood import Labels, Likelihood, likelihood_named, seeded
from foof.notices import warn
from foof.passes import record
from foof.vectors import Diagonal, Precision, Vector
from foof.woodbury import Woodbury


class Fisher:
    """``F = 1/N Σ_i Σ_k g_ik g_ikᵀ = G Gᵀ`` over N datapoints, never formed: only their inputs ``a`` and errors ``e`` are kept.

    >>> F = foof.Fisher(model, x)
    >>> F @ v; F.solve(v, damping=0.1); F.quadratic(v); F.sample(10, prior_precision=1.0)

    One forward and K backward passes; after that the model is not needed and may change: F stays the Fisher of this moment.
    Of the model's parameters, ``F.params`` are covered (weights and biases of linear, convolution and embedding layers); all
    others count as constants, with a warning that names them. For these likelihoods the Fisher equals the generalised
    Gauss–Newton matrix ``1/N Σ_i J_iᵀ H_i J_i`` of the mean loss: exactly with ``labels="full"``, in expectation with ``"mc"``.

    Args:
        model: put it into the mode (eval or train) whose Fisher is meant.
        x: inputs, datapoints first: a tensor, a tuple of arguments, or a mapping of keyword arguments; or a ``DataLoader`` of inputs,
            of (inputs, labels), or of mappings with or without ``"labels"``.
        labels: ``"mc"``: ``samples`` labels per input drawn from the model; ``"full"``: all labels, weighted by their
            probability (K backward passes and K columns per input); ``"empirical"``: the data's labels ``y``.
        y: the data's labels. Where they are given, categorical positions with label -100 are left out, whatever ``labels``.
        likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (unit variance), or a ``foof.likelihood.Likelihood``, of
            the model's outputs ``(N, ..., C)``: classes last. Of an output with ``.logits`` (transformers), these.
        blocks: ``"full"``, or ``"layer"`` for the block-diagonal Fisher, one block per weight with its bias.
        dtype: precision of the Gram matrix and of solves; ``torch.float64`` for damping far below F's eigenvalues.
        batch_size: datapoints per forward pass, to bound the memory of the passes themselves.
        generator: of sampled labels: a ``torch.Generator``, or a seed.
        exclude: names of modules whose parameters count as constants.
    """

    def __init__(self, model: nn.Module, x: Any, labels: str | Labels = "mc", y: Tensor | None = None, *,
                 likelihood: str | Likelihood = "categorical", blocks: str = "full", samples: int = 1,
                 dtype: torch.dtype | None = None, batch_size: int | None = None, generator: torch.Generator | int | None = None,
                 exclude: Iterable[str] = ()) -> None:  # fmt: skip
        by_layer = by_layer_named(blocks)
        source = labels if isinstance(labels, Labels) else Labels(labels, samples)
        layers, params = fisher_layers(model, names_of(exclude))
        warn_of_training_mode(model)
        labels_from = seeded(generator, params[0].device)
        calls, N, K = record(model, layers, x, y, source, likelihood_named(likelihood), labels_from, batch_size)
        names = {id(p): name for name, p in model.named_parameters()}
        self.layers, self.by_layer = layers, by_layer
        self.operator = GramOperator(params, calls, N, K, by_layer, dtype, [names[id(p)] for p in params])
        self._damped: Woodbury | None = None  # the latest

    # --- what it is -------------------------------------------------------------------------------------------------------

    @property
    def params(self) -> list[nn.Parameter]:
        """The covered parameters, in the order of ``model.parameters()``."""
        return self.operator.params

    @property
    def names(self) -> list[str]:
        """Their names in the model."""
        return self.operator.space.names

    @property
    def N(self) -> int:
        """Datapoints."""
        return self.operator.N

    @property
    def D(self) -> int:
        """Columns of G: datapoints × labels."""
        return self.operator.D

    @property
    def P(self) -> int:
        """Parameters."""
        return self.operator.space.P

    @property
    def shape(self) -> tuple[int, int]:
        return self.P, self.P

    def __repr__(self) -> str:
        parts = f", {len(self.operator.parts)} blocks" if len(self.operator.parts) > 1 else ""
        return f"Fisher({self.P:,} parameters, {self.N:,} datapoints, {self.D:,} columns{parts})"

    def memory(self) -> dict[str, int]:
        """Bytes held now: inputs and errors, Gram matrices, their factors."""
        return {**self.operator.memory(), "factor": 0 if self._damped is None else self._damped.memory()}

    # --- products and damped inverses ----------------------------------------------------------------------------------------------

    def __matmul__(self, v: Vector) -> Any:
        """``F v``, in the form of ``v``."""
        us, back = self.operator.space.read(v)
        return back(self.operator.apply(us))

    def damped(self, precision: Diagonal | Precision, *, datapoints: float = 1.0) -> Woodbury:
        """``Λ + c F``, factorised once: ``solve(v)``, ``sample(n)``, ``logdet()``, ``variance(jacobian)``. The latest one is kept.

        Λ may be any positive diagonal. One number for all parameters reuses the Gram matrix; one number per parameter tensor
        costs a new Gram matrix; a full diagonal also costs all datapoints' gradients, some neurons at a time (slow, exact). Where
        there are fewer parameters than columns, no diagonal costs more than another.
        """
        return self._inverse(precision, datapoints, "precision")

    def _inverse(self, value: Diagonal | Precision, datapoints: float | None, name: str) -> Woodbury:
        c, precision = float(self.N if datapoints is None else datapoints), self.precision(value, name)
        if self._damped is None or self._damped.c != c or self._damped.precision != precision:
            self._damped = None  # free the old one first
            self._damped = Woodbury(self.operator, precision, c)
        return self._damped

    def solve(self, v: Vector, damping: Diagonal, *, refine: int = 0, solver: str = "cholesky", tolerance: float = 1e-6) -> Any:
        """``(F + λI)⁻¹ v``, in the form of ``v``: short for ``F.damped(damping).solve(v, refine)``.

        The factor is kept for the next solve with this λ, which may be any positive diagonal. The relative error is about ε·μ/λ for
        F's largest eigenvalue μ; ``refine`` corrects the answer by its residual. ``solver="cg"`` solves by conjugate gradients to a
        residual of ``tolerance``, with no factor at all: cheaper for few vectors, many columns and a small model.
        """
        if solver_named(solver) is ConjugateGradients:
            return ConjugateGradients(self.operator, self.precision(damping, "damping"), tolerance=tolerance).solve(v)
        return self._inverse(damping, 1.0, "damping").solve(v, refine)

    def quadratic(self, v: Vector) -> Tensor:
        """``vᵀ F v``: a number, or ``(k,)`` for ``v`` of shape ``(P, k)``."""
        values = self.operator.quadratic(self.operator.space.read(v)[0])
        return values if isinstance(v, Tensor) and v.dim() == 2 else values[0]

    # --- the matrix itself ------------------------------------------------------------------------------------------------

    def gram(self) -> Tensor:
        """``GᵀG``: ``(D, D)``, columns label by label; for ``blocks="layer"`` one per block, ``(B, D, D)``. A copy."""
        grams = [self.operator.gram(part) for part in self.operator.parts]
        return grams[0].clone() if len(grams) == 1 else torch.stack(grams)

    def trace(self) -> Tensor:
        """``tr F``."""
        if all(part.gram is not None for part in self.operator.parts):
            return torch.stack([self.operator.gram(part).trace() for part in self.operator.parts]).sum()
        return torch.stack([d.sum() for d in self.operator.diagonal()]).sum()

    def diagonal(self) -> list[Tensor]:
        """The diagonal of F, shaped like ``F.params``."""
        return self.operator.diagonal()

    def columns(self) -> Tensor:
        """``G`` itself, ``(P, D)``: for small models."""
        position = {id(p): i for i, p in enumerate(self.params)}
        rows: list[Tensor] = [torch.empty(0)] * len(self.params)
        for part in self.operator.parts:
            for block in part.blocks:
                flat = block.flat(self.operator.dtype).mT / self.N**0.5
                for p in block.params:
                    start = block.offsets[id(p)]
                    rows[position[id(p)]] = flat[start : start + p.numel()]
        return torch.cat(rows)

    def dense(self) -> Tensor:
        """``F`` as a ``(P, P)`` matrix: for small models."""
        G = self.columns()
        F = G @ G.mT
        if len(self.operator.parts) > 1:
            block = torch.cat([torch.full((p.numel(),), self._part_of(i), device=p.device) for i, p in enumerate(self.params)])
            F = F * (block.unsqueeze(0) == block.unsqueeze(1))
        return F

    def _part_of(self, parameter: int) -> int:
        return next(i for i, part in enumerate(self.operator.parts) if parameter in part.where)

    # --- the posterior precision Λ + c F: short for F.damped(Λ, datapoints=c), with c = N by default -----------------------

    def sample(self, n: int, prior_precision: Diagonal, *, datapoints: float | None = None,
               generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
        """n exact draws from ``N(0, (Λ + c F)⁻¹)``: ``(P, n)``. Λ = ``prior_precision``; c = ``datapoints``, by default N.

        ``F.as_list(draws[:, i])`` has the shapes of ``F.params``.
        """
        return self._inverse(prior_precision, datapoints, "prior_precision").sample(n, generator)

    def logdet(self, prior_precision: Diagonal, *, datapoints: float | None = None) -> Tensor:
        """``log det (Λ + c F)``, a float64 number."""
        return self._inverse(prior_precision, datapoints, "prior_precision").logdet()

    def posterior_solve(self, v: Vector, prior_precision: Diagonal, *, datapoints: float | None = None) -> Any:
        """``(Λ + c F)⁻¹ v``, in the form of ``v``."""
        return self._inverse(prior_precision, datapoints, "prior_precision").solve(v)

    def eigenvalues(self) -> Tensor:
        """The D largest eigenvalues of F, ascending (those of ``GᵀG``); for ``blocks="layer"`` of all blocks together."""
        values = [torch.linalg.eigvalsh(self.operator.gram(part)) for part in self.operator.parts]
        return torch.cat(values).clamp_min(0).sort().values

    # --- forms of vectors -------------------------------------------------------------------------------------------------

    def as_list(self, flat: Tensor) -> list[Tensor]:
        """A flat vector ``(P,)`` as views shaped like ``F.params``."""
        return self.operator.space.as_list(flat)

    def as_flat(self, v: Sequence[Tensor]) -> Tensor:
        """A list shaped like ``F.params`` as one vector ``(P,)``."""
        space = self.operator.space
        return space.flat(space.read(list(v))[0]).squeeze(1)

    def precision(self, value: Diagonal | Precision, name: str) -> Precision:
        """A positive diagonal from a number, a flat tensor, or one entry per parameter."""
        return self.operator.space.precision(value, name)

    # --- other libraries --------------------------------------------------------------------------------------------------

    def to_scipy(self, damping: float | None = None) -> Any:
        """A SciPy ``LinearOperator``: of F, or with ``damping`` of ``(F + λI)⁻¹``."""
        from scipy.sparse.linalg import LinearOperator

        def multiply(array: Any) -> Any:
            v = torch.as_tensor(array, dtype=self.operator.dtype, device=self.operator.device)
            return (self @ v if damping is None else self.solve(v, damping)).cpu().numpy()

        dtype = torch.empty(0, dtype=self.operator.dtype).numpy().dtype
        return LinearOperator(self.shape, matvec=multiply, rmatvec=multiply, matmat=multiply, rmatmat=multiply, dtype=dtype)


def fisher_layers(model: nn.Module, exclude: tuple[str, ...]) -> tuple[list[Layer], list[nn.Parameter]]:
    """The covered layers and parameters of a model; a warning names trainable parameters that are left out unasked."""
    layers, rest = covered_layers(model, exclude, share_biases=True)
    if not layers:
        raise ValueError("the model has no trainable linear, convolution or embedding layer, so there is no Fisher to speak of.")
    left_out = [f"{name} ({why})" for name, why in rest.items() if why != "excluded by request"]
    if left_out:
        listed = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
        warn(f"the Fisher does not cover {listed}: they count as constants.")
    covered = {id(p) for layer in layers for p in layer.parameters}
    return layers, [p for p in model.parameters() if id(p) in covered]


def warn_of_training_mode(model: nn.Module) -> None:
    """Dropout and batch normalisation in training mode make the Fisher one of a particular forward pass."""
    kinds = (_torch.Dropout, _torch.BatchNorm)
    found = sorted({type(m).__name__ for m in model.modules() if isinstance(m, kinds) and m.training})
    if found:
        warn(
            f"the model is in training mode with {', '.join(found)}: this is the Fisher of this forward pass (its masks, its "
            f"batch statistics, which also couple datapoints). Call model.eval() for the Fisher of the trained function."
        )
