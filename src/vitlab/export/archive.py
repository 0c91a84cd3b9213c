"""Check a .pt2 before torch opens it: only weights and a graph of plain tensor operations are allowed.

torch.export.load runs code from the file: pickles, compiled libraries, and Python text in the graph (sizes, guards,
names and targets are all evaluated). So only entries that vitlab export writes are allowed, and torch reads a copy made
of those, never the file itself.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from vitlab.errors import ExportError
from vitlab.export.expressions import MAX_LENGTH, check_growth, check_guard, check_size
from vitlab.parsing import parse_json

MODEL, INPUTS = "models/model.json", "data/sample_inputs/model.pt"
CONFIGS = {"data/weights/model_weights_config.json": "weight_", "data/constants/model_constants_config.json": "tensor_"}
MARKS = ("archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id")
ALLOWED = re.compile(
    "|".join(map(re.escape, (MODEL, INPUTS, *CONFIGS, *MARKS)))
    + r"|data/weights/weight_\d+|data/constants/tensor_\d+|extra/vitlab\.json"
)
REFUSED = {  # prefix of the name: what it is
    "data/aotinductor/": "a compiled library, which would be run",
    "data/constants/opaque_obj_": "a pickled object, which would be run",
    "data/constants/custom_obj_": "an object of a C++ class",
    "data/weights/model.pt": "weights in the old format, a pickle",
    "data/constants/model.pt": "constants in the old format, a pickle",
    "serialized_": "a program in the old format, with pickles",
}

NAME = re.compile(r"[A-Za-z_]\w*")
OPERATORS = "add|sub|mul|truediv|floordiv|mod|neg|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_"
TARGET = re.compile(
    r"torch\.ops\.aten\.(?!from_file\b|save\b)(?:__(?:and|or|xor)__|_?[A-Za-z]\w*)\.[A-Za-z]\w*"  # these two open files
    rf"|_operator\.(?:{OPERATORS})|math\.(?:trunc|ceil|floor|sqrt)|torch\.(?:_sym_sqrt|sym_[a-z]+)"
)
NUMBER = r"\d++(?:\.\d++)?(?:e[+-]?\d++)?"
SIZE = re.compile(rf"(?:'[a-z]{{1,4}}\d+'|'-?{NUMBER}'|[A-Z][A-Za-z]*+|[a-z]++=|{NUMBER}|[-+*/%(),<>=! ])*")
GUARD = re.compile(rf"(?:L\['[A-Za-z_]\w*'\]\.size\(\)\[\d\]|\b(?:max|min|and|or|not)\b|{NUMBER}|[-+*/%(),<>=! ])*")
WORDS = re.compile(r"[\w.+:*()/ -]*")  # all other text: no quotes, no line breaks
SPEC = re.compile(r'(?:null|"builtins\.(?:tuple|list|dict)"|"(?:type|context|children_spec|null|\[\])"|[\d\[\]{}:, ])*')
PATTERNS = {"name": NAME, "as_name": NAME, "forward_arg_names": NAME, "target": TARGET, "as_operator": TARGET}
PATTERNS |= {"as_string": re.compile(".*", re.DOTALL)}  # never evaluated
PATTERNS |= {"expr_str": SIZE, "guards_code": GUARD, "in_spec": SPEC, "out_spec": SPEC}


@contextmanager
def sanitized_copy(path: Path) -> Iterator[IO[bytes]]:
    """A copy of the file with its checked entries only. Raises ExportError for anything that is not allowed."""
    with tempfile.TemporaryFile() as copy:
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
            entries = _entries(source)
            _check_pickle(source.read(entries[INPUTS]))
            for config, prefix in CONFIGS.items():
                _check_payloads(parse_json(source.read(entries[config])), prefix)
            graph = _checked_graph(parse_json(source.read(entries[MODEL])))
            for name, entry in entries.items():
                with target.open(f"model/{name}", "w", force_zip64=entry.file_size > 2**30) as out:
                    if name == MODEL:
                        out.write(json.dumps(graph).encode())
                    else:
                        with source.open(entry) as file:
                            shutil.copyfileobj(file, out, 2**20)
        copy.seek(0)
        yield copy


def _entries(source: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Entries by name, without their common folder."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in source.infolist():
        name = entry.filename.partition("/")[2] or entry.filename
        if not ALLOWED.fullmatch(name):
            kind = next((what for start, what in REFUSED.items() if name.startswith(start)), "nothing that we write")
            raise ExportError(f"it holds {name}: {kind}")
        if name in entries or entry.compress_type != zipfile.ZIP_STORED:
            raise ExportError(f"it holds {name} {'twice' if name in entries else 'compressed'}")
        entries[name] = entry
    if missing := sorted({MODEL, INPUTS, *CONFIGS} - entries.keys()):
        raise ExportError(f"it holds no {missing[0]}")
    return entries


def _check_pickle(data: bytes) -> None:
    """The example input may hold tensors only; otherwise torch falls back to running the pickle."""
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception:
        raise ExportError(f"{INPUTS} is a pickle of more than tensors, which would be run") from None


def _check_payloads(config: Any, prefix: str) -> None:
    for name, payload in config["config"].items():
        kind = payload["path_name"]
        if payload["use_pickle"] is not False or not re.fullmatch(rf"{prefix}\d+", kind):
            raise ExportError(f"{name} is {kind}, a pickled object and no plain tensor, which would be run")
        _check_text(name, "parameter_name")


def _checked_graph(graph: object, key: str = "") -> Any:
    """The graph without notes on source lines, with every evaluated text checked.

    `key`: name of this part, which selects the allowed texts.
    """
    if isinstance(graph, str):
        _check_text(graph, key)
    if isinstance(graph, list):
        return [_checked_graph(part, key) for part in graph]
    if not isinstance(graph, dict):
        return graph
    for name in graph:
        _check_text(name, "key")
    if graph.get("as_custom_obj") or graph.get("custom_obj_values") or graph.get("as_graph"):
        raise ExportError("its graph holds an object or another graph, which we do not write")
    check_growth(graph.get("nodes"))
    kept = {name: value for name, value in graph.items() if name != "metadata"}
    checked: Any = {name: _checked_graph(value, name) for name, value in kept.items()}
    return checked | ({"metadata": {}} if "metadata" in graph else {})


def _check_text(text: str, key: str) -> None:
    place = f"its graph holds {text[:60]!r} as {key}"
    if len(text) > MAX_LENGTH and key != "as_string":
        raise ExportError(f"{place}: it has {len(text)} characters; at most {MAX_LENGTH} are allowed")
    if text and not PATTERNS.get(key, WORDS).fullmatch(text):
        raise ExportError(f"{place}, which may be code and would be run")
    try:
        if text and key == "expr_str":
            check_size(text)
        if text and key == "guards_code":
            check_guard(text)
    except ExportError as error:
        raise ExportError(f"{place}: {error}") from None
