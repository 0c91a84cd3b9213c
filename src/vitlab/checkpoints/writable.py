"""Which networks another library can be: what its ViT has no option for is refused before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vitlab.errors import UsageError
from vitlab.models.vit_config import ViTConfig


def check_vit(library: str, c: ViTConfig, features: Iterable[str], others: Mapping[str, bool]) -> None:
    """Refuse a ViT that has one of the features, by their names below, or of the others."""
    present = {
        "positions": (f"positions={c.positions.kind}", c.positions.kind != "learned"),
        "class_token": ("a network without class token", not c.tokens.class_token),
        "registers": ("registers", bool(c.tokens.registers)),
        "distill_token": ("distill_token", c.tokens.distill_token),
        "mask_token": ("mask_token", c.tokens.mask_token),
        "pooling": (f"pooling={c.head.pooling}", c.head.pooling != "class"),
        "head_hidden": ("head_hidden", bool(c.head.head_hidden)),
        "head_dim": ("head_dim", c.head_dim is not None and c.head_dim * c.heads != c.width),
        "norm": ("norm=post", c.norm.kind == "post"),
        "norm_pre": ("norm_pre", c.norm.norm_pre),
        "final_norm": ("final_norm=no", c.final_norm == "no" and c.norm.kind == "pre"),
        "qk_norm": ("qk_norm", c.attention.qk_norm),
        "qkv_bias": ("qkv_bias=False", not c.attention.qkv_bias),
        "layer_scale": ("layer_scale", bool(c.residual.layer_scale)),
        "mlp": ("mlp=swiglu", c.mlp.kind == "swiglu"),
        "stem": (f"stem={c.stem.kind}", c.stem.kind != "patch"),
        "patch_norms": ("patch_norms", c.stem.patch_norms),
        "patch_bias": ("patch_bias=False", not c.stem.patch_bias),
    }
    reasons = {**dict(present[name] for name in features), **others}
    if wrong := [reason for reason, has_it in reasons.items() if has_it]:
        raise UsageError(f"{library} cannot express {', '.join(wrong)}. Use --to native.")
