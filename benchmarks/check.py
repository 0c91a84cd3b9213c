"""vitlab check: does it find what was planted, and nothing else?

    python benchmarks/check.py labels --data cifar-10-batches-bin                 # wrong labels among 5,000 images
    python benchmarks/check.py duplicates PHOTOS [PHOTOS ...]                      # copies among photos

`labels`: 500 test images of each class of CIFAR-10, of which 5 % get a random other label. Test images, because the
bundled models were trained on the training images (bundled:cifar10 with their labels): no model has seen these.
`duplicates`: every photo gets one altered copy, one kind at a time, in two halves of the photos: thresholds that
suit the first must suit the second. A pair of different photos that is taken for copies is false, and is named:
look at it, for photos may have copies of their own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from measure import machine, print_table
from PIL import Image

import vitlab
from vitlab.data_check.duplicates import candidates
from vitlab.data_check.matching import COPY, correlations
from vitlab.data_check.reading import read_contents
from vitlab.images.datasets import Dataset, open_data, subset
from vitlab.images.read import read_image
from vitlab.images.sources.dataset import FileDataset
from vitlab.images.sources.folder import images_under
from vitlab.inference import open_model
from vitlab.training.batches import ImageSet
from vitlab.training.features import dataset_features

Alter = Callable[[Image.Image, np.random.Generator], Image.Image]


def labels(args: argparse.Namespace) -> None:
    data = open_data("cifar10", path=None if args.data is None else str(args.data))
    test, random = data.test, np.random.default_rng(args.seed)
    assert test is not None
    classes = len(data.classes)
    chosen = np.concatenate([np.flatnonzero(test.labels == k)[: args.images // classes] for k in range(classes)])
    part = subset(test, chosen)
    wrong = random.permutation(len(part))[: round(args.share * len(part))]
    given = part.labels.copy()
    given[wrong] = (given[wrong] + random.integers(1, classes, len(wrong))) % classes
    print(f"planted: {len(wrong)} of {len(part)} ({args.share:.0%}), seed {args.seed}; {machine()}", flush=True)
    titles = ["features", f"precision of the first {args.first}", "of these rightly corrected", "suspects"]
    titles += ["planted ones among them", "share of wrong labels, estimated"]
    with tempfile.TemporaryDirectory() as scratch:
        for index, label in enumerate(given):
            folder = Path(scratch, "data", data.classes[label])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(part.read(index)).save(folder / f"{index}.png")
        rows = [suspects_of(model, Path(scratch, "data"), part, wrong, args.first) for model in args.models.split(",")]
    print_table(titles, rows)


def suspects_of(model: str, folder: Path, part: Dataset, wrong: np.ndarray, first: int) -> list[str]:
    """A row of the table."""
    result = vitlab.check(folder, model=model)
    order = np.array([int(Path(result.images[suspect.image].path).stem) for suspect in result.suspects])
    suggested = np.array([part.classes.index(result.classes[suspect.suggested]) for suspect in result.suspects])
    planted = np.isin(order, wrong)
    corrected = (suggested == part.labels[order])[:first][planted[:first]]
    shares = [f"{planted[:first].mean():.2f}", f"{corrected.mean():.2f}", str(len(order))]
    share = "features too weak" if result.wrong_labels is None else f"{result.wrong_labels:.1%}"
    return [model, *shares, f"{planted.sum() / len(wrong):.2f}", share]


def duplicates(args: argparse.Namespace) -> None:
    """Recall at the threshold that is built in, and false pairs at every threshold."""
    files = sorted(file for folder in args.photos for file in images_under(folder))
    order = np.random.default_rng(args.seed).permutation(len(files))
    halves = {"first half": order[: len(files) // 2], "second half": order[len(files) // 2 :]}
    for half, numbers in halves.items():
        rows, false = [], {}
        for kind, alter in KINDS.items():
            with tempfile.TemporaryDirectory() as scratch:
                originals = [files[i] for i in numbers]
                found = similarities(originals, alter, kind, Path(scratch), args)
            n = len(originals)
            own = np.array([found.get((i, n + i), 0.0) for i in range(n)])
            rows.append(
                [kind, str(n), f"{(own >= COPY).mean():.3f}", f"{own.min():.2f}", f"{np.quantile(own, 0.05):.2f}"]
            )
            for (a, b), similar in found.items():
                if a % n != b % n:
                    pair = min(a % n, b % n), max(a % n, b % n)
                    false[pair] = max(false.get(pair, 0.0), similar)
        print(f"\n{half}: {len(numbers)} photos, copies at a correlation of {COPY} or more, features of {args.model}")
        print_table(["altered", "copies", "recall", "lowest", "5 % quantile"], rows)
        pairs = len(numbers) * (len(numbers) - 1) // 2
        worst = sorted(false.items(), key=lambda item: -item[1])
        wrong = sum(similar >= COPY for similar in false.values())
        print(f"pairs of different photos: {pairs:,}; taken for copies in any of these: {wrong}")
        for (a, b), similar in worst[:5]:
            print(f"  {similar:.3f}  {files[numbers[a]]}  {files[numbers[b]]}")
    print(machine())


def similarities(
    originals: list[str], alter: Alter, kind: str, scratch: Path, args: argparse.Namespace
) -> dict[tuple[int, int], float]:
    """Of all pairs that are compared; the copy of image i is image n + i."""
    random, copies = np.random.default_rng(args.seed), []
    for number, file in enumerate(originals):
        copies.append(str(scratch / f"{number}.{'jpg' if 'JPEG' in kind else 'png'}"))
        image = alter(read_image(file), random)
        image.save(copies[-1], quality=50)
    data = FileDataset([*originals, *copies], np.zeros(2 * len(originals)), [])
    contents, network = read_contents(data), open_model(args.model, encoder=True).encoder
    features = dataset_features(network, ImageSet(data, network.require_preprocess())).vectors
    pairs, mirrored = candidates(contents.colours, features)
    found: dict[tuple[int, int], float] = {}
    for (a, b), similar in zip(pairs.tolist(), correlations(contents.thumbnails, pairs, mirrored), strict=True):
        found[a, b] = max(found.get((a, b), 0.0), float(similar))
    return found


def cropped(share: float) -> Alter:
    """A random part with this share of height and width."""

    def crop(image: Image.Image, random: np.random.Generator) -> Image.Image:
        w, h = round(share * image.width), round(share * image.height)
        x, y = random.integers(0, image.width - w + 1), random.integers(0, image.height - h + 1)
        return image.crop((int(x), int(y), int(x) + w, int(y) + h))

    return crop


def flipped(image: Image.Image, random: np.random.Generator) -> Image.Image:
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


KINDS: dict[str, Alter] = {
    "none (same pixels)": lambda image, random: image,
    "JPEG, quality 50": lambda image, random: image,  # saved so
    "mirrored": flipped,
    "crop, 90 % of the area": cropped(0.9**0.5),
    "crop, 90 % of the sides": cropped(0.9),
    "crop 90 %, mirrored, JPEG 50": lambda image, random: flipped(cropped(0.9)(image, random), random),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("labels")
    command.add_argument("--data", type=Path, help="folder of CIFAR-10's files")
    command.add_argument("--models", default="bundled:dino,bundled:mae,bundled:cifar10")
    command.add_argument("--images", type=int, default=5000)
    command.add_argument("--share", type=float, default=0.05)
    command.add_argument("--first", type=int, default=100)
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=labels)
    command = commands.add_parser("duplicates")
    command.add_argument("photos", type=Path, nargs="+")
    command.add_argument("--model", default="bundled:dino")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=duplicates)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
