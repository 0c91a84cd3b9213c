"""Does self-supervised training continue from released weights? Loss of the first steps, and k-NN before the first.

    python benchmarks/continued.py
    python benchmarks/continued.py --seeds 5 --epochs 40

Each method (MAE, DINO) is trained on digits. Then it starts anew on the same images with other seeds: from scratch,
from that encoder alone (new decoder or head), and from the whole checkpoint. The loss is the mean over the first steps;
k-NN is measured before any of them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from measure import Watch, machine, mean_and_spread, print_table

import vitlab
from vitlab.training.batches import ImageSet
from vitlab.training.job import prepare
from vitlab.training.loop import fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, with_settings

METHODS = ("mae", "dino")
STEPS = (1, 8, 32)  # the mean loss over this many first steps
STARTS = ("from scratch", "encoder alone, the rest new", "whole checkpoint")


class Losses(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def step(self, done: int, numbers: dict[str, float]) -> None:
        self.values.append(numbers["loss"])


def first_steps(recipe: Recipe, run: Path) -> tuple[list[float], float]:
    """Losses of a short run, and k-NN accuracy before it."""
    job, losses = prepare(recipe, run / "before"), Losses()
    job.model.eval()
    assert job.data.test is not None and job.model.preprocess is not None
    before = job.objective.evaluate(job.model, ImageSet(job.data.test, job.model.preprocess), final=True).top(1)
    fit(recipe, run / "run", show=losses)
    return losses.values, before


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ({min(values):.3f} .. {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20, help="of the training that is continued")
    args = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            recipe, runs = find_recipe(f"{method}_digits")[1], Path(folder) / method
            pretrained = with_settings(recipe, [f"run.epochs={args.epochs}", f"run.eval_every={args.epochs}"])
            result = fit(pretrained, runs / "pretrained", show=Watch())
            encoder = vitlab.save(vitlab.load(runs / "pretrained" / "best", encoder=True), runs / "encoder")
            sources = ([], [f"model.init_from={encoder}"], [f"model.init_from={runs / 'pretrained' / 'best'}"])
            print(f"\n{method}_digits, {args.epochs} epochs, k-NN {result['top1']:.2%}; n = {args.seeds}\n")
            rows = []
            for number, (start, source) in enumerate(zip(STARTS, sources, strict=True)):
                losses, accuracies = [], []
                for seed in range(1, args.seeds + 1):
                    settings = [f"run.seed={seed}", "run.epochs=4", "run.eval_every=4", *source]
                    values, accuracy = first_steps(with_settings(recipe, settings), runs / f"{number}-{seed}")
                    losses.append(values)
                    accuracies.append(accuracy)
                means = [spread([statistics.mean(values[:n]) for values in losses]) for n in STEPS]
                rows.append([start, mean_and_spread(accuracies), *means])
            print_table(["start", "k-NN before step 1", *(f"loss, steps 1-{n}" for n in STEPS)], rows)


if __name__ == "__main__":
    main()
