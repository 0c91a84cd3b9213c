"""explain.show: the page of `--html` in a sandboxed frame, the widget around it, and what it says without anywidget."""

from __future__ import annotations

import html
import re
import sys

import numpy as np
import pytest

from vitlab import explain
from vitlab.errors import UsageError
from vitlab.explain import figures

PHOTO = np.random.default_rng(0).integers(0, 256, (30, 20, 3), dtype=np.uint8)


def test_the_frame_holds_the_page_of_the_command():
    view = explain.show("bundled:cifar10", PHOTO, live=False)
    assert view.to_html() == figures.attention(explain.open_subject("bundled:cifar10", PHOTO)).page()
    frame = view._repr_html_()
    (page,) = re.findall(r'srcdoc="([^"]*)"', frame)
    assert html.unescape(page) == view.to_html()
    assert 'sandbox="allow-scripts"' in frame and frame.count("<iframe") == 1 and "http" not in frame.split("srcdoc")[0]


def test_it_is_saved_as_html_only(tmp_path):
    view = explain.show("bundled:digits", "digits#0", live=False, layers=[1], heads="mean")
    assert view.save(tmp_path / "new" / "a.html").read_text(encoding="utf-8") == view.to_html()
    with pytest.raises(UsageError, match=r"name it .*a\.html"):
        view.save(tmp_path / "a.png")


def test_the_widget_opens_with_the_last_layer_and_shows_the_same_page(monkeypatch, tmp_path):
    import IPython.display

    widget = explain.show("bundled:digits", ["digits#0", "digits#1"], layers=[0, -2])
    still = explain.show("bundled:digits", ["digits#0", "digits#1"], layers=[0, -2], live=False)
    assert (widget.image, widget.layer, widget.head, widget.patch) == (0, 2, None, None)
    assert widget.to_html() == still.to_html() == widget.save(tmp_path / "w.html").read_text(encoding="utf-8")
    shown = []
    monkeypatch.setattr(IPython.display, "display", lambda what, **options: shown.append((what, options)))
    widget._ipython_display_()
    (frame, _), (bundle, options) = shown
    assert f'name="{widget.frame}"' in frame._repr_html_() and options["raw"]
    assert list(bundle) == ["application/vnd.jupyter.widget-view+json"]  # what a viewer without widgets does not show


def test_without_anywidget_it_names_the_extra_and_the_other_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    with pytest.raises(UsageError, match=r"anywidget.*pip install 'vitlab\[notebook\]'.*live=False"):
        explain.show("bundled:digits", "digits#0")
