"""docs/{en,zh}/search.md: the code runs, figures are the package's, both languages hold the same."""

import inspect
import re
from pathlib import Path

import pytest

from vitlab.search import graph, query, update

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "search.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", PAGES)
def test_code_runs(language, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for block in blocks(PAGES[language], "python"):
        exec(compile(block, "search.md", "exec"), {})
        printed = capsys.readouterr().out.splitlines()
        told = re.findall(r"print\(.*\)  # (.*)$", block, re.MULTILINE)
        assert printed[: len(told)] == told and len(printed) == len(told) + 3


@pytest.mark.parametrize("language", PAGES)
def test_figures_are_those_of_the_code(language):
    text = PAGES[language]
    assert f"{graph.EXACT:,}" in text
    assert query.SPARE == 4 and re.search("four times|四倍", text)
    assert inspect.signature(update).parameters["batch_size"].default == 64 and "64" in text


def test_both_languages_hold_the_same():
    for language in ("python", "bash"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in PAGES.values()]
        assert plain[0] == plain[1] and plain[0]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in PAGES.values()]
    assert headings[0] == headings[1]
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    code = [sorted(re.findall(r"`([^`\n]+)`", text)) for text in prose]
    assert code[0] == code[1]
    tables = [re.findall(r"^\|", text, re.MULTILINE) for text in prose]
    assert tables[0] == tables[1]
