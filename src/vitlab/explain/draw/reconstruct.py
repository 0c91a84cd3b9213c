"""Images of a masked autoencoder: original, masked, reconstructed, and reconstructed only where hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitlab.explain.draw.heatmap import drawn
from vitlab.explain.draw.maps import ROWS, short_name
from vitlab.explain.draw.sheet import Heading, ImageCell, ImageRow, image_grid
from vitlab.explain.views import View
from vitlab.images.preprocess import Preprocess

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.reconstruct import Reconstruction

GREY = 128  # a hidden patch
COLUMNS = ("seen by the model", "masked", "reconstruction", "visible patches kept")


def reconstruction(
    views: Sequence[View],
    result: Reconstruction,
    preprocess: Preprocess,
    *,
    title: str = "Reconstruction",
    note: str = "",
) -> Figure:
    """A row for each image. What the preprocess crops is not shown."""
    shown = min(len(views), ROWS)
    side = 448 if shown <= 6 else 240
    rows = []
    for i, view in enumerate(views[:shown]):
        original = np.asarray(preprocess.to_image(result.images[i]).convert("RGB"))
        masked = np.where(result.hidden[i, 0].numpy()[..., None], GREY, original).astype(np.uint8)
        painted, pasted = (preprocess.to_image(x[i]).convert("RGB") for x in (result.painted, result.pasted))
        images = (Image.fromarray(original), Image.fromarray(masked), painted, pasted)
        cells = [ImageCell(np.asarray(drawn(replace(view, image=image), side))) for image in images]
        rows.append(ImageRow(cells, short_name(view.name), f"error {result.error[i]:.3f}"))
    hidden, all_of = int(result.mask[0].sum()), result.mask[0].numel()
    lines = [f"{hidden} of {all_of} patches are hidden. The error is the mean square over them."]
    lines += [note] if note else []
    lines += [f"{len(views) - shown} more images are in the numbers only."] if len(views) > shown else []
    return image_grid(rows, COLUMNS, Heading(title, lines), cell=240 if shown <= 6 else 190, apart=1)
