"""Exercise 5 of 8: the whole Vision Transformer, eqs. 1-4 of arXiv:2010.11929.

    z_0 = [x_class; x_p E] + E_pos       eq. 1, (B, N + 1, D)
    z_l = block(z_{l-1}), l = 1 .. L     eqs. 2-3
    y   = LN(z_L), its class token       eq. 4, (B, D)
    logits = head(y)                     (B, classes), no softmax

Write forward, then: vitlab learn vit vit.py
"""

import torch
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block
from vitlab.layers.patches import PatchEmbed  # or your own: from patch_embed import PatchEmbed


class ViT(nn.Module):
    def __init__(
        self,
        image_size: tuple[int, int],  # (H, W)
        patch_size: int,  # P
        channels: int,  # C
        classes: int,
        width: int,  # D
        depth: int,  # L
        heads: int,  # h
        hidden: int,
    ):
        super().__init__()
        N = (image_size[0] // patch_size) * (image_size[1] // patch_size)
        self.patch_embed = PatchEmbed(patch_size, channels, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))  # x_class
        self.positions = nn.Parameter(torch.randn(1, N + 1, width) * 0.02)  # E_pos
        self.blocks = nn.ModuleList(Block(Attention(width, heads), MLP(width, hidden), width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, classes)
        raise NotImplementedError
