"""Digests: what is loaded is what was saved (SHA-256), and whether two models are the same one.

model.json and state.json list the digest of every file beside them ("digests") and end with one of their own values
("seal"). `sha256sum weights.safetensors` prints the same number. Files without them, of earlier versions, load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.parsing import is_object

DIGESTS, SEAL = "digests", "seal"
TRAINING_ONLY = ("dropout", "attention_dropout", "patch_dropout", "stochastic_depth", "gradient_checkpointing")
CLASSIFIER = ("head.", "head_distill.")  # parameters, by the beginning of their names, that features do not depend on


class DamagedError(CheckpointError):
    """A file that is not, byte for byte, the one that was saved."""


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: file_digest(folder / name) for name in names}


def check_files(folder: Path, values: dict[str, Any], listed_in: str) -> None:
    """Compare the files of a folder with the digests that `values`, read from `listed_in`, has of them."""
    digests: object = values.get(DIGESTS) or {}
    if not is_object(digests) or not all(isinstance(digest, str) for digest in digests.values()):
        raise DamagedError(f'{folder / listed_in}: "{DIGESTS}" must be a table of file names and SHA-256 digests.')
    for name, expected in digests.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise DamagedError(f"{path}: is missing, and {listed_in} says that it was saved. Copy the whole folder.")
        if (digest := file_digest(path)) != expected:
            raise DamagedError(
                f"{path}: is damaged or was changed: its SHA-256 is {digest:.12}..., but {expected:.12}... was saved. "
                f"Fetch or save it again; if you changed it yourself, set "
                f'"{DIGESTS}" and "{SEAL}" to null in {listed_in}.'
            )


def seal(values: dict[str, Any]) -> dict[str, Any]:
    """The values with a digest of themselves; `check_seal` finds out if one of them was changed."""
    return {**values, SEAL: _digest_of(json.loads(json.dumps(values)))}  # as they will be read: keys are texts there


def check_seal(values: dict[str, Any], path: Path) -> None:
    if values.get(SEAL) is not None and values[SEAL] != _digest_of(
        {key: v for key, v in values.items() if key != SEAL}
    ):
        raise DamagedError(
            f"{path}: is damaged or was changed after it was saved. Fetch or save it again; if you changed it "
            f'yourself, set "{SEAL}" in it to null.'
        )


def _digest_of(values: dict[str, Any]) -> str:
    """White space and the order of keys do not count."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def fingerprint(model: Network) -> str:
    """Equal for models that give the same results: their network, preprocess, tokenizer and weights are the same."""
    preprocess, tokenizer = model.preprocess, model.tokenizer
    settings = [
        model.family,
        model.config.to_dict(),
        None if preprocess is None else preprocess.to_dict(),
        None if tokenizer is None else tokenizer.to_json(),
    ]
    return tensor_digest(model.state_dict(), json.dumps(settings, sort_keys=True))


def feature_fingerprint(model: Network) -> str:
    """Equal for models that give the same features of the same pixels, whatever their classifier and their dropout."""
    config = _without(model.config.to_dict(), {"classes", *TRAINING_ONLY})
    tensors = {key: value for key, value in model.state_dict().items() if not key.startswith(CLASSIFIER)}
    return tensor_digest(tensors, json.dumps([model.family, config], sort_keys=True))


def _without(values: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The table without these keys, at any depth."""
    kept = {key: value for key, value in values.items() if key not in names}
    tables = {key: _without(cast(dict[str, Any], v), names) for key, v in kept.items() if isinstance(v, dict)}
    return kept | tables


def tensor_digest(tensors: Mapping[str, Tensor], about: str = "") -> str:
    """Of names and values, and of a text."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for key, value in sorted(tensors.items()):
        digest.update(key.encode())
        numbers = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # numpy has no bfloat16
        digest.update(numbers.numpy().data)
    return digest.hexdigest()
