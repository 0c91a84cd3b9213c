"""What travels inside an exported file: how pictures are prepared, the classes' names, where the weights come from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from vitlab.checkpoints.fingerprint import fingerprint
from vitlab.images.preprocess import Preprocess
from vitlab.models.input_size import input_size
from vitlab.version import __version__

KEY = "vitlab"  # of ONNX's metadata_props; a torch.export archive has a file vitlab.json
FORMAT = 1
Gives = Literal["logits", "features", "text"]


@dataclass(frozen=True)
class About:
    gives: Gives  # logits of classes; a picture's features; or, of a CLIP, those of a text
    family: str
    classes: int  # 0 unless it gives logits
    image_size: tuple[int, int]
    channels: int
    dynamic_size: bool = False  # whether other sizes may be asked
    stride: int = 1  # what their sides are multiples of
    labels: list[str] | None = None
    preprocess: dict[str, Any] | None = None
    tokenizer: str | None = None  # of a text tower
    scale: float | None = None  # of a CLIP: logits = scale * (image features) (text features)^T,
    bias: float | None = None  # and plus this where it was trained with the sigmoid loss
    reducer: str | None = None  # fewer tokens: a part of the graph
    int8: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)  # name, source, licence, metrics
    weights: str = ""  # fingerprint of the model it was made of
    vitlab: str = __version__
    torch: str = torch.__version__
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | None, path: Path) -> About:
        if not text:
            raise ValueError(
                f"{path}: it carries no preprocess and no labels, so it was not written by vitlab export: "
                "vitlab export CHECKPOINT -o model.onnx."
            )
        try:
            values = json.loads(text)
            if values.get("format") != FORMAT:
                raise ValueError(f"format {values.get('format')!r} is not known: update vitlab")
            about = cls(**{name: values[name] for name in (f.name for f in fields(cls)) if name in values})
            if about.preprocess is not None:
                Preprocess.from_dict(about.preprocess)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{path}: its metadata cannot be used: {str(error).rstrip('.')}.") from None
        return about


def about_model(model: Any, gives: Gives, **more: Any) -> About:
    """`more`: what the export adds: dynamic_size, stride, reducer, int8."""
    tokenizer = getattr(model, "tokenizer", None)
    clip = hasattr(model, "encode_text")
    return About(
        gives=gives,
        family=model.family,
        classes=model.config.classes if gives == "logits" else 0,
        image_size=input_size(model),
        channels=model.config.channels,
        labels=list(model.labels) if gives == "logits" and model.labels else None,
        preprocess=model.preprocess.to_dict() if model.preprocess is not None and gives != "text" else None,
        tokenizer=tokenizer.to_json() if tokenizer is not None and gives == "text" else None,
        scale=model.scale.item() if clip else None,
        bias=model.bias.item() if clip and model.bias is not None else None,
        config=model.config.to_dict(),
        card=asdict(model.card) if getattr(model, "card", None) is not None else {},
        weights=fingerprint(model),
        **more,
    )
