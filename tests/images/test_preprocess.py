"""Preprocess, pixel for pixel against transformers' image processors; and places that map back to the picture."""

from __future__ import annotations

import io
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deit.image_processing_pil_deit import DeiTImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from vitlab.checkpoints import hf
from vitlab.errors import ImageError
from vitlab.images.preprocess import RESAMPLING, Preprocess
from vitlab.models.entry import HALF, IMAGENET

CLIP = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
SIZES = [(41, 67), (67, 41), (50, 50), (24, 32), (7, 90), (5, 3), (1, 1), (33, 64)]  # (H, W)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    noise = np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def theirs(processor, image: Image.Image) -> torch.Tensor:
    return processor(image, return_tensors="pt")["pixel_values"][0]


def sides(size) -> dict[str, int]:
    return {"height": size[0], "width": size[1]}


def options(preprocess: Preprocess) -> dict:
    return dict(
        resample=int(RESAMPLING[preprocess.interpolation]),
        do_rescale=True,
        rescale_factor=preprocess.scale,
        do_normalize=True,
        image_mean=list(preprocess.mean),
        image_std=list(preprocess.std),
    )


def stretched(preprocess: Preprocess) -> ViTImageProcessorPil:
    return ViTImageProcessorPil(do_resize=True, size=sides(preprocess.size), **options(preprocess))


def cropped(kind, preprocess: Preprocess):
    resize = preprocess.resize if preprocess.resize is not None else preprocess.size[0]
    return kind(
        do_resize=True,
        size={"shortest_edge": resize} if isinstance(resize, int) else sides(resize),
        do_center_crop=True,
        crop_size=sides(preprocess.size),
        **options(preprocess),
    )


PAIRS = {
    "vit": (Preprocess((32, 32), **HALF), stretched),
    "vit, not square": (Preprocess((24, 33), interpolation="bicubic", **IMAGENET), stretched),
    "vit, other scale": (Preprocess((24, 33), scale=1 / 127.5, mean=(1, 1, 1), std=(1, 1, 1)), stretched),
    "deit": (
        Preprocess((28, 28), how="crop", resize=(32, 32), interpolation="bicubic", **IMAGENET),
        lambda p: cropped(DeiTImageProcessorPil, p),
    ),
    "deit, odd and not square": (
        Preprocess((27, 30), how="crop", resize=(34, 31), **IMAGENET),
        lambda p: cropped(DeiTImageProcessorPil, p),
    ),
    "clip": (
        Preprocess((28, 28), how="crop", resize=28, interpolation="bicubic", **CLIP),
        lambda p: cropped(CLIPImageProcessorPil, p),
    ),
    "clip, crop larger than what was resized": (
        Preprocess((45, 38), how="crop", resize=20, interpolation="bicubic", **CLIP),
        lambda p: cropped(CLIPImageProcessorPil, p),
    ),
    "bit, as DINOv2 has it": (
        Preprocess((28, 28), how="crop", resize=32, interpolation="bicubic", **IMAGENET),
        lambda p: cropped(BitImageProcessorPil, p),
    ),
    "bit, odd": (Preprocess((27, 21), how="crop", resize=32, **IMAGENET), lambda p: cropped(BitImageProcessorPil, p)),
    "no resize given: the smallest that covers": (
        Preprocess((29, 29), how="crop", interpolation="bicubic", **IMAGENET),
        lambda p: cropped(BitImageProcessorPil, p),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_pixels_equal_those_of_transformers(name):
    ours, build = PAIRS[name]
    for size in SIZES:
        image = picture(*size)
        assert torch.equal(ours(image), theirs(build(ours), image)), size


@pytest.mark.parametrize("interpolation", RESAMPLING)
def test_every_interpolation_equals_that_of_transformers(interpolation):
    for ours, build in (
        (Preprocess((24, 33), interpolation=interpolation, **HALF), stretched),
        (
            Preprocess((24, 33), how="crop", resize=40, interpolation=interpolation, **CLIP),
            lambda p: cropped(CLIPImageProcessorPil, p),
        ),
    ):
        image = picture(51, 38)
        assert torch.equal(ours(image), theirs(build(ours), image))


@given(st.integers(1, 99), st.integers(1, 99), st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_any_crop_of_any_picture_equals_that_of_transformers(height, width, tall, wide, resize):
    ours = Preprocess((tall, wide), how="crop", resize=resize, **IMAGENET)
    image = picture(height, width)
    assert torch.equal(ours(image), theirs(cropped(BitImageProcessorPil, ours), image))


@pytest.mark.parametrize("name", PAIRS)
def test_a_saved_preprocessor_config_gives_the_same_pixels(name):
    processor = PAIRS[name][1](PAIRS[name][0])
    config = json.loads(json.dumps(processor.to_dict(), default=int))
    ours = Preprocess(**hf.preprocess_from(config))
    for size in SIZES:
        assert torch.equal(ours(picture(*size)), theirs(processor, picture(*size))), size


@pytest.mark.parametrize("name", PAIRS)
def test_what_we_write_for_transformers_gives_the_same_pixels_there(name, tmp_path):
    ours = PAIRS[name][0]
    config = hf.preprocessor_for(ours)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config), encoding="utf-8")
    kind = {"ViTImageProcessor": ViTImageProcessorPil, "BitImageProcessor": BitImageProcessorPil}
    processor = kind[config["image_processor_type"]].from_pretrained(tmp_path)
    for size in SIZES:
        assert torch.equal(ours(picture(*size)), theirs(processor, picture(*size))), size


def test_grey_models_see_pillows_grey():
    ours = Preprocess((19, 23), mean=(0.5,), std=(0.25,))
    values = np.float32(np.asarray(picture(19, 23).convert("L")) / 255)  # 0.5 and 0.25 are exact: no other rounding
    assert torch.equal(ours(picture(19, 23)), torch.from_numpy((values - 0.5) * 4)[None])
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)  # a grey file goes through RGB and comes back unchanged
    assert np.array_equal(np.asarray(Preprocess((16, 16), mean=(0.5,), std=(0.5,)).view(Image.fromarray(grey))), grey)


def test_fit_keeps_the_proportions_and_pads_with_the_mean_colour():
    ours = Preprocess((20, 30), how="fit", **IMAGENET)
    image = picture(40, 20)  # twice as tall as wide -> (20, 10), in the middle of 30
    view = np.asarray(ours.view(image))
    assert np.array_equal(view[:, 10:20], np.asarray(image.resize((10, 20), Image.Resampling.BILINEAR)))
    assert (np.delete(view, slice(10, 20), axis=1) == [round(255 * m) for m in IMAGENET["mean"]]).all()
    assert ours(image)[:, :, :10].abs().max() < 0.5 / 255 / 0.224 + 1e-6  # the mean colour is 0 for the model


def test_batch_is_one_by_one():
    ours = PAIRS["clip"][0]
    images = [picture(*size) for size in SIZES]
    assert torch.equal(ours.batch(images), torch.stack([ours(image) for image in images]))


@pytest.mark.parametrize("name", PAIRS)
def test_json_round_trip(name):
    ours = PAIRS[name][0]
    assert Preprocess.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours


@pytest.mark.parametrize("values", [HALF, IMAGENET, CLIP, dict(mean=(0.0,) * 3, std=(1.0,) * 3)])
def test_to_image_inverts_normalize_for_every_8_bit_value(values):
    every = np.stack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3, axis=-1)
    ours = Preprocess((16, 16), **values)
    assert np.array_equal(np.asarray(ours.to_image(ours(every))), every)
    grey = Preprocess((16, 16), mean=values["mean"][:1], std=values["std"][:1])
    assert np.array_equal(np.asarray(grey.to_image(grey(every[..., 0]))), every[..., 0])


def test_with_size_keeps_the_share_that_is_cut_off():
    assert Preprocess(224, how="crop", resize=256).with_size((112, 112)) == Preprocess(112, how="crop", resize=128)
    pair = Preprocess(224, how="crop", resize=(256, 288))
    assert pair.with_size((112, 56)) == Preprocess((112, 56), how="crop", resize=(128, 72))
    assert pair.with_size(pair.size) == pair
    assert Preprocess(224, how="crop", resize=256).with_size(448) == Preprocess(448, how="crop", resize=512)
    assert Preprocess(224, how="crop").with_size((96, 64)) == Preprocess((96, 64), how="crop")
    small, large = (Preprocess(24, how="crop", resize=32, **HALF).with_size(s) for s in ((24, 24), (48, 48)))
    assert small.patch_box(1, 2, 4, (64, 96)) == large.patch_box(1, 2, 8, (64, 96))


# Places

WAYS = {
    "stretch": dict(how="stretch"),
    "crop to cover": dict(how="crop"),
    "crop after the shorter side": dict(how="crop", resize=72),
    "crop after an exact size": dict(how="crop", resize=(90, 110)),
    "crop larger than what was resized": dict(how="crop", resize=40),
    "fit": dict(how="fit"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("original", [(300, 420), (420, 300)], ids=["wide", "tall"])
@pytest.mark.parametrize("size, grid", [((64, 48), (8, 6)), ((48, 72), (3, 9))])
def test_patches_that_see_a_block_map_back_onto_it(way, original, size, grid):
    """A red block on black; the patches in which the model sees red lead back to the block, and closely so."""
    ours = Preprocess(size, **WAYS[way])
    left, top, right, bottom = block = (170, 130, 215, 195)
    canvas = np.zeros((*original, 3), dtype=np.uint8)
    canvas[top:bottom, left:right, 0] = 255
    view = np.asarray(ours.view(Image.fromarray(canvas))).astype(int)
    red = view[..., 0] > view[..., 1]  # padding is black or grey
    rows, columns = size[0] // grid[0], size[1] // grid[1]
    seen = red.reshape(grid[0], rows, grid[1], columns).any(axis=(1, 3))  # (grid)
    boxes = np.array([ours.patch_box(r, c, (rows, columns), original) for r, c in np.argwhere(seen)])
    found = (*boxes[:, :2].min(axis=0), *boxes[:, 2:].max(axis=0))
    patch = (boxes[0, 2] - boxes[0, 0], boxes[0, 3] - boxes[0, 1])
    for i, side in enumerate(block):
        margin = (side - found[i]) if i < 2 else (found[i] - side)
        blur = 2 * patch[i % 2] / (columns, rows)[i % 2]  # resizing spreads an edge over two pixels of the view
        assert 0 <= margin <= patch[i % 2] + blur, (found, block)


@pytest.mark.parametrize("way", WAYS)
def test_geometry_says_which_pixel_the_model_sees(way):
    """With a gradient in x and y, what the model sees at a place is the place's own coordinates."""
    ours = Preprocess((64, 48), **WAYS[way])
    for height, width in ((200, 250), (250, 200)):
        x, y = np.meshgrid(np.arange(width), np.arange(height))
        view = np.asarray(ours.view(Image.fromarray(np.dstack([x, y, 255 + 0 * x]).astype(np.uint8)))).astype(int)
        checked = 0
        for row, column in np.argwhere(view[..., 2] == 255):
            box = ours.geometry((height, width)).to_original((column, row, column + 1, row + 1))
            centre_x, centre_y = (box[0] + box[2]) / 2 - 0.5, (box[1] + box[3]) / 2 - 0.5
            if 9 < centre_x < width - 9 and 9 < centre_y < height - 9:  # at the rim the filter is lopsided
                assert abs(view[row, column, 0] - centre_x) <= 1
                assert abs(view[row, column, 1] - centre_y) <= 1
                checked += 1
        assert checked > 500


lengths = st.integers(1, 5000)


@given(lengths, lengths, st.integers(1, 40), st.integers(1, 40), st.integers(1, 9), st.sampled_from(sorted(WAYS)))
@settings(max_examples=150, deadline=None)
def test_all_patch_boxes_together_are_the_view(height, width, rows, columns, patch, way):
    ours = Preprocess((rows * patch, columns * patch), **WAYS[way])
    original = (height, width)
    view = ours.geometry(original).to_original((0, 0, columns * patch, rows * patch))
    first, last = ours.patch_box(0, 0, patch, original), ours.patch_box(rows - 1, columns - 1, patch, original)
    assert np.allclose((*first[:2], *last[2:]), view, rtol=1e-9, atol=1e-6)
    for r in range(rows - 1):  # no gap and no overlap
        assert ours.patch_box(r, 0, patch, original)[3] == pytest.approx(ours.patch_box(r + 1, 0, patch, original)[1])
    for c in range(columns - 1):
        assert ours.patch_box(0, c, patch, original)[2] == pytest.approx(ours.patch_box(0, c + 1, patch, original)[0])


@given(lengths, lengths, st.integers(1, 400), st.integers(1, 400), st.sampled_from(["stretch", "crop to cover", "fit"]))
@settings(max_examples=150, deadline=None)
def test_the_corners_of_the_view_lie_where_they_must(height, width, tall, wide, way):
    ours = Preprocess((tall, wide), **WAYS[way])
    g = ours.geometry((height, width))
    left, top, right, bottom = g.to_original((0, 0, wide, tall))
    if way == "stretch":
        assert (left, top) == (0, 0)
        assert (right, bottom) == pytest.approx((width, height))
        return
    # One side fits exactly; the other is centred to within a pixel of the view, and proportions are kept.
    exact = Fraction(height, width)
    tie = Fraction(tall, wide)
    full_height = (exact <= tie) if way == "crop to cover" else (exact >= tie)
    pixel_x, pixel_y = width / g.resized[1], height / g.resized[0]
    if full_height:
        assert (top, bottom) == pytest.approx((0, height))
        assert abs((left + right) - width) <= pixel_x * 1.001
        assert abs(g.resized[1] - tall / exact) <= 1
    else:
        assert (left, right) == pytest.approx((0, width))
        assert abs((top + bottom) - height) <= pixel_y * 1.001
        assert abs(g.resized[0] - wide * exact) <= 1
    inside = left >= -1e-6 and right <= width + 1e-6 and top >= -1e-6 and bottom <= height + 1e-6
    around = left <= 1e-6 and right >= width - 1e-6 and top <= 1e-6 and bottom >= height - 1e-6
    assert inside if way == "crop to cover" else around


# What is refused


@pytest.mark.parametrize(
    "values, says",
    [
        (dict(how="squash"), ["squash", "stretch", "crop", "fit"]),
        (dict(interpolation="cubic"), ["cubic", *RESAMPLING]),
        (dict(size=(0, 32)), ["(0, 32)", "(height, width)"]),
        (dict(size=(3, 32, 32)), ["(3, 32, 32)", "(height, width)"]),
        (dict(mean=(0.5,) * 4, std=(0.5,) * 4), ["1 or 3"]),
        (dict(mean=(0.5,)), ["1 or 3"]),
        (dict(std=(0.5, 0.5, 0)), ["above 0"]),
        (dict(how="crop", resize=0), ["resize=0", "shorter side", "(height, width)"]),
        (dict(how="crop", resize=[9, 9, 9]), ["(9, 9, 9)", "shorter side"]),
        (dict(scale=0), ["scale=0"]),
    ],
)
def test_a_bad_option_is_refused_with_the_good_ones(values, says):
    with pytest.raises(ValueError) as caught:
        Preprocess(**{"size": (32, 32), **values})
    for word in says:
        assert word in str(caught.value)


def test_an_unknown_key_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'crop_pct'.*interpolation.*resize"):
        Preprocess.from_dict({"size": 32, "crop_pct": 0.9})


def test_a_thread_of_pixels_is_refused_before_it_is_blown_up():
    """1 x 20000 pixels, with the shorter side resized to 256, would be 1.3 gigapixels."""
    thread = io.BytesIO()
    Image.new("RGB", (20_000, 1)).save(thread, "PNG")
    with pytest.raises(ImageError, match=r"thread\.png: 20000 x 1 pixels"):
        Preprocess((224, 224), how="crop", resize=256)(thread.getvalue(), name="thread.png")
    assert Preprocess((224, 224))(thread.getvalue()).unique().tolist() == [-1.0]
