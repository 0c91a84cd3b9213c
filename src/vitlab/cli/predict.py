"""vitlab predict, vitlab zeroshot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli.console import console, load_options, print_json, print_table, say, say_note, table
from vitlab.cli.options import Checkpoint, CheckpointOrExport, Device, Heads, ImagesOrFolders, Json, Reducer, Size
from vitlab.cli.progress import counting
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.inference import Prediction


@dataclass(frozen=True)
class PredictOutput:
    """Where predictions go besides the terminal."""

    out: Annotated[
        Path | None, typer.Option("-o", "--out", "--csv", metavar="FILE", help="Write the predictions: a .csv table.")
    ] = None
    sort: Annotated[
        Path | None,
        typer.Option("--sort", metavar="FOLDER", help="Copy the images into a folder for each class, in a new folder."),
    ] = None


@dataclass(frozen=True)
class PredictOptions:
    """How the model is loaded and run."""

    heads: Heads = None
    image_size: Size = None
    reducer: Reducer = None
    device: Device = "auto"

    def for_predict(self) -> dict[str, Any]:
        return {**load_options(self.image_size, self.heads), "reducer": self.reducer, "device": self.device}


def predict(
    checkpoint: CheckpointOrExport,
    images: ImagesOrFolders,
    output: PredictOutput,
    top: Annotated[int, typer.Option(help="Number of classes to show.", min=1)] = 5,
    *,
    model: PredictOptions,
    json: Json = False,
) -> None:
    """Classify images, or all images of a folder.

    A file that cannot be read is reported; the others are processed (exit code 1).
    """
    from vitlab.images.sorting import SortedFolder
    from vitlab.inference import check_csv_name, find_images, predict, sort_images, write_predictions

    sources = find_images(images)
    if output.out is not None:
        check_csv_name(output.out)
    folder = None if output.sort is None else SortedFolder(output.sort, images)
    with counting("images", len(sources)) as progress:
        predictions = predict(checkpoint, sources, top=top, progress=progress, **model.for_predict())
    if output.out is not None:
        write_predictions(predictions, output.out)
        say(f"written: {output.out}")
    if folder is not None:
        counts = sort_images(predictions, folder)
        say(f"copied: {sum(counts.values()):,} images into {len(counts):,} class folders of {output.sort}")
    _report(predictions, json, as_table=output.out is None and folder is None)


def zeroshot(
    checkpoint: Checkpoint,
    images: ImagesOrFolders,
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
    """Classify images by labels of your own, with a CLIP or SigLIP.

    A file that cannot be read is reported; the others are processed (exit code 1).
    """
    from vitlab.inference import find_images, zero_shot

    sources = find_images(images)
    options = {**load_options(image_size), "templates": templates, "top": top, "device": device}
    with counting("images", len(sources)) as progress:
        predictions = zero_shot(checkpoint, sources, labels, progress=progress, note=say_note, **options)
    _report(predictions, json)


def _report(predictions: list[Prediction], json: bool, as_table: bool = True) -> None:
    """Print them, without `as_table` how many have each class; exit code 1 if an image has no scores."""
    from vitlab.inference import Predictions

    if json:
        print_json([prediction.to_dict() for prediction in predictions])
    elif as_table:
        read = Predictions(prediction for prediction in predictions if prediction.error is None)
        print_table(read.table(len(read)))
    else:
        _show_counts(predictions)
    errors = [str(prediction.error) for prediction in predictions if prediction.error is not None]
    for error in errors:
        say(f"vitlab: {one_line(error)}")
    if errors:
        say(f"{len(errors)} of {len(predictions)} images could not be read or scored.")
        raise SystemExit(1)


def _show_counts(predictions: list[Prediction]) -> None:
    grid = table("class", "images", right=("images",))
    counts = Counter(prediction.label for prediction in predictions if prediction.label is not None)
    for label, images in counts.most_common():
        grid.add_row(one_line(label), f"{images:,}")
    if grid.row_count:
        console().print(grid)
