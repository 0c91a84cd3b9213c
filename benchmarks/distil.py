"""Does a student that also listens to a teacher beat the same student that does not?

    python benchmarks/distil.py --data cifar-10-binary.tar.gz
    python benchmarks/distil.py --data cifar-10-binary.tar.gz --fraction 0.1 --seeds 3 objective.distillation=soft
    python benchmarks/distil.py --data cifar-10-binary.tar.gz --fraction 0.1 --checkpoint bundled:cifar10

A ResNet learns first (recipe resnet_cifar10), then a ViT three times with the same pictures, steps and rates (recipe
deit_cifar10): from the labels and the teacher, with DeiT's distillation token; from the labels alone, with that token;
and from the labels alone as a plain ViT. KEY=VALUE changes the students' recipe (objective.* that of the taught one
alone), --teacher KEY=VALUE the teacher's; --checkpoint takes a teacher that has learned before.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from measure import duration, fit_or_go_on, machine, mean_and_spread, print_table

from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings

ALONE = ["objective.name=supervised", "objective.teacher=none"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="values of the students' recipe to change")
    parser.add_argument("--data", help="where CIFAR-10's files lie; otherwise they are looked for, or downloaded")
    parser.add_argument("--fraction", type=float, help="of the training pictures, for teacher and students")
    parser.add_argument("--teacher", action="append", default=[], metavar="KEY=VALUE", help="of the teacher's recipe")
    parser.add_argument("--checkpoint", help="a trained teacher, instead of training one")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--runs", type=Path, help="folder for the runs; otherwise they are thrown away")
    args = parser.parse_intermixed_args()
    data = [f"data.path={args.data}"] if args.data else []
    data += [f"data.fraction={args.fraction}"] if args.fraction else []
    print(machine(), flush=True)
    found: dict[str, list[float]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as thrown_away:
        runs = (args.runs or Path(thrown_away)).resolve()
        teacher = args.checkpoint
        if teacher is None:
            recipe = with_settings(find_recipe("resnet_cifar10")[1], [*data, *args.teacher])
            learned = fit_or_go_on(recipe, runs / "teacher")
            took = duration(learned["seconds"])
            print(f"\nteacher: {learned['top1']:.2%}, {learned['params']:,} parameters, {took}\n", flush=True)
            teacher = runs / "teacher" / "best"
        ways = {
            "with the teacher": [f"objective.teacher={teacher}"],
            "without": ALONE,
            "without, plain ViT": [*ALONE, "model.distill_token=false"],
        }
        for seed in range(args.seeds):
            for number, (way, settings) in enumerate(ways.items()):
                asked = [s for s in args.settings if number == 0 or not s.startswith("objective.")]
                student = find_recipe("deit_cifar10")[1]
                student = with_settings(student, [*data, *asked, *settings, f"run.seed={seed}"])
                result = fit_or_go_on(student, runs / f"{number}-{seed}")
                found.setdefault(way, []).append(result["top1"])
                seconds[way] = result["seconds"]
    head = ["student", *(f"seed {seed}" for seed in range(args.seeds)), "mean (spread)", "time"]
    rows = ([w, *(f"{100 * s:.2f} %" for s in v), mean_and_spread(v), duration(seconds[w])] for w, v in found.items())
    print_table(head, rows)
    taught, *alone = found.values()
    best = [max(pair) for pair in zip(*alone, strict=True)]
    gains = [100 * (a - b) for a, b in zip(taught, best, strict=True)]
    print(
        f"\nwith the teacher against the better one without: {sum(gains) / len(gains):+.2f} points "
        f"({min(gains):+.2f} .. {max(gains):+.2f}), n = {len(gains)}"
    )


if __name__ == "__main__":
    main()
