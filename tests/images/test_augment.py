"""Augmentation against Pillow, slow loops and the statistics of what is drawn; and the same to the bit in any batch.

How long it takes, on this machine:

    .venv/bin/python tests/images/test_augment.py      # 128 x 3 x 32 x 32, padded crop, one thread: about 16 ms

Two threads gain nothing at this size, and lose much where other processes use the cores: they wait for each other.
"""

from __future__ import annotations

import math
import pickle
import random
import time

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

from vitlab.images import augment as module
from vitlab.images import randaugment as ra
from vitlab.images.augment import Augment, AugmentOptions, padded_crop
from vitlab.images.preprocess import RESAMPLING, Preprocess
from vitlab.images.randomness import uniform

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
BILINEAR = Image.Resampling.BILINEAR
EVERYTHING = dict(flip=True, randaugment=3, magnitude=8.0, magnitude_std=1.0, jitter=0.4, erasing=0.5)


def pictures(count: int, height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """(B, C, H, W) uint8: noise, blurred noise of little contrast, dark, flat, two levels, a gradient, in turns."""
    rng = np.random.default_rng([seed, height, width, channels])
    out = rng.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    for i in range(count):
        kind = i % 6
        if kind == 1:
            soft = to_pil(torch.from_numpy(out[i]).permute(2, 0, 1)).filter(ImageFilter.GaussianBlur(1.5))
            out[i] = np.array(soft).reshape(out[i].shape)
        if kind == 2:
            out[i] //= 9
        if kind == 3:
            out[i] = out[i, 0, 0]
        if kind == 4:
            out[i] = np.where(out[i] < 200, 30, 31)
        if kind == 5:
            out[i] = np.linspace(20, 240, width)[None, :, None] + np.arange(height)[:, None, None] % 7
    return torch.from_numpy(out).permute(0, 3, 1, 2).contiguous()


def to_pil(x: torch.Tensor) -> Image.Image:
    return Image.fromarray(x[0].numpy() if len(x) == 1 else x.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> torch.Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1))


def augment(size=(32, 32), channels=3, interpolation="bilinear", **options) -> Augment:
    return Augment(AugmentOptions(**options), size, MEAN[:channels], STD[:channels], interpolation)


def levels(a: Augment, x: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation: float -> grey levels."""
    std, mean = (torch.tensor(v)[:, None, None].double() for v in (a.std, a.mean))
    return ((x.double() * std + mean) * 255).round().int()


# ---- operations, one by one, against Pillow


def pil_operation(name: str, image: Image.Image, value: float, fill) -> Image.Image:
    """As the paper's own code writes them, with bilinear interpolation."""

    def affine(*matrix: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, matrix, BILINEAR, fillcolor=fill)

    W, H = image.size
    match name:
        case "identity":
            return image
        case "autocontrast":
            return ImageOps.autocontrast(image)
        case "equalize":
            return ImageOps.equalize(image)
        case "solarize":
            return ImageOps.solarize(image, value)  # type: ignore[arg-type]  # compares, so a float is fine
        case "posterize":
            return ImageOps.posterize(image, round(value))
        case "color" | "contrast" | "brightness" | "sharpness":
            return getattr(ImageEnhance, name.title())(image).enhance(value)
        case "rotate":
            return image.rotate(value, BILINEAR, fillcolor=fill)
        case "shear_x":
            return affine(1, value, 0, 0, 1, 0)
        case "shear_y":
            return affine(1, 0, 0, value, 1, 0)
        case "translate_x":
            return affine(1, 0, value * W, 0, 1, 0)
        case "translate_y":
            return affine(1, 0, 0, 0, 1, value * H)
    raise AssertionError(name)


GEOMETRY = {"rotate", "shear_x", "shear_y", "translate_x", "translate_y"}
VALUES = {
    "rotate": [-30, -7.5, 0, 0.1, 13, 29.9],
    "solarize": [256, 200.5, 128, 25.6, 1, 0],
    "posterize": [8, 7, 6.3, 5, 4.4, 4],
    "shear": [-0.3, -0.11, 0, 0.07, 0.2, 0.3],
    "translate": [-0.45, -0.2, 0, 0.125, 0.3, 0.45],
    "factor": [0.1, 0.37, 0.9, 1, 1.63, 1.9],
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(32, 32), (19, 46), (2, 5)])
@pytest.mark.parametrize("name", ra.OPERATIONS)
def test_operation_matches_pillow(name, size, channels):
    """Colours: equal. Geometry: 1 level, as Pillow cuts the interpolated value off where we round it."""
    values = VALUES.get(name) or VALUES.get(name.split("_")[0]) or VALUES["factor"]
    x = pictures(6, *size, channels).repeat_interleave(6, dim=0)  # each kind of picture with each value
    value = torch.tensor(values * 6, dtype=torch.float64)
    fill = torch.tensor([124, 116, 104][:channels], dtype=torch.uint8)
    colour = tuple(fill.tolist()) if channels == 3 else int(fill)
    ours = ra.OPERATIONS[name].apply(x, value, fill)
    theirs = torch.stack(
        [from_pil(pil_operation(name, to_pil(a), v, colour)) for a, v in zip(x, value.tolist(), strict=True)]
    )
    assert ours.dtype == torch.uint8
    difference = (ours.int() - theirs.int()).abs()
    assert difference.max() <= (1 if name in GEOMETRY else 0)


def test_geometry_goes_the_right_way():
    """Hand-made: whole-pixel shifts are exact, and a quarter turn is torch.rot90."""
    x = pictures(1, 8, 8)
    fill = torch.tensor([1, 2, 3], dtype=torch.uint8)
    value = torch.tensor([0.25], dtype=torch.float64)
    left = ra.translate_x(x, value, fill)
    assert torch.equal(left[..., :6], x[..., 2:])
    assert torch.equal(left[..., 6:], fill[None, :, None, None].expand(1, 3, 8, 2))
    up = ra.translate_y(x, value, fill)
    assert torch.equal(up[..., :6, :], x[..., 2:, :])
    assert torch.equal(ra.rotate(x, value * 360, fill), torch.rot90(x, 1, (2, 3)))  # counter-clockwise
    flat = torch.full((1, 3, 9, 9), 200, dtype=torch.uint8)
    assert torch.equal(ra.shear_x(flat, value, fill)[0, :, -1, -1], fill)  # bottom row moves left, top row stays
    assert (ra.shear_x(flat, value, fill)[..., 0, :] == 200).all()


def test_color_leaves_grey_images():
    x = pictures(6, 11, 13, channels=1)
    assert torch.equal(ra.color(x, torch.linspace(0.1, 1.9, 6).double(), x.new_zeros(1)), x)


# ---- RandAugment: what is drawn


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / counts.size
    return float(((counts - expected) ** 2 / expected).sum())


def test_each_image_of_a_batch_draws_its_own_operations():
    """chi-square with 13 and 195 degrees of freedom: below 40.9 and 277.1 in 9,999 of 10,000 fair draws."""
    which, value = ra.plan(uniform(0, module.RANDAUGMENT, 0, np.arange(7000), 0, count=8), 9.0, 0.0)  # one batch
    assert which.shape == value.shape == (2, 7000)
    for slot in which:
        assert chi_square(np.bincount(slot, minlength=14)) < 40.9
    assert chi_square(np.bincount(which[0] * 14 + which[1], minlength=196)) < 277.1  # the two are independent
    epochs = [uniform(0, module.RANDAUGMENT, epoch, 5, 0, count=8) for epoch in range(3000)]
    assert chi_square(np.bincount(ra.plan(np.concatenate(epochs), 9.0, 0.0)[0][0], minlength=14)) < 40.9  # one image
    assert len(np.unique(which[0, :32])) > 8  # a small batch is no exception


def test_magnitudes_follow_the_table():
    names = list(ra.OPERATIONS)
    numbers = uniform(3, 1, 0, np.arange(20000), 0, count=4)
    which, value = (a[0] for a in ra.plan(numbers, 9.0, 0.0))
    expect = {
        "rotate": {-27.0, 27.0},
        "solarize": {25.6},
        "posterize": {4.4},
        "color": {0.19, 1.81},
        "sharpness": {0.19, 1.81},
        "shear_x": {-0.27, 0.27},
        "translate_y": {-0.405, 0.405},
    }
    for name, values in expect.items():
        drawn = value[which == names.index(name)]
        assert set(np.round(drawn, 9).tolist()) == values
        if len(values) == 2:  # both sides equally often: within 4 standard deviations
            assert abs((drawn == drawn.max()).mean() - 0.5) < 4 * 0.5 / math.sqrt(len(drawn))
    which, value = (a[0] for a in ra.plan(numbers, 5.0, 0.5))
    level = np.abs(value[which == names.index("rotate")]) / 3
    assert abs(level.mean() - 5) < 0.06
    assert abs(level.std() - 0.5) < 0.05
    which, value = (a[0] for a in ra.plan(numbers, 10.0, 3.0))
    assert np.abs(value[which == names.index("rotate")]).max() == 30.0  # cut to 0..10
    which, value = (a[0] for a in ra.plan(numbers, 0.0, 0.0))
    rest = np.array([operation.rest for operation in ra.OPERATIONS.values()])
    assert np.array_equal(value, rest[which])


@pytest.mark.parametrize("channels", [1, 3])
def test_randaugment_matches_a_loop_with_pillow(channels):
    """The whole path, with N = 1: after two operations equalize may have magnified a difference of 1."""
    x = pictures(60, 24, 40, channels)
    a = augment((24, 40), channels, randaugment=1, magnitude=7.0, magnitude_std=0.5)
    indices = np.arange(1000, 1060)
    ours = levels(a, a(x, indices, seed=4, epoch=2))
    which, value = ra.plan(uniform(4, module.RANDAUGMENT, 2, indices, 0, count=4), 7.0, 0.5)
    fill = tuple(round(m * 255) for m in MEAN) if channels == 3 else round(MEAN[0] * 255)
    names = list(ra.OPERATIONS)
    for i in range(60):
        theirs = from_pil(pil_operation(names[which[0, i]], to_pil(x[i]), value[0, i], fill))
        assert (ours[i] - theirs.int()).abs().max() <= (names[which[0, i]] in GEOMETRY)


# ---- crop, flip, jitter, normalise, erase


def test_all_off_is_preprocess_to_the_bit():
    x = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(2, 3, 16, 16)
    for scale in (1 / 255, 1 / 127.5, 1 / 256):
        preprocess = Preprocess((16, 16), mean=MEAN, std=STD, scale=scale)
        expect = torch.stack([preprocess.normalize(to_pil(image)) for image in x])
        a = Augment(AugmentOptions(), (16, 16), MEAN, STD, scale=scale)
        assert torch.equal(a(x, np.arange(2), seed=0, epoch=0), expect)


@pytest.mark.parametrize("border", ["reflect", "zeros"])
@pytest.mark.parametrize(("size", "padding"), [((13, 22), 4), ((5, 9), 3)])
def test_padded_crop_matches_numpy_pad(border, size, padding):
    H, W = size
    x = pictures(50, H, W)
    numbers = uniform(1, 2, 3, np.arange(50), count=2)
    ours = padded_crop(x, numbers, padding, border)
    pad = ((0, 0), (padding, padding), (padding, padding))
    for i, (down, across) in enumerate((numbers * (2 * padding + 1)).astype(int)):
        grown = np.pad(x[i].numpy(), pad, mode="reflect" if border == "reflect" else "constant")
        assert np.array_equal(ours[i].numpy(), grown[:, down : down + H, across : across + W])


def test_padded_crop_and_flip_reach_every_place_equally_often():
    """One marked pixel tells where each crop came from: 81 places, flipped or not; chi-square with 161 degrees."""
    count, side = 20000, 32
    x = torch.zeros(count, 1, side, side, dtype=torch.uint8)
    x[:, :, 12, 10] = 255
    a = augment((side, side), 1, crop="padded", border="zeros", flip=True)
    out = levels(a, a(x, np.arange(count), seed=0, epoch=0))
    sample, _, row, column = (out == 255).nonzero().T
    assert torch.equal(sample, torch.arange(count))  # never out of sight
    assert set(row.tolist()) == set(range(8, 17))
    assert set(column.tolist()) == set(range(6, 15)) | set(range(17, 26))
    counts = np.bincount((row * 32 + column).numpy())
    assert chi_square(counts[counts > 0]) < 236.4  # 9,999 of 10,000


def test_flip_is_exact():
    x = pictures(64, 9, 14)
    a = augment((9, 14), flip=True)
    out = levels(a, a(x, np.arange(64), seed=0, epoch=0))
    flipped = [torch.equal(o, i.flip(-1).int()) for o, i in zip(out, x, strict=True)]
    for o, i, f in zip(out, x, flipped, strict=True):
        assert f or torch.equal(o, i.int())
    assert 16 < sum(flipped) < 54


@pytest.mark.parametrize("size", [(300, 500), (500, 300), (400, 400)])
def test_resized_crop_boxes(size):
    """Inside, in the ranges of area and ratio (up to rounding), and as often as in a loop with Python's generator."""
    a, count = augment(crop="resized", scale=(0.2, 0.8), ratio=(0.5, 2.0)), 4000
    boxes = a.boxes(np.broadcast_to(size, (count, 2)), np.arange(count), seed=0, epoch=0)
    assert boxes.dtype == np.int64
    left, top, right, bottom = boxes.T
    w, h = right - left, bottom - top
    assert (left >= 0).all() and (top >= 0).all() and (right <= size[1]).all() and (bottom <= size[0]).all()
    area, ratio = w * h / (size[0] * size[1]), w / h
    assert 0.198 < area.min() < 0.21 and 0.7 < area.max() < 0.802
    assert 0.49 < ratio.min() < 0.55 and 1.8 < ratio.max() < 2.02
    assert left.min() == 0 and (right == size[1]).any() and top.min() == 0 and (bottom == size[0]).any()

    rng, loop = random.Random(0), []
    while len(loop) < count:  # torchvision's RandomResizedCrop.get_params, its way of writing
        target, r = rng.uniform(0.2, 0.8) * size[0] * size[1], math.exp(rng.uniform(math.log(0.5), math.log(2)))
        lw, lh = round(math.sqrt(target * r)), round(math.sqrt(target / r))
        if lw <= size[1] and lh <= size[0]:
            loop.append((lw, lh, rng.randint(0, size[1] - lw), rng.randint(0, size[0] - lh)))
    for ours, theirs in zip((w, h, left, top), np.array(loop).T, strict=True):
        assert abs(ours.mean() - theirs.mean()) < 4 * math.sqrt(2 / count) * theirs.std()
        assert abs(ours.std() / theirs.std() - 1) < 0.08


def test_resized_crop_falls_back_to_the_centre():
    a = augment(crop="resized", scale=(1.0, 1.0))
    boxes = a.boxes(np.array([[10, 400], [400, 10], [100, 100], [1, 1]]), np.arange(4), seed=0, epoch=0)
    assert boxes[0].tolist() == [193, 0, 206, 10]  # ratio 4/3 of height 10
    assert boxes[1].tolist() == [0, 193, 10, 206]
    assert boxes[3].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_resized_crop_matches_pillow(interpolation, channels):
    """Both antialias in fixed point, torch with fewer bits: 1 level. The path of a worker that uses `boxes`.

    Nearest: equal, but for places halfway between two pixels, where Pillow's running sum falls on either side.
    """
    x = pictures(24, 61, 47, channels)
    a = augment((32, 20), channels, interpolation, crop="resized", flip=True, erasing=0.5, erasing_fill="zeros")
    where = dict(seed=1, epoch=2, repeat=3)
    indices = np.arange(24) * 7
    boxes = a.boxes(np.broadcast_to((61, 47), (24, 2)), indices, **where)
    cut = [
        from_pil(to_pil(image).crop(tuple(box)).resize((20, 32), RESAMPLING[interpolation]))
        for image, box in zip(x, boxes.tolist(), strict=True)
    ]
    ours, theirs = a(x, indices, **where), a(torch.stack(cut), indices, **where, cropped=True)
    difference = (levels(a, ours) - levels(a, theirs)).abs()
    if interpolation == "nearest":
        assert (difference > 0).float().mean() < 0.01
    else:
        assert difference.max() <= 1


def test_jitter_matches_a_loop_with_pillow():
    x, strength = pictures(60, 17, 24), 0.4
    a = augment((17, 24), jitter=strength)
    indices = np.arange(60)
    ours = levels(a, a(x, indices, seed=9, epoch=1))
    numbers = uniform(9, module.JITTER, 1, indices, 0, count=6)
    enhance = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)
    orders = set()
    for i in range(60):
        image, order = to_pil(x[i]), np.argsort(numbers[i, :3]).tolist()
        orders.add(tuple(order))
        for k in order:
            image = enhance[k](image).enhance(0.6 + 0.8 * numbers[i, 3 + k])
        assert torch.equal(ours[i], from_pil(image).int())
    assert len(orders) == 6


@pytest.mark.parametrize("size", [(32, 32), (24, 48)])
def test_erasing_matches_the_paper(size):
    """How often, the area and the sides, against the paper's loop with Python's generator; outside nothing changes."""
    H, W, count, p = *size, 3000, 0.4
    x = torch.full((count, 3, H, W), 77, dtype=torch.uint8)
    a = augment(size, erasing=p)
    base = a.normalize(x)
    out = a(x, np.arange(count), seed=0, epoch=0)
    changed = (out != base).all(dim=1)  # (B, H, W); noise hits the same float by chance once in millions
    erased = changed.flatten(1).any(1)
    assert abs(erased.float().mean() - p) < 4 * math.sqrt(p * (1 - p) / count)
    h, w = changed.any(2).sum(1)[erased], changed.any(1).sum(1)[erased]
    assert torch.equal(h * w, changed.flatten(1).sum(1)[erased])  # a full box
    assert torch.equal((out != base).any(dim=1), changed)  # in all channels or in none
    area = (h * w / (H * W)).numpy()
    assert area.min() > 0.012 and area.max() < 0.35  # 0.02 .. 0.33 and rounding to whole pixels
    hole = out[changed[:, None].expand_as(out)]
    assert abs(hole.mean()) < 0.01 and abs(hole.std() - 1) < 0.01

    rng, loop = random.Random(1), []
    while len(loop) < 4000:
        s, r = rng.uniform(0.02, 0.33) * H * W, math.exp(rng.uniform(math.log(0.3), math.log(3.3)))
        lh, lw = round(math.sqrt(s / r)), round(math.sqrt(s * r))
        if 1 <= lh <= H and 1 <= lw <= W:
            loop.append((lh, lw, lh * lw / (H * W)))
    for ours, theirs in zip((h.numpy(), w.numpy(), area), np.array(loop).T, strict=True):
        quantiles = np.linspace(0.1, 0.9, 9)
        spread = 5 * math.sqrt(0.25 / len(ours) + 0.25 / len(theirs))  # 5 standard deviations of a quantile's rank
        for q in quantiles:
            value = np.quantile(theirs, q)
            assert (ours < value).mean() - spread <= (theirs <= value).mean()
            assert (ours <= value).mean() + spread >= (theirs < value).mean()


def test_erasing_with_zeros_and_nothing_else():
    x = pictures(40, 20, 31)
    a = augment((20, 31), erasing=1.0, erasing_fill="zeros")
    out, base = a(x, np.arange(40), seed=0, epoch=0), a.normalize(x)
    assert ((out == 0) | (out == base)).all()
    assert ((out == 0).flatten(1).float().mean(1) > 0.01).all()


# ---- randomness has coordinates


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", ["none", "padded", "resized"])
def test_an_image_alone_equals_the_image_in_a_batch(crop, channels):
    size = (24, 40)
    x = pictures(48, *((30, 45) if crop == "resized" else size), channels)
    a = augment(size, channels, crop=crop, **EVERYTHING)
    indices = np.random.default_rng(0).permutation(50000)[:48]
    whole = a(x, indices, seed=5, epoch=7)
    assert whole.shape == (48, channels, *size) and whole.dtype == torch.float32
    for i in range(48):
        assert torch.equal(a(x[i : i + 1], indices[i : i + 1], seed=5, epoch=7)[0], whole[i])
    order = np.random.default_rng(1).permutation(48)
    assert torch.equal(a(x[order], indices[order], seed=5, epoch=7), whole[order])
    assert torch.equal(a(x[3:20], indices[3:20], seed=5, epoch=7), whole[3:20])
    assert torch.equal(a(x.contiguous(memory_format=torch.channels_last), indices, seed=5, epoch=7), whole)
    assert torch.equal(pickle.loads(pickle.dumps(a))(x, indices, seed=5, epoch=7), whole)  # in a worker


def test_threads_change_nothing():
    x, a, threads = pictures(64, 40, 40), augment((40, 40), crop="padded", **EVERYTHING), torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append(a(x, np.arange(64), seed=0, epoch=0))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*results)


def test_every_coordinate_counts():
    x = pictures(1, 32, 32).expand(24, -1, -1, -1)
    a = augment(crop="padded", **EVERYTHING)
    indices = np.arange(24)
    first = a(x, indices, seed=0, epoch=0)
    assert torch.equal(a(x, indices, seed=0, epoch=0), first)  # no memory of earlier calls
    for where in (dict(seed=1, epoch=0), dict(seed=0, epoch=1), dict(seed=0, epoch=0, repeat=1)):
        assert not any(torch.equal(p, q) for p, q in zip(a(x, indices, **where), first, strict=True))
    assert not torch.equal(first[0], first[1])
    repeats = np.arange(24) % 3
    mixed = a(x, indices, seed=0, epoch=0, repeat=repeats)
    for r in range(3):
        assert torch.equal(mixed[repeats == r], a(x, indices, seed=0, epoch=0, repeat=r)[repeats == r])


def test_options_do_not_disturb_each_other():
    """Turning one augmentation on leaves the draws of the others: crops stay where they were."""
    x = pictures(30, 32, 32)
    plain = augment(crop="padded", flip=True)
    more = augment(crop="padded", flip=True, erasing=0.5, erasing_fill="zeros")
    p, m = (a(x, np.arange(30), seed=0, epoch=0) for a in (plain, more))
    assert ((m == p) | (m == 0)).all() and not torch.equal(p, m)


def test_the_input_is_left_as_it_is():
    x = pictures(20, 32, 32)
    before = x.clone()
    for crop in ("none", "padded", "resized"):
        augment(crop=crop, **EVERYTHING)(x, np.arange(20), seed=0, epoch=0)
    assert torch.equal(x, before)


def test_empty_and_tiny():
    a = augment((1, 1), 1, crop="padded", border="zeros", padding=2, **EVERYTHING)
    assert a(pictures(9, 1, 1, 1), np.arange(9), seed=0, epoch=0).shape == (9, 1, 1, 1)
    assert augment(**EVERYTHING)(pictures(1, 32, 32)[:0], np.arange(0), seed=0, epoch=0).shape == (0, 3, 32, 32)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(crop="centre"), "'none', 'padded', 'resized'"),
        (dict(border="wrap"), "'reflect', 'zeros'"),
        (dict(erasing_fill="mean"), "'noise', 'zeros'"),
        (dict(flip="yes"), "flip='yes'"),
        (dict(padding=0), "at least 1"),
        (dict(padding=1.5), "whole number"),
        (dict(randaugment=-1), "at least 0"),
        (dict(randaugment=True), "whole number"),
        (dict(magnitude=11), "0 .. 10"),
        (dict(magnitude="9"), "must be a number"),
        (dict(magnitude_std=-1), "0 .. 10"),
        (dict(jitter=1.5), "0 .. 1"),
        (dict(erasing=float("nan")), "0 .. 1"),
        (dict(scale=(0.5, 0.2)), "low <= high"),
        (dict(scale=(0.5, 1.2)), "at most 1"),
        (dict(ratio=(0, 1)), "above 0"),
        (dict(ratio=0.75), "(low, high)"),
        (dict(ratio=("a", "b")), "(low, high)"),
    ],
)
def test_options_are_checked_at_birth(options, message):
    with pytest.raises(ValueError) as error:
        AugmentOptions(**options)
    assert message in str(error.value)


def test_lists_from_toml_become_tuples():
    assert AugmentOptions(scale=[0.5, 1], ratio=[1, 1]) == AugmentOptions(scale=(0.5, 1), ratio=(1, 1))  # type: ignore


def test_errors_of_use():
    x, n = pictures(2, 32, 32), np.arange(2)
    with pytest.raises(ValueError, match=r"padding=31 or less"):
        augment(crop="padded", padding=32)
    with pytest.raises(ValueError, match="nearest, bilinear, bicubic"):
        augment(interpolation="lanczos")
    with pytest.raises(ValueError, match="1 or 3 numbers"):
        Augment(AugmentOptions(), (8, 8), (0.5, 0.5), (0.5, 0.5))
    with pytest.raises(ValueError, match=r"found images of 32x32, expected 32x40.*crop=\"resized\""):
        augment((32, 40))(x, n, seed=0, epoch=0)
    with pytest.raises(ValueError, match="expected 16x16"):
        augment((16, 16), crop="resized")(x, n, seed=0, epoch=0, cropped=True)
    with pytest.raises(ValueError, match=r"float32, expected \(B, 3, H, W\) uint8"):
        augment()(x.float(), n, seed=0, epoch=0)
    with pytest.raises(ValueError, match=r"expected \(B, 1, H, W\)"):
        augment(channels=1)(x, n, seed=0, epoch=0)
    with pytest.raises(ValueError, match="2 images need one dataset index each"):
        augment()(x, np.arange(3), seed=0, epoch=0)
    with pytest.raises(ValueError, match='crop="resized" only'):
        augment(crop="padded").boxes(np.array([[32, 32]]), np.arange(1), seed=0, epoch=0)


def print_time(rounds: int = 30) -> None:
    x, indices = pictures(128, 32, 32), np.arange(128)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for crop in ("padded", "resized"):
            a = augment(crop=crop, flip=True, randaugment=2, erasing=0.25)
            seconds = []
            for epoch in range(rounds):
                start = time.perf_counter()
                a(x, indices, seed=0, epoch=epoch)
                seconds.append(time.perf_counter() - start)
            middle, best = 1e3 * np.median(seconds[3:]), 1e3 * min(seconds)
            print(f"{threads} threads, {crop} crop, flip, RandAugment 2, erasing: {middle:.1f} ms (best {best:.1f})")


if __name__ == "__main__":
    print_time()


def test_flips_in_turn_mirror_every_image_in_every_second_epoch():
    augment = Augment(AugmentOptions(flip=True, flip_in_turn=True), (4, 4), [0.0], [1.0], scale=1.0)
    images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).expand(200, 1, 4, 4)
    numbers = np.arange(200)
    epochs = [augment(images, numbers, seed=3, epoch=epoch)[:, 0, 0, 0] == 3 for epoch in range(4)]
    assert 60 < int(epochs[0].sum()) < 140
    assert all(torch.equal(epochs[epoch], epochs[0] ^ bool(epoch % 2)) for epoch in range(4))
    with pytest.raises(ValueError, match="flip=True"):
        AugmentOptions(flip_in_turn=True)
