"""benchmarks/: the scripts take hours, so they are not run here; but what they import is there."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_imports_names_that_exist(script, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    neighbours = {path.stem for path in FOLDER.glob("*.py")}
    for node in ast.walk(ast.parse((FOLDER / script).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            if node.module.partition(".")[0] not in {"vitlab", *neighbours}:
                continue
            module = import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert name in vars(module) or find_spec(f"{node.module}.{name}"), f"{node.module} has no {name}"
