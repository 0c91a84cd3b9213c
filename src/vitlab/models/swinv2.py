"""Swin v2: Swin with cosine attention, a norm at the end of each branch, and position biases from a small network, so
that trained weights fit larger windows (arXiv:2111.09883).

    model = vitlab.create("swinv2_tiny", classes=10)
    logits = model(images)                     # (B, 3, H, W) -> (B, 10), any size

Run `vitlab inspect swinv2_tiny` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import BLOCK_KINDS, MLP
from vitlab.layers.trace import LayerTrace, mark
from vitlab.layers.windows import WindowAttention, Windows, cached
from vitlab.models.entry import HALF, IMAGENET_CROP, Entry, Paper, ParsedName
from vitlab.models.hierarchy import Grid, GridBlock
from vitlab.models.swin import SMALL_IMAGES, Swin, SwinConfig, neighbours
from vitlab.models.swin import VARIANTS as SWIN_VARIANTS


@dataclass(frozen=True)
class SwinV2Config(SwinConfig):
    """Swin's options; `window` may change after training, for the biases are computed."""

    image_size: tuple[int, int] = (256, 256)  # (H, W) of the preprocess; with windows_fit="config" of the windows too
    window: int = 8
    shift_axes: Literal["together", "each"] = "each"  # windows and shifts fit each side of a map (timm), or both the
    # shorter one (the authors)
    pretrained_windows: tuple[int, ...] = ()  # of each stage: the window that offsets are measured by, 0: its own
    windows_fit: Literal["image", "config"] = "image"  # to the maps of the image at hand; or always to the rows of an
    # image of image_size (transformers)
    mask_twice: bool = False  # what a shift brought together is masked by -200 (transformers), not -100

    def __post_init__(self) -> None:
        super().__post_init__()
        windows, stages = self.pretrained_windows, len(self.depths)
        if windows and len(windows) != stages:
            raise UsageError(f"pretrained_windows={list(windows)} must have a number for each of {stages} stages.")
        if any(window < 0 or window == 1 for window in windows):
            raise UsageError(f"pretrained_windows={list(windows)} must be 0 (the stage's own window) or at least 2.")

    def stage_windows(self, stage: int, image: tuple[int, int], shifted: bool) -> Windows:
        """The windows of a stage: M x M, or the whole map where it has no more whole tokens; that is not shifted."""
        sides = (self.image_size[0],) * 2 if self.windows_fit == "config" else image
        if self.shift_axes == "together":
            sides = (min(sides),) * 2
        M, tokens = self.window, [max(side // self.patch_size // 2**stage, 1) for side in sides]
        shift = [M // 2 if shifted and count > M else 0 for count in tokens]
        window = min(M, tokens[0]), min(M, tokens[1])
        return Windows(self.grids(*image)[stage], window, (shift[0], shift[1]), self.roll_first)

    def places(self, height: int, width: int) -> tuple[Windows, ...]:
        """The windows of every block in images of this size."""
        return tuple(
            self.stage_windows(stage, (height, width), shifted=number % 2 == 1)
            for stage, depth in enumerate(self.depths)
            for number in range(depth)
        )


VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": SWIN_VARIANTS["tiny"],
    "small": SWIN_VARIANTS["small"],
    "base": SWIN_VARIANTS["base"],
    "large": {**SWIN_VARIANTS["large"], "image_size": (192, 192), "window": 12},  # as released before fine-tuning
}
MODELS = {
    **{f"swinv2_{name}": SwinV2Config(**variant) for name, variant in VARIANTS.items()},
    "swinv2_cifar": SwinV2Config(**SMALL_IMAGES),
}
MOST = math.log(100)  # of the learned scale: tau is at least 0.01, sec. 3.3


class ContinuousBias(nn.Module):
    """B(dx, dy) = G(dx, dy), eq. 3: a small network from the offset of two tokens to a number from 0 to 16 per head.

    Offsets are on a log scale (eq. 4), so that a larger window asks for few that it has not learned.
    """

    def __init__(self, heads: int, pretrained_window: int):
        super().__init__()
        self.pretrained_window = pretrained_window  # that offsets are measured by; 0: the window at hand
        self.fc1 = nn.Linear(2, 512)
        self.fc2 = nn.Linear(512, heads, bias=False)

    def forward(self, window: tuple[int, int]) -> Tensor:
        device, pretrained = self.fc1.weight.device, self.pretrained_window
        (offsets,) = cached("log_offsets", device, window, (pretrained, pretrained) if pretrained else window)
        (index,) = cached("offsets", device, window, window)  # (n, n): which offset each pair has
        numbers = self.fc2(F.relu(self.fc1(offsets.to(self.fc1.weight.dtype))))  # (offsets, h)
        return (16 * numbers.sigmoid())[index].permute(2, 0, 1)[None]  # (1, h, n, n)


class CosineAttention(WindowAttention):
    """SoftMax(cos(Q, K) / tau + B) V, eq. 2, with a learned tau for each head."""

    by_sqrt_d = False

    def __init__(self, c: SwinV2Config, stage: int):
        width, heads = c.widths[stage], c.heads[stage]
        super().__init__(
            *(width, heads),
            qkv_bias="qv" if c.qkv_bias else False,
            attention_dropout=c.attention_dropout,
            dropout=c.dropout,
            path=c.attention,
        )
        self.log_scale = nn.Parameter(torch.full((heads, 1, 1), math.log(10)))  # log(1 / tau)
        self.position_bias = ContinuousBias(heads, c.pretrained_windows[stage] if c.pretrained_windows else 0)
        self.scale = 1.0  # the queries hold it
        self.mask_times = 2 if c.mask_twice else 1

    @property
    def biased(self) -> bool:
        return True

    def project(self, x: Tensor, trace: LayerTrace | None) -> list[Tensor]:
        q, k, v = super().project(x, trace)
        scale = self.log_scale.clamp(max=MOST).exp()  # (h, 1, 1)
        return [F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1), v]

    def bias(self, at: Windows) -> Tensor:
        return self.position_bias(at.window).contiguous()  # (1, h, n, n)

    def mask(self, at: Windows) -> Tensor | None:
        mask = super().mask(at)
        return None if mask is None else self.mask_times * mask  # (count, 1, n, n)


class ResPostNormBlock(GridBlock):
    """z + LN(f(z)) for attention and MLP: activations stay small however deep the network is (sec. 3.2)."""

    pre_norm = False

    def forward(self, z: Tensor, at: Any, trace: LayerTrace | None = None) -> Tensor:  # (B, N, D)
        y = self.depth_drop(self.norm1(self.attention(z, at, trace)))
        z = mark(trace, "after_attention", z + mark(trace, "attention_out", y))
        y = self.depth_drop(self.norm2(self.mlp(z, trace)))
        return mark(trace, "tokens", z + mark(trace, "mlp_out", y))


class NormedMerging(nn.Module):
    """Four neighbours side by side, by one matrix from 4C to 2C channels, then a norm."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = nn.LayerNorm(2 * width, eps=eps)

    def forward(self, z: Tensor, grid: Grid) -> Tensor:  # (B, N, C)
        return self.norm(self.reduction(neighbours(z, grid)))  # (B, N/4, 2C)


class SwinV2(Swin):
    """Swin with the three changes of fig. 1; norms start at 1, as in transformers (the authors start them at 0)."""

    family = "swinv2"
    config: SwinV2Config  # pyright: ignore[reportIncompatibleVariableOverride]  # it is set once
    block_kinds = tuple(kind for kind in BLOCK_KINDS if kind not in ("norm1", "norm2"))  # they end the halves
    meanings = MappingProxyType(
        {
            "heads": "softmax(cos(q, k) / tau{bias}) v{where}; {heads} heads side by side",
            "after_attention": "LayerNorm, + residual",
            "tokens": "LayerNorm, + residual",
        }
    )

    def __init__(self, config: SwinV2Config):
        super().__init__(config)

    def merging(self, width: int) -> nn.Module:
        return NormedMerging(width, self.config.merge_eps)

    def block(self, stage: int, stochastic_depth: float) -> GridBlock:
        c, width = self.config, self.config.widths[stage]
        mlp = MLP(width, int(width * c.mlp_ratio), activation=c.activation, dropout=c.dropout)
        return ResPostNormBlock(CosineAttention(c, stage), mlp, width, eps=c.eps, stochastic_depth=stochastic_depth)

    def places(self, height: int, width: int) -> tuple[Windows, ...]:
        return self.config.places(height, width)


def _entry(name: str, config: SwinV2Config) -> Entry:
    size, side = name.split("_")[1], config.image_size[0]
    if size not in VARIANTS:
        return Entry(name, "swinv2", config, HALF)
    aliases = (f"SwinV2-{size[0].upper()}", f"swinv2_{size[0]}")
    return Entry(name, "swinv2", config, preprocess_for(side), aliases)


def preprocess_for(side: int) -> dict[str, Any]:
    """As timm has it: nine tenths of the image, all of it from 384 pixels on."""
    return {**IMAGENET_CROP, "resize": int(side / 0.9) if side < 384 else side, "size": (side, side)}


def parse_name(name: str) -> ParsedName | None:
    """timm's and the hub's: swinv2_base_window8_256; swinv2_base_window12to24_192to384 was trained with windows of 12
    on 192 pixels, then fine-tuned.
    """
    number, name = "([0-9]{1,4})", name.replace("-", "_").replace("_patch4_", "_")
    sizes = "|".join(VARIANTS)
    if match := re.fullmatch(rf"swinv2_({sizes})_window{number}_{number}", name):
        return f"swinv2_{match[1]}", {"window": int(match[2]), "image_size": int(match[3])}
    if match := re.fullmatch(rf"swinv2_({sizes})_window{number}to{number}_{number}to{number}", name):
        before, window, small, large = (int(text) for text in match.groups()[1:])
        windows = tuple(min(before, small // 4 // 2**stage) for stage in range(4))
        return f"swinv2_{match[1]}", {"window": window, "image_size": large, "pretrained_windows": windows}
    return None


PAPER = Paper("swinv2", SwinV2Config, SwinV2, [_entry(name, config) for name, config in MODELS.items()], parse_name)
