"""The Vision Transformer: an image is worth 16 x 16 words (arXiv:2010.11929), eqs. 1-4.

    model = vit_base(classes=10)
    logits = model(images)                     # (B, 3, 224, 224) -> (B, 10)

Run `vitlab inspect vit_base` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import BLOCK_KINDS, MLP, Block, SwiGLU, run
from vitlab.layers.patches import ConvStem, PatchEmbed, check_images, drop_patches, keep_patches
from vitlab.layers.pooling import AttentionPool, pool_tokens
from vitlab.layers.positions import LearnedPositions, RelativeBias, SinCosPositions, relative_index, rotary_2d
from vitlab.layers.reduced import to_map
from vitlab.layers.reducer import Reducer, Reducing
from vitlab.layers.trace import FROM_HEADS, TokenLayout, Trace, mark
from vitlab.models.base import Capability, Network
from vitlab.models.entry import HALF, Entry, Paper, half
from vitlab.models.vit_config import PATCH_SIZES, SIZES, SMALL_IMAGES, VARIANTS, ViTConfig


class VisionTransformer(Network):
    """z_0 = [x_class; x_p E] + E_pos;  z_l = block(z_{l-1});  y = LN(z_L)[class];  logits = head(y)."""

    family = "vit"

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = c = config
        self.patch_dropout = c.drop.patch_dropout  # a training loop may change it on the way

        if c.stem.kind == "conv":
            self.patch_embed = ConvStem(c.patch_size, c.channels, c.width, eps=c.norm.eps, pad=c.stem.pad)
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
        self.positions = None  # rotary and relative positions stand inside the blocks
        if c.positions.kind in ("learned", "sincos"):
            absolute = LearnedPositions if c.positions.kind == "learned" else SinCosPositions
            self.positions = absolute(c.grid, c.width, prefix=c.positioned_prefix, rule=c.positions.resize_rule)
        self.dropout = nn.Dropout(c.drop.dropout)
        self.norm_pre = nn.LayerNorm(c.width, eps=c.norm.eps) if c.norm.norm_pre else None
        self.blocks = nn.ModuleList(build_block(c, layer) for layer in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=c.norm.eps) if c.final_norm == "yes" else None

        self.pool = None
        if c.head.pooling == "attention":
            self.pool = AttentionPool(c.width, c.heads, c.mlp_hidden, activation=c.mlp.activation, eps=c.norm.eps)
        self.head_norm = nn.LayerNorm(c.width, eps=c.norm.eps) if c.head.pooling == "mean_norm" else None
        self.pre_logits = nn.Linear(self.pooled_width, c.head.head_hidden) if c.head.head_hidden else None
        self.head = _head(self.feature_width, c.classes)
        self.head_distill = _head(c.width, c.classes) if c.tokens.distill_token else None
        self.apply(init_weights)
        for head in (self.head, self.head_distill):
            _init_head(head)

    @property
    def capabilities(self) -> frozenset[Capability]:
        able = super().capabilities | {Capability.TOKENS}
        full_grid = self.config.positions.kind in ("rotary", "relative")  # these positions need every patch
        return able if full_grid else able | {Capability.REDUCE}

    @property
    def pooled_width(self) -> int:
        return self.config.width * (2 if self.config.head.pooling == "class_mean" else 1)

    @property
    def feature_width(self) -> int:
        """Width of what the classifier reads, and of the output when classes=0."""
        return self.config.head.head_hidden or self.pooled_width

    @property
    def traceable(self) -> tuple[str, ...]:
        """What a Trace can ask of this model: the steps it has, and what attention can show."""
        c = self.config
        absent = {
            "prefix": not c.prefix,
            "positions": self.positions is None,
            "norm_pre": self.norm_pre is None,
            "norm1": c.norm.kind == "post",  # post-norm's norms end the halves: after_attention and tokens show them
            "norm2": c.norm.kind == "post",
            "class_attention": not c.tokens.class_token,
            "norm": self.norm is None,
            "pool": self.head_distill is not None,
            "pre_logits": self.pre_logits is None,
            "head": not c.classes,
        }
        steps = ("patch_embed", "prefix", "positions", "norm_pre", *BLOCK_KINDS, *FROM_HEADS)
        return tuple(k for k in (*steps, "norm", "pool", "pre_logits", "head") if not absent.get(k))

    def layout(self, height: int, width: int) -> TokenLayout:
        return TokenLayout(self.config.prefix, self.config.grid_of(height, width))

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.layout(*size).grid

    def features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        tokens, sizes = self.encode(images, trace=trace, reducer=reducer)
        return self.forward_head(tokens, pre_logits=True, sizes=sizes, trace=trace)  # a mean weighs merged tokens

    def forward(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        tokens, sizes = self.encode(images, trace=trace, reducer=reducer)
        return self.forward_head(tokens, sizes=sizes, trace=trace)

    def forward_features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        """All tokens after the last block and the final norm: (B, C, H, W) -> (B, N, D), prefix tokens first."""
        return self.encode(images, trace=trace, reducer=reducer)[0]

    def encode(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens, and where a reducer merged some, how many patches each stands for.

        `keep` (B, n): of each image only the patches of these numbers go through the blocks (MAE).
        """
        check_images(images, self.config.channels, like=self.patch_embed.proj.weight)
        layout = self.layout(*images.shape[-2:])
        reducing = self.reducing(reducer) if reducer is not None else None
        if trace is not None:
            more = ("assignment", "sizes") * (reducing is not None) + ("visible",) * (keep is not None)
            trace.begin(depth=len(self.blocks), offers=(*self.traceable, *more), layout=layout)
        z, kept = self.embed(images, layout, trace, keep)  # (B, N, D), eq. 1
        rope, index = self._positions_inside(layout, kept, z)
        recompute = self.config.gradient_checkpointing and self.training and trace is None
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            at = trace.at(layer) if trace is not None else None
            relative = block.attention.relative
            bias = None if relative is None or index is None else relative(index, layout.grid)  # (1, h, N, N)
            if reducing is not None:
                z = reducing.run(block, z, layer, at, recompute)  # (B, M, D), M <= N
            else:
                z = run(block, z, rope, bias, at, recompute=recompute)  # (B, N, D), eqs. 2-3
        z = z if self.norm is None else mark(trace, "norm", self.norm(z))  # eq. 4, for every token
        return z, reducing.sizes if reducing is not None else None

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
            z = mark(trace, "positions", z + table)
        kept = None
        if keep is not None:
            z, kept = keep_patches(z, len(layout.prefix), keep)  # (B, prefix + n, D)
            mark(trace, "visible", z)
        elif self.training and self.patch_dropout:
            z, kept = drop_patches(z, len(layout.prefix), self.patch_dropout)
        z = self.dropout(z)
        return (z if self.norm_pre is None else mark(trace, "norm_pre", self.norm_pre(z))), kept

    def reducing(self, reducer: Reducer) -> Reducing:
        """A forward pass under this reducer; refused where the network cannot do with fewer tokens."""
        if Capability.REDUCE not in self.capabilities:
            raise UsageError(
                f"{self.config.positions.kind} positions belong to a full grid of patches, so its tokens cannot be "
                'reduced: use a model with positions="learned" or "sincos".'
            )
        return Reducing(reducer, depth=len(self.blocks), prefix=len(self.config.prefix), offers=self.traceable)

    def _positions_inside(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """What rotary and relative positions hand to every block: angles, or the index into each layer's table."""
        c, prefix = self.config, len(layout.prefix)
        if c.positions.kind == "relative":
            if kept is not None:
                raise UsageError('a relative bias belongs to a full grid of patches: use positions="sincos".')
            return None, relative_index(layout.grid, prefix, z.device)  # (N, N)
        if c.positions.kind != "rotary":
            return None, None
        rope = rotary_2d(layout.grid, c.head_dim or c.width // c.heads, c.positions.rotary_base, prefix, z.device)
        if kept is not None:
            rope = rope[0][kept][:, None], rope[1][kept][:, None]  # (B, 1, N, d/2) each
        return rope, None

    def forward_head(
        self,
        tokens: Tensor,
        *,
        pre_logits: bool = False,
        sizes: Tensor | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Tokens (B, N, D) -> logits (B, classes); `pre_logits=True` or classes=0 stops at the pooled features."""
        prefix = len(self.config.prefix)
        if self.head_distill is not None and not pre_logits and self.config.classes:
            first, second = self.forward_heads(tokens)
            return mark(trace, "head", (first + second) / 2)  # DeiT: the mean of the two at inference
        if self.pool is not None:
            y = self.pool(tokens[:, prefix:])
        else:
            y = pool_tokens(tokens, self.config.head.pooling, prefix, sizes)  # (B, D)
        y = mark(trace, "pool", y if self.head_norm is None else self.head_norm(y))
        if self.pre_logits is not None:
            y = mark(trace, "pre_logits", torch.tanh(self.pre_logits(y)))
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def forward_heads(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The class token's and the distillation token's logits, each (B, classes)."""
        if self.head_distill is None:
            raise UsageError("this model has one head: build it with distill_token=True to have two.")
        return self.head(tokens[:, 0]), self.head_distill(tokens[:, 1])

    def intermediate_features(
        self, images: Tensor, layers: Sequence[int] = (-1,), *, norm: bool = True, maps: bool = False
    ) -> list[Tensor]:
        """Tokens after the given blocks, through the final norm unless norm=False; `maps`: (B, D, H/P, W/P)."""
        trace = Trace("tokens", layers=layers, gradients=torch.is_grad_enabled())
        self.forward_features(images, trace=trace)
        tokens = [trace["tokens", layer] for layer in layers]
        if norm and self.norm is not None:
            tokens = [self.norm(z) for z in tokens]
        if not maps:
            return tokens
        layout = self.layout(*images.shape[-2:])
        return [to_map(z[:, len(layout.prefix) :], layout.grid) for z in tokens]

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained head for another number of classes (0: none); everything else stays."""
        self.config = replace(self.config, classes=classes)
        like = next(self.parameters())
        self.head = _head(self.feature_width, classes).to(like.device, like.dtype)
        _init_head(self.head)
        if self.head_distill is not None:
            self.head_distill = _head(self.config.width, classes).to(like.device, like.dtype)
            _init_head(self.head_distill)
        self.labels = None


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


def new_token(width: int, count: int = 1) -> nn.Parameter:
    return nn.Parameter(torch.randn(1, count, width) * 0.02)


def _head(width: int, classes: int) -> nn.Module:
    return nn.Linear(width, classes) if classes else nn.Identity()


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


def _init_head(head: nn.Module | None) -> None:
    if isinstance(head, nn.Linear):
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)


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
