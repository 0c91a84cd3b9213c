"""MLP-Mixer: an MLP over the channels of each patch, and one over the patches of each channel (arXiv:2105.01601).

model = vitlab.create("mixer_base_patch16", classes=10)
logits = model(images)                     # (B, 3, 224, 224) -> (B, 10); images of this size only
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import MLP, Activation
from vitlab.layers.patches import PatchEmbed, check_multiple
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import LayerTrace, TokenLayout, Trace, mark
from vitlab.models.base import Capability, Network
from vitlab.models.config import Config
from vitlab.models.entry import CROP, HALF, Entry, Paper
from vitlab.models.hierarchy import init_matrices, new_head


@dataclass(frozen=True)
class MixerConfig(Config):
    image_size: tuple[int, int] = (224, 224)  # (H, W); token mixing has weights for this number of patches
    patch_size: int = 16  # P
    channels: int = 3
    classes: int = 1000  # 0: the model returns pooled features (B, D)
    width: int = 768  # D, "hidden size C" in Table 1
    depth: int = 12
    tokens_hidden: int = 384  # D_S
    channels_hidden: int = 3072  # D_C
    eps: float = 1e-6
    activation: Activation = "gelu"
    dropout: float = 0.0

    fixed = ("image_size", "patch_size", "channels", "width", "depth", "tokens_hidden", "channels_hidden")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("patch_size", "channels", "width", "depth", "tokens_hidden", "channels_hidden"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.classes < 0:
            raise UsageError(f"classes={self.classes} must be 0 (pooled features) or more.")
        if self.eps <= 0 or not 0 <= self.dropout < 1:
            raise UsageError("eps must be greater than 0, dropout at least 0 and below 1.")
        for what, size in zip(("image height", "image width"), self.image_size, strict=True):
            check_multiple(what, size, self.patch_size, remedy="")

    @property
    def grid(self) -> tuple[int, int]:
        return self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size

    def readable_size(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.image_size


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # Table 1
    "small": ("S", dict(width=512, depth=8, tokens_hidden=256, channels_hidden=2048)),
    "base": ("B", dict(width=768, depth=12, tokens_hidden=384, channels_hidden=3072)),
    "large": ("L", dict(width=1024, depth=24, tokens_hidden=512, channels_hidden=4096)),
}
CIFAR = MixerConfig(32, 4, classes=10, width=128, depth=6, tokens_hidden=64, channels_hidden=256)  # type: ignore[arg-type]


class MixerBlock(nn.Module):
    """U = X + MLP over patches of LN(X); Y = U + MLP over channels of LN(U): eq. 1."""

    def __init__(self, c: MixerConfig):
        super().__init__()
        patches = c.grid[0] * c.grid[1]
        self.norm1 = nn.LayerNorm(c.width, eps=c.eps)
        self.mix_tokens = MLP(patches, c.tokens_hidden, activation=c.activation, dropout=c.dropout)
        self.norm2 = nn.LayerNorm(c.width, eps=c.eps)
        self.mix_channels = MLP(c.width, c.channels_hidden, activation=c.activation, dropout=c.dropout)

    def forward(self, x: Tensor, at: LayerTrace | None = None) -> Tensor:  # (B, N, D)
        y = mark(at, "norm1", self.norm1(x)).transpose(1, 2)  # (B, D, N)
        x = x + mark(at, "mix_tokens", self.mix_tokens(y).transpose(1, 2))
        x = x + mark(at, "mix_channels", self.mix_channels(mark(at, "norm2", self.norm2(x))))
        return mark(at, "tokens", x)


class Mixer(Network):
    """Patches, blocks, norm, mean over patches, head."""

    family = "mixer"
    meanings = {
        "patch_embed": "every patch becomes a token",
        "norm1": "LayerNorm",
        "mix_tokens": "MLP over the patches of each channel (eq. 1)",
        "norm2": "LayerNorm",
        "mix_channels": "MLP over the channels of each patch (eq. 1)",
        "tokens": "+ residual",
        "norm": "final LayerNorm",
        "pool": "mean over all patches: one vector per image",
        "head": "one score for each class",
    }

    def __init__(self, config: MixerConfig):
        super().__init__()
        self.config = c = config
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.blocks = nn.ModuleList(MixerBlock(c) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.apply(init_matrices)
        self.head = new_head(c.width, c.classes)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.EMBED, Capability.CLASSIFY} if self.config.classes else {Capability.EMBED})

    @property
    def traceable(self) -> tuple[str, ...]:
        blocks = ("norm1", "mix_tokens", "norm2", "mix_channels", "tokens")
        return ("patch_embed", *blocks, "norm", "pool", *(["head"] if self.config.classes else []))

    @property
    def feature_width(self) -> int:
        return self.config.width

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        if size != self.config.image_size:
            height, width = self.config.image_size
            raise UsageError(f"this Mixer reads images of {height} x {width}, not {size[0]} x {size[1]}.")
        return self.config.grid

    def forward(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        return self.forward_head(self.forward_features(images, trace=trace, reducer=reducer), trace=trace)

    def forward_features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        """(B, C, H, W) -> tokens (B, N, D) after the last norm."""
        if reducer is not None:
            raise UsageError("a Mixer needs all its patches: use a reducer with a ViT.")
        x = self.patch_embed(images)  # (B, N, D)
        grid = self.grid_of((images.shape[-2], images.shape[-1]))
        if trace is not None:
            trace.begin(depth=self.config.depth, offers=self.traceable, layout=TokenLayout((), grid))
        mark(trace, "patch_embed", x)
        for layer, block in enumerate(cast("list[MixerBlock]", self.blocks)):
            x = block(x, None if trace is None else trace.at(layer))
        return mark(trace, "norm", self.norm(x))

    def forward_head(self, tokens: Tensor, *, pre_logits: bool = False, trace: Trace | None = None) -> Tensor:
        y = mark(trace, "pool", tokens.mean(dim=1))  # (B, D)
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained head for another number of classes (0: none)."""
        self.config = replace(self.config, classes=classes)
        like = self.norm.weight
        self.head = new_head(self.feature_width, classes).to(like.device, like.dtype)
        self.labels = None


def _entries() -> list[Entry]:
    entries = [Entry("mixer_cifar", "mixer", CIFAR, HALF)]
    for size, (letter, options) in VARIANTS.items():
        for patch in (16, 32):
            aliases = (f"mixer_{letter.lower()}{patch}", f"Mixer-{letter}/{patch}")
            config = MixerConfig(**options, patch_size=patch)
            entries.append(Entry(f"mixer_{size}_patch{patch}", "mixer", config, {**CROP, **HALF}, aliases))
    return entries


PAPER = Paper("mixer", MixerConfig, Mixer, _entries())
