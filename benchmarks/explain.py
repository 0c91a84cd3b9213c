"""What looking inside costs: time of asking for the last layer's attention, and peak memory of a rollout.

    python benchmarks/explain.py [--only time|memory] [--model B/16] [--batch 4] [--rounds 21] [--memory-model L/16]
                                 [--size 512] [--json]

Time: plain and asking forward passes in one process, alternating; the ratio of medians (1.15 or less is the aim), by
the clock and by processor time, which other work on the machine disturbs less.
Memory: the largest resident set of a child process that does one thing to one image: a plain forward pass, a rollout,
or the same pass with the attention of all layers kept, which is what a rollout avoids.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from vitlab.explain.rollout import rollout
from vitlab.layers.trace import Trace
from vitlab.models.registry import build, find

ASKING: dict[str, Callable[[], Trace | None]] = {
    "plain": lambda: None,
    "last layer": lambda: Trace("attention", layers=[-1]),
    "last layer, class row": lambda: Trace("class_attention", layers=[-1]),
    "all layers, class row": lambda: Trace("class_attention"),
}
TASKS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "plain": lambda model, images: model(images),
    "rollout": lambda model, images: rollout(model, images),
    "all layers kept": lambda model, images: model(images, trace=Trace("attention")),
}


def model_of(name: str, size: int) -> Any:
    """With random weights, filled in place so that building it costs no memory beyond them."""
    entry, _ = find(name)
    with torch.device("meta"):
        model = build(entry.family, entry.config.with_options(image_size=size)).eval()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def timed(name: str, batch: int, rounds: int) -> list[dict[str, Any]]:
    model, images = model_of(name, 224), torch.randn(batch, 3, 224, 224)
    times: dict[str, list[float]] = {what: [] for what in ASKING}
    processor: dict[str, list[float]] = {what: [] for what in ASKING}
    with torch.inference_mode():
        for turn in range(rounds + 2):  # the first two warm up
            for what, trace in ASKING.items():
                start, used = time.perf_counter(), time.process_time()
                model(images, trace=trace())
                if turn >= 2:
                    times[what].append(time.perf_counter() - start)
                    processor[what].append(time.process_time() - used)
    plain, work = statistics.median(times["plain"]), statistics.median(processor["plain"])
    rows = []
    for what, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        row = {"model": name, "batch": batch, "asked": what, "n": rounds, "median": median, "ratio": median / plain}
        used = statistics.median(processor[what]) / work
        rows.append({**row, "quarter": low, "three_quarters": high, "processor_ratio": used})
    return rows


def peak(task: str, name: str, size: int) -> int:
    """Bytes at the most, seen from inside; to be run in a process of its own."""
    model, images = model_of(name, size), torch.randn(1, 3, size, size)
    with torch.inference_mode():
        TASKS[task](model, images)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux


def measured(name: str, size: int) -> list[dict[str, Any]]:
    rows = []
    for task in TASKS:
        command = [sys.executable, __file__, "--peak", task, "--memory-model", name, "--size", str(size)]
        found = int(subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8").stdout)
        rows.append({"model": name, "size": size, "task": task, "peak": found, "above_plain": found})
    for row in rows:
        row["above_plain"] -= rows[0]["peak"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--memory-model", default="L/16")
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--only", choices=("time", "memory"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--peak", choices=TASKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.peak:
        print(peak(args.peak, args.memory_model, args.size))
        return
    rows: dict[str, list[dict[str, Any]]] = {}
    if args.only != "memory":
        rows["time"] = timed(args.model, args.batch, args.rounds)
        if not args.json:
            show_time(rows["time"])
    if args.only != "time":
        rows["memory"] = measured(args.memory_model, args.size)
        if not args.json:
            show_memory(rows["memory"])
    if args.json:
        print(json.dumps(rows, indent=2))


def show_time(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        low, median, high = (f"{1e3 * row[name]:.1f}" for name in ("quarter", "median", "three_quarters"))
        print(
            f"ViT-{row['model']} batch {row['batch']} {row['asked']:22s} median {median} ms, half of the runs in "
            f"{low} .. {high} ms, n={row['n']}, {row['ratio']:.3f} of plain "
            f"({row['processor_ratio']:.3f} in processor time)",
            flush=True,
        )


def show_memory(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        print(
            f"ViT-{row['model']} {row['size']} px, one image, {row['task']:16s} peak {row['peak'] / 1e6:.0f} MB, "
            f"{row['above_plain'] / 1e6:+.0f} MB against plain"
        )


if __name__ == "__main__":
    main()
