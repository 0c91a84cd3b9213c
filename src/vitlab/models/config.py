"""What every model config shares: plain values in small groups, checked at birth, written to and read from JSON.

An option can be set by its own name wherever it stands, and a group by its kind:

    config.with_options(classes=10, registers=4, positions="sincos", eps=1e-5)
"""

from __future__ import annotations

import math
import types
from dataclasses import asdict, fields, is_dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from vitlab.errors import UsageError
from vitlab.parsing import is_object, is_sequence

FAMILIAR = {  # what other libraries call our options; a miss is told our name
    "attn_drop_rate": "attention_dropout",
    "act_layer": "activation",
    "decoder_depth": "decoder.depth",
    "decoder_embed_dim": "decoder.width",
    "decoder_heads": "decoder.heads",
    "decoder_hidden_size": "decoder.width",
    "decoder_num_attention_heads": "decoder.heads",
    "decoder_num_heads": "decoder.heads",
    "decoder_num_hidden_layers": "decoder.depth",
    "decoder_width": "decoder.width",
    "drop_path_rate": "stochastic_depth",
    "drop_rate": "dropout",
    "embed_dim": "width",
    "embedding_size": "stem_width",
    "global_pool": "pooling",
    "hidden_act": "activation",
    "hidden_size": "width",
    "hidden_sizes": "widths",
    "img_size": "image_size",
    "in_chans": "channels",
    "init_values": "layer_scale",
    "layer_norm_eps": "eps",
    "layer_type": "block",
    "norm_pix_loss": "norm_pix",
    "num_attention_heads": "heads",
    "num_channels": "channels",
    "num_classes": "classes",
    "num_heads": "heads",
    "num_hidden_layers": "depth",
    "num_labels": "classes",
    "num_layers": "depth",
    "patch_drop_rate": "patch_dropout",
    "reg_tokens": "registers",
}


class Config:
    """Base of the frozen dataclasses; subclasses call `super().__post_init__()`, then check what belongs together."""

    def __post_init__(self) -> None:
        for name, expected in _types(type(self)).items():
            value = _coerce(getattr(self, name), expected)
            object.__setattr__(self, name, value)
            if not _fits(value, expected):
                raise UsageError(f"{name}={value!r} is not valid: expected {_describe(expected)}.")

    fixed: ClassVar[tuple[str, ...]] = ()  # options that weights belong to: with others they are another network's

    @property
    def encoder(self) -> Config:
        """The encoder's config, where a model wraps an encoder; otherwise the config itself."""
        return self

    @property
    def wraps_encoder(self) -> bool:
        return self.encoder is not self

    def with_encoder(self, family: str, encoder: Config) -> Self:
        """The config of a model that wraps another encoder, which is of this family; what it adds stays the same."""
        raise NotImplementedError(f"{type(self).__name__} takes no other encoder.")

    @property
    def table_rule(self) -> str:
        """How position tables are resized to another grid."""
        return "bilinear"

    @property
    def relative_rule(self) -> str:
        """How tables of a relative bias are resized to another grid."""
        return "bicubic"

    def table_grid(self, key: str) -> tuple[int, int]:
        """The grid that a table of positions, by its name in the weights, is made for."""
        raise NotImplementedError(f"{type(self).__name__} has no position tables.")

    @property
    def one_projection(self) -> bool:
        """Whether one linear map makes a token of a patch: its weights can be resized to patches of another size."""
        return False

    def fixed_with(self, other: Config) -> tuple[str, ...]:
        """Options, by path, in which `other` may not differ if it shall use this network's weights."""
        return self.fixed

    def readable_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """The image size that the network can read, at or below this one."""
        return size

    def option(self, name: str) -> Any:
        """The value of an option by any name that `with_options` takes."""
        group, field = option_paths(type(self))[name]
        if group is None:
            return getattr(self, field)
        inner: Config = getattr(self, group)
        return inner.option(field) if field else inner

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload]  # every subclass is a dataclass

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Read what `to_dict` wrote; an unknown name is an error, so that a newer file is not half understood."""
        if not is_object(values):
            raise UsageError(f"{cls.__name__} must be a table of options, not {values!r}.")
        _check_names(values, [f.name for f in fields(cls)], cls.__name__)  # type: ignore[arg-type]
        hints = _types(cls)
        return cls(**{k: hints[k].from_dict(v) if is_dataclass(hints[k]) else v for k, v in values.items()})  # type: ignore[union-attr]

    def with_options(self, **options: Any) -> Self:
        """A copy with options changed, each by its own name ("registers"), by group ("positions") or by path."""
        where, hints = option_paths(type(self)), _types(type(self))
        _check_names(options, list(where), "the model")
        changed: dict[str, Any] = {}
        grouped: dict[str, dict[str, Any]] = {}
        for name, value in options.items():
            group, field = where[name]
            if group is None:
                changed[field] = value
            elif field == "" and is_object(value):  # positions={"kind": "rotary", "rotary_base": 100}
                grouped.setdefault(group, {}).update(value)
            elif field == "" and is_dataclass(value):
                changed[group] = value
            elif field == "" and "kind" not in _types(hints[group]):
                short = [n for n in where if "." not in n and n != name]
                inside = ", ".join(_types(hints[group]))
                raise UsageError(f"{name}={value!r}: {name} is a group of {inside}.{nearest(name, short)}")
            else:  # positions="rotary" sets the group's kind
                grouped.setdefault(group, {})[field or "kind"] = value
        for group, values in grouped.items():
            current = changed.get(group, getattr(self, group))
            _check_names(values, list(option_paths(hints[group])), group)
            _check_kind(group, values, _types(hints[group]))
            changed[group] = current.with_options(**values)
        return replace(self, **changed)  # type: ignore[type-var]


@cache
def option_paths(config: type[Config]) -> dict[str, tuple[str | None, str]]:
    """Every name an option may be set by -> (group, field); a group by its own name -> (group, "").

    A name that the config itself has too (width, beside decoder.width) is its own; in the group it is set by path. So
    is a name that two groups have (image.width, text.width).
    """
    paths: dict[str, tuple[str | None, str]] = {}
    short: dict[str, list[tuple[str, str]]] = {}
    for name, kind in _types(config).items():
        if is_dataclass(kind):
            paths[name] = (name, "")
            for inner in option_paths(kind):  # type: ignore[arg-type]
                paths[f"{name}.{inner}"] = (name, inner)
                if inner != "kind" and "." not in inner and inner not in _types(config):
                    short.setdefault(inner, []).append((name, inner))
        else:
            paths[name] = (None, name)
    return paths | {inner: places[0] for inner, places in short.items() if len(places) == 1}


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor that is at most `most`; by its square root, because either may be anything."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return max(n for n in (*low, *(number // n for n in low)) if n <= most)


def near_names(name: str, names: list[str]) -> list[str]:
    """Those that may have been meant."""
    familiar = FAMILIAR.get(name)
    inside = [path for path in names if path.endswith(f".{name}") and path.count(".") == 1]  # image.width, text.width
    return [familiar] if familiar in names else inside or get_close_matches(name, names, n=1, cutoff=0.5)


def nearest(name: str, names: list[str]) -> str:
    """' Did you mean ...?' where something is near, '' otherwise."""
    near = near_names(name, names)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _check_names(given: dict[str, Any], known: list[str], where: str) -> None:
    for name in given:
        if name not in known:
            short = sorted({n for n in known if "." not in n})
            raise UsageError(f"{where} has no option {name!r}.{nearest(name, known)} Options: {', '.join(short)}.")


def _check_kind(group: str, given: dict[str, Any], inside: dict[str, Any]) -> None:
    """norm=1e-5 is told of norm, not of the field `kind` that a group's name stands for."""
    if "kind" in given and not _fits(given["kind"], inside["kind"]):
        others = ", ".join(name for name in inside if name != "kind")
        raise UsageError(
            f"{group}={given['kind']!r} is not valid: expected {_describe(inside['kind'])}. "
            f"What else {group} has is set by its own name: {others}."
        )


@cache
def _types(config: type) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(config).items() if get_origin(kind) is not ClassVar}


def _coerce(value: Any, expected: Any) -> Any:
    """What JSON and callers write loosely: lists for tuples, one size for a square, whole numbers for floats."""
    if expected == tuple[int, int] and isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if get_origin(expected) is tuple and is_sequence(value):
        kinds = get_args(expected)
        return tuple(map(_coerce, value, kinds)) if len(kinds) == len(value) else tuple(value)
    if (
        expected in (float, float | None)
        and isinstance(value, int)
        and not isinstance(value, bool)
        and abs(value) < 10**300
    ):
        return float(value)
    return value


def _fits(value: Any, expected: Any) -> bool:
    origin, inner = get_origin(expected), get_args(expected)
    if origin is Literal:
        return value in inner
    if origin in (Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is tuple:
        if not is_sequence(value):
            return False
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return len(value) == len(kinds) and all(map(_fits, value, kinds))
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if expected is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, origin or expected)


def _describe(expected: Any) -> str:
    if get_origin(expected) is Literal:
        return " | ".join(map(str, get_args(expected)))
    if expected == tuple[int, int]:
        return "a whole number, or (height, width)"
    if expected == tuple[int, ...]:
        return "a list of whole numbers"
    names = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text"}
    return names.get(expected, str(expected).replace("typing.", ""))
