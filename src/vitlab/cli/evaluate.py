"""vitlab eval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from vitlab.cli.console import console, parse_size, print_json_text, say_note, table
from vitlab.cli.options import BatchSize, CheckpointOrExport, Data, Device, Json, Reducer, Size, SourceOptions, choice
from vitlab.cli.progress import Meter, following_downloads
from vitlab.errors import UsageError
from vitlab.printable import one_line

NAMES = {"top1": "top-1", "top5": "top-5", "knn": "k-NN on features", "linear_probe": "linear probe"}
FIGURES = (  # of several labels an image, and of a number
    ("map", "mAP", ".2%"),
    ("f1_micro", "F1 (micro)", ".2%"),
    ("f1_macro", "F1 (macro)", ".2%"),
    ("mae", "MAE", ".6g"),
    ("rmse", "RMSE", ".6g"),
    ("r2", "R2", ".4f"),
)
DIRECTIONS = {"image_to_text": "image -> caption", "text_to_image": "caption -> image"}
CLASSES, PAIRS, UNREADABLE = 40, 10, 10  # rows that are shown; --json has all


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
    labels an image are evaluated by mAP and F1, a number by MAE, RMSE and R2. On images
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
        result = evaluate(checkpoint, data, progress=meter.update, note=say_note, **options).to_dict()
    print_json_text(to_json(result)) if json else _show(result)


def _show(result: dict[str, Any]) -> None:
    reducer = "" if result["reducer"] is None else f", with {result['reducer']}"
    console().print(f"{result['checkpoint']} on {result['data']}, {result['split']} split{reducer}")
    if "recall" in result:
        _show_recall(result)
    if "templates" in result:
        _row("zero-shot", _describe_templates(result["templates"]))
    for key, name in NAMES.items():
        if key in result and (key != "top5" or len(result["classes"]) > 5):
            _row(name, f"{result[key]:.2%}")
    for key, name, form in FIGURES:
        if key in result:
            _row(name, format(result[key], form))
    if "few_shot" in result:
        few = result["few_shot"]
        spread = f"+- {few['deviation']:.2%} over {len(few['draws'])} draws"
        _row(f"{few['shots']} labels a class", f"{few['mean']:.2%} {spread}")
    if "top1" in result:
        _row("loss", f"{result['loss']:.4f}")
        _row("calibration (ECE)", f"{result['ece']:.4f}")
    if "top1" in result or "map" in result or "mae" in result:
        images = f"{result['images']} images in {result['seconds']:.1f} s, reading included"
        _row("speed", f"{result['images_per_second']:.0f} images/s, {images}")
    for message in result["unreadable_pictures"][:UNREADABLE]:
        _row("unreadable", message)
    if result["unreadable"] > UNREADABLE:
        _row("", f"and {result['unreadable'] - UNREADABLE} more (--json names all)")
    if "top1" in result:
        _show_classes(result)
    if "per_label" in result:
        _show_labels(result)


def _row(name: str, value: str) -> None:
    console().print(f"{name:18s} {value}")


def _show_classes(result: dict[str, Any]) -> None:
    """Accuracy of each class, or of the worst of many; and the pairs of classes that are confused most often."""
    accuracies, totals = result["per_class"], [sum(row) for row in result["confusion"]]
    numbers = range(len(accuracies))
    if len(accuracies) > CLASSES:
        numbers = sorted((i for i in numbers if totals[i]), key=lambda i: accuracies[i])[:CLASSES]
        console().print(f"\nThe {len(numbers)} worst of {len(accuracies)} classes (--json has all)")
    grid = table("class", "right", "images", right=("right", "images"))
    for i in numbers:
        accuracy = "-" if accuracies[i] is None else f"{accuracies[i]:.1%}"
        grid.add_row(one_line(result["classes"][i]), accuracy, str(totals[i]))
    console().print(grid)
    if result["confused"]:
        grid = table("most often taken", "for", "images", right=("images",))
        for pair in result["confused"][:PAIRS]:
            grid.add_row(one_line(pair["truth"]), one_line(pair["answer"]), str(pair["images"]))
        console().print()
        console().print(grid)


def _show_labels(result: dict[str, Any]) -> None:
    """Figures of each label, or of the worst of many."""
    rows = list(zip(result["classes"], result["per_label"], strict=True))
    if len(rows) > CLASSES:
        scored = [row for row in rows if row[1]["average_precision"] is not None]
        rows = sorted(scored, key=lambda row: row[1]["average_precision"])[:CLASSES]
        console().print(f"\nThe {len(rows)} worst of {len(result['classes'])} labels (--json has all)")
    right = ("average precision", "F1", "threshold", "images")
    grid = table("label", *right, right=right)
    for label, figures in rows:
        shares = ["-" if v is None else f"{v:.1%}" for v in (figures["average_precision"], figures["f1"])]
        grid.add_row(one_line(label), *shares, f"{figures['threshold']:.3f}", str(figures["images"]))
    console().print(grid)


def _describe_templates(templates: dict[str, Any]) -> str:
    """7 templates of held_out, none of them learned from: 'a photo of a {}', ..."""
    first, *more = templates["sentences"]
    number = f"{len(more) + 1} templates" if more else "1 template"
    of = f" of {templates['list']}" if templates["list"] else ""
    learned = templates["learned_from"]
    trained = "" if learned is None else f", {learned or 'none'} of them learned from"
    return f"{number}{of}{trained}: {first!r}{', ...' if more else ''}"


def _show_recall(result: dict[str, Any]) -> None:
    from vitlab.training.retrieval import AT

    titles = [title for k in AT for title in (f"recall@{k}", "chance")]
    grid = table("", *titles, right=titles)
    for direction, name in DIRECTIONS.items():
        cells = ((result["recall"][direction][str(k)], result["chance"][direction][str(k)]) for k in AT)
        grid.add_row(name, *(f"{share:.2%}" for pair in cells for share in pair))
    console().print(grid)
    _row("mean recall", f"{result['mean_recall']:.2%}")
    counts = f"{result['images']} images and {result['captions']} captions"
    _row("speed", f"{counts} in {result['seconds']:.1f} s, reading included")
