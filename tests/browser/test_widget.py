"""The attention view inside a notebook's page: Python's choice moves the frame, the reader's choice reaches Python."""

from __future__ import annotations

import json
from importlib.resources import files

import numpy as np
import pytest

from vitlab import explain
from vitlab.explain.attention_view import AttentionView

NOTEBOOK = """<!doctype html><meta charset="utf-8"><body style="background: #111; color: #eee">
<div id="html">{html}</div><div id="widget"></div>
<script type="application/json" id="values">{values}</script>
<script type="module">
{module}
const values = JSON.parse(document.getElementById("values").textContent), heard = {{}};
window.saved = 0;
window.model = {{  // as Jupyter's: listeners by "change:NAME"
  get: (name) => values[name],
  set(name, value) {{
    if (values[name] === value) return;
    values[name] = value;
    for (const listener of heard[`change:${{name}}`] || []) listener();
  }},
  on(name, f) {{ (heard[name] ||= []).push(f); }},
  off() {{}},
  save_changes() {{ window.saved += 1; }},
}};
render({{ model, el: document.getElementById("widget") }});
</script>"""


@pytest.fixture(scope="module", params=["html", "box"])
def page(request, browser, tmp_path_factory):
    """With the frame as a cell shows it, and in a box of widgets, where the widget makes the frame."""
    photo = np.random.default_rng(1).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    view = explain.show("bundled:digits", [photo, photo[::-1]], live=False)
    named = AttentionView(view.page, view.title, "vitlab-7")
    values = {"frame": "vitlab-7", "title": "t", "style": "width: 900px", "page": view.page}
    values |= {"image": 0, "layer": 3, "head": None, "patch": None}
    module = files("vitlab.explain").joinpath("widget.js").read_text(encoding="utf-8")
    text = NOTEBOOK.format(
        html=named._repr_html_() if request.param == "html" else "",
        values=json.dumps(values).replace("<", "\\u003c"),
        module=module.replace("export default { render };", ""),
    )
    path = tmp_path_factory.mktemp("notebook") / "notebook.html"
    path.write_text(text, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1000, "height": 1400})
    wrong, fetched = [], []
    tab.on("console", lambda message: wrong.append(message.text))
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: fetched.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_function("document.querySelectorAll('iframe').length === 1")
    inside = tab.frame_locator("iframe")
    inside.locator("#said strong").wait_for()
    tab.wait_for_function("document.querySelector('iframe').style.height !== '760px'")
    yield tab, inside
    assert not wrong
    assert [url for url in fetched if not url.startswith(("data:", "about:"))] == [path.as_uri()]
    tab.close()


def chosen(tab) -> list:
    return tab.evaluate("['image', 'layer', 'head', 'patch'].map((name) => model.get(name))")


def test_the_frame_follows_python_and_python_the_frame(page):
    tab, inside = page
    assert inside.locator("html").get_attribute("data-theme") == "dark"
    assert chosen(tab) == [0, 3, None, None] and tab.evaluate("saved") == 0  # opening it changes nothing
    tab.evaluate("model.set('layer', 1); model.set('head', 2); model.set('patch', 9)")
    inside.locator("#said strong", has_text="The patch at row 2, column 1").wait_for()
    assert inside.locator("#layer").input_value() == "1" and inside.locator("#head").input_value() == "3"
    assert chosen(tab) == [0, 1, 2, 9]
    inside.locator("#layer").select_option("2")
    tab.wait_for_function("model.get('layer') === 2")
    assert chosen(tab) == [0, 2, 2, 9] and tab.evaluate("saved") == 1
    tab.evaluate("model.set('head', 99)")  # there is none: the view keeps its own, and says so
    tab.wait_for_function("model.get('head') === 2")
    tab.evaluate("model.set('image', 1)")
    inside.locator("#images button[aria-pressed=true]").nth(0).wait_for()
    assert chosen(tab)[0] == 1
