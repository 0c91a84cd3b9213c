"""Two towers: images and texts in one space. What CLIP (arXiv:2103.00020), SigLIP (arXiv:2303.15343) and others share.

    out = model(images, tokenizer(texts))      # out.logits_per_image (B, T), out.logits_per_text (T, B)
    model.encode_image(images)                 # (B, E), of length 1; so is encode_text(ids): the product is the cosine
    model.encoder                              # the image tower: an encoder like any other

models/clip.py, siglip.py and tips.py hold what is each paper's own: which tokens a text token sees, where it is read.
models/aimv2.py, eva02.py and pe.py put their encoder into a CLIP.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.advice import to_type
from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.attention import Attention
from vitlab.layers.block import BLOCK_KINDS, MLP, Activation, Block, run
from vitlab.layers.edit import Edit
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import FROM_HEADS, TokenLayout, Trace, mark
from vitlab.models.base import Capability, Network, WrapsEncoder
from vitlab.models.config import Config, largest_divisor, option_paths
from vitlab.models.plain import PlainConfig, PlainTransformer
from vitlab.models.vit_config import ViTConfig

if TYPE_CHECKING:
    from vitlab.text.tokenizer import Tokenizer

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
    end_id: int = 49407  # what ends a text; CLIP reads a text at the first of these
    pad_id: int = 49407  # what follows it. CLIP never sees it: OpenAI has 0 here, transformers the end again
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
                how = to_type(': vitlab.create("clip_nano", **tokenizer.options).', ".")
                raise UsageError(
                    f"{name}={getattr(self, name)} is not among the {self.vocab} tokens. Take all four from the "
                    f"tokenizer{how}"
                )

    @property
    def mlp_hidden(self) -> int:
        return round(self.width * self.mlp_ratio)

    @property
    def mlp_name(self) -> str:
        """The MLP in words."""
        return f"MLP, {self.activation}"


@dataclass(frozen=True)
class TwoTowersConfig(Config):
    image: PlainConfig = field(default_factory=lambda: ViTConfig(classes=0))  # any encoder without classes
    text: TextConfig = field(default_factory=TextConfig)

    fixed = ("text.heads",)  # the rest shows in the shapes

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image.classes:
            raise UsageError(
                f"a CLIP has no classes to choose (found {self.image.classes}): it is asked in words, "
                "vitlab zeroshot CHECKPOINT IMAGE --labels cat,dog"
            )

    def with_options(self, **options: Any) -> Self:
        """As ever; activation and eps are set in both towers, width, depth and heads by path: image.width."""
        if options.get("stem") == "conv":  # it has norms of its own and always a bias
            options = {"patch_bias": True, **options}
        paths = [(name, f"{tower}.{name}") for name in BOTH if name in options for tower in ("image", "text")]
        paths_of_config = option_paths(type(self))  # a gated MLP has no activation to choose
        both = {path: options[name] for name, path in paths if path in paths_of_config}
        return super().with_options(**both, **{name: value for name, value in options.items() if name not in BOTH})

    @property
    def encoder(self) -> PlainConfig:
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


class TextTower(nn.Module):
    """Tokens (B, N) -> (B, D): a transformer, read at one token. A paper says which one, and which tokens see which."""

    reads = ""  # the token that is read: a Trace's name for the last step
    sees = "every token"  # what a token sees, in words, for `vitlab inspect`
    learns_positions = True  # False: a paper computes them in position_table
    positions: nn.Parameter  # (context, D), where they are learned

    def __init__(self, config: TextConfig):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab, c.width)
        if self.learns_positions:
            self.positions = nn.Parameter(torch.empty(c.context, c.width))
        self.blocks = nn.ModuleList(self.new_block() for _ in range(c.depth))
        self.norm = self.new_norm()

    def new_block(self) -> Block:
        c = self.config
        attention = Attention(c.width, c.heads, eps=c.eps)
        return Block(attention, MLP(c.width, c.mlp_hidden, activation=c.activation), c.width, eps=c.eps)

    def new_norm(self) -> nn.Module:
        return nn.LayerNorm(self.config.width, eps=self.config.eps)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """(B, N) -> (B, N, D)"""
        return self.embed(ids)

    def position_table(self, z: Tensor) -> Tensor:
        """(1, N, D), added to the tokens."""
        return self.positions[None, : z.shape[1]]

    def mask(self, z: Tensor, ids: Tensor) -> Tensor | None:
        """(1 or B, 1, 1 or N, N), added to the scaled products: -inf where a token does not see another. None: all see
        all.
        """
        return None

    def read(self, z: Tensor, ids: Tensor) -> Tensor:
        """(B, N, D), (B, N) -> (B, D): the token that stands for the text."""
        raise NotImplementedError(f"{type(self).__name__} must say where a text is read.")

    def trim_padding(self, ids: Tensor) -> Tensor:
        """(B, N) without columns that change nothing. Where padding is seen, none."""
        return ids

    def blank_ids(self, count: int) -> Tensor:
        """(count, N): empty texts of the full length."""
        ids = torch.full((count, self.config.context), self.config.pad_id, device=self.embed.weight.device)
        ids[:, 0] = self.config.end_id
        return ids

    def check_ids(self, ids: Tensor) -> bool:
        """Refuse what are no token numbers; False: the values were not looked at, which would wait for the device."""
        c = self.config
        if ids.ndim != 2 or not 0 < ids.shape[1] <= c.context or ids.is_floating_point():
            raise UsageError(
                f"expected token numbers of the shape (texts, {c.context} at most), found {tuple(ids.shape)}, "
                f"{ids.dtype}: model.tokenizer(texts) makes them."
            )
        if type(ids) is not Tensor or ids.device.type != "cpu" or torch.compiler.is_compiling() or not len(ids):
            return False
        if int(ids.max()) >= c.vocab or int(ids.min()) < 0:
            raise UsageError(f"token {int(ids.max())} is not among the model's {c.vocab}: is this its tokenizer?")
        return True

    @property
    def traceable(self) -> tuple[str, ...]:
        heads = (kind for kind in FROM_HEADS if kind != "class_attention")
        return ("embed", "position_embedding", "positions", *BLOCK_KINDS, *heads, "norm", self.reads)

    def forward(self, ids: Tensor, *, trace: Trace | None = None) -> Tensor:
        N = ids.shape[1]
        if trace is not None:
            trace.begin(depth=len(self.blocks), offers=self.traceable, layout=TokenLayout((), (1, N)))
        z = mark(trace, "embed", self.embed_tokens(ids))  # (B, N, D)
        z = mark(trace, "positions", z + mark(trace, "position_embedding", self.position_table(z)))
        mask = self.mask(z, ids)
        recompute = self.config.gradient_checkpointing and self.training and trace is None
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            at = trace.at(layer) if trace is not None else None
            z = run(block, z, None, None, mask, at, recompute=recompute)  # (B, N, D)
        if trace is not None:
            trace.finish()
        z = mark(trace, "norm", self.norm(z))
        return mark(trace, self.reads, self.read(z, ids))  # (B, D)


class ImageTextLogits(NamedTuple):
    logits_per_image: Tensor  # (B, T)
    logits_per_text: Tensor  # (T, B)


class TwoTowers(WrapsEncoder):
    """Base class: logits = scale * cos(image, text) + bias, with a learned scale, and a bias for the sigmoid loss."""

    config: Any  # of a subclass of TwoTowersConfig
    image: PlainTransformer
    image_projection: nn.Linear | None  # None: the image tower ends in the common space
    text: TextTower
    text_projection: nn.Linear | None  # None: so does the text tower
    log_scale: nn.Parameter  # (), unless `scale` is learned in another form
    bias: nn.Parameter | None  # (); None: the softmax loss needs none

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.TEXT}

    @property
    def encoder(self) -> PlainTransformer:
        """The image tower, for everything that needs no words; it ends before the projection."""
        return self.image

    @property
    def feature_width(self) -> int:
        """E of the common space, which need not be the image tower's width."""
        return self.image.feature_width if self.image_projection is None else self.image_projection.out_features

    def features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """Unit-length embeddings in one space with those of texts."""
        return self.encode_image(images, trace=trace, reducer=reducer, edit=edit)

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer whose numbers mean something else to the model."""
        c = self.config.text
        for name in ("context", "end_id", "pad_id"):
            ours, theirs = getattr(c, name), getattr(tokenizer, name)
            if ours != theirs:
                raise UsageError(
                    f"the tokenizer has {name}={theirs}, the model {ours}: they do not belong together."
                    + to_type(f' A model for it: vitlab.create("{self.family}_digits", **tokenizer.options), e.g.', "")
                )
        if tokenizer.vocab > c.vocab:
            raise UsageError(f"the tokenizer has {tokenizer.vocab} tokens, the model only {c.vocab}: vocab={c.vocab}.")

    @property
    def scale(self) -> Tensor:
        """()"""
        return self.log_scale.exp()

    def clamp_scale(self) -> None:
        """After the optimiser's step: keep the scale within its limit, where there is one."""

    def encode_image(
        self,
        images: Tensor,
        *,
        normalise: bool = True,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """(B, C, H, W) -> (B, E), of length 1 unless normalise=False."""
        trace = with_edit(trace, edit)
        x = self.image(images, trace=trace, reducer=reducer)  # (B, D)
        return self.project_image(x, normalise=normalise, trace=trace)

    def project_image(self, pooled: Tensor, *, normalise: bool = True, trace: Trace | None = None) -> Tensor:
        """What the image tower gives (B, D) -> (B, E) in the common space."""
        x = pooled
        if self.image_projection is not None:
            x = mark(trace, "projection", self.image_projection(x))
        return F.normalize(x, dim=-1) if normalise else x

    def encode_text(
        self, ids: Tensor, *, normalise: bool = True, trace: Trace | None = None, edit: Edit | None = None
    ) -> Tensor:
        """(T, N) token numbers, N at most the context -> (T, E), of length 1 unless normalise=False."""
        self.text.check_ids(ids)
        trace = with_edit(trace, edit)
        x = self.text(ids, trace=trace)  # (T, D)
        if self.text_projection is not None:
            x = mark(trace, "projection", self.text_projection(x))
        return F.normalize(x, dim=-1) if normalise else x

    @torch.no_grad()
    def class_embeddings(self, prompts: Sequence[Sequence[str]]) -> Tensor:
        """Prompts of each class -> (K, E): the mean of their embeddings, made of length 1 again (CLIP, sec. 3.1.4)."""
        tokenizer, device = self.require_tokenizer(), self.text.embed.weight.device
        means = [self.encode_text(tokenizer(texts).to(device)).float().mean(dim=0) for texts in prompts]  # (E,) each
        return F.normalize(torch.stack(means), dim=1)

    def forward(self, images: Tensor, ids: Tensor, *, edit: Edit | None = None) -> ImageTextLogits:
        """Every image against every text; there may be more of one than of the other. An edit is of the image tower."""
        logits = self.logits(self.encode_image(images, edit=edit), self.encode_text(ids))
        return ImageTextLogits(logits, logits.mT)

    def logits(self, image_features: Tensor, text_features: Tensor) -> Tensor:
        """(B, E), (T, E), both normalised -> (B, T)."""
        logits = self.scale * image_features @ text_features.mT
        return logits if self.bias is None else logits + self.bias

    def probabilities(self, logits: Tensor) -> Tensor:
        """(B, T) -> (B, T): one of the texts fits (they add up to 1), or with a bias, each fits or not by itself."""
        return logits.softmax(dim=1) if self.bias is None else logits.sigmoid()

    def loss(self, image_features: Tensor, text_features: Tensor, same: Tensor | None = None) -> Tensor:
        """Of normalised features of one batch, whole: see `gather`."""
        if self.bias is None:
            return contrastive_loss(image_features, text_features, self.scale, same)
        return sigmoid_loss(image_features, text_features, self.scale, self.bias, same)


def as_two_towers(model: Network) -> TwoTowers:
    """The model, if it reads images and texts."""
    if not isinstance(model, TwoTowers):
        raise UsageError(f"a model of the family {model.family} reads no text: this needs a CLIP or SigLIP.")
    return model


# ---- losses


def contrastive_loss(
    image_features: Tensor, text_features: Tensor, scale: Tensor | float, same: Tensor | None = None
) -> Tensor:
    """CLIP, figure 3: each image finds its text among all texts, each text its image; the mean of both. (B, E) each.

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
