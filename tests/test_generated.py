"""Images made by us in place of CURVES and FACES."""

import numpy as np
import pytest
import torch
from scipy.io import savemat

from foof.study.data.curves import SIZE, curves, path, read_curves
from foof.study.data.faces import patches, read_faces, standardise


def test_a_curve_passes_its_three_points_in_order():
    points = torch.rand(20, 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 28
    ends = path(points)
    assert torch.allclose(ends[:, 0], points[:, 0])
    assert torch.allclose(ends[:, -1], points[:, 2])
    nearest = (ends - points[:, 1:2]).norm(dim=-1).min(1).values
    step = (ends[:, 1:] - ends[:, :-1]).norm(dim=-1).max(1).values
    assert (nearest <= step).all()


def test_curves_are_white_strokes_on_black():
    images = curves(200, torch.Generator().manual_seed(0))
    assert images.shape == (200, 1, SIZE, SIZE)
    assert images.dtype == np.uint8
    assert (images.max(axis=(1, 2, 3)) > 200).all()
    assert 0.02 < (images > 0).mean() < 0.2
    assert ((images > 0) & (images < 255)).any(axis=(1, 2, 3)).all()  # anti-aliased


def test_curves_are_always_the_same_and_train_is_not_test():
    (train, labels), (test, _) = read_curves((30, 20))
    (again, _), _ = read_curves((30, 20))
    assert np.array_equal(train, again)
    assert labels.tolist() == [0] * 30
    assert not any((image == train).all(axis=(1, 2, 3)).any() for image in test)


@pytest.fixture
def olivetti(tmp_path):
    faces = np.random.default_rng(0).integers(0, 256, (64 * 64, 400), dtype=np.uint8)
    savemat(tmp_path / "olivettifaces.mat", {"faces": faces})
    return tmp_path


def test_faces_are_split_by_person(olivetti):
    (train, train_label), (test, test_label) = read_faces(olivetti, per_picture=2)
    assert train.shape == (600, 1, 25, 25)
    assert test.shape == (200, 1, 25, 25)
    assert set(train_label) == set(range(30))
    assert set(test_label) == set(range(30, 40))
    (again, _), _ = read_faces(olivetti, per_picture=2)
    assert np.array_equal(train, again)


def test_faces_need_the_official_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="olivettifaces"):
        read_faces(tmp_path)


def test_patches_stay_inside_their_picture_and_see_all_of_its_directions():
    """On a ramp, a patch is a ramp with the slope of its scale, turned by its angle; and nothing comes from outside."""
    ramp = np.broadcast_to(64 + 2 * np.arange(64, dtype=np.uint8), (1, 1, 64, 64)).copy()
    seen = patches(ramp, 500, torch.Generator().manual_seed(0)).astype(np.float64)[:, 0]
    assert seen.min() >= 64
    assert seen.max() <= 64 + 2 * 63
    across, down = seen[:, 12, -1] - seen[:, 12, 0], seen[:, -1, 12] - seen[:, 0, 12]
    scale = np.hypot(across, down) / (2 * 24)
    assert 1.35 < scale.min() < 1.45
    assert 1.75 < scale.max() < 1.85
    angle = np.degrees(np.arctan2(down, across))
    assert angle.min() < -80
    assert angle.max() > 80
    assert np.abs(angle).max() < 92


def test_faces_are_standardised_pixel_by_pixel_and_by_one_scale():
    random = np.random.default_rng(0)
    train, test = (random.integers(0, 256, (n, 1, 25, 25), dtype=np.uint8) for n in (50, 20))
    x, y = standardise(train, test)
    assert x.double().mean(0).abs().max() < 1e-6
    assert x.double().var(0, correction=0).mean().item() == pytest.approx(1, abs=1e-6)
    scale = (x[1] - x[0]) / torch.from_numpy(train[1].astype(np.float32) - train[0])
    assert torch.allclose(y[1] - y[0], torch.from_numpy(test[1].astype(np.float32) - test[0]) * scale.nanmean(), atol=1e-5)
