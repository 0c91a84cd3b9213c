"""Training batches from photo files: images per second, against the Pillow calls that timm's train transform makes.

    python benchmarks/pipeline.py [--photos FOLDER] [--sides 500 4000] [--cores 1 2] [--rounds 15]
    python benchmarks/pipeline.py --accuracy photos/ model.init_from=CHECKPOINT [--seeds 3]

A random resized crop (8 to 100 % of the area) of 224 x 224 pixels, bicubic, mirrored one time in two, normalised: the
same crops in every way. timm imports torchvision, which need not exist for this torch, so "Pillow" is written here with
the calls that timm's RandomResizedCropAndInterpolation, RandomHorizontalFlip, ToTensor and Normalize make: open,
convert, crop, resize, transpose, then float32. The photos are those of a folder, or soft blobs, enlarged or shrunk to
the sides asked for, with a sensor's noise, as JPEGs of quality 90 (4000 pixels: 12 megapixels, about 2 MB). The ways
take turns; a run is a pass over all files, with the start of its workers. With one core the process is kept on one and
has no workers; with two, each way has two. "first epoch" makes and stores the shrunken copies that "later epochs" read,
"no copies" is data.copies_gb=0. Files are read from the page cache: a slow disk is not part of it.

With --accuracy the folder is learned with data.decode=fast and exact, alike in all else, with several seeds each.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import duration, fit_or_go_on, machine, mean_and_spread, print_table
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitlab.export.timing import alternate, summary
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.copies import CopyRule
from vitlab.images.preprocess import Preprocess
from vitlab.images.read import EXTENSIONS
from vitlab.images.sources.dataset import FileDataset
from vitlab.training.batches import BatchDataset, Decode, ImageSet, Plan, batches
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings

SIZE, MEAN, STD = (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LARGE = 2000  # pixels: photos with a longer side than this are large
NOISE = 4.0  # levels
SEED = 0


def sources(folder: Path | None, count: int) -> list[Image.Image]:
    """So many photos of a folder, again from the first where there are fewer; or soft blobs."""
    if folder is not None:
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
        if not files:
            raise SystemExit(f"{folder}: no photos. Name a folder with some, or leave --photos out.")
        return [Image.open(files[i % len(files)]).convert("RGB") for i in range(min(count, len(files)))]
    rng = np.random.default_rng(SEED)
    return [Image.fromarray(rng.integers(0, 256, (18, 24, 3), dtype=np.uint8)) for _ in range(count)]


def write_photos(images: list[Image.Image], side: int, count: int, folder: Path) -> list[Path]:
    """JPEGs with this longer side; their noise makes them as large as a camera's."""
    rng, paths = np.random.default_rng(SEED), []
    folder.mkdir(parents=True)
    for number in range(count):
        image = images[number % len(images)]
        factor = side / max(image.size)
        image = image.resize((round(image.width * factor), round(image.height * factor)), Image.Resampling.BICUBIC)
        noisy = np.asarray(image) + rng.normal(0, NOISE, (image.height, image.width, 1)).astype(np.float32)
        paths.append(folder / f"{number}.jpg")
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(paths[-1], quality=90)
    return paths


class PillowDataset(TorchDataset):
    """What timm's train transform does to a file, with the crops that `augment` draws."""

    def __init__(self, paths: list[Path], augment: Augment):
        self.paths, self.augment = paths, augment
        self.mean, self.std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image, number = Image.open(self.paths[index]).convert("RGB"), np.array([index])
        left, top, right, bottom = self.augment.boxes(np.array([image.size[::-1]]), number, seed=SEED, epoch=0)[
            0
        ].tolist()
        image = image.crop((left, top, right, bottom)).resize((SIZE[1], SIZE[0]), Image.Resampling.BICUBIC)
        if self.augment.mirrored(number, seed=SEED, epoch=0)[0]:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return x.sub_(self.mean).div_(self.std)


def pillow_pass(dataset: PillowDataset, batch: int, workers: int) -> None:
    for _ in DataLoader(dataset, batch, num_workers=workers):
        pass


def vitlab_pass(steps: BatchDataset, workers: int, *, cold: bool) -> None:
    """An epoch. cold: the first one, which finds no copies and makes them."""
    stays, copies = os.environ["VITLAB_CACHE"], steps.image_set.copies
    with tempfile.TemporaryDirectory() as empty:
        if cold and copies is not None:
            os.environ["VITLAB_CACHE"] = empty
            copies.rows.fill_(-1)
        for _ in batches(steps, 0, workers):
            pass
    os.environ["VITLAB_CACHE"] = stays


def ways(paths: list[Path], batch: int, workers: int) -> dict[str, Callable[[], object]]:
    augment = Augment(AugmentOptions(crop="resized", flip=True), SIZE, MEAN, STD, "bicubic")
    pre = Preprocess(SIZE, interpolation="bicubic", mean=MEAN, std=STD)
    data = FileDataset(paths, np.zeros(len(paths)), ["photo"])
    plan = Plan(len(paths), batch, epochs=1, seed=SEED)

    def steps(decode: Decode, copies: CopyRule | None = None) -> BatchDataset:
        return BatchDataset(ImageSet(data, pre, decode, copies), plan, augment)

    rule = CopyRule.for_crops(3, augment.random_crops)
    return {
        "Pillow": partial(pillow_pass, PillowDataset(paths, augment), batch, workers),
        "exact": partial(vitlab_pass, steps("exact"), workers, cold=False),
        "fast, no copies": partial(vitlab_pass, steps("fast"), workers, cold=False),
        "fast, first epoch": partial(vitlab_pass, steps("fast", rule), workers, cold=True),
        "fast, later epochs": partial(vitlab_pass, steps("fast", rule), workers, cold=False),
    }


def compare(side: int, paths: list[Path], cores: int, batch: int, rounds: int) -> None:
    """Prints a table."""
    available = sorted(os.sched_getaffinity(0))
    if cores > len(available):
        print(f"\n{cores} cores: this machine has {len(available)}; left out.")
        return
    os.sched_setaffinity(0, available[:cores])
    torch.set_num_threads(1)
    times = alternate(ways(paths, batch, 0 if cores == 1 else cores), rounds)
    os.sched_setaffinity(0, available)
    megabytes = sum(path.stat().st_size for path in paths) / len(paths) / 1e6
    print(f"\n{len(paths)} photos of {side} pixels, {megabytes:.2f} MB each; {cores} cores, n = {rounds}:\n")
    medians, rows = {way: summary(values)["median"] for way, values in times.items()}, []
    for way, values in times.items():
        speed = summary([len(paths) / seconds for seconds in values])
        ratio = summary([a / b for a, b in zip(times["Pillow"], values, strict=True)])
        rows.append(
            [
                way,
                f"{speed['median']:.1f} ({speed['quarter']:.1f} .. {speed['three_quarters']:.1f})",
                f"{medians['Pillow'] / medians[way]:.2f} ({ratio['quarter']:.2f} .. {ratio['three_quarters']:.2f})",
            ]
        )
    print_table(["way", "images/s, median (half of the runs in)", "times Pillow (half of neighbours in)"], rows)


def accuracy(folder: str, settings: list[str], seeds: int, runs: Path) -> None:
    """Prints the accuracy on the test split, or else val, of training with both ways of decoding."""
    rows = []
    for decode in ("fast", "exact"):
        results = []
        for seed in range(seeds):
            fixed = [f"data.source={folder}", f"data.decode={decode}", f"run.seed={seed}", "run.ladder=false"]
            results.append(
                fit_or_go_on(with_settings(find_recipe("folder")[1], fixed + settings), runs / f"{decode}{seed}")
            )
        seconds = duration(sum(result["seconds"] for result in results) / seeds)
        rows.append([decode, mean_and_spread([result["top1"] for result in results]), seconds])
    print(f"\n{folder}, {' '.join(settings)}, n = {seeds}:\n")
    print_table(["data.decode", "top-1", "time of a run"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="with --accuracy: changes of the recipe")
    parser.add_argument("--photos", type=Path, help="a folder of photos to make the files from")
    parser.add_argument("--sides", type=int, nargs="+", default=[500, 4000], help="longer side in pixels")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--count", type=int, default=256, help="files; an eighth as many of more than 2000 pixels")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--accuracy", metavar="FOLDER", help="train on it instead, with both ways of decoding")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="keep the runs here; a second call goes on from them")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("a spread needs --rounds of at least 2.")
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        if args.accuracy:
            accuracy(args.accuracy, args.settings, args.seeds, args.runs or Path(temporary))
            return
        os.environ["VITLAB_CACHE"] = temporary
        for side in args.sides:
            count = max(8, args.count // (8 if side > LARGE else 1))
            paths = write_photos(sources(args.photos, count), side, count, Path(temporary) / str(side))
            for cores in args.cores:
                compare(side, paths, cores, min(args.batch, count // 4), args.rounds)


if __name__ == "__main__":
    main()
