"""The end of a run: the best model is evaluated on the test split, once; result.json and report.html are written."""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

from vitlab.checkpoints import native
from vitlab.checkpoints.load import load
from vitlab.images.datasets import Captioned
from vitlab.models.base import Card
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import Scores
from vitlab.training.job import TrainingJob
from vitlab.training.recipe import to_toml
from vitlab.training.report import GalleryItem, RunReport, write_report
from vitlab.training.retrieval import Retrieval
from vitlab.training.runlog import RunLog, read_log, to_json
from vitlab.training.state import Progress, explain_failed_save, save_best
from vitlab.training.unreadable import note_skipped
from vitlab.version import __version__


def finish(job: TrainingJob, progress: Progress, log: RunLog | None) -> dict[str, Any]:
    """Evaluate the best model on the test split, once; write result.json and the report."""
    job.who.wait()
    best = load(job.run / "best").to(job.who.device)
    split = "test" if job.data.test is not None else "val"
    image_set = ImageSet(job.data.test or job.data.val, best.preprocess)
    scores = job.objective.evaluate(best, image_set, final=True)
    note_skipped(scores.skipped, progress, log, progress.step)
    result = {
        "split": split,
        "objective": job.recipe.objective.name,
        "judged_by": job.objective.metric,
        **job.objective.results(scores),
        "val_top1": progress.best_top1,
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
    if job.who.first:
        measured = f"{split}_{job.objective.metric.lower().replace('-', '').replace(' ', '_')}"  # test_knn_top1
        fewer = job.recipe.model.reducer
        source = f"vitlab train, {job.data.name}{'' if fewer is None else f', with {fewer}'}"
        best.card = Card(job.recipe.model.name, source, None, {measured: result["top1"]})
        save_best(job.run, best)
        with explain_failed_save(job.run):
            native.write_text(job.run / "result.json", to_json(result))
        if log is not None:
            log.write("result", progress.step, **result)
        write_run_report(job, scores, image_set, result)
    progress.finished = True
    job.save(progress)
    return result


def write_run_report(job: TrainingJob, scores: Scores | Retrieval, image_set: ImageSet, result: dict[str, Any]) -> None:
    """report.html, with the mistakes the model was surest of and the first images as samples."""
    if isinstance(scores, Retrieval):
        assert isinstance(image_set.data, Captioned)
        captions = image_set.data.captions
        chances, answers = scores.nearest()
        names, own = captions.everything(), lambda index: captions[index][0]
        right = scores.owner[answers] == torch.arange(len(answers))
    else:
        chances, answers = scores.logits.softmax(dim=1).max(dim=1)
        names, own = job.data.classes, lambda index: job.data.classes[int(scores.labels[index])]
        right = answers == scores.labels
    wrong = (~right & scores.read).nonzero()[:, 0]
    worst = wrong[chances[wrong].argsort(descending=True)][:24].tolist()

    def shown(index: int) -> GalleryItem:
        pixels, _, _ = image_set.take(np.array([index]))
        taken_for = names[int(answers[index])]
        return GalleryItem(
            image=pixels[0].permute(1, 2, 0).numpy(),
            truth=taken_for if right[index] else own(index),  # of an image's captions any is right
            predicted=taken_for,
            confidence=float(chances[index]),
            name=image_set.data.name_of(index),
        )

    samples = scores.read.nonzero()[:24, 0].tolist()
    report = RunReport(
        log=read_log(job.run),
        recipe_text=to_toml(job.recipe),
        result=result,
        classes=job.data.classes,
        confusion=None if isinstance(scores, Retrieval) else scores.confusion(),
        mistakes=[shown(i) for i in worst],
        samples=[shown(i) for i in samples],
        environment=environment(),
    )
    write_report(job.run, report)


def environment() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vitlab": __version__,
        "system": platform.platform(),
        "threads": str(torch.get_num_threads()),
    }
