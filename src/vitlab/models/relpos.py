"""timm's ViTs with relative positions by a small network: an MLP of the offset, on a log scale, is added to Q K^T.

    model = vitlab.create("vit_relpos_small_patch16", classes=10)

The idea is Swin v2's (arXiv:2111.09883, sec. 3.3); the networks are timm's own. An MLP knows every offset, so images of
another size need no resizing. `shared`: one MLP for all layers (srelpos).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Activation, Block
from vitlab.layers.patches import PatchEmbed
from vitlab.layers.positions import Rotary, relative_index
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.entry import IMAGENET_CROP, Entry, Paper, half
from vitlab.models.plain import AttentionBias, PlainConfig, PlainTransformer, new_token
from vitlab.models.vit import init_weights

CROP = {**IMAGENET_CROP, "resize": 248}  # nine tenths of it are kept


@dataclass(frozen=True)
class RelPosConfig(PlainConfig):
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    eps: float = 1e-6
    qkv_bias: bool = False
    layer_scale: float = 1e-6  # start value; 0 = none
    norm: Literal["pre", "branch"] = "pre"  # branch: the norm ends each branch (rpn)
    class_token: bool = False
    pooling: Literal["class", "mean", "mean_norm"] = "mean_norm"
    bias_hidden: int = 128  # width of the MLP of offsets
    shared: bool = False
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0

    fixed = (
        *("patch_size", "channels", "width", "depth", "heads", "mlp_ratio", "qkv_bias", "norm", "class_token"),
        *("bias_hidden", "shared"),
    )

    def check(self) -> None:
        super().check()
        if self.layer_scale < 0 or self.bias_hidden < 1:
            raise UsageError("layer_scale must be 0 or more, and bias_hidden at least 1.")
        if self.pooling == "class" and not self.class_token:
            raise UsageError('pooling="class" needs class_token=True; without one use pooling="mean".')

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class",) * self.class_token

    @property
    def position_kind(self) -> str:
        return "relative"

    @property
    def post_norm(self) -> bool:
        return self.norm == "branch"


class OffsetMLP(nn.Module):
    """The offset (rows, columns) between query and key -> a number per head: two layers with a ReLU between."""

    def __init__(self, heads: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(2, hidden)
        self.fc2 = nn.Linear(hidden, heads)

    def forward(self, layout: TokenLayout, like: Tensor) -> Tensor:
        """(1, h, N, N); prefix tokens stand nowhere, so nothing is added for them."""
        rows, columns = layout.grid
        down, right = (torch.arange(1 - n, n, dtype=torch.float32, device=like.device) for n in (rows, columns))
        offsets = torch.stack(torch.meshgrid(down, right, indexing="ij"), dim=-1)  # (2 rows - 1, 2 columns - 1, 2)
        offsets = (offsets.sign() * offsets.abs().log1p()).to(like.dtype)
        table = self.fc2(F.relu(self.fc1(offsets))).flatten(0, 1)  # (offsets, h)
        bias = table[relative_index(layout.grid, 0, like.device)].permute(2, 0, 1)[None]  # (1, h, N, N)
        n = len(layout.prefix)
        return F.pad(bias, (n, 0, n, 0))


class RelPosViT(PlainTransformer):
    """z_0 = x_p E;  softmax(Q K^T / sqrt(d) + MLP(offsets)) in every layer."""

    family = "relpos"

    def __init__(self, config: RelPosConfig):
        super().__init__(config)
        c = config
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.class_token = new_token(c.width) if c.class_token else None
        self.offsets = nn.ModuleList(OffsetMLP(c.heads, c.bias_hidden) for _ in range(1 if c.shared else c.depth))
        self.blocks = nn.ModuleList(_block(c, layer) for layer in range(c.depth))
        if c.pooling == "mean_norm":
            self.head_norm = nn.LayerNorm(c.width, eps=c.eps)
        else:
            self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.apply(init_weights)
        self.add_head()

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        if self.class_token is not None:
            z = mark(trace, "prefix", torch.cat([self.class_token.expand(z.shape[0], -1, -1), z], dim=1))
        return self.leave_out(z, layout, trace, keep)

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        if kept is not None:
            raise UsageError("a relative bias belongs to a full grid of patches: set patch dropout to 0.")
        tables = cast("list[OffsetMLP]", self.offsets)
        if self.config.shared:
            bias = tables[0](layout, z)  # (1, h, N, N)
            return None, lambda layer: bias
        return None, lambda layer: tables[layer](layout, z)


def _block(c: RelPosConfig, layer: int) -> Block:
    attention = Attention(
        *(c.width, c.heads),
        qkv_bias=c.qkv_bias,
        eps=c.eps,
        attention_dropout=c.attention_dropout,
        dropout=c.dropout,
    )
    mlp = MLP(c.width, c.mlp_hidden, activation=c.activation, dropout=c.dropout)
    rate = c.stochastic_depth * layer / max(c.depth - 1, 1)
    scale = c.layer_scale if c.norm == "pre" else 0.0
    return Block(attention, mlp, c.width, norm=c.norm, eps=c.eps, layer_scale=scale, stochastic_depth=rate)


SIZES = {"small": (384, 6), "medium": (512, 8), "base": (768, 12)}
DIGITS = RelPosConfig((8, 8), patch_size=2, channels=1, classes=10, width=64, depth=4, heads=4, mlp_ratio=2.0)
PAPER = Paper(
    *("relpos", RelPosConfig, RelPosViT),
    [
        *(
            Entry(
                f"vit_relpos_{size}_patch16",
                "relpos",
                RelPosConfig(width=width, heads=heads),
                CROP,
                (f"vit_relpos_{size}_patch16_224",),
            )
            for size, (width, heads) in SIZES.items()
        ),
        Entry("vit_relpos_digits", "relpos", DIGITS, half(1)),
    ],
)
