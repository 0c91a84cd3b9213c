"""Make an index of the embeddings of a folder of images, or update it.

Only new and changed images are embedded. Every batch is written when it is done, so a killed run loses at most one
batch. With several processes each embeds a part of the images into its own file; rank 0 merges them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from vitlab.errors import SearchError, UsageError
from vitlab.images.digest import file_digest
from vitlab.inference import Embedding
from vitlab.search import graph
from vitlab.search.database import FILE, PART, FileState, ImageDatabase, ImageRecord, MadeBy, damaged_error
from vitlab.search.files import Stamp, scan
from vitlab.search.graph import Progress
from vitlab.training.processes import Processes

Embed = Callable[[list[Any]], Sequence[Embedding]]  # as vitlab.embed, of paths or pixels


@dataclass
class Counts:
    """Result of an update, in images."""

    new: int = 0
    changed: int = 0
    moved: int = 0  # a new name for known contents
    unchanged: int = 0
    removed: int = 0
    embedded: int = 0  # run through the model
    images: int = 0  # searchable in the index
    unreadable: dict[str, str] = field(default_factory=dict)  # path -> error, for the whole index
    rebuilt: int = 0  # 1 if the graph was damaged or missing and was rebuilt
    model: str = field(default="", compare=False)  # that made the index

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab index --json` prints it."""
        return {"pictures" if name == "images" else name: value for name, value in vars(self).items()}


def update(
    index: str | Path,
    folder: str | Path,
    made_by: MadeBy,
    embed: Embed,
    *,
    batch_size: int = 64,
    moved: bool = False,
    together: Processes | None = None,
    progress: Progress | None = None,
) -> Counts:
    """Make an index, or update it.

    `moved`: the images of the index are in another folder now.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size} must be at least 1.")
    group, index, folder = together or Processes(), Path(index).expanduser(), Path(folder).expanduser().resolve()
    stamps = scan(folder)
    if not stamps:
        raise SearchError(f"{folder}: no images in it; nothing was changed.")
    check(index, made_by, folder, moved)
    group.wait()  # until all processes have checked the index
    if group.rank == 0:
        _prepare(index, folder, made_by)
    group.wait()
    with ImageDatabase(index / FILE) as database:
        part = database if group.world == 1 else ImageDatabase.create(index / PART.replace("*", str(group.rank)), {})
        mine = {path: stamp for path, stamp in stamps.items() if _path_hash(path) % group.world == group.rank}
        counts = _embed_new(database, part, folder, mine, embed, batch_size, progress)
        if part is not database:
            part.rows.close()
        shares = group.gather(counts)
        if group.rank == 0:
            _merge_parts(database, index)
            removed = database.file_states().keys() - stamps.keys()
            database.drop(removed)
            rebuilt = graph.update_graph(database, index / graph.FILE, progress)
            counts = Counts(removed=len(removed), images=len(database), unreadable=database.unreadable())
            shares.append(replace(counts, rebuilt=int(rebuilt)))
    return _add_counts(made_by["checkpoint"], shares)


def check(index: Path, made_by: MadeBy, folder: Path | None = None, moved: bool = False) -> None:
    """Refuse an existing index of another model or another folder."""
    if not index.exists():
        return
    if not index.is_dir():
        raise SearchError(f"{index}: is a file. An index is a folder: name another place.")
    if not ImageDatabase.exists(index / FILE):
        if (index / graph.FILE).exists():
            raise damaged_error(index / FILE, "it is empty or missing")
        if any(path.name != FILE and not path.name.startswith(f"{FILE}-") for path in index.iterdir()):
            raise SearchError(f"{index}: is a folder that is not empty and not an index. Name another place.")
        return
    with ImageDatabase(index / FILE) as database:
        database.check_about()
        about = database.about
    before = about["made_by"]
    if before["fingerprint"] != made_by["fingerprint"]:
        theirs, ours = before["checkpoint"], made_by["checkpoint"]
        old, new = before.get("image_size"), made_by.get("image_size")
        if theirs == ours and old and new and list(old) != list(new):
            raise SearchError(
                f"{index}: was made with images of {old[0]} x {old[1]} pixels, not of {new[0]} x {new[1]}: their "
                f"embeddings cannot be compared. Use that size, --image-size {old[0]}x{old[1]}, or make a second "
                f"index: vitlab index {quote(about['folder'])} -o OTHER --model {quote(ours)} "
                f"--image-size {new[0]}x{new[1]}"
            )
        maker = f"with {theirs}" if theirs != ours else f"with {theirs} as it was then"
        raise SearchError(
            f"{index}: was made {maker}, which is another model than {ours}: their embeddings cannot be compared. Use "
            f"that model (--model), or make a second index: vitlab index {quote(about['folder'])} -o OTHER "
            f"--model {quote(ours)}"
        )
    if folder is not None and about["folder"] != str(folder) and not moved:
        raise SearchError(
            f"{index}: is of the images in {about['folder']}, not in {folder}. Make a second index with -o OTHER; or "
            "add --moved, if these are the same images in a new place."
        )


def _prepare(index: Path, folder: Path, made_by: MadeBy) -> None:
    """Create the database if needed, and merge the parts of a killed run."""
    if not ImageDatabase.exists(index / FILE):
        index.mkdir(parents=True, exist_ok=True)
        ImageDatabase.create(index / FILE, {"folder": str(folder), "made_by": made_by}).rows.close()
    with ImageDatabase(index / FILE) as database:
        database.add_checks()
        _merge_parts(database, index)
        if database.about["folder"] != str(folder):
            database.set_about("folder", str(folder))


def _embed_new(
    database: ImageDatabase,
    part: ImageDatabase,
    folder: Path,
    stamps: dict[str, Stamp],
    embed: Embed,
    batch_size: int,
    progress: Progress | None,
) -> Counts:
    """Embed new and changed images and write them to `part` batch by batch."""
    states = database.file_states()
    indexed = {path: Stamp(state.size, state.mtime) for path, state in states.items() if state.hash is not None}
    todo = [path for path, stamp in stamps.items() if indexed.get(path) != stamp]
    counts = Counts(unchanged=len(stamps) - len(todo))
    for first in range(0, len(todo), batch_size):
        entries = [ImageRecord(path, *stamps[path]) for path in todo[first : first + batch_size]]
        fresh = [entry for entry in entries if not _reuse(entry, states.get(entry.path), database, folder, counts)]
        if fresh:
            results = embed([folder / entry.path for entry in fresh])
            for entry, result in zip(fresh, results, strict=True):
                entry.vector, entry.error = result.vector, result.error
                if entry.vector is not None and not np.isfinite(entry.vector).all():
                    entry.vector, entry.error = None, "the model returns NaN or infinity for it."
                if entry.error is not None:  # the path is stored separately, and may change
                    entry.error = entry.error.removeprefix(f"{folder / entry.path}: ")
            counts.embedded += sum(not result.cached for result in results)
        part.put(entries)
        if progress is not None:
            progress("images", first + len(entries), len(todo))
    return counts


def _reuse(entry: ImageRecord, before: FileState | None, database: ImageDatabase, folder: Path, counts: Counts) -> bool:
    """Fill in the record from a known image with the same contents. True if it needs no embedding. Updates `counts`."""
    try:
        entry.hash = file_digest(folder / entry.path)
    except OSError as error:
        entry.error = f"cannot be opened ({error.strerror})."
    same = None if entry.hash is None else database.find_by_hash(entry.hash)
    if same is not None:
        entry.vector, entry.error = same
    if before is not None and before.hash == entry.hash:
        counts.unchanged += 1  # only its time changed, or it still cannot be opened
    elif same is not None:
        counts.moved += 1
    elif before is None:
        counts.new += 1
    else:
        counts.changed += 1
    return same is not None or entry.hash is None


def _path_hash(path: str) -> int:
    """A hash that is equal in every process."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest())


def _merge_parts(database: ImageDatabase, index: Path) -> None:
    for file in sorted(index.glob(PART)):
        if ImageDatabase.exists(file):
            database.absorb(file)
        else:
            file.unlink()


def _add_counts(model: str, shares: list[Counts]) -> Counts:
    names = [f.name for f in fields(Counts) if f.name not in ("model", "unreadable")]
    totals = {name: sum(getattr(share, name) for share in shares) for name in names}
    unreadable = {path: error for share in shares for path, error in share.unreadable.items()}
    return Counts(**totals, unreadable=unreadable, model=model)
