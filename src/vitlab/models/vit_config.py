"""What a Vision Transformer can be built with: small groups of plain values, saved beside the weights.

`vitlab.create("vit_base", positions="sincos", registers=4)` sets any of them by name; what cannot work is refused here,
with the next valid value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vitlab.errors import UsageError
from vitlab.layers.attention import Path
from vitlab.layers.block import Activation, swiglu_hidden
from vitlab.layers.patches import check_halving
from vitlab.layers.pooling import NORM_AFTER, Pooling
from vitlab.models.config import Config
from vitlab.models.plain import PlainConfig

ResizeRule = Literal["bicubic", "bicubic_antialias", "bicubic_offset", "bilinear_antialias"]


@dataclass(frozen=True)
class Stem(Config):
    kind: Literal["patch", "conv", "hybrid"] = "patch"  # one patch convolution; a small stack of them; a longer one
    patch_bias: bool = True
    patch_norms: bool = False  # LayerNorm before and after the projection (vit-pytorch)
    pad: bool = False  # let any image size in: zeros fill the last patches
    crop: bool = False  # let any image size in: pixels after the last whole patch are not read


@dataclass(frozen=True)
class Tokens(Config):
    class_token: bool = True
    registers: int = 0  # extra tokens without an output (arXiv:2309.16588)
    distill_token: bool = False  # DeiT's second token, with its own head
    mask_token: bool = False  # DINOv2 files carry one; kept so that they can be written back


@dataclass(frozen=True)
class Positions(Config):
    kind: Literal["learned", "sincos", "rotary", "relative", "none"] = "learned"
    prefix_positions: Literal["none", "class", "all"] = "class"  # which prefix tokens have one: class = class + distill
    resize_rule: ResizeRule = "bicubic"
    rotary_base: float = 100.0


@dataclass(frozen=True)
class Norm(Config):
    kind: Literal["pre", "post"] = "pre"
    eps: float = 1e-6  # the released JAX weights use 1e-6; torch defaults to 1e-5, HF ViT to 1e-12
    norm_pre: bool = False  # one more norm before the blocks (CLIP)
    final_norm: Literal["auto", "yes", "no"] = "auto"  # after the blocks; auto: where nothing else ends in a norm


@dataclass(frozen=True)
class AttentionOptions(Config):
    kind: Path = "auto"
    qkv_bias: bool = True
    qk_norm: bool = False  # LayerNorm on queries and keys (arXiv:2302.05442)


@dataclass(frozen=True)
class MLPOptions(Config):
    kind: Literal["mlp", "swiglu"] = "mlp"
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"  # OpenAI CLIP weights need quick_gelu


@dataclass(frozen=True)
class Residual(Config):
    layer_scale: float = 0.0  # start value; 0 = none
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0


@dataclass(frozen=True)
class Head(Config):
    pooling: Pooling = "class"
    head_hidden: int = 0  # width of the tanh layer before the classifier (the paper's pre-training head); 0 = none


@dataclass(frozen=True)
class Dropout(Config):
    dropout: float = 0.0  # after positions, projection and MLP layers
    attention_dropout: float = 0.0
    patch_dropout: float = 0.0  # share of patches left out in training


@dataclass(frozen=True)
class ViTConfig(PlainConfig):
    head_dim: int | None = None  # d, width / heads unless given
    stem: Stem = field(default_factory=Stem)
    tokens: Tokens = field(default_factory=Tokens)
    positions: Positions = field(default_factory=Positions)
    norm: Norm = field(default_factory=Norm)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    mlp: MLPOptions = field(default_factory=MLPOptions)
    residual: Residual = field(default_factory=Residual)
    head: Head = field(default_factory=Head)
    drop: Dropout = field(default_factory=Dropout)

    fixed = (
        *("patch_size", "channels", "width", "depth", "heads", "head_dim"),
        *("stem.kind", "stem.patch_bias", "stem.patch_norms", "tokens.class_token", "tokens.distill_token"),
        *("positions.kind", "positions.prefix_positions", "norm.kind", "norm.norm_pre"),
        *("attention.qkv_bias", "attention.qk_norm", "mlp.kind", "mlp.mlp_ratio"),
    )

    def check(self) -> None:
        super().check()
        check_vit(self)

    def fixed_with(self, other: Config) -> tuple[str, ...]:
        same_pooling = self.head.pooling == other.option("pooling")  # another may bring its own norm
        registers = self.positions.prefix_positions == "all"  # which then have positions
        return *self.fixed, *(("final_norm",) * same_pooling), *(("tokens.registers",) * registers)

    @property
    def table_rule(self) -> str:
        return self.positions.resize_rule

    @property
    def own_head_dim(self) -> int | None:
        return self.head_dim

    @property
    def one_projection(self) -> bool:
        return self.stem.kind == "patch" and not self.stem.patch_norms

    @property
    def pads_images(self) -> bool:
        return self.stem.pad

    @property
    def crops_images(self) -> bool:
        return self.stem.crop

    @property
    def position_kind(self) -> str:
        return self.positions.kind

    @property
    def mlp_name(self) -> str:
        return "SwiGLU" if self.mlp.kind == "swiglu" else f"MLP, {self.mlp.activation}"

    @property
    def post_norm(self) -> bool:
        return self.norm.kind == "post"

    @property
    def own_patch_dropout(self) -> float:
        return self.drop.patch_dropout

    @property
    def prefix(self) -> tuple[str, ...]:
        t = self.tokens
        return ("class",) * t.class_token + ("distillation",) * t.distill_token + ("register",) * t.registers

    @property
    def positioned_prefix(self) -> int:
        """How many prefix tokens have a position of their own."""
        counts = {"none": 0, "class": self.tokens.class_token + self.tokens.distill_token, "all": len(self.prefix)}
        return counts[self.positions.prefix_positions]

    @property
    def final_norm(self) -> Literal["yes", "no"]:
        """Whether a norm follows the blocks; post-norm blocks, and the head's own norm, end in one already."""
        if self.norm.final_norm != "auto":
            return self.norm.final_norm
        return "no" if self.norm.kind == "post" or self.head.pooling in NORM_AFTER else "yes"

    @property
    def mlp_hidden(self) -> int:
        if self.mlp.kind == "swiglu":
            return swiglu_hidden(self.width, self.mlp.mlp_ratio)
        return round(self.width * self.mlp.mlp_ratio)


def check_vit(c: ViTConfig) -> None:
    """Refuse what cannot work, and say what to type instead."""
    if c.head_dim is not None and c.head_dim < 1:
        raise UsageError(f"head_dim={c.head_dim} must be at least 1, or None for width / heads.")
    head_dim = c.head_width
    if c.positions.kind == "rotary" and head_dim % 4:
        raise UsageError(
            f"rotary positions turn pairs of channels by row and by column, so head_dim must be a multiple of 4, "
            f"not {head_dim}: use head_dim={-(-head_dim // 4) * 4}."
        )
    if c.positions.kind == "sincos" and c.width % 4:
        raise UsageError(f"sincos positions need a width that is a multiple of 4: use {-(-c.width // 4) * 4}.")
    if c.positions.rotary_base <= 0:
        raise UsageError("rotary_base must be greater than 0.")
    if c.head.pooling in ("class", "class_norm", "class_mean") and not c.tokens.class_token:
        raise UsageError(f'pooling="{c.head.pooling}" needs class_token=True; without one use pooling="mean".')
    if c.tokens.distill_token and c.head.pooling != "class":
        raise UsageError(f'distill_token=True reads two tokens, so it needs pooling="class", not "{c.head.pooling}".')
    if c.tokens.distill_token and c.head.head_hidden:
        raise UsageError("distill_token=True has two plain heads: use head_hidden=0.")
    if c.head.pooling == "attention" and c.width % c.heads:
        raise UsageError(f'pooling="attention" needs width {c.width} to be a multiple of heads {c.heads}.')
    if c.tokens.registers < 0 or c.head.head_hidden < 0 or c.residual.layer_scale < 0:
        raise UsageError("registers, head_hidden and layer_scale must be 0 or more.")
    if c.stem.kind != "patch":
        if c.stem.patch_norms or not c.stem.patch_bias or c.stem.crop:
            raise UsageError('patch_norms=True, patch_bias=False and crop=True belong to stem="patch".')
        check_halving(c.patch_size, c.stem.kind)
    if c.stem.pad and c.stem.crop:
        raise UsageError("pad=True fills the last patches and crop=True leaves them out: choose one.")
    if c.drop.patch_dropout and c.positions.kind == "relative":
        raise UsageError('patch_dropout cannot follow a relative bias: use positions="learned", or patch_dropout=0.')


SIZES: dict[str, tuple[str, int, dict[str, Any]]] = {  # the paper's letter, the patch size of the short name, D, L, h
    "tiny": ("Ti", 16, dict(width=192, depth=12, heads=3)),  # Ti and S: DeiT (arXiv:2012.12877)
    "small": ("S", 16, dict(width=384, depth=12, heads=6)),
    "base": ("B", 16, dict(width=768, depth=12, heads=12)),  # B, L and H: Table 1 of ViT
    "large": ("L", 16, dict(width=1024, depth=24, heads=16)),
    "huge": ("H", 14, dict(width=1280, depth=32, heads=16)),
}
VARIANTS = {letter: options for letter, _, options in SIZES.values()}
PATCH_SIZES = (8, 14, 16, 32)

SMALL_IMAGES: dict[str, dict[str, Any]] = {  # 192 x 9 at patch 4: the small-data ViT of arXiv:2112.13492
    "vit_cifar": dict(image_size=32, patch_size=4, width=192, depth=9, heads=12, mlp_ratio=2.0, classes=10),
    "vit_mnist": dict(image_size=28, patch_size=4, width=128, depth=6, heads=4, mlp_ratio=2.0, classes=10, channels=1),
    "vit_digits": dict(image_size=8, patch_size=2, width=64, depth=4, heads=4, mlp_ratio=2.0, classes=10, channels=1),
}
