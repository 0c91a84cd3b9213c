"""What an index knows of every picture, in a SQLite file: a batch is written whole or not at all, whatever happens."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FORMAT = 1
FILE = "pictures.sqlite"
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


class SearchError(ValueError):
    """An index that cannot be used or written; the message says what to do."""


@dataclass
class Entry:
    """A picture, and its vector or what is wrong with it. No hash: it could not be opened, so it is tried again."""

    path: str  # below the folder
    size: int
    mtime: int
    hash: bytes | None = None
    vector: np.ndarray | None = None  # (E,)
    error: str | None = None


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
            self.rows.execute("PRAGMA foreign_keys = ON")
            self.about = {key: json.loads(value) for key, value in self.rows.execute("SELECT key, value FROM about")}
        except sqlite3.Error as error:
            raise SearchError(f"{file}: cannot be read as an index ({error}). Remove it and index again.") from None
        if self.about.get("format") != FORMAT:
            raise SearchError(
                f"{file}: format {self.about.get('format')!r} is not known; this vitlab reads {FORMAT}. "
                "Update vitlab, or index again in another place."
            )

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *error: object) -> None:
        self.rows.close()

    def __len__(self) -> int:
        """Pictures that can be found."""
        return self.rows.execute("SELECT count(*) FROM vectors").fetchone()[0]

    @classmethod
    def create(cls, file: Path, about: dict[str, Any]) -> Ledger:
        rows = sqlite3.connect(file, timeout=PATIENCE, isolation_level=None)
        written = [("format", json.dumps(FORMAT)), *((key, json.dumps(value)) for key, value in about.items())]
        rows.execute("PRAGMA page_size = 16384")  # a vector of 512 numbers would waste half of SQLite's own 4096
        with _transaction(rows, file):
            for command in SCHEMA.split(";"):
                rows.execute(command)
            rows.executemany("INSERT INTO about VALUES (?, ?)", written)
        rows.close()
        return cls(file)

    @staticmethod
    def is_there(file: Path) -> bool:
        """Not if its creation was cut off."""
        if not file.is_file():
            return False
        rows = sqlite3.connect(file, timeout=PATIENCE)
        try:
            return rows.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        except sqlite3.Error:
            return True  # of some kind; opening it says what is wrong
        finally:
            rows.close()

    def tell(self, key: str, value: Any) -> None:
        with _transaction(self.rows, self.file):
            self.rows.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, json.dumps(value)))
        self.about[key] = value

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
                if e.vector is not None:
                    vector = np.ascontiguousarray(e.vector, dtype=np.float32)
                    self.rows.execute("INSERT INTO vectors VALUES (?, ?)", (number, vector.tobytes()))

    def drop(self, paths: Iterable[str]) -> None:
        with _transaction(self.rows, self.file):
            self.rows.executemany("DELETE FROM pictures WHERE path = ?", ((os.fsencode(path),) for path in paths))

    def absorb(self, part: Path) -> None:
        """Take over another ledger and remove it. Cut off and done again, it ends the same."""
        with Ledger(part) as other:
            what = "path, size, mtime, hash, vector, error"
            found = other.rows.execute(f"SELECT {what} FROM pictures LEFT JOIN vectors USING (id) ORDER BY id")
            while rows := found.fetchmany(CHUNK):
                self.put(
                    Entry(os.fsdecode(path), size, mtime, hash, _vector(vector), error)
                    for path, size, mtime, hash, vector, error in rows
                )
        part.unlink()

    # ---- reading

    def known(self) -> dict[str, Known]:
        rows = self.rows.execute("SELECT path, size, mtime, hash FROM pictures")
        return {os.fsdecode(path): Known(size, mtime, hash) for path, size, mtime, hash in rows}

    def twin(self, hash: bytes) -> tuple[np.ndarray | None, str | None] | None:
        """Vector and error of a picture with this content, under whatever name."""
        query = "SELECT vector, error FROM pictures LEFT JOIN vectors USING (id) WHERE hash = ? LIMIT 1"
        found = self.rows.execute(query, (hash,)).fetchone()
        return None if found is None else (_vector(found[0]), found[1])

    def unreadable(self) -> dict[str, str]:
        rows = self.rows.execute("SELECT path, error FROM pictures WHERE error IS NOT NULL ORDER BY path")
        return {os.fsdecode(path): error for path, error in rows}

    def numbers(self, after: int = 0) -> np.ndarray:
        """Of all pictures that have a vector, ascending."""
        rows = self.rows.execute("SELECT id FROM vectors WHERE id > ? ORDER BY id", (after,))
        return np.fromiter((number for (number,) in rows), dtype=np.int64)

    def vectors(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Numbers (n,) and vectors (n, E) of those that are still there, some at a time."""
        for start in range(0, len(numbers), CHUNK):
            rows = self._with("SELECT id, vector FROM vectors", numbers[start : start + CHUNK])
            if rows:
                there = np.array([number for number, _ in rows], dtype=np.int64)
                yield there, np.frombuffer(b"".join(v for _, v in rows), dtype=np.float32).reshape(len(rows), -1)

    def paths(self, numbers: np.ndarray) -> dict[int, str]:
        return {number: os.fsdecode(path) for number, path in self._with("SELECT id, path FROM pictures", numbers)}

    def _with(self, select: str, numbers: np.ndarray) -> list[tuple[int, Any]]:
        listed = json.dumps(numbers.tolist())  # one value: SQLite limits how many there may be
        return self.rows.execute(f"{select} WHERE id IN (SELECT value FROM json_each(?))", (listed,)).fetchall()


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
        raise SearchError(
            f"{file}: cannot be written ({error}). What was written before is kept; the same command goes on."
        ) from None


def _vector(stored: bytes | None) -> np.ndarray | None:
    return None if stored is None else np.frombuffer(stored, dtype=np.float32)
