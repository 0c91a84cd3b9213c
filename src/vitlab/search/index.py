"""A folder of pictures -> an index of their vectors, made once and then kept up to date.

Only new and changed pictures are looked at. Every batch is written as it is done, so a run that is killed loses at most
the batch it was at. In many processes each has its part of the pictures and a file of its own; the first joins them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import quote
from typing import Any, Protocol

import numpy as np

from vitlab.search import graph
from vitlab.search.files import Stamp, digest, scan
from vitlab.search.graph import Progress
from vitlab.search.ledger import FILE, PART, Entry, Known, Ledger, SearchError, damaged


class Embedded(Protocol):
    """What `vitlab.embed` gives for a picture."""

    vector: np.ndarray | None
    error: str | None


class Together(Protocol):
    """One of several processes, as vitlab.training.processes knows it."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def wait(self) -> None: ...
    def gather(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Alone:
    rank: int = 0
    world: int = 1

    def wait(self) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        return [value]


@dataclass
class Counts:
    """What became of the pictures of a folder."""

    new: int = 0
    changed: int = 0
    moved: int = 0  # another name, or one more, of a content that was known
    unchanged: int = 0
    removed: int = 0
    embedded: int = 0  # looked at by the model
    pictures: int = 0  # in the index, and can be found
    unreadable: dict[str, str] = field(default_factory=dict)  # of all in the index: path -> what is wrong
    rebuilt: int = 0  # 1: the graph was damaged or missing, and was built anew


def update(
    index: str | Path,
    folder: str | Path,
    made_by: dict[str, Any],
    embed: Callable[[list[Path]], Sequence[Embedded]],
    *,
    batch_size: int = 64,
    moved: bool = False,
    together: Together | None = None,
    progress: Progress | None = None,
) -> Counts:
    """Make an index, or bring it up to date.

    `made_by` says which model makes the vectors; its "fingerprint" and "checkpoint" are needed. `moved`: the pictures
    of an index are in another folder now. `progress` is told what is done, how far, and of how much.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    who, index, folder = together or Alone(), Path(index).expanduser(), Path(folder).expanduser().resolve()
    found = scan(folder)
    if not found:
        raise SearchError(f"{folder}: no pictures in it; nothing was changed.")
    check(index, made_by, folder, moved)
    who.wait()  # until all have seen the index as it was
    if who.rank == 0:
        _prepare(index, folder, made_by)
    who.wait()
    with Ledger(index / FILE) as ledger:
        part = ledger if who.world == 1 else Ledger.create(index / PART.replace("*", str(who.rank)), {})
        mine = {path: stamp for path, stamp in found.items() if _number(path) % who.world == who.rank}
        counts = _look(ledger, part, folder, mine, embed, batch_size, progress)
        if part is not ledger:
            part.rows.close()
        shares = who.gather(counts)
        if who.rank == 0:
            _join(ledger, index)
            removed = ledger.known().keys() - found.keys()
            ledger.drop(removed)
            rebuilt = graph.bring_up_to_date(ledger, index / graph.FILE, progress)
            counts = Counts(removed=len(removed), pictures=len(ledger), unreadable=ledger.unreadable())
            shares.append(replace(counts, rebuilt=int(rebuilt)))
    return _sum(shares)


def check(index: Path, made_by: dict[str, Any], folder: Path | None = None, moved: bool = False) -> None:
    """Whether vectors of this model, and pictures of this folder, belong in what is there."""
    if not index.exists():
        return
    if not index.is_dir():
        raise SearchError(f"{index}: is a file. An index is a folder: name another place.")
    if not Ledger.is_there(index / FILE):
        if (index / graph.FILE).exists():
            raise damaged(index / FILE, "it is empty or missing")
        if any(path.name != FILE and not path.name.startswith(f"{FILE}-") for path in index.iterdir()):
            raise SearchError(f"{index}: a folder that is no index and not empty. Name another place.")
        return
    with Ledger(index / FILE) as ledger:
        ledger.check_about()
        told = ledger.about
    if told["made_by"]["fingerprint"] != made_by["fingerprint"]:
        theirs, ours = told["made_by"]["checkpoint"], made_by["checkpoint"]
        what = f"with {theirs}" if theirs != ours else f"with {theirs} as it was then"
        raise SearchError(
            f"{index}: was made {what}, which is another model than {ours}: their vectors cannot be compared. Use "
            f"that one (--model), or make a second index: vitlab index {quote(told['folder'])} -o OTHER "
            f"--model {quote(ours)}"
        )
    if folder is not None and told["folder"] != str(folder) and not moved:
        raise SearchError(
            f"{index}: is of the pictures in {told['folder']}, not in {folder}. Make a second index with -o OTHER; or "
            "add --moved, if these are the same pictures in a new place."
        )


def _prepare(index: Path, folder: Path, made_by: dict[str, Any]) -> None:
    """The ledger is there and holds what a killed run has left."""
    if not Ledger.is_there(index / FILE):
        index.mkdir(parents=True, exist_ok=True)
        Ledger.create(index / FILE, {"folder": str(folder), "made_by": made_by}).rows.close()
    with Ledger(index / FILE) as ledger:
        ledger.add_checks()
        _join(ledger, index)
        if ledger.about["folder"] != str(folder):
            ledger.tell("folder", str(folder))


def _look(
    ledger: Ledger,
    part: Ledger,
    folder: Path,
    found: dict[str, Stamp],
    embed: Callable[[list[Path]], Sequence[Embedded]],
    batch_size: int,
    progress: Progress | None,
) -> Counts:
    """Vectors of what is not known yet, written to `part` batch by batch."""
    known = ledger.known()
    todo = [path for path, stamp in found.items() if not _settled(known.get(path), stamp)]
    counts = Counts(unchanged=len(found) - len(todo))
    for first in range(0, len(todo), batch_size):
        entries = [Entry(path, *found[path]) for path in todo[first : first + batch_size]]
        fresh = [entry for entry in entries if not _recognised(entry, known.get(entry.path), ledger, folder, counts)]
        if fresh:
            results = embed([folder / entry.path for entry in fresh])
            for entry, result in zip(fresh, results, strict=True):
                entry.vector, entry.error = result.vector, result.error
                if entry.vector is not None and not np.isfinite(entry.vector).all():
                    entry.vector, entry.error = None, "the model gives NaN or infinity for it."
                if entry.error is not None:  # the name is known, and may change
                    entry.error = entry.error.removeprefix(f"{folder / entry.path}: ")
            counts.embedded += len(fresh)
        part.put(entries)
        if progress is not None:
            progress("pictures", first + len(entries), len(todo))
    return counts


def _settled(before: Known | None, stamp: Stamp) -> bool:
    return before is not None and (before.size, before.mtime) == stamp and before.hash is not None


def _recognised(entry: Entry, before: Known | None, ledger: Ledger, folder: Path, counts: Counts) -> bool:
    """Whether the content is known, under this or another name; or cannot be had. Notes which it is."""
    try:
        entry.hash = digest(folder / entry.path)
    except OSError as error:
        entry.error = f"cannot be opened ({error.strerror})."
    twin = None if entry.hash is None else ledger.twin(entry.hash)
    if twin is not None:
        entry.vector, entry.error = twin
    if before is not None and before.hash == entry.hash:
        counts.unchanged += 1  # only its time is new; or it still cannot be opened
    elif twin is not None:
        counts.moved += 1
    elif before is None:
        counts.new += 1
    else:
        counts.changed += 1
    return twin is not None or entry.hash is None


def _number(path: str) -> int:
    """The same in every process, whatever else they find."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(path), digest_size=8).digest())


def _join(ledger: Ledger, index: Path) -> None:
    for file in sorted(index.glob(PART)):
        if Ledger.is_there(file):
            ledger.absorb(file)
        else:
            file.unlink()


def _sum(shares: list[Counts]) -> Counts:
    total = Counts()
    for share in shares:
        for name, value in vars(share).items():
            setattr(total, name, getattr(total, name) | value if name == "unreadable" else getattr(total, name) + value)
    return total
