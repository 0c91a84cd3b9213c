"""vitlab data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli.console import console, print_json, say, say_notes, table
from vitlab.cli.options import FoldersAndSettings, Json, Recipe
from vitlab.cli.progress import following_downloads
from vitlab.tables import by, count

CLASSES = 20  # rows of the table
UNREADABLE = 5  # images that are named


def data(
    what: Recipe,
    settings: FoldersAndSettings = None,
    preview: Annotated[
        Path | None,
        typer.Option("-o", "--out", "--preview", metavar="FILE", help="Draw the model's input: .png, .svg or .pdf."),
    ] = None,
    images: Annotated[int, typer.Option(help="Images in the preview.", min=1, max=100)] = 8,
    views: Annotated[int, typer.Option(help="Epochs to show (DINO: all views of one epoch).", min=1, max=20)] = 4,
    seed: Annotated[int | None, typer.Option(help="Seed. Default: the recipe's.")] = None,
    json: Json = False,
) -> None:
    """Show the data of a recipe, as numbers or as images.

    The images are shown before and after augmentation.
    """
    from vitlab.training.job import data_of, suited_recipe
    from vitlab.training.ladder import tuning_recipe
    from vitlab.training.presets import find_recipe, split_arguments
    from vitlab.training.preview import describe
    from vitlab.training.preview import preview as make_preview
    from vitlab.training.recipe import with_settings, with_value
    from vitlab.training.report import draw_preview, figure_format

    what, changes = split_arguments(what, settings or [])
    recipe = suited_recipe(with_settings(find_recipe(what)[1], changes))
    if seed is not None:
        recipe = with_value(recipe, "run.seed", seed)
    if preview is not None:
        figure_format(preview, "--preview")
    with following_downloads():
        dataset = data_of(recipe)
    if preview is not None:
        with following_downloads():
            recipe = tuning_recipe(recipe, dataset, changes)
        sheet = make_preview(recipe, dataset, images, views)
        draw_preview(sheet, preview)
        say_notes(sheet.notes)
        say(f"preview: {preview}")
    if json:
        print_json(describe(dataset))
    else:
        _show(describe(dataset))


def _show(summary: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    captions, splits = summary["captions"], summary["images"]
    console().print(Text(summary["name"], "bold"))
    rows = Table.grid(padding=(0, 2))
    numbers = summary["numbers"]
    if not captions and not numbers:
        rows.add_row("classes" if summary["kind"] == "class" else "labels", count(summary["classes"]))
    rows.add_row("images", ", ".join(f"{name} {count(n)}" for name, n in splits.items()))
    if captions:
        rows.add_row("captions", ", ".join(f"{name} {_captions(numbers)}" for name, numbers in captions.items()))
        lengths = (f"{name} {c['words']:.1f} a caption, up to {c['longest']}" for name, c in captions.items())
        rows.add_row("words", ", ".join(lengths))
        rows.add_row("the first", captions["train"]["first"])
    elif numbers:
        spans = (f"{name} {n['least']:.6g} to {n['most']:.6g}, mean {n['mean']:.6g}" for name, n in numbers.items())
        rows.add_row("numbers", "; ".join(spans))
    else:
        rows.add_row(
            "per class" if summary["kind"] == "class" else "per label",
            ", ".join(_range(summary["per_class"], split) for split in splits),
        )
    rows.add_row("sizes", _sizes(summary))
    for message in summary["unreadable"][:UNREADABLE]:
        rows.add_row("unreadable", message)
    if (more := len(summary["unreadable"]) - UNREADABLE) > 0:
        rows.add_row("", f"... {more} more of {count(summary['looked_at'])} looked at")
    for note in summary["notes"]:
        rows.add_row("note", note)
    console().print(rows)
    if captions or numbers:
        return
    grid = table("class" if summary["kind"] == "class" else "label", *splits, right=splits)
    for row in summary["per_class"][:CLASSES]:
        grid.add_row(row["class"], *[count(row[split]) for split in splits])
    console().print(grid)
    if summary["classes"] > CLASSES:
        console().print(f"... {count(summary['classes'] - CLASSES)} more (--json lists all)")


def _range(per_class: list[dict[str, Any]], split: str) -> str:
    least, most = (pick(row[split] for row in per_class) for pick in (min, max))
    return f"{split} {count(least)}" + (f" to {count(most)}" if most > least else "")


def _captions(numbers: dict[str, Any]) -> str:
    least, most = numbers["least"], numbers["most"]
    return f"{count(numbers['captions'])} ({least}{f' to {most}' if most > least else ''} per image)"


def _sizes(summary: dict[str, Any]) -> str:
    channels = f"{summary['channels']} channel{'s' if summary['channels'] > 1 else ''}"
    smallest, largest, common = (summary["sizes"][key] for key in ("smallest", "largest", "most_common"))
    if smallest is None:
        return f"none of {summary['looked_at']} looked at can be read"
    size = by(smallest)
    if smallest != largest:
        size += f" to {by(largest)}" + (f", most often {by(common)}" if common else "")
    part = summary["looked_at"] < sum(summary["images"].values())
    return f"{size}, {channels}" + (f" (of {count(summary['looked_at'])} looked at)" if part else "")
