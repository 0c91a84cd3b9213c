"""vitlab eval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from vitlab.cli.console import parse_size, print_json_text, print_tables, say_note
from vitlab.cli.options import BatchSize, CheckpointOrExport, Data, Device, Json, Reducer, Size, SourceOptions, choice
from vitlab.cli.progress import Meter, following_downloads
from vitlab.errors import UsageError


@dataclass(frozen=True)
class FeatureOptions:
    """Classifiers on the features."""

    knn: Annotated[bool, typer.Option("--knn", help="Also k nearest neighbours on the features.")] = False
    probe: Annotated[bool, typer.Option("--probe", help="Also a linear probe on the features.")] = False
    few_shot: Annotated[
        int | None, typer.Option(metavar="K", help="Also a classifier on the features of K images per class.", min=1)
    ] = None
    draws: Annotated[int, typer.Option(help="Number of random draws of --few-shot.", min=2)] = 10


@dataclass(frozen=True)
class TextOptions:
    """Zero-shot evaluation of a CLIP."""

    zeroshot: Annotated[
        bool, typer.Option("--zeroshot", help="Evaluate a CLIP or SigLIP by the names of the classes.")
    ] = False
    templates: Annotated[
        str | None,
        typer.Option(
            "--templates", metavar="LIST", help='Templates for --zeroshot: held_out, a file, or "a photo of a {}".'
        ),
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """How the images are run through the model."""

    split: Annotated[
        str | None,
        choice("train", "val", "test", help="Split to evaluate on. Default: test, or val without one."),
    ] = None
    flip: Annotated[bool, typer.Option("--flip", help="Average the scores with those of the mirrored image.")] = False
    image_size: Size = None
    reducer: Reducer = None
    batch_size: BatchSize = 256
    device: Device = "auto"
    max_unreadable: Annotated[int, typer.Option(help="Unreadable images that may be skipped.", min=0)] = 20


def evaluate(
    checkpoint: CheckpointOrExport,
    data: Data,
    source: SourceOptions,
    features: FeatureOptions,
    text: TextOptions,
    run: RunOptions,
    json: Json = False,
) -> None:
    """Evaluate a model: accuracy, calibration, errors, speed.

    Top-1 and top-5, also per class, and which classes it confuses; optionally classifiers on its features. Several
    labels an image are evaluated by mAP and F1, a number by MAE, RMSE and R2; classes of
    pixels by mIoU, masks and boxes of objects by AP, masks also by PQ. On images
    with captions a CLIP is evaluated by recall@1, 5 and 10, both ways, beside chance.
    """
    from vitlab.evaluation import evaluate
    from vitlab.training.runlog import to_json

    if text.templates is not None and not text.zeroshot:
        raise UsageError("--templates are the sentences of --zeroshot: add it, or leave them out.")
    templates = text.templates or "held_out" if text.zeroshot else None
    options = {**vars(source), **vars(features), **vars(run), "templates": templates}
    options["image_size"] = parse_size(run.image_size)
    with following_downloads(), Meter("images") as meter:
        result = evaluate(checkpoint, data, progress=meter.update, note=say_note, **options)
    print_json_text(to_json(result.to_dict())) if json else print_tables(result.tables())
