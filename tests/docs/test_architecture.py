"""docs/{en,zh}/architecture.md: its lists are those of the code, its examples work, both languages hold the same."""

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import vitlab
from vitlab import errors
from vitlab.explain.methods import METHODS, ScoringMethod
from vitlab.images.datasets import open_data
from vitlab.images.samples import open_sample
from vitlab.images.sources import SOURCES
from vitlab.models.base import Capability
from vitlab.training.loop import fit
from vitlab.training.objectives import OBJECTIVES
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings

ROOT = Path(__file__).parents[2]
PAGES = {x: (ROOT / "docs" / x / "architecture.md").read_text(encoding="utf-8") for x in ("en", "zh")}


def blocks(text: str, fence: str) -> list[str]:
    return re.findall(rf"^```{re.escape(fence)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(params=PAGES.values(), ids=list(PAGES))
def text(request) -> str:
    return request.param


def test_layers_are_those_of_the_contract(text):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = [c["layers"] for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers"]
    assert "".join(f"{re.sub('[()]', '', layer)}\n" for layer in layers) in blocks(text, "text")


def test_every_package_is_in_the_table(text):
    rows = re.findall(r"^\| \[`([\w./]+)`\]", text, re.MULTILINE)
    package = ROOT / "src" / "vitlab"
    folders = {f"{p.name}/" for p in package.iterdir() if (p / "__init__.py").exists()}
    assert folders <= set(rows) and all((package / row).exists() for row in rows)


def test_public_functions_exist(text):
    (row,) = re.findall(r"^\| \[`__init__.py`\].*", text, re.MULTILINE)
    names = set(re.findall(r"`(\w+)`", row)) - {"__init__"}
    assert names <= set(dir(vitlab)) and len(names) > 10
    assert all(callable(getattr(vitlab, name)) for name in names)


def test_errors_are_those_of_the_module(text):
    (tree,) = [b for b in blocks(text, "text") if b.startswith("VitlabError")]
    children = {c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, errors.VitlabError)}
    assert set(re.findall(r"\w+Error\b", tree)) == children | {"ValueError"}


def test_capabilities_are_those_of_the_class(text):
    assert re.findall(r"^\| `([A-Z]+)` \|", text, re.MULTILINE) == [c.name for c in Capability]


def test_short_examples_run(text):
    names: dict = {}
    for block in blocks(text, "python"):
        exec(compile(block, "architecture.md", "exec"), names)
    assert names["features"].shape == (2, 64)


def install(file: str, monkeypatch) -> None:
    """Makes the example's file importable, as if it lay where the page says."""
    (source,) = blocks(PAGES["en"], f"python file={file}")
    name = file.removeprefix("src/").removesuffix(".py").replace("/", ".")
    module = ModuleType(name)
    exec(compile(source, file, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)


def row(table: str) -> dict[str, str]:
    (line,) = blocks(PAGES["en"], f"python row={table}")
    return eval(f"{{{line}}}")


def test_an_explanation_method_is_one_file_and_one_row(monkeypatch):
    install("src/vitlab/explain/embedding_norm.py", monkeypatch)
    (line,) = blocks(PAGES["en"], "python row=METHODS")
    method = eval(line, {"ScoringMethod": ScoringMethod})
    monkeypatch.setitem(METHODS, method.name, method)
    digit, cat = open_sample("digits#3").image, ROOT / "docs" / "pictures" / "chelsea.jpg"
    for model, image, grid in (("bundled:digits", digit, (4, 4)), ("bundled:cifar10", cat, (8, 8))):
        network = vitlab.load(model)
        assert method.supports(network) and method(network, image).shape == (1, *grid)
    assert method(vitlab.create("swin_cifar"), cat).shape == (1, 16, 16)


def test_an_objective_is_one_file_and_one_line(monkeypatch, tmp_path):
    install("src/vitlab/training/objectives/bce.py", monkeypatch)
    for name, value in row("OBJECTIVES").items():
        monkeypatch.setitem(OBJECTIVES, name, value)
    settings = ["objective.name=bce", "run.epochs=1", "model.depth=1", f"run.dir={tmp_path / 'run'}"]
    result = fit(with_settings(find_recipe("digits")[1], settings), tmp_path / "run")
    assert 0 < result["top1"] <= 1


def test_a_data_source_is_one_file_and_one_line(monkeypatch):
    install("src/vitlab/images/sources/stripes.py", monkeypatch)
    for name, value in row("SOURCES").items():
        monkeypatch.setitem(SOURCES, name, value)
    data = open_data("stripes")
    assert data.classes == ["across", "down"] and data.train.read(0).shape == (16, 16, 1)
    assert len(data.train) + len(data.val) == 400


def test_both_languages_hold_the_same():
    fences = [re.findall(r"^```python.*?^```$", text, re.M | re.S) for text in PAGES.values()]
    code = [[re.sub(r"\s+# .*", "", block) for block in page] for page in fences]
    assert code[0] == code[1] and len(code[0]) == 9
    prose = [re.sub(r"^```.*?^```$", "", t, flags=re.M | re.S) for t in PAGES.values()]
    for pattern in (r"^#+ ", r"^\|", r"^\d\. ", r"^- "):
        assert len(re.findall(pattern, prose[0], re.M)) == len(re.findall(pattern, prose[1], re.M)), pattern
    for pattern in (r"`([^`\n]+)`", r"\]\(((?!\.\./(?:en|zh)/)[^)]+)\)"):
        ours, theirs = (sorted(re.findall(pattern, t)) for t in prose)
        assert ours == theirs, pattern
