"""How fast a ViT runs here without and with a change of its answers, against eager transformers with the same weights.

    python benchmarks/shipping.py [--models S/16,B/16] [--small Ti/16] [--batches 1,8] [--rounds 21] [--json FILE]
    python benchmarks/shipping.py --models "" --small "" --checkpoint runs/cifar10_56px/best [--data cifar10] [--path D]

The first prints, for every model and batch: transformers and plain ONNX Runtime, what vitlab.optimize(goal="exact")
chose, and int8; ratios of medians to transformers, the share of the machine's matrix-product rate, and the largest
difference of a logit. The second is about a trained model: how often int8 answers as float32 does on the whole test
split, and how much faster merging tokens is at 1 point of accuracy or less. How much to merge is chosen on every other
picture of the test split, because a small validation split cannot tell half a point, and judged on the others.
Everything that is compared runs in turns in one process. Run nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, print_table
from torch import Tensor

import vitlab
from vitlab.explain.sizes import size_of
from vitlab.export.runners import Runner, RunnerFactory, library_runner
from vitlab.export.samples import preprocess_batch, sample_images
from vitlab.export.timing import alternate, summary
from vitlab.images.datasets import Dataset, open_data
from vitlab.models.registry import find
from vitlab.reduce import r_for
from vitlab.training.labels import class_order

SIDE = 1536  # of the matrices whose product measures the machine
SHARES = (0.6, 0.7, 0.8)  # of the patches that merging takes away, over all layers
EARLY = ("0/1", "0/2")  # layers at which a share of the tokens goes at once
KEEPS = (0.7, 0.65, 0.6)
POINT = 0.01  # of accuracy that may be lost


def times_of(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    return {name: summary(seconds) for name, seconds in alternate(runs, rounds).items()}


def tell(text: str) -> None:
    """On the way, on stderr: the table stays alone on stdout."""
    print(f"  {text}", file=sys.stderr, flush=True)


def spread(t: dict[str, float]) -> str:
    """12.3 (12.1 .. 12.6), milliseconds; the middle half of the runs in brackets"""
    return f"{1e3 * t['median']:.1f} ({1e3 * t['quarter']:.1f} .. {1e3 * t['three_quarters']:.1f})"


def untrained(name: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    """One model at one batch size: a row for each way."""
    tell(f"{name}, batch {batch}")
    torch.manual_seed(0)
    model = vitlab.create(name).eval()
    seen = preprocess_batch(model, sample_images(batch))
    factory = RunnerFactory(model)
    exact = vitlab.optimize(model, seen, goal="exact", batch=batch, rounds=rounds)
    for note in exact.notes:
        print(f"note: {note}")
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        name: library_runner(name, model, factory).run for name in ("transformers", "onnxruntime")
    }
    runs |= {"eager": factory.make("eager").run, "exact": exact, "int8": factory.make("int8").run}
    a, b = torch.randn(2, SIDE, SIDE)
    timed: dict[str, Callable[[], object]] = {who: (lambda run=run: run(seen)) for who, run in runs.items()}
    times = times_of({**timed, "gemm": lambda: torch.mm(a, b)}, rounds)
    right = runs["transformers"](seen)
    macs, rate = size_of(find(name)[0].name)[1] * batch, SIDE**3 / times["gemm"]["median"]
    rows = []
    for who, run in runs.items():
        rows.append(
            {
                "model": name,
                "batch": batch,
                "way": f"exact: {exact.chosen.title}" if who == "exact" else who,
                **times[who],
                "speedup": times["transformers"]["median"] / times[who]["median"],
                "gemm_share": macs / times[who]["median"] / rate,
                "difference": float((run(seen) - right).abs().max()),
            }
        )
    return rows


def show_untrained(rows: list[dict[str, Any]]) -> None:
    head = [
        "model",
        "batch",
        "way",
        "ms (half of the runs)",
        "x transformers",
        "of the GEMM rate",
        "largest difference",
    ]
    print_table(
        head,
        [
            [
                *(r["model"], str(r["batch"]), r["way"], spread(r)),
                *(f"{r['speedup']:.2f} x", f"{r['gemm_share']:.0%}", f"{r['difference']:.1e}"),
            ]
            for r in rows
        ],
    )


# ---- a trained model


class Judged:
    """Some pictures of a split, prepared once, and what is right there."""

    def __init__(self, model: Any, split: Dataset, order: list[int], numbers: range):
        self.order = order
        self.labels = torch.as_tensor(np.asarray(split.labels)[list(numbers)])
        pixels = (split.read(n) for n in numbers)
        self.images = torch.stack([model.preprocess(p[:, :, 0] if p.shape[2] == 1 else p) for p in pixels])

    def answers(self, runner: Runner, batch: int = 50) -> Tensor:
        return torch.cat([runner.run(part)[:, self.order].argmax(dim=1) for part in self.images.split(batch)])

    def accuracy(self, answers: Tensor) -> float:
        return float((answers == self.labels).float().mean())


def candidates(model: Any) -> list[str]:
    """From the mildest to the strongest of each kind."""
    patches, depth = model.config.grid[0] * model.config.grid[1], len(model.blocks)
    counts = dict.fromkeys(r_for(share, patches=patches, depth=depth) for share in SHARES)
    found = [f"tome:r={r}{how}" for how in ("", ",schedule=decreasing") for r in counts]
    found += [f"tome:keep={keep},layers={layers}" for layers in EARLY for keep in KEEPS]
    return found + (["evit:keep=0.7"] if model.config.tokens.class_token else [])


def trained(args: argparse.Namespace) -> dict[str, Any]:
    model = vitlab.load(args.checkpoint).eval()
    data = open_data(args.data, path=args.path)
    order = class_order(model.labels, data.classes) if model.labels else list(range(len(data.classes)))
    assert order is not None, "the model knows other classes"
    test = data.test or data.val
    chosen_on, judged = (Judged(model, test, order, range(first, len(test), 2)) for first in (0, 1))
    factory = RunnerFactory(model)
    print(f"\n{args.checkpoint} on {args.data}: {len(judged.images)} test pictures; "
          f"chosen on {len(chosen_on.images)} others")  # fmt: skip

    whole = chosen_on.accuracy(chosen_on.answers(factory.make("eager")))
    fitting: dict[str, list[str]] = {"eager": [], "int8": []}
    for reducer in args.reducers or candidates(model):
        for way in fitting:
            lost = whole - chosen_on.accuracy(chosen_on.answers(factory.make(way, reducer)))
            tell(f"{way} + {reducer}: {100 * lost:.2f} points lost where it is chosen")
            if lost <= args.margin * POINT:
                fitting[way].append(reducer)
    batch = preprocess_batch(model, sample_images(8, channels=model.config.channels, source=args.data, path=args.path))
    picked = {way: fastest(factory, way, names, batch, args.rounds) for way, names in fitting.items()}

    ways = [("eager", None), ("onnx", None), ("int8", None)]
    ways += [(way, picked["eager"]) for way in ("eager", "onnx") if picked["eager"]]
    ways += [("int8", picked["int8"])] if picked["int8"] else []
    runners = [factory.make(way, reducer) for way, reducer in ways]
    answers = {}
    for runner in runners:
        tell(f"{runner.title} on the other pictures")
        answers[runner.title] = judged.answers(runner)
    baseline = in_transformers(model, factory)
    rows = []
    for size in args.batches:
        part = batch[:1].repeat(size, 1, 1, 1) if size < 8 else batch.repeat(-(-size // 8), 1, 1, 1)[:size]
        timed: dict[str, Callable[[], object]] = {
            r.title: (lambda run=r.run, x=part: run(x)) for r in [*baseline, *runners]
        }
        times = times_of(timed, args.rounds)
        for runner in runners:
            found = answers[runner.title]
            rows.append(
                {
                    "way": runner.title,
                    "batch": size,
                    **times[runner.title],
                    "accuracy": judged.accuracy(found),
                    "lost": judged.accuracy(answers["eager"]) - judged.accuracy(found),
                    "agreement": float((found == answers["eager"]).float().mean()),
                    "over_eager": times["eager"]["median"] / times[runner.title]["median"],
                    "over_transformers": times[baseline[0].title]["median"] / times[runner.title]["median"]
                    if baseline
                    else None,
                    "over_same_backend": times[runner.name]["median"] / times[runner.title]["median"],
                }
            )
    show_trained(rows)
    for reducer in dict.fromkeys([None, picked["int8"]]):
        show_steps("int8" if reducer is None else f"int8 + {reducer}", steps_of(factory.int8_file(reducer), batch))
    return {"rows": rows, "fitting": fitting}


def in_transformers(model: Any, factory: RunnerFactory) -> list[Runner]:
    try:
        return [library_runner("transformers", model, factory)]
    except ValueError as error:  # a stem of convolutions, for example
        print(f"without transformers: {error}")
        return []


def fastest(factory: RunnerFactory, way: str, names: list[str], batch: Tensor, rounds: int) -> str | None:
    if not names:
        return None
    runners = [factory.make(way, name) for name in names]
    runs: dict[str, Callable[[], object]] = {str(r.reducer): (lambda run=r.run: run(batch)) for r in runners}
    times = times_of(runs, max(5, rounds // 2))
    return min(times, key=lambda name: times[name]["median"])


def steps_of(path: Path, batch: Tensor, runs: int = 30) -> list[tuple[str, float]]:
    """Where ONNX Runtime spends its time: kinds of steps and milliseconds of each in a batch, the longest first."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling = torch.get_num_threads(), True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "steps")
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for _ in range(runs):
            session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    spent: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"] / 1e3 / runs
    return sorted(spent.items(), key=lambda step: -step[1])


def show_steps(title: str, steps: list[tuple[str, float]], most: int = 10) -> None:
    total = sum(ms for _, ms in steps)
    told = ", ".join(f"{name} {ms:.1f}" for name, ms in steps[:most])
    print(f"\n{title}, batch 8, {total:.1f} ms in all: {told}")


def show_trained(rows: list[dict[str, Any]]) -> None:
    head = ["way", "batch", "ms (half of the runs)", "x eager", "x transformers", "x same backend, all tokens"]
    print_table(
        [*head, "top-1", "points lost", "agreement"],
        [
            [
                *(r["way"], str(r["batch"]), spread(r), f"{r['over_eager']:.2f} x"),
                "-" if r["over_transformers"] is None else f"{r['over_transformers']:.2f} x",
                *(f"{r['over_same_backend']:.2f} x", f"{r['accuracy']:.2%}", f"{100 * r['lost']:.2f}"),
                f"{r['agreement']:.2%}",
            ]
            for r in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S/16,B/16")
    parser.add_argument("--small", default="Ti/16", help="timed at batch 1 only, where overhead counts")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--checkpoint")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--path")
    parser.add_argument("--margin", type=float, default=0.5, help="of the point that may be lost, when choosing")
    parser.add_argument("--reducers", nargs="*", help="try these, not the usual ones: tome:r=13 evit:keep=0.7")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.batches = [int(n) for n in args.batches.split(",")]
    rows = []
    asked = [(name, batch) for name in args.models.split(",") if name for batch in args.batches]
    for name, batch in [*asked, *((name, 1) for name in args.small.split(",") if name)]:
        rows += untrained(name, batch, args.rounds)
    print(machine())
    if rows:
        show_untrained(rows)
    found = {"untrained": rows, "trained": trained(args) if args.checkpoint else None}
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
