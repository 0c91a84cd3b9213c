"""A weights file -> plain tensors, safely: nothing in a file is ever executed, and what is wrong with it is said."""

from __future__ import annotations

import argparse
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt")
WRAPPERS = ("model_ema", "teacher", "model", "state_dict", "model_state_dict", "student", "net", "module")
BESIDE = "beside_backbone."
PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says what was found and what to do."""


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a .safetensors, .npz, .pth, .pt or .bin file, out of what training scripts put around it."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise CheckpointError(
            f"{path}: unknown kind of file {suffix or '(no ending)'}. Known are {', '.join(SUFFIXES)}."
        )
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path}: the file is empty. Fetch it again.")
    if suffix == ".safetensors":
        found: Any = _read_safetensors(path)
    elif suffix == ".npz":
        found = _read_npz(path)
    else:
        found = unwrap(_read_pickle(path), path)
    state = {key: value for key, value in found.items() if isinstance(value, Tensor)}
    if not state:
        raise CheckpointError(f"{path}: holds no tensors. Expected a state dict: names -> tensors.")
    return state


def read_shards(index: Path) -> dict[str, Tensor]:
    """A model in several files, listed in model.safetensors.index.json."""
    names = sorted(set(read_json(index)["weight_map"].values()))
    state: dict[str, Tensor] = {}
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: names the part {name!r}, which is not in the folder. Fetch it too.")
        state |= read_tensors(index.parent / name)
    return state


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: is not valid JSON ({error}). Fetch or write it again.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(found).__name__}.")
    return found


def check_finite(state: dict[str, Tensor], path: object) -> None:
    bad = {key: int((~torch.isfinite(t)).sum()) for key, t in state.items() if t.is_floating_point()}
    bad = {key: count for key, count in bad.items() if count}
    if bad:
        key, count = next(iter(bad.items()))
        raise CheckpointError(
            f"{path}: {len(bad)} tensor(s) hold NaN or infinity, e.g. {key} ({count} of {state[key].numel()} values). "
            "The training it came from diverged: take an earlier checkpoint, or pass allow_nan=True to look inside."
        )


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        if path.read_bytes()[:2] == b"PK":
            raise CheckpointError(f"{path}: is a PyTorch file under another name. Rename it to .pth.") from None
        raise CheckpointError(
            f"{path}: not a whole safetensors file ({error}). It may be cut off: fetch it again."
        ) from None


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {key: torch.from_numpy(arrays[key].copy()) for key in arrays.files}
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise CheckpointError(f"{path}: not a whole .npz file ({error}). It may be cut off: fetch it again.") from None
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: an array in it cannot be read without executing code ({error}).") from None


def _read_pickle(path: Path) -> Any:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # facebook's files carry their arguments in one
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported global" in str(error) or "Weights only load failed" in str(error):
            raise CheckpointError(
                f"{path}: holds Python objects besides tensors, and opening those could run foreign code. In the "
                'program that made it, save the tensors alone: torch.save(model.state_dict(), "weights.pth").'
            ) from None
        raise CheckpointError(f"{path}: not a PyTorch file ({error}).") from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError, AssertionError) as error:
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: is a TorchScript program, not weights. Save its tensors alone: "
                'torch.save(torch.jit.load(path).state_dict(), "weights.pth").'
            ) from None
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"{path}: not a whole PyTorch file ({first}). It may be cut off: fetch it again."
        ) from None


def unwrap(found: Any, path: Path) -> dict[str, Any]:
    """Training scripts save {"model": ..., "args": ...} and prefix names with module. or backbone.: undo both."""
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: holds a {type(found).__name__}, expected a state dict: names -> tensors.")
    while True:
        inner = next((found[key] for key in WRAPPERS if isinstance(found.get(key), dict)), None)
        if inner is None or any(isinstance(value, Tensor) for value in found.values()):
            break
        found = inner
    found = {key: value for key, value in found.items() if isinstance(key, str)}
    for prefix in PREFIXES * 2:
        keys = [key for key, value in found.items() if isinstance(value, Tensor)]
        inside = [key for key in keys if key.startswith(prefix)]
        if inside and len(inside) == len(keys):
            found = {key.removeprefix(prefix): found[key] for key in inside}
        elif inside and prefix == "backbone.":  # DINO keeps its projection head beside the backbone
            found = {k.removeprefix(prefix) if k in inside else BESIDE + k: found[k] for k in keys}
    return found
