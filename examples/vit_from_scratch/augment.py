"""Augmentation: a Vision Transformer knows nothing of images beforehand, so it should see each one in many forms.

On uint8 batches (B, 3, H, W): crop_and_flip, randaugment. On normalised ones: erase, mix. All draw from the generators
of `random` and `torch`, which the training loop seeds.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor


def crop_and_flip(x: Tensor) -> Tensor:
    """Mirror half of the images (B, 3, 32, 32); shift each by up to 4 pixels."""
    B = len(x)
    x = torch.where(torch.rand(B, 1, 1, 1) < 0.5, x.flip(-1), x)  # (B, 3, 32, 32)
    x = F.pad(x, (4, 4, 4, 4))  # (B, 3, 40, 40)
    windows = x.unfold(2, 32, 1).unfold(3, 32, 1)  # (B, 3, 9, 9, 32, 32): all positions, without a copy
    row, column = torch.randint(9, (2, B))
    return windows[torch.arange(B), :, row, column]  # (B, 3, 32, 32)


def shift(image: Image.Image, a=1.0, b=0.0, c=0.0, d=0.0, e=1.0, f=0.0) -> Image.Image:
    """Each pixel (x, y) comes from (ax + by + c, dx + ey + f)."""
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f), fillcolor=(128, 128, 128))


OPERATIONS = (  # of RandAugment; m: -1 .. 1
    lambda x, m: x,
    lambda x, m: ImageOps.autocontrast(x),
    lambda x, m: ImageOps.equalize(x),
    lambda x, m: ImageOps.solarize(x, round(256 - 256 * abs(m))),
    lambda x, m: ImageOps.posterize(x, round(8 - 4 * abs(m))),
    lambda x, m: ImageEnhance.Color(x).enhance(1 + 0.9 * m),
    lambda x, m: ImageEnhance.Contrast(x).enhance(1 + 0.9 * m),
    lambda x, m: ImageEnhance.Brightness(x).enhance(1 + 0.9 * m),
    lambda x, m: ImageEnhance.Sharpness(x).enhance(1 + 0.9 * m),
    lambda x, m: x.rotate(30 * m, fillcolor=(128, 128, 128)),
    lambda x, m: shift(x, b=0.3 * m),
    lambda x, m: shift(x, d=0.3 * m),
    lambda x, m: shift(x, c=0.45 * m * x.width),
    lambda x, m: shift(x, f=0.45 * m * x.height),
)


def randaugment(x: Tensor, count: int, magnitude: float) -> Tensor:
    """RandAugment (arXiv:1909.13719): to each image, `count` of 14 operations, of a strength from 0 to 10."""
    images = [Image.fromarray(image) for image in x.permute(0, 2, 3, 1).numpy()]
    for i in range(len(images)):
        for operation in random.choices(OPERATIONS, k=count):
            images[i] = operation(images[i], random.choice((-1, 1)) * magnitude / 10)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)  # (B, 3, 32, 32)


def random_box(H: int, W: int, area: float) -> tuple[slice, slice]:
    """Rows and columns of a box that covers this share of the image, its centre anywhere; what lies outside is cut."""
    h, w, row, column = H * area**0.5 / 2, W * area**0.5 / 2, random.uniform(0, H), random.uniform(0, W)
    return slice(max(round(row - h), 0), round(row + h)), slice(max(round(column - w), 0), round(column + w))


def erase(x: Tensor, probability: float) -> Tensor:
    """Random erasing (arXiv:1708.04896): noise in a box of 2 to 33 % of some images."""
    for image in x:  # (3, 32, 32)
        if random.random() < probability:
            hole = image[:, *random_box(*image.shape[1:], area=random.uniform(0.02, 0.33))]
            hole.copy_(torch.randn(hole.shape))
    return x


def mix(x: Tensor, targets: Tensor, mixup: float, cutmix: float) -> tuple[Tensor, Tensor]:
    """Mixup (arXiv:1710.09412), CutMix (arXiv:1905.04899): blend every image with another, or paste a box of it."""
    cut = random.random() < (cutmix > 0) / ((mixup > 0) + (cutmix > 0))  # both: each for half of the batches
    alpha = cutmix if cut else mixup
    lam = random.betavariate(alpha, alpha)  # lambda: the part that an image keeps
    partner = torch.randperm(len(x))
    if cut:
        rows, columns = random_box(*x.shape[2:], area=1 - lam)
        pasted = torch.zeros(x.shape[2:])  # (32, 32)
        pasted[rows, columns] = 1
        lam = 1 - float(pasted.mean())
        x = torch.where(pasted == 1, x[partner], x)  # (B, 3, 32, 32)
    else:
        x = lam * x + (1 - lam) * x[partner]  # (B, 3, 32, 32)
    return x, lam * targets + (1 - lam) * targets[partner]  # (B, K)
