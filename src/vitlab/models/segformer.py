"""SegFormer (arXiv:2105.15203): the encoder of PVT v2 and a head of linear layers alone, for semantic segmentation.

    model = vitlab.create("segformer_b0", classes=21)
    model(images).semantic                     # (B, 21, H/4, W/4) logits, for images of any size

The map of every stage is brought to one width and to the finest one's size; side by side they go through one more
linear layer with batch norm, and a classifier (sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability
from vitlab.models.config import Config
from vitlab.models.dense import DenseOutput, DenseTarget
from vitlab.models.dense_network import STRETCH, DenseConfig, DenseNetwork, backbone
from vitlab.models.entry import Entry, Paper
from vitlab.models.hierarchy import Hierarchy, StagedConfig
from vitlab.models.linear_head import pixel_loss
from vitlab.models.pvt import MODELS_V2, PVTv2Config


def mit(**options: Any) -> PVTv2Config:
    """The paper's encoder: a PVT v2 whose MLPs are four times as wide, and with 1e-5 in every norm."""
    own: dict[str, Any] = dict(image_size=512, classes=0, mlp_ratios=(4, 4, 4, 4))
    return PVTv2Config().with_options(
        **{**own, **dict.fromkeys(("eps", "merge_eps", "reduction_eps"), 1e-5), **options}
    )


@dataclass(frozen=True)
class SegFormerConfig(DenseConfig):
    backbone: dict[str, Any] = field(default_factory=lambda: backbone("pvt_v2", mit()))
    head_width: int = 256  # D', to which the map of every stage is brought
    head_dropout: float = 0.1

    fixed = ("head_width",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_width < 1 or not 0 <= self.head_dropout < 1:
            raise UsageError("head_width must be at least 1, head_dropout at least 0 and below 1.")

    def check_encoder(self, family: str, encoder: Config) -> None:
        if not isinstance(encoder, StagedConfig):
            raise UsageError(
                f"SegFormer reads the maps of a network of stages (PVT v2, PVT, Swin, Twins), and a {family} is none. "
                "Around it: linear_head."
            )


class SegFormer(DenseNetwork):
    """logits = classifier(relu(norm(fuse(maps of all stages))))."""

    family = "segformer"
    answers = frozenset({Capability.SEGMENT})
    untrained = ("projections", "fuse", "norm", "head")
    meanings = MappingProxyType(
        {
            "maps": "the map of every stage at one width and size, side by side",
            "fused": "1 x 1 convolution, batch norm, relu",
            "semantic": "1 x 1 convolution: a logit for each class and place",
        }
    )

    def __init__(self, config: SegFormerConfig):
        super().__init__(config)
        c, widths = config, [level.channels for level in self.encoder.pyramid]
        self.projections = nn.ModuleList(nn.Conv2d(width, c.head_width, kernel_size=1) for width in widths)
        self.fuse = nn.Conv2d(len(widths) * c.head_width, c.head_width, kernel_size=1, bias=False)
        self.norm = nn.BatchNorm2d(c.head_width)
        self.dropout = nn.Dropout(c.head_dropout)
        self.new_classifier()

    def new_classifier(self) -> None:
        self.head = nn.Conv2d(self.config.head_width, self.config.classes, kernel_size=1)

    @property
    def encoder(self) -> Hierarchy:
        return cast(Hierarchy, super().encoder)

    def forward(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> DenseOutput:
        maps = self.encoder.forward_pyramid(images, trace=with_edit(trace, edit))  # each (B, D_i, rows, columns)
        size = maps[0].shape[-2:]
        same = [
            F.interpolate(project(x), size=size, mode="bilinear")
            for project, x in zip(self.projections, maps, strict=True)
        ]
        x = torch.cat(same[::-1], dim=1)  # (B, 4 D', h, w), the coarsest first
        x = self.dropout(F.relu(self.norm(self.fuse(x))))
        return DenseOutput(semantic=self.head(x))  # (B, K, h, w)

    def loss(self, output: DenseOutput, targets: Sequence[DenseTarget]) -> dict[str, Tensor]:
        assert output.semantic is not None
        return {"pixels": pixel_loss(output.semantic, targets)}


NARROW: dict[str, Any] = dict(widths=(32, 64, 160, 256))
SIZES: dict[str, tuple[int, PVTv2Config]] = {  # D' and the encoder, Tables 1 and 6
    "b0": (256, mit(**NARROW)),
    "b1": (256, mit()),
    "b2": (768, mit(depths=(3, 4, 6, 3))),
    "b3": (768, mit(depths=(3, 4, 18, 3))),
    "b4": (768, mit(depths=(3, 8, 27, 3))),
    "b5": (768, mit(depths=(3, 6, 40, 3))),
    "nano": (64, MODELS_V2["pvt_v2_cifar"]),  # for small images and tests
}
PAPER = Paper(
    *("segformer", SegFormerConfig, SegFormer),
    [
        Entry(
            f"segformer_{size}",
            "segformer",
            SegFormerConfig(image_size=c.image_size, backbone=backbone("pvt_v2", c), head_width=width),
            STRETCH,
        )
        for size, (width, c) in SIZES.items()
    ],
)
