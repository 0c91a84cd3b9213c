"""DINOv3 (arXiv:2508.10104): an encoder whose positions are rotary alone, so it reads images of any size and aspect.

    model = vitlab.load("hf-hub:facebook/dinov3-vits16-pretrain-lvd1689m")
    tokens = model.forward_features(images)    # (B, C, H, W) -> (B, 1 + 4 + HW/P^2, D): class, registers, patches

Patch centres lie in [-1, 1] along each axis, whatever the size; queries and keys of patches turn by 2 pi times them.
Keys have no bias, both branches a LayerScale; S+, H+ and 7B have gated MLPs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Attention, Path
from vitlab.layers.block import MLP, Activation, Block, SwiGLU
from vitlab.layers.patches import PatchEmbed
from vitlab.layers.positions import Device, Rotary, grid_points, rotary_at, rotary_speeds
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models.entry import IMAGENET, Entry, Paper, ParsedName, half
from vitlab.models.plain import AttentionBias, PlainConfig, PlainTransformer, new_token, with_prefix
from vitlab.models.vit import init_weights


@dataclass(frozen=True)
class DINOv3Config(PlainConfig):
    classes: int = 0
    width: int = 384
    heads: int = 6
    registers: int = 4  # the paper's storage tokens
    mask_token: bool = False  # released files carry one; kept so that they can be written back
    pooling: Literal["class", "mean", "class_mean"] = "class"
    mlp: Literal["mlp", "swiglu"] = "mlp"
    mlp_ratio: float = 4.0  # hidden channels / width, of a gated MLP too
    activation: Activation = "gelu"  # silu in the released gated MLPs
    mlp_bias: bool = True
    qkv_bias: bool | Literal["qv"] = "qv"  # "qv": all but the keys
    proj_bias: bool = True
    layer_scale: float = 1e-5  # start value
    eps: float = 1e-5
    attention: Path = "auto"
    rotary_base: float = 100.0
    rotary_dtype: Literal["float32", "bfloat16"] = "float32"  # of the periods: Meta's own files hold them rounded
    position_shift: float = 0.0  # s: in training, coordinates move by up to s along each axis
    position_jitter: float = 1.0  # r: they are stretched by 1 / r to r, along each axis by itself
    position_rescale: float = 2.0  # r: the same, along both axes alike
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # the same rate in every block

    fixed = (
        *("patch_size", "channels", "width", "depth", "heads", "registers", "mlp", "mlp_ratio", "mlp_bias"),
        *("qkv_bias", "proj_bias"),
    )

    def check(self) -> None:
        super().check()
        if self.head_width % 4:
            raise UsageError(
                f"rotary positions turn pairs of channels by row and by column, so width / heads must be a multiple of "
                f"4, not {self.head_width}: use width={self.heads * -(-self.head_width // 4) * 4}."
            )
        for name in ("registers", "position_shift"):
            if (value := self.option(name)) < 0:
                raise UsageError(f"{name}={value:g} must be 0 or more.")
        for name in ("position_jitter", "position_rescale"):
            if (factor := self.option(name)) < 1:
                raise UsageError(f"{name}={factor:g} must be a factor of 1 (no change) or more.")
        if min(self.rotary_base, self.layer_scale) <= 0:
            raise UsageError("rotary_base and layer_scale must be greater than 0.")

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("class", *("register",) * self.registers)

    @property
    def position_kind(self) -> str:
        return "rotary"

    @property
    def mlp_name(self) -> str:
        if self.mlp == "mlp":
            return f"MLP, {self.activation}"
        return "SwiGLU" if self.activation == "silu" else f"gated MLP, {self.activation}"


class DINOv3(PlainTransformer):
    """z_0 = [x_class; registers; x_p E];  z_l = block(z_{l-1}, angles of the patches);  y = LN(z_L)[class]."""

    family = "dinov3"

    def __init__(self, config: DINOv3Config):
        super().__init__(config)
        c = config
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.class_token = new_token(c.width)
        self.register_tokens = new_token(c.width, c.registers) if c.registers else None
        if c.mask_token:
            self.register_buffer("mask_token", torch.zeros(1, c.width))
        self.blocks = nn.ModuleList(build_block(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.apply(init_weights)
        self.add_head()

    def embed(
        self, images: Tensor, layout: TokenLayout, trace: Trace | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        z = mark(trace, "patch_embed", self.patch_embed(images))  # (B, N, D)
        z = mark(trace, "prefix", with_prefix(z, self.class_token, self.register_tokens))
        return self.leave_out(z, layout, trace, keep)

    def attention_positions(
        self, layout: TokenLayout, kept: Tensor | None, z: Tensor
    ) -> tuple[Rotary | None, AttentionBias]:
        c: DINOv3Config = self.config
        points = patch_centres(layout.grid, z.device)  # (N, 2)
        if self.training:
            points = move_points(points, c)
        rope = rotary_at(2 * math.pi * points, speeds(c, z.device), len(layout.prefix), halves=True)
        return (rope if kept is None else rope.of_tokens(kept)), lambda layer: None


def patch_centres(grid: tuple[int, int], device: Device = None) -> Tensor:
    """(N, 2), row and column of each patch's centre; an image's edges are -1 and 1."""
    sides = [(torch.arange(n, dtype=torch.float32, device=device) + 0.5) / n for n in grid]
    return 2 * grid_points(*sides) - 1


def move_points(points: Tensor, c: DINOv3Config) -> Tensor:
    """Positions in training (the paper's jittering of the box): shifted, stretched along each axis, along both."""

    def uniform(limit: float, count: int) -> Tensor:
        return (2 * torch.rand(count, device=points.device) - 1) * limit  # [-limit, limit]

    if c.position_shift:
        points = points + uniform(c.position_shift, 2)
    if c.position_jitter > 1:
        points = points * uniform(math.log(c.position_jitter), 2).exp()
    if c.position_rescale > 1:
        points = points * uniform(math.log(c.position_rescale), 1).exp()
    return points


def speeds(c: DINOv3Config, device: Device = None) -> Tensor:
    """(d/4,), one over the periods."""
    if c.rotary_dtype == "float32":
        return rotary_speeds(c.head_width, c.rotary_base, device)
    return 1 / rotary_periods(c.head_width, c.rotary_base, device).bfloat16().float()


def rotary_periods(head_dim: int, base: float, device: Device = None) -> Tensor:
    """(d/4,), as Meta's files store them."""
    return base ** (torch.arange(head_dim // 4, dtype=torch.float32, device=device) / (head_dim // 4))


def build_block(c: DINOv3Config) -> Block:
    attention = Attention(
        *(c.width, c.heads),
        qkv_bias=c.qkv_bias,
        proj_bias=c.proj_bias,
        attention_dropout=c.attention_dropout,
        path=c.attention,
    )
    kind = SwiGLU if c.mlp == "swiglu" else MLP
    mlp = kind(c.width, c.mlp_hidden, activation=c.activation, bias=c.mlp_bias)
    return Block(
        *(attention, mlp, c.width),
        eps=c.eps,
        layer_scale=c.layer_scale,
        stochastic_depth=c.stochastic_depth,
    )


GATED: dict[str, Any] = dict(mlp="swiglu", activation="silu")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # Meta's name -> timm's; D, L, h as Meta's hub builds them
    "vits16": ("small", dict(width=384, depth=12, heads=6)),
    "vits16plus": ("small_plus", dict(width=384, depth=12, heads=6, **GATED)),
    "vitb16": ("base", dict(width=768, depth=12, heads=12)),
    "vitl16": ("large", dict(width=1024, depth=24, heads=16)),
    "vith16plus": ("huge_plus", dict(width=1280, depth=32, heads=20, **GATED)),
    "vit7b16": ("7b", dict(width=4096, depth=40, heads=32, mlp_ratio=2.0, qkv_bias=False, **GATED)),
}
DIGITS: dict[str, Any] = dict(image_size=8, patch_size=2, channels=1, classes=10, width=64, depth=4, mlp_ratio=2.0)


def parse_name(name: str) -> ParsedName | None:
    """timm's: vit_small_plus_patch16_dinov3, or vit_small_plus_patch16_dinov3_qkvb."""
    match = re.fullmatch(r"vit_(\w+)_patch16_dinov3(_qkvb)?", name)
    sizes = {timm: ours for ours, (timm, _) in VARIANTS.items()}
    return (f"dinov3_{sizes[match[1]]}", {}) if match and match[1] in sizes else None


MODELS = {f"dinov3_{name}": DINOv3Config(**options, mask_token=True) for name, (_, options) in VARIANTS.items()}
PAPER = Paper(
    *("dinov3", DINOv3Config, DINOv3),
    [
        *(
            Entry(f"dinov3_{n}", "dinov3", DINOv3Config(**o, mask_token=True), IMAGENET)
            for n, (_, o) in VARIANTS.items()
        ),
        Entry("dinov3_digits", "dinov3", DINOv3Config(**DIGITS, heads=4), half(1)),
    ],
    parse_name,
)
