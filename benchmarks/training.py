"""A training step against transformers' with the same weights, and images prepared per second against what it consumes.

    python benchmarks/training.py [--rounds 31] [--batch 128] [--data cifar-10-binary.tar.gz]
    python benchmarks/training.py --model swin_cifar

The step (forward, loss, backward, AdamW; eager float32) is that of vit_cifar: 192 wide, 9 deep, 12 heads, patch 4,
32 px. Both networks take it in turns in one process; a ratio of medians (ours / theirs) of 1.03 or less counts as no
slower. The input pipeline is that of cifar10_full with all its augmentation, alone: five times what a step consumes is
enough. Without --data and without CIFAR-10 in $VITLAB_DATA or the cache, pictures of noise of the same shape are used.
With --model swin_cifar the step is that of a small Swin (48 to 192 wide, 6 blocks, windows of 4), and nothing else is
measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from inference import pair
from measure import machine, print_table
from torch import Tensor

import vitlab
from vitlab.errors import DataError
from vitlab.export.timing import alternate, summary
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.datasets import Dataset, open_data
from vitlab.images.mix import Mix
from vitlab.images.sources.dataset import ArrayDataset
from vitlab.training.batches import BatchDataset, ImageSet, Plan, batches
from vitlab.training.presets import find_recipe

NETWORK = "vit_cifar"
RECIPE = "cifar10_full"
ENOUGH = 5  # times what a step consumes


def stepper(model: torch.nn.Module, logits: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Any:
    """One training step; the optimiser's settings are the recipe's, for both networks alike."""
    o = find_recipe(RECIPE)[1].optim
    optimiser = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=o.betas, weight_decay=o.weight_decay)

    def step() -> float:
        loss = F.cross_entropy(logits(images), labels)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def step_time(network: str, batch: int, rounds: int) -> float:
    """Prints the comparison; returns the median seconds of our step."""
    ours, theirs = pair(network)
    assert theirs.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    images = torch.randn(batch, 3, 32, 32)
    labels = torch.randint(0, 10, (batch,))
    with torch.inference_mode():
        difference = float((ours(images) - theirs(images).logits).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"the two networks differ: logits by {difference:.1e}. There is nothing to compare.")
    runs = {
        "vitlab": stepper(ours.train(), ours, images, labels),
        "transformers": stepper(theirs.train(), lambda x: theirs(x).logits, images, labels),
    }
    times = alternate(runs, rounds)
    ends = {who: run() for who, run in runs.items()}  # after as many steps on the same images
    print(f"\n{network}, batch {batch}, {sum(p.numel() for p in ours.parameters()):,} parameters, n = {rounds}:\n")
    rows = []
    for who, values in times.items():
        t = summary(values)
        spread = f"{1e3 * t['quarter']:.1f} .. {1e3 * t['three_quarters']:.1f}"
        rows.append([who, f"{1e3 * t['median']:.1f} ms ({spread})", f"{batch / t['median']:.0f}"])
    print_table(["step", "median (half of the runs in)", "images/s"], rows)
    ratios = summary([a / b for a, b in zip(times["vitlab"], times["transformers"], strict=True)])
    medians = {who: summary(values)["median"] for who, values in times.items()}
    ratio = medians["vitlab"] / medians["transformers"]
    print(
        f"\nratio of medians {ratio:.3f} ({'no slower' if ratio <= 1.03 else 'SLOWER'}); half of the ratios of "
        f"neighbouring steps in {ratios['quarter']:.3f} .. {ratios['three_quarters']:.3f}\n"
        f"largest logit difference before the first step {difference:.1e}; losses after {rounds + 3} steps "
        f"{ends['vitlab']:.4f} and {ends['transformers']:.4f}"
    )
    return medians["vitlab"]


def training_set(path: str | None) -> tuple[str, Dataset]:
    """CIFAR-10's, or noise of its shape."""
    try:
        return "CIFAR-10", open_data("cifar10", path=path, download=False).train
    except DataError:
        if path is not None:
            raise
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    return "noise", ArrayDataset(noise, rng.integers(0, 10, 50_000), [str(i) for i in range(10)], "noise")


def pipeline_time(steps: BatchDataset, mix: Mix, smoothing: float, workers: int, count: int) -> float:
    """Seconds per batch, mixed and with its targets, once the first has come."""
    stream = batches(steps, 0, workers)
    next(stream)
    start = time.perf_counter()
    for step, batch in enumerate(islice(stream, count)):
        mix(batch.images, batch.labels, 10, smoothing, seed=0, step=step)
    seconds = time.perf_counter() - start
    stream.close()  # type: ignore[attr-defined]  # ends the workers
    return seconds / count


def pipeline(path: str | None, batch: int, repeats: int, count: int, eaten: float) -> None:
    """Prints images/s with the recipe's workers and with none, against the images/s that a step consumes."""
    recipe = find_recipe(RECIPE)[1]
    a, pre = recipe.augment, vitlab.create(NETWORK).require_preprocess()
    options = {f.name: getattr(a, f.name) for f in fields(AugmentOptions) if hasattr(a, f.name)}
    augment = Augment(AugmentOptions(**options), pre.size, pre.mean, pre.std)
    name, train = training_set(path)
    plan = Plan(len(train), batch, epochs=1, seed=0, repeats=recipe.data.repeats)
    count = min(count, plan.total - 1)
    steps = BatchDataset(ImageSet(train, pre), plan, augment)
    mix = Mix(a.mixup, a.cutmix, probability=a.mix_probability)
    measure = partial(pipeline_time, steps, mix, a.smoothing, count=count)
    found: dict[int, list[float]] = {workers: [] for workers in dict.fromkeys((recipe.data.workers, 0))}
    for _ in range(repeats):
        for workers, seconds in found.items():
            seconds.append(measure(workers=workers))
    print(f"\ninput pipeline of {RECIPE} on {name}, {repeats} x {count} batches of {batch}:\n")
    rows = []
    for workers, seconds in found.items():
        speeds = summary([batch / s for s in seconds])
        times = speeds["median"] / eaten
        spread = f"{speeds['quarter']:.0f} .. {speeds['three_quarters']:.0f}"
        verdict = "enough" if times >= ENOUGH else "TOO SLOW"
        rows.append([str(workers), f"{speeds['median']:.0f} ({spread})", f"{times:.1f} ({verdict})"])
    print_table(["workers", "images/s, median (half of the runs in)", "times what a step consumes"], rows)
    print(f"\na step consumes {eaten:.0f} images/s; {ENOUGH} times as many or more count as enough")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31, help="alternations of the step")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--model", choices=(NETWORK, "swin_cifar"), default=NETWORK)
    parser.add_argument("--data", help="cifar-10-binary.tar.gz, or the folder that holds it")
    parser.add_argument("--repeats", type=int, default=5, help="of the pipeline's measurement")
    parser.add_argument("--batches", type=int, default=60, help="in each of them")
    args = parser.parse_args()
    if args.rounds < 2 or args.repeats < 2:
        parser.error("a spread needs --rounds and --repeats of at least 2.")
    torch.manual_seed(0)
    print(machine())
    seconds = step_time(args.model, args.batch, args.rounds)
    if args.model == NETWORK:
        pipeline(args.data, args.batch, args.repeats, args.batches, args.batch / seconds)


if __name__ == "__main__":
    main()
