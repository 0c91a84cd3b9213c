"""vitlab index, vitlab search."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.native import write_whole
from vitlab.cli.console import out, print_json, say
from vitlab.cli.progress import Meter
from vitlab.errors import CheckpointError, ImageError, UsageError
from vitlab.explain import draw
from vitlab.export.loader import is_export, open_export
from vitlab.images.read import read_image
from vitlab.images.samples import is_sample, open_sample
from vitlab.inference import embed, embed_text, encoder_of, fingerprint, reads_text
from vitlab.models.base import features_of
from vitlab.printable import one_line
from vitlab.search import Counts, Hit, Index, check, open_database, update
from vitlab.training.processes import start, stop

PATIENCE = timedelta(days=30)  # one process may be done long before another; torchrun ends all if one fails
NAMED = 10  # unreadable pictures that are named; --json names all


def index(
    folder: Path, place: Path, checkpoint: str | None, batch_size: int, device: str, moved: bool, json: bool
) -> None:
    began = time.perf_counter()
    if checkpoint is None:
        if not place.exists():
            raise UsageError(f"{place} is a new index: which model makes it? Add --model CHECKPOINT.")
        with open_database(place) as database:  # not its graph: `update` rebuilds that and says so
            checkpoint = str(database.about["made_by"]["checkpoint"])
    who = start(device, patience=PATIENCE)
    try:
        model, made_by = open_encoder(checkpoint, quiet=not who.first)
        names = {"pictures": folder.resolve().name, "graph": "graph of neighbours"}
        with Meter("pictures") as meter:
            counts = update(
                place,
                folder,
                made_by,
                partial(embed, model.to(who.device), batch_size=batch_size),
                batch_size=batch_size,
                moved=moved,
                together=who,
                progress=(lambda what, done, total: meter.update(names[what], done, total)) if who.first else None,
            )
    except KeyboardInterrupt:
        say("vitlab: stopped. What is done is kept: the same command goes on from here.")
        raise SystemExit(130) from None
    finally:
        stop()
    if who.first:
        found = {"index": str(place), "folder": str(folder), "model": made_by["checkpoint"], **vars(counts)}
        found |= {"seconds": time.perf_counter() - began}
        print_json(found) if json else _show_counts(counts, place)


def search(
    place: Path,
    text: str | None,
    image: str | None,
    top: int,
    checkpoint: str | None,
    sheet: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    if (text is None) == (image is None):
        raise UsageError('ask in words or with a picture: vitlab search INDEX "a dog on a beach", or --image x.jpg.')
    if text is not None and not text.strip():
        raise UsageError('the question is empty: vitlab search INDEX "a dog on a beach".')
    if sheet is not None:
        draw.check_kind(sheet)
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{html}: name an .html file.")
    with Meter("pictures") as meter:
        opened = Index(place, lambda what, done, total: meter.update("graph of neighbours", done, total))
    for note in opened.notes:
        say(f"note: {note}")
    with opened as there:
        if text is not None and not there.made_by.get("reads_text", True):
            raise UsageError(
                f"{place}: was made with {there.made_by['checkpoint']}, a model that knows pictures and no words. Ask "
                "with a picture: --image x.jpg; or index with a CLIP: vitlab index FOLDER -o OTHER --model CLIP"
            )
        try:
            model, made_by = open_encoder(checkpoint or there.made_by["checkpoint"])
        except CheckpointError as error:
            hint = "" if checkpoint else " The index was made with it; where is it now? Add --model CHECKPOINT."
            raise UsageError(f"{error}{hint}") from None
        asked = None if image is None else _picture(image)
        if text is not None:
            vector: Any = embed_text(model, text)[0]
        else:
            (seen,) = embed(model, [asked])  # type: ignore[list-item]
            vector = seen.vector
        check(place, made_by)
        hits = there.search(vector, top)
        count, below = len(there), there.folder
    if not hits:
        say(f"{place}: holds no picture that could be read.")
    if json:
        query = {"text": text} if text is not None else {"image": image}
        listed = [{"image": str(hit.path), "score": hit.score} for hit in hits]
        about = {"index": str(place), "folder": str(below), "model": made_by["checkpoint"], "pictures": count}
        print_json({**about, "query": query, "hits": listed})
    else:
        _show_hits(hits)
    if sheet is not None or html is not None:
        title = f"“{text}”" if text is not None else f"Like {Path(str(image)).name}"
        lines = [f"{len(hits)} of {count:,} pictures in {below}, by {made_by['checkpoint']}"]
        found = [_found(hit, below) for hit in hits]
        if sheet is not None:
            draw.save(draw.contact_sheet(found, title=title, lines=lines, query=asked), sheet)
        if html is not None:
            page = draw.contact_page(found, title=title, lines=lines, query=asked)
            html.parent.mkdir(parents=True, exist_ok=True)
            write_whole(html, lambda path: path.write_text(page, encoding="utf-8"))
        say(f"written: {', '.join(str(path) for path in (sheet, html) if path is not None)}")


def open_encoder(checkpoint: str, quiet: bool = False) -> tuple[Any, dict[str, Any]]:
    """The model, and what the index remembers of it. Of a model that learned without labels, the encoder; it may be a
    file that vitlab export has written to give features.
    """
    path = Path(checkpoint).expanduser()
    checkpoint = str(path.absolute()) if path.exists() else checkpoint
    if is_export(checkpoint):
        model = open_export(checkpoint)
        features_of(model)  # or an error that says how to export it
    else:
        model, report = load_with_report(checkpoint)
        for note in () if quiet else report.notes:
            say(f"note: {note}")
        model = encoder_of(model)
    about = {"checkpoint": checkpoint, "fingerprint": fingerprint(model), "family": model.family}
    return model, {**about, "reads_text": reads_text(model)}


def _picture(image: str) -> Any:
    return open_sample(image).picture if is_sample(image) else read_image(image)


def _found(hit: Hit, folder: Path) -> draw.SearchHit:
    try:
        picture = read_image(hit.path)
    except ImageError:  # gone or changed since
        picture = None
    return draw.SearchHit(picture, hit.path.relative_to(folder).as_posix(), hit.score, hit.path.as_uri())


def _show_counts(counts: Counts, place: Path) -> None:
    console = out(markup=False)
    console.print(f"{place}: {counts.pictures:,} pictures can be found")
    for name in ("new", "changed", "moved", "removed", "unchanged"):
        if value := getattr(counts, name):
            console.print(f"  {name:12s}{value:,}")
    if counts.rebuilt:
        say(f"note: {place}: its graph of neighbours was damaged or missing, and was rebuilt.")
    if counts.unreadable:
        console.print(f"  {'unreadable':12s}{len(counts.unreadable):,}")
    name_unreadable(counts.unreadable)


def name_unreadable(found: dict[str, str]) -> None:
    for path, error in list(found.items())[:NAMED]:
        say(f"vitlab: {one_line(path)}: {one_line(error)}")
    if len(found) > NAMED:
        say(f"and {len(found) - NAMED} more (--json names all)")


def _show_hits(hits: list[Hit]) -> None:
    console = out(markup=False)
    for hit in hits:
        console.print(f"{hit.score:6.3f}  {one_line(str(hit.path))}", soft_wrap=True)
