"""The nearest vectors without comparing all: a graph of neighbours (HNSW, arXiv:1603.09320) by the usearch library.

It is made from the ledger and can be made again. The ledger's numbers say what it holds, so one that is behind is seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.search.ledger import Ledger, SearchError

FILE = "vectors.usearch"
EXACT = 20_000  # up to so many vectors, all are compared: it takes milliseconds, and misses nothing
CONNECTIVITY, EFFORT_TO_ADD, EFFORT = 16, 128, 256  # HNSW's M, efConstruction and ef

Progress = Callable[[str, int, int], object]  # what, done, of how many


class Graph:
    """The graph in a file, which is read where a search leads and not as a whole."""

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


def bring_up_to_date(ledger: Ledger, file: Path, progress: Progress | None = None) -> None:
    """Put in what is new, take out what is gone; the file changes at once or not at all."""
    from vitlab.checkpoints.native import write_whole

    wanted = ledger.numbers()
    if not len(wanted):
        file.unlink(missing_ok=True)
        return
    graph = _restore(file) if file.exists() else None
    have = np.zeros(0, dtype=np.int64) if graph is None else _numbers(graph)
    gone = np.setdiff1d(have, wanted)
    if graph is None or 4 * len(gone) > len(have):  # holes make it slower and worse
        _, vectors = next(ledger.vectors(wanted[:1]))
        graph, have, gone = _new(vectors.shape[1]), have[:0], gone[:0]
    new = np.setdiff1d(wanted, have)
    if not len(new) and not len(gone):
        return
    if len(gone):
        graph.remove(gone.astype(np.uint64))
    done = 0
    for numbers, vectors in ledger.vectors(new):
        graph.add(numbers.astype(np.uint64), vectors)
        done += len(numbers)
        if progress is not None:
            progress("graph", done, len(new))
    write_whole(file, lambda path: graph.save(str(path)))


def _new(width: int) -> Any:
    options = dict(connectivity=CONNECTIVITY, expansion_add=EFFORT_TO_ADD)
    return _usearch()(ndim=width, metric="ip", dtype="f16", **options)


def _restore(file: Path, view: bool = False) -> Any:
    try:
        return _usearch().restore(str(file), view=view)
    except (RuntimeError, ValueError) as error:
        raise SearchError(f"{file}: is damaged ({error}). Remove it: vitlab index makes it again, quickly.") from None


def _numbers(graph: Any) -> np.ndarray:
    return graph.keys[:].astype(np.int64)


def _usearch() -> Any:
    try:
        from usearch.index import Index
    except ImportError:
        raise SearchError("search needs usearch, which is not installed: pip install 'vitlab[search]'.") from None
    return Index
