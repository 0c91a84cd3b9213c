"""vitlab.evaluate: the function behind `vitlab eval`, for names and for models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import normalize

import vitlab
from vitlab.errors import DataError, UsageError
from vitlab.evaluation import evaluate
from vitlab.images.datasets import open_data, subset
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier, shifted_views
from vitlab.training.features import dataset_features


def without_time(values: dict) -> dict:
    return {key: value for key, value in values.items() if key not in ("seconds", "images_per_second", "checkpoint")}


def test_a_name_a_model_and_the_command_agree(command):
    by_name = evaluate("bundled:digits", "digits", knn=True, probe=True, few_shot=2, draws=3)
    by_model = evaluate(vitlab.load("bundled:digits"), open_data("digits"), knn=True, probe=True, few_shot=2, draws=3)
    options = ["--knn", "--probe", "--few-shot", 2, "--draws", 3]
    printed = json.loads(command("eval", "bundled:digits", "digits", *options, "--json").stdout)
    assert without_time(by_name.to_dict()) == without_time(by_model.to_dict()) == without_time(printed)
    assert list(by_name.to_dict()) == list(printed)
    assert by_name.scores is not None and by_name.scores.top(1) == printed["top1"]
    assert by_name.knn == printed["knn"] and by_name.few_shot is not None and len(by_name.few_shot.draws) == 3


def test_progress_counts_every_image_once():
    seen: list[tuple[str, int, int]] = []
    evaluate("bundled:digits", "digits", knn=True, progress=lambda *done: seen.append(done))
    last = {what: (done, total) for what, done, total in seen}
    sizes = open_data("digits")
    assert sizes.test is not None
    assert last == {
        "digits, test": (len(sizes.test), len(sizes.test)),
        "features": (len(sizes.train) + len(sizes.val) + len(sizes.test),) * 2,
    }
    firsts = {what: done for what, done, _ in reversed(seen)}
    assert firsts == {"digits, test": 0, "features": 0}  # shown before the first batch


def test_a_clip_as_a_model_is_scored_by_its_encoder_or_by_text():
    clip = vitlab.load("bundled:clip")
    assert evaluate(clip, "digits").knn is not None
    result = evaluate(clip, "digits", templates="a {}")
    assert result.scores is not None and result.templates is not None
    assert result.templates.sentences == ["a {}"] and result.templates.learned_from is None


def test_wrong_arguments_are_refused():
    with pytest.raises(UsageError, match="no split 'extra'"):
        evaluate("bundled:digits", "digits", split="extra")
    with pytest.raises(UsageError, match="draws=1 must be at least 2"):
        evaluate("bundled:digits", "digits", few_shot=1, draws=1)
    with pytest.raises(UsageError, match="learn from train"):
        evaluate("bundled:digits", "digits", split="train", knn=True)
    with pytest.raises(UsageError, match="a CLIP or SigLIP, but bundled:digits is of the family vit"):
        evaluate("bundled:digits", "digits", templates="held_out")


def test_on_test_the_features_learn_from_train_and_val_by_scikit_learn():
    model, data = vitlab.load("bundled:digits"), open_data("digits")
    result = evaluate("bundled:digits", "digits", knn=True, probe=True)
    parts = [dataset_features(model, ImageSet(part, model.preprocess)) for part in (data.train, data.val, data.test)]
    x, y = ([getattr(part, name) for part in parts] for name in ("vectors", "labels"))
    unit = [normalize(part.numpy()) for part in x]
    bank, labels = np.concatenate(unit[:2]), np.concatenate([part.numpy() for part in y[:2]])
    votes = KNeighborsClassifier(20, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07))
    assert result.knn == pytest.approx(votes.fit(bank, labels).score(unit[2], y[2].numpy()), abs=1e-6)
    fitted = LogisticRegression(C=10.0, max_iter=1000).fit(bank, labels)
    assert result.linear_probe == pytest.approx(fitted.score(unit[2], y[2].numpy()), abs=1e-6)
    on_val = evaluate("bundled:digits", "digits", knn=True, split="val").knn  # val is not among its own neighbours
    alone = votes.fit(unit[0], y[0].numpy()).score(unit[1], y[1].numpy())
    assert on_val == pytest.approx(alone, abs=1e-6)


def test_another_table_is_read_by_the_columns_of_training(tmp_path):
    model, data = vitlab.load("bundled:digits"), open_data("digits")
    rows = []
    for i in range(60):
        Image.fromarray(data.test.read(i)[:, :, 0]).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{data.classes[data.test.labels[i]]},{'train' if i < 30 else 'val'}")
    (tmp_path / "new.csv").write_text("image,digit,split\n" + "\n".join(rows), encoding="utf-8")
    vitlab.save(model, tmp_path / "run" / "best")
    with pytest.raises(DataError, match="Say which column is learned"):
        evaluate(tmp_path / "run" / "best", tmp_path / "new.csv")
    (tmp_path / "run" / "recipe.toml").write_text('[data]\nsource = "old.csv"\nlabel = "digit"\n', encoding="utf-8")
    scores = evaluate(tmp_path / "run" / "best", tmp_path / "new.csv").scores
    expected = evaluate_classifier(model, ImageSet(subset(data.test, range(30, 60)), model.preprocess))
    torch.testing.assert_close(scores.logits, expected.logits, atol=1e-5, rtol=0)


def test_image_size_is_that_of_load():
    larger = vitlab.load("bundled:digits", image_size=12)
    expected = evaluate(larger, "digits").scores
    found = evaluate("bundled:digits", "digits", image_size=12).scores
    assert torch.equal(found.logits, expected.logits)
    assert not torch.allclose(found.logits, evaluate("bundled:digits", "digits").scores.logits, atol=1e-3)
    with pytest.raises(UsageError, match="the model is loaded already"):
        evaluate(larger, "digits", image_size=16)
    with pytest.raises(ValueError, match="13 is not a multiple of 2"):
        evaluate("bundled:digits", "digits", image_size=13)


def test_shifted_views_are_those_of_a_slow_loop():

    images = torch.randn(2, 3, 6, 8)
    (full, same), *moved = shifted_views(images, 1)
    assert full == 0.5 and torch.equal(same, images)
    for (weight, view), (down, right) in zip(moved, ((-1, -1), (1, 1)), strict=True):
        assert weight == 0.25
        for row in range(6):
            for column in range(8):
                y, x = abs(row + down), abs(column + right)
                y, x = (y if y < 6 else 10 - y), (x if x < 8 else 14 - x)
                assert torch.equal(view[..., row, column], images[..., y, x])
