"""Times a few real steps of a recipe on this machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from vitlab.images.datasets import Data, Dataset, subset
from vitlab.training import processes
from vitlab.training.batches import ImageSet, TrainingBatch
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, TrainingSession, backward, update
from vitlab.training.recipe import Recipe
from vitlab.training.state import Progress

READING = 0.25  # seconds of reading images, about, each time it is measured
SAMPLE_SIZE = (8, 256)  # least and most images that are read for it


@dataclass(frozen=True)
class Speed:
    """Seconds that the parts of a run take."""

    step: float  # forward, backward, optimiser
    early: float  # the same while patches are left out
    first: float  # the very first step, which also sets up memory and kernels
    prepare: float  # reading and augmenting the images of a step, in one process
    evaluate: float  # reading and evaluating one image
    resize: float  # one image of a set that is resized once and stays in memory
    params: int
    spent: float  # from the start of the command to the end of this measurement


@dataclass(frozen=True)
class SpeedMeter:
    """Measures recipes on some of the data; `read` is the time one image takes to read, `since` the clock's start."""

    data: Data
    read: float
    since: float

    def __call__(self, recipe: Recipe, patience: float = 0.0) -> Speed:
        """A few steps; or steps for `patience` seconds, which shows the load of other processes."""
        with TemporaryDirectory() as folder:
            return self._measure(recipe, Path(folder), patience)

    def _measure(self, recipe: Recipe, folder: Path, patience: float) -> Speed:
        world = processes.start(recipe.run.device).world
        parts = recipe.optim.accumulate * world
        train, val = (self._some(split, parts) for split in (self.data.train, self.data.val))
        job = prepare(recipe, folder, Data(self.data.name, self.data.classes, train, val, None))
        real = replace(job.plan, n=len(self.data.train))
        timed = partial(median_seconds, patience=1.0 if world == 1 else math.inf)  # processes must count alike
        per_batch = timed(lambda: job.steps[0, 0])
        stream, session = repeat(_repeated(job.steps[0, 0], real.part)), TrainingSession(job, Progress(), Silent())
        job.optimisers.set_factor(0.0)  # timing must not change the weights

        def step(number: int) -> None:
            backward(session, stream, number, 0.0)
            update(session, number)

        first = timed(lambda: step(0), times=1)
        full = timed(lambda: step(job.plan.total - 1))
        many = int(patience / max(float(job.who.sum(torch.tensor(full))) / world, 1e-4))
        slower = max(1.0, mean_seconds(lambda: step(job.plan.total - 1), many) / full) if many else 1.0
        pre = job.val.preprocess
        speed = Speed(
            step=slower * full,
            early=slower * (timed(lambda: step(0)) if recipe.augment.drop_patches else full),
            first=first,
            prepare=slower * per_batch / job.plan.part * real.part * real.accumulate,
            evaluate=slower * timed(lambda: job.objective.evaluate(job.evaluated_model, job.val)) / len(val),
            resize=slower * timed(lambda: ImageSet(train, pre), times=1) / len(train),
            params=sum(p.numel() for p in job.model.parameters()),
            spent=time.perf_counter() - self.since,
        )
        if world == 1:
            return speed
        mean = job.who.sum(torch.tensor(list(asdict(speed).values()), dtype=torch.float64)) / world
        values = dict(zip(asdict(speed), mean.tolist(), strict=True))  # so that all processes pick the same
        return Speed(**{**values, "params": speed.params})

    def _some(self, dataset: Dataset, parts: int) -> Dataset:
        """As many images as are read in READING seconds, spread over the dataset."""
        least, most = SAMPLE_SIZE
        count = min(len(dataset), max(least, parts, min(most, int(READING / max(self.read, 1e-9)))))
        return subset(dataset, np.linspace(0, len(dataset) - 1, count).astype(np.int64))


def median_seconds(call: Callable[[], object], times: int = 3, patience: float = 1.0) -> float:
    """Of `times` calls; of fewer where together they take longer than `patience`."""
    taken: list[float] = []
    while len(taken) < times and sum(taken) < patience:
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[len(taken) // 2]


def mean_seconds(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def _repeated(batch: TrainingBatch, count: int) -> TrainingBatch:
    """The batch repeated up to `count` images."""
    which = torch.arange(count) % len(batch.labels)
    return TrainingBatch(batch.images[which], batch.labels[which], which)
