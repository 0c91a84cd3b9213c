"""A run that must end in time: run.minutes, less the time for evaluation and the report."""

from __future__ import annotations

import time

import numpy as np

from vitlab.images.datasets import subset
from vitlab.training.batches import ImageSet
from vitlab.training.job import TrainingJob
from vitlab.training.run_report import FORWARD_PASSES

SLACK = 1.5  # evaluation may take this much longer than it took before
MARGIN = 0.02  # of the time, for starting and leaving Python
BUSY = 0.15  # of the time: the most that is kept for a slow end where others use the machine too
SAMPLE = 256  # images that are evaluated to time one


def wrap_up_seconds(params: int) -> float:
    """All besides training and evaluation: last and best are written, best is read again, the report is made."""
    return 2.0 + params / 2e6


class TimeLimit:
    """The clock of one run. `since` is when this part of the run began, `before` what earlier parts took."""

    def __init__(self, job: TrainingJob, since: float, before: float):
        self.seconds, self.since = (1 - MARGIN) * 60 * job.recipe.run.minutes, since - before
        data, who = job.data, job.who
        few = np.arange(min(len(data.val), SAMPLE * who.world))
        began, computed = time.perf_counter(), time.process_time()
        image_set = ImageSet(subset(data.val, few), job.val.preprocess)
        job.objective.evaluate(job.evaluated_model, image_set)
        taken, computed = time.perf_counter() - began, time.process_time() - computed
        per_image = taken / job.objective.images_evaluated(len(few))
        busy = max(1.0, taken / max(computed, 1e-3))  # where others use the machine too, all takes so much longer
        self.evaluation = per_image * job.objective.images_evaluated(len(data.val))
        self.ending = per_image * job.objective.images_evaluated(len(data.test or data.val), final=True)
        self.ending += per_image * FORWARD_PASSES
        alone = wrap_up_seconds(sum(p.numel() for p in job.model.parameters()))
        self.wrap_up = max(alone, min(busy * alone, BUSY * self.seconds))
        self.evaluation_began: float | None = None

    def near(self, began: float, evaluates: bool) -> bool:
        """Whether no further step fits. The last began at `began`; `evaluates`: an evaluation follows."""
        if self.evaluation_began is not None:  # where evaluation takes longer than expected, so will the end
            slower = max(1.0, (began - self.evaluation_began) / self.evaluation)
            self.evaluation, self.ending = self.evaluation * slower, self.ending * slower
        now = time.perf_counter()
        self.evaluation_began = now if evaluates else None
        rest = SLACK * (self.evaluation * (1 + evaluates) + self.ending) + self.wrap_up
        return now - self.since + 2 * (now - began) + rest > self.seconds
