"""DINOv2's encoders (arXiv:2304.07193): ViTs at patch 14 with LayerScale, for 518 px; registers by arXiv:2309.16588."""

from __future__ import annotations

from typing import Any

from vitlab.models.vit_config import VARIANTS, ViTConfig

GIANT: dict[str, Any] = dict(width=1536, depth=40, heads=24)  # its MLP is a SwiGLU
SIZES: dict[str, dict[str, Any]] = {
    "small": VARIANTS["S"],
    "base": VARIANTS["B"],
    "large": VARIANTS["L"],
    "giant": {**GIANT, "mlp": "swiglu"},
}


def _encoder(options: dict[str, Any], registers: int) -> ViTConfig:
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


ENCODERS = {f"dinov2_{size}": _encoder(options, 0) for size, options in SIZES.items()}
ENCODERS |= {f"dinov2_{size}_registers": _encoder(options, 4) for size, options in SIZES.items()}
