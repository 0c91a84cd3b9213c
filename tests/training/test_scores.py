"""What `vitlab eval` measures, against loops written from the definitions and against scikit-learn."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitlab
from vitlab.images.sources.splits import few_labels
from vitlab.training.evaluate import Scores, few_shot_accuracies, knn_accuracy, probe_accuracy


def scores(logits: torch.Tensor, labels: torch.Tensor, read: torch.Tensor | None = None) -> Scores:
    return Scores(logits, labels, torch.ones(len(labels), dtype=torch.bool) if read is None else read, 1.0)


def ece_by_loop(chances: list[list[float]], labels: list[int], M: int) -> float:
    """Eq. 3 of arXiv:1706.04599, sample by sample: sum over m of |B_m|/n |acc(B_m) - conf(B_m)|."""
    bins: list[list[tuple[bool, float]]] = [[] for _ in range(M)]
    for row, label in zip(chances, labels, strict=True):
        confidence = max(row)
        for m in range(1, M + 1):
            if (m - 1) / M < confidence <= m / M:
                bins[m - 1].append((row.index(confidence) == label, confidence))
    total = 0.0
    for members in bins:
        if members:
            accuracy = sum(right for right, _ in members) / len(members)
            mean = sum(confidence for _, confidence in members) / len(members)
            total += len(members) / len(labels) * abs(accuracy - mean)
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_calibration_error_is_that_of_the_definition(bins):
    torch.manual_seed(2)
    logits, labels = 3 * torch.randn(500, 7), torch.randint(7, (500,))
    chances = logits.double().softmax(1).tolist()
    assert scores(logits, labels).calibration_error(bins) == pytest.approx(ece_by_loop(chances, labels.tolist(), bins))


def test_a_confidence_on_an_edge_belongs_to_the_bin_below():
    """0.5 of ten bins lies in (0.4, 0.5], with 0.45, and not with 0.55."""
    chances = torch.tensor([[0.5, 0.25, 0.25], [0.45, 0.3, 0.25], [0.55, 0.25, 0.2]], dtype=torch.float64)
    labels = torch.tensor([1, 0, 0])
    found = scores(chances.log(), labels).calibration_error(10)
    assert found == pytest.approx(ece_by_loop(chances.tolist(), labels.tolist(), 10))
    assert found == pytest.approx((abs(1 - 0.95) + abs(1 - 0.55)) / 3)


def test_pictures_that_could_not_be_read_count_nowhere():
    torch.manual_seed(3)
    logits, labels = torch.randn(60, 6), torch.randint(6, (60,))
    read = torch.rand(60) > 0.3
    some, whole = scores(logits, labels, read), scores(logits[read], labels[read])
    for measure in (Scores.loss, Scores.calibration_error, Scores.per_class, Scores.confused):
        assert measure(some) == measure(whole)
    assert some.top(1) == whole.top(1) and some.top(5) == whole.top(5)


def test_the_most_confused_pairs():
    labels, answers = [0, 0, 0, 1, 1, 2, 2, 2, 2], [0, 2, 2, 1, 0, 1, 1, 1, 2]
    found = scores(F.one_hot(torch.tensor(answers), 4).float(), torch.tensor(labels))
    assert found.confused() == [(2, 1, 3), (0, 2, 2), (1, 0, 1)]
    assert found.per_class() == [1 / 3, 1 / 2, 1 / 4, None]  # the last class has no pictures


def clusters(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Five overlapping clouds on the unit sphere; double, so that near ties fall alike in both libraries."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    labels = torch.randint(5, (count,), generator=generator)
    points = centres[labels] + 1.5 * torch.randn(count, 12, generator=generator, dtype=torch.float64)
    return F.normalize(points, dim=1), labels


@pytest.mark.parametrize("k", [1, 7, 20, 1000])
def test_knn_is_scikit_learns(k):
    from sklearn.neighbors import KNeighborsClassifier

    known, asked = clusters(400, seed=1), clusters(301, seed=2)

    def weigh(distances: np.ndarray) -> np.ndarray:
        return np.exp((1 - distances) / 0.07)

    theirs = KNeighborsClassifier(min(k, 400), weights=weigh, metric="cosine").fit(*(t.numpy() for t in known))
    expected = theirs.score(*(t.numpy() for t in asked))
    assert 0.4 < expected < 0.99
    assert knn_accuracy(known, asked, k) == pytest.approx(expected)


def test_the_probe_is_scikit_learns_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    known, asked = clusters(200, seed=1), clusters(100, seed=2)
    theirs = LogisticRegression(C=10.0, max_iter=1000).fit(*(t.numpy() for t in known))
    assert probe_accuracy(known, asked) == theirs.score(*(t.numpy() for t in asked))


@pytest.mark.parametrize("shots", [1, 5])
def test_few_shots_are_scikit_learns_ridge_regression(shots):
    from sklearn.linear_model import RidgeClassifier

    known, asked = clusters(200, seed=1), clusters(100, seed=2)
    names = [str(i) for i in range(int(known[1].max()) + 1)]
    found = few_shot_accuracies(known, asked, names, shots, draws=3)
    for draw, accuracy in enumerate(found):
        few = few_labels(known[1].numpy(), names, draw, per_class=shots)
        x, y = known[0][few].double().numpy(), known[1][few].numpy()
        assert np.bincount(y).tolist() == [shots] * len(names)
        penalty = 0.1 * ((x - x.mean(axis=0)) ** 2).sum() / len(x)
        theirs = RidgeClassifier(alpha=penalty).fit(x, y)
        assert accuracy == pytest.approx(theirs.score(asked[0].double().numpy(), asked[1].numpy()))
    assert len(set(found)) > 1  # other pictures each time
    assert max(found) > 1.5 / len(names)


def test_eval_of_few_shots(checkpoint, command):
    asked = ["eval", checkpoint, "digits", "--few-shot", 5, "--draws", 4]
    found = json.loads(command(*asked, "--json").stdout)["few_shot"]
    assert len(found["draws"]) == 4 and found["shots"] == 5
    assert found["mean"] == pytest.approx(np.mean(found["draws"]))
    assert found["deviation"] == pytest.approx(np.std(found["draws"], ddof=1)) and found["deviation"] > 0
    shown = f"5 labels a class   {found['mean']:.2%} +- {found['deviation']:.2%} over 4 draws"
    assert shown in command(*asked).stdout
    assert "train holds only" in command("eval", checkpoint, "digits", "--few-shot", 1000, code=2).stderr
    assert "learn from train" in command(*asked, "--split", "train", code=2).stderr


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", depth=1)
    torch.nn.init.normal_(model.head.weight)
    model.labels = [str(i) for i in range(10)]
    return vitlab.save(model, tmp_path_factory.mktemp("model") / "digits")


def test_eval_shows_everything(checkpoint, command):
    text = command("eval", checkpoint, "digits", "--knn", "--probe").stdout
    found = json.loads(command("eval", checkpoint, "digits", "--knn", "--probe", "--json").stdout)
    for name, key in (
        ("top-1", "top1"),
        ("top-5", "top5"),
        ("k-NN on features", "knn"),
        ("linear probe", "linear_probe"),
    ):
        assert f"{name:18s} {found[key]:.2%}" in text
    assert f"calibration (ECE)  {found['ece']:.4f}" in text and "images/s, 357 images" in text
    confusion = np.array(found["confusion"])
    np.fill_diagonal(confusion, 0)
    worst = found["confused"][0]
    assert worst["images"] == confusion.max() == confusion[int(worst["truth"]), int(worst["answer"])]
    assert sum(pair["images"] for pair in found["confused"]) == confusion.sum()
    pairs = text.split("most often taken")[1].splitlines()[1]
    assert pairs.split() == [worst["truth"], worst["answer"], str(worst["images"])]
    assert np.array(found["confusion"]).sum() == found["images"] == 357 and found["images_per_second"] > 0


def test_batches_of_any_size_and_mirrored_scores(checkpoint, command):
    """A model that reads a row of pixels gives other scores for the mirror image; their mean is what --flip judges."""
    one, other = (
        json.loads(command("eval", checkpoint, "digits", "--json", "--batch-size", n).stdout) for n in (17, 256)
    )
    assert one["confusion"] == other["confusion"] and one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    flipped = json.loads(command("eval", checkpoint, "digits", "--json", "--flip").stdout)
    assert flipped["loss"] != pytest.approx(one["loss"], rel=1e-4)
    assert "is not known: use auto, cpu" in command("eval", checkpoint, "digits", "--device", "gpu9", code=2).stderr
