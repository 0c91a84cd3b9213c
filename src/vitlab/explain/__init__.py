"""Explains what a model sees and does, through Trace.

    vitlab.explain.rollout("bundled:cifar10", "cat.jpg")          # (B, grid_h, grid_w)
    subject = vitlab.explain.open_subject("bundled:cifar10", ["cat.jpg", "dog.jpg"])
    vitlab.explain.figures.rollout(subject).save("rollout.png")   # and rollout.npz

Every function takes a model or the name of one. In a notebook, vitlab.explain.show(model, image) is a view to explore.

Lazy: torch is imported on first use. Methods in the table of methods.py are public here under their own names.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vitlab.explain.methods import METHODS

if TYPE_CHECKING:
    from vitlab.explain.ablate import ablate
    from vitlab.explain.attention_maps import attention_maps, attention_masks
    from vitlab.explain.attention_view import AttentionView, show
    from vitlab.explain.attribution import attribution
    from vitlab.explain.block_view import BlockView, block_view, query_attention
    from vitlab.explain.cell_view import CellView, cell_view
    from vitlab.explain.clip_prompts import ask
    from vitlab.explain.distance import attention_distance, attention_entropy, attention_statistics
    from vitlab.explain.faithfulness import compare_methods, curves
    from vitlab.explain.features import Foreground, foreground, foreground_mask, nearest, patch_similarity, pca_rgb
    from vitlab.explain.lens import lens
    from vitlab.explain.outliers import OutlierTokens, outlier_tokens
    from vitlab.explain.patch import patch
    from vitlab.explain.pruned import pruned_patches
    from vitlab.explain.reconstruct import reconstruct
    from vitlab.explain.relevance import grad_cam, gradient_x_input, relevance
    from vitlab.explain.rollout import rollout
    from vitlab.explain.subject import Explanation, Subject, open_subject
    from vitlab.explain.walk import ForwardView, forward_view, walk_through
    from vitlab.explain.weights import filters, high_norm_tokens, position_similarity, stem_filters, token_norms

_NAMES = {  # by module
    "ablate": ("ablate",),
    "attention_maps": ("attention_maps", "attention_masks"),
    "block_view": ("BlockView", "block_view", "query_attention"),
    "cell_view": ("CellView", "cell_view"),
    "attribution": ("attribution",),
    "attention_view": ("AttentionView", "show"),
    "clip_prompts": ("ask",),
    "distance": ("attention_distance", "attention_entropy", "attention_statistics"),
    "faithfulness": ("compare_methods", "curves"),
    "features": ("Foreground", "foreground", "foreground_mask", "nearest", "patch_similarity", "pca_rgb"),
    "outliers": ("OutlierTokens", "outlier_tokens"),
    "lens": ("lens",),
    "patch": ("patch",),
    "pruned": ("pruned_patches",),
    "reconstruct": ("reconstruct",),
    "subject": ("Explanation", "Subject", "open_subject"),
    "walk": ("ForwardView", "forward_view", "walk_through"),
    "weights": ("filters", "high_norm_tokens", "position_similarity", "stem_filters", "token_norms"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
_MODULES |= {m.name: m.module for m in METHODS.values() if m.function == f"{m.module}.{m.name}"}
__all__ = [
    "AttentionView",
    "BlockView",
    "CellView",
    "Explanation",
    "Foreground",
    "ForwardView",
    "OutlierTokens",
    "Subject",
    "ablate",
    "ask",
    "attention_distance",
    "attention_entropy",
    "attention_maps",
    "attention_masks",
    "attention_statistics",
    "attribution",
    "block_view",
    "cell_view",
    "compare_methods",
    "curves",
    "filters",
    "foreground",
    "foreground_mask",
    "forward_view",
    "grad_cam",
    "gradient_x_input",
    "high_norm_tokens",
    "lens",
    "nearest",
    "open_subject",
    "outlier_tokens",
    "patch",
    "patch_similarity",
    "pca_rgb",
    "position_similarity",
    "pruned_patches",
    "query_attention",
    "reconstruct",
    "relevance",
    "rollout",
    "show",
    "stem_filters",
    "token_norms",
    "walk_through",
]


class _LazyModule(ModuleType):
    """Where a module and its function share a name (rollout), the attribute is the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if _MODULES.get(name) == name and isinstance(value, ModuleType):  # Python binds a submodule on import
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _LazyModule


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"vitlab.explain.{_MODULES[name]}"), name)
    if name in ("draw", "figures"):
        return import_module(f"vitlab.explain.{name}")
    raise AttributeError(f"module 'vitlab.explain' has no attribute {name!r}; it has {', '.join(__dir__())}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})  # a method is public by its row in methods.py
