"""The site of these pages: `make docs`. Nothing in it comes from another host: no fonts, no scripts, no counters."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from vitlab.version import __version__  # noqa: E402

project = "vitlab"
author = "the vitlab authors"
copyright = "the vitlab authors, Apache-2.0"
version = release = __version__
language = "en"

extensions = ["myst_parser", "sphinx.ext.autodoc", "parts", "glass_box"]  # the last two: beside this file
root_doc = "index"
exclude_patterns = ["site"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
myst_links_external_new_tab = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # torch's are not plain text
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "vitlab"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_search_language = "en+zh"
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
pygments_style = "default"
pygments_dark_style = "github-dark"
html_theme_options = {
    "light_css_variables": {
        "font-stack": "system-ui, -apple-system, 'Segoe UI', 'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', "
        "sans-serif",
        "font-stack--monospace": "ui-monospace, 'SFMono-Regular', Menlo, Consolas, 'Noto Sans Mono CJK SC', monospace",
    },
}
