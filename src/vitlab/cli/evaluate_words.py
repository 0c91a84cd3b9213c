"""vitlab eval of a CLIP: by the names of classes (zero-shot), or by captions (recall, both ways)."""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints import native
from vitlab.checkpoints.load import locate
from vitlab.cli.console import out
from vitlab.cli.progress import counting
from vitlab.errors import UsageError
from vitlab.images.datasets import Captioned, Data
from vitlab.inference import reads_text
from vitlab.layers.reducer import Reducer
from vitlab.text.templates import LISTS, read_templates
from vitlab.training.batches import Pictures
from vitlab.training.evaluate import Scores, evaluate_zeroshot
from vitlab.training.processes import pick_device
from vitlab.training.recipe import Recipe, read_recipe
from vitlab.training.retrieval import AT, evaluate_retrieval

NAME = "recipe.toml"
WAYS = {"image_to_text": "picture -> caption", "text_to_image": "caption -> picture"}


def is_clip(checkpoint: str) -> bool:
    """A CLIP in a folder of our own; what else there is opens without a look at its family."""
    folder = locate(checkpoint)
    return (folder / native.CARD).is_file() and native.read_card(folder)["family"] == "clip"


def recipe_of(checkpoint: str) -> Recipe | None:
    """What it was trained by: beside the folder in a run, in it where it is bundled; None where that is not known."""
    folder = locate(checkpoint).absolute()
    return next((read_recipe(p) for p in (folder.parent / NAME, folder / NAME) if p.is_file()), None)


def judge_by_words(
    model: Any,
    checkpoint: str,
    data: Data,
    split: str,
    templates: str | None,
    *,
    flip: bool,
    reducer: Reducer | None,
    batch_size: int,
    device: str,
) -> tuple[dict[str, Any], dict[str, str]]:
    """What is found, for JSON; and the pictures that could not be read."""
    if not reads_text(model):
        why = "--zeroshot judges" if templates is not None else f"{data.name} has captions, which judge"
        raise UsageError(f"{why} a CLIP, but {checkpoint} is of the family {model.family}.")
    model.require_tokenizer()
    if templates is not None and data.captioned:
        raise UsageError(f"{data.name} has captions and no classes: leave out --zeroshot.")
    model.to(pick_device(device))
    part = getattr(data, split)
    pictures = Pictures(part, model.preprocess)
    with counting(f"{data.name}, {split}", len(pictures)) as progress:
        common: dict[str, Any] = dict(batch_size=batch_size, flip=flip, reducer=reducer, progress=progress)
        if isinstance(part, Captioned):
            found = evaluate_retrieval(model, pictures, part.captions, **common)
            return found.to_dict(), found.skipped
        assert templates is not None
        sentences = read_templates(templates)
        scores = evaluate_zeroshot(model, pictures, data.classes, sentences, **common)
    told = {"list": templates if templates in LISTS else None, "sentences": sentences}
    told["learned_from"] = _learned(checkpoint, sentences)
    return {**scores.to_dict(), "templates": told, "confused": confused(scores, data.classes)}, scores.skipped


def _learned(checkpoint: str, sentences: list[str]) -> int | None:
    """How many of them the run has learned from; None: it is not known."""
    saved = recipe_of(checkpoint)
    if saved is None:
        return None
    try:
        known = read_templates(saved.objective.templates)
    except ValueError:  # a file that is gone
        return None
    return len(set(sentences) & set(known))


def words_of(found: dict[str, Any]) -> str:
    """zero-shot, 7 templates of held_out, none of them learned from"""
    told = found["templates"]
    of = f" of {told['list']}" if told["list"] else ""
    learned = {None: "", 0: ", none of them learned from"}.get(
        told["learned_from"], f", {told['learned_from']} of them learned from"
    )
    first, *more = told["sentences"]
    count = f"{len(more) + 1} templates" if more else "1 template"
    return f"{'zero-shot':18s} {count}{of}{learned}: {first!r}{', ...' if more else ''}"


def show_recall(found: dict[str, Any]) -> None:
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


def confused(scores: Scores, classes: list[str]) -> list[dict[str, Any]]:
    return [
        {"truth": classes[truth], "answer": classes[answer], "images": count}
        for truth, answer, count in scores.confused()
    ]
