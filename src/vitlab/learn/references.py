"""Our side of the exercises that are no single layer of this package: its parts, put together as the exercise asks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block
from vitlab.layers.positions import LearnedPositions, sincos_2d
from vitlab.models.mae import choose_visible
from vitlab.models.two_towers import contrastive_loss


class PositionsReference(nn.Module):
    """Eq. 1 of ViT from the tokens on: a class token, and positions for a grid of any size."""

    def __init__(self, grid: tuple[int, int], width: int, learned: bool):
        super().__init__()
        self.learned = learned
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = LearnedPositions(grid, width, prefix=1)

    def forward(self, x: Tensor) -> Tensor:  # (B, rows, columns, D) -> (B, 1 + N, D)
        B, rows, columns, D = x.shape
        z = torch.cat([self.class_token.expand(B, -1, -1), x.flatten(1, 2)], dim=1)
        if self.learned:
            return z + self.positions((rows, columns), like=z)
        return z + F.pad(sincos_2d((rows, columns), D), (0, 0, 1, 0))  # the class token gets zeros


class MaskingReference(nn.Module):
    """MAE (arXiv:2111.06377) with an encoder and a decoder of one block each, without a class token."""

    def __init__(self, patches: int, values: int, width: int, heads: int, hidden: int, mask_ratio: float):
        super().__init__()
        self.mask_ratio = mask_ratio
        self.embed = nn.Linear(values, width)
        self.positions = nn.Parameter(torch.zeros(1, patches, width))
        self.encoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_positions = nn.Parameter(torch.zeros(1, patches, width))
        self.decoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.pixels = nn.Linear(width, values)

    def forward(self, patches: Tensor, noise: Tensor) -> Tensor:  # (B, N, C*P*P), (B, N) -> ()
        tokens = self.embed(patches) + self.positions
        keep, mask = choose_visible(tokens, self.mask_ratio, noise)  # (B, n), (B, N)
        index = keep[..., None].expand(-1, -1, tokens.shape[-1])
        latent = self.encoder(tokens.gather(1, index))  # (B, n, D)
        full = self.mask_token.expand_as(tokens).scatter(1, index, latent)
        prediction = self.pixels(self.decoder(full + self.decoder_positions))
        error = (prediction - patches).square().mean(dim=-1)  # (B, N)
        return (error * mask).sum() / mask.sum()


class CLIPLossReference(nn.Module):
    """Figure 3 of CLIP (arXiv:2103.00020), from the features of both towers on."""

    def __init__(self, image_width: int, text_width: int, width: int):
        super().__init__()
        self.image_projection = nn.Linear(image_width, width, bias=False)
        self.text_projection = nn.Linear(text_width, width, bias=False)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # (B, I), (B, T) -> ()
        features = F.normalize(self.image_projection(images), dim=-1), F.normalize(self.text_projection(texts), dim=-1)
        return contrastive_loss(*features, self.log_scale.exp())
