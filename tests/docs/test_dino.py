"""docs/{en,zh}/dino.md: the code runs, shapes, sizes and schedules are the model's, both languages hold the same."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.models import dino
from vitlab.models.registry import build_config

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "dino.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", PAGES)
def test_code_runs(language):
    found: dict = {}
    for block in blocks(PAGES[language], "python"):
        exec(compile(block, "dino.md", "exec"), found)
    assert found["features"].shape == (4, 192)
    assert [tuple(view.shape[2:]) for view in found["views"]] == [(32, 32)] * 2 + [(16, 16)] * 4
    for block in blocks(PAGES[language], "python no-run"):
        ast.parse(block)


@pytest.mark.parametrize("language", PAGES)
def test_shapes_are_those_of_dino_small(language):
    """2 + 8 views on the meta device."""
    _, config = build_config("dino_small")
    with torch.device("meta"):
        model = dino.DINO(config)
        large, small = (model.encoder.forward_features(torch.empty(1, 3, n, n)).shape[1:] for n in (224, 96))
    p = config.projection
    text = PAGES[language]
    assert f"({large[0]}, {large[1]})" in text and f"({small[0]}, {small[1]})" in text
    assert f"(10B, {config.width})" in text and f"(10B, {p.out_dim})" in text and f"(2B, {p.out_dim})" in text
    sizes = [layer.out_features for layer in model.student_head.mlp]
    assert f"| {', '.join(map(str, sizes))} |" in text
    assert "2 x 9" in text  # the loss of ten views: every one of the two large ones with the nine others
    pairs = torch.eye(2, 10) == 0
    assert int(pairs.sum()) == 2 * 9


@pytest.mark.parametrize("language", PAGES)
def test_schedules_are_the_functions(language):
    rows = re.findall(r"\| ([\d.]+) \| ([\d.]+) \|.*?\| `(\w+)\(", PAGES[language])
    told = {name: (float(start), float(end)) for start, end, name in rows}
    found = {name: (getattr(dino, name)(0, 9), getattr(dino, name)(9, 9)) for name in told}
    assert told.keys() == {"teacher_momentum", "teacher_temperature", "weight_decay"}
    for name, values in told.items():
        assert values == pytest.approx(found[name])
    assert dino.last_layer_frozen(8, 9) and not dino.last_layer_frozen(9, 9)


@pytest.mark.parametrize("language", PAGES)
def test_the_table_of_names_is_the_registrys(language):
    rows = re.findall(r"^\| (`dino_.*?) \|.*?\| ([\d,]+) \|$", PAGES[language], re.MULTILINE)
    told = {name: int(outputs.replace(",", "")) for names, outputs in rows for name in re.findall(r"dino_\w+", names)}
    assert told == {name: config.projection.out_dim for name, config in dino.MODELS.items()}


def test_the_numbers_of_health_are_those_of_the_model():
    like = torch.zeros(2, 3, 5)
    found = dino.watch(like.softmax(-1), like.log_softmax(-1), torch.tensor(math.log(5)), like[0], like[0], like[0, 0])
    for text in PAGES.values():
        table = re.findall(r"^\| (`\w+`.*?) \|.*\|.*\|.*\|$", text, re.MULTILINE)
        named = {name for row in table for name in re.findall(r"`(\w+)`", row)}
        assert found.keys() | {"loss"} <= named
    model = eval(re.search(r'`(vitlab\.create\("dino_small".*?\))`', PAGES["en"])[1], {"vitlab": vitlab})
    assert (model.config.projection.out_dim, model.config.stem) == (4096, "conv")


def test_both_languages_hold_the_same():
    for language in ("python", "bash", "python no-run"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in PAGES.values()]
        assert plain[0] == plain[1] and plain[0]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in PAGES.values()]
    assert headings[0] == headings[1]
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    code = [set(re.findall(r"`([^`\n]+)`", text)) for text in prose]
    assert code[0] == code[1]
    formulas = [sorted(re.findall(r"\$[^$\n]+\$", text)) for text in prose]
    assert formulas[0] == formulas[1]
