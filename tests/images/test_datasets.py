"""Sources against sklearn's arrays, IDX and CIFAR bytes packed by hand, Pillow's pixels; splits counted; all errors."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitlab.errors import DataError, ImageError
from vitlab.images.datasets import SOURCES, Data, open_data, stratified_split, subset
from vitlab.images.sources import cifar, digits, download, idx
from vitlab.images.sources.dataset import FileDataset, Strings
from vitlab.images.sources.download import Remote
from vitlab.images.sources.splits import few_labels

RNG = np.random.default_rng(0)
PUBLISHED = dict(download.REMOTES)


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Nothing outside the test's folder is looked at, and nothing is downloaded."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    monkeypatch.setattr(idx, "DEBIAN", {})
    for name, remote in PUBLISHED.items():
        monkeypatch.setitem(download.REMOTES, name, Remote((), remote.files))


def picture(path: Path, size: tuple[int, int] = (7, 5), mode: str = "RGB") -> np.ndarray:
    """A PNG of noise, (W, H); returns its pixels as RGB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    pixels = RNG.integers(0, 256, shape, dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels if mode == "RGB" else np.stack([pixels] * 3, axis=-1)


def class_folders(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        for i in range(count):
            picture(root / name / f"{i}.png")
    return root


def names(dataset) -> list[str]:
    return [dataset.name_of(i) for i in range(len(dataset))]


def counted(dataset) -> list[int]:
    return np.bincount(dataset.labels, minlength=len(dataset.classes)).tolist()


def error(*args, **options) -> str:
    with pytest.raises(ValueError) as caught:
        open_data(*args, **options)
    return str(caught.value)


# Splits


@pytest.mark.parametrize("fractions", [(0.9, 0.1), (0.6, 0.2, 0.2), (0.25, 0.75)])
def test_split_is_disjoint_complete_and_stratified(fractions):
    labels = np.repeat([0, 1, 2, 3], [50, 97, 1000, 13])
    np.random.default_rng(1).shuffle(labels)
    parts = stratified_split(labels, fractions, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    for part, fraction in zip(parts, fractions, strict=True):
        assert (np.diff(part) > 0).all()
        for label, total in enumerate([50, 97, 1000, 13]):
            assert abs((labels[part] == label).sum() - fraction * total) < 1


def test_split_is_a_function_of_the_seed_and_looks_random():
    labels = np.arange(1000) % 2
    first, again, other = (stratified_split(labels, (0.5, 0.5), seed)[1] for seed in (0, 0, 1))
    assert (first == again).all() and not np.array_equal(first, other)
    assert 200 < np.isin(first, other).sum() < 300  # half of 500, give or take 3 sigma and more


@pytest.mark.parametrize(("held", "expected"), [(1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (4, [3, 1]), (16, [14, 2])])
def test_small_classes_keep_one_in_each_part_and_train_comes_first(held, expected):
    parts = stratified_split(np.zeros(held, dtype=int), (0.9, 0.1), seed=0)
    assert [len(part) for part in parts] == expected


@pytest.mark.parametrize("fractions", [(), (0.5, 0.4), (1.5, -0.5), (1.0, 0.0)])
def test_fractions_that_are_none(fractions):
    with pytest.raises(ValueError, match="add up to 1"):
        stratified_split(np.zeros(4, dtype=int), fractions, 0)


def test_few_labels():
    labels = np.repeat([0, 1, 2], [20, 30, 5])
    five, four, two = (few_labels(labels, list("abc"), 7, per_class=n) for n in (5, 4, 2))
    assert np.bincount(labels[five]).tolist() == [5, 5, 5]
    assert set(two) < set(four) < set(five)  # nested, so that curves over the number of labels are smooth
    tenth = few_labels(labels, list("abc"), 7, fraction=0.1)
    assert np.bincount(labels[tenth]).tolist() == [2, 3, 1]
    assert not np.array_equal(five, few_labels(labels, list("abc"), 8, per_class=5))
    with pytest.raises(DataError, match=r"only 5 of class 'c'.*per_class=5 or less"):
        few_labels(labels, list("abc"), 7, per_class=6)


# digits


def test_digits_are_sklearns():
    data = open_data("digits")
    original = load_digits()
    seen = []
    for dataset in (data.train, data.val, data.test):
        assert dataset is not None and dataset.images is not None
        where = [int(name.removeprefix("digits/")) for name in names(dataset)]
        seen += where
        np.testing.assert_array_equal(dataset.labels, original.target[where])
        np.testing.assert_allclose(dataset.images[..., 0] / 255 * 16, original.images[where], atol=16 / 255 / 2 + 1e-9)
        assert dataset.images.max() == 255 and dataset.images.min() == 0
        np.testing.assert_array_equal(dataset.read(3), dataset.images[3])
    assert sorted(seen) == list(range(1797))  # every digit in one split


def test_digits_are_read_without_scipy():
    """Which takes longer to import than torch."""
    code = (
        "import sys; from vitlab.images.datasets import open_data; open_data('digits'); print('scipy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, encoding="utf-8")
    assert done.stdout.strip() == "False"


def test_digits_that_were_moved_or_are_not_installed(tmp_path, monkeypatch):
    usual = digits._digits_table()
    moved = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(digits, "find_spec", lambda name: moved)
    np.testing.assert_array_equal(digits._digits_table(), usual)
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    assert "pip install scikit-learn" in error("digits")


def test_digits_split_is_fixed_and_stratified():
    data, other = open_data("digits", seed=0), open_data("digits", seed=5)
    assert data.test is not None and other.test is not None
    assert names(data.train) == names(other.train) and names(data.test) == names(other.test)
    total = np.bincount(load_digits().target)
    for dataset, share in ((data.train, 0.6), (data.val, 0.2), (data.test, 0.2)):
        assert (abs(np.array(counted(dataset)) - share * total) < 1).all()
    # the split that published figures rest on: change it, and they are no longer comparable
    assert hashlib.sha1(" ".join(names(data.test)).encode()).hexdigest() == "1a1486542a6fc44750bb66ffea9e6100f9e9c544"


def test_few_labels_leave_val_and_test_alone():
    whole = open_data("digits")
    few, tenth = open_data("digits", per_class=10), open_data("digits", fraction=0.1)
    assert counted(few.train) == [10] * 10 and set(names(few.train)) < set(names(whole.train))
    assert counted(tenth.train) == [round(0.1 * n) for n in counted(whole.train)]
    assert names(few.val) == names(whole.val) == names(tenth.val)
    assert few.train.images is not None and len(few.train.images) == 100
    assert names(open_data("digits", per_class=10, seed=1).train) != names(few.train)
    assert "only " in error("digits", per_class=1000)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(val_fraction=0), "val_fraction=0"),
        (dict(val_fraction=1.0), "val_fraction=1.0"),
        (dict(per_class=0), "per_class=0"),
        (dict(fraction=0), "fraction=0"),
        (dict(fraction=1.1), "fraction=1.1"),
        (dict(per_class=3, fraction=0.1), "exclude each other"),
        (dict(path="somewhere"), "need no path"),
    ],
)
def test_numbers_that_cannot_be(options, says):
    assert says in error("digits", **options)


# IDX


def idx_bytes(array: np.ndarray) -> bytes:
    """By hand, from the format's description: two zeros, 08 for bytes, the number of dimensions, the sizes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(folder: Path, train: int = 40, test: int = 20, zipped: bool = True) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for stem, count in (("train", train), ("t10k", test)):
        arrays[f"{stem}-images-idx3-ubyte"] = RNG.integers(0, 256, (count, 6, 5), dtype=np.uint8)
        arrays[f"{stem}-labels-idx1-ubyte"] = (np.arange(count) % 10).astype(np.uint8)
    for name, array in arrays.items():
        data = idx_bytes(array)
        (folder / f"{name}.gz" if zipped else folder / name).write_bytes(gzip.compress(data) if zipped else data)
    return arrays


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("source", ["mnist", "fashion-mnist"])
def test_idx_holds_the_bytes_packed_by_hand(tmp_path, source, zipped):
    arrays = idx_files(tmp_path / "files", zipped=zipped)
    data = open_data(source, path=str(tmp_path / "files"), val_fraction=0.25)
    assert data.test is not None and data.test.images is not None
    np.testing.assert_array_equal(data.test.images[..., 0], arrays["t10k-images-idx3-ubyte"])
    np.testing.assert_array_equal(data.test.labels, arrays["t10k-labels-idx1-ubyte"])
    assert counted(data.train) == [3] * 10 and counted(data.val) == [1] * 10
    assert data.train.channels == 1 and len(data.classes) == 10
    for dataset in (data.train, data.val):
        for i, name in enumerate(names(dataset)):
            at = int(name.removeprefix(f"{source}/train/"))
            np.testing.assert_array_equal(dataset.read(i)[..., 0], arrays["train-images-idx3-ubyte"][at])
            assert dataset.labels[i] == arrays["train-labels-idx1-ubyte"][at]
    assert len({*names(data.train), *names(data.val)}) == 40


@pytest.mark.parametrize("below", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_idx_is_found_in_vitlab_data(tmp_path, monkeypatch, below):
    idx_files(tmp_path / "data" / below)
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "data"))
    assert len(open_data("fashion-mnist", download=False).train) == 30


def test_idx_is_found_where_debian_puts_it_and_in_the_cache(tmp_path, monkeypatch):
    assert "downloading is off" in error("fashion-mnist", download=False)
    idx_files(tmp_path / "cache/fashion-mnist", train=30)
    assert len(open_data("fashion-mnist").train) == 20
    idx_files(tmp_path / "debian")
    monkeypatch.setattr(idx, "DEBIAN", {"fashion-mnist": tmp_path / "debian"})
    assert len(open_data("fashion-mnist").train) == 30


def broken(kind: str, whole: bytes) -> bytes:
    return {
        "magic": b"\0\0\x0d" + whole[3:],
        "empty": b"",
        "short": whole[:-3],
        "long": whole + b"\0",
        "header": whole[:9],
        "huge": whole[:4] + b"\xff" * 12 + whole[16:],
    }[kind]


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("magic", "magic number 0x00000d03, expected 0x00000803"),
        ("empty", "only 0 bytes"),
        ("short", "needs 1,200 bytes, but 1,197 follow"),
        ("long", "needs 1,200 bytes, but more follow"),
        ("header", "only 9 bytes"),
        ("huge", "4294967295 x 4294967295 x 4294967295, which cannot be"),
    ],
)
def test_broken_idx(tmp_path, kind, says, zipped):
    arrays = idx_files(tmp_path, zipped=zipped)
    name = "train-images-idx3-ubyte"
    data = broken(kind, idx_bytes(arrays[name]))
    (tmp_path / f"{name}.gz" if zipped else tmp_path / name).write_bytes(gzip.compress(data) if zipped else data)
    message = error("mnist", path=str(tmp_path))
    assert says in message and name in message


def test_idx_that_do_not_fit_together(tmp_path):
    idx_files(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    whole = labels.read_bytes()
    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(39, dtype=np.uint8))))
    assert "40 images" in (message := error("mnist", path=str(tmp_path))) and "39 labels" in message
    labels.write_bytes(gzip.compress(idx_bytes(np.full(40, 11, dtype=np.uint8))))
    assert "label 0 is 11, outside 0..9" in error("mnist", path=str(tmp_path))
    labels.write_bytes(whole[:-12])  # cut off within the gzip stream
    assert "damaged or cut off" in error("mnist", path=str(tmp_path))
    labels.write_bytes(b"<html>not found</html>")
    assert "damaged or cut off" in error("mnist", path=str(tmp_path))
    labels.unlink()
    assert "train-labels-idx1-ubyte missing" in error("mnist", path=str(tmp_path))
    assert "no such folder" in error("mnist", path=str(tmp_path / "nowhere"))
    assert "is a file" in error("mnist", path=str(tmp_path / "t10k-labels-idx1-ubyte.gz"))


def test_a_folder_of_idx_files_alone_does_not_say_which_set_it_is(tmp_path):
    idx_files(tmp_path)
    assert f"name it, mnist or fashion-mnist, with data.path={tmp_path}" in error(str(tmp_path))


# Downloads


@pytest.fixture
def server(tmp_path):
    """A local HTTP server: .files by name; .broken, those whose connection closes half-way."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            name = self.path.lstrip("/")
            asked.append(name)
            if name not in files:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[name])))
            self.end_headers()
            self.wfile.write(files[name][: len(files[name]) // 2] if name in broken else files[name])

        def log_message(self, *args):
            pass

    files: dict[str, bytes] = {}
    broken: set[str] = set()
    asked: list[str] = []
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    httpd.files, httpd.broken, httpd.asked = files, broken, asked  # type: ignore[attr-defined]
    yield httpd
    httpd.shutdown()
    httpd.server_close()


@pytest.fixture
def published(server, tmp_path, monkeypatch):
    """Small MNIST files on the server, under a table of their checksums."""
    idx_files(tmp_path / "published")
    server.files |= {file.name: file.read_bytes() for file in (tmp_path / "published").iterdir()}
    sums = {name: hashlib.md5(data).hexdigest() for name, data in server.files.items()}
    url = f"http://127.0.0.1:{server.server_port}/"
    monkeypatch.setitem(download.REMOTES, "mnist", Remote((url + "gone/", url), sums))
    return server


def test_download_falls_back_on_the_next_mirror_and_fills_the_cache(published, tmp_path):
    first = open_data("mnist")
    assert published.asked.count("gone/train-images-idx3-ubyte.gz") == 1
    for name, data in published.files.items():
        assert (tmp_path / "cache/mnist" / name).read_bytes() == data
    published.asked.clear()
    again = open_data("mnist", download=False)
    assert not published.asked and names(again.train) == names(first.train)
    (tmp_path / "cache/mnist/t10k-labels-idx1-ubyte.gz").unlink()
    open_data("mnist")
    assert set(published.asked) == {"gone/t10k-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"}  # the missing one


def test_interrupted_and_corrupt_downloads_leave_nothing_behind(published, tmp_path):
    name = "train-labels-idx1-ubyte.gz"
    published.broken.add(name)
    message = error("mnist")
    assert name in message and "broke off after" in message and "Not Found" in message and "VITLAB_DATA" in message
    kept = {file.name for file in (tmp_path / "cache/mnist").iterdir()}
    assert kept == {"train-images-idx3-ubyte.gz"}  # what came before it, and no partial file under any name
    published.broken.clear()
    published.files[name] = published.files[name][:-1] + b"x"
    assert "wrong checksum: MD5 is" in error("mnist")
    assert {file.name for file in (tmp_path / "cache/mnist").iterdir()} == kept


def test_no_network_and_no_place_to_write(published, tmp_path, monkeypatch):
    monkeypatch.setitem(download.REMOTES, "mnist", Remote(("http://127.0.0.1:9/",), download.REMOTES["mnist"].files))
    assert "refused" in error("mnist")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "file"))
    assert "Set VITLAB_CACHE" in error("mnist")


def test_a_full_disk_while_downloading_is_named(published, tmp_path, monkeypatch):
    def full(file, chunk):
        raise DataError("No space left")

    monkeypatch.setattr(download, "_write", full)
    assert "No space left" in error("mnist")
    assert list((tmp_path / "cache/mnist").iterdir()) == []


def test_published_addresses_are_https_with_md5():
    for remote in PUBLISHED.values():
        assert remote.mirrors and all(url.startswith("https://") and url.endswith("/") for url in remote.mirrors)
        assert all(len(bytes.fromhex(md5)) == 16 for md5 in remote.files.values())


# CIFAR


def cifar_bytes(labels: list[tuple[int, ...]], images: np.ndarray) -> bytes:
    """By hand: label bytes, then the red, green and blue planes, row by row."""
    records = []
    for label, image in zip(labels, images, strict=True):
        planes = [image[:, :, channel].tobytes() for channel in range(3)]
        records.append(struct.pack(f"{len(label)}B", *label) + b"".join(planes))
    return b"".join(records)


def small_cifar(
    monkeypatch, source: str, records: int = 20
) -> tuple[dict[str, bytes], dict[str, np.ndarray], list[int]]:
    """Files as the official ones, with fewer records and their own checksums: bytes, images, labels of train."""
    kind = cifar.KINDS[source]
    files, images, members = {}, {}, {}
    labels = [(i % 20, i % 100) if kind.label_bytes == 2 else (i % 10,) for i in range(records)]
    for name, member in kind.members.items():
        images[name] = RNG.integers(0, 256, (records, 32, 32, 3), dtype=np.uint8)
        files[name] = cifar_bytes(labels, images[name])
        sha1 = hashlib.sha1(files[name]).hexdigest() if member.sha1 else None
        members[name] = dataclasses.replace(member, records=records, sha1=sha1)
    monkeypatch.setitem(cifar.KINDS, source, dataclasses.replace(kind, members=members))
    files_of_train = sum(member.split == "train" for member in members.values())
    return files, images, [label[-1] for label in labels] * files_of_train


def tar(path: Path, files: dict[str, bytes], mode: str = "w:gz", folder: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(f"{folder}{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def check_cifar(data: Data, images: dict[str, np.ndarray], labels: list[int], source: str) -> None:
    train = np.concatenate([array for name, array in images.items() if not name.startswith("test")])
    test = np.concatenate([array for name, array in images.items() if name.startswith("test")])
    assert data.test is not None and data.test.images is not None
    np.testing.assert_array_equal(data.test.images, test)
    seen = set()
    for dataset in (data.train, data.val):
        for i, name in enumerate(names(dataset)):
            at = int(name.removeprefix(f"{source}/train/"))
            seen.add(at)
            np.testing.assert_array_equal(dataset.read(i), train[at])
            assert dataset.labels[i] == labels[at]
    assert seen == set(range(len(train)))


@pytest.mark.parametrize("form", ["tar.gz", "tar", "shuffled", "folder", "above"])
@pytest.mark.parametrize("source", ["cifar10", "cifar100"])
def test_cifar_holds_the_records_packed_by_hand(tmp_path, monkeypatch, source, form):
    files, images, labels = small_cifar(monkeypatch, source, records=20 if source == "cifar10" else 200)
    kind = cifar.KINDS[source]
    path = tmp_path / ("c.tar.gz" if form == "tar.gz" else "c.tar")
    if form in ("folder", "above"):
        path = tmp_path / kind.folder
        path.mkdir()
        for name, data in files.items():
            (path / name).write_bytes(data)
        path = path if form == "folder" else tmp_path
    elif form == "shuffled":  # another order, other names beside them, names with ./
        extra = {"batches.meta.txt": b"airplane\n", **dict(reversed(files.items()))}
        tar(path, extra, "w", f"./{kind.folder}/")
    else:
        tar(path, files, "w:gz" if form == "tar.gz" else "w", f"{kind.folder}/")
    check_cifar(open_data(source, path=str(path), seed=4), images, labels, source)
    if form != "shuffled" and not path.is_file():
        check_cifar(open_data(str(path)), images, labels, source)  # the path alone says which set it is


def test_cifar_in_vitlab_data_the_cache_and_by_download(tmp_path, monkeypatch, server):
    files, images, labels = small_cifar(monkeypatch, "cifar10")
    archive = tar(tmp_path / "data/cifar-10-binary.tar.gz", files, folder="cifar-10-batches-bin/")
    assert "downloading is off" in error("cifar10", download=False)
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "data"))
    check_cifar(open_data("cifar-10", download=False), images, labels, "cifar10")
    check_cifar(open_data(str(archive)), images, labels, "cifar10")
    monkeypatch.delenv("VITLAB_DATA")
    server.files[archive.name] = archive.read_bytes()
    md5 = hashlib.md5(archive.read_bytes()).hexdigest()
    remote = Remote((f"http://127.0.0.1:{server.server_port}/",), {archive.name: md5})
    monkeypatch.setitem(download.REMOTES, "cifar10", remote)
    check_cifar(open_data("cifar10"), images, labels, "cifar10")
    check_cifar(open_data("cifar10", download=False), images, labels, "cifar10")  # from the cache now


def test_cifar_checksums_are_of_the_members(tmp_path, monkeypatch):
    files, *_ = small_cifar(monkeypatch, "cifar10")
    monkeypatch.setitem(download.REMOTES, "cifar10", Remote(("https://x.org/",), {}))
    changed = files | {"data_batch_3.bin": files["data_batch_3.bin"][:-1] + b"!"}
    message = error("cifar10", path=str(tar(tmp_path / "c.tar.gz", changed, folder="cifar-10-batches-bin/")))
    assert "wrong checksum of data_batch_3.bin" in message and "https://x.org/cifar-10-binary.tar.gz" in message
    cached = tar(tmp_path / "cache/cifar10/cifar-10-binary.tar.gz", changed)
    assert f"Delete {cached}" in error("cifar10")


def test_broken_cifar(tmp_path, monkeypatch):
    files, *_ = small_cifar(monkeypatch, "cifar10")
    monkeypatch.setitem(download.REMOTES, "cifar10", Remote(("https://x.org/",), {}))

    def message(held: dict[str, bytes], folder: str = "cifar-10-batches-bin/", keep: float = 1.0) -> str:
        path = tar(tmp_path / "c.tar.gz", held, folder=folder)
        path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
        return error("cifar10", path=str(path))

    less = {name: data for name, data in files.items() if name != "data_batch_2.bin"}
    assert "data_batch_2.bin missing" in message(less)
    assert "data_batch_2.bin holds 61,459 bytes, expected 61,460" in message(
        files | {"data_batch_2.bin": files["data_batch_2.bin"][:-1]}
    )
    assert "missing" in message(files, folder="../../etc/")  # a strange path is not an expected name
    assert "cut off" in message(files, keep=0.5)
    assert "Python version" in message({"data_batch_1": b"\x80\x02"}, folder="cifar-10-batches-py/")
    (tmp_path / "no.tar.gz").write_bytes(b"<html>")
    assert "not a tar file" in error("cifar10", path=str(tmp_path / "no.tar.gz"))
    assert "no such file or folder" in error("cifar10", path=str(tmp_path / "nowhere"))
    (tmp_path / "py").mkdir()
    (tmp_path / "py/data_batch_1").write_bytes(b"\x80\x02")
    assert "Python version" in error("cifar10", path=str(tmp_path / "py"))


def test_cifar_labels_outside_the_classes(tmp_path, monkeypatch):
    files, images, _ = small_cifar(monkeypatch, "cifar100")
    monkeypatch.setitem(download.REMOTES, "cifar100", Remote(("https://x.org/",), {}))
    files["test.bin"] = cifar_bytes([(0, 100)] * 20, images["test.bin"])
    assert "record 0 of test has label 100, outside 0..99" in error(
        "cifar100", path=str(tar(tmp_path / "c.tar", files))
    )


def test_a_tar_link_is_not_followed(tmp_path, monkeypatch):
    files, *_ = small_cifar(monkeypatch, "cifar10")
    monkeypatch.setitem(download.REMOTES, "cifar10", Remote(("https://x.org/",), {}))
    path = tmp_path / "c.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
        for name in list(files)[:5]:
            info = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            info.size = len(files[name])
            archive.addfile(info, io.BytesIO(files[name]))
    assert "test_batch.bin missing" in error("cifar10", path=str(path))


def test_cifar_as_class_folders(tmp_path):
    class_folders(tmp_path / "train", dict.fromkeys(cifar.CIFAR10.classes, 3))
    class_folders(tmp_path / "test", dict.fromkeys(cifar.CIFAR10.classes, 1))
    data = open_data("cifar10", path=str(tmp_path))
    assert data.classes == cifar.CIFAR10.classes and not data.notes
    assert counted(data.train) == [2] * 10 and counted(data.val) == [1] * 10
    class_folders(tmp_path / "train", {"zebra": 2})
    assert "not named as the 10 classes of cifar10" in open_data("cifar10", path=str(tmp_path)).notes[0]


def test_cifar_classes():
    assert len(cifar.CIFAR100.classes) == len(set(cifar.CIFAR100.classes)) == 100
    for kind in cifar.KINDS.values():
        assert kind.classes == sorted(kind.classes)  # the official order is alphabetical, so class folders agree
        assert sum(member.records for member in kind.members.values()) == 60_000


# Folders


def test_folder_of_class_folders(tmp_path):
    kept = {}
    for name, count in {"dog": 10, "cat": 21, "ä 鸟": 5}.items():
        for i in range(count):
            path = tmp_path / name / ("deep" if i % 2 else ".") / f"{i}.PNG"
            kept[str(path)] = picture(path, mode="RGB" if i % 3 else "L")
    (tmp_path / "cat/.hidden.png").write_bytes(b"x")
    (tmp_path / "cat/notes.txt").write_bytes(b"x")
    (tmp_path / ".git/a").mkdir(parents=True)
    (tmp_path / "__MACOSX/cat").mkdir(parents=True)
    data = open_data(str(tmp_path), seed=1)
    assert data.classes == ["cat", "dog", "ä 鸟"] and data.test is None and data.notes == []
    assert counted(data.train) == [19, 9, 4] and counted(data.val) == [2, 1, 1]
    assert sorted(names(data.train) + names(data.val)) == sorted(kept)
    for dataset in (data.train, data.val):
        assert dataset.images is None and dataset.channels == 3
        for i, name in enumerate(names(dataset)):
            np.testing.assert_array_equal(dataset.read(i), kept[name])
            assert Path(name).relative_to(tmp_path).parts[0] == data.classes[dataset.labels[i]]
    assert names(open_data(str(tmp_path), seed=1).val) == names(data.val)
    assert names(open_data(str(tmp_path), seed=2).val) != names(data.val)


@pytest.mark.parametrize("val", ["val", "valid", "Validation"])
def test_folder_with_splits(tmp_path, val):
    class_folders(tmp_path / "train", {"b": 3, "a": 4})
    class_folders(tmp_path / val, {"a": 1, "b": 2})
    class_folders(tmp_path / "test", {"a": 2, "b": 1})
    data = open_data(f"{tmp_path}/")
    assert data.test is not None
    assert [counted(d) for d in (data.train, data.val, data.test)] == [[4, 3], [1, 2], [2, 1]]
    assert all(f"/{val}/" in name for name in names(data.val))


def test_folder_with_train_and_test_only(tmp_path):
    class_folders(tmp_path / "train", {"b": 3, "a": 4})
    class_folders(tmp_path / "test", {"a": 2})
    data = open_data(str(tmp_path))
    assert counted(data.train) == [3, 2] and counted(data.val) == [1, 1]
    assert all("/train/" in name for name in names(data.val))
    assert data.notes == ["test has no images of 1 of the 2 classes: b."]


def test_train_may_be_a_class(tmp_path):
    data = open_data(str(class_folders(tmp_path, {"train": 3, "bus": 4, "test": 2})))
    assert data.classes == ["bus", "test", "train"]


def test_pictures_outside_the_class_folders_are_noted(tmp_path):
    class_folders(tmp_path / "train", {"a": 3, "b": 3})
    picture(tmp_path / "train/loose.png")
    assert "1 images outside the class folders" in open_data(str(tmp_path)).notes[0]


def test_a_class_of_one_picture_stays_in_train(tmp_path):
    data = open_data(str(class_folders(tmp_path, {"a": 1, "b": 2, "c": 30})))
    assert counted(data.train) == [1, 1, 27] and counted(data.val) == [0, 1, 3] and "val has no images" in data.notes[0]


def test_an_unlabelled_test_folder_is_noted(tmp_path):
    class_folders(tmp_path / "train", {"a": 3, "b": 3})
    picture(tmp_path / "test/1.png")
    data = open_data(str(tmp_path))
    assert data.test is None and "no test split" in data.notes[0]


def flat(root: Path) -> None:
    picture(root / "1.png")
    (root / "labels.csv").write_text("path,label\n", encoding="utf-8")


def two_levels(root: Path) -> None:
    class_folders(root / "pictures", {"a": 1, "b": 1})


def other_files(root: Path) -> None:
    for name in ("a", "b"):
        (root / name).mkdir()
        (root / name / "1.heic").write_bytes(b"x")


def both_vals(root: Path) -> None:
    for split in ("train", "val", "valid"):
        class_folders(root / split, {"a": 1, "b": 1})


def val_with(**counts: int):
    def build(root: Path) -> None:
        class_folders(root / "train", {"a": 2, "b": 2})
        class_folders(root / "val", counts)
        (root / "val").mkdir(exist_ok=True)

    return build


BAD_FOLDERS = {
    "empty": (lambda root: None, "the folder is empty. Put the images of each class into a folder of its own"),
    "flat": (flat, "1 images lie directly in it, without class folders", "Or pass the table: "),
    "only text": (
        lambda root: (root / "readme.txt").write_text("", encoding="utf-8"),
        "no class folders and no images",
    ),
    "one class": (lambda root: class_folders(root, {"cat": 3}), "only one class, 'cat'"),
    "one level too high": (two_levels, "only one class", "pictures?"),
    "no pictures": (other_files, "no images in its 2 folders (files there end in .heic; read are .jpg"),
    "empty class": (
        lambda root: (class_folders(root, {"cat": 3, "dog": 2}), (root / "emu").mkdir()),
        "no images in class 'emu'. Add some, or remove the empty folder",
    ),
    "val and test only": (
        lambda root: [class_folders(root / split, {"a": 1, "b": 1}) for split in ("val", "test")],
        "has test/ and val/, but no train/",
    ),
    "two vals": (both_vals, "val and valid both mean val"),
    "val has more": (val_with(a=1, zebra=1), "class 'zebra' is not in ", "Add images of it to train"),
    "val is empty": (val_with(), "no images in class folders. Fill it as train is filled, or remove it"),
    "val lacks a class": (val_with(a=1), "val has no images of b, which train has", "val/b", "or remove val"),
    "train is flat": (lambda root: [picture(root / s / "1.png") for s in ("train", "val")], "without class folders"),
    "singles": (lambda root: class_folders(root, {"a": 1, "b": 1}), "each class has a single image"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_folders_that_cannot_be_trained_on(tmp_path, case):
    build, *says = BAD_FOLDERS[case]
    build(tmp_path)
    message = error(str(tmp_path))
    assert str(tmp_path) in message
    for words in says:
        assert words in message


def test_unreadable_pictures_are_named_when_read(tmp_path):
    class_folders(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a/0.png").write_bytes(b"no picture")
    (tmp_path / "a/gone.png").symlink_to(tmp_path / "nowhere.png")
    data = open_data(str(tmp_path))
    bad = []
    for dataset in (data.train, data.val):
        for i, name in enumerate(names(dataset)):
            try:
                dataset.read(i)
            except ImageError as unreadable:
                assert name in str(unreadable)
                bad.append(Path(name).name)
    assert sorted(bad) == ["0.png", "gone.png"]


def test_links_in_a_circle_end(tmp_path):
    class_folders(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "a/loop").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "b/up").symlink_to(tmp_path / "b", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    data = open_data(str(class_folders(tmp_path, {"elsewhere": 2})))
    assert len(data.train) + len(data.val) == 6


def test_an_archive_beside_class_folders_is_no_shard(tmp_path):
    class_folders(tmp_path, {"a": 2, "b": 2})
    tar(tmp_path / "backup.tar", {"x.jpg": b""}, "w")
    assert open_data(str(tmp_path)).classes == ["a", "b"]


# CSV


def table(tmp_path: Path, text: str, files: str = "1.png 2.png 3.png 4.png a/5.png a/6.png") -> str:
    for name in files.split():
        picture(tmp_path / name)
    (tmp_path / "list.csv").write_text(text, encoding="utf-8")
    return str(tmp_path / "list.csv")


def test_csv_of_paths_and_labels(tmp_path, monkeypatch):
    path = table(tmp_path, f"\ufeffLabel, Image\ncat,1.png\ndog,{tmp_path}/2.png\n\ncat,'3.png'\n".replace("'", '"')
                 + "dog,./4.png\ncat,a/5.png\n")  # fmt: skip
    monkeypatch.chdir(tmp_path.parent)  # relative to the CSV, not to where we are
    data = open_data(path)
    assert data.classes == ["cat", "dog"] and data.test is None
    found = {Path(n).name: data.classes[d.labels[i]] for d in (data.train, data.val) for i, n in enumerate(names(d))}
    assert found == {"1.png": "cat", "2.png": "dog", "3.png": "cat", "4.png": "dog", "5.png": "cat"}
    for dataset in (data.train, data.val):
        np.testing.assert_array_equal(dataset.read(0), np.asarray(Image.open(dataset.name_of(0))))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_csv_with_splits_and_numbers(tmp_path, separator):
    rows = [
        "file,class,split",
        "1.png,0,train",
        "2.png,2,Train",
        "3.png,2,validation",
        "4.png,0,test",
        "a/5.png,1,train",
        "a/6.png,0,val",
        "a/5.png,1,valid",
    ]
    data = open_data(table(tmp_path, "\n".join(rows).replace(",", separator)))
    assert data.test is not None and data.classes == ["0", "1", "2"]
    assert (
        data.train.labels.tolist() == [0, 2, 1]
        and data.val.labels.tolist() == [2, 0, 1]
        and data.test.labels.tolist() == [0]
    )
    assert data.notes == ["test has no images of 2 of the 3 classes: 1, 2."]


def test_csv_classes_file_fixes_names_and_order(tmp_path):
    (tmp_path / "classes.txt").write_text("zebra\nant\nemu\n", encoding="utf-8")
    numbers = open_data(table(tmp_path, "path,label\n1.png,0\n2.png,1\n3.png,0\n4.png,1\n"))
    assert numbers.classes == ["zebra", "ant", "emu"] and "train has no images of 1 of the 3" in numbers.notes[0]
    named = open_data(table(tmp_path, "path,label\n1.png,zebra\n2.png,ant\n3.png,zebra\n4.png,ant\n"))
    assert sorted(named.train.labels.tolist() + named.val.labels.tolist()) == [0, 0, 1, 1]
    assert "line 3: label 3 is outside the 3 classes" in error(table(tmp_path, "path,label\n1.png,0\n2.png,3\n"))
    assert "line 2: label 'cow' is not among" in error(table(tmp_path, "path,label\n1.png,cow\n2.png,ant\n"))
    (tmp_path / "classes.txt").write_text("a\na\n", encoding="utf-8")
    assert "names 'a' twice" in error(table(tmp_path, "path,label\n1.png,0\n"))
    (tmp_path / "classes.txt").write_text("\n", encoding="utf-8")
    assert "classes.txt: is empty" in error(table(tmp_path, "path,label\n1.png,0\n"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("path,label\n", "no lines below it"),
        ("0.png,cat\n2.png,dog\n", "no column path or image or file or filename (found 0.png, cat)"),
        ("path,colour\n1.png,cat\n", "no column label or class"),
        ("path,label\n1.png,cat\n2.png,\n", "line 3: the label is empty"),
        ("path,label\n1.png,cat\n2.png\n", "line 3: the label is empty"),
        ("path,label\n,cat\n", "line 2: the path is empty"),
        ("path,label,split\n1.png,cat,train\n2.png,dog,later\n", "line 3: split is 'later'; write train, val or test"),
        ("path,label,split\n1.png,cat,train\n2.png,dog,\n", "line 3: the split is empty"),
        ("path,label,split\n1.png,cat,val\n", "never says train, only val"),
        ("path,label\n1.png,cat\nx/2.png,dog\ny.png,dog\n", "2 of its files do not exist:\n  line 3: "),
        ("path,label\n1.png,cat\n2.png,cat\n", "only one class, 'cat'"),
        (
            "path,label,split\n1.png,a,train\n2.png,b,train\n3.png,c,val\n",
            "line 4: val has class 'c', which train has not",
        ),
        ("path,label,split\n1.png,0,train\n2.png,1,train\n3.png,2,test\n", "line 4: test has class '2'"),
        ("path,label\n1.png,0\n2.png,999999999\n", "line 3: label 999999999, but only 2 different ones"),
        ("path,label\n1.png,0\n2.png,1\n3.png,-1\n", "line 4: label -1 is below 0"),
        (
            "path,label,split\n1.png,0,train\n2.png,2,train\n3.png,0,val\n4.png,2,val\na/5.png,1,val\n",
            "val has images of 1, which train has not",
        ),
        (
            "path,label,split\n1.png,a,train\n2.png,b,train\n3.png,b,val\n",
            "val has no images of a, which train has",
        ),
    ],
)
def test_csv_that_cannot_be_used(tmp_path, text, says):
    message = error(table(tmp_path, text))
    assert says in message


def test_csv_that_is_not_utf8(tmp_path):
    (tmp_path / "list.csv").write_bytes("path,label\n1.png,zèbre\n".encode("latin-1"))
    assert "not UTF-8" in error(str(tmp_path / "list.csv"))


# By name or path


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("cifr10", "Did you mean 'cifar10'?"),
        ("fasion-mnist", "Did you mean 'fashion-mnist'?"),
        ("imagenet-22k", "unknown data source 'imagenet-22k'"),
        ("no/such/folder", "no/such/folder: no such file or folder"),
        ("list.csv", "list.csv: no such file or folder"),
    ],
)
def test_unknown_sources(tmp_path, monkeypatch, source, says):
    monkeypatch.chdir(tmp_path)
    message = error(source)
    assert says in message and all(name in message for name in SOURCES) and "CSV" in message


def test_files_that_are_no_source(tmp_path):
    picture(tmp_path / "1.png")
    assert "one image; pass the folder" in error(str(tmp_path / "1.png"))
    (tmp_path / "data.parquet").write_bytes(b"")
    assert "no kind of data known" in error(str(tmp_path / "data.parquet"))
    assert "a path belongs to one of digits" in error(str(tmp_path), path="x")


@pytest.mark.parametrize("spelling", ["digits", "Digits", "DIGITS"])
def test_names_in_other_spellings(spelling):
    assert open_data(spelling).name == "digits"


# In workers


class Read(TorchDataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset.read(index), int(self.dataset.labels[index])


def test_datasets_pickle_and_serve_workers(tmp_path):
    folder = open_data(str(class_folders(tmp_path, {"a": 6, "b": 7})))
    for dataset in (folder.train, folder.val, open_data("digits", per_class=2).train):
        copy = pickle.loads(pickle.dumps(dataset))
        assert names(copy) == names(dataset) and (copy.labels == dataset.labels).all()
        np.testing.assert_array_equal(copy.read(1), dataset.read(1))
    served = list(DataLoader(Read(folder.train), batch_size=None, num_workers=2))
    for i, (pixels, label) in enumerate(served):
        np.testing.assert_array_equal(pixels, folder.train.read(i))
        assert label == folder.train.labels[i]


def test_a_million_paths_pickle_small(tmp_path):
    """No Python object per sample: those are what makes forked workers copy memory."""
    paths = (f"/data/imagenet/train/n{i % 1000:08d}/{i:012d}.JPEG" for i in range(100_000))
    dataset = FileDataset(paths, np.zeros(100_000, dtype=np.int64), ["a"])
    data = io.BytesIO()
    pickler = pickle.Pickler(data)
    pickler.dump(dataset)
    assert len(pickler.memo.copy()) < 100
    assert dataset.name_of(99_999) == "/data/imagenet/train/n00000999/000000099999.JPEG"


def test_strings_are_kept_byte_by_byte():
    rng = random.Random(0)
    made = [
        "",
        "ä鸟",
        os.fsdecode(b"caf\xe9.jpg"),
        *(rng.randbytes(rng.randrange(20)).decode("latin-1") for _ in range(50)),
    ]
    kept = Strings(made)
    assert len(kept) == len(made) and list(kept) == made and kept[-1] == made[-1]


def test_subset(tmp_path):
    digits, folder = open_data("digits").train, open_data(str(class_folders(tmp_path, {"a": 6, "b": 7}))).train
    for dataset in (digits, folder):
        part = subset(subset(dataset, [5, 0, 3, 2]), np.array([True, False, True, False]))
        assert names(part) == [dataset.name_of(5), dataset.name_of(3)]
        assert part.labels.tolist() == dataset.labels[[5, 3]].tolist() and part.classes == dataset.classes
        np.testing.assert_array_equal(part.read(1), dataset.read(3))
        assert len(subset(dataset, [])) == 0
        for wrong in ([len(dataset)], [-1], np.ones(3, dtype=bool)):
            with pytest.raises(IndexError):
                subset(dataset, wrong)


def test_what_is_read_may_be_changed():
    dataset = open_data("digits").train
    before = dataset.read(0)
    dataset.read(0)[:] = 7
    np.testing.assert_array_equal(dataset.read(0), before)
