"""Names go out as they are: [brackets] and :colons: are no markup; what is assumed is a note, not a warning."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import vitlab
import vitlab.cli.main
from vitlab.checkpoints import keymap, timm

NAMES = ["run[bold]x", "a[/b]", "[red] :dog:"]


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*args: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        found = capsys.readouterr()
        assert (stopped.value.code or 0) == code, found
        return found

    return call


def small():
    return vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4)


def bare(path: Path) -> Path:
    """Weights alone, under timm's names: 6 patches are no square, and eps is not said."""
    state = {key: value.detach() for key, value in small().state_dict().items()}
    save_file(keymap.write("timm", timm.RULES, state, heads=4), path)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_inspect_and_convert_print_a_path_as_it_is(run, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = Path(name)
    vitlab.save(small(), folder)
    assert run("inspect", folder, "--grads").out.startswith(f"{folder} on 1 image of 16 x 24\n")
    text = run("convert", folder, folder / "timm", "--to", "timm", "--check").out
    assert f"written: {folder / 'timm'} (timm)\n" in text
    assert f"check: {folder / 'timm'} read back by vitlab: largest" in text


def test_convert_prints_names_of_tensors_and_notes_as_they_are(run, capsys):
    from vitlab.checkpoints.report import Report, Row
    from vitlab.cli.convert import _show

    rows = [Row("matched", "a[bold]b", ("x[/y]",), (2, 3), "[red]"), Row("unused", None, ("[i]z",), (), "")]
    _show(Report("s", "[dim]", rows, ["n [b] :dog:"]))
    text = capsys.readouterr().out
    for part in ("theirs ([dim])", "matched", "a[bold]b", "x[/y]", "[red]", "[i]z", "note: n [b] :dog:"):
        assert part in text


def test_the_home_folder_is_meant(run, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    vitlab.save(small(), tmp_path / "m")
    run("convert", "~/m", "~/n")
    assert (tmp_path / "n" / "model.json").is_file() and not (tmp_path / "~").exists()
    assert "no such file" in run("convert", "~/m", "~/o", "--map", "~/none.toml", code=2).err.lower()
    assert "~/m on 1 image" in run("inspect", "~/m").out


def test_inspect_tells_a_bare_file_its_size_only_where_it_must(run, tmp_path):
    file = bare(tmp_path / "bare.safetensors")
    assert "--image-size" in run("inspect", file, "--heads", 4, code=2).err
    for more in ([], ["--grads"]):
        done = run("inspect", file, "--heads", 4, "--image-size", "16x24", "--json", *more)
        assert json.loads(done.out)["tokens"] == "7 = 1 class token + 2 x 3 patches"
        assert "Warning" not in done.err
        assert done.err.count("note: ") == 1 and "eps" in done.err
    vitlab.save(small(), tmp_path / "m")
    found = json.loads(run("inspect", tmp_path / "m", "--image-size", "32x40", "--json").out)
    assert found["steps"][2]["meaning"] == "+ learned positions, resized from 2 x 3 (eq. 1)"


def test_frozen_is_not_wrong(capsys):
    from vitlab.cli.console import print_table
    from vitlab.explain.gradients import gradients

    model = small()
    model.blocks.requires_grad_(False)
    print_table(gradients(model).table())
    text = capsys.readouterr().out
    free = sum(p.requires_grad for p in model.parameters())
    assert "frozen" in text and f"all {free} parameters have a finite gradient" in text
    with torch.no_grad():
        model.norm.weight.zero_()
    print_table(gradients(model).table())
    assert f" of {free} look wrong: " in capsys.readouterr().out
