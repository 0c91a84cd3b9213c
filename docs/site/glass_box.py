"""The page of `vitlab serve` inside the site, without a server: `{glass-box}` in a page of the documentation shows it.

It is built into _glass_box/ of the site when a page asks for it. Where it cannot be (no npm, no network), the site says
so there, and is complete otherwise.
"""

from __future__ import annotations

import html
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = "_glass_box"
WORDS = {
    "en": ("The page, with a ViT that runs in your browser", "Open it in a window of its own"),
    "zh": ("网页，里面的 ViT 在你的浏览器里运行", "在单独的窗口中打开"),
}
ABSENT = {
    "en": "This copy of the documentation was built without the page: {reason} To see it: vitlab serve",
    "zh": "构建这份文档时没有生成这个网页：{reason} 可以在自己的机器上打开：vitlab serve",
}


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("glass_box_models", [], "html")  # none: the bundled models
    app.add_directive("glass-box", GlassBox)
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


class GlassBox(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        self.env.metadata[self.env.docname] |= {"glass_box": True, "hide-toc": True}  # furo's, for the width
        language = "zh" if self.env.docname.startswith("zh/") else "en"
        title, own_window = WORDS[language]
        up = "../" * self.env.docname.count("/")
        address = f"{up}{FOLDER}/index.html?lang={language}"
        return [
            nodes.raw(
                "",
                f'<p><a href="{address}" target="_blank">{own_window}</a></p>\n'
                f'<iframe class="glass-box" src="{address}" title="{title}" loading="lazy"></iframe>\n',
                format="html",
            )
        ]


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or not any("glass_box" in about for about in app.env.metadata.values()):
        return
    folder = Path(app.outdir, FOLDER)
    try:
        from vitlab.errors import VitlabError
        from vitlab.serve.static_page.build import build_page
    except ImportError as problem:
        _say_absent(folder, f"{problem.name} is not installed.")
        return
    try:
        build_page(folder, app.config.glass_box_models)
    except VitlabError as problem:
        _say_absent(folder, str(problem))


def _say_absent(folder: Path, reason: str) -> None:
    folder.mkdir(exist_ok=True)
    lines = "".join(
        f'<p lang="{lang}">{html.escape(words.format(reason=reason))}</p>' for lang, words in ABSENT.items()
    )
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>vitlab</title>{lines}</html>'
    (folder / "index.html").write_text(page, encoding="utf-8")
    sys.stderr.write(f"{folder}: {ABSENT['en'].format(reason=reason)}\n")  # no warning: -W would make it an error
