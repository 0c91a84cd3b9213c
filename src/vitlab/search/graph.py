"""The nearest vectors without comparing all: a graph of neighbours (HNSW, arXiv:1603.09320) by the usearch library.

It is made from the ledger and can be made again. The ledger's numbers say what it holds, so one that is behind is seen;
its digest stands in the ledger too, so one that is damaged is seen, and built anew.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.search.files import digest
from vitlab.search.ledger import Ledger, SearchError

FILE = "vectors.usearch"
EXACT = 20_000  # up to so many vectors, all are compared: it takes milliseconds, and misses nothing
CONNECTIVITY, EFFORT_TO_ADD, EFFORT = 16, 128, 256  # HNSW's M, efConstruction and ef

Progress = Callable[[str, int, int], object]  # what, done, of how many


class Graph:
    """The graph in a file, mapped into memory: a search reads only where it leads. Before that, `is_intact` reads the
    whole file once to check its digest.
    """

    def __init__(self, file: Path):
        self.index = _restore(file, view=True)
        self.index.expansion_search = EFFORT
        self.width: int = self.index.ndim
        self.last = int(_numbers(self.index).max(initial=0))  # numbers above are not in it

    def __len__(self) -> int:
        return len(self.index)

    def nearest(self, vector: np.ndarray, count: int) -> np.ndarray:
        """Numbers of about the `count` vectors with the largest products."""
        found = self.index.search(vector, min(count, len(self)), exact=len(self) <= EXACT)
        return found.keys.astype(np.int64)


class DamagedError(SearchError):
    """A graph file that usearch cannot read."""


def is_intact(ledger: Ledger, file: Path) -> bool:
    """Whether the file has the digest that the ledger holds. An older index has none: then it cannot be checked.

    The file is read once as a whole; while its inode, size and time stay the same, the digest is remembered.
    """
    if not file.is_file():
        made_before = (
            not ledger.has_checks
        )  # by a version that told no digests: a graph without one may have been there
        return "graph" not in ledger.about and not (made_before and len(ledger))
    if "graph" not in ledger.about:
        return True
    status = file.stat()
    stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
    if (seen := _digests.get(file)) is None or seen[0] != stamp:
        seen = _digests[file] = (stamp, digest(file).hex())
    if seen[1] not in ledger.about["graph"]:
        ledger.read_about()  # another process may have brought it up to date in between
    return seen[1] in ledger.about.get("graph", [])


_digests: dict[Path, tuple[tuple[int, int, int], str]] = {}  # of files, by their inode, size and time


def bring_up_to_date(ledger: Ledger, file: Path, progress: Progress | None = None) -> bool:
    """Put in what is new, take out what is gone; the file changes at once or not at all. True: it was damaged or
    missing, and all of it was built anew.
    """
    from vitlab.checkpoints.native import write_whole

    wanted = ledger.numbers()
    if not len(wanted):
        file.unlink(missing_ok=True)
        ledger.tell("graph", None)
        return False
    graph, rebuilt = None, not is_intact(ledger, file)
    if file.exists() and not rebuilt:
        try:
            graph = _restore(file)
        except DamagedError:
            rebuilt = True
    have = np.zeros(0, dtype=np.int64) if graph is None else _numbers(graph)
    gone = np.setdiff1d(have, wanted)
    if graph is None or 4 * len(gone) > len(have):  # holes make it slower and worse
        _, vectors = next(ledger.vectors(wanted[:1]))
        graph, have, gone = _new(vectors.shape[1]), have[:0], gone[:0]
    new = np.setdiff1d(wanted, have)
    if not len(new) and not len(gone):
        if "graph" not in ledger.about:  # of an index of before
            ledger.tell("graph", [digest(file).hex()])
        return False
    if len(gone):
        graph.remove(gone.astype(np.uint64))
    done = 0
    for numbers, vectors in ledger.vectors(new):
        graph.add(numbers.astype(np.uint64), vectors)
        done += len(numbers)
        if progress is not None:
            progress("graph", done, len(new))
    written: list[str] = []

    def write(path: Path) -> None:
        """Until the file has its name, the ledger tells of both: a process that is killed here damages nothing."""
        graph.save(str(path))
        written.append(digest(path).hex())
        ledger.tell("graph", [*ledger.about.get("graph", []), *written])

    write_whole(file, write)
    ledger.tell("graph", written)
    return rebuilt


def _new(width: int) -> Any:
    options = dict(connectivity=CONNECTIVITY, expansion_add=EFFORT_TO_ADD)
    return _usearch()(ndim=width, metric="ip", dtype="f16", **options)


def _restore(file: Path, view: bool = False) -> Any:
    try:
        return _usearch().restore(str(file), view=view)
    except (RuntimeError, ValueError) as error:
        raise DamagedError(f"{file}: is damaged ({error}). Remove it: vitlab index makes it again, quickly.") from None


def _numbers(graph: Any) -> np.ndarray:
    return graph.keys[:].astype(np.int64)


def _usearch() -> Any:
    try:
        from usearch.index import Index
    except ImportError:
        raise SearchError("search needs usearch, which is not installed: pip install 'vitlab[search]'.") from None
    return Index
