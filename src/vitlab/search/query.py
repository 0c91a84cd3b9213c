"""Search an index: the images nearest to a vector."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import numpy as np

from vitlab.errors import SearchError, UsageError
from vitlab.search import graph
from vitlab.search.database import FILE, ImageDatabase, MadeBy, WriteError, damaged_error
from vitlab.search.graph import DamagedGraphError, Graph, Progress, is_intact, update_graph

SPARE = 4  # candidates per result: the graph holds rounded vectors, the database ranks by exact ones


@dataclass(frozen=True)
class Hit:
    path: Path
    score: float  # cosine similarity
    number: int  # row in the index


def open_database(path: Path) -> ImageDatabase:
    """The database of an index, without its graph."""
    if not ImageDatabase.exists(path / FILE):
        if (path / graph.FILE).exists():
            raise damaged_error(path / FILE, "it is empty or missing")
        problem = "no index in it" if path.exists() else "no such index"
        raise SearchError(f"{path}: {problem}. Make one: vitlab index FOLDER -o {path} --model CHECKPOINT")
    database = ImageDatabase(path / FILE)
    try:
        database.check_about()
    except BaseException:
        database.rows.close()
        raise
    return database


class Index:
    """An index opened for search. Images that are not in the graph yet are compared one by one."""

    def __init__(self, path: str | Path, progress: Progress | None = None, *, rebuild: bool = True):
        """`progress` reports the rebuild of a damaged graph; `notes` mention it afterwards.

        `rebuild`: False where many requests open the index: without its graph, every vector is compared.
        """
        self.path = Path(path).expanduser()
        self.notes: list[str] = []
        self.database = open_database(self.path)
        try:
            self.graph = self._open_graph(self.path / graph.FILE, progress, rebuild)
        except BaseException:
            self.database.rows.close()
            raise

    def _open_graph(self, file: Path, progress: Progress | None, rebuild: bool) -> Graph | None:
        """The graph, rebuilt if damaged. None if there is none or it cannot be rebuilt: all are compared."""
        if is_intact(self.database, file):
            try:
                return Graph(file) if file.exists() else None
            except DamagedGraphError:
                pass
        if not rebuild or not os.access(file.parent, os.W_OK):
            self.notes.append(
                f"{file}: is damaged or missing. Every vector is compared instead, which is slower. To rebuild it, run "
                f"vitlab index {quote(str(self.folder))} -o {quote(str(self.path))}"
            )
            return None
        try:
            update_graph(self.database, file, progress)
            self.notes.append(f"{file}: was damaged or missing and was rebuilt from {FILE}.")
            return Graph(file) if file.exists() else None
        except (OSError, WriteError) as error:
            self.notes.append(
                f"{file}: is damaged or missing and cannot be rebuilt here ({error}). All vectors are compared instead."
            )
            return None

    def __enter__(self) -> Index:
        return self

    def __exit__(self, *error: object) -> None:
        self.database.rows.close()

    def __len__(self) -> int:
        return len(self.database)

    @property
    def folder(self) -> Path:
        return Path(self.database.about["folder"])

    @property
    def made_by(self) -> MadeBy:
        return self.database.made_by

    def search(self, vector: np.ndarray, top: int = 10) -> list[Hit]:
        """The `top` images with the highest cosine similarity to a vector (E,), best first."""
        if top < 1:
            raise UsageError(f"top={top} must be at least 1.")
        vector = np.asarray(vector, dtype=np.float32)
        length = float(np.linalg.norm(vector))
        if vector.ndim != 1 or not np.isfinite(length) or length == 0:
            raise UsageError(f"expected one vector of finite numbers, not all zero; found the shape {vector.shape}.")
        if self.graph is not None:
            self._check_width(vector, self.graph.width)
        vector = vector / length
        scores = self._scores(vector, self.database.numbers(after=self.graph.last if self.graph else 0))
        if self.graph is not None:
            wanted = SPARE * top
            near = self._scores(vector, self.graph.nearest(vector, wanted))
            while len(near) < top and wanted < len(self.graph):  # some were deleted since the graph was built
                wanted *= 4
                near = self._scores(vector, self.graph.nearest(vector, wanted))
            scores |= near
        best = sorted(scores, key=lambda number: -scores[number])[:top]
        paths = self.database.paths(np.array(best, dtype=np.int64))
        if outside := [path for path in paths.values() if _escapes_folder(path)]:
            raise damaged_error(self.path / FILE, f"{outside[0]!r:.60} is outside the folder")
        hits = [Hit(self.folder / path, scores[number], number) for number, path in paths.items()]
        return sorted(hits, key=lambda hit: (-hit.score, hit.path))

    def image_path(self, number: int) -> Path | None:
        """Path of the image in a row; None if the row is missing, or the path is outside the folder."""
        path = self.database.paths(np.array([number], dtype=np.int64)).get(number)
        if path is None or _escapes_folder(path):
            return None
        return self.folder / path

    def _scores(self, vector: np.ndarray, numbers: np.ndarray) -> dict[int, float]:
        """Scores by number, without deleted images."""
        scores: dict[int, float] = {}
        for there, vectors in self.database.vectors(numbers):
            self._check_width(vector, vectors.shape[1])
            scores |= zip(there.tolist(), (vectors @ vector).tolist(), strict=True)
        return scores

    def _check_width(self, vector: np.ndarray, width: int) -> None:
        if len(vector) != width:
            raise SearchError(f"{self.path}: holds vectors of {width} numbers, not of {len(vector)}.")


def _escapes_folder(path: str) -> bool:
    return Path(path).is_absolute() or ".." in Path(path).parts
