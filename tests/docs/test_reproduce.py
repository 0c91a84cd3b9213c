"""docs/{en,zh}/reproduce.md: table and sections are what the stored values say; both languages hold the same."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
from PIL import Image

from vitlab.study.reproduce.claims import CLAIMS
from vitlab.study.reproduce.result import NOT_RUN

ROOT = Path(__file__).parents[2]
STORED = ROOT / "benchmarks" / "reproduce.json"
PAGES = {x: (ROOT / "docs" / x / "reproduce.md").read_text(encoding="utf-8") for x in ("en", "zh")}


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module("reproduce")


@pytest.mark.parametrize("language", PAGES)
def test_the_table_is_that_of_the_stored_values(script, language):
    part = PAGES[language].partition(script.BEGIN)[2].partition(script.END)[0]
    assert part.strip() == script.measured(script.read_stored(), language).strip()


def test_every_claim_stands_in_the_table_with_its_plot():
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    assert [entry["claim"] for entry in stored] == list(CLAIMS)
    ran = [entry["claim"] for entry in stored if entry["verdict"] != NOT_RUN]
    for page in PAGES.values():
        assert re.findall(r"!\[([\w-]+)\]\(\.\./pictures/reproduce/", page) == ran
        assert len(re.findall(r"^\| .*<br>`vitlab reproduce [\w-]+` \|", page, re.MULTILINE)) == len(CLAIMS)
    for name in ran:
        picture = ROOT / "docs" / "pictures" / "reproduce" / f"{name}.png"
        assert picture.stat().st_size < 100_000
        with Image.open(picture) as image:
            image.verify()


def test_enough_claims_were_run_and_one_does_not_hold():
    verdicts = [entry["verdict"] for entry in json.loads(STORED.read_text(encoding="utf-8"))]
    assert len(verdicts) - verdicts.count(NOT_RUN) >= 10 and "does not hold" in verdicts


def test_both_languages_have_the_same_commands_and_headings():
    for pattern in (r"^```bash.*?^```$", r"^#+ "):
        found = [re.findall(pattern, re.sub(r" +# .*", "", p), re.MULTILINE | re.DOTALL) for p in PAGES.values()]
        assert found[0] == found[1]
