"""Views against Pillow, colorsys, scipy and slow loops; and the same to the bit in any batch."""

from __future__ import annotations

import colorsys
import math
import pickle

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from scipy.ndimage import gaussian_filter

from vitlab.images import multicrop as module
from vitlab.images.multicrop import MultiCrop, MultiCropOptions, gaussian_blur, resized_crops, turn_hue
from vitlab.images.preprocess import RESAMPLING
from vitlab.images.randomness import uniform

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
PLAIN = dict(flip=0.0, jitter=0.0, grey=0.0, blur=(0, 0, 0), solarize=(0, 0, 0))


def pictures(count: int, height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    """(B, C, H, W) uint8: noise, and smooth pictures in which colours differ."""
    rng = np.random.default_rng([seed, height, width, channels])
    out = rng.integers(0, 256, (count, channels, height, width), dtype=np.uint8)
    for i in range(1, count, 2):
        soft = gaussian_filter(out[i].astype(float), (0, 2, 2))
        out[i] = np.clip((soft - 128) * 6 + 128, 0, 255)
    return torch.from_numpy(out)


def multicrop(size=(32, 48), channels=3, interpolation="bicubic", **options) -> MultiCrop:
    options = {"local_views": 3, "local_size": 16, **options}
    return MultiCrop(MultiCropOptions(**options), size, MEAN[:channels], STD[:channels], interpolation)


def to_pil(x: torch.Tensor) -> Image.Image:
    return Image.fromarray(x[0].numpy() if len(x) == 1 else x.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> torch.Tensor:
    array = np.array(image)
    return torch.from_numpy(array[None] if array.ndim == 2 else array.transpose(2, 0, 1).copy())


def levels(m: MultiCrop, x: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation: float -> grey levels."""
    std, mean = (torch.tensor(v)[:, None, None].double() for v in (m.plain.std, m.plain.mean))
    return ((x.double() * std + mean) * 255).round().int()


# ---- each operation against somebody else's


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(16, 16), (32, 48), (5, 9)])
def test_crops_are_pillows(interpolation, size):
    """Ours have fewer digits in their weights, so a value near .5 may round to the next level, in either pass.

    Pillow resizes across or down first, whichever is less work; in two calls it has no choice.
    """
    x = pictures(4, 21, 34)
    boxes = np.array([[[0, 0, 34, 21], [3, 2, 10, 20], [33, 20, 34, 21], [5, 1, 29, 9]]] * 2)
    boxes[1] = boxes[1, ::-1]
    ours = resized_crops(x, boxes, size, interpolation).unflatten(0, (2, 4))
    for view in range(2):
        for i, box in enumerate(boxes[view]):
            cut, kernel = to_pil(x[i]).crop(tuple(box.tolist())), RESAMPLING[interpolation]
            cut = cut.resize((size[1], cut.height), kernel).resize((size[1], size[0]), kernel)
            difference = (ours[view, i].int() - from_pil(cut).int()).abs()
            assert difference.max() <= 2 and difference.double().mean() < 0.03


def test_hue_is_colorsys():
    x, value = pictures(4, 6, 7), [-0.5, -0.08, 0.1, 0.4]
    ours = turn_hue(x, torch.tensor(value, dtype=torch.float64), x.new_zeros(3))
    expected = np.empty(x.shape)
    for i, down, across in np.ndindex(4, 6, 7):
        h, s, v = colorsys.rgb_to_hsv(*(x[i, :, down, across].numpy() / 255))
        expected[i, :, down, across] = np.array(colorsys.hsv_to_rgb((h + value[i]) % 1, s, v)) * 255
    assert (ours.numpy() - expected).__abs__().max() < 0.501  # rounded, and nothing else
    grey = x[:, :1].expand(-1, 3, -1, -1)
    assert torch.equal(turn_hue(grey, torch.full((4,), 0.3), x.new_zeros(3)), grey)  # has no hue to turn


def test_blur_is_scipys():
    """Twice rounded to levels, so 1 level; outside the image there is nothing, which scipy writes as a quotient."""
    x, sigma = pictures(5, 19, 26), np.array([0.1, 0.4, 0.9, 1.5, 2.0])
    ours = gaussian_blur(x, sigma)
    inside = np.ones((19, 26))
    for i, s in enumerate(sigma):
        weight = gaussian_filter(inside, s, mode="constant", truncate=12)
        for channel in range(3):
            theirs = gaussian_filter(x[i, channel].double().numpy(), s, mode="constant", truncate=12) / weight
            assert np.abs(ours[i, channel].numpy() - theirs).max() <= 1.01
    assert torch.equal(ours[0], x[0])  # so small a sigma blurs nothing
    flat = torch.full((1, 3, 30, 30), 255, dtype=torch.uint8)
    assert torch.equal(gaussian_blur(flat, np.array([2.0])), flat)


def test_colours_are_pillows_in_the_drawn_order():
    """A slow loop: flip, the three enhancers of Pillow in the order that was drawn, grey, solarize; to the bit."""
    options = dict(hue=0.0, blur=(0, 0, 0), solarize=(0.5, 0.5, 0.5), grey=0.4, jitter=0.7)
    m = multicrop(local_views=1, **options)
    views = [pictures(20, *size, seed=n) for n, size in enumerate(m.sizes)]
    indices, repeat = np.arange(20) * 7, np.arange(20) % 3
    found = m(views, indices, seed=4, epoch=2, repeat=repeat, cropped=True)
    seen = set()
    for number, view in enumerate(views):
        for i in range(20):
            n = uniform(4, module.COLOUR, 2, indices[i], repeat[i], number, count=module.DRAWS)[0]
            image = to_pil(view[i])
            image = ImageOps.mirror(image) if n[0] < 0.5 else image
            if n[1] < 0.7:
                for which in np.argsort(n[6:10]):
                    if which < 3:
                        kind = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[which]
                        image = kind(image).enhance(1 + (0.4, 0.4, 0.2)[which] * (2 * n[10 + which] - 1))
            image = image.convert("L").convert("RGB") if n[2] < 0.4 else image
            image = ImageOps.solarize(image, 128) if n[5] < 0.5 else image
            assert torch.equal(levels(m, found[number][i]), from_pil(image).int())
            seen.add((n[0] < 0.5, n[1] < 0.7, n[2] < 0.4, n[5] < 0.5))
    assert len(seen) >= 12  # nearly every combination was met


def test_normalised_as_the_model_reads_pictures():
    m = multicrop(size=(16, 16), **PLAIN, global_scale=(1.0, 1.0), ratio=(1.0, 1.0))
    x = pictures(2, 16, 16)
    expected = (x.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(m(x, np.arange(2), seed=0, epoch=0)[0], expected)


# ---- what is drawn


def test_sizes_and_ranges_of_the_crops():
    m = multicrop(local_views=2, global_scale=(0.5, 0.9), local_scale=(0.1, 0.3))
    sizes = np.broadcast_to((224, 300), (3000, 2))
    boxes = m.boxes(sizes, np.arange(3000), seed=1, epoch=0)
    assert boxes.shape == (4, 3000, 4)
    left, top, right, bottom = np.moveaxis(boxes, -1, 0)
    assert left.min() >= 0 and top.min() >= 0 and right.max() <= 300 and bottom.max() <= 224
    area, ratio = (right - left) * (bottom - top) / (224 * 300), (right - left) / (bottom - top)
    for view, (low, high) in enumerate([(0.5, 0.9)] * 2 + [(0.1, 0.3)] * 2):
        assert low - 0.01 < area[view].min() < low + 0.02 and high - 0.02 < area[view].max() < high + 0.01
        assert ratio[view].min() > 0.74 and ratio[view].max() < 1.35
    assert abs(np.corrcoef(left[0], left[1])[0, 1]) < 0.1  # each view draws its own
    assert abs(area[2].mean() - 0.2) < 0.01
    views = m(pictures(2, 21, 34), np.arange(2), seed=0, epoch=0)
    assert [tuple(v.shape) for v in views] == [(2, 3, 32, 48)] * 2 + [(2, 3, 16, 16)] * 2


def test_each_kind_of_view_has_its_own_probabilities():
    """The paper's: blur 1, 0.1 and 0.5; solarize 0, 0.2 and 0. Counted on a thousand views."""
    n = 1000
    flat = torch.full((n, 3, 4, 4), 200, dtype=torch.uint8)  # a flat view is solarized to 55, whatever else
    m = multicrop(size=(4, 4), local_size=4, local_views=1, **{**PLAIN, "solarize": (0.0, 0.2, 0.0)})
    share = [float((levels(m, v)[:, 0, 0, 0] == 55).float().mean()) for v in m(flat, np.arange(n), seed=0, epoch=0)]
    assert share[0] == share[2] == 0 and abs(share[1] - 0.2) < 4 * math.sqrt(0.16 / n)
    spot = torch.zeros(n, 3, 4, 4, dtype=torch.uint8)
    spot[:, :, 1, 1] = 255
    blurs = {**PLAIN, "blur": MultiCropOptions().blur, "blur_sigma": (1, 2)}
    m = multicrop(size=(4, 4), local_size=4, local_views=1, **blurs)
    found = m([spot] * 3, np.arange(n), seed=0, epoch=0, cropped=True)
    share = [float((levels(m, v)[:, 0, 1, 1] < 255).float().mean()) for v in found]
    assert share[0] == 1 and abs(share[1] - 0.1) < 4 * math.sqrt(0.09 / n)
    assert abs(share[2] - 0.5) < 4 * math.sqrt(0.25 / n)
    assert MultiCropOptions().solarize == (0.0, 0.2, 0.0) and MultiCropOptions().blur == (1.0, 0.1, 0.5)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_view_depends_on_its_coordinates_alone(channels):
    m, x = multicrop(channels=channels), pictures(12, 27, 40, channels)
    indices, repeat = np.arange(100, 112), np.arange(12) % 2
    whole = m(x, indices, seed=3, epoch=5, repeat=repeat)
    assert len(whole) == 5
    order = np.random.default_rng(0).permutation(12)
    shuffled = m(x[torch.from_numpy(order)], indices[order], seed=3, epoch=5, repeat=repeat[order])
    alone = [m(x[i : i + 1], indices[i : i + 1], seed=3, epoch=5, repeat=repeat[i : i + 1]) for i in range(12)]
    fewer = multicrop(channels=channels, local_views=1)(x, indices, seed=3, epoch=5, repeat=repeat)
    for number, view in enumerate(whole):
        assert torch.equal(shuffled[number], view[torch.from_numpy(order)])
        assert torch.equal(torch.cat([views[number] for views in alone]), view)
        assert number >= 3 or torch.equal(fewer[number], view)
    sent = pickle.loads(pickle.dumps(m))  # to a worker
    assert torch.equal(sent(x, indices, seed=3, epoch=5, repeat=repeat)[4], whole[4])


@pytest.mark.parametrize("changed", [dict(seed=1), dict(epoch=1), dict(repeat=1), dict(indices=np.array([8]))])
def test_each_coordinate_changes_every_view(changed):
    m, x = multicrop(), pictures(2, 27, 40)[1:]
    usual = dict(indices=np.array([7]), seed=0, epoch=0)
    for first, second in zip(m(x, **usual), m(x, **{**usual, **changed}), strict=True):
        assert not torch.equal(first, second)
    views = m(x, **usual)
    assert not torch.equal(views[0], views[1]) and not torch.equal(views[2], views[3])


# ---- files


@pytest.mark.parametrize("channels", [1, 3])
def test_views_cut_from_a_file_are_those_cut_from_memory(channels):
    m = multicrop(channels=channels, **PLAIN)
    x = pictures(3, 37, 29, channels)
    indices = np.array([4, 9, 2])
    boxes = m.boxes(np.broadcast_to((37, 29), (3, 2)), indices, seed=0, epoch=1)
    cut = [m.cut(x[i].permute(1, 2, 0).numpy(), boxes[:, i]) for i in range(3)]
    views = [torch.stack([one[number] for one in cut]) for number in range(5)]
    from_files = m(views, indices, seed=0, epoch=1, cropped=True)
    for ours, theirs in zip(m(x, indices, seed=0, epoch=1), from_files, strict=True):
        difference = (levels(m, ours) - levels(m, theirs)).abs()
        assert difference.max() <= 2 and difference.double().mean() < 0.03
    colour = m.cut(pictures(1, 37, 29, 3)[0].permute(1, 2, 0).numpy(), boxes[:, 0])  # a picture in colours
    assert colour[0].shape == (channels, 32, 48)


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(local_views=-1), "local_views=-1 must be a whole number"),
        (dict(local_size=0), "at least 1"),
        (dict(global_scale=(0.5, 1.5)), "global_scale.*at most 1"),
        (dict(local_scale=[0.4, 0.1]), "local_scale.*low <= high"),
        (dict(blur=(1.0, 0.5)), "first global, second global, local"),
        (dict(solarize=(0, 2, 0)), "solarize.*0 .. 1"),
        (dict(jitter=1.5), "jitter=1.5 must be a number in 0 .. 1"),
        (dict(hue=0.7), "colour circle"),
        (dict(blur_sigma=(0.0, 1.0)), "blur_sigma"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ValueError, match=words):
        MultiCropOptions(**options)


def test_bad_images():
    m, x, one = multicrop(), pictures(2, 32, 48), np.arange(2)
    with pytest.raises(ValueError, match=r"expected \(B, 3, H, W\) uint8"):
        m(x.float(), one, seed=0, epoch=0)
    with pytest.raises(ValueError, match="one dataset index each"):
        m(x, np.arange(3), seed=0, epoch=0)
    with pytest.raises(ValueError, match="expected a list of views"):
        m(x, one, seed=0, epoch=0, cropped=True)
    with pytest.raises(ValueError, match="expected one tensor"):
        m([x, x], one, seed=0, epoch=0)
    with pytest.raises(ValueError, match="cut them with"):
        m([x, x], one, seed=0, epoch=0, cropped=True)
    with pytest.raises(ValueError, match="interpolation='lanczos' must be one of bilinear, bicubic"):
        multicrop(interpolation="lanczos")


def test_no_local_views():
    assert len(multicrop(local_views=0)(pictures(2, 32, 48), np.arange(2), seed=0, epoch=0)) == 2
