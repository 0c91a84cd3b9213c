"""Masked autoencoders (arXiv:2111.06377): most patches are hidden, the rest encoded, and a decoder paints the hidden.

    model = vitlab.create("mae_base")
    out = model(images)                        # (B, 3, 224, 224) -> out.loss, out.prediction, out.mask
    model.encoder                              # the VisionTransformer that is kept: features, explanations, fine-tuning

Run `vitlab inspect mae_base` for its steps, and `vitlab explain reconstruct CHECKPOINT IMAGE` to see what it paints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, Self, cast, get_args

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import BLOCK_KINDS, Activation, Block, run
from vitlab.layers.edit import Edit
from vitlab.layers.patches import check_images, patchify, unpatchify
from vitlab.layers.positions import LearnedPositions, SinCosPositions
from vitlab.layers.trace import FROM_HEADS, TokenLayout, Trace, mark
from vitlab.models.base import Capability, WrapsEncoder
from vitlab.models.config import Config
from vitlab.models.entry import IMAGENET_CROP, Entry, Paper, ParsedName, half
from vitlab.models.plain import new_token
from vitlab.models.vit import VisionTransformer, build_block, init_weights
from vitlab.models.vit_config import SIZES, SMALL_IMAGES, VARIANTS, ResizeRule, ViTConfig
from vitlab.parsing import flat

FixedOrStored = Literal["sincos", "learned"]  # computed; or a table of weights, where a file has another one
MAY_DIFFER = (  # options of a ViT that its tokens in pre-training do not depend on
    *("classes", "tokens.mask_token", "attention.kind", "head.pooling", "head.head_hidden"),
    *("drop.patch_dropout", "residual.stochastic_depth", "stem.pad"),
)
EPS = 1e-6  # of the variance of a patch's pixels


@dataclass(frozen=True)
class DecoderOptions(Config):
    """A narrow ViT of its own, used in pre-training only (section 3); activation, eps, dropout are the encoder's."""

    width: int = 512
    depth: int = 8
    heads: int = 16
    mlp_ratio: float = 4.0
    positions: FixedOrStored = "sincos"


@dataclass(frozen=True)
class MAEConfig(Config):
    image_size: tuple[int, int] = (224, 224)  # (H, W)
    patch_size: int = 16  # P
    channels: int = 3  # C
    width: int = 768  # D; this and what follows: of the encoder
    depth: int = 12  # L
    heads: int = 12  # h
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    qkv_bias: bool = True
    eps: float = 1e-6  # transformers' ViTMAE has 1e-12 by default
    dropout: float = 0.0
    attention_dropout: float = 0.0
    positions: FixedOrStored = "sincos"
    resize_rule: ResizeRule = "bicubic"  # of stored positions
    gradient_checkpointing: bool = False
    decoder: DecoderOptions = field(default_factory=DecoderOptions)
    mask_ratio: float = 0.75  # share of the patches that is hidden
    norm_pix: bool = False  # the decoder paints every patch's pixels less their mean, over their deviation

    fixed = ("decoder",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.mask_ratio < 1:
            raise UsageError(f"mask_ratio={self.mask_ratio} must be at least 0 and below 1: the paper's is 0.75.")
        _ = self.encoder  # checks what belongs to the encoder
        try:
            _ = self.decoder_stack
        except UsageError as error:
            raise UsageError(f"decoder: {error}") from None

    @property
    def encoder(self) -> ViTConfig:
        """The encoder as a Vision Transformer of its own: with a class token, without classes."""
        own = dict(width=self.width, depth=self.depth, heads=self.heads, mlp_ratio=self.mlp_ratio)
        return self._vit(**own, positions=self.positions)

    def with_encoder(self, family: str, encoder: Config) -> Self:
        """The same decoder and masking around another encoder, which must be a plain ViT."""
        if not isinstance(encoder, ViTConfig):
            raise UsageError(f"a masked autoencoder has a ViT as its encoder, not a {family}.")
        if encoder.positions.kind not in get_args(FixedOrStored):
            raise UsageError(f"a masked autoencoder has learned or sincos positions, not {encoder.positions.kind}.")
        names = [field.name for field in fields(self) if field.name not in ("decoder", "mask_ratio", "norm_pix")]
        values = {name: encoder.option(name) for name in names if name != "positions"}
        config = replace(self, **values, positions=encoder.positions.kind)
        has, wants = (flat(c.to_dict()) | {"norm.final_norm": c.final_norm} for c in (encoder, config.encoder))
        if differs := [f"{k}={has[k]}" for k in has if has[k] != wants[k] and k not in MAY_DIFFER]:
            raise UsageError(f"a masked autoencoder has a plain ViT as its encoder, and this one has {differs[0]}.")
        return config

    @property
    def decoder_stack(self) -> ViTConfig:
        """What the decoder's blocks are built by."""
        return self._vit(**self.decoder.to_dict())

    def _vit(self, **own: Any) -> ViTConfig:
        names = ("image_size", "patch_size", "channels", "activation", "qkv_bias", "eps", "dropout")
        names += ("attention_dropout", "gradient_checkpointing", "resize_rule")
        return ViTConfig().with_options(classes=0, **{name: getattr(self, name) for name in names}, **own)

    @property
    def classes(self) -> int:
        """None are learned."""
        return 0

    @property
    def grid(self) -> tuple[int, int]:
        return self.encoder.grid


def _variant(size: str, decoder: tuple[int, int, int] = (512, 8, 16), **options: Any) -> MAEConfig:
    width, depth, heads = decoder
    own = DecoderOptions(width, depth, heads)
    return MAEConfig(**VARIANTS[size], decoder=own, norm_pix=True, **options)  # as the models of Table 3


def _like(name: str, decoder: tuple[int, int, int], **options: Any) -> MAEConfig:
    """Of the size of one of the small ViTs, so that both can be compared."""
    sizes = {key: value for key, value in SMALL_IMAGES[name].items() if key != "classes"}
    width, depth, heads = decoder
    return MAEConfig(**sizes, decoder=DecoderOptions(width, depth, heads, mlp_ratio=2.0), **options)


MODELS = {  # decoder: width, depth, heads. B, L, H: the default of section 4.1; for less, narrowed by us
    "mae_tiny": _variant("Ti", (128, 4, 4)),
    "mae_small": _variant("S", (256, 4, 8)),
    "mae_base": _variant("B"),
    "mae_large": _variant("L"),
    "mae_huge": _variant("H", patch_size=14),
    "mae_cifar": _like("vit_cifar", (96, 2, 6), norm_pix=True),
    "mae_digits": _like("vit_digits", (32, 1, 2)),
}


class MAEOutput(NamedTuple):
    loss: Tensor  # (), mean squared error over the hidden patches
    prediction: Tensor  # (B, N, P*P*C), for every patch, hidden or not; as `pixels_of` orders them
    mask: Tensor  # (B, N), row by row: 1 hidden, 0 visible


class Decoder(nn.Module):
    """Encoded visible patches -> pixels of all patches: a learned mask token stands wherever one is hidden."""

    def __init__(self, c: MAEConfig):
        super().__init__()
        own = c.decoder_stack
        self.gradient_checkpointing = c.gradient_checkpointing
        self.embed = nn.Linear(c.width, own.width)
        self.mask_token = new_token(own.width)
        fixed = own.positions.kind == "sincos"
        self.positions = (SinCosPositions if fixed else LearnedPositions)(own.grid, own.width, prefix=1)
        self.blocks = nn.ModuleList(build_block(own, layer) for layer in range(own.depth))
        self.norm = nn.LayerNorm(own.width, eps=c.eps)
        self.pixels = nn.Linear(own.width, c.patch_size**2 * c.channels)
        self.apply(init_weights)

    @property
    def traceable(self) -> tuple[str, ...]:
        return ("embed", "masked", "position_embedding", "positions", *BLOCK_KINDS, *FROM_HEADS, "norm", "pixels")

    def forward(self, tokens: Tensor, keep: Tensor, layout: TokenLayout, trace: Trace | None = None) -> Tensor:
        """tokens (B, 1 + n, D), the class token first; keep (B, n), which patches the others are."""
        if trace is not None:
            trace.begin(depth=len(self.blocks), offers=self.traceable, layout=layout)
        x = mark(trace, "embed", self.embed(tokens))  # (B, 1 + n, D')
        rows, columns = layout.grid
        hidden = self.mask_token.to(x.dtype).expand(x.shape[0], rows * columns, -1)  # (B, N, D')
        patches = hidden.scatter(1, keep[..., None].expand(-1, -1, x.shape[-1]), x[:, 1:])  # each in its place
        x = mark(trace, "masked", torch.cat([x[:, :1], patches], dim=1))  # (B, 1 + N, D')
        x = mark(trace, "positions", x + mark(trace, "position_embedding", self.positions(layout.grid, like=x)))
        recompute = self.gradient_checkpointing and self.training and trace is None
        for layer, block in enumerate(cast("list[Block]", self.blocks)):
            at = trace.at(layer) if trace is not None else None
            x = run(block, x, None, None, None, at, recompute=recompute)  # (B, 1 + N, D')
        if trace is not None:
            trace.finish()
        x = mark(trace, "norm", self.norm(x))
        return mark(trace, "pixels", self.pixels(x[:, 1:]))  # (B, N, P*P*C)


class MaskedAutoencoder(WrapsEncoder):
    """Hide, encode what is left, decode, compare what was hidden (figure 1)."""

    family = "mae"
    untrained = ("decoder",)

    def __init__(self, config: MAEConfig):
        super().__init__(config)
        self._modules["encoder"] = VisionTransformer(config.encoder)  # under a name that is a property of the class
        self.decoder = Decoder(config)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.RECONSTRUCT}

    @property
    def encoder(self) -> VisionTransformer:
        """The network that is kept after pre-training."""
        return cast(VisionTransformer, self._modules["encoder"])

    def forward(
        self,
        images: Tensor,
        noise: Tensor | None = None,
        *,
        mask_ratio: float | None = None,
        trace: Trace | None = None,
        decoder_trace: Trace | None = None,
        edit: Edit | None = None,
        decoder_edit: Edit | None = None,
    ) -> MAEOutput:
        """`noise` (B, N) decides which patches are hidden: those where it is highest. Without it, chance does."""
        check_images(images, self.config.channels, like=self.decoder.embed.weight)
        target = self.target(images)  # (B, N, P*P*C)
        ratio = self.config.mask_ratio if mask_ratio is None else mask_ratio
        keep, mask = choose_visible(target, ratio, noise)  # (B, n), (B, N)
        latent, _ = self.encoder.encode(images, trace=with_edit(trace, edit), keep=keep)  # (B, 1 + n, D)
        layout = self.encoder.layout(*images.shape[-2:])
        prediction = self.decoder(latent, keep, layout, with_edit(decoder_trace, decoder_edit))  # (B, N, P*P*C)
        error = (prediction.to(target.dtype) - target).square().mean(dim=-1)  # (B, N)
        return MAEOutput((error * mask).sum() / mask.sum(), prediction, mask)

    def target(self, images: Tensor) -> Tensor:
        """What the decoder is to paint, (B, N, P*P*C): the pixels of every patch, normalised where norm_pix is set."""
        pixels = pixels_of(images, self.config.patch_size)
        if not self.config.norm_pix:
            return pixels
        mean, deviation = _statistics(pixels)
        return (pixels - mean) / deviation

    def to_images(self, prediction: Tensor, images: Tensor) -> Tensor:
        """What was painted, as images (B, C, H, W) in the input's scale; norm_pix is undone by the true patches."""
        if self.config.norm_pix:
            mean, deviation = _statistics(pixels_of(images, self.config.patch_size))
            prediction = prediction * deviation + mean
        return images_of(prediction, self.config.patch_size, self.encoder.layout(*images.shape[-2:]).grid)


def choose_visible(patches: Tensor, mask_ratio: float, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For patches (B, N, ...): the numbers of the visible ones in each image, (B, n), rising, and the mask, (B, N).

    The n patches of lowest noise stay visible; among equals the first. n is rounded down.
    """
    B, N = patches.shape[:2]
    visible = int(N * (1 - mask_ratio))
    if not 0 < visible < N:
        problem = "leaves none visible" if visible < 1 else "hides none"
        raise UsageError(
            f"mask_ratio={mask_ratio:g} of {N} patches {problem}: use a share between 0 and 1 that leaves at least one "
            "of each, or larger images."
        )
    if noise is None:
        noise = torch.rand(B, N, device=patches.device)
    elif noise.shape != (B, N):
        raise UsageError(f"noise is {tuple(noise.shape)} but must be ({B}, {N}): one number for each patch.")
    order = noise.to(patches.device).argsort(dim=1, stable=True)
    keep = order[:, :visible].sort(dim=1).values  # (B, n)
    mask = patches.new_ones(B, N).scatter(1, keep, 0.0)
    return keep, mask


def pixels_of(images: Tensor, patch_size: int) -> Tensor:
    """(B, C, H, W) -> (B, N, P*P*C): row, column, then channel, the order in which released weights paint them."""
    x = patchify(images, patch_size)  # (B, N, C*P*P)
    return torch.unflatten(x, -1, (images.shape[1], -1)).transpose(-2, -1).flatten(-2)


def images_of(pixels: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of `pixels_of`."""
    x = torch.unflatten(pixels, -1, (patch_size**2, -1)).transpose(-2, -1).flatten(-2)  # (B, N, C*P*P)
    return unpatchify(x, patch_size, grid)


def _statistics(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each patch, (B, N, 1); the variance is the unbiased one, as in the released weights."""
    return pixels.mean(dim=-1, keepdim=True), (pixels.var(dim=-1, keepdim=True) + EPS).sqrt()


def _entry(name: str, config: MAEConfig) -> Entry:
    if (size := name.removeprefix("mae_")) in SIZES:
        return Entry(name, "mae", config, IMAGENET_CROP, (f"vit_mae_{size}",))
    return Entry(name, "mae", config, half(config.channels))


def parse_name(name: str) -> ParsedName | None:
    """facebook's: mae_vit_base_patch16."""
    match = re.fullmatch(r"mae_vit_(\w+)_patch([0-9]{1,9})", name)
    config = MODELS.get(f"mae_{match[1]}") if match else None
    return (f"mae_{match[1]}", {}) if match and config and config.patch_size == int(match[2]) else None


PAPER = Paper("mae", MAEConfig, MaskedAutoencoder, [_entry(*row) for row in MODELS.items()], parse_name)
