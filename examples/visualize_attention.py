"""Attention maps in a page: what `vitlab explain attention` and `vitlab explain rollout` compute and draw, written out.

    python examples/visualize_attention.py                              # a digit, by the small model in the package
    python examples/visualize_attention.py CHECKPOINT cat.jpg --out cat.png

Any checkpoint that vitlab.load reads will do, with or without a class token, and a image of any shape.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import vitlab
from vitlab.images.read import read_image
from vitlab.images.samples import is_sample, open_sample


@torch.inference_mode()
def look(model: Any, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One normalised image (1, C, H, W) -> logits (1, classes), maps (L, h, rows, columns), rollout (rows, columns)."""
    # A Trace asks the forward pass to write something down. The logits are the same to the bit with or without it.
    trace = vitlab.Trace("attention")
    logits = model.eval()(image, trace=trace)
    A = trace.stack("attention")[:, 0]  # (L, h, N, N): row = who looks, column = at whom; rows sum to 1

    # The token list starts with what is no patch: a class token, perhaps registers. They stand nowhere in the image.
    prefix, (rows, columns) = len(trace.layout.prefix), trace.layout.grid
    # Who looks? The token that the classifier reads; where it reads the mean of all patches, they all do.
    reader = slice(0, 1) if model.config.head.pooling == "class" else slice(prefix, None)
    maps = A[:, :, reader].mean(2)[..., prefix:].unflatten(-1, (rows, columns))

    # Rollout: half of what a token becomes is what it was (the residual path), so add the identity; then follow the
    # paths through all layers, which is a product of matrices.
    eye = torch.eye(A.shape[-1])
    through = eye
    for W in A.mean(1):  # heads averaged: (N, N), from the first layer to the last
        W = W + eye
        through = W / W.sum(-1, keepdim=True) @ through
    rollout = through[reader].mean(0)[prefix:].unflatten(0, (rows, columns))
    return logits, maps, rollout


def draw(image: Image.Image, model: Any, maps: Tensor, rollout: Tensor, title: str) -> Figure:
    """The image; the head mean of the first, middle and last layer; rollout."""
    # The model saw a resized, perhaps cropped or padded image. Where does that view lie in the original?
    geometry = model.preprocess.geometry((image.height, image.width))
    H, W = model.preprocess.size
    left, top, right, bottom = geometry.to_original((0, 0, W, H))

    depth = len(maps)
    shown = {f"layer {n}": maps[n].mean(0) for n in sorted({0, depth // 2, depth - 1})} | {"rollout": rollout}
    figure = Figure(figsize=(2.6 * (1 + len(shown)), 3.2), layout="constrained")
    axes = figure.subplots(1, 1 + len(shown))
    for ax, (name, heat) in zip(axes, {title: None, **shown}.items(), strict=True):
        ax.imshow(image.convert("RGB"), interpolation="nearest" if image.width < 100 else None)
        size = ax.axis()  # a crop or padding reaches over the image's edge: keep to the image
        if heat is not None:
            ax.imshow(heat, extent=(left, right, bottom, top), cmap="inferno", alpha=0.7, interpolation="bilinear")
        ax.axis(size)
        ax.set_title(name, fontsize=9)
        ax.set_axis_off()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="bundled:digits")
    parser.add_argument("image", nargs="?", default="digits#3", help="a file, or a sample like digits#3")
    parser.add_argument("--out", type=Path, default=Path("attention.png"))
    args = parser.parse_args()

    model = vitlab.load(args.checkpoint)
    image = open_sample(args.image).image if is_sample(args.image) else read_image(args.image)
    tensor = model.preprocess(image)[None]  # (1, C, H, W)
    tokens = model.layout(*tensor.shape[-2:])
    print(f"{args.image}: {image.width} x {image.height} pixels, seen as {tokens} by {len(model.blocks)} layers")

    logits, maps, rollout = look(model, tensor)
    probability, answer = (float(v) for v in logits.softmax(-1).max(-1))
    title = f"{model.labels[int(answer)] if model.labels else f'class {int(answer)}'} {probability:.0%}"
    print(f"it is taken for: {title}")
    for layer, heads in enumerate(maps):
        row, column = divmod(int(heads.mean(0).argmax()), maps.shape[-1])
        print(f"layer {layer}: looks most at row {row}, column {column}, and {heads.sum((1, 2)).mean():.0%} at patches")
    row, column = divmod(int(rollout.argmax()), maps.shape[-1])
    print(f"rollout: most of row {row}, column {column} arrives at the end")

    draw(image, model, maps, rollout, title).savefig(args.out, dpi=150)
    print(f"drawn: {args.out}")


if __name__ == "__main__":
    main()
