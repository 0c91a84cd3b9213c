"""Commands on masks and boxes: train, eval, predict and data."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Red objects on blue, and a short run of each kind."""
    from vitlab.training.train import train

    place, rng = tmp_path_factory.mktemp("regions"), np.random.default_rng(0)
    for name in ("images", "instances"):
        (place / "data" / name).mkdir(parents=True)
    for number in range(10):
        ids = np.zeros((32, 40), dtype=np.uint16)
        top, left = rng.integers(0, 20, 2)
        ids[top : top + 10, left : left + 14] = 1
        colours = np.where(ids[..., None] > 0, [255, 0, 0], [0, 0, 255]).astype(np.uint8)
        Image.fromarray(colours).save(place / "data" / "images" / f"{number}.png")
        Image.fromarray(ids).save(place / "data" / "instances" / f"{number}.png")
    common = ["model.init_from=none", "model.image_size=32", "data.workers=0", "augment.crop=none", "optim.lr=3e-3"]
    common += [f"data.source={place / 'data'}", "run.epochs=1"]
    for name, model in (
        ("seg_folder", "linear_head_nano"),
        ("instance_folder", "eomt_nano"),
        ("detect_folder", "yolos_nano"),
    ):
        small = [] if name == "seg_folder" else ["model.depth=2", "model.width=32"]
        small += ["model.joined=1"] if model == "eomt_nano" else []
        train(name, [*common, *small, f"model.name={model}", f"run.dir={place / name}"])
    return place


def test_eval_prints_what_is_measured(runs, command):
    for name, figures in (("seg_folder", "mIoU"), ("instance_folder", "PQ"), ("detect_folder", "AP50")):
        answer = command("eval", str(runs / name / "best"), str(runs / "data")).stdout
        assert figures in answer and "object" in answer
    values = json.loads(command("eval", str(runs / "seg_folder" / "best"), str(runs / "data"), "--json").stdout)
    recorded = json.loads((runs / "seg_folder" / "result.json").read_text(encoding="utf-8"))
    assert values["miou"] == pytest.approx(recorded["miou"]) and values["per_class"][0]["class"] == "background"
    answer = command("eval", str(runs / "seg_folder" / "best"), str(runs / "data"), "--knn", code=2).stderr
    assert "is scored by its masks or boxes" in answer
    assert "gives none" in command("eval", "bundled:digits", str(runs / "data"), code=2).stderr


def test_predict_writes_masks_json_and_overlays(runs, command, tmp_path):
    images, best = str(runs / "data" / "images"), {n: str(runs / n / "best") for n in ("seg_folder", "instance_folder")}
    command("predict", best["seg_folder"], images, "-o", str(tmp_path / "seg"))
    masks = sorted((tmp_path / "seg" / "masks").iterdir())
    assert len(masks) == 10 and np.asarray(Image.open(masks[0])).shape == (32, 40)
    assert (tmp_path / "seg" / "classes.txt").read_text(encoding="utf-8").split() == ["background", "object"]
    assert len(list((tmp_path / "seg" / "overlays").iterdir())) == 10
    command("predict", best["instance_folder"], images, "-o", str(tmp_path / "objects"), "--threshold", "0.01")
    coco = COCO(tmp_path / "objects" / "annotations.json")
    ids = np.asarray(Image.open(tmp_path / "objects" / "masks" / "0.png"))
    assert len(coco.getImgIds()) == 10 and len(coco.getAnnIds()) > 0 and ids.dtype == np.uint16
    first = coco.loadAnns(coco.getAnnIds())[0]
    assert coco.annToMask(first).sum() == first["area"] > 0
    shown = command("predict", str(runs / "detect_folder" / "best"), images, "--json", "--threshold", "0.01").stdout
    assert {"label", "score", "bbox", "area"} == json.loads(shown)[0]["objects"][0].keys()
    answer = command("predict", "bundled:digits", images, "--threshold", "0.5", code=2).stderr
    assert "for masks and boxes" in answer


def test_windows_of_the_model_s_size_see_what_it_sees(runs):
    """One window is the whole image, and an image of two windows side by side is seen as its halves."""
    from vitlab.inference_regions import predict_regions

    best, rng = str(runs / "seg_folder" / "best"), np.random.default_rng(0)
    half = np.kron(rng.integers(0, 2, (4, 4, 1)), np.ones((8, 8, 1))) * [255, 0, -255] + [0, 0, 255]
    image = half.astype(np.uint8)
    whole, parts = (predict_regions(best, image, windows=windows)[0].answer.semantic for windows in (False, True))
    np.testing.assert_array_equal(whole, parts)
    wide = predict_regions(best, np.concatenate([image, image], axis=1), windows=True)[0].answer.semantic
    assert wide.shape == (32, 64) and (wide[:, :8] == whole[:, :8]).mean() > 0.9


def test_data_counts_and_draws(runs, command, tmp_path):
    of = str(runs / "data")
    shown = command("data", "seg_folder", of, "model.init_from=none", "model.name=linear_head_nano").stdout
    assert "share of pixels" in shown and "a class for every pixel" in shown
    preview = tmp_path / "preview.png"
    settings = ["model.init_from=none", "model.name=eomt_nano", "model.image_size=32"]
    few = ["--preview", str(preview), "--images", "2", "--views", "1"]
    answer = command("data", "instance_folder", of, *settings, *few, "--json").stdout
    assert preview.stat().st_size > 1000
    assert json.loads(answer)["per_class"][0]["train"] == [9, 9]


def test_drawn_pixels_are_those_of_the_mask():
    from vitlab.images.draw_regions import colour_of, drawn
    from vitlab.images.regions import VOID, Regions

    semantic = np.array([[0, 1], [VOID, 1]], dtype=np.uint8)
    image = np.full((2, 2, 3), 100, dtype=np.uint8)
    shown = drawn(image, Regions.of_map(semantic))
    np.testing.assert_array_equal(shown[1, 0], image[1, 0])
    for row, column in ((0, 0), (0, 1), (1, 1)):
        expected = (100 + colour_of(semantic[row, column]).astype(float)) / 2
        np.testing.assert_allclose(shown[row, column], expected, atol=1)
