"""The images of every step, and how they become a batch: a function of (seed, step) only.

Workers may make batches in any order, and a resumed run sees the same images.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import FrameType
from typing import Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitlab.errors import DataError, ImageError, TrainingError
from vitlab.images.augment import Augment
from vitlab.images.augment_regions import RegionAugment
from vitlab.images.bands import naming
from vitlab.images.copies import CopiedPhotos, CopyRule
from vitlab.images.datasets import Dataset as ImageDataset
from vitlab.images.multicrop import MultiCrop
from vitlab.images.preprocess import RESAMPLING, Preprocess, normalise
from vitlab.images.randomness import permutation, uniform
from vitlab.images.regions import VOID, Regions, RegionView
from vitlab.images.scaled import Cut, Photo, open_scaled
from vitlab.images.sources.dataset import Annotated, target_kind
from vitlab.models.dense import DenseTarget
from vitlab.training.dense_targets import target_of

ORDER, BALANCE = 1, 5  # coordinates of the draws that shuffle an epoch, or balance it

T = TypeVar("T")
Decode = Literal["fast", "exact"]
CropBox = Callable[[int, tuple[int, int]], np.ndarray]  # position in the batch, (H, W) -> left, top, right, bottom
Skipped = dict[str, str]  # images that could not be read: name -> what is wrong


@dataclass(frozen=True)
class Plan:
    """n images in steps of batch_size * accumulate * world, each epoch in its own order; a partial step is left out."""

    n: int
    batch_size: int
    epochs: int
    seed: int
    repeats: int = 1
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    balanced: BalancedDraw | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.n < 1:
            raise TrainingError("there are no training images.")
        if self.n < self.world * self.accumulate:
            raise TrainingError(
                f"{self.n} training images are too few for {self.world * self.accumulate} parts of a step."
            )

    @property
    def part(self) -> int:
        """Images per micro-step and process; fewer than batch_size where the data are few."""
        return min(self.batch_size, self.n // (self.world * self.accumulate))

    @property
    def per_step(self) -> int:
        return self.part * self.world * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        return self.n // self.per_step

    @property
    def total(self) -> int:
        return self.steps_per_epoch * self.epochs

    @property
    def log_every(self) -> int:
        """Steps between lines of the log."""
        return max(1, self.steps_per_epoch // 20)

    def take(self, step: int, micro: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Epoch, sample numbers and repeat numbers of this process's part of a step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.balanced is None:
            order, repeat = _order(self.n, self.seed, epoch), np.zeros(self.n, dtype=np.int64)
        else:
            order, repeat = self.balanced.epoch(self.seed, epoch)
        if self.repeats > 1:  # each image stands `repeats` times in a row; the epoch stays as long
            views = np.tile(np.arange(self.repeats), -(-self.n // self.repeats))[: self.n]
            order, repeat = (np.repeat(values, self.repeats)[: self.n] for values in (order, repeat))
            repeat = repeat * self.repeats + views
        start = within * self.per_step + (micro * self.world + self.rank) * self.part
        return epoch, order[start : start + self.part].copy(), repeat[start : start + self.part]


class BalancedDraw:
    """Draws of images in which each group is as likely as any other (data.balance=sampling).

    An epoch has as many draws as there are images: place p of it is an image of a group drawn by (seed, epoch, p).
    """

    def __init__(self, groups: np.ndarray):
        """groups (N,): the group of each image, e.g. its class."""
        _, sizes = np.unique(groups, return_counts=True)
        self.members = np.argsort(groups, kind="stable")  # of the first group, then of the second, ...
        self.sizes, self.starts = sizes, np.cumsum(sizes) - sizes
        self._last: tuple[tuple[int, int], tuple[np.ndarray, np.ndarray]] | None = None

    def epoch(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(n,): the images in order, and how often each was drawn in this epoch before: another view each time."""
        if self._last is None or self._last[0] != (seed, epoch):
            self._last = (seed, epoch), self._draw(seed, epoch)
        return self._last[1]

    def _draw(self, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        n = len(self.members)
        draws = uniform(seed, BALANCE, epoch, np.arange(n), count=2)  # (n, 2)
        group = (draws[:, 0] * len(self.sizes)).astype(np.int64)
        order = self.members[self.starts[group] + (draws[:, 1] * self.sizes[group]).astype(np.int64)]
        together = np.argsort(order, kind="stable")  # the draws of one image, in their order
        _, first, counts = np.unique(order[together], return_index=True, return_counts=True)
        repeat = np.empty(n, dtype=np.int64)
        repeat[together] = np.arange(n) - np.repeat(first, counts)
        return order, repeat


@lru_cache(maxsize=2)  # drawn once an epoch: for ImageNet's 1.3 million that takes as long as many a step
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(n, seed, ORDER, epoch)


@dataclass
class TrainingBatch:
    images: Tensor  # (B, C, H, W), normalised
    labels: Tensor  # (B,)
    indices: Tensor  # (B,), numbers in the training set; none where no image could be read: images holds a blank then
    skipped: Skipped = field(default_factory=dict)
    views: tuple[Tensor, ...] = ()  # of every image, where it is cut several times; `images` is the first
    targets: tuple[DenseTarget, ...] = ()  # of every image with masks or boxes


def label_tensor(labels: np.ndarray) -> Tensor:
    """Class numbers (N,) int64; several labels (N, K), 0 and 1 in float32; numbers (N,) float64."""
    tensor = torch.from_numpy(np.asarray(labels))
    return tensor.float() if target_kind(labels) == "labels" else tensor


class ImageSet:
    """A data set as (B, C, H, W) of the model's size, uint8 or stored values in float32; small sets are resized once
    and stay in memory.

    decode: "exact" reads photos as prediction does; "fast" at about the size that they are needed at
    copies: with "fast", photos are shrunk by this rule once, and the copies are read from then on
    """

    def __init__(
        self, data: ImageDataset, preprocess: Preprocess, decode: Decode = "exact", copies: CopyRule | None = None
    ):
        self.data, self.preprocess = data, preprocess.at_one_size()
        if data.stored != preprocess.stored:
            ours, theirs = (kind or "photos" for kind in (data.stored, preprocess.stored))
            raise DataError(f"the images are {ours}, and the model reads {theirs}. Use a model for such images.")
        self.labels = label_tensor(data.labels)
        self.in_memory: Tensor | None = None
        if data.images is not None:
            self.in_memory = torch.stack([self._fit(image) for image in data.images])
        self.fast = decode == "fast" and self.in_memory is None and data.stored is None
        self.copies = CopiedPhotos(data, copies) if self.fast and copies is not None else None

    @property
    def decode(self) -> Decode:
        """How its photos are in fact read: what is in memory is exact."""
        return "fast" if self.fast else "exact"

    def __len__(self) -> int:
        return len(self.data)

    def without_copies(self) -> ImageSet:
        """The same, read from the files."""
        same = copy(self)
        same.copies = None
        return same

    def _fit(self, image: np.ndarray, box: np.ndarray | None = None, name: str = "the image") -> Tensor:
        """(H, W, C) -> (C, h, w), by the model's own preprocess, or from a random crop."""
        if self.preprocess.stored is not None:
            values = self.preprocess.view_stored(image, None if box is None else [int(v) for v in box], name)
            return torch.from_numpy(values.transpose(2, 0, 1).copy())
        same = image.shape[:2] == self.preprocess.size and image.shape[2] == len(self.preprocess.mean)
        if not same or box is not None:
            pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
            if box is not None:
                left, top, right, bottom = (int(v) for v in box)
                pil = pil.crop((left, top, right, bottom))
                pil = pil.convert("L" if len(self.preprocess.mean) == 1 else "RGB")
                kernel = RESAMPLING[self.preprocess.interpolation]
                pil = pil.resize((self.preprocess.size[1], self.preprocess.size[0]), kernel)
            else:
                pil = self.preprocess.view(pil, name=name)
            image = np.asarray(pil)
            image = image[:, :, None] if image.ndim == 2 else image
        return torch.from_numpy(image.transpose(2, 0, 1).copy())

    def cut(self, image: np.ndarray, view: RegionView, name: str) -> Tensor:
        """(H, W, C) photo -> (C, h, w) uint8: what a view shows of it."""
        pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
        seen = np.asarray(self.preprocess.view(pil, name=name, geometry=view.geometry))
        seen = seen[:, :, None] if seen.ndim == 2 else seen
        return torch.from_numpy((seen[:, ::-1] if view.mirrored else seen).transpose(2, 0, 1).copy())

    def take(self, indices: np.ndarray, boxes: CropBox | None = None) -> tuple[Tensor, np.ndarray, Skipped]:
        """Images, the positions of those that could be read, and the errors of the others by name."""
        if self.in_memory is not None and boxes is None:
            return self.in_memory[torch.from_numpy(indices)], np.arange(len(indices)), {}
        dtype = torch.uint8 if self.preprocess.stored is None else torch.float32

        def fit(position: int, image: np.ndarray, name: str) -> Tensor:
            return self._fit(
                image, boxes(position, (image.shape[0], image.shape[1])) if boxes is not None else None, name
            )

        def view(position: int, photo: Photo) -> Tensor:
            if boxes is None:
                return self.preprocess.view_scaled(photo)
            left, top, right, bottom = boxes(position, photo.size).tolist()
            kernel = RESAMPLING[self.preprocess.interpolation]
            cut = Cut((left, top, right, bottom), self.preprocess.size)
            return photo.views([cut], kernel, len(self.preprocess.mean))[0]

        images, kept, skipped = self.read_photos(indices, view) if self.fast else self.read(indices, fit)
        batch = torch.empty(len(images), len(self.preprocess.mean), *self.preprocess.size, dtype=dtype)
        for place, image in zip(batch, images, strict=True):
            place.copy_(image)
        return batch, kept, skipped

    def read_photos(self, indices: np.ndarray, make: Callable[[int, Photo], T]) -> tuple[list[T], np.ndarray, Skipped]:
        """`make(position, photo)` of each photo, which is decoded when a view of it is asked for; the rest as in
        `take`.
        """
        if self.copies is None:

            def one(position: int, index: int, name: str) -> T:
                with open_scaled(self.data.source(index), name=name) as photo:
                    return make(position, photo)

            return self._readable(indices, one)
        with self.copies.reading() as copied:

            def shrunken(position: int, index: int, name: str) -> T:
                photo = copied(index)
                with naming(name):
                    return make(position, photo)

            return self._readable(indices, shrunken)

    def read(
        self, indices: np.ndarray, make: Callable[[int, np.ndarray, str], T]
    ) -> tuple[list[T], np.ndarray, Skipped]:
        """`make(position, pixels, name)` of each file; the rest as in `take`."""
        return self._readable(indices, lambda position, index, name: make(position, self.data.read(index), name))

    def _readable(self, indices: np.ndarray, make: Callable[[int, int, str], T]) -> tuple[list[T], np.ndarray, Skipped]:
        """`make(position, index, name)` of each image that can be read."""
        results, kept = [], []
        skipped: Skipped = {}
        for position, index in enumerate(indices):
            name = self.data.name_of(int(index))
            try:
                results.append(make(position, int(index), name))
                kept.append(position)
            except ImageError as error:
                skipped[name] = str(error)
        return results, np.array(kept, dtype=np.int64), skipped

    def normalise(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W), as `take` gives them -> the model's input."""
        p = self.preprocess
        return normalise(pixels, p.mean, p.std, p.scale)

    def normalised(self, indices: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """Model inputs (B, C, H, W) without augmentation, and the positions of those that could be read."""
        pixels, kept, skipped = self.take(indices)
        if not len(kept):
            raise ImageError("\n".join(skipped.values()))
        return self.normalise(pixels), kept


class BatchDataset(Dataset):
    """Batches by (step, micro-step), for DataLoader workers."""

    def __init__(self, image_set: ImageSet, plan: Plan, augment: Augment | MultiCrop | RegionAugment):
        self.image_set, self.plan, self.augment = image_set, plan, augment

    def __getitem__(self, key: tuple[int, int]) -> TrainingBatch:
        return self.batch(*self.plan.take(*key))

    def batch(self, epoch: int, indices: np.ndarray, repeat: np.ndarray) -> TrainingBatch:
        """These images, augmented for this epoch."""
        if isinstance(self.augment, MultiCrop):
            return self._views(self.augment, epoch, indices, repeat)
        if isinstance(self.augment, RegionAugment):
            return self._with_regions(self.augment, epoch, indices, repeat)
        crops = self.augment.options.crop == "resized" and self.image_set.in_memory is None
        draw = partial(self.augment.boxes, seed=self.plan.seed, epoch=epoch)

        def box(position: int, size: tuple[int, int]) -> np.ndarray:
            """Files differ in size, so each is cropped as it is read."""
            one = slice(position, position + 1)
            return draw(np.array([size]), indices[one], repeat=repeat[one])[0]

        boxes = box if crops else None
        pixels, kept, skipped = self.image_set.take(indices, boxes)
        indices, repeat = indices[kept], repeat[kept]
        if not len(kept):
            blank, unknown = torch.zeros(1, *pixels.shape[1:]), torch.zeros_like(self.image_set.labels[:1])
            return TrainingBatch(blank, unknown, torch.from_numpy(indices), skipped)
        images = self.augment(pixels, indices, seed=self.plan.seed, epoch=epoch, repeat=repeat, cropped=crops)
        numbers = torch.from_numpy(indices)
        return TrainingBatch(images, self.image_set.labels[numbers], numbers, skipped)

    def _with_regions(
        self, augment: RegionAugment, epoch: int, indices: np.ndarray, repeat: np.ndarray
    ) -> TrainingBatch:
        """Images with masks or boxes, which are moved alike."""
        data, seed = self.image_set.data, self.plan.seed
        assert isinstance(data, Annotated)

        def cut(position: int, image: np.ndarray, name: str) -> tuple[Tensor, DenseTarget]:
            index, size = int(indices[position]), (image.shape[0], image.shape[1])
            view = augment.view(size, index, seed=seed, epoch=epoch, repeat=int(repeat[position]))
            return self.image_set.cut(image, view, name), target_of(data.regions(index, size), view, data.kind)

        pairs, kept, skipped = self.image_set.read(indices, cut)
        numbers = torch.from_numpy(indices[kept])
        if not pairs:
            pre = self.image_set.preprocess
            blank = RegionView(pre.geometry(pre.size), pre.size)
            empty = target_of(Regions.of_map(np.full(pre.size, VOID, dtype=np.uint8)), blank, data.kind)
            return TrainingBatch(
                torch.zeros(1, len(pre.mean), *pre.size), torch.zeros(1), numbers, skipped, (), (empty,)
            )
        images, targets = zip(*pairs, strict=True)
        seen = augment(torch.stack(images), indices[kept], seed=seed, epoch=epoch, repeat=repeat[kept])
        return TrainingBatch(seen, self.image_set.labels[numbers], numbers, skipped, (), targets)

    def _views(self, crops: MultiCrop, epoch: int, indices: np.ndarray, repeat: np.ndarray) -> TrainingBatch:
        """Several crops of every image; those of files are cut before resizing."""
        seed, in_memory = self.plan.seed, self.image_set.in_memory
        kept, skipped = np.arange(len(indices)), {}
        if in_memory is not None:
            views = crops(in_memory[torch.from_numpy(indices)], indices, seed=seed, epoch=epoch, repeat=repeat)
        else:

            def cut(position: int, image: np.ndarray, name: str) -> list[Tensor]:
                one, size = slice(position, position + 1), np.array([image.shape[:2]])
                boxes = crops.boxes(size, indices[one], seed=seed, epoch=epoch, repeat=repeat[one])
                return crops.cut(image, boxes[:, 0])

            def cut_photo(position: int, photo: Photo) -> list[Tensor]:
                one, size = slice(position, position + 1), np.array([photo.size])
                boxes = crops.boxes(size, indices[one], seed=seed, epoch=epoch, repeat=repeat[one])
                return crops.cut_photo(photo, boxes[:, 0])

            image_set = self.image_set
            read = image_set.read_photos(indices, cut_photo) if image_set.fast else image_set.read(indices, cut)
            crops_by_image, kept, skipped = read
            indices, repeat = indices[kept], repeat[kept]
            cuts = [torch.stack(parts).contiguous() for parts in zip(*crops_by_image, strict=True)]
            views = crops(cuts, indices, seed=seed, epoch=epoch, repeat=repeat, cropped=True) if cuts else []
        numbers = torch.from_numpy(indices)
        if not len(kept):
            views = [torch.zeros(1, len(crops.plain.mean), *size) for size in crops.sizes]
        labels = self.image_set.labels[numbers] if len(kept) else torch.zeros_like(self.image_set.labels[:1])
        return TrainingBatch(views[0], labels, numbers, skipped, tuple(views))


def batches(steps: BatchDataset, first_step: int, workers: int) -> Iterator[TrainingBatch]:
    """Every micro-step's batch from `first_step` to the end of the run, in order."""
    plan = steps.plan
    keys = [(step, micro) for step in range(first_step, plan.total) for micro in range(plan.accumulate)]
    ready = _ignore_first_signal if workers else None
    loader = DataLoader(steps, None, sampler=keys, num_workers=workers, worker_init_fn=ready)  # type: ignore[arg-type]
    yield from loader


def _ignore_first_signal(worker: int) -> None:
    """Ctrl-C, and SIGTERM of a cluster, reach all processes of a run. A worker that died of it would break the step
    that the run finishes before it saves; the run ends its workers itself.
    """

    def left(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, left)
