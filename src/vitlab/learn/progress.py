"""Progress of a learner: a file next to the exercises with the hash of each file that passed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Literal

from vitlab.learn.exercises import EXERCISES, Exercise

NOTES = ".vitlab-learn.json"
State = Literal["done", "changed", "begun", "open"]


def remember(exercise: Exercise, file: Path) -> None:
    """Record that this file has passed."""
    notes = _read(file.parent)
    notes[exercise.name] = {"file": file.name, "sha256": _hash(file)}
    (file.parent / NOTES).write_text(json.dumps(notes, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def states(folder: Path) -> dict[str, tuple[str, State]]:
    """Exercise -> the learner's file in this folder, and its state."""
    notes = _read(folder)
    return {name: _state(exercise, folder, notes.get(name)) for name, exercise in EXERCISES.items()}


def next_exercise(folder: Path) -> tuple[str, str | None] | None:
    """The first exercise that is not done, and the learner's file if it is begun; None if all are done."""
    for name, (file, state) in states(folder).items():
        if state != "done":
            return name, None if state == "open" else file
    return None


def _state(exercise: Exercise, folder: Path, note: dict[str, str] | None) -> tuple[str, State]:
    if note and (folder / note["file"]).is_file():
        return note["file"], "done" if _hash(folder / note["file"]) == note["sha256"] else "changed"
    return exercise.file, "begun" if (folder / exercise.file).is_file() else "open"


def _read(folder: Path) -> dict[str, dict[str, str]]:
    try:
        notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or not ours
        return {}
    if not isinstance(notes, dict):
        return {}
    return {k: v for k, v in notes.items() if isinstance(v, dict) and {"file", "sha256"} <= v.keys()}


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
