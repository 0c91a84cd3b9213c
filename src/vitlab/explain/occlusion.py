"""Occlusion: how much the logit of a class falls when one patch is covered (Zeiler and Fergus, arXiv:1311.2901).

Slow and simple: one pass for each patch, and no look inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.explain.inputs import Images, as_batch, grid_of, logits_of, wide
from vitlab.explain.relevance import Target, classifier, target_classes


def occlusion(model: ModelOrName, images: Images, target: Target = None, *, batch_size: int = 8) -> Tensor:
    """(B, grid_h, grid_w): the logit of the full image minus that of the image with the patch at its own mean colour.

    Below 0 where the image is more like the class without the patch.
    """
    model = classifier(model)
    x = as_batch(model, images).images  # (B, C, H, W)
    (rows, columns), (height, width) = grid_of(model, x), x.shape[-2:]
    classes = torch.tensor(target_classes(model, x, target, batch_size=batch_size), device=x.device)[:, None]  # (B, 1)
    full = logits_of(model, x, batch_size).gather(1, classes)  # (B, 1)
    colour = wide(x).mean(dim=(2, 3), keepdim=True).to(x.dtype)  # (B, C, 1, 1)
    heat = full.new_empty(len(x), rows, columns)
    for row in range(rows):
        for column in range(columns):
            top, bottom = row * height // rows, (row + 1) * height // rows
            left, right = column * width // columns, (column + 1) * width // columns
            covered = x.clone()
            covered[:, :, top:bottom, left:right] = colour
            heat[:, row, column] = (full - logits_of(model, covered, batch_size).gather(1, classes))[:, 0]
    return heat.cpu()
