"""Write a finished run's model into the package, rounded to float16, with its recipe; and measure what it is then.

python benchmarks/bundle.py RUN NAME        # e.g. runs/cifar10_30min cifar10

A classifier is judged by top-1, MAE and DINO by k-NN on their encoder's features, MAE also by its reconstruction error,
CLIP by the names of the classes in sentences that it has not learned, or by recall where the data have captions.
Of DINO the teacher's encoder alone is kept: what is evaluated, explained and fine-tuned. Student and heads would make
it three times as large, and `vitlab.load` says that they are missing. With --plain, a ViT's LayerScale is multiplied
into its projections: the same function as a network that is exactly the paper's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import vitlab
from vitlab.checkpoints.bundled import FOLDER
from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.native import Card
from vitlab.export.fold import without_layer_scale
from vitlab.images.datasets import Captioned, Data
from vitlab.text.templates import read_templates
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier, evaluate_knn, evaluate_zeroshot
from vitlab.training.job import data_of, steps_of
from vitlab.training.objectives import objective_class
from vitlab.training.objectives.clip import CLIPOptions
from vitlab.training.processes import Processes
from vitlab.training.recipe import Recipe, read_recipe, to_toml, with_value
from vitlab.training.retrieval import AT, evaluate_retrieval

LICENCE = "Apache-2.0"
LIMIT = 4e6  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("name", help="what follows bundled:")
    parser.add_argument("--into", type=Path, default=FOLDER, help="another folder than the package's, to try it out")
    parser.add_argument("--machine", default="two CPU cores", help="where the run was made, for the card")
    parser.add_argument("--plain", action="store_true", help="fold LayerScale into the weights")
    args = parser.parse_args()
    recipe = read_recipe(args.run / "recipe.toml")
    result = json.loads((args.run / "result.json").read_text(encoding="utf-8"))
    model = kept(vitlab.load(args.run / "best"))
    model = (without_layer_scale(model) if args.plain else model).half()
    data = data_of(recipe)
    with tempfile.TemporaryDirectory() as folder:  # as a user will load it: rounded to float16, computed in float32
        vitlab.save(model, folder)
        rounded, _ = load_with_report(folder)
    metrics = {**measure(rounded, recipe, data, args.run), "seed": recipe.run.seed}
    length = f"{result['steps']} steps" if result["stopped_early"] else f"{result['epochs']} epochs"  # by run.minutes
    took = f"{length}, {result['seconds']:.0f} s on {args.machine}"
    told = elsewhere(recipe)
    source = f"vitlab train recipe.toml (the file beside this one), on {told.data.source}: {took}"
    model.card = Card(recipe.model.name, source, LICENCE, metrics)
    target = args.into / args.name
    shutil.rmtree(target, ignore_errors=True)
    vitlab.save(model, target)
    (target / "recipe.toml").write_text(to_toml(told), encoding="utf-8")
    size = sum(path.stat().st_size for path in target.iterdir())
    judged = f"{result['judged_by']} {result['top1']:.2%}"
    print(f"bundled:{args.name}: {size / 1e6:.2f} MB; the run had {judged}, rounded: {metrics}")
    if size >= LIMIT:
        raise SystemExit(f"{target} is not below {LIMIT / 1e6:g} MB: train a smaller model, and remove this one.")


def elsewhere(recipe: Recipe) -> Recipe:
    """Without the folders of the machine it was made on; of a file that was named, its name."""
    for key, plain in (("data.path", "none"), ("run.dir", "")):
        recipe = with_value(recipe, key, plain)
    named = {"data.source": recipe.data.source, "text.tokenizer": recipe.text.tokenizer}
    named |= {"model.init_from": recipe.model.init_from, "model.init_image": recipe.model.init_image}
    for key, value in named.items():
        if value is not None and Path(value).expanduser().exists():
            recipe = with_value(recipe, key, Path(value).name)
    return recipe


def kept(model: Any) -> Any:
    return model.encoder if model.family == "dino" else model


def measure(model: Any, recipe: Recipe, data: Data, run: Path) -> dict[str, float]:
    """On the test split, or where there is none on val."""
    split = "test" if data.test is not None else "val"
    pictures = ImageSet(data.test or data.val, model.preprocess)
    if model.family == "clip":
        found = by_words(model, recipe, data, pictures)
    elif model.config.classes:
        found = {"top1": evaluate_classifier(model, pictures).top(1)}
        if recipe.augment.flip_at_test:
            found["top1_with_flip"] = evaluate_classifier(model, pictures, flip=True).top(1)
    else:
        bank = ImageSet(data.train, model.preprocess)
        scores = evaluate_knn(getattr(model, "encoder", model), bank, pictures, len(data.classes))
        found = {"knn_top1": scores.top(1)}
        if model.family == "mae":
            plan = steps_of(recipe, data, model.preprocess).plan
            _, numbers = objective_class(recipe.objective.name)(recipe, model, data, plan, Processes(), run).rank(
                scores, model, pictures
            )
            found |= numbers  # the mean squared error over hidden patches
    return {f"{split}_{name}": value for name, value in found.items()}


def by_words(model: Any, recipe: Recipe, data: Data, pictures: ImageSet) -> dict[str, float]:
    """Recall both ways and its chance where there are captions; else zero-shot, by sentences kept for judging."""
    if isinstance(pictures.data, Captioned):
        told = evaluate_retrieval(model, pictures, pictures.data.captions).to_dict()
        ways = [(what, way, k) for what in ("recall", "chance") for way in told[what] for k in AT]
        return {f"{way}_{what}{k}": told[what][way][str(k)] for what, way, k in ways}
    sentences = read_templates(CLIPOptions.of(recipe).eval_templates)
    found = {"zeroshot_top1": evaluate_zeroshot(model, pictures, data.classes, sentences).top(1)}
    if recipe.augment.flip_at_test:
        found["zeroshot_top1_with_flip"] = evaluate_zeroshot(model, pictures, data.classes, sentences, flip=True).top(1)
    return found


if __name__ == "__main__":
    main()
