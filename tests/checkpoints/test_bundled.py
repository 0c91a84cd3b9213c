"""Models in the package: they load by name, say where they come from, and are as good as they say."""

import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vitlab
import vitlab.cli.main
from vitlab.checkpoints import bundled
from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.native import read_card
from vitlab.errors import CheckpointError, DataError
from vitlab.images.datasets import open_data
from vitlab.images.samples import is_sample, open_sample
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import features, knn_accuracy
from vitlab.training.recipe import read_recipe


@pytest.mark.parametrize("name", bundled.names())
def test_a_bundled_model_says_where_it_comes_from(name):
    folder = bundled.find(f"bundled:{name}")
    assert sum(path.stat().st_size for path in folder.iterdir()) < 3e6
    model, report = load_with_report(f"bundled:{name}")
    recipe = read_recipe(folder / "recipe.toml")
    assert model.card.licence == "Apache-2.0" and recipe.data.source in model.card.source
    assert recipe.data.path is None and recipe.run.dir == ""
    assert recipe.run.seed == model.card.metrics["seed"]
    assert any(key.startswith("test_") and value > 0 for key, value in model.card.metrics.items())
    method = recipe.objective.name
    if method in ("supervised", "distill"):
        assert len(model.labels) == model.config.classes == 10
    else:  # without labels, or from words
        assert model.labels is None and model.family in (method, "vit")
    alone = model.family == "vit" and method == "dino"  # without student and head, which would make it too large
    assert any("holds the encoder of dino_" in note for note in report.notes) == alone


ENCODERS = [name for name in bundled.names() if read_card(bundled.find(name))["family"] != "clip"]  # has two


@pytest.mark.parametrize("name", ENCODERS)
def test_a_bundled_encoder_tells_digits_from_one_another(name):
    """Whatever it learned from: features that collapsed, or a wrong preprocess spoiled, would be left to chance."""
    encoder = vitlab.load(f"bundled:{name}", encoder=True)
    assert encoder.family in ("vit", "resnet")
    data = open_data("digits", per_class=20)
    knn = knn_accuracy(*(features(encoder, ImageSet(split, encoder.preprocess)) for split in (data.train, data.test)))
    assert knn > 0.4  # chance: 0.1


def test_a_bundled_clip_is_asked_in_words(tmp_path):
    """Pictures of one colour are no cats; but every word has its number, and what is asked for has its share."""
    for name in set(bundled.names()) - set(ENCODERS):
        model = vitlab.load(f"bundled:{name}")
        assert model.tokenizer is not None and model.tokenizer.options["vocab"] <= model.config.text.vocab
        Image.new("RGB", (50, 70), (40, 90, 200)).save(tmp_path / "photo.png")
        (found,) = vitlab.zero_shot(model, tmp_path / "photo.png", ["cat", "dog", "一只狗"])
        assert sum(share for _, share in found.scores) == pytest.approx(1)


def test_the_digits_model_is_as_good_as_its_card_says():
    model, test = vitlab.load("bundled:digits"), open_data("digits").test
    assert test is not None
    found = vitlab.predict(model, [test.read(i)[:, :, 0] for i in range(len(test))], top=1, batch_size=128)
    top1 = np.mean([p.label == str(label) for p, label in zip(found, test.labels, strict=True)])
    assert top1 == pytest.approx(model.card.metrics["test_top1"], abs=1e-6)
    assert top1 >= 0.98


def test_a_sample_is_a_picture_of_the_test_split_with_its_label():
    pixels, labels = load_digits(return_X_y=True)
    for number in (0, 7):
        sample = open_sample(f"digits#{number}")
        values = np.asarray(sample.image) * (16 / 255)  # (8, 8)
        where = np.flatnonzero((np.abs(pixels - values.reshape(-1)) < 0.05).all(axis=1))
        assert len(where) and sample.label in {str(labels[i]) for i in where}


def test_the_old_name_of_a_replaced_model_loads_its_successor(monkeypatch):
    monkeypatch.setitem(bundled.ALIASES, "numbers", "digits")
    assert bundled.find("bundled:numbers") == bundled.find("bundled:digits")
    assert vitlab.load("bundled:numbers").card == vitlab.load("bundled:digits").card
    assert "numbers" not in bundled.names()
    with pytest.raises(CheckpointError, match=r"In the package: bundled:numbers"):
        vitlab.load("numbers")


def test_the_default_is_there_and_comes_first():
    assert bundled.find(bundled.DEFAULT).is_dir() and bundled.PREFIX + bundled.names()[0] == bundled.DEFAULT
    assert not set(bundled.ALIASES) & set(bundled.names())


def test_names_that_are_not_there(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"no such model in the package; there are vit, cifar10, .*digits"):
        vitlab.load("bundled:imagenet")
    with pytest.raises(CheckpointError, match=r"In the package: bundled:digits"):
        vitlab.load("digits")
    with pytest.raises(DataError, match=r"digits has 357 images to choose from"):
        open_sample("digits#357")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a#1").touch()
    assert not is_sample("a#1") and not is_sample("a.png") and is_sample("digits#1")


def test_predict_reads_bundled_models_and_samples(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["vitlab", "predict", "bundled:digits", "digits#0", "--top", "1", "--json"])
    with pytest.raises(SystemExit) as stopped:
        vitlab.cli.main.run()
    assert not stopped.value.code
    printed = capsys.readouterr().out
    assert '"image": "digits#0"' in printed and f'"label": "{open_sample("digits#0").label}"' in printed
