"""docs/{en,zh}/studies.md: every study is there, both languages hold the same."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from vitlab.cli.main import app
from vitlab.explain.inspect import inspect
from vitlab.study.families import SMALL

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "studies.md").read_text(encoding="utf-8") for language in ("en", "zh")}
STUDIES = get_command(app).commands["study"].commands  # type: ignore[attr-defined]


def commands(text: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@pytest.mark.parametrize("language", PAGES)
def test_every_study_is_there(language):
    told = re.findall(r"^\| `([\w-]+)` \|", PAGES[language], re.MULTILINE)
    assert sorted(told) == sorted(STUDIES)
    assert re.findall(r"^## ([\w-]+)[:：]", PAGES[language], re.MULTILINE) == told


def test_the_sizes_are_the_networks():
    counts = [inspect(name, classes=10, image_size=32, **options).parameters for name, options in SMALL.values()]
    assert (round(min(counts) / 1e6, 1), round(max(counts) / 1e6, 1)) == (0.6, 0.9)
    assert all("0.6" in text and "0.9 M" in text for text in PAGES.values())


def test_both_languages_hold_the_same():
    assert commands(PAGES["en"]) == commands(PAGES["zh"])
    counts = [
        [len(re.findall(mark, text, re.MULTILINE)) for mark in (r"^#+ ", r"^- ", r"^\*\*")] for text in PAGES.values()
    ]
    assert counts[0] == counts[1]
