"""How good answers for every pixel or object are: IoU of classes, average precision of objects, panoptic quality.

    scores = evaluate_regions(model, ImageSet(data.val, model.preprocess), "instance")
    scores.value, scores.numbers(), scores.per_class()

IoU counts the pixels of all images together; void is left out. AP is COCO's, by pycocotools: the mean over IoU
thresholds 0.5 to 0.95. PQ (arXiv:1801.00868): a segment is found where its IoU exceeds 0.5.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from vitlab.images.preprocess import Geometry
from vitlab.images.regions import VOID, Regions, RegionView, RunLengths
from vitlab.images.sources.dataset import Annotated, RegionKind
from vitlab.models.dense_network import DenseNetwork
from vitlab.optional import require
from vitlab.training.batches import ImageSet
from vitlab.training.dense_answers import MOST_OBJECTS, DenseAnswer, answers, flat_ids
from vitlab.training.evaluate import evaluating
from vitlab.training.processes import Processes
from vitlab.training.unreadable import none_readable

BATCH = 8
FOUND = 0.5  # IoU from which an object counts as found, of one image
MARKED: dict[RegionKind, str] = {"semantic": "mIoU", "instance": "AP", "detect": "AP"}


@dataclass
class RegionScores:
    """The answers for a dataset, compared with what is marked on it."""

    kind: RegionKind
    classes: list[str]
    read: torch.Tensor  # (N,), False where an image could not be read
    seconds: float
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read: name -> what is wrong
    confusion: np.ndarray | None = None  # (K, K) pixels: row = truth, column = answer
    precision: AveragePrecision | None = None
    panoptic: PanopticCounts | None = None
    of_images: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (N,): how good each answer is, 0 to 1

    @property
    def metric(self) -> str:
        return MARKED[self.kind]

    @property
    def of_image(self) -> str:
        """What `of_images` are."""
        return {"semantic": "mIoU", "instance": "PQ", "detect": "F1"}[self.kind]

    @property
    def value(self) -> float:
        """The figure that chooses the best model."""
        return self.numbers()["miou" if self.kind == "semantic" else "ap"]

    def numbers(self) -> dict[str, float]:
        """All figures, as the log and result.json have them."""
        values: dict[str, float] = {}
        if self.confusion is not None:
            values |= {"miou": mean_of(class_ious(self.confusion)), "pixel_accuracy": pixel_accuracy(self.confusion)}
        if self.precision is not None:
            values |= {"ap": self.precision.ap, "ap50": self.precision.ap50, "ap75": self.precision.ap75}
        if self.panoptic is not None:
            values |= {"pq": mean_of(self.panoptic.quality())}
        return values

    def per_class(self) -> list[dict[str, Any]]:
        """Figures of each class; None where neither truth nor answers have it."""
        columns: dict[str, Sequence[float | None]] = {}
        if self.confusion is not None:
            columns["iou"] = class_ious(self.confusion)
        if self.precision is not None:
            columns |= {"ap": self.precision.per_class, "ap50": self.precision.per_class50}
        if self.panoptic is not None:
            columns["pq"] = self.panoptic.quality()
        rows = enumerate(self.classes)
        return [{"class": name, **{key: values[k] for key, values in columns.items()}} for k, name in rows]

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": int(self.read.sum()),
            "unreadable": int((~self.read).sum()),
            "unreadable_pictures": list(self.skipped.values()),
            **self.numbers(),
            "seconds": self.seconds,
            "images_per_second": len(self.read) / max(self.seconds, 1e-9),
            "per_class": self.per_class(),
        }


def evaluate_regions(
    model: DenseNetwork,
    image_set: ImageSet,
    kind: RegionKind,
    *,
    processes: Processes | None = None,
    batch_size: int = BATCH,
    progress: Callable[[int], object] | None = None,
) -> RegionScores:
    """Run all images through the model once, over all processes."""
    began, who = time.perf_counter(), processes or Processes(device=next(model.parameters()).device)
    data = image_set.data
    assert isinstance(data, Annotated)
    collected, skipped = RegionComparison(kind, len(data.classes)), {}
    read, quality = np.zeros(len(data)), np.zeros(len(data))
    mine = np.arange(who.rank, len(data), who.world)
    with evaluating(model):
        for first in range(0, len(mine), batch_size):
            part = mine[first : first + batch_size]
            for index, answer, truth in _answered(model, image_set, part, kind, skipped):
                read[index], quality[index] = 1, collected.add(index, answer, truth)
            if progress is not None:
                progress(len(part))
    both = who.sum(torch.from_numpy(np.stack([read, quality]))).numpy()
    skipped, parts = who.join(skipped), who.gather(collected)
    if not both[0].any():
        raise none_readable(skipped)
    everything = RegionComparison.joined(parts)
    scores = RegionScores(kind, data.classes, torch.from_numpy(both[0] > 0), 0.0, skipped, of_images=both[1])
    if kind == "semantic":
        scores.confusion = everything.confusion
    else:
        scores.precision = average_precision(everything, "segm" if kind == "instance" else "bbox")
    if kind == "instance":
        scores.panoptic = everything.panoptic
    scores.seconds = time.perf_counter() - began
    return scores


def _answered(
    model: DenseNetwork, image_set: ImageSet, part: np.ndarray, kind: RegionKind, skipped: dict[str, str]
) -> list[tuple[int, DenseAnswer, Regions]]:
    """Index, answer and truth of the images that can be read."""
    data, pre = image_set.data, image_set.preprocess
    assert isinstance(data, Annotated)

    def look(position: int, image: np.ndarray, name: str) -> tuple[torch.Tensor, Regions]:
        size = (image.shape[0], image.shape[1])
        view = RegionView(Geometry(size, pre.size, 0, 0), pre.size)  # all of the image
        return image_set.cut(image, view, name), data.regions(int(part[position]), size)

    loaded, kept, bad = image_set.read(part, look)
    skipped |= bad
    if not loaded:
        return []
    pixels, truths = zip(*loaded, strict=True)
    device = next(model.parameters()).device
    output = model(image_set.normalise(torch.stack(pixels)).to(device))
    most = max(MOST_OBJECTS, *(len(truth.labels) for truth in truths))
    answered = answers(output, [truth.size for truth in truths], pre.size, kind, most)
    return list(zip(part[kept].tolist(), answered, truths, strict=True))


# ---- what is collected of all images


@dataclass
class RegionComparison:
    """Answers beside the truth, as the metrics need them."""

    kind: RegionKind
    classes: int
    truth: list[dict[str, Any]] = field(default_factory=list)  # objects as COCO writes them
    answers: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    confusion: np.ndarray = field(init=False)
    panoptic: PanopticCounts = field(init=False)

    def __post_init__(self) -> None:
        self.confusion = np.zeros((self.classes, self.classes), dtype=np.int64)
        self.panoptic = PanopticCounts.none(self.classes)

    @classmethod
    def joined(cls, parts: Sequence[RegionComparison]) -> RegionComparison:
        total = cls(parts[0].kind, parts[0].classes)
        for part in parts:
            total.truth += part.truth
            total.answers += part.answers
            total.images += part.images
            total.confusion += part.confusion
            total.panoptic = total.panoptic.plus(part.panoptic)
        return total

    def add(self, image: int, answer: DenseAnswer, truth: Regions) -> float:
        """How good the answer for this image is, 0 to 1."""
        if self.kind == "semantic":
            assert answer.semantic is not None
            counts = confusion_of(truth.painted, answer.semantic, self.classes)
            self.confusion += counts
            return mean_of(class_ious(counts))
        self.images.append({"id": image, "height": truth.size[0], "width": truth.size[1]})
        self.truth += _coco_truth(image, truth, masks=self.kind == "instance")
        self.answers += _coco_answer(image, answer)
        if self.kind == "detect":
            return boxes_found(answer, truth)
        counts = panoptic_of(answer, truth, self.classes)
        self.panoptic = self.panoptic.plus(counts)
        return mean_of(counts.quality(), empty=1.0)


def _coco_truth(image: int, truth: Regions, *, masks: bool) -> list[dict[str, Any]]:
    rows = []
    for i, (left, top, right, bottom) in enumerate(truth.boxes.tolist()):
        row: dict[str, Any] = {"image_id": image, "category_id": int(truth.labels[i]), "iscrowd": int(truth.crowd[i])}
        row |= {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
        if masks:
            assert truth.shapes is not None
            mask = truth.shapes[i].mask(truth.size)
            row |= {"segmentation": RunLengths.of_mask(mask).to_coco(truth.size), "area": int(mask.sum())}
        rows.append(row)
    return rows


def _coco_answer(image: int, answer: DenseAnswer) -> list[dict[str, Any]]:
    """Objects as COCO's results hold them, with what its index asks of annotations."""
    rows = []
    for found in answer.objects:
        left, top, right, bottom = found.box
        row: dict[str, Any] = {"image_id": image, "category_id": found.label, "score": found.score}
        row |= {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top), "iscrowd": 0}
        if found.outline is not None:
            row["segmentation"] = found.outline.to_coco(answer.size)
        rows.append(row)
    return rows


# ---- classes of pixels


def confusion_of(truth: np.ndarray, answer: np.ndarray, classes: int) -> np.ndarray:
    """(K, K) pixels of two maps (H, W): row = truth, column = answer; void is left out."""
    labelled = truth != VOID
    pairs = truth[labelled].astype(np.int64) * classes + answer[labelled]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def class_ious(confusion: np.ndarray) -> list[float | None]:
    """Intersection over union of each class; None where it is neither there nor answered."""
    both, union = np.diag(confusion), confusion.sum(axis=0) + confusion.sum(axis=1) - np.diag(confusion)
    return [float(b / u) if u else None for b, u in zip(both, union, strict=True)]


def pixel_accuracy(confusion: np.ndarray) -> float:
    return float(np.trace(confusion) / max(confusion.sum(), 1))


def mean_of(values: Sequence[float | None], empty: float = 0.0) -> float:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else empty


# ---- objects


@dataclass(frozen=True)
class AveragePrecision:
    """COCO's average precision, over the classes that there are objects of."""

    ap: float  # over IoU thresholds 0.5, 0.55, ... 0.95
    ap50: float
    ap75: float
    per_class: list[float | None]
    per_class50: list[float | None]


def average_precision(comparison: RegionComparison, what: Literal["segm", "bbox"]) -> AveragePrecision:
    """`what`: segm compares masks, bbox boxes."""
    require("average precision", "pycocotools")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    classes = range(comparison.classes)
    with redirect_stdout(io.StringIO()):  # it prints its progress
        both = COCO(), COCO()
        for coco, rows in zip(both, (comparison.truth, comparison.answers), strict=True):
            dataset: Any = {  # which its types describe more narrowly than it reads
                "images": comparison.images,
                "annotations": [{**row, "id": number} for number, row in enumerate(rows, 1)],
                "categories": [{"id": k, "name": str(k)} for k in classes],
            }
            coco.dataset = dataset
            coco.createIndex()
        evaluation = COCOeval(*both, what)
        per_image = np.bincount([row["image_id"] for row in comparison.truth], minlength=1)
        evaluation.params.maxDets = [max(MOST_OBJECTS, int(per_image.max()))]
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 0]  # (T, R, K), -1 where there are no objects of a class

    def mean(part: np.ndarray) -> float | None:
        return float(part[part > -1].mean()) if (part > -1).any() else None

    at = [mean(part) or 0.0 for part in (precision, precision[0], precision[5])]
    return AveragePrecision(
        *at,
        per_class=[mean(precision[:, :, k]) for k in classes],
        per_class50=[mean(precision[0, :, k]) for k in classes],
    )


def boxes_found(answer: DenseAnswer, truth: Regions) -> float:
    """F1 of one image: objects that a sure box of their class covers, and boxes that cover one."""
    real = np.flatnonzero(~truth.crowd)
    sure = [found for found in answer.objects if found.score >= FOUND]
    free, right = set(real.tolist()), 0
    for found in sure:
        overlaps = {i: box_iou(np.array(found.box), truth.boxes[i]) for i in free if truth.labels[i] == found.label}
        best = max(overlaps, key=overlaps.__getitem__, default=None)
        if best is not None and overlaps[best] >= FOUND:
            free.remove(best)
            right += 1
    return 2 * right / (len(sure) + len(real)) if len(sure) + len(real) else 1.0


def box_iou(a: np.ndarray, b: np.ndarray) -> float:
    low, high = np.maximum(a[:2], b[:2]), np.minimum(a[2:], b[2:])
    both = float((high - low).clip(0).prod())
    return both / max(float((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod()) - both, 1e-12)


# ---- panoptic quality


@dataclass(frozen=True)
class PanopticCounts:
    """Of each class (K,): the IoU of found segments summed, how many were found, wrong answers, and missed segments."""

    iou: np.ndarray
    matched: np.ndarray
    wrong: np.ndarray
    missed: np.ndarray

    @classmethod
    def none(cls, classes: int) -> PanopticCounts:
        return cls(*np.zeros((4, classes)))

    def plus(self, other: PanopticCounts) -> PanopticCounts:
        mine, theirs = ((c.iou, c.matched, c.wrong, c.missed) for c in (self, other))
        return PanopticCounts(*(a + b for a, b in zip(mine, theirs, strict=True)))

    def quality(self) -> list[float | None]:
        """sum of IoU / (TP + FP / 2 + FN / 2) of each class; None where it is neither there nor answered."""
        counts = self.matched + self.wrong / 2 + self.missed / 2
        return [float(iou / count) if count else None for iou, count in zip(self.iou, counts, strict=True)]


def panoptic_of(answer: DenseAnswer, truth: Regions, classes: int) -> PanopticCounts:
    """Of the objects of one image; groups of objects (crowd) are void."""
    assert truth.shapes is not None
    ids, void, labels = np.zeros(truth.size, dtype=np.int32), np.zeros(truth.size, dtype=bool), []
    for i, shape in enumerate(truth.shapes):
        mask = shape.mask(truth.size)
        if truth.crowd[i]:
            void |= mask
            continue
        labels.append(truth.labels[i])
        ids[mask] = len(labels)
    return panoptic_counts((ids, np.array(labels, dtype=np.int64)), flat_ids(answer), void & (ids == 0), classes)


Segments = tuple[np.ndarray, np.ndarray]  # (H, W) numbers from 1, 0: none; and the label of each (n,)


def panoptic_counts(truth: Segments, answer: Segments, void: np.ndarray, classes: int) -> PanopticCounts:
    """A segment of which more than half is void is no wrong answer; void counts in no union."""
    (ids, labels), (answer_ids, answer_labels) = truth, answer
    n, m = len(labels), len(answer_labels)
    pairs = np.bincount((ids.astype(np.int64) * (m + 1) + answer_ids).ravel(), minlength=(n + 1) * (m + 1))
    both = pairs.reshape(n + 1, m + 1)  # pixels of each pair of segments
    in_void = np.bincount(answer_ids[void], minlength=m + 1)[1:]
    areas, answer_areas = both.sum(axis=1)[1:], both.sum(axis=0)[1:]
    union = areas[:, None] + (answer_areas - in_void)[None] - both[1:, 1:]
    iou = np.where(labels[:, None] == answer_labels[None], both[1:, 1:] / np.maximum(union, 1), 0.0)  # (n, m)
    match = iou > 0.5  # of at most one pair in each row and column
    here, hits = areas > 0, match.any(axis=0)
    wrong = ~hits & (answer_areas > 0) & (in_void <= answer_areas / 2)
    weights = {"weights": iou.max(axis=1, initial=0.0) * match.any(axis=1)}
    return PanopticCounts(
        np.bincount(labels, minlength=classes, **weights),
        np.bincount(labels[match.any(axis=1)], minlength=classes).astype(float),
        np.bincount(answer_labels[wrong], minlength=classes).astype(float),
        np.bincount(labels[here & ~match.any(axis=1)], minlength=classes).astype(float),
    )
