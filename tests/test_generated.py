"""Images made by us in place of CURVES and FACES."""

import numpy as np
import pytest
import torch
from scipy.io import savemat

from foof.study.data import datasets
from foof.study.data.curves import SIZE, curves, path, read_curves
from foof.study.data.faces import moments, patches, read_faces


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
    assert train.shape == (500, 1, 25, 25)
    assert test.shape == (200, 1, 25, 25)
    assert set(train_label) == set(range(25))
    assert len(set(train_label[:100])) > 15  # in a random order
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
    train = np.random.default_rng(0).integers(0, 256, (50, 1, 25, 25), dtype=np.uint8)
    mean, scale = moments(train)
    x = (train / 255 - mean) / scale
    assert np.abs(x.mean(0)).max() < 1e-6
    assert x.var(0).mean() == pytest.approx(1, abs=1e-6)


def test_what_is_made_is_made_once_and_kept_whole(tmp_path):
    made = []

    def make():
        made.append(1)
        return read_curves((5, 3))

    path = tmp_path / "new" / "x.npz"
    first, again = datasets._kept(path, make), datasets._kept(path, make)
    assert len(made) == 1
    assert all(np.array_equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True))
    for times, damaged in enumerate((path.read_bytes()[:500], b""), 2):  # made anew
        path.write_bytes(damaged)
        assert np.array_equal(datasets._kept(path, make)[0][0], first[0][0])
        assert (len(made), [p.name for p in path.parent.iterdir()]) == (times, ["x.npz"])


def test_faces_come_normalised_and_can_be_made_bright_again(olivetti, monkeypatch, tmp_path):
    (tmp_path / "olivetti").mkdir()
    (tmp_path / "olivettifaces.mat").rename(tmp_path / "olivetti" / "olivettifaces.mat")
    monkeypatch.setenv("FOOF_DATA", str(tmp_path))
    monkeypatch.setattr(datasets.faces, "read_faces", lambda folder: read_faces(folder, 2))
    datasets.load.cache_clear()
    data = datasets.load("faces", "full", 100)
    (raw, _), _, _ = datasets.read("faces", "folder")
    assert (len(data.train_x), data.source) == (100, "folder")
    torch.testing.assert_close(data.brightness(data.train_x), torch.from_numpy(raw[:100] / 255).float(), atol=1e-5, rtol=0)
    datasets.load.cache_clear()
