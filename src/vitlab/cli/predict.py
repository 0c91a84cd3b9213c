"""vitlab predict, vitlab zeroshot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli.console import print_json, print_table, say, say_note
from vitlab.cli.options import (
    BatchSize,
    Checkpoint,
    CheckpointOrExport,
    Device,
    Heads,
    ImagesOrFolders,
    Json,
    ModelOptions,
    Reducer,
)
from vitlab.cli.progress import counting
from vitlab.errors import UsageError
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.images.read import Source
    from vitlab.inference import Predictions


PIPED = "-"


@dataclass(frozen=True)
class PredictOutput:
    """Where predictions go besides the terminal."""

    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            "--csv",
            metavar="FILE",
            help="Write predictions: a .csv table; masks, boxes: a folder.",
        ),
    ] = None
    sort: Annotated[
        Path | None,
        typer.Option("--sort", metavar="FOLDER", help="Copy the images into a folder for each class, in a new folder."),
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="Of masks and boxes: least score of an object. Default: 0.5.", min=0, max=1)
    ] = None
    windows: Annotated[
        bool, typer.Option("--windows", help="Of classes of pixels: large images at their own resolution, in parts.")
    ] = False


@dataclass(frozen=True)
class BatchOptions(ModelOptions):
    """How the model is loaded and run."""

    device: Device = "auto"
    batch_size: BatchSize = 16

    def for_load(self) -> dict[str, Any]:
        return {**super().for_load(), "batch_size": self.batch_size}


@dataclass(frozen=True)
class PredictOptions(BatchOptions):
    heads: Heads = None
    reducer: Reducer = None

    def for_load(self) -> dict[str, Any]:
        heads = {} if self.heads is None else {"heads": self.heads}
        return {**super().for_load(), **heads, "reducer": self.reducer}


def predict(
    checkpoint: CheckpointOrExport,
    images: ImagesOrFolders,
    output: PredictOutput,
    top: Annotated[int, typer.Option(help="Number of classes to show.", min=1)] = 5,
    *,
    model: PredictOptions,
    json: Json = False,
) -> None:
    """Classify images, or find masks and boxes in them.

    A network for segmentation or detection writes a folder: PNG masks, COCO JSON, overlays.

    A file that cannot be read is reported; the others are processed (exit code 1).
    """
    from vitlab.images.sorting import SortedFolder
    from vitlab.inference import check_csv_name, find_images, predict, sort_images, write_predictions
    from vitlab.inference_regions import finds_regions

    sources = find_images(_with_piped(images))
    if finds_regions(checkpoint):
        _predict_regions(checkpoint, sources, output, model, json)
        return
    if output.threshold is not None or output.windows:
        raise UsageError("--threshold and --windows are for masks and boxes, and this model gives classes.")
    if output.out is not None:
        check_csv_name(output.out)
    folder = None if output.sort is None else SortedFolder(output.sort, [image for image in images if image != PIPED])
    with counting("images", len(sources)) as progress:
        predictions = predict(checkpoint, sources, top=top, progress=progress, **model.for_load())
    if output.out is not None:
        write_predictions(predictions, output.out)
        say(f"written: {output.out}")
    if folder is not None:
        counts = sort_images(predictions, folder)
        say(f"copied: {sum(counts.values()):,} images into {len(counts):,} class folders of {output.sort}")
    _report(predictions, json, as_table=output.out is None and folder is None)


def _predict_regions(
    checkpoint: str, sources: list[Source], output: PredictOutput, model: PredictOptions, json: bool
) -> None:
    from vitlab.inference_regions import predict_regions, write_regions
    from vitlab.training.dense_answers import THRESHOLD

    if output.sort is not None or model.reducer is not None or model.heads is not None:
        raise UsageError("--sort, --reducer and --heads are for models of classes: leave them out here.")
    if output.out is not None and output.out.is_file():
        raise UsageError(f"{output.out}: is a file; masks and overlays need a folder.")
    options = {**BatchOptions.for_load(model), "threshold": output.threshold or THRESHOLD, "windows": output.windows}
    with counting("images", len(sources)) as progress:
        predictions = predict_regions(checkpoint, sources, progress=progress, **options)
    if output.out is not None:
        say(f"written: {len(write_regions(predictions, output.out)):,} files to {output.out}")
    if json:
        print_json([prediction.to_dict() for prediction in predictions])
    elif output.out is None:
        print_table(predictions.table(len(predictions)))
    if errors := [prediction.error for prediction in predictions if prediction.error is not None]:
        for error in errors:
            say(f"vitlab: {one_line(error)}")
        raise SystemExit(1)


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
    *,
    model: BatchOptions,
    json: Json = False,
) -> None:
    """Classify images by labels of your own, with a CLIP or SigLIP.

    A file that cannot be read is reported; the others are processed (exit code 1).
    """
    from vitlab.inference import find_images, zero_shot

    sources = find_images(_with_piped(images))
    options = {**model.for_load(), "templates": templates, "top": top, "note": say_note}
    with counting("images", len(sources)) as progress:
        predictions = zero_shot(checkpoint, sources, labels, progress=progress, **options)
    _report(predictions, json)


def _with_piped(images: list[str]) -> list[str]:
    """With the paths on stdin, one a line, in place of -."""
    piped = sys.stdin.read().splitlines() if PIPED in images else []
    return [path for image in images for path in (filter(None, piped) if image == PIPED else [image])]


def _report(predictions: Predictions, json: bool, as_table: bool = True) -> None:
    """Print them, without `as_table` how many have each class; exit code 1 if an image has no scores."""
    if json:
        print_json([prediction.to_dict() for prediction in predictions])
    elif as_table:
        print_table(predictions.scored().table(len(predictions)))
    else:
        print_table(predictions.counts_table())
    errors = [str(prediction.error) for prediction in predictions if prediction.error is not None]
    for error in errors:
        say(f"vitlab: {one_line(error)}")
    if errors:
        say(f"{len(errors)} of {len(predictions)} images could not be read or scored.")
        raise SystemExit(1)
