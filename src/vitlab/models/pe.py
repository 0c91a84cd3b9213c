"""Perception Encoder (arXiv:2504.13181): PE-Core, PE-Lang and PE-Spatial, the encoders that Meta's CLIP trained.

    model = vitlab.load("hf-hub:timm/vit_pe_core_base_patch16_224.fb")

A norm before the blocks, a learned table, and rotary positions stretched to the grid of the pre-training. PE-Core ends
in a norm, pooling by attention, which reads the class token too, and a projection; the others end in their tokens.
PE-Core was trained beside CLIP's text tower, and Meta's own files hold both (family pe_clip). At other image sizes than
the pre-training's, Meta's code counts patches as they are and resizes the table bilinearly; timm does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention, Path
from vitlab.layers.block import MLP, Activation, Block
from vitlab.layers.patches import PatchEmbed
from vitlab.layers.pooling import AttentionPool
from vitlab.layers.positions import LearnedPositions, Rotary, rotary_scaled, rotary_speeds
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.clip import CLIP, ProjectedConfig
from vitlab.models.entry import HALF, Entry, Paper, half
from vitlab.models.eva02 import check_rotary
from vitlab.models.plain import AttentionBias, PlainConfig, PlainTransformer, new_token, with_prefix
from vitlab.models.two_towers import TextConfig
from vitlab.models.vit import init_weights


@dataclass(frozen=True)
class PEConfig(PlainConfig):
    classes: int = 0  # of PE-Core: the width of its embeddings
    class_token: bool = True
    final_norm: bool = True
    pooling: Literal["attention", "mean", "class"] = "attention"
    pool_heads: int = 8  # of pooling by attention
    pool_ratio: float = 4.0  # hidden channels / width of its MLP
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    qkv_bias: bool = True
    layer_scale: float = 0.0  # start value; 0 = none
    rotary_grid: tuple[int, int] = (14, 14)  # of the pre-training
    rotary_stretch: bool = True  # every grid spans that one; False: patches are counted as they are
    rotary_base: float = 10000.0
    resize_rule: Literal["bicubic_antialias", "bilinear"] = "bicubic_antialias"  # of the learned table
    eps: float = 1e-5
    attention: Path = "auto"
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0

    fixed = (
        *("patch_size", "channels", "width", "depth", "heads", "class_token", "final_norm", "mlp_ratio", "qkv_bias"),
    )

    def check(self) -> None:
        super().check()
        check_rotary(self, self.rotary_grid, self.rotary_base)
        if self.pool_hidden < 1:
            raise UsageError(f"pool_ratio={self.pool_ratio} leaves the pooling's MLP no hidden channel: use 4.")
        if self.pool_heads < 1 or self.layer_scale < 0:
            raise UsageError("pool_heads must be at least 1, and layer_scale 0 or more.")
        if self.pooling == "class" and not self.class_token:
            raise UsageError('pooling="class" needs class_token=True; without one use pooling="mean".')

    @property
    def pool_hidden(self) -> int:
        """Hidden channels of the MLP after pooling by attention."""
        return round(self.width * self.pool_ratio)

    @property
    def table_rule(self) -> str:
        return self.resize_rule

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class",) * self.class_token

    @property
    def position_kind(self) -> str:
        return "learned + rotary"


class PE(PlainTransformer):
    """z_0 = LN([x_class; x_p E] + E_pos);  z_l = block(z_{l-1}, angles of the patches);  y = pool(LN(z_L))."""

    family = "pe"

    def __init__(self, config: PEConfig):
        super().__init__(config)
        c = config
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width, bias=False)
        self.class_token = new_token(c.width) if c.class_token else None
        self.positions = LearnedPositions(c.grid, c.width, prefix=len(c.prefix), rule=c.table_rule)
        self.norm_pre = nn.LayerNorm(c.width, eps=c.eps)
        self.blocks = nn.ModuleList(build_block(c, layer) for layer in range(c.depth))
        if c.final_norm:
            self.norm = nn.LayerNorm(c.width, eps=c.eps)
        if c.pooling == "attention":
            self.pool = AttentionPool(c.width, c.pool_heads, c.pool_hidden, eps=c.eps)
        self.apply(init_weights)
        self.add_head()

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert self.positions is not None and self.norm_pre is not None
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        if self.class_token is not None:
            z = mark(trace, "prefix", with_prefix(z, self.class_token))
        z = mark(trace, "positions", z + mark(trace, "position_embedding", self.positions(layout.grid, like=z)))
        z, kept = self.leave_out(z, layout, trace, keep)
        return mark(trace, "norm_pre", self.norm_pre(z)), kept

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        c: PEConfig = self.config
        speeds = rotary_speeds(c.head_width, c.rotary_base, z.device)
        prefix = len(layout.prefix)  # patches are counted from 1 beside a class token
        span = c.rotary_grid if c.rotary_stretch else layout.grid
        rope = rotary_scaled(layout.grid, span, speeds, prefix, first=prefix, columns_first=True)
        return (rope if kept is None else rope.of_tokens(kept)), lambda layer: None

    def pooled(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        return super().pooled(tokens, sizes) if self.pool is None else self.pool(tokens)  # the class token too


def build_block(c: PEConfig, layer: int) -> Block:
    attention = Attention(
        c.width, c.heads, qkv_bias=c.qkv_bias, attention_dropout=c.attention_dropout, path=c.attention
    )
    mlp = MLP(c.width, c.mlp_hidden, activation=c.activation)
    rate = c.stochastic_depth * layer / max(c.depth - 1, 1)
    return Block(attention, mlp, c.width, eps=c.eps, layer_scale=c.layer_scale, stochastic_depth=rate)


# ---- with a text tower


@dataclass(frozen=True)
class PECLIPConfig(ProjectedConfig):
    image: PEConfig = field(default_factory=PEConfig)
    text: TextConfig = field(default_factory=lambda: TextConfig(activation="gelu"))
    projection_bias: bool = False  # timm's head, which open_clip uses, has one

    @property
    def projects_with_bias(self) -> bool:
        return self.projection_bias


class PECLIP(CLIP):
    """logits = scale * cos(image, text): CLIP's text tower beside a PE."""

    family = "pe_clip"
    image_tower = PE


# ---- names

SIZES: dict[str, dict[str, Any]] = {  # as Meta's repository and timm have them
    "tiny": dict(width=192, depth=12, heads=3),
    "small": dict(width=384, depth=12, heads=6),
    "base": dict(width=768, depth=12, heads=12),
    "large": dict(width=1024, depth=24, heads=16),
    "gigantic": dict(width=1536, depth=50, heads=16, mlp_ratio=8960 / 1536, class_token=False),
}
CORE = {  # size -> patch, image, width of the embeddings
    "tiny": (16, 384, 512),
    "small": (16, 384, 512),
    "base": (16, 224, 1024),
    "large": (14, 336, 1024),
    "gigantic": (14, 448, 1280),
}
SPATIAL = {"tiny": (16, 512), "small": (16, 512), "base": (16, 512), "large": (14, 448), "gigantic": (14, 448)}
LANG = {"large": 23, "gigantic": 47}  # size -> depth; at patch 14 and 448 pixels


def _made(size: str, patch: int, side: int, **options: Any) -> PEConfig:
    at: dict[str, Any] = dict(image_size=side, patch_size=patch, rotary_grid=side // patch)
    return PEConfig(**{**SIZES[size], **options, **at})


def _models() -> dict[str, PEConfig]:
    tokens: dict[str, Any] = dict(final_norm=False, pooling="mean")
    core = {f"core_{s}_patch{p}": _made(s, p, side, classes=width) for s, (p, side, width) in CORE.items()}
    lang = {f"lang_{s}_patch14": _made(s, 14, 448, **tokens, depth=n, layer_scale=0.1) for s, n in LANG.items()}
    scaled = {"gigantic": 0.1}
    spatial = {
        f"spatial_{s}_patch{p}": _made(s, p, side, **tokens, layer_scale=scaled.get(s, 0.0))
        for s, (p, side) in SPATIAL.items()
    }
    return {f"pe_{name}": config for name, config in (core | lang | spatial).items()}


MODELS = _models()
DIGITS: dict[str, Any] = dict(image_size=8, patch_size=2, channels=1, classes=10, width=64, depth=4, heads=4)
PREPROCESS: dict[str, Any] = {**HALF, "interpolation": "bicubic", "how": "crop"}

PAPER = Paper(
    "pe",
    PEConfig,
    PE,
    [
        *(Entry(name, "pe", config, PREPROCESS, (f"vit_{name}",)) for name, config in MODELS.items()),
        Entry("pe_digits", "pe", PEConfig(**DIGITS, rotary_grid=(4, 4), pool_heads=4), half(1)),
    ],
)

TEXT = {  # size -> context, width, depth, heads of PE-Core's text tower
    **dict.fromkeys(("tiny", "small"), (32, 512, 12, 8)),
    **dict.fromkeys(("base", "large"), (32, 1024, 24, 16)),
    "gigantic": (72, 1280, 24, 20),
}


def _with_text(size: str) -> PECLIPConfig:
    image, (context, width, depth, heads) = MODELS[f"pe_core_{size}_patch{CORE[size][0]}"], TEXT[size]
    tower = TextConfig(context=context, width=width, depth=depth, heads=heads, activation="gelu", pad_id=0)
    own = replace(image, classes=0, rotary_stretch=False, resize_rule="bilinear")
    return PECLIPConfig(own, tower, embed_dim=image.classes)


SQUASH: dict[str, Any] = {**HALF, "interpolation": "bilinear", "how": "stretch"}  # as Meta's code reads images
DIGITS_IMAGE = replace(PEConfig(**DIGITS, rotary_grid=(4, 4), pool_heads=4), classes=0)
DIGITS_TEXT = TextConfig(16, 1024, 64, 2, 4, mlp_ratio=2.0, activation="gelu", end_id=1023, pad_id=1023)
CLIP_PAPER = Paper(
    "pe_clip",
    PECLIPConfig,
    PECLIP,
    [
        *(Entry(f"pe_clip_{size}_patch{CORE[size][0]}", "pe_clip", _with_text(size), SQUASH) for size in CORE),
        Entry("pe_clip_digits", "pe_clip", PECLIPConfig(DIGITS_IMAGE, DIGITS_TEXT, 64), half(1)),
    ],
)
