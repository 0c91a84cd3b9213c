"""Shards made with tarfile: bytes as tarfile itself reads them, pixels as Pillow does; the index, workers, errors."""

from __future__ import annotations

import io
import json
import os
import pickle
import tarfile
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import DataError, ImageError
from vitlab.images.datasets import open_data
from vitlab.images.sources import shards
from vitlab.images.sources.captions import holds_captions
from vitlab.images.sources.shards import expand, index_of

RNG = np.random.default_rng(0)
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


def encoded(form: str = "png", size: tuple[int, int] = (9, 6)) -> bytes:
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(file, FORMATS[form])
    return file.getvalue()


def write(path: Path, members: dict[str, bytes], form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(labels: list, first: int = 0, label: str = "cls") -> dict[str, bytes]:
    members = {}
    for i, value in enumerate(labels, first):
        members[f"{i:04d}.png"] = encoded()
        members[f"{i:04d}.{label}"] = (
            json.dumps({"label": value}).encode() if label == "json" else f"{value}\n".encode()
        )
    return members


def names(dataset) -> list[str]:
    return [dataset.name_of(i) for i in range(len(dataset))]


def by_tarfile(name: str) -> tuple[bytes, bytes]:
    """The picture's and the label's bytes, as tarfile extracts them: "x.tar/0001.png" -> ..."""
    shard, _, member = name.partition(".tar/")
    with tarfile.open(f"{shard}.tar") as tar:
        picture, label = (tar.extractfile(m) for m in (member, f"{member.rpartition('.')[0]}.cls"))
        assert picture is not None and label is not None
        return picture.read(), label.read()


def error(source: str) -> str:
    with pytest.raises(ValueError) as caught:
        open_data(source)
    return str(caught.value)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_samples_are_what_tarfile_and_pillow_read(tmp_path, form):
    folder = "" if form == tarfile.USTAR_FORMAT else f"a/{'long_' * 40}/"  # long names take headers of their own
    for shard in range(3):
        members = {}
        for i, ending in enumerate(["jpg", "png", "webp", "JPG"] * 3):
            key = f"{folder}{shard}{i:03d}"
            members[f"{key}.cls"] = str((i + shard) % 3).encode()
            members[f"{key}.{ending}"] = encoded(ending.lower(), size=(5 + i, 8 + shard))
            members[f"{key}.seg.png"] = b"something else"
        write(tmp_path / f"train-{shard:06d}.tar", members, form)
    data = open_data(f"{tmp_path}/train-{{000000..000002}}.tar", seed=3)
    assert data.classes == ["0", "1", "2"] and data.test is None
    assert np.bincount(data.train.labels).tolist() == [11, 11, 11] and np.bincount(data.val.labels).tolist() == [
        1,
        1,
        1,
    ]
    assert len({*names(data.train), *names(data.val)}) == 36
    for dataset in (data.train, data.val):
        for i, name in enumerate(names(dataset)):
            picture, label = by_tarfile(name)
            np.testing.assert_array_equal(dataset.read(i), np.asarray(Image.open(io.BytesIO(picture))))
            assert data.classes[dataset.labels[i]] == label.decode()


@pytest.mark.parametrize(
    "source",
    [
        "{0}/train-{{000..001}}.tar",
        "{0}/train-*.tar",
        "{0}/train-00[01].tar",
        "{0}/{{train-000,train-001}}.tar",
        "{0}/train-000.tar::{0}/train-001.tar",
    ],
)
def test_all_spellings_of_a_source(tmp_path, source):
    write(tmp_path / "train-000.tar", samples([0, 1, 0, 1]))
    write(tmp_path / "train-001.tar", samples([0, 1, 0, 1], first=4))
    write(tmp_path / "val-000.tar", samples([0, 1], first=8))
    data = open_data(source.format(tmp_path))
    assert len(data.train) + len(data.val) == 8
    assert not any("val-" in name for name in names(data.val))


def test_a_folder_of_shards_splits_by_names(tmp_path):
    write(tmp_path / "x-train-000.tar", samples([0, 1, 2]))
    write(tmp_path / "x-train-001.tar", samples([0, 1, 2], first=3))
    write(tmp_path / "x-validation-000.tar", samples([2, 1, 0]))
    write(tmp_path / "x-test-000.tar", samples([0]))
    data = open_data(str(tmp_path))
    assert data.test is not None
    assert data.train.labels.tolist() == [0, 1, 2, 0, 1, 2] and data.val.labels.tolist() == [2, 1, 0]
    assert data.test.labels.tolist() == [0]
    assert data.notes == ["test has no images of 2 of the 3 classes: 1, 2."]


def test_a_folder_with_train_and_val_folders_of_shards(tmp_path):
    write(tmp_path / "train/000.tar", samples([0, 1]))
    write(tmp_path / "val/000.tar", samples([1, 0, 0]))
    data = open_data(str(tmp_path))
    assert data.train.labels.tolist() == [0, 1] and data.val.labels.tolist() == [1, 0, 0]


def test_shards_of_one_other_split_alone_are_what_was_asked_for(tmp_path):
    write(tmp_path / "test-000.tar", samples([0, 1, 0, 1]))
    write(tmp_path / "val-000.tar", samples([0, 1]))
    assert len(open_data(f"{tmp_path}/test-000.tar").train) == 2
    assert "but none of train" in error(str(tmp_path))


def test_expansion_is_the_shells():
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand("{x,y}-{9..10}") == ["x-9", "x-10", "y-9", "y-10"]
    assert expand("plain.tar") == ["plain.tar"]
    for wrong in ("{5..1}", "{0..99999999}"):
        with pytest.raises(ValueError, match="must count upwards"):
            expand(wrong)


# Labels


@pytest.mark.parametrize("form", ["cls", "txt", "json"])
def test_names_as_labels(tmp_path, form):
    write(tmp_path / "a.tar", samples(["dog", "cat", "dog", "cat"], label=form))
    data = open_data(str(tmp_path / "a.tar"))
    assert data.classes == ["cat", "dog"] and sorted([*data.train.labels, *data.val.labels]) == [0, 0, 1, 1]


@pytest.mark.parametrize("form", ["cls", "txt", "json"])
def test_classes_file_names_the_numbers(tmp_path, form):
    (tmp_path / "classes.txt").write_text("emu\nant\n", encoding="utf-8")
    write(tmp_path / "a.tar", samples([1, 0, 1, 1], label=form))
    data = open_data(str(tmp_path / "a.tar"))
    assert data.classes == ["emu", "ant"] and sorted([*data.train.labels, *data.val.labels]) == [0, 1, 1, 1]
    write(tmp_path / "b.tar", samples([1, 0, 2], label=form))
    message = error(str(tmp_path / "b.tar"))
    assert "b.tar, 0002.png: label 2 is outside the 2 classes of" in message and "(0..1)" in message


def test_cls_goes_before_json_and_txt(tmp_path):
    members = samples([0, 1]) | samples(["x", "y"], label="txt") | samples([5, 6], label="json")
    write(tmp_path / "train.tar", members)
    write(tmp_path / "val.tar", samples([1, 0]))
    assert open_data(str(tmp_path)).classes == ["0", "1"]


def test_a_label_of_val_that_train_lacks(tmp_path):
    write(tmp_path / "train.tar", samples(["a", "b"]))
    write(tmp_path / "val.tar", samples(["a", "zebra"]))
    assert "val.tar, 0001.png: val has class 'zebra', which train has not" in error(str(tmp_path))


# The index


def test_the_index_is_made_once_and_again_when_the_shard_changes(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tar", samples([0, 1, 0, 1]))
    first = index_of(path)
    stored = tmp_path / "a.tar.index.json"
    assert json.loads(stored.read_text(encoding="utf-8"))["names"] == ["0000.png", "0001.png", "0002.png", "0003.png"]
    assert not (tmp_path / "cache").exists() and sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", stored.name]
    with monkeypatch.context() as patch:
        patch.setattr(shards, "_scan", lambda *args: pytest.fail("scanned again"))
        assert index_of(path) == first
    write(path, samples([0, 1, 0, 1, 1]))
    assert len(index_of(path).names) == 5  # another size
    write(path, dict(reversed(samples([0, 1, 0, 1, 1]).items())))
    os.utime(path, ns=(1, 1))
    assert index_of(path).names[0] == "0004.png"  # the same size, another time


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 1}', '{"nonsense": 3}', "null"])
def test_a_damaged_index_is_made_anew(tmp_path, content):
    path = write(tmp_path / "a.tar", samples([0, 1, 0, 1]))
    first = index_of(path)
    (tmp_path / "a.tar.index.json").write_text(content, encoding="utf-8")
    assert index_of(path) == first
    assert json.loads((tmp_path / "a.tar.index.json").read_text(encoding="utf-8"))["sizes"] == first.sizes


def test_the_index_goes_to_the_cache_where_the_folder_cannot_be_written(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tar", samples([0, 1, 0, 1]))
    replace = Path.replace

    def refuse(self: Path, target: Path):
        if target.parent == tmp_path:
            raise PermissionError(13, "Permission denied")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refuse)
    first = index_of(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tar", "cache"]  # and no partial file
    assert len(list((tmp_path / "cache/shards").iterdir())) == 1
    monkeypatch.setattr(shards, "_scan", lambda *args: pytest.fail("scanned again"))
    assert index_of(path) == first


def test_with_no_place_for_an_index_shards_still_open(tmp_path, monkeypatch):
    path = write(tmp_path / "a.tar", samples([0, 1, 0, 1]))
    monkeypatch.setattr(Path, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert len(open_data(str(path)).train) == 2


def test_one_seek_and_no_scan_per_sample(tmp_path, monkeypatch):
    write(tmp_path / "a.tar", samples([0, 1] * 20))
    open_data(str(tmp_path / "a.tar"))
    monkeypatch.setattr(tarfile, "open", lambda *args, **options: pytest.fail("the tar was scanned"))
    data = open_data(str(tmp_path / "a.tar"))
    assert data.train.read(30).shape == (6, 9, 3)


# Workers


def read_all(dataset, indices) -> list[bytes]:
    return [dataset.read(i).tobytes() for i in indices]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_several_processes_and_threads_read_at_once(tmp_path, method):
    for shard in range(2):
        write(tmp_path / f"{shard}.tar", samples([0, 1] * 30, first=60 * shard))
    dataset = open_data(str(tmp_path)).train
    expected = read_all(dataset, range(len(dataset)))
    copy = pickle.loads(pickle.dumps(dataset))
    assert read_all(copy, [0, 50]) == [expected[0], expected[50]]
    orders = [RNG.permutation(len(dataset)).tolist() for _ in range(2)]
    with get_context(method).Pool(2) as pool:
        in_processes = pool.starmap(read_all, [(dataset, order) for order in orders])
    with ThreadPoolExecutor(4) as threads:
        in_threads = list(threads.map(lambda order: read_all(dataset, order), orders))
    for order, *read in zip(orders, in_processes, in_threads, strict=True):
        assert read[0] == read[1] == [expected[i] for i in order]


# Errors


def test_shards_that_are_not_there(tmp_path):
    write(tmp_path / "train-0.tar", samples([0, 1]))
    assert "train-1.tar: no such shard" in error(f"{tmp_path}/train-{{0..1}}.tar")
    assert "no such shard" in error(f"{tmp_path}/nothing-*.tar")
    assert "no such file or folder" in error(f"{tmp_path}/nothing.tar")


def test_compressed_shards(tmp_path):
    for name in ("a.tar.gz", "a.tgz"):
        (tmp_path / name).write_bytes(b"")
        assert "must be unpacked first" in error(str(tmp_path / name))


BAD = {
    "no label": ({"1.png": encoded()}, "a.tar: 1.png has no label. Put a .cls, a .json"),
    "no picture": ({"1.cls": b"0", "1.npy": b""}, "1.cls has no image beside it"),
    "nothing": ({}, "no samples in the 1 shards"),
    "other names": ({"1.left.png": encoded()}, "no samples in the 1 shards"),
    "empty label": ({"1.png": encoded(), "1.cls": b" \n"}, "1.cls holds no label, but ''"),
    "no label in JSON": ({"1.png": encoded(), "1.json": b'{"size": 3}'}, "1.json holds no label, but None"),
    "odd label in JSON": ({"1.png": encoded(), "1.json": b'{"label": [1]}'}, "1.json holds no label, but [1]"),
    "no JSON": ({"1.png": encoded(), "1.json": b"{"}, "1.json cannot be read"),
    "a list in JSON": ({"1.png": encoded(), "1.json": b"[3]"}, "1.json cannot be read"),
    "binary label": ({"1.png": encoded(), "1.cls": b"\xff\xfe"}, "1.cls cannot be read"),
    "caption": ({"1.png": encoded(), "1.txt": b"a dog runs\nover a field"}, "1.txt holds a text, not a label"),
    "one class": (samples([0, 0, 0]), "only one class, '0'"),
    "far labels": (samples([0, 10**9]), "0001.png: label 1000000000, but only 2 different ones"),
    "negative labels": (samples([0, 1, -1]), "0002.png: label -1 is below 0"),
}


@pytest.mark.parametrize("case", BAD)
def test_shards_that_cannot_be_used(tmp_path, case):
    members, says = BAD[case]
    assert says in error(str(write(tmp_path / "a.tar", members)))


def test_shards_that_are_no_tar(tmp_path):
    path = write(tmp_path / "a.tar", samples([0, 1] * 10))
    whole = path.read_bytes()
    for data in (b"", b"<html>" * 200, whole[:5000]):
        path.write_bytes(data)
        message = error(str(path))
        assert "a.tar: not a plain tar file, damaged, or cut off" in message and "Fetch it again" in message
    assert not (tmp_path / "a.tar.index.json").exists()


def test_a_header_with_a_size_that_no_file_can_have(tmp_path):
    tar = tmp_path / "a.tar"
    with tarfile.open(tar, "w") as archive:
        archive.addfile(tarfile.TarInfo("a.png"))
    header = bytearray(tar.read_bytes()[:512])
    header[124:136] = b"\x80" + b"\x7f" * 11  # the size, in base 256
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    tar.write_bytes(header + bytes(1024))
    assert not holds_captions(tar)
    with pytest.raises(DataError, match="damaged, or cut off"):
        open_data(str(tar))


def test_links_in_a_tar_are_not_samples(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in samples([0, 1, 0, 1]).items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("9.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    data = open_data(str(path))
    assert len(data.train) + len(data.val) == 4


def test_unreadable_samples_are_named(tmp_path):
    members = samples([0, 1, 0, 1]) | {"0002.png": b"not a picture"}
    dataset = open_data(str(write(tmp_path / "a.tar", members))).train
    wrong = next((i for i, name in enumerate(names(dataset)) if name.endswith("0002.png")), None)
    if wrong is None:  # the split put it into val
        dataset = open_data(str(tmp_path / "a.tar")).val
        wrong = next(i for i, name in enumerate(names(dataset)) if name.endswith("0002.png"))
    with pytest.raises(ImageError, match=r"a\.tar/0002\.png: not an image"):
        dataset.read(wrong)
    (tmp_path / "a.tar").write_bytes(b"shorter now")
    with pytest.raises(ImageError, match=r"a\.tar/0.*: the shard ends after"):
        dataset.read(0)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(ImageError, match=r"a\.tar/0.*: the shard cannot be read"):
        dataset.read(0)
