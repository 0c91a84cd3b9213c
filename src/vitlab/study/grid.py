"""A grid of recipes: every setting with several values is an axis, every combination of values a cell.

grid = read_grid(recipe, ["model.depth=4,6", "augment.scale=[0.3,1.0],[0.5,1.0]", "run.epochs=20"])
grid.axes       # {"model.depth": [4, 6], "augment.scale": [[0.3, 1.0], [0.5, 1.0]]}
grid.cells      # four, each a recipe with a name: depth=4,scale=[0.3,1.0]
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.errors import UsageError, VitlabError
from vitlab.training.recipe import (
    Recipe,
    from_tables,
    parse_value,
    single_run,
    to_tables,
    to_toml,
    with_settings,
    with_value,
)

MAX_LENGTH = 100  # bytes of a cell's name


@dataclass(frozen=True)
class GridCell:
    """One training run of a study."""

    name: str  # also of its folder
    recipe: Recipe
    values: dict[str, Any]  # values of the axes, by recipe key


@dataclass(frozen=True)
class Grid:
    base: Recipe  # with the settings that all cells share
    axes: dict[str, list[Any]]
    cells: list[GridCell]

    @property
    def name(self) -> str:
        """Name of the folder: depth-positions"""
        return file_safe("-".join(short_keys(self.axes).values()))


def read_grid(recipe: Recipe, settings: list[str]) -> Grid:
    """Cells in the order of the settings, the last axis fastest. Unknown settings are refused."""
    shared: list[str] = []
    axes: dict[str, list[str]] = {}
    for key, values in _read_settings(settings).items():
        if len(values) == 1:
            shared.append(f"{key}={values[0]}")
        else:
            axes[key] = values
    if not axes:
        raise UsageError("there is nothing to compare: give a setting two or more values, e.g. model.depth=4,6.")
    base = single_run(with_settings(with_value(recipe, "run.dir", ""), shared))
    cells = [_cell(base, dict(zip(axes, texts, strict=True))) for texts in itertools.product(*axes.values())]
    seen: set[str] = set()
    for cell in cells:
        if seen & {cell.name, to_toml(cell.recipe)}:
            raise UsageError(f"{cell.name} is in the grid twice: leave a value out.")
        seen |= {cell.name, to_toml(cell.recipe)}
    values = {key: {format_value(cell.values[key]): cell.values[key] for cell in cells} for key in axes}
    return Grid(base, {key: list(distinct.values()) for key, distinct in values.items()}, cells)


def split_values(text: str) -> list[str]:
    """Split at commas, but not inside brackets or quotes: "[0.3,1.0],[0.5,1.0]" has two values."""
    values, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and (depth or not values[-1].strip()):  # inside a word it is an apostrophe
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and not depth:
            values.append("")
            continue
        values[-1] += letter
    return [value.strip() for value in values]


def short_keys(keys: Collection[str]) -> dict[str, str]:
    """model.depth -> depth, unless another key has the same ending."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def format_value(value: object) -> str:
    """A value as typed on the command line."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def label(values: Mapping[str, object], between: str = ",") -> str:
    """depth=4,positions=learned"""
    short = short_keys(values)
    return between.join(f"{short[key]}={format_value(value)}" for key, value in values.items())


def file_safe(name: str) -> str:
    """The name itself if it is valid on every file system, otherwise a readable part and a hash."""
    safe = re.sub(r"[^\w.,=+\[\]-]+", "-", name)
    if safe == name and len(name.encode()) <= MAX_LENGTH:
        return name
    while len(safe.encode()) > MAX_LENGTH:
        safe = safe[:-1]
    return f"{safe}-{hashlib.sha256(name.encode(errors='backslashreplace')).hexdigest()[:8]}"


def _read_settings(settings: list[str]) -> dict[str, list[str]]:
    parsed: dict[str, list[str]] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        key, values = key.strip(), split_values(text)
        if not sign or not key:
            raise UsageError(f"{setting!r} is not a setting: write key=value, or key=a,b,c to compare values.")
        if not all(values):
            raise UsageError(f"{setting!r} has an empty value: write {key}=a,b,c without extra commas.")
        if key in parsed:
            raise UsageError(f"{key} is set twice. Put all its values into one: {key}={','.join(parsed[key] + values)}")
        if key == "run.dir":
            raise UsageError("run.dir is chosen by the study, one folder for each run. -o names the study's own.")
        parsed[key] = values
    return parsed


def _cell(base: Recipe, texts: dict[str, str]) -> GridCell:
    recipe, values = base, {}
    try:
        for key, text in texts.items():
            recipe = with_value(recipe, key, parse_value(text))
        for key in texts:
            group, _, name = key.partition(".")
            value = to_tables(recipe)[group][name]
            values[key] = list(value) if isinstance(value, tuple) else value
        # As the run writes it and reads it back, so that a resumed cell compares equal.
        recipe = from_tables(tomllib.loads(to_toml(recipe)))
    except VitlabError as error:
        raise UsageError(f"{label(texts)}: {error}") from None
    return GridCell(file_safe(label(values)), recipe, values)
