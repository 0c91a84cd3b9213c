"""What travels inside an exported file: how pictures are prepared, the classes' names, where the weights come from."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import torch

from vitlab.checkpoints import schema
from vitlab.checkpoints.fingerprint import fingerprint
from vitlab.checkpoints.native import spelled
from vitlab.images.preprocess import Preprocess
from vitlab.parsing import parse_json
from vitlab.version import __version__

KEY = "vitlab"  # of ONNX's metadata_props; a torch.export archive has a file vitlab.json
FORMAT = 1
Gives = Literal["logits", "features", "text"]
CARD: schema.Kinds = {name: schema.CARD[name] for name in ("name", "source", "licence", "metrics")}
KINDS: schema.Kinds = {  # of the values that are read
    "gives": schema.Kind("logits, features or text", lambda value: value in ("logits", "features", "text")),
    "family": schema.TEXT,
    "classes": schema.WHOLE,
    "image_size": schema.Kind("[height, width]", lambda value: isinstance(value, list) and schema.PAIR.fits(value)),
    **dict.fromkeys(("channels", "stride"), schema.POSITIVE),
    "dynamic_size": schema.FLAG,
    "labels": schema.TEXTS | schema.NULL,
    "preprocess": schema.TABLE | schema.NULL,
    **dict.fromkeys(("tokenizer", "reducer", "int8"), schema.TEXT | schema.NULL),
    **dict.fromkeys(("scale", "bias"), schema.NUMBER | schema.NULL),
    **dict.fromkeys(("config", "card"), schema.TABLE),
    "weights": schema.TEXT,
}


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
        return json.dumps(spelled(asdict(self)), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | None, path: Path) -> About:
        if not text:
            raise ValueError(
                f"{path}: it carries no preprocess and no labels, so it was not written by vitlab export: "
                "vitlab export CHECKPOINT -o model.onnx."
            )
        try:
            values = parse_json(text)
            if not isinstance(values, dict) or values.get("format") != FORMAT:
                said = values.get("format") if isinstance(values, dict) else values
                raise ValueError(f"format {said!r:.40} is not known: update vitlab")
            schema.check(values, KINDS, "it")
            schema.check(values.get("card", {}), CARD, "its card")
            if unknown := values.get("card", {}).keys() - CARD.keys():
                raise ValueError(f"its card has {sorted(unknown)[0]!r:.40}, which is not known: update vitlab")
            needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
            if missing := [name for name in needed if name not in values]:
                raise ValueError(f"{missing[0]} is missing")
            about = cls(**{name: values[name] for name in (f.name for f in fields(cls)) if name in values})
            if about.labels is not None and len(about.labels) != about.classes:
                raise ValueError(f"it has {len(about.labels)} labels for {about.classes} classes")
            if about.preprocess is not None:
                Preprocess.from_dict(about.preprocess)
        except ValueError as error:
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
        image_size=model.input_size,
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
