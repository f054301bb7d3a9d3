"""Second moments of patches: with and without the patches, against those of the rows a convolution has."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import foof
from foof.layers import Conv
from foof.patches import Subset, axes_of, by_patches, cheaper_without_patches, second_moment, without_patches

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


@settings(max_examples=400)
@given(convolutions())
def test_both_ways_are_the_product_of_the_rows(case):
    layer, x = case
    rows = layer.input_rows(x).flatten(-3, -2)
    theirs = (rows.mT @ rows).reshape(layer.groups, layer.m, layer.m)
    assert close(second_moment(layer, x).reshape(theirs.shape), theirs)
    inputs = layer.m - layer.has_bias
    for way in (by_patches, without_patches):
        moment = torch.zeros_like(theirs)
        way(layer._pad(layer.batched(x)), axes_of(layer, layer.batched(x), Subset()), moment)
        assert close(moment[:, :, :inputs], theirs[:, :, :inputs])


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("every", [1, 2])
def test_spans_count_each_product_once(half, every):
    """All small convolutions of one dimension: for each pair of offsets, the positions whose product is not known to be zero."""
    for k, s, d, padding, size in itertools.product(range(1, 6), range(1, 5), range(1, 4), range(5), range(1, 9)):
        if size + 2 * padding < d * (k - 1) + 1:
            continue
        layer = Conv("", nn.Conv1d(1, 1, k, s, padding, d))
        (axis,) = axes_of(layer, torch.empty(1, 1, size), Subset(locations=every, shift=1))
        expected, found = Counter(), Counter()
        for u, v, r in itertools.product(range(k), range(k), range(axis.R)):
            p, q = (axis.start + axis.s * r + d * offset for offset in (u, v))
            if p in axis.data and q in axis.data and (v >= u or not half):
                expected[u, v, p] += 1
        for span in axis.spans(half):
            for p, u, delta in itertools.product(span.positions, span.offsets, span.differences):
                if u + delta in range(k) and p + d * delta in axis.data:
                    found[u, u + delta, p] += 1
            assert 0 <= span.seen(d).start <= span.seen(d).stop <= size + 2 * padding
        assert found == expected


@settings(max_examples=100)
@given(convolutions(), st.integers(1, 3), st.integers(1, 4), st.integers(0, 100))
def test_a_subset_is_scaled_to_stand_for_all_rows(case, datapoints, locations, shift):
    layer, x = case
    all_rows = layer.input_rows(x)  # (..., N, R, m)
    with torch.no_grad():
        out = layer.module(x)
    grid = out.shape[-layer.spatial :]
    chosen = torch.zeros(all_rows.shape[-3], *grid, dtype=torch.bool)
    index, left = [slice(shift % min(datapoints, len(chosen)), None, datapoints)], shift
    for size in grid:
        every = min(locations, size)
        index.append(slice(left % every, None, every))
        left //= every
    chosen[tuple(index)] = True
    rows = all_rows.flatten(-3, -2)[..., chosen.flatten(), :]
    theirs = rows.mT @ rows * (chosen.numel() / chosen.sum())
    assert close(second_moment(layer, x, Subset(datapoints, locations, shift)), theirs)


def test_subsets_of_consecutive_shifts_come_by_all_rows():
    layer, x = Conv("", nn.Conv2d(2, 2, 3, padding=1, dtype=torch.float64)), torch.randn(6, 2, 7, 5, dtype=torch.float64)
    parts = [second_moment(layer, x, Subset(locations=2, shift=shift)) for shift in range(4)]
    shares = torch.tensor([4 * 3, 3 * 3, 4 * 2, 3 * 2]).double() / 35
    assert close(sum(share * part for share, part in zip(shares, parts, strict=True)), second_moment(layer, x))


def test_a_subset_has_rows():
    with pytest.raises(ValueError, match="n ≥ 1"):
        Subset(locations=0)
    with pytest.raises(ValueError, match="shift"):
        Subset(shift=-1)


def test_no_datapoints_have_no_moment():
    layer = Conv("", nn.Conv2d(2, 2, 3))
    assert torch.equal(second_moment(layer, torch.zeros(0, 2, 5, 5)), torch.zeros(19, 19))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_are_float32_whatever_autocast_says(dtype):
    """Half-precision inputs are exact in float32, and so are their products to rounding."""
    torch.manual_seed(0)
    layer, x = Conv("", nn.Conv2d(8, 8, 3, padding=1)), torch.randn(16, 8, 16, 16, requires_grad=True).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moment = second_moment(layer, x)
    rows = layer.input_rows(x.double()).flatten(-3, -2)
    assert moment.dtype == torch.float32
    assert not moment.requires_grad
    assert (moment - rows.mT @ rows).norm() <= 1e-6 * moment.norm()


def test_border_values_cancel_nothing():
    """Values a million times larger at the border stay out of the sums they are no part of."""
    layer = Conv("", nn.Conv2d(1, 1, 3, bias=False, dtype=torch.float64))
    x = torch.randn(4, 1, 12, 12, dtype=torch.float64)
    x[:, :, 0] *= 1e8
    rows = layer.input_rows(x).flatten(-3, -2)
    moment = torch.zeros(1, 9, 9, dtype=torch.float64)
    without_patches(x, axes_of(layer, x, Subset()), moment)
    assert torch.allclose(moment[0], rows.mT @ rows, rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    ("conv", "size", "without"),
    [
        (nn.Conv2d(64, 64, 3, padding=1), 32, True),
        (nn.Conv2d(16, 16, 3, padding=1), 16, True),
        (nn.Conv2d(64, 64, 4, stride=4), 32, False),  # patches do not overlap
        (nn.Conv2d(1, 6, 5), 28, False),  # LeNet: too small to be worth 81 calls
    ],
)
def test_the_cheaper_way_is_taken(conv, size, without):
    layer, x = Conv("", conv), torch.empty(100, conv.in_channels, size, size)
    assert cheaper_without_patches(x, axes_of(layer, x, Subset()), layer.groups) is without


@settings(max_examples=60)
@given(convolutions())
def test_both_gradients_at_once_are_those_of_autograd(case):
    layer, x = case
    x.requires_grad_()
    conv = layer.module
    out = conv(x)
    e = torch.randn_like(out)
    theirs = torch.autograd.grad(out, [x, *conv.parameters()], e)
    of_x, matrix = layer.gradients(x.detach(), e, conv.weight.detach())
    assert of_x.shape == x.shape
    assert close(of_x, theirs[0])
    for ours, parameter in zip(layer.split(matrix), theirs[1:], strict=False):
        assert close(ours, parameter)


def test_the_optimizer_takes_the_moment_of_many_patches_and_keeps_the_rows_of_few():
    """Either way Σ is the mean over datapoints of the sum over patches."""
    torch.manual_seed(0)
    for conv, size in ((nn.Conv2d(16, 4, 3, padding=1), 12), (nn.Conv2d(16, 4, 3), 4)):
        model, x = nn.Sequential(conv.double(), nn.Flatten()), torch.randn(8, 16, size, size, dtype=torch.float64)
        layer = Conv("0", conv)
        opt = foof.FOOF(model, lr=0.1, damping=1.0, T=1, S=1)
        model(x).square().mean().backward()
        opt.step()
        rows = layer.input_rows(x).flatten(-3, -2)
        assert (len(rows) > layer.m) == (size == 12)
        assert close(opt.second_moments()["0"]["Sigma"], rows.mT @ rows / 8)


def test_channels_last_is_a_layout_and_nothing_else():
    """Moments and gradients of inputs, errors and weights that are stored channels last."""
    torch.manual_seed(0)
    layer = Conv("", nn.Conv2d(8, 4, 3, padding=1, dtype=torch.float64))
    x, e = torch.randn(5, 8, 9, 9, dtype=torch.float64), torch.randn(5, 4, 9, 9, dtype=torch.float64)
    weight = layer.weight.detach()
    last = [t.contiguous(memory_format=torch.channels_last) for t in (x, e, weight)]
    assert close(second_moment(layer, last[0]), second_moment(layer, x))
    for ours, theirs in zip(layer.gradients(*last), layer.gradients(x, e, weight), strict=True):
        assert close(ours, theirs)
    model = nn.Sequential(layer.module, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 81, 3, dtype=torch.float64))
    steps = []
    for stored in (torch.contiguous_format, torch.channels_last):
        twin = copy.deepcopy(model).to(memory_format=stored)
        opt = foof.FOOF(twin, lr=0.1, damping=1.0, T=1, S=1)
        for _ in range(3):
            opt.zero_grad()
            twin(x.contiguous(memory_format=stored)).square().mean().backward()
            opt.step()
        steps.append(torch.cat([p.detach().flatten() for p in twin.parameters()]))
    assert close(*steps)
