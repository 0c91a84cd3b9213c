"""From a finished run to the contents of its report: which images it shows, and what its verdict rests on."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.images.datasets import Annotated, Captioned, Data
from vitlab.images.draw_regions import drawn
from vitlab.images.preprocess import Geometry
from vitlab.images.regions import RegionView
from vitlab.models.base import Network, evaluating
from vitlab.models.dense_network import DenseNetwork
from vitlab.training.batches import ImageSet
from vitlab.training.clock import Deadline
from vitlab.training.dense_answers import answers
from vitlab.training.dense_scores import RegionScores
from vitlab.training.evaluate import Scores
from vitlab.training.heat_maps import PASSES, heat_maps, heat_method
from vitlab.training.label_issues import LabelSuspect, sure_suspects
from vitlab.training.objectives.base import AnyScores
from vitlab.training.recipe import Recipe, to_toml
from vitlab.training.report import Evidence, GalleryItem, RunReport, Smoothing, write_report
from vitlab.training.report.html import both, name_html, percent
from vitlab.training.retrieval import Retrieval
from vitlab.training.runlog import read_log
from vitlab.training.target_scores import LabelScores, NumberScores, TargetScores
from vitlab.version import __version__

SHOWN = 24  # mistakes and samples
EXPLAINED = 6  # mistakes and successes with a heat map, each
FORWARD_PASSES = 2 * EXPLAINED * PASSES  # of one image, that the heat maps of a report cost
SUSPECTS = 12  # that are shown, half of them from the training images


@dataclass(frozen=True)
class HeldOut:
    """Training images, each as seen by a probe that was not fitted on it."""

    image_set: ImageSet
    indices: np.ndarray  # (n,): numbers in the image set
    log_probabilities: Tensor  # (n, K)


@dataclass(frozen=True)
class FinishedRun:
    """What a report is made of."""

    run: Path
    recipe: Recipe
    data: Data
    model: Network
    scores: AnyScores
    image_set: ImageSet  # the images of the scores
    result: dict[str, Any]
    log: list[dict[str, Any]] | None = None  # None: the run's own
    trained_by: Recipe | None = None  # that taught the model labels, step by step
    held_out: HeldOut | None = None
    deadline: Deadline = field(default_factory=Deadline)  # for images and heat maps


def write_run_report(run: FinishedRun) -> Path:
    """run/report.html"""
    report = RunReport(
        log=read_log(run.run) if run.log is None else run.log,
        recipe_text=to_toml(run.recipe),
        result=run.result,
        classes=run.data.classes,
        confusion=None,
        mistakes=[],
        samples=[],
        environment=environment(),
    )
    scores = run.scores
    if isinstance(scores, Retrieval):
        return write_report(run.run, _with_captions(report, run, scores))
    if isinstance(scores, TargetScores):
        return write_report(run.run, _with_targets(report, run, scores))
    if isinstance(scores, RegionScores):
        return write_report(run.run, _with_regions(report, run, scores))
    return write_report(run.run, _with_classes(report, run, scores))


def _with_captions(report: RunReport, run: FinishedRun, scores: Retrieval) -> RunReport:
    data = run.image_set.data
    assert isinstance(data, Captioned)
    captions = data.captions
    chances, answers = scores.nearest()
    right = scores.owner[answers] == torch.arange(len(answers))
    names = captions.everything()

    def shown(index: int) -> GalleryItem:
        answer = names[int(answers[index])]
        truth = answer if right[index] else captions[index][0]  # of an image's captions any is right
        return _item(run.image_set, index, truth, answer, float(chances[index]))

    return replace(
        report,
        mistakes=[shown(i) for i in run.deadline.while_it_fits(_worst(right, chances, scores.read))],
        samples=[shown(i) for i in run.deadline.while_it_fits(scores.read.nonzero()[:SHOWN, 0].tolist())],
    )


def _with_classes(report: RunReport, run: FinishedRun, scores: Scores) -> RunReport:
    probabilities = scores.logits.softmax(dim=1)
    chances, answers = probabilities.max(dim=1)
    right = answers == scores.labels
    classes, labels = run.data.classes, scores.labels
    suspects = _evaluated_suspects(probabilities, scores)
    contradicted = {suspect.image for suspect in suspects}

    def shown(index: int) -> GalleryItem:
        item = _item(
            run.image_set, index, classes[int(labels[index])], classes[int(answers[index])], float(chances[index])
        )
        return replace(item, remark=both("the label may be wrong", "标签可能有误")) if index in contradicted else item

    worst = _worst(right, chances, scores.read)
    typical = typical_successes(chances, right & scores.read, labels)
    fits = run.deadline.while_it_fits
    mistakes = [shown(i) for i in fits(worst)]
    heat = _heat(run, worst[: len(mistakes)][:EXPLAINED] + typical, answers)
    method = heat_method(run.model) if heat else None
    training = [] if run.held_out is None else sure_suspects(*_numbers(run.held_out))
    examined = int(scores.read.sum()) + (0 if run.held_out is None else len(run.held_out.indices))
    return replace(
        report,
        confusion=scores.confusion(),
        mistakes=[replace(item, heat=heat.get(i)) for i, item in zip(worst, mistakes, strict=False)],
        successes=[replace(shown(i), heat=heat.get(i)) for i in fits(typical)],
        suspects=_suspects_shown(run, training, suspects),
        samples=[shown(i) for i in fits(scores.read.nonzero()[:SHOWN, 0].tolist())],
        evidence=Evidence(
            str(run.run),
            classes[int(np.bincount(run.data.train.labels).argmax())] if len(run.data.train) else None,
            examined,
            len(training) + len(suspects),
            _rising(report.log),
        ),
        smoothing=None if run.trained_by is None else smoothing_of(run.trained_by, len(classes)),
        confidence=float(chances[scores.read].mean()),
        heat="" if method is None else method.title,
    )


def _with_targets(report: RunReport, run: FinishedRun, scores: TargetScores) -> RunReport:
    """For several labels or a number: the worst answers are those of the highest loss."""
    answers = label_answers(run, scores) if isinstance(scores, LabelScores) else number_answers(run, scores)
    wrong = (~answers.right & scores.read).nonzero()[:, 0]
    worst = wrong[answers.losses[wrong].argsort(descending=True)][:SHOWN].tolist()
    fits = run.deadline.while_it_fits
    mistakes = [answers.shown(i) for i in fits(worst)]
    heat = _heat(run, (worst[: len(mistakes)][:EXPLAINED] + answers.typical), answers.outputs)
    method = heat_method(run.model) if heat else None

    def explained(i: int, item: GalleryItem) -> GalleryItem:
        return replace(item, heat=heat[i], remark=answers.remark(i)) if i in heat else item

    return replace(
        report,
        mistakes=[explained(i, item) for i, item in zip(worst, mistakes, strict=False)],
        successes=[explained(i, answers.shown(i)) for i in fits(answers.typical)],
        samples=[answers.shown(i) for i in fits(scores.read.nonzero()[:SHOWN, 0].tolist())],
        evidence=Evidence(str(run.run)),
        heat="" if method is None else method.title,
    )


def _with_regions(report: RunReport, run: FinishedRun, scores: RegionScores) -> RunReport:
    """The worst images, then the first others: what is marked, and beside it what the model says."""
    fits, read = run.deadline.while_it_fits, np.flatnonzero(scores.read.numpy())
    worst = read[np.argsort(scores.of_images[read], kind="stable")][:EXPLAINED].tolist()
    others = [index for index in read.tolist() if index not in worst][:EXPLAINED]
    return replace(
        report,
        mistakes=[_marked_and_said(run, scores, i) for i in fits(worst)],
        samples=[_marked_and_said(run, scores, i) for i in fits(others)],
    )


def _marked_and_said(run: FinishedRun, scores: RegionScores, index: int) -> GalleryItem:
    model, image_set, data = run.model, run.image_set, run.image_set.data
    assert isinstance(model, DenseNetwork) and isinstance(data, Annotated)
    image, seen = data.read(index), image_set.preprocess.size
    size = (image.shape[0], image.shape[1])
    view = image_set.cut(image, RegionView(Geometry(size, seen, 0, 0), seen), data.name_of(index))
    with evaluating(model):
        output = model(image_set.normalise(view[None]).to(next(model.parameters()).device))
    said = answers(output, [size], seen, scores.kind)[0].above()
    pixels = scores.kind == "semantic"
    marked, answer = (drawn(image, r, classes=pixels) for r in (data.regions(index, size), said.regions()))
    text = f"{scores.of_image} {scores.of_images[index]:.2f}"
    return GalleryItem(marked, text, text, None, data.name_of(index), heat=answer)


@dataclass(frozen=True)
class TargetAnswers:
    """The answers of a model of several labels or of a number, as a report shows them."""

    losses: Tensor  # (N,)
    right: Tensor  # (N,) bool
    outputs: Tensor  # (N,): which output a heat map of the image explains
    typical: list[int]  # good answers
    shown: Callable[[int], GalleryItem]
    remark: Callable[[int], str]  # what its heat map explains, HTML


def label_answers(run: FinishedRun, scores: LabelScores) -> TargetAnswers:
    """A heat map explains the label that is the most wrong; where all are right, the surest that the image has."""
    present, truth, classes = scores.present, scores.labels > 0, run.data.classes
    losses = F.binary_cross_entropy_with_logits(scores.outputs, scores.labels.float(), reduction="none")  # (N, K)
    right = (present == truth).all(dim=1)
    wrong_label = losses.masked_fill(present == truth, -1.0).argmax(dim=1)
    sure_label = scores.outputs.masked_fill(~present, -math.inf).argmax(dim=1)
    outputs = torch.where(right, sure_label, wrong_label)
    chances = scores.probabilities.where(present, 1 - scores.probabilities).prod(dim=1)

    def names(row: Tensor) -> str:
        return ", ".join(classes[k] for k in row.nonzero()[:, 0].tolist()) or "none"

    def shown(i: int) -> GalleryItem:
        return _item(run.image_set, i, names(truth[i]), names(present[i]), float(chances[i]))

    def remark(i: int) -> str:
        label, name = int(outputs[i]), name_html(classes[int(outputs[i])])
        if right[i]:
            return both(f"map: {name}", f"热图：{name}")
        if truth[i, label]:
            return both(f"map: {name}, missed", f"热图：{name}，漏掉了")
        return both(f"map: {name}, wrongly given", f"热图：{name}，误报")

    has_label = right & scores.read & truth.any(dim=1)
    return TargetAnswers(
        losses.sum(dim=1), right, outputs, typical_successes(chances, has_label, sure_label), shown, remark
    )


def number_answers(run: FinishedRun, scores: TargetScores) -> TargetAnswers:
    """A heat map explains the number. The better half of the answers counts as good; some of it, from low to high."""
    assert isinstance(scores, NumberScores)
    values, expected = scores.predicted, scores.labels
    losses = (values - expected).abs()
    read = scores.read.nonzero()[:, 0]
    better = read[losses[read].argsort(stable=True)][: len(read) // 2]
    ordered = better[expected[better].argsort(stable=True)]
    places = np.unique(np.linspace(0, len(ordered) - 1, min(EXPLAINED, len(ordered))).astype(np.int64))

    def shown(i: int) -> GalleryItem:
        return _item(run.image_set, i, f"{float(expected[i]):.5g}", f"{float(values[i]):.5g}", None)

    nothing_right = torch.zeros(len(losses), dtype=torch.bool)  # of a number there is only more or less wrong
    typical = [int(ordered[place]) for place in places]
    return TargetAnswers(
        losses, nothing_right, torch.zeros(len(losses), dtype=torch.long), typical, shown, lambda i: ""
    )


def _worst(right: Tensor, chances: Tensor, read: Tensor) -> list[int]:
    wrong = (~right & read).nonzero()[:, 0]
    return wrong[chances[wrong].argsort(descending=True)][:SHOWN].tolist()


def typical_successes(chances: Tensor, right: Tensor, labels: Tensor, most: int = EXPLAINED) -> list[int]:
    """Right answers of middling confidence, of one class after another."""
    by_class = []
    for label in labels[right].unique().tolist():
        rows = (right & (labels == label)).nonzero()[:, 0]
        ordered = rows[(chances[rows] - chances[rows].median()).abs().argsort(stable=True)]
        by_class.append(ordered.tolist())
    rounds = max(map(len, by_class), default=0)
    return [rows[i] for i in range(rounds) for rows in by_class if i < len(rows)][:most]


def _heat(run: FinishedRun, indices: list[int], outputs: Tensor) -> dict[int, np.ndarray]:
    """Image -> the map of this output, as long as there is time."""
    outputs_match = run.model.classes == (len(run.data.classes) or 1)
    if not outputs_match or heat_method(run.model) is None:
        return {}
    maps = {}
    for index in run.deadline.while_it_fits(indices):
        pixels, _, _ = run.image_set.take(np.array([index]))
        maps[index] = heat_maps(run.model, run.image_set.normalise(pixels), [int(outputs[index])])[0]
    return maps


def _evaluated_suspects(probabilities: Tensor, scores: Scores) -> list[LabelSuspect]:
    """`image` counts all images, those that could not be read too."""
    rows = scores.read.nonzero()[:, 0].numpy()
    suspects = sure_suspects(probabilities[rows].double().numpy(), scores.labels[rows].numpy())
    return [replace(suspect, image=int(rows[suspect.image])) for suspect in suspects]


def _numbers(held_out: HeldOut) -> tuple[np.ndarray, np.ndarray]:
    labels = held_out.image_set.labels[torch.from_numpy(held_out.indices)]
    return held_out.log_probabilities.double().exp().numpy(), labels.numpy()


def _suspects_shown(run: FinishedRun, training: list[LabelSuspect], evaluated: list[LabelSuspect]) -> list[GalleryItem]:
    classes, items = run.data.classes, []
    split = {"val": ("validation image", "验证图片"), "test": ("test image", "测试图片")}[run.result["split"]]
    few = max(SUSPECTS // 2, SUSPECTS - len(evaluated))

    def add(image_set: ImageSet, index: int, suspect: LabelSuspect, where: tuple[str, str]) -> None:
        given = percent(suspect.given_confidence)
        remark = both(f"{where[0]}; the label has {given}", f"{where[1]}；给定标签只有 {given}")
        item = _item(image_set, index, classes[suspect.given], classes[suspect.suggested], suspect.confidence)
        items.append(replace(item, remark=remark))

    fits = run.deadline.while_it_fits
    for suspect in fits(training[:few] if run.held_out is not None else []):
        assert run.held_out is not None
        add(run.held_out.image_set, int(run.held_out.indices[suspect.image]), suspect, ("training image", "训练图片"))
    for suspect in fits(evaluated[: SUSPECTS - len(items)]):
        add(run.image_set, suspect.image, suspect, split)
    return items


def _item(image_set: ImageSet, index: int, truth: str, predicted: str, confidence: float | None) -> GalleryItem:
    normalised, _ = image_set.normalised(np.array([index]))
    image = np.asarray(image_set.preprocess.to_image(normalised[0]))
    return GalleryItem(image, truth, predicted, confidence, image_set.data.name_of(index))


def _rising(log: list[dict[str, Any]]) -> bool:
    """Whether the last evaluation of several is the best, and better than the one before by a point."""
    curve = [event["top1"] for event in log if event["kind"] == "val" and isinstance(event.get("top1"), float)]
    return len(curve) >= 3 and curve[-1] >= max(curve[:-1]) + 0.01


def smoothing_of(recipe: Recipe, classes: int) -> Smoothing:
    augment = recipe.augment
    return Smoothing(augment.smoothing, classes, augment.mixup > 0 or augment.cutmix > 0)


def environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vitlab": __version__,
        "system": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }
