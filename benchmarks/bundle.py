"""Write a finished run's model into the package, rounded to float16, with its recipe; and measure what it is then.

python benchmarks/bundle.py RUN NAME        # e.g. runs/cifar10_30min cifar10
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import vitlab
from vitlab.checkpoints.bundled import FOLDER
from vitlab.checkpoints.native import Card
from vitlab.images.datasets import open_data
from vitlab.training.batches import Pictures
from vitlab.training.evaluate import evaluate
from vitlab.training.recipe import read_recipe, to_toml, with_value

LICENCE = "Apache-2.0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name", help="what follows bundled:")
    args = parser.parse_args()
    recipe = read_recipe(args.run / "recipe.toml")
    result = json.loads((args.run / "result.json").read_text(encoding="utf-8"))
    model = vitlab.load(args.run / "best").half()
    with tempfile.TemporaryDirectory() as folder:  # as a user will load it: rounded to float16, computed in float32
        vitlab.save(model, folder)
        rounded = vitlab.load(folder)
    data = open_data(recipe.data.source, path=recipe.data.path, seed=recipe.run.seed)
    pictures = Pictures(data.test or data.val, model.preprocess)
    metrics = {"test_top1": evaluate(rounded, pictures).top(1), "seed": recipe.run.seed}
    if recipe.augment.flip_at_test:
        metrics["test_top1_with_flip"] = evaluate(rounded, pictures, flip=True).top(1)
    took = f"{result['epochs']} epochs, {result['seconds']:.0f} s on two CPU cores"
    source = f"vitlab train recipe.toml (the file beside this one), on {data.name}: {took}"
    model.card = Card(recipe.model.name, source, LICENCE, metrics)
    target = FOLDER / args.name
    shutil.rmtree(target, ignore_errors=True)
    vitlab.save(model, target)
    for key, plain in (("data.path", "none"), ("run.dir", "")):  # of the machine it was made on
        recipe = with_value(recipe, key, plain)
    (target / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"bundled:{args.name}: {size / 1e6:.2f} MB; the run had {result['top1']:.2%}, rounded: {metrics}")


if __name__ == "__main__":
    main()
