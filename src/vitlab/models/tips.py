"""TIPSv2: images and texts in one space, with patches that know what they show (TIPS, arXiv:2410.16512).

    model = vitlab.load("hf-hub:google/tipsv2-b14")
    vitlab.zero_shot(model, "photo.jpg", ["cat", "dog"])

The image tower is DINOv2's with one register, which learned from captions too. Against CLIP: both towers end in the
common space without projections; a text has no start and no end, its tokens see all but padding, and their mean stands
for it; text positions are computed. Run `vitlab inspect tipsv2_base_patch14` to see every step of both towers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import Activation
from vitlab.models.entry import Entry, Paper, half
from vitlab.models.two_towers import TextConfig, TextTower, TwoTowers, TwoTowersConfig
from vitlab.models.vit import VisionTransformer, init_weights
from vitlab.models.vit_config import VARIANTS, ViTConfig

SQUASH: dict[str, Any] = dict(  # both sides are resized; values stay between 0 and 1
    mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bilinear", how="stretch"
)
TEMPERATURE = 0.005065968260169029  # the released one


@dataclass(frozen=True)
class TIPSTextConfig(TextConfig):
    context: int = 64
    vocab: int = 32000
    width: int = 768
    heads: int = 12
    activation: Activation = "relu"
    eps: float = 1e-5
    end_id: int = 0  # a text ends where padding begins
    pad_id: int = 0
    scale_tokens: bool = True  # by sqrt(D), before positions are added
    mean_eps: float = 1e-8  # added to the number of tokens that the mean is of


def tips_vit(**options: Any) -> ViTConfig:
    """TIPSv2's ViT: one register without a position, LayerScale, a mask token, no classifier."""
    own: dict[str, Any] = dict(registers=1, layer_scale=1.0, mask_token=True, resize_rule="bilinear_antialias")
    return ViTConfig().with_options(**{**own, "eps": 1e-6, "classes": 0, **options})


@dataclass(frozen=True)
class TIPSConfig(TwoTowersConfig):
    image: ViTConfig = field(default_factory=tips_vit)
    text: TIPSTextConfig = field(default_factory=TIPSTextConfig)

    fixed = (*TwoTowersConfig.fixed, "text.scale_tokens", "text.context")

    @property
    def embed_dim(self) -> int:
        """E: both towers end in the common space."""
        return self.image.width

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            self.image.width != self.text.width
            or self.image.head.head_hidden
            or self.image.head.pooling == "class_mean"
        ):
            raise UsageError(
                f"both towers of a TIPSv2 end in one space, so image.width={self.image.width} and text.width="
                f"{self.text.width} must be equal, without head_hidden or class_mean."
            )
        if self.text.end_id != self.text.pad_id:
            raise UsageError(f"a TIPSv2's text has no end but padding: use text.end_id={self.text.pad_id}.")


def sinusoids(count: int, width: int, device: torch.device | None = None) -> Tensor:
    """(count, width): sines, then cosines, of speeds from 1 to 1/10000, both included; an odd width ends in 0."""
    half_width = width // 2
    step = math.log(10000) / max(half_width - 1, 1)
    speeds = torch.exp(torch.arange(half_width, device=device).float() * -step)  # (D/2,)
    angles = torch.arange(count, device=device).float()[:, None] * speeds  # (N, D/2)
    return nn.functional.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, width % 2))


class TIPSText(TextTower):
    """Every token sees all that are no padding; their mean is read. An empty text gives zeros."""

    reads, sees = "mean", "every token but padding"
    learns_positions = False
    config: TIPSTextConfig

    def __init__(self, config: TIPSTextConfig):
        super().__init__(config)
        self.blocks.apply(init_weights)
        nn.init.normal_(self.embed.weight, std=config.width**-0.5)

    def embed_tokens(self, ids: Tensor) -> Tensor:
        z = self.embed(ids)
        return z * math.sqrt(self.config.width) if self.config.scale_tokens else z

    def position_table(self, z: Tensor) -> Tensor:
        return sinusoids(z.shape[1], z.shape[2], z.device).to(z.dtype)[None]

    def mask(self, z: Tensor, ids: Tensor) -> Tensor:
        padding = ids == self.config.pad_id  # (B, N)
        hidden = padding & ~padding.all(dim=1, keepdim=True)  # where all is padding, -inf alone would give NaN
        return torch.zeros_like(hidden, dtype=z.dtype).masked_fill(hidden, -math.inf)[:, None, None]  # (B, 1, 1, N)

    def read(self, z: Tensor, ids: Tensor) -> Tensor:
        tokens = (ids != self.config.pad_id)[..., None].to(z.dtype)  # (B, N, 1)
        return (z * tokens).sum(dim=1) / (tokens.sum(dim=1) + self.config.mean_eps)

    def trim_padding(self, ids: Tensor) -> Tensor:
        used = (ids != self.config.pad_id).any(dim=0).nonzero()
        return ids[:, : int(used.max()) + 1 if len(used) else 1]


class TIPS(TwoTowers):
    """logits = cos(image, text) / temperature."""

    family = "tipsv2"

    def __init__(self, config: TIPSConfig):
        super().__init__(config)
        self.image = VisionTransformer(config.image)
        self.image_projection = None
        self.text = TIPSText(config.text)
        self.text_projection = None
        self.temperature = nn.Parameter(torch.tensor(TEMPERATURE))
        self.bias = None

    @property
    def scale(self) -> Tensor:
        """()"""
        return 1 / self.temperature

    @torch.no_grad()
    def clamp_scale(self) -> None:
        """After the optimiser's step: a temperature at or below 0 would turn the order around."""
        self.temperature.clamp_(min=1e-3)


# ---- names


def _small(text: tuple[int, int], context: int, vocab: int, **image: Any) -> TIPSConfig:
    """For a tokenizer of your own."""
    depth, heads = text
    tower = TIPSTextConfig(context, vocab, image["width"], depth, heads, mlp_ratio=2.0)
    return TIPSConfig(tips_vit(mlp_ratio=2.0, **image), tower)


MODELS = {
    "tipsv2_base_patch14": TIPSConfig(tips_vit(**VARIANTS["B"], patch_size=14, image_size=448)),
    "tipsv2_nano": _small((3, 4), 32, 1024, image_size=32, patch_size=4, width=128, depth=6, heads=4),
    "tipsv2_digits": _small((2, 4), 16, 1024, image_size=8, patch_size=2, channels=1, width=64, depth=4, heads=4),
}


def _entry(name: str, config: TIPSConfig) -> Entry:
    small = name.endswith(("_nano", "_digits"))
    aliases = () if small else ("tipsv2-b14",)
    return Entry(name, "tipsv2", config, half(config.channels) if small else SQUASH, aliases)


PAPER = Paper("tipsv2", TIPSConfig, TIPS, [_entry(name, config) for name, config in MODELS.items()])
