"""The columns of ``G``, one gradient per datapoint and label, kept as the inputs ``a`` and errors ``e`` they are made of.

A *block* holds the columns of one weight (with its bias). For datapoint i and label k its column is ``g_ik = E_ikᵀ A_i``
(n × m), a sum over rows; nothing of the size of all columns is ever formed. Appendix I's three operations are

- ``Gᵀu``: datapoint i's entry is ``⟨E_ik, A_i Uᵀ⟩``, the layer's own forward pass with weight U against the errors;
- ``G w``: ``Σ_ik w_ik E_ikᵀ A_i``, the layer's own weight gradient for weighted errors;
- ``GᵀG``: by pairs of rows, ``Σ_rr' (a_ir·a_jr')(e_ikr·e_jlr')``, or by the gradients of a slice of neurons at a time,
  whichever is cheaper.

Columns are counted label by label: column ``k·N + i``. Nothing here is divided by N; ``foof.gram`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from foof.covering import matrix_key
from foof.layers import Embedding, Layer
from foof.statistics import wide
from foof.vectors import Vectors

Weights = Sequence[float | Tensor]  # a diagonal: for each parameter one number, or a tensor of its shape

ROWS = 1024  # rows of a at a time on each side of a product of rows
BUDGET = 2**28  # bytes for the gradients of a slice of neurons
CUT = 2**23  # bytes of patches to cut out at a time: they should still be in the cache when they are multiplied
MANY = 16  # vectors at once for which a small block forms its columns
PASSES = 16  # what writing, multiplying and summing one entry of a product of rows costs, in multiply-adds


@dataclass
class Call:
    """One call of a layer: its input ``(N, ...)`` and, for each label, the gradient of its output ``(N, ...)``."""

    layer: Layer
    x: Tensor
    errors: list[Tensor]

    def at(self, chunk: slice, dtype: torch.dtype | None = None) -> Call:
        """The same for some datapoints only, in at least single precision."""
        dtype = dtype or wide(self.errors[0].dtype)
        x = self.x[chunk]
        return Call(self.layer, x if self.layer.diagonal else x.to(dtype), [e[chunk].to(dtype) for e in self.errors])

    @property
    def rows(self) -> int:
        """Rows per datapoint."""
        return self.layer.rows(self.errors[0]) // len(self.errors[0])

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.x, *self.errors))


def chunks(total: int, size: int) -> Iterator[slice]:
    """``0..total`` in pieces of at most ``size``."""
    size = max(1, size)
    for start in range(0, total, size):
        yield slice(start, min(start + size, total))


class Columns:
    """The columns of one block: parameters that share layers, and every call of those layers."""

    def __init__(self, params: list[nn.Parameter], calls: list[Call], N: int, K: int) -> None:
        self.params, self.calls, self.N, self.K = params, calls, N, K
        self.size = sum(p.numel() for p in params)
        self.R = sum(call.rows for call in calls)
        matrices = {(matrix_key(c.layer), c.layer.has_bias) for c in calls}
        self.one_matrix = len(matrices) <= 1 and len(params) == (len(calls[0].layer.parameters) if calls else len(params))

    @property
    def layer(self) -> Layer:
        return self.calls[0].layer

    @property
    def offsets(self) -> dict[int, int]:
        """Where each parameter begins, by its id, which is another one in a copy."""
        begins = accumulate((p.numel() for p in self.params), initial=0)
        return {id(p): begin for p, begin in zip(self.params, begins, strict=False)}

    @property
    def bytes(self) -> int:
        """What is kept: inputs and errors."""
        return sum(call.bytes for call in self.calls)

    # --- Gᵀu and G w ------------------------------------------------------------------------------------------------------

    def project(self, us: Vectors) -> Tensor:
        """``Gᵀu`` for k vectors: ``(K·N, k)``. us: one ``(k, *p.shape)`` for each of ``params``."""
        k = len(us[0])
        if self._better_formed(k, us[0].dtype):
            return self.flat(us[0].dtype) @ torch.cat([u.flatten(1) for u in us], dim=1).mT
        projected = us[0].new_zeros(k, self.K, self.N)
        for call in self.calls:
            weights, biases = self._of_layer(us, call.layer)
            for chunk in chunks(self.N, BUDGET // max(1, 8 * call.errors[0][0].numel())):
                part = call.at(chunk, us[0].dtype)
                for j in range(k):
                    b = call.layer.output(part.x, weights[j], None if biases is None else biases[j])
                    for label, e in enumerate(part.errors):
                        projected[j, label, chunk] += (b.reshape(e.shape) * e).flatten(1).sum(1)
        return projected.reshape(k, -1).mT

    def combine(self, w: Tensor) -> Vectors:
        """``G w`` for k vectors w ``(K·N, k)``: one ``(k, *p.shape)`` for each of ``params``."""
        k = w.shape[1]
        if self._better_formed(k, w.dtype):
            return self.pieces(w.mT @ self.flat(w.dtype))
        weights = w.mT.reshape(k, self.K, self.N)
        combined = [p.new_zeros(k, *p.shape, dtype=w.dtype) for p in self.params]
        where = {id(p): i for i, p in enumerate(self.params)}
        for call in self.calls:
            part = call.at(slice(None), w.dtype)
            for j in range(k):
                e = torch.zeros_like(part.errors[0])
                for label, each in enumerate(part.errors):
                    e.addcmul_(each, weights[j, label].reshape(-1, *[1] * (e.dim() - 1)))
                gradients = call.layer.split(call.layer.weight_gradient(part.x, e))
                for p, gradient in zip(call.layer.parameters, gradients, strict=False):
                    if gradient is not None:
                        combined[where[id(p)]][j] += gradient
        return combined

    def _better_formed(self, k: int, dtype: torch.dtype) -> bool:
        """For many vectors on a small block, one product with its columns beats a pass for each vector."""
        return k >= MANY and self.K * self.N * self.size * (torch.finfo(dtype).bits // 8) <= BUDGET

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """A tensor ``(..., P)`` in the shapes ``(..., *p.shape)`` of the block's parameters."""
        split = flat.split([p.numel() for p in self.params], dim=-1)
        return [piece.reshape(*flat.shape[:-1], *p.shape) for piece, p in zip(split, self.params, strict=True)]

    def _of_layer(self, us: Vectors, layer: Layer) -> tuple[Tensor, Tensor | None]:
        where = {id(p): i for i, p in enumerate(self.params)}
        return us[where[id(layer.weight)]], None if layer.bias is None else us[where[id(layer.bias)]]

    # --- GᵀG --------------------------------------------------------------------------------------------------------------

    def add_gram(self, other: Columns, weights: Weights | None, out: Tensor) -> None:
        """``out += G₁ᵀ diag(weights) G₂``, by the cheaper of two ways. ``other`` is this block, or the same of other datapoints.

        A number per parameter costs nothing; a full diagonal needs the gradients of a slice of neurons at a time.
        """
        if not self.calls or not other.calls:
            return
        separable = weights is None or not any(isinstance(w, Tensor) for w in weights)
        if self.one_matrix and separable and self._rows_are_cheaper(other):
            self._add_by_rows(other, weights, out)
        else:
            self._add_by_slices(other, weights, out)

    def _rows_are_cheaper(self, other: Columns) -> bool:
        rows, slices = self._gram_costs(other)
        return rows <= slices

    def _gram_costs(self, other: Columns) -> tuple[int, int]:
        """Multiply-adds of ``(AAᵀ) ⊙ (EEᵀ)`` on rows, and those of gradients, then their products."""
        n, m, G = self.layer.n, self.layer.m, self.layer.groups
        pairs, labels = self.N * self.R * other.N * other.R * G, self.K * other.K
        rows = pairs * ((0 if self.layer.diagonal else m) + labels * (n + PASSES))
        columns = self.N * self.K * other.N * other.K
        slices = G * n * m * (columns + self.N * self.K * self.R + other.N * other.K * other.R)
        return rows, slices

    def gram_cost(self, other: Columns) -> int:
        """Multiply-adds of ``add_gram``, by the cheaper way."""
        if not self.calls or not other.calls:
            return 0
        rows, slices = self._gram_costs(other)
        return min(rows, slices) if self.one_matrix else slices

    def _add_by_rows(self, other: Columns, weights: Weights | None, out: Tensor) -> None:
        q = self._input_weights(weights, out)
        view = out.view(self.K, self.N, other.K, other.N)
        for I in chunks(self.N, ROWS // self.R):
            A1, E1 = self._rows(I, out.dtype)
            for J in chunks(other.N, ROWS // other.R):
                if other is self and J.start > I.start:
                    break
                same = other is self and I == J
                A2, E2 = (A1, E1) if same else other._rows(J, out.dtype)
                AA = self._inner(A1, A2, q, out.dtype).unsqueeze(2)  # (G, b₁·R₁, 1, b₂·R₂): one for all labels
                for k in range(self.K):
                    labels = k + 1 if same else other.K  # of two that mirror each other, one
                    EE = E1[:, k] @ E2[:, :labels].flatten(1, 2).mT
                    products = _sum_rows(EE.unflatten(2, (labels, -1)).mul_(AA), self.R, other.R)
                    view[k, I, :labels, J] += products
                    if other is self:
                        mirrored = labels - 1 if same else labels
                        view[:mirrored, J, k, I] += products[:, :mirrored].permute(1, 2, 0)

    def _rows(self, chunk: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs ``(G, b·R, m)`` (of an embedding: its indices ``(1, b·R)``) and the errors of all labels ``(G, K, b·R, n)``."""
        inputs, errors = [], []
        for call in self.calls:
            part, layer = call.at(chunk, dtype), call.layer
            b = len(part.x)
            a = part.x.reshape(1, b, -1) if layer.diagonal else layer.input_rows(part.x).reshape(layer.groups, b, -1, layer.m)
            inputs.append(a)
            rows = [layer.error_rows(e).reshape(layer.groups, b, -1, layer.n) for e in part.errors]
            errors.append(torch.stack(rows, dim=1) if len(rows) > 1 else rows[0].unsqueeze(1))
        A = torch.cat(inputs, dim=2) if len(inputs) > 1 else inputs[0]
        E = torch.cat(errors, dim=3) if len(errors) > 1 else errors[0]
        return A.flatten(1, 2), E.flatten(2, 3)

    def _inner(self, A1: Tensor, A2: Tensor, q: Tensor | float, dtype: torch.dtype) -> Tensor:
        """Products of inputs ``(G, b₁·R₁, b₂·R₂)``; one-hot inputs meet where their indices are equal."""
        if not isinstance(self.layer, Embedding):
            return (A1 * q if isinstance(q, Tensor) or q != 1 else A1) @ A2.mT
        equal = A1.unsqueeze(2) == A2.unsqueeze(1)
        if self.layer.padding_idx is not None:
            equal &= A1.ne(self.layer.padding_idx).unsqueeze(2)
        return equal.to(dtype) * q

    def _input_weights(self, weights: Weights | None, like: Tensor) -> Tensor | float:
        """A number for the weight and one for the bias, as weights ``(m,)`` of the inputs."""
        if weights is None:
            return 1.0
        if len(weights) == 1:
            return float(weights[0])
        q = like.new_full((self.layer.m,), float(weights[0]))
        q[-1] = float(weights[1])
        return q

    def _add_by_slices(self, other: Columns, weights: Weights | None, out: Tensor) -> None:
        for left, right in self._slices(other, weights, out.dtype):
            for I in chunks(len(left), max(256, len(left) // 8)):
                if other is not self:
                    out[I] += left[I] @ right.mT
                    continue
                products = left[I] @ left[: I.stop].mT
                out[I, : I.stop] += products
                out[: I.start, I] += products[:, : I.start].mT

    def _slices(self, other: Columns, weights: Weights | None, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
        """Gradients ``(K·N, p)`` of some neurons at a time, for both sides, scaled by the root of the weights."""
        if not self.one_matrix:
            root = None if weights is None else self.flat_weights(weights, dtype).sqrt()
            left = self.flat(dtype) if root is None else self.flat(dtype) * root
            yield left, (left if other is self else other.flat(dtype) if root is None else other.flat(dtype) * root)
            return
        matrix = None if weights is None else self._matrix_weights(weights, dtype).sqrt()
        itemsize = torch.finfo(dtype).bits // 8
        widest = max(self.N * self.K, other.N * other.K)
        for part in chunks(self.layer.n, BUDGET // (widest * self.layer.m * self.layer.groups * itemsize)):
            root = None if matrix is None else matrix[:, part].flatten()
            left = self.of_neurons(part, dtype).flatten(0, 1)
            right = left if other is self else other.of_neurons(part, dtype).flatten(0, 1)
            yield (left, right) if root is None else (left * root, left * root if other is self else right * root)

    # --- G Gᵀ -------------------------------------------------------------------------------------------------------------

    @property
    def separable(self) -> bool:
        """Is each column an outer product ``e aᵀ``?"""
        return self.one_matrix and self.R == 1 and bool(self.calls) and self.layer.groups == 1 and not self.layer.diagonal

    def moment(self, dtype: torch.dtype) -> Tensor:
        """``G Gᵀ`` ``(n·m, n·m)`` of a separable block, its rows in the order ``positions(layer)``.

        Its blocks are ``Aᵀ diag(Σ_k e_kj e_kl) A`` for each pair (j, l) of neurons: for all labels at once. Each is symmetric, so
        that only its lower half, by slabs of rows I, is computed.
        """
        A, E = (rows[0] for rows in self._rows(slice(0, self.N), dtype))  # (N, m), (K, N, n)
        n, m = self.layer.n, self.layer.m
        H = torch.einsum("kij,kil->ijl", E, E)
        moment = torch.zeros(n, m, n, m, dtype=dtype, device=A.device)
        for j in range(n):
            for I in chunks(m, max(64, m // 8)):
                for i in chunks(self.N, BUDGET // (8 * (j + 1) * m)):
                    weighted = H[i, j, : j + 1].unsqueeze(2) * A[i, : I.stop].unsqueeze(1)  # (N, l ≤ j, columns up to I)
                    moment[j, I, : j + 1, : I.stop] += (A[i, I].mT @ weighted.flatten(1)).unflatten(1, (j + 1, I.stop))
            for block in moment[j, :, : j + 1].unbind(1):
                block.copy_(block.tril() + block.tril(-1).mT)
            moment[:j, :, j] = moment[j, :, :j].permute(1, 2, 0)
        return moment.view(n * m, n * m)

    def second_moments(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``Σ_ir a aᵀ`` ``(G, m, m)``, or its diagonal ``(m,)``, and ``Σ_irk e eᵀ`` ``(G, n, n)``: sums over datapoints, rows, labels."""
        layer = self.layer
        Sigma = torch.zeros((layer.m,) if layer.diagonal else (layer.groups, layer.m, layer.m), dtype=dtype, device=layer.weight.device)
        Sigma_E = torch.zeros(layer.groups, layer.n, layer.n, dtype=dtype, device=layer.weight.device)
        for chunk in chunks(self.N, BUDGET // (8 * self.R * layer.groups * max(layer.m, self.K * layer.n))):
            A, E = self._rows(chunk, dtype)
            Sigma += layer.counts(A).to(dtype) if isinstance(layer, Embedding) else A.mT @ A
            E = E.flatten(1, 2)
            Sigma_E += E.mT @ E
        return Sigma, Sigma_E

    # --- gradients of a slice, the diagonal, and the block of one datapoint -----------------------------------------------

    def of_neurons(self, part: slice, dtype: torch.dtype, datapoints: slice = slice(None)) -> Tensor:
        """Per-datapoint gradients of some output neurons' weights: ``(K, N, G·p·m)``."""
        start, stop, _ = datapoints.indices(self.N)
        layer = self.layer
        width = layer.groups * len(range(*part.indices(layer.n))) * layer.m
        gradients = torch.empty(self.K, stop - start, width, dtype=dtype, device=layer.weight.device)
        for chunk in chunks(stop - start, CUT // (8 * self.R * max(layer.m, layer.n) * layer.groups)):
            A, E = self.dense_rows(slice(start + chunk.start, start + chunk.stop), dtype)
            for k in range(self.K):
                gradients[k, chunk] = (E[:, k, ..., part].mT @ A).transpose(0, 1).flatten(1)  # (G, b, p, m) → (b, G·p·m)
        return gradients

    def dense_rows(self, chunk: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Inputs ``(G, b, R, m)``, one-hot for an embedding, and errors ``(G, K, b, R, n)``."""
        A, E = self._rows(chunk, dtype)
        layer, b = self.layer, chunk.stop - chunk.start
        if layer.diagonal:
            A = layer.input_rows(A.reshape(b, -1)).to(dtype)
        return A.reshape(layer.groups, b, self.R, layer.m), E.reshape(layer.groups, self.K, b, self.R, layer.n)

    def flat(self, dtype: torch.dtype, datapoints: slice = slice(None)) -> Tensor:
        """The columns themselves, as rows: ``(K·N, P)`` in the order of ``params``. For small blocks, and mixed ties."""
        start, stop, _ = datapoints.indices(self.N)
        columns = torch.zeros(self.K, stop - start, self.size, dtype=dtype, device=self.params[0].device)
        for call in self.calls:
            alone = Columns(call.layer.parameters, [Call(call.layer, call.x, call.errors)], self.N, self.K)
            gradients = alone.of_neurons(slice(None), dtype, datapoints)
            columns.index_add_(2, self.positions(call.layer), gradients)
        return columns.flatten(0, 1)

    def positions(self, layer: Layer) -> Tensor:
        """Where the entries of the matrix ``[W, bias]`` are in the block's flat vector: ``(G·n·m,)``."""
        offsets = self.offsets
        at = [
            torch.arange(offsets[id(p)], offsets[id(p)] + p.numel(), device=p.device).reshape(p.shape)
            for p in layer.parameters
        ]
        return layer.join(at[0], at[1] if len(at) > 1 else None).flatten()

    def flat_weights(self, weights: Weights, dtype: torch.dtype) -> Tensor:
        """A diagonal as one vector ``(P,)``."""
        pairs = zip(weights, self.params, strict=True)
        return torch.cat([torch.as_tensor(w, dtype=dtype, device=p.device).expand(p.shape).flatten() for w, p in pairs])

    def _matrix_weights(self, weights: Weights, dtype: torch.dtype) -> Tensor:
        """A diagonal in the layout of the matrix: ``(G, n, m)``."""
        layer = self.layer
        return self.flat_weights(weights, dtype)[self.positions(layer)].reshape(layer.groups, layer.n, layer.m)

    def diagonal(self, dtype: torch.dtype) -> list[Tensor]:
        """``diag(G Gᵀ)``: for each parameter the sum of its squared gradients."""
        if not self.calls:
            return [torch.zeros(p.shape, dtype=dtype, device=p.device) for p in self.params]
        if self.one_matrix and self.R == 1:  # (e aᵀ)² = e² (a²)ᵀ
            part, layer = self.calls[0].at(slice(None), dtype), self.layer
            x = part.x if layer.diagonal else part.x.square()
            squares = sum(layer.weight_gradient(x, e.square()) for e in part.errors)
            assert isinstance(squares, Tensor)
            flat = squares.new_zeros(self.size).index_add_(0, self.positions(layer), squares.flatten())
        else:
            flat = torch.zeros(self.size, dtype=dtype, device=self.params[0].device)
            for chunk in chunks(self.N, BUDGET // (8 * self.K * self.size)):
                flat += self.flat(dtype, chunk).square().sum(0)
        return self.pieces(flat)

    def own(self, weights: Weights | None, dtype: torch.dtype) -> Tensor:
        """Each datapoint's own block of ``Gᵀ diag(weights) G``: ``(N, K, K)``."""
        own = torch.zeros(self.N, self.K, self.K, dtype=dtype, device=self.params[0].device)
        if not self.calls:
            return own
        separable = weights is None or not any(isinstance(w, Tensor) for w in weights)
        if self.one_matrix and self.R == 1 and separable and self.layer.groups == 1 and not self.layer.diagonal:
            A, E = self._rows(slice(0, self.N), dtype)
            return torch.einsum("kin,lin->ikl", E[0], E[0]) * (A[0].square() * self._input_weights(weights, own)).sum(1)[:, None, None]
        root = None if weights is None else self.flat_weights(weights, dtype).sqrt()
        for chunk in chunks(self.N, BUDGET // (8 * self.K * self.size)):
            columns = self.flat(dtype, chunk).reshape(self.K, -1, self.size)
            columns = columns if root is None else columns * root
            own[chunk] = torch.einsum("kip,lip->ikl", columns, columns)
        return own


def _sum_rows(products: Tensor, R1: int, R2: int) -> Tensor:
    """``(G, b₁·R₁, K, b₂·R₂)`` summed over groups and over the rows of each datapoint: ``(b₁, K, b₂)``."""
    summed = products.sum(0) if len(products) > 1 else products[0]
    if R1 == R2 == 1:
        return summed
    return summed.unflatten(2, (-1, R2)).unflatten(0, (-1, R1)).sum((1, 4))


def blocks_of(params: list[nn.Parameter], calls: list[Call], N: int, K: int) -> list[Columns]:
    """One block per set of parameters that share a layer, in the order of ``params``."""
    parent = {id(p): id(p) for p in params}

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for call in calls:
        first, *others = (id(p) for p in call.layer.parameters)
        for other in others:
            parent[root(other)] = root(first)
    members: dict[int, list[nn.Parameter]] = {}
    for p in params:
        members.setdefault(root(id(p)), []).append(p)
    blocks = []
    for key, ps in members.items():
        mine = [c for c in calls if root(id(c.layer.weight)) == key]
        if mine and len(ps) == len(mine[0].layer.parameters):
            ps = mine[0].layer.parameters  # weight first, then bias, whatever the module's order
        blocks.append(Columns(ps, mine, N, K))
    return blocks
