"""The native checkpoint: a folder with weights.safetensors and model.json. Loading it needs no name and no flag."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vitlab.checkpoints.files import CheckpointError, read_json
from vitlab.version import __version__

FORMAT = 1
WEIGHTS, CARD = "weights.safetensors", "model.json"


@dataclass
class Card:
    """Where a model comes from; everything here travels in model.json."""

    name: str | None = None
    source: str | None = None
    licence: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def save(model: Any, folder: str | Path) -> Path:
    """Write a checkpoint folder. Files appear under their names only when they are whole."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file. A checkpoint is a folder: name another place.")
    folder.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().cpu().contiguous() for key, value in model.state_dict().items()}
    card = {
        "format": FORMAT,
        "vitlab": __version__,
        "family": model.family,
        "config": model.config.to_dict(),
        "preprocess": model.preprocess.to_dict() if model.preprocess is not None else None,
        "labels": model.labels,
        **asdict(getattr(model, "card", None) or Card()),
    }
    write_whole(folder / WEIGHTS, lambda path: save_file(state, path, metadata={"format": "pt"}))
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / CARD, lambda path: path.write_text(text, encoding="utf-8"))
    return folder


def write_whole(path: Path, write: Any) -> None:
    """Write to a temporary name, flush to disk, then rename: a file under its own name is always whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_card(folder: Path) -> dict[str, Any]:
    card = read_json(folder / CARD)
    if card.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / CARD}: format {card.get('format')!r} is not known; this vitlab {__version__} reads {FORMAT}. "
            "Update vitlab: pip install -U vitlab."
        )
    if missing := {"family", "config"} - card.keys():
        raise CheckpointError(f"{folder / CARD}: {sorted(missing)[0]!r} is missing.")
    return card


def on_meta(build: Any) -> nn.Module:
    """Build a model without memory for its weights; they are assigned from the file."""
    with torch.device("meta"):
        return build()
