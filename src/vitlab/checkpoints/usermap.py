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

import re
from pathlib import Path
from typing import Any

from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.keymap import JOIN, SAME, TRANSPOSE, Dialect, Rule
from vitlab.models.config import nearest, option_paths
from vitlab.models.vit_config import ViTConfig
from vitlab.parsing import parse_toml


def read_map(path: Path) -> tuple[Dialect, dict[str, Any]]:
    """The table as a dialect, and the options it states."""
    try:
        table = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:  # of TOML, of UTF-8, of parse_toml
        raise CheckpointError(f"{path}: is not valid TOML ({error}).") from None
    if unknown := set(table) - {"model", "keys", "ignore"}:
        raise CheckpointError(f"{path}: unknown section [{sorted(unknown)[0]}]; known are [model], [keys], [ignore].")
    for section, values in table.items():
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {section} must be a section: write [{section}], then its lines.")
    if not table.get("keys"):
        raise CheckpointError(f'{path}: has no [keys], e.g. "patch_embed.proj.*" = "stem.conv.*".')
    rules = tuple(_rule(path, ours, theirs) for ours, theirs in table["keys"].items())
    options = dict(table.get("model", {}))
    known = [*option_paths(ViTConfig), "grid"]
    for name in options:
        if name not in known:
            raise CheckpointError(f"{path}: [model] has no option {name!r}.{nearest(name, known)}")
    dialect = Dialect(
        name=path.name,
        rules=rules,
        recognise=lambda keys: True,
        assumed={name: value for name, value in (("eps", 1e-6), ("activation", "gelu")) if name not in options},
        preprocess={},
        ignored={_pattern(path, key): str(why) for key, why in table.get("ignore", {}).items()},
    )
    return dialect, options


def _rule(path: Path, ours: str, theirs: Any) -> Rule:
    if isinstance(theirs, str):
        keys, codec = (theirs,), SAME
    elif isinstance(theirs, list) and theirs and all(isinstance(key, str) for key in theirs):
        keys, codec = tuple(theirs), JOIN
    elif isinstance(theirs, dict) and set(theirs) <= {"key", "transpose"} and isinstance(theirs.get("key"), str):
        keys, codec = (theirs["key"],), TRANSPOSE if theirs.get("transpose") else SAME
    else:
        raise CheckpointError(
            f'{path}: {ours!r} must be a key, a list of keys to join, or {{ key = "...", transpose = true }}.'
        )
    for key in keys:
        for sign in ("{i}", "*"):
            if (sign in key) != (sign in ours):
                raise CheckpointError(f"{path}: {sign} must stand on both sides of {ours!r} = {key!r}, or on neither.")
    return Rule(ours, keys, codec)


def _pattern(path: Path, key: str) -> str:
    try:
        re.compile(key)
    except re.error as error:
        raise CheckpointError(f"{path}: [ignore] {key!r} is not a regular expression ({error}).") from None
    return key
