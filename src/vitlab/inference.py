"""Pictures -> labelled scores or embeddings: the one path that the command line, the server and the examples share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.images.read import ImageError, Source


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
    model: Any,
    images: Source | Iterable[Source],
    *,
    top: int = 5,
    batch_size: int = 16,
    progress: Callable[[int], object] | None = None,
) -> list[Prediction]:
    """The `top` classes of every picture. A picture that cannot be read is reported under its name; the others go on.

    `progress` is called with the number of pictures done, after each batch.
    """
    if not hasattr(model, "config"):
        load = f": vitlab.predict(vitlab.load({model!r}), images)" if isinstance(model, str | PathLike) else ""
        raise ValueError(f"predict takes a model first, not a {type(model).__name__}{load}.")
    if hasattr(model, "encoder"):
        raise ValueError(
            f"a model that learned without labels ({model.family}) knows no classes. Fine-tune it first: "
            "vitlab train DATA model.init_from=CHECKPOINT. Its features: model.encoder."
        )
    if not model.config.classes:
        raise ValueError(
            "this model has no classes (classes=0): it gives features. Load one with a head, or classes=N."
        )
    if top < 1:
        raise ValueError(f"top={top} must be at least 1.")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1.")
    top = min(top, model.config.classes)
    results: list[Prediction] = []
    for names, tensors, errors in _batches(model, images, batch_size):
        chances = iter(_run(model, tensors).float().softmax(dim=-1)) if tensors else iter(())
        for name, error in zip(names, errors, strict=True):
            if error is not None:
                results.append(Prediction(name, error=error))
                continue
            values, indices = next(chances).topk(top)
            labels = [label_of(model, int(i)) for i in indices]
            results.append(Prediction(name, list(zip(labels, values.tolist(), strict=True))))
        if progress is not None:
            progress(len(names))
    return results


def label_of(model: Any, index: int) -> str:
    return model.labels[index] if model.labels and index < len(model.labels) else f"class {index}"


def _run(model: Any, tensors: list[Tensor]) -> Tensor:
    like = next(model.parameters())
    was_training = [(module, module.training) for module in model.modules()]  # parts of it may be frozen
    model.eval()
    try:
        with torch.inference_mode():
            return model(torch.stack(tensors).to(like.device, like.dtype)).cpu()
    finally:
        for module, training in was_training:
            module.training = training


def _batches(
    model: Any, images: Source | Iterable[Source], size: int
) -> Iterator[tuple[list[str], list[Tensor], list[str | None]]]:
    """Names, readable pictures as tensors, and per name what was wrong (None: nothing)."""
    if model.preprocess is None:
        raise ValueError(
            "the model has no preprocess: set model.preprocess = vitlab.images.preprocess.Preprocess(size=...) first."
        )
    single = _is_picture(images) or isinstance(images, Tensor) or not isinstance(images, Iterable)
    sources: list[Any] = [images] if single else list(images)  # type: ignore[arg-type]
    for source in sources:
        if not _is_picture(source):
            raise ValueError(_no_picture(source))
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
        raise ValueError(f"{getattr(source, 'name', 'the file')} was opened as text: open it as bytes, with mode 'rb'.")
    return bytes(found) if isinstance(found, bytearray | memoryview) else found


def _no_picture(source: Any) -> str:
    hint = ""
    if isinstance(source, Tensor):
        hint = " Call the model itself on tensors that are normalised: model(images).softmax(-1)."
    return (
        f"a picture is a path, bytes, an open file, an array (H, W, 3) or a PIL image, not a {type(source).__name__}."
        f"{hint}"
    )
