"""What an index knows of every picture, in a SQLite file: a batch is written whole or not at all, whatever happens.

A damaged file is never searched: SQLite's own check sees broken pages, and a digest of every row sees changed values.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.parsing import parse_json
from vitlab.printable import one_line

FORMAT = 1
FILE = "pictures.sqlite"
PART = "part-*.sqlite"  # of a process; what is left of a killed run is taken over by the next
CHUNK = 1000  # rows at a time, where there may be millions
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
SEAL = "digest"  # the key in `about` of a digest of the other rows there
_checked: dict[Path, tuple[int, int, int]] = {}  # files that were found whole -> their inode, size and time then


class SearchError(ValueError):
    """An index that cannot be used or written; the message says what to do."""


class WriteError(SearchError):
    """An index that cannot be written."""


def damaged(file: Path, why: object) -> SearchError:
    """The error for a ledger that cannot be trusted. It is the index itself: nothing else can restore it."""
    folder = file.parent
    if file.match(PART):
        return SearchError(
            f"{file}: is damaged ({one_line(str(why)[:200])}). A killed process has left it. Remove this file: "
            "its pictures are embedded again."
        )
    return SearchError(
        f"{file}: the index is damaged ({one_line(str(why)[:200])}). Delete {folder} and index again: "
        f"vitlab index FOLDER -o {folder} --model CHECKPOINT"
    )


def read_error(file: Path, error: sqlite3.Error) -> SearchError:
    """Only what SQLite calls damage is damage; a lock, a full disk or a missing permission passes."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    wrong = (
        "no such table",
        "no such column",
        "unsupported file format",
        "Could not decode",
    )  # have no code of their own
    if str(error).startswith(wrong) or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return damaged(file, error)
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return SearchError(f"{file}: another process is writing it. Try again when it is done.")
    return SearchError(f"{file}: cannot be read ({one_line(str(error)[:200])}). Try again.")


@dataclass
class Entry:
    """A picture, and its vector or what is wrong with it. No hash: it could not be opened, so it is tried again."""

    path: str  # below the folder
    size: int
    mtime: int
    hash: bytes | None = None
    vector: np.ndarray | None = None  # (E,)
    error: str | None = None


class Row(NamedTuple):
    """A row of the ledger; whatever a search answers with, covered by the row's digest."""

    number: int
    path: bytes
    hash: bytes | None
    vector: bytes | None


class Known(NamedTuple):
    size: int
    mtime: int
    hash: bytes | None


class Ledger:
    """Every content under every name has a number of its own, which is never used again: no vector ever changes under
    its number, so whatever was built from the numbers needs no other sign of being up to date.

    Paths are stored as bytes, because a file's name need not be text.
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
        """SQLite's quick_check reads the whole file once; while inode, size and time stay the same, not again."""
        status = self.file.stat()
        stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
        if _checked.get(self.file) != stamp:
            if (found := self._all("PRAGMA quick_check(1)")) != [("ok",)]:
                raise damaged(self.file, found[0][0] if found else "nothing can be read")
            _checked[self.file] = stamp

    def read_about(self) -> None:
        """What the index says of itself, as it is now."""
        rows = self._all("SELECT key, value FROM about")
        found = {}
        for key, value in rows:
            try:
                found[key] = parse_json(value)
            except (ValueError, TypeError) as error:
                raise damaged(self.file, f"{key!r:.40} in it: {error}") from None
        told = found.pop(SEAL, None)
        if (told is not None) != self.has_checks or told not in (None, _seal(rows)):
            raise damaged(self.file, "what it says of itself has changed")
        self.about = found

    def check_about(self) -> None:
        """Which pictures and which model: what every index says, but not the part of one process."""
        made_by = self.about.get("made_by")
        texts = [self.about.get("folder")]
        texts += [made_by.get(key) for key in ("checkpoint", "fingerprint")] if isinstance(made_by, dict) else [None]
        graphs = self.about.get("graph", [])
        if not all(isinstance(text, str) for text in texts) or not isinstance(graphs, list):
            raise damaged(self.file, "it does not say which pictures and which model it is of")

    def add_checks(self) -> None:
        """Give the rows of an index of before, which have none, their digests."""
        if self.has_checks:
            return
        with _transaction(self.rows, self.file):
            self.rows.execute(CHECKS)
            found = self.rows.execute("SELECT id, path, hash, vector FROM pictures LEFT JOIN vectors USING (id)")
            self.rows.executemany("INSERT INTO checks VALUES (?, ?)", ((row[0], row_digest(*row)) for row in found))
            _write_seal(self.rows)
        self.has_checks = True

    def _select(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self.rows.execute(query, values)
        except sqlite3.Error as error:
            raise read_error(self.file, error) from None

    def _all(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return list(self._select(query, values))

    def _checked_rows(self, where: str, values: tuple[Any, ...]) -> Iterator[Row]:
        """Number, path, hash and vector of some pictures, each compared with its digest."""
        digest, joined = ("digest", " LEFT JOIN checks USING (id)") if self.has_checks else ("NULL", "")
        query = (
            f"SELECT id, path, hash, vector, {digest} FROM pictures LEFT JOIN vectors USING (id){joined} WHERE {where}"
        )
        for number, path, hash, vector, told in self._select(query, values):
            plain = isinstance(path, bytes) and isinstance(hash, bytes | None) and isinstance(vector, bytes | None)
            if not plain or (self.has_checks and row_digest(number, path, hash, vector) != told):
                raise damaged(self.file, f"the row of picture {number} has changed")
            yield Row(number, path, hash, vector)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.rows.close()

    def __len__(self) -> int:
        """Pictures that can be found."""
        return self._all("SELECT count(*) FROM vectors")[0][0]

    @classmethod
    def create(cls, file: Path, about: dict[str, Any]) -> Ledger:
        rows = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        written = [("format", json.dumps(FORMAT)), *((key, json.dumps(value)) for key, value in about.items())]
        rows.execute("PRAGMA page_size = 16384")  # a vector of 512 numbers would waste half of SQLite's own 4096
        with _transaction(rows, file):
            for command in (*SCHEMA.split(";"), CHECKS):
                rows.execute(command)
            rows.executemany("INSERT INTO about VALUES (?, ?)", written)
            _write_seal(rows)
        rows.close()
        return cls(file)

    @staticmethod
    def is_there(file: Path) -> bool:
        """Not if its creation was cut off."""
        if not file.is_file():
            return False
        try:
            rows = sqlite3.connect(file, timeout=PATIENCE)
        except sqlite3.Error:
            return True
        try:
            return rows.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        except sqlite3.Error:
            return True  # of some kind; opening it says what is wrong
        finally:
            rows.close()

    def tell(self, key: str, value: Any) -> None:
        """None: forget what was told."""
        with _transaction(self.rows, self.file):
            self.rows.execute("DELETE FROM about WHERE key = ?", (key,))
            if value is not None:
                self.rows.execute("INSERT INTO about VALUES (?, ?)", (key, json.dumps(value)))
            if self.has_checks:
                _write_seal(self.rows)
        self.about.pop(key, None)
        self.about |= {} if value is None else {key: value}

    # ---- writing

    def put(self, entries: Iterable[Entry]) -> None:
        """All of them or, if anything happens, none. The same content under the same name keeps its number."""
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
        """Take over another ledger and remove it. Cut off and done again, it ends the same."""
        with Ledger(part) as other:
            rest = {number: values for number, *values in other._select("SELECT id, size, mtime, error FROM pictures")}
            entries = []
            for number, path, hash, vector in other._checked_rows("TRUE ORDER BY id", ()):
                size, mtime, error = rest[number]
                entries.append(Entry(os.fsdecode(path), size, mtime, hash, _vector(vector), error))
                if len(entries) == CHUNK:
                    self.put(entries)
                    entries.clear()
            self.put(entries)
        part.unlink()

    # ---- reading

    def known(self) -> dict[str, Known]:
        rows = self._select("SELECT path, size, mtime, hash FROM pictures")
        return {self._path(path): Known(size, mtime, hash) for path, size, mtime, hash in rows}

    def twin(self, hash: bytes) -> tuple[np.ndarray | None, str | None] | None:
        """Vector and error of a picture with this content, under whatever name."""
        for number, _, _, vector in self._checked_rows("hash = ? LIMIT 1", (hash,)):
            return _vector(vector), self._all("SELECT error FROM pictures WHERE id = ?", (number,))[0][0]
        return None

    def unreadable(self) -> dict[str, str]:
        rows = self._select("SELECT path, error FROM pictures WHERE error IS NOT NULL ORDER BY path")
        return {self._path(path): str(error) for path, error in rows}

    def numbers(self, after: int = 0) -> np.ndarray:
        """Of all pictures that have a vector, ascending."""
        rows = self._select("SELECT id FROM vectors WHERE id > ? ORDER BY id", (after,))
        return np.fromiter((number for (number,) in rows), dtype=np.int64)

    def vectors(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers (n,) and vectors (n, E) of those that are still there, some at a time."""
        for start in range(0, len(numbers), CHUNK):
            rows = [(n, v) for n, _, _, v in self._with(numbers[start : start + CHUNK]) if v is not None]
            if rows:
                if len({len(v) for _, v in rows}) > 1 or len(rows[0][1]) % 4 or not rows[0][1]:
                    raise damaged(self.file, "its vectors are not of one length")
                found = np.frombuffer(b"".join(v for _, v in rows), dtype=np.float32).reshape(len(rows), -1)
                if not np.isfinite(found).all():
                    raise damaged(self.file, "a vector holds NaN or infinity")
                yield np.array([number for number, _ in rows], dtype=np.int64), found

    def paths(self, numbers: np.ndarray) -> dict[int, str]:
        return {number: os.fsdecode(path) for number, path, _, _ in self._with(numbers)}

    def _with(self, numbers: np.ndarray) -> Iterator[Row]:
        listed = json.dumps(numbers.tolist())  # one value: SQLite limits how many there may be
        return self._checked_rows("id IN (SELECT value FROM json_each(?))", (listed,))

    def _path(self, stored: Any) -> str:
        if not isinstance(stored, bytes):
            raise damaged(self.file, f"a path in it is {stored!r:.40}")
        return os.fsdecode(stored)


@contextmanager
def _transaction(rows: sqlite3.Connection, file: Path) -> Iterator[None]:
    try:
        rows.execute("BEGIN IMMEDIATE")
        try:
            yield
            rows.execute("COMMIT")
        except BaseException:
            if rows.in_transaction:  # a full disk has rolled it back already
                rows.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise WriteError(
            f"{file}: cannot be written ({error}). What was written before is kept; the same command goes on."
        ) from None


def _seal(about: Iterable[tuple[Any, Any]]) -> str:
    """A digest of all that an index says of itself."""
    held = sorted((str(key), str(value)) for key, value in about if key != SEAL)
    return hashlib.blake2b(json.dumps(held).encode(), digest_size=8).hexdigest()


def _write_seal(rows: sqlite3.Connection) -> None:
    seal = _seal(rows.execute("SELECT key, value FROM about").fetchall())
    rows.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (SEAL, json.dumps(seal)))


def row_digest(number: int, path: bytes, hash: bytes | None, vector: bytes | None) -> bytes:
    """Digest of everything a search answers with, so that a changed bit in it is seen."""
    parts = (str(number).encode(), path, hash or b"", vector or b"")
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def _vector(stored: bytes | None) -> np.ndarray | None:
    return None if stored is None else np.frombuffer(stored, dtype=np.float32)
