"""Eager float32 forward of our ViT, or Swin, against transformers' with the same weights, in one process, alternating.

    python benchmarks/inference.py [--models S/16,B/16] [--batch 8] [--rounds 21] [--json]
    python benchmarks/inference.py --models swin_tiny

Prints the median and spread of each, the ratio of medians (ours / theirs; 1.03 or less counts as no slower), and how
much of the machine's own matrix-product rate each reaches.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measure import machine
from transformers import AutoModelForImageClassification

import vitlab
from vitlab.explain.sizes import size_of
from vitlab.export.timing import alternate, summary


def pair(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Our model and transformers', with equal weights."""
    ours = vitlab.create(name).eval()
    with TemporaryDirectory() as folder:
        vitlab.convert(ours, Path(folder) / "hf", to="hf")
        return ours, AutoModelForImageClassification.from_pretrained(
            Path(folder) / "hf", attn_implementation="sdpa"
        ).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="S/16,B/16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not args.json:
        print(machine())
    rows = []
    for name in args.models.split(","):
        ours, theirs = pair(name)
        title = name if name.startswith("swin") else f"ViT-{name}"
        images = torch.randn(args.batch, 3, *ours.config.image_size)  # type: ignore[union-attr]
        a, b = torch.randn(2, 1536, 1536)
        with torch.inference_mode():
            difference = float((ours(images) - theirs(images).logits).abs().max())
            runs: dict[str, Callable[[], object]] = {
                "vitlab": partial(ours, images),
                "transformers": partial(theirs, images),
                "gemm": partial(torch.mm, a, b),
            }
            times = {who: summary(values) for who, values in alternate(runs, args.rounds).items()}
        macs = size_of(name)[1] * args.batch
        rate = 1536**3 / times["gemm"]["median"]
        ratio = times["vitlab"]["median"] / times["transformers"]["median"]
        share = {who: macs / times[who]["median"] / rate for who in ("vitlab", "transformers")}
        rows.append(
            {"model": name, "batch": args.batch, "ratio": ratio, "difference": difference, "gemm_share": share, **times}
        )
        if not args.json:
            for who in ("vitlab", "transformers"):
                t = times[who]
                print(
                    f"{title} batch {args.batch} {who:13s} median {1e3 * t['median']:7.1f} ms, half of the runs in "
                    f"{1e3 * t['quarter']:.1f} .. {1e3 * t['three_quarters']:.1f} ms, n={t['n']}, "
                    f"{share[who]:.0%} of the GEMM rate"
                )
            verdict = "no slower" if ratio <= 1.03 else "SLOWER"
            print(f"{title} ratio of medians {ratio:.3f} ({verdict}); largest logit difference {difference:.1e}")
    if args.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
