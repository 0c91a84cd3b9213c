"""vitlab data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitlab.cli.console import count, out, print_json, say
from vitlab.cli.progress import following_downloads
from vitlab.training.job import data_of
from vitlab.training.presets import find_recipe
from vitlab.training.preview import describe, preview
from vitlab.training.recipe import with_settings, with_value
from vitlab.training.report import draw_preview, picture_kind

SHOWN = 20  # classes of the table
NAMED = 5  # unreadable pictures


def run(
    what: str, settings: list[str], draw_to: Path | None, images: int, views: int, seed: int | None, json: bool
) -> None:
    _, recipe = find_recipe(what)
    recipe = with_settings(recipe, settings)
    if seed is not None:
        recipe = with_value(recipe, "run.seed", seed)
    if draw_to is not None:
        picture_kind(draw_to, "--preview")
    with following_downloads():
        data = data_of(recipe)
    if draw_to is not None:
        found = preview(recipe, data, images, views)
        draw_preview(found, draw_to)
        for note in found.notes:
            say(f"note: {note}")
        say(f"preview: {draw_to}")
    if json:
        print_json(describe(data))
    elif draw_to is None:
        _show(describe(data))


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out(markup=False)
    console.print(Text(found["name"], "bold"))
    pairs = Table.grid(padding=(0, 2))
    if not found["captions"]:
        pairs.add_row("classes", count(found["classes"]))
    pairs.add_row("images", ", ".join(f"{name} {count(n)}" for name, n in found["images"].items()))
    if found["captions"]:
        pairs.add_row("captions", ", ".join(f"{name} {_captions(told)}" for name, told in found["captions"].items()))
        pairs.add_row("words", ", ".join(f"{name} {_words(told)}" for name, told in found["captions"].items()))
        pairs.add_row("the first", Text(found["captions"]["train"]["first"]))
    else:
        pairs.add_row("of a class", ", ".join(_range(found["per_class"], split) for split in found["images"]))
    pairs.add_row("pictures", _sizes(found))
    for message in found["unreadable"][:NAMED]:
        pairs.add_row("unreadable", Text(message))
    if len(found["unreadable"]) > NAMED:
        pairs.add_row("", f"... {len(found['unreadable']) - NAMED} more of {count(found['looked_at'])} looked at")
    for note in found["notes"]:
        pairs.add_row("note", Text(note))
    console.print(pairs)
    if found["captions"]:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("class")
    for split in found["images"]:
        table.add_column(split, justify="right")
    for row in found["per_class"][:SHOWN]:
        table.add_row(Text(row["class"]), *[count(row[split]) for split in found["images"]])  # Text: [x] stays [x]
    console.print(table)
    if found["classes"] > SHOWN:
        console.print(f"... {count(found['classes'] - SHOWN)} more (--json lists all)")


def _range(per_class: list[dict[str, Any]], split: str) -> str:
    least, most = (pick(row[split] for row in per_class) for pick in (min, max))
    return f"{split} {count(least)}" + (f" to {count(most)}" if most > least else "")


def _captions(told: dict[str, Any]) -> str:
    least, most = told["least"], told["most"]
    return f"{count(told['captions'])} ({least}{f' to {most}' if most > least else ''} a picture)"


def _words(told: dict[str, Any]) -> str:
    return f"{told['words']:.1f} a caption, up to {told['longest']}"


def _sizes(found: dict[str, Any]) -> str:
    channels = f"{found['channels']} channel{'s' if found['channels'] > 1 else ''}"
    smallest, largest, common = (found["sizes"][key] for key in ("smallest", "largest", "most_common"))
    if smallest is None:
        return f"none of {found['looked_at']} looked at can be read"
    size = _size(smallest)
    if smallest != largest:
        size += f" to {_size(largest)}" + (f", most often {_size(common)}" if common else "")
    part = found["looked_at"] < sum(found["images"].values())
    return f"{size}, {channels}" + (f" (of {count(found['looked_at'])} looked at)" if part else "")


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
