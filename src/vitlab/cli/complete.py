"""Shell completion: values of arguments and options. Nothing here imports torch or numpy, unless models/ changed."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path

HERE = Path(__file__).parent
BREAKS = ":="  # characters at which bash splits words

Complete = Callable[[str], list[str]]


def one_of(*names: str) -> Complete:
    return lambda incomplete: _matches(names, incomplete)


def models(incomplete: str) -> list[str]:
    return _matches(_model_names(), incomplete)


def _model_names() -> list[str]:
    """Every name and its shorter form. The registry imports torch: they are kept until a file of models/ changes."""
    from vitlab.images.sources.download import cache_dir

    kept = cache_dir() / "model_names.txt"
    files = sorted((HERE.parent / "models").glob("*.py"))
    stamp = f"{HERE} {zlib.crc32(repr([(file.name, file.stat().st_mtime_ns) for file in files]).encode())}"
    with suppress(OSError, ValueError):
        first, *names = kept.read_text(encoding="utf-8").splitlines()
        if first == stamp:
            return names
    from vitlab.models.registry import MODELS

    entries = MODELS.values()
    names = sorted({name for e in entries for name in (e.name, *filter(e.name.startswith, e.aliases))})
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        new = kept.with_name(f"{kept.name}.{os.getpid()}")
        new.write_text("\n".join([stamp, *names]), encoding="utf-8")
        new.replace(kept)
    return names


def checkpoints(incomplete: str) -> list[str]:
    """Bundled checkpoints, and those of the runs in this folder; the shell completes other paths itself."""
    from vitlab.checkpoints.bundled import PREFIX, names

    trained = [folder.as_posix() for folder in sorted(Path("runs").glob("*/best"))]
    return _matches([*(f"{PREFIX}{name}" for name in names()), *trained], incomplete)


def models_and_checkpoints(incomplete: str) -> list[str]:
    return [*models(incomplete), *checkpoints(incomplete)]


def sources(incomplete: str) -> list[str]:
    from vitlab.images.sources import SOURCES

    return _matches(SOURCES, incomplete)


def recipes(incomplete: str) -> list[str]:
    """Recipes and data sources, which share some names."""
    from vitlab.images.sources import SOURCES
    from vitlab.training.presets import recipes as shipped

    return _matches(sorted({*shipped(), *SOURCES}), incomplete)


def runs(incomplete: str) -> list[str]:
    return _matches([file.parent.as_posix() for file in sorted(Path("runs").glob("*/recipe.toml"))], incomplete)


def layouts() -> list[str]:
    """What `vitlab convert --to` writes: the names of the writers in checkpoints/, which themselves import torch."""
    texts = [file.read_text(encoding="utf-8") for file in (HERE.parent / "checkpoints").glob("*.py")]
    writers = {name for text in texts for name in re.findall(r'"(\w+)": (?:\w+\.)?_?writer\b', text, re.I)}
    return ["native", *sorted(writers)]


def exercises(incomplete: str) -> list[str]:
    files = (HERE.parent / "learn" / "solutions").glob("*.py")
    return _matches(sorted(file.stem.replace("_", "-") for file in files), incomplete)


def claims(incomplete: str) -> list[str]:
    files = (HERE.parent / "study" / "reproduce" / "claims").glob("[a-z]*.py")
    return _matches([*sorted(file.stem.replace("_", "-") for file in files), "all"], incomplete)


def _matches(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


@contextmanager
def answering_bash() -> Iterator[None]:
    """bash splits bundled:ci into three words and completes the last: join them, and print the end of each match."""
    if os.environ.get("_VITLAB_COMPLETE") != "complete_bash":
        yield
        return
    words = os.environ["COMP_WORDS"].split("\n")[: int(os.environ["COMP_CWORD"]) + 1]
    words = re.sub(f"\n([{BREAKS}]+)(?:\n|$)", r"\1", "\n".join(words)).split("\n")
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(len(words) - 1)
    behind = max(words[-1].rfind(character) for character in BREAKS) + 1
    answer = StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        print("\n".join(line[behind:] for line in answer.getvalue().splitlines()))
