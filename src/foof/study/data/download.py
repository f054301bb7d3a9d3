"""Downloads from the official addresses: checked by checksum, continued where they stopped."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import pooch
import requests
from filelock import FileLock

from foof.study.data.formats import DataError


class Source(Protocol):
    @property
    def url(self) -> str: ...
    @property
    def checksum(self) -> str: ...
    @property
    def archive(self) -> bool: ...


class Resumable:
    """A pooch downloader that keeps what has arrived in a `.part` file and asks only for the rest next time."""

    def __init__(self, part: Path):
        self.part = part

    def __call__(self, url: str, output_file: str, _pooch: object) -> None:
        have = self.part.stat().st_size if self.part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            if response.status_code != 416:  # 416: nothing is left to fetch
                response.raise_for_status()
                # a server that ignores Range answers 200 with the whole file: start over
                continues = response.status_code == 206
                total = int(response.headers.get("Content-Length", 0)) + have * continues
                with self.part.open("ab" if continues else "wb") as out:
                    for chunk in response.iter_content(1 << 20):
                        out.write(chunk)
                        _show(self.part.stem, out.tell(), total)
        Path(output_file).write_bytes(self.part.read_bytes())
        self.part.unlink()  # complete; if the checksum fails, the next attempt starts afresh


def _show(name: str, have: int, total: int) -> None:
    """How much has arrived, in one line that is written over; nothing where nobody watches."""
    if sys.stderr.isatty():
        of = f" of {total / 1e6:.0f}" if total else ""
        print(f"\r{name}: {have / 1e6:.0f}{of} MB", end="\n" if have == total else "", file=sys.stderr, flush=True)


def download(remotes: Iterable[Source], folder: Path) -> None:
    """Fetch every remote into `folder` (archives are unpacked there), unless it is there with the right checksum.

    Of several processes that want the same, one fetches and the others wait for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        for remote in remotes:
            _fetch(remote, folder)


def _fetch(remote: Source, folder: Path) -> None:
    name = remote.url.rsplit("/", 1)[1]
    try:
        pooch.retrieve(
            remote.url, remote.checksum, fname=name, path=folder,
            downloader=Resumable(folder / f"{name}.part"),
            processor=pooch.Untar(extract_dir=".") if remote.archive else None,
        )  # fmt: skip
    except (requests.RequestException, OSError) as error:
        raise DataError(
            f"{name} was needed from {remote.url}, but the download failed ({error}). Check the network and run the "
            f"same command again (it continues where it stopped), or put the file into {folder} by hand."
        ) from error
    except ValueError as error:  # pooch: the checksum does not match
        raise DataError(
            f"{name} came from {remote.url} with the wrong content ({error}). Run the same command again, or put an "
            f"intact copy into {folder} by hand."
        ) from error
