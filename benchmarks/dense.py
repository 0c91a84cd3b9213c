"""Masks and boxes: semantic and instance segmentation of nuclei, and overfitting 16 images of coco128.

    python benchmarks/dense.py nuclei/ coco128/ -o dense.json
    python benchmarks/dense.py nuclei/ coco128/ --minutes 2            # a short try

Each run is `vitlab train` with the settings below. Overfitting shows that readers, losses and metrics belong together:
the images that are learned from are those that are evaluated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vitlab.training.train import train

FEW = 16  # images that are overfitted


@dataclass(frozen=True)
class Task:
    """One run, and the figures of its result that are kept."""

    name: str
    recipe: str
    data: Path
    settings: list[str]
    figures: tuple[str, ...]
    minutes: float


def tasks(nuclei: Path, coco: Path, encoder: str | None) -> Iterator[Task]:
    """`encoder`: a checkpoint that the runs on nuclei start from; for the linear head also frozen."""
    new = ["model.init_from=none", "model.image_size=256", "model.width=128", "model.depth=4", "model.heads=4"]
    start = [*new, "model.patch_size=8"] if encoder is None else [f"model.init_from={encoder}"]
    plain = [*start, "data.workers=0", "augment.jitter=0.1", "run.eval_every=10"]
    head = [*plain, "model.name=linear_head_nano", "optim.lr=1e-3", "data.batch_size=8", "run.epochs=60"]
    pixels, objects = ("miou", "pixel_accuracy", "per_class"), ("ap", "ap50", "pq")
    yield Task("nuclei, foreground", "seg_folder", nuclei, head, pixels, minutes=15)
    if encoder is not None:
        frozen = [*head, "model.freeze=encoder"]
        yield Task("nuclei, frozen encoder", "seg_folder", nuclei, frozen, pixels, minutes=15)
    queries = ["model.name=eomt_nano", "model.upscale=2", "model.queries=150", "optim.lr=5e-4", "run.epochs=100"]
    yield Task("nuclei, objects", "instance_folder", nuclei, [*plain, *queries], objects, minutes=40)
    still = ["augment.crop=none", "augment.flip=false", "augment.jitter=0", "run.epochs=600", "run.eval_every=100"]
    over = [*new, "model.patch_size=16", "model.name=eomt_nano", "model.upscale=3", "model.queries=60"]
    over += [*still, "data.workers=0", "data.batch_size=4", "optim.lr=5e-4"]
    yield Task("coco128, pixels", "seg_folder", coco / "semantic_segmentation", over, pixels, minutes=40)
    yield Task("coco128, objects", "instance_folder", coco / "instance_segmentation", over, objects, minutes=40)


def few_of(source: Path, folder: Path) -> Path:
    """The first images of a set of coco128 as a set of its own, for train and val alike."""
    shared = source.parent / "images" / "train2017"
    marks = "masks" if (source / "masks").is_dir() else "labels"
    suffix = ".png" if marks == "masks" else ".txt"
    files = [f for f in sorted((source / marks / "train2017").iterdir()) if (shared / f"{f.stem}.jpg").is_file()][:FEW]
    for split in ("train2017", "val2017"):
        for kind in ("images", marks):
            (folder / kind / split).mkdir(parents=True)
        for file in files:
            shutil.copy(file, folder / marks / split / f"{file.stem}{suffix}")
            shutil.copy(shared / f"{file.stem}.jpg", folder / "images" / split)
    text = (source / "config.yaml").read_text(encoding="utf-8")
    named = text[text.index("classes:" if marks == "masks" else "names:") :]
    (folder / "config.yaml").write_text(named, encoding="utf-8")
    return folder


def measure(task: Task, folder: Path, minutes: float | None) -> dict[str, object]:
    data = few_of(task.data, folder / "data") if task.name.startswith("coco128") else task.data
    limit = task.minutes if minutes is None else minutes
    settings = [*task.settings, f"data.source={data}", f"run.minutes={limit}", f"run.dir={folder / 'run'}"]
    result = train(task.recipe, settings).result
    figures = {name: result[name] for name in task.figures if name in result}
    return {
        "name": task.name,
        "recipe": task.recipe,
        "settings": task.settings,
        "seconds": result["seconds"],
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nuclei", type=Path, help="folder of train/, val/ and test/, each with images/ and instances/")
    parser.add_argument("coco", type=Path, help="folder of coco128, with semantic_segmentation/ and the like")
    parser.add_argument("--encoder", help="a checkpoint that the runs on nuclei start from")
    parser.add_argument("--minutes", type=float, help="of each run, instead of its own")
    parser.add_argument("--only", help="runs whose name begins so")
    parser.add_argument("-o", "--out", type=Path, help="a JSON file of what was measured")
    options = parser.parse_args()
    results = []
    for task in tasks(options.nuclei, options.coco, options.encoder):
        if options.only and not task.name.startswith(options.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(task, Path(folder), options.minutes))
        print(json.dumps({**results[-1], "per_class": results[-1].get("per_class", [])[:2]}, indent=1))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
