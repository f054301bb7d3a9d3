"""The Fisher information of a model on some datapoints, as an operator for people."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foof.covering import covered_layers
from foof.gradients import Vectors
from foof.gram import GramOperator, Precision, by_layer_named
from foof.layers import Layer
from foof.likelihood import Labels, Likelihood, likelihood_named
from foof.passes import record

Vector = Tensor | Sequence[Tensor]  # (P,), (P, k), or a list shaped like F.params
Diagonal = float | Tensor | Sequence[float | Tensor]  # λ, a flat diagonal (P,), or for each parameter a number or a tensor


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
        x: inputs, datapoints first: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        labels: ``"mc"``: ``samples`` labels per input drawn from the model; ``"full"``: all labels, weighted by their
            probability (K backward passes and K columns per input); ``"empirical"``: the data's labels ``y``.
        y: the data's labels. Where they are given, categorical positions with label -100 are left out, whatever ``labels``.
        likelihood: ``"categorical"``, ``"bernoulli"``, ``"gaussian"`` (unit variance), or a ``foof.likelihood.Likelihood``, of
            the model's outputs ``(N, ..., C)``: classes last.
        blocks: ``"full"``, or ``"layer"`` for the block-diagonal Fisher, one block per weight with its bias.
        dtype: precision of the Gram matrix and of solves; ``torch.float64`` for damping far below F's eigenvalues.
        batch_size: datapoints per forward pass, to bound the memory of the passes themselves.
        exclude: names of modules whose parameters count as constants.
    """

    def __init__(self, model: nn.Module, x: Any, labels: str | Labels = "mc", y: Tensor | None = None, *,
                 likelihood: str | Likelihood = "categorical", blocks: str = "full", samples: int = 1,
                 dtype: torch.dtype | None = None, batch_size: int | None = None, generator: torch.Generator | None = None,
                 exclude: Iterable[str] = ()) -> None:  # fmt: skip
        by_layer = by_layer_named(blocks)
        source = labels if isinstance(labels, Labels) else Labels(labels, samples)
        layers, params = fisher_layers(model, tuple(exclude))
        warn_of_training_mode(model)
        calls, N, K = record(model, layers, x, y, source, likelihood_named(likelihood), generator, batch_size)
        names = {id(p): name for name, p in model.named_parameters()}
        self.names = [names[id(p)] for p in params]
        self.layers, self.by_layer = layers, by_layer
        self.operator = GramOperator(params, calls, N, K, by_layer, dtype)

    # --- what it is -------------------------------------------------------------------------------------------------------

    @property
    def params(self) -> list[nn.Parameter]:
        """The covered parameters, in the order of ``model.parameters()``."""
        return self.operator.params

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
        return sum(p.numel() for p in self.params)

    @property
    def shape(self) -> tuple[int, int]:
        return self.P, self.P

    def __repr__(self) -> str:
        parts = f", {len(self.operator.parts)} blocks" if len(self.operator.parts) > 1 else ""
        return f"Fisher({self.P:,} parameters, {self.N:,} datapoints, {self.D:,} columns{parts})"

    def memory(self) -> dict[str, int]:
        """Bytes held now: inputs and errors, Gram matrices, their factors."""
        return self.operator.memory()

    # --- products and solves ----------------------------------------------------------------------------------------------

    def __matmul__(self, v: Vector) -> Any:
        """``F v``, in the form of ``v``."""
        us, back = self._read(v)
        return back(self.operator.apply(us))

    def solve(self, v: Vector, damping: Diagonal, *, refine: int = 0) -> Any:
        """``(F + λI)⁻¹ v`` by Woodbury's identity, in the form of ``v``. The factor is kept for the next solve with this λ.

        λ may be any positive diagonal. One number for all parameters reuses the Gram matrix; one number per parameter tensor
        costs a new Gram matrix; a full diagonal also costs all datapoints' gradients, some neurons at a time (slow, exact).
        The relative error is about ε·μ/λ for F's largest eigenvalue μ; ``refine`` corrects the answer by its residual.
        """
        us, back = self._read(v)
        return back(self.operator.solve(us, self.precision(damping, "damping"), refine=refine))

    def quadratic(self, v: Vector) -> Tensor:
        """``vᵀ F v``: a number, or ``(k,)`` for ``v`` of shape ``(P, k)``."""
        values = self.operator.quadratic(self._read(v)[0])
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

    # --- the posterior precision Λ + c F ----------------------------------------------------------------------------------

    def sample(self, n: int, prior_precision: Diagonal, *, datapoints: float | None = None,
               generator: torch.Generator | None = None) -> Tensor:  # fmt: skip
        """n exact draws from ``N(0, (Λ + c F)⁻¹)``: ``(P, n)``. Λ = ``prior_precision``; c = ``datapoints``, by default N.

        ``F.as_list(draws[:, i])`` has the shapes of ``F.params``.
        """
        if n < 1:
            raise ValueError(f"the number of samples must be at least 1, got {n}.")
        precision = self.precision(prior_precision, "prior_precision")
        return self._flat(self.operator.sample(n, precision, self._count(datapoints), generator))

    def logdet(self, prior_precision: Diagonal, *, datapoints: float | None = None) -> Tensor:
        """``log det (Λ + c F)``, a float64 number."""
        return self.operator.logdet(self.precision(prior_precision, "prior_precision"), self._count(datapoints))

    def posterior_solve(self, v: Vector, prior_precision: Diagonal, *, datapoints: float | None = None) -> Any:
        """``(Λ + c F)⁻¹ v``, in the form of ``v``."""
        us, back = self._read(v)
        return back(self.operator.solve(us, self.precision(prior_precision, "prior_precision"), self._count(datapoints)))

    def eigenvalues(self) -> Tensor:
        """The D largest eigenvalues of F, ascending (those of ``GᵀG``); for ``blocks="layer"`` of all blocks together."""
        values = [torch.linalg.eigvalsh(self.operator.gram(part)) for part in self.operator.parts]
        return torch.cat(values).clamp_min(0).sort().values

    def _count(self, datapoints: float | None) -> float:
        if datapoints is not None and not 0 < datapoints < float("inf"):
            raise ValueError(f"datapoints must be a positive number, got {datapoints}.")
        return float(self.N if datapoints is None else datapoints)

    # --- forms of vectors -------------------------------------------------------------------------------------------------

    def as_list(self, flat: Tensor) -> list[Tensor]:
        """A flat vector ``(P,)`` as views shaped like ``F.params``."""
        self._check_flat(flat)
        return [piece.view(p.shape) for piece, p in zip(flat.split([p.numel() for p in self.params]), self.params, strict=True)]

    def as_flat(self, v: Sequence[Tensor]) -> Tensor:
        """A list shaped like ``F.params`` as one vector ``(P,)``."""
        return self._flat(self._read(list(v))[0]).squeeze(1)

    def precision(self, value: Diagonal, name: str) -> Precision:
        """A positive diagonal from a number, a flat tensor, or one entry per parameter."""
        values: list[Any]
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == self.P and self.P > 1:
            values = list(self.as_list(value))
        elif isinstance(value, Sequence) and len(value) == len(self.params):
            values = list(value)
        elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
            values = [float(value)] * len(self.params)
        else:
            given = tuple(value.shape) if isinstance(value, Tensor) else f"{type(value).__name__} of {value!r:.60}"
            raise ValueError(
                f"{name} must be a number, a flat diagonal ({self.P},), or {len(self.params)} entries like F.params; got {given}."
            )
        for i, (entry, p) in enumerate(zip(values, self.params, strict=True)):
            if isinstance(entry, Tensor) and entry.numel() > 1 and entry.shape != p.shape:
                raise ValueError(
                    f"{name}: entry {i} ({self.names[i]}) must be a number or {tuple(p.shape)}, got {tuple(entry.shape)}."
                )
            if not isinstance(entry, Tensor) or entry.numel() == 1:
                values[i] = entry = float(entry)
            else:
                values[i] = entry = entry.detach().clone()  # ours: the caller's may change
            smallest, largest = (float(entry.min()), float(entry.max())) if isinstance(entry, Tensor) else (entry, entry)
            if not (smallest > 0 and largest < float("inf")):
                raise ValueError(f"{name} must be positive and finite, got {smallest:g} for {self.names[i]}: F alone is singular")
        return Precision(tuple(values))

    def _read(self, v: Vector) -> tuple[Vectors, Callable[[Vectors], Any]]:
        """k vectors inside, and how to give an answer the form of the question."""
        dtype = self.operator.dtype
        if isinstance(v, Tensor):
            self._check_flat(v)
            columns = v.detach().to(dtype).reshape(self.P, -1)
            pieces = columns.split([p.numel() for p in self.params])
            us = [piece.mT.reshape(-1, *p.shape) for piece, p in zip(pieces, self.params, strict=True)]
            return us, lambda answer: self._flat(answer).to(v.dtype).reshape(v.shape)
        vs = list(v)
        wrong = len(vs) != len(self.params) or any(u.shape != p.shape for u, p in zip(vs, self.params, strict=False))
        if wrong:
            raise ValueError(
                f"a vector must be a list shaped like F.params ({len(self.params)} tensors: {_shapes(self.params)}), "
                f"got {len(vs)} tensors: {_shapes(vs)}."
            )
        us = [u.detach().to(dtype).unsqueeze(0) for u in vs]
        return us, lambda answer: [a[0].to(u.dtype) for a, u in zip(answer, vs, strict=True)]

    def _check_flat(self, v: Tensor) -> None:
        if v.dim() not in (1, 2) or v.shape[0] != self.P:
            raise ValueError(f"a flat vector must be ({self.P},), or ({self.P}, k) for k vectors; got {tuple(v.shape)}.")

    def _flat(self, vectors: Vectors) -> Tensor:
        return torch.cat([u.flatten(1) for u in vectors], dim=1).mT

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
        warnings.warn(f"the Fisher does not cover {listed}: they count as constants.", stacklevel=4)
    covered = {id(p) for layer in layers for p in layer.parameters}
    return layers, [p for p in model.parameters() if id(p) in covered]


def warn_of_training_mode(model: nn.Module) -> None:
    """Dropout and batch normalisation in training mode make the Fisher one of a particular forward pass."""
    kinds = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
    found = sorted({type(m).__name__ for m in model.modules() if isinstance(m, kinds) and m.training})
    if found:
        warnings.warn(
            f"the model is in training mode with {', '.join(found)}: this is the Fisher of this forward pass (its masks, its "
            f"batch statistics, which also couple datapoints). Call model.eval() for the Fisher of the trained function.",
            stacklevel=4,
        )


def _shapes(tensors: Sequence[Any]) -> str:
    shapes = [str(tuple(getattr(t, "shape", ("?",)))) for t in tensors]
    return ", ".join(shapes[:6]) + (", ..." if len(shapes) > 6 else "")
