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
    text = json.dumps(card, indent=2, ensure_ascii=False) + "\n"
    write_together(
        {
            folder / WEIGHTS: lambda path: save_file(state, path, metadata={"format": "pt"}),
            folder / CARD: lambda path: path.write_text(text, encoding="utf-8"),
        }
    )
    return folder


def write_whole(path: Path, write: Any) -> None:
    """One file: under its own name it is always whole."""
    write_together({path: write})


def write_together(writes: dict[Path, Any]) -> None:
    """Write all to temporary names, flush to disk, then rename: if one fails, the files of before stay as they were."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in writes}
    try:
        for path, write in writes.items():
            write(temporary[path])
            with temporary[path].open("rb") as file:
                os.fsync(file.fileno())
        for path in writes:
            temporary[path].replace(path)
    finally:
        for path in writes:
            temporary[path].unlink(missing_ok=True)


def read_card(folder: Path) -> dict[str, Any]:
    card = read_json(folder / CARD)
    if card.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / CARD}: format {card.get('format')!r} is not known; this vitlab {__version__} reads {FORMAT}. "
            "Update vitlab: pip install -U vitlab."
        )
    for key, kind in (("family", str), ("config", dict)):
        if not isinstance(card.get(key), kind):
            raise CheckpointError(
                f"{folder / CARD}: {key!r} is missing or damaged. Fetch or save the checkpoint again."
            )
    return card


def on_meta(build: Any) -> nn.Module:
    """Build a model without memory for its weights; they are assigned from the file."""
    with torch.device("meta"):
        return build()
