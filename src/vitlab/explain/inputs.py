"""Images as the model's input, and where they lie in the originals.

    batch = as_batch(model, ["cat.jpg", "dog.jpg"])
    batch.images                               # (B, C, H, W), normalised, where the model is
    batch.geometries[0].to_original(box)       # a box in the model's pixels -> in cat.jpg

A normalised tensor is used unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.advice import to_type
from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import UsageError
from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.images.preprocess import Geometry
from vitlab.images.read import Source
from vitlab.images.samples import replace_sample
from vitlab.layers.patches import check_images
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, evaluation_mode
from vitlab.models.hierarchy import Hierarchy
from vitlab.models.plain import PlainTransformer

SOURCES = (str, PathLike, bytes, np.ndarray, Image.Image)  # one image
TokenModel = PlainTransformer | Hierarchy | PromptClassifier  # has patch tokens and attention


@dataclass
class ImageBatch:
    """Images ready for the model; `originals` and `geometries` are None where tensors were given."""

    images: Tensor  # (B, C, H, W), normalised, on the model's device and in its dtype
    originals: list[Image.Image] | None = None  # upright
    geometries: list[Geometry] | None = None  # where the input lies in each

    def __len__(self) -> int:
        return len(self.images)

    def split(self, size: int) -> Iterator[ImageBatch]:
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield ImageBatch(
                self.images[part],
                None if self.originals is None else self.originals[part],
                None if self.geometries is None else self.geometries[part],
            )


Images = Tensor | ImageBatch | Source | Iterable[Source]


def as_batch(model: ModelOrName, images: Images) -> ImageBatch:
    """A normalised tensor (B, C, H, W), or images (paths, "digits#3", PIL, arrays, bytes), preprocessed."""
    model = token_model(model)
    if isinstance(images, ImageBatch):
        return images
    like = next(model.parameters())
    if isinstance(images, Tensor):
        check_images(images, model.config.channels)
        _check_some(len(images))
        return ImageBatch(images.to(like.device, like.dtype))
    sources = [replace_sample(source) for source in as_list(images)]
    if model.preprocess is None:
        raise UsageError(
            "the model has no preprocess: "
            + to_type(
                "set model.preprocess = vitlab.images.preprocess.Preprocess(size=...) first, or pass a normalised "
                "tensor (B, C, H, W).",
                "vitlab convert CHECKPOINT FOLDER --mean ... --std ... gives it one.",
            )
        )
    preprocess = model.preprocess.at_one_size()  # so that maps of several images can be compared
    prepared = [preprocess.prepare(source) for source in sources]
    tensors, originals = torch.stack([image for image, _ in prepared]), [shown for _, shown in prepared]  # (B, C, H, W)
    geometries = [preprocess.geometry((p.height, p.width)) for p in originals]
    return ImageBatch(tensors.to(like.device, like.dtype), originals, geometries)


def batches(model: TokenModel, images: Images, batch_size: int) -> Iterator[ImageBatch]:
    """Batches of at most `batch_size`. Files are read batch by batch, to save memory."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"batch_size={batch_size!r} must be a whole number, at least 1.")
    if isinstance(images, Tensor | ImageBatch):
        yield from as_batch(model, images).split(batch_size)
        return
    sources = as_list(images)
    for start in range(0, len(sources), batch_size):
        yield as_batch(model, sources[start : start + batch_size])


def grid_of(model: TokenModel, images: Tensor | ImageBatch) -> tuple[int, int]:
    """Rows and columns of patches for these images."""
    tensor = images.images if isinstance(images, ImageBatch) else images
    return model.layout(*tensor.shape[-2:]).grid


def token_model(model: ModelOrName) -> TokenModel:
    """The model, or the one that a name loads; of MAE and DINO by name, the encoder. Raises if it has no tokens."""
    model = as_network(model, encoder=True)
    if Capability.TEXT in model.capabilities:
        raise UsageError("a CLIP is asked in sentences: explain.ask(model, ['a dog']), or without words model.encoder.")
    if model.encoder is not model:
        raise UsageError(f"a {model.family} model is a network around an encoder: explain model.encoder.")
    if not model.traceable:
        raise UsageError("an exported file cannot be looked into: explain the checkpoint that it was made from.")
    if not isinstance(model, TokenModel):
        raise UsageError(
            f"a {model.family} has neither tokens nor attention to explain. By vitlab.Trace it can give: "
            f"{', '.join(model.traceable)}."
        )
    return model


def check_layer(model: TokenModel, layer: int) -> int:
    """The layer's number, counted from the first."""
    depth = len(model.blocks)
    if not -depth <= layer < depth:
        raise UsageError(f"layer {layer} does not exist: this model has layers 0 to {depth - 1} (or -1, ...).")
    return layer % depth


@torch.no_grad()
def logits_of(model: TokenModel, images: Tensor, batch_size: int) -> Tensor:
    """(B, classes), in float32 at least."""
    with evaluation_mode(model):
        return torch.cat([wide(model(part)) for part in images.split(batch_size)])


@torch.no_grad()
def run_trace(model: TokenModel, images: Tensor, *kinds: str, **options: Any) -> Trace:
    """What the model computes for these images: Trace(*kinds, **options) of one pass, in evaluation mode."""
    trace = Trace(*kinds, **options)
    with evaluation_mode(model):
        model(images, trace=trace)
    return trace


def wide(values: Tensor) -> Tensor:
    """At least float32, to sum without losing precision."""
    return values if values.dtype == torch.float64 else values.float()


def as_list(images: Source | Iterable[Source]) -> list[Source]:
    """One image or several -> a list."""
    if isinstance(images, SOURCES):
        return [images]
    if not isinstance(images, Iterable):
        raise UsageError(_no_images(images))
    sources = list(images)
    for source in sources:
        if not isinstance(source, SOURCES):
            raise UsageError(_no_images(source))
    _check_some(len(sources))
    return sources


def _check_some(count: int) -> None:
    if not count:
        raise UsageError("there is no image to look at: give at least one.")


def _no_images(images: object) -> str:
    hint = " Put the tensors together: torch.stack(images)." if isinstance(images, Tensor) else ""
    return (
        "images are a normalised tensor (B, C, H, W), or images: paths, PIL images, arrays (H, W, 3) or bytes; "
        f"found a {type(images).__name__}.{hint}"
    )
