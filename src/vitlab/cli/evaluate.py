"""vitlab eval."""

from __future__ import annotations

from typing import Any

from vitlab.cli.console import out, print_json_text, say
from vitlab.cli.progress import Meter, following_downloads
from vitlab.evaluation import evaluate
from vitlab.printable import one_line
from vitlab.training.retrieval import AT
from vitlab.training.runlog import to_json

NAMES = {"top1": "top-1", "top5": "top-5", "knn": "k-NN on features", "linear_probe": "linear probe"}
WAYS = {"image_to_text": "picture -> caption", "text_to_image": "caption -> picture"}
CLASSES, PAIRS, UNREADABLE = 40, 10, 10  # rows that are shown; --json has all


def run(checkpoint: str, source: str, json: bool, options: dict[str, Any]) -> None:
    """`options`: those of vitlab.evaluate."""
    with following_downloads(), Meter("pictures") as meter:
        result = evaluate(
            checkpoint, source, progress=meter.update, note=lambda text: say(f"note: {text}"), **options
        ).to_dict()
    print_json_text(to_json(result)) if json else _show(result)


def _show(found: dict[str, Any]) -> None:
    console = out(markup=False)
    fewer = "" if found["reducer"] is None else f", with {found['reducer']}"
    console.print(f"{found['checkpoint']} on {found['data']}, {found['split']} split{fewer}")
    if "recall" in found:
        _show_recall(found)
    if "templates" in found:
        console.print(_describe_templates(found))
    for key, name in NAMES.items():
        if key in found and (key != "top5" or len(found["classes"]) > 5):
            console.print(f"{name:18s} {found[key]:.2%}")
    if "few_shot" in found:
        few = found["few_shot"]
        name, spread = f"{few['shots']} labels a class", f"+- {few['deviation']:.2%} over {len(few['draws'])} draws"
        console.print(f"{name:18s} {few['mean']:.2%} {spread}")
    if "top1" in found:
        console.print(f"{'loss':18s} {found['loss']:.4f}\n{'calibration (ECE)':18s} {found['ece']:.4f}")
        console.print(
            f"{'speed':18s} {found['images_per_second']:.0f} images/s, {found['images']} images in "
            f"{found['seconds']:.1f} s, reading included"
        )
    for words in found["unreadable_pictures"][:UNREADABLE]:
        console.print(f"{'unreadable':18s} {words}")
    if found["unreadable"] > UNREADABLE:
        console.print(f"{'':18s} and {found['unreadable'] - UNREADABLE} more (--json names all)")
    if "top1" in found:
        _show_classes(found)


def _show_classes(found: dict[str, Any]) -> None:
    """The classes, the worst ones where there are many; and the pairs that are confused most often."""
    console = out(markup=False)
    rights, totals = found["per_class"], [sum(row) for row in found["confusion"]]
    numbers = range(len(rights))
    if len(rights) > CLASSES:
        numbers = sorted((i for i in numbers if totals[i]), key=lambda i: rights[i])[:CLASSES]
        console.print(f"\nThe {len(numbers)} worst of {len(rights)} classes (--json has all)")
    table = _table("class", "right", "images")
    for i in numbers:
        right = "-" if rights[i] is None else f"{rights[i]:.1%}"
        table.add_row(_plain(found["classes"][i]), right, str(totals[i]))
    console.print(table)
    if found["confused"]:
        table = _table("most often taken", "for", "images")
        for pair in found["confused"][:PAIRS]:
            table.add_row(_plain(pair["truth"]), _plain(pair["answer"]), str(pair["images"]))
        console.print()
        console.print(table)


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in ("right", "images") else "left")
    return table


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(one_line(text))


def _describe_templates(found: dict[str, Any]) -> str:
    """zero-shot, 7 templates of held_out, none of them learned from"""
    templates = found["templates"]
    of = f" of {templates['list']}" if templates["list"] else ""
    learned = {None: "", 0: ", none of them learned from"}.get(
        templates["learned_from"], f", {templates['learned_from']} of them learned from"
    )
    first, *more = templates["sentences"]
    count = f"{len(more) + 1} templates" if more else "1 template"
    return f"{'zero-shot':18s} {count}{of}{learned}: {first!r}{', ...' if more else ''}"


def _show_recall(found: dict[str, Any]) -> None:
    from rich.table import Table

    console = out(markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for k in AT:
        table.add_column(f"recall@{k}", justify="right")
        table.add_column("chance", justify="right")
    for way, name in WAYS.items():
        cells = ((found["recall"][way][str(k)], found["chance"][way][str(k)]) for k in AT)
        table.add_row(name, *(f"{share:.2%}" for pair in cells for share in pair))
    console.print(table)
    console.print(f"{'mean recall':18s} {found['mean_recall']:.2%}")
    console.print(
        f"{'speed':18s} {found['images']} images and {found['captions']} captions in {found['seconds']:.1f} s, "
        "reading included"
    )
