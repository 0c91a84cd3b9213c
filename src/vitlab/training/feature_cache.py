"""Features on disk, by content: an image that was run through an encoder once is never run through it again.

    cache = FeatureCache.open(key, width, about)         # one encoder, one way of reading images
    cache.find(digests)                                  # (n,), -1 where an image is not known
    cache.add(digests, vectors)                          # (n, E), written before they can be found
    cache.take(digests)                                  # (n, E), mapped into memory

$VITLAB_CACHE/features/index.sqlite says which row of which file belongs to which image; <key>.f32 holds the rows. Two
processes may use it at the same time. A killed one loses the batch it was at; a damaged row counts as not known.
"""

from __future__ import annotations

import json
import sqlite3
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TypedDict

import numpy as np

from vitlab.content_index import connect, transaction
from vitlab.images.sources.download import cache_dir
from vitlab.tables import Table, Tabular, by

INDEX, VECTORS = "index.sqlite", ".f32"
TABLES = """
CREATE TABLE IF NOT EXISTS encoders (key TEXT PRIMARY KEY, width INTEGER, about TEXT, used REAL);
CREATE TABLE IF NOT EXISTS features (key TEXT, digest BLOB, row INTEGER, crc INTEGER, PRIMARY KEY (key, digest))
WITHOUT ROWID;
"""


def folder() -> Path:
    return cache_dir() / "features"


class EncoderDescription(TypedDict):
    """What people recognise an encoder by."""

    model: str  # its name or family
    size: list[int]  # H, W of its images
    mirrored: bool  # features of the mirror images


@dataclass(frozen=True)
class CachedEncoder:
    """What the cache holds of one encoder."""

    key: str
    model: str  # this and the next two as in EncoderDescription
    size: list[int]
    mirrored: bool
    images: int
    bytes: int
    used: float  # seconds since 1970

    def cells(self) -> list[str]:
        pixels = by(self.size).replace(" ", "") + (", mirrored" if self.mirrored else "")
        used = datetime.fromtimestamp(self.used).strftime("%Y-%m-%d %H:%M")
        return [self.key, self.model, pixels, f"{self.images:,}", f"{self.bytes / 1e6:,.1f}", used]


class CachedEncoders(Tabular, list[CachedEncoder]):
    def table(self) -> Table:
        titles = ["key", "model", "pixels", "images", "MB", "last used"]
        return Table(titles, [encoder.cells() for encoder in self], right=("images", "MB"))


class FeatureCache:
    """The features of one encoder and one way of reading images, which `key` identifies."""

    def __init__(self, place: Path, key: str, width: int):
        self.place, self.key, self.width = place, key, width
        self.index = _connect(place)
        self.file = place / f"{key}{VECTORS}"

    @classmethod
    def open(cls, key: str, width: int, about: EncoderDescription) -> FeatureCache | None:
        """None where the cache cannot be written."""
        try:
            cache = cls(folder(), key, width)
            with transaction(cache.index):
                cache.index.execute(
                    "INSERT INTO encoders VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET used = excluded.used",
                    (key, width, json.dumps(about), time.time()),
                )
        except (OSError, sqlite3.Error):
            return None
        return cache

    def __enter__(self) -> FeatureCache:
        return self

    def __exit__(self, *error: object) -> None:
        self.index.close()

    def find(self, digests: Sequence[bytes]) -> np.ndarray:
        """(n,): the row of each image, -1 where it is not known or its row is damaged."""
        return self._find(digests, self._mapped())

    def _find(self, digests: Sequence[bytes], vectors: np.ndarray) -> np.ndarray:
        rows_by_digest = {digest: (row, crc) for digest, row, crc in self._rows()}
        pairs = [rows_by_digest.get(digest, (-1, 0)) for digest in digests]
        rows = np.array([row for row, _ in pairs], dtype=np.int64)
        rows[rows >= len(vectors)] = -1
        for place, (row, (_, crc)) in enumerate(zip(rows, pairs, strict=True)):
            if row >= 0 and zlib.crc32(vectors[row].tobytes()) != crc:
                rows[place] = -1
        return rows

    def add(self, digests: Sequence[bytes], vectors: np.ndarray) -> None:
        """Keep these features. The vectors are on disk before the index names them."""
        vectors = np.ascontiguousarray(vectors, dtype=np.float32)  # (n, E)
        assert vectors.shape == (len(digests), self.width)
        with transaction(self.index):
            size = self.file.stat().st_size if self.file.exists() else 0
            first = -(-size // (4 * self.width))  # behind what a killed process may have left there
            with self.file.open("r+b" if size else "w+b") as file:
                file.seek(first * self.width * 4)
                file.write(vectors.tobytes())
            self.index.executemany(
                "INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)",
                (
                    (self.key, digest, first + number, zlib.crc32(vector.tobytes()))
                    for number, (digest, vector) in enumerate(zip(digests, vectors, strict=True))
                ),
            )

    def take(self, digests: Sequence[bytes]) -> np.ndarray:
        """(n, E); rows that stand together in the file stay there, and are read as they are used.

        Raises OSError where one is not known: the cache was cleaned meanwhile.
        """
        vectors = self._mapped()
        rows = self._find(digests, vectors)
        if len(rows) and rows.min() < 0:
            raise FileNotFoundError(f"{self.file}: features are gone that were there before")
        first = int(rows[0]) if len(rows) else 0
        if np.array_equal(rows, np.arange(first, first + len(rows))):
            return vectors[first : first + len(rows)]
        return vectors[rows]

    def _rows(self) -> Iterator[tuple[bytes, int, int]]:
        return self.index.execute("SELECT digest, row, crc FROM features WHERE key = ?", (self.key,))

    def _mapped(self) -> np.ndarray:
        """(rows, E), read from disk as they are used."""
        size = self.file.stat().st_size // (4 * self.width) if self.file.exists() else 0
        if not size:
            return np.zeros((0, self.width), dtype=np.float32)
        return np.memmap(self.file, dtype=np.float32, mode="c", shape=(size, self.width))  # changes stay in memory


def _connect(place: Path) -> sqlite3.Connection:
    return connect(place / INDEX, TABLES, VECTORS)


def encoders() -> CachedEncoders:
    """Everything in the cache, the most recently used first."""
    listed = CachedEncoders()
    if not (folder() / INDEX).exists():
        return listed
    index = _connect(folder())
    rows = index.execute(
        "SELECT key, about, used, (SELECT COUNT(*) FROM features WHERE features.key = encoders.key) FROM encoders "
        "ORDER BY used DESC"
    ).fetchall()
    index.close()
    for key, about, used, images in rows:
        file = folder() / f"{key}{VECTORS}"
        size = file.stat().st_size if file.exists() else 0
        listed.append(CachedEncoder(key, **json.loads(about), images=images, bytes=size, used=used))
    return listed


def remove_features(chosen: Sequence[CachedEncoder]) -> None:
    """Delete the features of these encoders from the disk."""
    if not chosen:
        return
    index = _connect(folder())
    for encoder in chosen:
        index.execute("DELETE FROM features WHERE key = ?", (encoder.key,))
        index.execute("DELETE FROM encoders WHERE key = ?", (encoder.key,))
        with suppress(FileNotFoundError):
            (folder() / f"{encoder.key}{VECTORS}").unlink()
    index.execute("VACUUM")
    index.close()
