"""--minutes: what is picked follows from the data and the speed, settings win, and the clock is kept."""

import json
import math
import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file

import vitlab
import vitlab.cli.main
from vitlab.training.autopick import choose, pick
from vitlab.training.candidates import LEVELS, Facts, candidates, config_of, enough_passes, work
from vitlab.training.clock import Clock as RunClock
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, fit
from vitlab.training.measure import Speed
from vitlab.training.recipe import Recipe, read_recipe, with_settings
from vitlab.training.runlog import read_log
from vitlab.training.timelimit import TimeLimit, wrap_up_seconds
from vitlab.training.train import train

PHOTOS = Facts("photos", 4000, 400, 0, 5, 3, side=300, alike=False, in_memory=False, characters=False)
CIFAR = Facts("cifar10", 45_000, 5000, 10_000, 10, 3, side=32, alike=True, in_memory=True, characters=False)
DIGITS = Facts("digits", 1078, 361, 358, 10, 1, side=8, alike=True, in_memory=True, characters=True)


def machine(slowness: float = 1.0, spent: float = 5.0):
    """Speeds as a machine of so many multiplications a second would have them."""

    def measure(recipe: Recipe, patience: float = 0.0) -> Speed:
        a, B = recipe.augment, recipe.data.batch_size
        is_vit = recipe.model.init_from is None and config_of(recipe.model) is not None
        effort = work(recipe.model) if is_vit else 1e8
        step = slowness * (2e-3 + 6e-11 * effort * B)
        return Speed(
            step=step,
            early=0.6 * step if a.drop_patches else step,
            first=2 * step,
            prepare=slowness * B * (1e-4 + 1e-4 * a.randaugment),
            evaluate=slowness * 2e-11 * effort + 1e-5,
            resize=slowness * 1e-5,
            params=500_000,
            busy=1.0,
            spent=spent,
        )

    return measure


def simulated(recipe: Recipe, facts: Facts, speed: Speed) -> float:
    """Seconds of the run that the loop would make of this recipe: its rules, one step after another."""
    n, B = facts.train, min(recipe.data.batch_size, facts.train)
    per_epoch = n // B
    total = per_epoch * recipe.run.epochs
    clock = speed.first
    for step in range(total):
        early = recipe.augment.drop_patches and step < recipe.augment.drop_patches_until * total
        clock += speed.early if early else speed.step
        clock += speed.prepare / max(1, min(recipe.data.workers, facts.cpus))
        epoch, ended = step // per_epoch + 1, (step + 1) % per_epoch == 0
        if ended and (epoch % recipe.run.eval_every == 0 or epoch == recipe.run.epochs):
            clock += facts.val * speed.evaluate
    resizing = (facts.train + facts.val + facts.test) * speed.resize if facts.in_memory else 0
    return clock + resizing + (facts.test or facts.val) * speed.evaluate + wrap_up_seconds(speed.params)


@pytest.mark.parametrize("facts", [PHOTOS, CIFAR, DIGITS], ids=lambda facts: facts.source)
def test_more_time_never_gives_a_smaller_model(facts):
    minutes = [1, 2, 5, 10, 30, 60, 180, 600, 3000, 20_000]
    models = []
    for m in minutes:
        try:
            models.append(choose(facts, m, [], machine())[0].model)
        except ValueError:
            assert not models, "what fits in a short time fits in a longer one"
    sizes = [work(model) for model in models]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert work(models[-1]) == work(candidates(facts, [])[-1])  # in two weeks the largest


def test_a_slower_machine_gets_a_smaller_model_or_fewer_epochs():
    picked = [choose(CIFAR, 60, [], machine(s))[0] for s in (1, 3, 10)]
    sizes = [work(recipe.model) for recipe in picked]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    fixed = ["model.name=vit_cifar", "augment.drop_patches=0", "augment.randaugment=0"]
    epochs = [choose(CIFAR, 60, fixed, machine(s))[0].run.epochs for s in (1, 2, 4)]
    assert epochs[0] > 1.7 * epochs[1] > 2.5 * epochs[2] > 0


@given(
    minutes=st.floats(0.2, 2000),
    train=st.integers(20, 200_000),
    val=st.integers(2, 20_000),
    side=st.integers(4, 600),
    slowness=st.floats(0.2, 20),
    in_memory=st.booleans(),
    given_settings=st.sampled_from([[], ["run.eval_every=1"], ["data.batch_size=32"], ["data.workers=2"]]),
)
@settings(max_examples=40, deadline=None)
def test_the_planned_run_ends_in_time(minutes, train, val, side, slowness, in_memory, given_settings):
    facts = replace(PHOTOS, train=train, val=val, side=side, in_memory=in_memory)
    measure = machine(slowness)
    try:
        recipe, reasons = choose(facts, minutes, given_settings, measure)
    except ValueError as error:
        (said,) = re.findall(r"Use --minutes ([\d.]+) or more", str(error))
        enough = float(said)  # and that is true
        assert enough > minutes
        recipe, reasons = choose(facts, enough, given_settings, measure)
        minutes = enough
    total = train // min(recipe.data.batch_size, train) * recipe.run.epochs
    if total < 10_000:  # the simulation takes every step
        assert simulated(recipe, facts, measure(recipe)) <= 0.8 * (60 * minutes - 5.0) + 1e-6
    size = config_of(recipe.model).image_size
    assert max(size) <= max(side, 8)  # never enlarged, but for pictures that are no pictures
    assert recipe.run.minutes == minutes and reasons


@pytest.mark.parametrize("side", [8, 12, 16, 28, 32, 48, 64, 96, 224, 500])
def test_the_ladder_rises_in_work_and_never_falls_in_sharpness(side):
    models = candidates(replace(PHOTOS, side=side), [])
    configs = [config_of(model) for model in models]
    assert [work(m) for m in models] == sorted(work(m) for m in models)
    sizes = [c.image_size[0] for c in configs]
    assert sizes == sorted(sizes) and sizes[-1] > 0.74 * min(side, 224)
    with torch.device("meta"):
        for model in models:
            vitlab.create(model.name, **model.options)


def test_work_is_the_matrices_times_the_tokens_and_attention():
    for model in candidates(PHOTOS, []):
        with torch.device("meta"):
            network = vitlab.create(model.name, **model.options)
        matrices = sum(p.numel() for block in network.blocks for p in block.parameters() if p.ndim == 2)
        q = torch.zeros(config_of(model).grid[0] ** 2, network.config.width)  # (N, D)
        attention = 2 * len(network.blocks) * len(q) * q.numel()  # every token with every other, twice
        assert work(model) == len(q) * matrices + attention


def test_passes_are_enough_as_the_square_root_of_the_pictures():
    few, many = (enough_passes(replace(PHOTOS, train=n), tuned=False) for n in (12_500, 50_000))
    assert (few, many) == (24, 12)
    assert [enough_passes(replace(PHOTOS, train=n), False) for n in (10, 10_000_000)] == [100, 5]


def test_what_is_picked_follows_the_data():
    digits, reasons = choose(DIGITS, 2, [], machine())
    assert (digits.augment.flip, digits.augment.randaugment, digits.optim.name) == (False, 0, "muon")
    assert digits.augment.border == "zeros" and "characters" in " ".join(reasons)
    hurried, _ = choose(CIFAR, 10, [], machine())
    assert hurried.augment.drop_patches == 0.5 and hurried.augment.crop == "padded" and hurried.augment.flip
    assert (hurried.augment.randaugment, hurried.data.workers) == (0, 0)
    patient, reasons = choose(replace(PHOTOS, train=500), 60, [], machine())
    assert patient.run.epochs >= LEVELS[-1].passes and patient.augment.cutmix == 1.0
    assert patient.augment.drop_patches == 0 and patient.augment.crop == "resized"
    assert any("augment.flip=false" in reason for reason in reasons)
    on_gpu, _ = choose(replace(CIFAR, device="cuda"), 10, [], machine(0.05))
    assert (on_gpu.optim.name, on_gpu.run.amp) == ("adamw", "bf16")


def test_slow_files_get_helpers_and_a_hint():
    def measure(recipe: Recipe, patience: float = 0.0) -> Speed:
        speed = machine()(recipe)
        return replace(speed, prepare=5 * speed.step)

    recipe, reasons = choose(PHOTOS, 30, [], measure)
    assert recipe.data.workers == 2
    assert any("smaller files would train faster" in reason for reason in reasons)


def test_settings_win_and_are_measured():
    given_settings = ["run.seed=7", "model.depth=5", "optim.lr=0.004", "augment.flip=false", "data.batch_size=48"]
    seen: list[Recipe] = []

    def measure(recipe: Recipe, patience: float = 0.0) -> Speed:
        seen.append(recipe)
        return machine()(recipe)

    recipe, reasons = choose(PHOTOS, 30, given_settings, measure)
    assert all(with_settings(r, given_settings) == r for r in [*seen, recipe])
    assert not any("mirror" in reason for reason in reasons)
    assert any(reason.startswith("as you set: run.seed=7") for reason in reasons)
    named, reasons = choose(PHOTOS, 600, ["model.name=vit_tiny"], machine())
    assert named.model.name == "vit_tiny" and config_of(named.model).image_size == (224, 224)
    assert "you named it" in reasons[1]
    sized, _ = choose(PHOTOS, 30, ["model.image_size=48"], machine())
    assert config_of(sized.model).image_size == (48, 48)
    with pytest.raises(ValueError, match="is not a multiple of"):
        choose(PHOTOS, 30, ["model.image_size=50", "model.patch_size=16"], machine())


@pytest.mark.parametrize("name", ["resnet18", "swin_tiny"])
def test_a_model_of_another_family_that_is_named_is_taken_as_it_is(name):
    recipe, reasons = choose(PHOTOS, 30, [f"model.name={name}"], machine())
    assert recipe.model.name == name and recipe.optim.name == "adamw" and recipe.augment.crop == "resized"
    assert f"picked model: {name} (" in reasons[1]


def test_trained_weights_are_tuned_gently():
    new, _ = choose(PHOTOS, 30, [], machine())
    tuned, reasons = choose(PHOTOS, 30, ["model.init_from=some/where"], machine())
    assert (tuned.optim.name, tuned.optim.layer_decay) == ("adamw", 0.75)
    assert tuned.optim.lr < new.optim.lr and tuned.model.options.keys() <= {"stochastic_depth"}
    assert tuned.augment.drop_patches == 0 and "some/where" in reasons[1]


@pytest.mark.parametrize(
    ("minutes", "given_settings", "says"),
    [
        (0, [], "above 0"),
        (-3, [], "above 0"),
        (math.nan, [], "above 0"),
        (math.inf, [], "above 0"),
        (5, ["run.epochs=3"], r"run\.epochs was given, but --minutes 5 picks"),
        (5, ["run.minutes=3"], "the same thing"),
        (5, ["run.epoch=3"], "Did you mean run.epochs=3"),
        (5, ["model.widht=3"], "Did you mean 'width'"),
        (0.05, [], r"--minutes 0.05 is too little: .* the smallest model needs .* Use --minutes [\d.]+ or more"),
        (0.05, ["model.name=vit_cifar"], "this model needs"),
    ],
)
def test_errors(minutes, given_settings, says):
    with pytest.raises(ValueError, match=says):
        choose(CIFAR, minutes, given_settings, machine())


def test_a_machine_too_slow_to_be_timed_is_told_so_at_once():
    timed = []

    def measure(recipe: Recipe, patience: float = 0.0) -> Speed:
        timed.append(recipe)
        return machine(spent=40.0 * len(timed))(recipe)

    with pytest.raises(ValueError, match=r"timing this machine took 40 s.* Use --minutes [\d.]+ or more"):
        choose(CIFAR, 0.5, [], measure)
    assert len(timed) == 1


def command(what, *settings: str, resume=None, minutes=5.0):
    train(what, settings, resume=resume, minutes=minutes)


def test_recipes_and_resumed_runs_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text('[data]\nsource = "mnist"\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"cifar10_full is a recipe.* vitlab train cifar10 --minutes 5"):
        command("cifar10_full")
    with pytest.raises(ValueError, match="vitlab train mnist --minutes 5"):
        command("mine.toml")
    with pytest.raises(ValueError, match="vitlab train FOLDER --minutes 5"):
        command("folder")
    with pytest.raises(ValueError, match="--resume goes on with the plan"):
        command(None, resume=tmp_path)
    with pytest.raises(ValueError, match="Did you mean 'digits'"):
        command("digitz")


def test_data_are_meant_where_a_name_is_also_a_recipe(tmp_path, monkeypatch):
    asked = []

    def asking(source, *others, **options):
        asked.append(source)
        raise ValueError("picked")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vitlab.training.train.pick", asking)
    (tmp_path / "folder").mkdir()
    for what in (None, "digits", "fashion-mnist", "folder", "shards/train-{0..9}.tar"):
        with pytest.raises(ValueError, match="picked"):
            command(what, "model.init_from=none")
    assert asked == ["digits", "digits", "fashion-mnist", "folder", "shards/train-{0..9}.tar"]


def pictures_folder(folder: Path, count: int = 24) -> Path:
    for number, name in enumerate(("red", "green")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(100 * number + i).integers(0, 90, (20 + i, 33, 3), dtype=np.uint8)
            pixels[..., number] += 120
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


class Clock:
    """Runs while this process computes, as on a machine that nobody else uses; and can be put forward."""

    ahead, pace = 0.0, 1.0

    def __call__(self) -> float:
        return self.pace * time.process_time() + self.ahead


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def test_a_folder_in_eighteen_seconds(tmp_path, monkeypatch, capsys, clock):
    """The whole command but for the import of torch, which is done here and can take long on a busy machine."""
    source, run, clock.pace = pictures_folder(tmp_path / "photos"), tmp_path / "run", 3.0  # a slow machine
    words = ["vitlab", "train", str(source), "--minutes", "0.3", f"run.dir={run}", "run.seed=3", "model.init_from=none"]
    monkeypatch.setattr(sys, "argv", words)
    began = time.perf_counter()
    with pytest.raises(SystemExit) as ended:
        vitlab.cli.main.run()
    seconds, said = time.perf_counter() - began, capsys.readouterr()
    assert not ended.value.code, said.err
    assert seconds <= 18, said.out
    assert "picked model" in said.out and "because" in said.out and "as you set: run.dir" in said.out
    recipe, result = read_recipe(run / "recipe.toml"), json.loads((run / "result.json").read_text(encoding="utf-8"))
    assert (recipe.run.minutes, recipe.run.seed, recipe.data.source) == (0.3, 3, str(source))
    assert result["top1"] > 0.9 and result["steps"] >= 20
    notes = [line["text"] for line in read_log(run) if line["kind"] == "note"]
    assert any(note.startswith("picked model") for note in notes)
    assert "picked model" in (run / "report.html").read_text(encoding="utf-8")


def test_the_pick_is_measured_here_and_its_data_are_open():
    picked = pick("digits", 1, ["data.per_class=20", "model.depth=2"])
    assert len(picked.data.train) == 200 and picked.recipe.model.options["depth"] == 2
    assert picked.recipe.data.per_class == 20 and picked.recipe.run.minutes == 1


class Slow(Silent):
    """Steps that take a quarter of a second more."""

    def __init__(self, clock: Clock):
        super().__init__()
        self.clock = clock

    def step(self, done, numbers):
        self.clock.ahead += 0.25


def test_a_run_ends_in_time_though_its_steps_are_slow(tmp_path, clock):
    slow = ["data.batch_size=32", "model.depth=2", "run.epochs=50", "run.eval_every=50", "run.minutes=0.1"]
    show, began = Slow(clock), time.perf_counter()
    result = fit(with_settings(Recipe(), slow), tmp_path, show=show)
    assert time.perf_counter() - began <= 6
    assert result["stopped_early"] is True and 0 < result["steps"] < 50 * (1078 // 32)
    assert json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["stopped_early"] is True
    assert any("run.minutes=0.1" in note for note in show.notes)
    assert any("run.minutes=0.1" in line.get("text", "") for line in read_log(tmp_path))
    last, best = (load_file(tmp_path / which / "weights.safetensors") for which in ("last", "best"))
    assert all(torch.equal(value, best[key]) for key, value in last.items())  # it was judged once, at the end
    assert fit(with_settings(Recipe(), slow), tmp_path, resume=True) == result  # and it is finished


def test_a_limit_that_is_not_reached_changes_nothing(tmp_path):
    plain = ["data.batch_size=32", "data.per_class=16", "model.depth=2", "model.dropout=0.1", "run.epochs=2"]
    results = [fit(with_settings(Recipe(), [*plain, f"run.minutes={m}"]), tmp_path / str(m)) for m in (0, 30)]
    free, limited = (load_file(tmp_path / str(m) / "last" / "weights.safetensors") for m in (0, 30))
    assert all(torch.equal(value, limited[key]) for key, value in free.items())
    assert results[0]["top1"] == results[1]["top1"] and not results[1]["stopped_early"]


def test_the_clock_goes_on_where_a_resumed_run_was_stopped(tmp_path):
    job = prepare(with_settings(Recipe(), ["run.minutes=2", "data.per_class=5"]), tmp_path)
    now = time.perf_counter()
    assert not TimeLimit(job, RunClock(now, 120)).near(now, evaluates=False)
    assert TimeLimit(job, RunClock(now, 120, before=119)).near(now, evaluates=False)


def test_time_limits_are_checked():
    with pytest.raises(ValueError, match=r"run\.minutes=-1\.0 must be 0 or more"):
        with_settings(Recipe(), ["run.minutes=-1"])
