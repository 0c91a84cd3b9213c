"""Several labels, numbers and balance: metrics, losses and probes against scikit-learn and closed forms; small runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import (
    average_precision_score,
    f1_score,
    log_loss,
    mean_absolute_error,
    precision_recall_curve,
    r2_score,
    root_mean_squared_error,
)
from sklearn.utils.class_weight import compute_class_weight
from starlette.testclient import TestClient

import vitlab
from vitlab.errors import CheckpointError, TrainingError, UsageError
from vitlab.export.loader import Exported
from vitlab.export.metadata import ExportMetadata, model_metadata
from vitlab.export.pipeline import export_model
from vitlab.export.verify import Comparison
from vitlab.images.datasets import TargetColumns, open_data, subset
from vitlab.images.sorting import SortedFolder
from vitlab.inference import sort_images, write_predictions
from vitlab.models.task import CLASSES, LabelTask, NumberTask
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import ServedModel
from vitlab.training import targets
from vitlab.training.batches import BalancedDraw, ImageSet, Plan, TrainingBatch
from vitlab.training.heat_maps import heat_maps
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.objectives import objective_class
from vitlab.training.objectives.base import MicroStep
from vitlab.training.probe import fit_probe
from vitlab.training.recipe import Recipe, from_tables
from vitlab.training.report.verdict import Evidence, verdict
from vitlab.training.run_report import FinishedRun, label_answers
from vitlab.training.runs import list_runs, main_table
from vitlab.training.target_scores import LabelScores, NumberScores, best_thresholds, headline

SMALL = {
    "model.init_from": "none",
    "model.name": "vit_digits",
    "model.channels": 3,
    "model.depth": 2,
    "model.stochastic_depth": 0.0,
    "data.workers": 0,
    "data.batch_size": 16,
    "augment.crop": "none",
    "augment.flip": False,
    "augment.randaugment": 0,
    "augment.mixup": 0.0,
    "augment.cutmix": 0.0,
    "augment.smoothing": 0.0,
    "optim.lr": 2e-3,
    "optim.warmup_epochs": 1,
    "run.ladder": False,
}


def random_labels(n=57, k=3, seed=0):
    """Outputs with ties, labels of unequal frequency, and one label that no image has."""
    random = np.random.default_rng(seed)
    labels = random.random((n, k + 1)) < [0.5, 0.15, 0.3, 0.0]
    outputs = np.round(random.normal(size=(n, k + 1)) + labels, 1)
    return torch.from_numpy(outputs).float(), torch.from_numpy(labels).float()


def test_average_precision_and_f1_are_sklearns():
    outputs, labels = random_labels()
    read = torch.ones(len(labels), dtype=torch.bool)
    read[[3, 8]] = False  # what cannot be read counts nowhere
    task = LabelTask(thresholds=(0.4, 0.55, 0.6, 0.5))
    scores = LabelScores(outputs, labels, read, 1.0, task=task)
    x, y = outputs[read].numpy(), labels[read].numpy()
    theirs = [average_precision_score(y[:, k], x[:, k]) for k in range(3)]
    assert scores.average_precisions()[:3] == pytest.approx(theirs)
    assert scores.average_precisions()[3] is None
    assert scores.mean_average_precision() == pytest.approx(np.mean(theirs))
    given = 1 / (1 + np.exp(-x.astype(np.float64))) >= task.thresholds
    for average in ("micro", "macro"):
        assert scores.f1(average) == pytest.approx(f1_score(y, given, average=average, zero_division=0.0))
    chances = 1 / (1 + np.exp(-x.astype(np.float64)))
    assert scores.loss() == pytest.approx(np.mean([log_loss(y[:, k], chances[:, k], labels=[0, 1]) for k in range(4)]))


def test_thresholds_reach_the_best_f1_of_the_precision_recall_curve():
    outputs, labels = random_labels(seed=3)
    thresholds = best_thresholds(outputs, labels)
    for k in range(3):
        precision, recall, _ = precision_recall_curve(labels[:, k], outputs[:, k])
        best = np.max(2 * precision * recall / np.maximum(precision + recall, 1e-12))
        given = outputs[:, k].double().sigmoid() >= thresholds[k]
        assert f1_score(labels[:, k], given) == pytest.approx(best)
    assert thresholds[3] == 0.5  # nobody has it


def test_errors_of_numbers_are_sklearns():
    random = np.random.default_rng(1)
    truth = random.normal(40, 9, 31)
    outputs = torch.from_numpy((truth - 38) / 7 + random.normal(0, 0.3, 31))[:, None]
    read = torch.ones(31, dtype=torch.bool)
    read[5] = False
    scores = NumberScores(outputs, torch.from_numpy(truth), read, 1.0, task=NumberTask(mean=38.0, std=7.0))
    predicted, truth = (outputs[:, 0].numpy() * 7 + 38)[read], truth[read]
    assert scores.mae() == pytest.approx(mean_absolute_error(truth, predicted))
    assert scores.rmse() == pytest.approx(root_mean_squared_error(truth, predicted))
    assert scores.r2() == pytest.approx(r2_score(truth, predicted))
    assert scores.loss() == pytest.approx(np.mean(((truth - predicted) / 7) ** 2))


@pytest.mark.parametrize("n", [40, 11])
def test_ridge_is_sklearns(n):
    random = np.random.default_rng(2)
    x, y = random.normal(3, 2, (n, 17)), random.normal(size=(n, 1))
    weight, bias = targets.ridge(x, y, 5.0)
    fitted = Ridge(alpha=5.0).fit(x, y)
    np.testing.assert_allclose(weight, fitted.coef_.reshape(1, -1), rtol=1e-8)
    np.testing.assert_allclose(bias, fitted.intercept_, rtol=1e-8)


def test_probe_of_a_number_is_ridge_on_standardised_features():
    random = np.random.default_rng(3)
    x = random.normal(2, [1, 5, 0.1, 3, 1], (90, 5))
    y = x @ [1, 0.2, -8, 0, 0.5] + random.normal(0, 0.5, 90) + 100
    task = NumberTask(mean=float(y.mean()), std=float(y.std()))
    probe = targets.fit_target_probe(torch.from_numpy(x), torch.from_numpy(y), task)
    standard = (x - x.mean(0)) / x.std(0)
    fitted = Ridge(alpha=probe.strength).fit(standard, y)
    ours = task.scores(probe.logits(torch.from_numpy(x).float()))[:, 0]
    np.testing.assert_allclose(ours, fitted.predict(standard), rtol=1e-5)
    assert 0.5 < np.corrcoef(probe.held_out[:, 0], y)[0, 1] < np.corrcoef(ours, y)[0, 1]  # not fitted on themselves


@pytest.mark.parametrize("balanced", [False, True])
def test_probe_of_labels_is_logistic_regression(balanced):
    random = np.random.default_rng(4)
    x = random.normal(1, 2, (80, 6))
    y = np.stack([x[:, 0] + random.normal(size=80) > 1, x[:, 1] - x[:, 2] > 3], axis=1)
    probe = targets.fit_target_probe(torch.from_numpy(x), torch.from_numpy(y).float(), LabelTask(), balanced=balanced)
    standard = (x - x.mean(0)) / x.std(0)
    for k in range(2):
        weights = "balanced" if balanced else None
        fitted = LogisticRegression(C=probe.strength, max_iter=1000, class_weight=weights).fit(standard, y[:, k])
        ours = probe.logits(torch.from_numpy(x).float())[:, k]
        np.testing.assert_allclose(ours, fitted.decision_function(standard), atol=2e-3)


def test_balanced_probe_of_classes_is_sklearns():
    random = np.random.default_rng(5)
    y = np.repeat([0, 1, 2], [60, 9, 15])
    x = random.normal(size=(84, 4)) + y[:, None] * [0.8, 0, -0.5, 0]
    probe = fit_probe(torch.from_numpy(x), torch.from_numpy(y), 3, strength=0.1, balanced=True)
    standard = (x - x.mean(0)) / x.std(0)
    fitted = LogisticRegression(C=0.1, max_iter=1000, class_weight="balanced").fit(standard, y)
    ours = probe.logits(torch.from_numpy(x).float()).softmax(1)
    np.testing.assert_allclose(ours, fitted.predict_proba(standard), atol=1e-3)


def test_intervals_are_scipys_bootstrap():
    from scipy.stats import bootstrap

    random = np.random.default_rng(0)
    truth = random.random(300)
    values = truth + 0.1 * random.standard_normal(300)
    numbers = NumberScores(
        torch.tensor(values)[:, None], torch.tensor(truth), torch.ones(300).bool(), 0.0, task=NumberTask()
    )
    theirs = bootstrap((truth, values), r2_score, paired=True, vectorized=False, method="percentile", n_resamples=400)
    low, high = targets.interval(numbers)
    assert (low, high) == pytest.approx(tuple(theirs.confidence_interval), abs=0.02) and low < numbers.value < high
    labels = (random.random((200, 2)) < 0.4).astype(np.float32)
    outputs = labels + random.standard_normal((200, 2)).astype(np.float32)
    scores = LabelScores(torch.tensor(outputs), torch.tensor(labels), torch.ones(200).bool(), 0.0, task=LabelTask())

    def mean_precision(rows):
        return average_precision_score(labels[rows.astype(int)], outputs[rows.astype(int)])

    rows = np.arange(200)
    theirs = bootstrap((rows,), mean_precision, vectorized=False, method="percentile", n_resamples=400)
    assert targets.interval(scores) == pytest.approx(tuple(theirs.confidence_interval), abs=0.03)
    copies = np.repeat(np.arange(50), 4)  # drawn together, they are worth fewer images
    alike = replace(scores, outputs=scores.outputs[copies], labels=scores.labels[copies])
    assert np.diff(targets.interval(alike, copies)) > 1.5 * np.diff(targets.interval(alike))


def test_one_number_has_errors_and_no_r2(recwarn):
    scores = NumberScores(torch.tensor([[1.0]]), torch.tensor([3.0]).double(), torch.tensor([True]), 0.0)
    low, high = targets.interval(scores)
    assert np.isnan([low, high, scores.value]).all() and not recwarn.list
    numbers = {**scores.numbers(), "interval": [low, high], "images": 1, "split": "val", "judged_by": "R2"}
    assert headline(numbers) == "MAE 2, RMSE 2"
    page = verdict(numbers, Evidence())
    assert "off by <b>2</b>" in page and "nan" not in page and "label more images to measure it with" in page


@pytest.mark.parametrize(
    "changes, says",
    [
        ({}, "ready to use</b>: <code>vitlab predict runs/x/best"),
        ({"interval": [0.2, 0.9]}, "not surely better than not looking"),
        ({"interval": [0.6, 0.9]}, "whether its mAP is 60.0 % or 90.0 %"),
        ({"stopped_early": True}, "train longer"),
    ],
)
def test_the_verdict_on_labels_says_against_what_and_what_next(changes, says):
    random = np.random.default_rng(0)
    truth = random.random((4000, 3)) < [0.1, 0.3, 0.5]
    guesses = torch.from_numpy(random.normal(size=truth.shape))
    scores = LabelScores(guesses, torch.from_numpy(truth).float(), torch.ones(4000).bool(), 0.0)
    assert scores.chance() == pytest.approx(0.3, abs=0.02) == pytest.approx(scores.value, abs=0.03)  # random order
    result = {"split": "test", "judged_by": "mAP", "images": 4000, "map": 0.8, "f1_micro": 0.7, "f1_macro": 0.6}
    result |= {"interval": [0.78, 0.82], "baseline": scores.chance(), **changes}
    page = verdict(result, Evidence("runs/x"))
    assert says in page and "a random order would have" in page


def test_a_model_beats_another_by_more_than_noise():
    random = np.random.default_rng(6)
    truth = torch.from_numpy(random.normal(size=200))
    read, task = torch.ones(200, dtype=torch.bool), NumberTask()

    def answers(noise, seed):
        errors = torch.from_numpy(np.random.default_rng(seed).normal(0, noise, 200))
        return NumberScores((truth + errors)[:, None], truth, read, 1.0, task=task)

    assert targets.beats(answers(0.3, 1), answers(0.6, 2)) and not targets.beats(answers(0.6, 2), answers(0.3, 1))
    assert not targets.beats(answers(0.5, 1), answers(0.5, 1))  # a tie goes to the simpler
    labels = (truth > 0.5).float()[:, None]
    good = LabelScores(answers(0.2, 3).outputs - 0.5, labels, read, 1.0, task=LabelTask())
    bad = replace(good, outputs=answers(2.0, 4).outputs)
    assert targets.beats(good, bad) and not targets.beats(bad, good)


# ------------------------------------------------------------------------------------------------------------- balance


def test_balanced_draws_have_the_frequencies_of_equal_classes():
    groups = np.repeat([0, 1, 2], [900, 80, 20])
    draw, epochs = BalancedDraw(groups), 5
    orders = [draw.epoch(7, epoch) for epoch in range(epochs)]
    n = epochs * len(groups)
    counts = np.bincount(groups[np.concatenate([order for order, _ in orders])])
    assert np.abs(counts - n / 3).max() < 4 * np.sqrt(n * (1 / 3) * (2 / 3))  # 4 standard deviations of a binomial
    rare = np.bincount(np.concatenate([order for order, _ in orders]), minlength=1000)[980:]
    assert np.abs(rare - n / 60).max() < 4 * np.sqrt(n / 60)
    assert not np.array_equal(orders[0][0], orders[1][0])
    for order, repeat in orders:  # the second draw of an image in an epoch is another view of it
        for image in np.unique(order)[-5:]:
            assert repeat[order == image].tolist() == list(range(int((order == image).sum())))


def test_a_balanced_plan_depends_on_nothing_but_seed_and_step():
    groups = np.repeat([0, 1], [50, 7])
    plan = Plan(n=57, batch_size=10, epochs=3, seed=3, repeats=2, balanced=BalancedDraw(groups))
    again = replace(plan, balanced=BalancedDraw(groups))
    forwards = [plan.take(step, 0) for step in range(plan.total)]
    backwards = [again.take(step, 0) for step in reversed(range(plan.total))][::-1]
    for (a, b, c), (d, e, f) in zip(forwards, backwards, strict=True):
        assert a == d and np.array_equal(b, e) and np.array_equal(c, f)
    for epoch in range(3):  # no view of an image comes twice
        views = [(i, r) for e, images, repeats in forwards if e == epoch for i, r in zip(images, repeats, strict=True)]
        assert len(set(views)) == len(views)
    parts = [replace(plan, world=2, rank=rank, batch_size=5) for rank in (0, 1)]
    assert np.array_equal(np.concatenate([part.take(1, 0)[1] for part in parts]), plan.take(1, 0)[1])


def job_of(tables, folder, data=None):
    return prepare(from_tables(tables), folder, data)


def tables_of(source, **more):
    tables: dict = {}
    for key, value in {**SMALL, "data.source": str(source), **more}.items():
        group, _, name = key.partition(".")
        tables.setdefault(group, {})[name] = value
    return tables


def test_class_weights_are_sklearns_and_the_loss_is_torchs(tmp_path):
    data = open_data("digits")
    keep = np.flatnonzero((data.train.labels > 2) | (np.arange(len(data.train)) % 7 == 0))
    data = replace(data, train=subset(data.train, keep))
    tables = tables_of("digits", **{"data.balance": "loss", "model.channels": 1})
    job = job_of(tables, tmp_path, data)
    theirs = compute_class_weight("balanced", classes=np.arange(10), y=data.train.labels)
    np.testing.assert_allclose(job.objective.class_weights, theirs, rtol=1e-6)
    batch = job.steps[0, 0]
    job.model.eval()
    with torch.no_grad():
        logits = job.model(batch.images)
        loss, _ = job.objective.loss(job.model, job.objective.inputs(batch, MicroStep(0, 0)))
    weights = torch.from_numpy(theirs).float()
    expected = F.cross_entropy(logits, batch.labels, weight=weights, reduction="sum") / len(batch.labels)
    torch.testing.assert_close(loss, expected)
    chances = logits.double().softmax(1)
    weighted = log_loss(batch.labels, chances, sample_weight=theirs[batch.labels], labels=range(10))
    assert float(loss) == pytest.approx(weighted * theirs[batch.labels].mean(), rel=1e-4)


class StopAt(Silent):
    def __init__(self, step):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            raise Stopped


def test_balanced_sampling_resumes_to_the_bit(tmp_path):
    tables = tables_of("digits", **{"data.balance": "sampling", "model.channels": 1, "data.per_class": 7})
    tables["run"] |= {"epochs": 3, "save_every": 2, "eval_every": 3}
    tables["augment"]["crop"] = "padded"
    recipe = from_tables(tables)
    fit(recipe, tmp_path / "straight")
    with pytest.raises(Stopped):
        fit(recipe, tmp_path / "killed", show=StopAt(7))
    fit(recipe, tmp_path / "killed", resume=True)
    a, b = (load_file(tmp_path / name / "last" / "weights.safetensors") for name in ("straight", "killed"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_balance_is_refused_where_it_means_nothing(tmp_path, table):
    with pytest.raises(TrainingError, match=r"data\.balance=sampling needs classes or labels"):
        more = {"data.balance": "sampling", "data.target": "level", "objective.name": "regression"}
        job_of(tables_of(table, **more), tmp_path)
    with pytest.raises(TrainingError, match=r"data\.balance=loss is not for objective\.name=mae"):
        objective_class("mae").check(from_tables({"data": {"balance": "loss"}, "objective": {"name": "mae"}}))


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of 8 x 8 pixels: a red square or a green bar, or both, or neither, on a blue of some level."""
    folder = tmp_path_factory.mktemp("targets")
    random, lines, numbers = np.random.default_rng(0), ["image,split,labels"], ["image,level,split"]
    for n in range(150):
        red, bar, level = random.random() < 0.4, random.random() < 0.3, random.uniform(20, 200)
        image = np.full((8, 8, 3), 60.0)
        image[..., 2] = level
        image[1:4, 1:4, 0] += 170 * red
        image[:, 6, 1] += 180 * bar
        image += random.normal(0, 8, image.shape)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{n}.png")
        split = "train" if n < 96 else "val" if n < 124 else "test"
        lines.append(f"{n}.png,{split},{';'.join(['red'] * red + ['bar'] * bar)}")
        numbers.append(f"{n}.png,{500 + 3 * level!r},{split}")
    (folder / "tags.csv").write_text("\n".join(lines), encoding="utf-8")
    (folder / "levels.csv").write_text("\n".join(numbers), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def table(folder):
    return folder / "levels.csv"


@pytest.fixture(scope="module")
def labels_run(folder, tmp_path_factory):
    run = tmp_path_factory.mktemp("labels") / "run"
    return vitlab.train(folder / "tags.csv", {**SMALL, "run.epochs": 6, "optim.ema": 0.5, "run.dir": str(run)})


@pytest.fixture(scope="module")
def number_run(table, tmp_path_factory):
    run = tmp_path_factory.mktemp("number") / "run"
    return vitlab.train(table, {**SMALL, "run.epochs": 6, "data.target": "level", "run.dir": str(run)})


def test_binary_cross_entropy_and_its_gradient_in_closed_form(folder, tmp_path):
    tables = tables_of(folder / "tags.csv", **{"objective.name": "multilabel", "augment.smoothing": 0.2})
    objective = job_of(tables, tmp_path).objective
    batch = objective.data.train.labels[:5]
    outputs = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    images = torch.zeros(5, 3, 8, 8)
    given = TrainingBatch(images, torch.from_numpy(batch).float(), torch.arange(5))
    inputs = objective.inputs(given, MicroStep(0, 0))
    t = inputs["targets"].double()
    np.testing.assert_allclose(t, 0.8 * batch + 0.1, rtol=1e-6)
    loss, _ = objective.loss(lambda images, reducer: outputs, {**inputs, "targets": t})
    loss.backward()
    p = outputs.detach().sigmoid()
    torch.testing.assert_close(loss.detach(), -(t * p.log() + (1 - t) * (1 - p).log()).mean())
    torch.testing.assert_close(outputs.grad, (p - t) / 10)


def test_labels_are_learned_and_travel_with_the_model(labels_run, folder):
    result = labels_run.result
    assert result["objective"] == "multilabel" and result["judged_by"] == "mAP"
    assert result["map"] > 0.9 and result["f1_micro"] > 0.8
    model = vitlab.load(labels_run.model)
    assert model.labels == ["bar", "red"] and isinstance(model.task, LabelTask) and len(model.task.thresholds) == 2
    evaluation = vitlab.evaluate(labels_run.model, folder / "tags.csv")
    assert evaluation.to_dict()["map"] == pytest.approx(result["map"])
    val = vitlab.evaluate(labels_run.model, folder / "tags.csv", split="val").scores
    read = val.outputs[val.read], val.labels[val.read]
    assert model.task.thresholds == pytest.approx(best_thresholds(*read), abs=1e-5)  # those of the averaged weights
    data = open_data(str(folder / "tags.csv"))
    paths = [data.test.name_of(i) for i in range(len(data.test))]
    scores = evaluation.scores
    for i, prediction in enumerate(vitlab.predict(labels_run.model, paths, top=1)):
        expected = {model.labels[k]: float(scores.probabilities[i, k]) for k in scores.present[i].nonzero()[:, 0]}
        assert dict(prediction.scores) == pytest.approx(expected, abs=1e-5)


def test_numbers_are_learned_in_their_units(number_run, table):
    result = number_run.result
    assert result["objective"] == "regression" and result["r2"] > 0.8 and result["mae"] < 80
    data = open_data(str(table), columns=TargetColumns(target="level"))
    model = vitlab.load(number_run.model)
    assert model.task == NumberTask(mean=float(data.train.labels.mean()), std=float(data.train.labels.std()))
    paths = [data.test.name_of(i) for i in range(len(data.test))]
    values = [prediction.value for prediction in vitlab.predict(model, paths)]
    assert mean_absolute_error(data.test.labels, values) == pytest.approx(result["mae"], rel=1e-4)
    assert vitlab.evaluate(number_run.model, table).to_dict()["r2"] == pytest.approx(result["r2"], rel=1e-4)
    with pytest.raises(UsageError, match="gives a number"):
        vitlab.evaluate(number_run.model, "digits")
    predictions = vitlab.predict(model, [*paths, table.with_name("none.png")])
    write_predictions(predictions, number_run.folder / "answers.csv")
    rows = list(csv.reader((number_run.folder / "answers.csv").read_text(encoding="utf-8").splitlines()))
    assert rows[0] == ["image", "level", "error"] and "none.png" in rows[-1][2] and rows[-1][1] == ""
    assert [float(row[1]) for row in rows[1:-1]] == values
    with pytest.raises(UsageError, match="--sort needs classes"):
        sort_images(predictions, SortedFolder(number_run.folder / "sorted", paths))
    assert "largest errors first" in number_run.report.read_text(encoding="utf-8")


def test_exported_files_answer_alike(labels_run, number_run, folder, tmp_path):
    images, path = [folder / f"{n}.png" for n in (130, 131, 132)], tmp_path / "level.pt2"
    export_model(number_run.model, path, compare=Comparison(images=16))
    for a, b in zip(vitlab.predict(number_run.model, images), vitlab.predict(path, images), strict=True):
        assert b.quantity == "level" and a.value == pytest.approx(b.value, rel=1e-4)
    model = vitlab.load(labels_run.model)
    written = model_metadata(model, "logits").to_json()
    exported = Exported(model, ExportMetadata.from_json(written, path), path)  # the file's words, the model's outputs
    assert exported.task == model.task
    assert [p.scores for p in vitlab.predict(exported, images)] == [p.scores for p in vitlab.predict(model, images)]


def test_other_libraries_formats_are_refused(number_run, labels_run, tmp_path):
    for run in (number_run, labels_run):
        with pytest.raises(UsageError, match="which the formats of other libraries cannot say"):
            vitlab.convert(run.model, tmp_path / "out", to="hf")


def test_damaged_tasks_are_refused(labels_run, number_run, tmp_path):
    model = vitlab.load(labels_run.model)
    model.task = LabelTask(thresholds=(0.5,))
    with pytest.raises(CheckpointError, match="1 thresholds for 2 labels"):
        vitlab.save(model, tmp_path / "few")
    model.task = NumberTask()
    with pytest.raises(CheckpointError, match="1 output, not 2"):
        vitlab.save(model, tmp_path / "number")
    card = json.loads((number_run.model / "model.json").read_text(encoding="utf-8"))
    assert card["format"] == 2  # a vitlab of before says that it is too old, and does not answer with a softmax
    assert json.loads((labels_run.model / "model.json").read_text(encoding="utf-8"))["task"]["kind"] == "labels"
    assert vitlab.load("bundled:digits").task == CLASSES  # a checkpoint of before


def test_a_head_for_another_task_is_new(number_run, labels_run, folder, tmp_path):
    tables = tables_of(folder / "tags.csv", **{"objective.name": "multilabel"})
    tables["model"] = {"init_from": str(number_run.model)}
    job = job_of(tables, tmp_path)
    assert isinstance(job.model.task, LabelTask) and job.model.labels == ["bar", "red"]
    assert any("a new head for 2 labels" in note for note in job.notes)
    tables["model"] = {"init_from": str(labels_run.model)}
    assert any("its head for the same 2 labels" in note for note in job_of(tables, tmp_path).notes)
    with pytest.raises(TrainingError, match=r"objective\.name=multilabel"):
        job_of(tables_of(folder / "tags.csv"), tmp_path)


def test_ladder_of_labels_and_numbers(labels_run, number_run, folder, table, tmp_path):
    settings = ["run.ladder=true", f"model.init_from={labels_run.model}", "data.workers=0", "run.epochs=1"]
    result = vitlab.train(table, [*settings, "data.target=level", f"run.dir={tmp_path / 'number'}"]).result
    assert result["rungs"][0]["name"] == "probe" and result["judged_by"] == "R2"
    kept = next(rung for rung in result["rungs"] if rung["kept"])
    assert kept["val_r2"] >= result["rungs"][0]["val_r2"]
    assert kept["interval"][0] <= kept["val_r2"] <= kept["interval"][1]
    assert [row["r2"] for row in main_table(list_runs(tmp_path).runs)] == [result["r2"]]
    best = vitlab.load(tmp_path / "number" / "best")
    assert isinstance(best.task, NumberTask)
    assert vitlab.evaluate(tmp_path / "number" / "best", table).to_dict()["mae"] == pytest.approx(
        result["mae"], rel=1e-3
    )
    result = vitlab.train(folder / "tags.csv", [*settings, f"run.dir={tmp_path / 'labels'}"]).result
    assert result["map"] > 0.9 and len(vitlab.load(tmp_path / "labels" / "best").task.thresholds) == 2


def test_server_answers_with_labels_and_numbers(labels_run, number_run, folder):
    runs = {"tags": labels_run, "level": number_run}
    models = [ServedModel(name, vitlab.load(run.model)) for name, run in runs.items()]
    image = folder / "131.png"
    with TestClient(create_app(models), "http://127.0.0.1:8000") as client:
        answers = {}
        for name in ("tags", "level"):
            response = client.post("/predict", params={"model": name}, files={"image": image.read_bytes()})
            assert response.status_code == 200, response.text
            answers[name] = response.json()
    expected = vitlab.predict(labels_run.model, image)[0].scores
    assert [(s["label"], pytest.approx(s["probability"], abs=1e-5)) for s in answers["tags"]["scores"]] == expected
    number = vitlab.predict(number_run.model, image)[0]
    assert answers["level"]["target"] == "level" and answers["level"]["scores"] == []
    assert answers["level"]["value"] == pytest.approx(number.value, rel=1e-5)


def test_reports_of_labels_and_numbers_show_heat_maps_of_what_was_wrong(labels_run, number_run):
    pages = [(run.folder / "report.html").read_text(encoding="utf-8") for run in (labels_run, number_run)]
    assert all(page.count(": heat map") >= 1 for page in pages)
    assert "raised the number" in pages[1]
    assert "map: " in pages[0] and "From the better half of the answers" in pages[1]


def test_the_label_explained_is_the_one_that_is_most_wrong(labels_run, folder):
    model = vitlab.load(labels_run.model)
    data = open_data(str(folder / "tags.csv"), val_fraction=0.3)
    images, truth = ImageSet(data.val, model.require_preprocess()), torch.from_numpy(data.val.labels).float()
    n = len(truth)
    outputs = 4 * torch.randn(n, 2, generator=torch.Generator().manual_seed(1))
    scores = LabelScores(outputs, truth, torch.ones(n, dtype=torch.bool), 0.0, task=LabelTask(thresholds=(0.5, 0.5)))
    run = FinishedRun(labels_run.folder, Recipe(), data, model, scores, images, labels_run.result)
    answers = label_answers(run, scores)
    for i in range(n):
        wrong = {k: abs(float(outputs[i, k])) for k in (0, 1) if bool(outputs[i, k] > 0) != bool(truth[i, k])}
        assert bool(answers.right[i]) == (not wrong)
        if wrong:
            k = max(wrong, key=lambda k: wrong[k])
            assert int(answers.outputs[i]) == k
            assert ("missed" if truth[i, k] else "wrongly given") in answers.remark(i)
    heat = heat_maps(model, images.normalise(images.take(np.array([0]))[0]), [int(answers.outputs[0])])
    assert heat[0].ndim == 3
