"""Masks and boxes for images, with a network for segmentation or detection.

answers = predict_regions("runs/nuclei/best", "photos/")
answers[0].objects[0].label, .score, .box
write_regions(answers, "answers/")              # masks/*.png, annotations.json, overlays/*.png
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitlab.checkpoints.load import ModelOrName, locate
from vitlab.checkpoints.native import CARD, read_card, write_text
from vitlab.errors import ImageError, UsageError
from vitlab.images.draw_regions import drawn
from vitlab.images.read import Source, read_image
from vitlab.images.sources.dataset import RegionKind
from vitlab.inference import find_images, open_model
from vitlab.models import registry
from vitlab.models.base import Capability, Network
from vitlab.models.dense_network import DenseConfig, DenseNetwork
from vitlab.models.task import RegionTask
from vitlab.tables import Table, Tabular
from vitlab.training.dense_answers import THRESHOLD, DenseAnswer, FoundObject, answers, flat_ids, large_map
from vitlab.training.evaluate import evaluating


@dataclass(frozen=True)
class RegionPrediction:
    """What one image shows; or why that is not known."""

    name: str
    classes: list[str]
    kind: RegionKind
    answer: DenseAnswer | None = None
    error: str | None = None

    @property
    def counts(self) -> Counter[str]:
        """Objects of each class, or pixels."""
        if self.answer is None:
            return Counter()
        if self.answer.semantic is None:
            return Counter(self.classes[found.label] for found in self.answer.objects)
        pixels = np.bincount(self.answer.semantic.ravel(), minlength=len(self.classes))
        return Counter({self.classes[k]: int(pixels[k]) for k in np.flatnonzero(pixels)})

    def to_dict(self) -> dict[str, Any]:
        """As `vitlab predict --json` prints it."""
        if self.answer is None:
            return {"image": self.name, "error": self.error}
        if self.answer.semantic is not None:
            total = self.answer.semantic.size
            return {"image": self.name, "shares": {name: n / total for name, n in self.counts.most_common()}}
        objects = [{"label": self.classes[one.label], **measures(one, self.answer)} for one in self.answer.objects]
        return {"image": self.name, "objects": objects}


class RegionPredictions(Tabular, list[RegionPrediction]):
    """Of several images; printed, a table."""

    def table(self, most: int = 50) -> Table:
        rows = []
        for prediction in self[:most]:
            counts = prediction.counts.most_common(6)
            total = sum(prediction.counts.values())
            pixels = prediction.kind == "semantic"
            parts = (f"{name} {n / total:.1%}" if pixels else f"{name} {n:,}" for name, n in counts)
            rows.append([Path(prediction.name).name, prediction.error or ", ".join(parts) or "nothing"])
        notes = [f"and {len(self) - most:,} more"] if len(self) > most else []
        return Table(["image", "found"], rows, notes=notes)


def region_network(model: ModelOrName, device: str | None = None, **load_options: Any) -> DenseNetwork:
    """The network, which says something of pixels or objects; read so that it sees all of an image."""
    network = open_model(model, device, **load_options)
    if not isinstance(network, DenseNetwork):
        raise UsageError(f"a {network.family} gives no masks and no boxes: vitlab predict gives its classes.")
    network.preprocess = replace(network.require_preprocess(), how="stretch", resize=None)
    return network


def finds_regions(model: ModelOrName) -> bool:
    """Whether a model gives masks or boxes; of paths, checkpoints of our own. Loading says what is wrong."""
    if not isinstance(model, str | PathLike):
        return isinstance(model, DenseNetwork)
    folder = locate(fspath(model))
    if not (folder / CARD).is_file():
        return False
    family = read_card(folder).get("family")
    return (
        isinstance(family, str)
        and family in registry.FAMILIES
        and issubclass(registry.FAMILIES[family][0], DenseConfig)
    )


def kind_of(model: Network) -> RegionKind:
    """What it was trained to answer; of a file of another library what it can."""
    if isinstance(model.task, RegionTask):
        return model.task.region_kind
    if Capability.DEPTH in model.capabilities:
        raise UsageError(f"a {model.family} gives the depth of every pixel, and no masks or boxes.")
    return "detect" if Capability.DETECT in model.capabilities else "semantic"


def predict_regions(
    model: ModelOrName,
    images: Source | Iterable[Source],
    *,
    threshold: float = THRESHOLD,
    windows: bool = False,
    batch_size: int = 4,
    device: str | None = None,
    progress: Callable[[int], object] | None = None,
    **load_options: Any,
) -> RegionPredictions:
    """Of every image its objects above a score, or the class of every pixel. `windows`: an image larger than the
    model's is read at its own resolution, part by part (classes of pixels only).
    """
    network = region_network(model, device, **load_options)
    kind = kind_of(network)
    if windows and kind != "semantic":
        raise UsageError(f"--windows is for classes of pixels, and this model gives {network.task.description}.")
    if not 0 < threshold < 1:
        raise UsageError(f"threshold={threshold} must lie between 0 and 1.")
    listed = [images] if isinstance(images, str | PathLike | bytes | np.ndarray | Image.Image) else list(images)
    sources, predictions = find_images(listed), RegionPredictions()
    classes = [network.label_of(k) for k in range(network.classes)]
    with evaluating(network):
        step = 1 if windows else batch_size
        for first in range(0, len(sources), step):
            opened = list(_opened(sources[first : first + step], first))
            answers = iter(
                _answer(network, kind, [picture for _, picture, _ in opened if picture is not None], windows)
            )
            for name, picture, error in opened:
                answer = None if picture is None else next(answers).above(threshold)
                predictions.append(RegionPrediction(name, classes, kind, answer, error))
            if progress is not None:
                progress(len(opened))
    return predictions


def _opened(sources: Sequence[Source], first: int) -> Iterator[tuple[str, Image.Image | None, str | None]]:
    """Name, picture, and why there is none."""
    for number, source in enumerate(sources, first):
        name = fspath(source) if isinstance(source, str | PathLike) else f"image {number}"
        try:
            yield name, read_image(source, name=name), None
        except ImageError as error:
            yield name, None, str(error)


def _answer(model: DenseNetwork, kind: RegionKind, pictures: list[Image.Image], windows: bool) -> list[DenseAnswer]:
    pre, device = model.require_preprocess(), next(model.parameters()).device
    sizes = [(picture.height, picture.width) for picture in pictures]
    if not pictures:
        return []
    if windows:
        pixels = torch.from_numpy(np.array(pictures[0])).permute(2, 0, 1)
        return [DenseAnswer(sizes[0], large_map(model, pixels))]
    batch = torch.stack([pre.normalize(pre.view(picture)) for picture in pictures])
    return answers(model(batch.to(device)), sizes, pre.size, kind)


# ---- files


def write_regions(found: Sequence[RegionPrediction], folder: str | PathLike[str]) -> list[Path]:
    """overlays/*.png; masks/*.png: classes of pixels, or numbers of objects (16 bits); annotations.json: objects as
    COCO writes them. Returns what was written; images that could not be read are left out.
    """
    target, written = Path(folder).expanduser(), []
    answered = [prediction for prediction in found if prediction.answer is not None]
    for prediction, stem in zip(answered, _different([Path(p.name).stem for p in answered]), strict=True):
        answer = prediction.answer
        assert answer is not None
        ids = answer.semantic if answer.semantic is not None else flat_ids(answer, 0.0)[0].astype(np.uint16)
        overlay = drawn(np.array(read_image(prediction.name)), answer.regions())
        pictures = {"overlays": overlay} if prediction.kind == "detect" else {"masks": ids, "overlays": overlay}
        for kind, pixels in pictures.items():
            path = target / kind / f"{stem}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            written.append(path)
    if answered and answered[0].kind == "semantic":
        write_text(target / "classes.txt", "\n".join(answered[0].classes) + "\n")
        return [*written, target / "classes.txt"]
    write_text(target / "annotations.json", json.dumps(coco_of(answered)))
    return [*written, target / "annotations.json"]


def coco_of(found: Sequence[RegionPrediction]) -> dict[str, Any]:
    """Objects of images as COCO JSON, with their scores."""
    classes = found[0].classes if found else []
    content: dict[str, Any] = {"images": [], "annotations": []}
    content["categories"] = [{"id": number, "name": name} for number, name in enumerate(classes, 1)]
    for image, prediction in enumerate(found, 1):
        answer = prediction.answer
        assert answer is not None
        size = {"height": answer.size[0], "width": answer.size[1]}
        content["images"].append({"id": image, "file_name": Path(prediction.name).name, **size})
        for one in answer.objects:
            row = {"id": len(content["annotations"]) + 1, "image_id": image, "iscrowd": 0, "category_id": one.label + 1}
            content["annotations"].append({**row, **measures(one, answer)})
    return content


def measures(found: FoundObject, answer: DenseAnswer) -> dict[str, Any]:
    """Score, box, area and mask of an object, as COCO writes them."""
    left, top, right, bottom = found.box
    row: dict[str, Any] = {"score": found.score, "bbox": [left, top, right - left, bottom - top]}
    row["area"] = (right - left) * (bottom - top)
    if found.outline is not None:
        row |= {"area": int(found.outline.counts[1::2].sum()), "segmentation": found.outline.to_coco(answer.size)}
    return row


def _different(stems: list[str]) -> list[str]:
    """a, a of two folders -> a, a-2"""
    seen: Counter[str] = Counter()
    names = []
    for stem in stems:
        seen[stem] += 1
        names.append(stem if seen[stem] == 1 else f"{stem}-{seen[stem]}")
    return names
