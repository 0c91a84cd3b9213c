"""A stranger's network, loaded by the user's own rename table:

[model]                                    # what weights cannot tell
heads = 4
eps = 1e-5

[keys]                                     # ours = theirs; {i} is a layer number, * is weight and bias
"patch_embed.proj.*" = "stem.conv.*"
"blocks.{i}.attention.qkv.*" = ["layers.{i}.q.*", "layers.{i}.k.*", "layers.{i}.v.*"]
"blocks.{i}.mlp.fc1.weight" = { key = "layers.{i}.up", transpose = true }

[ignore]                                   # regex of keys to leave out = why
"ema\\\\..*" = "running averages"
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.keymap import JOIN, SAME, TRANSPOSE, Dialect, Rule


def read_map(path: Path) -> tuple[Dialect, dict[str, Any]]:
    """The table as a dialect, and the options it states."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    except tomllib.TOMLDecodeError as error:
        raise CheckpointError(f"{path}: is not valid TOML ({error}).") from None
    if unknown := set(table) - {"model", "keys", "ignore"}:
        raise CheckpointError(f"{path}: unknown section [{sorted(unknown)[0]}]; known are [model], [keys], [ignore].")
    if not table.get("keys"):
        raise CheckpointError(f'{path}: has no [keys], e.g. "patch_embed.proj.*" = "stem.conv.*".')
    rules = tuple(_rule(path, ours, theirs) for ours, theirs in table["keys"].items())
    options = dict(table.get("model", {}))
    dialect = Dialect(
        name=path.name,
        rules=rules,
        recognise=lambda keys: True,
        assumed={name: value for name, value in (("eps", 1e-6), ("activation", "gelu")) if name not in options},
        preprocess={},
        ignored=table.get("ignore", {}),
    )
    return dialect, options


def _rule(path: Path, ours: str, theirs: Any) -> Rule:
    transpose = False
    if isinstance(theirs, dict):
        transpose, theirs = bool(theirs.get("transpose")), theirs.get("key")
    if isinstance(theirs, str):
        return Rule(ours, theirs, TRANSPOSE if transpose else SAME)
    if isinstance(theirs, list) and theirs and all(isinstance(key, str) for key in theirs) and not transpose:
        return Rule(ours, tuple(theirs), JOIN)
    raise CheckpointError(
        f'{path}: {ours!r} must be a key, a list of keys to join, or {{ key = "...", transpose = true }}.'
    )
