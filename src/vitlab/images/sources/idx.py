"""MNIST and Fashion-MNIST: four IDX files, plain or .gz (the format: yann.lecun.com/exdb/mnist; arXiv:1708.07747)."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.dataset import ArrayDataset, Splits
from vitlab.images.sources.download import REMOTES, Remote, again, fetch, not_found, places

CLASSES = {
    "mnist": [str(digit) for digit in range(10)],
    "fashion-mnist": (
        ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
    ),
}
DEBIAN = {"fashion-mnist": Path("/usr/share/datasets/fashion-mnist")}  # the package dataset-fashion-mnist
TORCHVISION = {"mnist": "MNIST/raw", "fashion-mnist": "FashionMNIST/raw"}  # where torchvision puts them
FILES = {  # split -> images, labels
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
FIRST_TEST_LABELS = {  # the two sets' files have the same names: this tells them apart
    "mnist": bytes([7, 2, 1, 0, 4, 1, 4, 9, 5, 9, 0, 6, 9, 0, 1, 5, 9, 7, 3, 4]),
    "fashion-mnist": bytes([9, 2, 1, 1, 6, 1, 4, 6, 5, 7, 4, 5, 7, 3, 4, 1, 2, 4, 8, 0]),
}
IMAGES, LABELS = 0x0803, 0x0801  # magic numbers: 08 = unsigned bytes, then the number of dimensions
REMOTES["mnist"] = Remote(
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    {
        "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
        "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
        "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    },
)
REMOTES["fashion-mnist"] = Remote(
    ("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",),
    {
        "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
        "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
        "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    },
)
MOST = 1 << 31  # bytes: a damaged header must not ask for all the memory there is


def open_idx(source: str, path: Path | None, download: bool) -> Splits:
    """train and test as published; val is split off later."""
    files = _find(source, path, download)
    splits = {split: _open_split(source, split, *(files[name] for name in names)) for split, names in FILES.items()}
    train, test = splits["train"], splits["test"]
    assert train.images is not None and test.images is not None
    if train.images.shape[1:] != test.images.shape[1:]:
        raise DataError(
            f"{source}: images of train are {train.images.shape[1:3]}, of test {test.images.shape[1:3]} "
            "(height, width). The files come from different sets; fetch them again."
        )
    first = test.labels[:20].astype(np.uint8).tobytes()
    for other, labels in FIRST_TEST_LABELS.items():
        if other != source and first == labels:
            raise DataError(
                f"{files[FILES['test'][1]]}: these are {other}'s files, not {source}'s. Name {other} instead, or "
                f"pass the folder of {source}."
            )
    return Splits(CLASSES[source], train, test=test)


def folder_files(source: str, folder: Path) -> dict[str, Path]:
    """Those of the four files that lie in the folder, or where torchvision would put them below it."""
    files = {}
    for place in (folder, folder / "raw", folder / TORCHVISION[source]):
        for name in (name for names in FILES.values() for name in names):
            for spelling in (name, name.replace("-idx", ".idx")):
                for file in (place / f"{spelling}.gz", place / spelling):
                    if name not in files and file.is_file():
                        files[name] = file
    return files


def _find(source: str, path: Path | None, download: bool) -> dict[str, Path]:
    wanted = [name for names in FILES.values() for name in names]
    if path is not None:
        if not path.is_dir():
            what = "is a file" if path.exists() else "no such folder"
            raise DataError(f"{path}: {what}. Pass the folder that holds {', '.join(wanted)} (or the same with .gz).")
        files = folder_files(source, path)
        if missing := [name for name in wanted if name not in files]:
            raise DataError(
                f"{path}: {', '.join(missing)} missing there, with or without .gz. Put all four files in it."
            )
        return files
    looked = [*places(source)[:-1], *([DEBIAN[source]] if source in DEBIAN else []), places(source)[-1]]
    for folder in looked:
        files = folder_files(source, folder)
        if len(files) == len(wanted):
            return files
    if not download:
        raise not_found(source, looked)
    files = folder_files(source, looked[-1])  # what an earlier, interrupted download left whole
    assert set(REMOTES[source].files) == {f"{name}.gz" for name in wanted}
    return {name: files.get(name) or fetch(source, f"{name}.gz") for name in wanted}


def _open_split(source: str, split: str, images_file: Path, labels_file: Path) -> ArrayDataset:
    images, labels = (read_idx(source, file, magic) for file, magic in ((images_file, IMAGES), (labels_file, LABELS)))
    if len(images) != len(labels):
        raise DataError(
            f"{images_file} holds {len(images)} images, {labels_file} {len(labels)} labels. The two files do not "
            "belong together; fetch both again."
        )
    classes = CLASSES[source]
    if len(labels) and labels.max() >= len(classes):
        at = int(labels.argmax())
        raise DataError(
            f"{labels_file}: label {at} is {labels[at]}, outside 0..{len(classes) - 1}. {again(source, labels_file)}"
        )
    return ArrayDataset(images[..., None], labels, classes, f"{source}/{split}")  # (N, H, W, 1)


def read_idx(source: str, path: Path, magic: int) -> np.ndarray:
    """(N, H, W) or (N,) uint8, after checking the header against the bytes that follow."""
    remedy = again(source, path)
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            dims = magic & 0xFF
            header = file.read(4 + 4 * dims)
            if len(header) < 4 + 4 * dims:
                raise DataError(f"{path}: only {len(header)} bytes, too short for an IDX file. {remedy}")
            actual, *shape = struct.unpack(f">{1 + dims}I", header)
            if actual != magic:
                raise DataError(
                    f"{path}: does not begin as an IDX file of {'labels' if magic == LABELS else 'images'} should: "
                    f"magic number {actual:#010x}, expected {magic:#010x}. {remedy}"
                )
            size = math.prod(shape)
            if not 0 < size <= MOST:
                raise DataError(f"{path}: its header says {' x '.join(map(str, shape))}, which cannot be. {remedy}")
            data = file.read(size + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged or cut off ({error}). {remedy}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}).") from None
    if len(data) != size:
        held = f"{len(data):,}" if len(data) < size else "more"
        raise DataError(f"{path}: {' x '.join(map(str, shape))} needs {size:,} bytes, but {held} follow. {remedy}")
    return np.frombuffer(data, dtype=np.uint8).reshape(shape).copy()  # writable, as torch wants it
