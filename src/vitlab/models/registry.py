"""Names -> models: canonical names, the names people bring from timm and the papers, and the nearest one on a miss."""

from __future__ import annotations

import re
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from vitlab.errors import UsageError
from vitlab.models.base import Network
from vitlab.models.config import Config
from vitlab.models.entry import Entry
from vitlab.models.index import PAPERS

FAMILIES = {paper.family: (paper.config, paper.network) for paper in PAPERS}
MODELS = {entry.name: entry for paper in PAPERS for entry in paper.entries}
ALIASES = {alias.lower(): entry.name for entry in MODELS.values() for alias in (entry.name, *entry.aliases)}


def find(name: str) -> tuple[Entry, dict[str, Any]]:
    """The entry a name means, and the options the name carries: vit_base_patch16_384 is vit_base_patch16 at 384 px."""
    architecture = name.lower().split(".")[0]  # timm puts the weights' tag behind a dot
    if architecture in ALIASES:
        return MODELS[ALIASES[architecture]], {}
    sized = re.fullmatch(r"(\w+)_([0-9]{1,9})", architecture)
    if sized and sized[1] in ALIASES:
        return MODELS[ALIASES[sized[1]]], {"image_size": int(sized[2])}
    for paper in PAPERS:
        if parsed := paper.parse_name(architecture):
            return MODELS[parsed[0]], parsed[1]
    near = get_close_matches(architecture, list(ALIASES), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    raise UsageError(f"there is no model named {name!r}.{hint} `vitlab models` lists all names.")


def list_models(pattern: str = "*") -> list[str]:
    """Canonical names that match, by themselves or by an alias: with * and ? as a whole, otherwise any part of it."""
    pattern = pattern.lower()
    wild = any(c in pattern for c in "*?[")
    names = {n for alias, n in ALIASES.items() if (fnmatch(alias, pattern) if wild else pattern in alias)}
    if not names and not wild:  # a full name with an image size or tag: vit_base_patch16_384
        with suppress(UsageError):
            names = {find(pattern)[0].name}
    return [name for name in MODELS if name in names]


def build_config(name: str, **options: Any) -> tuple[Entry, Any]:
    """The entry and the config that a name and options mean."""
    entry, carried = find(name)
    return entry, entry.config.with_options(**{**carried, **options})


def build(family: str, config: Config) -> Network:
    """A freshly initialised model of this config, on torch's current default device."""
    return FAMILIES[family][1](config)
