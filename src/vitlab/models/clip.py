"""CLIP: images and texts in one space (arXiv:2103.00020); beside it SigLIP's sigmoid loss (arXiv:2303.15343).

    model = vitlab.create("clip_nano", **tokenizer.options)
    out = model(images, tokenizer(texts))      # out.logits_per_image (B, T), out.logits_per_text (T, B)
    model.encode_image(images)                 # (B, E), of length 1; so is encode_text(ids): the product is the cosine
    model.encoder                              # the image tower: a VisionTransformer like any other

Run `vitlab inspect clip_vit_base_patch32` to see every step of both towers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention
from vitlab.layers.block import BLOCK_KINDS, MLP, Activation, Block, run
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import FROM_HEADS, TokenLayout, Trace, mark
from vitlab.models.base import Capability, Network, WrapsEncoder
from vitlab.models.config import Config, largest_divisor
from vitlab.models.entry import CLIP_CROP, Entry, Paper, half
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import VARIANTS, ViTConfig

if TYPE_CHECKING:
    from vitlab.text.tokenizer import Tokenizer

MAX_SCALE = 100.0  # section 2.5: above it training becomes unstable
BOTH = ("activation", "eps", "gradient_checkpointing")  # options that, without a path, are set in both towers


@dataclass(frozen=True)
class TextConfig(Config):
    context: int = 77  # tokens of a text, start and end included
    vocab: int = 49408
    width: int = 512
    depth: int = 12
    heads: int = 8
    mlp_ratio: float = 4.0
    activation: Activation = "quick_gelu"
    eps: float = 1e-5
    end_id: int = 49407  # a text is what stands at the first of these
    pad_id: int = 49407  # what follows it; nothing looks at it. OpenAI has 0 here, transformers the end again
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("vocab", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"text.{name}={getattr(self, name)} must be at least 1.")
        if self.context < 3 or self.eps <= 0 or round(self.width * self.mlp_ratio) < 1:
            raise UsageError("text.context must be 3 or more, text.eps and text.mlp_ratio above 0.")
        if self.width % self.heads:
            fitting = largest_divisor(self.width, self.heads)
            raise UsageError(f"text.width {self.width} is not a multiple of text.heads {self.heads}: use {fitting}.")
        for name in ("end_id", "pad_id"):
            if not 0 <= getattr(self, name) < self.vocab:
                raise UsageError(
                    f"{name}={getattr(self, name)} is not among the {self.vocab} tokens. Take all four from the "
                    'tokenizer: vitlab.create("clip_nano", **tokenizer.options).'
                )


def clip_vit(**options: Any) -> ViTConfig:
    """CLIP's own ViT: one more norm before the blocks, patches without bias, QuickGELU, no classifier."""
    own: dict[str, Any] = dict(norm_pre=True, patch_bias=False, activation="quick_gelu", eps=1e-5, classes=0)
    return ViTConfig().with_options(**{**own, **options})


@dataclass(frozen=True)
class CLIPConfig(Config):
    image: ViTConfig = field(default_factory=clip_vit)  # any ViT without classes
    text: TextConfig = field(default_factory=TextConfig)
    embed_dim: int = 512  # E, of the space both end in
    loss: Literal["softmax", "sigmoid"] = "softmax"

    fixed = ("text.heads",)  # the rest shows in the shapes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_dim < 1:
            raise UsageError(f"embed_dim={self.embed_dim} must be at least 1.")
        if self.image.classes:
            raise UsageError(
                f"a CLIP has no classes to choose (found {self.image.classes}): it is asked in words, "
                "vitlab zeroshot CHECKPOINT IMAGE --labels cat,dog"
            )

    def with_options(self, **options: Any) -> Self:
        """As ever; activation and eps are set in both towers, width, depth and heads by path: image.width."""
        if options.get("stem") == "conv":  # it has norms of its own and always a bias
            options = {"patch_bias": True, **options}
        both = {f"{tower}.{name}": options[name] for name in BOTH if name in options for tower in ("image", "text")}
        return super().with_options(**both, **{name: value for name, value in options.items() if name not in BOTH})

    @property
    def encoder(self) -> ViTConfig:
        """What is kept when no text is read."""
        return self.image

    @property
    def image_size(self) -> tuple[int, int]:
        return self.image.image_size

    @property
    def channels(self) -> int:
        return self.image.channels

    @property
    def grid(self) -> tuple[int, int]:
        return self.image.grid

    @property
    def classes(self) -> int:
        """None are learned."""
        return 0


def _variant(size: str, patch_size: int, text: tuple[int, int, int], embed_dim: int, **options: Any) -> CLIPConfig:
    width, depth, heads = text
    image = clip_vit(**VARIANTS[size], patch_size=patch_size)
    config = CLIPConfig(image, TextConfig(width=width, depth=depth, heads=heads), embed_dim)
    return config.with_options(**options)


def _small(text: tuple[int, int, int], embed_dim: int, context: int, vocab: int, **image: Any) -> CLIPConfig:
    """For a tokenizer of your own. Exact GELU, as everything trained since OpenAI's release."""
    width, depth, heads = text
    tower = TextConfig(context, vocab, width, depth, heads, mlp_ratio=2.0, end_id=vocab - 1, pad_id=vocab - 1)
    return CLIPConfig(clip_vit(mlp_ratio=2.0, **image), tower, embed_dim).with_options(activation="gelu")


MODELS = {  # text: width, depth, heads. B and L: Table 20 of CLIP; H: LAION's, trained with exact GELU
    "clip_vit_base_patch32": _variant("B", 32, (512, 12, 8), 512),
    "clip_vit_base_patch16": _variant("B", 16, (512, 12, 8), 512),
    "clip_vit_large_patch14": _variant("L", 14, (768, 12, 12), 768),
    "clip_vit_large_patch14_336": _variant("L", 14, (768, 12, 12), 768, image_size=336),
    "clip_vit_huge_patch14": _variant("H", 14, (1024, 24, 16), 1024, activation="gelu"),
    "clip_nano": _small((128, 3, 4), 128, 32, 1024, image_size=32, patch_size=4, width=128, depth=6, heads=4),
    "clip_nano_96": _small((128, 4, 4), 128, 32, 4096, image_size=96, patch_size=8, width=128, depth=6, heads=4),
    "clip_digits": _small((64, 2, 4), 64, 16, 1024, image_size=8, patch_size=2, channels=1, width=64, depth=4, heads=4),
}


class TextTransformer(nn.Module):
    """Tokens (B, N) -> (B, D): a causal transformer, read where the text ends (section 2.4)."""

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab, c.width)
        self.positions = nn.Parameter(torch.empty(c.context, c.width))
        self.blocks = nn.ModuleList(_text_block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        _init_text(self)

    @property
    def traceable(self) -> tuple[str, ...]:
        return ("embed", "positions", *BLOCK_KINDS, *(k for k in FROM_HEADS if k != "class_attention"), "norm", "end")

    def forward(self, ids: Tensor, *, trace: Trace | None = None) -> Tensor:
        N = ids.shape[1]
        if trace is not None:
            trace.begin(depth=len(self.blocks), offers=self.traceable, layout=TokenLayout((), (1, N)))
        z = mark(trace, "embed", self.embed(ids))  # (B, N, D)
        z = mark(trace, "positions", z + self.positions[:N])
        later = torch.full((N, N), -math.inf, dtype=z.dtype, device=z.device).triu(1)[None, None]  # no token sees it
        recompute = self.config.gradient_checkpointing and self.training and trace is None
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            at = trace.at(layer) if trace is not None else None
            z = run(block, z, None, later, at, recompute=recompute)  # (B, N, D)
        z = mark(trace, "norm", self.norm(z))
        end = (ids == self.config.end_id).int().argmax(dim=1)  # (B,), the first
        return mark(trace, "end", z[torch.arange(ids.shape[0], device=z.device), end])  # (B, D)


@dataclass(frozen=True)
class CLIPVisionConfig(ViTConfig):
    embed_dim: int = 512  # E, of the space that the class token is projected to

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_dim < 1:
            raise UsageError(f"embed_dim={self.embed_dim} must be at least 1.")
        if self.tokens.distill_token or self.head.head_hidden or self.head.pooling == "class_mean":
            raise UsageError(
                "the projection reads one vector of the tower's width: use distill_token=False, head_hidden=0, and "
                'pooling="class_norm", "class" or "mean".'
            )


class CLIPVision(VisionTransformer):
    """CLIP's image tower and its projection, for those who need no text: forward gives transformers' image_embeds.

    A ViT like any other; `features` are the embeddings, and a classifier, where there is one, reads them.
    """

    family = "clip_vision"

    def __init__(self, config: CLIPVisionConfig):
        super().__init__(config)
        self.projection = nn.Linear(config.width, config.embed_dim, bias=False)
        nn.init.normal_(self.projection.weight, std=config.width**-0.5)

    @property
    def feature_width(self) -> int:
        return self.config.embed_dim

    @property
    def traceable(self) -> tuple[str, ...]:
        steps = super().traceable
        return (*steps[:-1], "projection", "head") if self.config.classes else (*steps, "projection")

    def forward_head(
        self, tokens: Tensor, *, pre_logits: bool = False, sizes: Tensor | None = None, trace: Trace | None = None
    ) -> Tensor:
        y = super().forward_head(tokens, pre_logits=True, sizes=sizes, trace=trace)  # (B, D)
        y = mark(trace, "projection", self.projection(y))  # (B, E)
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def encode_image(
        self, images: Tensor, *, normalise: bool = False, trace: Trace | None = None, reducer: Reducer | None = None
    ) -> Tensor:
        """(B, C, H, W) -> (B, E) as the projection gives them; normalise=True: of length 1, as CLIP's own."""
        x = self.features(images, trace=trace, reducer=reducer)
        return F.normalize(x, dim=-1) if normalise else x


class CLIPOutput(NamedTuple):
    logits_per_image: Tensor  # (B, T)
    logits_per_text: Tensor  # (T, B)


class CLIP(WrapsEncoder):
    """Two towers, a projection for each, and a learned scale: logits = scale * cos(image, text) (figure 3)."""

    family = "clip"

    def __init__(self, config: CLIPConfig):
        super().__init__(config)
        c = config
        self.image = VisionTransformer(c.image)
        self.image_projection = nn.Linear(self.image.feature_width, c.embed_dim, bias=False)
        self.text = TextTransformer(c.text)
        self.text_projection = nn.Linear(c.text.width, c.embed_dim, bias=False)
        start, bias = (math.log(1 / 0.07), None) if c.loss == "softmax" else (math.log(10.0), -10.0)
        self.log_scale = nn.Parameter(torch.tensor(start))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias))
        for projection in (self.image_projection, self.text_projection):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.TEXT}

    @property
    def encoder(self) -> VisionTransformer:
        """The image tower, for everything that needs no words; it ends before the projection."""
        return self.image

    def features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        """Unit-length embeddings in one space with those of texts."""
        return self.encode_image(images, trace=trace, reducer=reducer)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer whose numbers mean something else to the model."""
        c = self.config.text
        for name in ("context", "end_id", "pad_id"):
            ours, theirs = getattr(c, name), getattr(tokenizer, name)
            if ours != theirs:
                raise UsageError(
                    f"the tokenizer has {name}={theirs}, the model {ours}: they do not belong together. A model for "
                    'it: vitlab.create("clip_nano", **tokenizer.options).'
                )
        if tokenizer.vocab > c.vocab:
            raise UsageError(f"the tokenizer has {tokenizer.vocab} tokens, the model only {c.vocab}: vocab={c.vocab}.")

    @property
    def scale(self) -> Tensor:
        """(), at most 100 with the softmax loss; call `clamp_scale` after a step, or a larger one could not fall."""
        limited = self.log_scale.clamp(max=math.log(MAX_SCALE)) if self.config.loss == "softmax" else self.log_scale
        return limited.exp()

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """After the optimiser's step: the learned value itself stays below the limit."""
        if self.config.loss == "softmax":
            self.log_scale.clamp_(max=math.log(MAX_SCALE))

    def encode_image(
        self, images: Tensor, *, normalise: bool = True, trace: Trace | None = None, reducer: Reducer | None = None
    ) -> Tensor:
        """(B, C, H, W) -> (B, E), of length 1 unless normalise=False."""
        x = self.image(images, trace=trace, reducer=reducer)  # (B, D)
        x = mark(trace, "projection", self.image_projection(x))
        return F.normalize(x, dim=-1) if normalise else x

    def encode_text(self, ids: Tensor, *, normalise: bool = True, trace: Trace | None = None) -> Tensor:
        """(T, N) token numbers, N at most the context -> (T, E), of length 1 unless normalise=False."""
        check_ids(ids, self.config.text)
        x = mark(trace, "projection", self.text_projection(self.text(ids, trace=trace)))
        return F.normalize(x, dim=-1) if normalise else x

    @torch.no_grad()
    def class_embeddings(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        """Prompts of each class -> (K, E): the mean of their embeddings, made of length 1 again (section 3.1.4)."""
        tokenizer, device = self.require_tokenizer(), self.log_scale.device
        means = [self.encode_text(tokenizer(texts).to(device)).float().mean(dim=0) for texts in prompts]  # (E,) each
        return F.normalize(torch.stack(means), dim=1)

    def forward(self, images: Tensor, ids: Tensor) -> CLIPOutput:
        """Every image against every text; there may be more of one than of the other."""
        logits = self.logits(self.encode_image(images), self.encode_text(ids))
        return CLIPOutput(logits, logits.mT)

    def logits(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """(B, E), (T, E), both normalised -> (B, T)."""
        logits = self.scale * image_features @ text_features.mT
        return logits if self.bias is None else logits + self.bias

    def loss(self, image_features: Tensor, text_features: Tensor, same: Tensor | None = None) -> Tensor:
        """What the config names, of normalised features of one batch, whole: see `gather`."""
        if self.bias is None:
            return contrastive_loss(image_features, text_features, self.scale, same)
        return sigmoid_loss(image_features, text_features, self.scale, self.bias, same)


def as_clip(model: Network) -> CLIP:
    """The model, if it is a CLIP."""
    if not isinstance(model, CLIP):
        raise UsageError(f"a model of the family {model.family} reads no text: this needs a CLIP.")
    return model


# ---- losses


def contrastive_loss(
    image_features: Tensor, text_features: Tensor, scale: Tensor | float, same: Tensor | None = None
) -> Tensor:
    """Figure 3: each image finds its text among all texts, each text its image; the mean of both. (B, E) each.

    `same` (B, B): pairs with equal captions. They are no negatives of each other and are left out of the sums; an
    image's own text always stays.
    """
    logits = _wide(scale * image_features @ text_features.mT)  # (B, B)
    own = torch.arange(len(logits), device=logits.device)
    if same is not None:
        logits = logits.masked_fill(_others(same), -math.inf)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.mT, own)) / 2


def sigmoid_loss(
    image_features: Tensor,
    text_features: Tensor,
    scale: Tensor | float,
    bias: Tensor | float,
    same: Tensor | None = None,
) -> Tensor:
    """SigLIP, eq. 1: every pair by itself is a match (the own text) or none; the sum over pairs, per image.

    `same` (B, B): pairs with equal captions that are not the own one are left out.
    """
    logits = _wide(scale * image_features @ text_features.mT + bias)  # (B, B)
    match = 2 * torch.eye(len(logits), device=logits.device) - 1  # 1 on the diagonal, -1 beside it
    pairs = F.logsigmoid(match * logits)
    if same is not None:
        pairs = pairs.masked_fill(_others(same), 0.0)
    return -pairs.sum() / len(logits)


def same_captions(ids: Tensor) -> Tensor:
    """Token numbers (B, N) -> (B, B): which texts are equal."""
    # torch gives `unique` no types
    group = cast(Tensor, torch.unique(ids, dim=0, return_inverse=True)[1])  # pyright: ignore[reportUnknownMemberType]
    return group[:, None] == group[None]


def _others(same: Tensor) -> Tensor:
    return same & ~torch.eye(len(same), dtype=torch.bool, device=same.device)


def _wide(x: Tensor) -> Tensor:
    """Softmax and sums in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ---- checks and initial values


def check_ids(ids: Tensor, c: TextConfig) -> None:
    if ids.ndim != 2 or ids.shape[1] > c.context or ids.is_floating_point():
        raise UsageError(
            f"expected token numbers of the shape (texts, {c.context} at most), found {tuple(ids.shape)}, "
            f"{ids.dtype}: model.tokenizer(texts) makes them."
        )
    if type(ids) is not Tensor or ids.device.type != "cpu" or torch.compiler.is_compiling() or not len(ids):
        return  # a look at the values would wait for the device
    if int(ids.max()) >= c.vocab or int(ids.min()) < 0:
        raise UsageError(f"token {int(ids.max())} is not among the model's {c.vocab}: is this its tokenizer?")
    if not bool((ids == c.end_id).any(dim=1).all()):
        raise UsageError(f"a text has no end-of-text ({c.end_id}), where it is read: model.tokenizer(texts) adds it.")


def _text_block(c: TextConfig) -> Block:
    attention = Attention(c.width, c.heads, eps=c.eps)
    return Block(attention, MLP(c.width, round(c.width * c.mlp_ratio), activation=c.activation), c.width, eps=c.eps)


def _init_text(tower: TextTransformer) -> None:
    """As the paper's code starts: what ends a residual branch is smaller in a deeper network."""
    c = tower.config
    nn.init.normal_(tower.embed.weight, std=0.02)
    nn.init.normal_(tower.positions, std=0.01)
    for block in cast("list[Block]", tower.blocks):
        nn.init.normal_(block.attention.qkv.weight, std=c.width**-0.5)
        nn.init.normal_(block.attention.proj.weight, std=(2 * c.width * c.depth) ** -0.5)
        nn.init.normal_(block.mlp.fc1.weight, std=(2 * c.width) ** -0.5)
        nn.init.normal_(block.mlp.fc2.weight, std=(2 * c.width * c.depth) ** -0.5)
        for layer in (block.attention.qkv, block.attention.proj, block.mlp.fc1, block.mlp.fc2):
            nn.init.zeros_(layer.bias)


# ---- names


def _entry(name: str, config: CLIPConfig) -> Entry:
    if not name.startswith("clip_vit_"):
        return Entry(name, "clip", config, half(config.channels))
    letter = next(key for key in VARIANTS if VARIANTS[key]["width"] == config.image.width)
    patch, side = config.image.patch_size, config.image_size[0]
    larger = side != 224
    open_clip = f"ViT-{letter}-{patch}" + (f"-{side}" if larger else "")  # by itself it has GELU
    open_clip += "" if config.text.activation == "gelu" else "-quickgelu"
    aliases = (f"clip_ViT-{letter}/{patch}" + (f"@{side}px" if larger else ""), name.replace("_", "-"), open_clip)
    return Entry(name, "clip", config, CLIP_CROP, aliases)


def _vision(name: str, config: CLIPConfig) -> Entry:
    """The image tower of a CLIP in the table, with its projection."""
    tower = {group.name: getattr(config.image, group.name) for group in fields(ViTConfig)}
    own = CLIPVisionConfig(**tower, embed_dim=config.embed_dim).with_options(pooling="class_norm")
    crop = CLIP_CROP if name.startswith("clip_vit_") else half(config.channels)
    return Entry(name.replace("clip_", "clip_vision_").replace("_vit", ""), "clip_vision", own, crop)


VISION_PAPER = Paper("clip_vision", CLIPVisionConfig, CLIPVision, [_vision(*item) for item in MODELS.items()])
PAPER = Paper("clip", CLIPConfig, CLIP, [_entry(name, config) for name, config in MODELS.items()])
