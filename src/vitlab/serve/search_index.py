"""An index of `vitlab index` that a server searches, and which of its models made it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.load import load
from vitlab.inference import encoder_of, fingerprint
from vitlab.search import Hit, Index, SearchError, check
from vitlab.serve.model_pool import Served, free_name, refusals


@dataclass(frozen=True)
class Shelf:
    """Every question opens the index, so that it may be brought up to date while the server runs."""

    path: Path
    model: str  # its name here
    made_by: dict[str, Any]

    @property
    def words(self) -> bool:
        """Whether it can be asked in words."""
        return self.made_by.get("reads_text", True)

    def about(self) -> dict[str, Any]:
        with Index(self.path) as there:
            return {"name": there.folder.name, "model": self.model, "words": self.words, "pictures": len(there)}

    def search(self, vector: np.ndarray, top: int) -> tuple[list[tuple[Hit, str]], int]:
        """The nearest pictures, each with its name below the folder; and how many there are."""
        check(self.path, self.made_by)
        with Index(self.path) as there:
            hits = there.search(vector, top)
            return [(hit, _plain(hit.path.relative_to(there.folder).as_posix())) for hit in hits], len(there)

    def picture(self, number: int) -> Path | None:
        with Index(self.path) as there:
            return there.picture(number)


def open_index(place: str | Path, models: list[Served], load: Callable[[str], Any] = load) -> Shelf:
    """The model that made it is one of `models`; or it is loaded, and put there."""
    place = Path(place).expanduser()
    with Index(place) as there:
        made_by, folder = there.made_by, there.folder
    served = next((one for one in models if _print(one.model) == made_by["fingerprint"]), None)
    if served is None:
        served = _fetch(place, folder, made_by, models, load)
        models.append(served)
    return Shelf(place, served.name, made_by)


def _fetch(
    place: Path, folder: Path, made_by: dict[str, Any], models: list[Served], load: Callable[[str], Any]
) -> Served:
    checkpoint = made_by["checkpoint"]
    here = ", ".join(one.name for one in models)
    found = f"{place}: was made with {checkpoint}, which is none of the models here ({here})"
    remedy = (
        f"Name it where it is now: vitlab serve CHECKPOINT --index {quote(str(place))}; or make another index: "
        f"vitlab index {quote(str(folder))} -o OTHER --model CHECKPOINT"
    )
    try:
        model = load(checkpoint)
    except CheckpointError as error:
        raise SearchError(f"{found} and cannot be loaded: {error} {remedy}") from None
    if _print(model) != made_by["fingerprint"]:
        raise SearchError(f"{found} and has changed since: their vectors cannot be compared. {remedy}")
    return Served(free_name(checkpoint, {one.name for one in models}), model.eval(), refusals(model))


def _print(model: Any) -> str:
    return fingerprint(encoder_of(model))


def _plain(text: str) -> str:
    """Names of files need not be UTF-8, but JSON is."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
