"""CLIP: images and texts in one space (arXiv:2103.00020). models/two_towers.py holds what SigLIP shares with it.

    model = vitlab.create("clip_nano", **tokenizer.options)
    out = model(images, tokenizer(texts))      # out.logits_per_image (B, T), out.logits_per_text (T, B)
    model.encode_image(images)                 # (B, E), of length 1; so is encode_text(ids): the product is the cosine

Run `vitlab inspect clip_vit_base_patch32` to see every step of both towers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import Block
from vitlab.layers.edit import Edit
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace, mark
from vitlab.models.entry import CLIP_CROP, Entry, Paper, half
from vitlab.models.plain import PlainTransformer
from vitlab.models.two_towers import TextConfig, TextTower, TwoTowers, TwoTowersConfig
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import VARIANTS, ViTConfig

MAX_SCALE = 100.0  # section 2.5: above it training becomes unstable


def clip_vit(**options: Any) -> ViTConfig:
    """CLIP's own ViT: one more norm before the blocks, patches without bias, QuickGELU, no classifier."""
    own: dict[str, Any] = dict(norm_pre=True, patch_bias=False, activation="quick_gelu", eps=1e-5, classes=0)
    return ViTConfig().with_options(**{**own, **options})


@dataclass(frozen=True)
class ProjectedConfig(TwoTowersConfig):
    """Two towers, each with a projection: CLIP's, around any image tower."""

    embed_dim: int = 512  # E, of the space both end in
    loss: Literal["softmax", "sigmoid"] = "softmax"  # SigLIP's loss can train this network too

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.embed_dim < 1:
            raise UsageError(f"embed_dim={self.embed_dim} must be at least 1.")

    @property
    def projects_with_bias(self) -> bool:
        """Whether the image tower's projection has a bias."""
        return False


@dataclass(frozen=True)
class CLIPConfig(ProjectedConfig):
    image: ViTConfig = field(default_factory=clip_vit)


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


class TextTransformer(TextTower):
    """A causal transformer, read where the text ends (section 2.4)."""

    reads, sees = "end", "no later token"

    def __init__(self, config: TextConfig):
        super().__init__(config)
        self.init_text()

    def init_text(self) -> None:
        """As the paper's code starts: what ends a residual branch is smaller in a deeper network."""
        c = self.config
        nn.init.normal_(self.embed.weight, std=0.02)
        nn.init.normal_(self.positions, std=0.01)
        for block in cast("list[Block]", self.blocks):
            nn.init.normal_(block.attention.qkv.weight, std=c.width**-0.5)
            nn.init.normal_(block.attention.proj.weight, std=(2 * c.width * c.depth) ** -0.5)
            nn.init.normal_(block.mlp.fc1.weight, std=(2 * c.width) ** -0.5)
            nn.init.normal_(block.mlp.fc2.weight, std=(2 * c.width * c.depth) ** -0.5)
            for layer in (block.attention.qkv, block.attention.proj, block.mlp.fc1, block.mlp.fc2):
                nn.init.zeros_(layer.bias)

    def mask(self, z: Tensor, ids: Tensor) -> Tensor:
        N = z.shape[1]
        return torch.full((N, N), -math.inf, dtype=z.dtype, device=z.device).triu(1)[None, None]  # no later token

    def read(self, z: Tensor, ids: Tensor) -> Tensor:
        end = (ids == self.config.end_id).int().argmax(dim=1)  # (B,), the first
        return z[torch.arange(ids.shape[0], device=z.device), end]

    def trim_padding(self, ids: Tensor) -> Tensor:
        """(B, N) without the columns that are padding in every row: no token sees what comes after it."""
        last = int((ids == self.config.end_id).int().argmax(dim=1).max())
        return ids[:, : last + 1]

    def check_ids(self, ids: Tensor) -> bool:
        end_id = self.config.end_id
        if not super().check_ids(ids):
            return False
        if not bool((ids == end_id).any(dim=1).all()):
            raise UsageError(f"a text has no end-of-text ({end_id}), where it is read: model.tokenizer(texts) adds it.")
        return True


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
        self,
        images: Tensor,
        *,
        normalise: bool = False,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """(B, C, H, W) -> (B, E) as the projection gives them; normalise=True: of length 1, as CLIP's own."""
        x = self.features(images, trace=trace, reducer=reducer, edit=edit)
        return F.normalize(x, dim=-1) if normalise else x


class CLIP(TwoTowers):
    """Two towers, a projection for each, and a learned scale: logits = scale * cos(image, text) (figure 3)."""

    family = "clip"
    image_tower: type[PlainTransformer] = VisionTransformer
    text_tower: type[TextTransformer] = TextTransformer

    def __init__(self, config: ProjectedConfig):
        super().__init__(config)
        c = config
        self.image = self.image_tower(c.image)
        self.image_projection = nn.Linear(self.image.feature_width, c.embed_dim, bias=c.projects_with_bias)
        self.text = self.text_tower(c.text)
        self.text_projection = nn.Linear(c.text.width, c.embed_dim, bias=False)
        start, bias = (math.log(1 / 0.07), None) if c.loss == "softmax" else (math.log(10.0), -10.0)
        self.log_scale = nn.Parameter(torch.tensor(start))
        self.bias = None if bias is None else nn.Parameter(torch.tensor(bias))
        for projection in (self.image_projection, self.text_projection):
            nn.init.normal_(projection.weight, std=projection.in_features**-0.5)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """Tokens before the last norm, which CLIP applies to the class token alone: transformers' last_hidden_state.

        `model.encoder.forward_features` gives them after it.
        """
        return self.image.run_blocks(images, trace=with_edit(trace, edit), reducer=reducer)[0]  # (B, N, D)

    @property
    def scale(self) -> Tensor:
        """(), at most 100 with the softmax loss; call `clamp_scale`, or a larger one could not fall."""
        limited = self.log_scale.clamp(max=math.log(MAX_SCALE)) if self.bias is None else self.log_scale
        return limited.exp()

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """After the optimiser's step: the learned value itself stays below the limit."""
        if self.bias is None:
            self.log_scale.clamp_(max=math.log(MAX_SCALE))


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
