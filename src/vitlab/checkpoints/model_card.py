"""The README.md of a model on the Hugging Face hub, made from what its checkpoint says about itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vitlab.checkpoints import hub
from vitlab.checkpoints.files import read_json
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Capability, Card, Network
from vitlab.printable import one_line
from vitlab.version import __version__

LIBRARIES = {"native": "vitlab", "hf": "transformers", "timm": "timm", "open_clip": "open_clip"}  # by --to
LICENCES = {  # that the hub knows by these names; others are "other", with their own
    *("apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc0-1.0", "openrail", "apple-amlr", "apple-ascl"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0", "gpl-3.0", "unlicense"),
}
MOST_CLASSES = 100  # that are named in the card; all are in the checkpoint


def model_card(model: Network, name: str, to: str, folder: Path) -> str:
    """`name`: owner/name on the hub; `folder`: the files as they will lie there."""
    card = model.card or Card()
    parts = [
        _front_matter(model, card, to),
        f"# {name.split('/')[1]}",
        _table(("", ""), _facts(model, card, to)),
        _classes(model),
        f"## Metrics\n\n{_table(('metric', 'value'), _metrics(card.metrics))}" if card.metrics else "",
        f"## Use\n\n{_use(model, name, to, folder)}",
        f"This card was made by `vitlab push` (vitlab {__version__}) from the checkpoint's own facts.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def is_ours(text: str) -> bool:
    """Whether a README.md was made here, and by nobody's hand."""
    return "This card was made by `vitlab push`" in text


def _front_matter(model: Network, card: Card, to: str) -> str:
    values: dict[str, Any] = {"library_name": LIBRARIES[to], "pipeline_tag": _task(model)}
    transformer = ["vision-transformer"] if Capability.TOKENS in model.encoder.capabilities else []
    values["tags"] = ["vitlab", model.family.replace("_", "-"), *transformer]
    if card.licence:
        licence = card.licence.lower()
        other = {"license": "other", "license_name": _slug(card.licence)}
        values |= {"license": licence} if licence in LICENCES else other
    if base := _hub_name(card.source):
        values["base_model"] = base
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]  # JSON is YAML
    return "\n".join(["---", *lines, "---"])


def _task(model: Network) -> str:
    """The hub's name for what the model does."""
    if Capability.TEXT in model.capabilities:
        return "zero-shot-image-classification"
    return "image-classification" if Capability.CLASSIFY in model.capabilities else "image-feature-extraction"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")[:60] or "unknown"


def _hub_name(source: str | None) -> str | None:
    match = re.fullmatch(rf"{hub.PREFIX}([\w.-]+/[\w.-]+)(@.*)?", source or "")
    return match[1] if match else None


def _facts(model: Network, card: Card, to: str) -> Iterable[tuple[str, str]]:
    height, width = model.input_size
    yield "Family", model.family + (f" ({card.name})" if card.name else "")
    yield "Parameters", f"{sum(p.numel() for p in model.parameters()):,}"
    yield "Input", f"{model.config.channels} x {height} x {width} (channels, height, width)"
    yield "Preprocess", _preprocess(model.preprocess) if model.preprocess is not None else "not stored"
    yield "Classes", str(model.classes) if model.classes else "none: it gives features"
    yield "Layout", f"{LIBRARIES[to]}'s" if to != "native" else "vitlab's: weights.safetensors and model.json"
    yield "Licence", card.licence or "not stated"
    yield "Source", card.source or "not stated"


def _preprocess(p: Preprocess) -> str:
    size, mean, std = by(p.size), *(", ".join(f"{value:g}" for value in values) for values in (p.mean, p.std))
    if p.how == "crop":
        first = f"the shorter side to {p.resize}" if isinstance(p.resize, int) else by(p.resize or p.size)
        how = f"resized ({first}), then the centre {size} cropped"
    else:
        how = f"stretched to {size}" if p.how == "stretch" else f"fitted into {size}, padded with the mean colour"
    if p.stored is not None:
        how = f"{p.stored}, as stored in the files; {how}"
    return f"{how}, {p.interpolation}; scale {p.scale:g}, mean {mean}, std {std}"


def by(size: Iterable[int]) -> str:
    return "x".join(map(str, size))


def _classes(model: Network) -> str:
    if not model.labels or not model.classes:
        return ""
    names = ", ".join(_cell(label) for label in model.labels[:MOST_CLASSES])
    more = f", and {len(model.labels) - MOST_CLASSES} more" if len(model.labels) > MOST_CLASSES else ""
    return f"## Classes\n\n{names}{more}."


def _metrics(metrics: Mapping[str, object]) -> Iterable[tuple[str, str]]:
    for name, value in metrics.items():
        yield name, f"{value:.6g}" if isinstance(value, float) else str(value)


def _table(titles: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {titles[0]} | {titles[1]} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_cell(key)} | {_cell(value)} |" for key, value in rows)])


def _cell(text: str) -> str:
    """Text of a file, which must not break out of a table or become HTML."""
    return re.sub(r"([\\|`*_\[\]])", r"\\\1", one_line(text)).replace("<", "&lt;").replace("---", "\\-\\-\\-")


def _use(model: Network, name: str, to: str, folder: Path) -> str:
    lines = ["import vitlab", "", f'model = vitlab.load("{hub.PREFIX}{name}")']
    if Capability.TEXT in model.capabilities:
        lines.append('vitlab.zero_shot(model, "cat.jpg", ["a cat", "a dog"])')
    elif Capability.CLASSIFY in model.capabilities:
        lines.append('vitlab.predict(model, "cat.jpg")')
    else:
        lines.append('vitlab.embed(model, ["cat.jpg"])')
    blocks = ["\n".join(["```python", *lines, "```"])]
    if other := _other_library(name, to, folder):
        blocks.append(f"In {LIBRARIES[to]}:\n\n```python\n{other}\n```")
    return "\n\n".join(blocks)


def _other_library(name: str, to: str, folder: Path) -> str:
    if to == "hf":
        kind = (read_json(folder / "config.json").get("architectures") or ["AutoModel"])[0]
        return f'from transformers import {kind}\n\nmodel = {kind}.from_pretrained("{name}")'
    if to == "timm":
        return f'import timm\n\nmodel = timm.create_model("hf-hub:{name}", pretrained=True)'
    if to == "open_clip":
        return f'import open_clip\n\nmodel, preprocess = open_clip.create_model_from_pretrained("hf-hub:{name}")'
    return ""
