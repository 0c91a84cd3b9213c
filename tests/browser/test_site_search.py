"""The search of the documentation site, as a reader's browser runs it: every term is found, in both languages."""

import re
import shutil
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
TERMS = {  # what notes on ViTs ask: the search of the site finds it, in pages of each language
    "en": "patch|patch equivalence|unfold|sqrt d|class token|[CLS]|position embedding|GELU|ReLU|pre-norm|post-norm|"
    "LayerNorm|attention head|residual|parameter count|224 -> 384|384|inductive bias|needs data|quadratic cost|"
    "flash attention|mixed precision|warm-up|token pruning|token merging|Swin|PVT|Twins|CLIP|SigLIP|zero-shot|"
    "temperature|MAE|DINO|DeiT|distillation|logit lens|k-NN|int8",
    "zh": "图块|图块等价|展开|根号 d|类别 token|[CLS]|位置编码|GELU|ReLU|前置归一化|后置归一化|LayerNorm|注意力头|"
    "残差|参数量|224 -> 384|384|归纳偏置|数据|平方复杂度|flash attention|混合精度|预热|token 剪枝|token 合并|Swin|PVT|"
    "Twins|CLIP|SigLIP|零样本|温度|MAE|DINO|DeiT|蒸馏|logit lens|k 近邻|int8",
}

SEARCH = (
    """queries => queries.map(query => Search._performSearch(...Search._parseQuery(query)).map(result => result[0]))"""
)


def test_the_search_finds_what_notes_on_vits_ask(tmp_path, browser, capsys):
    from sphinx.cmd.build import main

    source, site = tmp_path / "docs", tmp_path / "site"
    for language in TERMS:
        shutil.copytree(DOCS / language / "course", source / language / "course")
        for page in (source / language).rglob("*.md"):  # links to pages that are not built here become their text
            text = page.read_text(encoding="utf-8")
            page.write_text(re.sub(r"(?<!!)\[([^\]]+)\]\(\.\./[^)]+\)", r"\1", text), encoding="utf-8")
    below = "".join(f"{language}/course/index\n" for language in TERMS)
    (source / "index.md").write_text(f"# pages\n\n```{{toctree}}\n{below}```\n", encoding="utf-8")
    assert main(["-q", "-W", "-c", str(DOCS / "site"), str(source), str(site)]) == 0, capsys.readouterr().err
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "search.html").as_uri())
    page.wait_for_function("Search.hasIndex()")
    missing = []
    for language, terms in TERMS.items():
        queries = terms.split("|")
        assert len(queries) >= 30
        for query, pages in zip(queries, page.evaluate(SEARCH, queries), strict=True):
            if not any(name.startswith(f"{language}/course/") for name in pages):
                missing.append(f"{language}: {query}")
    page.close()
    assert not missing and not errors
