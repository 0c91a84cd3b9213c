"""Embed all images of a source into a Parquet table, with one or many processes, on one or many machines.

The images are split into chunks; process r of w takes every w-th. A chunk is written when it is done: a killed run
loses at most its current chunks and resumes with any number of processes. At the end each process joins its chunks:
out.parquet is a file for one process, and a folder of files for several. Parquet readers accept both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from vitlab.errors import ImageError, SearchError, UsageError
from vitlab.images.listing import Items
from vitlab.optional import require
from vitlab.parsing import parse_json
from vitlab.printable import valid_utf8
from vitlab.search.database import MadeBy
from vitlab.search.graph import Progress
from vitlab.search.index import Embed
from vitlab.training.processes import Processes

CHUNK = 512  # images
KEY = b"vitlab"  # of the table's metadata


class TableAbout(TypedDict):
    """What a table was made of, written into its metadata."""

    data: str
    pictures: int
    names: str  # digest of the images' names
    made_by: MadeBy
    chunk: int


@dataclass
class TableSummary:
    data: str  # the source's name
    model: str
    images: int
    width: int  # E
    files: list[str]
    embedded: int = 0  # in this run
    unreadable: dict[str, str] = field(default_factory=dict)  # path -> error

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab embed --json` prints it."""
        return {"pictures" if name == "images" else name: value for name, value in vars(self).items()}


def write_table(
    out: str | Path,
    items: Items,
    made_by: MadeBy,
    embed: Embed,
    *,
    batch_size: int = 64,
    chunk: int = CHUNK,
    together: Processes | None = None,
    progress: Progress | None = None,
) -> TableSummary:
    """An existing table of the same images and model is kept."""
    _arrow()
    if batch_size < 1 or chunk < 1:
        raise UsageError(f"batch_size={batch_size} and chunk={chunk} must be at least 1.")
    group, out = together or Processes(), Path(out).expanduser()
    about = TableAbout(data=items.name, pictures=len(items), names=items.digest(), made_by=made_by, chunk=chunk)
    parts = out.with_name(f"{out.name}.parts")
    exists = out.exists()
    group.wait()  # until all processes have checked
    if exists:
        _check_same(out, _read_about(out), about)
        if group.rank == 0 and parts.exists():
            shutil.rmtree(parts)
        return _summary(out, items.name, made_by)
    if group.rank == 0:
        _prepare(parts, about)
    group.wait()
    _check_same(parts, _read_unfinished(parts), about)
    numbers = range(group.rank, -(-len(items) // chunk), group.world)
    done = _fill(parts, items, numbers, about, embed, batch_size, progress)
    name = "whole.parquet" if group.world == 1 else f"part-{group.rank:05d}-of-{group.world:05d}.parquet"
    _join(parts / "joined" / name, [_chunk_file(parts, k) for k in numbers])
    embedded = sum(group.gather(done))  # also a barrier
    if group.rank == 0:
        (parts / "joined" / name if group.world == 1 else parts / "joined").rename(out)
        shutil.rmtree(parts)
    group.wait()
    return replace(_summary(out, items.name, made_by), embedded=embedded)


def _prepare(parts: Path, about: TableAbout) -> None:
    from vitlab.checkpoints.native import write_whole

    parts.mkdir(parents=True, exist_ok=True)
    if (parts / "joined").exists():  # of a run that was killed while joining
        shutil.rmtree(parts / "joined")
    (parts / "joined").mkdir()
    if not (parts / "about.json").exists():
        text = json.dumps(about, indent=2)
        write_whole(parts / "about.json", lambda path: path.write_text(text, encoding="utf-8"))


def _read_unfinished(parts: Path) -> dict[str, Any]:
    """Description of an unfinished table."""
    try:
        about = parse_json((parts / "about.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SearchError(f"{parts}: about.json is damaged ({error}). Delete {parts} and start again.") from None
    return about if isinstance(about, dict) else {}


def _check_same(place: Path, old: Mapping[str, object], new: TableAbout) -> None:
    def refuse(why: str) -> SearchError:
        return SearchError(f"{place}: {why}. Name another place with -o, or delete it.")

    made_by = old.get("made_by")
    if not isinstance(made_by, dict) or not {"data", "names", "chunk"} <= old.keys():
        raise refuse("is damaged: it does not name its images and its model")
    if made_by.get("fingerprint") != new["made_by"]["fingerprint"]:
        raise refuse(f"was made with another model, {made_by.get('checkpoint')}")
    if (old["data"], old["names"]) != (new["data"], new["names"]):
        same = old["data"] == new["data"]
        raise refuse(f"is of {old['data']}" + (", whose images have changed since" if same else ""))
    if old["chunk"] != new["chunk"]:
        raise refuse(f"was begun in chunks of {old['chunk']}, not of {new['chunk']}")


def _fill(
    parts: Path,
    items: Items,
    numbers: Iterable[int],
    about: TableAbout,
    embed: Embed,
    batch_size: int,
    progress: Progress | None,
) -> int:
    """Write the missing chunks and return their number of images."""
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
                progress("images", done + len(rows), sum(sizes.values()))
        _write(_chunk_file(parts, k), rows, len(grey.vector), about)
        done += len(rows)
    return done


def _rows(items: Items, numbers: range, embed: Embed) -> list[dict[str, Any]]:
    rows, sources, read = [], [], []
    for number in numbers:
        path, split, label = (None if text is None else valid_utf8(text) for text in items.about(number))
        rows.append({"number": number, "path": path, "split": split, "label": label, "embedding": None, "error": None})
        try:
            sources.append(items.source(number))
            read.append(rows[-1])
        except ImageError as error:  # an image inside a shard
            rows[-1]["error"] = valid_utf8(str(error))
    for row, source, result in zip(read, sources, embed(sources) if sources else [], strict=True):
        row["embedding"] = result.vector
        row["error"] = None if result.error is None else valid_utf8(result.error.removeprefix(f"{source}: "))
    return rows


def _write(file: Path, rows: Sequence[Mapping[str, object]], width: int, about: TableAbout) -> None:
    from vitlab.checkpoints.native import write_whole

    pa, pq = _arrow()
    kinds = dict(number=pa.int64(), path=pa.string(), split=pa.string(), label=pa.string())
    kinds |= dict(embedding=pa.list_(pa.float32(), width), error=pa.string())
    schema = pa.schema(list(kinds.items()), metadata={KEY: json.dumps(about).encode()})
    table = pa.Table.from_pylist(rows, schema)
    write_whole(file, lambda path: pq.write_table(table, path))


def _join(file: Path, chunks: Sequence[Path]) -> None:
    """Join the chunks with one in memory at a time."""
    _, pq = _arrow()
    if not chunks:  # more processes than chunks
        return
    with pq.ParquetWriter(file, pq.read_schema(chunks[0])) as writer:
        for chunk in chunks:
            writer.write_table(pq.read_table(chunk))


def _summary(out: Path, data: str, made_by: MadeBy) -> TableSummary:
    _, pq = _arrow()
    files = _files(out)
    images, unreadable = 0, {}
    for file in files:
        with pq.ParquetFile(file) as opened:
            images += opened.metadata.num_rows
            for batch in opened.iter_batches(columns=["path", "error"]):
                pairs = zip(batch["path"].to_pylist(), batch["error"].to_pylist(), strict=True)
                unreadable |= {path: error for path, error in pairs if error is not None}
    width = pq.read_schema(files[0]).field("embedding").type.list_size
    paths = [str(file) for file in files]
    return TableSummary(data, made_by["checkpoint"], images, width, paths, unreadable=unreadable)


def _read_about(out: Path) -> dict[str, Any]:
    _, pq = _arrow()
    files = _files(out)
    try:
        return {**parse_json(pq.read_schema(files[0]).metadata[KEY])}
    except (OSError, IndexError, KeyError, TypeError, ValueError):
        raise SearchError(f"{out}: exists and is not a table of vitlab embed. Name another place with -o.") from None


def _files(out: Path) -> list[Path]:
    return sorted(out.glob("part-*.parquet")) if out.is_dir() else [out]


def _chunk_file(parts: Path, number: int) -> Path:
    return parts / f"chunk-{number:08d}.parquet"


def _arrow() -> tuple[Any, Any]:
    require("a Parquet table", "pyarrow")
    import pyarrow
    import pyarrow.parquet

    return pyarrow, pyarrow.parquet
