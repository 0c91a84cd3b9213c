"""vitlab eval."""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints.load import load_with_report
from vitlab.cli.console import out, print_json, say
from vitlab.images.datasets import open_data
from vitlab.training.batches import Pictures
from vitlab.training.evaluate import evaluate, features, knn_accuracy, probe_accuracy


def run(
    checkpoint: str, source: str, path: str | None, split: str | None, knn: bool, probe: bool, flip: bool, json: bool
) -> None:
    model, report = load_with_report(checkpoint)
    for note in report.notes:
        say(f"note: {note}")
    data = open_data(source, path=path)
    chosen = split or ("test" if data.test is not None else "val")
    if chosen not in ("train", "val", "test") or getattr(data, chosen) is None:
        have = [name for name in ("train", "val", "test") if getattr(data, name) is not None]
        raise ValueError(f"{source} has no split {chosen!r}: use --split {' or '.join(have)}.")
    if model.preprocess is None:
        raise ValueError(f"{checkpoint}: the model has no preprocess, so it cannot read pictures.")
    pictures = Pictures(getattr(data, chosen), model.preprocess)
    found: dict[str, Any] = {"checkpoint": checkpoint, "data": source, "split": chosen, "classes": data.classes}
    if model.config.classes:
        check_classes(model, data.classes, checkpoint, source)
        found |= evaluate(model, pictures, flip=flip).to_dict()
    if knn or probe or not model.config.classes:
        known, asked = features(model, Pictures(data.train, model.preprocess)), features(model, pictures)
        found |= {"knn": knn_accuracy(known, asked)} if knn or not probe else {}
        found |= {"linear_probe": probe_accuracy(known, asked)} if probe else {}
    print_json(found) if json else _show(found)


def check_classes(model: Any, classes: list[str], checkpoint: str, source: str) -> None:
    """Class numbers mean nothing unless both sides count the same classes in the same order."""
    if model.labels is not None and model.labels != classes:
        raise ValueError(
            f"{checkpoint} knows the classes {', '.join(model.labels[:5])}, ... but {source} has "
            f"{', '.join(classes[:5])}, ...: fine-tune it on them with model.init_from={checkpoint}."
        )
    if model.config.classes != len(classes):
        raise ValueError(f"{checkpoint} has {model.config.classes} classes but {source} has {len(classes)}.")


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table

    console = out()
    console.print(f"{found['checkpoint']} on {found['data']}, {found['split']} split", markup=False)
    names = {"top1": "top-1", "top5": "top-5", "knn": "k-NN on features", "linear_probe": "linear probe"}
    for key, name in names.items():
        if key in found:
            console.print(f"{name:18s} {found[key]:.2%}")
    if "top1" not in found:
        return
    console.print(f"{'loss':18s} {found['loss']:.4f}\n{'calibration (ECE)':18s} {found['ece']:.4f}")
    console.print(f"{'speed':18s} {found['images_per_second']:.0f} images/s, {found['images']} images")
    if found["unreadable"]:
        console.print(f"[yellow]{found['unreadable']} pictures could not be read[/yellow]")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("class", "right", "most often taken for"):
        table.add_column(column)
    for i, (name, row) in enumerate(zip(found["classes"], found["confusion"], strict=True)):
        wrong = [(n, found["classes"][j]) for j, n in enumerate(row) if j != i and n]
        worst = max(wrong, default=(0, ""))
        table.add_row(
            _plain(name), f"{found['per_class'][i]:.1%}", _plain(f"{worst[1]} ({worst[0]})" if worst[0] else "-")
        )
    console.print(table)


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)
