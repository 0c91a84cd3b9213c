"""Masks and boxes from every source: the same objects, whatever they are written in, and clear errors."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from vitlab.errors import DataError, ImageError
from vitlab.images.datasets import FileOptions, open_data, subset
from vitlab.images.regions import VOID, RunLengths, mask_box
from vitlab.images.sources.marks import ImageObjects, read_objects

H, W = 20, 30
CLASSES = ["cat", "dog"]


def rectangles(number: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    """(class, box) of the objects of an image; they do not overlap."""
    return [(number % 2, (2 + number, 3, 12, 9)), ((number + 1) % 2, (15, 8, 28, 18))][: number % 3]


def mask_of(box):
    mask = np.zeros((H, W), dtype=bool)
    mask[box[1] : box[3], box[0] : box[2]] = True
    return mask


def corners(box):
    left, top, right, bottom = box
    return [left, top, right, top, right, bottom, left, bottom]


def save_images(folder: Path, count=5):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (H, W, 3), dtype=np.uint8)).save(folder / f"{number}.png")


def write_coco(path: Path, *, rle=False, change=None):
    annotations = [
        {
            "id": 10 * number + i,
            "image_id": number,
            "category_id": 7 + 2 * label,
            "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
            "area": int(mask_of(box).sum()),
            "iscrowd": int(rle),
            "segmentation": RunLengths.of_mask(mask_of(box)).to_coco((H, W)) if rle else [corners(box)],
        }
        for number in range(5)
        for i, (label, box) in enumerate(rectangles(number))
    ]
    content = {
        "images": [{"id": n, "file_name": f"{n}.png", "height": H, "width": W} for n in range(5)],
        "categories": [{"id": 9, "name": "dog"}, {"id": 7, "name": "cat"}],
        "annotations": annotations,
    }
    if change is not None:
        change(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def as_coco(folder, rle=False):
    save_images(folder / "images")
    write_coco(folder / "annotations.json", rle=rle)


def as_yolo(folder):
    save_images(folder / "images" / "train")
    (folder / "labels" / "train").mkdir(parents=True)
    for number in range(5):
        shares = [
            " ".join([str(label), *(f"{n / (W, H)[k % 2]:.8f}" for k, n in enumerate(corners(box)))])
            for label, box in rectangles(number)
        ]
        if shares:
            (folder / "labels" / "train" / f"{number}.txt").write_text("\n".join(shares), encoding="utf-8")
    (folder / "data.yaml").write_text("train: images/train\nnames: [cat, dog]\n", encoding="utf-8")


def as_instances(folder):
    save_images(folder / "images")
    (folder / "instances").mkdir()
    for number in range(5):
        ids = np.zeros((H, W), dtype=np.uint16)
        for i, (_, box) in enumerate(rectangles(number)):
            ids[mask_of(box)] = 300 + 7 * i
        Image.fromarray(ids).save(folder / "instances" / f"{number}.png")


def regions(folder, kind, **options):
    data = open_data(str(folder), files=FileOptions(marks=kind, **options), val_fraction=0.2)
    both = [(split.name_of(i), split.regions(i, (H, W))) for split in (data.train, data.val) for i in range(len(split))]
    return data, {Path(name).stem: found for name, found in both}


@pytest.mark.parametrize("write", [as_coco, lambda f: as_coco(f, rle=True), as_yolo, as_instances])
def test_every_source_gives_the_same_objects(tmp_path, write):
    write(tmp_path / "set")
    data, found = regions(tmp_path / "set", "instance")
    numbered = write is as_instances  # of one class
    assert data.classes == (["object"] if numbered else CLASSES) and len(found) == 5
    for number in range(5):
        expected, got = rectangles(number), found[str(number)]
        assert got.labels.tolist() == [0 if numbered else label for label, _ in expected]
        for (_, box), shape, corner in zip(expected, got.shapes, got.boxes, strict=True):
            np.testing.assert_array_equal(shape.mask((H, W)), mask_of(box))
            np.testing.assert_allclose(corner, box, atol=1e-5)
    _, painted = regions(tmp_path / "set", "semantic")
    for number in range(5):
        expected = np.zeros((H, W), dtype=np.uint8)
        for label, box in rectangles(number):
            expected[mask_of(box)] = 1 if numbered else label + 1
        np.testing.assert_array_equal(painted[str(number)].painted, expected)


def test_coco_equals_pycocotools(tmp_path, capsys):
    as_coco(tmp_path, rle=True)
    _, found = regions(tmp_path, "instance")
    theirs = COCO(tmp_path / "annotations.json")
    for number in range(5):
        annotations = theirs.loadAnns(theirs.getAnnIds(number))
        assert len(annotations) == len(found[str(number)].labels)
        for annotation, shape in zip(annotations, found[str(number)].shapes, strict=True):
            np.testing.assert_array_equal(shape.mask((H, W)), theirs.annToMask(annotation).astype(bool))
        assert found[str(number)].crowd.all()


def test_published_layouts_of_coco(tmp_path):
    for split in ("train", "val"):
        save_images(tmp_path / "a" / f"{split}2017")
        write_coco(tmp_path / "a" / "annotations" / f"instances_{split}2017.json")
        save_images(tmp_path / "b" / split)
        write_coco(tmp_path / "b" / split / "_annotations.coco.json")
    for name in ("a", "b"):
        data = open_data(str(tmp_path / name))
        assert (len(data.train), len(data.val), data.train.kind) == (5, 5, "instance")
    assert len(open_data(str(tmp_path / "a" / "annotations" / "instances_val2017.json")).train) == 4


def test_panoptic_maps_know_things_crowds_and_void(tmp_path):
    save_images(tmp_path / "train", 1)
    ids = np.zeros((H, W), dtype=np.int64)
    ids[:10], ids[10:15, :20], ids[15:, :10] = 70_000, 258, 3  # stuff, a thing, a crowd; the rest is void
    maps = tmp_path / "annotations" / "panoptic_train"
    maps.mkdir(parents=True)
    Image.fromarray(np.stack([ids % 256, ids // 256 % 256, ids // 65536], axis=-1).astype(np.uint8)).save(
        maps / "0.png"
    )
    segments = [
        {"id": 70_000, "category_id": 2, "iscrowd": 0},
        {"id": 258, "category_id": 1, "iscrowd": 0},
        {"id": 3, "category_id": 1, "iscrowd": 1},
    ]
    content = {
        "images": [{"id": 5, "file_name": "0.png", "height": H, "width": W}],
        "categories": [{"id": 1, "name": "cat", "isthing": 1}, {"id": 2, "name": "sky", "isthing": 0}],
        "annotations": [{"image_id": 5, "file_name": "0.png", "segments_info": segments}],
    }
    (tmp_path / "annotations" / "panoptic_train.json").write_text(json.dumps(content), encoding="utf-8")
    save_images(tmp_path / "val", 1)
    (tmp_path / "annotations" / "panoptic_val").mkdir()
    Image.open(maps / "0.png").save(tmp_path / "annotations" / "panoptic_val" / "0.png")
    (tmp_path / "annotations" / "panoptic_val.json").write_text(json.dumps(content), encoding="utf-8")
    data = open_data(str(tmp_path))
    assert (data.train.kind, data.classes) == ("semantic", ["cat", "sky"])
    found = data.train.regions(0, (H, W))
    expected = np.full((H, W), VOID)
    expected[:10], expected[10:15, :20], expected[15:, :10] = 1, 0, 0
    np.testing.assert_array_equal(found.painted, expected)
    assert found.labels.tolist() == [0, 0] and found.crowd.tolist() == [False, True]
    np.testing.assert_array_equal(found.boxes[0], mask_box(ids == 258))


def test_masks_by_number_by_colour_and_binary(tmp_path):
    expected = np.zeros((H, W), dtype=np.uint8)
    expected[mask_of((2, 3, 12, 9))], expected[:2] = 1, VOID
    colours = np.array([[0, 0, 128], [255, 0, 0]], dtype=np.uint8)
    for name in ("grey", "palette", "colour", "named"):
        folder = tmp_path / name
        save_images(folder / "images", 2)
        (folder / "masks").mkdir()
        if name in ("grey", "palette"):
            mask = Image.fromarray(expected)
            if name == "palette":
                mask.putpalette(np.random.default_rng(1).integers(0, 256, 768).tolist())
                assert mask.mode == "P"
        elif name == "colour":
            mask = Image.fromarray(np.where(expected[..., None] == VOID, 9, colours[expected % 2]).astype(np.uint8))
            (folder / "config.yaml").write_text(
                "classes: {sky: [0, 0, 128], tree: [255, 0, 0], void: [9, 9, 9]}", encoding="utf-8"
            )
        else:
            mask = Image.fromarray(np.where(expected == VOID, 3, 5 + expected).astype(np.uint8))
            (folder / "config.yaml").write_text("classes: {3: unlabeled, 5: sky, 6: tree}", encoding="utf-8")
        for number in range(2):
            mask.save(folder / "masks" / f"{number}.png")
        data, found = regions(folder, None)
        assert data.classes == (["sky", "tree"] if name in ("colour", "named") else ["0", "1"])
        np.testing.assert_array_equal(found["0"].painted, expected)
    for number in range(2):  # black and white
        Image.fromarray(255 * (expected == 1).astype(np.uint8)).save(tmp_path / "grey" / "masks" / f"{number}.png")
    data, found = regions(tmp_path / "grey", "semantic")
    assert data.classes == ["background", "foreground"]
    np.testing.assert_array_equal(found["1"].painted, expected == 1)


def plant_everything(content):
    """One of each kind of mistake: eight annotations."""
    good = content["annotations"][0]
    rle = RunLengths.of_mask(mask_of((2, 3, 12, 9))).to_coco((H, W))
    off_by_one = {**rle, "counts": [1, *np.diff([0, 5, H * W]).tolist()]}
    content["annotations"] += [
        {**good, "bbox": [500, 10, 20, 20]},
        {**good, "bbox": [5, 5, 0, 3]},
        {**good, "segmentation": [[1, 1, 5, 5]]},
        {**good, "segmentation": [[1, 1, 5, 5, 900, 9]]},
        {**good, "category_id": 8},
        {**good, "image_id": 77},
        {**good, "segmentation": off_by_one},
        {**good, "segmentation": {**rle, "counts": "garbage\x00"}},
    ]


def test_wrong_annotations_are_named_counted_and_left_out(tmp_path):
    save_images(tmp_path / "images")
    write_coco(tmp_path / "annotations.json", change=plant_everything)
    data, found = regions(tmp_path, "instance")
    assert sum(len(regions.labels) for regions in found.values()) == sum(len(rectangles(n)) for n in range(5))
    assert any("8 annotations are wrong" in note for note in data.notes)
    with pytest.raises(DataError) as error:
        regions(tmp_path, "instance", max_bad_annotations=7)
    for text in (
        "box 500, 10, 520, 30 reaches outside the image of 30 x 20 pixels",
        "has no area",
        "a polygon of 2 points",
        "category_id 8 is not listed",
        "image_id 77",
        "run lengths of 601 pixels for an image of 30 x 20",
        "no digit of a run length",
        "data.max_bad_annotations=8",
    ):
        assert text in str(error.value)


def test_wrong_lines_of_yolo(tmp_path):
    as_yolo(tmp_path)
    (tmp_path / "labels" / "train" / "1.txt").write_text(
        "0 0.1 0.1 0.5 0.1 0.5 0.9\n0 0.1 0.1 0.9 0.9\n5 0.1 0.1 0.5 0.1 0.5 0.9\n0 0.1 0.1 nan 0.1 0.5 0.9\n"
        "0 0.1 0.1 0.5 0.1 0.5\n0 0.1 0.1 3.5 0.1 0.5 0.9\nx y z\n",
        encoding="utf-8",
    )
    with pytest.raises(DataError) as error:
        regions(tmp_path, "instance", max_bad_annotations=0)
    for line, text in (
        (2, "of 2 points"),
        (3, "no name"),
        (4, "finite"),
        (5, "take turns"),
        (6, "outside"),
        (7, "num"),
    ):
        assert any(f"line {line} of" in row and text in row for row in str(error.value).splitlines())
    _, found = regions(tmp_path, "instance")
    assert len(found["1"].labels) == 1


def test_a_mask_of_another_size_and_a_number_without_a_class(tmp_path):
    as_instances(tmp_path)
    Image.fromarray(np.zeros((W, H), dtype=np.uint16)).save(tmp_path / "instances" / "0.png")
    data = open_data(str(tmp_path))
    with pytest.raises(ImageError, match=r"0.png: is 30 x 20 pixels, and its mask .* is 20 x 30"):
        data.train.regions([data.train.name_of(i)[-5:] for i in range(4)].index("0.png"), (H, W))
    (tmp_path / "config.yaml").write_text("classes: {0: background, 300: thing}", encoding="utf-8")
    (tmp_path / "instances").rename(tmp_path / "masks")
    data = open_data(str(tmp_path))
    with pytest.raises(ImageError, match="class number 307, which no class has"):
        [data.train.regions(i, (H, W)) for i in range(len(data.train)) if data.train.name_of(i)[-5] == "2"]


def test_coordinates_that_are_swapped_are_seen():
    """x and y of a wide image taken for each other: the box leaves the image."""
    objects = ImageObjects((H, W))
    objects.add(0, (20, 2, 28, 6), [corners((20, 2, 28, 6))])
    found = read_objects(objects.to_json(), (H, W))
    assert found.shapes[0].mask((H, W)).sum() == 8 * 4
    with pytest.raises(ImageError, match="20 x 30 pixels, and its annotations are for 30 x 20"):
        read_objects(objects.to_json(), (W, H))


def test_what_a_source_does_not_have_is_said(tmp_path):
    as_yolo(tmp_path)
    for path in (tmp_path / "labels" / "train").glob("*.txt"):
        path.write_text("1 0.5 0.5 0.2 0.2\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"has a box for each object, and a class .* asked for.*detect_folder"):
        open_data(str(tmp_path), files=FileOptions(marks="semantic"))
    assert open_data(str(tmp_path)).train.kind == "detect"


def test_images_without_a_mask_are_left_out(tmp_path):
    as_instances(tmp_path)
    (tmp_path / "instances" / "3.png").unlink()
    data = open_data(str(tmp_path))
    assert len(data.train) + len(data.val) == 4 and "1 images have no mask" in data.notes[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [cat, cat]", "twice"),
        ("names: 3", "must be numbers and names"),
        ("[1, 2", "is no YAML"),
        ("a: &a [x]\nb: &b [*a,*a]\nnames: *b", "twice"),
    ],
)
def test_hostile_configs(tmp_path, text, message):
    as_yolo(tmp_path)
    (tmp_path / "data.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        open_data(str(tmp_path))


def test_a_config_may_not_lead_elsewhere(tmp_path):
    folder = tmp_path / "a" / "b"
    as_yolo(folder)
    (folder / "labels").rename(tmp_path / "labels")
    (folder / "images").rename(tmp_path / "images")
    (folder / "data.yaml").write_text("train: ../../images/train\nnames: [cat, dog]", encoding="utf-8")
    with pytest.raises(DataError, match=r"outside the folder above it.*allow_outside"):
        open_data(str(folder))
    assert len(open_data(str(folder), allow_outside=True).train) == 4


def test_a_file_name_may_not_lead_elsewhere(tmp_path):
    save_images(tmp_path / "set" / "images")
    Image.new("RGB", (W, H)).save(tmp_path / "secret.png")
    away = lambda content: content["images"][3].update(file_name="../../secret.png")
    write_coco(tmp_path / "set" / "annotations.json", change=away)
    with pytest.raises(DataError, match="allow_outside"):
        open_data(str(tmp_path / "set"))


def test_annotated_splits_pickle_and_divide(tmp_path):
    as_coco(tmp_path)
    data = open_data(str(tmp_path))
    part = pickle.loads(pickle.dumps(subset(data.train, np.array([2, 0]))))
    ours, theirs = part.regions(0, (H, W)), data.train.regions(2, (H, W))
    np.testing.assert_array_equal(ours.boxes, theirs.boxes)
    assert part.name_of(1) == data.train.name_of(0)
