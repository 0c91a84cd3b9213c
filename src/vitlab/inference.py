"""Pictures -> labelled scores or embeddings: the one path that the command line, the server and the examples share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike, fspath
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlab.checkpoints.digests import fingerprint
from vitlab.errors import ImageError, UsageError
from vitlab.images.read import Source
from vitlab.layers.reducer import Reducer
from vitlab.models.base import Capability, Network, evaluating, features_of
from vitlab.models.clip import CLIP
from vitlab.text.templates import class_embeddings, read_templates
from vitlab.text.tokenizer import its_tokenizer

__all__ = [
    "Embedding",
    "Labels",
    "Prediction",
    "embed",
    "embed_labels",
    "embed_text",
    "encoder_of",
    "fingerprint",
    "predict",
    "reads_text",
    "zero_shot",
]


@dataclass
class Prediction:
    """What a model says of one picture: classes with their probabilities, or why there are none."""

    name: str
    scores: list[tuple[str, float]] = field(default_factory=list)  # best first
    error: str | None = None

    @property
    def label(self) -> str | None:
        return self.scores[0][0] if self.scores else None

    def to_dict(self) -> dict[str, Any]:
        if self.error is not None:
            return {"image": self.name, "error": self.error}
        return {"image": self.name, "scores": [{"label": label, "probability": p} for label, p in self.scores]}


def predict(
    model: Network,
    images: Source | Iterable[Source],
    *,
    top: int = 5,
    batch_size: int = 16,
    reducer: Reducer | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Prediction]:
    """The `top` classes of every picture. A picture that cannot be read is reported under its name; the others go on.

    `reducer`: a ViT with fewer tokens. `progress` is called with the number of pictures done, after each batch.
    """
    check_predicts(model)
    if top < 1:
        raise UsageError(f"top={top} must be at least 1.")
    labels = class_labels(model)
    results: list[Prediction] = []
    for names, tensors, errors in _batches(model, images, batch_size):
        chances = iter(class_probabilities(model, tensors, reducer)) if tensors else iter(())
        results += _predictions(names, errors, chances, labels, top)
        if progress is not None:
            progress(len(names))
    return results


def check_predicts(model: Network) -> None:
    """Whether it knows classes; if not, the error says what it can do instead."""
    _check_model(model, "predict")
    if reads_text(model):
        raise UsageError(
            "a CLIP knows no classes by itself: name them, vitlab.zero_shot(model, images, ['cat', 'dog']), or "
            "vitlab zeroshot CHECKPOINT IMAGE --labels cat,dog."
        )
    if model.encoder is not model:
        raise UsageError(
            f"a model that learned without labels ({model.family}) knows no classes. Fine-tune it first: "
            "vitlab train DATA model.init_from=CHECKPOINT. Its features: vitlab.embed(model, images)."
        )
    if not model.config.classes:
        raise UsageError(
            "this model has no classes (classes=0): it gives features. Load one with a head, or classes=N."
        )


def class_probabilities(model: Network, tensors: list[Tensor], reducer: Reducer | None = None) -> Tensor:
    """Prepared pictures, each (C, H, W) -> (B, classes)."""
    look = model if reducer is None else partial(model, reducer=reducer)
    return _run(model, look, tensors).softmax(dim=-1)


@dataclass(frozen=True)
class Labels:
    """Classes that are told to a CLIP in words, embedded once for many pictures."""

    names: list[str]
    weights: Tensor  # (K, E), rows of length 1


def embed_labels(model: Network, labels: Sequence[str], templates: str | Sequence[str] = "train") -> Labels:
    """Each label as the mean of its sentences; `templates`: what text/templates.py reads, or a list of sentences."""
    _check_model(model, "embed_labels", "labels")
    names = [labels] if isinstance(labels, str) else [label.strip() for label in labels]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise UsageError(f"the label {twice[0]!r} is given twice: name each class once.")
    sentences = read_templates(templates) if isinstance(templates, str) else list(templates)
    return Labels(names, _evaluate(model, lambda: class_embeddings(model, names, sentences)))


def zero_shot(
    model: Network,
    images: Source | Iterable[Source],
    labels: Sequence[str] | Labels,
    *,
    templates: str | Sequence[str] = "train",
    top: int = 5,
    batch_size: int = 16,
    progress: Callable[[int], object] | None = None,
) -> list[Prediction]:
    """Which of these words fits each picture best, by a CLIP; the probabilities are among these labels alone.

    A server embeds its labels once: labels=embed_labels(model, [...]). Errors and `progress` as in `predict`.
    """
    _check_model(model, "zero_shot", "images, labels")
    if top < 1:
        raise UsageError(f"top={top} must be at least 1.")
    known = labels if isinstance(labels, Labels) else embed_labels(model, labels, templates)
    results: list[Prediction] = []
    for names, tensors, errors in _batches(model, images, batch_size):
        chances = iter(among(cast(CLIP, model), image_features(model, tensors), known)) if tensors else iter(())
        results += _predictions(names, errors, chances, known.names, top)
        if progress is not None:
            progress(len(names))
    return results


def among(model: CLIP, found: Tensor, known: Labels) -> Tensor:
    """A CLIP's features (B, E) of pictures -> their probabilities (B, K) among the labels."""
    return (model.scale.item() * found @ known.weights.T).softmax(dim=1)


def _predictions(
    names: list[str], errors: list[str | None], chances: Iterator[Tensor], labels: list[str], top: int
) -> list[Prediction]:
    """`chances` (K,) of each picture that could be read; and what is wrong with the others."""
    results = []
    for name, error in zip(names, errors, strict=True):
        if error is not None:
            results.append(Prediction(name, error=error))
            continue
        found = next(chances)
        if torch.isfinite(found).all():
            results.append(Prediction(name, ranked(found, labels, top)))
        else:
            results.append(Prediction(name, error=f"{name}: the model's scores for it are not finite numbers."))
    return results


def ranked(chances: Tensor, labels: list[str], top: int) -> list[tuple[str, float]]:
    """(K,) -> the best labels first, each with its probability."""
    values, indices = chances.topk(min(top, len(labels)))
    return [(labels[i], p) for i, p in zip(indices.tolist(), values.tolist(), strict=True)]


def class_labels(model: Network) -> list[str]:
    return [model.label_of(index) for index in range(model.classes)]


@dataclass
class Embedding:
    """What a model makes of one picture: a vector that is near those of similar pictures, or why there is none."""

    name: str
    vector: np.ndarray | None = None  # (E,), float32, of length 1
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        if self.vector is None:
            return {"image": self.name, "error": self.error}
        return {"image": self.name, "embedding": self.vector.tolist()}


def embed(
    model: Network,
    images: Source | Iterable[Source],
    *,
    batch_size: int = 16,
    progress: Callable[[int], object] | None = None,
) -> list[Embedding]:
    """Vectors whose products are cosines. Of a CLIP they are in one space with those of `embed_text`; of any other
    model they are what its classifier reads, or would read. Errors and `progress` as in `predict`.
    """
    _check_model(model, "embed")
    results: list[Embedding] = []
    for names, tensors, errors in _batches(model, images, batch_size):
        vectors = iter(image_vectors(model, tensors).numpy()) if tensors else iter(())
        for name, error in zip(names, errors, strict=True):
            vector = next(vectors) if error is None else None
            if vector is not None and not np.isfinite(vector).all():
                vector, error = None, f"{name}: the model's features of it are not finite numbers."
            results.append(Embedding(name, vector, error))
        if progress is not None:
            progress(len(names))
    return results


def image_vectors(model: Network, tensors: list[Tensor]) -> Tensor:
    """Prepared pictures, each (C, H, W) -> (B, E), rows of length 1."""
    return F.normalize(image_features(model, tensors), dim=1)


def image_features(model: Network, tensors: list[Tensor]) -> Tensor:
    """The same, as long as the model makes them; a CLIP's are of length 1 already."""
    return _run(model, features_of(model), tensors)


def embed_text(model: Network, texts: str | Iterable[str]) -> np.ndarray:
    """Texts -> (T, E), float32, rows of length 1, in one space with the pictures of `embed`. One text is one row."""
    _check_model(model, "embed_text", "texts")
    if not reads_text(model):
        raise UsageError(
            f"this model ({model.family}) knows pictures and no words, so it cannot be asked in words. Ask with a "
            "picture, or use a CLIP."
        )
    ids = its_tokenizer(model)([texts] if isinstance(texts, str) else list(texts))  # (T, N)
    like = next(model.parameters(), ids)
    return _evaluate(model, lambda: model.encode_text(ids.to(like.device))).numpy()


def reads_text(model: Network) -> bool:
    return Capability.TEXT in model.capabilities


def encoder_of(model: Network) -> Any:
    """What makes the vectors of `embed`: of a model that learned without labels, its encoder; of a CLIP, all of it."""
    return model if reads_text(model) else model.encoder


def _check_model(model: Network, function: str, what: str = "images") -> None:
    if not isinstance(model, Network):
        load = f": vitlab.{function}(vitlab.load({model!r}), {what})" if isinstance(model, str | PathLike) else ""
        raise UsageError(f"{function} takes a model first, not a {type(model).__name__}{load}.")


def _run(model: Network, look: Callable[[Tensor], Tensor], tensors: list[Tensor]) -> Tensor:
    like = next(model.parameters(), None)  # an exported model has none: it takes float32 from the CPU
    images = torch.stack(tensors)
    images = images if like is None else images.to(like.device, like.dtype)
    return _evaluate(model, lambda: look(images))


def _evaluate(model: Network, work: Callable[[], Tensor]) -> Tensor:
    with evaluating(model):
        return work().float().cpu()


def _batches(
    model: Network, images: Source | Iterable[Source], size: int
) -> Iterator[tuple[list[str], list[Tensor], list[str | None]]]:
    """Names, readable pictures as tensors, and per name what was wrong (None: nothing)."""
    if size < 1:
        raise UsageError(f"batch_size={size} must be at least 1.")
    if model.preprocess is None:
        raise UsageError(
            "the model has no preprocess: set model.preprocess = vitlab.images.preprocess.Preprocess(size=...) first."
        )
    single = _is_picture(images) or isinstance(images, Tensor) or not isinstance(images, Iterable)
    sources: list[Any] = [images] if single else list(images)  # type: ignore[arg-type]
    for source in sources:
        if not _is_picture(source):
            raise UsageError(_no_picture(source))
    for start in range(0, len(sources), size):
        names: list[str] = []
        tensors: list[Tensor] = []
        errors: list[str | None] = []
        for number, source in enumerate(sources[start : start + size], start):
            names.append(fspath(source) if isinstance(source, str | PathLike) else f"image {number}")
            try:
                tensors.append(model.preprocess(_plain(source), name=names[-1]))
                errors.append(None)
            except ImageError as error:
                errors.append(str(error))
        yield names, tensors, errors


def _is_picture(source: Any) -> bool:
    """Of a kind that can hold one picture; whether it does is seen when it is read."""
    kinds = str | PathLike | bytes | bytearray | memoryview | np.ndarray | Image.Image
    return isinstance(source, kinds) or hasattr(source, "read")


def _plain(source: Any) -> Source:
    """An open file is one picture, from where it stands; its bytes, like any others, as `bytes`."""
    found = source.read() if hasattr(source, "read") else source
    if found is not source and isinstance(found, str):
        raise UsageError(f"{getattr(source, 'name', 'the file')} was opened as text: open it as bytes, with mode 'rb'.")
    return bytes(found) if isinstance(found, bytearray | memoryview) else found


def _no_picture(source: Any) -> str:
    hint = ""
    if isinstance(source, Tensor):
        hint = " Call the model itself on tensors that are normalised: model(images).softmax(-1)."
    return (
        f"a picture is a path, bytes, an open file, an array (H, W, 3) or a PIL image, not a {type(source).__name__}."
        f"{hint}"
    )
