"""docs/{en,zh}/api.md: every public name has a section, and every example runs."""

import re
from pathlib import Path

import pytest
from PIL import Image

import vitlab
from vitlab.export.optimize import BACKENDS

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "api.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def examples(language: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGES[language], re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", PAGES)
def test_every_public_name_has_a_section_or_a_row(language):
    sections = set(re.findall(r"^### `(\w+)`$", PAGES[language], re.MULTILINE))
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGES[language], re.MULTILINE))
    assert sections | rows == set(vitlab.__all__) and not sections & rows
    assert all(name in "\n".join(examples(language)) for name in sections)
    for package in re.findall(r"^## `vitlab\.([\w.]+)`$", PAGES[language], re.MULTILINE):
        assert f".. automodule:: vitlab.{package}\n" in PAGES[language]


def test_both_languages_have_the_same_examples():
    assert examples("en") == examples("zh")


def test_every_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo = Image.open(Path(vitlab.__file__).parent / "images" / "photos" / "cat.jpg")
    for label in ("a", "b"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(8):
            photo.rotate(9 * number).resize((8, 8)).save(tmp_path / f"photos/{label}/{number}.png")
    monkeypatch.setitem(BACKENDS, "exact", ("eager",))  # compiling takes half a minute
    names: dict = {}
    for code in examples("en"):
        exec(compile(code, "api.md", "exec"), names)
    assert names["fast"].chosen and names["result"].page.is_file() and names["run"].report.is_file()
