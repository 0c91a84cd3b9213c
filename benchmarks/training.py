"""A training step against transformers' with the same weights, and images prepared per second against what it consumes.

    python benchmarks/training.py [--rounds 31] [--batch 128] [--data cifar-10-binary.tar.gz]
    python benchmarks/training.py --model swin_cifar
    python benchmarks/training.py --attention

The step (forward, loss, backward, AdamW; eager float32) is that of vit_cifar: 192 wide, 9 deep, 12 heads, patch 4,
32 px. Both networks take it in turns in one process; a ratio of medians (ours / theirs) of 1.03 or less counts as no
slower. "products" are the step's own matrix products and nothing else, on tensors of the same shapes: what is left of
the step is norms, activations, softmax, copies and the optimiser. With --attention the layer alone is timed at several
lengths, forward and backward, by torch's fused kernel and by plain products: what attention="auto" should take. The
input pipeline is that of cifar10_full with all its augmentation, alone: five times what a step consumes is
enough. Without --data and without CIFAR-10 in $VITLAB_DATA or the cache, pictures of noise of the same shape are used.
With --model swin_cifar the step is that of a small Swin (48 to 192 wide, 6 blocks, windows of 4), and nothing else is
measured.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
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
from torch.utils._python_dispatch import TorchDispatchMode

import vitlab
from vitlab.errors import DataError
from vitlab.export.timing import alternate, summary
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.datasets import Dataset, open_data
from vitlab.images.mix import Mix, smooth_targets
from vitlab.images.sources.dataset import ArrayDataset
from vitlab.layers.attention import Attention
from vitlab.training.batches import BatchDataset, ImageSet, Plan, batches
from vitlab.training.presets import find_recipe

NETWORK = "vit_cifar"
RECIPE = "cifar10_full"
ATTENTION = (  # tokens, heads, width, batch
    (17, 4, 64, 256),
    (65, 12, 192, 64),
    (145, 6, 384, 16),
    (197, 3, 192, 16),
    (577, 6, 384, 2),
)
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
    times = alternate({**runs, "products": products_of(runs["vitlab"])}, rounds)
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
    print(f"\nvitlab / its own products {medians['vitlab'] / medians['products']:.3f}")
    print(
        f"\nratio of medians {ratio:.3f} ({'no slower' if ratio <= 1.03 else 'SLOWER'}); half of the ratios of "
        f"neighbouring steps in {ratios['quarter']:.3f} .. {ratios['three_quarters']:.3f}\n"
        f"largest logit difference before the first step {difference:.1e}; losses after {rounds + 3} steps "
        f"{ends['vitlab']:.4f} and {ends['transformers']:.4f}"
    )
    return medians["vitlab"]


class Products(TorchDispatchMode):
    """Records the shapes of all matrix products of what runs inside; attention counts as its products alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int, int, int]] = Counter()  # (batch, rows, inner, columns)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm"):
            self._add(args[0], args[1])
        elif name in ("addmm", "baddbmm"):
            self._add(args[1], args[2])
        elif name == "convolution":  # a patch embedding: (B N, C P P) times (C P P, D)
            images, filters = args[0], args[1]
            places = images.shape[0] * (images.shape[2] // args[3][0]) * (images.shape[3] // args[3][1])
            self.shapes[1, places, filters[0].numel(), filters.shape[0]] += 1
        elif name == "convolution_backward":  # that of the filters; the images need none
            gradient, filters = args[0], args[2]
            places = gradient.numel() // gradient.shape[1]
            self.shapes[1, filters.shape[0], places, filters[0].numel()] += 1
        elif name == "_scaled_dot_product_flash_attention_for_cpu":  # q k^T, A v
            self._attention(args[0], 1)
        elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":  # of A, v, q, k
            self._attention(args[1], 2)
        return func(*args, **(kwargs or {}))

    def _add(self, a: Tensor, b: Tensor) -> None:
        batch = a.shape[0] if a.ndim == 3 else 1
        self.shapes[batch, a.shape[-2], a.shape[-1], b.shape[-1]] += 1

    def _attention(self, q: Tensor, times: int) -> None:
        B, h, N, d = q.shape
        self.shapes[B * h, N, d, N] += times
        self.shapes[B * h, N, N, d] += times


def products_of(step: Callable[[], object]) -> Callable[[], None]:
    """The products of this step, on random tensors."""
    with Products() as recorded:
        step()
    pairs = [
        (torch.randn(batch, rows, inner), torch.randn(batch, inner, columns), count)
        for (batch, rows, inner, columns), count in recorded.shapes.items()
    ]

    def run() -> None:
        for a, b, count in pairs:
            for _ in range(count):
                torch.bmm(a, b)

    return run


def attention_times(rounds: int) -> None:
    """Prints the time of a layer's attention in training, fused and by plain products."""
    rows = []
    for tokens, heads, width, batch in ATTENTION:
        x, gradient = torch.randn(batch, tokens, width), torch.randn(batch, tokens, width)
        layers = {path: Attention(width, heads, path=path).train() for path in ("fused", "explicit")}
        layers["explicit"].load_state_dict(layers["fused"].state_dict())
        runs: dict[str, Callable[[], object]] = {
            path: partial(forward_backward, layer, x, gradient) for path, layer in layers.items()
        }
        times = alternate(runs, rounds)
        ratio = summary([a / b for a, b in zip(times["fused"], times["explicit"], strict=True)])
        medians = [f"{1e3 * summary(times[path])['median']:.2f} ms" for path in layers]
        spread = f"{ratio['median']:.3f} ({ratio['quarter']:.3f} .. {ratio['three_quarters']:.3f})"
        rows.append([str(tokens), str(heads), str(width // heads), str(batch), *medians, spread])
    print(f"\nattention layer, forward and backward, n = {rounds}:\n")
    print_table(["tokens", "heads", "d", "batch", "fused", "plain products", "fused / plain (half in)"], rows)


def forward_backward(layer: Attention, x: Tensor, gradient: Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    layer(x).backward(gradient)


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
        mix(batch.images, smooth_targets(batch.labels, 10, smoothing), seed=0, step=step)
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
    parser.add_argument("--attention", action="store_true", help="time attention by itself, and nothing else")
    parser.add_argument("--data", help="cifar-10-binary.tar.gz, or the folder that holds it")
    parser.add_argument("--repeats", type=int, default=5, help="of the pipeline's measurement")
    parser.add_argument("--batches", type=int, default=60, help="in each of them")
    args = parser.parse_args()
    if args.rounds < 2 or args.repeats < 2:
        parser.error("a spread needs --rounds and --repeats of at least 2.")
    torch.manual_seed(0)
    print(machine())
    if args.attention:
        attention_times(args.rounds)
        return
    seconds = step_time(args.model, args.batch, args.rounds)
    if args.model == NETWORK:
        pipeline(args.data, args.batch, args.repeats, args.batches, args.batch / seconds)


if __name__ == "__main__":
    main()
