"""vitlab embed."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from vitlab.cli.console import out as console
from vitlab.cli.console import print_json, say
from vitlab.cli.progress import Meter, following_downloads
from vitlab.cli.search import PATIENCE, name_unreadable, open_encoder
from vitlab.errors import UsageError
from vitlab.images.listing import open_items
from vitlab.inference import embed
from vitlab.search.table import write_table
from vitlab.training.processes import start, stop

DEFAULT = "bundled:dino"
OTHERS = (".csv", ".tsv", ".json", ".jsonl", ".npy", ".npz", ".txt")  # what the table is not


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
    if out.suffix.lower() in OTHERS:
        raise UsageError(f"{out}: the table is written as Parquet: name it {out.with_suffix('.parquet')}.")
    began = time.perf_counter()
    who = start(device, patience=PATIENCE)
    try:
        if checkpoint is None and who.first:
            say(f"note: without --model it is {DEFAULT}, a small model for small pictures.")
        model, made_by = open_encoder(checkpoint or DEFAULT, quiet=not who.first)
        with following_downloads():
            items = open_items(source, path=path, **allow)
        for note in items.notes if who.first else ():
            say(f"note: {note}")
        with Meter("pictures") as meter:
            found = write_table(
                out,
                items,
                made_by,
                partial(embed, model.to(who.device), batch_size=batch_size),
                batch_size=batch_size,
                together=who,
                progress=(lambda what, done, total: meter.update(source, done, total)) if who.first else None,
            )
    except KeyboardInterrupt:
        say("vitlab: stopped. What is done is kept: the same command goes on from here.")
        raise SystemExit(130) from None
    finally:
        stop()
    if not who.first:
        return
    if json:
        about = {"out": str(out), "data": items.name, "model": made_by["checkpoint"], **vars(found)}
        print_json({**about, "seconds": time.perf_counter() - began})
        return
    console(markup=False).print(
        f"{out}: {found.pictures:,} pictures, {found.width} numbers each; {found.embedded:,} of them made now",
        soft_wrap=True,
    )
    name_unreadable(found.unreadable)
