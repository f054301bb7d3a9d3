"""enwik8, the first 100,000,000 bytes of English Wikipedia, as bytes: 90 million to train on, 5 million for validation, 5 for test."""

from __future__ import annotations

import gzip
import hashlib
import os
import zipfile
from pathlib import Path

import torch
from torch import Tensor

URL = "http://mattmahoney.net/dc/enwik8.zip"
MD5 = "a1fa5ffddb56f4953e226637dabbb36a"  # of the text


def folder() -> Path:
    return Path(os.environ.get("FOOF_DATA", Path.home() / ".cache" / "foof")) / "enwik8"


def read() -> bytes:
    """The text from ``enwik8``, ``enwik8.gz`` or ``enwik8.zip`` in the folder; downloaded where there is none."""
    here = folder()
    if not any((here / name).exists() for name in ("enwik8", "enwik8.gz", "enwik8.zip")):
        import pooch

        pooch.retrieve(URL, known_hash=None, path=here, fname="enwik8.zip", progressbar=True)  # the text itself is checked
    if (here / "enwik8").exists():
        return (here / "enwik8").read_bytes()
    if (here / "enwik8.gz").exists():
        return gzip.decompress((here / "enwik8.gz").read_bytes())
    with zipfile.ZipFile(here / "enwik8.zip") as archive:
        return archive.read("enwik8")


def splits() -> tuple[Tensor, Tensor]:
    """(training, validation) bytes as uint8; the checksum is checked once and the checked text kept uncompressed."""
    checked = folder() / "enwik8"
    fresh = not checked.exists()
    text = read()
    if fresh or len(text) != 100_000_000:
        found = hashlib.md5(text).hexdigest()
        if found != MD5:
            raise ValueError(f"enwik8: expected a text with md5 {MD5}, got {found} in {folder()}; remove what is there and try again.")
        temporary = checked.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(text)
        temporary.replace(checked)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return ids[:90_000_000], ids[90_000_000:95_000_000]


def batch(ids: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows at random places and the same shifted by one: ``(size, length)`` each, int64."""
    starts = torch.randint(len(ids) - length, (size, 1), generator=generator)
    windows = ids[starts + torch.arange(length + 1)].long()
    return windows[:, :-1], windows[:, 1:]
