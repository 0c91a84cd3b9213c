"""DINOv2's encoders (arXiv:2304.07193): ViTs at patch 14 with LayerScale, for 518 px; registers by arXiv:2309.16588."""

from __future__ import annotations

import re
from typing import Any

from vitlab.models.entry import IMAGENET_CROP, Entry, Paper, ParsedName
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import VARIANTS, ViTConfig

SIZES: dict[str, dict[str, Any]] = {
    "small": VARIANTS["S"],
    "base": VARIANTS["B"],
    "large": VARIANTS["L"],
    "giant": dict(width=1536, depth=40, heads=24, mlp="swiglu"),
}


def _encoder(registers: int, **options: Any) -> ViTConfig:
    rule = "bicubic_antialias" if registers else "bicubic_offset"  # as each release resizes its positions
    return ViTConfig().with_options(
        **options,
        image_size=518,
        patch_size=14,
        classes=0,
        layer_scale=1e-5,
        mask_token=True,
        registers=registers,
        resize_rule=rule,
    )


MODELS = {
    **{f"dinov2_{size}": _encoder(0, **options) for size, options in SIZES.items()},
    **{f"dinov2_{size}_registers": _encoder(4, **options) for size, options in SIZES.items()},
}


def parse_name(name: str) -> ParsedName | None:
    """timm's: vit_small_patch14_reg4_dinov2."""
    match = re.fullmatch(r"vit_(small|base|large|giant)_patch14_(reg4_)?dinov2", name)
    return (f"dinov2_{match[1]}" + ("_registers" if match[2] else ""), {}) if match else None


PAPER = Paper(
    *("vit", ViTConfig, VisionTransformer),
    [Entry(name, "vit", config, IMAGENET_CROP) for name, config in MODELS.items()],
    parse_name,
)
