"""Boxes: centre and size, or corners; overlap; the box around a mask. All are (..., 4) and, unless said, in 0..1."""

from __future__ import annotations

import torch
from torch import Tensor


def corners(boxes: Tensor) -> Tensor:
    """Centre x, centre y, width, height -> left, top, right, bottom."""
    x, y, width, height = boxes.unbind(-1)
    return torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], dim=-1)


def centres(boxes: Tensor) -> Tensor:
    """The inverse of `corners`."""
    left, top, right, bottom = boxes.unbind(-1)
    return torch.stack([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top], dim=-1)


def areas(boxes: Tensor) -> Tensor:
    """Of boxes by their corners."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def generalised_iou(a: Tensor, b: Tensor) -> Tensor:
    """GIoU (arXiv:1902.09630) of boxes by their corners, which are broadcast: 1 where equal, down to -1 far apart."""
    shared = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = areas(a) + areas(b) - shared
    around = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    return shared / union - (around - union) / around


def mask_boxes(masks: Tensor) -> Tensor:
    """The smallest box around each mask (n, H, W) bool, by its corners in pixels: (n, 4); of an empty mask zeros."""
    n, H, W = masks.shape
    places = torch.zeros(n, 4, device=masks.device)
    for axis, (side, filled) in enumerate(((W, masks.any(dim=1)), (H, masks.any(dim=2)))):
        position = torch.arange(side, device=masks.device)
        first = torch.where(filled, position, side).amin(dim=1)  # (n,)
        last = torch.where(filled, position, -1).amax(dim=1)
        places[:, axis], places[:, axis + 2] = first, last + 1
    return places * masks.flatten(1).any(dim=1)[:, None]
