"""Photos read at about the size they are needed at: regions against a closed form, pixels against exact reading."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from vitlab.errors import ImageError
from vitlab.images.preprocess import Preprocess
from vitlab.images.read import read_image
from vitlab.images.scaled import ABUNDANCE, SCALES, Cut, open_scaled, whole

KERNEL = Image.Resampling.BILINEAR
TURNS = range(1, 9)


def ramp(height: int, width: int) -> Image.Image:
    """Red grows from left to right, green from top to bottom: a pixel says where it is."""
    across, down = (255 * (np.arange(n) + 0.5) / n for n in (width, height))
    red, green = np.meshgrid(across, down)
    return Image.fromarray(np.stack([red, green, np.full_like(red, 128)], axis=-1).round().astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", orientation: int = 1, **options: object) -> bytes:
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    options = {"quality": 98, "subsampling": 0, **options} if form in ("JPEG", "MPO") else options
    image.save(file, form, exif=exif, **options)
    return file.getvalue()


def textured(height: int, width: int, mode: str = "RGB") -> Image.Image:
    """Soft blobs, as photos have them."""
    rng = np.random.default_rng([height, width])
    coarse = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, len(mode)), dtype=np.uint8)
    image = Image.fromarray(coarse[:, :, 0] if len(mode) == 1 else coarse)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def view_of(source: bytes, box: tuple[int, int, int, int], size: tuple[int, int], channels: int = 3) -> np.ndarray:
    with open_scaled(source) as photo:
        (view,) = photo.views([Cut(box, size)], KERNEL, channels)
    return view.permute(1, 2, 0).numpy().astype(float)  # (h, w, C)


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
def test_a_crop_is_the_same_region(turn, shrink):
    H, W, (h, w) = 403, 597, (12, 18)
    stored = ramp(W, H) if turn >= 5 else ramp(H, W)
    with open_scaled(encoded(stored, orientation=turn)) as photo:
        assert photo.size == (H, W)
        left, top = 31, 42
        box = (left, top, left + round(w * shrink * ABUNDANCE), top + round(h * shrink * ABUNDANCE))
        (view,) = photo.views([Cut(box, (h, w))], KERNEL, channels=3)
    shown = read_image(encoded(stored, orientation=turn))
    exact = np.asarray(shown.crop(box).resize((w, h), KERNEL)).astype(float)
    off = np.abs(view.permute(1, 2, 0).numpy() - exact)  # in levels
    levels = 1.5 if shrink == 1 else 2.5  # JPEG and rounding; a level is 2.3 pixels of the photo
    assert off.max() <= levels  # at 1/8 that is a third of the view's pixel: 2.5 * 2.3 of 16


@pytest.mark.parametrize("scale", (1, *SCALES))
def test_libjpeg_turbo_and_pillow_decode_alike(scale):
    data = encoded(textured(203, 301), subsampling=2, quality=85)
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (301 // scale, 203 // scale))
    size = (-(-203 // scale), -(-301 // scale))
    turbo = simplejpeg.decode_jpeg(data, "RGB", min_height=size[0], min_width=size[1], min_factor=scale)
    assert turbo.shape == (*size, 3)
    np.testing.assert_array_equal(turbo, np.asarray(image))


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("form", ["JPEG", "MPO", "PNG", "TIFF", "WEBP"])
def test_every_format_and_orientation_is_cut_as_exactly(form, turn):
    options = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True}}.get(form, {})
    if form == "MPO":
        options = {"save_all": True, "append_images": [textured(20, 30)]}
    source = encoded(textured(160, 120), form, turn, **options)
    shown = read_image(source)
    box = (11, 23, shown.width - 5, shown.height - 17)
    exact = np.asarray(shown.crop(box).resize((40, 30), KERNEL)).astype(float)
    assert np.abs(view_of(source, box, (30, 40)) - exact).max() <= 3


@pytest.mark.parametrize(
    "image, form, options",
    [
        (textured(90, 70, "RGBA"), "PNG", {}),
        (textured(90, 70).quantize(17), "PNG", {"transparency": 3}),
        (textured(90, 70, "L"), "PNG", {"transparency": 100}),
        (textured(90, 70, "L").point(lambda v: 200 * v, "I").convert("I;16"), "PNG", {}),
        (textured(90, 70, "L"), "JPEG", {}),
        (textured(90, 70).convert("CMYK"), "JPEG", {}),
        (textured(90, 70), "JPEG", {"progressive": True}),
        (textured(90, 70), "GIF", {}),
    ],
    ids=["alpha", "palette", "one grey", "16 bits", "grey JPEG", "CMYK", "progressive", "GIF"],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_converted_after_the_crop_looks_the_same(image, form, options, channels):
    file, box = io.BytesIO(), (7, 11, 61, 83)
    image.save(file, form, **options)
    shown = read_image(file.getvalue()).convert("L" if channels == 1 else "RGB")
    exact = np.asarray(shown.crop(box)).reshape(72, 54, channels)
    np.testing.assert_array_equal(view_of(file.getvalue(), box, (72, 54), channels), exact)


@pytest.mark.parametrize(
    "how, resize", [("stretch", None), ("crop", 40), ("crop", None), ("crop", (20, 60)), ("fit", None)]
)
@pytest.mark.parametrize("size", [(403, 301), (31, 50)])
def test_a_whole_view_is_that_of_prediction(how, resize, size):
    pre, source = Preprocess((32, 48), how, resize), encoded(textured(*size))
    with open_scaled(source) as photo:
        fast = pre.view_scaled(photo).permute(1, 2, 0).numpy().astype(float)
    exact = np.asarray(pre.view(read_image(source))).astype(float)
    assert fast.shape == exact.shape == (32, 48, 3)
    assert np.abs(fast - exact).mean() < 0.6 and np.abs(fast - exact).max() < 6
    unlike = np.asarray(replace(pre, how="stretch" if how != "stretch" else "fit").view(read_image(source))).astype(
        float
    )
    assert np.abs(unlike - exact).mean() > 3  # the tolerance tells one way from another


def test_several_views_are_as_sharp_as_the_sharpest_needs():
    source = encoded(textured(400, 600))
    small, large = Cut((0, 0, 600, 400), (10, 15)), Cut((100, 100, 160, 140), (30, 45))
    with open_scaled(source) as photo:
        together = photo.views([small, large], KERNEL, 3)[1]
    with open_scaled(source) as photo:
        alone = photo.views([large], KERNEL, 3)[0]
    np.testing.assert_array_equal(together, alone)


def test_a_damaged_photo_is_named(tmp_path):
    path = tmp_path / "cut.jpg"
    path.write_bytes(encoded(textured(200, 300))[:3000])
    with pytest.raises(ImageError, match=r"cut\.jpg: damaged or cut off"), open_scaled(path) as photo:
        photo.views([Cut(whole(photo.size), (20, 30))], KERNEL, 3)
    with pytest.raises(ImageError, match=r"none\.jpg: no such file"), open_scaled(tmp_path / "none.jpg"):
        pass
    path.write_bytes(b"text")
    with pytest.raises(ImageError, match=r"cut\.jpg: not an image"), open_scaled(path):
        pass


def test_odd_bytes_that_pillow_reads_are_read():
    """libjpeg warns of bytes between two segments, and simplejpeg refuses what it warns of."""
    data = encoded(textured(40, 60))
    odd = data[:2] + b"\xff\xfe\x00\x04ab" + data[2:-2] + b"\x00\x01\x02" + data[-2:]
    exact = np.asarray(read_image(odd)).astype(float)
    np.testing.assert_array_equal(view_of(odd, (0, 0, 60, 40), (40, 60)), exact)
