"""Without an optional package, each command that needs it names the extra to install, in one line."""

import re
import shlex
import shutil
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import vitlab
from vitlab.cli.main import app
from vitlab.optional import EXTRAS, how_to_install
from vitlab.training.recipe import Recipe, to_toml

PYPROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXPLAIN = next(group for group in app.registered_groups if group.name == "explain").typer_instance

NEEDS = {
    "matplotlib": {
        "explain attention bundled:digits digits#3",
        "explain rollout bundled:digits digits#3",
        "explain relevance bundled:digits digits#3",
        "explain compare bundled:digits digits#3",
        "explain figure7 bundled:digits digits#3",
        "explain features bundled:digits digits#3",
        "explain faithfulness bundled:digits digits#3 digits#4 --methods grad_cam",
        "explain reconstruct bundled:mae sample:cat",
        "explain pruned bundled:digits digits#3 --reducer tome:r=2",
        "explain lens bundled:digits digits#3",
        "explain attribution bundled:digits digits#3",
        "explain ablate bundled:digits digits#3",
        "explain patch bundled:digits digits#3 digits#4",
        "data digits --preview seen.png",
        "runs . --plot curves.png",
        "try digits#3 --model bundled:digits --no-serve",
    },
    "onnx": {"export bundled:digits -o d.onnx"},
    "onnxscript": {"export bundled:digits -o d.onnx"},
    "onnxruntime": {"predict d.onnx digits#3"},
    "usearch": {"index photos -o photos.index --model bundled:dino"},
    "pycocotools": {"train detect_folder data.source=photos model.init_from=none"},
    "pyarrow": {"embed digits -o d.parquet --model bundled:digits"},
    "fastapi": {"serve bundled:digits", "page build site"},
    "prometheus_client": {"serve bundled:digits"},
    "python_multipart": {"serve bundled:digits"},
    "uvicorn": {"serve bundled:digits", "try digits#3 --model bundled:digits"},
    "transformers": {
        "bench bundled:digits --against transformers --rounds 3",
        "diff transformers:hf bundled:digits",
    },
    "wandb": {"train digits track.wandb=offline run.epochs=1"},
    "tensorboard": {"train digits track.tensorboard=true run.epochs=1"},
    "anywidget": set(),  # vitlab.explain.show, in tests/explain/test_attention_view.py
}


@pytest.fixture
def without(monkeypatch):
    """Call with a package to block its import, and drop the modules of vitlab that import one at the top."""

    def block(package: str) -> None:
        for name in [package, *(loaded for loaded in sys.modules if loaded.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
        for name in [name for name in sys.modules if re.match(r"vitlab\.(serve|study\.plot|explain\.widget)\b", name)]:
            monkeypatch.delitem(sys.modules, name)

    return block


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """What the commands above are given; they stop before they read it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    shutil.copy(Path(vitlab.__file__).parent / "images" / "photos" / "cat.jpg", tmp_path / "photos")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    (tmp_path / "d.onnx").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(to_toml(Recipe()), encoding="utf-8")
    (tmp_path / "run" / "log.jsonl").write_text('{"kind": "val", "step": 3, "top1": 0.5}\n', encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(("package", "line"), [(p, line) for p, lines in NEEDS.items() for line in sorted(lines)])
def test_a_missing_package_is_named_with_its_extra(package, line, command, folder, without):
    without(package)
    answer = command(*shlex.split(line), code=2).stderr
    assert f"needs {package}, which is not installed: {how_to_install(package)}." in answer
    assert "Traceback" not in answer


def test_every_drawing_command_and_every_package_has_a_row():
    drawing = {line.split()[1] for line in NEEDS["matplotlib"] if line.startswith("explain")}
    assert drawing == {c.name or c.callback.__name__ for c in EXPLAIN.registered_commands}
    assert {package for names in EXTRAS.values() for package in names} == set(NEEDS)


def test_an_import_that_fails_elsewhere_is_named_too(command, monkeypatch):
    """Where no command asked for the package first."""

    def fail(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'matplotlib.font_manager'", name="matplotlib.font_manager")

    monkeypatch.setattr(import_module("vitlab.explain.inspect"), "inspect", fail)
    answer = command("inspect", "vit_tiny", code=2).stderr
    assert "this needs matplotlib, which is not installed: pip install 'vitlab[plot]'." in answer


def test_extras_are_those_of_pyproject():
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[><=]", line)[0].replace("-", "_") for line in requirements}

    extras = {extra: names(lines) for extra, lines in PYPROJECT["optional-dependencies"].items()}
    for extra, packages in EXTRAS.items():
        assert set(packages) <= extras[extra]
    plain = names(PYPROJECT["dependencies"])
    assert plain >= set().union(*(extras[extra] for extra in EXTRAS if extra not in ("compare", "track")))
    assert not plain & (extras["compare"] | extras["track"])  # the checks against a library, and training trackers
    assert PYPROJECT["optional-dependencies"]["all"] == ["vitlab[compare,track]"]
