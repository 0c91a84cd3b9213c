"""The numbers behind the limits of outlier tokens and of an unsure foreground, in docs/en/look_inside.md.

    python benchmarks/outliers.py CHECKPOINT PHOTOS                       # how far patches stand out
    python benchmarks/outliers.py CHECKPOINT PHOTOS --masks MASKS         # and how good the foreground is

PHOTOS is a folder of images; MASKS has a grey PNG of the same name for each, with COCO's numbers: 1 to 91 are objects,
the rest is background. Images are seen at the model's own size: for outliers as its preprocess has them, for the
foreground whole.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image

import vitlab
from vitlab.explain.features import foreground
from vitlab.explain.outliers import outlier_tokens
from vitlab.images.read import EXTENSIONS

OBJECTS = 91  # the highest number of an object


def main(checkpoint: str, photos: Path, masks: Path | None) -> None:
    model = vitlab.load(checkpoint, encoder=True)
    images = sorted(path for path in photos.rglob("*") if path.name.lower().endswith(EXTENSIONS))
    report_outliers(model, images)
    if masks is not None:
        preprocess = model.require_preprocess()
        model.preprocess = preprocess.uncropped()
        report_foreground(model, [image for image in images if (masks / f"{image.stem}.png").exists()], masks)


def report_outliers(model, images: list[Path]) -> None:
    found = outlier_tokens(model, images, batch_size=2)
    strongest = found.attention.amax((2, 3)).numpy()  # (B, layers)
    print(f"{len(images)} images, {int(found.mask.flatten(1).any(1).sum())} with an outlier")
    print(f"longest token: {found.length.max():.2f} times the median")
    for layer, values in enumerate(strongest.T):
        low, middle, high = np.quantile(values, (0, 0.5, 1))
        print(f"layer {layer:2}: strongest patch {low:.1f} to {high:.1f}, median {middle:.1f}")


def report_foreground(model, images: list[Path], masks: Path) -> None:
    guess = foreground(model, images, batch_size=2)
    quality, inverted = [], []
    for image, mask in zip(images, guess.mask.numpy(), strict=True):
        kinds = np.asarray(Image.open(masks / f"{image.stem}.png"))
        objects = Image.fromarray(((kinds > 0) & (kinds <= OBJECTS)).astype(np.uint8) * 255)
        objects = np.asarray(objects.resize(mask.shape[::-1], Image.Resampling.BOX)) > 127  # as fine as the patches
        quality.append(overlap(mask, objects))
        inverted.append(overlap(~mask, objects))
    quality, swapped = np.array(quality), np.array(inverted) >= np.array(quality)
    unsure = guess.unsure.numpy()
    for name, group in (("sure", ~unsure), ("unsure", unsure)):
        if group.any():
            share = swapped[group].mean()
            print(f"{name}: {group.sum()} masks, mean IoU {quality[group].mean():.2f}, more background {share:.0%}")


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """Intersection over union."""
    return float((a & b).sum() / max((a | b).sum(), 1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("photos", type=Path)
    parser.add_argument("--masks", type=Path)
    told = parser.parse_args()
    main(told.checkpoint, told.photos, told.masks)
