"""A study's folder: it belongs to one study, which study.json describes and a later command may go on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.native import write_together, write_whole
from vitlab.version import __version__

ABOUT, PLOT = "study.json", "plot.png"
ANOTHER = "Take another folder: --dir studies/NAME."


def read_about(folder: Path, kind: str) -> dict[str, Any]:
    """What the folder says of the study it holds, nothing where it is new; anything else in it is refused."""
    if not (folder / ABOUT).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{folder} is there already and holds no study. Take another: --dir studies/NAME.")
        return {}
    old = read_json(folder / ABOUT)
    if old.get("study", kind) != kind:
        raise ValueError(f"{folder} holds another study ({old.get('study')}). {ANOTHER}")
    return old


def write_about(folder: Path, kind: str, about: dict[str, Any], command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"study": kind, "command": command, "vitlab": __version__, **about}
    text = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / ABOUT, lambda path: path.write_text(text, encoding="utf-8"))


def write_texts(folder: Path, texts: dict[str, str]) -> None:
    """Several files at once, so that they always belong together."""

    def writer(text: str) -> Callable[[Path], object]:
        return lambda path: path.write_text(text, encoding="utf-8")

    write_together({folder / name: writer(text) for name, text in texts.items()})


def without_matplotlib(draw: Callable[[], object]) -> list[str]:
    """Draw; where that cannot be done, the words that say so."""
    try:
        draw()
    except ImportError:
        return [f"{PLOT} is not drawn: that needs matplotlib, which is not installed: pip install matplotlib."]
    return []
