"""docs/{en,zh}/look_inside.md: every command and snippet runs, its pictures are what the commands below them draw, its
figures are those that were measured, and both languages hold the same."""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from PIL import Image

import vitlab
import vitlab.cli.main

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
TEXTS = {lang: (ROOT / "docs" / lang / "look_inside.md").read_text(encoding="utf-8") for lang in ("en", "zh")}
READMES = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")]
VERBS = ("attention", "rollout", "relevance", "features", "figure7", "faithfulness", "pruned", "compare", "diff")
VERBS += ("lens", "attribution", "ablate", "patch")
DRAW = runpy.run_path(str(PICTURES / "draw.py"), run_name="draw")
CHINESE = re.compile(r"[\u4e00-\u9fff]")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(text: str, language: str = "bash") -> list[list[str]]:
    """The words of each line; a remark starts with a space and #, while digits#3 is a word."""
    lines = (line for block in blocks(text, language) for line in block.splitlines())
    return [shlex.split(re.sub(r"\s+#.*", "", line)) for line in lines]


def prose(text: str) -> list[str]:
    """The lines outside code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines()


@cache
def verbs() -> Any:
    return typer.main.get_command(vitlab.cli.main.app)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """vitlab VERB [VERB] ARGS -> typer's command, ARGS; a verb that does not exist is a KeyError."""
    program, *rest = words
    assert program == "vitlab"
    command = verbs()
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.fixture(params=TEXTS)
def text(request) -> str:
    return TEXTS[request.param]


# ------------------------------------------------------------------------------------------------------------ commands


def test_every_verb_has_its_section(text):
    assert set(VERBS) <= set(re.findall(r"^## (\w+)$", text, re.MULTILINE))


def test_options_that_the_text_names_exist(text):
    """Those of commands that run are checked by running; here also those in prose, and commands that are not run."""
    asked = [words for words in [*commands(text), *commands(text, "bash no-run")] if words[0] == "vitlab"]
    known = {"--with"}
    for words in asked:
        command, rest = command_of(words)
        command.make_context(command.name, list(rest))
        known |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    named = {option for line in prose(text) for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert len(named) > 10 and named <= known


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    """A folder in which all commands and snippets of the page have run, in their order; and what the snippets made."""
    folder, names = tmp_path_factory.mktemp("look_inside"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for language, code in re.findall(r"^```(bash|python)\n(.*?)^```$", TEXTS["en"], re.MULTILINE | re.DOTALL):
            if language == "python":
                exec(compile(code, "look_inside.md", "exec"), names)
                check_shapes(code, names)
                continue
            for words in commands(f"```bash\n{code}```"):
                if words[0] == "cp":
                    shutil.copy(ROOT / words[1], words[2])
                    continue
                patch.setattr(sys, "argv", words)
                with pytest.raises(SystemExit) as stopped:
                    vitlab.cli.main.run()
                assert (stopped.value.code or 0) == (words[1] == "diff"), shlex.join(words)
    return folder, names


def check_shapes(code: str, names: dict[str, Any]) -> None:
    """`name = ...  # (2, 3)` is the shape of what was made."""
    for name, shape in re.findall(r"^(\w+) = .*  # (\(\d[\d, ]*\))$", code, re.MULTILINE):
        assert tuple(names[name].shape) == ast.literal_eval(shape), name


def test_commands_write_what_they_name(ran):
    outs = [words for words in commands(TEXTS["en"]) if "--out" in words]
    assert len(outs) >= 14
    for words in outs:
        drawn = ran[0] / words[words.index("--out") + 1]
        with Image.open(drawn) as picture, np.load(drawn.with_suffix(".npz"), allow_pickle=False) as numbers:
            assert min(picture.size) > 250 and len(numbers.files) > 1, drawn.name
    assert (ran[0] / "attention.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_snippets_make_what_the_page_says(ran):
    folder, names = ran
    assert len(re.findall(r"  # \(\d[\d, ]*\)$", TEXTS["en"], re.MULTILINE)) >= 9
    np.testing.assert_allclose(np.load(folder / "two_maps.npz")["rollout"], np.load(folder / "rollout.npz")["maps"])
    assert names["result"].cause.kind == "eps" and names["rows"][0].method == "rollout"
    patch = names["views"][0].patch_under(170, 112)
    assert patch == np.load(folder / "eye.npz")["query_patch"][0]
    assert divmod(patch, 24) == (24 // 4, 36 // 4)  # query=(36, 24), in patches of 4 pixels


# ------------------------------------------------------------------------------------------------------------ pictures


def test_pictures_are_what_stands_below_them(ran):
    """Averaged over 8 x 8 pixels, which takes out the dithering of the stored copies."""
    shown = list(DRAW["sources"](TEXTS["en"]))
    assert len(shown) == TEXTS["en"].count("![") >= 10
    for name, language, code in shown:
        if name == "page":  # a screenshot
            continue
        assert language == "python" or shlex.split(code)[-1] == f"{name}.png" or f"--out {name}.png" in code
        stored, drawn = (averaged(folder / f"{name}.png") for folder in (PICTURES, ran[0]))
        again = f"draw it again: python docs/pictures/draw.py {name}"
        assert stored.shape == drawn.shape, f"{name}.png: {again}"
        assert np.abs(stored - drawn).mean() < CLOSE, f"{name}.png: {again}"


CLOSE = 0.006  # of white


def averaged(path: Path) -> np.ndarray:
    pixels = np.asarray(Image.open(path).convert("RGB"), dtype=float) / 255
    h, w = (side // 8 * 8 for side in pixels.shape[:2])
    return pixels[:h, :w].reshape(h // 8, 8, w // 8, 8, 3).mean((1, 3))


def test_another_map_is_noticed(ran):
    """The same sheet with a map of another method, or for another class, is further off than that."""
    for stored, other in (("relevance", "dog"), ("rollout", "rollout_90")):
        drawn = averaged(ran[0] / f"{other}.png")
        ours = averaged(PICTURES / f"{stored}.png")[-30:]  # the maps, not the words above them
        assert np.abs(ours - drawn[-30:]).mean() > CLOSE


@pytest.mark.parametrize("page", [*TEXTS.values(), *READMES], ids=["en", "zh", "readme", "readme-zh"])
def test_pictures_exist_and_are_small(page):
    shown = re.findall(r"!\[[^\]]+\]\([\w./]*pictures/(\w+\.png)\)", page)
    assert len(shown) == page.count("![") >= 2
    for name in shown:
        assert 5_000 < (PICTURES / name).stat().st_size < 200_000, name


def test_every_stored_picture_is_shown_and_the_photo_has_its_licence():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    shown = {name for page in pages for name in re.findall(r"(\w+\.png)\)", page.read_text(encoding="utf-8"))}
    assert {path.name for path in PICTURES.glob("*.png")} <= shown
    assert (PICTURES / "chelsea.jpg").stat().st_size < 60_000
    words = (PICTURES / "README.md").read_text(encoding="utf-8")
    assert "CC0 1.0" in words and "Stéfan van der Walt" in words


def test_readme_shows_commands_of_this_page():
    """In the README a picture stands above its command as well, and it is the same one."""
    ours = {name: code for name, language, code in DRAW["sources"](TEXTS["en"]) if language == "bash"}
    for readme in READMES:
        found = re.findall(r"!\[[^\]]+\]\(docs/pictures/(\w+)\.png\)\n\n```bash\n(.*?)^```$", readme, re.M | re.S)
        assert len(found) >= 2
        for name, code in found:
            lines = [re.sub(r"\s+#.*", "", line).replace("docs/pictures/", "") for line in code.splitlines()]
            assert ours[name] in lines, name


# ------------------------------------------------------------------------------------------------------------- figures


def test_figures_in_the_text_are_those_measured(ran, text):
    numbers = np.load(ran[0] / "figure7.npz")
    low, high, uniform = numbers["distance"].min(), numbers["distance"].max(), numbers["uniform_distance"]
    for value in (low, high, uniform):
        assert f" {value:.1f} " in text or f" {value:.1f}." in text or f" {value:.1f}。" in text, value
    for name in ("cifar10", "digits"):
        told = json.loads((ROOT / "src" / "vitlab" / "bundled" / name / "model.json").read_text(encoding="utf-8"))
        assert f"{100 * told['metrics']['test_top1']:.1f} %" in text


def test_diff_prints_what_the_page_shows(ran, monkeypatch, capsys):
    """Word by word; of numbers only that they are there, since the last digits depend on the machine."""
    [shown] = blocks(TEXTS["en"], "console")
    command, *lines = shown.splitlines()
    monkeypatch.chdir(ran[0])
    monkeypatch.setattr(sys, "argv", shlex.split(command.removeprefix("$ ")))
    with pytest.raises(SystemExit):
        vitlab.cli.main.run()
    printed = capsys.readouterr().out
    assert without_numbers("\n".join(lines)) == without_numbers(printed)
    assert "first difference: blocks.0.norm1" in printed and "LayerNorm eps: 1e-06 in A, 0.0001 in B" in printed


def without_numbers(text: str) -> list[str]:
    return re.sub(r"-?\d\.\d+(e[-+]\d+)?|-?\d\.\d+", "0", text).split()


# ----------------------------------------------------------------------------------------------------------- languages


def test_both_languages_hold_the_same():
    english, chinese = TEXTS.values()
    for language in ("bash", "bash no-run", "python", "console"):
        assert blocks(english, language) == blocks(chinese, language)
    for kind in (r"^#+ ", r"\$\$.*\$\$", r"\]\((?!\.\./(?:en|zh)/)[^)]+\)", r"^\|---.*"):
        ours, theirs = (re.findall(kind, text, re.MULTILINE) for text in (english, chinese))
        assert ours == theirs, kind
    for kind in (r"`[^`\n]+`", r"\$[^$\n]+\$", r"arXiv:[\d.]+\d"):  # in another order, perhaps
        ours, theirs = ({*re.findall(kind, "\n".join(prose(text)))} for text in (english, chinese))
        assert ours == theirs, ours ^ theirs
    assert not CHINESE.search(english.replace("中文", ""))
    paragraphs = [line for line in prose(chinese) if len(line) > 60 and not line.startswith(("|", "$", "!"))]
    assert all(CHINESE.search(line) for line in paragraphs)


def test_maths_works_on_github(text):
    """GitHub wants a space before $ (also after Chinese punctuation), and eats a backslash before punctuation."""
    for words in prose(text):
        for match in re.finditer(r"\$\$?[^$]+\$\$?", words):
            before, after = words[: match.start()], words[match.end() :]
            assert not before or before[-1] == " ", match[0]
            assert not after or after[0] in " .,:;", match[0]
            assert not re.search(r"\\[^A-Za-z ]", match[0]), match[0]
