"""Make the embedded subset of Fashion-MNIST: the first 600 training and 100 test records of each class, in file order.

python tools/embed_fashion_mnist.py FOLDER_OF_THE_FULL_FILES
"""

import gzip
import struct
import sys
from pathlib import Path

import numpy as np

from foof.study.data.formats import read_idx

TARGET = Path(__file__).parents[1] / "src/foof/study/data/embedded"


def write_idx(path: Path, x: np.ndarray) -> None:
    header = b"\x00\x00\x08" + bytes([x.ndim]) + struct.pack(f">{x.ndim}I", *x.shape)
    path.write_bytes(gzip.compress(header + x.tobytes(), compresslevel=9, mtime=0))  # the same bytes every time


def main(folder: Path) -> None:
    for split, count in (("train", 600), ("t10k", 100)):
        images = read_idx(folder / f"{split}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz")
        keep = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))
        write_idx(TARGET / f"{split}-images-idx3-ubyte.gz", images[keep])
        write_idx(TARGET / f"{split}-labels-idx1-ubyte.gz", labels[keep])


if __name__ == "__main__":
    main(Path(sys.argv[1]).expanduser())
