"""Test accuracy and training time of recipes/digits.toml over several seeds.

python benchmarks/digits.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from vitlab.training.loop import fit
from vitlab.training.presets import find_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    _, recipe = find_recipe("digits")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(parser.parse_args().seeds):
            found.append(fit(replace(recipe, run=replace(recipe.run, seed=seed)), Path(folder) / str(seed)))
            print(f"seed {seed}: top-1 {found[-1]['top1']:.2%}, {found[-1]['seconds']:.0f} s", flush=True)
    scores = [result["top1"] for result in found]
    spread = f"{min(scores):.2%} .. {max(scores):.2%}"
    print(f"mean top-1 {statistics.mean(scores):.2%} ({spread}), n={len(scores)}, {found[0]['params']:,} parameters")


if __name__ == "__main__":
    main()
