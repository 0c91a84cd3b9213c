"""SigLIP: every pair of image and text is a match or none, by itself (arXiv:2303.15343); SigLIP 2 (arXiv:2502.14786).

    model = vitlab.load("hf-hub:google/siglip2-base-patch16-224")
    vitlab.zero_shot(model, "photo.jpg", ["cat", "dog"])       # each label's own probability: they need not add up to 1

Against CLIP: no class token but attention pooling (MAP), which ends in the common space; a text tower in which every
token sees every other, padding too, read at its last token; a bias beside the scale. SigLIP 2 is the same network with
another vocabulary. Run `vitlab inspect siglip_base_patch16` to see every step of both towers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import Activation
from vitlab.models.entry import HALF, Entry, Paper, ParsedName, half
from vitlab.models.two_towers import TextConfig, TextTower, TwoTowers, TwoTowersConfig
from vitlab.models.vit import VisionTransformer, init_weights
from vitlab.models.vit_config import VARIANTS, ViTConfig

SQUASH: dict[str, Any] = {**HALF, "interpolation": "bicubic", "how": "stretch"}  # both sides are resized
VOCABULARY = {"siglip": 32000, "siglip2": 256000}  # sentencepiece of C4; Gemma's


@dataclass(frozen=True)
class SigLIPTextConfig(TextConfig):
    context: int = 64
    vocab: int = 32000
    width: int = 768
    heads: int = 12
    activation: Activation = "gelu_tanh"
    eps: float = 1e-6
    end_id: int = 1
    pad_id: int = 1  # the text tower sees it; SigLIP 2 has 0


def siglip_vit(**options: Any) -> ViTConfig:
    """SigLIP's ViT: no class token, attention pooling, tanh GELU, no classifier."""
    own: dict[str, Any] = dict(class_token=False, pooling="attention", activation="gelu_tanh", eps=1e-6, classes=0)
    return ViTConfig().with_options(**{**own, **options})


@dataclass(frozen=True)
class SigLIPConfig(TwoTowersConfig):
    image: ViTConfig = field(default_factory=siglip_vit)
    text: TextConfig = field(default_factory=SigLIPTextConfig)

    @property
    def embed_dim(self) -> int:
        """E: the image tower ends in the common space."""
        return self.image.width

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image.head.head_hidden or self.image.head.pooling == "class_mean":
            raise UsageError("a SigLIP's image embedding is as wide as its tokens: leave out head_hidden, class_mean.")


class SigLIPText(TextTower):
    """Every token sees every other; the last one, which may be padding, is read."""

    reads = "last"

    def __init__(self, config: TextConfig):
        super().__init__(config)
        self.blocks.apply(init_weights)
        for table in (self.embed.weight, self.positions):
            nn.init.normal_(table, std=config.width**-0.5)

    def read(self, z: Tensor, ids: Tensor) -> Tensor:
        return z[:, -1]


class SigLIP(TwoTowers):
    """logits = scale * cos(image, text) + bias; their sigmoid is the probability of a match (section 3.2)."""

    family = "siglip"
    image_tower: type[VisionTransformer] = VisionTransformer

    def __init__(self, config: SigLIPConfig):
        super().__init__(config)
        self.image = self.image_tower(config.image)
        self.image_projection = None
        self.text = SigLIPText(config.text)
        self.text_projection = nn.Linear(config.text.width, config.embed_dim)
        init_weights(self.text_projection)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))  # section 3.2, as is the bias
        self.bias = nn.Parameter(torch.tensor(-10.0))


# ---- names

SO400M: dict[str, Any] = dict(width=1152, depth=27, heads=16, mlp_ratio=4304 / 1152)  # arXiv:2305.13035
GIANT: dict[str, Any] = dict(width=1536, depth=40, heads=16)
TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # image tower, text tower
    "base": (VARIANTS["B"], dict(width=768, depth=12, heads=12)),
    "large": (VARIANTS["L"], dict(width=1024, depth=24, heads=16)),
    "so400m": (SO400M, SO400M),
    "giant_opt": (GIANT, SO400M),
}
RELEASES: dict[str, dict[tuple[str, int], int]] = {  # size, patch -> image size; others by their name: ..._384
    "siglip": {("base", 16): 224, ("large", 16): 256, ("so400m", 14): 224},
    "siglip2": {
        ("base", 16): 224,
        ("base", 32): 256,
        ("large", 16): 256,
        ("so400m", 14): 224,
        ("so400m", 16): 256,
        ("giant_opt", 16): 256,
    },
}


def _variant(release: str, size: str, patch_size: int, image_size: int) -> SigLIPConfig:
    image, text = TOWERS[size]
    crop = patch_size == 14  # of 384 pixels, the released size, the last 6 are not read
    tower = SigLIPTextConfig(vocab=VOCABULARY[release], pad_id=1 if release == "siglip" else 0, **text)
    return SigLIPConfig(siglip_vit(**image, patch_size=patch_size, image_size=image_size, crop=crop), tower)


def _small(text: tuple[int, int, int], context: int, vocab: int, **image: Any) -> SigLIPConfig:
    """For a tokenizer of your own."""
    width, depth, heads = text
    tower = SigLIPTextConfig(context, vocab, width, depth, heads, mlp_ratio=2.0, end_id=vocab - 1, pad_id=vocab - 1)
    return SigLIPConfig(siglip_vit(mlp_ratio=2.0, **image), tower)


MODELS = {
    **{
        f"{release}_{size}_patch{patch}": _variant(release, size, patch, side)
        for release, table in RELEASES.items()
        for (size, patch), side in table.items()
    },
    "siglip_nano": _small((128, 3, 4), 32, 1024, image_size=32, patch_size=4, width=128, depth=6, heads=4),
    "siglip_digits": _small((64, 2, 4), 16, 1024, image_size=8, patch_size=2, channels=1, width=64, depth=4, heads=4),
}


def _parse_name(name: str) -> ParsedName | None:
    """google's names on the hub: siglip-so400m-patch14-384."""
    parts = re.fullmatch(r"(siglip2?-[a-z0-9-]+-patch[0-9]+)-([0-9]{1,9})", name)
    base = parts[1].replace("-", "_") if parts else ""
    return (base, {"image_size": int(parts[2])}) if parts and base in MODELS else None


def _entry(name: str, config: SigLIPConfig) -> Entry:
    small = name.endswith(("_nano", "_digits"))
    return Entry(name, "siglip", config, half(config.channels) if small else SQUASH)


ENTRIES = [_entry(name, config) for name, config in MODELS.items()]
PAPER = Paper("siglip", SigLIPConfig, SigLIP, ENTRIES, _parse_name)
