"""A weights file -> plain tensors, safely: nothing in a file is ever executed, and what is wrong with it is said."""

from __future__ import annotations

import argparse
import pickle
import string
import warnings
import zipfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]  # not fully typed
from torch import Tensor

from vitlab.advice import to_type
from vitlab.errors import CheckpointError, VitlabError
from vitlab.parsing import is_object, parse_json
from vitlab.special_files import special_kind

SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".ckpt")
WRAPPERS = ("model_ema", "teacher", "model", "state_dict", "model_state_dict", "student", "net", "module", "weights")
BESIDE = "beside_backbone."
PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_WRAPPERS = 16
MAX_TENSORS = 10_000  # the largest published networks have about a thousand
MAX_NAME = 500  # characters of a tensor's name
MAX_HEADER = 2**24  # bytes of names, shapes and offsets, in a .safetensors header or a .pth file's pickle
SAVE_TENSORS = 'torch.save(model.state_dict(), "weights.pth")'
SAVE_ARRAYS = "In the program that made it, save arrays of numbers alone: np.savez(path, **arrays)."


@contextmanager
def naming(path: object) -> Generator[None]:
    """Errors in a file's content begin with the file's name."""
    try:
        yield
    except VitlabError as error:
        has_name = isinstance(error, CheckpointError) and str(path) in str(error)
        raise (error if has_name else CheckpointError(f"{path}: {error}")) from None


def read_tensors(path: Path, notes: list[str] | None = None) -> dict[str, Tensor]:
    """Every tensor of a .safetensors, .npz, .pth, .pt or .bin file, out of what training scripts put around it.

    A choice between several sets of weights in one file is written to `notes`.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        hint = " predict, embed and evaluate open an exported file." if suffix in (".onnx", ".pt2") else ""
        raise CheckpointError(
            f"{path}: unknown kind of file {suffix or '(no ending)'}. Known are {', '.join(SUFFIXES)}.{hint}"
        )
    kind = suffix if suffix in (".safetensors", ".npz") else ".pth"
    really = _kind(path)
    if really not in (kind, None):
        raise CheckpointError(f"{path}: is a {really} file under another name. Rename it to {path.stem}{really}.")
    if suffix == ".safetensors":
        state = _read_safetensors(path)
    elif suffix == ".npz":
        state = _read_npz(path)
    else:
        state = unwrap(_read_pickle(path), path, notes)
    if not state:
        raise CheckpointError(f"{path}: holds no tensors. Expected a state dict: names -> tensors.")
    check_tensors(state, path)
    return state


def check_tensors(state: dict[str, Tensor], path: Path) -> None:
    """Refuse more tensors, longer names and emptier shapes than any network has, before work is done for each."""
    _check_count(len(state), path)
    for key, tensor in state.items():
        if len(key) > MAX_NAME:
            raise CheckpointError(
                f"{path}: a tensor's name has {len(key)} characters, {key[:40]}..., and at most {MAX_NAME} are read. "
                "Save the weights under the names of their network."
            )
        if not tensor.numel() and not key.endswith("register_tokens"):  # transformers' DINOv3 saves those it has not
            raise CheckpointError(
                f"{path}: {key} has the shape {tuple(tensor.shape)} and no values in it. Save the weights again."
            )


def _check_count(count: int, path: Path) -> None:
    if count > MAX_TENSORS:
        raise CheckpointError(
            f"{path}: holds {count:,} tensors, and at most {MAX_TENSORS:,} are read: no network here has so many. "
            f"Save the weights of the network alone: {SAVE_TENSORS}."
        )


def _check_header(size: int, path: Path) -> None:
    if size > MAX_HEADER:
        raise CheckpointError(
            f"{path}: its list of tensors takes {size:,} bytes, and at most {MAX_HEADER:,} are read: no network here "
            f"has so many. Save the weights of the network alone: {SAVE_TENSORS}."
        )


def read_shards(index: Path) -> dict[str, Tensor]:
    """A model in several files, listed in model.safetensors.index.json."""
    parts = read_json(index).get("weight_map")
    if not is_object(parts) or not parts or not all(isinstance(name, str) for name in parts.values()):
        raise CheckpointError(f'{index}: has no "weight_map" of tensor names -> files. Fetch it again.')
    state: dict[str, Tensor] = {}
    for name in sorted(set(parts.values())):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: names the part {name!r}, which is not in the folder. Fetch it too.")
        state |= read_tensors(index.parent / name)
    return state


def check_regular(path: Path) -> None:
    """Refuse a FIFO, a device or a socket before anybody opens it."""
    if kind := special_kind(path):
        raise CheckpointError(f"{path}: is {kind}, not a regular file. Copy what it holds into a file, and name that.")


def read_json(path: Path) -> dict[str, Any]:
    check_regular(path)
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of JSON, of UTF-8, of parse_json
        raise CheckpointError(f"{path}: is not valid JSON ({error}). Fetch or write it again.") from None
    if not is_object(values):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(values).__name__}.")
    return values


def save_tensors(state: dict[str, Tensor], path: Path) -> None:
    """One .safetensors file, as torch's users expect it."""
    save_file(state, path, metadata={"format": "pt"})


def check_values(state: dict[str, Tensor], path: object, allow_nan: bool) -> None:
    """Weights must be plain floats, and finite unless that is waived."""
    for key, tensor in state.items():
        if key.endswith("num_batches_tracked") and tensor.dtype == torch.int64:  # a batch norm's counter
            continue
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            readable = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise CheckpointError(
                f"{path}: {key} is {tensor.dtype}, {tensor.layout}: only plain float weights are read ({readable}). "
                "Save it anew from weights that are not quantised or sparse: model.float()."
            )
    if allow_nan:
        return
    bad = {key: int((~torch.isfinite(t)).sum()) for key, t in state.items()}
    bad = {key: count for key, count in bad.items() if count}
    if bad:
        key, count = next(iter(bad.items()))
        raise CheckpointError(
            f"{path}: {len(bad)} tensor(s) hold NaN or infinity, e.g. {key} ({count} of {state[key].numel()} values). "
            "The training it came from diverged: take an earlier checkpoint"
            + to_type(", or pass allow_nan=True to look inside.", ".")
        )


def _kind(path: Path) -> str | None:
    """The kind of weights the first bytes show (None: they do not tell); raises where they are no weights at all."""
    check_regular(path)
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    if not head:
        raise CheckpointError(f"{path}: the file is empty. Fetch it again.")
    if head.startswith(b"version https://"):
        raise CheckpointError(
            f"{path}: is a git-lfs pointer, not the weights. Run `git lfs pull` in its folder, or fetch the weights."
        )
    if all(byte in string.printable.encode() for byte in head):
        raise CheckpointError(f"{path}: is text, not weights; it may be a server's error page. Fetch it again.")
    if head[8:9] == b"{":
        return ".safetensors"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # no zip, or a damaged one: the reader that the ending names will say so
        return None
    if any(name.endswith("/data.pkl") for name in names):
        return ".pth"
    return ".npz" if any(name.endswith(".npy") for name in names) else None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size <= path.stat().st_size:  # else it is no header at all, as safetensors itself will say
        _check_header(size, path)
    try:
        with safe_open(path, "pt") as file:  # pyright: ignore[reportUnknownVariableType]  # without types
            _check_count(len(list[str](file.keys())), path)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a complete safetensors file ({error}). It may be cut off: fetch it again."
        ) from None


def _from_numpy(values: Any, name: str) -> Tensor:
    array = np.asarray(values)  # a member of the archive that is no array is read as bytes
    if array.dtype == "V2":  # numpy's name for the bfloat16 that JAX wrote
        return torch.as_tensor(array.view(np.int16)).view(torch.bfloat16)
    if array.dtype.kind not in "fiub":
        raise CheckpointError(f"{name} in it is not an array of numbers. {SAVE_ARRAYS}")
    try:
        return torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except TypeError:
        raise CheckpointError(f"{name} in it is {array.dtype}, which torch does not have. {SAVE_ARRAYS}") from None


def _read_npz(path: Path) -> dict[str, Tensor]:
    try:
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("File is not a zip file")  # np.load would call it a pickle
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            _check_count(len(archive.files), path)
            arrays: dict[str, Any] = {key: archive[key] for key in archive.files}
    except CheckpointError:
        raise
    except Exception as error:  # zip, zlib, struct and numpy each have their own errors for damaged bytes
        if "allow_pickle" in str(error):
            raise CheckpointError(
                f"{path}: holds pickled Python objects, and opening those could run foreign code. {SAVE_ARRAYS}"
            ) from None
        raise CheckpointError(
            f"{path}: not a complete .npz file ({error}). It may be cut off: fetch it again."
        ) from None
    return {key: _from_numpy(array, f"{path}: {key}") for key, array in arrays.items()}


def _read_pickle(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            _check_header(
                max((e.file_size for e in archive.infolist() if e.filename.endswith("/data.pkl")), default=0), path
            )
    try:
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():  # facebook's args
            warnings.simplefilter("ignore")  # torch warns of TorchScript and of pickle protocols; we say it below
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise whatever the unpickler stumbles over
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: is a TorchScript program, not weights. Save its tensors alone: "
                'torch.save(torch.jit.load(path).state_dict(), "weights.pth").'
            ) from None
        if isinstance(error, pickle.UnpicklingError) and "Unsupported operand" not in str(error):
            raise CheckpointError(
                f"{path}: holds Python objects besides tensors, and opening those could run foreign code. "
                f"In the program that made it, save the tensors alone: {SAVE_TENSORS}."
            ) from None
        why = str(error).split(". ")[0]  # torch goes on with advice to open the file unsafely
        useful = isinstance(error, (RuntimeError, OSError)) and why and "weights_only" not in why
        why = f" ({why})" if useful else ""
        raise CheckpointError(
            f"{path}: not a complete PyTorch file{why}. It may be cut off: fetch it again, or save it: {SAVE_TENSORS}."
        ) from None


def unwrap(content: object, path: Path, notes: list[str] | None = None) -> dict[str, Tensor]:
    """Training scripts save {"model": ..., "args": ...} and prefix names with module. or backbone.: undo both."""
    if not is_object(content):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, expected a state dict: names -> tensors.")
    outer = {id(content)}  # a dict can hold itself
    while inside := {
        name: inner
        for name in WRAPPERS
        if is_object(inner := content.get(name)) and id(inner) not in outer and _holds_tensors(inner)
    }:
        if len(outer) > MAX_WRAPPERS:
            raise CheckpointError(f"{path}: weights inside more than {MAX_WRAPPERS} dicts. Save anew: {SAVE_TENSORS}.")
        first = next(iter(inside))
        if len(inside) > 1 and notes is not None:
            notes.append(f"holds {', '.join(inside)}: {first} was read.")
        content = inside[first]
        outer.add(id(content))
    state = {key: value for key, value in content.items() if isinstance(key, str) and isinstance(value, Tensor)}  # pyright: ignore[reportUnnecessaryIsInstance]  # a pickle's keys may be anything
    for prefix in PREFIXES * 2:
        prefixed = [key for key in state if key.startswith(prefix)]
        if prefixed and len(prefixed) == len(state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
        elif prefixed and prefix == "backbone.":  # DINO keeps its projection head beside the backbone
            state = {k.removeprefix(prefix) if k.startswith(prefix) else BESIDE + k: v for k, v in state.items()}
    return state


def _holds_tensors(content: dict[str, Any]) -> bool:
    """Whether there are tensors somewhere in it; a dict of numbers and texts is a config, not weights."""
    waiting: list[object] = [content]
    seen: set[int] = set()
    while waiting:  # no recursion, and nothing twice: a file may nest without end
        part = waiting.pop()
        if isinstance(part, Tensor):
            return True
        if is_object(part) and id(part) not in seen:
            seen.add(id(part))
            waiting += part.values()
    return False
