"""A run that must end in time: run.minutes, less what judging the model and writing the report will still take."""

from __future__ import annotations

import time

import numpy as np

from vitlab.images.datasets import subset
from vitlab.training.batches import Pictures
from vitlab.training.job import TrainingJob

SLACK = 1.5  # judging may take this much longer than it took before
MARGIN = 0.02  # of the time, for starting and leaving Python
BUSY = 0.15  # of the time: the most that is kept for a slow end where others use the machine too
SAMPLE = 256  # images that are judged to learn how long an image takes


def wrap_up_seconds(params: int) -> float:
    """All besides training and judging: last and best are written, best is read again, the report is made."""
    return 2.0 + params / 2e6


class TimeLimit:
    """The clock of one run. `since` is when this part of the run began, `before` what earlier parts took."""

    def __init__(self, job: TrainingJob, since: float, before: float):
        self.seconds, self.since = (1 - MARGIN) * 60 * job.recipe.run.minutes, since - before
        data, who = job.data, job.who
        few = np.arange(min(len(data.val), SAMPLE * who.world))
        began, computed = time.perf_counter(), time.process_time()
        pictures = Pictures(subset(data.val, few), job.model.preprocess)
        job.objective.evaluate(job.evaluated_model, pictures)
        taken, computed = time.perf_counter() - began, time.process_time() - computed
        per_picture = taken / job.objective.images_evaluated(len(few))
        busy = max(1.0, taken / max(computed, 1e-3))  # where others use the machine too, all takes so much longer
        self.judging = per_picture * job.objective.images_evaluated(len(data.val))
        self.ending = per_picture * job.objective.images_evaluated(len(data.test or data.val), final=True)
        alone = wrap_up_seconds(sum(p.numel() for p in job.model.parameters()))
        self.wrap_up = max(alone, min(busy * alone, BUSY * self.seconds))
        self.asked_before_judging: float | None = None

    def near(self, began: float, judges: bool) -> bool:
        """Whether no further step fits. The last began at `began`; `judges`: the model is about to be judged."""
        if self.asked_before_judging is not None:  # where judging takes longer than thought, so will the end
            slower = max(1.0, (began - self.asked_before_judging) / self.judging)
            self.judging, self.ending = self.judging * slower, self.ending * slower
        now = time.perf_counter()
        self.asked_before_judging = now if judges else None
        rest = SLACK * (self.judging * (1 + judges) + self.ending) + self.wrap_up
        return now - self.since + 2 * (now - began) + rest > self.seconds
