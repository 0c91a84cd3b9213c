"""The index, made by `vitlab index`, that a server searches, and which of the served models made it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from vitlab.errors import SearchError, VitlabError
from vitlab.export.loader import open_network
from vitlab.printable import valid_utf8
from vitlab.search import Hit, Index, check
from vitlab.search.database import MadeBy, remembered_size
from vitlab.serve.model_pool import ServedModel, unique_name


@dataclass(frozen=True)
class SearchIndex:
    """Opened anew for every query, so that it can be updated while the server runs. No query rebuilds a damaged graph:
    that takes long, and several would do it at once.
    """

    path: Path
    model: str  # name of the served model that made it
    made_by: MadeBy
    notes: tuple[str, ...] = ()  # for the operator, at the start

    @property
    def reads_text(self) -> bool:
        return self.made_by.get("reads_text", True)

    def summary(self) -> dict[str, Any]:
        with Index(self.path, rebuild=False) as index:
            info = {"name": index.folder.name, "model": self.model, "words": self.reads_text}
            return {**info, "pictures": len(index)}

    def search(self, vector: np.ndarray, top: int) -> tuple[list[tuple[Hit, str]], int]:
        """The nearest images, each with its path relative to the folder; and the number of images."""
        check(self.path, self.made_by)
        with Index(self.path, rebuild=False) as index:
            hits = index.search(vector, top)
            return [(hit, valid_utf8(hit.path.relative_to(index.folder).as_posix())) for hit in hits], len(index)

    def image_path(self, number: int) -> Path | None:
        with Index(self.path, rebuild=False) as index:
            return index.image_path(number)


def open_index(path: str | Path, models: list[ServedModel]) -> SearchIndex:
    """Open an index. If none of `models` made it, its model is loaded and appended to them."""
    path = Path(path).expanduser()
    with Index(path, rebuild=False) as index:
        made_by, folder, notes = index.made_by, index.folder, tuple(index.notes)
    served = next((one for one in models if one.fingerprint == made_by["fingerprint"]), None)
    if served is None:
        checkpoint = made_by["checkpoint"]
        names = [one.name for one in models]
        problem = f"{path}: was made with {checkpoint}, which is none of the models here ({', '.join(names)})"
        remedy = (
            f"Give its current path: vitlab serve CHECKPOINT --index {quote(str(path))}; or make another index: "
            f"vitlab index {quote(str(folder))} -o OTHER --model CHECKPOINT"
        )
        try:
            served = ServedModel(unique_name(checkpoint, names), open_network(checkpoint, **remembered_size(made_by)))
        except VitlabError as error:
            raise SearchError(f"{problem} and cannot be loaded: {error} {remedy}") from None
        if served.fingerprint != made_by["fingerprint"]:
            raise SearchError(f"{problem} and has changed since: their embeddings cannot be compared. {remedy}")
        models.append(served)
    return SearchIndex(path, served.name, made_by, notes)
