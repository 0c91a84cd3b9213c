"""Many tokens to one vector per image: class token, mean of the patches, both, or attention with a learned query.

With `_norm` the network's last norm comes after pooling, and reads that one vector (CLIP, timm's fc_norm).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import MLP, Activation

Pooling = Literal["class", "class_norm", "mean", "mean_norm", "class_mean", "attention"]
NORM_AFTER: tuple[Pooling, ...] = ("class_norm", "mean_norm")


def pool_tokens(tokens: Tensor, pooling: Pooling, prefix: int, sizes: Tensor | None = None) -> Tensor:
    """(B, N, D) -> (B, D), or (B, 2D) for class_mean. Registers and the class token never count as patches.

    `sizes` (B, N): how many patches each token stands for, so that merged tokens weigh as much as their parts did.
    """
    if pooling in ("class", "class_norm"):
        return tokens[:, 0]
    if sizes is None:
        mean = tokens[:, prefix:].mean(dim=1)
    else:
        share = sizes[:, prefix:, None] / sizes[:, prefix:, None].sum(dim=1, keepdim=True)
        mean = (tokens[:, prefix:] * share).sum(dim=1)
    return torch.cat([tokens[:, 0], mean], dim=1) if pooling == "class_mean" else mean


class AttentionPool(nn.Module):
    """A learned query looks at every patch, then one residual MLP: the MAP head of arXiv:2106.04560 (also SigLIP's)."""

    def __init__(self, width: int, heads: int, hidden: int, *, activation: Activation = "gelu", eps: float = 1e-6):
        super().__init__()
        if width % heads:
            raise UsageError(f'pooling="attention" needs width {width} to be a multiple of heads {heads}.')
        self.heads = heads
        self.query = nn.Parameter(torch.empty(1, 1, width))
        nn.init.trunc_normal_(self.query, std=0.02)
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width)
        self.proj = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(width, hidden, activation=activation)

    def forward(self, patches: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (B, 1, 1, N) is added to the scaled products: -inf where a token is padding."""
        query = self.query.expand(patches.shape[0], -1, -1)  # (B, 1, D)
        q = self.q(query).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, h, 1, d)
        k, v = self.kv(patches).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, h, N, d)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, h, 1, d)
        x = self.proj(x.transpose(1, 2).flatten(2))  # (B, 1, D)
        return (x + self.mlp(self.norm(x)))[:, 0]  # (B, D)
