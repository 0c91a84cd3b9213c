"""The loop learns, is the same in two processes as in one, and stops with plain words when something is wrong."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitlab
from vitlab.errors import DataError
from vitlab.images.datasets import open_data
from vitlab.training.batches import ImageSet, Plan
from vitlab.training.doctor import DivergedError, check_installation
from vitlab.training.evaluate import Scores, evaluate_classifier, features, knn_accuracy, probe_accuracy
from vitlab.training.loop import fit
from vitlab.training.recipe import Recipe, with_settings

VITLAB = Path(sys.executable).parent / "vitlab"


def recipe(*settings: str) -> Recipe:
    return with_settings(Recipe(), ["data.batch_size=32", "model.depth=2", *settings])


def test_two_batches_are_learned_by_heart(tmp_path):
    few = [
        "data.per_class=6",
        "data.batch_size=30",
        "run.epochs=60",
        "run.eval_every=60",
        "optim.lr=3e-3",
        "optim.weight_decay=0",
    ]
    fit(recipe(*few), tmp_path)
    data = open_data("digits", per_class=6)
    model = vitlab.load(tmp_path / "last")
    assert evaluate_classifier(model, ImageSet(data.train, model.preprocess)).top(1) == 1.0


def test_it_learns_digits(tmp_path):
    """Four short epochs: far above chance, which is 10 %."""
    result = fit(recipe("run.epochs=4", "run.eval_every=4", "optim.name=muon", "optim.lr=2e-3"), tmp_path)
    assert result["top1"] > 0.6
    assert result["split"] == "test" and result["seed"] == 0
    best = vitlab.load(tmp_path / "best")
    assert best.labels == [str(i) for i in range(10)]
    data = open_data("digits")
    again = evaluate_classifier(best, ImageSet(data.test, best.preprocess))
    assert again.top(1) == result["top1"]
    assert best.card.metrics["test_top1"] == result["top1"]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_every_epoch_takes_every_image_once_in_another_order():
    plan = Plan(n=100, batch_size=10, epochs=2, seed=3)
    epochs = [np.concatenate([plan.take(step, 0)[1] for step in range(10 * e, 10 * e + 10)]) for e in (0, 1)]
    for order in epochs:
        assert sorted(order) == list(range(100))
    assert (epochs[0] != epochs[1]).any()


def test_processes_and_micro_steps_share_a_step_without_overlap():
    whole = Plan(n=100, batch_size=24, epochs=1, seed=3)
    parts = [Plan(n=100, batch_size=6, epochs=1, seed=3, accumulate=2, rank=r, world=2) for r in (0, 1)]
    assert whole.steps_per_epoch == parts[0].steps_per_epoch == 4
    for step in range(4):
        found = [plan.take(step, micro)[1] for plan in parts for micro in (0, 1)]
        assert sorted(np.concatenate(found)) == sorted(whole.take(step, 0)[1])


def test_repeated_augmentation_gives_views_of_one_image():
    plan = Plan(n=90, batch_size=30, epochs=1, seed=0, repeats=3)
    _, indices, repeat = plan.take(0, 0)
    assert repeat.tolist() == [0, 1, 2] * 10
    assert all(len(set(indices[i : i + 3])) == 1 for i in range(0, 30, 3))


SGD = ["optim.name=sgd", "optim.momentum=0", "optim.lr=1", "optim.weight_decay=0", "optim.schedule=constant"]


def test_two_processes_equal_one_with_the_doubled_batch(tmp_path, fit_in_two):
    """One plain step of rate 1: the weights differ from the start by the gradient, so gradients are compared."""
    common = ["data.per_class=3", "run.epochs=1", *SGD]
    fit(recipe("data.batch_size=30", *common), tmp_path / "one")
    assert fit_in_two(recipe("data.batch_size=15", *common), tmp_path / "two") == [0, 0]
    one, two = (load_file(tmp_path / run / "last" / "weights.safetensors") for run in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-6, rtol=0, msg=key)
    results = [json.loads((tmp_path / run / "result.json").read_text(encoding="utf-8")) for run in ("one", "two")]
    assert results[0]["top1"] == results[1]["top1"]  # sharded evaluation counts each image once
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-5)


def test_accumulated_parts_equal_one_batch(tmp_path):
    common = ["data.per_class=3", "run.epochs=1", *SGD]
    fit(recipe("data.batch_size=30", *common), tmp_path / "whole")
    fit(recipe("data.batch_size=10", "optim.accumulate=3", *common), tmp_path / "parts")
    one, two = (load_file(tmp_path / run / "last" / "weights.safetensors") for run in ("whole", "parts"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=1e-6, rtol=0, msg=key)


def test_a_loss_that_is_not_finite_stops_with_layer_and_advice(tmp_path):
    start = vitlab.create("vit_digits", depth=2)
    start.labels = [str(i) for i in range(10)]
    with torch.no_grad():
        start.blocks[1].mlp.fc1.weight.mul_(1e30)
        start.blocks[1].mlp.fc2.weight.mul_(1e30)
    vitlab.save(start, tmp_path / "start")
    with pytest.raises(DivergedError) as error:
        fit(with_settings(Recipe(), [f"model.init_from={tmp_path / 'start'}", "run.epochs=1"]), tmp_path / "run")
    text = str(error.value)
    assert "step 0" in text and "block 1, fc" in text and "optim.lr" in text
    replay = load_file(tmp_path / "run" / "replay" / "batch.safetensors")
    assert not torch.isfinite(start(replay["images"])).all()  # it can be replayed


def pictures_folder(folder: Path, classes=("red", "绿色"), count: int = 12) -> Path:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(100 * number + i).integers(0, 90, (20 + i, 30, 3), dtype=np.uint8)
            pixels[..., number] += 120
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


FOLDER = ["model.image_size=16", "model.patch_size=4", "model.channels=3", "run.epochs=3", "data.batch_size=8"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_of_pictures_trains(workers, tmp_path):
    source = pictures_folder(tmp_path / "data")
    settings = [
        f"data.source={source}",
        *FOLDER,
        "augment.crop=resized",
        "augment.flip=true",
        f"data.workers={workers}",
    ]
    result = fit(recipe(*settings, "run.epochs=12", "optim.lr=3e-3"), tmp_path / "run")
    assert result["val_top1"] == 1.0
    assert vitlab.load(tmp_path / "run" / "best").labels == ["red", "绿色"]
    assert "绿色" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_unreadable_pictures_are_named_skipped_and_limited(tmp_path):
    source = pictures_folder(tmp_path / "data")
    for i in range(3):
        (source / "red" / f"{i}.png").write_bytes(b"\x89PNG broken")
    settings = [f"data.source={source}", *FOLDER]
    result = fit(recipe(*settings, "data.val_fraction=0.2"), tmp_path / "run")
    assert result["unreadable"] >= 1
    skips = [
        json.loads(line)
        for line in (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8").splitlines()
        if '"skip"' in line
    ]
    assert all(".png" in line["message"] for line in skips) and skips
    with pytest.raises(DataError, match=r"data\.max_unreadable=0(?s:.*)\.png"):
        fit(recipe(*settings, "data.max_unreadable=0"), tmp_path / "strict")


def test_fine_tuning_keeps_the_encoder_and_changes_the_head(tmp_path):
    fit(recipe("run.epochs=1", "data.per_class=8"), tmp_path / "base")
    start = vitlab.load(tmp_path / "base" / "best")
    source = pictures_folder(tmp_path / "data", classes=("a", "b", "c"))
    settings = [
        f"data.source={source}",
        f"model.init_from={tmp_path / 'base' / 'best'}",
        "model.freeze=encoder",
        "run.epochs=1",
    ]
    fit(with_settings(Recipe(), settings), tmp_path / "tuned")
    tuned = vitlab.load(tmp_path / "tuned" / "best")
    assert (tuned.config.classes, tuned.labels) == (3, ["a", "b", "c"])
    for (key, a), b in zip(start.named_parameters(), tuned.parameters(), strict=True):
        assert key.startswith("head") or torch.equal(a, b), key


def test_scores_against_scikit_learn():
    from sklearn.metrics import accuracy_score, confusion_matrix, log_loss, top_k_accuracy_score

    torch.manual_seed(1)
    logits, labels = torch.randn(200, 7), torch.randint(7, (200,))
    scores = Scores(logits, labels, torch.ones(200, dtype=torch.bool), 1.0)
    truth, chances = labels.numpy(), logits.double().softmax(1).numpy()
    assert scores.top(1) == pytest.approx(accuracy_score(truth, chances.argmax(1)))
    assert scores.top(5) == pytest.approx(top_k_accuracy_score(truth, chances, k=5))
    assert scores.loss() == pytest.approx(log_loss(truth, chances), abs=1e-5)
    assert (scores.confusion() == confusion_matrix(truth, chances.argmax(1))).all()


def test_calibration_error_by_hand():
    """Two bins: sure at 0.95 and right half the time, sure at 0.6 and always right."""
    chances = torch.tensor([[0.95, 0.05]] * 4 + [[0.6, 0.4]] * 4)
    labels = torch.tensor([0, 1, 0, 1, 0, 0, 0, 0])
    scores = Scores(chances.log(), labels, torch.ones(8, dtype=torch.bool), 1.0)
    assert scores.calibration_error() == pytest.approx(0.5 * 0.45 + 0.5 * 0.4, abs=1e-6)


def test_knn_and_probe_against_scikit_learn(tmp_path):
    from sklearn.neighbors import KNeighborsClassifier

    model = vitlab.create("vit_digits", depth=1).eval()
    data = open_data("digits")
    known, asked = (features(model, ImageSet(split, model.preprocess)) for split in (data.train, data.val))

    def weigh(distances):
        return np.exp((1 - distances) / 0.07)

    theirs = KNeighborsClassifier(20, weights=weigh, metric="cosine").fit(known[0].numpy(), known[1].numpy())
    assert knn_accuracy(known, asked) == pytest.approx(theirs.score(asked[0].numpy(), asked[1].numpy()), abs=0.006)
    assert probe_accuracy(known, asked) > 0.5


def test_eval_on_the_command_line(tmp_path, command):
    fit(recipe("run.epochs=2", "data.per_class=16"), tmp_path / "run")
    found = json.loads(command("eval", tmp_path / "run" / "best", "digits", "--knn", "--probe", "--json").stdout)
    assert found["split"] == "test" and found["images"] == 357
    assert found["top1"] == json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["top1"]
    assert np.array(found["confusion"]).sum() == 357 and 0 < found["knn"] < 1 and 0 < found["linear_probe"] < 1
    source = pictures_folder(tmp_path / "data")
    assert "model.init_from" in command("eval", tmp_path / "run" / "best", source, code=2).stderr


def test_the_installation_is_checked():
    rows = check_installation()
    assert all(well for _, well, _ in rows)
    assert {"torch", "device", "matrix product"} <= {what for what, _, _ in rows}
    assert not math.isnan(len(rows))
