"""Tar files that are cut, damaged or joined: an error that says so, or, when asked for, what is whole; never less in
silence. What is whole is checked with GNU tar's view of the file, by the headers' own arithmetic.
"""

import io
import json
import os
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import DataError
from vitlab.images.datasets import open_data
from vitlab.images.sources.shards import index_of, stored_index

BLOCK = 512
SAMPLES = 6


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


def picture(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 9, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def write(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def labelled(count: int = SAMPLES, first: int = 0) -> dict[str, bytes]:
    members = {}
    for i in range(first, first + count):
        members |= {f"{i:04d}.png": picture(i), f"{i:04d}.cls": f"{i % 2}".encode()}
    return members


def captioned(count: int = SAMPLES) -> dict[str, bytes]:
    rows = "".join(f"{i:04d}.png,a picture of {i}\n" for i in range(count))
    return {"captions.csv": f"image,caption\n{rows}".encode(), **{f"{i:04d}.png": picture(i) for i in range(count)}}


def boundaries(members: dict[str, bytes]) -> list[int]:
    """Where each header begins, and where the end-of-archive block does: a header of 512, then data in blocks."""
    found = [0]
    for data in members.values():
        found.append(found[-1] + BLOCK + -(-len(data) // BLOCK) * BLOCK)
    return found


def whole_samples(members: dict[str, bytes], size: int) -> int:
    """Samples of which every byte lies below `size`, by arithmetic."""
    starts = boundaries(members)
    there = {name for (name, data), at in zip(members.items(), starts, strict=False) if at + BLOCK + len(data) <= size}
    return sum({f"{i:04d}.png", f"{i:04d}.cls"} <= there for i in range(SAMPLES))


def count(data) -> int:
    return len(data.train) + len(data.val)


MEMBERS = labelled()
CUTS = [at + inside for at in boundaries(MEMBERS)[6:] for inside in (0, 1, 100, 511)]  # at a header, and inside it
CUTS += [at + BLOCK + inside for at in boundaries(MEMBERS)[6:-1] for inside in (0, 1)]  # at the data, and inside


@pytest.mark.parametrize("size", CUTS)
def test_a_cut_shard_is_refused_or_gives_its_whole_samples(tmp_path, size):
    path = write(tmp_path / "a.tar", MEMBERS)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError, match=r"a\.tar: .*cut off .*Fetch it again.*data\.allow_cut=true"):
        open_data(str(path))
    assert not list(tmp_path.glob("*.json"))
    data = open_data(str(path), allow_cut=True)
    assert count(data) == whole_samples(MEMBERS, size)
    assert any("a.tar is incomplete" in note and f"first {count(data)} samples" in note for note in data.notes)
    assert not list(tmp_path.glob("*.json"))  # an index of it would let the next command pass
    for dataset in (data.train, data.val):
        for i in range(len(dataset)):
            number = int(Path(dataset.name_of(i)).stem)
            np.testing.assert_array_equal(dataset.read(i), np.asarray(Image.open(io.BytesIO(picture(number)))))


@pytest.mark.parametrize("padding", [BLOCK, 2 * BLOCK, 10240])
def test_a_shard_that_ends_with_zeros_is_complete(tmp_path, padding):
    """One block shows the end; GNU tar writes two, and fills up to 10,240."""
    path = write(tmp_path / "a.tar", MEMBERS)
    path.write_bytes(path.read_bytes()[: boundaries(MEMBERS)[-1]] + bytes(padding))
    data = open_data(str(path))
    assert count(data) == SAMPLES and not data.notes


def joined(whole: bytes) -> bytes:
    return whole + whole  # cat a.tar b.tar: readers stop after the first


def preallocated(whole: bytes) -> bytes:
    return whole[: boundaries(MEMBERS)[6]] + bytes(1 << 20)  # a download that reserved its space and broke off


def broken_header(whole: bytes) -> bytes:
    at = boundaries(MEMBERS)[6]
    return whole[: at + 148] + b"9999999\0" + whole[at + 156 :]  # the checksum


@pytest.mark.parametrize("damage", [joined, preallocated, broken_header])
def test_what_readers_of_tar_stop_at_is_refused(tmp_path, damage):
    path = write(tmp_path / "a.tar", MEMBERS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="Fetch it again"):
        open_data(str(path))
    assert 0 < count(open_data(str(path), allow_cut=True)) <= SAMPLES


def test_an_index_made_before_does_not_hide_a_cut(tmp_path):
    """Version 1 also stored indexes of cut shards."""
    path = write(tmp_path / "a.tar", MEMBERS)
    index_of(path)
    stored = json.loads((tmp_path / "a.tar.index.json").read_text(encoding="utf-8"))
    path.write_bytes(path.read_bytes()[: boundaries(MEMBERS)[8]])
    status = path.stat()
    kept = {name: stored[name][:4] for name in ("names", "labels", "offsets", "sizes")}
    old = {**kept, "version": 1, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
    (tmp_path / "a.tar.index.json").write_text(json.dumps(old), encoding="utf-8")
    with pytest.raises(DataError, match="no end-of-archive block"):
        open_data(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [-512] * SAMPLES},
        {"sizes": [10**15] * SAMPLES},
        {"sizes": [1.5] * SAMPLES},
        {"names": [None] * SAMPLES},
        {"labels": 7},
        {"cut": "yes"},
        {"offsets": "[" * 10_000},
    ],
)
def test_an_index_that_cannot_be_true_is_made_anew(tmp_path, change):
    path = write(tmp_path / "a.tar", MEMBERS)
    first = index_of(path)
    stored = json.loads((tmp_path / "a.tar.index.json").read_text(encoding="utf-8"))
    (tmp_path / "a.tar.index.json").write_text(json.dumps(stored | change), encoding="utf-8")
    assert stored_index(path) is None and index_of(path) == first


def test_an_index_nested_too_deep_or_a_fifo_is_made_anew(tmp_path):
    path = write(tmp_path / "a.tar", MEMBERS)
    first = index_of(path)
    (tmp_path / "a.tar.index.json").write_text("[" * 100_000, encoding="utf-8")
    assert index_of(path) == first
    (tmp_path / "a.tar.index.json").unlink()
    os.mkfifo(tmp_path / "a.tar.index.json")
    assert index_of(path) == first


def test_a_cut_tar_with_a_caption_table(tmp_path):
    members = captioned()
    path = write(tmp_path / "a.tar", members)
    path.write_bytes(path.read_bytes()[: boundaries(members)[-1]])  # all pictures are there, the end is not
    with pytest.raises(DataError, match=r"no end-of-archive block.*data\.allow_cut=true"):
        open_data(str(path))
    path.write_bytes(path.read_bytes()[: boundaries(members)[5]])
    data = open_data(str(path), allow_cut=True)
    assert count(data) == 4 and any("2 of 6 captions are left out" in note for note in data.notes)


def test_the_command_says_what_to_type(tmp_path, command):
    path = write(tmp_path / "a.tar", MEMBERS)
    path.write_bytes(path.read_bytes()[: boundaries(MEMBERS)[8]])
    for road, option in ((("data", path), "data.allow_cut=true"), (("eval", "bundled:digits", path), "--allow-cut")):
        assert option in command(*road, code=2).stderr
        done = command(*road, option, *(["--knn"] if road[0] == "eval" else []))
        assert "a.tar is incomplete" in done.stdout + done.stderr


@pytest.mark.parametrize("members", [MEMBERS, captioned()], ids=["labels", "captions"])
def test_damaged_tars_are_errors_in_words(tmp_path, members):
    """Changed bytes, holes and cuts at random: a DataError, or a data set; with allow_cut too."""
    whole, draw, opened = write(tmp_path / "a.tar", members).read_bytes(), random.Random(0), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            at = draw.choice(boundaries(members)) + draw.randrange(BLOCK)
            if at < len(data):
                data[at] = draw.randrange(256)
        del data[draw.choice([len(data), draw.randrange(len(data))]) :]
        (tmp_path / "a.tar").write_bytes(data)
        for allow in (False, True):
            try:
                opened += count(open_data(str(tmp_path / "a.tar"), allow_cut=allow)) > 0
            except ValueError as error:
                assert "a.tar" in str(error)
        for index in tmp_path.glob("*.json"):
            index.unlink()
    assert opened
