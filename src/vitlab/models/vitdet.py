"""A feature pyramid on a plain ViT: its last map, made finer and coarser (ViTDet, arXiv:2203.16527, sec. 3).

    pyramid = SimplePyramid(vitlab.create("vit_base"), channels=256)
    maps = pyramid.forward_pyramid(images)     # (B, 256, H/4, W/4), H/8, H/16, H/32
    pyramid.pyramid                            # their strides and channels, for a detection or segmentation head

Networks of stages (Swin, PVT, Twins, ResNet) have `forward_pyramid` themselves; a ViT has one map, so this one learns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.models.hierarchy import Level
from vitlab.models.vit import VisionTransformer


class MapNorm(nn.LayerNorm):
    """LayerNorm over the channels of each place of a map."""

    def forward(self, input: Tensor) -> Tensor:  # (B, C, H, W)
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class SimplePyramid(nn.Module):
    """Each map from the last one of the encoder alone, without its final norm: no way from one level to another."""

    def __init__(
        self,
        encoder: VisionTransformer,
        channels: int = 256,
        *,
        strides: Sequence[int] = (4, 8, 16, 32),
        eps: float = 1e-6,
    ):
        super().__init__()
        width, P = encoder.config.width, encoder.config.patch_size
        if channels < 1:
            raise UsageError(f"channels={channels} must be at least 1.")
        steps = [check_stride(stride, P) for stride in strides]
        if min(steps) < 0 and width % 2 ** -min(steps):
            raise UsageError(
                f"stride {min(strides)} halves the width {width} {-min(steps)} times, which leaves a rest: use larger "
                "strides."
            )
        self.encoder = encoder
        self.pyramid = tuple(Level(stride, channels) for stride in strides)
        self.levels = nn.ModuleList(_level(width, step, channels, eps) for step in steps)

    def forward_pyramid(self, images: Tensor) -> list[Tensor]:
        """One map for each level, (B, channels, rows, columns), as `pyramid` states them."""
        (x,) = self.encoder.intermediate_features(images, [-1], norm=False, maps=True)  # (B, D, H/P, W/P)
        return [level(x) for level in self.levels]

    forward = forward_pyramid


class Halve(nn.Module):
    """The largest of each 2 x 2 places; an odd side rounds up, as in the networks of stages."""

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2, ceil_mode=True)


def check_stride(stride: int, patch_size: int) -> int:
    """How often a map of patches is halved to reach a stride; less than 0: how often it is doubled."""
    for step in range(-8, 9):
        if stride == patch_size * 2**step:
            return step
    near = [patch_size // 2**n for n in (2, 1) if patch_size % 2**n == 0] + [patch_size, 2 * patch_size]
    raise UsageError(
        f"stride {stride} is not patch_size={patch_size} doubled or halved: use strides={tuple(near)}, or a ViT of "
        "patch_size 4, 8, 16 or 32."
    )


def _level(width: int, step: int, channels: int, eps: float) -> nn.Sequential:
    """Finer by transposed convolutions of 2 x 2, each to half as many channels; coarser by pooling; then two more."""
    parts: list[nn.Module] = [Halve() for _ in range(step)]
    for number in range(-step):
        if number:
            parts += [MapNorm(width, eps=eps), nn.GELU()]
        parts.append(nn.ConvTranspose2d(width, width // 2, kernel_size=2, stride=2))
        width //= 2
    parts += [nn.Conv2d(width, channels, kernel_size=1, bias=False), MapNorm(channels, eps=eps)]
    parts += [nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False), MapNorm(channels, eps=eps)]
    return nn.Sequential(*parts)
