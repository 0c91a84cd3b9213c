"""The end of a run: the best model is evaluated on the test split, once; result.json and report.html are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vitlab.checkpoints import native
from vitlab.checkpoints.load import load
from vitlab.images.datasets import Dataset
from vitlab.models.base import Card, Network
from vitlab.training import targets
from vitlab.training.batches import ImageSet
from vitlab.training.clock import Clock
from vitlab.training.dense_scores import RegionScores
from vitlab.training.evaluate import Scores
from vitlab.training.job import TrainingJob
from vitlab.training.objectives.base import AnyScores
from vitlab.training.retrieval import Retrieval
from vitlab.training.run_report import FinishedRun, write_run_report
from vitlab.training.runlog import RunLog, to_json
from vitlab.training.state import Progress, explain_failed_save, save_best
from vitlab.training.target_scores import LabelScores, TargetScores
from vitlab.training.timelimit import report_deadline
from vitlab.training.uncertainty import accuracy, majority
from vitlab.training.unreadable import note_skipped

ANSWERS = "answers.safetensors"


def finish(job: TrainingJob, progress: Progress, log: RunLog | None, clock: Clock) -> dict[str, Any]:
    """Evaluate the best model on the test split, once; write result.json and the report."""
    split = "test" if job.data.test is not None else "val"
    best, scores, result = _evaluate_best(job, progress, log, split)
    if job.who.first:
        fewer = job.recipe.model.reducer
        started = "" if job.recipe.model.init_from is None else f", from {job.recipe.model.init_from}"
        source = f"vitlab train, {job.data.name}{started}{'' if fewer is None else f', with {fewer}'}"
        best.card = trained_card(best, source, card_metrics(split, job.objective.metric, scores))
        save_best(job.run, best)
        write_result(job.run, result, log, progress.step)
        image_set = ImageSet(_split(job, split), best.require_preprocess())
        taught = job.recipe if job.recipe.objective.name == "supervised" else None
        parts = (job.run, job.recipe, job.data, best, scores, image_set, result)
        write_run_report(FinishedRun(*parts, trained_by=taught, deadline=report_deadline(clock)))
    progress.finished = True
    job.save(progress)
    return result


def finish_rung(job: TrainingJob, progress: Progress, log: RunLog | None, clock: Clock) -> dict[str, Any]:
    """The end of a run that is part of a larger one: its answers to the validation split; test stays unseen."""
    _, scores, result = _evaluate_best(job, progress, log, "val")
    assert not isinstance(scores, Retrieval | RegionScores)  # no rung of a ladder
    if job.who.first:
        save_answers(job.run, scores)
        write_result(job.run, result, log, progress.step)
    progress.finished = True
    job.save(progress)
    return result


def _evaluate_best(
    job: TrainingJob, progress: Progress, log: RunLog | None, split: str
) -> tuple[Network, AnyScores, dict[str, Any]]:
    job.who.wait()
    best = load(job.who.local_folder(job.run / "best")).to(job.who.device)
    scores = job.objective.evaluate(best, ImageSet(_split(job, split), best.preprocess), final=True)
    note_skipped(scores.skipped, progress, log, progress.step)
    metric = scores.metric.lower() if isinstance(scores, TargetScores | RegionScores) else "top1"
    result = {
        "split": split,
        "objective": job.recipe.objective.name,
        "judged_by": job.objective.metric,
        **job.objective.results(scores),
        **certainty(scores, _split(job, split), job.data.train),
        f"val_{metric}": progress.best_top1,
        "best_epoch": progress.best_epoch + 1,
        "epochs": job.recipe.run.epochs,
        "steps": progress.step,
        "stopped_early": progress.step < job.plan.total,  # by run.minutes
        "seconds": progress.seconds,
        "images_per_second": progress.images / max(progress.seconds, 1e-9),
        "params": sum(p.numel() for p in best.parameters()),
        "seed": job.recipe.run.seed,
        "unreadable": len(progress.skipped),
    }
    return best, scores, result


def certainty(scores: AnyScores, evaluated: Dataset, train: Dataset) -> dict[str, Any]:
    """For result.json: the 95 % interval of the score, the images behind it, and a baseline: of classes always the most
    frequent one, of several labels a random order.
    """
    if isinstance(scores, Retrieval):
        return {}
    if isinstance(scores, RegionScores):
        return {"images": int(scores.read.sum())}
    if isinstance(scores, TargetScores):
        chance = {"baseline": scores.chance()} if isinstance(scores, LabelScores) else {}
        certain = {"interval": list(targets.interval(scores, evaluated.groups)), "images": int(scores.read.sum())}
        return {**certain, **chance}
    read = scores.read.numpy()
    groups = None if evaluated.groups is None else evaluated.groups[read]
    measured = accuracy((scores.predicted == scores.labels)[scores.read], groups)
    baseline = {"majority": majority(train.labels, scores.labels[scores.read].numpy())} if len(train) else {}
    return {"interval": [measured.low, measured.high], "images": measured.images, **baseline}


def _split(job: TrainingJob, split: str) -> Dataset:
    return job.data.val if split == "val" or job.data.test is None else job.data.test


def metric_name(split: str, metric: str) -> str:
    """The key of a metric in a model's card: test_knn_top1"""
    return f"{split}_{metric.lower().replace('-', '').replace(' ', '_')}"


def trained_card(model: Network, source: str, metrics: dict[str, float]) -> Card:
    """The card of a trained model; its name and licence are those of the weights that it started from."""
    started = model.card or Card()
    return Card(started.name or model.family, source, started.licence, metrics)


def card_metrics(split: str, metric: str, scores: AnyScores) -> dict[str, float]:
    """The metrics of a model's card; `metric`: the name of what `scores.top` is."""
    if isinstance(scores, TargetScores | RegionScores):
        return {metric_name(split, name): value for name, value in scores.numbers().items() if name != "loss"}
    return {metric_name(split, metric): scores.top(1)}


def save_answers(run: Path, scores: Scores | TargetScores) -> None:
    """The outputs for the validation images, beside the model that gave them."""
    logits = scores.outputs if isinstance(scores, TargetScores) else scores.logits
    with explain_failed_save(run):
        native.write_whole(run / ANSWERS, lambda path: save_file({"logits": logits, "read": scores.read}, path))


def write_result(run: Path, result: dict[str, Any], log: RunLog | None, step: int) -> None:
    with explain_failed_save(run):
        native.write_text(run / "result.json", to_json(result))
    if log is not None:
        log.write("result", step, **result)
