"""Runs that end in time although the machine slows down: the time is that of a clock in these tests."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.models.vit import VisionTransformer
from vitlab.training.clock import BUSIEST, Clock, Deadline, Late, busyness
from vitlab.training.loop import Silent


class FakeTime:
    """Stands still unless it is put forward."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fake(monkeypatch):
    fake = FakeTime()
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


def work(fake: FakeTime, deadline: Deadline, seconds: list[float], guess: float = 0.0) -> int:
    """How many of these pieces of work are done."""
    done = 0
    for taken in deadline.while_it_fits(seconds, guess):
        fake.now += taken
        done += 1
    return done


def test_no_piece_of_work_begins_that_would_end_late(fake):
    assert work(fake, Deadline(), [1e6] * 3) == 3
    assert work(fake, Deadline(fake.now + 10), [3] * 9) == 3
    assert work(fake, Deadline(fake.now + 10), [1, 6, 1, 1]) == 2  # another of 6 s would be late
    assert work(fake, Deadline(fake.now + 10), [1] * 4, guess=11) == 0
    assert work(fake, Deadline(fake.now - 1), [0]) == 0


def test_the_clock_counts_earlier_parts_and_keeps_a_reserve(fake):
    clock = Clock(fake.now, 60, before=20)
    fake.now += 5
    assert (clock.gone, clock.left, clock.deadline().left, clock.deadline(keep=8).left) == (25, 35, 35, 27)
    assert Clock(fake.now).deadline(keep=1e9).left == float("inf")


def test_what_is_counted_is_given_up_after_the_deadline(fake):
    counted: list[int] = []
    count = Deadline(fake.now + 1).checked(lambda what, done, total: counted.append(done))
    count("features", 1, 3)
    fake.now += 2
    with pytest.raises(Late):
        count("features", 2, 3)
    assert counted == [1]


def test_busyness_is_wall_time_over_processor_time(monkeypatch):
    assert 1 <= busyness() <= BUSIEST
    times = iter([0.0, 6.0])  # of a thread that computes for 2 of 6 seconds
    computed = iter([0.0, 2.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(time, "thread_time", lambda: next(computed))
    assert busyness() == pytest.approx(3)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Two classes of noise, one lighter, with some wrong labels."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for split, count in (("train", 40), ("val", 20)):
        for label in (0, 1):
            place = folder / split / ("dark", "light")[label]
            place.mkdir(parents=True)
            for i in range(count):
                light = 40 * (label ^ (i % 5 == 0))
                pixels = random.normal(90 + light, 40, (16, 16, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return str(folder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    vitlab.save(vitlab.create("vit_digits", channels=3, image_size=16, depth=2, classes=0), folder / "vit")
    return str(folder / "vit")


class SlowingMachine:
    """Each image takes this long through the network, and so many times longer from a moment on."""

    def __init__(self, fake: FakeTime, per_image: float, slow_from: float, slowdown: float):
        self.fake, self.per_image, self.slow_from, self.slowdown = fake, per_image, fake.now + slow_from, slowdown

    def passes(self, images: int, factor: float = 1.0) -> None:
        slower = self.slowdown if self.fake.now >= self.slow_from else 1.0
        self.fake.now += images * self.per_image * factor * slower


@pytest.mark.parametrize("slow_from", [0.0, 60.0, 150.0, 220.0])
def test_a_ladder_ends_in_time_on_a_machine_that_becomes_four_times_slower(
    photos, weights, tmp_path, monkeypatch, fake, slow_from
):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    began, machine = fake.now, SlowingMachine(fake, 0.2, slow_from, 4.0)
    encode = VisionTransformer.encode

    def timed(self, images, *args, **kwargs):
        machine.passes(len(images), 3.0 if torch.is_grad_enabled() else 1.0)  # backward takes twice as long
        return encode(self, images, *args, **kwargs)

    monkeypatch.setattr(VisionTransformer, "encode", timed)
    settings = [f"model.init_from={weights}", f"run.dir={tmp_path / 'run'}", "run.minutes=5", "data.workers=0"]
    show = Silent()
    run = vitlab.train(photos, settings, show=show)
    assert fake.now - began <= 300, show.notes
    assert (tmp_path / "run" / "report.html").is_file() and run.model.is_dir()
    assert any("left out" in note or "of 5 min" in note or "allows no more" in note for note in show.notes)
