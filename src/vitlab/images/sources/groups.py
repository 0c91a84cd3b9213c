r"""Groups of images that no split may tear apart: by a table's column, or by a rule on the path.

data.group=patient                  the column of a CSV
data.group=parent                   the name of the folder that the image lies in
data.group="re:(patient\d+)"        a regular expression, searched in the path; its first group is the name
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

import numpy as np

from vitlab.errors import DataError, UsageError
from vitlab.images.sources.dataset import Dataset

PARENT, PATTERN = "parent", "re:"
SHOWN = 3  # images and groups that a message names


def is_path_rule(rule: str) -> bool:
    return rule == PARENT or rule.startswith(PATTERN)


def path_groups(rule: str, datasets: dict[str, Dataset]) -> dict[str, Sequence[str]]:
    """The name of each image's group, by split. The folders that all images share take no part."""
    if not is_path_rule(rule):
        raise UsageError(
            f"data.group={rule}: only a table (CSV) has columns. For files: data.group=parent, by the folder that an "
            'image lies in, or data.group="re:(patient[0-9]+)", by a part of the path.'
        )
    names = {
        split: [data.name_of(i).replace(os.sep, "/") for i in range(len(data))] for split, data in datasets.items()
    }
    if rule == PARENT:
        return {split: [PurePath(name).parent.name for name in paths] for split, paths in names.items()}
    try:
        pattern = re.compile(rule.removeprefix(PATTERN))
    except re.error as error:
        raise UsageError(f"data.group={rule}: is no regular expression ({error}).") from None
    if pattern.groups > 1:
        raise UsageError(f"data.group={rule}: has {pattern.groups} groups; one of them, (...), must name the group.")
    every = [name for paths in names.values() for name in paths]
    common = os.path.commonprefix(every)  # noqa: RUF071 - of texts; only what ends at a whole folder's name is left out
    skipped = common.rfind("/") + 1
    matches = {split: [pattern.search(name[skipped:]) for name in paths] for split, paths in names.items()}
    without = [n for split, found in matches.items() for n, m in zip(names[split], found, strict=True) if m is None]
    if without:
        raise DataError(
            f"data.group={rule}: {len(without)} of {sum(map(len, names.values()))} paths do not match, e.g. "
            f"{', '.join(name[skipped:] for name in without[:SHOWN])}. Correct the expression."
        )
    return {split: [m[pattern.groups] for m in found if m is not None] for split, found in matches.items()}


def posix(name: str) -> str:
    """A rule is written with /, also on Windows."""
    return name.replace(os.sep, "/")


def number_groups(rule: str, name: str, groups: Mapping[str, Sequence[str]]) -> dict[str, np.ndarray]:
    """Names by split -> numbers (N,); a group in two of the source's own splits is an error."""
    numbers: dict[str, int] = {}
    result = {
        split: np.array([numbers.setdefault(group, len(numbers)) for group in names], dtype=np.int64)
        for split, names in groups.items()
    }
    seen: dict[str, str] = {}
    shared: list[tuple[str, str, str]] = []
    for split, names in groups.items():
        for group in sorted(set(names)):
            if seen.setdefault(group, split) != split:
                shared.append((group, seen[group], split))
    if shared:
        listed = ", ".join(f"{group!r} in {first} and {second}" for group, first, second in shared[:SHOWN])
        raise DataError(
            f"{name}: {len(shared)} groups of data.group={rule} are in two splits: {listed}. Move each to one side, or "
            "leave data.group out."
        )
    return result
