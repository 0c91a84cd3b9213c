"""Strict JSON and TOML for untrusted files: a value of bounded depth with finite numbers, or a ValueError.

json.loads alone accepts NaN, reads 1e999 as infinity, and ends in a RecursionError where brackets are nested too deep.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

MAX_DEPTH = 64  # nested tables; files written by people are far below


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """A JSON object, or a TOML table."""
    return isinstance(value, dict)


def flat(tables: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """{"run": {"seed": 0}} -> {"run.seed": 0}"""
    pairs: dict[str, Any] = {}
    for key, value in tables.items():
        pairs |= flat(value, f"{prefix}{key}.") if is_object(value) else {f"{prefix}{key}": value}
    return pairs


def is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    """A JSON list; a caller may write it as a tuple."""
    return isinstance(value, list | tuple)


def parse_json(text: str | bytes) -> Any:
    """json.loads that refuses NaN, infinity and deep nesting. Every refusal is a ValueError."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    check_depth(value)
    return value


def spell_not_finite(value: object) -> Any:
    """Replace NaN and infinity, which JSON cannot express, by "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, dict):
        return {key: spell_not_finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [spell_not_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """tomllib.loads that refuses nan, inf, more than 64 bits and deep nesting. Every refusal is a ValueError."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep") from None
    check_depth(table)
    _check_numbers(table)  # afterwards: as parse_float, "nano" would be refused as a number, and not as bad TOML
    return table


def check_depth(value: object) -> None:
    """Raise where containers are nested deeper than MAX_DEPTH; walks level by level, without recursion."""
    level, depth = [value], 0
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} levels deep")


def _children(value: object) -> list[object]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [child for child in inner if isinstance(child, dict | list)]


def _check_numbers(value: object) -> None:
    infinite = isinstance(value, float) and not math.isfinite(value)
    if infinite or (isinstance(value, int) and not -(2**63) <= value < 2**63):
        raise ValueError(f"{value} is not a finite number" if infinite else "a number does not fit into 64 bits")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(inner)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that JSON has")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits:.20} is not a finite number")
    return number
