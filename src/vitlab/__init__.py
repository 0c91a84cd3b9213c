"""vitlab: build, train, look inside and ship Vision Transformers.

    import vitlab
    model = vitlab.create("vit_base", classes=10)
    model = vitlab.load("hf-hub:google/vit-base-patch16-224")
    vitlab.predict(model, "cat.jpg")

This door is lazy: importing vitlab does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitlab.version import __version__

if TYPE_CHECKING:
    from vitlab.checkpoints.load import load
    from vitlab.checkpoints.native import save
    from vitlab.explain.inspect import inspect
    from vitlab.export.optimize import optimize
    from vitlab.factory import create
    from vitlab.inference import embed, embed_text, predict, zero_shot
    from vitlab.layers.trace import Trace
    from vitlab.models.registry import list_models

_WHERE = {
    "create": "vitlab.factory",
    "load": "vitlab.checkpoints.load",
    "save": "vitlab.checkpoints.native",
    "inspect": "vitlab.explain.inspect",
    "embed": "vitlab.inference",
    "embed_text": "vitlab.inference",
    "predict": "vitlab.inference",
    "zero_shot": "vitlab.inference",
    "list_models": "vitlab.models.registry",
    "optimize": "vitlab.export.optimize",
    "Trace": "vitlab.layers.trace",
}
__all__ = [
    "Trace",
    "__version__",
    "create",
    "embed",
    "embed_text",
    "inspect",
    "list_models",
    "load",
    "optimize",
    "predict",
    "save",
    "zero_shot",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    if name in ("checkpoints", "explain", "export", "images", "layers", "models", "search"):
        return import_module(f"vitlab.{name}")
    raise AttributeError(f"module 'vitlab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
