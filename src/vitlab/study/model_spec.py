"""Parse the models of a study's command line: a registered name with options after colons.

parse_models("vit_tiny,vit_tiny:depth=4")     # {"vit_tiny": ("vit_tiny", {}), "vit_tiny:depth=4": ("vit_tiny", {...})}
"""

from __future__ import annotations

from typing import Any

from vitlab.errors import UsageError
from vitlab.study.grid import split_values
from vitlab.training.recipe import parse_value

ModelSpec = tuple[str, dict[str, Any]]  # name, options


def parse_models(text: str) -> dict[str, ModelSpec]:
    """Models by their label in table and plot. Whether a model exists is not checked here."""
    specs: dict[str, ModelSpec] = {}
    for label in split_values(text):
        name, *settings = label.split(":")
        if not name:
            raise UsageError(f"--models {text!r} has an empty name: write a,b,c without extra commas.")
        if label in specs:
            raise UsageError(f"--models names {label} twice.")
        options = {}
        for setting in settings:
            key, sign, value = setting.partition("=")
            if not sign or not key or not value:
                raise UsageError(f"{label!r}: {setting!r} is not an option: write {name}:depth=4, for instance.")
            options[key.strip()] = parse_value(value.strip())
        specs[label] = name, options
    return specs


def parse_numbers(option: str, text: str, kind: type = int) -> list[Any]:
    """Sorted and without duplicates: "128,96" -> [96, 128]"""
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if not 0 < min(numbers) <= max(numbers) < 2**31:
        example = "0.01,0.1,1" if kind is float else "96,128,192"
        raise UsageError(
            f"{option} {text!r} is not a list of numbers above 0 and below 2**31: write {example}, for instance."
        )
    return numbers
