"""The preview shows what the loop makes: views, mixed batches and labels are those of training, to the pixel."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab.cli.main
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.mix import smooth_targets
from vitlab.images.preprocess import Preprocess
from vitlab.training.data_summary import describe
from vitlab.training.job import data_of, prepare
from vitlab.training.objectives.dino import SelfDistillation
from vitlab.training.presets import find_recipe
from vitlab.training.preview import preview, shares
from vitlab.training.recipe import Recipe, from_tables, with_settings
from vitlab.training.report import draw_preview, figure_format

CLASSES = ["$a_b$", "_x", "大熊猫", "x" * 60]
SIZE = (16, 24)  # (H, W)


def digits(**augment) -> Recipe:
    return from_tables({"data": {"batch_size": 64}, "augment": augment, "run": {"seed": 5}})


def folder_recipe(folder: Path, **augment) -> Recipe:
    model = {"image_size": list(SIZE), "patch_size": 8}
    return from_tables({"data": {"source": str(folder), "batch_size": 10}, "model": model, "augment": augment})


@pytest.fixture
def folder(tmp_path) -> Path:
    """Noise in colour, of the model's size and larger; 30 pictures to train on, the first of class _x is cut off."""
    rng = np.random.default_rng(0)
    for k, label in enumerate(CLASSES):
        for split, count in (("train", 6 + k), ("val", 1)):
            place = tmp_path / "pictures" / split / label
            place.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (*(SIZE if i % 2 else (20, 31)), 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    broken = tmp_path / "pictures" / "train" / "_x" / "0.png"
    broken.write_bytes(broken.read_bytes()[:500])
    return tmp_path / "pictures"


def back(images: torch.Tensor, mean: float, std: float) -> np.ndarray:
    """(B, C, H, W), normalised -> (B, H, W, C) in 0..255, not rounded."""
    return (255 * (images * std + mean)).clamp(0, 255).permute(0, 2, 3, 1).numpy()


def test_before_is_the_picture_itself():
    recipe = digits(crop="padded", flip=True)
    data = data_of(recipe)
    found = preview(recipe, data, images=20, views=1)
    assert len({row.index for row in found.rows}) == 20
    for row in found.rows:
        np.testing.assert_array_equal(row.images[0], data.train.read(row.index))
        assert row.label == data.classes[data.train.labels[row.index]] and row.name == data.train.name_of(row.index)


def test_views_are_what_augment_makes_in_each_epoch():
    recipe = digits(crop="padded", padding=2, flip=True, randaugment=2, erasing=0.5)
    data = data_of(recipe)
    found = preview(recipe, data, images=6, views=3)
    options = AugmentOptions(crop="padded", padding=2, flip=True, randaugment=2, erasing=0.5)
    augment = Augment(options, (8, 8), (0.5,), (0.5,))
    indices = np.array([row.index for row in found.rows])
    pixels = torch.from_numpy(np.stack([data.train.read(i) for i in indices])).permute(0, 3, 1, 2)  # (B, 1, 8, 8)
    for epoch in range(3):
        expected = back(augment(pixels, indices, seed=5, epoch=epoch), 0.5, 0.5)
        np.testing.assert_allclose(np.stack([row.images[1 + epoch] for row in found.rows]), expected, atol=0.51)
    assert all((row.images[1] != row.images[2]).any() for row in found.rows)


def test_all_views_of_dino_are_shown(tmp_path):
    settings = ["objective.local_views=3", "objective.local_size=6", "run.seed=5"]
    recipe = with_settings(find_recipe("dino_digits")[1], settings)
    data = data_of(recipe)
    found = preview(recipe, data, images=4, views=2)
    assert found.columns == ["before", "large 1", "large 2", "small 1, 6 px", "small 2, 6 px", "small 3, 6 px"]
    assert "local_scale=(0.4, 0.8)" in found.settings
    indices = np.array([row.index for row in found.rows])
    pixels = torch.from_numpy(np.stack([data.train.read(i) for i in indices])).permute(0, 3, 1, 2)  # (B, 1, 8, 8)
    crops = SelfDistillation.augmentation(recipe, Preprocess((8, 8), mean=(0.5,), std=(0.5,)))
    views = crops(pixels, indices, seed=5, epoch=0)
    for number, view in enumerate(views, 1):
        np.testing.assert_allclose([row.images[number] for row in found.rows], back(view, 0.5, 0.5), atol=0.51)
    draw_preview(found, tmp_path / "x.png")
    assert Image.open(tmp_path / "x.png").width > 6 * 224


def test_what_mae_hides_is_told():
    recipe = with_settings(find_recipe("mae_digits")[1], ["model.mask_ratio=0.5"])
    assert any("hides 50% of the patches" in note for note in preview(recipe, data_of(recipe), 1, 1).notes)


def test_files_are_cropped_as_they_are_read(folder):
    recipe = with_settings(folder_recipe(folder, crop="resized"), ["data.decode=exact"])
    data = data_of(recipe)
    found = preview(recipe, data, images=50, views=2)
    assert len(found.rows) == 29 and len(found.notes) == 1
    assert found.notes[0].startswith(str(folder / "train" / "_x" / "0.png"))
    augment = Augment(AugmentOptions(crop="resized"), SIZE, (0.5,) * 3, (0.5,) * 3)
    for row in found.rows:
        file = Image.open(row.name)
        view = file if file.size == (SIZE[1], SIZE[0]) else file.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
        np.testing.assert_array_equal(row.images[0], np.asarray(view))
        for epoch in (0, 1):
            sizes = np.array([[file.height, file.width]])
            box = augment.boxes(sizes, np.array([row.index]), seed=0, epoch=epoch)[0].tolist()
            expected = file.crop(tuple(box)).resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR)
            np.testing.assert_array_equal(row.images[1 + epoch], np.asarray(expected))


def test_the_first_views_are_the_first_batch_of_the_run(tmp_path):
    recipe = digits(crop="padded", flip=True, jitter=0.4)
    found = preview(recipe, data_of(recipe), images=64, views=1)
    batch = prepare(recipe, tmp_path).steps[0, 0]
    assert [row.index for row in found.rows] == batch.indices.tolist()
    np.testing.assert_allclose(np.stack([row.images[1] for row in found.rows]), back(batch.images, 0.5, 0.5), atol=0.51)


def test_repeated_augmentation_shows_each_picture_once():
    recipe = from_tables({"data": {"batch_size": 64, "repeats": 3}})
    found = preview(recipe, data_of(recipe), images=30, views=1)
    assert len({row.index for row in found.rows}) == 30


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_batches_are_those_of_the_run(tmp_path, smoothing):
    recipe = digits(crop="padded", mixup=0.8, cutmix=1.0, smoothing=smoothing)
    found = preview(recipe, data_of(recipe), images=1, views=5)
    assert [batch.how for batch in found.mixed] == ["mixup", "cutmix"]
    job = prepare(recipe, tmp_path)
    for batch in found.mixed:
        whole = job.steps[batch.step, 0]
        drawn = job.objective.mix.draw(64, (8, 8), seed=5, step=batch.step)
        assert drawn is not None and drawn.how == batch.how and drawn.lam == batch.lam
        images, partners = back(whole.images, 0.5, 0.5), drawn.partner
        expected = drawn.lam * images + (1 - drawn.lam) * images[partners]
        if drawn.box is not None:
            left, top, right, bottom = drawn.box
            expected = images.copy()
            expected[:, top:bottom, left:right] = images[partners, top:bottom, left:right]
        assert len(batch.images) == len(batch.labels) == 6
        np.testing.assert_allclose(np.stack(batch.images), expected[:6], atol=0.51)
        for i, parts in enumerate(batch.labels):
            label, other = str(int(whole.labels[i])), str(int(whole.labels[partners[i]]))
            told = Counter({label: drawn.lam})
            told[other] += 1 - drawn.lam
            assert dict(parts) == pytest.approx(dict(told), abs=1e-5)
            assert [share for _, share in parts] == sorted((share for _, share in parts), reverse=True)


def test_without_mixing_there_are_no_mixed_batches():
    recipe = digits(flip=True)
    assert preview(recipe, data_of(recipe), images=1, views=1).mixed == []
    never = digits(mixup=1.0, mix_probability=0.0)
    found = preview(never, data_of(never), images=1, views=1)
    assert found.mixed == [] and "augment.mix_probability=0.0" in found.notes[-1]


@pytest.mark.parametrize(("K", "smoothing"), [(2, 0.3), (10, 0.0), (1000, 0.1)])
@pytest.mark.parametrize(("lam", "told"), [(0.7, [0.7, 0.3]), (0.25, [0.75, 0.25]), (0.998, [0.998]), (0.0, [1.0])])
def test_shares_leave_out_the_smoothing(K, smoothing, lam, told):
    names = [f"c{k}" for k in range(K)]
    own, partner = smooth_targets(torch.tensor([1, 0]), K, smoothing)
    parts = shares(lam * own + (1 - lam) * partner, names, smoothing)
    assert [share for _, share in parts] == pytest.approx(told, abs=1e-4)
    assert [name for name, _ in parts] == (["c1", "c0"] if lam > 0.5 else ["c0", "c1"])[: len(told)]
    assert shares(own, names, smoothing) == [("c1", pytest.approx(1.0, abs=1e-4))]


def places(sheet: np.ndarray, image: np.ndarray) -> list[tuple[int, int]]:
    """(top, left) of a picture of 8 x 8 on the sheet, each pixel 28 times as large, give or take 2."""
    matches = np.ones((sheet.shape[0] - 223, sheet.shape[1] - 223), dtype=bool)
    for (i, j), value in np.ndenumerate(image[:, :, 0]):
        for corner in (3, 24):  # of the large pixel, inside the frame
            y, x = 28 * i + corner, 28 * j + corner
            matches &= sheet[y : y + matches.shape[0], x : x + matches.shape[1]] == value
    return [(int(y), int(x)) for y, x in np.argwhere(matches)]


def test_the_figure_holds_every_picture_in_its_row_and_column(tmp_path):
    recipe = digits(crop="padded", padding=3, border="zeros", cutmix=1.0)
    found = preview(recipe, data_of(recipe), images=3, views=2)
    draw_preview(found, tmp_path / "new" / "x.png")
    sheet = np.array(Image.open(tmp_path / "new" / "x.png").convert("L"))
    top, left = places(sheet, found.rows[0].images[0])[0]
    spots = [(0, 0), (0, 240), (0, 472), (232, 0), (232, 240), (232, 472), (464, 0), (464, 240), (464, 472)]
    for (down, across), image in zip(spots, [image for row in found.rows for image in row.images], strict=True):
        assert any(abs(y - top - down) <= 4 and abs(x - left - across) <= 4 for y, x in places(sheet, image))
    for across, image in zip((0, 240, 472), found.mixed[0].images, strict=True):
        assert any(y > top + 3 * 232 and abs(x - left - across) <= 4 for y, x in places(sheet, image))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.png"]


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*args: object, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["vitlab", "data", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        told = capsys.readouterr()
        assert (stopped.value.code or 0) == code, told
        return told.out, told.err

    return call


def settings(folder: Path) -> list[str]:
    return [str(folder), "model.name=vit_digits", "model.image_size=[16,24]", "model.patch_size=8"]


def test_odd_labels_are_drawn_as_they_are(run, folder, tmp_path):
    _, err = run(*settings(folder), "--preview", tmp_path / "x.svg", "--images", 12, "--views", 1)
    assert f"preview: {tmp_path / 'x.svg'}" in err
    svg = (tmp_path / "x.svg").read_text(encoding="utf-8")
    for label in ("$a_b$", "_x", "大熊猫", "xxxxxxxxxx…"):
        assert label in svg
    assert "mixup" in svg and "cutmix" in svg and "x" * 60 not in svg


def test_png_of_plausible_size(run, folder, tmp_path):
    out, _ = run(*settings(folder), "--preview", tmp_path / "a" / "x.png", "--images", 3, "--views", 5)
    assert "per class" in out and "sizes" in out  # the counts are printed too
    with Image.open(tmp_path / "a" / "x.png") as sheet:
        assert 6 * 200 < sheet.width < 6 * 224 + 500 and 5 * 149 < sheet.height < 5 * 224 + 400
    before = (tmp_path / "a" / "x.png").read_bytes()
    run(*settings(folder), "--preview", tmp_path / "a" / "x.png", "--images", 3, "--views", 5, "--seed", 1)
    assert (tmp_path / "a" / "x.png").read_bytes() != before


def test_what_cannot_be_drawn_is_said_before_work_begins(run, tmp_path, monkeypatch):
    _, err = run("digits", "--preview", tmp_path / "x.txt", code=2)
    assert "--preview" in err and "cannot draw .txt" in err and ".svg" in err
    assert "is a folder" in run("digits", "--preview", tmp_path, code=2)[1]
    assert "no recipe, data source" in run("digit", "--preview", tmp_path / "x.png", code=2)[1]
    assert "augment.erasing" in run("digits", "augment.erasin=1", code=2)[1]
    assert not list(tmp_path.iterdir())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="--preview needs matplotlib"):
        figure_format(tmp_path / "x.png", "--preview")


def test_a_broken_write_leaves_the_old_figure(run, tmp_path, monkeypatch):
    run("digits", "--preview", tmp_path / "x.png", "--images", 1, "--views", 1)
    before = (tmp_path / "x.png").read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    assert "disk full" in run("digits", "--preview", tmp_path / "x.png", "--images", 2, code=2)[1]
    assert [path.name for path in tmp_path.iterdir()] == ["x.png"] and (tmp_path / "x.png").read_bytes() == before


def test_numbers_equal_a_count_of_the_files(run, folder):
    found = json.loads(run(*settings(folder), "--json")[0])
    assert found["images"] == {"train": 6 + 7 + 8 + 9, "val": 4} and found["looked_at"] == 34
    assert found["classes"] == 4 and found["channels"] == 3
    assert [row["class"] for row in found["per_class"]] == sorted(CLASSES)
    for row in found["per_class"]:
        assert row["train"] == len(list((folder / "train" / row["class"]).iterdir())) and row["val"] == 1
    assert found["sizes"] == {"smallest": [16, 24], "largest": [20, 31], "most_common": [20, 31]}
    (message,) = found["unreadable"]
    assert message.startswith(str(folder / "train" / "_x" / "0.png"))
    out, _ = run(*settings(folder))
    assert "16 x 24 to 20 x 31, most often 20 x 31, 3 channels" in out and "train 6 to 9, val 1" in out
    assert "大熊猫" in out and "$a_b$" in out and str(folder / "train" / "_x" / "0.png") in out


def test_numbers_of_digits(run):
    found = json.loads(run("digits", "data.per_class=7", "--json")[0])
    assert found["images"]["train"] == 70 and all(row["train"] == 7 for row in found["per_class"])
    assert found["sizes"]["smallest"] == found["sizes"]["largest"] == [8, 8] and found["channels"] == 1
    out, _ = run("digits")
    assert "train 1,078, val 362, test 357" in out and "8 x 8, 1 channel" in out


def test_a_long_list_of_classes_is_cut(run, tmp_path):
    for k in range(23):
        (tmp_path / f"[c{k:02}]").mkdir()
        for i in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / f"[c{k:02}]" / f"{i}.png")
    out, _ = run(tmp_path)
    assert "[c19]" in out and "[c20]" not in out and "... 3 more" in out


def test_large_pictures_are_not_all_opened(monkeypatch, folder):
    monkeypatch.setattr("vitlab.training.data_summary.PIXELS", 3 * 16 * 24)
    data = data_of(folder_recipe(folder))
    found = describe(data)
    assert 2 <= found.looked_at <= 8 < sum(found.images.values())


def test_the_counts_are_printed_beside_the_preview(run, tmp_path):
    from sklearn.datasets import load_digits

    out, err = run("digits", "--preview", tmp_path / "x.png", "--images", 1, "--views", 1)
    assert "x.png" in err
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line[:1].isdigit()}
    truth = np.bincount(load_digits().target)
    assert {name: sum(map(int, counts)) for name, counts in rows.items()} == dict(zip("0123456789", truth, strict=True))
    assert all(len(counts) == 3 for counts in rows.values())  # train, val, test
    assert "8 x 8" in out and run("digits")[0] == out
