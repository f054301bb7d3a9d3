"""The kinds of layer, each seen as ``b = W a``: inputs and errors as rows, weight (and bias) as one matrix and back.

Past this file every layer looks the same: inputs ``a`` are ``(N, R, m)`` and errors ``e`` are ``(N, R, n)`` for N datapoints
with R rows each (1 for a plain linear layer, locations for a convolution, tokens for a sequence). A grouped convolution has one
matrix per group and a leading group dimension everywhere: ``(G, N, R, m)``. A trainable bias is one more input, always 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foof import _torch
from foof.linalg import product, times_transposed


class Layer(ABC):
    """One module whose forward is ``b = W a`` in disguise.

    ``n`` and ``m`` are the sizes of (one group's) matrix ``[W, bias]``; ``m`` counts the bias input where there is one.
    The weight is passed in rather than read from the module, since ``functional_call`` and FSDP swap it.
    """

    diagonal = False  # is the second moment of the inputs diagonal (one-hot inputs)?
    rows_first = True  # does the weight's first dimension run over the rows of its matrix?
    n: int
    m: int
    groups: int = 1
    cutting = 0  # what it costs to have the inputs as rows, in multiplications for each number
    functional = False  # does its module compute with the weight past any hook, so that inputs and gradients are seen but no errors?

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True) -> None:
        self.name, self.module = name, module
        bias = getattr(module, "bias", None)
        self.has_bias = with_bias and isinstance(bias, Tensor) and bias.requires_grad

    @property
    def label(self) -> str:
        """A name for messages, also where the layer is the whole model."""
        return self.name or type(self.module).__name__

    @property
    def module_name(self) -> str:
        """What ``exclude=`` calls it."""
        return self.name

    def without_bias(self) -> Layer:
        """The same, with a bias that is somebody else's."""
        return type(self)(self.name, self.module, with_bias=False)

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight  # type: ignore[return-value]

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias, where it is trained together with the weight."""
        return self.module.bias if self.has_bias else None  # type: ignore[return-value]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight] + ([self.bias] if self.bias is not None else [])

    @property
    def layout(self) -> tuple[Any, ...]:
        """How the weight is read as matrices: layers of one weight and one layout use the same matrix."""
        return self.diagonal, self.rows_first, self.groups, self.n, self.m - self.has_bias

    @property
    def prior_precision(self) -> float:
        """Precision of the usual (Kaiming) initialisation: ``fan_in / 2``."""
        return (self.m - self.has_bias) / 2

    @abstractmethod
    def input_rows(self, x: Tensor) -> Tensor:
        """The module's input as ``a``: ``(N, R, m)``, or ``(G, N, R, m)``."""

    @abstractmethod
    def error_rows(self, e: Tensor) -> Tensor:
        """The gradient of the module's output as rows: ``(N, R, n)``, or ``(G, N, R, n)``."""

    def inputs_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The inputs among what the module was called with."""
        return args[0] if args else next(iter(kwargs.values()))

    def input_matrix(self, x: Tensor) -> Tensor:
        """``A``: all rows of the inputs, ``(N·R, m)``, or ``(G, N·R, m)``."""
        return self.input_rows(x).flatten(-3, -2)

    def error_matrix(self, e: Tensor) -> Tensor:
        """``E``: all rows of the errors, ``(N·R, n)``, or ``(G, N·R, n)``."""
        return self.error_rows(e).flatten(-3, -2)

    def rows(self, e: Tensor) -> int:
        """How many rows ``N·R`` an error tensor of this layer holds."""
        return e.numel() // (self.n * self.groups)

    @abstractmethod
    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``b = W a`` for another weight and bias of the same shapes: what the module itself would return."""

    @abstractmethod
    def input_gradient(self, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        """``dL/dx`` for ``e = dL/db``, in the shape of ``x``."""

    def weight_gradient(self, x: Tensor, e: Tensor) -> Tensor:
        """``Eᵀ A``, the plain gradient of ``[W, bias]`` as a matrix ``(n, m)`` or ``(G, n, m)``."""
        return product(self.error_matrix(e).mT, self.input_matrix(x))

    def gradients(self, x: Tensor, e: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """``dL/dx`` and ``Eᵀ A``, for a layer that can compute both at once."""
        return self.input_gradient(x, e, weight), self.weight_gradient(x, e)

    def bias_gradient(self, e: Tensor) -> Tensor:
        """The plain gradient of the bias: the errors summed over all rows, ``(G·n,)``."""
        return self.error_matrix(e).sum(-2).flatten()

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Weight and bias (or their gradients) as the matrix ``(n, m)`` or ``(G, n, m)``."""
        matrix = weight.reshape(self.groups, self.n, -1)
        if bias is not None:
            matrix = torch.cat([matrix, bias.reshape(self.groups, self.n, 1)], dim=-1)
        return matrix if self.groups > 1 else matrix[0]

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        """The inverse of ``join``: tensors of the shape of the weight and of the bias."""
        shape = self.weight_shape
        if not self.has_bias:
            return matrix.reshape(shape), None
        return matrix[..., :-1].reshape(shape), matrix[..., -1].reshape(-1)

    @property
    def weight_shape(self) -> torch.Size:
        return self.weight.shape

    def _append_one(self, a: Tensor) -> Tensor:
        return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1) if self.has_bias else a


class Linear(Layer):
    """``nn.Linear`` over any number of leading dimensions; the first is the datapoint, the others are rows."""

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True) -> None:
        super().__init__(name, module, with_bias)
        self.n, inputs = self.weight.shape
        self.m = inputs + self.has_bias

    def input_rows(self, x: Tensor) -> Tensor:
        return self._append_one(_datapoints_and_rows(x))

    def error_rows(self, e: Tensor) -> Tensor:
        return _datapoints_and_rows(e)

    def input_matrix(self, x: Tensor) -> Tensor:
        return self._append_one(x.reshape(-1, x.shape[-1]))

    def error_matrix(self, e: Tensor) -> Tensor:
        return e.reshape(-1, self.n)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        return times_transposed(self.error_matrix(e), weight.mT).reshape(x.shape)


class TransposedLinear(Linear):
    """A linear layer that stores its weight as ``(in, out)``, such as ``Conv1D`` of transformers' GPT-2."""

    rows_first = False

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True) -> None:
        Layer.__init__(self, name, module, with_bias)
        inputs, self.n = self.weight.shape
        self.m = inputs + self.has_bias

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.mT, bias)

    def input_gradient(self, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        return times_transposed(self.error_matrix(e), weight).reshape(x.shape)

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().join(weight.mT, bias)

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.has_bias:
            return matrix.mT.contiguous(), None
        return matrix[..., :-1].mT.contiguous(), matrix[..., -1].contiguous()


class Projection(Linear):
    """``in_proj_weight`` of ``nn.MultiheadAttention``: three matrices ``(3, n, m)``, for query, key and value; or one of ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight``, which it has where these are of different widths.

    The module computes with them past any hook, so nobody sees their errors; what is done with inputs and gradients alone can be done.
    """

    functional = True
    READS: ClassVar = {"in_proj": ("query", "key", "value"), "q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",)}

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True) -> None:
        """name: that of the module, and which one: ``"encoder.self_attn.in_proj"``."""
        self.name, self.module, self.which = name, module, name.rpartition(".")[2]
        self.groups, self.rows_first = len(self.READS[self.which]), self.which != "in_proj"
        bias = module.in_proj_bias
        self.has_bias = with_bias and self.groups == 3 and isinstance(bias, Tensor) and bias.requires_grad  # else of three weights
        self.n = self.weight.shape[0] // self.groups
        self.m = self.weight.shape[1] + self.has_bias

    @property
    def module_name(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def weight(self) -> nn.Parameter:
        return getattr(self.module, f"{self.which}_weight")

    @property
    def bias(self) -> nn.Parameter | None:
        return self.module.in_proj_bias if self.has_bias else None  # type: ignore[return-value]

    def inputs_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Query, key and value; or the one that is projected."""
        given = dict(zip(("query", "key", "value"), args, strict=False)) | dict(kwargs)
        read = [given[name] for name in self.READS[self.which]]
        return tuple(read) if self.groups > 1 else read[0]


class Conv(Layer):
    """``nn.Conv1d/2d/3d``: the rows are the patches under the kernel, one per output location.

    Patches are only cut out where they are needed (second moments, few rows); plain gradients use the convolution's own kernels.
    """

    cutting = 100  # copies of patches, as measured on a CPU

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True) -> None:
        super().__init__(name, module, with_bias)
        self.groups = module.groups  # type: ignore[assignment]
        self.rows_first = self.groups == 1
        self.n = self.weight.shape[0] // self.groups
        self.m = math.prod(self.weight.shape[1:]) + self.has_bias
        self.spatial = self.weight.dim() - 2
        conv: Any = module
        self.stride, self.dilation, self.kernel = conv.stride, conv.dilation, conv.kernel_size
        self.padding_mode: str = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        self.both_sides = _torch.padding_of_both_sides(module)
        left, right = self.both_sides[::2], self.both_sides[1::2]
        self.native_padding = left[::-1] if self.padding_mode == "constant" and left == right else None

    def input_rows(self, x: Tensor) -> Tensor:
        x = self._pad(self.batched(x))
        for d in range(self.spatial):  # window of the kernel's extent, every stride; then every dilation-th entry of it
            x = x.unfold(2 + d, self.dilation[d] * (self.kernel[d] - 1) + 1, self.stride[d])[..., :: self.dilation[d]]
        N, C, k = x.shape[0], x.shape[1], self.spatial
        x = x.unflatten(1, (self.groups, C // self.groups))  # (N, G, C/G, *locations, *kernel)
        order = [1, 0, *range(3, 3 + k), 2, *range(3 + k, 3 + 2 * k)]
        a = x.permute(order).reshape(self.groups, N, math.prod(x.shape[3 : 3 + k]), self.m - self.has_bias)
        return self._append_one(a if self.groups > 1 else a[0])

    def error_rows(self, e: Tensor) -> Tensor:
        e = self.batched(e).flatten(2)  # (N, G·n, R)
        e = e.unflatten(1, (self.groups, self.n)).permute(1, 0, 3, 2)
        return e if self.groups > 1 else e[0]

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.spatial - 1]
        return convolve(self._pad(self.batched(x)), weight, bias, self.stride, 0, self.dilation, self.groups)

    def input_gradient(self, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        if self.native_padding is not None:
            gradient = self._backward(self.batched(x), e, weight, self.native_padding, (True, False))[0]
        else:  # the padding is its own linear map: convolve the padded input without padding, then pull back through the pad
            with torch.enable_grad():
                source = self.batched(x).detach().requires_grad_()
                padded = self._pad(source)
            gradient = self._backward(padded.detach(), e, weight, [0] * self.spatial, (True, False))[0]
            gradient = torch.autograd.grad(padded, source, gradient)[0]
        return gradient if x.dim() == gradient.dim() else gradient[0]

    def weight_gradient(self, x: Tensor, e: Tensor) -> Tensor:
        x, padding = self.batched(x), self.native_padding
        if padding is None:
            x, padding = self._pad(x), [0] * self.spatial
        shape_only = x.new_empty(()).expand(self.weight_shape)
        return self._joined(self._backward(x, e, shape_only, padding, (False, True))[1], e)

    def gradients(self, x: Tensor, e: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if self.native_padding is None:
            return super().gradients(x, e, weight)
        of_x, of_weight = self._backward(self.batched(x), e, weight, self.native_padding, (True, True))[:2]
        return of_x if x.dim() == of_x.dim() else of_x[0], self._joined(of_weight, e)

    def _joined(self, of_weight: Tensor, e: Tensor) -> Tensor:
        return self.join(of_weight, self.batched(e).flatten(2).sum((0, 2)) if self.has_bias else None)

    def _backward(self, x: Tensor, e: Tensor, weight: Tensor, padding: list[int], wanted: tuple[bool, bool]) -> Any:
        """(input gradient, weight gradient) by the convolution's own backward kernels."""
        return torch.ops.aten.convolution_backward(
            self.batched(e), x, weight, None, self.stride, padding, self.dilation, False, [0] * self.spatial, self.groups,
            [*wanted, False],
        )  # fmt: skip

    def batched(self, x: Tensor) -> Tensor:
        """An input or output with its dimension of datapoints, also where the module was given one alone."""
        return x if x.dim() == self.spatial + 2 else x.unsqueeze(0)

    def locations(self, x: Tensor) -> int:
        """How many patches each datapoint of an input has."""
        sizes = zip(x.shape[-self.spatial :], self.both_sides[-2::-2], self.both_sides[::-2], self.dilation, self.kernel, self.stride,
                    strict=True)  # fmt: skip
        return math.prod((size + left + right - d * (k - 1) - 1) // s + 1 for size, left, right, d, k, s in sizes)

    def _pad(self, x: Tensor) -> Tensor:
        return F.pad(x, self.both_sides, self.padding_mode) if any(self.both_sides) else x


class Embedding(Layer):
    """``nn.Embedding``: the input is one-hot, so its second moment is diagonal: how often each index occurs per datapoint.

    As a matrix the weight is ``(n, m)`` = (features, indices), the transpose of how it is stored.
    """

    diagonal = True
    rows_first = False

    def __init__(self, name: str, module: nn.Module, with_bias: bool = True) -> None:
        super().__init__(name, module, with_bias)
        self.m, self.n = self.weight.shape
        self.padding_idx: int | None = module.padding_idx  # type: ignore[assignment]

    @property
    def prior_precision(self) -> float:
        return 1.0  # nn.Embedding is initialised with unit variance

    def input_rows(self, x: Tensor) -> Tensor:
        """One-hot rows ``(N, R, m)``: for tests and small models; nothing in training calls it."""
        one_hot = F.one_hot(x.reshape(len(x) if x.dim() else 1, -1).long(), self.m).to(self.weight.dtype)
        if self.padding_idx is not None:
            one_hot[..., self.padding_idx] = 0  # this row has no gradient, so it is no input either
        return one_hot

    def error_rows(self, e: Tensor) -> Tensor:
        return _datapoints_and_rows(e)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the module's, with the padding index as an input that is zero (its row has no gradient)."""
        b = F.embedding(x, weight)
        return b if self.padding_idx is None else b * (x != self.padding_idx).unsqueeze(-1)

    def input_gradient(self, x: Tensor, e: Tensor, weight: Tensor) -> Tensor:
        raise TypeError(f"{self.label}: its inputs are indices, which have no gradient; autograd never asks for one.")

    def counts(self, x: Tensor) -> Tensor:
        """How often each index occurs in ``x``: the diagonal of ``AᵀA``, ``(m,)``."""
        counts = torch.bincount(x.reshape(-1), minlength=self.m)
        if self.padding_idx is not None:
            counts[self.padding_idx] = 0
        return counts.to(torch.promote_types(self.weight.dtype, torch.float32))

    def weight_gradient(self, x: Tensor, e: Tensor) -> Tensor:
        gradient = e.new_zeros(self.m, self.n).index_add_(0, x.reshape(-1), e.reshape(-1, self.n))
        if self.padding_idx is not None:
            gradient[self.padding_idx] = 0
        return gradient.mT

    def join(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight.mT

    def split(self, matrix: Tensor) -> tuple[Tensor, Tensor | None]:
        return matrix.mT.contiguous(), None


def _datapoints_and_rows(x: Tensor) -> Tensor:
    """``(*, k)`` as ``(N, R, k)``: the first dimension is the datapoint, those between are rows; one vector is one datapoint."""
    return x.reshape(len(x) if x.dim() > 1 else 1, math.prod(x.shape[1:-1]), x.shape[-1])
