"""AIMv2 (arXiv:2411.14402): a ViT with RMS norms, SwiGLU and no biases, trained to predict pixels and then words.

    model = vitlab.create("aimv2_large_patch14", classes=10)
    model.features(images)                     # (B, D): a learned query looks at every patch
    model = vitlab.load("hf-hub:apple/aimv2-large-patch14-224-lit")         # with a text tower, for zero-shot

There is no class token. The "native" networks compute sin-cos positions for the grid of each image; the others have
learned ones. The text tower learned beside a finished image tower (LiT, arXiv:2111.07991): a CLIP of AIMv2's blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import Activation, Block, SwiGLU
from vitlab.layers.edit import Edit
from vitlab.layers.patches import PatchEmbed
from vitlab.layers.positions import LearnedPositions, SinCosPositions, sincos_2d
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.clip import CLIP, MAX_SCALE, ProjectedConfig, TextTransformer
from vitlab.models.entry import OPENAI, Entry, Paper, half
from vitlab.models.plain import PlainConfig, PlainTransformer, new_token
from vitlab.models.two_towers import TextConfig
from vitlab.models.vit import init_weights


@dataclass(frozen=True)
class AIMv2Config(PlainConfig):
    hidden: int = 2816  # of the MLP
    eps: float = 1e-5
    qkv_bias: bool = False  # on the output projection too
    mlp_bias: bool = False
    positions: Literal["learned", "sincos"] = "learned"
    pooling: Literal["attention", "mean"] = "attention"  # timm reads the mean
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0

    fixed = (*("patch_size", "channels", "width", "depth", "heads", "hidden", "qkv_bias", "mlp_bias", "positions"),)

    def check(self) -> None:
        super().check()
        if self.hidden < 1:
            raise UsageError(f"hidden={self.hidden} must be at least 1.")
        if self.positions == "sincos" and self.width % 4:
            raise UsageError(f"sincos positions need a width that is a multiple of 4: use {-(-self.width // 4) * 4}.")

    @property
    def prefix(self) -> tuple[str, ...]:
        return ()

    @property
    def position_kind(self) -> str:
        return self.positions

    @property
    def mlp_hidden(self) -> int:
        return self.hidden

    @property
    def mlp_name(self) -> str:
        return "SwiGLU"

    @property
    def table_rule(self) -> str:
        return "bicubic_antialias"


class RMSPatchEmbed(PatchEmbed):
    """Patches, each divided by its root mean square."""

    def __init__(self, patch_size: int, channels: int, width: int, *, eps: float):
        super().__init__(patch_size, channels, width)
        self.norm_out = nn.RMSNorm(width, eps=eps)


class GridPositions(SinCosPositions):
    """Sin-cos positions computed for the grid of the image, whatever its size; nothing is resized."""

    def forward(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        return sincos_2d(grid, self.width, device=like.device).to(like.dtype)  # (1, N, D)


class QueryPool(nn.Module):
    """One learned query, itself not projected, looks at every patch: (B, N, D) -> (B, D)."""

    def __init__(self, width: int, heads: int, *, bias: bool):
        super().__init__()
        self.heads = heads
        self.query = new_token(width)
        self.kv = nn.Linear(width, 2 * width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, patches: Tensor) -> Tensor:
        q = torch.unflatten(self.query.expand(patches.shape[0], -1, -1), -1, (self.heads, -1)).transpose(
            1, 2
        )  # (B, h, 1, d)
        k, v = self.kv(patches).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, h, N, d)
        x = F.scaled_dot_product_attention(q, k, v)  # (B, h, 1, d)
        return self.proj(x.transpose(1, 2).flatten(2))[:, 0]  # (B, D)


class AIMv2(PlainTransformer):
    """z_0 = RMS(x_p E) + E_pos;  z_l = block(z_{l-1});  y = pool(RMS(z_L))."""

    family = "aimv2"

    def __init__(self, config: AIMv2Config):
        super().__init__(config)
        c = config
        self.patch_embed = RMSPatchEmbed(c.patch_size, c.channels, c.width, eps=c.eps)
        positions = LearnedPositions if c.positions == "learned" else GridPositions
        self.positions = positions(c.grid, c.width, prefix=0, rule=c.table_rule)
        self.blocks = nn.ModuleList(_block(c, layer) for layer in range(c.depth))
        self.norm = nn.RMSNorm(c.width, eps=c.eps)
        if c.pooling == "attention":
            self.pool = QueryPool(c.width, c.heads, bias=c.qkv_bias)
        self.apply(init_weights)
        self.add_head()

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        assert self.positions is not None
        z = mark(trace, "positions", z + mark(trace, "position_embedding", self.positions(layout.grid, like=z)))
        return self.leave_out(z, layout, trace, keep)


def _block(c: AIMv2Config, layer: int) -> Block:
    attention = Attention(
        *(c.width, c.heads),
        qkv_bias=c.qkv_bias,
        proj_bias=c.qkv_bias,
        attention_dropout=c.attention_dropout,
    )
    mlp = SwiGLU(c.width, c.hidden, bias=c.mlp_bias)
    rate = c.stochastic_depth * layer / max(c.depth - 1, 1)
    return Block(attention, mlp, c.width, rms=True, eps=c.eps, stochastic_depth=rate)


# ---- with a text tower


@dataclass(frozen=True)
class AIMv2TextConfig(TextConfig):
    width: int = 768
    heads: int = 6
    mlp_ratio: float = 8 / 3  # hidden channels / width
    activation: Activation = "silu"
    qkv_bias: bool = False  # on the output projection too
    mlp_bias: bool = False

    @property
    def mlp_name(self) -> str:
        return "SwiGLU"


class AIMv2Text(TextTransformer):
    """CLIP's text tower of AIMv2's blocks: causal, read where the text ends."""

    config: AIMv2TextConfig

    def new_block(self) -> Block:
        c = self.config
        attention = Attention(c.width, c.heads, qkv_bias=c.qkv_bias, proj_bias=c.qkv_bias)
        mlp = SwiGLU(c.width, c.mlp_hidden, activation=c.activation, bias=c.mlp_bias)
        return Block(attention, mlp, c.width, rms=True, eps=c.eps)

    def new_norm(self) -> nn.Module:
        return nn.RMSNorm(self.config.width, eps=self.config.eps)

    def init_text(self) -> None:
        self.blocks.apply(init_weights)
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)


@dataclass(frozen=True)
class AIMv2LiTConfig(ProjectedConfig):
    image: AIMv2Config = field(default_factory=lambda: AIMv2Config(classes=0, patch_size=14))
    text: AIMv2TextConfig = field(default_factory=AIMv2TextConfig)
    embed_dim: int = 768

    fixed = (*ProjectedConfig.fixed, "text.qkv_bias", "text.mlp_bias")


class AIMv2LiT(CLIP):
    """logits = scale * cos(image, text), with a scale between 1 and 100."""

    family = "aimv2_lit"
    image_tower, text_tower = AIMv2, AIMv2Text

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """Patches after the last norm, which all of them go through."""
        return self.image.forward_features(images, trace=trace, reducer=reducer, edit=edit)

    @property
    def scale(self) -> Tensor:
        return self.log_scale.clamp(0.0, math.log(MAX_SCALE)).exp() if self.bias is None else super().scale


# ---- names

SIZES = {  # D, L, h, hidden: Table 1 and the released configs
    "large": (1024, 24, 8, 2816),
    "huge": (1536, 24, 12, 4096),
    "1b": (2048, 24, 16, 5632),
    "3b": (3072, 24, 24, 8192),
}
CROP = {**OPENAI, "interpolation": "bicubic", "how": "crop"}
SMALL: dict[str, Any] = dict(patch_size=2, channels=1, width=64, depth=4, heads=4, hidden=128)
DIGITS = AIMv2Config((8, 8), classes=10, **SMALL)
DIGITS_TEXT = AIMv2TextConfig(16, 1024, 64, 2, 4, mlp_ratio=2.0, end_id=1023, pad_id=1023)


def _entry(size: str) -> Entry:
    width, depth, heads, hidden = SIZES[size]
    config = AIMv2Config(patch_size=14, width=width, depth=depth, heads=heads, hidden=hidden)
    name = f"aimv2_{size}_patch14"
    return Entry(name, "aimv2", config, CROP, (f"{name}_224", f"AIMv2-{size[0].upper()}/14"))


PAPER = Paper("aimv2", AIMv2Config, AIMv2, [*map(_entry, SIZES), Entry("aimv2_digits", "aimv2", DIGITS, half(1))])
LIT_PAPER = Paper(
    "aimv2_lit",
    AIMv2LiTConfig,
    AIMv2LiT,
    [
        Entry(
            *("aimv2_lit_large_patch14", "aimv2_lit"),
            AIMv2LiTConfig(AIMv2Config(classes=0, patch_size=14, width=1024, depth=24, heads=8)),
            CROP,
            ("aimv2-large-patch14-224-lit",),
        ),
        Entry(
            *("aimv2_lit_digits", "aimv2_lit"),
            AIMv2LiTConfig(AIMv2Config((8, 8), classes=0, **SMALL), DIGITS_TEXT, 64),
            half(1),
        ),
    ],
)
