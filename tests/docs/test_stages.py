"""docs/{en,zh}/{swin,pvt,twins}.md: the code runs and gives the shapes told, the tables are the registry's, the
languages agree."""

import re
from pathlib import Path

import pytest
import torch

from vitlab.explain.sizes import size_of
from vitlab.models.registry import MODELS, find

ROOT = Path(__file__).parents[2]
FAMILIES = {"swin": ("swin",), "pvt": ("pvt", "pvt_v2"), "twins": ("twins",)}
PAGES = {
    (name, language): (ROOT / "docs" / language / f"{name}.md").read_text(encoding="utf-8")
    for name in FAMILIES
    for language in ("en", "zh")
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", FAMILIES)
def test_code_runs_and_gives_what_is_told(name):
    """Once: in the other language only the comments differ, and there the shapes are the same (below)."""
    found: dict = {}
    text = "\n".join(blocks(PAGES[name, "en"], "python"))
    with torch.no_grad():
        exec(compile(text, f"{name}.md", "exec"), found)
    told = re.findall(r"\(B, (\d+), (\d+), (\d+)\)", re.search(r"maps = .*", text)[0])  # type: ignore[index]
    assert [tuple(m.shape[1:]) for m in found["maps"]] == [tuple(map(int, shape)) for shape in told]
    assert str(found["levels"]) in text and found["logits"].shape == (2, 5)
    if name == "swin":
        assert (found["windows"].window, found["windows"].shift) == ((4, 4), (2, 2))
    if name == "twins":
        assert (found["near"].window, found["far"].keys) == ((4, 4), (5, 7))
    if name == "pvt":
        assert (found["at"].grid, found["at"].keys, found["weights"].shape) == ((20, 29), (5, 7), (2, 1, 580, 35))
        assert [tuple(m.shape) for m in found["four"]] == [(1, 32, 64 // s, 96 // s) for s in found["strides"]]
        assert found["strides"] == [4, 8, 16, 32]


def row(name: str) -> list[str]:
    c = MODELS[name].config
    numbers = [" ".join(map(str, values)) for values in (c.depths, c.heads)]
    if c.__class__.__name__ == "SwinConfig":
        cells = [str(c.width), *numbers, str(c.window)]
    elif hasattr(c, "window"):
        cells = [" ".join(map(str, c.widths)), *numbers, str(c.window)]
    else:
        reductions = "Li" if getattr(c, "linear", False) else " ".join(map(str, c.reductions))
        cells = [" ".join(map(str, c.widths)), numbers[0], reductions]
    return [*cells, f"{size_of(name)[0]:,}"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_is_the_registrys(name):
    rows = {n: row(n) for n, entry in MODELS.items() if entry.family in FAMILIES[name]}
    for language in ("en", "zh"):
        told = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGES[name, language], re.MULTILINE)
        assert {n: cells.split(" | ") for n, cells in told} == rows


def test_names_of_other_libraries_are_found():
    for name in ("swin_base_patch4_window12_384", "Swin-T", "pvt-tiny-224", "PVT-Tiny", "PVTv2-B0", "Twins-SVT-S"):
        find(name)


@pytest.mark.parametrize("name", FAMILIES)
def test_both_languages_hold_the_same(name):
    texts = [PAGES[name, language] for language in ("en", "zh")]
    for language in ("python", "bash"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in texts]
        assert plain[0] == plain[1] and plain[0]
    told = [[re.findall(r"[(\[][\dB, h]+[)\]]", block) for block in blocks(text, "python")] for text in texts]
    assert told[0] == told[1]
    assert len({len(re.findall(r"^#+ ", text, re.MULTILINE)) for text in texts}) == 1
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in texts]
    assert len({frozenset(re.findall(r"`([^`\n]+)`", text)) for text in prose}) == 1
    assert re.findall(r"\$\$.*?\$\$", prose[0]) == re.findall(r"\$\$.*?\$\$", prose[1])
