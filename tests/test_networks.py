"""The paper's convolutional networks and autoencoder, and the augmentation they are trained with."""

import itertools
import math

import pytest
import torch
from torch import nn

from foof.study.train.augmentation import augment
from foof.study.train.networks import autoencoder, resnet18, vgg11


def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_resnet18_has_the_known_number_of_parameters():
    """11,173,962 for CIFAR-10, of which 9,600 are batch norm's; it is quadratic in the width but for norms and the ends."""
    model = resnet18(3, 10)
    assert count(model) == 11_173_962
    assert count(resnet18(3, 10, train_norm=False)) == 11_173_962 - 9_600
    assert count(resnet18(3, 10, norm=False)) == 11_173_962 - 9_600 + 4_800
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 20


def test_vgg11_has_the_known_number_of_parameters():
    assert count(vgg11(3, 10)) == 9_225_610
    assert not any(isinstance(m, nn.BatchNorm2d) for m in vgg11(3, 10, width=4).modules())


def test_the_autoencoder_has_the_sizes_of_the_paper():
    model = autoencoder(784)
    linear = [m for m in model if isinstance(m, nn.Linear)]
    assert [m.in_features for m in linear] + [linear[-1].out_features] == [784, 1000, 500, 250, 30, 250, 500, 1000, 784]
    followed = [
        isinstance(after, nn.Tanh) for before, after in zip(model, [*model[1:], None], strict=True) if isinstance(before, nn.Linear)
    ]
    assert followed == [True, True, True, False, True, True, True, False]
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 784)


@pytest.mark.parametrize("model", [resnet18(3, 10, width=8, generator=torch.Generator().manual_seed(0)),
                                   resnet18(3, 10, width=8, norm=False, generator=torch.Generator().manual_seed(0)),
                                   vgg11(3, 10, width=8, generator=torch.Generator().manual_seed(0))],
                         ids=["resnet", "resnet without norm", "vgg"])  # fmt: skip
def test_weights_are_kaimings_and_gradients_reach_all_of_them(model):
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            m = module.weight[0].numel()
            spread = 6 / math.sqrt(2 * module.weight.numel())
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / m), rel=spread)
            assert module.bias is None or not module.bias.any()
    out = model(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    assert out.shape == (4, 10)
    out.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


def test_a_generator_decides_the_weights():
    first, second, other = (vgg11(3, 10, 4, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_every_augmented_image_is_a_flipped_crop():
    x = torch.randn(50, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 10  # nowhere zero
    padded = torch.nn.functional.pad(x, [4] * 4)
    found = []
    for k, image in enumerate(augment(x, seed=3, step=7)):
        crops = [
            (i, j, flip)
            for i, j, flip in itertools.product(range(9), range(9), (False, True))
            if torch.equal(image.flip(2) if flip else image, padded[k, :, i : i + 8, j : j + 8])
        ]
        assert len(crops) == 1
        found += crops
    down, right, flipped = map(set, zip(*found, strict=True))
    assert down == right == set(range(9))
    assert flipped == {False, True}


def test_augmentation_depends_on_seed_and_step_alone():
    """So that a run resumed at any step sees the same images, whatever was drawn in between."""
    x = torch.randn(20, 3, 8, 8)
    once = augment(x, seed=1, step=2)
    torch.rand(3)
    assert torch.equal(augment(x, seed=1, step=2), once)
    assert not torch.equal(augment(x, seed=1, step=3), once)
    assert not torch.equal(augment(x, seed=2, step=2), once)
    assert torch.equal(augment(x, seed=1, step=2, padding=0).sort(-1).values, x.sort(-1).values)
