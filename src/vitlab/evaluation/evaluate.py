"""The evaluation of a model on one split of a dataset: what it is scored by follows from the model and the data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import nn

from vitlab.checkpoints import native
from vitlab.checkpoints.load import ModelOrName, as_network, load_with_report, locate
from vitlab.errors import UsageError, VitlabError
from vitlab.evaluation.regions import evaluate_network
from vitlab.evaluation.result import Evaluation, FewShot, Templates
from vitlab.export.loader import Exported, is_export, open_network
from vitlab.images.bands import StoredPixels
from vitlab.images.datasets import (
    Captioned,
    Data,
    FileOptions,
    TargetColumns,
    first_few,
    images_per_class,
    is_table,
    open_data,
)
from vitlab.images.preprocess import Preprocess
from vitlab.images.samples import Samples, data_of_samples
from vitlab.images.sources import sources_of
from vitlab.images.sources.dataset import KIND_NAMES
from vitlab.images.sources.targets import table_titles
from vitlab.inference import check_reducer, on_device
from vitlab.inference_regions import finds_regions, kind_of, region_network
from vitlab.models import registry
from vitlab.models.base import Capability, Network, class_labels
from vitlab.models.dense_network import DenseNetwork
from vitlab.models.two_towers import TwoTowers, TwoTowersConfig
from vitlab.reduce import reducer_of
from vitlab.text.templates import LISTS, read_templates
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import (
    Features,
    PassOptions,
    evaluate_classifier,
    evaluate_zeroshot,
    features,
    few_shot_accuracies,
    knn_accuracy,
    probe_accuracy,
)
from vitlab.training.features import Count, adding, dataset_features
from vitlab.training.job import columns_of
from vitlab.training.labels import class_order, differing
from vitlab.training.objectives.clip import CLIPOptions
from vitlab.training.recipe import Recipe, read_recipe
from vitlab.training.retrieval import evaluate_retrieval
from vitlab.training.target_scores import reordered, task_scores
from vitlab.training.unreadable import check_skipped

SPLITS = ("train", "val", "test")
RECIPE = "recipe.toml"
Note = Callable[[str], object]


class EvaluateOptions(TypedDict, total=False):
    """`image_size` as in vitlab.load; the others are options of `open_data`."""

    image_size: int | tuple[int, int] | None

    path: str | None
    columns: TargetColumns | None  # of a table; default: as the model was trained
    allow_cut: bool
    allow_outside: bool


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
    progress: Count | None = None,
    note: Note | None = None,
    **options: Unpack[EvaluateOptions],
) -> Evaluation:
    """Evaluate a model, or a checkpoint or exported file by its name, on one split of a dataset.

    `data`: its name or path; an open dataset; or (image, label) pairs, as a list or a torch Dataset.

    A classifier is scored by its classes. `knn`, `probe` and `few_shot` (images per class, drawn `draws` times) score
    the features, alone where the model has no classes or others; on test, k-NN and probe learn from train and val. A
    CLIP is scored by captions where the data have them, or zero-shot where `templates` names its sentences. `split`:
    default test, or val without one. `flip` averages the scores of an image and its mirror image. `reducer` runs a ViT
    with fewer tokens: "tome:r=8". `device`: default the best for a name; a model stays where it is. More than
    `max_unreadable` images that cannot be read are an error. `progress` gets what is done after each batch, `note` what
    a user should know, as it is learned. `image_size`: of a model given by its name; positions are resized as
    vitlab.load does.
    """
    _check_numbers(few_shot, draws, batch_size)
    notes: list[str] = []

    def tell(text: str) -> None:
        notes.append(text)
        if note is not None:
            note(text)

    opening: dict[str, Any] = {**options}
    size = {} if (image_size := opening.pop("image_size", None)) is None else {"image_size": image_size}
    model = as_network(model, **size) if isinstance(model, nn.Module) else fspath(model)
    name = model if isinstance(model, str) else (model.card and model.card.name) or model.family
    recipe = None if isinstance(model, Network) else recipe_of(name)
    with_features = knn or probe or few_shot is not None
    if reducer is None and recipe is not None and recipe.model.reducer is not None:
        tell(f"{name} was trained with fewer tokens. To evaluate it so: --reducer {recipe.model.reducer}")
    check_reducer(model, reducer)
    network = model
    if not isinstance(network, Network):
        network, device = _open_model(name, reducer, templates is not None, tell, **size), device or "auto"
    if isinstance(network, Exported):
        _check_export(network, with_features or templates is not None)
    network = region_network(network, device) if isinstance(network, DenseNetwork) else network
    marks = kind_of(network) if isinstance(network, DenseNetwork) else None
    if not isinstance(data, Data | str | PathLike):
        if network.encoder.task.kind != "class":
            raise UsageError(f"{name} gives {network.encoder.task.description}: name a table of images, and not pairs.")
        data = data_of_samples(data, class_labels(network.encoder), _stored(network))
    source = data.name if isinstance(data, Data) else fspath(data)
    if not isinstance(data, Data):
        captions = templates is None and _may_read_text(model)  # where a source can be read either way
        stored = _stored(network)
        trained, group = _split_as_trained(recipe, source)
        opening.setdefault("columns", trained.pop("columns", None) or _columns(network.encoder, source, recipe))
        files = FileOptions("photo") if stored is None else FileOptions("stored", stored.channels)
        files = replace(files, group=group, marks=marks, max_bad_annotations=max_unreadable)
        data = open_data(source, captions=captions, files=files, **opening, **trained)
        for text in data.notes:
            tell(text)
    chosen = _choose_split(data, source, split)
    result = Evaluation(name, source, chosen, data.classes, reducer, notes=notes)
    if isinstance(network, DenseNetwork):
        if with_features or templates is not None or flip or reducer is not None:
            raise UsageError(
                f"{name} is scored by its masks or boxes: leave out --knn, --probe, --zeroshot and --flip."
            )
        result.scores = evaluate_network(network, name, data, getattr(data, chosen), progress, batch_size)
        check_skipped(result.scores.skipped, max_unreadable, "--max-unreadable", "--max-unreadable=...")
        result.skipped |= result.scores.skipped
        return result
    if data.annotated:
        raise UsageError(f"{source} has masks or boxes, and {name} is a {network.family}: it gives none.")
    common: dict[str, Any] = {"batch_size": batch_size, "reducer": None if reducer is None else reducer_of(reducer)}
    if templates is not None or data.captioned:
        if with_features:
            raise UsageError("--knn, --probe and --few-shot evaluate features by classes: leave them out here.")
        if templates is None and not isinstance(model, Network) and not isinstance(network, Exported):
            network = load_with_report(name, **size)[0]  # with its text tower
        clip = _clip(network, name, data, templates)
        image_set = ImageSet(getattr(data, chosen), _preprocess(on_device(clip, device), name))
        common |= {"flip": flip, "progress": adding(progress, f"{source}, {chosen}", len(image_set))}
        if isinstance(image_set.data, Captioned):
            result.retrieval = evaluate_retrieval(clip, image_set, image_set.data.captions, **common)
            result.skipped |= result.retrieval.skipped
        else:
            result.templates = _templates(templates or "", recipe)
            result.scores = evaluate_zeroshot(clip, image_set, data.classes, result.templates.sentences, **common)
            result.skipped |= result.scores.skipped
    else:
        _check_kind(network.encoder, data, name, with_features)
        _check_features(data, chosen, with_features, few_shot)
        network = on_device(network.encoder, device)
        image_set = ImageSet(getattr(data, chosen), _preprocess(network, name))
        order = _class_order(network, data, name, source, with_features, tell)
        if order is not None:
            count = adding(progress, f"{source}, {chosen}", len(image_set))
            scores = evaluate_classifier(network, image_set, flip=flip, order=order, progress=count, **common)
            result.scores = task_scores(scores, reordered(network.task, order))
            result.skipped |= result.scores.skipped
        if with_features or order is None:
            if not len(data.train):
                raise UsageError(
                    "--knn, --probe and --few-shot learn from training images, and there are only (image, label) pairs "
                    "to evaluate on: name a dataset; or evaluate a CLIP with templates."
                )
            pre = image_set.preprocess
            parts = [ImageSet(data.train, pre, "fast")]  # as training reads it, so that both share the features
            parts += [ImageSet(data.val, pre)] if chosen == "test" and data.val else []
            parts += [image_set]
            common["progress"] = adding(progress, "features", sum(map(len, parts)))
            *banks, queries = (_features(network, part, result.skipped, **common) for part in parts)
            bank: Features = torch.cat([x for x, _ in banks]), torch.cat([labels for _, labels in banks])
            result.knn = knn_accuracy(bank, queries) if knn or not with_features else None
            result.linear_probe = probe_accuracy(bank, queries) if probe else None
            if few_shot is not None:
                accuracies = few_shot_accuracies(banks[0], queries, data.classes, few_shot, draws=draws)
                result.few_shot = FewShot(few_shot, accuracies)
    check_skipped(result.skipped, max_unreadable, "--max-unreadable", "--max-unreadable=...")
    return result


def _features(model: Network, image_set: ImageSet, skipped: dict[str, str], **options: Unpack[PassOptions]) -> Features:
    """Unit-length features; those of all tokens are computed once, and kept."""
    if options.get("reducer") is not None:
        return features(model, image_set, skipped=skipped, **options)
    rows = dataset_features(model, image_set, progress=options.get("progress"))
    skipped |= rows.skipped
    return F.normalize(rows.vectors, dim=1), rows.labels


def recipe_of(checkpoint: str) -> Recipe | None:
    """The recipe a checkpoint was trained by: beside its folder in a run, in it where it is bundled."""
    folder = locate(checkpoint).absolute()
    return next((read_recipe(p) for p in (folder.parent / RECIPE, folder / RECIPE) if p.is_file()), None)


def _open_model(name: str, reducer: str | None, with_text: bool, note: Note, **size: Any) -> Network:
    """Loads the encoder alone, unless `with_text`: of a CLIP both towers. `size`: image_size, where it is given."""
    if is_export(name):
        return open_network(name, **size)
    if reducer is not None:
        reducer_of(reducer)  # before the model is read
    model, report = load_with_report(name, encoder=not (with_text or finds_regions(name)), **size)
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
    return (folder / native.CARD).is_file() and _reads_text(native.read_card(folder)["family"])


def _reads_text(family: str) -> bool:
    return issubclass(registry.FAMILIES[family][0], TwoTowersConfig)


def _stored(network: Network) -> StoredPixels | None:
    """What image files must hold for this model; None: photos."""
    return None if network.encoder.preprocess is None else network.encoder.preprocess.stored


def _split_as_trained(recipe: Recipe | None, source: str) -> tuple[dict[str, Any], str | None]:
    """Where val was split off train, a run's own model is evaluated on what it has not seen: by its run's seed, and by
    its groups.
    """
    if recipe is None:
        return {}, None
    trained, now = ([Path(part).expanduser() for part in sources_of(name)] for name in (recipe.data.source, source))
    same = len(trained) == len(now) and all(
        a == b or (a.exists() and b.exists() and a.samefile(b)) for a, b in zip(trained, now, strict=True)
    )
    if not same:
        return {}, None
    d = recipe.data
    options = {"seed": recipe.run.seed, "val_fraction": d.val_fraction, "apply": d.apply}
    return options | ({"columns": columns_of(recipe)} if columns_of(recipe).settings else {}), d.group


def _columns(model: Network, source: str, recipe: Recipe | None) -> TargetColumns | None:
    """Of a table, the columns that the model was trained on, or those with the names of what it gives."""
    trained = TargetColumns() if recipe is None else columns_of(recipe)
    learned = model.labels if model.task.kind != "class" else None
    if not is_table(source) or not (trained.names or learned):
        return None
    titles = {title.lower() for title in table_titles(Path(source).expanduser())}
    if trained.names and all(name.lower() in titles for name in trained.names):
        return trained
    if not learned:
        return None
    if model.task.kind == "number":
        return TargetColumns(target=learned[0])
    all_there = all(label.lower() in titles and "," not in label for label in learned)
    return TargetColumns(labels=",".join(learned)) if all_there else None


def _check_kind(model: Network, data: Data, name: str, with_features: bool) -> None:
    """Refuse data whose labels are of another kind than the model's outputs."""
    if data.kind == "class" and (model.task.kind == "class" or not model.classes):
        return
    if data.kind != model.task.kind or not model.classes:
        raise UsageError(
            f"{data.name} has {KIND_NAMES[data.kind]}, but {name} gives "
            f"{model.task.description if model.classes else 'features'}: evaluate it on data of that kind, or train it "
            f"on these: vitlab train {data.name} model.init_from={name}"
        )
    if with_features:
        raise UsageError("--knn, --probe and --few-shot evaluate features by classes: leave them out here.")


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
    if few_shot is not None and (fewest := int(images_per_class(data.train).min())) < few_shot:
        raise UsageError(f"--few-shot {few_shot}: train holds only {fewest} of one class. Use that or less.")


def _class_order(
    model: Network, data: Data, name: str, source: str, with_features: bool, note: Note
) -> list[int] | None:
    """The model's output for each class of the data; None where it has none, so that only its features are scored."""
    classes, labels = data.classes, model.labels
    if not model.classes:
        return None
    if data.kind == "number":
        return [0]
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


def _clip(model: Network, name: str, data: Data, templates: str | None) -> TwoTowers:
    """The model, checked to be a CLIP or SigLIP with a tokenizer, for data that go with the templates."""
    if not isinstance(model, TwoTowers):
        why = "--zeroshot evaluates" if templates is not None else f"{data.name} has captions, which evaluate"
        raise UsageError(f"{why} a CLIP or SigLIP, but {name} is of the family {model.family}.")
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
