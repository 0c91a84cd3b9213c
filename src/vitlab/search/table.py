"""All pictures of a source -> a Parquet table of their vectors, by one process or many, on one machine or many.

The list is cut into chunks; process r of w takes every w-th. A chunk is written when it is done: a run that is killed
loses at most the chunks it was at, and goes on with any number of processes. In the end each process joins its chunks:
out.parquet is a file where there was one process, and a folder with a file of each where there were several; whatever
reads Parquet reads both alike.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitlab.images.read import ImageError
from vitlab.parsing import parse_json
from vitlab.search.graph import Progress
from vitlab.search.index import Alone, Embedded, Together
from vitlab.search.ledger import SearchError

CHUNK = 512  # pictures
KEY = b"vitlab"  # of the table's metadata: what it was made of


class Listed(Protocol):
    """A list of pictures, as vitlab.images.listing gives it."""

    @property
    def name(self) -> str: ...
    def __len__(self) -> int: ...
    def about(self, number: int) -> tuple[str, str | None, str | None]: ...  # path, split, label
    def source(self, number: int) -> Any: ...
    def digest(self) -> str: ...


@dataclass
class Written:
    pictures: int
    width: int  # E
    files: list[str]
    embedded: int = 0  # in this run; the others were there
    unreadable: dict[str, str] = field(default_factory=dict)  # path -> what is wrong


def write_table(
    out: str | Path,
    items: Listed,
    made_by: dict[str, Any],
    embed: Callable[[list[Any]], Sequence[Embedded]],
    *,
    batch_size: int = 64,
    chunk: int = CHUNK,
    together: Together | None = None,
    progress: Progress | None = None,
) -> Written:
    """`made_by` needs "checkpoint" and "fingerprint". A table that is there and is of the same is left as it is."""
    _arrow()
    if batch_size < 1 or chunk < 1:
        raise ValueError(f"batch_size={batch_size} and chunk={chunk} must be at least 1.")
    who, out = together or Alone(), Path(out).expanduser()
    about = {"data": items.name, "pictures": len(items), "names": items.digest(), "made_by": made_by, "chunk": chunk}
    parts = out.with_name(f"{out.name}.parts")
    there = out.exists()
    who.wait()  # until all have looked
    if there:
        _check_same(out, _read_about(out), about)
        if who.rank == 0 and parts.exists():
            shutil.rmtree(parts)
        return _written(out)
    if who.rank == 0:
        _prepare(parts, about)
    who.wait()
    _check_same(parts, _begun(parts), about)
    numbers = [k for k in range(-(-len(items) // chunk)) if k % who.world == who.rank]
    done = _fill(parts, items, numbers, about, embed, batch_size, progress)
    name = "whole.parquet" if who.world == 1 else f"part-{who.rank:05d}-of-{who.world:05d}.parquet"
    _join(parts / "joined" / name, [_chunk_file(parts, k) for k in numbers])
    embedded = sum(who.gather(done))  # and by that all are here
    if who.rank == 0:
        (parts / "joined" / name if who.world == 1 else parts / "joined").rename(out)
        shutil.rmtree(parts)
    who.wait()
    found = _written(out)
    found.embedded = embedded
    return found


def _prepare(parts: Path, about: dict[str, Any]) -> None:
    from vitlab.checkpoints.native import write_whole

    parts.mkdir(parents=True, exist_ok=True)
    if (parts / "joined").exists():  # of a run that was killed while joining
        shutil.rmtree(parts / "joined")
    (parts / "joined").mkdir()
    if not (parts / "about.json").exists():
        text = json.dumps(about, indent=2)
        write_whole(parts / "about.json", lambda path: path.write_text(text, encoding="utf-8"))


def _begun(parts: Path) -> dict[str, Any]:
    """What a table that is not finished says of itself."""
    try:
        found = parse_json((parts / "about.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SearchError(f"{parts}: about.json is damaged ({error}). Remove {parts} and start again.") from None
    return found if isinstance(found, dict) else {}


def _check_same(place: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    def refuse(why: str) -> SearchError:
        return SearchError(f"{place}: {why}. Name another place with -o, or remove it.")

    if not isinstance(found.get("made_by"), dict) or not {"data", "names", "chunk"} <= found.keys():
        raise refuse("does not say what it is of: it is damaged")
    if found["made_by"].get("fingerprint") != wanted["made_by"]["fingerprint"]:
        raise refuse(f"was made with another model, {found['made_by'].get('checkpoint')}")
    if (found["data"], found["names"]) != (wanted["data"], wanted["names"]):
        same = found["data"] == wanted["data"]
        raise refuse(f"is of {found['data']}" + (", whose pictures have changed since" if same else ""))
    if found["chunk"] != wanted["chunk"]:
        raise refuse(f"was begun in chunks of {found['chunk']}, not of {wanted['chunk']}")


def _fill(
    parts: Path,
    items: Listed,
    numbers: Iterable[int],
    about: dict[str, Any],
    embed: Callable[[list[Any]], Sequence[Embedded]],
    batch_size: int,
    progress: Progress | None,
) -> int:
    """Write the chunks that are not there; how many pictures that were."""
    missing = [k for k in numbers if not _chunk_file(parts, k).exists()]
    sizes = {k: min(about["chunk"], len(items) - k * about["chunk"]) for k in missing}
    (grey,) = embed([np.full((8, 8, 3), 128, dtype=np.uint8)])
    assert grey.vector is not None
    done = 0
    for k in missing:
        rows: list[dict[str, Any]] = []
        for first in range(0, sizes[k], batch_size):
            start = k * about["chunk"] + first
            rows += _rows(items, range(start, start + min(batch_size, sizes[k] - first)), embed)
            if progress is not None:
                progress("pictures", done + len(rows), sum(sizes.values()))
        _write(_chunk_file(parts, k), rows, len(grey.vector), about)
        done += len(rows)
    return done


def _rows(items: Listed, numbers: range, embed: Callable[[list[Any]], Sequence[Embedded]]) -> list[dict[str, Any]]:
    rows, sources, read = [], [], []
    for number in numbers:
        path, split, label = (None if text is None else _plain(text) for text in items.about(number))
        rows.append({"number": number, "path": path, "split": split, "label": label, "embedding": None, "error": None})
        try:
            sources.append(items.source(number))
            read.append(rows[-1])
        except ImageError as error:  # of one inside another file
            rows[-1]["error"] = _plain(str(error))
    for row, source, found in zip(read, sources, embed(sources) if sources else [], strict=True):
        row["embedding"] = found.vector
        row["error"] = None if found.error is None else _plain(found.error.removeprefix(f"{source}: "))
    return rows


def _write(file: Path, rows: list[dict[str, Any]], width: int, about: dict[str, Any]) -> None:
    from vitlab.checkpoints.native import write_whole

    pa, pq = _arrow()
    fields = [pa.field("number", pa.int64()), pa.field("path", pa.string())]
    fields += [pa.field("split", pa.string()), pa.field("label", pa.string())]
    fields += [pa.field("embedding", pa.list_(pa.float32(), width)), pa.field("error", pa.string())]
    schema = pa.schema(fields, metadata={KEY: json.dumps(about).encode()})
    table = pa.Table.from_pylist(rows, schema)
    write_whole(file, lambda path: pq.write_table(table, path))


def _join(file: Path, chunks: Sequence[Path]) -> None:
    """One chunk after another, so that memory holds one."""
    _, pq = _arrow()
    if not chunks:  # more processes than chunks
        return
    with pq.ParquetWriter(file, pq.read_schema(chunks[0])) as writer:
        for chunk in chunks:
            writer.write_table(pq.read_table(chunk))


def _written(out: Path) -> Written:
    _, pq = _arrow()
    files = _files(out)
    pictures, unreadable = 0, {}
    for file in files:
        with pq.ParquetFile(file) as opened:
            pictures += opened.metadata.num_rows
            for batch in opened.iter_batches(columns=["path", "error"]):
                pairs = zip(batch["path"].to_pylist(), batch["error"].to_pylist(), strict=True)
                unreadable |= {path: error for path, error in pairs if error is not None}
    width = pq.read_schema(files[0]).field("embedding").type.list_size
    return Written(pictures, width, [str(file) for file in files], unreadable=unreadable)


def _read_about(out: Path) -> dict[str, Any]:
    _, pq = _arrow()
    files = _files(out)
    try:
        found = parse_json(pq.read_schema(files[0]).metadata[KEY])
        return {**found}
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        raise SearchError(f"{out}: is there and no table of vitlab embed. Name another place with -o.") from None


def _files(out: Path) -> list[Path]:
    return sorted(out.glob("part-*.parquet")) if out.is_dir() else [out]


def _chunk_file(parts: Path, number: int) -> Path:
    return parts / f"chunk-{number:08d}.parquet"


def _plain(text: str) -> str:
    """Paths need not be UTF-8, but tables are."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise SearchError("tables need pyarrow, which is not installed: pip install 'vitlab[embed]'.") from None
    return pyarrow, pyarrow.parquet
