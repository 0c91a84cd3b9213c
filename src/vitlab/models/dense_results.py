"""From a DenseOutput to what an image shows: a class for every pixel, objects with masks and boxes, or both (panoptic).

    maps = semantic_maps(out, view=(512, 512), sizes=[(480, 640)])     # [(480, 640) int64]
    found = instances(out, view=(512, 512), sizes=[(480, 640)])[0]     # found.labels, .scores, .masks, .boxes

`view` is the (H, W) that the network saw, `sizes` those of the images. `contents` says how much of the view each image
fills from the top left, where the rest was padded. Numbers equal those of transformers' image processors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.layers.boxes import corners, mask_boxes
from vitlab.models.dense import DenseOutput

Size = tuple[int, int]


@dataclass(frozen=True)
class Segments:
    """Parts of one image; of instances, masks may overlap."""

    ids: Tensor  # (H, W) int64, the number of the segment at each pixel, -1: none
    labels: Tensor  # (n,)
    scores: Tensor  # (n,)
    masks: Tensor  # (n, H, W) bool
    queries: Tensor  # (n,), which query predicted each

    @property
    def boxes(self) -> Tensor:
        """(n, 4): left, top, right, bottom of each mask in pixels."""
        return mask_boxes(self.masks)


@dataclass(frozen=True)
class Detections:
    """Boxes of one image."""

    boxes: Tensor  # (n, 4): left, top, right, bottom in pixels
    labels: Tensor  # (n,)
    scores: Tensor  # (n,)
    queries: Tensor  # (n,)


def semantic_scores(output: DenseOutput, view: Size) -> Tensor:
    """(B, K, H, W) of the view: logits; of queries the sum of their masks, weighed by the shares of their classes."""
    if output.semantic is not None:
        return _resized(output.semantic, view)
    classes, masks = _queries(output)
    shares = classes.softmax(-1)[..., :-1]  # (B, Q, K)
    return torch.einsum("bqk,bqhw->bkhw", shares, _resized(masks, view).sigmoid())


def semantic_maps(output: DenseOutput, view: Size, sizes: Sequence[Size]) -> list[Tensor]:
    """The class of every pixel, (H, W) each."""
    scores = semantic_scores(output, view)
    return [_resized(image[None], size)[0].argmax(dim=0) for image, size in zip(scores, sizes, strict=True)]


def instances(
    output: DenseOutput,
    view: Size,
    sizes: Sequence[Size],
    *,
    contents: Sequence[Size] | None = None,
    threshold: float = 0.8,
) -> list[Segments]:
    """Each query is one object; its score is that of its class times the mean probability of its mask."""
    results: list[Segments] = []
    for classes, masks in _by_image(output, view, sizes, contents):
        scores, labels = classes.softmax(-1)[:, :-1].max(-1)  # (Q,)
        inside = masks > 0  # (Q, H, W)
        area = inside.flatten(1).sum(1)
        scores = scores * (masks.sigmoid() * inside).flatten(1).sum(1) / (area + 1e-6)
        kept = ((area > 0) & (scores >= threshold)).nonzero()[:, 0]
        results.append(_segments(inside[kept], labels[kept], scores[kept], kept))
    return results


def panoptic(
    output: DenseOutput,
    view: Size,
    sizes: Sequence[Size],
    *,
    contents: Sequence[Size] | None = None,
    threshold: float = 0.8,
    overlap: float = 0.8,
    stuff: Collection[int] = (),
) -> list[Segments]:
    """Each pixel belongs to one segment at most: that of the query whose class and mask are surest there.

    A query counts from a probability of `threshold`, and if it keeps more than a share `overlap` of its mask. Those of
    a class in `stuff` (sky, road) become one segment.
    """
    results: list[Segments] = []
    for classes, masks in _by_image(output, view, sizes, contents):
        scores, labels = classes.softmax(-1).max(-1)
        sure = ((labels < classes.shape[-1] - 1) & (scores > threshold)).nonzero()[:, 0]
        scores, labels, shares = scores[sure], labels[sure], masks[sure].sigmoid()
        parts: list[Tensor] = []
        chosen: list[int] = []  # the number, in `sure`, of each segment's first query
        owner = (scores[:, None, None] * shares).argmax(0) if len(sure) else masks.new_zeros(masks.shape[-2:])
        for number in range(len(sure)):
            own, covered = owner == number, shares[number] >= 0.5
            part = own & covered
            if not part.any() or not own.sum() / covered.sum() > overlap:
                continue
            same = [place for place, first in enumerate(chosen) if labels[first] == labels[number]]
            if same and int(labels[number]) in stuff:
                parts[same[0]] = parts[same[0]] | part
                continue
            parts.append(part)
            chosen.append(number)
        kept = torch.tensor(chosen, dtype=torch.int64, device=masks.device)
        regions = torch.stack(parts) if parts else torch.zeros(0, *masks.shape[-2:], dtype=torch.bool)
        results.append(_segments(regions.to(masks.device), labels[kept], scores[kept], sure[kept]))
    return results


def detections(output: DenseOutput, sizes: Sequence[Size], *, threshold: float = 0.5) -> list[Detections]:
    """Boxes whose class is surer than `threshold`, in the pixels of images of these sizes."""
    if output.classes is None or output.boxes is None:
        raise UsageError("this network gives no boxes: use `instances`, whose boxes come from masks.")
    results: list[Detections] = []
    for logits, boxes, (H, W) in zip(output.classes, output.boxes, sizes, strict=True):
        scores, labels = logits.softmax(-1)[:, :-1].max(-1)
        kept = (scores > threshold).nonzero()[:, 0]
        places = corners(boxes[kept]) * boxes.new_tensor([W, H, W, H])
        results.append(Detections(places, labels[kept], scores[kept], kept))
    return results


def _segments(masks: Tensor, labels: Tensor, scores: Tensor, queries: Tensor) -> Segments:
    ids = torch.full(masks.shape[-2:], -1, device=masks.device)
    for number, mask in enumerate(masks):
        ids[mask] = number  # where masks overlap, the last one
    return Segments(ids, labels, scores, masks, queries)


def _by_image(
    output: DenseOutput, view: Size, sizes: Sequence[Size], contents: Sequence[Size] | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each image the classes (Q, K + 1) and the masks (Q, H, W), both logits, at the image's own size."""
    classes, masks = _queries(output)
    seen = _resized(masks, view)
    for index, size in enumerate(sizes):
        height, width = view if contents is None else contents[index]
        yield classes[index], _resized(seen[index : index + 1, :, :height, :width], size)[0]


def _queries(output: DenseOutput) -> tuple[Tensor, Tensor]:
    if output.classes is None or output.masks is None:
        raise UsageError("this network gives no masks: of boxes, use `detections`.")
    return output.classes, output.masks


def _resized(maps: Tensor, size: Size) -> Tensor:
    return maps if maps.shape[-2:] == size else F.interpolate(maps, size=size, mode="bilinear")
