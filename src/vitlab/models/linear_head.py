"""Semantic segmentation by one linear layer: batch norm and a 1 x 1 convolution on patch tokens (DINOv2,
arXiv:2304.07193, sec. 7.4), the plainest test of what an encoder's patches know.

    model = vitlab.create("linear_head_small", classes=21)
    model(images).semantic                     # (B, 21, H/P, W/P) logits
    model.encoder.requires_grad_(False)        # the paper's protocol: the head alone is trained

It reads the tokens after chosen blocks, through the last norm; of a network of stages (Swin, PVT, Twins, ResNet) the
maps of chosen stages. Several are brought to the finest one's size and stand side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.collective import all_mean
from vitlab.layers.edit import Edit
from vitlab.layers.reduced import to_map
from vitlab.layers.trace import Trace, mark
from vitlab.models import dinov2
from vitlab.models.base import Capability
from vitlab.models.config import Config
from vitlab.models.dense import VOID, DenseOutput, DenseTarget
from vitlab.models.dense_network import STRETCH, DenseConfig, DenseNetwork
from vitlab.models.entry import Entry, Paper
from vitlab.models.hierarchy import Hierarchy, StagedConfig
from vitlab.models.plain import PlainConfig, PlainTransformer
from vitlab.models.resnet import ResNet, ResNetConfig
from vitlab.models.vit_config import VARIANTS, ViTConfig


@dataclass(frozen=True)
class LinearHeadConfig(DenseConfig):
    layers: tuple[int, ...] = (-1,)  # blocks, or of a network of stages its stages; -1 is the last

    def __post_init__(self) -> None:
        super().__post_init__()
        most = depth_of(self.encoder)
        if not self.layers or not all(-most <= layer < most for layer in self.layers):
            raise UsageError(
                f"layers={list(self.layers)} must name blocks or stages of the encoder: 0 to {most - 1}, or -1, -2, "
                "... from the last."
            )

    def check_encoder(self, family: str, encoder: Config) -> None:
        if not isinstance(encoder, PlainConfig | StagedConfig | ResNetConfig):
            raise UsageError(f"a linear head reads patch tokens or maps, and a {family} has neither.")


def depth_of(encoder: Config) -> int:
    """Blocks of a plain encoder, stages of another."""
    return encoder.depth if isinstance(encoder, PlainConfig) else len(encoder.option("depths"))


class LinearHead(DenseNetwork):
    """logits = conv(norm(maps side by side))."""

    family = "linear_head"
    answers = frozenset({Capability.SEGMENT})
    untrained = ("norm", "head")
    meanings = MappingProxyType(
        {
            "maps": "chosen layers' patches as maps, side by side",
            "map_norm": "batch norm",
            "semantic": "1 x 1 convolution: a logit for each class and place",
        }
    )

    def __init__(self, config: LinearHeadConfig):
        super().__init__(config)
        self.channels = sum(self._channels())
        self.norm = nn.BatchNorm2d(self.channels)
        self.new_classifier()

    def new_classifier(self) -> None:
        self.head = nn.Conv2d(self.channels, self.config.classes, kernel_size=1)
        nn.init.normal_(self.head.weight, std=0.01)
        if self.head.bias is not None:
            nn.init.zeros_(self.head.bias)

    def _channels(self) -> list[int]:
        """Of the map of each chosen layer."""
        c: LinearHeadConfig = self.config
        if isinstance(self.encoder, PlainTransformer):
            return [self.encoder.config.width] * len(c.layers)
        assert isinstance(self.encoder, Hierarchy | ResNet)
        return [self.encoder.pyramid[layer].channels for layer in c.layers]

    @property
    def traceable(self) -> tuple[str, ...]:
        inside = tuple(kind for kind in self.encoder.traceable if kind not in ("norm", "pool", "pre_logits", "head"))
        return (*inside, "maps", "map_norm", "semantic") if isinstance(self.encoder, PlainTransformer) else inside

    def forward(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> DenseOutput:
        trace = with_edit(trace, edit)
        x = mark(trace, "maps", side_by_side(self.maps(images, trace)))  # (B, D, h, w)
        x = mark(trace, "map_norm", self.norm(x))
        return DenseOutput(semantic=mark(trace, "semantic", self.head(x)))  # (B, K, h, w)

    def maps(self, images: Tensor, trace: Trace | None) -> list[Tensor]:
        """Of each chosen layer, (B, D, rows, columns)."""
        encoder, layers = self.encoder, self.config.layers
        if not isinstance(encoder, PlainTransformer):
            assert isinstance(encoder, Hierarchy | ResNet)
            pyramid = encoder.forward_pyramid(images, trace=trace)
            return [pyramid[layer] for layer in layers]
        layout = encoder.layout(*images.shape[-2:])
        tokens = encoder.tokens_after(images, layers, trace=trace, steps=self.traceable)
        tokens = tokens if encoder.norm is None else [encoder.norm(z) for z in tokens]
        return [to_map(z[:, len(layout.prefix) :], layout.grid) for z in tokens]

    def loss(self, output: DenseOutput, targets: Sequence[DenseTarget]) -> dict[str, Tensor]:
        assert output.semantic is not None
        return {"pixels": pixel_loss(output.semantic, targets)}


def side_by_side(maps: Sequence[Tensor]) -> Tensor:
    """Maps (B, D, h, w) at the size of the finest one."""
    size = max(tuple(m.shape[-2:]) for m in maps)
    same = [m if m.shape[-2:] == size else F.interpolate(m, size=size, mode="bilinear") for m in maps]
    return torch.cat(same, dim=1) if len(same) > 1 else same[0]


def pixel_loss(logits: Tensor, targets: Sequence[DenseTarget]) -> Tensor:
    """Cross-entropy of logits (B, K, h, w), enlarged to the images: the mean over all pixels that are not VOID."""
    if any(target.semantic is None for target in targets):
        raise UsageError("this network learns from a class for every pixel, and the data has none: use semantic masks.")
    losses: list[Tensor] = []
    for image, target in zip(logits, targets, strict=True):
        assert target.semantic is not None
        enlarged = F.interpolate(image[None], size=tuple(target.semantic.shape), mode="bilinear")  # (1, K, H, W)
        losses.append(F.cross_entropy(enlarged, target.semantic[None], ignore_index=VOID, reduction="sum"))
    pixels = sum((t.semantic != VOID).sum() for t in targets if t.semantic is not None)
    return torch.stack(losses).sum() / all_mean(torch.as_tensor(pixels, dtype=logits.dtype)).clamp(min=1)


NANO = ViTConfig().with_options(image_size=32, patch_size=4, width=64, depth=4, heads=4, mlp_ratio=2.0, classes=0)
ENCODERS = {
    "nano": NANO,  # for small images and tests
    "tiny": ViTConfig(**VARIANTS["Ti"], classes=0),
    "small": dinov2.MODELS["dinov2_small"],
    "base": dinov2.MODELS["dinov2_base"],
    "large": dinov2.MODELS["dinov2_large"],
}
PAPER = Paper(
    *("linear_head", LinearHeadConfig, LinearHead),
    [
        Entry(f"linear_head_{size}", "linear_head", LinearHeadConfig().with_encoder("vit", encoder), STRETCH)
        for size, encoder in ENCODERS.items()
    ],
)
