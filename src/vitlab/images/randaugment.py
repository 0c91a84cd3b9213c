"""RandAugment (arXiv:1909.13719): each image draws N of 14 operations; those that drew the same go through together.

An operation takes a group of 8-bit images and one value for each of them. On colours it gives Pillow's result to the
bit, which is what published recipes were tuned with. Sums are of whole numbers and all else is done image by image, so
an image comes out the same alone and in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[[Tensor, Tensor, Tensor], Tensor]  # images (b, C, H, W) uint8, value (b,) float64, fill (C,) uint8


def identity(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    return x


# ---- one table per image and channel: grey level in -> grey level out


def autocontrast(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Stretches each channel to 0..255; a flat channel stays."""
    low, high = (e.double()[:, :, None, None] for e in torch.aminmax(x.flatten(2), dim=2))  # (b, C, 1, 1)
    gain = torch.full_like(low, 255).div_((high - low).clamp_min(1))  # torch's 255 / x is (1 / x) * 255: not the same
    gain = torch.where(high > low, gain, 1.0)
    shift = torch.where(high > low, -low * gain, 0.0)
    return (x * gain + shift).clamp_(0, 255).to(torch.uint8)  # float64 and cut off, as Pillow builds its table


def equalize(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Makes each channel's histogram flat, with Pillow's whole-number rule."""
    b, C, H, W = x.shape
    levels = x.reshape(b * C, H * W).long()
    histogram = torch.zeros(b * C, 256, dtype=torch.int64, device=x.device)
    histogram.scatter_add_(1, levels, torch.ones_like(levels))
    last = histogram.gather(1, levels.amax(dim=1, keepdim=True))  # (b*C, 1): pixels at the highest level
    step = (H * W - last) // 255
    before = histogram.cumsum(1) - histogram  # pixels below each level
    table = ((before + step // 2) // step.clamp_min(1)).clamp_max_(255)
    table = torch.where(step > 0, table, torch.arange(256, device=x.device))
    return table.gather(1, levels).reshape(x.shape).to(torch.uint8)


def solarize(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Inverts the levels from the threshold up."""
    return torch.where(x >= value[:, None, None, None], 255 - x, x)


def posterize(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Keeps the highest bits, their number rounded."""
    return x & (256 - 2 ** (8 - value.round().int())).to(torch.uint8)[:, None, None, None]


# ---- blends: value 1 is the image, 0 a duller one, above 1 away from the duller one


def _blend(dull: Tensor, x: Tensor, value: Tensor) -> Tensor:
    d = dull.float()
    return (d + value.float()[:, None, None, None] * (x.float() - d)).clamp_(0, 255).to(torch.uint8)  # cut off: Pillow


def grey(x: Tensor) -> Tensor:
    """(b, 3, H, W) -> (b, 1, H, W): luma of ITU-R 601 in 16-bit fixed point, as Pillow's "L"; one channel stays."""
    if x.shape[1] == 1:
        return x
    r, g, b = x.int().split(1, dim=1)
    return ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).to(torch.uint8)


def brightness(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    return _blend(torch.zeros_like(x[:, :1, :1, :1]), x, value)


def contrast(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    luma = grey(x)
    mean = luma.sum(dim=(1, 2, 3), keepdim=True).double() / luma[0].numel()  # of whole numbers, so in any order
    return _blend((mean + 0.5).floor(), x, value)


def color(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Saturation; an image of one channel stays."""
    return _blend(grey(x), x, value)


def sharpness(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """The dull image is smoothed with 1 1 1 / 1 5 1 / 1 1 1 over 13, its border left as it is."""
    n = x.int()
    rows = n[:, :, :-2] + n[:, :, 1:-1] + n[:, :, 2:]
    box = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * n[:, :, 1:-1, 1:-1]
    dull = n.clone()
    dull[:, :, 1:-1, 1:-1] = (2 * box + 13) // 26  # box / 13, rounded
    return _blend(dull, x, value)


# ---- geometry: bilinear; what comes from outside the image gets the fill colour


def affine(x: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """matrix (b, 2, 3): where each output point comes from, in pixels from the top left corner, (x, y, 1) -> (x, y)."""
    H, W = x.shape[2:]
    m = matrix[..., None, None]  # (b, 2, 3, 1, 1)
    across = torch.arange(W, dtype=torch.float64, device=x.device) + 0.5  # centres of the pixels
    down = (torch.arange(H, dtype=torch.float64, device=x.device) + 0.5)[:, None]
    source = m[:, :, 0] * across + m[:, :, 1] * down + m[:, :, 2]  # (b, 2, H, W)
    side = torch.tensor([W, H], dtype=torch.float64, device=x.device)[:, None, None]
    inside = ((source >= 0) & (source < side)).all(dim=1, keepdim=True)  # (b, 1, H, W)
    grid = (2 * source / side - 1).permute(0, 2, 3, 1).float()  # (b, H, W, 2)
    y = F.grid_sample(x.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return torch.where(inside, y.round_().to(torch.uint8), fill[:, None, None])


def _matrix(like: Tensor, *entries: Tensor | float) -> Tensor:
    """Six entries, each a number or (b,) -> (b, 2, 3)."""
    return torch.stack([e if isinstance(e, Tensor) else torch.full_like(like, e) for e in entries], 1).reshape(-1, 2, 3)


def rotate(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Degrees, counter-clockwise, about the centre."""
    cy, cx = x.shape[2] / 2, x.shape[3] / 2
    cos, sin = torch.deg2rad(value).cos(), torch.deg2rad(value).sin()
    return affine(x, _matrix(value, cos, -sin, cx - cx * cos + cy * sin, sin, cos, cy - cx * sin - cy * cos), fill)


def shear_x(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """The top row stays, as in the paper's code."""
    return affine(x, _matrix(value, 1, value, 0, 0, 1, 0), fill)


def shear_y(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """The left column stays."""
    return affine(x, _matrix(value, 1, 0, 0, value, 1, 0), fill)


def translate_x(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Positive: to the left."""
    return affine(x, _matrix(value, 1, 0, value * x.shape[3], 0, 1, 0), fill)


def translate_y(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Positive: upwards."""
    return affine(x, _matrix(value, 1, 0, 0, 0, 1, value * x.shape[2]), fill)


class Operation(NamedTuple):
    apply: Function
    rest: float  # its value at magnitude 0
    full: float  # at magnitude 10; between them on a straight line
    signed: bool  # whether a coin decides on which side of `rest` the value lies


OPERATIONS = {  # the paper's 14. Ranges: those of AutoAugment (arXiv:1805.09501) run so that 10 is always the strongest
    "identity": Operation(identity, 0, 0, False),
    "autocontrast": Operation(autocontrast, 0, 0, False),
    "equalize": Operation(equalize, 0, 0, False),
    "rotate": Operation(rotate, 0, 30, True),  # degrees
    "solarize": Operation(solarize, 256, 0, False),  # threshold
    "color": Operation(color, 1, 1.9, True),  # factor, down to 0.1
    "posterize": Operation(posterize, 8, 4, False),  # bits
    "contrast": Operation(contrast, 1, 1.9, True),
    "brightness": Operation(brightness, 1, 1.9, True),
    "sharpness": Operation(sharpness, 1, 1.9, True),
    "shear_x": Operation(shear_x, 0, 0.3, True),  # pixels across per pixel down
    "shear_y": Operation(shear_y, 0, 0.3, True),
    "translate_x": Operation(translate_x, 0, 0.45, True),  # parts of the width
    "translate_y": Operation(translate_y, 0, 0.45, True),  # parts of the height
}
DRAWS = 4  # random numbers for each operation of an image: which, on which side, and two for the magnitude


def randaugment(x: Tensor, numbers: np.ndarray, magnitude: float, magnitude_std: float, fill: Tensor) -> Tensor:
    """x (B, C, H, W) uint8; numbers (B, DRAWS * N) in [0, 1): N operations for each image, one after the other."""
    functions = [operation.apply for operation in OPERATIONS.values()]
    for which, value in zip(*plan(numbers, magnitude, magnitude_std), strict=True):
        x = apply_grouped(x, functions, which, value, fill)
    return x


def plan(numbers: np.ndarray, magnitude: float, magnitude_std: float) -> tuple[np.ndarray, np.ndarray]:
    """-> which operation, by its place in OPERATIONS, and its value, both (N, B)."""
    numbers = numbers.reshape(len(numbers), numbers.shape[1] // DRAWS, DRAWS).transpose(2, 1, 0)  # (DRAWS, N, B)
    which = (numbers[0] * len(OPERATIONS)).astype(np.int64)
    sign = np.where(numbers[1] < 0.5, -1.0, 1.0)
    normal = np.sqrt(-2 * np.log1p(-numbers[2])) * np.cos(2 * np.pi * numbers[3])  # Box-Muller
    level = np.clip(magnitude + magnitude_std * normal, 0, 10) / 10
    rest, full, signed = (np.array(column)[which] for column in list(zip(*OPERATIONS.values(), strict=True))[1:])
    return which, rest + np.where(signed, sign, 1.0) * (full - rest) * level


def apply_grouped(
    x: Tensor, functions: Sequence[Function], which: np.ndarray, value: np.ndarray, fill: Tensor
) -> Tensor:
    """Image i goes through functions[which[i]] with value[i]; those that share a function go together."""
    if not len(x):
        return x
    order = np.argsort(which, kind="stable")  # index_select copies whole images: much faster than x[group]
    groups = []
    for k in np.unique(which):
        members = order[which[order] == k]
        values = torch.from_numpy(np.asarray(value[members], dtype=np.float64)).to(x.device)
        group = x.index_select(0, torch.from_numpy(members).to(x.device))
        groups.append(functions[k](group, values, fill))
    return torch.cat(groups).index_select(0, torch.from_numpy(np.argsort(order)).to(x.device))
