"""ResNet: residual networks of convolutions (arXiv:1512.03385), the CNN to compare with and to learn from.

    model = vitlab.create("resnet50", classes=10)
    logits = model(images)                     # (B, 3, 224, 224) -> (B, 10)

Run `vitlab inspect resnet50` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.edit import Edit
from vitlab.layers.patches import check_images
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import LayerTrace, TokenLayout, Trace, mark
from vitlab.models.base import Capability, Network
from vitlab.models.config import Config
from vitlab.models.entry import HALF, IMAGENET_CROP, Entry, Paper
from vitlab.models.hierarchy import Level


@dataclass(frozen=True)
class ResNetConfig(Config):
    image_size: tuple[int, int] = (224, 224)  # (H, W) of the preprocess; the network takes any
    channels: int = 3  # C
    classes: int = 1000  # 0: the model returns pooled features (B, D)
    stem: Literal["imagenet", "small", "deep"] = "imagenet"  # 7x7 by 2, then max-pooling by 2; for small images 3x3; or
    # three 3x3, the first by 2, in place of the 7x7 (ResNet-C, arXiv:1812.01187, fig. 2b)
    stem_width: int = 64
    stem_inner: tuple[int, ...] = ()  # of a deep stem: channels after its first and second convolution
    block: Literal["basic", "bottleneck"] = "bottleneck"  # fig. 5, left and right
    depths: tuple[int, ...] = (3, 4, 6, 3)  # residual blocks in each stage
    widths: tuple[int, ...] = (256, 512, 1024, 2048)  # channels that each stage gives; inside a bottleneck, a quarter
    stride_in: Literal["3x3", "1x1"] = "3x3"  # where a bottleneck halves: the paper 1x1, nearly all weights since 3x3
    shortcut: Literal["stride", "pool"] = "stride"  # how a shortcut halves: its 1x1 reads every second place; or all of
    # them, as means of 2x2 (ResNet-D, arXiv:1812.01187, fig. 2c)

    fixed = ("channels", "stem", "stem_width", "stem_inner", "block", "depths", "widths", "stride_in", "shortcut")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_resnet(self)

    @property
    def stem_stride(self) -> int:
        return 1 if self.stem == "small" else 4

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The last block of each stage, counted through: Trace("block", layers=config.stage_ends)."""
        return tuple(end - 1 for end in accumulate(self.depths))

    def place(self, layer: int) -> str:
        """Where a block, counted through, stands: 4 is stages.1.1 where the first stage has 3."""
        stage = next(s for s, end in enumerate(self.stage_ends) if layer <= end)
        return f"stages.{stage}.{layer - self.stage_ends[stage] - 1 + self.depths[stage]}"

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the last stage's map; each halving rounds up."""
        by = self.stem_stride * 2 ** (len(self.depths) - 1)
        return -(-height // by), -(-width // by)


def check_resnet(c: ResNetConfig) -> None:
    """Refuse what cannot work, and say what to type instead."""
    if not c.depths or len(c.depths) != len(c.widths):
        raise UsageError(
            f"depths={list(c.depths)} and widths={list(c.widths)} must have a number for each stage, equally many."
        )
    least = {"channels": c.channels, "stem_width": c.stem_width, "image_size": min(c.image_size)}
    for name, value in {**least, "depths": min(c.depths), "widths": min(c.widths)}.items():
        if value < 1:
            raise UsageError(f"{name}={getattr(c, name)} must be at least 1.")
    if c.classes < 0:
        raise UsageError(f"classes={c.classes} must be 0 (pooled features) or more.")
    if len(c.stem_inner) != (2 if c.stem == "deep" else 0) or min(c.stem_inner, default=1) < 1:
        raise UsageError(
            f"stem={c.stem} with stem_inner={list(c.stem_inner)}: a deep stem has two numbers there, as [32, 32], and "
            "another stem none."
        )
    for width in c.widths:
        if c.block == "bottleneck" and width % 4:
            raise UsageError(
                f"widths={list(c.widths)}: inside a bottleneck stands a quarter of its width, and {width} has none. "
                f"Use {-(-width // 4) * 4}."
            )


VARIANTS: dict[str, dict[str, Any]] = {
    # Table 1
    "resnet18": dict(block="basic", depths=(2, 2, 2, 2), widths=(64, 128, 256, 512)),
    "resnet34": dict(block="basic", depths=(3, 4, 6, 3), widths=(64, 128, 256, 512)),
    "resnet50": dict(block="bottleneck", depths=(3, 4, 6, 3), widths=(256, 512, 1024, 2048)),
    # Table 3 of arXiv:1812.01187
    "resnet50d": dict(
        **dict(block="bottleneck", depths=(3, 4, 6, 3), widths=(256, 512, 1024, 2048)),
        **dict(stem="deep", stem_inner=(32, 32), shortcut="pool"),
    ),
    # three stages, as in sec. 4.2, but wide and shallow, which a CPU computes faster
    "resnet_cifar": dict(
        **dict(image_size=(32, 32), classes=10, stem="small", stem_width=32),
        **dict(block="basic", depths=(1, 1, 2), widths=(32, 64, 128)),
    ),
}
MODELS = {name: ResNetConfig(**options) for name, options in VARIANTS.items()}


class ConvNorm(nn.Module):
    """A convolution and the batch norm after it, sec. 3.4; the norm's bias makes one of the convolution needless."""

    def __init__(self, width_in: int, width: int, kernel: int, stride: int = 1):
        super().__init__()
        self.conv = nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        return self.norm(self.conv(x))  # (B, D, H/stride, W/stride)


class DeepStem(nn.Module):
    """Three 3x3 convolutions in place of one 7x7, the first of them by 2."""

    def __init__(self, c: ResNetConfig):
        super().__init__()
        widths = (c.channels, *c.stem_inner, c.stem_width)
        self.convs = nn.ModuleList(ConvNorm(widths[n], widths[n + 1], 3, stride=1 if n else 2) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        first, second, third = self.convs
        return third(F.relu_(second(F.relu_(first(x)))))  # (B, stem_width, H/2, W/2)


class ResidualBlock(nn.Module):
    """y = relu(F(x) + x), eq. 1; where the shape changes relu(F(x) + W_s x), eq. 2."""

    def __init__(self, c: ResNetConfig, width_in: int, width: int, stride: int):
        super().__init__()
        if c.block == "basic":
            convs = [ConvNorm(width_in, width, 3, stride), ConvNorm(width, width, 3)]
        else:
            inner, (first, second) = width // 4, (stride, 1) if c.stride_in == "1x1" else (1, stride)
            convs = [
                ConvNorm(width_in, inner, 1, first),
                ConvNorm(inner, inner, 3, second),
                ConvNorm(inner, width, 1),
            ]
        self.convs = nn.ModuleList(convs)
        same = width_in == width and stride == 1
        self.pooled = c.shortcut == "pool" and stride == 2
        self.shortcut = None if same else ConvNorm(width_in, width, 1, 1 if self.pooled else stride)

    def forward(self, x: Tensor, at: LayerTrace | None = None) -> Tensor:  # (B, C, H, W)
        y = x
        for number, conv in enumerate(self.convs, 1):
            y = conv(y)
            y = y if number == len(self.convs) else F.relu_(y)  # the last is added first
            y = mark(at, f"conv{number}", y)
        if self.pooled:
            x = F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False)  # at an odd edge, the mean of what is there
        x = x if self.shortcut is None else mark(at, "shortcut", self.shortcut(x))
        return mark(at, "block", F.relu(x + y))  # (B, D, H/stride, W/stride), eq. 1 or 2


class ResNet(Network):
    """Stem, stages that halve the map and widen it, the mean over places, one linear layer."""

    family = "resnet"

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = c = config

        kernel, stride = (7, 2) if c.stem == "imagenet" else (3, 1)
        self.stem = DeepStem(c) if c.stem == "deep" else ConvNorm(c.channels, c.stem_width, kernel, stride)
        self.stages = nn.ModuleList()
        width_in = c.stem_width
        for stage, (depth, width) in enumerate(zip(c.depths, c.widths, strict=True)):
            blocks = [ResidualBlock(c, width_in, width, stride=2 if stage else 1)]
            blocks += [ResidualBlock(c, width, width, stride=1) for _ in range(depth - 1)]
            self.stages.append(nn.ModuleList(blocks))
            width_in = width
        self.head = _head(self.feature_width, c.classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # sec. 3.4: arXiv:1502.01852
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.PYRAMID}

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.config.grid(*size)

    @property
    def feature_width(self) -> int:
        """Width of what the classifier reads, and of the output when classes=0."""
        return self.config.widths[-1]

    @property
    def pyramid(self) -> tuple[Level, ...]:
        """What `forward_pyramid` gives; sides round up."""
        return tuple(Level(self.config.stem_stride * 2**stage, width) for stage, width in enumerate(self.config.widths))

    @property
    def traceable(self) -> tuple[str, ...]:
        """What a Trace can ask of this model; its layers are the residual blocks, counted through all stages."""
        convs = ("conv1", "conv2", "conv3")[: 2 if self.config.block == "basic" else 3]
        return ("stem", *convs, "shortcut", "block", "pool", *(["head"] if self.config.classes else []))

    @property
    def blocks(self) -> list[ResidualBlock]:
        """All residual blocks, counted through."""
        return [block for stage in cast("list[list[ResidualBlock]]", self.stages) for block in stage]

    def train(self, mode: bool = True) -> Self:
        """As torch's; but a norm whose weights are frozen keeps its statistics too, or it would go on learning."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d) and not module.weight.requires_grad:
                module.eval()
        return self

    def forward(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        trace = with_edit(trace, edit)
        return self.forward_head(self.forward_features(images, trace=trace, reducer=reducer), trace=trace)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """The last stage's map: (B, C, H, W) -> (B, D, rows, columns)."""
        *_, x = self._run(images, with_edit(trace, edit), reducer)
        return x

    def forward_pyramid(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> list[Tensor]:
        """One map of each stage, (B, D, rows, columns), as `pyramid` states them."""
        return list(self._run(images, with_edit(trace, edit)))

    def _run(self, images: Tensor, trace: Trace | None, reducer: Reducer | None = None) -> Iterator[Tensor]:
        """The map that each stage gives."""
        check_images(images, self.config.channels, like=next(self.parameters()))
        if reducer is not None:
            raise UsageError("a ResNet has no tokens to reduce: use a reducer with a ViT.")
        if trace is not None:
            layout = TokenLayout((), self.config.grid(*images.shape[-2:]))
            trace.begin(depth=sum(self.config.depths), offers=self.traceable, layout=layout)
        images = images.contiguous(memory_format=torch.channels_last)  # the same numbers; convolutions are faster so
        x = F.relu_(self.stem(images))  # (B, stem_width, H, W), or of H/2, W/2
        if self.config.stem != "small":
            x = F.max_pool2d(x, 3, stride=2, padding=1)  # (B, stem_width, H/4, W/4)
        x = mark(trace, "stem", x)
        for layer, block in enumerate(self.blocks):
            x = block(x, trace.at(layer) if trace is not None else None)  # (B, widths[stage], ...)
            if layer in self.config.stage_ends:
                yield x
        if trace is not None:
            trace.finish()

    def forward_head(self, maps: Tensor, *, pre_logits: bool = False, trace: Trace | None = None) -> Tensor:
        """(B, D, rows, columns) -> logits (B, classes); `pre_logits=True` or classes=0 stops at the pooled features."""
        y = mark(trace, "pool", maps.mean(dim=(2, 3)))  # (B, D)
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained head for another number of classes (0: none); everything else stays."""
        self.config = replace(self.config, classes=classes)
        like = next(self.parameters())
        self.head = _head(self.feature_width, classes).to(like.device, like.dtype)
        self.labels = None


def _head(width: int, classes: int) -> nn.Module:
    if not classes:
        return nn.Identity()
    head = nn.Linear(width, classes)
    nn.init.normal_(head.weight, std=0.01)
    nn.init.zeros_(head.bias)
    return head


def _entry(name: str, config: ResNetConfig) -> Entry:
    """Names are torchvision's and timm's; the paper writes ResNet-50."""
    if config.image_size != (224, 224):
        return Entry(name, "resnet", config, HALF)
    preprocess = {**IMAGENET_CROP, "interpolation": "bilinear"}
    return Entry(name, "resnet", config, preprocess, (name.replace("resnet", "ResNet-"),))


PAPER = Paper("resnet", ResNetConfig, ResNet, [_entry(name, config) for name, config in MODELS.items()])
