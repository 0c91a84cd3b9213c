"""What it costs to check a checkpoint's digests: loading ViT-L/16 (1.2 GB) with and without them, in turns.

python benchmarks/digests.py [--model vit_large] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from measure import machine

import vitlab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_large")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folders = {"with digests": Path(name) / "with", "without": Path(name) / "without"}
        vitlab.save(vitlab.create(args.model), folders["with digests"])
        shutil.copytree(folders["with digests"], folders["without"])
        card = folders["without"] / "model.json"
        kept = {
            key: v for key, v in json.loads(card.read_text(encoding="utf-8")).items() if key not in ("digests", "seal")
        }
        card.write_text(json.dumps(kept), encoding="utf-8")
        size = (folders["without"] / "weights.safetensors").stat().st_size
        times: dict[str, list[float]] = {label: [] for label in folders}
        for _ in range(args.rounds + 1):
            for label, folder in folders.items():
                began = time.perf_counter()
                vitlab.load(folder)
                times[label].append(time.perf_counter() - began)
    medians = {}
    for label, values in times.items():
        low, medians[label], high = statistics.quantiles(values[1:], n=4)  # the first round warms the file cache
        spread = f"half of the runs in {low:.2f} .. {high:.2f} s"
        print(f"{args.model}, {size / 1e9:.2f} GB, {label}: median {medians[label]:.2f} s, {spread}, n={args.rounds}")
    print(f"checking the digests: {medians['with digests'] - medians['without']:.2f} s")


if __name__ == "__main__":
    main()
