"""Shrunken copies of photos on disk, by content: from the second epoch on nobody decodes a JPEG.

    photos = CopiedPhotos(data.train, CopyRule(channels=3, side=320))
    with photos.reading() as photo:
        photo(7).views(...)                                  # stored, or shrunk now and stored

$VITLAB_CACHE/copies/index.sqlite says which bytes of which file are the copy of which photo; <key>.u8 holds the bytes,
mapped into memory. A copy depends on the photo's content and the rule alone, so whether it was there changes nothing.
Several processes may use it at the same time. A killed one loses the batch it was at.
"""

from __future__ import annotations

import math
import shutil
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from vitlab.content_index import connect, transaction
from vitlab.images.bands import naming
from vitlab.images.digest import bytes_digest
from vitlab.images.preprocess import RESAMPLING, Preprocess
from vitlab.images.read import open_file
from vitlab.images.scaled import Cut, ShrunkenPhoto, open_scaled, whole
from vitlab.images.sources.dataset import Dataset
from vitlab.images.sources.download import cache_dir

VERSION = 1  # raise it where a correction changes the copies of the same photos
INDEX, PIXELS = "index.sqlite", ".u8"
STEP = 32  # sides are multiples, so that similar recipes share copies
SPARE = 2 * 10**9  # bytes of the disk that are left free
TABLES = """
CREATE TABLE IF NOT EXISTS rules (key TEXT PRIMARY KEY, rule TEXT, channels INTEGER, used REAL);
CREATE TABLE IF NOT EXISTS copies (key TEXT, digest BLOB, start INTEGER, crc INTEGER, height INTEGER, width INTEGER,
original_height INTEGER, original_width INTEGER, PRIMARY KEY (key, digest)) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class CopyRule:
    """How photos are shrunk: to a shorter side, for random crops; or to all of a model's view, where none are made."""

    channels: int
    side: int | None
    view: Preprocess | None = None

    def __str__(self) -> str:
        if (p := self.view) is None:
            return f"shorter side {self.side}"
        resize = f" from {p.resize}" if p.resize else ""
        return f"{p.size[1]}x{p.size[0]}, {p.how}{resize}, {p.interpolation}"

    @property
    def key(self) -> str:
        return blake2b(repr((VERSION, str(self), self.channels)).encode(), digest_size=8).hexdigest()

    @property
    def kernel(self) -> Image.Resampling:
        return RESAMPLING["bicubic" if self.view is None else self.view.interpolation]

    def size_of(self, original: tuple[int, int]) -> tuple[int, int]:
        """(H, W) of a photo -> (h, w) of its copy. For crops, a photo that is no larger is copied as it is."""
        if self.view is not None:
            return self.view.geometry(original).resized
        assert self.side is not None
        shrink = max(1.0, min(original) / self.side)
        height, width = (max(1, round(length / shrink)) for length in original)
        return height, width

    @classmethod
    def for_crops(cls, channels: int, crops: Iterable[tuple[int, tuple[float, float]]]) -> CopyRule:
        """Large enough that a crop of average area has the pixels of its view; crops: (side, range of the area)."""
        side = max(side / math.sqrt((low + high) / 2) for side, (low, high) in crops)
        return cls(channels, STEP * math.ceil(side / STEP))

    def bytes_for(self, images: int) -> int:
        """What the copies of so many photos of 4:3 take, about."""
        height, width = self.size_of((3000, 4000))
        return images * height * width * self.channels


class CopyRow(NamedTuple):
    """Where a copy is: columns of the index."""

    start: int  # byte of the file
    crc: int
    height: int
    width: int
    original_height: int  # of the photo
    original_width: int


class CopiedPhotos:
    """The photos of a dataset, shrunk. Worker processes share what each of them has found or stored."""

    def __init__(self, data: Dataset, rule: CopyRule):
        self.data, self.rule = data, rule
        self.rows = torch.full((len(data), len(CopyRow._fields)), -1).share_memory_()
        self._mapped = np.zeros(0, dtype=np.uint8)
        self._broken = False  # the disk is full or read-only: go on without storing

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_mapped": np.zeros(0, dtype=np.uint8)}

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], ShrunkenPhoto]]:
        """photo(index) -> its copy. New ones are stored at the end, all together."""
        new: dict[int, tuple[bytes, ShrunkenPhoto]] = {}
        with ExitStack() as stack:
            index: sqlite3.Connection | None = None

            def photo(number: int) -> ShrunkenPhoto:
                nonlocal index
                row = CopyRow(*self.rows[number].tolist())
                if row.start >= 0 and (stored := self._stored(row)) is not None:
                    return stored
                if index is None and not self._broken and (index := self._open()) is not None:
                    stack.enter_context(closing(index))
                content, name = self._content(number), self.data.name_of(number)
                digest = bytes_digest(content)
                if (stored := self._find(index, number, digest)) is not None:
                    return stored
                new[number] = digest, self._shrink(content, name)
                return new[number][1]

            yield photo
            if new and index is not None and not self._broken:
                self._store(index, new)

    def _open(self) -> sqlite3.Connection | None:
        try:
            index = connect(folder() / INDEX, TABLES, PIXELS)
            index.execute("PRAGMA synchronous = OFF")  # what a power cut damages is made again
            about = (self.rule.key, str(self.rule), self.rule.channels, time.time())
            index.execute("INSERT OR REPLACE INTO rules VALUES (?, ?, ?, ?)", about)
            return index
        except (OSError, sqlite3.Error):
            self._broken = True
            return None

    def _content(self, number: int) -> bytes:
        """The bytes of a file."""
        source = self.data.source(number)
        assert isinstance(source, str | PathLike | bytes)
        with naming(self.data.name_of(number)), open_file(source) as stream:
            return stream.read()

    def _shrink(self, content: bytes, name: str) -> ShrunkenPhoto:
        with open_scaled(content, name=name) as photo:
            wanted = [Cut(whole(photo.size), self.rule.size_of(photo.size))]
            (pixels,) = photo.views(wanted, self.rule.kernel, self.rule.channels)
            return ShrunkenPhoto(photo.size, np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))  # (h, w, C)

    def _find(self, index: sqlite3.Connection | None, number: int, digest: bytes) -> ShrunkenPhoto | None:
        if index is None or self._broken:
            return None
        query = f"SELECT {', '.join(CopyRow._fields)} FROM copies WHERE key = ? AND digest = ?"
        try:
            values = index.execute(query, (self.rule.key, digest)).fetchone()
        except sqlite3.Error:
            self._broken = True
            return None
        stored = None if values is None else self._stored(CopyRow(*values))
        if stored is not None:
            self.rows[number] = torch.tensor(values)
        return stored

    def _stored(self, row: CopyRow) -> ShrunkenPhoto | None:
        """None where the bytes are not those that were stored: the cache was cleaned, or is damaged."""
        shape = (row.height, row.width, self.rule.channels)
        end = row.start + math.prod(shape)
        for _ in range(2):  # what was mapped before may be too short, or of a file that was deleted
            pixels = self._mapped[row.start : end]
            if len(pixels) == end - row.start and zlib.crc32(pixels.data) == row.crc:
                return ShrunkenPhoto((row.original_height, row.original_width), pixels.reshape(shape))
            with suppress(OSError, ValueError):  # ValueError: an empty file
                self._mapped = np.memmap(_pixel_file(self.rule.key), dtype=np.uint8, mode="r")
        return None

    def _store(self, index: sqlite3.Connection, new: dict[int, tuple[bytes, ShrunkenPhoto]]) -> None:
        """The pixels are on disk before the index names them, and the index before the workers do."""
        size = sum(copy.pixels.nbytes for _, copy in new.values())
        try:
            if shutil.disk_usage(folder()).free < size + SPARE:
                raise OSError("the disk is nearly full")
            with transaction(index):
                rows = _append(_pixel_file(self.rule.key), [copy for _, copy in new.values()])
                entries = [(self.rule.key, digest, *row) for (digest, _), row in zip(new.values(), rows, strict=True)]
                index.executemany(f"INSERT OR REPLACE INTO copies VALUES ({', '.join('?' * len(entries[0]))})", entries)
        except (OSError, sqlite3.Error):
            self._broken = True
            return
        self.rows[list(new)] = torch.tensor(rows)


def _append(file: Path, copies: Sequence[ShrunkenPhoto]) -> list[CopyRow]:
    rows = []
    with file.open("ab") as stream:
        start = stream.seek(0, 2)
        for copy in copies:
            height, width, _ = copy.pixels.shape
            rows.append(CopyRow(start, zlib.crc32(copy.pixels.data), height, width, *copy.size))
            start += stream.write(copy.pixels.data)
    return rows


def folder() -> Path:
    return cache_dir() / "copies"


def _pixel_file(key: str) -> Path:
    return folder() / f"{key}{PIXELS}"


@dataclass(frozen=True)
class StoredCopies:
    """What is stored by one rule."""

    key: str
    rule: str
    images: int
    bytes: int
    used: float  # seconds since 1970

    def cells(self) -> list[str]:
        """As those of training/feature_cache.py: key, model, pixels, images, MB, last used."""
        used = datetime.fromtimestamp(self.used).strftime("%Y-%m-%d %H:%M")
        return [self.key, "shrunken photos", self.rule, f"{self.images:,}", f"{self.bytes / 1e6:,.1f}", used]


def stored_copies() -> list[StoredCopies]:
    """Everything stored, the most recently used first."""
    if not (folder() / INDEX).exists():
        return []
    with closing(connect(folder() / INDEX, TABLES, PIXELS)) as index:
        rows = index.execute(
            "SELECT key, rule, (SELECT COUNT(*) FROM copies WHERE copies.key = rules.key), used FROM rules "
            "ORDER BY used DESC"
        ).fetchall()
    listed = []
    for key, rule, images, used in rows:
        file = _pixel_file(key)
        listed.append(StoredCopies(key, rule, images, file.stat().st_size if file.exists() else 0, used))
    return listed


def remove_copies(chosen: Sequence[StoredCopies]) -> None:
    """Delete them from the disk. A run that reads them makes them again, with the same pixels."""
    if not chosen:
        return
    with closing(connect(folder() / INDEX, TABLES, PIXELS)) as index:
        for copies in chosen:
            with transaction(index):
                index.execute("DELETE FROM copies WHERE key = ?", (copies.key,))
                index.execute("DELETE FROM rules WHERE key = ?", (copies.key,))
                with suppress(FileNotFoundError):
                    _pixel_file(copies.key).unlink()
        index.execute("VACUUM")
