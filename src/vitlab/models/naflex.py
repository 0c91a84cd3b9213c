"""NaFlex: images of their own aspect in one batch, as SigLIP 2 has it (arXiv:2502.14786; NaViT, arXiv:2307.06304).

    images = [model.preprocess(photo) for photo in photos]     # (C, H, W) each, at most 256 patches, of its own aspect
    model.encode_images(images)                                # (B, E), of length 1

The patches of all images stand in one batch, padded to the longest. Positions are resized to the grid of each image,
and no token sees padding, so an image gives what it gives alone. Images of one size are a batch for any ViT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vitlab.errors import UsageError
from vitlab.layers.block import Block, run
from vitlab.layers.patches import check_images, patchify
from vitlab.layers.pooling import AttentionPool
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability
from vitlab.models.entry import HALF, Entry, Paper, half
from vitlab.models.siglip import TOWERS, VOCABULARY, SigLIP, SigLIPConfig, SigLIPTextConfig
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import Head, MLPOptions, Positions, Tokens, ViTConfig

Images = Tensor | Sequence[Tensor]  # (B, C, H, W), or (C, H, W) each


def aspect(patch: int, max_patches: int = 256) -> dict[str, Any]:
    """Preprocess values: each image keeps its aspect."""
    return {**HALF, "interpolation": "bilinear", "how": "aspect", "patch": patch, "max_patches": max_patches}


@dataclass(frozen=True)
class NaFlexViTConfig(ViTConfig):
    image_size: tuple[int, int] = (256, 256)  # whose grid has a position for each patch
    classes: int = 0
    tokens: Tokens = field(default_factory=lambda: Tokens(class_token=False))
    positions: Positions = field(default_factory=lambda: Positions(resize_rule="bilinear_antialias"))
    mlp: MLPOptions = field(default_factory=lambda: MLPOptions(activation="gelu_tanh"))
    head: Head = field(default_factory=lambda: Head(pooling="attention"))

    def check(self) -> None:
        super().check()
        wrong = {
            "a class or distillation token": self.tokens.class_token or self.tokens.distill_token,
            "registers with positions": self.positioned_prefix > 0,
            f"positions={self.positions.kind}": self.positions.kind != "learned",
            f"stem={self.stem.kind}": self.stem.kind != "patch",
            "patch_norms": self.stem.patch_norms,
            "norm_pre": self.norm.norm_pre,
            "pad or crop": self.stem.pad or self.stem.crop,
        }
        if misfits := [name for name, is_so in wrong.items() if is_so]:
            raise UsageError(
                "images of their own aspect are packed as plain patches with learned positions, and registers if any: "
                f"{', '.join(misfits)} is not possible here."
            )


class NaFlexViT(VisionTransformer):
    """A ViT that also takes a list of images, each (C, H, W) of its own size, wherever it takes a batch."""

    family = "naflex_vit"

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.MIXED}

    def encode_images(self, images: Sequence[Tensor]) -> Tensor:
        """(C, H, W) each -> (B, D), pooled."""
        tokens, seen = self.encode(images)
        return self.forward_head(tokens, pre_logits=True, sizes=seen)

    def encode(
        self,
        images: Images,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Of a list: tokens (B, N, D), N those of the largest image, and (B, N): 1 for a patch, 0 for padding."""
        if isinstance(images, Tensor):
            return super().encode(images, trace=trace, reducer=reducer, keep=keep)
        if trace is not None or reducer is not None or keep is not None:
            raise UsageError("a Trace, an Edit or a reducer needs images of one size: stack them as (B, C, H, W).")
        z, seen = self.pack(images)  # (B, N, D), (B, N)
        mask = torch.zeros_like(seen, dtype=z.dtype).masked_fill(~seen, -torch.inf)[:, None, None]  # (B, 1, 1, N)
        recompute = self.config.gradient_checkpointing and self.training
        for block in cast("list[Block]", self.blocks):
            z = run(block, z, None, None, mask, recompute=recompute)
        return z if self.norm is None else self.norm(z), seen.to(z.dtype)

    def pack(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Eq. 1 of ViT for images of different sizes -> (B, N, D), and (B, N): where there is a patch."""
        if not isinstance(images, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]  # a caller may pass anything
            raise UsageError(f"images must be a list of tensors, each (C, H, W), not a {type(images).__name__}.")
        if not images:
            raise UsageError("there are no images to encode: expected a list of at least one, each (C, H, W).")
        P, proj = self.config.patch_size, self.patch_embed.proj
        patches: list[Tensor] = []
        positions: list[Tensor] = []
        for image in images:
            batched = _one_image(image, self.config.channels, like=proj.weight)  # (1, C, H, W)
            patches.append(patchify(batched, P)[0])  # (n, C*P*P)
            assert self.positions is not None
            positions.append(self.positions(self.config.grid_of(*batched.shape[-2:]), like=batched)[0])  # (n, D)
        seen = pad_sequence([torch.ones(len(rows), dtype=torch.bool, device=rows.device) for rows in patches], True)
        z = F.linear(pad_sequence(patches, True), proj.weight.flatten(1), proj.bias)  # (B, N, D)
        z = z + pad_sequence(positions, True)
        if self.register_tokens is not None:
            registers = self.register_tokens.expand(len(z), -1, -1)
            z, seen = torch.cat([registers, z], dim=1), F.pad(seen, (registers.shape[1], 0), value=True)
        return self.dropout(z), seen

    def pooled(self, tokens: Tensor, sizes: Tensor | None = None) -> Tensor:
        """`sizes` (B, N): patches that a token stands for; 0: padding, which the query does not see."""
        if sizes is None or not isinstance(self.pool, AttentionPool):
            return super().pooled(tokens, sizes)
        prefix = len(self.config.prefix)
        padding = torch.zeros_like(sizes).masked_fill(sizes == 0, -torch.inf)[:, None, None, prefix:]  # (B, 1, 1, N)
        return self.pool(tokens[:, prefix:], padding)


def _one_image(image: object, channels: int, like: Tensor) -> Tensor:
    """(C, H, W) -> (1, C, H, W); what is no normalised image is refused."""
    batch = image[None] if isinstance(image, Tensor) else image
    check_images(batch, channels, like=like)
    return cast(Tensor, batch)


@dataclass(frozen=True)
class NaFlexConfig(SigLIPConfig):
    image: NaFlexViTConfig = field(default_factory=NaFlexViTConfig)


class NaFlex(SigLIP):
    """SigLIP 2 whose image tower takes images of their own aspect."""

    family = "naflex"
    image_tower = NaFlexViT

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.MIXED}

    def encode_images(self, images: Sequence[Tensor], *, normalise: bool = True) -> Tensor:
        """(C, H, W) each, of any sizes -> (B, E), of length 1 unless normalise=False."""
        x = cast(NaFlexViT, self.image).encode_images(images)
        return F.normalize(x, dim=-1) if normalise else x


# ---- names


def _config(size: str, patch_size: int) -> NaFlexConfig:
    image, text = TOWERS[size]
    tower = NaFlexViTConfig().with_options(**image, patch_size=patch_size, image_size=16 * patch_size)
    return NaFlexConfig(tower, SigLIPTextConfig(vocab=VOCABULARY["siglip2"], pad_id=0, **text))


DIGITS: dict[str, Any] = dict(image_size=8, patch_size=2, channels=1, width=64, depth=4, heads=4, mlp_ratio=2.0)
DIGITS_TEXT = SigLIPTextConfig(16, 1024, 64, 2, 4, mlp_ratio=2.0, end_id=1023, pad_id=1023)
TOWER = NaFlexViTConfig().with_options(**DIGITS)
RELEASES = {f"siglip2_{size}_patch16_naflex": _config(size, 16) for size in ("base", "so400m")}
PAPER = Paper(
    "naflex",
    NaFlexConfig,
    NaFlex,
    [
        *(Entry(name, "naflex", config, aspect(16), (name.replace("_", "-"),)) for name, config in RELEASES.items()),
        Entry("naflex_digits", "naflex", NaFlexConfig(TOWER, DIGITS_TEXT), half(1)),
    ],
)
TOWER_PAPER = Paper(
    "naflex_vit",
    NaFlexViTConfig,
    NaFlexViT,
    [
        *(Entry(f"{name}_vision", "naflex_vit", config.image, aspect(16)) for name, config in RELEASES.items()),
        Entry("naflex_vit_digits", "naflex_vit", TOWER.with_options(classes=10), half(1)),
    ],
)
