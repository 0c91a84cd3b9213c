"""The Vision Transformer: an image is worth 16 x 16 words (arXiv:2010.11929), eqs. 1-4.

    model = vit_base(classes=10)
    logits = model(images)                     # (B, 3, 224, 224) -> (B, 10)

Run `vitlab inspect vit_base` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block, SwiGLU
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.layers.patches import ConvStem, PatchEmbed
from vitlab.layers.pooling import NORM_AFTER, AttentionPool
from vitlab.layers.positions import (
    LearnedPositions,
    RelativeBias,
    Rotary,
    SinCosPositions,
    relative_index,
    rotary_2d,
)
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.entry import HALF, Entry, Paper, half
from vitlab.models.plain import AttentionBias, PlainTransformer, init_head, new_head, new_token
from vitlab.models.vit_config import PATCH_SIZES, SIZES, SMALL_IMAGES, VARIANTS, ViTConfig


class VisionTransformer(PlainTransformer):
    """z_0 = [x_class; x_p E] + E_pos;  z_l = block(z_{l-1});  y = LN(z_L)[class];  logits = head(y)."""

    family = "vit"

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        c = config
        if c.stem.kind == "conv":
            self.patch_embed = ConvStem(c.patch_size, c.channels, c.width, eps=c.norm.eps, pad=c.stem.pad)
        elif c.stem.kind == "hybrid":
            self.patch_embed = HybridStem(c.patch_size, c.channels, c.width, eps=c.norm.eps, pad=c.stem.pad)
        else:
            self.patch_embed = PatchEmbed(
                *(c.patch_size, c.channels, c.width),
                bias=c.stem.patch_bias,
                norms=c.stem.patch_norms,
                eps=c.norm.eps,
                pad=c.stem.pad,
                crop=c.stem.crop,
            )
        self.class_token = new_token(c.width) if c.tokens.class_token else None
        self.distill_token = new_token(c.width) if c.tokens.distill_token else None
        self.register_tokens = new_token(c.width, c.tokens.registers) if c.tokens.registers else None
        if c.tokens.mask_token:
            self.register_buffer("mask_token", torch.zeros(1, c.width))
        if c.positions.kind in ("learned", "sincos"):  # rotary and relative positions stand inside the blocks
            absolute = LearnedPositions if c.positions.kind == "learned" else SinCosPositions
            self.positions = absolute(c.grid, c.width, prefix=c.positioned_prefix, rule=c.positions.resize_rule)
        self.dropout = nn.Dropout(c.drop.dropout)
        if c.norm.norm_pre:
            self.norm_pre = nn.LayerNorm(c.width, eps=c.norm.eps)
        self.blocks = nn.ModuleList(build_block(c, layer) for layer in range(c.depth))
        if c.final_norm == "yes":
            self.norm = nn.LayerNorm(c.width, eps=c.norm.eps)
        if c.head.pooling == "attention":
            self.pool = AttentionPool(c.width, c.heads, c.mlp_hidden, activation=c.mlp.activation, eps=c.norm.eps)
        if c.head.pooling in NORM_AFTER:
            self.head_norm = nn.LayerNorm(c.width, eps=c.norm.eps)
        self.pre_logits = nn.Linear(super().feature_width, c.head.head_hidden) if c.head.head_hidden else None
        self.head = new_head(self.feature_width, c.classes)
        self.head_distill = new_head(c.width, c.classes) if c.tokens.distill_token else None
        self.apply(init_weights)
        if isinstance(self.patch_embed, HybridStem):
            self.patch_embed.init_filters()
        for head in (self.head, self.head_distill):
            init_head(head)

    @property
    def feature_width(self) -> int:
        return self.config.head.head_hidden or super().feature_width

    @property
    def linear_head(self) -> nn.Linear | None:
        return super().linear_head if self.head_distill is None else None

    @property
    def traceable(self) -> tuple[str, ...]:
        steps = super().traceable
        if self.head_distill is not None:
            return tuple(step for step in steps if step != "pool")
        if self.pre_logits is None:
            return steps
        after = steps.index("pool") + 1
        return *steps[:after], "pre_logits", *steps[after:]

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Eq. 1: patches, prefix tokens, positions; as asked, or in training, fewer patches, and which were kept."""
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        prefix = [t for t in (self.class_token, self.distill_token, self.register_tokens) if t is not None]
        if prefix:
            z = mark(trace, "prefix", torch.cat([*(t.expand(z.shape[0], -1, -1) for t in prefix), z], dim=1))
        if self.positions is not None:
            table = self.positions(layout.grid, like=z)  # (1, positioned prefix + N, D)
            without = len(layout.prefix) - self.config.positioned_prefix
            if without:  # registers (and perhaps the class token) stand nowhere: zeros between prefix and patches
                n = self.config.positioned_prefix
                table = torch.cat([table[:, :n], table.new_zeros(1, without, table.shape[-1]), table[:, n:]], dim=1)
            z = mark(trace, "positions", z + mark(trace, "position_embedding", table))
        z, kept = self.leave_out(z, layout, trace, keep)
        z = self.dropout(z)
        return (z if self.norm_pre is None else mark(trace, "norm_pre", self.norm_pre(z))), kept

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        c, prefix = self.config, len(layout.prefix)
        if c.positions.kind == "relative":
            if kept is not None:
                raise UsageError('a relative bias belongs to a full grid of patches: use positions="sincos".')
            index = relative_index(layout.grid, prefix, z.device)  # (N, N)
            tables = [cast(Block, block).attention.relative for block in self.blocks]
            return None, lambda layer: None if (table := tables[layer]) is None else table(index, layout.grid)
        if c.positions.kind != "rotary":
            return super().attention_positions(layout, kept, z)
        rope = rotary_2d(layout.grid, c.head_width, c.positions.rotary_base, prefix, z.device)
        return (rope if kept is None else rope.of_tokens(kept)), lambda layer: None

    def forward_head(
        self,
        tokens: Tensor,
        *,
        pre_logits: bool = False,
        sizes: Tensor | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Tokens (B, N, D) -> logits (B, classes); `pre_logits=True` or classes=0 stops at the pooled features."""
        if self.head_distill is not None and not pre_logits and self.config.classes:
            first, second = self.forward_heads(tokens)
            return mark(trace, "head", (first + second) / 2)  # DeiT: the mean of the two at inference
        y = mark(trace, "pool", self.pooled(tokens, sizes))  # (B, D)
        if self.pre_logits is not None:
            y = mark(trace, "pre_logits", torch.tanh(self.pre_logits(y)))
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def forward_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The class token's and the distillation token's logits, each (B, classes)."""
        if self.head_distill is None:
            raise UsageError("this model has one head: build it with distill_token=True to have two.")
        return self.head(tokens[:, 0]), self.head_distill(tokens[:, 1])

    def reset_classifier(self, classes: int) -> None:
        super().reset_classifier(classes)
        if self.head_distill is not None:
            like = next(self.parameters())
            self.head_distill = new_head(self.config.width, classes).to(like.device, like.dtype)
            init_head(self.head_distill)


def build_block(c: ViTConfig, layer: int) -> Block:
    relative = RelativeBias(c.grid, c.heads, prefix=len(c.prefix)) if c.positions.kind == "relative" else None
    attention = Attention(
        *(c.width, c.heads, c.head_dim),
        qkv_bias=c.attention.qkv_bias,
        qk_norm=c.attention.qk_norm,
        eps=c.norm.eps,
        attention_dropout=c.drop.attention_dropout,
        dropout=c.drop.dropout,
        path=c.attention.kind,
        relative=relative,
    )
    if c.mlp.kind == "swiglu":
        mlp = SwiGLU(c.width, c.mlp_hidden, dropout=c.drop.dropout)
    else:
        mlp = MLP(c.width, c.mlp_hidden, activation=c.mlp.activation, dropout=c.drop.dropout)
    return Block(
        *(attention, mlp, c.width),
        norm=c.norm.kind,
        eps=c.norm.eps,
        layer_scale=c.residual.layer_scale,
        stochastic_depth=c.residual.stochastic_depth * layer / max(c.depth - 1, 1),
    )


def init_weights(module: nn.Module) -> None:
    """As the paper's code starts: Xavier for matrices, fan-in for the patches; small heads; biases at zero."""
    if isinstance(module, nn.Conv2d):
        nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    parts: tuple[Tensor, ...] = ()
    if isinstance(module, Attention):  # queries, keys and values are three matrices in one
        parts = module.qkv.weight.chunk(3)
    elif isinstance(module, AttentionPool):
        parts = module.kv.weight.chunk(2)
    for part in parts:
        nn.init.xavier_uniform_(part)


def _vit(variant: str, patch_size: int, **options: Any) -> VisionTransformer:
    return VisionTransformer(ViTConfig(**VARIANTS[variant], patch_size=patch_size).with_options(**options))


def vit_tiny(patch_size: int = 16, **options: Any) -> VisionTransformer:
    return _vit("Ti", patch_size, **options)


def vit_small(patch_size: int = 16, **options: Any) -> VisionTransformer:
    return _vit("S", patch_size, **options)


def vit_base(patch_size: int = 16, **options: Any) -> VisionTransformer:
    return _vit("B", patch_size, **options)


def vit_large(patch_size: int = 16, **options: Any) -> VisionTransformer:
    return _vit("L", patch_size, **options)


def vit_huge(patch_size: int = 14, **options: Any) -> VisionTransformer:
    return _vit("H", patch_size, **options)


def _entries() -> list[Entry]:
    entries: list[Entry] = []
    for size, (letter, short_patch, options) in SIZES.items():
        for patch in PATCH_SIZES:
            aliases = (f"ViT-{letter}/{patch}", f"{letter}/{patch}", *([f"vit_{size}"] if patch == short_patch else []))
            config = ViTConfig(**options, patch_size=patch)
            entries.append(Entry(f"vit_{size}_patch{patch}", "vit", config, HALF, aliases))
    for name, options in SMALL_IMAGES.items():
        config = ViTConfig().with_options(**options)
        entries.append(Entry(name, "vit", config, half(config.channels)))
    return entries


PAPER = Paper("vit", ViTConfig, VisionTransformer, _entries())
