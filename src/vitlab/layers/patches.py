"""Images to patch tokens and back: the first half of eq. 1 of ViT (arXiv:2010.11929).

A convolution whose stride equals its kernel is the same linear map applied to every patch, so the weight of
`PatchEmbed.proj`, flattened, is the matrix E of the paper.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.advice import to_type
from vitlab.errors import UsageError


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cut images into patches, row by row; inside a patch the order is channel, row, column (a conv weight's order)."""
    B, C, H, W = images.shape
    P = patch_size
    check_multiple("image height", H, P, remedy="")
    check_multiple("image width", W, P, remedy="")
    x = images.reshape(B, C, H // P, P, W // P, P)
    x = x.permute(0, 2, 4, 1, 3, 5)  # (B, H/P, W/P, C, P, P)
    return x.flatten(3).flatten(1, 2)  # (B, N, C*P*P), N = HW/P^2


def unpatchify(patches: Tensor, patch_size: int, grid: tuple[int, int]) -> Tensor:
    """The inverse of `patchify`; the grid (rows, columns) is asked for because 196 is 14 x 14 and also 7 x 28."""
    B, N, values = patches.shape
    (rows, columns), P = grid, patch_size
    if rows * columns != N:
        raise UsageError(
            f"grid {rows}x{columns} has {rows * columns} patches but {N} were given: pass the grid they came from."
        )
    if values % (P * P):
        raise UsageError(f"a patch of side {P} holds a multiple of {P * P} values but {values} were given.")
    x = patches.reshape(B, rows, columns, values // (P * P), P, P)
    x = x.permute(0, 3, 1, 4, 2, 5)  # (B, C, rows, P, columns, P)
    return x.reshape(B, values // (P * P), rows * P, columns * P)


def resize_patches(weight: Tensor, patch_size: int) -> Tensor:
    """The projection of patches (D, C, P, P) for patches of another size: PI-resize of FlexiViT (arXiv:2212.08013).

    If B resizes a patch bilinearly, w' = (B^T)^+ w gives the resized patch Bx nearly the token of x: <Bx, w'> = <x, w>,
    exactly so for larger patches.
    """
    old = weight.shape[-1]
    pixels = torch.eye(old * old, dtype=torch.float64).reshape(-1, 1, old, old)  # one patch for each pixel
    resized = F.interpolate(pixels, (patch_size, patch_size), mode="bilinear").flatten(1)  # B^T, (P*P, P'*P')
    inverse = torch.pinverse(resized)  # (P'*P', P*P)
    new = weight.double().flatten(2) @ inverse.T  # (D, C, P'*P')
    return torch.unflatten(new, 2, (patch_size, patch_size)).to(weight.dtype)


def check_multiple(what: str, size: int, patch_size: int, remedy: str | None = None) -> None:
    """Sizes that do not fit are the most common first error, so the message gives the sizes that do."""
    if size % patch_size or size <= 0:
        below, above = size // patch_size * patch_size, (max(size, 0) // patch_size + 1) * patch_size
        either = f"use {above} (or {below})" if below > 0 else f"use {above}"
        remedy = to_type(", or pad=True", "") if remedy is None else remedy  # no command takes pad=
        raise UsageError(f"{what}: {size} is not a multiple of {patch_size}: {either}{remedy}.")


def check_halving(patch_size: int, stem: str = "conv") -> int:
    """How often a convolutional stem halves the image to reach this patch size."""
    steps = patch_size.bit_length() - 1
    if patch_size != 2**steps or steps < 1:
        raise UsageError(
            f'stem="{stem}" halves the image step by step, so patch_size must be 2, 4, 8, 16 or 32, not {patch_size}: '
            f'use {max(2, 2**steps)}, or stem="patch".'
        )
    return steps


class PatchEmbed(nn.Module):
    """x_p E of eq. 1: every P x P patch becomes one token.

    `norms` puts a LayerNorm before and after the projection (vit-pytorch does); `pad` lets any image size in, by
    zeros at the right and bottom; with `crop`, what is left of a patch there is not read.
    """

    def __init__(
        self,
        patch_size: int,
        channels: int,
        width: int,
        *,
        bias: bool = True,
        norms: bool = False,
        eps: float = 1e-6,
        pad: bool = False,
        crop: bool = False,
    ):
        super().__init__()
        self.patch_size, self.channels, self.pad, self.crop = patch_size, channels, pad, crop
        self.norm_in = nn.LayerNorm(channels * patch_size**2, eps=eps) if norms else None
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size, bias=bias)
        self.norm_out: nn.Module | None = nn.LayerNorm(width, eps=eps) if norms else None

    def forward(self, images: Tensor) -> Tensor:
        images = fit_to_patches(images, self.patch_size, self.channels, self.pad, self.crop)  # (B, C, H, W)
        if self.norm_in is None:
            x = self.proj(images)  # (B, D, H/P, W/P)
            x = x.flatten(2).transpose(1, 2)  # (B, N, D), N = HW/P^2, row by row
            x = x.contiguous()  # once here, or every LayerNorm would copy it
        else:  # a norm over each patch stands between, so the convolution is written as the matrix it is
            x = self.norm_in(patchify(images, self.patch_size))  # (B, N, C*P*P)
            x = F.linear(x, self.proj.weight.flatten(1), self.proj.bias)  # (B, N, D)
        return x if self.norm_out is None else self.norm_out(x)


class ConvStem(nn.Module):
    """A small convolutional stem: 3 x 3 convolutions of stride 2, then 1 x 1 (Xiao et al., arXiv:2106.14881).

    Its norm is a GroupNorm of one group instead of the paper's BatchNorm: no running statistics, so one image gives the
    same tokens alone, in a batch, or spread over many processes.
    """

    def __init__(self, patch_size: int, channels: int, width: int, *, eps: float = 1e-6, pad: bool = False):
        super().__init__()
        steps = check_halving(patch_size)
        self.patch_size, self.channels, self.pad = patch_size, channels, pad
        widths = [channels] + [max(width // 2 ** (steps - i), 8) for i in range(1, steps + 1)]
        layers: list[nn.Module] = []
        for narrow, wide in pairwise(widths):
            layers += [
                nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False),
                nn.GroupNorm(1, wide, eps=eps),
                nn.ReLU(),
            ]
        self.convs = nn.Sequential(*layers)
        self.proj = nn.Conv2d(widths[-1], width, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        images = fit_to_patches(images, self.patch_size, self.channels, self.pad)
        x = self.proj(self.convs(images))  # (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2).contiguous()  # (B, N, D); once here, or every LayerNorm would copy it


def check_images(images: object, channels: int, like: Tensor | None = None) -> None:
    """Refuse what is not a batch of normalised images; `like` is a weight that reads them."""
    if not isinstance(images, Tensor):
        raise UsageError(
            f"images must be a tensor (batch, {channels}, height, width), not a {type(images).__name__}. "
            "Use model.preprocess(image)[None], or torch.from_numpy(array)."
        )
    if images.ndim != 4 or images.shape[1] != channels:
        shape = " x ".join(str(n) for n in images.shape)
        hint = " Add the batch dimension: images[None]." if images.ndim == 3 else ""
        if images.ndim == 4 and images.shape[-1] == channels:
            hint = " Put channels first: images.permute(0, 3, 1, 2)."
        elif images.ndim == 4:
            hint = f" Build the model with channels={images.shape[1]}, or convert the images."
        raise UsageError(f"images must be (batch, {channels}, height, width) but are ({shape}).{hint}")
    if not images.is_floating_point():
        raise UsageError(
            f"images must be floating point and normalised but are {images.dtype}. Use model.preprocess(image)."
        )
    if like is not None and images.dtype != like.dtype and not torch.is_autocast_enabled(images.device.type):
        raise UsageError(
            f"images are {images.dtype} but the model is {like.dtype}: pass images.to({like.dtype}), "
            f"or convert the model: model.to({images.dtype})."
        )


def fit_to_patches(images: Tensor, patch_size: int, channels: int, pad: bool, crop: bool = False) -> Tensor:
    """Images whose sides are multiples of the patch: padded or cropped at the right and bottom, if that is set."""
    check_images(images, channels)
    H, W = images.shape[-2:]
    if crop and patch_size <= H and patch_size <= W:
        return images[..., : H // patch_size * patch_size, : W // patch_size * patch_size]
    if pad and H > 0 and W > 0:
        return F.pad(images, (0, -W % patch_size, 0, -H % patch_size))
    check_multiple("image height", H, patch_size)
    check_multiple("image width", W, patch_size)
    return images


def grid_of(height: int, width: int, patch_size: int, crop: bool = False) -> tuple[int, int]:
    """Rows and columns of patches that an image of this size makes; rounded up, as padding fills the rest, or down."""
    if crop:
        return height // patch_size, width // patch_size
    return -(-height // patch_size), -(-width // patch_size)


def drop_patches(tokens: Tensor, prefix: int, rate: float) -> tuple[Tensor, Tensor]:
    """Keep a random share of each image's patches, in order, and every prefix token; returns as `keep_patches` does.

    FLIP's way to train faster (arXiv:2212.00794).
    """
    B, N, _ = tokens.shape
    patches = N - prefix
    count = max(1, round(patches * (1 - rate)))
    order = torch.rand(B, patches, device=tokens.device).argsort(dim=1)
    return keep_patches(tokens, prefix, order[:, :count].sort(dim=1).values)


def keep_patches(tokens: Tensor, prefix: int, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Every prefix token and, of each image, the patches numbered in `keep` (B, n); returns tokens and kept indices.

    Indices count all tokens, so that other per-token tables can follow.
    """
    first = torch.arange(prefix, device=tokens.device).expand(tokens.shape[0], prefix)
    kept = torch.cat([first, keep + prefix], dim=1)  # (B, prefix + n)
    return take_tokens(tokens, kept), kept


def take_tokens(tokens: Tensor, places: Tensor) -> Tensor:
    """Of each image the tokens at `places`: (B, N, D), (B, n) -> (B, n, D)."""
    return tokens.gather(1, places[..., None].expand(-1, -1, tokens.shape[-1]))
