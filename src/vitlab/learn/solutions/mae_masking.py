import torch
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block


class MAE(nn.Module):
    def __init__(self, patches: int, values: int, width: int, heads: int, hidden: int, mask_ratio: float):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.embed = nn.Linear(values, width)
        self.positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.encoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.decoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.pixels = nn.Linear(width, values)

    def forward(self, patches: Tensor, noise: Tensor) -> Tensor:
        B, N, _ = patches.shape
        n = int(N * (1 - self.mask_ratio))  # visible patches
        order = noise.argsort(dim=1)  # (B, N): the patches that stay come first
        restore = order.argsort(dim=1)  # (B, N): where each patch is in that order
        x = self.embed(patches) + self.positions  # (B, N, D)
        x = x.gather(1, order[:, :n, None].expand(-1, -1, x.shape[2]))  # (B, n, D)
        x = self.encoder(x)
        x = torch.cat([x, self.mask_token.expand(B, N - n, -1)], dim=1)  # (B, N, D), in another order
        x = x.gather(1, restore[..., None].expand(-1, -1, x.shape[2]))  # each in its place
        x = self.decoder(x + self.decoder_positions)
        error = (self.pixels(x) - patches).square().mean(dim=-1)  # (B, N)
        hidden = (restore >= n).float()  # (B, N): 1 = hidden
        return (error * hidden).sum() / hidden.sum()
