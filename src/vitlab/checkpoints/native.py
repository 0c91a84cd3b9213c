"""The native checkpoint: a folder with weights.safetensors and model.json. Loading it needs no name and no flag.

A model that reads words has its tokenizer.json beside them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlab.checkpoints import digests
from vitlab.checkpoints.files import check_values, read_json
from vitlab.errors import CheckpointError
from vitlab.models import registry
from vitlab.models.base import Card, Network, unwrap
from vitlab.parsing import spell_not_finite
from vitlab.version import __version__

FORMAT = 1
WEIGHTS, CARD, WORDS = "weights.safetensors", "model.json", "tokenizer.json"


def save(model: nn.Module, folder: str | Path) -> Path:
    """Write a checkpoint folder. Files appear under their names only when they are whole and will load."""
    folder, network = Path(folder).expanduser(), unwrap(model)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file. A checkpoint is a folder: name another place.")
    state = _whole_state(network, folder)
    _check_labels(network, folder)
    folder.mkdir(parents=True, exist_ok=True)
    card = {
        "format": FORMAT,
        "vitlab": __version__,
        "family": network.family,
        "config": network.config.to_dict(),
        "preprocess": network.preprocess.to_dict() if network.preprocess is not None else None,
        "labels": network.labels,
        **asdict(network.card or Card()),
    }
    tokenizer = network.tokenizer
    writes = {WEIGHTS: lambda path: save_file(state, path, metadata={"format": "pt"})}
    if tokenizer is not None:
        writes[WORDS] = lambda path: path.write_text(tokenizer.to_json(), encoding="utf-8")
    written: dict[str, str] = {}

    def write_and_digest(name: str, path: Path) -> None:
        writes[name](path)
        written[name] = digests.file_digest(path)

    def write_card(path: Path) -> None:  # after the others, whose digests it holds
        sealed = digests.seal({**spell_not_finite(card), digests.DIGESTS: written})
        path.write_text(json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    write_together({**{folder / name: partial(write_and_digest, name) for name in writes}, folder / CARD: write_card})
    if tokenizer is None:  # one of another model
        (folder / WORDS).unlink(missing_ok=True)
    return folder


def _whole_state(model: Network, folder: Path) -> dict[str, Tensor]:
    """The tensors as `load` will want them: those of the network that model.config describes, and no others."""
    state = {key.replace("_orig_mod.", ""): value for key, value in model.state_dict().items()}  # compiled blocks
    wanted = on_meta(lambda: registry.build(model.family, model.config)).state_dict()
    problems = [f"{key} is not there" for key in wanted.keys() - state.keys()]
    problems += [f"{key} is not part of the network" for key in state.keys() - wanted.keys()]
    for key in wanted.keys() & state.keys():
        found, expected = (tuple(getattr(t, "shape", ())) for t in (state[key], wanted[key]))
        if found != expected:
            problems.append(f"{key} is {found}, expected {expected}")
    if problems:
        raise CheckpointError(
            f"{folder}: not written, because it could not be loaded: {'; '.join(sorted(problems)[:4])}. "
            f"The model was changed after it was built with model.config: {_remedy(state, model.config.classes)}."
        )
    if any(value.is_meta for value in state.values()):
        raise CheckpointError(
            f"{folder}: not written: the model is on the meta device, where tensors have no values. Build it outside "
            'torch.device("meta"), or load weights into it first.'
        )
    check_values(state, folder, allow_nan=True)
    return {key: value.detach().cpu().contiguous() for key, value in state.items()}


def _remedy(state: dict[str, Any], classes: int) -> str:
    head = state.get("head.weight")
    if head is None or head.ndim != 2 or head.shape[0] == classes:
        return "change it by options of vitlab.create or vitlab.load instead"
    n = head.shape[0]
    return (
        f"for another number of classes call model.reset_classifier({n}); a head that is trained already can be put "
        f"back after it (head = model.head; model.reset_classifier({n}); model.head = head)"
    )


def _check_labels(model: Network, folder: Path) -> None:
    labels, n = model.labels, model.config.classes
    named = isinstance(labels, list | tuple) and all(isinstance(label, str) for label in labels)
    if labels is not None and not (named and len(labels) == n):
        found = f"{len(labels)} names" if named else f"{labels!r:.60}"
        raise CheckpointError(
            f"{folder}: not written: model.labels must be a list of {n} texts, one for each class, or None; "
            f"found {found}."
        )


def write_whole(path: Path, write: Any) -> None:
    """One file: under its own name it is always whole."""
    write_together({path: write})


def write_together(writes: dict[Path, Any]) -> None:
    """Write all to temporary names, flush to disk, then rename: if one fails, the files of before stay as they were."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp") for path in writes}
    try:
        for path, write in writes.items():
            temporary[path].touch()
            mode = temporary[path].stat().st_mode  # what the user's files have; safetensors lets nobody else read
            try:
                write(temporary[path])
            except SafetensorError as error:  # its name for a full disk
                raise OSError(f"{path}: cannot be written ({error}). Make room, or name another place.") from None
            temporary[path].chmod(mode)
            with temporary[path].open("rb") as file:
                os.fsync(file.fileno())
        for path in writes:
            temporary[path].replace(path)
    finally:
        for path in writes:
            temporary[path].unlink(missing_ok=True)


def read_card(folder: Path) -> dict[str, Any]:
    """model.json, as it was saved. Whether the files beside it are is `digests.check_files`' to say."""
    card = read_json(folder / CARD)
    if card.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder / CARD}: format {card.get('format')!r} is not known; this vitlab {__version__} reads {FORMAT}. "
            "Update vitlab: pip install -U vitlab."
        )
    digests.check_seal(card, folder / CARD)
    for key, kind in (("family", str), ("config", dict)):
        if not isinstance(card.get(key), kind):
            raise CheckpointError(
                f"{folder / CARD}: {key!r} is missing or damaged. Fetch or save the checkpoint again."
            )
    return card


def on_meta(build: Callable[[], Network]) -> Network:
    """Build a model on the meta device; its weights are assigned from the file."""
    with torch.device("meta"):
        return build()
