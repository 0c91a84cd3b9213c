"""Pictures of what a model sees. Everything else in `explain` returns numbers; only this package draws.

    from vitlab.explain import draw, rollout
    seen = draw.views(model, ["cat.jpg", "dog.jpg"])                   # the pictures, and what the model says of them
    figure = draw.heat(seen, {"rollout": rollout(model, ["cat.jpg", "dog.jpg"])}, title="Rollout")
    draw.save(figure, "rollout.png")

Functions take numbers and return a matplotlib Figure: `attention` (layer x head), `heat` (named maps), `figure7`,
`faithfulness`, `neighbours`, `pruned`, `reconstruction`, `contact_sheet` (what a search found). `attention_page`,
`likeness_page`, `maps_page`, `contact_page` return one HTML page. `overlay` is one picture under its heat, as an array.

Heat lies on the original picture, through the inverse of the model's preprocess, so crops, padding and other shapes
land where they belong; what the model never saw stays grey.
"""

from __future__ import annotations

from vitlab.explain.draw.contact import Found, contact_page, contact_sheet
from vitlab.explain.draw.figure7 import figure7, figure7_numbers
from vitlab.explain.draw.groups import grouped, pruned
from vitlab.explain.draw.maps import attention, heat, neighbours
from vitlab.explain.draw.page import attention_page, figure_page, likeness_page, maps_page
from vitlab.explain.draw.reconstruct import reconstruction
from vitlab.explain.draw.scores import faithfulness
from vitlab.explain.draw.sheet import check_kind, mark_of, save
from vitlab.explain.draw.view import View, overlay, spread, views

__all__ = [
    "Found",
    "View",
    "attention",
    "attention_page",
    "check_kind",
    "contact_page",
    "contact_sheet",
    "faithfulness",
    "figure7",
    "figure7_numbers",
    "figure_page",
    "grouped",
    "heat",
    "likeness_page",
    "maps_page",
    "mark_of",
    "neighbours",
    "overlay",
    "pruned",
    "reconstruction",
    "save",
    "spread",
    "views",
]
