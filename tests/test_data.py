"""Data: every format read back as written, the paper's preprocessing, and errors that say what to do."""

import gzip
import http.server
import struct
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.io import savemat

from foof.study.data import datasets as data
from foof.study.data import download, formats
from foof.study.data.datasets import Remote, load
from foof.study.data.formats import DataError


def idx(x: np.ndarray) -> bytes:
    return b"\x00\x00\x08" + bytes([x.ndim]) + struct.pack(f">{x.ndim}I", *x.shape) + x.tobytes()


def random_images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def write_mnist(folder, train=20, test=10, suffix=".gz"):
    folder.mkdir(parents=True)
    for split, n in (("train", train), ("t10k", test)):
        for kind, x in (("images-idx3", random_images(n, 28, 28)), ("labels-idx1", np.arange(n, dtype=np.uint8) % 10)):
            content = idx(x)
            (folder / f"{split}-{kind}-ubyte{suffix}").write_bytes(gzip.compress(content) if suffix else content)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty data folder, no Debian package, and no data remembered from other tests."""
    monkeypatch.setenv("FOOF_DATA", str(tmp_path))
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    load.cache_clear()
    yield tmp_path
    load.cache_clear()


def test_embedded_subset_is_balanced_and_normalised_with_the_moments_of_mnist():
    d = load("fashion-mnist", "embedded")
    assert d.train_x.shape == (6000, 1, 28, 28)
    assert d.test_x.shape == (1000, 1, 28, 28)
    assert torch.bincount(d.train_y).tolist() == [600] * 10
    assert torch.bincount(d.test_y).tolist() == [100] * 10
    (raw, _), _, _ = data.read("fashion-mnist", "embedded")
    expected = (torch.from_numpy(raw[7].astype(np.float64)) / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(d.train_x[7].double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("suffix", [".gz", ""])
def test_mnist_files_may_hold_fewer_records_than_the_official_ones(folder, suffix):
    write_mnist(folder / "mnist", suffix=suffix)
    d = load("mnist", "full")
    assert (len(d.train_y), len(d.test_y), d.source) == (20, 10, "folder")
    assert torch.equal(load("mnist", "full", 5).train_x, d.train_x[:5])


def test_cifar_10_joins_its_batches(folder):
    place = folder / "cifar-10-batches-bin"
    place.mkdir()
    records = random_images(12, 3073)
    records[:, 0] %= 10
    records[:5].tofile(place / "data_batch_1.bin")
    records[5:9].tofile(place / "data_batch_2.bin")
    records[9:].tofile(place / "test_batch.bin")
    (x, y), (_, t), _ = data.read("cifar-10", "folder")
    assert x.shape == (9, 3, 32, 32)
    assert np.array_equal(x.reshape(9, -1), records[:9, 1:])
    assert np.array_equal(np.concatenate([y, t]), records[:, 0])
    whole = load("cifar-10", "folder").train_x
    torch.testing.assert_close(whole.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(whole.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_cifar_100_takes_the_fine_label(tmp_path):
    records = random_images(4, 3074)
    records.tofile(tmp_path / "x.bin")
    x, y = formats.read_cifar(tmp_path / "x.bin", 2)
    assert np.array_equal(y, records[:, 1])
    assert np.array_equal(x.reshape(4, -1), records[:, 2:])


def test_svhn_turns_label_ten_into_digit_zero(tmp_path):
    pixels = random_images(32, 32, 3, 3)
    savemat(tmp_path / "x.mat", {"X": pixels, "y": np.array([[10], [1], [9]], np.uint8)})
    x, y = formats.read_svhn(tmp_path / "x.mat")
    assert y.tolist() == [0, 1, 9]
    assert np.array_equal(x[1, 2], pixels[:, :, 2, 1])


def test_olivetti_is_upright_and_split_by_person(folder):
    (folder / "olivetti").mkdir()
    faces = random_images(4096, 20)
    savemat(folder / "olivetti" / "olivettifaces.mat", {"faces": faces.astype(np.float64)})
    (x, y), (_, t), _ = data.read("olivetti", "folder")
    assert (len(y), t.tolist()) == (16, [0, 0, 1, 1])
    assert np.array_equal(x[0, 0], faces[:, 0].reshape(64, 64).T)  # stored column by column


@pytest.mark.parametrize("cut", [0, 3, 10, 200, -1])
def test_a_truncated_file_is_refused_with_what_to_do(folder, cut):
    write_mnist(folder / "mnist")
    path = folder / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"train-images.*needed.*Delete the file and fetch it again"):
        load("mnist", "folder")


@pytest.mark.parametrize("content", [b"", b"not idx", idx(random_images(4, 2))[:-1]])
def test_corrupt_idx(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(DataError, match="needed"):
        formats.read_idx(path)


def test_corrupt_cifar_and_mat(tmp_path):
    (tmp_path / "x.bin").write_bytes(b"\x00" * 3000)
    (tmp_path / "x.mat").write_bytes(b"MATLAB 5.0" + b"\x00" * 30)
    with pytest.raises(DataError, match="whole records"):
        formats.read_cifar(tmp_path / "x.bin", 1)
    with pytest.raises(DataError, match="MATLAB"):
        formats.read_svhn(tmp_path / "x.mat")


def test_what_is_missing_is_named(folder):
    with pytest.raises(DataError, match=r"SVHN was needed.*train_32x32.*FOOF_DATA.*foof data --download svhn"):
        load("svhn", "folder")
    with pytest.raises(DataError, match="no data set is called 'mnits'"):
        load("mnits")
    with pytest.raises(DataError, match="Fashion-MNIST alone"):
        load("mnist", "embedded")
    with pytest.raises(DataError, match=r"7,000 training records.*has 6,000"):
        load("fashion-mnist", "embedded", 7000)


def test_what_has_arrived_in_part_is_not_there(folder):
    (folder / "olivetti").mkdir()
    (folder / "olivetti" / "olivettifaces.mat.part").write_bytes(b"half")
    assert not data.there("faces")
    (folder / "olivetti" / "olivettifaces.mat").write_bytes(b"whole")
    assert data.there("faces")


def test_a_few_records_have_the_classes_of_all():
    assert load("fashion-mnist", "embedded", 1).classes == 10


def test_available_tells_parts_damage_and_absence(folder):
    write_mnist(folder / "mnist")
    write_mnist(folder / "fashion-mnist")
    (folder / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(b"broken")
    found = {(f.name, f.source): f for f in data.available()}
    assert found["mnist", "folder"].counts == (20, 10)
    assert "damaged" in found["fashion-mnist", "folder"].problem
    assert found["fashion-mnist", "embedded"].counts == (6000, 1000)
    assert found["svhn", "folder"].problem == "not there"


class Server(http.server.BaseHTTPRequestHandler):
    """Serves `content` and understands `Range`; breaks the first `breaks` answers off half-way."""

    content = b""
    breaks = 0
    asked: list = []  # noqa: RUF012

    def do_GET(self):
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        Server.asked.append(start)
        body = self.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if Server.breaks:
            Server.breaks -= 1
            body = body[: len(body) // 2]
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as it:
        threading.Thread(target=it.serve_forever, daemon=True).start()
        Server.asked, Server.breaks = [], 0
        yield f"http://127.0.0.1:{it.server_port}"
        it.shutdown()


def checksum(content: bytes) -> str:
    import hashlib

    return "md5:" + hashlib.md5(content).hexdigest()


def test_a_broken_download_continues_where_it_stopped(server, tmp_path):
    Server.content, Server.breaks = random_images(5_000_000).tobytes(), 1
    remote = Remote(f"{server}/x.bin", checksum(Server.content))
    with pytest.raises(DataError, match=r"x\.bin was needed.*continues where it stopped"):
        download.download([remote], tmp_path)
    download.download([remote], tmp_path)
    assert (tmp_path / "x.bin").read_bytes() == Server.content
    assert Server.asked[0] == 0
    assert Server.asked[1] > 0
    download.download([remote], tmp_path)  # there already: nothing is asked for
    assert len(Server.asked) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"]


def test_of_several_that_want_a_file_one_fetches_it(server, tmp_path):
    Server.content = random_images(5_000_000).tobytes()
    remote, folder = Remote(f"{server}/x.bin", checksum(Server.content)), tmp_path / "data"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: download.download([remote], folder), range(4)))
    assert (folder / "x.bin").read_bytes() == Server.content
    assert len(Server.asked) == 1


def test_a_download_with_the_wrong_content_is_refused(server, tmp_path):
    Server.content = b"something else"
    with pytest.raises(DataError, match="wrong content"):
        download.download([Remote(f"{server}/x.bin", checksum(b"what was meant"))], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_is_unpacked(server, tmp_path):
    (tmp_path / "records.bin").write_bytes(b"records")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "records.bin", "batches/records.bin")
    Server.content = (tmp_path / "x.tar.gz").read_bytes()
    (tmp_path / "to").mkdir()
    download.download([Remote(f"{server}/x.tar.gz", checksum(Server.content), archive=True)], tmp_path / "to")
    assert (tmp_path / "to" / "batches" / "records.bin").read_bytes() == b"records"


def test_no_network_says_what_to_do(tmp_path):
    with pytest.raises(DataError, match=r"download failed.*Check the network.*by hand"):
        download.download([Remote("http://127.0.0.1:9/x.bin", "md5:0")], tmp_path)
