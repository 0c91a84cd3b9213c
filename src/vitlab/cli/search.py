"""vitlab index, vitlab search, vitlab embed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli.console import console, print_json, say, say_notes, say_unreadable
from vitlab.cli.options import AllowCut, AllowOutside, BatchSize, Data, Device, Json, SourcePath, model_option
from vitlab.cli.progress import Meter, following_downloads
from vitlab.errors import CheckpointError, ImageError, UsageError
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.explain import draw
    from vitlab.search import Counts, Hit
    from vitlab.training.processes import Processes

PATIENCE = timedelta(days=30)  # one process may finish long before another; torchrun ends all if one fails
DEFAULT = "bundled:dino"
OTHER_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".npy", ".npz", ".txt")


def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Images, at any depth.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="INDEX", help="The index: a folder to make or update.")],
    model: Annotated[str | None, model_option("A CLIP, or any encoder. Default: the index's.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch; a killed run repeats one batch.", min=1)] = 64,
    device: Device = "auto",
    moved: Annotated[bool, typer.Option("--moved", help="The images are the same, in another folder.")] = False,
    json: Json = False,
) -> None:
    """Make a folder of images searchable.

    Run again, it reads only new and changed images.
    """
    from vitlab.inference import embed
    from vitlab.search import open_database, update

    began = time.perf_counter()
    if model is None:
        if not out.exists():
            raise UsageError(f"{out} is a new index: which model makes it? Add --model CHECKPOINT.")
        with open_database(out) as database:  # not its graph: `update` rebuilds that and says so
            model = str(database.about["made_by"]["checkpoint"])
    with _processes(device) as process, Meter("images") as meter:
        encoder, made_by = open_encoder(model, quiet=not process.first)
        titles = {"pictures": folder.resolve().name, "graph": "graph of neighbours"}
        counts = update(
            out,
            folder,
            made_by,
            partial(embed, encoder.to(process.device), batch_size=batch_size),
            batch_size=batch_size,
            moved=moved,
            together=process,
            progress=(lambda what, done, total: meter.update(titles[what], done, total)) if process.first else None,
        )
    if not process.first:
        return
    if json:
        result = {"index": str(out), "folder": str(folder), "model": made_by["checkpoint"], **vars(counts)}
        print_json({**result, "seconds": time.perf_counter() - began})
    else:
        _show_counts(counts, out)


def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="An index made by vitlab index.")],
    text: Annotated[
        str | None, typer.Argument(metavar="WORDS", help='"a dog on a beach", if the index was made with a CLIP.')
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="An image, or digits#3.")] = None,
    top: Annotated[int, typer.Option(help="Number of images to find.", min=1)] = 10,
    model: Annotated[str | None, model_option("Where the index's model is now.")] = None,
    sheet: Annotated[
        Path | None, typer.Option("--sheet", metavar="FILE", help="Draw the results: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the results to a page.")] = None,
    json: Json = False,
) -> None:
    """Find images by text, or by a similar image."""
    from vitlab.checkpoints.native import write_whole
    from vitlab.explain import draw
    from vitlab.images.read import read_image
    from vitlab.images.samples import is_sample, open_sample
    from vitlab.inference import embed, embed_text
    from vitlab.search import Index, check

    if (text is None) == (image is None):
        raise UsageError('ask in words or with a picture: vitlab search INDEX "a dog on a beach", or --image x.jpg.')
    if text is not None and not text.strip():
        raise UsageError('the question is empty: vitlab search INDEX "a dog on a beach".')
    if sheet is not None:
        draw.check_kind(sheet)
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{html}: name an .html file.")
    with Meter("images") as meter:
        opened = Index(index, lambda what, done, total: meter.update("graph of neighbours", done, total))
    say_notes(opened.notes)
    with opened:
        if text is not None and not opened.made_by.get("reads_text", True):
            raise UsageError(
                f"{index}: was made with {opened.made_by['checkpoint']}, a model that knows pictures and no words. Ask "
                "with a picture: --image x.jpg; or index with a CLIP: vitlab index FOLDER -o OTHER --model CLIP"
            )
        try:
            encoder, made_by = open_encoder(model or opened.made_by["checkpoint"])
        except CheckpointError as error:
            hint = "" if model else " The index was made with it; where is it now? Add --model CHECKPOINT."
            raise UsageError(f"{error}{hint}") from None
        query = None
        if image is not None:
            query = open_sample(image).picture if is_sample(image) else read_image(image)
        vector = embed_text(encoder, text)[0] if text is not None else embed(encoder, [query])[0].vector
        check(index, made_by)
        hits = opened.search(vector, top)
        total, folder = len(opened), opened.folder
    if not hits:
        say(f"{index}: holds no image that could be read.")
    if json:
        asked = {"text": text} if text is not None else {"image": image}
        listed = [{"image": str(hit.path), "score": hit.score} for hit in hits]
        about = {"index": str(index), "folder": str(folder), "model": made_by["checkpoint"], "pictures": total}
        print_json({**about, "query": asked, "hits": listed})
    else:
        for hit in hits:
            console().print(f"{hit.score:6.3f}  {one_line(str(hit.path))}", soft_wrap=True)
    if sheet is not None or html is not None:
        title = f"“{text}”" if text is not None else f"Like {Path(str(image)).name}"
        lines = [f"{len(hits)} of {total:,} images in {folder}, by {made_by['checkpoint']}"]
        results = [_result(hit, folder) for hit in hits]
        if sheet is not None:
            draw.save(draw.contact_sheet(results, title=title, lines=lines, query=query), sheet)
        if html is not None:
            page = draw.contact_page(results, title=title, lines=lines, query=query)
            html.parent.mkdir(parents=True, exist_ok=True)
            write_whole(html, lambda path: path.write_text(page, encoding="utf-8"))
        say(f"written: {', '.join(str(path) for path in (sheet, html) if path is not None)}")


def embed(
    data: Data,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The table: out.parquet.")],
    model: Annotated[str | None, model_option("Any model. Default: bundled:dino.")] = None,
    path: SourcePath = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    allow_cut: AllowCut = False,
    allow_outside: AllowOutside = False,
    json: Json = False,
) -> None:
    """Write the embeddings of all images to a Parquet table.

    After an interruption the same command continues; torchrun shares the work.
    """
    from vitlab.images.listing import open_items
    from vitlab.inference import embed
    from vitlab.search.table import write_table

    if out.suffix.lower() in OTHER_TABLES:
        raise UsageError(f"{out}: the table is written as Parquet: name it {out.with_suffix('.parquet')}.")
    began = time.perf_counter()
    with _processes(device) as process, Meter("images") as meter:
        if model is None and process.first:
            say(f"note: without --model it is {DEFAULT}, a small model for small images.")
        encoder, made_by = open_encoder(model or DEFAULT, quiet=not process.first)
        with following_downloads():
            items = open_items(data, path=path, allow_cut=allow_cut, allow_outside=allow_outside)
        say_notes(items.notes if process.first else ())
        table = write_table(
            out,
            items,
            made_by,
            partial(embed, encoder.to(process.device), batch_size=batch_size),
            batch_size=batch_size,
            together=process,
            progress=(lambda what, done, total: meter.update(data, done, total)) if process.first else None,
        )
    if not process.first:
        return
    if json:
        about = {"out": str(out), "data": items.name, "model": made_by["checkpoint"], **vars(table)}
        print_json({**about, "seconds": time.perf_counter() - began})
        return
    console().print(
        f"{out}: {table.pictures:,} images, {table.width} numbers each; {table.embedded:,} of them made now",
        soft_wrap=True,
    )
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


def open_encoder(checkpoint: str, quiet: bool = False) -> tuple[Any, dict[str, Any]]:
    """The model, and what an index remembers of it. Of a model that learned without labels, the encoder; it may be a
    file that vitlab export has written to give features.
    """
    from vitlab.checkpoints.load import load_with_report
    from vitlab.export.loader import is_export, open_export
    from vitlab.inference import encoder_of, fingerprint, reads_text
    from vitlab.models.base import features_of

    path = Path(checkpoint).expanduser()
    checkpoint = str(path.absolute()) if path.exists() else checkpoint
    if is_export(checkpoint):
        model = open_export(checkpoint)
        features_of(model)  # or an error that says how to export it
    else:
        model, report = load_with_report(checkpoint)
        say_notes(() if quiet else report.notes)
        model = encoder_of(model)
    about = {"checkpoint": checkpoint, "fingerprint": fingerprint(model), "family": model.family}
    return model, {**about, "reads_text": reads_text(model)}


def _result(hit: Hit, folder: Path) -> draw.SearchHit:
    from vitlab.explain import draw
    from vitlab.images.read import read_image

    try:
        image = read_image(hit.path)
    except ImageError:  # gone or changed since
        image = None
    return draw.SearchHit(image, hit.path.relative_to(folder).as_posix(), hit.score, hit.path.as_uri())


def _show_counts(counts: Counts, index: Path) -> None:
    console().print(f"{index}: {counts.pictures:,} images can be found")
    for name in ("new", "changed", "moved", "removed", "unchanged"):
        if value := getattr(counts, name):
            console().print(f"  {name:12s}{value:,}")
    if counts.rebuilt:
        say(f"note: {index}: its graph of neighbours was damaged or missing, and was rebuilt.")
    if counts.unreadable:
        console().print(f"  {'unreadable':12s}{len(counts.unreadable):,}")
    say_unreadable(counts.unreadable)
