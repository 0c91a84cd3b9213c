"""vitlab predict, vitlab zeroshot."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli.console import console, print_json, say, size_option, table
from vitlab.cli.options import Checkpoint, CheckpointOrExport, Device, Heads, Images, Json, Reducer, Size
from vitlab.errors import UsageError
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.inference import Prediction
    from vitlab.models.base import Network


def predict(
    checkpoint: CheckpointOrExport,
    images: Images,
    top: Annotated[int, typer.Option(help="Number of classes to show.", min=1)] = 5,
    heads: Heads = None,
    image_size: Size = None,
    reducer: Reducer = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Classify images.

    A file that cannot be read is reported; the others are processed (exit code 1).
    """
    from vitlab.export.loader import is_export
    from vitlab.inference import predict
    from vitlab.reduce import reducer_of

    fewer = None if reducer is None else reducer_of(reducer)
    if fewer is not None and is_export(checkpoint):
        raise UsageError(f"{checkpoint} is an exported network: give --reducer to vitlab export, not here.")
    model = _open(checkpoint, device, image_size, heads)
    _report(_with_progress(lambda images, **more: predict(model, images, top=top, reducer=fewer, **more), images), json)


def zeroshot(
    checkpoint: Checkpoint,
    images: Images,
    labels: Annotated[
        str, typer.Option("--labels", metavar="A,B,C", help="Labels to choose from; or a file with one per line.")
    ],
    templates: Annotated[
        str, typer.Option("--templates", metavar="LIST", help='train, held_out, a file, or "a photo of a {}|one {}".')
    ] = "train",
    top: Annotated[int, typer.Option(help="Number of labels to show.", min=1)] = 5,
    image_size: Size = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Classify images by labels of your own, with a CLIP.

    A file that cannot be read is reported; the others are processed (exit code 1).
    """
    from vitlab.inference import embed_labels, zero_shot
    from vitlab.text.templates import fill, read_templates

    sentences = read_templates(templates)
    names = _read_labels(labels)
    model = _open(checkpoint, device, image_size)
    classes = embed_labels(model, names, sentences)
    if len(names) == 1:
        say("note: one label alone always has the probability 1: name others that it could be.")
    say(f"note: each label is the mean of {len(sentences)} sentences, e.g. {fill(sentences[0], names[0])!r}.")
    _report(_with_progress(lambda images, **more: zero_shot(model, images, classes, top=top, **more), images), json)


def _open(checkpoint: str, device: str, size: str | None, heads: int | None = None) -> Network:
    """The network of a checkpoint or exported file, on its device."""
    from vitlab.export.loader import Exported, open_network
    from vitlab.training.processes import pick_device

    options: dict[str, Any] = {} if heads is None else {"heads": heads}
    model = open_network(checkpoint, **options, **size_option(size))
    if not isinstance(model, Exported):
        return model.to(pick_device(device))
    if device not in ("auto", "cpu"):
        raise UsageError(f"--device {device}: an exported file runs on the CPU here: leave --device out.")
    return model


def _read_labels(text: str) -> list[str]:
    """cat,dog; or a file with one per line."""
    path = Path(text).expanduser()
    if not path.is_file() and "," not in text and (path.suffix == ".txt" or len(path.parts) > 1):
        raise UsageError(f"--labels {text}: no such file. Write cat,dog, or name a file with one label a line.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else text.split(",")
    except UnicodeDecodeError:
        raise UsageError(f"--labels {text}: is no text. Write cat,dog, or name a file with one label a line.") from None
    names = [name.strip() for name in lines if name.strip()]
    if not names:
        raise UsageError(f"--labels {text!r} names nothing: write cat,dog, or a file with one label a line.")
    return names


def _with_progress(ask: Callable[..., list[Prediction]], images: list[str]) -> list[Prediction]:
    """ask(images), with a bar on a terminal if there are many."""
    if len(images) <= 16 or not sys.stderr.isatty():
        return ask(images)
    from vitlab.cli.progress import counting

    with counting("images", len(images)) as progress:
        return ask(images, progress=progress)


def _report(predictions: list[Prediction], json: bool) -> None:
    """Print them; exit code 1 if an image has no scores."""
    if json:
        print_json([prediction.to_dict() for prediction in predictions])
    else:
        _show(predictions)
    errors = [str(prediction.error) for prediction in predictions if prediction.error is not None]
    for error in errors:
        say(f"vitlab: {one_line(error)}")
    if errors:
        say(f"{len(errors)} of {len(predictions)} images could not be read or scored.")
        raise SystemExit(1)


def _show(predictions: list[Prediction]) -> None:
    grid = table("image", "class", "probability", "", right=("probability",))
    for prediction in predictions:
        for rank, (label, probability) in enumerate(prediction.scores):
            name = one_line(Path(prediction.name).name) if rank == 0 else ""
            grid.add_row(name, one_line(label), f"{probability:.1%}", "█" * round(20 * probability))
    if grid.row_count:
        console().print(grid)
