"""AttentionWidget: the attention view, linked to Python by anywidget. `vitlab.explain.show` makes it.

A cell shows the view as plain HTML, which every viewer of a saved or exported notebook can show, and beside it an
invisible widget that links it to Python while a kernel runs.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any
from uuid import uuid4

import anywidget
import traitlets

from vitlab.explain.attention_view import STYLE, AttentionView


class AttentionWidget(anywidget.AnyWidget):
    """`image`, `layer`, `head` and `patch` are what is chosen in the view; setting one of them moves the view."""

    _esm = files("vitlab.explain").joinpath("widget.js").read_text(encoding="utf-8")
    frame = traitlets.Unicode().tag(sync=True)  # name of the frame
    page = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)
    style = traitlets.Unicode(STYLE).tag(sync=True)
    image = traitlets.Int(0).tag(sync=True)  # number of the image
    layer = traitlets.Int().tag(sync=True)
    head = traitlets.Int(None, allow_none=True).tag(sync=True)  # None: the mean of heads
    patch = traitlets.Int(None, allow_none=True).tag(sync=True)  # row by row; None: the class token, or the mean

    def __init__(self, page: str, title: str, layer: int):
        super().__init__(frame=f"vitlab-{uuid4()}", page=page, title=title, layer=layer)

    @property
    def view(self) -> AttentionView:
        """The view without its link."""
        return AttentionView(self.page, self.title, self.frame)

    def to_html(self) -> str:
        """One self-contained HTML page."""
        return self.page

    def save(self, path: str | Path) -> Path:
        """Write the page; the name ends in .html."""
        return self.view.save(path)

    def _ipython_display_(self, **options: Any) -> None:
        from IPython.display import display

        display(self.view)
        bundle = self._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        display({kind: value for kind, value in data.items() if kind != "text/plain"}, raw=True, metadata=metadata)
