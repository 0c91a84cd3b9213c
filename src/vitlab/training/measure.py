"""Times a few real steps of a recipe on this machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from vitlab.checkpoints.native import write_text
from vitlab.images.datasets import Data, Dataset, subset
from vitlab.images.sources.download import cache_dir
from vitlab.training import processes
from vitlab.training.batches import ImageSet, TrainingBatch
from vitlab.training.clock import busyness
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, TrainingSession, backward, update
from vitlab.training.recipe import Recipe, to_tables
from vitlab.training.runlog import from_json, to_json
from vitlab.training.state import Progress

READING = 0.25  # seconds of reading images, about, each time it is measured
SAMPLE_SIZE = (8, 256)  # least and most images that are read for it
TIMINGS, KEPT = "timings.json", 200  # in the cache: the last measurements


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
    busy: float  # the machine meanwhile, see `busyness`
    spent: float  # from the start of the command to the end of this measurement

    def when(self, busy: float) -> Speed:
        """On the same machine when it is so busy."""
        times = busy / self.busy
        parts = ("step", "early", "first", "prepare", "evaluate", "resize")
        return replace(self, busy=busy, **{part: times * getattr(self, part) for part in parts})


@dataclass(frozen=True)
class SpeedMeter:
    """Measures recipes on some of the data; `read` is the time one image takes to read, `since` the clock's start."""

    data: Data
    read: float
    since: float
    weights: str | None = None  # what to remember model.init_from by, where that is a copy

    def __call__(self, recipe: Recipe, patience: float = 0.0) -> Speed:
        """A few steps; or steps for `patience` seconds, which shows the load of other processes.

        Without patience, what was measured for the same recipe on this machine before is taken again.
        """
        same = replace(recipe, model=replace(recipe.model, init_from=self.weights or recipe.model.init_from))
        key = timing_key(same, len(self.data.classes), self.data.train.channels)
        who = processes.start(recipe.run.device)
        earlier = None if patience else who.from_first(lambda: remembered(key))
        if earlier is not None:
            return replace(earlier.when(who.from_first(busyness)), spent=time.perf_counter() - self.since)
        with TemporaryDirectory() as folder:
            speed = self._measure(recipe, Path(folder), patience)
        remember(key, speed)
        return speed

    def _measure(self, recipe: Recipe, folder: Path, patience: float) -> Speed:
        world = processes.start(recipe.run.device).world
        recipe = replace(recipe, data=replace(recipe.data, copies_gb=0.0))  # the first epoch decodes every photo
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
            busy=busyness(),
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


def timing_key(recipe: Recipe, classes: int, channels: int) -> str:
    """Equal for recipes whose steps take equally long, on machines that are alike."""
    tables = to_tables(recipe)
    about = {group: tables[group] for group in ("augment", "model", "objective", "optim")}
    about["run"] = {name: tables["run"][name] for name in ("amp", "compile", "device", "sharding")}
    about["data"] = {name: tables["data"][name] for name in ("source", "batch_size", "repeats", "decode")}
    threads = torch.get_num_threads()
    machine = [platform.node(), platform.processor(), os.cpu_count(), threads, torch.__version__]
    text = json.dumps([about, classes, channels, machine], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def remembered(key: str) -> Speed | None:
    try:
        values = from_json((cache_dir() / TIMINGS).read_bytes())[key]
        return Speed(**{field.name: values[field.name] for field in fields(Speed)})
    except (OSError, ValueError, KeyError, TypeError):  # it can always be measured again
        return None


def remember(key: str, speed: Speed) -> None:
    """Keep a measurement, with the last ones before it."""
    path = cache_dir() / TIMINGS
    with suppress(OSError):
        try:
            values = from_json(path.read_bytes())
        except (OSError, ValueError):
            values = {}
        values = {**(values if isinstance(values, dict) else {}), key: asdict(speed)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, to_json(dict(list(values.items())[-KEPT:])))


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
