"""A reducer in a few words, for command lines and recipes.

reducer_of("tome:r=13")                       # 13 merged in every layer
reducer_of("tome:r=13,schedule=decreasing")
reducer_of("evit:keep=0.7")                   # 7 of 10 stay, at three layers
reducer_of("random:keep=0.7,layers=3/6/9")
reducer_of("random:like=tome:r=13")           # at every layer as many as the other
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitlab.layers.reducer import Reducer
from vitlab.models.config import nearest
from vitlab.reduce.evit import EViT
from vitlab.reduce.random_drop import RandomDrop
from vitlab.reduce.schedule import Constant, Decreasing, KeepRatio, Same, Schedule
from vitlab.reduce.tome import ToMe

REDUCERS: dict[str, Any] = {"tome": ToMe, "evit": EViT, "random": RandomDrop}
KEYS = ("r", "schedule", "keep", "layers")
SCHEDULES = {"constant": Constant, "decreasing": Decreasing}
OTHER = "like="
LIKE = "Write it like tome:r=13, tome:r=13,schedule=decreasing or evit:keep=0.7."


def reducer_of(text: str) -> Reducer:
    name, _, rest = text.strip().partition(":")
    if name not in REDUCERS:
        raise ValueError(f"{name!r} is no way to have fewer tokens.{nearest(name, list(REDUCERS))} {LIKE}")
    if rest.startswith(OTHER):
        return REDUCERS[name](Same(reducer_of(rest.removeprefix(OTHER))))
    given: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in KEYS or not value:
            raise ValueError(f"{text!r}: {part!r} is not understood. Keys: {', '.join(KEYS)}. {LIKE}")
        given[key] = value
    return REDUCERS[name](_schedule(text, given))


def for_training(reducer: Reducer) -> Reducer:
    """The same, but what it draws is drawn anew at each step."""
    return replace(reducer, seed=None) if isinstance(reducer, RandomDrop) else reducer


def _schedule(text: str, given: dict[str, str]) -> Schedule:
    if ("r" in given) == ("keep" in given):
        raise ValueError(f"{text!r}: say how many go, r=13, or which share stays, keep=0.7. {LIKE}")
    try:
        if "keep" in given:
            if "schedule" in given:
                raise ValueError("schedule belongs to r; keep has layers, e.g. layers=3/6/9")
            layers = tuple(int(n) for n in given["layers"].split("/")) if "layers" in given else None
            return KeepRatio(float(given["keep"]), layers)
        if "layers" in given:
            raise ValueError("layers belongs to keep; r has schedule, constant or decreasing")
        kind = given.get("schedule", "constant")
        if kind not in SCHEDULES:
            raise ValueError(f"schedule={kind} must be constant or decreasing")
        return SCHEDULES[kind](int(given["r"]))
    except ValueError as error:
        raise ValueError(f"{text!r}: {str(error).rstrip('.')}. {LIKE}") from None
