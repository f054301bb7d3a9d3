"""Second moments of patches: with and without the patches, against those of the rows a convolution has."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from foof.layers import Conv
from foof.patches import Subset, axes_of, by_patches, second_moment, without_patches

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@st.composite
def convolutions(draw):
    """A convolution, and an input it can take, often one smaller than its kernel."""
    D = draw(st.integers(1, 3))
    most = {1: 6, 2: 4, 3: 2}[D]
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    groups = draw(st.integers(1, 3))
    kernel = draw(st.tuples(*[st.integers(1, most)] * D))
    dilation = draw(st.tuples(*[st.integers(1, 3)] * D))
    stride = draw(st.tuples(*[st.integers(1, 4)] * D))
    padding = "same" if stride == (1,) * D and draw(st.booleans()) else draw(st.tuples(*[st.integers(0, most)] * D))
    torch.manual_seed(draw(st.integers(0, 10**6)))
    conv = CONVOLUTIONS[D - 1](groups * draw(st.integers(1, 3)), groups, kernel, stride, padding, dilation, groups,
                               bias=draw(st.booleans()), padding_mode=mode, dtype=torch.float64)  # fmt: skip
    sides = conv._reversed_padding_repeated_twice
    sizes = []
    for i in range(D):
        both = sides[-2 * i - 2 :][:2]
        least = max(1, dilation[i] * (kernel[i] - 1) + 1 - sum(both))
        if mode in ("reflect", "circular"):
            least = max(least, max(both) + (mode == "reflect"))
        sizes.append(least + draw(st.integers(0, 2 * most)))
    x = torch.randn(draw(st.integers(1, 3)), conv.in_channels, *sizes, dtype=torch.float64)
    return Conv("", conv), x if draw(st.booleans()) else x[0]


def close(ours, theirs):
    return (ours - theirs).norm() <= 1e-12 * theirs.norm()


@settings(max_examples=300)
@given(convolutions())
def test_both_ways_are_the_product_of_the_rows(case):
    layer, x = case
    rows = layer.input_rows(x).flatten(-3, -2)
    theirs = (rows.mT @ rows).reshape(layer.groups, layer.m, layer.m)
    assert close(second_moment(layer, x).reshape(theirs.shape), theirs)
    inputs = layer.m - layer.has_bias
    for way in (by_patches, without_patches):
        moment = torch.zeros_like(theirs)
        way(layer._pad(layer._batched(x)), axes_of(layer, layer._batched(x), Subset()), moment)
        assert close(moment[:, :, :inputs], theirs[:, :, :inputs])
