"""bundled:NAME -> the folder of a small trained model that ships in the package, with its recipe beside it."""

from __future__ import annotations

from pathlib import Path

from vitlab.errors import CheckpointError

PREFIX = "bundled:"
DEFAULT = "bundled:vit"  # where a command needs a model and is given none; the first on the page
ALIASES: dict[str, str] = {}  # names of models that were replaced -> those of their successors
FOLDER = Path(__file__).parents[1] / "bundled"


def names() -> list[str]:
    """The default first, then by name; without aliases."""
    trained = (folder.name for folder in FOLDER.iterdir() if (folder / "model.json").is_file())
    return sorted(trained, key=lambda name: (PREFIX + name != DEFAULT, name))


def find(name: str) -> Path:
    model = name.removeprefix(PREFIX)
    model = ALIASES.get(model, model)
    if model not in names():
        raise CheckpointError(f"{name}: there is no such model in the package; there are {', '.join(names())}.")
    return FOLDER / model
