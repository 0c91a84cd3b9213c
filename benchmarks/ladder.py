"""The ladder of `vitlab train FOLDER`: does it choose well, and what does each rung cost?

    python benchmarks/ladder.py few --data cifar-10-batches-bin            # few labels: every rung on the test set
    python benchmarks/ladder.py probe FOLDER --weights CHECKPOINT          # linear_probe with and without kept features
    python benchmarks/ladder.py folder FOLDER --weights CHECKPOINT --minutes 5

`few`: 20 labels of each class of CIFAR-10, from each of the bundled encoders and from scratch, n seeds. Rungs are
chosen on the validation split alone; here each is also scored on the test split, which the ladder never sees.
`probe` and `folder` time themselves: run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from measure import Watch, duration, machine, mean_and_spread, print_table

import vitlab
from vitlab.images.datasets import open_data
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import Scores, knn_accuracy
from vitlab.training.features import dataset_features
from vitlab.training.objectives import supervised


def few(args: argparse.Namespace) -> None:
    rows: dict[str, dict[str, list[float]]] = {}
    for start in args.starts.split(","):
        for seed in range(args.seeds):
            run = args.runs / f"{start.replace(':', '-')}-{seed}"
            settings = [f"data.per_class={args.per_class}", f"run.seed={seed}", f"run.dir={run}"]
            settings += [f"data.path={args.data}"] if args.data else []
            if start == "none":
                settings += [f"run.epochs={args.scratch_epochs}", "run.eval_every=10", "data.repeats=1"]
                result = vitlab.train("cifar10", settings, show=Watch())
                rows.setdefault(start, {}).setdefault("from scratch", []).append(result.result["top1"])
                continue
            settings += ["run.ladder=true", f"model.init_from={start}"]
            result = vitlab.train("folder", ["data.source=cifar10", *settings], show=Watch())
            names = {rung["title"].split(" (")[0]: rung["name"] for rung in result.result["rungs"]}
            scores = {title: score(run, name, seed, args) for title, name in names.items()}
            for title, top1 in scores.items():
                rows.setdefault(start, {}).setdefault(title, []).append(top1)
            rows[start].setdefault("the ladder's choice", []).append(result.result["top1"])
    print_table(
        ["from", "rung", f"top-1 on the test split, n = {args.seeds}"],
        [[start, title, mean_and_spread(top1)] for start, found in rows.items() for title, top1 in found.items()],
    )
    for start, found in rows.items():
        if chosen := found.get("the ladder's choice"):
            others = [top1 for title, top1 in found.items() if title != "the ladder's choice"]
            short = [max(top1[seed] for top1 in others) - chosen[seed] for seed in range(len(chosen))]
            print(f"{start}: below the best single rung by at most {100 * max(short):.2f} points")


def score(run: Path, name: str, seed: int, args: argparse.Namespace) -> float:
    """Top-1 of one rung on the test split."""
    options: dict[str, Any] = {"path": str(args.data)} if args.data else {}
    folder = run / "rungs" / name
    if name == "knn":
        model = vitlab.load(run / "rungs" / "probe")  # its features are those of the weights
        data = open_data("cifar10", seed=seed, per_class=args.per_class, **options)
        assert data.test is not None
        known = [dataset_features(model, ImageSet(part, model.preprocess)) for part in (data.train, data.test)]
        bank, queries = ((F.normalize(part.vectors, dim=1), part.labels) for part in known)
        return knn_accuracy(bank, queries)
    found = vitlab.evaluate(folder if name == "probe" else folder / "best", "cifar10", **options).scores
    assert isinstance(found, Scores)
    return found.top(1)


def probe(args: argparse.Namespace) -> None:
    """The same recipe twice: features kept, and the encoder run in every step."""
    settings = [f"data.source={args.folder}", f"model.init_from={args.weights}", "data.workers=0"]
    settings += ["data.batch_size=32", f"optim.lr={args.lr}"]
    seconds, scores = {}, {}
    for kept, epochs in ((True, args.epochs), (False, args.slow_epochs)):
        run = args.runs / f"probe-{'kept' if kept else 'every-step'}"
        began, before = time.perf_counter(), supervised.why_in_every_step
        supervised.why_in_every_step = before if kept else lambda recipe, model: "the benchmark wants it"
        found = vitlab.train("linear_probe", [*settings, f"run.epochs={epochs}", f"run.dir={run}"], show=Watch())
        supervised.why_in_every_step = before
        seconds[kept], scores[kept, epochs] = time.perf_counter() - began, found.result
    again = vitlab.train(
        "linear_probe", [*settings, f"run.epochs={args.slow_epochs}", f"run.dir={args.runs / 'again'}"], show=Watch()
    )
    slow = scores[False, args.slow_epochs]
    per_epoch = seconds[False] / args.slow_epochs
    print_table(
        ["", "epochs", "seconds", "top-1", "loss"],
        [
            ["features kept", str(args.epochs), f"{seconds[True]:.1f}", *shown(scores[True, args.epochs])],
            ["features kept", str(args.slow_epochs), "", *shown(again.result)],
            ["encoder in every step", str(args.slow_epochs), f"{seconds[False]:.1f}", *shown(slow)],
        ],
    )
    print(
        f"{args.epochs} epochs: {per_epoch * args.epochs / seconds[True]:.0f} times faster than "
        f"{args.epochs} x {per_epoch:.1f} s would be"
    )


def shown(result: dict[str, Any]) -> list[str]:
    return [f"{result['top1']:.4%}", f"{result['loss']:.6f}"]


def folder(args: argparse.Namespace) -> None:
    """The command as a user types it, start of Python and all; and the same from scratch."""
    rows = []
    for title, start in (("from the weights", args.weights), ("from scratch", "none")):
        taken, found = [], []
        for seed in range(args.seeds):
            run = args.runs / f"{'weights' if start != 'none' else 'scratch'}-{seed}"
            words = [sys.executable, "-m", "vitlab", "train", str(args.folder), "--minutes", f"{args.minutes:g}"]
            began = time.perf_counter()
            settings = [f"model.init_from={start}", f"run.dir={run}", f"run.seed={seed}"]
            subprocess.run([*words, *settings], check=True, stdout=sys.stderr)
            taken.append(time.perf_counter() - began)
            found.append(vitlab.evaluate(run / "best", str(args.folder)).scores.top(1))  # type: ignore[union-attr]
        rows.append([title, mean_and_spread(found), f"{min(taken):.0f} .. {max(taken):.0f} s"])
    print_table(["", f"top-1, n = {args.seeds}", f"time, of {duration(60 * args.minutes)}"], rows)
    print(f"median of all times: {statistics.median(float(row[2].split()[0]) for row in rows):.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    for function in (few, probe, folder):
        part = parts.add_parser(function.__name__)
        part.set_defaults(function=function)
        part.add_argument("--runs", type=Path, help="keep the runs here")
        part.add_argument("--seeds", type=int, default=3 if function is few else 1)
        if function is few:
            part.add_argument("--data", help="folder of CIFAR-10's binary files")
            part.add_argument("--starts", default="bundled:mae,bundled:dino,none")
            part.add_argument("--per-class", type=int, default=20)
            part.add_argument("--scratch-epochs", type=int, default=60)
            continue
        part.add_argument("folder", type=Path)
        part.add_argument("--weights", required=True)
        part.add_argument("--minutes", type=float, default=5.0)
        part.add_argument("--epochs", type=int, default=100)
        part.add_argument("--slow-epochs", type=int, default=2)
        part.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as place:
        args.runs = args.runs or Path(place)
        args.function(args)


if __name__ == "__main__":
    main()
