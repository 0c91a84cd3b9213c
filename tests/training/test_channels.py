"""A model of images with five channels: its first layer, its statistics, and what it learns from them."""

import json

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

import vitlab
from vitlab.checkpoints.load import adapt_channels, load_with_report
from vitlab.errors import DataError, ImageError, TrainingError, UsageError, VitlabError
from vitlab.explain.inputs import as_batch
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.datasets import FileOptions, open_data
from vitlab.images.preprocess import Preprocess
from vitlab.training.batches import ImageSet
from vitlab.training.finetune import build_for_data
from vitlab.training.recipe import Recipe, setting, with_settings
from vitlab.training.train import train

RANDOM = np.random.default_rng(0)
SMALL = dict(image_size=(16, 24), patch_size=8, width=48, depth=2, heads=4, classes=3)


@pytest.fixture
def colours(tmp_path):
    """A checkpoint of three channels, by its folder."""
    model = vitlab.create("vit_digits", **SMALL, channels=3).eval()
    model.preprocess = Preprocess((16, 24), "crop", mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))
    vitlab.save(model, tmp_path / "colours")
    return str(tmp_path / "colours")


@pytest.mark.parametrize("name", ["vit_digits", "swin_cifar"])
def test_grey_through_the_summed_layer_is_grey_as_three_colours(name, tmp_path):
    torch.manual_seed(0)
    options = SMALL if name == "vit_digits" else dict(classes=3)
    model = vitlab.create(name, **options, channels=3).eval()
    vitlab.save(model, tmp_path / "x")
    grey = torch.randn(2, 1, *model.input_size)
    alone = vitlab.load(tmp_path / "x", channels=1)
    with torch.no_grad():
        torch.testing.assert_close(alone(grey), model(grey.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-5)


def test_tokens_of_grey_are_the_same(colours):
    model, alone = vitlab.load(colours), vitlab.load(colours, channels=1)
    grey = torch.randn(2, 1, 16, 24, dtype=torch.float64)
    one, three = alone.patch_embed.double(), model.patch_embed.double()
    one.proj.weight.data = adapt_channels(three.proj.weight.data, 1)  # without float32's rounding of the sum
    with torch.no_grad():
        torch.testing.assert_close(one(grey), three(grey.expand(-1, 3, -1, -1)), rtol=1e-13, atol=1e-13)
    assert alone.preprocess.mean == (pytest.approx(0.5),) and len(alone.preprocess.std) == 1


def test_more_channels_repeat_the_colours_and_keep_their_sum():
    weight = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    six, five = adapt_channels(weight, 6), adapt_channels(weight, 5)
    torch.testing.assert_close(six, torch.cat([weight, weight], dim=1) / 2)
    torch.testing.assert_close(five, torch.stack([weight[:, c] for c in (0, 1, 2, 0, 1)], dim=1) * 3 / 5)
    torch.testing.assert_close(six.sum(dim=1), weight.sum(dim=1))
    torch.testing.assert_close(adapt_channels(weight, 1), weight.sum(dim=1, keepdim=True))


def test_loading_says_which_layer_is_adapted(colours):
    model, report = load_with_report(colours, channels=5)
    (row,) = [row for row in report.rows if row.status != "matched"]
    assert (row.ours, row.note) == ("patch_embed.proj.weight", "from 48x3x8x8, 3 channels to 5")
    assert model.preprocess is None  # no photo has five channels
    with pytest.raises(UsageError, match="another network"):
        mae = vitlab.create("mae_digits", channels=3, image_size=16)
        vitlab.save(mae, colours + "-mae")
        vitlab.load(colours + "-mae", channels=5)


# ------------------------------------------------------------------------------------------------- data


def tiles(root, *, telling=3, count=24):
    """Two classes of 5 channels that differ in one alone, `telling`: where a bright square is."""
    random = np.random.default_rng(1)
    for label, corner in (("left", 1), ("right", 13)):
        (root / label).mkdir(parents=True)
        for i in range(count):
            array = random.integers(900, 1100, (16, 24, 5)).astype(np.uint16)
            array[3:12, corner : corner + 9, telling] += 700  # upper bytes differ by 3 at most
            np.save(root / label / f"{i}.npy", array if i % 2 else array.transpose(2, 0, 1))
    return str(root)


def without_band(root, out, band):
    for path in sorted(root.rglob("*.npy")):
        to = out / path.parent.name
        to.mkdir(parents=True, exist_ok=True)
        array = np.load(path)
        np.save(to / path.name, np.delete(array, band, axis=int(array.shape.index(5))))
    return str(out)


def last(path):
    array = np.load(path)
    return array if array.shape[2] == 5 else array.transpose(1, 2, 0)


SIZE = {"image_size": (16, 24), "patch_size": 8, "width": 48, "depth": 2, "heads": 4}
SETTINGS = {
    **{f"model.{name}": value for name, value in SIZE.items()},
    "model.name": "vit_digits",
    "model.stem": "conv",  # learns in fewer epochs
    "augment.crop": "none",
    "augment.flip": False,
    "data.val_fraction": 0.25,
    "run.epochs": 12,
    "run.eval_every": 12,
    "data.batch_size": 12,
    "optim.lr": 3e-3,
    "optim.warmup_epochs": 1,
}


def test_what_only_the_fourth_channel_tells_is_learned_and_without_it_is_not(tmp_path):
    source = tiles(tmp_path / "x")
    run = train("digits", {**SETTINGS, "data.source": source, "run.dir": str(tmp_path / "run")})
    assert run.result["top1"] == 1.0
    fewer = without_band(tmp_path / "x", tmp_path / "y", 3)
    less = train("digits", {**SETTINGS, "data.source": fewer, "run.dir": str(tmp_path / "less")})
    assert less.result["top1"] < 0.9

    card = json.loads((run.model / "model.json").read_text(encoding="utf-8"))["preprocess"]
    data = open_data(source, val_fraction=0.25)
    pixels = np.concatenate([last(data.train.name_of(i)).reshape(-1, 5) for i in range(len(data.train))]) / 65535
    np.testing.assert_allclose(card["mean"], pixels.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(card["std"], pixels.std(axis=0), rtol=1e-9)
    assert (card["pixels"], card["scale"]) == ("uint16", 1 / 65535)

    one = data.val.name_of(0)
    tifffile.imwrite(tmp_path / "one.tif", last(one), photometric="minisblack", planarconfig="contig")
    answers = vitlab.predict(run.model, [one, tmp_path / "one.tif", last(one), one.replace("/x/", "/y/")])
    assert answers[0].scores == answers[1].scores == answers[2].scores
    assert "5 channels are expected" in answers[3].error
    assert vitlab.evaluate(run.model, source).scores.top(1) == 1.0
    pairs = [(last(data.val.name_of(i)), data.classes[data.val.labels[i]]) for i in range(len(data.val))]
    assert vitlab.evaluate(run.model, pairs).scores.top(1) == 1.0
    with pytest.raises(ImageError, match="5 channels are expected"):
        vitlab.evaluate(run.model, fewer)
    batch = as_batch(run.model, one)
    assert batch.originals[0].size == (24, 16) and batch.originals[0].mode == "RGB"
    torch.testing.assert_close(batch.images[0], vitlab.load(run.model).preprocess(last(one)))


def test_the_ladder_starts_from_weights_of_colours(tmp_path, colours, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    source = tiles(tmp_path / "x", count=10)
    settings = {"model.init_from": colours, "run.dir": str(tmp_path / "run"), "run.epochs": 1}
    run = train(source, {**settings, "model.freeze": "encoder", "data.val_fraction": 0.25})
    model, start = vitlab.load(run.model), vitlab.load(colours)
    assert (model.preprocess.how, model.preprocess.size) == ("crop", (16, 24))
    assert model.preprocess.pixels == "uint16" and len(model.preprocess.mean) == 5
    torch.testing.assert_close(
        model.patch_embed.proj.weight, adapt_channels(start.patch_embed.proj.weight, 5), rtol=0, atol=0
    )
    log = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")
    assert "3 channels to 5" in log and "mean and std of each channel" in log


def test_a_channel_of_one_value_is_noted_and_does_no_harm(tmp_path):
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(3):
            array = RANDOM.normal(size=(16, 24, 2)).astype(np.float32)
            array[:, :, 1] = 7.0
            np.save(tmp_path / label / f"{i}.npy", array)
    data = open_data(str(tmp_path))
    recipe = with_settings(
        Recipe(),
        ["model.name=vit_digits", "augment.randaugment=2", *(setting(f"model.{k}", v) for k, v in SIZE.items())],
    )
    model, notes = build_for_data(recipe, data)
    assert any("channel 2 has one value" in note for note in notes)
    assert any("augment.randaugment=2 is left out" in note for note in notes)
    assert model.preprocess.std[1] == 1.0 and model.preprocess.mean[1] == 7.0
    x, _ = ImageSet(data.train, model.preprocess).normalised(np.arange(2))
    assert x.shape[1] == 2 and (x[:, 1] == 0).all()


def test_augmentation_moves_stored_values_and_leaves_them_as_they_are():
    values = torch.from_numpy(RANDOM.integers(0, 65536, (6, 5, 16, 24)).astype(np.float32))
    plain = dict(mean=(0.0,) * 5, std=(1.0,) * 5, scale=1 / 65535, pixels="uint16")
    augment = Augment(AugmentOptions(crop="padded", flip=True), (16, 24), **plain)
    moved = augment(values, np.arange(6), seed=0, epoch=1) * 65535
    assert set(moved.round().flatten().tolist()) <= set(values.flatten().tolist())
    assert not torch.equal(moved.round(), values)
    assert torch.equal(values, values.round())  # what was passed in has not changed
    for option in ({"randaugment": 2}, {"jitter": 0.3}):
        with pytest.raises(UsageError, match="is for the colours of photos"):
            Augment(AugmentOptions(**option), (16, 24), **plain)
    with pytest.raises(UsageError, match="float32"):
        augment(values.to(torch.uint8), np.arange(6), seed=0, epoch=1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"model.channels": 3}, "the images have 5 channels and the model reads 3"),
        ({"objective.name": "dino", "model.name": "dino_digits"}, "5 channels of uint16"),
        ({"data.pixels": "photo"}, "unreadable|cannot be read|not an image"),
    ],
)
def test_what_cannot_be_trained(tmp_path, settings, says):
    source = tiles(tmp_path / "x", count=6)
    own = {} if "objective.name" in settings else SETTINGS
    with pytest.raises(VitlabError, match=says):
        train("digits", {**own, "data.source": source, "run.dir": str(tmp_path / "run"), **settings})


def test_photos_and_a_model_of_other_images(tmp_path):
    model = vitlab.create("vit_digits", **SMALL, channels=5)
    model.preprocess = Preprocess((16, 24), mean=(0.1,) * 5, std=(1.0,) * 5, scale=1 / 65535, pixels="uint16")
    model.labels = ["a", "b", "c"]
    vitlab.save(model, tmp_path / "five")
    for label in "abc":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (24, 16)).save(tmp_path / "photos" / label / f"{i}.png")
    with pytest.raises(DataError, match="are photos, and the model reads 5 channels of uint16"):
        ImageSet(open_data(str(tmp_path / "photos")).train, model.preprocess)
    with pytest.raises(TrainingError, match="the images are photos"):
        recipe = with_settings(Recipe(), [setting("model.init_from", tmp_path / "five")])
        build_for_data(recipe, open_data(str(tmp_path / "photos")))
    (answer,) = vitlab.predict(tmp_path / "five", tmp_path / "photos" / "a" / "0.png")
    assert "holds 3 channels of uint8, and the model reads 5 channels of uint16" in answer.error


def test_groups_are_kept_by_a_run_and_by_its_evaluation(tmp_path):
    for label in "ab":
        for patient in range(6):
            (tmp_path / "x" / label / f"p{patient}").mkdir(parents=True)
            for i in range(2):
                grey = np.full((16, 24), 40 + 20 * patient + i, np.uint8)
                grey[: 8 if label == "a" else 16] //= 2
                Image.fromarray(grey).save(tmp_path / "x" / label / f"p{patient}" / f"{i}.png")
    source = str(tmp_path / "x")
    own = {"data.source": source, "data.group": "parent", "run.dir": str(tmp_path / "run"), "run.epochs": 1}
    run = train("digits", {**SETTINGS, **own, "model.channels": 3})
    kept = open_data(source, val_fraction=0.25, files=FileOptions(group="parent")).val
    result = vitlab.evaluate(run.model, source)
    assert len(result.scores.labels) == len(kept) and result.scores.top(1) == run.result["top1"]
    assert result.scores.labels.tolist() == kept.labels.tolist()
