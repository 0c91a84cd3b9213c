"""Approximate nearest neighbours by a graph (HNSW, arXiv:1603.09320) of the usearch library.

It is built from the database and can be rebuilt. Its keys are the database's row numbers, which shows whether it is up
to date; its digest is stored in the database, which shows whether it is damaged.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.errors import SearchError
from vitlab.images.digest import file_digest
from vitlab.optional import require
from vitlab.search.database import ImageDatabase
from vitlab.search.files import identity

FILE = "vectors.usearch"
EXACT = 20_000  # up to this many vectors, all are compared: exact, and takes milliseconds
CONNECTIVITY, EFFORT_TO_ADD, EFFORT = 16, 128, 256  # HNSW's M, efConstruction and ef

Progress = Callable[[str, int, int], object]  # name of the work, done, total


class Graph:
    """A memory-mapped graph file: a search reads only parts of it, after `is_intact` read all of it for its digest."""

    def __init__(self, file: Path):
        self.index = _restore(file, view=True)
        self.index.expansion_search = EFFORT
        self.width: int = self.index.ndim
        self.last = int(_numbers(self.index).max(initial=0))  # higher numbers are not in it

    def __len__(self) -> int:
        return len(self.index)

    def nearest(self, vector: np.ndarray, count: int) -> np.ndarray:
        """Numbers of approximately the `count` vectors with the largest dot products."""
        matches = self.index.search(vector, min(count, len(self)), exact=len(self) <= EXACT)
        return matches.keys.astype(np.int64)


class DamagedGraphError(SearchError):
    """A graph file that usearch cannot read."""


def is_intact(database: ImageDatabase, file: Path) -> bool:
    """Whether the file has the digest in the database, cached while it stays the same. An older index has none."""
    if not file.is_file():
        may_be_lost = not database.has_checks and len(database) > 0  # an older index stored no digest of its graph
        return "graph" not in database.about and not may_be_lost
    if "graph" not in database.about:
        return True
    stamp = identity(file)
    if (cached := _digests.get(file)) is None or cached[0] != stamp:
        cached = _digests[file] = (stamp, file_digest(file).hex())
    if cached[1] not in database.about["graph"]:
        database.read_about()  # another process may have updated it
    return cached[1] in database.about.get("graph", [])


_digests: dict[Path, tuple[tuple[int, int, int], str]] = {}  # file -> (inode, size, time), digest


def update_graph(database: ImageDatabase, file: Path, progress: Progress | None = None) -> bool:
    """Add new vectors and remove deleted ones, atomically. True if the file was damaged or missing and was rebuilt."""
    from vitlab.checkpoints.native import write_whole

    wanted = database.numbers()
    if not len(wanted):
        file.unlink(missing_ok=True)
        database.set_about("graph", None)
        return False
    graph, rebuilt = None, not is_intact(database, file)
    if file.exists() and not rebuilt:
        try:
            graph = _restore(file)
        except DamagedGraphError:
            rebuilt = True
    have = np.zeros(0, dtype=np.int64) if graph is None else _numbers(graph)
    gone = np.setdiff1d(have, wanted)
    if graph is None or 4 * len(gone) > len(have):  # many deletions make it slower and less accurate
        _, vectors = next(database.vectors(wanted[:1]))
        graph, have, gone = _new(vectors.shape[1]), have[:0], gone[:0]
    new = np.setdiff1d(wanted, have)
    if not len(new) and not len(gone):
        if "graph" not in database.about:  # an index of an older version
            database.set_about("graph", [file_digest(file).hex()])
        return False
    if len(gone):
        graph.remove(gone.astype(np.uint64))
    done = 0
    for numbers, vectors in database.vectors(new):
        graph.add(numbers.astype(np.uint64), vectors)
        done += len(numbers)
        if progress is not None:
            progress("graph", done, len(new))
    written: list[str] = []

    def write(path: Path) -> None:
        """Until the file is renamed, the database lists both digests, so that a process may be killed here."""
        graph.save(str(path))
        written.append(file_digest(path).hex())
        database.set_about("graph", [*database.about.get("graph", []), *written])

    write_whole(file, write)
    database.set_about("graph", written)
    return rebuilt


def _new(width: int) -> Any:
    options = dict(connectivity=CONNECTIVITY, expansion_add=EFFORT_TO_ADD)
    return _usearch()(ndim=width, metric="ip", dtype="f16", **options)


def _restore(file: Path, view: bool = False) -> Any:
    try:
        return _usearch().restore(str(file), view=view)
    except (RuntimeError, ValueError) as error:
        raise DamagedGraphError(f"{file}: is damaged ({error}). Delete it: vitlab index rebuilds it quickly.") from None


def _numbers(graph: Any) -> np.ndarray:
    return graph.keys[:].astype(np.int64)


def _usearch() -> Any:
    require("search", "usearch")
    from usearch.index import Index

    return Index
