"""Answers for every pixel: what networks for segmentation, detection and depth return, and what they are trained on.

    out = model(images)                        # a DenseOutput
    out.masks.sigmoid() > 0.5                  # (B, Q, h, w), of a network of queries

A network sets the fields that it has. `set_loss.py` compares an output with one DenseTarget per image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

VOID = 255  # in a semantic map: a pixel that belongs to no class and is not counted


@dataclass(frozen=True)
class DenseOutput:
    """K classes, Q queries; maps are (h, w), which may be coarser than the images."""

    classes: Tensor | None = None  # (B, Q, K + 1) logits; the last one: no object
    masks: Tensor | None = None  # (B, Q, h, w) logits
    boxes: Tensor | None = None  # (B, Q, 4): centre x, centre y, width, height, each in 0..1 of the image
    semantic: Tensor | None = None  # (B, K, h, w) logits
    depth: Tensor | None = None  # (B, h, w)
    auxiliary: tuple[DenseOutput, ...] = ()  # in training: what earlier blocks predict, each with a loss of its own

    def tensors(self) -> dict[str, Tensor]:
        """The fields that are there, by name, without the auxiliary ones."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def dense_output(fields: Mapping[str, Tensor]) -> DenseOutput:
    """The inverse of `tensors`."""
    return replace(DenseOutput(), **fields)


@dataclass(frozen=True)
class DenseTarget:
    """What one image shows: n objects, or a class for every pixel, or both."""

    labels: Tensor  # (n,) int64, each in 0..K-1
    masks: Tensor | None = None  # (n, H, W) bool
    boxes: Tensor | None = None  # (n, 4) float: centre x, centre y, width, height, each in 0..1 of the image
    semantic: Tensor | None = None  # (H, W) int64; VOID where no class is known

    def to(self, device: torch.device | str) -> Self:
        present = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in present.items() if value is not None})
