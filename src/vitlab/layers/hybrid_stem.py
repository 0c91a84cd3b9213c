"""HybridStem: a short convolutional network whose last map is read as tokens, for short runs on small images.

A frozen whitening of 2 x 2 patches, 3 x 3 convolutions with batch norms, and one pooling by 2 for each halving, so that
a token stands for P x P pixels as anywhere else. The whitening, pooling right after a convolution and batch norms
without a learned scale are those of airbench (arXiv:2404.00498).
"""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.patches import check_halving, fit_to_patches

WHITENED = 2  # side of the patches that the first convolution whitens
FLOOR = 5e-4  # added to the variance of each principal component, so that noise is not blown up
MOMENTUM = 0.4  # of the batch norms: a short run has few steps to average over


class HybridStem(nn.Module):
    """(B, C, H, W) -> (B, N, D), N = HW/P^2: the whitening, then two convolutions for each halving of the image."""

    def __init__(self, patch_size: int, channels: int, width: int, *, eps: float = 1e-6, pad: bool = False):
        super().__init__()
        steps = check_halving(patch_size, "hybrid")
        self.patch_size, self.channels, self.pad = patch_size, channels, pad
        widths = [2 * channels * WHITENED**2]  # every principal component and its negative
        for step in range(steps):
            widths += [width if step == steps - 1 else max(width // 4, 8)] * 2
        self.whiten = nn.Conv2d(channels, widths[0], WHITENED)
        self.whiten.weight.requires_grad_(False)  # measured on images; its bias learns
        *inner, last = [nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in pairwise(widths)]
        self.filters, self.proj = nn.ModuleList(inner), last
        self.batch_norms = nn.ModuleList(_norm(after, eps) for after in widths[1:])

    def forward(self, images: Tensor) -> Tensor:
        images = fit_to_patches(images, self.patch_size, self.channels, self.pad)
        images = images.contiguous(memory_format=torch.channels_last)  # what convolutions of few channels are fast on
        x = F.gelu(self.whiten(F.pad(images, (0, 1, 0, 1))))  # (B, 8 C, H, W)
        for number, (conv, norm) in enumerate(zip(self.filters, self.batch_norms, strict=False)):
            x = conv(x)
            if number % 2 == 0:
                x = F.max_pool2d(x, 2)
            x = F.gelu(norm(x))
        x = self.batch_norms[-1](self.proj(x))  # (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2).contiguous()  # (B, N, D); once here, or every LayerNorm would copy it

    def init_filters(self) -> None:
        """Start every 3 x 3 filter near the identity: channel i reads channel i, the channels beyond are random."""
        for conv in [*self.filters, self.proj]:
            assert isinstance(conv, nn.Conv2d)
            nn.init.kaiming_uniform_(conv.weight, a=5**0.5)
            nn.init.dirac_(conv.weight[: conv.in_channels])
        nn.init.zeros_(self.whiten.bias)  # type: ignore[arg-type]
        self.set_whitening(torch.eye(self.channels * WHITENED**2))

    @torch.no_grad()
    def whiten_by(self, images: Tensor) -> None:
        """Measure the whitening on normalised training images (n, C, H, W): uncorrelated values of unit variance."""
        patches = images.unfold(2, WHITENED, 1).unfold(3, WHITENED, 1)  # (n, C, H-1, W-1, 2, 2)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2).double()  # (places, 4 C)
        values, vectors = cast(tuple[Tensor, Tensor], torch.linalg.eigh(torch.cov(patches.T)))  # pyright: ignore[reportUnknownMemberType]
        self.set_whitening((vectors / (values + FLOOR).sqrt()).T.flip(0))

    @torch.no_grad()
    def set_whitening(self, matrix: Tensor) -> None:
        """(4 C, 4 C): a row for each output."""
        rows = matrix.to(self.whiten.weight).reshape(-1, self.channels, WHITENED, WHITENED)
        self.whiten.weight.copy_(torch.cat([rows, -rows]))


def _norm(width: int, eps: float) -> nn.BatchNorm2d:
    """Batch norm without a learned scale, which the next layer's weights can take over."""
    norm = nn.BatchNorm2d(width, eps=eps, momentum=MOMENTUM)
    norm.weight.requires_grad_(False)
    return norm
