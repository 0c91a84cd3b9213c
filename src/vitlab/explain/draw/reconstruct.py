"""Pictures as a masked autoencoder sees them: whole, masked, painted, and painted only where they were hidden."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vitlab.explain.draw.maps import ROWS, short_name
from vitlab.explain.draw.sheet import Cell, Heading, Row, grid_of_pictures
from vitlab.explain.draw.view import View, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.reconstruct import Reconstruction

GREY = 128  # a hidden patch
COLUMNS = ("seen by the model", "masked", "reconstruction", "visible patches kept")


def reconstruction(
    views: Sequence[View], found: Reconstruction, preprocess: Any, *, title: str = "Reconstruction", note: str = ""
) -> Figure:
    """A row for each picture. What the model's preprocess cuts off is not shown: the model never saw it."""
    shown = min(len(views), ROWS)
    side = 448 if shown <= 6 else 240
    rows = []
    for i, view in enumerate(views[:shown]):
        whole = np.asarray(preprocess.picture(found.images[i]).convert("RGB"))
        left = np.where(found.hidden[i, 0].numpy()[..., None], GREY, whole).astype(np.uint8)
        painted, pasted = (preprocess.picture(x[i]).convert("RGB") for x in (found.painted, found.pasted))
        pictures = (Image.fromarray(whole), Image.fromarray(left), painted, pasted)
        cells = [Cell(np.asarray(drawn(replace(view, picture=picture), side))) for picture in pictures]
        rows.append(Row(cells, short_name(view.name), f"error {found.error[i]:.3f}"))
    hidden, all_of = int(found.mask[0].sum()), found.mask[0].numel()
    lines = [f"{hidden} of {all_of} patches are hidden. The error is the mean square over them."]
    lines += [note] if note else []
    lines += [f"{len(views) - shown} more pictures are in the numbers only."] if len(views) > shown else []
    return grid_of_pictures(rows, COLUMNS, Heading(title, lines), cell=240 if shown <= 6 else 190, apart=1)
