"""Parse reducers of command lines and recipes.

reducer_of("tome:r=13")                       # merges 13 in every layer
reducer_of("tome:r=13,schedule=decreasing")
reducer_of("evit:keep=0.7")                   # keep 70 % at each of three layers
reducer_of("random:keep=0.7,layers=3/6/9")
reducer_of("random:like=tome:r=13")           # drops as many in every layer
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitlab.errors import UsageError
from vitlab.layers.reducer import Reducer
from vitlab.models.config import nearest
from vitlab.reduce.evit import EViT
from vitlab.reduce.random_drop import RandomDrop
from vitlab.reduce.schedule import Constant, Decreasing, KeepRatio, Same, Schedule
from vitlab.reduce.tome import ToMe

REDUCERS: dict[str, Any] = {"tome": ToMe, "evit": EViT, "random": RandomDrop}
KEYS = ("r", "schedule", "keep", "layers")
SCHEDULES = {"constant": Constant, "decreasing": Decreasing}
LIKE = "like="
EXAMPLES = "Write it like tome:r=13, tome:r=13,schedule=decreasing or evit:keep=0.7."


def reducer_of(text: str) -> Reducer:
    name, _, rest = text.strip().partition(":")
    if name not in REDUCERS:
        raise UsageError(f"unknown reducer {name!r}.{nearest(name, list(REDUCERS))} {EXAMPLES}")
    if rest.startswith(LIKE):
        return REDUCERS[name](Same(reducer_of(rest.removeprefix(LIKE))))
    options: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or key not in KEYS or not value:
            raise UsageError(f"{text!r}: {part!r} is not understood. Keys: {', '.join(KEYS)}. {EXAMPLES}")
        options[key] = value
    return REDUCERS[name](_schedule(text, options))


def for_training(reducer: Reducer) -> Reducer:
    """The reducer for training: random choices change at every step."""
    return replace(reducer, seed=None) if isinstance(reducer, RandomDrop) else reducer


def _schedule(text: str, options: dict[str, str]) -> Schedule:
    if ("r" in options) == ("keep" in options):
        raise UsageError(f"{text!r}: give the number to remove, r=13, or the share to keep, keep=0.7. {EXAMPLES}")
    try:
        if "keep" in options:
            if "schedule" in options:
                raise UsageError("schedule belongs to r; keep has layers, e.g. layers=3/6/9")
            layers = tuple(int(n) for n in options["layers"].split("/")) if "layers" in options else None
            return KeepRatio(float(options["keep"]), layers)
        if "layers" in options:
            raise UsageError("layers belongs to keep; r has schedule, constant or decreasing")
        kind = options.get("schedule", "constant")
        if kind not in SCHEDULES:
            raise UsageError(f"schedule={kind} must be constant or decreasing")
        return SCHEDULES[kind](int(options["r"]))
    except ValueError as error:
        raise UsageError(f"{text!r}: {str(error).rstrip('.')}. {EXAMPLES}") from None
