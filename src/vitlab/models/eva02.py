"""EVA-02 (arXiv:2303.11331): a ViT with SwiGLU, rotary positions beside a learned table, and keys without a bias.

    model = vitlab.load("hf-hub:timm/eva02_base_patch14_448.mim_in22k_ft_in22k_in1k")

Rotary positions are stretched to the grid of the pre-training, so larger images turn by the same angles in finer steps.
B and L have a norm inside the MLP; the image towers of EVA-02-CLIP also one between the heads and their projection.
EVA-02-CLIP (arXiv:2303.15389) is a CLIP around such a tower, whose projection has a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention, Path
from vitlab.layers.block import Block, SwiGLU
from vitlab.layers.patches import PatchEmbed
from vitlab.layers.positions import LearnedPositions, Rotary, rotary_scaled, rotary_speeds
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.clip import CLIP, ProjectedConfig
from vitlab.models.entry import CLIP_CROP, Entry, Paper, half
from vitlab.models.plain import AttentionBias, PlainConfig, PlainTransformer, new_token, with_prefix
from vitlab.models.two_towers import TextConfig
from vitlab.models.vit import init_weights


@dataclass(frozen=True)
class EVA02Config(PlainConfig):
    patch_size: int = 14
    mlp_ratio: float = 8 / 3  # hidden channels / width
    mlp_norm: bool = False  # a LayerNorm inside the MLP
    attention_norm: bool = False  # one between the heads and their projection
    qkv_bias: bool | Literal["qv"] = "qv"  # "qv": all but the keys
    pooling: Literal["class", "mean", "mean_norm"] = "mean_norm"
    rotary_grid: tuple[int, int] = (16, 16)  # of the pre-training: 224 / 14
    rotary_base: float = 10000.0
    eps: float = 1e-6
    attention: Path = "auto"
    dropout: float = 0.0  # after positions, projection and MLP layers
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0

    fixed = (
        *("patch_size", "channels", "width", "depth", "heads", "mlp_ratio", "mlp_norm", "attention_norm", "qkv_bias"),
    )

    def check(self) -> None:
        super().check()
        check_rotary(self, self.rotary_grid, self.rotary_base)

    @property
    def table_rule(self) -> str:
        return "bicubic_antialias"

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class",)

    @property
    def position_kind(self) -> str:
        return "learned + rotary"

    @property
    def mlp_name(self) -> str:
        return "SwiGLU with a LayerNorm" if self.mlp_norm else "SwiGLU"


class EVA02(PlainTransformer):
    """z_0 = [x_class; x_p E] + E_pos;  z_l = block(z_{l-1}, angles of the patches);  y = LN(mean of patches)."""

    family = "eva02"

    def __init__(self, config: EVA02Config):
        super().__init__(config)
        c = config
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.class_token = new_token(c.width)
        self.positions = LearnedPositions(c.grid, c.width, prefix=1, rule=c.table_rule)
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(build_block(c, layer) for layer in range(c.depth))
        if c.pooling == "mean_norm":
            self.head_norm = nn.LayerNorm(c.width, eps=c.eps)
        else:
            self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.apply(init_weights)
        self.add_head()

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert self.positions is not None
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        z = mark(trace, "prefix", with_prefix(z, self.class_token))
        z = mark(trace, "positions", z + mark(trace, "position_embedding", self.positions(layout.grid, like=z)))
        return self.leave_out(self.dropout(z), layout, trace, keep)

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        c: EVA02Config = self.config
        speeds = rotary_speeds(c.head_width, c.rotary_base, z.device)
        rope = rotary_scaled(layout.grid, c.rotary_grid, speeds, len(layout.prefix))
        return (rope if kept is None else rope.of_tokens(kept)), lambda layer: None


def build_block(c: EVA02Config, layer: int) -> Block:
    attention = Attention(
        *(c.width, c.heads),
        qkv_bias=c.qkv_bias,
        inner_norm=c.attention_norm,
        eps=c.eps,
        attention_dropout=c.attention_dropout,
        dropout=c.dropout,
        path=c.attention,
    )
    mlp = SwiGLU(c.width, c.mlp_hidden, norm_eps=c.eps if c.mlp_norm else None, dropout=c.dropout)
    rate = c.stochastic_depth * layer / max(c.depth - 1, 1)
    return Block(attention, mlp, c.width, eps=c.eps, stochastic_depth=rate)


def check_rotary(c: PlainConfig, grid: tuple[int, int], base: float) -> None:
    """Refuse what cannot turn."""
    if c.head_width % 4:
        raise UsageError(
            f"rotary positions turn pairs of channels by row and by column, so width / heads must be a multiple of 4, "
            f"not {c.head_width}: use width={c.heads * -(-c.head_width // 4) * 4}."
        )
    if min(grid) < 1 or base <= 0:
        raise UsageError("rotary_grid and rotary_base must be greater than 0.")


# ---- with a text tower


@dataclass(frozen=True)
class EVA02CLIPConfig(ProjectedConfig):
    image: EVA02Config = field(default_factory=lambda: EVA02Config(classes=0, pooling="class"))
    text: TextConfig = field(default_factory=lambda: TextConfig(activation="gelu"))

    @property
    def projects_with_bias(self) -> bool:
        return True


class EVA02CLIP(CLIP):
    """logits = scale * cos(image, text): CLIP's text tower beside EVA-02's image tower."""

    family = "eva02_clip"
    image_tower = EVA02


# ---- names

LARGE: dict[str, Any] = dict(mlp_norm=True)  # B and L
SIZES: dict[str, dict[str, Any]] = {  # as timm names them; Ti to L of the paper
    "tiny": dict(width=192, depth=12, heads=3),
    "small": dict(width=384, depth=12, heads=6),
    "base": dict(width=768, depth=12, heads=12, **LARGE),
    "large": dict(width=1024, depth=24, heads=16, mlp_ratio=2730 / 1024, **LARGE),  # the released one rounds down
}
IN_CLIP: dict[str, Any] = dict(pooling="class", attention_norm=True)  # the image towers of EVA-02-CLIP
MODELS: dict[str, EVA02Config] = {
    **{f"eva02_{size}_patch14": EVA02Config(**options) for size, options in SIZES.items()},
    "eva02_base_patch16_clip": EVA02Config(**SIZES["base"], **IN_CLIP, patch_size=16, classes=512),
    "eva02_large_patch14_clip": EVA02Config(**SIZES["large"], **IN_CLIP, classes=768),
}
DIGITS: dict[str, Any] = dict(image_size=8, patch_size=2, channels=1, classes=10, width=64, depth=4, heads=4)

PAPER = Paper(
    "eva02",
    EVA02Config,
    EVA02,
    [
        *(Entry(name, "eva02", config, CLIP_CROP) for name, config in MODELS.items()),
        Entry("eva02_digits", "eva02", EVA02Config(**DIGITS, rotary_grid=(4, 4), mlp_norm=True), half(1)),
    ],
)


def _with_text(size: str, text: tuple[int, int, int]) -> EVA02CLIPConfig:
    """The image tower of this name, and a text tower of this width, depth and heads."""
    image, (width, depth, heads) = MODELS[f"eva02_{size}_clip"], text
    tower = TextConfig(width=width, depth=depth, heads=heads, activation="gelu")
    return EVA02CLIPConfig(replace(image, classes=0), tower, embed_dim=image.classes)


CLIPS = {
    "eva02_clip_base_patch16": _with_text("base_patch16", (512, 12, 8)),
    "eva02_clip_large_patch14": _with_text("large_patch14", (768, 12, 12)),
}
DIGITS_IMAGE = replace(EVA02Config(**DIGITS, **IN_CLIP, rotary_grid=(4, 4)), classes=0)
DIGITS_TEXT = TextConfig(16, 1024, 64, 2, 4, mlp_ratio=2.0, activation="gelu", end_id=1023, pad_id=1023)
CLIP_PAPER = Paper(
    "eva02_clip",
    EVA02CLIPConfig,
    EVA02CLIP,
    [
        *(Entry(name, "eva02_clip", config, CLIP_CROP) for name, config in CLIPS.items()),
        Entry("eva02_clip_digits", "eva02_clip", EVA02CLIPConfig(DIGITS_IMAGE, DIGITS_TEXT, 64), half(1)),
    ],
)
