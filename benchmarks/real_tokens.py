"""A real ViT with fewer tokens, int8, and both: accuracy and agreement of a probe against speed and memory.

    python benchmarks/real_tokens.py WEIGHTS PHOTOS [--sizes 224 518] [--batch 8] [--rounds 15] [--plot FILE]

WEIGHTS is a transformers folder of a DINOv2 or ViT encoder, PHOTOS a folder with a folder for each class, with val/ or
without. A logistic regression learns from the features of the whole, unchanged network (train); every combination is
judged by it on val: top-1, and the share of photos that get the same answer as from the whole network. Times are those
of a batch, in turns in one process, against the same weights in transformers (eager, fused attention). Merging is ToMe,
pruning EViT, each at several strengths; int8 is ONNX Runtime's, dynamic. Memory is the peak of a batch,
without weights.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from measure import machine, print_table
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from transformers import AutoModel

import vitlab
from vitlab.export.runners import Runner, RunnerFactory
from vitlab.export.timing import alternate, peak_memory, summary
from vitlab.images.datasets import open_data
from vitlab.models.plain import PlainTransformer
from vitlab.reduce import r_for
from vitlab.training.batches import ImageSet

MERGED = (0.3, 0.5, 0.7)  # share of the patches that ToMe merges over all layers
KEPT = (0.8, 0.7, 0.5)  # share of the patches that EViT keeps at each of its layers
LOSS = 0.01  # of top-1, which the best combination may lose


@dataclass
class Result:
    title: str
    top1: float
    agreement: float
    memory: int | None
    seconds: list[float] = field(default_factory=list)


def reducers_of(model: PlainTransformer) -> list[str | None]:
    patches, depth = math.prod(model.layout(*model.input_size).grid), len(model.blocks)
    merging = [f"tome:r={r_for(share, patches=patches, depth=depth)}" for share in MERGED]
    return [None, *merging, *(f"evit:keep={share}" for share in KEPT)]


def inputs_of(images: ImageSet) -> tuple[Tensor, np.ndarray]:
    """Model inputs (N, C, H, W) and labels of what can be read."""
    pixels, kept = images.normalised(np.arange(len(images)))
    return pixels, images.labels[torch.from_numpy(kept)].numpy()


def features(run: Callable[[Tensor], Tensor], images: Tensor, batch: int) -> np.ndarray:
    return torch.cat([run(part) for part in images.split(batch)]).float().numpy()


def transformers_run(weights: Path) -> Callable[[Tensor], Tensor]:
    network = AutoModel.from_pretrained(weights, attn_implementation="sdpa").eval()

    def run(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return network(images).last_hidden_state

    return run


def compare(weights: Path, photos: str, size: int, batch: int, rounds: int) -> tuple[list[Result], list[float]]:
    """Results of every combination, and the seconds of transformers."""
    model = vitlab.load(weights, image_size=size).encoder.eval()
    assert isinstance(model, PlainTransformer)
    data, preprocess, factory = open_data(photos), model.require_preprocess(), RunnerFactory(model)
    (learned, labels), (judged, truth) = (inputs_of(ImageSet(part, preprocess)) for part in (data.train, data.val))
    whole = factory.make("eager")
    scale = StandardScaler().fit(known := features(whole.run, learned, batch))
    probe = LogisticRegression(max_iter=2000).fit(scale.transform(known), labels)
    expected = probe.predict(scale.transform(features(whole.run, judged, batch)))
    runners: list[Runner] = [whole]
    runners += [factory.make(backend, reducer) for backend in ("onnx", "int8") for reducer in reducers_of(model)]
    results, timed = [], judged[:batch]
    for runner in runners:
        answers = probe.predict(scale.transform(features(runner.run, judged, batch)))
        memory = peak_memory(partial(runner.without_arena(), timed))
        results.append(
            Result(runner.title, float((answers == truth).mean()), float((answers == expected).mean()), memory)
        )
    runs: dict[str, Callable[[], object]] = {r.title: partial(r.run, timed) for r in runners}
    theirs = transformers_run(weights)
    times = alternate({"transformers": lambda: theirs(timed), **runs}, rounds)
    for result in results:
        result.seconds = times[result.title]
    return results, times["transformers"]


def show(size: int, results: list[Result], theirs: list[float], batch: int) -> None:
    base, rows = summary(theirs)["median"], []
    print(f"\n{size} x {size} pixels, batch {batch}, n = {len(theirs)}; transformers: {1e3 * base:.1f} ms a batch\n")
    for r in results:
        ratio = summary([a / b for a, b in zip(theirs, r.seconds, strict=True)])
        speed = f"{base / summary(r.seconds)['median']:.2f} ({ratio['quarter']:.2f} .. {ratio['three_quarters']:.2f})"
        memory = "-" if r.memory is None else f"{r.memory / 1e6:.0f}"
        rows.append([r.title, f"{r.top1:.2%}", f"{r.agreement:.2%}", speed, memory])
    print_table(["combination", "top-1 of the probe", "same answer", "times transformers (half in)", "memory MB"], rows)
    fitting = [r for r in results if r.top1 >= results[0].top1 - LOSS]
    best = min(fitting, key=lambda r: summary(r.seconds)["median"])
    print(f"\nbest at a loss of {LOSS:.0%} or less: {best.title}, {base / summary(best.seconds)['median']:.2f} times")


def draw(figures: dict[int, tuple[list[Result], list[float]]], path: Path) -> None:
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, len(figures), figsize=(6 * len(figures), 4.5), squeeze=False)
    for ax, (size, (results, theirs)) in zip(axes[0], figures.items(), strict=True):
        base = summary(theirs)["median"]
        for r in results:
            place = (base / summary(r.seconds)["median"], 100 * r.top1)
            ax.plot(*place, "o", color="tab:red" if "int8" in r.title else "tab:blue")
            ax.annotate(r.title, place, fontsize=7)
        ax.set(title=f"{size} px", xlabel="times transformers", ylabel="top-1 of the probe, %")
    plt.tight_layout()
    plt.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path)
    parser.add_argument("photos")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 518])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("a spread needs --rounds of at least 2.")
    print(machine())
    figures = {}
    for size in args.sizes:
        figures[size] = compare(args.weights, args.photos, size, args.batch, args.rounds)
        results, theirs = figures[size]
        show(size, results, theirs, args.batch)
    if args.plot is not None:
        draw(figures, args.plot)


if __name__ == "__main__":
    main()
