"""Models as a study's command line names them: a registered name and, behind colons, options.

read_models("vit_tiny,vit_tiny:depth=4")     # {"vit_tiny": ("vit_tiny", {}), "vit_tiny:depth=4": ("vit_tiny", {...})}
"""

from __future__ import annotations

from typing import Any

from vitlab.study.grid import split_values
from vitlab.training.recipe import parse_value

Named = tuple[str, dict[str, Any]]  # the model's name, its options


def read_models(text: str) -> dict[str, Named]:
    """By what they are called in table and plot, in order. Whether such a model exists is not asked here."""
    found: dict[str, Named] = {}
    for called in split_values(text):
        name, *settings = called.split(":")
        if not name:
            raise ValueError(f"--models {text!r} leaves a name empty: write a,b,c without a comma too many.")
        if called in found:
            raise ValueError(f"--models names {called} twice.")
        options = {}
        for setting in settings:
            key, sign, value = setting.partition("=")
            if not sign or not key or not value:
                raise ValueError(f"{called!r}: {setting!r} is not an option: write {name}:depth=4, for instance.")
            options[key.strip()] = parse_value(value.strip())
        found[called] = name, options
    return found


def read_numbers(option: str, text: str, kind: type = int) -> list[Any]:
    """Ascending, each once: "96,128" -> [96, 128]"""
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if min(found) <= 0:
        like = "0.01,0.1,1" if kind is float else "96,128,192"
        raise ValueError(f"{option} {text!r} is not a list of numbers above 0: write {like}, for instance.")
    return found
