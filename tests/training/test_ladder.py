"""The ladder: each rung equals what it is made of, the best is kept, and a killed run ends as an unbroken one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

import vitlab
from vitlab.errors import TrainingError, UsageError
from vitlab.images.datasets import open_data
from vitlab.training import ladder_state, uncertainty
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier, knn_accuracy
from vitlab.training.features import dataset_features
from vitlab.training.loop import Silent, Stopped
from vitlab.training.presets import own_values
from vitlab.training.probe import STRENGTHS, fit_probe
from vitlab.training.recipe import Recipe, read_recipe, with_settings
from vitlab.training.starting_points import Start

SMALL = ["run.seed=1", "data.workers=0", "augment.randaugment=0", "augment.crop=none", "data.val_fraction=0.4"]
SMALL += ["run.epochs=4", "data.batch_size=16"]


def stripes(folder: Path, count: int = 40) -> Path:
    """Images striped across or down, in noise: nothing that a mean colour would tell. Some have the wrong label."""
    for label, name in enumerate(("across", "down")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            random = np.random.default_rng(1000 * label + i)
            wave = np.sin(np.arange(16) * random.uniform(0.6, 1.4) + random.uniform(0, 6))
            clean = np.broadcast_to(wave[:, None], (16, 16))
            noisy = 128 + 50 * (clean if (label == 0) != (i % 8 == 0) else clean.T) + random.normal(0, 60, (16, 16))
            Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert("RGB").save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return stripes(tmp_path_factory.mktemp("data") / "stripes")


@pytest.fixture(scope="module")
def weights(tmp_path_factory, folder):
    """A small ViT that has learned something of such images."""
    settings = {"run.epochs": 2, "run.dir": str(tmp_path_factory.mktemp("weights") / "run"), "model.init_from": None}
    settings |= {"model.name": "vit_digits", "model.image_size": 16, "model.patch_size": 4, "model.depth": 2}
    settings |= {"data.workers": 0, "augment.crop": "none", "augment.randaugment": 0, "optim.warmup_epochs": 0}
    return str(vitlab.train(folder, settings).model)


@pytest.fixture(scope="module")
def climbed(tmp_path_factory, folder, weights):
    run = tmp_path_factory.mktemp("runs") / "climbed"
    show = Silent()
    result = vitlab.train(folder, [f"model.init_from={weights}", f"run.dir={run}", *SMALL], show=show)
    return result, show.notes


def test_every_rung_is_what_it_says(climbed, folder, weights):
    run, notes = climbed
    data = open_data(str(folder), seed=1, val_fraction=0.4)
    model = vitlab.load(weights)
    train, val = (dataset_features(model, ImageSet(part, model.preprocess)) for part in (data.train, data.val))
    rungs = {rung["name"]: rung for rung in run.result["rungs"]}
    unit = [(F.normalize(part.vectors, dim=1), part.labels) for part in (train, val)]
    assert rungs["knn"]["val_top1"] == pytest.approx(knn_accuracy(*unit))
    assert list(rungs) == ["knn", "probe", "lora", "whole"]
    probe = vitlab.load(run.folder / "rungs" / "probe")
    scores = evaluate_classifier(probe, ImageSet(data.val, probe.preprocess))
    assert rungs["probe"]["val_top1"] == pytest.approx(scores.top(1))  # the head of the network is the probe
    best = vitlab.load(run.model)
    assert best.labels == ["across", "down"]
    assert run.result["top1"] == pytest.approx(evaluate_classifier(best, ImageSet(data.val, best.preprocess)).top(1))
    assert any(weights in note and "you named it" in note for note in notes)
    assert sum(rung["kept"] for rung in run.result["rungs"]) == 1
    for name in ("report.html", "ladder.json", "log.jsonl"):
        assert (run.folder / name).stat().st_size > 0


def test_one_checkpoint_that_everything_takes(climbed, folder):
    run, _ = climbed
    image = str(next((folder / "down").iterdir()))
    (answer,) = vitlab.predict(run.model, image)
    assert {label for label, _ in answer.scores} == {"across", "down"}
    evaluated = vitlab.evaluate(run.model, str(folder))
    assert evaluated.scores is not None
    assert evaluated.scores.top(1) == pytest.approx(run.result["top1"])  # on the same images that chose it


class StopIn(Silent):
    """Ends the run in the middle of this: features, or the steps of this rung."""

    def __init__(self, what: str, at: int):
        super().__init__()
        self.what, self.at, self.rung = what, at, ""

    def count(self, what, done, total):
        if self.what in what and done >= self.at:
            raise KeyboardInterrupt

    def step(self, done, numbers):
        if self.what in self.rung and done == self.at:
            raise KeyboardInterrupt

    def note(self, text):
        super().note(text)
        if self.what in text and not self.at:
            raise KeyboardInterrupt
        self.rung = text if "passes over" in text else self.rung


@pytest.mark.parametrize(
    "what, at", [("features of train", 32), ("features of val", 1), ("linear probe", 0), ("LoRA", 3), ("whole", 2)]
)
def test_killed_and_resumed_ends_with_the_same_bits(climbed, folder, weights, tmp_path, monkeypatch, what, at):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    unbroken, _ = climbed
    settings = [f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}", *SMALL]
    with pytest.raises((KeyboardInterrupt, Stopped)):
        vitlab.train(folder, settings, show=StopIn(what, at))
    resumed = vitlab.train(resume=tmp_path / "run")
    ours, theirs = (load_file(run.model / "weights.safetensors") for run in (resumed, unbroken))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    timed = {"seconds", "images_per_second", "rungs", "start"}
    without = [{k: v for k, v in run.result.items() if k not in timed} for run in (resumed, unbroken)]
    assert without[0] == without[1]
    assert [r["val_top1"] for r in resumed.result["rungs"]] == [r["val_top1"] for r in unbroken.result["rungs"]]
    again = vitlab.train(resume=tmp_path / "run")  # nothing to resume
    assert again.result == resumed.result


def test_a_rung_that_is_stopped_says_how_to_resume_the_whole_run(folder, weights, tmp_path, monkeypatch):
    def stop(recipe, run, *rest, **more):
        raise Stopped(f"saved at step 3 of 9. Resume: vitlab train --resume {run}")

    monkeypatch.setattr("vitlab.training.ladder.fit_part", stop)
    with pytest.raises(Stopped) as stopped:
        vitlab.train(folder, [f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}", *SMALL])
    assert str(stopped.value) == f"saved at step 3 of 9. Resume: vitlab train --resume {tmp_path / 'run'}"


def test_settings_changed_on_resume_reach_the_rungs_that_are_not_finished(folder, weights, tmp_path):
    settings = [f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}", *SMALL]
    with pytest.raises((KeyboardInterrupt, Stopped)):
        vitlab.train(folder, settings, show=StopIn("whole", 2))
    vitlab.train(resume=tmp_path / "run", settings=["optim.clip=0.125"], changed=True)
    recipes = [read_recipe(tmp_path / "run" / "rungs" / name / "recipe.toml") for name in ("lora", "whole")]
    assert [recipe.optim.clip == 0.125 for recipe in recipes] == [False, True]
    assert read_recipe(tmp_path / "run" / "recipe.toml").optim.clip == 0.125


def test_a_resumed_run_is_the_run_that_was_begun(climbed, folder, weights, tmp_path):
    run, _ = climbed
    with pytest.raises(TrainingError, match="holds a run already"):
        vitlab.train(folder, [f"model.init_from={weights}", f"run.dir={run.folder}"])
    with pytest.raises(TrainingError, match=r"run\.seed: 1 -> 2"):
        vitlab.train(resume=run.folder, settings=["run.seed=2"])
    settings = [f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}", *SMALL]
    copy = stripes(tmp_path / "copy", count=12)
    with pytest.raises(KeyboardInterrupt):
        vitlab.train(copy, settings, show=StopIn("features of val", 1))
    (copy / "down").rename(copy / "up")
    with pytest.raises(TrainingError, match="only the run has down; only the data has up"):
        vitlab.train(resume=tmp_path / "run")
    (tmp_path / "run" / "ladder.json").write_text("{", encoding="utf-8")
    with pytest.raises(TrainingError, match=r"ladder\.json: is missing or damaged"):
        vitlab.train(resume=tmp_path / "run")


def test_what_cannot_climb_is_refused(folder, weights, tmp_path):
    with pytest.raises(UsageError, match=r"model\.init_from=auto is part of run\.ladder=true"):
        vitlab.train(folder, ["run.ladder=false", f"run.dir={tmp_path / 'run'}"])
    numbers = tmp_path / "numbers.csv"
    rows = [f"stripes/{image.parent.name}/{image.name},{i}" for i, image in enumerate(sorted(folder.rglob("*.png")))]
    (tmp_path / "stripes").symlink_to(folder)
    numbers.write_text("image,size\n" + "\n".join(rows), encoding="utf-8")
    show, settings = Silent(), ["data.target=size", "data.balance=loss", "data.allow_outside=true"]
    with pytest.raises(TrainingError, match="a number has none"):
        vitlab.train(numbers, [*settings, f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}"], show=show)
    assert not show.notes  # before anything is computed
    for setting in ("model.reducer=tome:r=1", "augment.flip_at_test=true"):
        with pytest.raises(TrainingError, match="is for a single run, not for the ladder"):
            vitlab.train(folder, [f"model.init_from={weights}", setting, f"run.dir={tmp_path / 'run'}"])
    with pytest.raises(TrainingError, match=r"run\.ladder=true is for objective\.name=supervised"):
        vitlab.train(folder, ["objective.name=mae", "model.init_from=bundled:mae", f"run.dir={tmp_path / 'run'}"])


def test_one_class_that_can_be_read_is_not_learned(weights, tmp_path):
    folder = stripes(tmp_path / "data", count=6)
    for image in (folder / "down").iterdir():
        image.write_bytes(b"not an image")
    with pytest.raises(TrainingError, match=r"only training images of 'across' can be read.* cannot be read, e\.g\."):
        vitlab.train(folder, [f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}", *SMALL])


def test_a_recipe_file_reaches_every_rung(climbed, folder, tmp_path):
    """What a file sets otherwise than the recipe of a folder; the recipe.toml of a run gives the same run."""
    mine = tmp_path / "mine.toml"
    mine.write_text(
        '[data]\nbalance = "loss"\n[optim]\nclip = 0.5\n[run]\nepochs = 30\nladder = true\n', encoding="utf-8"
    )
    assert sorted(own_values(mine)) == ['data.balance="loss"', "optim.clip=0.5"]  # 30 epochs are usual
    run, _ = climbed
    state = ladder_state.LadderState.read(run.folder)
    again = with_settings(Recipe(), own_values(run.folder / "recipe.toml"))
    assert again == with_settings(Recipe(), [*state.settings, f"data.source={folder}"])


def test_without_weights_a_bundled_model_and_a_new_network_compete(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    show = Silent()
    settings = [f"run.dir={tmp_path / 'run'}", *SMALL, "run.epochs=1", "model.depth=1", "model.image_size=16"]
    settings += ["model.width=32", "model.heads=2", "model.patch_size=8", "model.stochastic_depth=0"]
    run = vitlab.train(folder, settings, show=show)
    (said,) = [note for note in show.notes if "no trained weights" in note]
    assert "\n" not in said and "not in the local cache" in said.replace("wholly ", "")
    assert [rung["name"] for rung in run.result["rungs"]] == ["knn", "probe", "scratch"]
    assert any("started from bundled:dino" in note for note in show.notes)
    best = max(run.result["rungs"][1:], key=lambda rung: rung["val_top1"])
    assert run.result["val_top1"] >= best["val_top1"] - 0.1
    assert vitlab.load(run.model).labels == ["across", "down"]


# ------------------------------------------------------------------------------------------------------------- parts


@pytest.fixture(scope="module")
def clouds():
    random = np.random.default_rng(0)
    labels = random.permutation(np.repeat([0, 1, 2], [40, 30, 20]))
    centres = random.normal(0, 1.0, (3, 12))
    features = centres[labels] + random.normal(0, 1.3, (90, 12)) * random.uniform(0.1, 5, 12) + 3
    return torch.from_numpy(features).float(), torch.from_numpy(labels)


def test_the_probe_is_scikit_learns_on_standardised_features(clouds):
    features, labels = clouds
    probe = fit_probe(features, labels, 3)
    x = features.double().numpy()
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    folds = [(np.flatnonzero(ladder_folds(labels) != k), np.flatnonzero(ladder_folds(labels) == k)) for k in range(5)]
    losses = {}
    for strength in STRENGTHS:
        held = cross_val_predict(
            LogisticRegression(C=strength, max_iter=1000), x, labels.numpy(), cv=folds, method="predict_log_proba"
        )
        losses[strength] = -held[np.arange(90), labels.numpy()].mean()
        if strength == probe.strength:
            np.testing.assert_allclose(probe.held_out.numpy(), held, atol=1e-3)
    assert probe.strength == min(losses, key=losses.__getitem__)
    theirs = LogisticRegression(C=probe.strength, max_iter=1000).fit(x, labels.numpy())
    ours = probe.logits(features).log_softmax(dim=1).numpy()
    np.testing.assert_allclose(ours, theirs.predict_log_proba(x), atol=1e-3)


def ladder_folds(labels):
    from vitlab.training.probe import deal

    return deal(labels.numpy(), 0)


def test_two_classes_are_one_row_and_absent_ones_never_answer(clouds):
    features, labels = clouds
    two = labels < 2
    probe = fit_probe(features[two], labels[two], 4)  # of four classes, two have no image
    assert probe.logits(features).argmax(dim=1).max() < 2
    x = features[two].double().numpy()
    theirs = LogisticRegression(C=probe.strength, max_iter=1000).fit((x - x.mean(0)) / x.std(0), labels[two].numpy())
    ours = probe.logits(features[two])[:, :2].softmax(dim=1).numpy()
    np.testing.assert_allclose(ours, theirs.predict_proba((x - x.mean(0)) / x.std(0)), atol=1e-3)


@pytest.mark.parametrize("hits, n", [(0, 10), (131, 153), (153, 153), (1, 2), (9_000, 10_000)])
def test_the_interval_is_wilsons(hits, n):
    from scipy.stats import binomtest

    ours = uncertainty.accuracy(torch.arange(n) < hits)
    theirs = binomtest(hits, n).proportion_ci(method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert ours.value == hits / n and ours.images == n


def test_images_of_one_group_count_once():
    """Copies of independent images are worth no more than one each; groups that say nothing change nothing."""
    single = np.random.default_rng(0).random(60) < 0.7
    copies, groups = np.repeat(single, 5), np.repeat(np.arange(60), 5)
    assert uncertainty.effective_images(copies.astype(float), groups) == pytest.approx(59)  # 60, less one for the mean
    of_copies, of_one = uncertainty.accuracy(copies, groups), uncertainty.accuracy(single)
    assert (of_copies.low, of_copies.high) == pytest.approx((of_one.low, of_one.high), abs=2e-3)
    assert of_copies.images == 300 and uncertainty.accuracy(copies).low > of_one.low + 0.03
    alone = np.arange(300)
    assert uncertainty.effective_images(copies.astype(float), alone) == pytest.approx(299)
    all_right = uncertainty.accuracy(np.ones(300, dtype=bool), groups)  # how alike a group is cannot be seen: 60 images
    assert all_right.low == pytest.approx(uncertainty.wilson(1.0, 60)[0])


def test_a_group_gains_as_one_image_would():
    groups = np.repeat(np.arange(20), 5)
    old = torch.tensor([True] * 80 + [False] * 20)
    one_group = torch.cat([old[:80], torch.tensor([True] * 5), old[85:]])
    assert uncertainty.beats(one_group, old) and not uncertainty.beats(one_group, old, groups)  # 1 - 0 group
    every_group = torch.cat([old[:80], torch.tensor([True, False, False, False, False] * 4)])
    assert uncertainty.beats(every_group, old, groups)  # 4 - 0


def test_groups_are_drawn_complete():
    groups = np.array([7, 3, 7, 7, 3, 1])
    for rows in uncertainty.resamples(6, 50, 0, groups):
        drawn = np.bincount(rows, minlength=6)
        assert drawn[0] == drawn[2] == drawn[3] and drawn[1] == drawn[4] and drawn[[0, 1, 5]].sum() == 3


def test_a_tie_goes_to_the_simpler():
    old = torch.tensor([True] * 80 + [False] * 20)
    assert not uncertainty.beats(old, old)
    assert not uncertainty.beats(torch.cat([old[:79], torch.tensor([False, True, True]), old[82:]]), old)  # 2 - 1
    assert uncertainty.beats(torch.cat([old[:80], torch.tensor([True] * 2), old[82:]]), old)  # 2 - 0
    assert uncertainty.majority(np.array([0, 1, 1]), np.array([1, 0, 0, 0])) == 0.25


def test_more_labels_are_foreseen_where_the_error_falls_by_a_power():
    """Answers whose error is n^-0.5 by construction: the forecast for twice the labels is known."""
    classes, labels = ["a", "b"], np.arange(800) % 2
    truth = torch.arange(4000) % 2

    def answers(indices):
        error = len(indices) ** -0.5
        wrong = torch.arange(4000) < round(4000 * error)
        return torch.where(wrong, 1 - truth, truth)

    curve = uncertainty.learning_curve(answers, labels, classes, truth)
    assert curve is not None and curve.labels == [200, 400, 800] and curve.forecast_labels == 1600
    assert curve.forecast == pytest.approx(1 - 1600**-0.5, abs=2e-4)
    assert curve.low < curve.forecast < curve.high and "would help" in str(curve)
    assert uncertainty.learning_curve(lambda indices: truth, labels, classes, truth) is None  # no error to fall


def test_the_state_of_a_ladder_is_read_as_it_was_written(tmp_path):
    state = ladder_state.LadderState(["run.seed=1"], Start("hf-hub:a/b", "why", "mit", 3.5), ["x"], {"lora": "[run]"})
    state.write(tmp_path)
    assert ladder_state.LadderState.read(tmp_path) == state
    assert json.loads((tmp_path / "ladder.json").read_text(encoding="utf-8"))["start"]["licence"] == "mit"
