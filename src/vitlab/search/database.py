"""The images of an index and their vectors in a SQLite file. Every batch is written in one transaction.

A damaged file is never searched: SQLite's own check finds broken pages, and a digest of every row finds changed values.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from vitlab.errors import SearchError
from vitlab.parsing import parse_json
from vitlab.printable import one_line
from vitlab.search.files import identity

FORMAT = 1
FILE = "pictures.sqlite"
PART = "part-*.sqlite"  # one per process; the next run takes over those of a killed run
CHUNK = 1000  # rows at a time
PATIENCE = 60  # seconds to wait while another process writes
SCHEMA = """
CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE pictures (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    path BLOB NOT NULL UNIQUE,
    size INTEGER NOT NULL,
    mtime INTEGER NOT NULL,
    hash BLOB,
    error TEXT
);
CREATE INDEX by_hash ON pictures (hash);
CREATE TABLE vectors (id INTEGER PRIMARY KEY REFERENCES pictures ON DELETE CASCADE, vector BLOB NOT NULL);
"""
CHECKS = "CREATE TABLE checks (id INTEGER PRIMARY KEY REFERENCES pictures ON DELETE CASCADE, digest BLOB NOT NULL)"
DIGEST_KEY = "digest"  # key in `about` of a digest of its other rows
_checked: dict[Path, tuple[int, int, int]] = {}  # intact files -> inode, size, time


class WriteError(SearchError):
    """An index that cannot be written."""


def damaged_error(file: Path, why: object) -> SearchError:
    """The error for a damaged database. It cannot be restored from anything else."""
    folder, why = file.parent, one_line(str(why)[:200])
    if file.match(PART):
        remedy = "A killed process has left it. Remove this file: its images are embedded again."
        return SearchError(f"{file}: is damaged ({why}). {remedy}")
    remedy = f"Delete {folder} and index again: vitlab index FOLDER -o {folder} --model CHECKPOINT"
    return SearchError(f"{file}: the index is damaged ({why}). {remedy}")


def read_error(file: Path, error: sqlite3.Error) -> SearchError:
    """Only what SQLite calls damage is damage; a lock, a full disk or a missing permission passes."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF  # none: Python cannot decode a text
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR):  # ERROR: a table is missing
        return damaged_error(file, error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SearchError(f"{file}: another process is writing it. Try again when it is done.")
    return SearchError(f"{file}: cannot be read ({one_line(str(error)[:200])}). Try again.")


class MadeBy(TypedDict):
    """The model that made an index. Equal fingerprints: equal embeddings."""

    checkpoint: str
    fingerprint: str
    family: NotRequired[str]
    reads_text: NotRequired[bool]
    image_size: NotRequired[list[int]]  # (H, W) that images are read at
    resized: NotRequired[bool]  # this size was requested, it is not the checkpoint's own


def remembered_size(made_by: MadeBy) -> dict[str, tuple[int, int]]:
    """image_size for vitlab.load, where the index was made with another than the checkpoint's own."""
    size = made_by.get("image_size")
    return {"image_size": (size[0], size[1])} if made_by.get("resized") and size else {}


@dataclass
class ImageRecord:
    """An image with its vector or error. Without a hash it could not be opened and is tried again."""

    path: str  # relative to the folder
    size: int
    mtime: int
    hash: bytes | None = None
    vector: np.ndarray | None = None  # (E,)
    error: str | None = None


class VectorRow(NamedTuple):
    """The part of a row that a search returns, covered by the row's digest."""

    number: int
    path: bytes
    hash: bytes | None
    vector: bytes | None


class FileState(NamedTuple):
    size: int
    mtime: int
    hash: bytes | None


class ImageDatabase:
    """Every pair of path and contents has its own number, which is never reused: the vector of a number never changes,
    so a graph that holds the same numbers is up to date.

    Paths are stored as bytes, because a file name need not be valid text.
    """

    def __init__(self, file: Path):
        self.file = file
        try:
            self.rows = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        except sqlite3.Error as error:
            raise read_error(file, error) from None
        try:
            self._check_pages()
            self.has_checks = bool(self._all("SELECT 1 FROM sqlite_master WHERE name = 'checks'"))
            self._all("PRAGMA foreign_keys = ON")
            self.about: dict[str, Any] = {}
            self.read_about()
            if self.about.get("format") != FORMAT:
                raise SearchError(
                    f"{file}: format {self.about.get('format')!r:.40} is not known; this vitlab reads {FORMAT}. "
                    "Update vitlab, or index again in another place."
                )
        except BaseException:
            self.rows.close()
            raise

    def _check_pages(self) -> None:
        """Run SQLite's quick_check, once while the file stays the same."""
        if _checked.get(self.file) != (stamp := identity(self.file)):
            if (rows := self._all("PRAGMA quick_check(1)")) != [("ok",)]:
                raise damaged_error(self.file, rows[0][0] if rows else "nothing can be read")
            _checked[self.file] = stamp

    def read_about(self) -> None:
        """Read the description of the index again."""
        rows = self._all("SELECT key, value FROM about")
        about = {}
        for key, value in rows:
            try:
                about[key] = parse_json(value)
            except (ValueError, TypeError) as error:
                raise damaged_error(self.file, f"{key!r:.40} in it: {error}") from None
        stored = about.pop(DIGEST_KEY, None)
        if (stored is not None) != self.has_checks or stored not in (None, _about_digest(rows)):
            raise damaged_error(self.file, "its description has changed")
        self.about = about

    def check_about(self) -> None:
        """Refuse a database that does not name its images and its model. The part of one process does not."""
        made_by = self.about.get("made_by")
        texts = [self.about.get("folder")]
        texts += [made_by.get(key) for key in ("checkpoint", "fingerprint")] if isinstance(made_by, dict) else [None]
        graphs = self.about.get("graph", [])
        if not all(isinstance(text, str) for text in texts) or not isinstance(graphs, list):
            raise damaged_error(self.file, "it does not name its images and its model")

    def add_checks(self) -> None:
        """Add digests to the rows of an index of an older version."""
        if self.has_checks:
            return
        with _transaction(self.rows, self.file):
            self.rows.execute(CHECKS)
            rows = self.rows.execute("SELECT id, path, hash, vector FROM pictures LEFT JOIN vectors USING (id)")
            self.rows.executemany("INSERT INTO checks VALUES (?, ?)", ((row[0], row_digest(*row)) for row in rows))
            _write_about_digest(self.rows)
        self.has_checks = True

    def _select(self, query: str, values: tuple[object, ...] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self.rows.execute(query, values)
        except sqlite3.Error as error:
            raise read_error(self.file, error) from None

    def _all(self, query: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        return list(self._select(query, values))

    def _checked_rows(self, where: str, values: tuple[object, ...]) -> Iterator[VectorRow]:
        """Selected rows, each compared with its digest."""
        digest, joined = ("digest", " LEFT JOIN checks USING (id)") if self.has_checks else ("NULL", "")
        query = (
            f"SELECT id, path, hash, vector, {digest} FROM pictures LEFT JOIN vectors USING (id){joined} WHERE {where}"
        )
        for number, path, hash, vector, stored in self._select(query, values):
            typed = isinstance(path, bytes) and isinstance(hash, bytes | None) and isinstance(vector, bytes | None)
            if not typed or (self.has_checks and row_digest(number, path, hash, vector) != stored):
                raise damaged_error(self.file, f"the row of image {number} has changed")
            yield VectorRow(number, path, hash, vector)

    @property
    def made_by(self) -> MadeBy:
        return self.about["made_by"]

    def __enter__(self) -> ImageDatabase:
        return self

    def __exit__(self, *error: object) -> None:
        self.rows.close()

    def __len__(self) -> int:
        """Number of images with a vector."""
        return self._all("SELECT count(*) FROM vectors")[0][0]

    @classmethod
    def create(cls, file: Path, about: Mapping[str, object]) -> ImageDatabase:
        rows = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        written = [("format", json.dumps(FORMAT)), *((key, json.dumps(value)) for key, value in about.items())]
        rows.execute("PRAGMA page_size = 16384")  # a vector of 512 numbers would waste half of SQLite's default of 4096
        with _transaction(rows, file):
            for command in (*SCHEMA.split(";"), CHECKS):
                rows.execute(command)
            rows.executemany("INSERT INTO about VALUES (?, ?)", written)
            _write_about_digest(rows)
        rows.close()
        return cls(file)

    @staticmethod
    def exists(file: Path) -> bool:
        """Whether the file holds a database; not if its creation was interrupted."""
        if not file.is_file():
            return False
        try:
            rows = sqlite3.connect(file, timeout=PATIENCE)
        except sqlite3.Error:
            return True
        try:
            return rows.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        except sqlite3.Error:
            return True  # opening it reports the error
        finally:
            rows.close()

    def set_about(self, key: str, value: object) -> None:
        """Set an entry of the description; None deletes it."""
        with _transaction(self.rows, self.file):
            self.rows.execute("DELETE FROM about WHERE key = ?", (key,))
            if value is not None:
                self.rows.execute("INSERT INTO about VALUES (?, ?)", (key, json.dumps(value)))
            if self.has_checks:
                _write_about_digest(self.rows)
        self.about.pop(key, None)
        self.about |= {} if value is None else {key: value}

    # ---- writing

    def put(self, entries: Iterable[ImageRecord]) -> None:
        """Write all records in one transaction. The same contents under the same path keep their number."""
        with _transaction(self.rows, self.file):
            for e in entries:
                path = os.fsencode(e.path)
                same = "UPDATE pictures SET size = ?, mtime = ?, error = ? WHERE path = ? AND hash IS ?"
                if self.rows.execute(same, (e.size, e.mtime, e.error, path, e.hash)).rowcount:
                    continue
                self.rows.execute("DELETE FROM pictures WHERE path = ?", (path,))
                row = (path, e.size, e.mtime, e.hash, e.error)
                number = self.rows.execute(
                    "INSERT INTO pictures (path, size, mtime, hash, error) VALUES (?, ?, ?, ?, ?)", row
                ).lastrowid
                vector = None if e.vector is None else np.ascontiguousarray(e.vector, dtype=np.float32).tobytes()
                if vector is not None:
                    self.rows.execute("INSERT INTO vectors VALUES (?, ?)", (number, vector))
                if self.has_checks:
                    check = row_digest(number or 0, path, e.hash, vector)
                    self.rows.execute("INSERT INTO checks VALUES (?, ?)", (number, check))

    def drop(self, paths: Iterable[str]) -> None:
        with _transaction(self.rows, self.file):
            self.rows.executemany("DELETE FROM pictures WHERE path = ?", ((os.fsencode(path),) for path in paths))

    def absorb(self, part: Path) -> None:
        """Move the records of another database here and delete it. Safe to repeat after an interruption."""
        with ImageDatabase(part) as other:
            rest = {number: values for number, *values in other._select("SELECT id, size, mtime, error FROM pictures")}
            entries = []
            for number, path, hash, vector in other._checked_rows("TRUE ORDER BY id", ()):
                size, mtime, error = rest[number]
                entries.append(ImageRecord(os.fsdecode(path), size, mtime, hash, _vector(vector), error))
                if len(entries) == CHUNK:
                    self.put(entries)
                    entries.clear()
            self.put(entries)
        part.unlink()

    # ---- reading

    def file_states(self) -> dict[str, FileState]:
        rows = self._select("SELECT path, size, mtime, hash FROM pictures")
        return {self._path(path): FileState(size, mtime, hash) for path, size, mtime, hash in rows}

    def find_by_hash(self, hash: bytes) -> tuple[np.ndarray | None, str | None] | None:
        """Vector and error of an image with these contents, under any path."""
        for number, _, _, vector in self._checked_rows("hash = ? LIMIT 1", (hash,)):
            return _vector(vector), self._all("SELECT error FROM pictures WHERE id = ?", (number,))[0][0]
        return None

    def unreadable(self) -> dict[str, str]:
        rows = self._select("SELECT path, error FROM pictures WHERE error IS NOT NULL ORDER BY path")
        return {self._path(path): str(error) for path, error in rows}

    def numbers(self, after: int = 0) -> np.ndarray:
        """Numbers of all images with a vector, ascending."""
        rows = self._select("SELECT id FROM vectors WHERE id > ? ORDER BY id", (after,))
        return np.fromiter((number for (number,) in rows), dtype=np.int64)

    def vectors(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers (n,) and vectors (n, E) in chunks, without deleted images."""
        for start in range(0, len(numbers), CHUNK):
            rows = [(n, v) for n, _, _, v in self._select_rows(numbers[start : start + CHUNK]) if v is not None]
            if rows:
                if len({len(v) for _, v in rows}) > 1 or len(rows[0][1]) % 4 or not rows[0][1]:
                    raise damaged_error(self.file, "its vectors differ in length")
                vectors = np.frombuffer(b"".join(v for _, v in rows), dtype=np.float32).reshape(len(rows), -1)
                if not np.isfinite(vectors).all():
                    raise damaged_error(self.file, "a vector holds NaN or infinity")
                yield np.array([number for number, _ in rows], dtype=np.int64), vectors

    def paths(self, numbers: np.ndarray) -> dict[int, str]:
        return {number: os.fsdecode(path) for number, path, _, _ in self._select_rows(numbers)}

    def _select_rows(self, numbers: np.ndarray) -> Iterator[VectorRow]:
        listed = json.dumps(numbers.tolist())  # as one value, because SQLite limits their number
        return self._checked_rows("id IN (SELECT value FROM json_each(?))", (listed,))

    def _path(self, stored: object) -> str:
        if not isinstance(stored, bytes):
            raise damaged_error(self.file, f"a path in it is {stored!r:.40}")
        return os.fsdecode(stored)


@contextmanager
def _transaction(rows: sqlite3.Connection, file: Path) -> Iterator[None]:
    try:
        rows.execute("BEGIN IMMEDIATE")
        try:
            yield
            rows.execute("COMMIT")
        except BaseException:
            if rows.in_transaction:  # a full disk has rolled it back
                rows.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise WriteError(
            f"{file}: cannot be written ({error}). Earlier batches are kept; run the same command again to continue."
        ) from None


def _about_digest(about: Iterable[tuple[object, ...]]) -> str:
    """A digest of the description of an index."""
    rows = sorted((str(key), str(value)) for key, value in about if key != DIGEST_KEY)
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def _write_about_digest(rows: sqlite3.Connection) -> None:
    stored = _about_digest(rows.execute("SELECT key, value FROM about").fetchall())
    rows.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (DIGEST_KEY, json.dumps(stored)))


def row_digest(number: int, path: bytes, hash: bytes | None, vector: bytes | None) -> bytes:
    """Digest of everything that a search returns."""
    parts = (str(number).encode(), path, hash or b"", vector or b"")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _vector(stored: bytes | None) -> np.ndarray | None:
    return None if stored is None else np.frombuffer(stored, dtype=np.float32)
