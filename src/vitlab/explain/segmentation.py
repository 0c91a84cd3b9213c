"""The class token's attention as a segmentation, as DINO shows it (arXiv:2104.14294, section 4.2.2 and figure 4).

    masks = attention_masks(model, "cat.jpg")          # (B, h, grid_h, grid_w), True where each head looks

Images and models are those of `attention_maps`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitlab.explain.attention_maps import attention_maps
from vitlab.explain.inputs import Images


def attention_masks(model: Any, images: Images, keep: float = 0.6, layer: int = -1, *, batch_size: int = 8) -> Tensor:
    """(B, h, grid_h, grid_w), True on the fewest patches that hold the share `keep` of a head's attention to patches.

    The query is the class token, so the model needs one. Its attention to itself does not count.
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep:g} is a share of the attention: above 0 and at most 1, e.g. 0.6.")
    maps = attention_maps(model, images, [layer], query="class", batch_size=batch_size)[:, 0]  # (B, h, grid_h, grid_w)
    share = maps.flatten(2).double()
    share = share / share.sum(dim=-1, keepdim=True)
    most, order = share.sort(dim=-1, descending=True, stable=True)
    before = most.cumsum(dim=-1) - most  # the share of the patches before each one
    kept = before < keep - 1e-12  # the patch that completes the share is still kept
    return torch.zeros_like(kept).scatter(-1, order, kept).unflatten(-1, maps.shape[2:])
