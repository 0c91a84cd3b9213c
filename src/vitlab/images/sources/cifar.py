"""CIFAR-10 and CIFAR-100, the binary version (www.cs.toronto.edu/~kriz/cifar.html): a tar, its files, or class folders.

A record is 1 label byte (CIFAR-100: coarse, then fine) and 3072 bytes, the red, green and blue planes of 32 x 32. The
tar is read into memory by the names expected in it: nothing is extracted, nothing unpickled.
"""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.dataset import ArrayDataset, Splits
from vitlab.images.sources.download import REMOTES, Remote, again, fetch, not_found, places
from vitlab.images.sources.folder import open_folder

SIDE = 32
PICKLED = ("data_batch_1", "batches.meta", "meta", "cifar-10-batches-py", "cifar-100-python")  # the Python version's


@dataclass(frozen=True)
class Member:
    split: str
    records: int
    sha1: str | None = None  # of the file: tars made elsewhere hold the same files and differ


@dataclass(frozen=True)
class Layout:
    archive: str
    folder: str  # in the archive
    label_bytes: int
    members: dict[str, Member]
    classes: list[str]


def _names(text: str) -> list[str]:
    return text.split()


CIFAR10 = Layout(
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    label_bytes=1,
    members={
        "data_batch_1.bin": Member("train", 10_000, "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
        "data_batch_2.bin": Member("train", 10_000, "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
        "data_batch_3.bin": Member("train", 10_000, "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
        "data_batch_4.bin": Member("train", 10_000, "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
        "data_batch_5.bin": Member("train", 10_000, "26e2849e66a845b7f1e4614ae70f4889ae604628"),
        "test_batch.bin": Member("test", 10_000, "67eb016db431130d61cd03c7ad570b013799c88c"),
    },
    classes=["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"],
)
CIFAR100 = Layout(
    archive="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    label_bytes=2,
    members={"train.bin": Member("train", 50_000), "test.bin": Member("test", 10_000)},
    classes=_names("""
        apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
        castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
        elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
        man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
        pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
        skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
        tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""),
)
TORONTO = ("https://www.cs.toronto.edu/~kriz/",)
REMOTES["cifar10"] = Remote(TORONTO, {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"})
REMOTES["cifar100"] = Remote(TORONTO, {"cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8"})
KINDS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def open_cifar(source: str, path: Path | None, download: bool) -> Splits:
    """train and test as published; val is split off later, unless class folders have their own."""
    kind = KINDS[source]
    if path is not None:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder. Pass {kind.archive}, its .bin files or class folders.")
        place = locate(source, path)
        return _class_folders(source, kind, path) if place is None else _read(source, kind, place)
    looked = places(source)
    place = next((place for folder in looked if (place := locate(source, folder))), None)
    if place is None:
        if not download:
            raise not_found(source, looked)
        place = fetch(source, kind.archive)
    return _read(source, kind, place)


def locate(source: str, path: Path) -> Path | None:
    """The tar, or the folder with the .bin files, at this path or in this folder; None where there is neither."""
    kind = KINDS[source]
    if path.is_file():
        return path
    for folder in (path, path / kind.folder):
        if any((folder / name).is_file() for name in kind.members):
            return folder
    archives = (path / kind.archive, path / kind.archive.removesuffix(".gz"))
    return next((archive for archive in archives if archive.is_file()), None)


def _class_folders(source: str, kind: Layout, path: Path) -> Splits:
    if any((path / name).exists() for name in PICKLED):
        raise _pickled(kind, path)
    splits = open_folder(path)
    if splits.classes != kind.classes:
        splits.notes.append(
            f"{path}: {len(splits.classes)} class folders, not named as the {len(kind.classes)} classes of {source} "
            f"are ({', '.join(kind.classes[:3])}, ...). The folders' names are used."
        )
    return splits


def _read(source: str, kind: Layout, place: Path) -> Splits:
    """All records of the tar or folder, in the official order."""
    starts, counts = {}, {"train": 0, "test": 0}
    for name, member in kind.members.items():
        starts[name] = counts[member.split]
        counts[member.split] += member.records
    images = {split: np.empty((count, SIDE, SIDE, 3), dtype=np.uint8) for split, count in counts.items()}
    labels = {split: np.empty(count, dtype=np.int64) for split, count in counts.items()}
    missing = dict(kind.members)
    for name, data in _from_tar(source, kind, place) if place.is_file() else _from_folder(kind, place):
        member = missing.pop(name)
        _check(source, kind, place, name, data)
        rows = np.frombuffer(data, dtype=np.uint8).reshape(member.records, -1)  # (n, label bytes + 3072)
        here = slice(starts[name], starts[name] + member.records)
        labels[member.split][here] = rows[:, kind.label_bytes - 1]
        planes = rows[:, kind.label_bytes :].reshape(-1, 3, SIDE, SIDE)  # (n, C, H, W)
        for channel in range(3):  # (n, H, W, C); five times as fast as one copy of the transposed array
            images[member.split][here, ..., channel] = planes[:, channel]
    if missing:
        raise DataError(f"{place}: {', '.join(missing)} missing in it. {again(source, place, kind.archive)}")
    for split in labels:
        if labels[split].max() >= len(kind.classes):
            at = int(labels[split].argmax())
            raise DataError(
                f"{place}: record {at} of {split} has label {labels[split][at]}, outside 0..{len(kind.classes) - 1}. "
                + again(source, place, kind.archive)
            )
    train, test = (ArrayDataset(images[s], labels[s], kind.classes, f"{source}/{s}") for s in ("train", "test"))
    return Splits(kind.classes, train, test=test)


def _from_folder(kind: Layout, folder: Path) -> Iterator[tuple[str, bytes]]:
    for name in kind.members:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def _from_tar(source: str, kind: Layout, path: Path) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the members expected, as they come; stops after the last, since the stream costs time."""
    wanted = {f"{kind.folder}/{name}": name for name in kind.members} | {name: name for name in kind.members}
    left = set(kind.members)
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
        with tarfile.open(path, "r|gz" if zipped else "r|") as tar:
            for info in tar:
                name = wanted.get(info.name.removeprefix("./"))
                if "batches-py" in info.name or "cifar-100-python" in info.name:
                    raise _pickled(kind, path)
                if name not in left or not info.isreg():
                    continue
                _check_size(source, kind, path, name, info.size)
                stream = tar.extractfile(info)
                assert stream is not None
                yield name, stream.read()
                left.remove(name)
                if not left:
                    return
    except DataError:
        raise
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise DataError(
            f"{path}: not a tar file, damaged, or cut off ({error}). Expected {kind.archive}. "
            + again(source, path, kind.archive)
        ) from None


def _check(source: str, kind: Layout, place: Path, name: str, data: bytes) -> None:
    _check_size(source, kind, place, name, len(data))
    expected = kind.members[name].sha1
    digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
    if expected and digest != expected:
        raise DataError(
            f"{place}: wrong checksum of {name}: SHA-1 is {digest}, expected {expected}. The file is damaged, or is "
            f"not {source}. {again(source, place, kind.archive)}"
        )


def _check_size(source: str, kind: Layout, place: Path, name: str, size: int) -> None:
    expected = kind.members[name].records * (kind.label_bytes + 3 * SIDE * SIDE)
    if size != expected:
        raise DataError(
            f"{place}: {name} holds {size:,} bytes, expected {expected:,}. {again(source, place, kind.archive)}"
        )


def _pickled(kind: Layout, path: Path) -> DataError:
    return DataError(
        f"{path}: this is the Python version, made of pickles, which can run programs and are not opened here. "
        f"Fetch the binary version, {kind.archive}."
    )
