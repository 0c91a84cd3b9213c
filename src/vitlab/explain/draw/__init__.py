"""Figures and pages of what the rest of `explain` computes. The modules of this package take numbers and run no model.

    from vitlab.explain import draw, rollout
    views = draw.views(model, ["cat.jpg", "dog.jpg"])                  # the images, and their predicted classes
    figure = draw.heat(views, {"rollout": rollout(model, ["cat.jpg", "dog.jpg"])}, title="Rollout")
    draw.save(figure, "rollout.png")

Functions take numbers and return a matplotlib Figure: `attention` (layer x head), `heat` (named maps), `figure7`,
`faithfulness`, `neighbours`, `pruned`, `reconstruction`, `lens`, `attribution`, `ablation`, `patching`, `contact_sheet`
(search results). `attention_page`, `likeness_page`, `maps_page`, `contact_page` return one HTML page. `overlay` is an
image under its heat map.

Heat maps lie on the original image, through the inverse of the model's preprocess; what the model did not see is grey.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitlab.explain.draw.contact import SearchHit, contact_page, contact_sheet
from vitlab.explain.draw.figure7 import figure7
from vitlab.explain.draw.groups import grouped, pruned
from vitlab.explain.draw.heatmap import overlay, spread
from vitlab.explain.draw.inside import ablation, attribution, lens, patching
from vitlab.explain.draw.maps import attention, heat, neighbours
from vitlab.explain.draw.page import figure_page, likeness_page, maps_page
from vitlab.explain.draw.reconstruct import reconstruction
from vitlab.explain.draw.scores import faithfulness
from vitlab.explain.draw.sheet import check_kind, mark_of, save
from vitlab.explain.figure7 import figure7_numbers
from vitlab.explain.views import View, views

if TYPE_CHECKING:
    from vitlab.explain.attention_page import attention_page

__all__ = [
    "SearchHit",
    "View",
    "ablation",
    "attention",
    "attention_page",
    "attribution",
    "check_kind",
    "contact_page",
    "contact_sheet",
    "faithfulness",
    "figure7",
    "figure7_numbers",
    "figure_page",
    "grouped",
    "heat",
    "lens",
    "likeness_page",
    "maps_page",
    "mark_of",
    "neighbours",
    "overlay",
    "patching",
    "pruned",
    "reconstruction",
    "save",
    "spread",
    "views",
]


def __getattr__(name: str) -> Any:
    if name == "attention_page":  # imported on use: it runs the model and imports this package
        from vitlab.explain.attention_page import attention_page

        return attention_page
    raise AttributeError(f"module 'vitlab.explain.draw' has no attribute {name!r}")
