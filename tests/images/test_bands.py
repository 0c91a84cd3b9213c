"""Images that are no photos: what is read is what was written, by tifffile, numpy or Pillow."""

import io
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image, ImageOps

from vitlab.errors import DataError, ImageError, UsageError
from vitlab.images.bands import channels_last, is_photo, measure_pixels, read_bands
from vitlab.images.datasets import FileOptions, open_data
from vitlab.images.preprocess import Preprocess
from vitlab.images.read import TURNS, TooLargeError, read_image

RANDOM = np.random.default_rng(0)


def values(dtype, shape=(23, 31, 5)):
    if np.dtype(dtype).kind == "f":
        return RANDOM.normal(0, 3, shape).astype(dtype)
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return RANDOM.integers(low, high, shape, dtype=dtype, endpoint=True)


def tiff(array, **options):
    file = io.BytesIO()
    tifffile.imwrite(file, array, **options)
    return file.getvalue()


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


WRITTEN = {  # how five channels are laid out in a TIFF, by whatever program
    "samples": lambda a: tiff(a, photometric="minisblack", planarconfig="contig"),
    "planes": lambda a: tiff(a.transpose(2, 0, 1), photometric="minisblack", planarconfig="separate"),
    "pages": lambda a: tiff(a.transpose(2, 0, 1)),
    "pages without a word": lambda a: tiff(a.transpose(2, 0, 1), metadata=None),
    "as numpy has it": tiff,
    "deflate": lambda a: tiff(a, photometric="minisblack", planarconfig="contig", compression="deflate"),
    "deflate, predicted": lambda a: tiff(
        a, photometric="minisblack", planarconfig="contig", compression="deflate", predictor=a.dtype.kind != "f"
    ),
    "tiles, big-endian": lambda a: tiff(
        a, photometric="minisblack", planarconfig="contig", tile=(16, 16), byteorder=">", bigtiff=True
    ),
    "npy": npy,
    "npy, channels first": lambda a: npy(a.transpose(2, 0, 1)),
    "npy, big-endian": lambda a: npy(a.astype(a.dtype.newbyteorder(">"))),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.float32])
@pytest.mark.parametrize("written", WRITTEN)
def test_every_value_comes_back_from_every_kind_of_file(written, dtype):
    array = values(dtype)
    read = read_bands(WRITTEN[written](array))
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, array)


def test_a_tiff_and_an_array_of_the_same_values_give_the_same_tensor_and_no_bit_of_16_is_lost():
    array = values(np.uint16, (40, 52, 5))
    array[:, :, 0] = 4000 + array[:, :, 0] % 16  # 12-bit values, whose differences 8 bits do not show
    pre = Preprocess((16, 24), "crop", mean=(0.1, 0.2, 0.3, 0.4, 0.5), std=(0.5,) * 5, scale=1 / 65535, pixels="uint16")
    one, other = pre(WRITTEN["samples"](array)), pre(npy(array))
    assert torch.equal(one, other) and torch.equal(one, pre(array))
    plain = Preprocess((40, 52), mean=(0.0,), std=(1.0,), scale=1 / 65535, pixels="uint16")
    levels = (plain(array[:, :, 0].copy()) * 65535).round().unique()
    assert levels.tolist() == list(range(4000, 4016))


@pytest.mark.parametrize("how", ["stretch", "crop", "fit"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "box"])
def test_stored_8_bit_grey_is_what_a_photo_is_but_for_rounding(how, interpolation):
    grey = 80 + values(np.uint8, (37, 53)) // 3  # bicubic overshoots by a third at most, and 8 bits would cut it off
    options = dict(how=how, interpolation=interpolation, mean=(0.4,), std=(0.3,))
    photo = Preprocess((32, 24), **options)(Image.fromarray(grey))
    stored = Preprocess((32, 24), **options, pixels="uint8")(grey)
    off = ((photo - stored) * 0.3 * 255).abs()
    assert off.max() < 1.01 and off.mean() < 0.35  # Pillow rounds after the rows and after the columns


def test_mean_and_std_are_those_of_numpy():
    images = [values(np.uint16, (int(h), int(w), 5)) for h, w in RANDOM.integers(3, 40, (9, 2))]
    pixels = np.concatenate([image.reshape(-1, 5) for image in images]).astype(np.float64) / 65535
    mean, std = measure_pixels(images, 5, 1 / 65535)
    np.testing.assert_allclose(mean, pixels.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(std, pixels.std(axis=0), rtol=1e-12)


def test_a_small_spread_around_a_large_mean_is_measured():
    images = [np.float32(1e6) + values(np.float32, (20, 30, 2)).round() for _ in range(5)]
    expected = np.concatenate([image.reshape(-1, 2) for image in images]).astype(np.float64).std(axis=0)
    np.testing.assert_allclose(measure_pixels(images, 2, 1.0)[1], expected, rtol=1e-9)


@pytest.mark.parametrize("orientation", TURNS)
def test_a_tiff_is_turned_as_pillow_turns_it(orientation):
    grey = values(np.uint8, (7, 11))
    tagged = tiff(grey, extratags=[(274, "H", 1, orientation, True)])
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(tagged)))
    np.testing.assert_array_equal(read_bands(tagged)[:, :, 0], np.asarray(expected))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((30, 40), (30, 40, 1)),
        ((30, 40, 1), (30, 40, 1)),
        ((1, 30, 40), (30, 40, 1)),
        ((30, 40, 13), (30, 40, 13)),
        ((13, 30, 40), (30, 40, 13)),
        ((64, 48, 3), (64, 48, 3)),
    ],
)
def test_the_shorter_end_holds_the_channels(shape, expected):
    assert channels_last(np.zeros(shape)).shape == expected


def test_where_the_shape_does_not_tell_it_is_asked_for():
    with pytest.raises(ImageError, match=r"\(8, 8, 13\): whether its channels.*data.channels=13"):
        channels_last(np.zeros((8, 8, 13)))
    assert channels_last(np.zeros((8, 9, 13)), 13).shape == (8, 9, 13)
    assert channels_last(np.zeros((13, 8, 9)), 13).shape == (8, 9, 13)
    with pytest.raises(ImageError, match="5 channels are expected"):
        channels_last(np.zeros((8, 8, 13)), 5)


def test_other_numbers_are_float32_if_that_holds_them():
    whole = RANDOM.integers(-1000, 1000, (12, 17, 2))
    read = read_bands(npy(whole))
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, whole)
    for bad, says in [
        (whole + 2**40, "float32 cannot tell apart"),
        (np.full((9, 9), np.nan), "NaN"),
        (np.full((9, 9), 1e300), "more than float32 can"),
        (np.full((9, 9), "x"), "pixels are numbers"),
        (np.full((9, 9), None), "pixels are numbers"),
        (np.zeros((2, 9, 9, 3)), r"must be \(H, W\)"),
        (np.zeros((0, 9, 3)), r"must be \(H, W\)"),
    ]:
        file = io.BytesIO()
        np.save(file, bad, allow_pickle=True)
        with pytest.raises(ImageError, match=says):
            read_bands(file.getvalue(), name="x.npy")


def test_what_cannot_be_read_is_refused_in_words(tmp_path):
    good = WRITTEN["samples"](values(np.uint16))
    for data in (good[: len(good) // 2], good[:60], npy(values(np.uint16))[:200], b"\x93NUMPY\x01\x00\xff"):
        (tmp_path / "cut").write_bytes(data)
        with pytest.raises(ImageError, match="cut: damaged or cut off"):
            read_bands(tmp_path / "cut")
    lzw = io.BytesIO()
    Image.fromarray(values(np.uint16, (20, 30))).save(lzw, "TIFF", compression="tiff_lzw")
    with pytest.raises(ImageError, match=r"compressed with LZW.*COMPRESS=DEFLATE"):
        read_bands(lzw.getvalue())
    with pytest.raises(TooLargeError, match="tiles"):
        read_bands(npy(np.zeros((30, 40, 5), np.uint8)), max_pixels=1199)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<u2", "fortran_order": False, "shape": (10**6, 10**6, 5)})
    with pytest.raises(TooLargeError):
        read_bands(header.getvalue())


def test_other_images_than_those_of_training_are_refused():
    pre = Preprocess((8, 8), mean=(0.1,) * 5, std=(1.0,) * 5, scale=1 / 65535, pixels="uint16")
    for wrong in (values(np.uint8), values(np.float32)):
        with pytest.raises(ImageError, match=r"holds 5 channels of \w+, and the model reads 5 channels of uint16"):
            pre(wrong)
    with pytest.raises(ImageError, match="5 channels are expected"):
        pre(values(np.uint16, (20, 30, 4)))
    with pytest.raises(UsageError, match="pixels='uint12' must be one of photo, uint8"):
        Preprocess((8, 8), pixels="uint12")
    again = Preprocess.from_dict(pre.to_dict())
    assert again == pre and "pixels" not in Preprocess((8, 8)).to_dict()


PHOTOS = {
    "8-bit TIFF": (tiff(values(np.uint8, (20, 30, 3))), True),
    "RGBA": (tiff(values(np.uint8, (20, 30, 4)), photometric="rgb", extrasamples=["unassalpha"]), True),
    "red, green, blue, infrared": (tiff(values(np.uint8, (20, 30, 4)), photometric="rgb", extrasamples=[0]), False),
    "CMYK": (tiff(values(np.uint8, (20, 30, 4)), photometric="separated"), True),
    "two pages": (tiff(values(np.uint8, (2, 20, 30)), metadata=None), True),
    "16-bit colours": (tiff(values(np.uint16, (20, 30, 3)), photometric="rgb"), False),
    "two channels": (tiff(values(np.uint8, (20, 30, 2)), photometric="minisblack", planarconfig="contig"), False),
    "as numpy has it": (tiff(values(np.uint8)), False),
    "float": (tiff(values(np.float32, (20, 30))), False),
    "array": (npy(values(np.uint8, (20, 30, 3))), False),
}


@pytest.mark.parametrize("kind", PHOTOS)
def test_what_is_a_photo(kind, tmp_path):
    data, expected = PHOTOS[kind]
    (tmp_path / "x").write_bytes(data)
    assert is_photo(tmp_path / "x") == expected


def test_png(tmp_path):
    for mode, dtype, expected in (("RGB", np.uint8, True), ("L", np.uint8, True), ("I;16", np.uint16, False)):
        array = values(dtype, (20, 30, 3) if mode == "RGB" else (20, 30))
        Image.fromarray(array).save(tmp_path / "x.png")
        assert is_photo(tmp_path / "x.png") == expected
        np.testing.assert_array_equal(read_bands(tmp_path / "x.png").squeeze(), array)


def folder(path: Path, make, count=6, suffix=".npy"):
    for label in ("a", "b"):
        (path / label).mkdir(parents=True)
        for i in range(count):
            (path / label / f"{i}{suffix}").write_bytes(make(i))
    return str(path)


def test_a_folder_says_what_it_holds(tmp_path):
    arrays = [values(np.uint16) for _ in range(6)]
    data = open_data(folder(tmp_path / "x", lambda i: npy(arrays[i])))
    assert data.train.channels == 5 and str(data.train.stored) == "5 channels of uint16"
    assert any("5 channels of uint16" in note for note in data.notes)
    name = data.val.name_of(0)
    np.testing.assert_array_equal(data.val.read(0), arrays[int(Path(name).stem)])
    photos = open_data(folder(tmp_path / "y", lambda i: tiff(values(np.uint8, (9, 11, 3))), suffix=".tif"))
    assert photos.train.stored is None and photos.train.read(0).shape == (9, 11, 3)
    stored = open_data(str(tmp_path / "y"), files=FileOptions("stored"))
    assert str(stored.train.stored) == "3 channels of uint8"
    deep = folder(tmp_path / "z", lambda i: tiff(values(np.uint16, (9, 11))), suffix=".tif")
    assert str(open_data(deep).train.stored) == "1 channel of uint16"
    assert open_data(deep, files=FileOptions("photo")).train.stored is None


def test_folders_of_different_things(tmp_path):
    mixed = folder(tmp_path / "x", lambda i: npy(values((np.uint8, np.uint16)[i % 2])))
    with pytest.raises(DataError, match=r"hold different things: .* 5 channels of uint8, .* 5 channels of uint16"):
        open_data(mixed)
    both = folder(tmp_path / "y", lambda i: npy(values(np.uint8)))
    Image.new("RGB", (9, 9)).save(tmp_path / "y" / "a" / "photo.jpg")
    with pytest.raises(DataError, match=r"\.npy and \.jpg files"):
        open_data(both)
    some = folder(tmp_path / "z", lambda i: tiff(values((np.uint8, np.uint16)[i % 2], (9, 11))), suffix=".tif")
    data = open_data(some)  # as before there were other channels than colours
    assert data.train.stored is None and any("data.pixels=stored" in note for note in data.notes)
    small = folder(tmp_path / "w", lambda i: npy(values(np.uint8, (8, 8, 13))))
    with pytest.raises(ImageError, match=r"data\.channels=13"):
        open_data(small)
    assert open_data(small, files=FileOptions(channels=13)).train.channels == 13


def test_a_photo_of_12_megapixels_is_what_pillow_makes_of_it():
    small = Image.fromarray(values(np.uint8, (27, 36, 3)))
    exif, file = Image.Exif(), io.BytesIO()
    exif[274] = 6
    small.resize((4032, 3024)).save(file, "JPEG", exif=exif, quality=50)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    read = read_image(file.getvalue())
    assert read.size == (3024, 4032) and read.tobytes() == expected.tobytes()
