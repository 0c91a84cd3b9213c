"""PlainTransformer: what all encoders with one grid of patches share. ViT, DINOv3, EVA-02, BEiT, AIMv2 and more are it.

A paper's file builds the layers and says what stands before the blocks (`embed`), what attention is given about
positions (`attention_positions`) and what the head reads; the way through the blocks, Trace, pooling and the classifier
are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import BLOCK_KINDS, Block, run
from vitlab.layers.edit import Edit
from vitlab.layers.patches import check_images, check_multiple, drop_patches, grid_of, keep_patches
from vitlab.layers.pooling import Pooling, pool_tokens
from vitlab.layers.positions import LearnedPositions, Rotary, SinCosPositions
from vitlab.layers.reduced import to_map
from vitlab.layers.reducer import Reducer, Reducing
from vitlab.layers.trace import FROM_HEADS, TokenLayout, Trace, mark
from vitlab.models.base import Capability, Network
from vitlab.models.config import Config, largest_divisor, option_paths

if TYPE_CHECKING:
    from vitlab.layers.hybrid_stem import HybridStem
    from vitlab.layers.patches import ConvStem, PatchEmbed

RATES = {"dropout", "attention_dropout", "patch_dropout", "stochastic_depth"}
AttentionBias = Callable[[int], Tensor | None]  # layer -> (1 or B, 1 or h, N, N), added to the scaled product


class Start(NamedTuple):
    """What the blocks begin with."""

    z: Tensor  # (B, N, D)
    rope: Rotary | None
    bias_at: AttentionBias


@dataclass(frozen=True)
class PlainConfig(Config):
    """Options that every plain encoder has; a paper adds its own and says what it is made of."""

    image_size: tuple[int, int] = (224, 224)  # (H, W)
    patch_size: int = 16  # P
    channels: int = 3  # C
    classes: int = 1000  # 0: the model returns pooled features (B, D)
    width: int = 768  # D
    depth: int = 12  # L
    heads: int = 12  # h
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check()

    def check(self) -> None:
        """Refuse what cannot work, and say what to type instead."""
        for name in ("patch_size", "channels", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.classes < 0:
            raise UsageError(f"classes={self.classes} must be 0 (pooled features) or more.")
        options = option_paths(type(self))
        for what, size in zip(("image height", "image width"), self.image_size, strict=True):
            if self.crops_images and size < self.patch_size:
                raise UsageError(f"{what}: {size} has no room for a patch of {self.patch_size}: use that or more.")
            if not (self.pads_images or self.crops_images) or size < 1:
                check_multiple(what, size, self.patch_size, None if "pad" in options else "")
        if self.own_head_dim is None and self.width % self.heads:
            fitting = largest_divisor(self.width, self.heads)
            more = ", or give head_dim" if "head_dim" in options else ""
            raise UsageError(
                f"width {self.width} is not a multiple of heads {self.heads}: use heads={fitting}, "
                f"or width={-(-self.width // self.heads) * self.heads}{more}."
            )
        if self.option("eps") <= 0:
            raise UsageError(f"eps={self.option('eps')} must be greater than 0.")
        for name in RATES & options.keys():
            if not 0 <= self.option(name) < 1:
                raise UsageError(f"{name}={self.option(name)} must be at least 0 and below 1.")
        if self.mlp_hidden < 1:
            raise UsageError(f"the MLP has {self.mlp_hidden} hidden channels: use mlp_ratio=4.")

    @property
    def own_head_dim(self) -> int | None:
        """d, where a paper lets it differ from width / heads."""
        return None

    @property
    def head_width(self) -> int:
        """d, the channels of one head."""
        return self.own_head_dim or self.width // self.heads

    @property
    def pads_images(self) -> bool:
        """Whether images of any size are padded to whole patches."""
        return False

    @property
    def crops_images(self) -> bool:
        """Whether pixels after the last whole patch are not read."""
        return False

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at `image_size`."""
        return self.grid_of(*self.image_size)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        return grid_of(height, width, self.patch_size, self.crops_images)

    @property
    def prefix(self) -> tuple[str, ...]:
        """Names of the tokens that stand before the patches, in order: class, distillation, register."""
        raise NotImplementedError(f"{type(self).__name__} must name its prefix tokens.")

    @property
    def pool_kind(self) -> Pooling:
        """How the head makes one vector of the tokens."""
        return self.option("pooling")

    @property
    def position_kind(self) -> str:
        """learned, sincos, rotary, relative or none; several are joined by " + "."""
        raise NotImplementedError(f"{type(self).__name__} must say what its positions are.")

    @property
    def needs_full_grid(self) -> bool:
        """Whether positions stand inside the blocks, so that tokens cannot be merged or pruned on the way."""
        return any(kind in self.position_kind for kind in ("rotary", "relative"))

    @property
    def mlp_hidden(self) -> int:
        return round(self.width * self.option("mlp_ratio"))

    @property
    def mlp_name(self) -> str:
        """The MLP in words: "MLP, gelu" or "SwiGLU"."""
        return f"MLP, {self.option('activation')}"

    @property
    def post_norm(self) -> bool:
        """Whether norms end the two halves of a block instead of beginning them."""
        return False

    @property
    def own_patch_dropout(self) -> float:
        """Share of patches left out in training."""
        return 0.0

    def readable_size(self, size: tuple[int, int]) -> tuple[int, int]:
        P = self.patch_size
        return size if self.pads_images or self.crops_images else (max(size[0] // P, 1) * P, max(size[1] // P, 1) * P)

    def table_grid(self, key: str) -> tuple[int, int]:
        return self.grid


class PlainTransformer(Network):
    """z_0 = embed(image);  z_l = block(z_{l-1});  y = pool(norm(z_L));  logits = head(y)."""

    config: Any  # a PlainConfig
    patch_embed: PatchEmbed | ConvStem | HybridStem
    blocks: nn.ModuleList
    head: nn.Module

    def __init__(self, config: PlainConfig):
        super().__init__()
        self.config = config
        self.patch_dropout = config.own_patch_dropout  # a training loop may change it on the way
        self.positions: LearnedPositions | SinCosPositions | None = None  # added before the blocks
        self.norm_pre: nn.Module | None = None
        self.norm: nn.Module | None = None  # after the blocks, on every token
        self.pool: nn.Module | None = None  # makes one vector of all patches
        self.head_norm: nn.Module | None = None  # after pooling

    def add_head(self) -> None:
        """The classifier, or nothing where there are no classes."""
        self.head = new_head(self.feature_width, self.config.classes)
        init_head(self.head)

    @property
    def capabilities(self) -> frozenset[Capability]:
        able = super().capabilities | {Capability.TOKENS}
        return able if self.config.needs_full_grid else able | {Capability.REDUCE}

    @property
    def feature_width(self) -> int:
        """Width of what the classifier reads, and of the output when classes=0."""
        return self.config.width * (2 if self.config.pool_kind == "class_mean" else 1)

    @property
    def absent_steps(self) -> dict[str, bool]:
        """Steps that the network does not have."""
        c = self.config
        return {
            "prefix": not c.prefix,
            "position_embedding": self.positions is None,
            "positions": self.positions is None,
            "norm_pre": self.norm_pre is None,
            "norm1": c.post_norm,  # post-norm's norms end the halves: after_attention and tokens show them
            "norm2": c.post_norm,
            "class_attention": "class" not in c.prefix,
            "norm": self.norm is None,
            "head": not c.classes,
        }

    @property
    def traceable(self) -> tuple[str, ...]:
        """What a Trace can ask of this model: the steps it has, and what attention can show."""
        absent = self.absent_steps
        steps = ("patch_embed", "prefix", "position_embedding", "positions", "norm_pre", *BLOCK_KINDS, *FROM_HEADS)
        return tuple(kind for kind in (*steps, "norm", "pool", "head") if not absent.get(kind))

    def layout(self, height: int, width: int) -> TokenLayout:
        return TokenLayout(self.config.prefix, self.config.grid_of(height, width))

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.layout(*size).grid

    def features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        trace = with_edit(trace, edit)
        tokens, sizes = self.encode(images, trace=trace, reducer=reducer)
        return self.forward_head(tokens, pre_logits=True, sizes=sizes, trace=trace)  # a mean weighs merged tokens

    def forward(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        trace = with_edit(trace, edit)
        tokens, sizes = self.encode(images, trace=trace, reducer=reducer)
        return self.forward_head(tokens, sizes=sizes, trace=trace)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """All tokens after the last block and the final norm: (B, C, H, W) -> (B, N, D), prefix tokens first."""
        return self.encode(images, trace=with_edit(trace, edit), reducer=reducer)[0]

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
        z, sizes = self.run_blocks(images, trace=trace, reducer=reducer, keep=keep)
        return (z if self.norm is None else mark(trace, "norm", self.norm(z))), sizes  # eq. 4, for every token

    def run_blocks(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`encode` without the final norm."""
        reducing = self.reducing(reducer) if reducer is not None else None
        more = ("assignment", "sizes") * (reducing is not None)
        z, rope, bias_at = self.start(images, trace, keep=keep, more=more)  # (B, N, D), eq. 1
        recompute = self.recomputes(trace)
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            at = trace.at(layer) if trace is not None else None
            if reducing is not None:
                z = reducing.run(block, z, layer, at, recompute)  # (B, M, D), M <= N
            else:
                z = run(block, z, rope, bias_at(layer), None, at, recompute=recompute)  # (B, N, D), eqs. 2-3
        if trace is not None:
            trace.finish()
        return z, reducing.sizes if reducing is not None else None

    def start(
        self,
        images: Tensor,
        trace: Trace | None = None,
        *,
        keep: Tensor | None = None,
        steps: tuple[str, ...] | None = None,
        more: tuple[str, ...] = (),
    ) -> Start:
        """What the first block reads; a trace may ask for `steps`, `traceable` unless given, and for `more`."""
        check_images(images, self.config.channels, like=self.patch_embed.proj.weight)
        layout = self.layout(*images.shape[-2:])
        if trace is not None:
            offers = (*(self.traceable if steps is None else steps), *more, *(("visible",) * (keep is not None)))
            trace.begin(depth=len(self.blocks), offers=offers, layout=layout)
        z, kept = self.embed(images, layout, trace, keep)  # (B, N, D), eq. 1
        return Start(z, *self.attention_positions(layout, kept, z))

    def tokens_after(
        self,
        images: Tensor,
        layers: Sequence[int],
        *,
        trace: Trace | None = None,
        steps: tuple[str, ...] | None = None,
    ) -> list[Tensor]:
        """The tokens after each of these blocks, (B, N, D), before the final norm; `steps` as in `start`."""
        depth = len(self.blocks)
        wanted = [layer % depth for layer in layers]
        z, rope, bias_at = self.start(images, trace, steps=steps)
        after: dict[int, Tensor] = {}
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            at = trace.at(layer) if trace is not None else None
            z = run(block, z, rope, bias_at(layer), None, at, recompute=self.recomputes(trace))
            after[layer] = z
            if trace is None and layer == max(wanted):
                break
        if trace is not None:
            trace.finish()
        return [after[layer] for layer in wanted]

    def recomputes(self, trace: Trace | None) -> bool:
        """Whether blocks are computed again for the gradients."""
        return self.config.gradient_checkpointing and self.training and trace is None

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Eq. 1: patches, prefix tokens, positions; as asked, or in training, fewer patches, and which were kept."""
        raise NotImplementedError(f"{type(self).__name__} must make tokens of images.")

    def leave_out(
        self, z: Tensor, layout: TokenLayout, trace: Trace | None, keep: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The patches in `keep`, or in training all but a random share; and the indices of the tokens that stay."""
        if keep is not None:
            z, kept = keep_patches(z, len(layout.prefix), keep)  # (B, prefix + n, D)
            return mark(trace, "visible", z), kept
        if self.training and self.patch_dropout:
            return drop_patches(z, len(layout.prefix), self.patch_dropout)
        return z, None

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        """What the attention of each block is given about positions: rotary angles, and a bias by layer."""
        return None, lambda layer: None

    def reducing(self, reducer: Reducer) -> Reducing:
        """A forward pass under this reducer; refused where the network cannot do with fewer tokens."""
        if Capability.REDUCE not in self.capabilities:
            raise UsageError(
                f"{self.config.position_kind} positions belong to a full grid of patches, so its tokens cannot be "
                'reduced: use a model with positions="learned" or "sincos".'
            )
        return Reducing(reducer, depth=len(self.blocks), prefix=len(self.config.prefix), offers=self.traceable)

    def forward_head(
        self,
        tokens: Tensor,
        *,
        pre_logits: bool = False,
        sizes: Tensor | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Tokens (B, N, D) -> logits (B, classes); `pre_logits=True` or classes=0 stops at the pooled features."""
        y = mark(trace, "pool", self.pooled(tokens, sizes))  # (B, D)
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def pooled(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        """(B, N, D) -> (B, D), through the head's own norm."""
        prefix = len(self.config.prefix)
        if self.pool is not None:
            y = self.pool(tokens[:, prefix:])
        else:
            y = pool_tokens(tokens, self.config.pool_kind, prefix, sizes)
        return y if self.head_norm is None else self.head_norm(y)

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
        self.add_head()
        self.head.to(like.device, like.dtype)
        self.labels = None


def with_prefix(z: Tensor, *tokens: Tensor | None) -> Tensor:
    """Puts learned tokens, where there are any, before the patches of every image: (B, N, D) -> (B, prefix + N, D)."""
    return torch.cat([*(token.expand(z.shape[0], -1, -1) for token in tokens if token is not None), z], dim=1)


def new_token(width: int, count: int = 1) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, count, width).normal_().mul_(0.02))


def new_head(width: int, classes: int) -> nn.Module:
    return nn.Linear(width, classes) if classes else nn.Identity()


def init_head(head: nn.Module | None) -> None:
    if isinstance(head, nn.Linear):
        nn.init.trunc_normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)
