"""What a network for segmentation or detection says of an image, in the image's own pixels.

answer = answers(model(images), [(480, 640)], preprocess.size, "instance")[0]
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
from vitlab.images.preprocess import normalise
from vitlab.images.regions import Regions, RunLengths
from vitlab.images.sources.dataset import RegionKind
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import DenseNetwork
from vitlab.models.dense_results import detections, instances, semantic_maps, semantic_scores

MOST_OBJECTS = 100  # of one image, as COCO counts them; more where the truth has more
THRESHOLD = 0.5  # score from which an object is reported
LEAST_SCORE = 1e-3  # of an answer that is kept
TOGETHER = 10  # masks that are enlarged to the image's size at a time
OVERLAP = 0.5  # of neighbouring windows

Size = tuple[int, int]


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

    size: Size
    semantic: np.ndarray | None = None  # (H, W) uint8
    objects: list[FoundObject] = field(default_factory=list)  # the surest first

    def above(self, threshold: float = THRESHOLD) -> DenseAnswer:
        """Without the objects of a lower score."""
        return replace(self, objects=[found for found in self.objects if found.score >= threshold])

    def regions(self) -> Regions:
        """As what is marked on an image."""
        if self.semantic is not None:
            return Regions.of_map(self.semantic)
        shapes = tuple(found.outline for found in self.objects if found.outline is not None)
        count = len(self.objects)
        return Regions(
            self.size,
            np.array([found.label for found in self.objects], dtype=np.int64),
            np.array([found.box for found in self.objects], dtype=np.float64).reshape(-1, 4),
            np.zeros(count, dtype=bool),
            shapes if len(shapes) == count else None,
        )


def answers(
    output: DenseOutput, sizes: Sequence[Size], view: Size, kind: RegionKind, most: int = MOST_OBJECTS
) -> list[DenseAnswer]:
    """One for each image of a batch, all of which was seen in a `view` of this size; `most`: objects of an image."""
    answered: list[DenseAnswer] = []
    for index, size in enumerate(sizes):
        one = _of_image(output, index)
        if kind == "semantic":
            answered.append(DenseAnswer(size, semantic_maps(one, view, [size])[0].to(torch.uint8).numpy()))
        else:
            answered.append(DenseAnswer(size, objects=_objects(_surest(one, most), view, size, kind)))
    return answered


def _of_image(output: DenseOutput, index: int) -> DenseOutput:
    """A batch of one, on the CPU."""
    parts = {name: value[index : index + 1].detach().float().cpu() for name, value in output.tensors().items()}
    return replace(output, auxiliary=(), **parts)


def _surest(output: DenseOutput, most: int) -> DenseOutput:
    """The queries of one image that have the most probable objects, in this order."""
    if output.classes is None:
        raise UsageError("this network gives no objects: use objective.name=segment.")
    chances = output.classes.softmax(-1)[0, :, :-1].amax(-1)  # (Q,)
    order = chances.argsort(descending=True, stable=True)[:most]
    order = order[chances[order] >= LEAST_SCORE]
    return replace(output, **{name: value[:, order] for name, value in output.tensors().items()})


def _objects(output: DenseOutput, view: Size, size: Size, kind: RegionKind) -> list[FoundObject]:
    if output.boxes is not None and (kind == "detect" or output.masks is None):
        if kind == "instance":
            raise UsageError("this network gives boxes and no masks: its objects are learned by objective.name=detect.")
        detected = detections(output, [size], threshold=LEAST_SCORE)[0]
        limits = detected.boxes.new_tensor([size[1], size[0]] * 2)
        boxes = detected.boxes.clamp(min=0).minimum(limits)
        rows = zip(detected.labels.tolist(), detected.scores.tolist(), boxes.tolist(), strict=True)
        return [FoundObject(k, score, (a, b, c, d)) for k, score, (a, b, c, d) in rows if c > a and d > b]
    objects: list[FoundObject] = []
    assert output.classes is not None
    for part in torch.arange(output.classes.shape[1]).split(TOGETHER):
        some = replace(output, **{name: value[:, part] for name, value in output.tensors().items()})
        seen = instances(some, view, [size], threshold=LEAST_SCORE)[0]
        for label, score, box, mask in zip(seen.labels, seen.scores, seen.boxes.tolist(), seen.masks, strict=True):
            outline = RunLengths.of_mask(mask.numpy())
            objects.append(FoundObject(int(label), float(score), tuple(box), outline))
    return sorted(objects, key=lambda found: -found.score)


def flat_ids(answer: DenseAnswer, threshold: float = THRESHOLD) -> tuple[np.ndarray, np.ndarray]:
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
        output = _of_image(model(part[None].to(device)), 0)
        scores = semantic_scores(output, window)[0]
        scores = scores if output.semantic is None else scores.softmax(0)
        total = total if len(total) else torch.zeros(len(scores), x.shape[1], x.shape[2])
        total[:, top : top + window[0], left : left + window[1]] += scores
    return total[:, : size[0], : size[1]].argmax(dim=0).to(torch.uint8).numpy()
