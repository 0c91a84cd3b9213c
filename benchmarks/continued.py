"""Does self-supervised training continue from released weights? Loss and k-NN of the first steps against a new start.

    python benchmarks/continued.py --epochs 40 --then 12

Each method (MAE, DINO) is trained on digits. Then it starts anew on the same images with other seeds: from scratch;
from that encoder alone, whose new decoder or head learns first (MAE's default) or together with it (DINO's); and from
the whole checkpoint. k-NN is measured before the first step and at the end.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import Watch, machine, mean_and_spread, print_table

import vitlab
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import Scores
from vitlab.training.job import prepare
from vitlab.training.loop import fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, with_settings

METHODS = ("mae", "dino")
FREEZE = "objective.freeze_encoder_epochs"
LAST = 16  # steps whose mean is the loss at the end


class Losses(Watch):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[float] = []

    def step(self, done: int, numbers: dict[str, float]) -> None:
        self.values.append(numbers["loss"])


def first_steps(recipe: Recipe, run: Path) -> tuple[list[float], float, float]:
    """Losses of a short run, and k-NN accuracy before and after it."""
    job, losses = prepare(recipe, run / "before"), Losses()
    job.model.eval()
    assert job.data.test is not None and job.model.preprocess is not None
    scores = job.objective.evaluate(job.model, ImageSet(job.data.test, job.model.preprocess), final=True)
    assert isinstance(scores, Scores)
    before = scores.top(1)
    after = fit(recipe, run / "run", show=losses)["top1"]
    return losses.values, before, after


def steps_until(losses: list[float], level: float) -> int:
    """The first step at which the mean of the last steps is at most `level`; where it never is, all steps."""
    ends = range(LAST, len(losses) + 1)
    return next((end for end in ends if statistics.mean(losses[end - LAST : end]) <= level), len(losses))


def spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=40, help="of the training that is continued")
    parser.add_argument("--then", type=int, default=12, help="epochs of each run that starts from it")
    args = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            recipe, runs = find_recipe(f"{method}_digits")[1], Path(folder) / method
            pretrained = with_settings(recipe, [f"run.epochs={args.epochs}", f"run.eval_every={args.epochs}"])
            result = fit(pretrained, runs / "pretrained", show=Watch())
            encoder = vitlab.save(vitlab.load(runs / "pretrained" / "best", encoder=True), runs / "encoder")
            alone = min(max(recipe.optim.warmup_epochs, 1), args.then / 2)  # MAE's default
            starts = {
                "from scratch": [],
                "encoder; the new part learns first": [f"model.init_from={encoder}", f"{FREEZE}={alone:g}"],
                "encoder; all learn at once": [f"model.init_from={encoder}", f"{FREEZE}=0"],
                "whole checkpoint": [f"model.init_from={runs / 'pretrained' / 'best'}"],
            }
            print(f"\n{method}_digits, {args.epochs} epochs, k-NN {result['top1']:.2%}; n = {args.seeds}\n", flush=True)
            rows, levels, steps = [], [], 0
            for number, (start, source) in enumerate(starts.items()):
                results = []
                for seed in range(1, args.seeds + 1):
                    settings = [f"run.seed={seed}", f"run.epochs={args.then}", f"run.eval_every={args.then}", *source]
                    results.append(first_steps(with_settings(recipe, settings), runs / f"{number}-{seed}"))
                losses, before, after = zip(*results, strict=True)
                steps, ends = len(losses[0]), [statistics.mean(values[-LAST:]) for values in losses]
                levels = levels or ends  # of the runs from scratch
                until = [steps_until(values, level) for values, level in zip(losses, levels, strict=True)]
                first = spread([values[0] for values in losses])
                accuracies = [mean_and_spread(list(values)) for values in (before, after)]
                rows.append([start, first, spread(ends), spread(until, 0), *accuracies])
            last = f"loss, last {LAST} of {steps} steps"
            columns = ["start", "loss, step 1", last, "steps to scratch's last loss", "k-NN before", "k-NN after"]
            print_table(columns, rows)


if __name__ == "__main__":
    main()
