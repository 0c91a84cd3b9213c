"""EoMT: "Your ViT is secretly an image segmentation model" (arXiv:2503.19108): queries join the last blocks of a plain
encoder, and from each of them one mask and one class are read. Semantic, instance and panoptic segmentation.

    model = vitlab.create("eomt_small", classes=21)
    out = model(images)                        # out.classes (B, Q, 22), out.masks (B, Q, H/4, W/4)
    model.anneal(0.4)                          # in training: how often a query sees only its own mask so far

Masks are dot products of a query and the patches, which small transposed convolutions made finer (sec. 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import ACTIVATIONS, Activation, Block, run
from vitlab.layers.edit import Edit
from vitlab.layers.positions import with_unbiased
from vitlab.layers.reduced import to_map
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.base import Capability
from vitlab.models.config import Config
from vitlab.models.dense import DenseOutput, DenseTarget
from vitlab.models.dense_network import STRETCH, DenseConfig, DenseNetwork, HeadMLP
from vitlab.models.entry import Entry, Paper
from vitlab.models.naflex import NaFlexViTConfig
from vitlab.models.plain import PlainConfig, PlainTransformer, init_head, new_token
from vitlab.models.set_loss import LossWeights, set_loss
from vitlab.models.vit_config import VARIANTS, ViTConfig
from vitlab.models.vitdet import MapNorm

POWER = 0.9  # of the fall of the masking in training


@dataclass(frozen=True)
class EoMTConfig(DenseConfig):
    queries: int = 200  # Q: objects that an image can have
    joined: int = 3  # L2, the last blocks, which the queries go through
    upscale: int = 2  # steps, each of which doubles the maps' sides
    head_activation: Activation = "gelu"
    masking: tuple[float, ...] = ()  # of each joined block, the share of queries that see their own mask alone; (): 0

    fixed = ("queries", "joined", "upscale")

    def __post_init__(self) -> None:
        super().__post_init__()
        depth = self.encoder.option("depth")
        if min(self.queries, self.joined) < 1 or self.upscale < 0:
            raise UsageError("queries and joined must be at least 1, upscale 0 or more.")
        if self.joined > depth:
            raise UsageError(f"joined={self.joined} is more than the encoder's {depth} blocks: use joined={depth}.")
        if len(self.masking) not in (0, self.joined) or not all(0 <= share <= 1 for share in self.masking):
            raise UsageError(f"masking={list(self.masking)} must have {self.joined} shares from 0 to 1, or none.")

    def check_encoder(self, family: str, encoder: Config) -> None:
        if not isinstance(encoder, PlainConfig) or isinstance(encoder, NaFlexViTConfig):
            raise UsageError(
                f"EoMT's queries go through the blocks of a plain encoder with one grid of patches (ViT, DINOv2, "
                f"DINOv3, BEiT, EVA-02, ...), and a {family} is none. Around it: linear_head."
            )


class Upscale(nn.Module):
    """Doubles the sides of a map: transposed convolution, activation, a 3 x 3 convolution of each channel, norm."""

    def __init__(self, width: int, activation: Activation):
        super().__init__()
        self.finer = nn.ConvTranspose2d(width, width, kernel_size=2, stride=2)
        self.activation = ACTIVATIONS[activation]
        self.depthwise = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width, bias=False)
        self.norm = MapNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.depthwise(self.activation(self.finer(x))))  # (B, D, 2h, 2w)


class EoMT(DenseNetwork):
    """z = first blocks(image);  [z; q] = last blocks([z; queries]);  masks = MLP(q) . upscale(patches of z)."""

    family = "eomt"
    answers = frozenset({Capability.SEGMENT})
    untrained = ("queries", "upscale", "mask_head", "head")
    loss_weights = LossWeights()  # the paper's
    meanings = MappingProxyType(
        {
            "joined": "+ learned queries, after the patches",
            "norm": "the encoder's last norm, on every token",
            "head": "linear: a logit for each class and for no object",
            "mask_head": "MLP of three layers on each query",
            "upscaled": "patches as a map, made finer by transposed convolutions",
            "masks": "query x place: a logit for each mask",
        }
    )

    def __init__(self, config: EoMTConfig):
        super().__init__(config)
        c, width = config, self.encoder.config.width
        self.queries = new_token(width, c.queries)
        self.upscale = nn.Sequential(*(Upscale(width, c.head_activation) for _ in range(c.upscale)))
        self.mask_head = HeadMLP(width, width, activation=c.head_activation)
        self.new_classifier()
        nn.init.normal_(self.queries)

    def new_classifier(self) -> None:
        self.head = nn.Linear(self.encoder.config.width, self.config.classes + 1)
        init_head(self.head)

    @property
    def encoder(self) -> PlainTransformer:
        return cast(PlainTransformer, super().encoder)

    @property
    def traceable(self) -> tuple[str, ...]:
        inside = tuple(kind for kind in self.encoder.traceable if kind not in ("norm", "pool", "pre_logits", "head"))
        return (*inside, "joined", "norm", "head", "mask_head", "upscaled", "masks")

    def forward(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> DenseOutput:
        """In training `auxiliary` has the predictions before each joined block."""
        trace = with_edit(trace, edit)
        encoder, c = self.encoder, self.config
        layout = encoder.layout(*images.shape[-2:])
        z, rope, bias_at = encoder.start(images, trace, steps=self.traceable)  # (B, N, D)
        first = len(encoder.blocks) - c.joined
        earlier: list[DenseOutput] = []
        for layer, block in enumerate(cast("list[Block]", encoder.blocks)):
            bias, mask = bias_at(layer), None
            if layer == first:
                queries = self.queries.expand(z.shape[0], -1, -1)
                z = mark(trace, "joined", torch.cat([z, queries], dim=1))  # (B, N + Q, D)
                rope = None if rope is None else rope.with_still(c.queries)
            if layer >= first:
                bias = with_unbiased(bias, c.queries)
                share = c.masking[layer - first] if c.masking else 0.0
                if self.training or share >= 0.5:  # outside training chance has no part in it
                    earlier.append(self.predict(z, layout))
                    mask = self.attention_mask(earlier[-1], layout, share if self.training else 1.0)
            at = trace.at(layer) if trace is not None else None
            z = run(block, z, rope, bias, mask, at, recompute=encoder.recomputes(trace))
        if trace is not None:
            trace.finish()
        last = self.predict(z, layout, trace)
        return replace(last, auxiliary=tuple(earlier)) if self.training else last

    def predict(self, z: Tensor, layout: TokenLayout, trace: Trace | None = None) -> DenseOutput:
        """Tokens (B, N + Q, D), the queries last -> a class and a mask of each query."""
        z = z if self.encoder.norm is None else mark(trace, "norm", self.encoder.norm(z))
        Q = self.config.queries
        queries, patches = z[:, -Q:], z[:, len(layout.prefix) : -Q]
        classes = mark(trace, "head", self.head(queries))  # (B, Q, K + 1)
        vectors = mark(trace, "mask_head", self.mask_head(queries))  # (B, Q, D)
        x = mark(trace, "upscaled", self.upscale(to_map(patches, layout.grid)))  # (B, D, h, w)
        return DenseOutput(classes, mark(trace, "masks", torch.einsum("bqd,bdhw->bqhw", vectors, x)))

    def attention_mask(self, seen: DenseOutput, layout: TokenLayout, share: float) -> Tensor | None:
        """(B, 1, N + Q, N + Q), to be added to the scores: of this share of the queries, each sees the patches that
        its mask covers, and all tokens that are no patches. Everything else sees everything.
        """
        if share == 0:
            return None
        assert seen.masks is not None
        covered = F.interpolate(seen.masks.detach(), size=layout.grid, mode="bilinear").flatten(2) > 0  # (B, Q, N)
        B, Q, N = covered.shape
        if share < 1:
            covered = covered | (torch.rand(B, Q, device=covered.device) > share)[..., None]
        prefix = len(layout.prefix)
        mask = seen.masks.new_zeros(B, 1, prefix + N + Q, prefix + N + Q)
        mask[:, 0, -Q:, prefix : prefix + N].masked_fill_(~covered, -torch.inf)
        return mask

    def anneal(self, progress: float) -> None:
        """Sets `masking` for a run that is at `progress`, 0 to 1: see `annealed`."""
        self.config = replace(self.config, masking=annealed(progress, self.config.joined))

    def loss(self, output: DenseOutput, targets: Sequence[DenseTarget]) -> dict[str, Tensor]:
        return set_loss(output, targets, self.loss_weights)


def annealed(progress: float, blocks: int) -> tuple[float, ...]:
    """How large a share of the queries is masked in each joined block (sec. 3.3): 1 at first, then falling to 0 within
    a sixth of the run, one block after the other; in the last sixth nobody is masked.
    """
    starts = [1 / 6 + block / (2 * max(blocks - 1, 1)) for block in range(blocks)]  # 1/6 to 4/6, as released
    done = [min(max(6 * (progress - start), 0.0), 1.0) for start in starts]
    return tuple((1 - share) ** POWER for share in done)


def eomt_encoder(**options: Any) -> ViTConfig:
    """DINOv2 with registers, at patch 16: only patches have positions (the paper's sec. 4.1)."""
    own: dict[str, Any] = dict(patch_size=16, image_size=640, classes=0, layer_scale=1e-5, registers=4)
    own |= dict(prefix_positions="none", resize_rule="bicubic_antialias")
    return ViTConfig().with_options(**{**own, **options})


SIZES: dict[str, tuple[int, dict[str, Any]]] = {  # L2, and the encoder. S, B, L: Table 4
    "nano": (2, dict(image_size=32, patch_size=4, width=64, depth=4, heads=4, mlp_ratio=2.0, registers=0)),
    "tiny": (3, dict(image_size=256, **VARIANTS["Ti"])),
    "small": (3, VARIANTS["S"]),
    "base": (3, VARIANTS["B"]),
    "large": (4, VARIANTS["L"]),
}


def _config(size: str) -> EoMTConfig:
    joined, options = SIZES[size]
    own: dict[str, Any] = dict(queries=20, upscale=1) if size == "nano" else {}  # small images, and tests
    return EoMTConfig(joined=joined, **own).with_encoder("vit", eomt_encoder(**options))


PAPER = Paper(
    *("eomt", EoMTConfig, EoMT),
    [Entry(f"eomt_{size}", "eomt", _config(size), STRETCH) for size in SIZES],
)
