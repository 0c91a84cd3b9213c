"""vitlab data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.console import print_json, print_tables, say, say_notes
from vitlab.cli.options import FoldersAndSettings, Json, Recipe
from vitlab.cli.progress import following_downloads


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
    from vitlab.training.data_summary import describe
    from vitlab.training.job import data_of, suited_recipe
    from vitlab.training.ladder_plan import tuning_recipe
    from vitlab.training.presets import find_recipe, split_arguments
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
    summary = describe(dataset)
    print_json(summary.to_dict()) if json else print_tables(summary.tables())
