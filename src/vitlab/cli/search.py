"""vitlab index, vitlab search."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from vitlab.checkpoints.native import write_whole
from vitlab.cli.console import out, print_json, say, warnings_as_notes
from vitlab.cli.progress import Meter
from vitlab.errors import UsageError
from vitlab.explain import draw
from vitlab.printable import one_line
from vitlab.search import Counts, Hit, index_folder, search_index
from vitlab.training.processes import Processes, start, stop

PATIENCE = timedelta(days=30)  # one process may be done long before another; torchrun ends all if one fails
NAMED = 10  # unreadable pictures that are named; --json names all


@contextmanager
def processes(device: str) -> Iterator[Processes]:
    """The processes of torchrun, or one. An interrupted command can be continued."""
    group = start(device, patience=PATIENCE)
    try:
        with warnings_as_notes(group.first):
            yield group
    except KeyboardInterrupt:
        say("vitlab: stopped. What is done is kept: the same command goes on from here.")
        raise SystemExit(130) from None
    finally:
        stop()


def index(
    folder: Path, place: Path, checkpoint: str | None, batch_size: int, device: str, moved: bool, json: bool
) -> None:
    began = time.perf_counter()
    names = {"pictures": folder.resolve().name, "graph": "graph of neighbours"}
    with processes(device) as group, Meter("pictures") as meter:
        counts = index_folder(
            folder,
            place,
            checkpoint,
            batch_size=batch_size,
            moved=moved,
            device=group.device,
            together=group,
            progress=(lambda what, done, total: meter.update(names[what], done, total)) if group.first else None,
        )
    if group.first:
        report = {"index": str(place), "folder": str(folder), **vars(counts), "seconds": time.perf_counter() - began}
        print_json(report) if json else _show_counts(counts, place)


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
    if sheet is not None:
        draw.check_kind(sheet)
    if html is not None and html.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"{html}: name an .html file.")
    with Meter("pictures") as meter, warnings_as_notes():
        progress = lambda what, done, total: meter.update("graph of neighbours", done, total)
        result = search_index(place, text, image=image, top=top, model=checkpoint, progress=progress)
    for note in result.notes:
        say(f"note: {note}")
    if not result.hits:
        say(f"{place}: holds no picture that could be read.")
    if json:
        query = {"text": text} if text is not None else {"image": image}
        hits = [{"image": str(hit.path), "score": hit.score} for hit in result.hits]
        about = {"index": str(place), "folder": str(result.folder), "model": result.model, "pictures": result.images}
        print_json({**about, "query": query, "hits": hits})
    else:
        _show_hits(result.hits)
    if sheet is not None:
        draw.save(result.sheet(), sheet)
    if html is not None:
        page = result.page()
        html.parent.mkdir(parents=True, exist_ok=True)
        write_whole(html, lambda path: path.write_text(page, encoding="utf-8"))
    if sheet is not None or html is not None:
        say(f"written: {', '.join(str(path) for path in (sheet, html) if path is not None)}")


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


def name_unreadable(errors: dict[str, str]) -> None:
    for path, error in list(errors.items())[:NAMED]:
        say(f"vitlab: {one_line(path)}: {one_line(error)}")
    if len(errors) > NAMED:
        say(f"and {len(errors) - NAMED} more (--json names all)")


def _show_hits(hits: list[Hit]) -> None:
    console = out(markup=False)
    for hit in hits:
        console.print(f"{hit.score:6.3f}  {one_line(str(hit.path))}", soft_wrap=True)
