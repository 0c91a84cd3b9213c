"""Listing and comparing runs: every field from its file, every format parses back, strangers are named and skipped."""

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from vitlab.cli.runs import runs as command
from vitlab.training.doctor import check_run
from vitlab.training.recipe import Recipe, to_toml, with_settings
from vitlab.training.report import plot
from vitlab.training.runlog import RunLog, to_json
from vitlab.training.runs import COLUMNS, differences, list_runs, read_run, shown, table, to_csv, to_markdown

RESULT = dict(top1=0.9875, loss=0.051234, seconds=41.25, images_per_second=3012.4, epochs=3, params=213002, seed=0)


def make_run(folder: Path, when: float, *, lr=0.001, seed=0, finished=True, saved=True, steps=30, extra="", **result):
    folder.mkdir(parents=True)
    source = json.dumps(result.pop("source", "digits"), ensure_ascii=False)
    (folder / "recipe.toml").write_text(
        f'[data]\nsource = {source}\n[model]\nname = "vit_digits"\n{extra}\n[optim]\nlr = {lr}\nbetas = [0.9, 0.999]\n'
        f"[run]\nepochs = 3\nseed = {seed}\ndir = {json.dumps(str(folder), ensure_ascii=False)}\n",
        encoding="utf-8",
    )
    log = [{"kind": "start", "step": 0, "time": when, "steps": 30}]
    log += [{"kind": "val", "step": s, "time": when + s, "top1": 0.5 + s / 100} for s in range(10, steps + 1, 10)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log), encoding="utf-8")
    if saved:
        (folder / "last").mkdir()
    if finished:
        (folder / "result.json").write_text(to_json({**RESULT, "seed": seed, **result}), encoding="utf-8")
    return folder


@pytest.fixture
def notebook(tmp_path) -> Path:
    """Five runs, oldest first by name."""
    runs = tmp_path / "runs"
    make_run(runs / "a first", 1000, extra="depth = 4")
    make_run(runs / 'b|`pipe`\\_x_ <b>,"q"', 2000, lr=0.003, top1=0.5, seconds=100.0, source='图|片, "x"')
    make_run(runs / "c killed", 3000, seed=2, finished=False, steps=20)
    make_run(runs / "d unsaved", 4000, finished=False, saved=False, steps=0)
    make_run(runs / "=e(1) 最新", 5000, top1=0.99, loss=float("nan"))
    return runs


def test_runs_newest_first_with_their_values(notebook):
    found = list_runs(notebook)
    assert found.skipped == []
    assert [run.name[0] for run in found.runs] == ["=", "d", "c", "b", "a"]
    rows = table(found.runs)
    assert list(rows[0]) == [*COLUMNS, "model.depth", "optim.lr"]
    assert rows[-1] == {
        "name": "a first", "data": "digits", "model": "vit_digits", "params": 213002, "epochs": 3, "top1": 0.9875,
        "val_top1": 0.8, "loss": 0.051234, "seconds": 41.25, "images_per_second": 3012.4, "seed": 0,
        "status": "finished", "model.depth": 4, "optim.lr": 0.001,
    }  # fmt: skip
    killed, unsaved = rows[2], rows[1]
    assert killed["status"] == "stopped at step 20 of 30" and unsaved["status"] == "never saved, at step 0 of 30"
    assert killed["top1"] is None and killed["val_top1"] == 0.7 and killed["seed"] == 2 and killed["epochs"] == 3


def test_only_recipe_keys_that_vary_are_shown(notebook):
    runs = list_runs(notebook).runs
    assert differences(runs) == ["model.depth", "optim.lr"]
    assert differences(runs[:1]) == [] and differences([]) == []


def test_without_a_start_line_the_total_is_not_guessed(tmp_path):
    folder = make_run(tmp_path / "x", 1000, finished=False, steps=20)
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join(lines[1:]) + '{"kind": "tra', encoding="utf-8")
    assert list_runs(tmp_path).runs[0].status == "stopped at step 20"


def test_killed_in_the_middle_of_a_save_it_still_counts_as_saved(tmp_path):
    folder = make_run(tmp_path / "x", 1000, finished=False)
    (folder / "last").rename(folder / ".last.old")
    assert list_runs(tmp_path).runs[0].status.startswith("stopped")


def test_a_log_as_runlog_writes_it(tmp_path):
    folder = make_run(tmp_path / "x", 1000, finished=False)
    with RunLog(folder) as log:
        log.write("start", 0, steps=400)
        log.write("val", 200, top1=float("nan"))
        log.write("val", 300, top1=0.25)
    (run,) = list_runs(tmp_path).runs
    assert run.val_curve == [(300, 0.25)] and run.status == "stopped at step 300 of 400"


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("top1", "=abdc"), ("-top1", "ba=dc"), ("seconds", "=abdc"), ("-seconds", "b=adc"), ("name", "=abcd"),
        ("-name", "dcba="), ("optim.lr", "=dcab"), ("started", "=dcba"), ("-started", "abcd="), ("loss", "ba=dc"),
        ("seed", "=dbac"),
    ],
)  # fmt: skip
def test_sorted_the_best_first_and_the_unknown_last(notebook, sort, expected):
    assert "".join(row["name"][0] for row in table(list_runs(notebook).runs, sort)) == expected


def test_an_unknown_column_is_an_error_with_the_nearest(notebook):
    with pytest.raises(ValueError, match=r"--sort top_1.*'top1'"):
        table(list_runs(notebook).runs, "top_1")


def markdown_cells(line: str) -> list[str]:
    """As GitHub reads a row: split at bare bars, then a backslash before punctuation stands for the punctuation."""
    assert line.startswith("| ") and line.endswith(" |")
    cells = re.split(r"(?<!\\)(?:\\\\)* \| ", line[2:-2])
    assert not any(re.search(r"(?<!\\)(?:\\\\)*[<`|*\[\]]", cell) for cell in cells), cells
    return [re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", cell) for cell in cells]


def test_markdown_parses_back(notebook):
    rows = table(list_runs(notebook).runs)
    header, rule, *lines = to_markdown(rows).splitlines()
    assert markdown_cells(header) == list(rows[0])
    right = dict(zip(rows[0], markdown_cells(rule), strict=True))
    assert right["top1"] == "---:" and right["name"] == "---" and right["status"] == "---"
    assert len(lines) == len(rows)
    for line, row in zip(lines, rows, strict=True):
        assert markdown_cells(line) == [" ".join(shown(key, value).split()) for key, value in row.items()]
    assert "98.75 %" in lines[-1] and "213,002" in lines[-1]


def test_csv_parses_back_exactly(notebook):
    rows = table(list_runs(notebook).runs)
    read = list(csv.DictReader(io.StringIO(to_csv(rows))))
    assert len(read) == len(rows)
    for got, row in zip(read, rows, strict=True):
        for key, value in row.items():
            if value is None:
                assert got[key] == ""
            elif isinstance(value, str):
                assert got[key].removeprefix("'") == value
            else:
                assert float(got[key]) == value or value != value
    assert read[0]["name"] == "'=e(1) 最新"  # a spreadsheet would take it for a formula
    assert to_csv([]) == ",".join(COLUMNS) + "\n" and to_markdown([]) == ""


def test_lists_and_switches_in_a_recipe(tmp_path):
    make_run(tmp_path / "a", 1000, extra="flip = true\nsizes = [1, 2]")
    make_run(tmp_path / "b", 2000, extra='flip = false\nsizes = ["图"]')
    rows = table(list_runs(tmp_path).runs)
    (b, a) = csv.DictReader(io.StringIO(to_csv(rows)))
    assert (a["model.flip"], json.loads(a["model.sizes"])) == ("true", [1, 2])
    assert (b["model.flip"], json.loads(b["model.sizes"])) == ("false", ["图"])


def test_strangers_are_named_and_skipped(notebook):
    (notebook / "notes").mkdir()
    (notebook / ".hidden").mkdir()
    (notebook / "file.txt").write_text("not a folder", encoding="utf-8")
    for name, file, text in (
        ("bad_recipe", "recipe.toml", "[data"),
        ("bad_bytes", "recipe.toml", b"\xff\xfe"),
        ("bad_result", "result.json", '{"top1": 0.'),
        ("odd_result", "result.json", "[1]"),
        ("bad_log", "log.jsonl", "nonsense\n{}\n"),
    ):
        folder = make_run(notebook / name, 1)
        (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    found = list_runs(notebook)
    assert len(found.runs) == 5
    assert len(found.skipped) == 6
    for name in ("notes", "bad_recipe", "bad_bytes", "bad_result", "odd_result", "bad_log"):
        assert sum(str(notebook / name) in line for line in found.skipped) == 1


def test_a_folder_that_is_a_run_is_listed_itself(notebook):
    (run,) = list_runs(notebook / "a first").runs
    assert run.name == "a first"


def test_no_folder_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match="vitlab train"):
        list_runs(tmp_path / "runs")


def test_the_plot_shows_every_curve(notebook, tmp_path):
    without = plot(list_runs(notebook).runs, tmp_path / "out" / "plot.png")
    assert without == ["d unsaved"]
    with Image.open(tmp_path / "out" / "plot.png") as picture:
        assert picture.width >= 1000
        colours = {colour for n, colour in picture.convert("RGB").getcolors(1 << 24) if n > 100}
    assert {(31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)} <= colours  # C0 to C3: four curves
    plot(list_runs(notebook).runs, tmp_path / "plot.svg")
    svg = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    assert "最新  80.00 %" in svg and "c killed  70.00 %" in svg


def test_plots_that_cannot_be(notebook, tmp_path, monkeypatch):
    runs = list_runs(notebook).runs
    with pytest.raises(ValueError, match="no curve"):
        plot([run for run in runs if run.name == "d unsaved"], tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"cannot draw \.txt"):
        plot(runs, tmp_path / "x.txt")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"pip install 'vitlab\[plot\]'"):
        plot(runs, tmp_path / "x.png")


def test_the_command(notebook, tmp_path, capsys):
    (notebook / "notes").mkdir()
    command(notebook, "table", tmp_path / "x.png", "top1", False, True)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["name", "data", "model"] and len(lines) == 6
    assert lines[1].startswith("=e(1) 最新") and "99.00 %" in lines[1]
    assert "notes: is not a run" in err and "without a curve: d unsaved" in err and (tmp_path / "x.png").stat().st_size
    command(notebook, "csv", None, None, False)
    assert len(list(csv.reader(io.StringIO(capsys.readouterr().out)))) == 6
    command(notebook, "markdown", None, None, False)
    assert capsys.readouterr().out.count("\n") == 7
    command(notebook, "table", None, None, True)
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert rows[0]["loss"] == "NaN" and rows[-1]["top1"] == 0.9875
    with pytest.raises(ValueError, match="table, markdown, csv"):
        command(notebook, "html", None, None, False)


def test_notes_stand_in_every_format_and_the_table_goes_to_a_file(notebook, tmp_path, capsys):
    make_run(notebook / "f noted", 6000)
    recipe = with_settings(Recipe(), ['run.note=no positions: I expect < 80 %, "surely" | 预期'])
    (notebook / "f noted" / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
    note = recipe.run.note
    command(notebook, "table", None, None, False)
    assert note in re.sub(r"\s+", " ", capsys.readouterr().out)
    command(notebook, "table", tmp_path / "out" / "runs.csv", None, False)
    command(notebook, "table", tmp_path / "runs.MD", None, False)
    written = (tmp_path / "out" / "runs.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(written)))
    assert [row["note"] for row in rows] == [note, "", "", "", "", ""]
    assert (tmp_path / "runs.MD").read_text(encoding="utf-8") == to_markdown(table(list_runs(notebook).runs))
    assert "run.note" not in differences(list_runs(notebook).runs)


def test_an_empty_folder_is_no_error(tmp_path, capsys):
    command(tmp_path, "table", tmp_path / "x.png", None, True)
    out, err = capsys.readouterr()
    assert json.loads(out) == [] and "vitlab train" in err and not list(tmp_path.iterdir())


def test_doctor_reads_a_log_whose_events_lack_fields(tmp_path):
    (tmp_path / "recipe.toml").write_text(to_toml(Recipe()), encoding="utf-8")
    events = [{"kind": kind, "step": 1} for kind in ("train", "skip", "doctor", "val")]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
    assert any("1 images could not be read" in message for _, message in check_run(tmp_path))


def test_a_terminal_of_80_columns_shows_the_main_numbers_and_what_differs(notebook, capsys, monkeypatch):
    command(notebook, "table", None, None, False)
    out = capsys.readouterr().out
    head = out.splitlines()[0].split("  ")
    assert 6 <= len([title for title in head if title.strip()]) <= 8
    above, below = out.split("what differs")
    varying = differences(list_runs(notebook).runs)
    assert varying and not any(key in above for key in varying)
    assert [line.split()[0] for line in below.splitlines()[1:] if line[:1].strip()] == varying
    monkeypatch.setattr("vitlab.cli.console.console", lambda: Console(width=80, highlight=False, markup=False))
    command(notebook, "table", None, None, False)
    narrow = capsys.readouterr().out
    assert max(map(len, narrow.splitlines())) <= 80 and "99.00 %" in narrow


def test_a_run_on_the_ladder_shows_its_rung_and_its_weights(tmp_path, capsys):
    recipe = with_settings(Recipe(), ["run.ladder=true", "model.init_from=/far/away/runs/first/best"])
    for name, kept in (("finished", True), ("stopped", False)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "recipe.toml").write_text(to_toml(recipe), encoding="utf-8")
        events = [dict(kind="start", step=0, steps=0, time=1.0), dict(kind="rung", step=1, name="knn", kept=False)]
        events += [dict(kind="rung", step=2, name="probe", top1=0.75, kept=True)]
        (folder / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events), encoding="utf-8")
        if kept:
            (folder / "result.json").write_text(
                json.dumps(dict(top1=0.5, val_top1=0.625, rung="lora", seconds=3.0)), encoding="utf-8"
            )
    finished, stopped = (read_run(tmp_path / name).main_row() for name in ("finished", "stopped"))
    assert (finished["rung"], finished["val_top1"], finished["status"]) == ("lora", 0.625, "finished")
    assert (stopped["rung"], stopped["status"]) == ("probe", "stopped after probe")
    assert finished["model"] == "first/best"
    command(tmp_path, "table", None, None, True)
    assert list(json.loads(capsys.readouterr().out)[0])[: len(COLUMNS)] == list(COLUMNS)  # as before


def test_numbers_are_shown_with_the_digits_that_mean_something():
    cells = {"r2": -0.018696002448595594, "val_r2": 0.5, "loss": 1.23456, "seconds": 23.16, "images_per_second": 71.4}
    assert [shown(key, value) for key, value in cells.items()] == ["-0.0187", "0.5000", "1.2346", "23.2", "71"]
