"""A run that must end in time: run.minutes, less the time for evaluation and the report."""

from __future__ import annotations

import statistics
import time

import numpy as np

from vitlab.images.datasets import subset
from vitlab.training.batches import ImageSet
from vitlab.training.clock import Clock, Deadline, busyness
from vitlab.training.job import TrainingJob
from vitlab.training.run_report import FORWARD_PASSES

SLACK = 1.5  # evaluation may take this much longer than it took before
MARGIN = 0.02  # of the time, for starting and leaving Python
BUSY = 0.15  # of the time: the most that is kept for a slow end where others use the machine too
REPORT = 2.0  # seconds to write the report, without what it shows
SAMPLE = 256  # images that are evaluated to time one


def wrap_up_seconds(params: int) -> float:
    """All besides training and evaluation: last and best are written, best is read again, the report is made."""
    return 2.0 + params / 2e6


def busy_wrap_up(params: int, limit: float) -> float:
    """The same on the machine as it is now, where others may use it too; of a run of `limit` seconds."""
    alone = wrap_up_seconds(params)
    return max(alone, min(busyness() * alone, BUSY * limit))


def report_deadline(clock: Clock) -> Deadline:
    """For what a report can do without: heat maps, further images."""
    return clock.deadline(MARGIN * clock.limit + REPORT * busyness())


class TimeLimit:
    """Whether a run that trains has time for another step."""

    def __init__(self, job: TrainingJob, clock: Clock):
        self.clock, self.seconds = clock, (1 - MARGIN) * clock.limit
        data, who = job.data, job.who
        few = np.arange(min(len(data.val), SAMPLE * who.world))
        began = time.perf_counter()
        image_set = ImageSet(subset(data.val, few), job.val.preprocess)
        job.objective.evaluate(job.evaluated_model, image_set)
        per_image = (time.perf_counter() - began) / job.objective.images_evaluated(len(few))
        self.evaluation = per_image * job.objective.images_evaluated(len(data.val))
        self.ending = per_image * job.objective.images_evaluated(len(data.test or data.val), final=True)
        self.ending += per_image * FORWARD_PASSES
        self.wrap_up = busy_wrap_up(sum(p.numel() for p in job.model.parameters()), clock.limit)
        self.evaluation_began: float | None = None
        self.steps: list[float] = []  # seconds

    def near(self, began: float, evaluates: bool) -> bool:
        """Whether no further step fits. The last began at `began`; `evaluates`: an evaluation follows."""
        now = time.perf_counter()
        self.steps.append(now - began)
        if self.evaluation_began is not None:  # where evaluation takes longer than expected, so will the end
            slower = max(1.0, (began - self.evaluation_began) / self.evaluation)
            self.evaluation, self.ending = self.evaluation * slower, self.ending * slower
        self.evaluation_began = now if evaluates else None
        rest = SLACK * self._slower(2) * (self.evaluation * (1 + evaluates) + self.ending) + self.wrap_up
        return self.clock.gone + 2 * (now - began) + rest > self.seconds

    @property
    def evaluates_in_time(self) -> bool:
        """Whether one more evaluation fits before the end of the run."""
        return self.clock.gone + self._slower(1) * (self.evaluation + self.ending) + self.wrap_up <= self.seconds

    def _slower(self, steps: int) -> float:
        """How many times longer than usual each of the last steps took: one alone may be chance."""
        return max(1.0, min(self.steps[-steps:]) / max(statistics.median(self.steps), 1e-9))
