"""R + ViT, the hybrid of sec. 3.1 of ViT (arXiv:2010.11929): the patches are those of a ResNet's map, not of the image.

    model = vitlab.create("vit_base_r50_s16", classes=10)
    logits = model(images)                     # (B, 3, 384, 384) -> (B, 10)

Its convolutions have standardised weights (arXiv:1903.10520) and group norms, as in BiT (arXiv:1912.11370), so that one
image gives the same tokens alone and in a batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.patches import fit_to_patches
from vitlab.models.entry import HALF, Entry, Paper, ParsedName
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import SIZES, ViTConfig

GROUPS = 32  # of a group norm


@dataclass(frozen=True)
class HybridConfig(ViTConfig):
    """A ViT's options and those of its ResNet; patch_size is in pixels of the image."""

    stem_width: int = 64
    stage_depths: tuple[int, ...] = (3, 4, 9)  # residual blocks of each stage; (): the stem alone
    stage_widths: tuple[int, ...] = (256, 512, 1024)  # channels that each stage gives; inside a block, a quarter
    fixed = (*ViTConfig.fixed, "stem_width", "stage_depths", "stage_widths")

    def check(self) -> None:
        super().check()
        depths, widths = self.stage_depths, self.stage_widths
        if len(depths) != len(widths) or min((*depths, *widths), default=1) < 1:
            raise UsageError(
                f"stage_depths={list(depths)} and stage_widths={list(widths)} must have a number of at least 1 for "
                "each stage, equally many."
            )
        for name, width in [("stem_width", self.stem_width), *(("stage_widths", width // 4) for width in widths)]:
            if width < 1 or width % GROUPS:
                raise UsageError(
                    f"{name}: a group norm has {GROUPS} groups, which do not divide {width} channels. stem_width must "
                    f"be a multiple of {GROUPS}, and stage_widths, whose quarter stands inside, of {4 * GROUPS}."
                )
        if self.patch_size % self.map_stride:
            raise UsageError(
                f"patch_size={self.patch_size} must be a multiple of {self.map_stride}: so many pixels has each place "
                f"of the map after {len(depths)} stages."
            )
        if self.stem.kind != "patch" or self.stem.patch_norms:
            raise UsageError("a hybrid's stem is its ResNet: leave stem and patch_norms as they are.")

    @property
    def map_stride(self) -> int:
        """Pixels of the image to a place of the ResNet's map."""
        return self.stride_after(len(self.stage_depths))

    @staticmethod
    def stride_after(stages: int) -> int:
        return 4 * 2 ** max(stages - 1, 0)

    @property
    def map_channels(self) -> int:
        return self.stage_widths[-1] if self.stage_widths else self.stem_width


R26: dict[str, Any] = dict(stage_depths=(2, 2, 2, 2), stage_widths=(256, 512, 1024, 2048), patch_size=32)
R50: dict[str, Any] = dict(stage_depths=(3, 4, 6, 3), stage_widths=(256, 512, 1024, 2048), patch_size=32)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # size of the ViT, and its ResNet
    "vit_base_r50_s16": ("base", dict(image_size=(384, 384))),  # sec. 4.1: stage 4's blocks stand in stage 3
    # AugReg (arXiv:2106.10270)
    "vit_tiny_r_s16_p8": ("tiny", dict(stage_depths=(), stage_widths=(), patch_size=32)),
    "vit_small_r26_s32": ("small", R26),
    "vit_base_r26_s32": ("base", R26),
    "vit_large_r50_s32": ("large", R50),
}
MODELS = {name: HybridConfig(**{**SIZES[size][2], **options}) for name, (size, options) in VARIANTS.items()}


class StandardConv(nn.Conv2d):
    """A convolution whose filters have mean 0 and deviation 1; zeros are filled up more at the right and bottom."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int = 1):
        super().__init__(width_in, width, kernel, stride, bias=False)  # pyright: ignore[reportUnknownMemberType]

    def forward(self, input: Tensor) -> Tensor:  # (B, C, H, W)
        w = self.weight.flatten(1)  # (D, C k k)
        w = F.layer_norm(w, w.shape[1:], eps=1e-8).reshape(self.weight.shape)
        return F.conv2d(pad_ends(input, self.kernel_size[0], self.stride[0]), w, stride=self.stride)


def pad_ends(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """So that a window of `kernel` by `stride` gives side / stride; of an odd number the smaller half comes first."""
    total = kernel - stride  # sides are multiples of the stride, for the image's are of the patch
    if total <= 0:
        return x
    first = total // 2
    return F.pad(x, (first, total - first, first, total - first), value=value)


class ConvGroupNorm(nn.Module):
    def __init__(self, width_in: int, width: int, kernel: int, stride: int = 1):
        super().__init__()
        self.conv = StandardConv(width_in, width, kernel, stride)
        self.norm = nn.GroupNorm(GROUPS, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        return self.norm(self.conv(x))  # (B, D, H/stride, W/stride)


class Bottleneck(nn.Module):
    """y = relu(F(x) + x), eq. 1 of ResNet (arXiv:1512.03385); the first of a stage has a matrix in its shortcut."""

    def __init__(self, width_in: int, width: int, stride: int, first: bool):
        super().__init__()
        inner = width // 4
        self.convs = nn.ModuleList(
            (ConvGroupNorm(width_in, inner, 1), ConvGroupNorm(inner, inner, 3, stride), ConvGroupNorm(inner, width, 1))
        )
        self.shortcut = ConvGroupNorm(width_in, width, 1, stride) if first else None

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        one, two, three = self.convs
        y = three(F.relu(two(F.relu(one(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))  # (B, D, H/stride, W/stride)


class HybridEmbed(nn.Module):
    """Stem, stages, and every patch of their map becomes a token."""

    def __init__(self, c: HybridConfig):
        super().__init__()
        self.patch_size, self.channels, self.pad = c.patch_size, c.channels, c.stem.pad
        self.stem = ConvGroupNorm(c.channels, c.stem_width, 7, 2)
        self.levels = nn.ModuleList()
        width_in = c.stem_width
        for level, (depth, width) in enumerate(zip(c.stage_depths, c.stage_widths, strict=True)):
            blocks = [
                Bottleneck(width if number else width_in, width, 2 if level and not number else 1, first=number == 0)
                for number in range(depth)
            ]
            self.levels.append(nn.ModuleList(blocks))
            width_in = width
        patch = c.patch_size // c.map_stride  # in places of the map
        self.proj = nn.Conv2d(c.map_channels, c.width, patch, stride=patch, bias=c.stem.patch_bias)

    def forward(self, images: Tensor) -> Tensor:
        x = fit_to_patches(images, self.patch_size, self.channels, self.pad)  # (B, C, H, W)
        x = F.relu(self.stem(x))  # (B, stem_width, H/2, W/2)
        x = F.max_pool2d(pad_ends(x, 3, 2, value=-float("inf")), 3, stride=2)  # (B, stem_width, H/4, W/4)
        for blocks in cast("list[list[Bottleneck]]", self.levels):
            for block in blocks:
                x = block(x)  # (B, stage width, ...)
        return self.proj(x).flatten(2).transpose(1, 2).contiguous()  # (B, N, D), row by row


class HybridViT(VisionTransformer):
    """The blocks of a ViT on the map of a ResNet."""

    family = "hybrid"
    meanings = MappingProxyType({"patch_embed": "a ResNet; every patch of its map becomes a token (sec. 3.1)"})

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        embed = HybridEmbed(config)
        self.add_module("patch_embed", embed)  # in place of a ViT's
        for module in embed.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def parse_name(name: str) -> ParsedName | None:
    """timm's, with the image size: vit_base_r50_s16_224."""
    match = re.fullmatch(rf"({'|'.join(VARIANTS)})_([0-9]{{1,5}})", name)
    return (match[1], {"image_size": int(match[2])}) if match else None


PAPER = Paper("hybrid", HybridConfig, HybridViT, [Entry(n, "hybrid", c, HALF) for n, c in MODELS.items()], parse_name)
