"""Where in a file the entry of each content is, in SQLite: for cached features and shrunken copies."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 60.0  # seconds to wait for another process that writes


def connect(index: Path, tables: str, entries: str) -> sqlite3.Connection:
    """The index; a damaged one is started anew with the files *`entries`, for all of it can be computed again."""
    index.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(2):
        connection = sqlite3.connect(index, timeout=PATIENCE, isolation_level=None)
        try:
            connection.executescript(tables)
            return connection
        except sqlite3.OperationalError:  # locked, or read-only: nothing is wrong with it
            connection.close()
            raise
        except sqlite3.DatabaseError:
            connection.close()
            for file in [*index.parent.glob(f"{index.name}*"), *index.parent.glob(f"*{entries}")]:
                file.unlink()
    raise sqlite3.DatabaseError(f"{index}: cannot be made")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of it or nothing; others wait for it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
