"""With few labels, is fine-tuning better than training from scratch? The same network and steps, several seeds.

    python benchmarks/finetune.py --data cifar-10-binary.tar.gz
    python benchmarks/finetune.py --checkpoint RUN/best --per-class 10 --few run.epochs=50
    python benchmarks/finetune.py fashion-mnist run.epochs=4

The recipe trains on the first half of its source's classes (or --checkpoint is such a model). Then a few pictures of
each of the other classes, which it never saw, are learned: from scratch, from scratch with three times the learning
rate, from that model, and by a new head alone, which bears ten times the rate. Every seed draws other pictures; nothing
is chosen by validation; all of the other classes' test pictures count. KEY=VALUE changes the recipe, --few KEY=VALUE
the settings of the few labels.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import numpy as np
from measure import duration, fit_or_go_on, machine, mean_and_spread, print_table
from PIL import Image

import vitlab
from vitlab.images.datasets import Data, open_data
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, with_settings

RECIPE = "cifar10_30min"
PRETRAIN = ["run.epochs=6"]
FEW = [  # for every way of learning alike
    "data.batch_size=32",
    "data.workers=0",
    "augment.drop_patches=0",
    "optim.name=adamw",
    "optim.lr=5e-4",
    "optim.weight_decay=0.05",
    "optim.schedule=cosine",
    "optim.warmup_epochs=5",
    "run.epochs=100",
    "run.save_every=100000",  # once, at the end
]
POOL = 500  # pictures of a class to draw the few from, and as many for what a run calls validation


def folder_name(label: str) -> str:
    return label.replace("/", "-")  # Fashion-MNIST has a T-shirt/top


def write_classes(data: Data, chosen: list[int], folder: Path, most: int | None = None) -> list[str]:
    """Class folders with only these classes, split as the data are; `most` pictures of each, but all of test."""
    names = [folder_name(data.classes[label]) for label in chosen]
    if folder.is_dir():  # of an earlier call with the same --runs
        return names
    unfinished = folder.with_name(f".{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    for split in ("train", "val", "test"):
        if (dataset := getattr(data, split)) is None:
            continue
        for label, name in zip(chosen, names, strict=True):
            place = unfinished / split / name
            place.mkdir(parents=True)
            for index in np.flatnonzero(dataset.labels == label)[: None if split == "test" else most]:
                pixels = dataset.read(int(index))  # (H, W, C)
                picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
                picture.save(place / f"{index:06d}.png", compress_level=1)
    unfinished.rename(folder)
    return names


def check_unseen(checkpoint: Path, classes: list[str]) -> None:
    """A model that learned the other classes' labels already would win without merit."""
    known = {folder_name(label) for label in vitlab.load(checkpoint).labels or []}
    if seen := known & set(classes):
        raise SystemExit(
            f"{checkpoint}: was trained on {', '.join(sorted(seen))}, which must be new to it. Leave --checkpoint out: "
            "one is trained on the other classes."
        )


def learn(few: Recipe, checkpoint: Path, seeds: int, runs: Path) -> dict[str, list[float]]:
    """Test accuracy of every way of learning, a number for each seed."""
    start = f"model.init_from={checkpoint}"
    ways = {
        "from scratch": [],
        "from scratch, 3 x the rate": [f"optim.lr={3 * few.optim.lr}"],
        "fine-tuned": [start],
        "new head alone": [start, "model.freeze=encoder", f"optim.lr={10 * few.optim.lr}"],
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    sizes = set()
    for seed in range(seeds):
        for number, (way, settings) in enumerate(ways.items()):
            recipe = with_settings(few, [f"run.seed={seed}", *settings])
            result = fit_or_go_on(recipe, runs / f"{number}-{seed}")
            sizes.add((result["params"], result["steps"]))
            found[way].append(result["top1"])
    if len(sizes) > 1:
        raise SystemExit(
            f"not the same network or steps: {sorted(sizes)} (parameters, steps). Give the checkpoint's own options, "
            "e.g. model.width=128."
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="RECIPE|KEY=VALUE", help=f"recipe: {RECIPE} if left out")
    parser.add_argument("--data", help="where the source's files lie; otherwise they are looked for, or downloaded")
    parser.add_argument("--checkpoint", type=Path, help="a model of the first half of the classes; otherwise trained")
    parser.add_argument("--per-class", type=int, default=20)
    parser.add_argument("--few", action="append", default=[], metavar="KEY=VALUE", help="of the few labels")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="folder for the runs; otherwise they are thrown away")
    args = parser.parse_intermixed_args()
    named = [] if not args.what or "=" in args.what[0] else args.what[:1]
    name, recipe = find_recipe(*named or [RECIPE])
    recipe = with_settings(recipe, [*PRETRAIN, *args.what[len(named) :]])
    data = open_data(recipe.data.source, path=args.data or recipe.data.path)
    half = len(data.classes) // 2
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as thrown_away:
        runs = (args.runs or Path(thrown_away)).resolve()
        runs.mkdir(parents=True, exist_ok=True)
        fresh = write_classes(data, list(range(half, len(data.classes))), runs / "few", POOL)
        checkpoint = args.checkpoint
        if checkpoint is None:
            write_classes(data, list(range(half)), runs / "many")
            many = with_settings(recipe, [f"data.source={runs / 'many'}", "data.path=none"])
            result = fit_or_go_on(many, runs / "pretrained")
            checkpoint = runs / "pretrained" / "best"
            learned = f"test top-1 {result['top1']:.2%} after {duration(result['seconds'])}"
            print(f"\n{name}, the first {half} classes: {learned}, {result['params']:,} parameters", flush=True)
        check_unseen(checkpoint, fresh)
        few = with_settings(recipe, [*FEW, *args.few, f"data.source={runs / 'few'}", "data.path=none"])
        few = with_settings(few, [f"data.per_class={args.per_class}", f"run.eval_every={few.run.epochs}"])
        found = learn(few, checkpoint, args.seeds, runs)
    print(f"\n{name}, the other {len(fresh)} classes, {args.per_class} labels of each:\n")
    head = ["start", *(f"seed {seed}" for seed in range(args.seeds)), "mean (spread)"]
    print_table(head, ([way, *(f"{100 * s:.2f} %" for s in v), mean_and_spread(v)] for way, v in found.items()))
    scratch = [max(pair) for pair in zip(*(v for way, v in found.items() if "scratch" in way), strict=True)]
    gains = [100 * (a - b) for a, b in zip(found["fine-tuned"], scratch, strict=True)]
    verdict = "better in every seed" if min(gains) > 0 else "NOT better in every seed"
    print(
        f"\nfine-tuned against the better run from scratch: {sum(gains) / len(gains):+.2f} points "
        f"({min(gains):+.2f} .. {max(gains):+.2f}), n = {len(gains)}: {verdict}"
    )


if __name__ == "__main__":
    main()
