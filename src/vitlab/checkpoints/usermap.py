"""A network of no known layout, loaded by the user's own rename table:

[model]                                    # what the weights do not show
heads = 4
eps = 1e-5

[preprocess]                               # how images were read in training
mean = [0.4914, 0.4822, 0.4465]
std = [0.2470, 0.2435, 0.2616]

[keys]                                     # ours = theirs; {i} is a layer number, * is weight and bias
"patch_embed.proj.*" = "stem.conv.*"
"blocks.{i}.attention.qkv.*" = ["layers.{i}.q.*", "layers.{i}.k.*", "layers.{i}.v.*"]
"blocks.{i}.mlp.fc1.weight" = { key = "layers.{i}.up", transpose = true }

[ignore]                                   # regex of keys to leave out = why
"ema\\\\..*" = "running averages"

A table whose names begin with image. and text. is that of a CLIP.
"""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from vitlab.checkpoints.families import FAMILIES
from vitlab.checkpoints.family import Family
from vitlab.checkpoints.files import check_regular
from vitlab.checkpoints.keymap import JOIN, SAME, TOKENS, TRANSPOSE, Codec, Dialect, Options, Renamed, Rule, expand
from vitlab.checkpoints.schema import TEXTS
from vitlab.errors import CheckpointError, UsageError
from vitlab.images.preprocess import Preprocess
from vitlab.models.config import nearest, option_paths
from vitlab.parsing import is_object, is_sequence, parse_toml

SECTIONS = ("model", "preprocess", "keys", "ignore")
TOKEN_TABLES = ("class_token", "distill_token", "register_tokens", "positions.table")  # (1, n, D); others save (n, D)


class RenameTable(NamedTuple):
    """Names as a dialect, options of the network, and values for Preprocess."""

    path: Path
    family: Family
    dialect: Dialect
    options: Options
    preprocess: Options


def read_map(path: Path) -> RenameTable:
    """Read and check a rename table."""
    check_regular(path)
    try:
        sections = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is not valid TOML ({error}).") from None
    _check_sections(path, sections)
    keys = sections["keys"]
    rules = tuple(_rule(path, ours, theirs) for ours, theirs in keys.items())
    options = dict(sections.get("model", {}))
    family, template = next(
        (family, family.map_template)
        for family in reversed(FAMILIES.values())  # a ViT's takes any names
        if family.map_template is not None and family.map_template.recognise(set(keys))
    )
    _check_options(path, family, options)
    dialect = replace(
        template,
        name=path.name,
        rules=rules,
        ignored={_pattern(path, key): _reason(path, key, why) for key, why in sections.get("ignore", {}).items()},
    )
    return RenameTable(path, family, dialect, options, _preprocess(path, sections.get("preprocess", {})))


def _check_options(path: Path, family: Family, options: Options) -> None:
    for name, value in options.items():
        try:
            family.check_options(family.by_path({name: value}, False))
        except UsageError:
            short = (path.split(".")[-1] for path in family.bare_options)
            near = nearest(name, [*option_paths(family.config), *short, "grid"])
            raise CheckpointError(f"{path}: [model] has no option {name!r}.{near}") from None


def check_used(table: RenameTable, renamed: Renamed) -> None:
    """Every line under [keys] must have taken a key of the file, or it is a misspelling."""
    for rule in table.dialect.rules:
        used = False
        for part in expand(rule, ""):
            ours, theirs = (re.compile(re.escape(name).replace(r"\{i\}", r"\d+")) for name in (part.ours, part.keys[0]))
            used |= any(ours.fullmatch(key) and theirs.fullmatch(came[0]) for key, came in renamed.origin.items())
        if not used:
            raise CheckpointError(
                f"{table.path}: [keys] {rule.ours!r} = {rule.keys[0]!r} takes no key of the file: none is called so, "
                "or another line has taken it. Correct the name, or leave the line out."
            )


def _check_sections(path: Path, sections: Options) -> None:
    if not sections:
        raise CheckpointError(f'{path}: is empty. A rename table has at least [keys], e.g. "head.*" = "classifier.*".')
    for name in sections:
        if name not in SECTIONS:
            valid = ", ".join(f"[{section}]" for section in SECTIONS)
            near = nearest(name, list(SECTIONS))
            raise CheckpointError(f"{path}: unknown section [{name}].{near} Known are {valid}.")
    for name, values in sections.items():
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: {name} must be a section: write [{name}], then its lines.")
    if not sections.get("keys"):
        raise CheckpointError(f'{path}: has no [keys], e.g. "patch_embed.proj.*" = "stem.conv.*".')


def _preprocess(path: Path, values: Options) -> Options:
    names = [f.name for f in fields(Preprocess)]
    for name in values:
        if name not in names:
            near = nearest(name, names)
            raise CheckpointError(f"{path}: [preprocess] has no option {name!r}.{near} It has {', '.join(names)}.")
    if ("mean" in values) != ("std" in values):
        given, absent = ("mean", "std") if "mean" in values else ("std", "mean")
        raise CheckpointError(f"{path}: [preprocess] has {given} but no {absent}: give both, one number per channel.")
    try:
        checked = Preprocess.from_dict({"size": 224, **values})
    except UsageError as error:
        raise CheckpointError(f"{path}: [preprocess] {error}") from None
    return {name: getattr(checked, name) for name in values}


def _rule(path: Path, ours: str, theirs: object) -> Rule:
    default = TOKENS if ours.removeprefix("image.") in TOKEN_TABLES else SAME
    keys: tuple[str, ...]
    codec: Codec
    if isinstance(theirs, str):
        keys, codec = (theirs,), default
    elif is_sequence(theirs) and theirs and TEXTS.fits(theirs):
        keys, codec = tuple(theirs), JOIN
    elif is_object(theirs) and _is_key_table(theirs):
        keys, codec = (theirs["key"],), TRANSPOSE if theirs.get("transpose") else default
    else:
        raise CheckpointError(
            f'{path}: {ours!r} must be a key, a list of keys to join, or {{ key = "...", transpose = true }}.'
        )
    for key in keys:
        for sign in ("{i}", "*"):
            if (sign in key) != (sign in ours):
                raise CheckpointError(f"{path}: {sign} must stand on both sides of {ours!r} = {key!r}, or on neither.")
    return Rule(ours, keys, codec)


def _is_key_table(values: Options) -> bool:
    only = set(values) <= {"key", "transpose"}
    return only and isinstance(values.get("key"), str) and isinstance(values.get("transpose", False), bool)


def _reason(path: Path, key: str, why: object) -> str:
    if not isinstance(why, str) or not why.strip():
        raise CheckpointError(
            f"{path}: [ignore] {key!r} = {why!r} is of no known form. Each line is a regular expression of whole key "
            'names and why they are left out, e.g. "ema\\\\..*" = "running averages".'
        )
    return why


def _pattern(path: Path, key: str) -> str:
    try:
        re.compile(key)
    except re.error as error:
        raise CheckpointError(f"{path}: [ignore] {key!r} is not a regular expression ({error}).") from None
    return key
