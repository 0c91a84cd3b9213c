import torch
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block
from vitlab.layers.patches import PatchEmbed


class ViT(nn.Module):
    def __init__(
        self,
        image_size: tuple[int, int],
        patch_size: int,
        channels: int,
        classes: int,
        width: int,
        depth: int,
        heads: int,
        hidden: int,
    ):
        super().__init__()
        N = (image_size[0] // patch_size) * (image_size[1] // patch_size)
        self.patch_embed = PatchEmbed(patch_size, channels, width)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, N + 1, width) * 0.02)
        self.blocks = nn.ModuleList(Block(Attention(width, heads), MLP(width, hidden), width) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        z = self.patch_embed(images)  # (B, N, D)
        first = self.class_token.expand(z.shape[0], -1, -1)  # (B, 1, D)
        z = torch.cat([first, z], dim=1)  # (B, N + 1, D)
        z = z + self.positions  # eq. 1
        for block in self.blocks:
            z = block(z)  # eqs. 2-3
        y = self.norm(z)[:, 0]  # (B, D), eq. 4
        return self.head(y)  # (B, classes)
