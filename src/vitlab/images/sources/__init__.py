"""Data sources: one file per kind, each giving `Splits`; `vitlab.images.datasets` opens them."""

from __future__ import annotations

import re
from pathlib import Path

SOURCES = {  # name -> file and function of this package, called with (name, path, download)
    "digits": "digits.open_digits",
    "fashion-mnist": "idx.open_idx",
    "mnist": "idx.open_idx",
    "cifar10": "cifar.open_cifar",
    "cifar100": "cifar.open_cifar",
}
SHARD_PATTERN = r"[*?{\[]|::"  # in the name of several shards


def sources_of(source: str) -> list[str]:
    """The parts of "a/,b/"; a source of its own may have commas in its name, or in the pattern of its shards."""
    if "," not in source or Path(source).expanduser().exists() or re.search(SHARD_PATTERN, source):
        return [source]
    return [part.strip() for part in source.split(",") if part.strip()]
