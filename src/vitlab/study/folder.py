"""A study's folder. It belongs to one study, which study.json describes and a later command may resume."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.native import write_together, write_whole
from vitlab.errors import UsageError
from vitlab.version import __version__

STUDY_JSON, PLOT = "study.json", "plot.png"
OTHER_FOLDER = "Use another folder: --dir studies/NAME."


def read_study_json(folder: Path, kind: str) -> dict[str, Any]:
    """Contents of study.json, empty for a new folder. A folder with anything else in it is refused."""
    if not (folder / STUDY_JSON).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists already and holds no study. Use another: --dir studies/NAME.")
        return {}
    old = read_json(folder / STUDY_JSON)
    if old.get("study", kind) != kind:
        raise UsageError(f"{folder} holds another study ({old.get('study')}). {OTHER_FOLDER}")
    return old


def write_study_json(folder: Path, kind: str, about: Mapping[str, object], command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"study": kind, "command": command, "vitlab": __version__, **about}
    text = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / STUDY_JSON, lambda path: path.write_text(text, encoding="utf-8"))


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Write several files in one step, so that they always belong together."""

    def writer(text: str) -> Callable[[Path], object]:
        return lambda path: path.write_text(text, encoding="utf-8")

    write_together({folder / name: writer(text) for name, text in texts.items()})


def try_draw(draw: Callable[[], object]) -> list[str]:
    """Draw; returns a note if matplotlib is missing."""
    try:
        draw()
    except ImportError:
        return [f"{PLOT} is not drawn: that needs matplotlib, which is not installed: pip install matplotlib."]
    return []
