"""DPT: vision transformers for dense prediction (arXiv:2103.13413), as Depth Anything V2 (arXiv:2406.09414) has it: a
depth for every pixel from the tokens after four blocks.

    model = vitlab.load("hf-hub:depth-anything/Depth-Anything-V2-Small-hf")
    model(images).depth                        # (B, H, W): relative and larger where nearer, or metres

The tokens become maps at strides P/4, P/2, P and 2P (reassemble, sec. 3.1), which are added up from the coarsest to the
finest (fusion). Images may have any size; pixels after the last whole patch are not read. It is read, not trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.edit import Edit
from vitlab.layers.reduced import to_map
from vitlab.layers.trace import Trace, mark
from vitlab.models import dinov2
from vitlab.models.base import Capability
from vitlab.models.config import Config
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import STRETCH, DenseConfig, DenseNetwork, backbone
from vitlab.models.entry import Entry, Paper
from vitlab.models.naflex import NaFlexViTConfig
from vitlab.models.plain import PlainConfig, PlainTransformer
from vitlab.models.vit_config import ViTConfig

FINER = (4, 2, 1)  # how much finer than the patches the first three maps are; the last one is twice as coarse


@dataclass(frozen=True)
class DPTConfig(DenseConfig):
    classes: int = 0
    layers: tuple[int, ...] = (2, 5, 8, 11)  # blocks that are read
    widths: tuple[int, ...] = (48, 96, 192, 384)  # channels of their maps
    fusion_width: int = 64
    head_width: int = 32
    normed: bool = True  # tokens go through the encoder's last norm first
    depth_kind: Literal["relative", "metric"] = "relative"  # ends in a ReLU, or in a sigmoid times max_depth
    max_depth: float = 1.0

    names_classes: ClassVar[bool] = False
    fixed = ("layers", "widths", "fusion_width", "head_width", "normed", "depth_kind")

    def __post_init__(self) -> None:
        super().__post_init__()
        depth = self.encoder.option("depth")
        if len(self.layers) != 4 or not all(-depth <= layer < depth for layer in self.layers):
            raise UsageError(f"layers={list(self.layers)} must name four blocks of the encoder, 0 to {depth - 1}.")
        if len(self.widths) != 4 or min(*self.widths, self.head_width) < 1 or self.fusion_width < 2:
            raise UsageError("widths must have four numbers, each at least 1; fusion_width at least 2.")
        if self.max_depth <= 0:
            raise UsageError(f"max_depth={self.max_depth} must be above 0.")

    def check_encoder(self, family: str, encoder: Config) -> None:
        if not isinstance(encoder, PlainConfig) or isinstance(encoder, NaFlexViTConfig):
            raise UsageError(
                f"DPT reads the blocks of a plain encoder with one grid of patches, and a {family} is none."
            )


class Reassemble(nn.Module):
    """A map of tokens -> one with other channels and sides, then at the fusion's width."""

    def __init__(self, width: int, channels: int, fusion_width: int, finer: int):
        super().__init__()
        self.project = nn.Conv2d(width, channels, kernel_size=1)
        if finer > 1:
            self.resize = nn.ConvTranspose2d(channels, channels, kernel_size=finer, stride=finer)
        else:
            coarser = nn.Conv2d(channels, channels, kernel_size=3, stride=2, padding=1)
            self.resize = nn.Identity() if finer == 1 else coarser
        self.to_fusion = nn.Conv2d(channels, fusion_width, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_fusion(self.resize(self.project(x)))


class ResidualUnit(nn.Module):
    """x + two 3 x 3 convolutions, a ReLU before each."""

    def __init__(self, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Fusion(nn.Module):
    """Adds a finer map to what was fused so far, and enlarges the sum."""

    def __init__(self, width: int, *, first: bool):
        super().__init__()
        self.unit = None if first else ResidualUnit(width)
        self.refine = ResidualUnit(width)
        self.project = nn.Conv2d(width, width, kernel_size=1)

    def forward(self, fused: Tensor, finer: Tensor | None, size: Sequence[int]) -> Tensor:
        """`size` (h, w) of the result."""
        if finer is not None and self.unit is not None:
            fused = fused + self.unit(finer)
        x = F.interpolate(self.refine(fused), size=(size[0], size[1]), mode="bilinear", align_corners=True)
        return self.project(x)


class DepthHead(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width // 2, kernel_size=3, padding=1)
        self.conv2 = nn.Conv2d(width // 2, hidden, kernel_size=3, padding=1)
        self.conv3 = nn.Conv2d(hidden, 1, kernel_size=1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """(B, D, h, w) -> (B, 1, H, W), before the last activation."""
        x = F.interpolate(self.conv1(x), size=size, mode="bilinear", align_corners=True)
        return self.conv3(F.relu(self.conv2(x)))


class DPT(DenseNetwork):
    """depth = head(fusion(reassemble(tokens after four blocks)))."""

    family = "dpt"
    answers = frozenset({Capability.DEPTH})
    untrained = ("reassemble", "fusion", "head")
    meanings = MappingProxyType(
        {
            "maps": "tokens after four blocks as maps, the coarsest of them",
            "fused": "maps added up from the coarsest to the finest, a residual unit before each sum",
            "depth": "three convolutions at the size of the patches' pixels; ReLU, or sigmoid x max_depth",
        }
    )

    def __init__(self, config: DPTConfig):
        super().__init__(config)
        c, width = config, self.encoder.config.width
        self.reassemble = nn.ModuleList(
            Reassemble(width, channels, c.fusion_width, finer)
            for channels, finer in zip(c.widths, (*FINER, 0), strict=True)
        )
        self.fusion = nn.ModuleList(Fusion(c.fusion_width, first=number == 0) for number in range(4))
        self.head = DepthHead(c.fusion_width, c.head_width)

    def new_classifier(self) -> None:
        raise UsageError("a network of depth has no classes.")

    @property
    def encoder(self) -> PlainTransformer:
        return cast(PlainTransformer, super().encoder)

    @property
    def traceable(self) -> tuple[str, ...]:
        inside = tuple(kind for kind in self.encoder.traceable if kind not in ("norm", "pool", "pre_logits", "head"))
        return (*inside, "maps", "fused", "depth")

    def forward(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> DenseOutput:
        trace = with_edit(trace, edit)
        c, encoder = self.config, self.encoder
        layout = encoder.layout(*images.shape[-2:])
        tokens = encoder.tokens_after(images, c.layers, trace=trace, steps=self.traceable)
        if c.normed and encoder.norm is not None:
            tokens = [encoder.norm(z) for z in tokens]
        patches = [to_map(z[:, len(layout.prefix) :], layout.grid) for z in tokens]  # each (B, D, rows, columns)
        maps = [part(x) for part, x in zip(self.reassemble, patches, strict=True)]
        fused = mark(trace, "maps", maps[-1])
        for number, part in enumerate(self.fusion):
            finer = maps[-1 - number] if number else None
            rows, columns = fused.shape[-2:]
            size = maps[-2 - number].shape[-2:] if number < 3 else (2 * rows, 2 * columns)
            fused = part(fused, finer, size)
        fused = mark(trace, "fused", fused)  # (B, D', 8 rows, 8 columns)
        P = encoder.config.patch_size
        x = self.head(fused, (layout.grid[0] * P, layout.grid[1] * P))[:, 0]  # (B, H, W)
        x = F.relu(x) if c.depth_kind == "relative" else x.sigmoid()
        return DenseOutput(depth=mark(trace, "depth", c.max_depth * x))


def _encoder(name: str) -> ViTConfig:
    return dinov2.MODELS[name].with_options(crop=True, resize_rule="bicubic")


NANO = ViTConfig().with_options(
    image_size=32, patch_size=4, width=64, depth=4, heads=4, mlp_ratio=2.0, classes=0, crop=True
)
SIZES: dict[str, tuple[ViTConfig, dict[str, Any]]] = {  # the encoder, and what differs; Depth Anything V2's
    "nano": (NANO, dict(layers=(0, 1, 2, 3), widths=(8, 16, 32, 64), fusion_width=16, head_width=8)),
    "small": (_encoder("dinov2_small"), {}),
    "base": (_encoder("dinov2_base"), dict(widths=(96, 192, 384, 768), fusion_width=128)),
    "large": (
        _encoder("dinov2_large"),
        dict(layers=(4, 11, 17, 23), widths=(256, 512, 1024, 1024), fusion_width=256),
    ),
}


def _config(size: str) -> DPTConfig:
    encoder, options = SIZES[size]
    return DPTConfig(image_size=encoder.image_size, backbone=backbone("vit", encoder), **options)


PAPER = Paper(
    *("dpt", DPTConfig, DPT),
    [
        Entry(f"depth_anything_v2_{size}", "dpt", _config(size), {**STRETCH, "interpolation": "bicubic"})
        for size in SIZES
    ],
)
