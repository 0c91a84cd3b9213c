"""Images -> labelled scores or embeddings: the one path that the command line, the server and the examples share.

vitlab.predict("bundled:cifar10", "cat.jpg")               # a model, or the name or path that vitlab.load takes
vitlab.predict("model.onnx", "cat.jpg")                    # or an exported file
vitlab.predict("bundled:cifar10", "photos/")               # every image of a folder, at any depth
vitlab.embed(model, ["cat.jpg", "digits#3"])               # paths, samples of a dataset, PIL images, arrays, bytes
vitlab.zero_shot("bundled:clip", "cat.jpg", ["cat", "dog"])
vitlab.predict("mine.pth", "cat.jpg", heads=4, device="cuda")  # options of vitlab.load, and where it runs
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.advice import to_type
from vitlab.checkpoints.digests import fingerprint
from vitlab.checkpoints.load import ModelOrName
from vitlab.checkpoints.native import write_text
from vitlab.device import pick_device
from vitlab.errors import DataError, ImageError, UsageError, VitlabError
from vitlab.export.loader import Exported, is_export, open_network
from vitlab.images.read import Source, read_image, thumbnail_url
from vitlab.images.samples import check_image, contents, is_image
from vitlab.images.sorting import SortedFolder
from vitlab.images.sources.folder import images_under
from vitlab.images.sources.table import listed_files, names_files
from vitlab.layers.reducer import Reducer
from vitlab.models.base import Capability, Network, class_labels, evaluating, features_of
from vitlab.models.task import LabelTask, NumberTask
from vitlab.models.two_towers import TwoTowers, as_two_towers
from vitlab.printable import csv_cell, valid_utf8
from vitlab.reduce import reducer_of
from vitlab.tables import Bar, Cell, Table, Tabular, Thumbnail
from vitlab.text.templates import class_prompts, fill, read_labels, read_templates

__all__ = [
    "Embedding",
    "Labels",
    "Prediction",
    "Predictions",
    "embed",
    "embed_labels",
    "embed_text",
    "encoder_of",
    "fingerprint",
    "predict",
    "reads_text",
    "zero_shot",
]

Progress = Callable[[int], object]  # called with the number of images done, after each batch
Note = Callable[[str], object]
Row = tuple[str, Tensor | None, str | None]  # an image's name, its result, and the error if there is none


def open_model(model: ModelOrName, device: str | None = None, **load_options: Any) -> Network:
    """A model as it is; or the checkpoint or exported file of this name, opened with options of vitlab.load.

    `device`: default the best for a name; a model stays where it is.
    """
    network = open_network(model, **load_options)
    return on_device(network, device if isinstance(model, nn.Module) else device or "auto")


def on_device(model: Network, device: str | None) -> Network:
    """None: where it is. An exported file runs on the CPU."""
    if not isinstance(model, Exported):
        return model if device is None else model.to(pick_device(device))
    if device not in (None, "auto", "cpu"):
        raise UsageError(f"--device {device}: an exported file runs on the CPU here: leave --device out.")
    return model


def check_reducer(model: ModelOrName, reducer: object) -> None:
    """Refuse a reducer for an exported file, before it is opened."""
    exported = isinstance(model, Exported) if isinstance(model, nn.Module) else is_export(model)
    if reducer is not None and exported:
        name = model.path if isinstance(model, Exported) else model
        raise UsageError(f"{name} is an exported network: give --reducer to vitlab export, not here.")


@dataclass
class Prediction(Tabular):
    """What a model says of one image: classes with their probabilities, the labels it has, or a number. Or why not."""

    name: str
    scores: list[tuple[str, float]] = field(default_factory=list)  # best first; labels: those above their thresholds
    error: str | None = None
    value: float | None = None  # a number
    quantity: str | None = None  # what the number is

    @property
    def label(self) -> str | None:
        return self.scores[0][0] if self.scores else None

    def to_dict(self) -> dict[str, Any]:
        if self.error is not None:
            return {"image": self.name, "error": self.error}
        if self.value is not None:
            return {"image": self.name, "target": self.quantity, "value": self.value}
        return {"image": self.name, "scores": [{"label": label, "probability": p} for label, p in self.scores]}

    def table(self) -> Table:
        return Predictions([self]).table()

    def lines(self) -> list[list[Cell]]:
        """Class, probability and bar; or why there is none."""
        if self.error is not None or not self.scores:
            return [["-", "", self.error or "no label is above its threshold"]]
        return [[label, f"{probability:.1%}", Bar(probability)] for label, probability in self.scores]


class Predictions(Tabular, list[Prediction]):
    """A list of predictions. Printed, or at the end of a notebook's cell, it is a table, with small images."""

    def table(self, most: int = 50) -> Table:
        """Of the first `most` images."""
        rows: list[list[Cell]] = []
        quantity = next((p.quantity or "value" for p in self if p.value is not None), None)
        for prediction in self[:most]:
            image: list[Cell] = [Thumbnail(partial(_small_image, prediction)), Path(prediction.name).name]
            if quantity is not None:
                rows.append([*image, f"{prediction.value:.6g}" if prediction.value is not None else "-"])
                continue
            for line in prediction.lines():
                rows.append([*image, *line])
                image = ["", ""]
        notes = [f"and {len(self) - most:,} more"] if len(self) > most else []
        if quantity is not None:
            return Table(["", "image", quantity], rows, (quantity,), notes=notes)
        return Table(["", "image", "class", "probability", ""], rows, ("probability",), notes=notes)

    def scored(self) -> Predictions:
        """Those without an error."""
        return Predictions(prediction for prediction in self if prediction.error is None)

    def counts_table(self) -> Table:
        """How many images have each class, the most frequent first."""
        counts = Counter(prediction.label for prediction in self if prediction.label is not None)
        rows = [[label, f"{images:,}"] for label, images in counts.most_common()]
        return Table(["class", "images"], rows, right=("images",))


def _small_image(prediction: Prediction) -> str:
    """As a data URL; "" for an image that was not read from a file, or is there no more."""
    try:
        source = contents(prediction.name)
        return "" if isinstance(source, np.ndarray) else thumbnail_url(read_image(source))
    except (VitlabError, OSError):
        return ""


def predict(
    model: ModelOrName,
    images: Source | Iterable[Source],
    *,
    top: int = 5,
    batch_size: int = 16,
    reducer: Reducer | str | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    **load_options: Any,
) -> Predictions:
    """The `top` classes of every image. An image that cannot be read is reported under its name; the others go on.

    `images` may be a folder, for all images in it. A model of several labels gives all that are above their thresholds,
    one of a number its value. `reducer`: a ViT with fewer tokens, "tome:r=8". `device` and `load_options` as in
    `open_model`.
    """
    fewer = reducer_of(reducer) if isinstance(reducer, str) else reducer
    check_reducer(model, fewer)
    network = open_model(model, device, **load_options)
    check_predicts(network)
    _check_top(top)
    compute = partial(class_probabilities, network, reducer=fewer)
    rows = _rows(network, images, compute, "scores", batch_size, progress)
    return Predictions(
        Prediction(name, error=error) if scores is None else answer(network, name, scores, top)
        for name, scores, error in rows
    )


def answer(model: Network, name: str, scores: Tensor, top: int) -> Prediction:
    """What is said of an image, by its scores (K,)."""
    labels, task = class_labels(model), model.task
    if isinstance(task, NumberTask):
        return Prediction(name, value=float(scores[0]), quantity=labels[0])
    best = ranked(scores, labels, len(labels) if isinstance(task, LabelTask) else top)
    if isinstance(task, LabelTask):
        present = {labels[k] for k in task.present(scores).nonzero()[:, 0].tolist()}
        best = [(label, probability) for label, probability in best if label in present]
    return Prediction(name, best)


def write_predictions(predictions: Sequence[Prediction], path: str | PathLike[str]) -> None:
    """A CSV table: image, label, probability, those of the next classes; or the number, under its name. And the error
    of what could not be read.
    """
    most = max((len(prediction.scores) for prediction in predictions), default=1)
    titles = [name for i in range(1, max(most, 1) + 1) for name in _columns(i)]
    if quantity := next((p.quantity for p in predictions if p.value is not None), None):
        titles = [quantity]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow([csv_cell(cell) for cell in ("image", *titles, "error")])
    for prediction in predictions:
        cells = [cell for score in prediction.scores for cell in score]
        cells += [] if prediction.value is None else [prediction.value]
        cells += [""] * (len(titles) - len(cells))
        row = [valid_utf8(prediction.name), *cells, prediction.error or ""]
        writer.writerow([csv_cell(cell) for cell in row])
    target = Path(path).expanduser()
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, buffer.getvalue())


def _columns(rank: int) -> tuple[str, str]:
    return ("label", "probability") if rank == 1 else (f"label_{rank}", f"probability_{rank}")


def check_csv_name(path: str | PathLike[str]) -> None:
    """Refuse a folder, and the suffixes of other kinds of tables."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise UsageError(f"{path}: is a folder: name the table in it, {path / 'predictions.csv'}.")
    if path.suffix.lower() != ".csv":
        raise UsageError(f"{path}: the table is written as CSV: name it {path.with_suffix('.csv')}.")


def sort_images(predictions: Sequence[Prediction], folder: SortedFolder) -> dict[str, int]:
    """Copy every image into the folder of its class, or of its most probable label; returns how many images each has.

    One without a label is not copied.
    """
    if any(prediction.value is not None for prediction in predictions):
        raise UsageError("--sort needs classes, and this model gives a number: use --csv FILE.csv.")
    counts: dict[str, int] = {}
    try:
        for prediction in predictions:
            if prediction.label is not None:
                folder.add(prediction.name, prediction.label)
                counts[prediction.label] = counts.get(prediction.label, 0) + 1
    finally:
        folder.save()
    return counts


def find_images(images: Iterable[Source]) -> list[Source]:
    """The images, with those of a folder, at any depth, or of a list of files (.txt, .csv) in its place."""
    listed: list[Source] = []
    for image in images:
        path = isinstance(image, str | PathLike) and fspath(image)  # "" is no name, and not this folder
        if path and names_files(Path(path).expanduser()):
            listed += listed_files(Path(path).expanduser())
        elif not path or not Path(path).expanduser().is_dir():
            listed.append(image)
        elif files := sorted(images_under(Path(path).expanduser())):
            listed += files
        else:
            raise DataError(f"{path}: no images in it. Name a folder of images, or image files.")
    return listed


def check_predicts(model: Network) -> None:
    """Refuse a model without a classifier, and say what it can do instead."""
    if reads_text(model):
        raise UsageError(
            f"this model ({model.family}) knows no classes by itself: name them, vitlab zeroshot CHECKPOINT IMAGE "
            "--labels cat,dog" + to_type(", or vitlab.zero_shot(model, images, ['cat', 'dog']).", ".")
        )
    if model.encoder is not model:
        raise UsageError(
            f"a model that learned without labels ({model.family}) knows no classes. Fine-tune it first: "
            "vitlab train DATA model.init_from=CHECKPOINT. Its features: "
            + to_type("vitlab.embed(model, images).", "vitlab embed FOLDER -o out.parquet --model CHECKPOINT.")
        )
    if not model.classes:
        raise UsageError(
            "this model has no classes (classes=0): it gives features, vitlab embed FOLDER -o out.parquet --model "
            "CHECKPOINT. Train a classifier on them: vitlab train linear_probe data.source=FOLDER "
            "model.init_from=CHECKPOINT."
        )


def class_probabilities(model: Network, tensors: list[Tensor], reducer: Reducer | None = None) -> Tensor:
    """Preprocessed images, each (C, H, W) -> (B, classes); of a model of a number its value, (B, 1)."""
    outputs = _run(model, model if reducer is None else partial(model, reducer=reducer), tensors)
    return model.task.scores(outputs)


@dataclass(frozen=True)
class Labels:
    """Class names for a CLIP or SigLIP, embedded once for many images."""

    names: list[str]
    weights: Tensor  # (K, E), rows of length 1


def embed_labels(model: ModelOrName, labels: str | Sequence[str], templates: str | Sequence[str] = "train") -> Labels:
    """Each label as the mean of its prompts. As text both are what text/templates.py reads."""
    return _embed_labels(as_two_towers(open_model(model)), _label_names(labels), _sentences(templates))


def _embed_labels(clip: TwoTowers, names: list[str], sentences: list[str]) -> Labels:
    with evaluating(clip):
        return Labels(names, clip.class_embeddings(class_prompts(names, sentences)).float().cpu())


def _label_names(labels: str | Sequence[str]) -> list[str]:
    names = read_labels(labels) if isinstance(labels, str) else [label.strip() for label in labels]
    if repeated := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"the label {repeated[0]!r} is given twice: name each class once.")
    return names


def _sentences(templates: str | Sequence[str]) -> list[str]:
    return read_templates(templates) if isinstance(templates, str) else list(templates)


def zero_shot(
    model: ModelOrName,
    images: Source | Iterable[Source],
    labels: str | Sequence[str] | Labels,
    *,
    templates: str | Sequence[str] = "train",
    top: int = 5,
    batch_size: int = 16,
    progress: Progress | None = None,
    note: Note | None = None,
    **options: Any,
) -> Predictions:
    """Which of these labels fits each image best, by a CLIP or SigLIP.

    The probabilities of all labels add up to 1; after the sigmoid loss (SigLIP) each label has its own: none may fit.
    `labels`: a list, "cat,dog", or a text file with one a line; or, to embed them once for many calls,
    embed_labels(model, [...]). `note` gets what a user should know; `options`: `device`, and those of
    vitlab.load. Errors and `progress` as in `predict`.
    """
    names, sentences = ([], []) if isinstance(labels, Labels) else (_label_names(labels), _sentences(templates))
    clip = as_two_towers(open_model(model, **options))
    embedded = labels if isinstance(labels, Labels) else _embed_labels(clip, names, sentences)
    if note is not None and len(embedded.names) == 1 and clip.bias is None:
        note("one label alone always has the probability 1: name others that it could be.")
    if note is not None and names:
        note(f"each label is the mean of {len(sentences)} sentences, e.g. {fill(sentences[0], names[0])!r}.")

    def compute(tensors: list[Tensor]) -> Tensor:
        return zero_shot_probabilities(clip, image_features(clip, tensors), embedded)

    return _predictions(_rows(clip, images, compute, "scores", batch_size, progress), embedded.names, top)


def zero_shot_probabilities(model: TwoTowers, features: Tensor, labels: Labels) -> Tensor:
    """Image features (B, E) -> probabilities (B, K) of the labels: among each other, or with the sigmoid loss alone."""
    bias = 0.0 if model.bias is None else model.bias.item()
    return model.probabilities(model.scale.item() * features @ labels.weights.T + bias)


def _check_top(top: int) -> None:
    if top < 1:
        raise UsageError(f"top={top} must be at least 1.")


def _predictions(rows: Iterable[Row], labels: list[str], top: int) -> Predictions:
    _check_top(top)
    return Predictions(
        Prediction(name, [] if probabilities is None else ranked(probabilities, labels, top), error)
        for name, probabilities, error in rows
    )


def ranked(probabilities: Tensor, labels: list[str], top: int) -> list[tuple[str, float]]:
    """(K,) -> the best labels first, each with its probability."""
    values, indices = probabilities.topk(min(top, len(labels)))
    return [(labels[i], p) for i, p in zip(indices.tolist(), values.tolist(), strict=True)]


@dataclass
class Embedding:
    """The vector of one image, near those of similar images; or why there is none."""

    name: str
    vector: np.ndarray | None = None  # (E,), float32, of length 1
    error: str | None = None
    cached: bool = False  # read from the feature cache, not computed now

    def to_dict(self) -> dict[str, Any]:
        if self.vector is None:
            return {"image": self.name, "error": self.error}
        return {"image": self.name, "embedding": self.vector.tolist()}


def embed(
    model: ModelOrName,
    images: Source | Iterable[Source],
    *,
    batch_size: int = 16,
    device: str | None = None,
    progress: Progress | None = None,
    **load_options: Any,
) -> list[Embedding]:
    """Unit-length embeddings. Those of a CLIP or SigLIP are in one space with those of `embed_text`; those of any other
    model are what its classifier reads, or would read. Errors and all options as in `predict`.
    """
    network = open_model(model, device, **load_options)
    rows = _rows(network, images, partial(image_vectors, network), "features", batch_size, progress)
    return [Embedding(name, None if vector is None else vector.numpy(), error) for name, vector, error in rows]


def feature_rows(
    model: Network, images: Source | Iterable[Source], *, batch_size: int = 16, progress: Progress | None = None
) -> Iterator[Row]:
    """Unnormalised features of every image, with its name, or the error of one that cannot be read."""
    return _rows(model, images, partial(image_features, model), "features", batch_size, progress)


def image_vectors(model: Network, tensors: list[Tensor]) -> Tensor:
    """Preprocessed images, each (C, H, W) -> (B, E), rows of length 1."""
    return F.normalize(image_features(model, tensors), dim=1)


def image_features(model: Network, tensors: list[Tensor]) -> Tensor:
    """Unnormalised features; a CLIP's are of length 1 already."""
    return _run(model, features_of(model), tensors)


def embed_text(
    model: ModelOrName, texts: str | Iterable[str], *, device: str | None = None, **load_options: Any
) -> np.ndarray:
    """Texts -> (T, E), float32, rows of length 1, in one space with the images of `embed`. One text is one row."""
    network = open_model(model, device, **load_options)
    if not reads_text(network):
        raise UsageError(f"this model ({network.family}) reads no text: search with an image, or use a CLIP or SigLIP.")
    ids = network.require_tokenizer()([texts] if isinstance(texts, str) else list(texts))  # (T, N)
    like = next(network.parameters(), ids)
    with evaluating(network):
        return network.encode_text(ids.to(like.device)).float().cpu().numpy()


def reads_text(model: Network) -> bool:
    return Capability.TEXT in model.capabilities


def encoder_of(model: Network) -> Network:
    """What makes the vectors of `embed`: the encoder of a model that learned without labels; otherwise the model."""
    return model if reads_text(model) else model.encoder


def _run(model: Network, function: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> Tensor:
    like = next(model.parameters(), None)  # an exported model has none: it takes float32 from the CPU
    if Capability.MIXED in model.capabilities and len({tensor.shape for tensor in tensors}) > 1:
        images: Any = [image if like is None else image.to(like.device, like.dtype) for image in tensors]
    else:
        images = torch.stack(tensors)
        images = images if like is None else images.to(like.device, like.dtype)
    with evaluating(model):
        return function(images).float().cpu()


def _rows(
    model: Network,
    images: Source | Iterable[Source],
    compute: Callable[[list[Tensor]], Tensor],
    results: str,
    size: int,
    progress: Progress | None,
) -> Iterator[Row]:
    """`compute` turns preprocessed images into one row of `results` each, batch by batch."""
    if size < 1:
        raise UsageError(f"batch_size={size} must be at least 1.")
    preprocess, sources = model.require_preprocess(), _as_list(images)
    for start in range(0, len(sources), size):
        names: list[str] = []
        tensors: list[Tensor] = []
        errors: list[str | None] = []
        for number, source in enumerate(sources[start : start + size], start):
            names.append(fspath(source) if isinstance(source, str | PathLike) else f"image {number}")
            try:
                tensors.append(preprocess(contents(source), name=names[-1]))
                errors.append(None)
            except ImageError as error:
                errors.append(str(error))
        rows = iter(compute(tensors) if tensors else ())
        for name, error in zip(names, errors, strict=True):
            row = next(rows) if error is None else None
            if row is not None and not torch.isfinite(row).all():
                row, error = None, f"{name}: the model's {results} are not finite numbers."
            yield name, row, error
        if progress is not None:
            progress(len(names))


def _as_list(images: object) -> list[Source]:
    """One image or several, or a folder of images -> a list."""
    if isinstance(images, str | PathLike) and Path(images).expanduser().is_dir():
        images = find_images([images])
    if is_image(images) or isinstance(images, Tensor) or not isinstance(images, Iterable):
        images = [images]
    hint = "Call the model itself on tensors that are normalised: model(images).softmax(-1)."
    return [check_image(source, hint) for source in images]
