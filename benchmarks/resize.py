"""Does a trained model keep its accuracy at another image size, before any fine-tuning? 28 -> 48 is 224 -> 384.

    python benchmarks/resize.py [RECIPE] [KEY=VALUE ...] [--sizes 48] [--seeds 3] [--checkpoint RUN/best]
    python benchmarks/resize.py digits model.stem=conv model.image_size=28 model.patch_size=4 --seeds 3

Patches keep their side, so the picture becomes more of them (7 x 7 -> 12 x 12) and the learned positions are resized
bicubically, as ViT does (arXiv:2010.11929, section 3.2). Both sizes show the same content: the larger pictures are the
same originals, enlarged bicubically. Each patch then shows a smaller piece of the object, as in training with random
resized crops, which is how ImageNet models are trained too; SETTINGS below therefore change the recipe's crop.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measure import fit_or_go_on, machine, mean_and_spread, print_table

import vitlab
from vitlab.images.datasets import open_data
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, with_settings, with_value

RECIPE = "fashion-mnist"
SETTINGS = [
    "augment.crop=resized",
    "augment.scale=[0.25, 1.0]",  # of the area: an object at 1 to 2 times its size; 48 / 28 is 1.71
    "augment.ratio=[0.8, 1.25]",
    "run.epochs=10",
    "run.eval_every=10",
]
ALLOWED = 0.01  # one point


def accuracies(checkpoint: Path, recipe: Recipe, sizes: list[int]) -> tuple[list[str], list[float]]:
    """Names of the sizes with their grids, and the test accuracy at each; the first is the model's own size."""
    data = open_data(recipe.data.source, path=recipe.data.path, seed=recipe.run.seed)
    own = vitlab.load(checkpoint)
    names, found = [], []
    for size in [None, *sizes]:
        change = {} if size is None else {"image_size": size, "preprocess": {"interpolation": "bicubic"}}
        model = own if size is None else vitlab.load(checkpoint, **change)
        pictures = ImageSet(data.test or data.val, model.preprocess)
        found.append(evaluate_classifier(model, pictures, flip=recipe.augment.flip_at_test).top(1))
        names.append("{} px, {} x {} patches".format(model.config.image_size[0], *model.config.grid))
    return names, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="RECIPE|KEY=VALUE", help=f"recipe: {RECIPE} if left out")
    parser.add_argument("--sizes", help="other sizes, e.g. 36,48; otherwise 12/7 of the model's own")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, help="a trained model, instead of training one")
    parser.add_argument("--runs", type=Path, help="folder for the runs; otherwise they are thrown away")
    args = parser.parse_intermixed_args()
    named = [] if not args.what or "=" in args.what[0] else args.what[:1]
    name, settings = (named or [RECIPE])[0], args.what[len(named) :]
    recipe = with_settings(find_recipe(name)[1], [*SETTINGS, *settings])
    print(machine(), flush=True)
    what = [str(args.checkpoint)] if args.checkpoint else [name, *SETTINGS, *settings]
    print(f"\n{' '.join(what)}:\n", flush=True)
    names: list[str] = []
    found: list[list[float]] = []
    with tempfile.TemporaryDirectory() as thrown_away:
        for seed in range(1 if args.checkpoint else args.seeds):
            recipe = with_value(recipe, "run.seed", seed)
            checkpoint = args.checkpoint
            if checkpoint is None:
                run = (args.runs or Path(thrown_away)) / str(seed)
                fit_or_go_on(recipe, run)
                checkpoint = run / "best"
            own = vitlab.load(checkpoint).config.image_size[0]
            sizes = [int(s) for s in args.sizes.split(",")] if args.sizes else [own * 12 // 7]
            names, scores = accuracies(checkpoint, recipe, sizes)
            found.append(scores)
    rows, verdicts = [], []
    for name, scores in zip(names, zip(*found, strict=True), strict=True):
        changes = [score - run[0] for score, run in zip(scores, found, strict=True)]
        low, high = 100 * min(changes), 100 * max(changes)
        points = f"{100 * sum(changes) / len(changes):+.2f} ({low:+.2f} .. {high:+.2f})"
        rows.append([name, mean_and_spread(scores), points if name != names[0] else "-"])
        if name != names[0]:
            verdicts.append("within one point" if min(changes) >= -ALLOWED else "NOT within one point")
    print_table(["input", "top-1", "change in points"], rows)
    print(f"\nn = {len(found)}; {', '.join(f'{n}: {v}' for n, v in zip(names[1:], verdicts, strict=True))}")


if __name__ == "__main__":
    main()
