"""Exercise 1 of 8: images to tokens, the first half of eq. 1 of ViT (arXiv:2010.11929).

    x_p E        every P x P patch, as one long vector, times one matrix E

Cut the images (B, C, H, W) into N = (H/P)(W/P) patches, row by row. Inside a patch the order of the values is channel,
row, column. Then self.proj makes a token of width D from each patch: (B, N, D). Images need not be square.

Write forward, then: vitlab learn patch-embed patch_embed.py
"""

from torch import Tensor, nn


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, channels: int, width: int):
        super().__init__()
        self.patch_size = patch_size  # P
        self.proj = nn.Linear(channels * patch_size**2, width)  # E: C*P*P -> D

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, N, D)
        raise NotImplementedError
