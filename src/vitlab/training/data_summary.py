"""A dataset in numbers: images of each split and class, captions, sizes, and what cannot be read.

summary = describe(data_of(recipe))
print(summary)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from vitlab.errors import ImageError
from vitlab.images.datasets import Annotated, Captioned, Data, Dataset, images_per_class
from vitlab.images.randomness import permutation
from vitlab.images.regions import VOID
from vitlab.images.sources.dataset import REGION_NAMES
from vitlab.tables import Table, Tabular, by, count

LOOKED_AT, PIXELS = 500, 50_000_000  # of a split that is read one by one, so many images are looked at, no more
CLASSES = 20  # rows of the table
UNREADABLE = 5  # images that are named


@dataclass(frozen=True)
class CaptionCounts:
    """The captions of a split."""

    captions: int
    least: int  # of one image
    most: int
    words: float  # mean of a caption
    longest: int  # words
    first: str


@dataclass(frozen=True)
class NumberRange:
    """The numbers of a split."""

    least: float
    mean: float
    most: float


@dataclass(frozen=True)
class Sizes:
    """(H, W) of the images, by area; None where none could be read, or none is more frequent than others."""

    smallest: tuple[int, int] | None
    largest: tuple[int, int] | None
    most_common: tuple[int, int] | None


@dataclass(frozen=True)
class DataSummary(Tabular):
    """What a dataset holds; by the name of the split where it differs."""

    name: str
    kind: str
    classes: int
    numbers: Mapping[str, NumberRange]
    captions: Mapping[str, CaptionCounts]
    images: Mapping[str, int]
    channels: int
    sizes: Sizes
    looked_at: int
    unreadable: list[str]
    notes: list[str]
    per_class: list[dict[str, Any]]  # the class, and its images in each split; of masks and boxes a pair, see `measure`
    marks: str | None = None  # what is learned of masks or boxes
    measure: str = ""  # the second number of a pair

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab data --json` prints it."""
        return asdict(self)

    def tables(self) -> list[Table]:
        rows = [["images", ", ".join(f"{split} {count(n)}" for split, n in self.images.items())]]
        if self.captions:
            rows += self._caption_rows()
        elif self.marks is not None:
            rows = [["learned", self.marks], ["classes", count(self.classes)], *rows]
        elif self.numbers:
            spans = (f"{s} {n.least:.6g} to {n.most:.6g}, mean {n.mean:.6g}" for s, n in self.numbers.items())
            rows.append(["numbers", "; ".join(spans)])
        else:
            title = "classes" if self.kind == "class" else "labels"
            spans = ", ".join(f"{split} {_span([row[split] for row in self.per_class])}" for split in self.images)
            rows = [[title, count(self.classes)], *rows, ["per class" if self.kind == "class" else "per label", spans]]
        rows.append(["sizes", self._sizes()])
        rows += [["unreadable", message] for message in self.unreadable[:UNREADABLE]]
        if (more := len(self.unreadable) - UNREADABLE) > 0:
            rows.append(["", f"... {more} more of {count(self.looked_at)} looked at"])
        rows += [["note", note] for note in self.notes]
        summary = Table(["", ""], rows, heading=[self.name], prose=("",))
        return [summary] if self.captions or self.numbers else [summary, self._class_table()]

    def _class_table(self) -> Table:
        splits = list(self.images)
        if self.marks is not None:
            return self._marks_table()
        rows = [[row["class"], *[count(row[split]) for split in splits]] for row in self.per_class[:CLASSES]]
        more = self.classes - CLASSES
        notes = [f"... {count(more)} more (--json lists all)"] if more > 0 else []
        return Table(["class" if self.kind == "class" else "label", *splits], rows, splits, notes=notes)

    def _marks_table(self) -> Table:
        """Images with each class, and its objects or its share of the pixels, in what was looked at."""
        titles = [title for split in self.images for title in (f"{split}: images", self.measure)]
        rows: list[list[str]] = []
        for row in self.per_class[:CLASSES]:
            numbers = [number for split in self.images for number in row[split]]
            rows.append([row["class"], *(f"{n:.1%}" if isinstance(n, float) else count(n) for n in numbers)])
        more = self.classes - CLASSES
        notes = [f"... {count(more)} more (--json lists all)"] if more > 0 else []
        return Table(["class", *titles], rows, titles, notes=notes)

    def _caption_rows(self) -> list[list[str]]:
        counts = (
            f"{split} {count(c.captions)} ({_span([c.least, c.most])} per image)" for split, c in self.captions.items()
        )
        lengths = (f"{split} {c.words:.1f} a caption, up to {c.longest}" for split, c in self.captions.items())
        first = self.captions["train"].first
        return [["captions", ", ".join(counts)], ["words", ", ".join(lengths)], ["the first", first]]

    def _sizes(self) -> str:
        channels = f"{self.channels} channel{'s' if self.channels > 1 else ''}"
        smallest, largest, common = self.sizes.smallest, self.sizes.largest, self.sizes.most_common
        if smallest is None or largest is None:
            return f"none of {self.looked_at} looked at can be read"
        size = by(smallest)
        if smallest != largest:
            size += f" to {by(largest)}" + (f", most often {by(common)}" if common else "")
        part = self.looked_at < sum(self.images.values())
        return f"{size}, {channels}" + (f" (of {count(self.looked_at)} looked at)" if part else "")


def _span(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return count(least) + (f" to {count(most)}" if most > least else "")


def describe(data: Data) -> DataSummary:
    """Counts everything, and looks at the sizes of the images.

    Files are not all opened: of a split that is not in memory up to 500 images, or 50 megapixels, are looked at.
    """
    splits = {name: split for name in ("train", "val", "test") if (split := getattr(data, name)) is not None}
    with_numbers = data.kind == "number" and not data.captioned
    counts = {} if with_numbers or data.annotated else {name: images_per_class(split) for name, split in splits.items()}
    sizes: Counter[tuple[int, int]] = Counter()
    unreadable: list[str] = []
    for split in splits.values():
        split_sizes, wrong = _look(split)
        sizes += split_sizes
        unreadable += wrong
    by_area = sorted(sizes, key=lambda size: (size[0] * size[1], size))
    common = [size for size, n in sizes.most_common(1) if n > 1]
    marks = marked_classes(splits) if data.annotated else None
    return DataSummary(
        name=data.name,
        kind=data.kind,
        classes=len(data.classes),
        numbers={name: _numbers(split.labels) for name, split in splits.items()} if with_numbers else {},
        captions={name: _captions(split) for name, split in splits.items() if isinstance(split, Captioned)},
        images={name: len(split) for name, split in splits.items()},
        channels=data.train.channels,
        sizes=Sizes(*((by_area[0], by_area[-1]) if by_area else (None, None)), common[0] if common else None),
        looked_at=sizes.total() + len(unreadable),
        unreadable=unreadable,
        notes=list(data.notes),
        marks=None if marks is None else marks.learned,
        measure="" if marks is None else marks.measure,
        per_class=marks.per_class
        if marks is not None
        else [
            {"class": label, **{name: int(count[k]) for name, count in counts.items()}}
            for k, label in enumerate([] if with_numbers else data.classes)
        ],
    )


def _numbers(values: np.ndarray) -> NumberRange:
    return NumberRange(least=float(values.min()), mean=float(values.mean()), most=float(values.max()))


def _captions(split: Captioned) -> CaptionCounts:
    counts, lengths = split.captions.counts, [len(text.split()) for text in split.captions.everything()]
    return CaptionCounts(
        captions=int(counts.sum()),
        least=int(counts.min()),
        most=int(counts.max()),
        words=sum(lengths) / len(lengths),
        longest=max(lengths),
        first=split.captions[0][0],
    )


def _look(split: Dataset) -> tuple[Counter[tuple[int, int]], list[str]]:
    """Counts of images of each (H, W), and the errors of those that cannot be read."""
    if split.images is not None:
        return Counter({split.images.shape[1:3]: len(split)}), []
    sizes: Counter[tuple[int, int]] = Counter()
    unreadable: list[str] = []
    seen = 0
    for index in permutation(len(split), 0)[:LOOKED_AT].tolist():
        try:
            h, w = split.read(index).shape[:2]
        except ImageError as error:
            unreadable.append(str(error))
            continue
        sizes[h, w] += 1
        seen += h * w
        if seen >= PIXELS:
            break
    return sizes, unreadable


@dataclass(frozen=True)
class MarkedClasses:
    """How often each class is marked on the images that are looked at."""

    learned: str
    measure: str
    per_class: list[dict[str, Any]]


def marked_classes(splits: Mapping[str, Dataset]) -> MarkedClasses:
    """By split, for each class: images that have it; and its objects, or its share of the pixels that are not void."""
    tables: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    pixels = False
    for name, split in splits.items():
        assert isinstance(split, Annotated)
        pixels = split.kind == "semantic"
        tables[name] = _count_marks(split)
    first = next(iter(splits.values()))
    assert isinstance(first, Annotated)
    rows: list[dict[str, Any]] = []
    for k, label in enumerate(first.classes):
        pairs: dict[str, Any] = {}
        for name, (images, amounts) in tables.items():
            share = float(amounts[k] / max(amounts.sum(), 1))
            pairs[name] = [int(images[k]), share if pixels else int(amounts[k])]
        rows.append({"class": label, **pairs})
    return MarkedClasses(REGION_NAMES[first.kind], "share of pixels" if pixels else "objects", rows)


def _count_marks(split: Annotated) -> tuple[np.ndarray, np.ndarray]:
    """(K,) images, and objects or pixels, of up to LOOKED_AT images that can be read."""
    images, amounts = np.zeros((2, len(split.classes)), dtype=np.int64)
    for index in permutation(len(split), 0)[:LOOKED_AT].tolist():
        try:
            h, w = split.read(index).shape[:2]
            regions = split.regions(index, (h, w))
        except ImageError:
            continue
        shown = regions.painted[regions.painted != VOID] if split.kind == "semantic" else regions.labels[~regions.crowd]
        counts = np.bincount(shown, minlength=len(split.classes))
        images += counts > 0
        amounts += counts
    return images, amounts
