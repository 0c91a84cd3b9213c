"""vitlab: build, train, look inside and ship Vision Transformers.

    import vitlab
    model = vitlab.create("vit_base", classes=10)
    model = vitlab.load("hf-hub:google/vit-base-patch16-224")
    vitlab.predict(model, "cat.jpg")
    vitlab.predict("bundled:cifar10", "cat.jpg")           # functions that take a model also take its name or path

Names are imported on first use: importing vitlab does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vitlab.errors import (
    CheckpointError,
    DataError,
    ExportError,
    ImageError,
    SearchError,
    TokenizerError,
    TrainingError,
    UsageError,
    VitlabError,
)
from vitlab.version import __version__

if TYPE_CHECKING:
    from vitlab.checkpoints.convert import convert
    from vitlab.checkpoints.load import load
    from vitlab.checkpoints.native import save
    from vitlab.checkpoints.push import push
    from vitlab.data_check.check import check
    from vitlab.evaluation import evaluate
    from vitlab.explain.inspect import inspect
    from vitlab.export.optimize import optimize
    from vitlab.export.pipeline import export_model
    from vitlab.factory import create
    from vitlab.inference import embed, embed_text, predict, zero_shot
    from vitlab.layers.edit import Edit
    from vitlab.layers.trace import Trace
    from vitlab.models.registry import list_models
    from vitlab.training.train import train

_MODULES = {
    "Edit": "vitlab.layers.edit",
    "Trace": "vitlab.layers.trace",
    "check": "vitlab.data_check.check",
    "convert": "vitlab.checkpoints.convert",
    "create": "vitlab.factory",
    "embed": "vitlab.inference",
    "embed_text": "vitlab.inference",
    "evaluate": "vitlab.evaluation",
    "export_model": "vitlab.export.pipeline",
    "inspect": "vitlab.explain.inspect",
    "list_models": "vitlab.models.registry",
    "load": "vitlab.checkpoints.load",
    "optimize": "vitlab.export.optimize",
    "predict": "vitlab.inference",
    "push": "vitlab.checkpoints.push",
    "save": "vitlab.checkpoints.native",
    "train": "vitlab.training.train",
    "zero_shot": "vitlab.inference",
}
_PACKAGES = ("checkpoints", "explain", "export", "images", "layers", "models", "search", "training")

__all__ = [
    "CheckpointError",
    "DataError",
    "Edit",
    "ExportError",
    "ImageError",
    "SearchError",
    "TokenizerError",
    "Trace",
    "TrainingError",
    "UsageError",
    "VitlabError",
    "__version__",
    "check",
    "convert",
    "create",
    "embed",
    "embed_text",
    "evaluate",
    "export_model",
    "inspect",
    "list_models",
    "load",
    "optimize",
    "predict",
    "push",
    "save",
    "train",
    "zero_shot",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _PACKAGES:
        return import_module(f"vitlab.{name}")
    raise AttributeError(f"module 'vitlab' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, *_PACKAGES]
