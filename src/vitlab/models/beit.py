"""BEiT (arXiv:2106.08254), BEiT v2 (arXiv:2208.06366) and data2vec's vision network: a ViT whose positions are a bias.

    model = vitlab.create("beit_base_patch16", classes=10)

Each layer adds a learned number per head and per offset between two patches to Q K^T; the class token has three numbers
of its own. Keys have no bias, LayerScale damps both branches, and the head reads the mean of the patches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Activation, Block
from vitlab.layers.patches import PatchEmbed
from vitlab.layers.positions import LearnedPositions, RelativeBias, Rotary, relative_index
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.entry import HALF, Entry, Paper, half
from vitlab.models.plain import AttentionBias, PlainConfig, PlainTransformer, new_token
from vitlab.models.vit import init_weights


@dataclass(frozen=True)
class BEiTConfig(PlainConfig):
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    eps: float = 1e-6  # transformers has 1e-12
    layer_scale: float = 0.1  # start value; 0 = none
    pooling: Literal["mean_norm", "mean", "class"] = "mean_norm"  # mean: an encoder saved without its head
    layer_bias: bool = True  # a bias table in each layer
    shared_bias: bool = False  # one table for all layers, as in pre-training
    absolute_positions: bool = False
    mask_token: bool = False  # files of pre-training carry one; kept so that they can be written back
    bias_resize: Literal["bilinear", "bicubic"] = "bicubic"  # of the tables, to another grid; transformers: bilinear
    swapped_bias: bool = False  # transformers reads the table of a grid that is no square with rows as columns
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0

    fixed = (
        *("patch_size", "channels", "width", "depth", "heads", "mlp_ratio", "layer_bias", "shared_bias"),
        *("absolute_positions", "swapped_bias"),
    )

    def check(self) -> None:
        super().check()
        if self.layer_scale < 0:
            raise UsageError(f"layer_scale={self.layer_scale} must be 0 or more.")

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class",)

    @property
    def position_kind(self) -> str:
        relative = self.layer_bias or self.shared_bias
        return " + ".join(["learned"] * self.absolute_positions + ["relative"] * relative) or "none"

    @property
    def table_rule(self) -> str:
        return "bicubic"

    @property
    def relative_rule(self) -> str:
        return self.bias_resize

    def table_grid(self, key: str) -> tuple[int, int]:
        rows, columns = self.grid
        return (columns, rows) if self.swapped_bias and key.endswith("relative.table") else (rows, columns)


class BEiT(PlainTransformer):
    """z_0 = [x_class; x_p E];  softmax(Q K^T / sqrt(d) + B_l) in every layer;  y = LN(mean of the patches)."""

    family = "beit"

    def __init__(self, config: BEiTConfig):
        super().__init__(config)
        c = config
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.class_token = new_token(c.width)
        if c.mask_token:
            self.register_buffer("mask_token", torch.zeros(1, 1, c.width))
        if c.absolute_positions:
            self.positions = LearnedPositions(c.grid, c.width, prefix=1, rule=c.table_rule)
        self.dropout = nn.Dropout(c.dropout)
        self.relative = _bias(c) if c.shared_bias else None
        self.blocks = nn.ModuleList(_block(c, layer) for layer in range(c.depth))
        if c.pooling == "class":
            self.norm = nn.LayerNorm(c.width, eps=c.eps)
        elif c.pooling == "mean_norm":
            self.head_norm = nn.LayerNorm(c.width, eps=c.eps)
        self.apply(init_weights)
        self.add_head()

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        z = mark(trace, "prefix", torch.cat([self.class_token.expand(z.shape[0], -1, -1), z], dim=1))
        if self.positions is not None:
            z = mark(trace, "positions", z + mark(trace, "position_embedding", self.positions(layout.grid, like=z)))
        z, kept = self.leave_out(z, layout, trace, keep)
        return self.dropout(z), kept

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        if not (self.config.layer_bias or self.config.shared_bias):
            return super().attention_positions(layout, kept, z)
        if kept is not None:
            raise UsageError("a relative bias belongs to a full grid of patches: set patch dropout to 0.")
        index = relative_index(layout.grid, len(layout.prefix), z.device)  # (N, N)
        shared = None if self.relative is None else self.relative(index, layout.grid)  # (1, h, N, N)

        def bias_at(layer: int) -> Tensor | None:
            table = cast(Block, self.blocks[layer]).attention.relative
            own = None if table is None else table(index, layout.grid)
            return shared if own is None else own if shared is None else own + shared

        return None, bias_at


def _bias(c: BEiTConfig) -> RelativeBias:
    return RelativeBias(c.table_grid("relative.table"), c.heads, prefix=1, rule=c.bias_resize)


def _block(c: BEiTConfig, layer: int) -> Block:
    attention = Attention(
        *(c.width, c.heads),
        qkv_bias="qv",
        eps=c.eps,
        attention_dropout=c.attention_dropout,
        dropout=c.dropout,
        relative=_bias(c) if c.layer_bias else None,
    )
    mlp = MLP(c.width, c.mlp_hidden, activation=c.activation, dropout=c.dropout)
    rate = c.stochastic_depth * layer / max(c.depth - 1, 1)
    return Block(attention, mlp, c.width, eps=c.eps, layer_scale=c.layer_scale, stochastic_depth=rate)


BASE = BEiTConfig()
LARGE = BEiTConfig(width=1024, depth=24, heads=16, layer_scale=1e-5)
DIGITS = BEiTConfig((8, 8), patch_size=2, channels=1, classes=10, width=64, depth=4, heads=4, mlp_ratio=2.0)
PAPER = Paper(
    *("beit", BEiTConfig, BEiT),
    [
        Entry("beit_base_patch16", "beit", BASE, HALF, ("BEiT-B/16", "beit_base_patch16_224")),
        Entry("beit_large_patch16", "beit", LARGE, HALF, ("BEiT-L/16", "beit_large_patch16_224")),
        Entry("beit_digits", "beit", DIGITS, half(1)),
    ],
)
