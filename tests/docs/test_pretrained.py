"""The table of families in pretrained.md says what the records in checkpoints/ say, in both languages."""

import re
from pathlib import Path

import pytest

from vitlab.checkpoints.families import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {"hf": "transformers", "jax": "JAX", "lucidrains": "vit-pytorch"}
ORDER = ("hf", "timm", "jax", "open_clip")
REFUSING = {"convnext"}  # read only to be refused in words


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_family_has_its_row(language):
    text = (DOCS / language / "pretrained.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \(`(\w+)`\) \| ([^|]+) \| ([^|]*)\| ([^|]+) \|$", text, re.MULTILINE)
    assert {code for code, *_ in rows} == FAMILIES.keys() and len(rows) == len(FAMILIES)
    for code, read, written, checked in rows:
        dialects = {NAMES.get(d.name, d.name) for d in FAMILIES[code].dialects if d.name not in REFUSING}
        assert {name for name in dialects if name not in read} == set(), code
        assert re.findall(r"`(\w+)`", written) == sorted(
            FAMILIES[code].writers, key=["hf", "timm", "jax", "open_clip"].index
        )
        assert ("transformers" in checked) == ("transformers" in dialects or code == "hybrid")
        assert "hf" not in FAMILIES[code].writers or "transformers" in dialects
