"""read_image against hand-turned arrays, the blend formula, Pillow, transformers; then all that can be broken."""

from __future__ import annotations

import io
import random
import resource
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from vitlab.errors import ImageError
from vitlab.images.read import read_image

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (19, 23, 3), dtype=np.uint8)  # (H, W, C)


def encode(image: Image.Image | np.ndarray, form: str = "PNG", **options) -> bytes:
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def pixels(source, **options) -> np.ndarray:
    image = read_image(source, **options)
    assert image.mode == "RGB"
    return np.asarray(image)


def grey(values) -> np.ndarray:
    """(H, W) -> (H, W, 3)."""
    return np.stack([values] * 3, axis=-1)


# Turning

STORED = {  # where the EXIF standard puts row 0 and column 0 of the stored picture, in the picture as it is shown
    1: lambda shown: shown,  # row 0 at the top, column 0 at the left
    2: lambda shown: shown[:, ::-1],  # top, right
    3: lambda shown: shown[::-1, ::-1],  # bottom, right
    4: lambda shown: shown[::-1],  # bottom, left
    5: lambda shown: shown.swapaxes(0, 1),  # left, top
    6: lambda shown: shown[:, ::-1].swapaxes(0, 1),  # right, top
    7: lambda shown: shown[::-1, ::-1].swapaxes(0, 1),  # right, bottom
    8: lambda shown: shown[::-1].swapaxes(0, 1),  # left, bottom
}
SHOWN = np.kron(RNG.integers(0, 256, (2, 3, 1)), np.ones((8, 8, 3))).astype(np.uint8)  # JPEG keeps flat 8x8 blocks


def orientation(value: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif


@pytest.mark.parametrize("value", STORED)
@pytest.mark.parametrize("form, options, error", [("PNG", {}, 0), ("WEBP", {"lossless": True}, 0), ("JPEG", {}, 2)])
def test_exif_rotation_shows_the_picture_as_the_camera_was_held(value, form, options, error):
    data = encode(np.ascontiguousarray(STORED[value](SHOWN)), form, exif=orientation(value), **options)
    shown = pixels(data)
    assert shown.shape == SHOWN.shape
    assert np.abs(shown.astype(int) - SHOWN).max() <= error


@pytest.mark.parametrize("value", STORED)
def test_tiff_orientation_tag(value):
    data = encode(np.ascontiguousarray(STORED[value](SHOWN)), "TIFF", tiffinfo={274: value})
    assert np.array_equal(pixels(data), SHOWN)


def test_a_picture_that_was_read_is_not_turned_again():
    first = read_image(encode(np.ascontiguousarray(STORED[6](SHOWN)), exif=orientation(6)))
    assert np.array_equal(pixels(first), SHOWN)


def test_orientation_counts_even_where_the_rest_of_the_exif_is_broken():
    exif = orientation(6)
    exif[0x010F] = "maker"
    broken = exif.tobytes().replace(b"\x01\x0f\x00\x02", b"\x01\x00\x00\x02")  # a width that is a word: ImageOps raises
    assert broken != exif.tobytes()
    assert np.array_equal(pixels(encode(np.ascontiguousarray(STORED[6](SHOWN)), exif=broken)), SHOWN)


def test_corrupted_exif_still_gives_the_pixels():
    exif = orientation(1)
    exif[0x010F], exif[0x011A] = "maker", 72.0
    good = exif.tobytes()
    for position in range(6, len(good)):
        broken = bytearray(good)
        broken[position] ^= 0xFF
        shown = pixels(encode(SHOWN, exif=bytes(broken)))
        assert any(np.array_equal(STORED[v](shown), SHOWN) for v in STORED), position


# Modes


def test_grey_is_repeated_in_every_channel():
    assert np.array_equal(pixels(encode(NOISE[..., 0])), grey(NOISE[..., 0]))


def test_one_bit_is_black_and_white():
    bits = NOISE[..., 0] > 127
    assert np.array_equal(pixels(encode(Image.fromarray(bits))), grey(bits * 255))


def palette_picture() -> tuple[Image.Image, np.ndarray, np.ndarray]:
    """A picture, its indices and its four colours."""
    indices, colours = NOISE[..., 0] % 4, NOISE[0, :4]
    image = Image.fromarray(indices)
    image.putpalette(colours.tobytes())
    return image, indices, colours


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_palette_colours_are_looked_up(form):
    image, indices, colours = palette_picture()
    assert np.array_equal(pixels(encode(image, form)), colours[indices])


@pytest.mark.parametrize("form", ["PNG", "GIF"])
def test_the_transparent_palette_colour_is_white(form):
    image, indices, colours = palette_picture()
    colours = colours.copy()
    colours[2] = 255
    assert np.array_equal(pixels(encode(image, form, transparency=2)), colours[indices])


def on_white(colour: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    """colour * a + white * (1 - a), a = alpha / 255."""
    colour, alpha = colour.astype(np.float64), alpha.astype(np.float64)
    return np.rint((colour * alpha + 255 * (255 - alpha)) / 255).astype(np.uint8)


def test_palette_with_an_alpha_for_each_colour():
    image, indices, colours = palette_picture()
    alpha = np.array([0, 64, 128, 255])
    expected = on_white(colours, alpha[:, None])[indices]
    assert np.array_equal(pixels(encode(image, transparency=bytes(alpha.tolist()))), expected)


def test_every_alpha_of_every_colour_blends_with_white():
    colour, alpha = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    expected = grey(on_white(colour, alpha))
    assert np.array_equal(pixels(encode(np.stack([colour] * 3 + [alpha], axis=-1))), expected)  # RGBA
    assert np.array_equal(pixels(encode(Image.merge("LA", [Image.fromarray(c) for c in (colour, alpha)]))), expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_colour_marked_transparent_without_alpha_channel_is_white(mode):
    image = Image.fromarray(NOISE).convert(mode)
    mark = image.getpixel((3, 4))
    data = encode(image, transparency=mark)
    assert pixels(data)[4, 3].tolist() == [255, 255, 255]
    assert np.array_equal(pixels(data), convert_to_rgb(Image.open(io.BytesIO(data)), return_numpy=True))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV"])
def test_every_mode_agrees_with_transformers(mode):
    source = np.dstack([NOISE, NOISE[::-1, :, 0]]) if "A" in mode else NOISE
    image = Image.fromarray(source).convert(mode)
    assert np.array_equal(pixels(image), convert_to_rgb(image, return_numpy=True))


def test_cmyk_jpeg_agrees_with_pillow():
    data = encode(Image.fromarray(NOISE).convert("CMYK"), "JPEG")
    assert np.array_equal(pixels(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


DEEP = RNG.integers(0, 1 << 16, (9, 11), dtype=np.uint16)


@pytest.mark.parametrize("values", [DEEP, DEEP // 256], ids=["full range", "all dark"])
def test_16_bit_keeps_the_upper_8_bits(values):
    big_endian = Image.frombytes("I;16B", values.shape[::-1], values.astype(">u2").tobytes())
    for source in (encode(values), encode(values, "TIFF"), encode(big_endian, "TIFF"), values, values.astype(">u2")):
        assert np.array_equal(pixels(source), grey(values >> 8))


def test_32_bit_whole_number_tiff_holds_8_or_16_bit_values():
    assert np.array_equal(pixels(encode(DEEP.astype(np.int32), "TIFF")), grey(DEEP >> 8))
    assert np.array_equal(pixels(encode((DEEP >> 8).astype(np.int32), "TIFF")), grey(DEEP >> 8))


def test_float_tiff_holds_fractions_or_0_to_255():
    fractions = (DEEP / 65535).astype(np.float32)
    assert np.array_equal(pixels(encode(fractions, "TIFF")), grey(np.rint(fractions * 255)))
    assert np.array_equal(pixels(encode(fractions * 255, "TIFF")), grey(np.rint(fractions * 255)))


@pytest.mark.parametrize("form, options", [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_of_an_animation_the_first_frame_is_read(form, options):
    indices, other = NOISE[..., 0] % 2 * 255, NOISE[..., 1] % 2 * 255  # two greys: exact in a GIF, too
    data = encode(indices, form, save_all=True, append_images=[Image.fromarray(other)], **options)
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert np.array_equal(pixels(data), grey(indices))


# Kinds of source


def test_path_text_bytes_pillow_and_array_give_the_same(tmp_path):
    file = tmp_path / "x.png"
    file.write_bytes(encode(NOISE))
    for source in (file, str(file), file.read_bytes(), Image.open(file), Image.fromarray(NOISE), NOISE):
        assert np.array_equal(pixels(source), NOISE)


def test_arrays_of_fractions_whole_numbers_and_truth_values():
    assert np.array_equal(pixels(NOISE / 255), NOISE)
    assert np.array_equal(pixels((NOISE / 255).astype(np.float32)), NOISE)
    assert np.array_equal(pixels(NOISE.astype(np.float64)), NOISE)
    assert np.array_equal(pixels(NOISE.astype(np.int64)), NOISE)
    assert np.array_equal(pixels(NOISE[..., :1]), grey(NOISE[..., 0]))
    assert np.array_equal(pixels(NOISE[..., 0] > 127), grey((NOISE[..., 0] > 127) * 255))
    assert np.array_equal(pixels(NOISE[:, ::-2]), NOISE[:, ::-2])  # not contiguous
    rgba = np.dstack([NOISE, NOISE[::-1, :, 0]])
    assert np.array_equal(pixels(rgba), on_white(NOISE, rgba[..., 3:]))


def test_reading_leaves_the_source_as_it_was():
    image, array = Image.fromarray(NOISE), NOISE.copy()
    read_image(image).paste("red", (0, 0, 9, 9))
    read_image(array).paste("red", (0, 0, 9, 9))
    assert np.array_equal(np.asarray(image), NOISE)
    assert np.array_equal(array, NOISE)


@pytest.mark.parametrize(
    "array, says",
    [
        (NOISE.transpose(2, 0, 1), "array.transpose(1, 2, 0)"),
        (np.zeros((2, 5, 5, 3)), "(2, 5, 5, 3)"),
        (np.zeros((5, 5, 2)), "(H, W, 1|3|4)"),
        (np.zeros((0, 5, 3)), "(0, 5, 3)"),
        (np.full((4, 4), np.nan), "NaN"),
        (np.full((4, 4), np.inf), "infinity"),
        (np.full((4, 4), 1j), "complex"),
        (np.full((4, 4), "a"), "whole numbers"),
    ],
)
def test_arrays_that_are_no_picture_are_refused(array, says):
    with pytest.raises(ImageError) as caught:
        read_image(array, name="upload 7")
    assert str(caught.value).startswith("upload 7: ")
    assert says in str(caught.value)


# Broken files


def refused(source, *names: str, **options) -> str:
    """The message; refusing must be quick and must not need memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ImageError) as caught:
        read_image(source, **options)
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kB
    message = str(caught.value)
    for name in names or (str(source),):
        assert name in message
    return message


@pytest.mark.parametrize("form", ["JPEG", "PNG"])
@pytest.mark.parametrize("kept", [0.0005, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98])
def test_a_cut_off_file_is_named(tmp_path, form, kept):
    file = tmp_path / f"cut.{form.lower()}"
    whole = encode(RNG.integers(0, 256, (60, 70, 3), dtype=np.uint8), form)
    file.write_bytes(whole[: int(len(whole) * kept) + 1])
    refused(file)
    refused(file.read_bytes(), "upload 7", name="upload 7")


def test_a_cut_off_file_opened_with_pillow_is_named_too(tmp_path):
    file = tmp_path / "cut.jpg"
    whole = encode(NOISE, "JPEG")
    file.write_bytes(whole[: len(whole) * 3 // 4])
    with Image.open(file) as image:
        refused(image, str(file))


@pytest.mark.parametrize("content", [b"hello", b"<html>404 Not Found</html>\n" * 99, b"", bytes(5000)])
def test_a_file_that_is_no_picture(tmp_path, content):
    file = tmp_path / "x.jpg"
    file.write_bytes(content)
    assert "Expected one of jpg" in refused(file)


def test_missing_files_folders_and_impossible_names(tmp_path):
    assert "no such file" in refused(tmp_path / "none.png")
    assert "no such file" in refused("a\0b.png")
    assert "is a folder" in refused(tmp_path)
    assert "cannot be opened" in refused("a" * 300 + ".png")


def test_a_float_file_with_nan_is_named(tmp_path):
    file = tmp_path / "x.tiff"
    file.write_bytes(encode(np.full((4, 4), np.nan, dtype=np.float32), "TIFF"))
    assert "NaN" in refused(file)


def claimed(width: int, height: int) -> bytes:
    """A small PNG that says it is this large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(100_000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.parametrize("width, height", [(60_000, 60_000), (2**31 - 1, 2**31 - 1), (10_001, 10_000)])
def test_a_decompression_bomb_is_refused_at_its_header(tmp_path, width, height):
    file = tmp_path / "bomb.png"
    file.write_bytes(claimed(width, height))
    assert "pixels" in refused(file)


def test_max_pixels_is_the_last_number_that_passes():
    data = encode(NOISE)
    assert np.array_equal(pixels(data, max_pixels=19 * 23), NOISE)
    assert "23 x 19" in refused(data, "upload 7", name="upload 7", max_pixels=19 * 23 - 1)


def test_whatever_is_done_to_a_file_only_ImageError_comes_out():
    exif = orientation(6)
    exif[0x010F] = "maker"
    picture, palette = Image.fromarray(NOISE), Image.fromarray(NOISE).quantize(16)
    seeds = [
        encode(picture, exif=exif),
        encode(palette, transparency=3),
        encode(picture, save_all=True, append_images=[picture.rotate(180)]),
        encode(picture, "JPEG", exif=exif),
        encode(palette, "GIF", save_all=True, append_images=[palette.rotate(180)]),
        encode(picture, "WEBP", lossless=True, exif=exif),
        encode(picture, "TIFF"),
        encode(picture, "TIFF", compression="tiff_lzw"),
        encode(picture, "BMP"),
    ]
    chance = random.Random(0)
    read = 0
    for _ in range(1500):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.choice([1, 1, 2, 5])):
            place = chance.randrange(chance.choice([40, 150, len(data)]))
            what = chance.random()
            if what < 0.7:
                data[place : place + 1] = chance.randbytes(1)
            elif what < 0.8:
                del data[place : place + chance.randrange(1, 9)]
            else:
                data[place:place] = chance.randbytes(chance.randrange(1, 9))
        try:
            read += pixels(bytes(data), name="mutant", max_pixels=100_000).ndim == 3
        except ImageError as error:
            assert str(error).startswith("mutant: ")
    assert 200 < read < 1300  # both outcomes were met


def test_kinds_of_error_that_Pillow_lets_through_are_caught():
    strips = encode(NOISE, "TIFF")
    offset = struct.pack("<HHI", 273, 4, 1)  # StripOffsets, a long
    assert offset in strips
    broken = strips.replace(offset, struct.pack("<HHI", 273, 5, 1))  # now a fraction: TypeError inside Pillow
    refused(broken, "mutant", name="mutant")


def test_reading_a_file_closes_it(tmp_path):
    file = Path(tmp_path / "x.png")
    file.write_bytes(encode(NOISE))
    image = read_image(file)
    file.unlink()
    assert np.array_equal(np.asarray(image), NOISE)
    assert not [p for p in Path("/proc/self/fd").iterdir() if p.is_symlink() and str(file) in str(p.readlink())]


def test_threads_read_at_the_same_time(recwarn):
    """Pictures that make Pillow warn, beside others; the filters of warnings are afterwards as they were for others."""
    import warnings
    from concurrent.futures import ThreadPoolExecutor

    buffer = io.BytesIO()
    picture = Image.new("P", (9, 7))
    picture.putpalette([1, 2, 3] * 256)
    picture.save(buffer, "PNG", transparency=b"\x10" * 200)
    files = [buffer.getvalue()]
    for number in range(4):
        buffer = io.BytesIO()
        Image.new("RGB", (30 + number, 20), (number, 0, 0)).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    alone = [np.asarray(read_image(file)) for file in files]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda number: np.asarray(read_image(files[number % 5])), range(400)))
    for number, pixels in enumerate(found):
        np.testing.assert_array_equal(pixels, alone[number % 5])
    warnings.warn("still heard", stacklevel=1)
    assert [str(w.message) for w in recwarn] == ["still heard"]
