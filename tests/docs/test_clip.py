"""docs/{en,zh}/clip.md: code runs, shapes and sizes are the models', both languages hold the same."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitlab.models.clip import MAX_SCALE
from vitlab.models.registry import MODELS, build, build_config
from vitlab.models.two_towers import ImageTextLogits
from vitlab.text.templates import LISTS
from vitlab.training.objectives.clip import matching_numbers

ROOT = Path(__file__).parents[2]
PAGES = {language: (ROOT / "docs" / language / "clip.md").read_text(encoding="utf-8") for language in ("en", "zh")}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_code_runs():
    """Of one page: below, the other has the same."""
    found: dict = {}
    for block in blocks(PAGES["en"], "python"):
        exec(compile(block, "clip.md", "exec"), found)
    assert isinstance(found["out"], ImageTextLogits) and found["ids"].shape == (3, 32)
    assert found["cosines"].shape == found["out"].logits_per_image.shape == (3, 3)
    assert found["features"].shape == (3, 128) and found["heat"].shape == (3, 8, 8)
    assert found["model"].log_scale.grad is not None


@pytest.mark.parametrize("language", PAGES)
def test_shapes_are_those_of_base_32(language):
    """Two pictures and three texts on the meta device."""
    _, config = build_config("clip_vit_base_patch32")
    with torch.device("meta"):
        model = build("clip", config).eval()
        tokens = model.image.forward_features(torch.empty(2, 3, 224, 224))
        ids = torch.zeros(3, 77, dtype=torch.long)
        words, out = model.text.embed(ids), model(torch.empty(2, 3, 224, 224), ids)
        pooled, end = model.image(torch.empty(2, 3, 224, 224)), model.text(ids)
    told = re.findall(r"\(([BT](?:, \w+)+)\)", PAGES[language].split("`clip_vit_base_patch32`")[1])
    known = [(2, 3, 224, 224), tokens.shape, pooled.shape, (2, 512), ids.shape, words.shape, end.shape, (3, 512)]
    known += [out.logits_per_image.shape, out.logits_per_text.shape]
    sizes = {"B": 2, "T": 3}
    found = [tuple(sizes.get(n) or int(n) for n in shape.split(", ")) for shape in told]
    assert found[: len(known)] == [tuple(shape) for shape in known]


ROW = re.compile(r"^\| `(clip_\w+)` \| (.*?) \| (\d+), (\d+) \| (\d+) \| ([\d,]+) \|$", re.MULTILINE)


def test_the_table_of_names_is_the_registrys():
    found = {}
    for name, entry in MODELS.items():
        if entry.family == "clip":
            c = entry.config
            with torch.device("meta"):
                count = sum(p.numel() for p in build("clip", c).parameters())
            found[name] = (c.text.width, c.text.depth, c.embed_dim, count)
    for text in PAGES.values():
        rows = ROW.findall(text)
        assert {name: (int(w), int(d), int(e), int(n.replace(",", ""))) for name, _, w, d, e, n in rows} == found
        for name, image, *_ in rows:
            c = MODELS[name].config.image
            assert re.search(rf"{c.image_size[0]} ?(px|像素)", image), name
            shape = {str(c.patch_size)} if "/" in image else {str(c.depth), str(c.width)}
            assert shape <= set(re.findall(r"\d+", image))


def test_numbers_in_the_text_are_those_of_the_code():
    model = SimpleNamespace(bias=None, scale=torch.tensor(3.0))
    logged = matching_numbers(model, torch.eye(4), torch.eye(4), torch.eye(4).bool())
    for text in PAGES.values():
        assert f"{len(LISTS['train'])} " in text and MAX_SCALE == 100 and " 100" in text
        rows = re.findall(r"^\| (`\w+`(?:[,、] ?`\w+`)*) \| [^|]+ \|$", text, re.MULTILINE)
        named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
        assert logged.keys() | {"loss"} <= named


def test_both_languages_hold_the_same():
    for language in ("python", "bash"):
        plain = [[re.sub(r"\s*#.*", "", block) for block in blocks(text, language)] for text in PAGES.values()]
        assert plain[0] == plain[1] and plain[0]
    headings = [re.findall(r"^#+ ", text, re.MULTILINE) for text in PAGES.values()]
    assert headings[0] == headings[1]
    prose = [re.sub(r"```.*?```", "", text, flags=re.DOTALL) for text in PAGES.values()]
    for pattern in (r"`([^`\n]+)`", r"\$\$?[^$\n]+\$\$?", r"^\|", r"^(?:- |\d\. )", r"\]\(([^)]+)\)", r"arXiv:[\d.]+"):
        found = [sorted(re.findall(pattern, text, re.MULTILINE)) for text in prose]
        if pattern.startswith(r"\]"):
            found = [[link.replace("../zh/clip.md", "").replace("../en/clip.md", "") for link in one] for one in found]
        assert sorted(found[0]) == sorted(found[1]), pattern
    for text in PAGES.values():
        for link in re.findall(r"\]\(([^)]+)\)", text):
            assert (ROOT / "docs" / "en" / link).exists(), link
