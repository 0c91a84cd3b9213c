"""Time of a forward pass with an Edit against the same pass without one, in one process, alternating.

    python benchmarks/edit.py [--models S/16,swin_tiny] [--batch 8] [--rounds 21] [--json]

Prints the median and spread of each, and the ratio of medians (edited / plain; 1.1 or less is the goal of the edits
that keep the fused kernel). "weights" writes the attention weights of one layer out and has no goal.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

import torch
from measure import machine

import vitlab
from vitlab.export.timing import alternate, summary
from vitlab.layers.edit import Edit

GOAL = 1.1


def edits() -> dict[str, Edit]:
    """One of each kind that the page and `vitlab explain` use."""
    return {
        "mask patches": Edit().mask_patches([0, 3, 5]),
        "drop heads": Edit().drop_heads([(0, 1), (-1, 0)]),
        "drop an MLP": Edit().drop_mlp(1),
        "temperature": Edit().temperature(2.0),
        "without sqrt(d)": Edit().without_sqrt_d(),
        "no positions": Edit().remove_positions(),
        "scale every token": Edit().scale("tokens", 0.9),
        "weights": Edit().uniform_attention(layer=1, heads=[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S/16,swin_tiny")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.json:
        print(machine())
    rows = []
    for name in args.models.split(","):
        model = vitlab.create(name).eval()
        images = torch.randn(args.batch, model.config.channels, *model.config.image_size)
        runs: dict[str, Callable[[], object]] = {"plain": partial(model, images)}
        runs |= {what: partial(model, images, edit=edit) for what, edit in edits().items()}
        with torch.inference_mode():
            times = {what: summary(values) for what, values in alternate(runs, args.rounds).items()}
        for what, t in times.items():
            ratio = t["median"] / times["plain"]["median"]
            rows.append({"model": name, "batch": args.batch, "edit": what, "ratio": ratio, **t})
            if not args.json:
                met = (
                    ""
                    if what in ("plain", "weights")
                    else " (goal met)"
                    if ratio <= GOAL
                    else " (SLOWER than the goal)"
                )
                print(
                    f"{name} batch {args.batch} {what:18s} median {1e3 * t['median']:7.1f} ms, half of the runs in "
                    f"{1e3 * t['quarter']:.1f} .. {1e3 * t['three_quarters']:.1f} ms, n={t['n']}, "
                    f"ratio {ratio:.3f}{met}"
                )
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
