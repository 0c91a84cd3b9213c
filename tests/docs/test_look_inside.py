"""docs/{en,zh}/look_inside.md: the code and the commands run, every picture is what the command below it draws, both
languages say the same."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

import vitlab.cli.main

ROOT = Path(__file__).parents[2]
PAGES = {language: ROOT / "docs" / language / "look_inside.md" for language in ("en", "zh")}
PICTURES = ROOT / "docs" / "pictures"
TEXTS = {language: page.read_text(encoding="utf-8") for language, page in PAGES.items()}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str, language: str = "bash") -> list[list[str]]:
    """What a shell would make of each line; a remark starts with a space and #, digits#3 is a word."""
    lines = (line for block in blocks(text, language) for line in block.splitlines())
    return [shlex.split(re.sub(r"\s+#.*", "", line)) for line in lines]


def resolve(words: list[str]) -> tuple[Any, list[str]]:
    """vitlab VERB [VERB] ARGS -> typer's command, ARGS; a verb that does not exist is a KeyError."""
    program, *rest = words
    assert program == "vitlab"
    command: Any = typer.main.get_command(vitlab.cli.main.app)
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def parse(words: list[str]) -> dict[str, Any]:
    """The values that the command would be called with; unknown options and wrong kinds are typer's own errors."""
    command, rest = resolve(words)
    return command.make_context(command.name, list(rest)).params


def prose(text: str) -> list[tuple[int, str]]:
    """(line number, line) of everything outside code."""
    found, code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            code = not code
        elif not code:
            found.append((number, line))
    return found


# ---------------------------------------------------------------- commands


@pytest.fixture(params=PAGES)
def text(request) -> str:
    return TEXTS[request.param]


def test_every_command_and_option_exists(text):
    found = [*commands(text), *commands(text, "bash no-run")]
    assert len(found) > 15
    for words in found:
        parse(words)
    options = [p for words in found for p in resolve(words)[0].params]
    known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    named = {option for _, line in prose(text) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert named and named <= known


@pytest.mark.parametrize("change", [("--discard", "--discart"), ("rollout", "rolout"), ("0.9", "most")])
def test_a_wrong_command_is_noticed(change):
    [words] = [words for words in commands(TEXTS["en"]) if "--discard" in words]
    assert parse(words)["discard"] == 0.9
    with pytest.raises(Exception, match=r"(?i)no such option|rolout|not a valid float"):
        parse([change[1] if word == change[0] else word for word in words])


def test_every_verb_has_its_section(text):
    verbs = set(typer.main.get_command(vitlab.cli.main.app).commands["explain"].commands)  # type: ignore[attr-defined]
    assert verbs | {"diff"} <= set(re.findall(r"^## (\w+)$", text, re.MULTILINE))


# ---------------------------------------------------------------- what they do


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """A folder in which the first code block and then all commands have run."""
    folder = tmp_path_factory.mktemp("look_inside")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(blocks(TEXTS["en"], "python")[0], "look_inside.md", "exec"), {})
        for words in commands(TEXTS["en"]):
            patch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as stopped:
                vitlab.cli.main.run()
            assert (stopped.value.code or 0) == (words[1] == "diff"), shlex.join(words)
    return folder


def test_commands_write_what_they_name(ran):
    for words in commands(TEXTS["en"]):
        if "--out" in words:
            drawn = ran / words[words.index("--out") + 1]
            with Image.open(drawn) as picture, np.load(drawn.with_suffix(".npz"), allow_pickle=False) as numbers:
                assert min(picture.size) > 300 and len(numbers.files) > 1, drawn.name
            assert drawn.with_suffix(".html").exists() == ("--html" in words)


def test_diff_names_what_was_planted(ran, monkeypatch, capsys):
    monkeypatch.chdir(ran)
    planted, asked, _ = [words for words in commands(TEXTS["en"]) if words[1] in ("convert", "diff")]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit):
        vitlab.cli.main.run()
    printed = capsys.readouterr().out
    eps = float(planted[planted.index("--eps") + 1])
    assert f"LayerNorm eps: 1e-06 in A, {eps:g} in B" in printed and "first difference: blocks.0.norm1" in printed


def test_pictures_are_what_the_commands_below_them_draw(ran, text):
    shown = re.findall(r"!\[[^\]]+\]\(\.\./pictures/(\w+\.png)\)\n\n```bash\n([^\n]+)", text)
    assert len(shown) == text.count("![") >= 7
    for name, command in shown:
        words = shlex.split(command)
        assert words[words.index("--out") + 1] == name
        assert (PICTURES / name).stat().st_size < 200_000, name
        stored, drawn = (
            np.asarray(Image.open(folder / name).convert("RGB"), dtype=float) / 255 for folder in (PICTURES, ran)
        )
        assert stored.shape == drawn.shape, f"{name}: draw it again: {command}"
        off = np.abs(stored - drawn).mean()
        assert off < 0.01, f"{name}: {off:.3f} off; draw it again: {command}"


def test_every_picture_is_shown_somewhere():
    pages = [p for p in ROOT.rglob("*.md") if ".venv" not in p.parts]
    links = {link.split("/")[-1] for p in pages for link in re.findall(r"[\w./-]+\.png", p.read_text(encoding="utf-8"))}
    assert {path.name for path in PICTURES.iterdir()} <= links


def test_code_runs_and_shapes_are_as_written(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(blocks(text, "python"))
    (tmp_path / "page.py").write_text(code, encoding="utf-8")
    found = runpy.run_path(str(tmp_path / "page.py"))
    said = re.findall(r"^(\w+) = .*  # (\([\d, ]+\))$", code, re.MULTILINE)
    assert len(said) >= 8
    for name, shape in said:
        assert tuple(found[name].shape) == ast.literal_eval(shape), name
    assert found["found"].cause.kind == "eps" and (tmp_path / "two_maps.npz").is_file()


# ---------------------------------------------------------------- words


def test_both_languages_say_the_same():
    english, chinese = TEXTS.values()
    for language in ("bash", "bash no-run", "python"):
        assert blocks(english, language) == blocks(chinese, language)
    assert [line for line, _ in prose(english)] == [line for line, _ in prose(chinese)]
    for (line, ours), (_, theirs) in zip(prose(english)[3:], prose(chinese)[3:], strict=True):
        for kind in (r"^#+ ", r"^\$\$.*", r"\|", r"^- ", r"`[^`]+`", r"\$[^$]+\$", r"arXiv:[\d.]+", r"\]\([^)]+\)"):
            codes = [sorted(re.findall(kind, words)) for words in (ours, theirs)]
            assert codes[0] == codes[1], f"line {line}: {codes}"
        numbers = [sorted(re.findall(r"\d+(?:\.\d+)?", words)) for words in (ours, theirs)]
        assert set(numbers[0]) == set(numbers[1]), f"line {line}: {numbers}"
    assert re.search(r"[\u4e00-\u9fff]", chinese) and not re.search(r"[\u4e00-\u9fff]", english.replace("中文", ""))


def test_maths_works_on_github(text):
    """GitHub wants a space before $ (also after Chinese punctuation), and eats a backslash before punctuation."""
    for line, words in prose(text):
        for match in re.finditer(r"\$\$?[^$]+\$\$?", words):
            before, after = words[: match.start()], words[match.end() :]
            assert not before or before[-1] == " ", f"{line}: {match[0]}"
            assert not after or after[0] in " .,:;", f"{line}: {match[0]}"
            assert not re.search(r"\\[^A-Za-z ]", match[0]), f"{line}: {match[0]}"
