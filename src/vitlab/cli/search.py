"""vitlab index, vitlab search, vitlab embed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.console import console, parse_size, print_json, say, say_notes, say_unreadable
from vitlab.cli.options import IMAGE, BatchSize, Data, Device, Html, Json, Size, SourceOptions, model_option
from vitlab.cli.progress import Meter, following_downloads
from vitlab.errors import UsageError
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.training.processes import Processes

PATIENCE = timedelta(days=30)  # one process may finish long before another; torchrun ends all if one fails
GRAPH = "graph of neighbours"


def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Images, at any depth.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="INDEX", help="The index: a folder to make or update.")],
    model: Annotated[str | None, model_option("A CLIP, a SigLIP, or any encoder. Default: the index's.")] = None,
    batch_size: BatchSize = 64,
    image_size: Size = None,
    device: Device = "auto",
    moved: Annotated[bool, typer.Option("--moved", help="The images are the same, in another folder.")] = False,
    json: Json = False,
) -> None:
    """Make a folder of images searchable.

    Run again, it reads only new and changed images.
    """
    from vitlab.search import index_folder

    began = time.perf_counter()
    titles = {"images": folder.resolve().name, "graph": GRAPH}
    with _processes(device) as process, Meter("images") as meter:
        counts = index_folder(
            folder,
            out,
            model,
            batch_size=batch_size,
            moved=moved,
            device=process.device,
            image_size=parse_size(image_size),
            together=process,
            progress=(lambda what, done, total: meter.update(titles[what], done, total)) if process.first else None,
        )
    if not process.first:
        return
    if json:
        report = {"index": str(out), "folder": str(folder), **counts.to_dict()}
        print_json({**report, "seconds": time.perf_counter() - began})
        return
    console().print(f"{out}: {counts.images:,} images can be found")
    for name in ("new", "changed", "moved", "removed", "unchanged"):
        if value := getattr(counts, name):
            console().print(f"  {name:12s}{value:,}")
    if counts.rebuilt:
        say(f"note: {out}: its graph of neighbours was damaged or missing, and was rebuilt.")
    if counts.unreadable:
        console().print(f"  {'unreadable':12s}{len(counts.unreadable):,}")
    say_unreadable(counts.unreadable)


@dataclass(frozen=True)
class ResultFiles:
    """Where results go besides the terminal."""

    sheet: Annotated[
        Path | None, typer.Option("--sheet", metavar="FILE", help="Draw the results: .png, .svg or .pdf.")
    ] = None
    html: Html = None


def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="An index made by vitlab index.")],
    text: Annotated[
        str | None,
        typer.Argument(metavar="WORDS", help='"a dog on a beach", if the index was made with a CLIP or SigLIP.'),
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help=IMAGE)] = None,
    top: Annotated[int, typer.Option(help="Number of images to find.", min=1)] = 10,
    model: Annotated[str | None, model_option("Where the index's model is now.")] = None,
    image_size: Size = None,
    *,
    files: ResultFiles,
    json: Json = False,
) -> None:
    """Find images by text, or by a similar image."""
    from vitlab.checkpoints.native import write_whole
    from vitlab.explain import draw
    from vitlab.search import search_index

    sheet, html = files.sheet, files.html
    if sheet is not None:
        draw.check_kind(sheet)
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{html}: name an .html file.")
    size = parse_size(image_size)
    with Meter("images") as meter:
        progress = lambda what, done, total: meter.update(GRAPH, done, total)
        result = search_index(index, text, image=image, top=top, model=model, progress=progress, image_size=size)
    say_notes(result.notes)
    if not result.hits:
        say(f"{index}: holds no image that could be read.")
    if json:
        query = {"text": text} if text is not None else {"image": image}
        hits = [{"image": str(hit.path), "score": hit.score} for hit in result.hits]
        about = {"index": str(index), "folder": str(result.folder), "model": result.model, "pictures": result.images}
        print_json({**about, "query": query, "hits": hits})
    else:
        for hit in result.hits:
            console().print(f"{hit.score:6.3f}  {one_line(str(hit.path))}", soft_wrap=True)
    if sheet is not None:
        draw.save(result.sheet(), sheet)
    if html is not None:
        page = result.page()
        html.parent.mkdir(parents=True, exist_ok=True)
        write_whole(html, lambda path: path.write_text(page, encoding="utf-8"))
    if written := [str(path) for path in (sheet, html) if path is not None]:
        say(f"written: {', '.join(written)}")


def embed(
    data: Data,
    source: SourceOptions,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The table: out.parquet.")],
    model: Annotated[str | None, model_option("Any model. Default: bundled:dino.")] = None,
    image_size: Size = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Write the embeddings of all images to a Parquet table.

    After an interruption the same command continues; torchrun shares the work.
    """
    from vitlab.images.listing import open_items
    from vitlab.search.api import DEFAULT_MODEL, check_table_name, embed_dataset

    check_table_name(out)
    began = time.perf_counter()
    with _processes(device) as process, Meter("images") as meter:
        if model is None and process.first:
            say(f"note: without --model it is {DEFAULT_MODEL}, a small model for small images.")
        with following_downloads():
            items = open_items(data, **vars(source))
        say_notes(items.notes if process.first else ())
        table = embed_dataset(
            items,
            out,
            model or DEFAULT_MODEL,
            batch_size=batch_size,
            device=process.device,
            image_size=parse_size(image_size),
            together=process,
            progress=(lambda what, done, total: meter.update(data, done, total)) if process.first else None,
        )
    if not process.first:
        return
    if json:
        print_json({"out": str(out), **table.to_dict(), "seconds": time.perf_counter() - began})
        return
    numbers = f"{table.width} numbers each; {table.embedded:,} of them made now"
    console().print(f"{out}: {table.images:,} images, {numbers}", soft_wrap=True)
    say_unreadable(table.unreadable)


@contextmanager
def _processes(device: str) -> Iterator[Processes]:
    """The processes of torchrun, or this one alone. Ctrl-C says how to continue."""
    from vitlab.training.processes import start, stop

    process = start(device, patience=PATIENCE)
    try:
        yield process
    except KeyboardInterrupt:
        say("vitlab: stopped. The work so far is kept: the same command continues.")
        raise SystemExit(130) from None
    finally:
        stop()
