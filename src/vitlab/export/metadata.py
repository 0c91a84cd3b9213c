"""Metadata inside an exported file: preprocess, class names, and where the weights come from."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from vitlab.checkpoints import schema
from vitlab.checkpoints.digests import fingerprint
from vitlab.errors import ExportError, VitlabError
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network
from vitlab.models.dense import DenseOutput
from vitlab.models.task import CLASSES, task_from_dict
from vitlab.models.two_towers import TwoTowers
from vitlab.parsing import parse_json, spell_not_finite
from vitlab.version import __version__

KEY = "vitlab"  # key in ONNX's metadata_props; a torch.export archive has a file vitlab.json
FORMAT = 1
WITH_TASK = 2  # its logits are no classes, which a vitlab that reads format 1 alone would take them for
OutputKind = Literal["logits", "features", "text", "dense"]
CARD: schema.Kinds = {name: schema.CARD[name] for name in ("name", "source", "licence", "metrics")}
KINDS: schema.Kinds = {
    "gives": schema.Kind("logits, features, text or dense", lambda value: value in get_args(OutputKind)),
    "fields": schema.Kind("names of a DenseOutput's fields", lambda value: _are_fields(value)),
    "family": schema.TEXT,
    "classes": schema.WHOLE,
    "image_size": schema.Kind("[height, width]", lambda value: isinstance(value, list) and schema.PAIR.fits(value)),
    **dict.fromkeys(("channels", "stride"), schema.POSITIVE),
    "dynamic_size": schema.FLAG,
    "labels": schema.TEXTS | schema.NULL,
    **dict.fromkeys(("preprocess", "task"), schema.TABLE | schema.NULL),
    **dict.fromkeys(("tokenizer", "reducer", "int8"), schema.TEXT | schema.NULL),
    **dict.fromkeys(("scale", "bias"), schema.NUMBER | schema.NULL),
    **dict.fromkeys(("config", "card"), schema.TABLE),
    "weights": schema.TEXT,
}


@dataclass(frozen=True)
class ExportMetadata:
    """Also the config of an exported network."""

    gives: OutputKind  # logits, image features, the text features of a CLIP, or the fields of a DenseOutput
    family: str
    classes: int  # 0 unless gives is logits or dense
    image_size: tuple[int, int]
    channels: int
    fields: list[str] = field(default_factory=list[str])  # of a DenseOutput, in the order of the outputs
    dynamic_size: bool = False  # whether other image sizes are allowed
    stride: int = 1  # image sides must be multiples of this
    labels: list[str] | None = None
    task: dict[str, Any] | None = None  # what the logits mean, where they are not those of classes
    preprocess: dict[str, Any] | None = None
    tokenizer: str | None = None  # for a text tower
    scale: float | None = None  # CLIP: logits = scale * (image features) (text features)^T
    bias: float | None = None  # added to the logits of a model trained with the sigmoid loss
    reducer: str | None = None  # token reduction inside the graph
    int8: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)  # name, source, licence, metrics
    weights: str = ""  # fingerprint of the exported model
    vitlab: str = __version__
    torch: str = torch.__version__
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(spell_not_finite(self.to_dict()), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | None, path: Path) -> ExportMetadata:
        if not text:
            raise ExportError(
                f"{path}: has no preprocess and no labels, so it was not written by vitlab export. Write it with: "
                "vitlab export CHECKPOINT -o model.onnx."
            )
        try:
            values = parse_json(text)
        except ValueError as error:
            raise _unusable(path, error) from None
        try:
            return cls.from_dict(values)
        except VitlabError as error:
            raise _unusable(path, error) from None

    @classmethod
    def from_dict(cls, values: object) -> ExportMetadata:
        if not isinstance(values, dict) or values.get("format") not in (FORMAT, WITH_TASK):
            version = values.get("format") if isinstance(values, dict) else values
            raise ExportError(f"format {version!r:.40} is not known: update vitlab")
        schema.check(values, KINDS, "it")
        card = values.get("card", {})
        schema.check(card, CARD, "its card")
        if unknown := card.keys() - CARD.keys():
            raise ExportError(f"its card has {sorted(unknown)[0]!r:.40}, which is not known: update vitlab")
        needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        if missing := [name for name in needed if name not in values]:
            raise ExportError(f"{missing[0]} is missing")
        metadata = cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
        if metadata.labels is not None and len(metadata.labels) != metadata.classes:
            raise ExportError(f"it has {len(metadata.labels)} labels for {metadata.classes} classes")
        task_from_dict(metadata.task).check(metadata.classes)
        if metadata.preprocess is not None:
            Preprocess.from_dict(metadata.preprocess)
        return replace(metadata, image_size=tuple(metadata.image_size))


def _are_fields(value: object) -> bool:
    names = [f.name for f in fields(DenseOutput)]
    return schema.TEXTS.fits(value) and set(value) <= set(names)  # type: ignore[call-overload]


def _unusable(path: Path, error: ValueError) -> ExportError:
    return ExportError(f"{path}: its metadata cannot be used: {str(error).rstrip('.')}.")


def model_metadata(model: Network, gives: OutputKind, **options: Any) -> ExportMetadata:
    """`options`: fields, dynamic_size, stride, reducer and int8 of the export."""
    towers = model if isinstance(model, TwoTowers) else None
    tokenizer = towers.tokenizer if towers is not None and gives == "text" else None
    task = None if model.task == CLASSES or gives != "logits" else model.task.to_dict()
    return ExportMetadata(
        gives=gives,
        family=model.family,
        classes=model.config.classes if gives in ("logits", "dense") else 0,
        image_size=model.input_size,
        channels=model.config.channels,
        labels=list(model.labels) if gives in ("logits", "dense") and model.labels else None,
        task=task,
        format=FORMAT if task is None else WITH_TASK,
        preprocess=model.preprocess.at_one_size().to_dict()
        if model.preprocess is not None and gives != "text"
        else None,
        tokenizer=tokenizer.to_json() if tokenizer is not None else None,
        scale=towers.scale.item() if towers is not None else None,
        bias=towers.bias.item() if towers is not None and towers.bias is not None else None,
        config=model.config.to_dict(),
        card=asdict(model.card) if model.card is not None else {},
        weights=fingerprint(model),
        **options,
    )
