"""vitlab predict, vitlab zeroshot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.console import console, load_options, print_json, say, say_note, table
from vitlab.cli.options import Checkpoint, CheckpointOrExport, Device, Heads, Images, Json, Reducer, Size
from vitlab.cli.progress import counting
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.inference import Prediction


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
    from vitlab.inference import predict

    options = {**load_options(image_size, heads), "top": top, "reducer": reducer, "device": device}
    with counting("images", len(images)) as progress:
        predictions = predict(checkpoint, images, progress=progress, **options)
    _report(predictions, json)


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
    from vitlab.inference import zero_shot

    options = {**load_options(image_size), "templates": templates, "top": top, "device": device}
    with counting("images", len(images)) as progress:
        predictions = zero_shot(checkpoint, images, labels, progress=progress, note=say_note, **options)
    _report(predictions, json)


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
