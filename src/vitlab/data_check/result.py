"""The result of a check: what was found, as a record, as JSON and as a table of corrections."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data_check.duplicates import Copy
from vitlab.data_check.outliers import OutlierImage
from vitlab.images.listing import ImageInfo
from vitlab.images.sources.corrections import Correction
from vitlab.images.sources.dataset import TargetKind
from vitlab.images.sources.targets import TargetColumns
from vitlab.training.label_issues import LabelSuspect

IMBALANCE = 10.0  # times as many images in the largest class as in the smallest: worth saying


@dataclass(frozen=True)
class CheckMethod:
    """How the check was done, to be read with its results."""

    model: str  # whose features were compared
    why: str  # this model
    copy_threshold: float = 1.0  # correlation of details from which images are near copies; above 1: none can be told
    seconds: float = 0.0


@dataclass(frozen=True)
class DoubtfulLabel:
    """One of several labels that an image likely has, or lacks, by mistake."""

    image: int
    label: int
    given: bool  # whether the image has it now
    confidence: float  # probability that the opposite holds
    margin: float  # probability of what is given, less that of the opposite; from -1


@dataclass
class CheckResult:
    """The state of a dataset. Images are numbers in `images`, which lists all splits."""

    name: str
    source: str
    classes: list[str]  # none: the images have no labels
    images: list[ImageInfo]
    method: CheckMethod
    unreadable: dict[int, str] = field(default_factory=dict)  # image -> what is wrong
    tiny: dict[int, tuple[int, int]] = field(default_factory=dict)  # image -> height, width
    extreme: dict[int, tuple[int, int]] = field(default_factory=dict)
    blank: list[int] = field(default_factory=list)
    leaks: list[Copy] = field(default_factory=list)  # an image of val or test, and its copy in an earlier split
    duplicates: list[Copy] = field(default_factory=list)  # within a split
    conflicts: list[Copy] = field(default_factory=list)  # copies with different labels
    suspects: list[LabelSuspect] = field(default_factory=list)  # the worst first
    doubtful: list[DoubtfulLabel] = field(default_factory=list)  # where images have several labels; the worst first
    wrong_labels: float | None = None  # estimated share of wrong labels; None: not estimated
    outliers: list[OutlierImage] = field(default_factory=list)  # the farthest first
    counts: dict[str, list[int]] = field(default_factory=dict)  # split -> images of each class
    notes: list[str] = field(default_factory=list)
    applied: list[Correction] = field(default_factory=list)  # drop and relabel, with which the data were checked
    kind: TargetKind = "class"  # what the labels are
    columns: TargetColumns = field(default_factory=TargetColumns)  # that were chosen, of a table
    page: Path | None = None
    table: Path | None = None

    @property
    def splits(self) -> dict[str, int]:
        """Images of each split."""
        counts: dict[str, int] = {}
        for info in self.images:
            counts[info.split or "train"] = counts.get(info.split or "train", 0) + 1
        return counts

    @property
    def serious(self) -> int:
        """What makes results wrong or stops a run: leaks, contradictory labels, unreadable images."""
        return len(self.leaks) + len(self.conflicts) + len(self.unreadable)

    @property
    def imbalance(self) -> float | None:
        """The largest class of train over its smallest that has images; None without classes."""
        present = [count for count in self.counts.get("train", []) if count]
        return max(present) / min(present) if len(present) > 1 else None

    def problems(self) -> dict[int, list[str]]:
        """Image -> what is wrong with it, the most serious first."""
        problems: dict[int, list[str]] = {}

        def add(image: int, text: str) -> None:
            texts = problems.setdefault(image, [])
            if text not in texts:
                texts.append(text)

        for image in self.unreadable:
            add(image, "unreadable")
        for copy in self.leaks:
            add(copy.image, f"in {self._split(copy.of)} too: {self._path(copy.of)} ({shown_kind(copy)})")
            add(copy.of, f"in {self._split(copy.image)} too: {self._path(copy.image)} ({shown_kind(copy)})")
        for copy in self.conflicts:
            for image, other in ((copy.image, copy.of), (copy.of, copy.image)):
                add(image, f"copy with another label: {self._path(other)} is {self.images[other].label}")
        for suspect in self.suspects:
            add(suspect.image, f"likely wrong label ({suspect.confidence:.2f})")
        for doubtful in self.doubtful:
            add(doubtful.image, f"{self.doubt(doubtful)} ({doubtful.confidence:.2f})")
        for copy in self.duplicates:
            add(copy.image, f"copy of {self._path(copy.of)} ({shown_kind(copy)})")
            add(copy.of, "has copies")
        for outlier in self.outliers:
            usual = "its class" if self.kind == "class" else "the others"
            add(outlier.image, f"unlike {usual} ({outlier.deviation:.1f} deviations)")
        for image, (height, width) in self.tiny.items():
            add(image, f"tiny ({width} x {height})")
        for image, (height, width) in self.extreme.items():
            add(image, f"extreme shape ({width} x {height})")
        for image in self.blank:
            add(image, "blank")
        return problems

    def doubt(self, doubtful: DoubtfulLabel) -> str:
        return f"likely {'not' if doubtful.given else 'lacks'} {self.classes[doubtful.label]}"

    def corrections(self) -> list[Correction]:
        """A line for every image with a problem. Actions are proposed only where nothing has to be judged:

        unreadable images, the copy in the earlier split of a leak, and further copies of an image are dropped.
        Corrections that the data were checked with come last: the table is complete without the one before it.
        """
        drop = set(self.unreadable)
        drop |= {copy.of for copy in self.leaks}
        contradictory = {image for copy in self.conflicts for image in (copy.image, copy.of)}
        split_off = "val" not in self.splits  # val is then drawn from train: near copies would be on both sides
        for copy in self.duplicates:
            if copy.image not in contradictory and (copy.kind != "near" or split_off):
                drop.add(copy.image)
        suggested = {suspect.image: self.classes[suspect.suggested] for suspect in self.suspects}
        relabelled = {(row.path, row.split): row for row in self.applied if row.action == "relabel"}
        lines = []
        for image, texts in self.problems().items():
            path, split, label = self.images[image]
            line = Correction(path, split or "train", label or "", "; ".join(texts), suggested.get(image, ""))
            if before := relabelled.pop((path, line.split), None):  # its label in the files is the one of before
                line = replace(line, label=before.label, suggested_label=before.suggested_label, action="relabel")
            lines.append(replace(line, action="drop") if image in drop else line)
        return [*lines, *relabelled.values(), *(row for row in self.applied if row.action == "drop")]

    def train_command(self) -> str:
        """What trains with the corrections."""
        settings = [f"data.{name}={value}" for name, value in self.columns.chosen.items()]
        return shlex.join(["vitlab", "train", self.source, *settings, "--apply", str(self.table)])

    def check_command(self) -> str:
        """What looks at the data as corrected."""
        options = [word for name, value in self.columns.chosen.items() for word in (f"--{name}", value)]
        return shlex.join(["vitlab", "check", self.source, *options, "--apply", str(self.table)])

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab check --json` prints it."""
        m = self.method
        return {
            "name": self.name,
            "page": None if self.page is None else str(self.page),
            "table": None if self.table is None else str(self.table),
            "images": self.splits,
            "kind": self.kind,
            "classes": self.classes,
            "model": m.model,
            "copy_threshold": m.copy_threshold,
            "serious": self.serious,
            "leaks": [self._pair(copy) for copy in self.leaks],
            "conflicts": [self._pair(copy) for copy in self.conflicts],
            "unreadable": [self._about(image) | {"error": error} for image, error in self.unreadable.items()],
            "wrong_labels": self.wrong_labels,
            "suspects": [
                self._about(s.image)
                | {
                    "suggested": self.classes[s.suggested],
                    "confidence": s.confidence,
                    "given_confidence": s.given_confidence,
                    "margin": s.margin,
                }
                for s in self.suspects
            ],
            "doubtful_labels": [
                self._about(d.image)
                | {
                    "doubtful": self.classes[d.label],
                    "given": d.given,
                    "confidence": d.confidence,
                    "margin": d.margin,
                }
                for d in self.doubtful
            ],
            "duplicates": [self._pair(copy) for copy in self.duplicates],
            "outliers": [
                self._about(o.image) | {"distance": o.distance, "deviation": o.deviation} for o in self.outliers
            ],
            "tiny": [self._about(image) | {"size": list(size)} for image, size in self.tiny.items()],
            "extreme": [self._about(image) | {"size": list(size)} for image, size in self.extreme.items()],
            "blank": [self._about(image) for image in self.blank],
            "per_class": {split: dict(zip(self.classes, counts, strict=True)) for split, counts in self.counts.items()},
            "imbalance": self.imbalance,
            "notes": self.notes,
            "seconds": m.seconds,
        }

    def _path(self, image: int) -> str:
        return self.images[image].path

    def _split(self, image: int) -> str:
        return self.images[image].split or "train"

    def _about(self, image: int) -> dict[str, Any]:
        return {"image": self._path(image), "split": self._split(image), "label": self.images[image].label}

    def _pair(self, copy: Copy) -> dict[str, Any]:
        values = {"kind": copy.kind, "similarity": copy.similarity, "mirrored": copy.mirrored}
        return self._about(copy.image) | {"of": self._about(copy.of)} | values


def shown_kind(copy: Copy) -> str:
    if copy.kind != "near":
        return copy.kind
    if not copy.similarity:
        return "by way of another copy"
    return f"near, {copy.similarity:.2f}" + (", mirrored" if copy.mirrored else "")


def odd_sizes(sizes: np.ndarray, readable: np.ndarray) -> tuple[list[int], list[int]]:
    """Tiny images, and images of extreme shape, each against what is usual in the dataset. sizes (n, 2)."""
    if not readable.any():
        return [], []
    shorter, longer = sizes.min(axis=1), np.maximum(sizes.max(axis=1), 1)
    ratio = longer / np.maximum(shorter, 1)
    smallest = min(TINY, 0.5 * float(np.median(shorter[readable])))
    widest = max(EXTREME, 2 * float(np.median(ratio[readable])))
    return np.flatnonzero(readable & (shorter < smallest)).tolist(), np.flatnonzero(
        readable & (ratio > widest)
    ).tolist()


TINY = 64  # pixels of the shorter side; sets of small images have their own scale
EXTREME = 3.0  # longer side over shorter side: a square crop then shows less than a third
