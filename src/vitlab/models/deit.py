"""DeiT (arXiv:2012.12877): the ViT at patch 16, and one with a distillation token and its own head, whose mean with the
class token's head is the answer at inference."""

from __future__ import annotations

from vitlab.models.vit_config import VARIANTS, ViTConfig

SIZES = {"tiny": "Ti", "small": "S", "base": "B"}
PLAIN = {f"deit_{size}_patch16": ViTConfig(**VARIANTS[variant]) for size, variant in SIZES.items()}
DISTILLED = {
    f"deit_{size}_distilled_patch16": ViTConfig(**VARIANTS[variant]).with_options(distill_token=True)
    for size, variant in SIZES.items()
}
