"""The README in both languages: its code runs, its output is what the command prints."""

import ast
import re
import shlex
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import vitlab.cli.main

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def blocks(page: Path, language: str) -> list[str]:
    fence = re.compile(rf"^```{re.escape(language)}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), namespace)
    assert namespace["logits"].shape == (2, 10)
    assert namespace["trace"]["attention", -1].shape == (2, 3, 21, 21)
    assert str(namespace["trace"].layout) == "21 = 1 class token + 4 register tokens + 4 x 4 patches"
    assert (namespace["model"].config.classes, namespace["model"].config.image_size) == (3, (224, 224))
    for block in blocks(page, "python no-run"):
        ast.parse(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_console_output_is_what_the_command_prints(page, capsys, monkeypatch, tmp_path):
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    shutil.copy(ROOT / "docs" / "pictures" / "chelsea.jpg", tmp_path / "docs" / "pictures")
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "console"):
        command, *shown = block.splitlines()
        monkeypatch.setattr(sys, "argv", command.removeprefix("$ ").split())
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        assert not stopped.value.code
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed[: len(shown)] == shown


OUTPUTS = ("-o", "--out", "--html", "--sheet", "--csv", "--sort", "--preview")
MADE = {"vitlab train": ["runs/digits"], "vitlab learn attention": ["attention.py"]}


def files_missing(text: str) -> list[str]:
    """Files and folders that a command names and that are not there, in the page's order.

    They are in the repository, made by an earlier line, or a placeholder in capitals for a reader's own.
    """
    made, missing = {"my_model"}, []  # by a block of Python
    for block in re.findall(r"^```(?:bash|console)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^(?:\$ )?((?:vitlab|make|python|cp) ?.*)$", block, re.MULTILINE):
            words = shlex.split(line, comments=True)
            given = [word for previous, word in pairwise(words) if previous not in OUTPUTS]
            paths = [
                word for word in given if re.search(r"\.\w{2,5}$|/|^my_", word) and not re.match(r"-|[\w.-]+[:=]", word)
            ]
            made |= {word for previous, word in pairwise(words) if previous in OUTPUTS}
            made |= {words[3]} if words[1:2] == ["convert"] else set()
            paths = [path for path in paths if path not in made and words[1] != "push"]
            starts = tuple(folder for command, folders in MADE.items() if command in text for folder in folders)
            missing += [path for path in paths if not path.startswith(starts) and not (ROOT / path).exists()]
    return missing


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_that_a_command_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    assert not files_missing(text)
    assert files_missing(text.replace("chelsea.jpg", "nobody.jpg").replace("runs/digits", "runs/nothing"))


def test_both_languages_hold_the_same_commands_and_links():
    english, chinese = PAGES
    for language in ("bash", "console", "python", "python no-run"):
        without_remarks = [[re.sub(r"\s*#.*", "", b) for b in blocks(page, language)] for page in PAGES]
        assert without_remarks[0] == without_remarks[1]
    targets = [set(re.findall(r"\]\((?!README)([^)]+)\)", page.read_text(encoding="utf-8"))) for page in PAGES]
    chinese_pages = {"docs/en/": "docs/zh/", "scratch/README.md": "scratch/README.zh-CN.md"}
    for old, new in chinese_pages.items():
        targets[0] = {target.replace(old, new) for target in targets[0]}
    assert targets[0] == targets[1]
    headings = [re.findall(r"^#+ ", page.read_text(encoding="utf-8"), re.MULTILINE) for page in (english, chinese)]
    assert headings[0] == headings[1]
