"""Masks, boxes and run lengths: against pycocotools, scikit-image's rule of pixel centres, and closed forms."""

import numpy as np
import pytest
from matplotlib.path import Path as Outline
from PIL import Image
from pycocotools import mask as coco

from vitlab.errors import ImageError
from vitlab.images.preprocess import Geometry, Preprocess
from vitlab.images.regions import (
    VOID,
    Polygons,
    Regions,
    RegionView,
    RunLengths,
    compress_counts,
    fill_polygon,
    mask_box,
    read_counts,
)


def random_masks(count=20):
    rng = np.random.default_rng(3)
    for number in range(count):
        size = tuple(rng.integers(1, 40, 2))
        yield rng.random(size) < (number % 5) / 4


def test_run_lengths_equal_pycocotools():
    for mask in random_masks():
        theirs = coco.encode(np.asfortranarray(mask.astype(np.uint8)))
        ours = RunLengths.of_mask(mask).to_coco(mask.shape)
        assert ours["counts"] == theirs["counts"].decode()
        assert ours["size"] == theirs["size"]
        decoded = RunLengths(np.array(read_counts(ours["counts"]))).mask(mask.shape)
        np.testing.assert_array_equal(decoded, coco.decode(theirs).astype(bool))


def test_run_lengths_that_are_off_by_one_are_refused():
    mask = np.zeros((5, 7), dtype=bool)
    mask[1:4, 2:6] = True
    counts = RunLengths.of_mask(mask).counts
    with pytest.raises(ImageError, match="36 pixels for an image of 7 x 5"):
        RunLengths(np.array([counts[0] + 1, *counts[1:]])).mask((5, 7))


@pytest.mark.parametrize("text", ["\x00", "zz", "o" * 40, "P" * 9, "4Oó"])
def test_hostile_run_lengths(text):
    with pytest.raises(ValueError):
        read_counts(text)


def test_a_run_length_too_long_for_the_image_takes_no_memory():
    with pytest.raises(ImageError):
        RunLengths(np.array(read_counts(compress_counts([0, 2**33])))).mask((4, 4))


def test_polygons_hold_the_pixels_whose_centre_is_inside():
    rng = np.random.default_rng(0)
    H, W = 31, 44
    centres = np.stack(np.meshgrid(np.arange(W) + 0.5, np.arange(H) + 0.5), axis=-1).reshape(-1, 2)
    for corners in (3, 4, 7):
        angle = np.sort(rng.random(corners)) * 2 * np.pi  # a star around a point: no line crosses another
        points = np.stack([20 + 30 * rng.random(corners) * np.cos(angle), 15 + 20 * np.sin(angle)], axis=1)
        theirs = Outline(points).contains_points(centres).reshape(H, W)
        np.testing.assert_array_equal(fill_polygon(points, (H, W)), theirs)


def test_a_rectangle_has_its_area_and_its_box():
    mask = Polygons((np.array([[2.0, 1], [9, 1], [9, 5], [2, 5]]),)).mask((6, 12))
    assert mask.sum() == 7 * 4
    np.testing.assert_array_equal(mask_box(mask), [2, 1, 9, 5])


def test_polygons_nearly_equal_pycocotools():
    points = np.array([[3.2, 4.1], [80.7, 9.3], [95.5, 70.2], [40.1, 88.8], [7.9, 60.4]])
    theirs = coco.decode(coco.frPyObjects([points.ravel().tolist()], 100, 110))[:, :, 0].astype(bool)
    ours = fill_polygon(points, (100, 110))
    assert (ours & theirs).sum() / (ours | theirs).sum() > 0.99  # they differ in pixels on the line itself


def test_hostile_polygons_are_filled_in_little_memory():
    zigzag = np.stack([np.arange(4000) % 2 * 1e12 - 5e11, np.arange(4000) % 3 * 1e9], axis=1)
    assert fill_polygon(zigzag, (50, 60)).shape == (50, 60)
    assert not fill_polygon(np.array([[1.0, 1.0], [5.0, 5.0]]), (8, 8)).any()  # two points enclose nothing


def test_an_image_and_its_mask_move_together():
    """The mask of a picture's bright pixels, and the bright pixels of the moved picture: the same, for any view."""
    rng = np.random.default_rng(1)
    pixels = np.kron(rng.random((6, 9)) < 0.4, np.ones((8, 8))).astype(bool)  # 48 x 72
    picture = Image.fromarray(np.uint8(255 * pixels)).convert("RGB")
    pre = Preprocess((32, 40), how="fit", interpolation="nearest", mean=(0.0,) * 3, std=(1.0,) * 3)
    for resized, top, left in (
        ((24, 36), -4, -2),
        ((96, 144), 30, 55),
        ((48, 72), 10, 0),
        ((32, 48), 0, 3),
    ):  # no centre falls between two pixels
        view = RegionView(Geometry((48, 72), resized, top, left), pre.size)
        seen = np.asarray(pre.view(picture, geometry=view.geometry))[:, :, 0] > 127
        np.testing.assert_array_equal(view.cut(pixels, outside=False), seen)
        flipped = RegionView(view.geometry, pre.size, mirrored=True)
        np.testing.assert_array_equal(flipped.cut(pixels, outside=False), seen[:, ::-1])
        assert not np.array_equal(flipped.cut(pixels, outside=False), seen)  # a flip that is forgotten is seen here


def test_boxes_move_as_masks_do():
    mask = np.zeros((40, 60), dtype=bool)
    mask[8:20, 12:36] = True
    box = mask_box(mask)[None]
    for mirrored in (False, True):
        view = RegionView(Geometry((40, 60), (80, 120), 10, 20), (64, 64), mirrored)
        np.testing.assert_array_equal(view.boxes(box)[0], mask_box(view.cut(mask, outside=False)))
        swapped = RegionView(Geometry((40, 60), (80, 120), 20, 10), (64, 64), mirrored)  # x and y taken for each other
        assert not np.array_equal(swapped.boxes(box)[0], mask_box(view.cut(mask, outside=False)))


def test_outside_the_image_no_class_is_known():
    view = RegionView(Geometry((4, 6), (4, 6), -2, -1), (8, 8))
    seen = view.cut(np.zeros((4, 6), dtype=np.uint8), outside=VOID)
    assert (seen == VOID).sum() == 64 - 24 and (seen[2:6, 1:7] == 0).all()


def test_small_objects_are_painted_over_large_ones():
    square = lambda a, b: Polygons((np.array([[a, a], [b, a], [b, b], [a, b]], dtype=float),))
    regions = Regions(
        (10, 10),
        np.array([4, 1]),
        np.array([[2.0, 2, 4, 4], [0, 0, 8, 8]]),
        np.zeros(2, bool),
        (square(2, 4), square(0, 8)),
    )
    painted = regions.painted
    assert painted[3, 3] == 5 and painted[6, 6] == 2 and painted[9, 9] == 0
