"""vitlab predict."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.checkpoints.load import load
from vitlab.cli.console import out, parse_size, print_json, say
from vitlab.errors import UsageError
from vitlab.export.loader import Exported, is_export, open_export
from vitlab.images.samples import is_sample, open_sample
from vitlab.inference import Prediction, predict
from vitlab.printable import one_line
from vitlab.reduce import reducer_of
from vitlab.training.processes import pick_device

INSIDE = "{} is an exported network: give --reducer to vitlab export, not here."


def run(
    checkpoint: str,
    images: list[str],
    top: int,
    heads: int | None,
    size: str | None,
    fewer: str | None,
    device: str,
    json: bool,
) -> None:
    """`fewer`: a reducer in words."""
    reducer = None if fewer is None else reducer_of(fewer)
    if reducer is not None and is_export(checkpoint):
        raise UsageError(INSIDE.format(checkpoint))
    model = place(open_any(checkpoint, size, heads), device)
    common: dict[str, Any] = dict(top=top, reducer=reducer)
    report(with_progress(lambda pictures, **more: predict(model, pictures, **common, **more), images), json)


def open_any(source: str, size: str | None, heads: int | None) -> Any:
    """A checkpoint, or a file that vitlab export has written."""
    if not is_export(source):
        return open_model(source, size, heads)
    if heads is not None:
        raise UsageError(f"{source} is an exported network, whose heads are what they are: leave --heads out.")
    shipped, asked = open_export(source), parse_size(size)
    return shipped if asked is None else shipped.with_size(asked)


def place(model: Any, device: str) -> Any:
    if not isinstance(model, Exported):
        return model.to(pick_device(device))
    if device not in ("auto", "cpu"):
        raise UsageError(f"--device {device}: an exported file runs on the CPU here: leave --device out.")
    return model


def open_model(checkpoint: str, size: str | None, heads: int | None = None) -> Any:
    options: dict[str, Any] = {"heads": heads, "image_size": parse_size(size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # whoever left a file open, it is no note on the model
        model = load(checkpoint, **{k: v for k, v in options.items() if v is not None})
    for note in caught:
        say(f"note: {note.message}")
    return model


def with_progress(ask: Callable[..., list[Prediction]], images: list[str]) -> list[Prediction]:
    """What `ask` says of the pictures, with a progress bar where someone watches and there is enough to watch."""
    pictures = [open_sample(text).picture if is_sample(text) else text for text in images]
    if len(images) <= 16 or not sys.stderr.isatty():
        found = ask(pictures)
    else:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("pictures", total=len(images))
            found = ask(pictures, progress=lambda done: bar.advance(task, done))
    for prediction, text in zip(found, images, strict=True):
        if prediction.error is not None:  # a sample has no name of its own
            prediction.error = f"{text}: {prediction.error.removeprefix(f'{prediction.name}: ')}"
        prediction.name = text
    return found


def report(found: list[Prediction], json: bool) -> None:
    """Print them; exit code 1 where a picture has no scores."""
    if json:
        print_json([p.to_dict() for p in found])
    else:
        _show(found)
    failed = [p for p in found if p.error is not None]
    for p in failed:
        say(f"vitlab: {one_line(str(p.error))}")
    if failed:
        say(f"{len(failed)} of {len(found)} pictures could not be read or scored.")
        raise SystemExit(1)


def _show(found: list[Prediction]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("picture")
    table.add_column("class")
    table.add_column("probability", justify="right")
    table.add_column("")
    for p in found:
        for rank, (label, chance) in enumerate(p.scores):
            bar = "█" * round(20 * chance)
            name = Text(
                one_line(Path(p.name).name) if rank == 0 else ""
            )  # Text: [brackets] and :colons: stay as they are
            table.add_row(name, Text(one_line(label)), f"{chance:.1%}", bar)
    if table.row_count:
        console.print(table)
