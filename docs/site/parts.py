"""What Sphinx does not bring: formulas without a script, a search that finds Chinese words, plain docstrings, Chinese
words around Chinese pages."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import snowballstemmer
from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.search.en import SearchEnglish
from sphinx.util import logging

log = logging.getLogger(__name__)
CHINESE = "\u4e00-\u9fff"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline, None), (_display, None))
    app.add_search_language(Words)
    app.connect("autodoc-process-docstring", _plain)
    app.connect("html-page-context", _language)
    app.connect("source-read", _folders)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


# ---------------------------------------------------------------- formulas: MathML, which browsers draw themselves


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(_mathml(node))
    raise nodes.SkipNode


def _display(self: Any, node: nodes.math_block) -> None:
    self.body.append(f'<div class="math">{_mathml(node, as_block=True)}</div>\n')
    raise nodes.SkipNode


def _mathml(node: nodes.Element, as_block: bool = False) -> str:
    tex = re.sub(r"\\dots\b", r"\\ldots", node.astext())  # docutils knows only the second
    try:
        return tex2mathml(tex, as_block=as_block)
    except MathError as error:
        log.warning("%s: %s", error, tex, location=node)
        return html.escape(tex)


# ---------------------------------------------------------------- search


class Words(SearchEnglish):
    """English by words, Chinese by pairs of characters: most words have two, and nothing stands between them.

    Sphinx drops numbers from a query, so 384 is indexed and searched as n384.
    """

    lang = "en+zh"
    language_name = "English"  # also names the stemmer in the script of the search page
    js_splitter_code = f"""
function splitQuery(query) {{
  const found = [];
  for (const run of query.match(/[{CHINESE}]+|[\\p{{L}}\\p{{N}}_]+/gu) || []) {{
    if (!/[{CHINESE}]/.test(run) || run.length < 3) {{ found.push(run.replace(/^(?=\\d+$)/, "n")); continue; }}
    for (let i = 0; i + 1 < run.length; i++) found.push(run.slice(i, i + 2));
  }}
  return found;
}}
"""

    def split(self, input: str) -> list[str]:
        found = []
        for run in re.findall(rf"[{CHINESE}]+|[^\W{CHINESE}]+", input):
            pairs = [run[i : i + 2] for i in range(len(run) - 1)] if re.match(f"[{CHINESE}]", run) else []
            found += pairs or [f"n{run}" if run.isdigit() else run]
        return found

    def stem(self, word: str) -> str:
        return self._stemmer.stemWord(word.lower())

    _stemmer = snowballstemmer.stemmer("english")


# ---------------------------------------------------------------- docstrings


def _plain(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text: `code` is code, indented lines stand as they are, nothing else is markup."""
    made: list[str] = []
    literal = False
    for line in lines:
        indented = line.startswith((" ", "\t"))
        if indented and not literal:
            made += ["", "::", ""]
        if not indented and literal and line.strip():
            made += [""]
        literal = indented or (literal and not line.strip())
        made.append(line if indented else _escaped(line))
    lines[:] = made


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        f"``{p[1:-1]}``" if p.startswith("`") and len(p) > 2 else re.sub(r"([\\*_|`])", r"\\\1", p) for p in parts
    )


# ---------------------------------------------------------------- pages

THEME = {  # what furo writes around a page
    "Search": "搜索",
    "Next": "下一页",
    "Previous": "上一页",
    "Home": "首页",
    "On this page": "本页内容",
    "Back to top": "回到顶部",
    "Made with ": "制作工具：",
}


def _language(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    chinese = pagename.startswith("zh/")
    context["language"] = "zh-CN" if chinese else "en"
    if chinese:
        # a page's own name goes before that of the templates
        context["gettext"] = lambda words: THEME.get(words, words)


def _folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """A link to a folder, or to a text outside of docs/, leads somewhere on disk, but to no page: its words stay."""
    here, pages = Path(app.srcdir, docname).parent, Path(app.srcdir).resolve()

    def words(link: re.Match) -> str:
        target = (here / link[2]).resolve()
        elsewhere = target.suffix == ".md" and target.is_file() and pages not in target.parents
        return link[1] if target.is_dir() or elsewhere else link[0]

    source[0] = re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]+)\)", words, source[0])
