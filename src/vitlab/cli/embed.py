"""vitlab embed."""

from __future__ import annotations

import time
from pathlib import Path

from vitlab.cli.console import out as console
from vitlab.cli.console import print_json, say
from vitlab.cli.progress import Meter, following_downloads
from vitlab.cli.search import name_unreadable, processes
from vitlab.images.listing import open_items
from vitlab.search.api import DEFAULT_MODEL, check_table_name, embed_dataset


def run(
    source: str,
    out: Path,
    checkpoint: str | None,
    path: str | None,
    batch_size: int,
    device: str,
    json: bool,
    allow: dict[str, bool],
) -> None:
    """`allow`: allow_cut and allow_outside of open_items."""
    check_table_name(out)
    began = time.perf_counter()
    with processes(device) as group:
        if checkpoint is None and group.first:
            say(f"note: without --model it is {DEFAULT_MODEL}, a small model for small pictures.")
        with following_downloads():
            items = open_items(source, path=path, **allow)
        for note in items.notes if group.first else ():
            say(f"note: {note}")
        with Meter("pictures") as meter:
            table = embed_dataset(
                items,
                out,
                checkpoint or DEFAULT_MODEL,
                batch_size=batch_size,
                device=group.device,
                together=group,
                progress=(lambda what, done, total: meter.update(source, done, total)) if group.first else None,
            )
    if not group.first:
        return
    if json:
        print_json({"out": str(out), **vars(table), "seconds": time.perf_counter() - began})
        return
    console(markup=False).print(
        f"{out}: {table.pictures:,} pictures, {table.width} numbers each; {table.embedded:,} of them made now",
        soft_wrap=True,
    )
    name_unreadable(table.unreadable)
