"""The pages as a whole: twins in both languages, links with their anchors, and the site that Sphinx makes of them.

`make docs` builds all of it; here two pages with formulas are built, by the same settings and as strictly.
"""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FOLDERS = [p for p in ROOT.iterdir() if p.is_dir() and p.name not in (".venv", ".git", "build")]
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """As GitHub and MyST make them of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = (page.parent / file).resolve() if file else page
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def test_every_page_has_its_twin_and_stands_in_the_index():
    names = [{p.relative_to(DOCS / x).as_posix() for p in (DOCS / x).rglob("*.md")} for x in ("en", "zh")]
    assert names[0] == names[1]
    for language, other in (("en", "zh"), ("zh", "en")):
        for name in sorted(names[0] - {"index.md"}):
            page = DOCS / language / name
            folder = page.parent.parent if page.name == "index.md" else page.parent
            index = (folder / "index.md").read_text(encoding="utf-8")
            assert f"({page.relative_to(folder).as_posix()})" in index, f"{folder / 'index.md'} does not list {name}"
            up = "../" * (name.count("/") + 1)
            assert f"({up}{other}/{name})" in page.read_text(encoding="utf-8")
    titles = [re.findall(r"^#+ |^- ", (DOCS / x / "index.md").read_text(encoding="utf-8"), re.M) for x in ("en", "zh")]
    assert titles[0] == titles[1]


class Read(HTMLParser):
    """What a page asks a browser to fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.fetched: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.formulas = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag == "html":
            self.attributes = found
        self.formulas += tag == "math"
        if tag in ("script", "img", "iframe", "source") and found.get("src"):
            self.fetched.append(found["src"] or "")
        if tag == "link" and found.get("href"):
            self.fetched.append(found["href"] or "")


def build(source: Path, target: Path) -> int:
    from sphinx.cmd.build import main

    return main(["-q", "-W", "--keep-going", "-c", str(DOCS / "site"), str(source), str(target)])


def test_the_site(tmp_path, capsys):
    source = tmp_path / "docs"
    for language in ("en", "zh"):
        (source / language).mkdir(parents=True)
        shutil.copy(DOCS / language / "vit_architecture.md", source / language)
    toctree = "```{toctree}\nen/vit_architecture\nzh/vit_architecture\n```\n"
    (source / "index.md").write_text(f"# pages\n\n{toctree}", encoding="utf-8")
    site = tmp_path / "site"
    assert build(source, site) == 0, capsys.readouterr().err
    for language, spoken in (("en", "en"), ("zh", "zh-CN")):
        text = (site / language / "vit_architecture.html").read_text(encoding="utf-8")
        read = Read(text)
        assert read.attributes["lang"] == spoken and read.formulas > 50
        assert read.fetched and not [url for url in read.fetched if re.match(r"(https?:)?//|.*mathjax", url)]
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(url\(|@import)\s*["']?(https?:)?//""", sheet.read_text(encoding="utf-8")), sheet
    assert json.dumps("注意") in (site / "searchindex.js").read_text(encoding="utf-8")  # a pair of 注意力
    assert "splitQuery" in (site / "_static" / "language_data.js").read_text(encoding="utf-8")
    (source / "index.md").write_text(f"# pages\n\n[gone](nowhere.md)\n\n{toctree}", encoding="utf-8")
    assert build(source, site) != 0 and "nowhere.md" in capsys.readouterr().err


def test_without_npm_the_site_says_that_the_page_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    source, site = tmp_path / "docs", tmp_path / "site"
    (source / "zh").mkdir(parents=True)
    for name, below in (("index", "```{toctree}\nzh/play\n```\n"), ("zh/play", "")):
        (source / f"{name}.md").write_text(f"# play\n\n```{{glass-box}}\n```\n\n{below}", encoding="utf-8")
    assert build(source, site) == 0
    assert "there is no npm here" in capsys.readouterr().err
    absent = (site / "_glass_box" / "index.html").read_text(encoding="utf-8")
    assert "there is no npm here: install Node.js" in absent and "vitlab serve" in absent and "构建这份文档时" in absent
    for page, address in (("index", "_glass_box/index.html?lang=en"), ("zh/play", "../_glass_box/index.html?lang=zh")):
        text = (site / f"{page}.html").read_text(encoding="utf-8")
        assert f'<iframe class="glass-box" src="{address}"' in text and "toc-scroll" not in text
