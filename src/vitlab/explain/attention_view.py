"""show: where every patch of an image looks, as a view inside a notebook.

    view = vitlab.explain.show("bundled:cifar10", "cat.jpg")
    view                                       # at the end of a cell: move over the image
    view.layer, view.patch = 3, 120            # a view in a running notebook follows, and tells what is chosen
    view.save("cat.html")

The view is the page of `vitlab explain attention --html` in a frame. The page is stored with the notebook, so it works
in a notebook that is opened again without a kernel, and in an exported one without network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.attention_page import attention_page
from vitlab.explain.stages import head_counts
from vitlab.explain.subject import check_output, open_subject
from vitlab.images.read import Source
from vitlab.optional import require
from vitlab.tables import escaped

if TYPE_CHECKING:
    from vitlab.explain.widget import AttentionWidget

STYLE = "width:100%;height:760px;border:0;color-scheme:normal"  # of a frame, until its page tells its height


class AttentionView:
    """The page, in a frame: plain HTML, which every viewer of notebooks shows."""

    def __init__(self, page: str, title: str, name: str = ""):
        self.page, self.title, self.name = page, title, name

    def __repr__(self) -> str:
        return f"AttentionView({self.title!r})"

    def to_html(self) -> str:
        """One self-contained HTML page."""
        return self.page

    def save(self, path: str | Path) -> Path:
        """Write the page; the name ends in .html."""
        path = check_output(path)
        if path.suffix.lower() != ".html":
            raise UsageError(f"{path}: the view is a page: name it {path.with_suffix('.html')}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.page, encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        """In a sandbox: the page's scripts run, but reach nothing around it."""
        page = self.page.replace("&", "&amp;").replace('"', "&quot;")
        names = f'title="{escaped(self.title)}" name="{escaped(self.name)}"'
        return f'<iframe {names} sandbox="allow-scripts" style="{STYLE}" srcdoc="{page}"></iframe>'


def show(
    model: ModelOrName,
    images: Source | Iterable[Source],
    *,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] | None = None,
    live: bool = True,
    **load_options: Any,
) -> AttentionView | AttentionWidget:
    """Attention of every layer and head, for one image or several: move over a patch and see where it looks.

    layers, heads   as in explain.attention_maps; heads=None: all, or their mean where their number differs by layer
    live            a widget, whose `image`, `layer`, `head` and `patch` follow the view and can be set; it needs
                    anywidget. False: the same view as plain HTML, which does without it
    load_options    as in vitlab.load: image_size=(64, 96)
    """
    widget = _widget_class() if live else None
    subject = open_subject(model, images, **load_options)
    if heads is None:
        heads = "mean" if len(head_counts(subject.model, layers)) > 1 else "all"
    title = f"Attention in {subject.name}"
    page, _ = attention_page(subject.model, subject.images, subject.views, layers=layers, heads=heads, title=title)
    if widget is None:
        return AttentionView(page, title)
    depth = len(subject.model.blocks)
    return widget(page, title, depth - 1 if isinstance(layers, str) else layers[-1] % depth)  # the page opens with it


def _widget_class() -> type[AttentionWidget]:
    view = "Or pass live=False, for the same view without its link to Python."
    require("a live view", "anywidget", otherwise=view)
    from vitlab.explain.widget import AttentionWidget

    return AttentionWidget
