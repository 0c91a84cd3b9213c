"""A grid of runs: refused before it begins or run to its end, resumed to the bit, and told with means and spreads."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

import vitlab.cli.main
from vitlab.cli import console as console_module
from vitlab.cli.train import ProgressBar
from vitlab.study import runner as runner_module
from vitlab.study.configs import ConfigsStudy, study_configs
from vitlab.study.grid import GridCell, file_safe, read_grid, split_values
from vitlab.study.plot import draw_groups
from vitlab.study.runner import Group, Outcome
from vitlab.study.study import as_table
from vitlab.training.doctor import DivergedError
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.recipe import Recipe, to_toml, with_settings

TINY = ["data.per_class=6", "data.batch_size=20", "run.epochs=2", "model.width=16"]
GRID = ["model.depth=1,2", "model.positions=learned,sincos"]
NAMES = [f"depth={d},positions={p}" for d in (1, 2) for p in ("learned", "sincos")]
STEPS = 2 * (60 // 20)  # of one run


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The grid, run without a pause."""
    folder = tmp_path_factory.mktemp("study") / "straight"
    study_configs("tiny", Recipe(), [*TINY, *GRID], folder)
    return folder


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """The console script's own function, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(*args: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        found = capsys.readouterr()
        assert (stopped.value.code or 0) == code, found
        return found

    return call


@pytest.fixture
def pretend(monkeypatch):
    """Instead of training, results are made up; a rate above 1 fails. Lists the runs that were asked for."""
    asked: list[str] = []

    def fake(recipe, run, *, resume=False, show=None):
        asked.append(run.name)
        run.mkdir(parents=True, exist_ok=True)
        (run / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        if recipe.optim.lr > 1:
            raise DivergedError("step 3 (epoch 0): the loss is nan; no layer. Try optim.lr=1e-3, or less.")
        drawn = np.random.default_rng([recipe.run.seed, recipe.model.options.get("depth", 0)]).random(5).tolist()
        keys = ("top1", "val_top1", "loss", "seconds", "images_per_second")
        result = {"split": "test", **dict(zip(keys, drawn, strict=True)), "params": 1234}
        result["seconds"] = 100.0
        (run / "result.json").write_text(json.dumps(result), encoding="utf-8")
        return result

    monkeypatch.setattr(runner_module, "fit", fake)
    return asked


def weights(run: Path) -> dict[str, torch.Tensor]:
    parts = [(run / part / "weights.safetensors") for part in ("last", "best")]
    return {f"{path.parent.name}/{key}": value for path in parts for key, value in load_file(path).items()}


def same(one: Path, other: Path) -> None:
    a, b = weights(one), weights(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    results = [json.loads((run / "result.json").read_text(encoding="utf-8")) for run in (one, other)]
    timeless = [{k: v for k, v in r.items() if k not in ("seconds", "images_per_second")} for r in results]
    assert timeless[0] == timeless[1]


# ------------------------------------------------------------------------------------------------------ it trains


def test_a_cell_is_the_run_that_train_would_make(straight, tmp_path):
    fit(with_settings(Recipe(), [*TINY, "model.depth=2", "model.positions=sincos"]), tmp_path / "alone")
    same(straight / "depth=2,positions=sincos", tmp_path / "alone")
    with pytest.raises(AssertionError):  # the comparison can fail
        same(straight / "depth=2,positions=learned", tmp_path / "alone")


def test_the_folder_holds_runs_table_plot_and_what_was_asked(straight):
    assert sorted(p.name for p in straight.iterdir()) == sorted(
        [*NAMES, "plot.png", "results.csv", "study.json", "table.md"]
    )
    about = json.loads((straight / "study.json").read_text(encoding="utf-8"))
    assert about["axes"] == {"model.depth": [1, 2], "model.positions": ["learned", "sincos"]}
    with (straight / "results.csv").open(encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["run"] for row in found] == NAMES
    for row in found:
        result = json.loads((straight / row["run"] / "result.json").read_text(encoding="utf-8"))
        assert float(row["top1"]) == result["top1"] and row["status"] == "finished"
        assert (row["model.depth"], row["model.positions"]) == tuple(re.findall(r"=(\w+)", row["run"]))
    assert len((straight / "table.md").read_text(encoding="utf-8").splitlines()) == 2 + 4
    assert Image.open(straight / "plot.png").size == (1200, 690)


class StopIn(Silent):
    """Ctrl-C at a step, counted over the whole study."""

    def __init__(self, at: int = 0):
        super().__init__()
        self.at, self.steps = at, 0

    def step(self, done, numbers):
        self.steps += 1
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupted_and_resumed_is_identical_to_the_bit(straight, tmp_path):
    show = StopIn(at=STEPS + 2)  # in the second run
    with pytest.raises(Stopped):
        study_configs("tiny", Recipe(), [*TINY, *GRID], tmp_path / "s", show=show)
    assert (tmp_path / "s" / "table.md").read_text(encoding="utf-8").count(
        "\n"
    ) == 2 + 1  # what is finished can be read already
    again = StopIn()
    study = study_configs("tiny", Recipe(), [*TINY, *GRID], tmp_path / "s", show=again)
    assert again.steps == 4 * STEPS - show.steps and show.steps == STEPS + 2
    assert "1 of 4 runs are finished already." in again.notes
    for name in NAMES:
        same(straight / name, tmp_path / "s" / name)
    assert [outcome.cell.name for outcome in study.outcomes] == NAMES
    last = StopIn()
    once_more = study_configs("tiny", Recipe(), [*TINY, *GRID], tmp_path / "s", show=last)
    assert last.steps == 0 and once_more.rows == study.rows


def test_a_run_that_fails_is_told_and_the_others_go_on(run, tmp_path):
    settings = [*TINY, "optim.name=sgd", "optim.schedule=constant", "optim.lr=1e30,0.01"]
    found = run("study", "configs", "digits", *settings, "--dir", "s", "--format", "csv", code=1)
    bad, good = csv.DictReader(io.StringIO(found.out))
    assert (bad["n"], bad["top1"], good["n"]) == ("0", "", "1")
    assert bad["note"].startswith("failed: step ") and "the loss is" in bad["note"]
    assert (
        float(good["top1"])
        == json.loads((tmp_path / "s" / "lr=0.01" / "result.json").read_text(encoding="utf-8"))["top1"]
    )
    with (tmp_path / "s" / "results.csv").open(encoding="utf-8") as file:
        reasons = [row["reason"] for row in csv.DictReader(file)]
    assert "Try optim.lr=" in reasons[0] and reasons[1] == ""
    assert "1 of 2 runs failed" in found.err


# ------------------------------------------------------------------------------------------------- it refuses first


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.depth=1,2", "model.dpth=3"], r"^depth=1: .*no option 'dpth'.*'depth'"),
        (["optim.lrr=1,2"], r"^lrr=1: .*'optim.lrr'.*optim.lr=1"),
        (["depth=1,2"], r"there is no 'depth'"),
        (["model.depth=1,two"], r"^depth=two: depth='two' is not valid: expected a whole number"),
        (["optim.lr=0.1,big"], r"^lr=big: optim.lr='big' is not valid"),
        (["optim.lr=0.1,-1"], r"^lr=-1: .*above 0"),
        (["model.heads=4,5", "model.positions=learned,sincos"], r"^heads=5,positions=learned: .*16.*5"),
        (["model.depth=1,"], r"'model.depth=1,' has an empty value"),
        (["model.depth="], r"has an empty value"),
        (["model.depth=1,2", "model.depth=3"], r"model.depth is set twice.*model.depth=1,2,3"),
        (["model.depth=1,1"], r"depth=1 is in the grid twice"),
        (["optim.lr=1,1.0"], r"lr=1.0 is in the grid twice"),
        (["model.depth=2"], r"nothing to compare"),
        (["model.depth"], r"'model.depth' is not a setting"),
        (["run.dir=a,b"], r"-o names the study's own"),
        (["run.device=cpu,tpu9"], r"^device=tpu9: device 'tpu9' is not known"),
        (["data.source=digits,digitz"], r"^source=digitz: unknown data source"),
        (["model.init_from=none,nowhere.pth"], r"^init_from=nowhere.pth: nowhere.pth: no such file"),
        (["augment.scale=0.3,1.0"], r"^scale=0.3: augment.scale=0.3 is not valid"),
        (["augment.mixup=0,-1"], r"^mixup=-1.0: mixup"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(settings, words, tmp_path, pretend):
    with pytest.raises(ValueError, match=words):
        study_configs("tiny", Recipe(), [*TINY, *settings], tmp_path / "s")
    assert pretend == [] and not (tmp_path / "s").exists()


def test_labels_and_numbers_have_no_accuracy_to_compare(tmp_path, pretend):
    for number in range(8):
        Image.new("L", (8, 8), 30 * number).save(tmp_path / f"{number}.png")
    table = tmp_path / "levels.csv"
    table.write_text("\n".join(["file,level", *(f"{n}.png,{n / 2}" for n in range(8))]), encoding="utf-8")
    settings = ["data.batch_size=2", f"data.source={table}", "data.target=level", "objective.name=regression"]
    with pytest.raises(ValueError, match=r"^depth=1: a study compares accuracies, and .* has a number for each image"):
        study_configs("tiny", Recipe(), [*settings, "model.depth=1,2"], tmp_path / "s")
    assert pretend == [] and not (tmp_path / "s").exists()


def test_a_study_may_grow_and_nothing_else(tmp_path, pretend):
    def study(*settings: str):
        pretend.clear()
        return study_configs("tiny", Recipe(), [*TINY, *settings], tmp_path / "s")

    study("model.depth=2,4", "run.seed=0,1")
    assert pretend == ["depth=2,seed=0", "depth=2,seed=1", "depth=4,seed=0", "depth=4,seed=1"]
    grown = study("model.depth=2,3,4", "run.seed=0,1,2")
    assert pretend == ["depth=2,seed=2", "depth=3,seed=0", "depth=3,seed=1", "depth=3,seed=2", "depth=4,seed=2"]
    assert [row["model.depth"] for row in grown.rows] == [2, 3, 4]
    for settings, words in [
        (["model.depth=2,4", "run.seed=0,1,2"], r"another study:\n  model.depth: 3 is left out"),
        (["model.depth=2,3,4"], r"axes: model.depth, run.seed -> model.depth"),
        (["run.seed=0,1,2", "model.depth=2,3,4"], r"axes: model.depth, run.seed -> run.seed, model.depth"),
        (["model.depth=2,3,4", "run.seed=0,1,2", "optim.clip=1"], r"optim.clip: 0.0 -> 1.0"),
    ]:
        with pytest.raises(ValueError, match=words):
            study(*settings)
        assert pretend == []


def test_stopped_while_it_grows_the_table_keeps_what_was_there(tmp_path, pretend, monkeypatch):
    study_configs("tiny", Recipe(), [*TINY, "model.depth=2,4"], tmp_path / "s")

    def stop(*args, **more):
        raise Stopped("saved")

    monkeypatch.setattr(runner_module, "fit", stop)
    with pytest.raises(Stopped):
        study_configs("tiny", Recipe(), [*TINY, "model.depth=1,2,4"], tmp_path / "s")
    with (tmp_path / "s" / "results.csv").open(encoding="utf-8") as file:
        assert [row["run"] for row in csv.DictReader(file)] == ["depth=2", "depth=4"]


def test_a_folder_of_something_else_is_left_alone(tmp_path, pretend):
    (tmp_path / "photo.jpg").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no study"):
        study_configs("tiny", Recipe(), ["model.depth=1,2"], tmp_path)
    study_configs("tiny", Recipe(), ["model.depth=1,2"], tmp_path / "s")
    other = to_toml(with_settings(Recipe(), ["model.depth=2", "optim.lr=0.5"]))
    (tmp_path / "s" / "depth=2" / "recipe.toml").write_text(other, encoding="utf-8")
    with pytest.raises(ValueError, match=r"another recipe:\n  optim.lr: 0.5 -> 0.001"):
        study_configs("tiny", Recipe(), ["model.depth=1,2"], tmp_path / "s")
    (tmp_path / "s" / "study.json").write_text('{"axes": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"study.json: cannot be understood"):
        study_configs("tiny", Recipe(), ["model.depth=1,2"], tmp_path / "s")


def test_torchrun_is_refused(tmp_path, pretend, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="without torchrun"):
        study_configs("tiny", Recipe(), ["model.depth=1,2"], tmp_path / "s")


# ------------------------------------------------------------------------------------------------- values and names

plain = st.text("ab,[]{} '=", max_size=6)
nested = st.recursive(st.integers() | st.booleans() | plain, lambda inner: st.lists(inner, max_size=3), max_leaves=6)


@examples(deadline=None, max_examples=60)
@given(st.lists(nested, min_size=1, max_size=5))
def test_values_are_split_as_json_would_read_them(values):
    text = ",".join(json.dumps(value) for value in values)
    assert [json.loads(part) for part in split_values(text)] == values == json.loads(f"[{text}]")


@examples(deadline=None, max_examples=60)
@given(st.text(max_size=300), st.text(max_size=300))
def test_names_of_folders_are_safe_and_differ_where_the_values_do(one, other):
    safe = [file_safe(f"source={name}") for name in (one, other)]
    assert (safe[0] == safe[1]) == (one == other)
    for name in safe:
        assert len(name.encode()) < 120 and not re.search(r'[/\\:*?"<>|\s\0$]', name)


def test_lists_are_values(tmp_path):
    grid = read_grid(Recipe(), ["augment.scale=[0.3,1.0],[0.5,1]", "data.per_class=5,none", "augment.crop=resized"])
    assert grid.axes == {"augment.scale": [[0.3, 1.0], [0.5, 1.0]], "data.per_class": [5, None]}
    assert [(c.recipe.augment.scale, c.recipe.data.per_class) for c in grid.cells] == [
        ((0.3, 1.0), 5), ((0.3, 1.0), None), ((0.5, 1.0), 5), ((0.5, 1.0), None),
    ]  # fmt: skip
    assert grid.cells[0].name == "scale=[0.3,1.0],per_class=5" and grid.cells[1].name.endswith("per_class=none")
    assert all(cell.recipe.augment.crop == "resized" for cell in grid.cells)


def test_a_dotted_option_of_the_model_can_be_resumed(tmp_path):
    """The run's recipe.toml spells it as a table."""
    settings = [*TINY, "run.epochs=1", "model.depth=1", "model.norm.eps=1e-6,1e-5"]
    settings.remove("run.epochs=2")
    study = study_configs("tiny", Recipe(), settings, tmp_path / "s")
    show = StopIn()
    again = study_configs("tiny", Recipe(), settings, tmp_path / "s", show=show)
    assert again.rows == study.rows and show.steps == 0 and [row["n"] for row in again.rows] == [1, 1]


# ------------------------------------------------------------------------------------------------ means and spreads


def test_means_and_spreads_are_numpy_s_over_the_result_files(tmp_path, pretend):
    study = study_configs("tiny", Recipe(), [*TINY, "model.depth=1,2,3", "run.seed=0,1,2,3"], tmp_path / "s")
    assert [row["model.depth"] for row in study.rows] == [1, 2, 3]
    best = []
    for row in study.rows:
        files = sorted((tmp_path / "s").glob(f"depth={row['model.depth']},*/result.json"))
        results = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        assert row["n"] == len(results) == 4
        for key in ("top1", "val_top1", "loss", "seconds", "images_per_second"):
            assert row[key] == pytest.approx(np.mean([r[key] for r in results]), rel=1e-12)
        assert (row["top1_min"], row["top1_max"]) == (min(r["top1"] for r in results), max(r["top1"] for r in results))
        assert row["params"] == 1234 and isinstance(row["params"], int)
        best.append(np.mean([r["val_top1"] for r in results]))
    assert [i for i, row in enumerate(study.rows) if row["note"] == "best on val"] == [int(np.argmax(best))]
    lines = (tmp_path / "s" / "table.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("| model.depth | n | top1 | spread | val_top1 | loss | params | seconds |")
    first = study.rows[0]
    assert (
        f"| {100 * first['top1']:.2f} % | {100 * first['top1_min']:.2f} .. {100 * first['top1_max']:.2f} % |"
        in lines[2]
    )


def test_failed_seeds_are_left_out_of_the_mean_and_counted():
    numbers = dict(split="test", val_top1=0.5, loss=1.0, seconds=1.0, images_per_second=2.0, params=7)
    good = [{**numbers, "top1": top1} for top1 in (0.5, 0.75)]
    cells = [GridCell(f"seed={s}", Recipe(), {"run.seed": s}) for s in range(3)]
    found = [Outcome(cells[0], good[0]), Outcome(cells[1], failed="it broke. Really"), Outcome(cells[2], good[1])]
    (row,) = ConfigsStudy(Path(), "", [], found).rows
    assert (row["n"], row["top1"], row["note"]) == (2, 0.625, "1 of 3 failed: it broke")


def test_the_time_left_is_guessed_from_finished_runs(tmp_path, pretend):
    show = Silent()
    study_configs("tiny", Recipe(), [*TINY, "model.depth=1,2,3,4"], tmp_path / "s", show=show)
    told = [note for note in show.notes if note.startswith("run ")]
    assert told == [
        "run 1 of 4: depth=1", "run 2 of 4: depth=2 (about 5 min left)", "run 3 of 4: depth=3 (about 3 min left)",
        "run 4 of 4: depth=4 (about 2 min left)",
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the picture


def made_up(axes: dict[str, list], seeds: int = 1) -> list[Group]:
    """Groups with top-1 drawn at random."""
    rng, groups = np.random.default_rng(0), [{}]
    for key, values in axes.items():
        groups = [{**g, key: value} for g in groups for value in values]
    return [
        Group(g, [Outcome(GridCell("", Recipe(), g), {"split": "val", "top1": t}) for t in rng.random(seeds)])
        for g in groups
    ]


def test_a_number_along_the_axis_with_least_and_greatest(tmp_path):
    groups = made_up({"optim.lr": [1e-3, 1e-4, 1e-2]}, seeds=5)
    axes = draw_groups(groups, tmp_path / "p.png", "digits")
    (bars,) = axes.containers
    tops = np.array([g.numbers("top1") for g in groups])[[1, 0, 2]]  # in order of the rate
    np.testing.assert_allclose(bars[0].get_xdata(orig=False), [1e-4, 1e-3, 1e-2])
    np.testing.assert_allclose(bars[0].get_ydata(orig=False), tops.mean(axis=1))
    ends = np.array([segment[:, 1] for segment in bars[2][0].get_segments()])
    np.testing.assert_allclose(ends, np.stack([tops.min(axis=1), tops.max(axis=1)], axis=1))
    low, high = axes.get_ylim()
    assert low < tops.min() < tops.max() < high < 2 * tops.max()
    assert axes.get_xscale() == "log" and axes.get_xlabel() == "optim.lr" and axes.get_ylabel() == "val accuracy"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0.0001", "0.001", "0.01"]
    assert all(t.get_text().endswith(" %") for t in axes.get_yticklabels())


@pytest.mark.parametrize("order", [1, -1])
def test_two_axes_give_a_line_for_each_name(order, tmp_path):
    axes_of = {"model.depth": [2, 4, 6], "model.positions": ["learned", "$x_1$", "随机"]}
    axes = draw_groups(made_up(dict(list(axes_of.items())[::order])), tmp_path / "p.png", "digits")
    assert [bars.get_label() for bars in axes.containers] == [f"positions={v}" for v in axes_of["model.positions"]]
    assert (
        all(list(bars[0].get_xdata(orig=False)) == [2, 4, 6] for bars in axes.containers)
        and axes.get_xscale() == "linear"
    )
    assert len({to_hex(bars[0].get_color()) for bars in axes.containers}) == 3


def test_three_axes_give_a_list_the_best_on_top(tmp_path):
    groups = made_up({"a.x": [1, 2], "a.y": ["p", "q"], "a.z": [True, False]}, seeds=3)
    axes = draw_groups(groups, tmp_path / "p.png", "digits")
    named = {f"x={g.values['a.x']}, y={g.values['a.y']}, z={str(g.values['a.z']).lower()}": g for g in groups}
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == sorted(named, key=lambda name: -np.mean(named[name].numbers("top1")))
    top, bottom = axes.get_ylim()[::-1]
    assert top < bottom  # row 0 is drawn on top


@pytest.mark.parametrize("axes", [{}, {"model.positions": ["learned", "sincos"]}, {"data.per_class": [5, 10, None]}])
def test_names_are_listed_in_their_order(axes, tmp_path):
    drawn = draw_groups(made_up(axes, seeds=2), tmp_path / "p.png", "digits")
    expected = {
        0: ["all seeds"],
        2: ["positions=learned", "positions=sincos"],
        3: [f"per_class={v}" for v in (5, 10, "none")],
    }
    assert [t.get_text() for t in drawn.get_yticklabels()] == expected[len(next(iter(axes.values()), []))]


# -------------------------------------------------------------------------------------------------- the command line


def test_the_command_prints_the_table_alone_and_resumes(run, tmp_path, pretend):
    command = ["study", "configs", "digits", "model.depth=2,4", "model.positions=learned,sincos", "run.seed=0,1"]
    found = json.loads(run(*command, "--json").out)
    folder = tmp_path / "studies" / "digits-depth-positions-seed"
    assert len(pretend) == 8 and json.loads((folder / "study.json").read_text(encoding="utf-8"))["command"].startswith(
        "vitlab study"
    )
    assert [(row["model.depth"], row["n"]) for row in found] == [(2, 2), (2, 2), (4, 2), (4, 2)]
    markdown = run(*command, "--format", "markdown").out
    assert markdown == (folder / "table.md").read_text(encoding="utf-8") and len(pretend) == 8
    for row, read in zip(found, csv.DictReader(io.StringIO(run(*command, "--format", "csv").out)), strict=True):
        assert float(read["top1"]) == row["top1"] and read["model.positions"] == row["model.positions"]
    table = run(*command)
    assert "best val" in table.out and "best on val" in table.out and "finished already" not in table.out
    assert "8 of 8 runs are finished already." in table.err and f"{folder.relative_to(tmp_path)}/plot.png" in table.err
    assert "--format 'x' is not known" in run(*command, "--format", "x", code=2).err


def test_without_a_recipe_it_is_digits(run, tmp_path, pretend):
    run("study", "configs", "model.depth=1,2")
    assert pretend == ["depth=1", "depth=2"] and (tmp_path / "studies" / "digits-depth").is_dir()


def test_stopped_it_says_how_to_go_on(run, monkeypatch):
    def stop(*args, **more):
        raise Stopped("saved")

    monkeypatch.setattr(runner_module, "fit", stop)
    found = run("study", "configs", "digits", "model.depth=1,2", "--dir", "my study", code=130)
    assert "continues: vitlab study configs digits model.depth=1,2 --dir 'my study'" in found.err


@pytest.mark.parametrize("width", [70, 120])
def test_a_narrow_terminal_gets_fewer_columns_and_no_broken_line(width, tmp_path, pretend, monkeypatch, capsys):
    study = study_configs("tiny", Recipe(), [*TINY, "model.depth=1,2", "run.seed=0,1"], tmp_path / "s")
    monkeypatch.setattr(console_module, "console", lambda: Console(width=width))
    console_module.print_table(as_table(study.tables()[0]))
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 3 and all(len(line) <= width for line in text.splitlines())
    assert ("images/s" in text) == (width == 120) and "best on val" in text and "spread" in text


def test_one_bar_for_the_run_that_is_going_on(capsys):
    with ProgressBar() as bar:
        for total in (3, 5):
            bar.start(0, total)
            bar.step(1, {"loss": 1.0, "lr": 0.1})
        assert [task.total for task in bar.progress.tasks] == [5]


def test_help_does_not_import_torch():
    code = "import sys; sys.argv = ['vitlab', 'study', 'configs', '--help']\nfrom vitlab.cli.main import run\n"
    code += "try: run()\nexcept SystemExit: sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0 and "run.seed=0,1,2" in done.stdout
