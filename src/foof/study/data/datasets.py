"""The data sets of the study: where they are, how they are read, the paper's preprocessing.

`load(name, source)` gives training and test images. Sources: `embedded` (the subset of Fashion-MNIST in the package),
`folder` (official files under `~/.cache/foof` or `$FOOF_DATA`), `debian` (the package dataset-fashion-mnist),
`download` (official addresses, checked by checksum), and `full`, the first of folder, debian and download that works. CURVES- and
FACES-like images are made by us, once, and kept in the folder.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from foof.study.data import curves, faces, formats
from foof.study.data.formats import DataError, Images, Labels

Pair = tuple[Images, Labels]
Moments = tuple[np.ndarray | float, np.ndarray | float]  # mean and deviation of brightness from 0 to 1

EMBEDDED = Path(__file__).parent / "embedded"
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SOURCES = ("embedded", "folder", "debian", "download", "full")
MNIST_MOMENTS = (0.1307, 0.3081)  # the paper normalises Fashion-MNIST with MNIST's mean and deviation too


@dataclass(frozen=True)
class Remote:
    """An official file: its address, its checksum, and whether it is an archive to unpack."""

    url: str
    checksum: str
    archive: bool = False


def _of_channels(train: Images) -> Moments:
    """Mean and deviation of each channel ``(1, C, 1, 1)``."""
    mean, deviation = (moment(train, axis=(0, 2, 3), keepdims=True, dtype=np.float64) / 255 for moment in (np.mean, np.std))
    return np.asarray(mean, np.float32), np.asarray(deviation, np.float32)


@dataclass(frozen=True)
class Spec:
    """What there is to know about a data set before reading it."""

    title: str
    folder: str
    counts: tuple[int, int]  # official numbers of training and test records
    read: Callable[[Path], tuple[Pair, Pair]]
    remotes: tuple[Remote, ...]
    moments: Moments | Callable[[Images], Moments] = _of_channels  # or how to get them from the training images
    made: bool = False  # by us, in a moment too long to make them just to count them


@dataclass(frozen=True)
class Data:
    """A data set ready to train on: images float32 `(N, C, H, W)`, labels int64 `(N,)`."""

    name: str
    source: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: Tensor  # of brightness from 0 to 1: what images were shifted by
    deviation: Tensor  # and divided by

    def brightness(self, x: Tensor) -> Tensor:
        """Normalised images as they were, from 0 to 1."""
        return (x * self.deviation.to(x.device) + self.mean.to(x.device)).clamp(0, 1)

    @property
    def classes(self) -> int:
        """Of all records: a small part to train on may lack some."""
        return int(max(self.train_y.max(), self.test_y.max())) + 1


def _read_mnist(folder: Path) -> tuple[Pair, Pair]:
    def pair(split: str) -> Pair:
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        return formats.read_idx_pair(*(_find(folder, f"{split}-{kind}") for kind in kinds))

    return pair("train"), pair("t10k")


def _find(folder: Path, name: str) -> Path:
    """The file `name` in `folder`, compressed or not."""
    for path in (folder / f"{name}.gz", folder / name):
        if path.exists():
            return path
    raise FileNotFoundError(folder / f"{name}.gz")


def _join(pairs: Iterable[Pair]) -> Pair:
    xs, ys = zip(*pairs, strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def _read_cifar10(folder: Path) -> tuple[Pair, Pair]:
    batches = sorted(folder.glob("data_batch_[1-5].bin")) or [folder / "data_batch_1.bin"]
    return _join(formats.read_cifar(path, 1) for path in batches), formats.read_cifar(folder / "test_batch.bin", 1)


def _read_cifar100(folder: Path) -> tuple[Pair, Pair]:
    return formats.read_cifar(folder / "train.bin", 2), formats.read_cifar(folder / "test.bin", 2)


def _read_svhn(folder: Path) -> tuple[Pair, Pair]:
    return formats.read_svhn(_exists(folder / "train_32x32.mat")), formats.read_svhn(_exists(folder / "test_32x32.mat"))


def _read_olivetti(folder: Path) -> tuple[Pair, Pair]:
    """Olivetti has no official split: the last two of each person's ten pictures are the test set."""
    x, y = formats.read_olivetti(_exists(folder / "olivettifaces.mat"))
    test = np.arange(len(x)) % 10 >= 8
    return (x[~test], y[~test]), (x[test], y[test])


def _read_curves(folder: Path) -> tuple[Pair, Pair]:
    return _kept(folder / f"curves-{curves.SEED}.npz", curves.read_curves)


def _read_faces(folder: Path) -> tuple[Pair, Pair]:
    official = _exists(folder / "olivettifaces.mat")
    return _kept(folder.with_name("faces") / f"faces-{faces.SEED}.npz", lambda: faces.read_faces(official.parent))


def _kept(path: Path, make: Callable[[], tuple[Pair, Pair]]) -> tuple[Pair, Pair]:
    """What was made before, or is made now; kept where that is possible, complete or not at all."""
    try:
        with path.open("rb") as file, np.load(file) as kept:
            return (kept["train_x"], kept["train_y"]), (kept["test_x"], kept["test_y"])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile):
        train, test = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.part.npz")
        np.savez(partial, train_x=train[0], train_y=train[1], test_x=test[0], test_y=test[1])
        partial.replace(path)
    except OSError:
        pass  # a folder that cannot be written to: they are made again next time
    return train, test


def _exists(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(path)
    return path


def _mnist_files(base: str, checksums: str) -> tuple[Remote, ...]:
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    return tuple(Remote(f"{base}{n}-ubyte.gz", f"md5:{c}") for n, c in zip(names, checksums.split(), strict=True))


OLIVETTI = (
    Remote(
        "https://cs.nyu.edu/~roweis/data/olivettifaces.mat", "sha256:b612fb967f2dc77c9c62d3e1266e0c73d5fca46a4b8906c18e454d41af987794",
    ),
)  # fmt: skip
SPECS: dict[str, Spec] = {
    "fashion-mnist": Spec(
        "Fashion-MNIST", "fashion-mnist", (60_000, 10_000), _read_mnist,
        _mnist_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d 25c81989df183df01b3e8a0aad5dffbe "
            "bef4ecab320f06d8554ea6380940ec79 bb300cfdad3c16e7a12a480ee83cd310",
        ),
        MNIST_MOMENTS,
    ),
    "mnist": Spec(
        "MNIST", "mnist", (60_000, 10_000), _read_mnist,
        _mnist_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873 d53e105ee54ea40749a09fcbcd1e9432 "
            "9fb629c4189551a2d022fa330f9573f3 ec29112dd5afa0611ce80d1b7f02629c",
        ),
        MNIST_MOMENTS,
    ),
    "cifar-10": Spec(
        "CIFAR-10", "cifar-10-batches-bin", (50_000, 10_000), _read_cifar10,
        (Remote("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530", True),),
    ),
    "cifar-100": Spec(
        "CIFAR-100", "cifar-100-binary", (50_000, 10_000), _read_cifar100,
        (Remote("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8", True),),
    ),
    "svhn": Spec(
        "SVHN", "svhn", (73_257, 26_032), _read_svhn,
        (
            Remote("http://ufldl.stanford.edu/housenumbers/train_32x32.mat", "md5:e26dedcc434d2e4c54c9b2d4a06d8373"),
            Remote("http://ufldl.stanford.edu/housenumbers/test_32x32.mat", "md5:eb5a983be6a315427106f1b164d9cef3"),
        ),
    ),
    "olivetti": Spec(
        "Olivetti faces", "olivetti", (320, 80), _read_olivetti, OLIVETTI,
    ),
    "curves": Spec("CURVES-like", "curves", curves.COUNTS, _read_curves, (), made=True),
    "faces": Spec("FACES-like", "olivetti", (103_500, 41_400), _read_faces, OLIVETTI, faces.moments, made=True),
}  # fmt: skip


def data_folder() -> Path:
    """Where official files are looked for and downloaded to: `$FOOF_DATA`, or `~/.cache/foof`."""
    return Path(os.environ.get("FOOF_DATA") or "~/.cache/foof").expanduser()


def _spec(name: str) -> Spec:
    if name not in SPECS:
        raise DataError(f"no data set is called {name!r}; there are {', '.join(SPECS)}")
    return SPECS[name]


def _place(name: str, source: str) -> Path:
    """The folder of `name` in `source`; `DataError` where that source has no such data set."""
    spec = _spec(name)
    if source == "folder":
        return data_folder() / spec.folder
    if source not in SOURCES:
        raise DataError(f"no source is called {source!r}; there are {', '.join(SOURCES)}")
    if name != "fashion-mnist":
        raise DataError(f"the source {source!r} has Fashion-MNIST alone, but {spec.title} was asked for; use 'full'")
    return EMBEDDED if source == "embedded" else DEBIAN


def read(name: str, source: str) -> tuple[Pair, Pair, str]:
    """Training and test records as arrays, and the source they came from in the end."""
    spec = _spec(name)
    if source == "download" and spec.remotes:
        from foof.study.data.download import download

        folder = data_folder()
        download(spec.remotes, folder if spec.remotes[0].archive else folder / spec.folder)
        return *spec.read(folder / spec.folder), "download"
    if source not in ("full", "download"):
        place = _place(name, source)
        try:
            return *spec.read(place), source
        except FileNotFoundError as error:
            raise DataError(
                f"{spec.title} was needed from {place}, but {error} is not there. Put the official files into that "
                f"folder, set FOOF_DATA to the folder above it, or fetch them with `foof data --download {name}`."
            ) from error
    for each in ("folder", "debian"):
        if each == "folder" or name == "fashion-mnist":
            try:
                return *spec.read(_place(name, each)), each
            except FileNotFoundError:
                continue
    return read(name, "download")


def _normalise(x: Images, moments: Moments) -> Tensor:
    mean, deviation = moments
    return torch.from_numpy(((x.astype(np.float32) / 255 - mean) / deviation).astype(np.float32))


@lru_cache(maxsize=2)
def load(name: str, source: str = "full", train_size: int | None = None) -> Data:
    """The data set with the paper's preprocessing, of the first `train_size` training records (None: all)."""
    (train_x, train_y), (test_x, test_y), came_from = read(name, source)
    if train_size is not None and train_size > len(train_x):
        raise DataError(f"{train_size:,} training records of {_spec(name).title} were needed, {source} has {len(train_x):,}")
    of = _spec(name).moments
    moments = of(train_x) if callable(of) else of
    return Data(
        name, came_from,
        _normalise(train_x[:train_size], moments), torch.from_numpy(train_y[:train_size].copy()),
        _normalise(test_x, moments), torch.from_numpy(test_y.copy()),
        *(torch.as_tensor(moment, dtype=torch.float32) for moment in moments),
    )  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One line of `foof data`."""

    name: str
    source: str
    counts: tuple[int, int] | None
    official: tuple[int, int]
    problem: str = ""


def there(name: str) -> bool:
    """Can a data set be had without the network: are there files of it, whole ones, or is it made of nothing?"""
    spec = _spec(name)
    arrived = (path.suffix != ".part" for path in (data_folder() / spec.folder).glob("*"))
    return not spec.remotes or (name == "fashion-mnist" and DEBIAN.exists()) or any(arrived)


def test_records(name: str) -> int:
    """How many the source "full" has: in the files on this machine, by reading them, or in the official ones, which would be fetched."""
    spec = _spec(name)
    for source in () if spec.made else ("folder", "debian") if name == "fashion-mnist" else ("folder",):
        try:
            return len(spec.read(_place(name, source))[1][1])
        except (FileNotFoundError, DataError):
            continue
    return spec.counts[1]


def available() -> list[Found]:
    """What is on this machine, by reading it: every data set in every local source. What is made by us is there if its source is."""
    found = []
    for name, spec in SPECS.items():
        for source in ("embedded", "folder", "debian") if name == "fashion-mnist" else ("folder",):
            try:
                if spec.made:
                    found.append(Found(name, "made", spec.counts if there(name) else None, spec.counts, "" if there(name) else "not there"))
                    continue
                (x, _), (t, _), _ = read(name, source)
                found.append(Found(name, source, (len(x), len(t)), spec.counts))
            except DataError as error:
                missing = isinstance(error.__cause__, FileNotFoundError)
                found.append(Found(name, source, None, spec.counts, "not there" if missing else str(error)))
    return found
