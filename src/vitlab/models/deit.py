"""DeiT: a ViT with a second, distillation token and its own head (arXiv:2012.12877); at inference their mean."""

from __future__ import annotations

from vitlab.models.vit_config import VARIANTS, ViTConfig

DISTILLED = {
    f"deit_{size}_distilled_patch16": ViTConfig(**VARIANTS[variant]).with_options(distill_token=True)
    for size, variant in (("tiny", "Ti"), ("small", "S"), ("base", "B"))
}
