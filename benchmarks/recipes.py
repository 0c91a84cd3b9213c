"""Test accuracy, time and size of a recipe over several seeds.

    python benchmarks/recipes.py digits
    python benchmarks/recipes.py cifar10_30min data.path=cifar-10-binary.tar.gz --seeds 1
    python benchmarks/recipes.py cifar10_30min model.stem=patch --runs runs/plain

The data are looked for in $VITLAB_DATA unless data.path is given. --runs keeps the runs (FOLDER/0, FOLDER/1, ...): the
same command goes on where it was stopped, and does not repeat what is finished.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from measure import duration, fit_or_go_on, machine, mean_and_spread, print_table

from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings, with_value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="a shipped recipe, a TOML file, a data source or a folder")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="values to change")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, help="folder for the runs; otherwise they are thrown away")
    args = parser.parse_intermixed_args()
    name, recipe = find_recipe(args.recipe)
    recipe = with_settings(recipe, args.settings)
    print(machine(), flush=True)
    print(f"\n{' '.join([name, *args.settings])}:\n", flush=True)
    found = {}
    with tempfile.TemporaryDirectory() as thrown_away:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            run = (args.runs or Path(thrown_away)) / str(seed)
            found[seed] = fit_or_go_on(with_value(recipe, "run.seed", seed), run)
    rows = [
        [str(seed), f"{100 * r['top1']:.2f} %", duration(r["seconds"]), f"{r['images_per_second']:.0f}"]
        for seed, r in found.items()
    ]
    print_table(["seed", "top-1", "time", "images/s"], rows)
    first = next(iter(found.values()))
    time = duration(statistics.mean(r["seconds"] for r in found.values()))
    print(
        f"\n{first['split']} top-1: mean {mean_and_spread([r['top1'] for r in found.values()])}, n = {len(found)}; "
        f"{time} a run, {first['params']:,} parameters, {first['epochs']} epochs"
    )


if __name__ == "__main__":
    main()
