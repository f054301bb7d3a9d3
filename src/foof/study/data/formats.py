"""The official file formats of the image data sets: bytes in, arrays out.

Every reader returns `(images, labels)` with images as uint8 `(N, C, H, W)` and labels as int64 `(N,)`, or raises
`DataError`, which says what was needed, what came and what to do.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]
Labels = NDArray[np.int64]


class DataError(RuntimeError):
    """Data that is missing, truncated or corrupt."""


def _damaged(path: Path, needed: str, came: str) -> DataError:
    return DataError(
        f"{path} is damaged: needed {needed}, but {came}. "
        f"Delete the file and fetch it again (`foof data --download`), or put an intact copy in its place."
    )


def _read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed if it is gzip."""
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged(path, "a whole gzip file", f"decompressing its {len(raw):,} bytes failed ({error})") from error


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes: magic number, sizes, data. Returns an array of the sizes its header gives."""
    raw = _read_bytes(path)
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise _damaged(path, "an IDX header of unsigned bytes (00 00 08)", f"it begins with {raw[:4].hex(' ') or 'nothing'}")
    ndim = raw[3]
    start = 4 + 4 * ndim
    if len(raw) < start:
        raise _damaged(path, f"an IDX header of {start} bytes", f"the file has {len(raw)}")
    shape = struct.unpack(f">{ndim}I", raw[4:start])
    needed, came = int(np.prod(shape, dtype=np.int64)), len(raw) - start
    if came != needed:
        raise _damaged(path, f"{needed:,} bytes of data for shape {shape}", f"it has {came:,}")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def read_idx_pair(images: Path, labels: Path) -> tuple[Images, Labels]:
    """MNIST's two files: images `(N, H, W)`, labels `(N,)`."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1 or len(x) != len(y):
        raise _damaged(images, "images (N, H, W) and as many labels", f"images are {x.shape} and labels {y.shape}")
    return x[:, None], y.astype(np.int64)


def read_cifar(path: Path, label_bytes: int) -> tuple[Images, Labels]:
    """CIFAR's binary records: label bytes (CIFAR-100: coarse, fine), then 3 x 32 x 32 pixels. The last label counts."""
    raw, size = _read_bytes(path), label_bytes + 3 * 32 * 32
    if not raw or len(raw) % size:
        raise _damaged(path, f"whole records of {size:,} bytes", f"it has {len(raw):,} bytes, {len(raw) / size:.2f} records")
    records = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), records[:, label_bytes - 1].astype(np.int64)


def _read_mat(path: Path, *names: str) -> list[NDArray]:
    from scipy.io import loadmat

    try:
        content = loadmat(path)
        return [content[name] for name in names]
    except Exception as error:  # scipy raises many kinds for damaged files
        raise _damaged(path, f"a MATLAB file with {', '.join(names)}", f"reading it failed ({error})") from error


def read_svhn(path: Path) -> tuple[Images, Labels]:
    """SVHN's cropped digits: X `(32, 32, 3, N)`, y `(N, 1)` with 10 standing for the digit 0."""
    x, y = _read_mat(path, "X", "y")
    if x.shape[:3] != (32, 32, 3) or x.shape[3] != y.size:
        raise _damaged(path, "X (32, 32, 3, N) and N labels", f"X is {x.shape} and y {y.shape}")
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), y.reshape(-1).astype(np.int64) % 10


def read_olivetti(path: Path) -> tuple[Images, Labels]:
    """Olivetti's faces `(4096, 400)`, stored column by column: ten pictures of each of forty people."""
    (faces,) = _read_mat(path, "faces")
    if faces.shape[0] != 64 * 64 or faces.shape[1] % 10:
        raise _damaged(path, "faces (4096, 10 x people)", f"faces is {faces.shape}")
    x = faces.T.reshape(-1, 64, 64).transpose(0, 2, 1)[:, None]
    return np.ascontiguousarray(x.astype(np.uint8)), np.arange(len(x), dtype=np.int64) // 10
