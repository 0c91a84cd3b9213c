"""Write a finished run's model into the package, rounded to float16, with its recipe; and measure what it is then.

python benchmarks/bundle.py RUN NAME [KEY=VALUE ...]        # e.g. data.path=cifar-10-binary.tar.gz
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
    parser.add_argument("name")
    arguments = parser.parse_args()
    recipe = read_recipe(arguments.run / "recipe.toml")
    result = json.loads((arguments.run / "result.json").read_text())
    model = vitlab.load(arguments.run / "best").half()
    with tempfile.TemporaryDirectory() as folder:  # as a user will load it: rounded to float16, computed in float32
        vitlab.save(model, folder)
        rounded = vitlab.load(folder)
    data = open_data(recipe.data.source, path=recipe.data.path, seed=recipe.run.seed)
    pictures = Pictures(data.test or data.val, model.preprocess)
    top1 = evaluate(rounded, pictures, flip=recipe.augment.flip_at_test).top(1)
    alone = evaluate(rounded, pictures).top(1)
    command = f"vitlab train {arguments.name}"
    model.card = Card(
        recipe.model.name,
        f"vitlab train, {data.name}: {result['epochs']} epochs in {result['seconds'] / 60:.1f} minutes",
        LICENCE,
        {"test_top1": alone, "test_top1_flip": top1, "seed": recipe.run.seed},
    )
    target = FOLDER / arguments.name
    shutil.rmtree(target, ignore_errors=True)
    vitlab.save(model, target)
    for key in ("path",):
        recipe = with_value(recipe, f"data.{key}", "none")
    recipe = with_value(recipe, "run.dir", "")
    (target / "recipe.toml").write_text(f"# {command}\n{to_toml(recipe)}", encoding="utf-8")
    size = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target.name}: {size / 1e6:.2f} MB; run {result['top1']:.2%}, rounded {top1:.2%}, one view {alone:.2%}")


if __name__ == "__main__":
    main()
