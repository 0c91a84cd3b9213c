"""What the shell offers at Tab: values of arguments and options. Nothing here imports torch or numpy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

HERE = Path(__file__).parent
BREAKS = ":="  # where bash ends a word by itself

Complete = Callable[[str], list[str]]


def one_of(*names: str) -> Complete:
    return lambda incomplete: _fitting(names, incomplete)


def models(incomplete: str) -> list[str]:
    return _fitting((HERE / "model_names.txt").read_text(encoding="utf-8").split(), incomplete)


def checkpoints(incomplete: str) -> list[str]:
    """Those in the package, and of the runs in this folder; other paths are the shell's own affair."""
    from vitlab.checkpoints.bundled import PREFIX, names

    trained = [folder.as_posix() for folder in sorted(Path("runs").glob("*/best"))]
    return _fitting([*(f"{PREFIX}{name}" for name in names()), *trained], incomplete)


def models_and_checkpoints(incomplete: str) -> list[str]:
    return [*models(incomplete), *checkpoints(incomplete)]


def sources(incomplete: str) -> list[str]:
    from vitlab.images.sources import SOURCES

    return _fitting(SOURCES, incomplete)


def recipes(incomplete: str) -> list[str]:
    """A source has the name of its recipe, or one of its own."""
    from vitlab.images.sources import SOURCES
    from vitlab.training.presets import recipes as shipped

    return _fitting(sorted({*shipped(), *SOURCES}), incomplete)


def runs(incomplete: str) -> list[str]:
    return _fitting([file.parent.as_posix() for file in sorted(Path("runs").glob("*/recipe.toml"))], incomplete)


def exercises(incomplete: str) -> list[str]:
    files = (HERE.parent / "learn" / "solutions").glob("*.py")
    return _fitting(sorted(file.stem.replace("_", "-") for file in files), incomplete)


def _fitting(names: Iterable[str], incomplete: str) -> list[str]:
    """bash replaces only what stands behind its last break: cifar10, where bundled:ci was typed."""
    kept = 0
    if os.environ.get("_VITLAB_COMPLETE") == "complete_bash":
        kept = max(incomplete.rfind(character) for character in BREAKS) + 1
    return [name[kept:] for name in names if name.startswith(incomplete)]


def join_words() -> None:
    """bash tells bundled:ci as three words; make it one, so that it is completed as it was typed."""
    if os.environ.get("_VITLAB_COMPLETE") != "complete_bash":
        return
    words, at = os.environ.get("COMP_WORDS", "").split("\n"), int(os.environ.get("COMP_CWORD", "0"))
    before = re.sub(f"\n([{BREAKS}]+)(?:\n|$)", r"\1", "\n".join(words[: at + 1])).split("\n")
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(before), str(len(before) - 1)
