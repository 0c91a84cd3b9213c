"""vitlab.evaluate: how good a model is on a dataset. The command `vitlab eval` prints what it returns.

result = vitlab.evaluate("bundled:digits", "digits")
result.scores.top(1), result.scores.per_class(), result.scores.calibration_error()
vitlab.evaluate("model.onnx", [("a.png", "cat"), ("b.png", "dog")])  # or a torch Dataset of (image, label)
vitlab.evaluate("bundled:dino", "cifar10", knn=True).knn             # features, against the training images
vitlab.evaluate("bundled:clip", "digits", templates="held_out")      # zero-shot, by the names of the classes
vitlab.evaluate("bundled:clip", "flickr8k/").retrieval.recall(10)    # images with captions
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from statistics import mean, stdev
from typing import Any, TypedDict, Unpack

import numpy as np
from torch import nn

from vitlab.checkpoints import native
from vitlab.checkpoints.load import ModelOrName, load_with_report, locate
from vitlab.errors import UsageError, VitlabError
from vitlab.export.loader import Exported, is_export, open_export
from vitlab.images.datasets import Captioned, Data, first_few, open_data
from vitlab.images.preprocess import Preprocess
from vitlab.images.samples import Samples, data_of_samples
from vitlab.inference import check_reducer, class_labels, on_device
from vitlab.models.base import Capability, Network, unwrap
from vitlab.models.clip import CLIP
from vitlab.reduce import reducer_of
from vitlab.text.templates import LISTS, read_templates
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import (
    Scores,
    evaluate_classifier,
    evaluate_zeroshot,
    features,
    few_shot_accuracies,
    knn_accuracy,
    probe_accuracy,
)
from vitlab.training.labels import class_order, differing
from vitlab.training.objectives.clip import CLIPOptions
from vitlab.training.recipe import Recipe, read_recipe
from vitlab.training.retrieval import Retrieval, evaluate_retrieval
from vitlab.training.unreadable import check_skipped

SPLITS = ("train", "val", "test")
RECIPE = "recipe.toml"
Progress = Callable[[str, int, int], object]  # what is being run through the model, images done, images in all
Note = Callable[[str], object]


class OpenOptions(TypedDict, total=False):
    """Options of `open_data` that also apply to a dataset that is evaluated."""

    path: str | None
    allow_cut: bool
    allow_outside: bool


@dataclass(frozen=True)
class FewShot:
    """Accuracy of a classifier on the features of `shots` images of each class, for several draws of them."""

    shots: int
    draws: list[float]

    def to_dict(self) -> dict[str, Any]:
        return {
            "shots": self.shots,
            "mean": mean(self.draws),
            "deviation": stdev(self.draws),
            "draws": self.draws,
        }


@dataclass(frozen=True)
class Templates:
    """The sentences of a zero-shot evaluation."""

    list: str | None  # the name of a list of text/templates.py
    sentences: list[str]
    learned_from: int | None  # how many of them the model was trained on; None: not known


@dataclass
class Evaluation:
    """What `evaluate` measured; None where something was not measured."""

    checkpoint: str
    data: str
    split: str
    classes: list[str]
    reducer: str | None = None
    scores: Scores | None = None  # of the classifier, or zero-shot
    retrieval: Retrieval | None = None
    templates: Templates | None = None
    knn: float | None = None
    linear_probe: float | None = None
    few_shot: FewShot | None = None
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read: name -> what is wrong
    notes: list[str] = field(default_factory=list)

    @property
    def confused(self) -> list[dict[str, Any]]:
        """Every kind of mistake, the most frequent first."""
        pairs = [] if self.scores is None else self.scores.confused()
        return [{"truth": self.classes[i], "answer": self.classes[j], "images": count} for i, j, count in pairs]

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab eval --json` prints it."""
        values: dict[str, Any] = {"checkpoint": self.checkpoint, "data": self.data, "split": self.split}
        values |= {"reducer": self.reducer, "classes": self.classes}
        if self.retrieval is not None:
            values |= self.retrieval.to_dict()
        if self.scores is not None:
            values |= self.scores.to_dict()
        if self.templates is not None:
            values["templates"] = vars(self.templates)
        if self.scores is not None:
            values["confused"] = self.confused
        values |= {} if self.knn is None else {"knn": self.knn}
        values |= {} if self.linear_probe is None else {"linear_probe": self.linear_probe}
        values |= {} if self.few_shot is None else {"few_shot": self.few_shot.to_dict()}
        return values | {"unreadable": len(self.skipped), "unreadable_pictures": list(self.skipped.values())}


def evaluate(
    model: ModelOrName,
    data: Data | Samples | str | PathLike[str],
    *,
    split: str | None = None,
    knn: bool = False,
    probe: bool = False,
    few_shot: int | None = None,
    draws: int = 10,
    templates: str | None = None,
    flip: bool = False,
    reducer: str | None = None,
    batch_size: int = 256,
    device: str | None = None,
    max_unreadable: int = 20,
    progress: Progress | None = None,
    note: Note | None = None,
    **options: Unpack[OpenOptions],
) -> Evaluation:
    """Evaluate a model, or a checkpoint or exported file by its name, on one split of a dataset.

    `data`: its name or path; an open dataset; or (image, label) pairs, as a list or a torch Dataset.

    A classifier is scored by its classes. `knn`, `probe` and `few_shot` (images per class, drawn `draws` times) score
    the features, alone where the model has no classes or others. A CLIP is scored by captions where the data have
    them, or zero-shot where `templates` names its sentences. `split`: default test, or val without one. `flip`
    averages the scores of an image and its mirror image. `reducer` runs a ViT with fewer tokens: "tome:r=8".
    `device`: default the best for a name; a model stays where it is. More than `max_unreadable` images that cannot be
    read are an error. `progress` gets what is done after each batch, `note` what a user should know, as it is learned.
    """
    _check_numbers(few_shot, draws, batch_size)
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        if note is not None:
            note(text)

    model = unwrap(model) if isinstance(model, nn.Module) else fspath(model)
    name = model if isinstance(model, str) else (model.card and model.card.name) or model.family
    recipe = None if isinstance(model, Network) else recipe_of(name)
    with_features = knn or probe or few_shot is not None
    if reducer is None and recipe is not None and recipe.model.reducer is not None:
        tell(f"{name} was trained with fewer tokens. To evaluate it so: --reducer {recipe.model.reducer}")
    check_reducer(model, reducer)
    network = model
    if not isinstance(network, Network):
        network, device = _open_model(name, reducer, templates is not None, tell), device or "auto"
    if isinstance(network, Exported):
        _check_export(network, with_features or templates is not None)
    if not isinstance(data, Data | str | PathLike):
        data = data_of_samples(data, class_labels(network.encoder))
    source = data.name if isinstance(data, Data) else fspath(data)
    if not isinstance(data, Data):
        captions = templates is None and _may_read_text(model)  # where a source can be read either way
        data = open_data(source, captions=captions, **options, **_split_as_trained(recipe, source))
        for text in data.notes:
            tell(text)
    chosen = _choose_split(data, source, split)
    result = Evaluation(name, source, chosen, data.classes, reducer, notes=notes)
    common: dict[str, Any] = {"batch_size": batch_size, "reducer": None if reducer is None else reducer_of(reducer)}
    if templates is not None or data.captioned:
        if with_features:
            raise UsageError("--knn, --probe and --few-shot evaluate features by classes: leave them out here.")
        if templates is None and not isinstance(model, Network) and not isinstance(network, Exported):
            network = load_with_report(name)[0]  # with its text tower
        clip = _clip(network, name, data, templates)
        image_set = ImageSet(getattr(data, chosen), _preprocess(on_device(clip, device), name))
        common |= {"flip": flip, "progress": _counter(progress, f"{source}, {chosen}", len(image_set))}
        if isinstance(image_set.data, Captioned):
            result.retrieval = evaluate_retrieval(clip, image_set, image_set.data.captions, **common)
            result.skipped |= result.retrieval.skipped
        else:
            result.templates = _templates(templates or "", recipe)
            result.scores = evaluate_zeroshot(clip, image_set, data.classes, result.templates.sentences, **common)
            result.skipped |= result.scores.skipped
    else:
        _check_features(data, chosen, with_features, few_shot)
        network = on_device(network.encoder, device)
        image_set = ImageSet(getattr(data, chosen), _preprocess(network, name))
        order = _class_order(network, data, name, source, with_features, tell)
        if order is not None:
            count = _counter(progress, f"{source}, {chosen}", len(image_set))
            result.scores = evaluate_classifier(network, image_set, flip=flip, order=order, progress=count, **common)
            result.skipped |= result.scores.skipped
        if with_features or order is None:
            if not len(data.train):
                raise UsageError(
                    "--knn, --probe and --few-shot learn from training images, and there are only (image, label) pairs "
                    "to evaluate on: name a dataset; or evaluate a CLIP with templates."
                )
            train = ImageSet(data.train, image_set.preprocess)
            common["progress"] = _counter(progress, "features", len(train) + len(image_set))
            bank, queries = (features(network, part, skipped=result.skipped, **common) for part in (train, image_set))
            result.knn = knn_accuracy(bank, queries) if knn or not with_features else None
            result.linear_probe = probe_accuracy(bank, queries) if probe else None
            if few_shot is not None:
                accuracies = few_shot_accuracies(bank, queries, data.classes, few_shot, draws=draws)
                result.few_shot = FewShot(few_shot, accuracies)
    check_skipped(result.skipped, max_unreadable, "--max-unreadable", "--max-unreadable=...")
    return result


def recipe_of(checkpoint: str) -> Recipe | None:
    """The recipe a checkpoint was trained by: beside its folder in a run, in it where it is bundled."""
    folder = locate(checkpoint).absolute()
    return next((read_recipe(p) for p in (folder.parent / RECIPE, folder / RECIPE) if p.is_file()), None)


def _open_model(name: str, reducer: str | None, with_text: bool, note: Note) -> Network:
    """Loads the encoder alone, unless `with_text`: of a CLIP both towers."""
    if is_export(name):
        return open_export(name)
    if reducer is not None:
        reducer_of(reducer)  # before the model is read
    model, report = load_with_report(name, encoder=not with_text)
    for text in report.notes:
        note(text)
    return model


def _check_export(model: Exported, more: bool) -> None:
    """`more`: something besides its classes is to be evaluated."""
    if Capability.CLASSIFY not in model.capabilities:
        raise UsageError(
            f"{model.path} was exported to give features and no classes: evaluate the checkpoint that it is made of."
        )
    if more:
        raise UsageError(
            "--knn, --probe, --few-shot and --zeroshot evaluate features, and an exported file gives classes alone: "
            "leave them out, or evaluate the checkpoint that it is made of."
        )


def _may_read_text(model: Network | str) -> bool:
    """Whether it reads captions; of checkpoints only those in a folder of our own are looked into."""
    if isinstance(model, Network):
        return Capability.TEXT in model.capabilities
    folder = locate(model)
    return (folder / native.CARD).is_file() and native.read_card(folder)["family"] == CLIP.family


def _split_as_trained(recipe: Recipe | None, source: str) -> dict[str, Any]:
    """Where val was split off train, a run's own model is evaluated on what it has not seen: by its run's seed."""
    if recipe is None:
        return {}
    places = [Path(name).expanduser() for name in (recipe.data.source, source)]
    same = recipe.data.source == source or (all(p.exists() for p in places) and places[0].samefile(places[1]))
    return {"seed": recipe.run.seed, "val_fraction": recipe.data.val_fraction} if same else {}


def _choose_split(data: Data, source: str, split: str | None) -> str:
    available = [name for name in SPLITS if getattr(data, name)]  # neither missing nor empty
    chosen = split or ("test" if data.test is not None else "val")
    if chosen not in available:
        raise UsageError(f"{source} has no split {chosen!r}: use --split {' or '.join(available)}.")
    return chosen


def _preprocess(model: Network, name: str) -> Preprocess:
    if model.preprocess is None:
        raise UsageError(f"{name}: the model has no preprocess, so it cannot read images.")
    return model.preprocess


def _counter(progress: Progress | None, what: str, total: int) -> Callable[[int], object] | None:
    """Adds up the images of each batch for `progress`."""
    if progress is None:
        return None
    done = 0

    def add(count: int) -> None:
        nonlocal done
        done += count
        progress(what, done, total)

    return add


def _check_numbers(few_shot: int | None, draws: int, batch_size: int) -> None:
    for option, value, least in (("few_shot", few_shot, 1), ("draws", draws, 2), ("batch_size", batch_size, 1)):
        if value is not None and value < least:
            raise UsageError(f"{option}={value} must be at least {least}.")


def _check_features(data: Data, split: str, with_features: bool, few_shot: int | None) -> None:
    if split == "train" and with_features:
        raise UsageError(
            "--knn, --probe and --few-shot learn from train, so they cannot be evaluated on it: use --split val or "
            "test."
        )
    fewest = int(np.bincount(data.train.labels, minlength=len(data.classes)).min())
    if few_shot is not None and fewest < few_shot:
        raise UsageError(f"--few-shot {few_shot}: train holds only {fewest} of one class. Use that or less.")


def _class_order(
    model: Network, data: Data, name: str, source: str, with_features: bool, note: Note
) -> list[int] | None:
    """The model's output for each class of the data; None where it has none, so that only its features are scored."""
    classes, labels = data.classes, model.labels
    if not model.classes:
        return None
    if labels is None and model.classes == len(classes):
        note(f"{name} does not name its classes: they are taken to be {first_few(classes)}, in this order.")
        return list(range(len(classes)))
    if labels is not None and (order := class_order(labels, classes)) is not None:
        return order
    what = f"{name} has {model.classes} classes, which it does not name, but {source} has {len(classes)}"
    if labels is not None:
        what = f"{name} knows other classes than {source} has: "
        what += differing(labels, classes, "the checkpoint", "the data")
    if with_features:
        note(f"{what}. Only its features are evaluated.")
        return None
    remedy = "Rename the classes of the data if they mean the same"
    if not isinstance(model, Exported):
        remedy += (
            f"; fine-tune the model on them: vitlab train {source} model.init_from={name}; or evaluate its features "
            "alone: --knn, --probe, --few-shot"
        )
    raise UsageError(f"{what}. {remedy}.")


def _clip(model: Network, name: str, data: Data, templates: str | None) -> CLIP:
    """The model, checked to be a CLIP with a tokenizer, for data that go with the templates."""
    if not isinstance(model, CLIP):
        why = "--zeroshot evaluates" if templates is not None else f"{data.name} has captions, which evaluate"
        raise UsageError(f"{why} a CLIP, but {name} is of the family {model.family}.")
    model.require_tokenizer()
    if templates is not None and data.captioned:
        raise UsageError(f"{data.name} has captions and no classes: leave out --zeroshot.")
    return model


def _templates(text: str, recipe: Recipe | None) -> Templates:
    """The sentences, and how many of them the run of the recipe learned from."""
    sentences, learned = read_templates(text), None
    if recipe is not None:
        with suppress(VitlabError):  # a file that is gone
            learned = len(set(sentences) & set(read_templates(CLIPOptions.of(recipe).templates)))
    return Templates(text if text in LISTS else None, sentences, learned)
