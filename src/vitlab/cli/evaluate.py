"""vitlab eval."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

from vitlab.checkpoints.load import load_with_report
from vitlab.cli.console import out, print_json_text, say
from vitlab.cli.evaluate_words import confused, is_clip, judge_by_words, recipe_of, show_recall, words_of
from vitlab.cli.predict import INSIDE, place
from vitlab.cli.progress import counting, following_downloads
from vitlab.errors import UsageError
from vitlab.export.loader import Exported, is_export, open_export
from vitlab.images.datasets import Data, open_data
from vitlab.layers.reducer import Reducer
from vitlab.printable import one_line
from vitlab.reduce import reducer_of
from vitlab.training.batches import Pictures
from vitlab.training.evaluate import Features, evaluate, features, knn_accuracy, probe_accuracy
from vitlab.training.fewshot import few_shot_accuracies
from vitlab.training.labels import class_order, differing, shown
from vitlab.training.processes import Processes
from vitlab.training.runlog import to_json
from vitlab.training.unreadable import check_skipped

NAMES = {"top1": "top-1", "top5": "top-5", "knn": "k-NN on features", "linear_probe": "linear probe"}
CLASSES, PAIRS, UNREADABLE = 40, 10, 10  # rows that are shown; --json has all


def run(
    checkpoint: str,
    source: str,
    path: str | None,
    split: str | None,
    knn: bool,
    probe: bool,
    few_shot: int | None,
    draws: int,
    zeroshot: str | None,
    flip: bool,
    fewer: str | None,
    batch_size: int,
    device: str,
    max_unreadable: int,
    json: bool,
    allow: dict[str, bool],
) -> None:
    """`zeroshot`: the templates that a CLIP is judged by, where that is asked for. `fewer`: a reducer in words.

    `allow`: allow_cut and allow_outside of open_data.
    """
    frozen, shipped = knn or probe or few_shot is not None, is_export(checkpoint)
    if shipped and fewer is not None:
        raise UsageError(INSIDE.format(checkpoint))
    reducer = _reducer(checkpoint, fewer)
    model = _exported(checkpoint, frozen or zeroshot is not None) if shipped else _loaded(checkpoint, zeroshot is None)
    with following_downloads():
        captions = zeroshot is None and is_clip(checkpoint)  # where a source may be read either way
        data = open_data(source, path=path, captions=captions, **allow, **_split_as_trained(checkpoint, source))
    for note in data.notes:
        say(f"note: {note}")
    chosen = split or ("test" if data.test is not None else "val")
    if chosen not in ("train", "val", "test") or getattr(data, chosen) is None:
        have = [name for name in ("train", "val", "test") if getattr(data, name) is not None]
        raise UsageError(f"{source} has no split {chosen!r}: use --split {' or '.join(have)}.")
    about = {"checkpoint": checkpoint, "data": source, "split": chosen, "reducer": fewer}
    if zeroshot is not None or data.captioned:
        if frozen:
            raise UsageError("--knn, --probe and --few-shot judge features by classes: leave them out here.")
        whole = model if zeroshot is not None or shipped else load_with_report(checkpoint)[0]
        common = dict(flip=flip, reducer=reducer, batch_size=batch_size, device=device)
        found, skipped = judge_by_words(whole, checkpoint, data, chosen, zeroshot, **common)
        found = {**about, "classes": data.classes, **found}
        check_skipped(skipped, max_unreadable, "--max-unreadable", "--max-unreadable=...")
        print_json_text(to_json(found)) if json else _show(found)
        return
    if chosen == "train" and frozen:
        raise UsageError(
            "--knn, --probe and --few-shot learn from train, so they cannot be judged on it: use --split val or test."
        )
    fewest = int(np.bincount(data.train.labels, minlength=len(data.classes)).min())
    if few_shot is not None and fewest < few_shot:
        raise UsageError(f"--few-shot {few_shot}: train holds only {fewest} of one class. Use that or less.")
    if model.preprocess is None:
        raise UsageError(f"{checkpoint}: the model has no preprocess, so it cannot read pictures.")
    model = place(model, device)
    pictures, skipped = Pictures(getattr(data, chosen), model.preprocess), {}
    found: dict[str, Any] = {**about, "classes": data.classes}
    order = _order(model, data, checkpoint, source, features_will_do=frozen)
    if order is not None:
        with counting(f"{source}, {chosen}", len(pictures)) as progress:
            common: dict[str, Any] = dict(batch_size=batch_size, reducer=reducer, progress=progress)
            processes = Processes() if shipped else None
            scores = evaluate(model, pictures, flip=flip, order=order, processes=processes, **common)
        skipped |= scores.skipped
        found |= {**scores.to_dict(), "confused": confused(scores, data.classes)}
    if frozen or order is None:
        with counting("features", len(data.train) + len(pictures)) as progress:
            common = dict(batch_size=batch_size, skipped=skipped, reducer=reducer, progress=progress)
            known = features(model, Pictures(data.train, model.preprocess), **common)
            asked = features(model, pictures, **common)
        found |= {"knn": knn_accuracy(known, asked)} if knn or not frozen else {}
        found |= {"linear_probe": probe_accuracy(known, asked)} if probe else {}
        found |= {"few_shot": _few_shot(known, asked, data.classes, few_shot, draws)} if few_shot is not None else {}
    found |= {"unreadable": len(skipped), "unreadable_pictures": list(skipped.values())}
    check_skipped(skipped, max_unreadable, "--max-unreadable", "--max-unreadable=...")
    print_json_text(to_json(found)) if json else _show(found)


def _reducer(checkpoint: str, asked: str | None) -> Reducer | None:
    if asked is not None:
        return reducer_of(asked)
    recipe = recipe_of(checkpoint)
    if recipe is not None and recipe.model.reducer is not None:
        say(f"note: {checkpoint} was trained with fewer tokens. To judge it so: --reducer {recipe.model.reducer}")
    return None


def _loaded(checkpoint: str, encoder: bool) -> Any:
    model, report = load_with_report(checkpoint, encoder=encoder)
    for note in report.notes:
        say(f"note: {note}")
    return model


def _exported(path: str, more: bool) -> Exported:
    """`more`: something else than its classes is asked for."""
    model = open_export(path)
    if model.metadata.gives != "logits":
        raise UsageError(
            f"{path} was exported to give features and no classes: judge the checkpoint that it is made of."
        )
    if more:
        raise UsageError(
            "--knn, --probe, --few-shot and --zeroshot judge features, and an exported file gives classes alone: "
            "leave them out, or judge the checkpoint that it is made of."
        )
    return model


def _split_as_trained(checkpoint: str, source: str) -> dict[str, Any]:
    """Where val was split off train, a run's own model must be judged on what it has not seen: by its run's seed."""
    recipe = recipe_of(checkpoint)
    if recipe is None:
        return {}
    places = [Path(name).expanduser() for name in (recipe.data.source, source)]
    same = recipe.data.source == source or (all(p.exists() for p in places) and places[0].samefile(places[1]))
    return {"seed": recipe.run.seed, "val_fraction": recipe.data.val_fraction} if same else {}


def _order(model: Any, data: Data, checkpoint: str, source: str, features_will_do: bool) -> list[int] | None:
    """The model's output for each class of the data; None where it has none and its features alone are judged."""
    classes = data.classes
    if not model.config.classes:
        return None
    if model.labels is None and model.config.classes == len(classes):
        say(f"note: {checkpoint} does not name its classes: they are taken to be {shown(classes)}, in this order.")
        return list(range(len(classes)))
    order = None if model.labels is None else class_order(model.labels, classes)
    if order is not None:
        return order
    if model.labels is None:
        what = (
            f"{checkpoint} has {model.config.classes} classes, which it does not name, but {source} has {len(classes)}"
        )
    else:
        what = f"{checkpoint} knows other classes than {source} has: "
        what += differing(model.labels, classes, "the checkpoint", "the data")
    if features_will_do:
        say(f"note: {what}. Its features alone are judged.")
        return None
    if isinstance(model, Exported):
        raise UsageError(f"{what}. Rename the classes of the data if they mean the same.")
    raise UsageError(
        f"{what}. Rename the classes of the data if they mean the same; fine-tune the model on them: "
        f"vitlab train {source} model.init_from={checkpoint}; or judge its features alone: --knn, --probe, --few-shot."
    )


def _few_shot(known: Features, asked: Features, classes: list[str], shots: int, draws: int) -> dict[str, Any]:
    each = few_shot_accuracies(known, asked, classes, shots, draws=draws)
    return {"shots": shots, "mean": mean(each), "deviation": stdev(each), "draws": each}


def _show(found: dict[str, Any]) -> None:
    console = out(markup=False)
    fewer = "" if found["reducer"] is None else f", with {found['reducer']}"
    console.print(f"{found['checkpoint']} on {found['data']}, {found['split']} split{fewer}")
    if "recall" in found:
        show_recall(found)
    if "templates" in found:
        console.print(words_of(found))
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
