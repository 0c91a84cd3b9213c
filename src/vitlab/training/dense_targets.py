"""What is marked on an image, as a network for segmentation or detection learns it."""

from __future__ import annotations

import numpy as np
import torch

from vitlab.errors import ImageError
from vitlab.images.regions import VOID, Regions, RegionView, RunLengths, mask_box
from vitlab.images.sources.dataset import RegionKind
from vitlab.models.dense import DenseTarget

LARGEST = 2 << 30  # bytes of the masks of one image
SMALLEST = 1.0  # pixels of the view: the sides of a box that is still learned


def target_of(regions: Regions, view: RegionView, kind: RegionKind) -> DenseTarget:
    """What the view shows. Groups of objects (crowd) are not among the objects, nor is what is out of view."""
    if kind == "semantic":
        return _semantic(regions, view)
    return _boxes(regions, view) if kind == "detect" else _masks(regions, view)


def _semantic(regions: Regions, view: RegionView) -> DenseTarget:
    """The map of classes; for networks of queries also the mask of each class."""
    classes = view.cut(regions.painted, outside=VOID)
    present = np.setdiff1d(np.unique(classes), [VOID])
    masks = torch.from_numpy(classes[None] == present[:, None, None])
    labels, semantic = torch.from_numpy(present.astype(np.int64)), torch.from_numpy(classes.astype(np.int64))
    return DenseTarget(labels, masks, semantic=semantic)


def _masks(regions: Regions, view: RegionView) -> DenseTarget:
    learned = np.flatnonzero(~regions.crowd)
    assert regions.shapes is not None
    if (needed := len(learned) * view.size[0] * view.size[1]) > LARGEST:
        raise ImageError(f"{len(learned):,} objects, whose masks take {needed >> 20:,} MB.", "Are they all objects?")
    masks = view.masks([regions.shapes[i] for i in learned], regions.size)
    seen = masks.any(axis=(1, 2))
    boxes = np.array([mask_box(mask) for mask in masks[seen]]).reshape(-1, 4)
    labels = torch.from_numpy(regions.labels[learned][seen])
    return DenseTarget(labels, torch.from_numpy(masks[seen]), relative_boxes(boxes, view.size))


def _boxes(regions: Regions, view: RegionView) -> DenseTarget:
    boxes = view.boxes(regions.boxes)
    seen = ~regions.crowd & ((boxes[:, 2:] - boxes[:, :2]) >= SMALLEST).all(axis=1)
    return DenseTarget(torch.from_numpy(regions.labels[seen]), boxes=relative_boxes(boxes[seen], view.size))


def relative_boxes(boxes: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """(n, 4) left, top, right, bottom in pixels of (h, w) -> centre x, centre y, width, height in 0..1."""
    shares = boxes / np.array([size[1], size[0]] * 2)
    centred = np.concatenate([(shares[:, :2] + shares[:, 2:]) / 2, shares[:, 2:] - shares[:, :2]], axis=1)
    return torch.from_numpy(centred).float()


def regions_of_target(target: DenseTarget, size: tuple[int, int]) -> Regions:
    """A target of a view of this (h, w) as what is marked on an image, to draw it."""
    if target.semantic is not None:
        return Regions.of_map(target.semantic.numpy().astype(np.uint8))
    boxes = np.zeros((len(target.labels), 4))
    if target.boxes is not None:
        centre, sides = np.split(target.boxes.numpy() * np.array([size[1], size[0]] * 2), 2, axis=1)
        boxes = np.concatenate([centre - sides / 2, centre + sides / 2], axis=1)
    shapes = None if target.masks is None else tuple(RunLengths.of_mask(mask) for mask in target.masks.numpy())
    return Regions(size, target.labels.numpy(), boxes, np.zeros(len(boxes), dtype=bool), shapes)
