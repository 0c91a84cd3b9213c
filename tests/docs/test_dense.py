"""docs/{en,zh}/linear_head.md, eomt, yolos, dpt and segformer: the code runs and gives the shapes, tables are the
registry's, and both languages hold the same.
"""

import re
from pathlib import Path

import pytest
import torch

from vitlab.explain.sizes import size_of
from vitlab.models.registry import MODELS

ROOT = Path(__file__).parents[2]
FAMILIES = ("linear_head", "eomt", "yolos", "dpt", "segformer")
PAGES = {
    (name, language): (ROOT / "docs" / language / f"{name}.md").read_text(encoding="utf-8")
    for name in FAMILIES
    for language in ("en", "zh")
}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", FAMILIES)
def test_code_runs_and_gives_the_shapes(name):
    torch.manual_seed(0)
    text = "\n".join(blocks(PAGES[name, "en"], "python"))
    found: dict = {}
    with torch.no_grad():
        exec(compile(text, f"{name}.md", "exec"), found)
    shapes = found["shapes"] if "shapes" in found else (found["shape"],)
    line = next(line for line in text.splitlines() if line.startswith("shape"))
    assert re.findall(r"\([\d, ]+\)", line.split("#")[1]) == [str(shape) for shape in shapes]
    if name == "eomt":
        assert found["classes"].shape == found["segments"].ids.shape == found["found"].masks.shape[1:] == (48, 40)
        assert list(found["terms"]) == ["classes", "masks", "dice"]
    if name == "yolos":
        assert list(found["terms"]) == ["classes", "boxes", "giou"]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_is_the_registrys(name):
    rows = {}
    for model, entry in MODELS.items():
        if entry.family == name:
            c = entry.config
            if name == "segformer":
                cells = [" ".join(map(str, values)) for values in (c.encoder.widths, c.encoder.depths)]
            else:
                cells = [f"{c.encoder.width} x {c.encoder.depth}", "{} x {}".format(*c.image_size)]
            rows[model] = [*cells, f"{size_of(model)[0]:,}"]
    for language in ("en", "zh"):
        told = re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGES[name, language], re.MULTILINE)
        assert {model: cells.split(" | ") for model, cells in told} == rows


@pytest.mark.parametrize("name", FAMILIES)
def test_both_languages_hold_the_same(name):
    texts = [PAGES[name, language] for language in ("en", "zh")]
    for language in ("python", "bash"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in texts]
        assert plain[0] == plain[1] and plain[0]
    assert len({len(re.findall(r"^#+ ", text, re.MULTILINE)) for text in texts}) == 1
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in texts]
    assert len({frozenset(re.findall(r"`([^`\n]+)`", text)) for text in prose}) == 1
    assert re.findall(r"\$\$.*?\$\$", prose[0]) == re.findall(r"\$\$.*?\$\$", prose[1])
