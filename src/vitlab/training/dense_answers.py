"""What a network for segmentation or detection says of an image, in the image's own pixels.

answer = answers(model(images), geometries, preprocess.size, "instance")[0]
answer.semantic                            # (H, W) uint8: the class of every pixel
answer.objects[0].label, .score, .box, .outline       # the surest first

large_map(model, pixels)                   # an image larger than the model's, window by window
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.images.preprocess import Geometry, normalise
from vitlab.images.regions import RunLengths, mask_box
from vitlab.images.sources.dataset import RegionKind
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import DenseNetwork

MOST_OBJECTS = 100  # of one image, as COCO counts them; more where the truth has more
LEAST_SCORE = 1e-3  # of an answer that is kept
OVERLAP = 0.5  # of neighbouring windows


@dataclass(frozen=True)
class FoundObject:
    """One object of an answer."""

    label: int
    score: float  # 0 to 1
    box: tuple[float, float, float, float]  # left, top, right, bottom, in the image's pixels
    outline: RunLengths | None = None  # of its mask


@dataclass(frozen=True)
class DenseAnswer:
    """Of one image of this (H, W)."""

    size: tuple[int, int]
    semantic: np.ndarray | None = None  # (H, W) uint8
    objects: list[FoundObject] = field(default_factory=list)  # the surest first


def answers(
    output: DenseOutput,
    geometries: Sequence[Geometry],
    size: tuple[int, int],
    kind: RegionKind,
    most: int = MOST_OBJECTS,
) -> list[DenseAnswer]:
    """One for each image of a batch, which was seen in views of `size`; `most`: objects of an image."""
    read = {"semantic": _semantic, "instance": _instances, "detect": _detections}[kind]
    return [read(_of_image(output, i), geometry, size, most) for i, geometry in enumerate(geometries)]


def _of_image(output: DenseOutput, index: int) -> DenseOutput:
    return replace(output, auxiliary=(), **{n: v[index].detach().float().cpu() for n, v in output.tensors().items()})


def _semantic(output: DenseOutput, geometry: Geometry, size: tuple[int, int], most: int) -> DenseAnswer:
    scores = in_image(class_scores(output), geometry, size)
    return DenseAnswer(geometry.original, scores.argmax(dim=0).to(torch.uint8).numpy())


def class_scores(output: DenseOutput) -> Tensor:
    """Scores of the classes at every place of one image, (K, h, w): its logits; or of queries the sum of their masks,
    weighed by their classes (arXiv:2107.06278, sec. 3.4).
    """
    if output.semantic is not None:
        return output.semantic
    if output.classes is None or output.masks is None:
        raise UsageError("this network gives no masks, so that it cannot tell the class of a pixel.")
    return torch.einsum("qk,qhw->khw", output.classes.softmax(-1)[:, :-1], output.masks.sigmoid())


def in_image(maps: Tensor, geometry: Geometry, size: tuple[int, int]) -> Tensor:
    """Maps (C, h', w') of a view of `size` -> (C, H, W) of the image, bilinear; what was padded is cut off."""
    g = geometry
    if (g.top, g.left) != (0, 0) or g.resized != size:
        maps = _resized(maps, size)[:, max(-g.top, 0) :, max(-g.left, 0) :][:, : g.resized[0], : g.resized[1]]
    return _resized(maps, g.original)


def _resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    return F.interpolate(maps[None], size, mode="bilinear", align_corners=False)[0]


def _instances(output: DenseOutput, geometry: Geometry, size: tuple[int, int], most: int) -> DenseAnswer:
    """Queries with a mask: the score is that of the class times the mean certainty of the mask's pixels."""
    if output.masks is None:
        raise UsageError("this network gives boxes and no masks: its objects are found by objective.name=detect.")
    objects: list[FoundObject] = []
    for query, label, score in _surest(output, most):
        mask = in_image(output.masks[query][None], geometry, size)[0]  # (H, W) logits
        inside = mask > 0
        if inside.any():
            certainty = float(mask.sigmoid()[inside].mean())
            left, top, right, bottom = mask_box(inside.numpy()).tolist()
            outline = RunLengths.of_mask(inside.numpy())
            objects.append(FoundObject(label, score * certainty, (left, top, right, bottom), outline))
    return DenseAnswer(geometry.original, objects=sorted(objects, key=lambda found: -found.score))


def _detections(output: DenseOutput, geometry: Geometry, size: tuple[int, int], most: int) -> DenseAnswer:
    if output.boxes is None:  # boxes come from masks
        return _instances(output, geometry, size, most)
    (H, W), (h, w), objects = geometry.original, size, []
    for query, label, score in _surest(output, most):
        x, y, wide, tall = output.boxes[query].tolist()
        seen = ((x - wide / 2) * w, (y - tall / 2) * h, (x + wide / 2) * w, (y + tall / 2) * h)
        left, top, right, bottom = geometry.to_original(seen)
        box = min(max(left, 0.0), W), min(max(top, 0.0), H), min(max(right, 0.0), W), min(max(bottom, 0.0), H)
        if box[2] > box[0] and box[3] > box[1]:
            objects.append(FoundObject(label, score, box))
    return DenseAnswer(geometry.original, objects=objects)


def _surest(output: DenseOutput, most: int) -> Iterator[tuple[int, int, float]]:
    """Query, class and probability of the most probable pairs."""
    if output.classes is None:
        raise UsageError("this network gives no objects: use objective.name=segment.")
    chances = output.classes.softmax(-1)[:, :-1]  # (Q, K)
    found = chances.flatten().topk(min(most, chances.numel()))
    for place, chance in zip(found.indices.tolist(), found.values.tolist(), strict=True):
        if chance >= LEAST_SCORE:
            yield place // chances.shape[1], place % chances.shape[1], chance


def flat_ids(answer: DenseAnswer, threshold: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    """Objects above a score without overlaps: (H, W) numbers from 1, 0 where there is none; and their labels. The
    surer object has a pixel; one of which less than half is left is dropped.
    """
    ids, labels = np.zeros(answer.size, dtype=np.int32), []
    for found in answer.objects:
        if found.score < threshold or found.outline is None:
            continue
        mask = found.outline.mask(answer.size)
        free = mask & (ids == 0)
        if free.sum() * 2 >= mask.sum():
            labels.append(found.label)
            ids[free] = len(labels)
    return ids, np.array(labels, dtype=np.int64)


# ---- images larger than the model's


def windows(size: tuple[int, int], window: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """The top left corners of windows that cover an image and overlap by half or more; the last ends with it."""
    starts = [
        np.linspace(0, max(side - w, 0), 1 + math.ceil(max(side - w, 0) / (w * (1 - OVERLAP)))).round().astype(int)
        for side, w in zip(size, window, strict=True)
    ]
    for top in starts[0].tolist():
        for left in starts[1].tolist():
            yield top, left


def large_map(model: DenseNetwork, pixels: Tensor) -> np.ndarray:
    """The class of every pixel of a photo (C, H, W) uint8 at its own resolution, (H, W) uint8: the mean over windows
    of the model's size. Sides shorter than a window are padded with the mean colour.
    """
    pre = model.require_preprocess()
    size, window = (pixels.shape[1], pixels.shape[2]), pre.size
    x = normalise(pixels, pre.mean, pre.std, pre.scale)
    x = F.pad(x, (0, max(window[1] - size[1], 0), 0, max(window[0] - size[0], 0)))
    total, device = torch.zeros(0), next(model.parameters()).device
    for top, left in windows((x.shape[1], x.shape[2]), window):
        part = x[:, top : top + window[0], left : left + window[1]]
        scores = class_scores(_of_image(model(part[None].to(device)), 0))
        scores = _resized(scores.softmax(0) if scores.min() < 0 else scores, window)
        total = total if len(total) else torch.zeros(len(scores), x.shape[1], x.shape[2])
        total[:, top : top + window[0], left : left + window[1]] += scores
    return total[:, : size[0], : size[1]].argmax(dim=0).to(torch.uint8).numpy()
