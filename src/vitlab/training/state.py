"""A run folder's checkpoints: everything a run needs to go on, written so that `last` is always whole.

last/   weights.safetensors, model.json, optimizer.safetensors, ema.safetensors, state.json
best/   weights.safetensors, model.json
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.checkpoints import native
from vitlab.checkpoints.files import CheckpointError, read_json, read_tensors


@dataclass
class Progress:
    """Where a run stands; the numbers that no tensor holds."""

    step: int = 0  # steps done
    best_rank: float | None = None  # the objective's own measure; the accuracy where it learns labels
    best_top1: float = -1.0
    best_epoch: int = -1
    seconds: float = 0.0  # of training, over all its parts
    images: int = 0
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read: name -> what is wrong
    scaler: float = 0.0  # fp16's loss scale
    scaler_steps: int = 0  # since it last changed
    finished: bool = False


Tensors = dict[str, Tensor]


def check_place(run: Path) -> None:
    """Refuse a run folder that cannot be written, before anything is downloaded or trained."""
    place = next(place for place in (run, *run.absolute().parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"run.dir={run}: {place} is a file, where a folder is needed. Name another: run.dir=...")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"run.dir={run}: {place} cannot be written. Name another folder: run.dir=...")


def save_last(run: Path, model: Any, optimizer: Tensors, ema: Tensors | None, progress: Progress) -> None:
    """Everything that --resume needs."""

    def fill(folder: Path) -> None:
        native.save(model, folder)
        save_file(optimizer, folder / "optimizer.safetensors")
        if ema is not None:
            save_file(ema, folder / "ema.safetensors")
        (folder / "state.json").write_text(json.dumps(asdict(progress)) + "\n", encoding="utf-8")

    replace_folder(run / "last", fill)


def save_best(run: Path, model: Any) -> None:
    replace_folder(run / "best", lambda folder: native.save(model, folder))


def replace_folder(folder: Path, fill: Any) -> None:
    """Fill a new folder, flush it, and put it in the old one's place; whenever it stops, one of the two is whole."""
    new, old = folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")
    recover(folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        fill(new)
        for path in new.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        _sync_folder(new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    _sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """After a kill between the two renames, the old folder goes back to its place."""
    old = folder.with_name(f".{folder.name}.old")
    if old.exists() and not folder.exists():
        with suppress(FileNotFoundError):  # another process of the run was faster
            old.rename(folder)
    elif old.exists():
        shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@dataclass
class Saved:
    labels: list[str] | None
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    ema: dict[str, Tensor] | None
    progress: Progress


def load_last(run: Path) -> Saved | None:
    """What the last save holds; None where nothing was saved yet."""
    folder = run / "last"
    recover(folder)
    if not folder.is_dir():
        return None
    values = read_json(folder / "state.json")
    try:
        progress = Progress(**values)
    except TypeError as error:
        raise CheckpointError(f"{folder}/state.json: {error}. It was written by another vitlab.") from None
    ema = load_file(folder / "ema.safetensors") if (folder / "ema.safetensors").is_file() else None
    labels, weights = native.read_card(folder).get("labels"), read_tensors(folder / native.WEIGHTS)
    return Saved(labels, weights, load_file(folder / "optimizer.safetensors"), ema, progress)
