"""docs/{en,zh}/deit.md: the code runs, the table is the registry's, the languages agree."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from vitlab.explain.sizes import size_of
from vitlab.models.resnet import MODELS
from vitlab.training.objectives.distill import DistillOptions

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "deit.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("language", PAGES)
def test_code_runs(language):
    torch.manual_seed(0)
    found: dict = {}
    for block in blocks(PAGES[language], "python"):
        exec(compile(block, "deit.md", "exec"), found)
    assert found["answers"].shape == found["logits"].shape == (4, 3)
    assert found["hard"].item() > 0 and found["soft"].item() > 0
    assert found["ends"] == (1, 3, 5, 7)
    assert [maps.shape[1:] for maps in found["maps"]][0::3] == [(64, 32, 48), (512, 4, 6)]


@pytest.mark.parametrize("language", PAGES)
def test_the_table_is_the_registrys(language):
    rows = re.findall(
        r"^\| `(resnet\w+)` \| (\w+), ([\d ]+) \| ([\d ]+) \| ([\d,]+) \|$", PAGES[language], re.MULTILINE
    )
    told = {name: (block, depths, widths, count) for name, block, depths, widths, count in rows}
    assert told == {
        name: (c.block, " ".join(map(str, c.depths)), " ".join(map(str, c.widths)), f"{size_of(name)[0]:,}")
        for name, c in MODELS.items()
    }


@pytest.mark.parametrize("language", PAGES)
def test_the_options_exist(language):
    names = re.findall(r"^\| `(\w+)(?: = \"distill\")?` \|", PAGES[language], re.MULTILINE)
    options = [name for name in names if not name.startswith("resnet")]
    assert len(options) == 6 and set(options) <= {"name", *(f.name for f in fields(DistillOptions))}


def test_both_languages_hold_the_same():
    for language in ("python", "bash"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in PAGES.values()]
        assert plain[0] == plain[1]
    counts = [len(re.findall(r"^#+ ", text, re.MULTILINE)) for text in PAGES.values()]
    assert counts[0] == counts[1]
