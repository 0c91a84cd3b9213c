"""YOLOS: "You only look at one sequence" (arXiv:2106.00666): detection tokens go through a plain ViT beside its
patches, and from each of them one class and one box are read.

    model = vitlab.create("yolos_tiny", classes=20)
    out = model(images)                        # out.classes (B, Q, 21), out.boxes (B, Q, 4)

Images may have any size: positions are resized (sec. 3.1). The larger models add positions after every block, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import Block, run
from vitlab.layers.edit import Edit
from vitlab.layers.positions import LearnedPositions, with_unbiased
from vitlab.layers.trace import Trace, mark
from vitlab.models.base import Capability
from vitlab.models.config import Config
from vitlab.models.dense import DenseOutput, DenseTarget
from vitlab.models.dense_network import STRETCH, DenseConfig, DenseNetwork, HeadMLP
from vitlab.models.entry import Entry, Paper
from vitlab.models.naflex import NaFlexViTConfig
from vitlab.models.plain import PlainConfig, PlainTransformer, new_token
from vitlab.models.set_loss import LossWeights, set_loss
from vitlab.models.vit_config import VARIANTS, ViTConfig


@dataclass(frozen=True)
class YOLOSConfig(DenseConfig):
    classes: int = 91  # COCO's category numbers
    queries: int = 100  # Q, the detection tokens
    between: bool = False  # positions are also added after every block but the last

    fixed = ("queries", "between")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < 1:
            raise UsageError(f"queries={self.queries} must be at least 1.")
        if self.between and len(_plain(self.encoder).prefix) != 1:
            raise UsageError("positions between blocks belong to one class token and patches: use between=False.")

    def check_encoder(self, family: str, encoder: Config) -> None:
        if not isinstance(encoder, PlainConfig) or isinstance(encoder, NaFlexViTConfig):
            raise UsageError(
                f"detection tokens go through the blocks of a plain encoder with one grid of patches (ViT, DeiT, "
                f"DINOv2, DINOv3, ...), and a {family} is none."
            )


def _plain(encoder: Config) -> PlainConfig:
    assert isinstance(encoder, PlainConfig)
    return encoder


class BetweenPositions(nn.Module):
    """What is added to all tokens after one block."""

    def __init__(self, grid: tuple[int, int], width: int, queries: int):
        super().__init__()
        self.positions = LearnedPositions(grid, width, prefix=1)
        self.detection = new_token(width, queries)

    def forward(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        return torch.cat([self.positions(grid, like), self.detection], dim=1)  # (1, 1 + N + Q, D)


class YOLOS(DenseNetwork):
    """[z; q] = blocks([tokens of the image; detection tokens]);  class = MLP(q);  box = sigmoid(MLP(q))."""

    family = "yolos"
    answers = frozenset({Capability.DETECT})
    untrained = ("queries", "head", "box_head")
    loss_weights = LossWeights(classes=1, masks=0, dice=0, boxes=5, giou=2)  # DETR's
    meanings = MappingProxyType(
        {
            "joined": "+ detection tokens with positions of their own, after the patches",
            "between": "+ learned positions",
            "norm": "the encoder's last norm, on every token",
            "head": "MLP of three layers: a logit for each class and for no object",
            "boxes": "MLP of three layers, sigmoid: centre, width and height in 0..1",
        }
    )

    def __init__(self, config: YOLOSConfig):
        super().__init__(config)
        c, inside = config, self.encoder.config
        self.queries = new_token(inside.width, c.queries)
        self.query_positions = new_token(inside.width, c.queries)
        self.between = nn.ModuleList(
            BetweenPositions(inside.grid, inside.width, c.queries) for _ in range((inside.depth - 1) * c.between)
        )
        self.new_classifier()
        self.box_head = HeadMLP(inside.width, 4)

    def new_classifier(self) -> None:
        self.head = HeadMLP(self.encoder.config.width, self.config.classes + 1)

    @property
    def encoder(self) -> PlainTransformer:
        return cast(PlainTransformer, super().encoder)

    @property
    def traceable(self) -> tuple[str, ...]:
        inside = tuple(kind for kind in self.encoder.traceable if kind not in ("norm", "pool", "pre_logits", "head"))
        return (*inside, "joined", *(("between",) * self.config.between), "norm", "head", "boxes")

    def forward(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> DenseOutput:
        trace = with_edit(trace, edit)
        encoder, Q = self.encoder, self.config.queries
        grid = encoder.layout(*images.shape[-2:]).grid
        z, rope, bias_at = encoder.start(images, trace, steps=self.traceable)  # (B, N, D)
        queries = (self.queries + self.query_positions).expand(z.shape[0], -1, -1)
        z = mark(trace, "joined", torch.cat([z, queries], dim=1))  # (B, N + Q, D)
        rope = None if rope is None else rope.with_still(Q)
        for layer, block in enumerate(cast("list[Block]", encoder.blocks)):
            at = trace.at(layer) if trace is not None else None
            bias = with_unbiased(bias_at(layer), Q)
            z = run(block, z, rope, bias, None, at, recompute=encoder.recomputes(trace))
            if layer < len(self.between):
                z = mark(at, "between", z + self.between[layer](grid, like=z))
        if trace is not None:
            trace.finish()
        z = z if encoder.norm is None else mark(trace, "norm", encoder.norm(z))
        classes = mark(trace, "head", self.head(z[:, -Q:]))  # (B, Q, K + 1)
        return DenseOutput(classes, boxes=mark(trace, "boxes", self.box_head(z[:, -Q:]).sigmoid()))  # (B, Q, 4)

    def loss(self, output: DenseOutput, targets: Sequence[DenseTarget]) -> dict[str, Tensor]:
        return set_loss(output, targets, self.loss_weights)


SIZES: dict[str, tuple[bool, dict[str, Any]]] = {  # positions between blocks, and the encoder; as released
    "nano": (False, dict(image_size=32, patch_size=4, width=64, depth=4, heads=4, mlp_ratio=2.0)),  # and for tests
    "tiny": (False, dict(image_size=(800, 1333), **VARIANTS["Ti"])),
    "small": (True, dict(image_size=(512, 864), **VARIANTS["S"])),
    "base": (True, dict(image_size=(800, 1344), **VARIANTS["B"])),
}


def _config(size: str) -> YOLOSConfig:
    between, options = SIZES[size]
    encoder = ViTConfig().with_options(classes=0, crop=True, **options)
    return YOLOSConfig(queries=20 if size == "nano" else 100).with_encoder("vit", encoder).with_options(between=between)


PAPER = Paper(
    *("yolos", YOLOSConfig, YOLOS),
    [Entry(f"yolos_{size}", "yolos", _config(size), STRETCH) for size in SIZES],
)
