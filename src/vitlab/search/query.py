"""An index, opened to be asked: a vector -> the pictures that are most like it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from vitlab.search import graph
from vitlab.search.graph import DamagedError, Graph, Progress, bring_up_to_date, is_intact
from vitlab.search.ledger import FILE, Ledger, SearchError, WriteError, damaged

SPARE = 4  # candidates for each that is asked for: the graph holds rounded vectors, the ledger ranks by the exact ones


@dataclass(frozen=True)
class Hit:
    path: Path
    score: float  # cosine: 1 for the same direction
    number: int  # of its row in the index


def open_ledger(path: Path) -> Ledger:
    """The ledger of an index, without its graph."""
    if not Ledger.is_there(path / FILE):
        if (path / graph.FILE).exists():
            raise damaged(path / FILE, "it is empty or missing")
        what = "no index in it" if path.exists() else "no such index"
        raise SearchError(f"{path}: {what}. Make one: vitlab index FOLDER -o {path} --model CHECKPOINT")
    ledger = Ledger(path / FILE)
    try:
        ledger.check_about()
    except BaseException:
        ledger.rows.close()
        raise
    return ledger


class Index:
    """Pictures that the graph does not hold yet, e.g. while an index is made, are compared one by one."""

    def __init__(self, path: str | Path, progress: Progress | None = None, *, rebuild: bool = True):
        """`progress` is told how far a damaged graph is rebuilt; `notes` say it afterwards.

        `rebuild`: False where many requests open the index: without its graph, every vector is compared.
        """
        self.path = Path(path).expanduser()
        self.notes: list[str] = []
        self.ledger = open_ledger(self.path)
        try:
            self.graph = self._open_graph(self.path / graph.FILE, progress, rebuild)
        except BaseException:
            self.ledger.rows.close()
            raise

    def _open_graph(self, file: Path, progress: Progress | None, rebuild: bool) -> Graph | None:
        """None: there is none yet, or none can be made here, and all vectors are compared. A damaged one is rebuilt."""
        if is_intact(self.ledger, file):
            try:
                return Graph(file) if file.exists() else None
            except DamagedError:
                pass
        if not rebuild or not os.access(file.parent, os.W_OK):
            self.notes.append(
                f"{file}: is damaged or missing. Every vector is compared instead, which is slower. To rebuild it, run "
                f"vitlab index {quote(str(self.folder))} -o {quote(str(self.path))}"
            )
            return None
        try:
            bring_up_to_date(self.ledger, file, progress)
            self.notes.append(f"{file}: was damaged or missing, and was rebuilt from {FILE}.")
            return Graph(file) if file.exists() else None
        except (OSError, WriteError) as error:
            self.notes.append(
                f"{file}: is damaged or missing, and cannot be rebuilt here ({error}). "
                "Every vector is compared instead."
            )
            return None

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *error: object) -> None:
        self.ledger.rows.close()

    def __len__(self) -> int:
        return len(self.ledger)

    @property
    def folder(self) -> Path:
        return Path(self.ledger.about["folder"])

    @property
    def made_by(self) -> dict[str, Any]:
        """Which model made the vectors."""
        return self.ledger.about["made_by"]

    def search(self, vector: np.ndarray, top: int = 10) -> list[Hit]:
        """The `top` pictures with the largest cosine to a vector (E,), best first."""
        if top < 1:
            raise ValueError(f"top={top} must be at least 1.")
        vector = np.asarray(vector, dtype=np.float32)
        length = float(np.linalg.norm(vector))
        if vector.ndim != 1 or not np.isfinite(length) or length == 0:
            raise ValueError(f"expected one vector of finite numbers, not all zero; found the shape {vector.shape}.")
        if self.graph is not None:
            self._check_width(vector, self.graph.width)
        vector = vector / length
        scores = self._scores(vector, self.ledger.numbers(after=self.graph.last if self.graph else 0))
        if self.graph is not None:
            wanted = SPARE * top
            near = self._scores(vector, self.graph.nearest(vector, wanted))
            while len(near) < top and wanted < len(self.graph):  # some of them are gone since the graph was made
                wanted *= 4
                near = self._scores(vector, self.graph.nearest(vector, wanted))
            scores |= near
        best = sorted(scores, key=lambda number: -scores[number])[:top]
        paths = self.ledger.paths(np.array(best, dtype=np.int64))
        if outside := [path for path in paths.values() if _leads_out(path)]:
            raise damaged(self.path / FILE, f"{outside[0]!r:.60} leads out of the folder")
        hits = [Hit(self.folder / path, scores[number], number) for number, path in paths.items()]
        return sorted(hits, key=lambda hit: (-hit.score, hit.path))

    def picture(self, number: int) -> Path | None:
        """Path of a row's picture; None: there is no such row, or the path leads out of the folder."""
        path = self.ledger.paths(np.array([number], dtype=np.int64)).get(number)
        if path is None or _leads_out(path):
            return None
        return self.folder / path

    def _scores(self, vector: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
        """Of those pictures that are still there, by their numbers."""
        scores: dict[int, float] = {}
        for there, vectors in self.ledger.vectors(numbers):
            self._check_width(vector, vectors.shape[1])
            scores |= zip(there.tolist(), (vectors @ vector).tolist(), strict=True)
        return scores

    def _check_width(self, vector: np.ndarray, width: int) -> None:
        if len(vector) != width:
            raise ValueError(f"{self.path}: holds vectors of {width} numbers, not of {len(vector)}.")


def _leads_out(path: str) -> bool:
    return Path(path).is_absolute() or ".." in Path(path).parts
