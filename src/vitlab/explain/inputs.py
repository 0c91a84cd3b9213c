"""Images as the model's input, and where they lie in the originals.

    batch = as_batch(model, ["cat.jpg", "dog.jpg"])
    batch.images                               # (B, C, H, W), normalised, where the model is
    batch.geometries[0].to_original(box)       # a box in the model's pixels -> in cat.jpg

A normalised tensor is used unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.images.preprocess import Geometry
from vitlab.images.read import Source, called, read_image
from vitlab.layers.patches import check_images
from vitlab.models.base import Capability, Network


@dataclass
class Batch:
    """Images ready for the model; `pictures` and `geometries` are None where tensors were given."""

    images: Tensor  # (B, C, H, W), normalised, on the model's device and in its dtype
    pictures: list[Image.Image] | None = None  # the originals, upright
    geometries: list[Geometry] | None = None  # where the input lies in each

    def __len__(self) -> int:
        return len(self.images)

    def split(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Batch(
                self.images[part],
                None if self.pictures is None else self.pictures[part],
                None if self.geometries is None else self.geometries[part],
            )


Images = Tensor | Batch | Source | Iterable[Source]


def as_batch(model: Any, images: Images) -> Batch:
    """A normalised tensor (B, C, H, W), or pictures (paths, PIL, arrays, bytes) through the model's preprocess."""
    check_model(model)
    if isinstance(images, Batch):
        return images
    like = next(model.parameters())
    if isinstance(images, Tensor):
        check_images(images, model.config.channels)
        _check_some(len(images))
        return Batch(images.to(like.device, like.dtype))
    sources = as_list(images)
    if model.preprocess is None:
        raise UsageError(
            "the model has no preprocess: set model.preprocess = vitlab.images.preprocess.Preprocess(size=...) first, "
            "or pass a normalised tensor (B, C, H, W)."
        )
    pictures = [read_image(source) for source in sources]
    views = [model.preprocess.view(p, name=called(s)) for p, s in zip(pictures, sources, strict=True)]
    tensors = torch.stack([model.preprocess.normalize(view) for view in views])  # (B, C, H, W)
    geometries = [model.preprocess.geometry((p.height, p.width)) for p in pictures]
    return Batch(tensors.to(like.device, like.dtype), pictures, geometries)


def batches(model: Any, images: Images, batch_size: int) -> Iterator[Batch]:
    """Batches of at most `batch_size`. Files are read batch by batch, to save memory."""
    check_model(model)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size={batch_size!r} must be a whole number, at least 1.")
    if isinstance(images, Tensor | Batch):
        yield from as_batch(model, images).split(batch_size)
        return
    sources = as_list(images)
    for start in range(0, len(sources), batch_size):
        yield as_batch(model, sources[start : start + batch_size])


def grid_of(model: Any, images: Tensor | Batch) -> tuple[int, int]:
    """Rows and columns of patches for these images."""
    tensor = images.images if isinstance(images, Batch) else images
    return model.layout(*tensor.shape[-2:]).grid


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; restores the mode of every module afterwards."""
    modes = [(module, module.training) for module in model.modules()]  # parts may be frozen
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_model(model: Any) -> None:
    if not isinstance(model, Network):
        load = f": load it first, vitlab.load({str(model)!r})" if isinstance(model, str | PathLike) else ""
        raise UsageError(f"expected a vitlab model first, found a {type(model).__name__}{load}.")
    if Capability.TEXT in model.capabilities:
        raise UsageError("a CLIP is asked in sentences: explain.ask(model, ['a dog']), or without words model.encoder.")
    if model.encoder is not model:
        raise UsageError(f"a {model.family} model is a network around an encoder: explain model.encoder.")
    if not model.traceable:
        raise UsageError("an exported file cannot be looked into: explain the checkpoint that it was made from.")
    if not hasattr(model, "layout"):
        raise UsageError(
            f"a {model.family} has neither tokens nor attention to explain. By vitlab.Trace it can give: "
            f"{', '.join(model.traceable)}."
        )


def wide(values: Tensor) -> Tensor:
    """At least float32, to sum without losing precision."""
    return values if values.dtype == torch.float64 else values.float()


def as_list(images: Any) -> list[Any]:
    """One image or several -> a list."""
    kinds = str | PathLike | bytes | np.ndarray | Image.Image
    if not isinstance(images, kinds | Iterable):
        raise UsageError(_no_pictures(images))
    sources = [images] if isinstance(images, kinds) else list(images)
    for source in sources:
        if not isinstance(source, kinds):
            raise UsageError(_no_pictures(source))
    _check_some(len(sources))
    return sources


def _check_some(count: int) -> None:
    if not count:
        raise UsageError("there is no image to look at: give at least one.")


def _no_pictures(images: object) -> str:
    hint = " Put the tensors together: torch.stack(images)." if isinstance(images, Tensor) else ""
    return (
        "images are a normalised tensor (B, C, H, W), or pictures: paths, PIL images, arrays (H, W, 3) or bytes; "
        f"found a {type(images).__name__}.{hint}"
    )
