"""docs/{en,zh}/mae.md: the code runs, the shapes and sizes are the model's, both languages hold the same."""

import re
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.explain.inspect import inspect
from vitlab.models.mae import MODELS

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "mae.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", PAGES)
def test_code_runs(language):
    found: dict = {}
    for block in blocks(PAGES[language], "python"):
        exec(compile(block, "mae.md", "exec"), found)
    assert found["out"].prediction.shape == (2, 64, 48) and found["out"].mask.shape == (2, 64)
    assert found["painted"].shape == (2, 3, 32, 32) and found["features"].shape == (2, 192)


@pytest.mark.parametrize("language", PAGES)
def test_shapes_are_those_of_mae_base(language):
    shapes = {step.name: step.shape for step in inspect("mae_base", batch=2).steps}
    steps = ("positions", "visible", "norm", "decoder.embed", "decoder.masked", "decoder.norm", "decoder.pixels")
    told = re.findall(r"\| \(B, (\d+), (\d+)\) \|", PAGES[language])
    assert [(2, int(n), int(d)) for n, d in told] == [shapes[step] for step in steps]
    assert "decoder.blocks.7.tokens" in shapes and "decoder.blocks.8.tokens" not in shapes


@pytest.mark.parametrize("language", PAGES)
def test_the_table_of_names_is_the_registrys(language):
    rows = re.findall(r"^\| (`mae_.*?) \|.*?\| ([\d,和and ]+) \|$", PAGES[language], re.MULTILINE)
    told = {}
    for names, decoders in rows:
        sizes = re.findall(r"(\d+), (\d+), (\d+)", decoders)
        for i, name in enumerate(re.findall(r"mae_\w+", names)):
            told[name] = tuple(map(int, sizes[min(i, len(sizes) - 1)]))
    assert told == {n: (c.decoder.width, c.decoder.depth, c.decoder.heads) for n, c in MODELS.items()}


def test_the_one_line_examples_work():
    for text in PAGES.values():
        (line,) = set(re.findall(r'`(vitlab\.create\("mae_base".*?\))`', text))
        with torch.device("meta"):
            model = eval(line, {"vitlab": vitlab})
        assert (model.config.mask_ratio, model.config.decoder.depth, model.config.image_size) == (0.6, 4, (384, 384))


def test_both_languages_hold_the_same():
    for language in ("python", "bash"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in PAGES.values()]
        assert plain[0] == plain[1] and plain[0]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in PAGES.values()]
    assert headings[0] == headings[1]
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    code = [set(re.findall(r"`([^`\n]+)`", text)) for text in prose]
    assert code[0] == code[1]
