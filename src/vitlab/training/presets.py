"""Recipes that ship with vitlab, found by name; and the recipe for a source or folder that has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from vitlab.errors import UsageError
from vitlab.images.sources import SHARD_PATTERN, SOURCES, sources_of
from vitlab.models.config import nearest
from vitlab.parsing import flat, parse_toml
from vitlab.training.recipe import Recipe, read_recipe, setting, to_tables

FOLDERS = (Path(__file__).parents[1] / "recipes", Path(__file__).parents[3] / "recipes")  # installed; in the repository
BY_SOURCE = {"cifar10": "cifar10_full", "cifar100": "cifar10_full", "mnist": "fashion-mnist"}


def recipes() -> dict[str, Path]:
    return {path.stem: path for folder in FOLDERS for path in sorted(folder.glob("*.toml"))}


def split_arguments(what: str, more: Sequence[str]) -> tuple[str, list[str]]:
    """The data source or recipe and the settings of `vitlab train A B key=value`: folders and files come before
    settings. Behind the name of a recipe they are its data.
    """
    folders = list(takewhile(lambda text: "=" not in text and Path(text).expanduser().exists(), more))
    if folders and what in recipes() and what not in SOURCES and not Path(what).exists():
        return what, [setting("data.source", join_sources(folders)), *more[len(folders) :]]
    return join_sources([what, *folders]) if folders else what, list(more[len(folders) :])


def join_sources(names: Sequence[str]) -> str:
    """Several folders, tables or lists as one data.source."""
    if wrong := [name for name in names if "," in name]:
        raise UsageError(f"{wrong[0]}: a comma in its name, and commas are between several sources. Rename it.")
    return ",".join(names)


def own_values(path: Path) -> list[str]:
    """Settings of a recipe file that differ from the recipe of a folder, as typed on the command line.

    On the ladder these hold for every rung; for the rest each rung has values of its own.
    """
    usual = flat(to_tables(read_recipe(recipes()["folder"])))
    written = flat(parse_toml(path.read_text(encoding="utf-8")))
    return [
        setting(key, value)
        for key, value in written.items()
        if key not in usual or setting(key, value) != setting(key, usual[key])
    ]


def find_recipe(what: str | None) -> tuple[str, Recipe]:
    """A name for the run and the recipe: of a TOML file, of a shipped recipe, of a data source or of a folder."""
    available = recipes()
    name = "digits" if what is None else BY_SOURCE.get(what, what)
    if name in available:
        recipe = read_recipe(available[name])
        if what in BY_SOURCE:  # a recipe made for another source of the same kind
            recipe = replace(recipe, data=replace(recipe.data, source=what))
        return what or name, recipe
    path = Path(name)
    if path.suffix == ".toml":
        return path.stem, read_recipe(path)
    if name in SOURCES:  # without a recipe of its own
        base = read_recipe(available["folder"])
        return name, replace(base, data=replace(base.data, source=name))
    if len(parts := sources_of(name)) > 1:
        base = read_recipe(available["folder"])
        title = "-".join(Path(part).resolve().stem for part in parts)
        return title, replace(base, data=replace(base.data, source=name))
    pattern = re.search(SHARD_PATTERN, name)
    if path.exists() or pattern:
        from vitlab.images.sources.annotated import RECIPES, holds_marks, natural_kind
        from vitlab.images.sources.captions import holds_captions

        if path.exists() and holds_marks(path):
            suited = RECIPES[natural_kind(path)]
        else:
            suited = "clip_folder" if holds_captions(path) else "folder"
        base = read_recipe(available[suited])
        title = path.absolute().parent.name if pattern else path.resolve().stem
        return title, replace(base, data=replace(base.data, source=name))
    if "/" in name or name.startswith((".", "~")):
        raise UsageError(f"{what}: no such file or folder (from {Path.cwd()}), and it is no recipe or data source.")
    raise UsageError(
        f"{what!r} is no recipe, data source or folder.{nearest(name, [*available, *SOURCES])} "
        f"Recipes: {', '.join(available)}. For your own images: vitlab train FOLDER, with a folder for each class, "
        "or with captions."
    )
