"""Edit: what a forward pass is asked to change on its way. Immutable; every method returns a new Edit.

    edit = Edit().zero("heads", layer=3, heads=[1]).replace("tokens", other["tokens", 5], layer=5, tokens=[4, 5])
    logits = model(images, edit=edit)
    logits = model(images, edit=Edit.from_json({"mask_patches": [3, 4], "drop_heads": [[0, 1]], "temperature": 2.0}))

The places are the steps that a Trace can name (`model.traceable`): what can be traced can be edited. Layers, heads and
tokens count from 0, as in a Trace; -1 is the last layer. layers/apply_edit.py applies the changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import index
from typing import Any, Literal, TypedDict, Unpack, cast, get_args

import torch
from torch import Tensor

from vitlab.errors import UsageError

Action = Literal[
    "zero",
    "mean",
    "replace",
    "add",
    "scale",
    "uniform_attention",
    "hide_keys",
    "hide_patches",
    "temperature",
    "without_sqrt_d",
    "remove_positions",
    "shuffle_positions",
]
ACTIONS: tuple[str, ...] = get_args(Action)
STEP_ACTIONS = ("zero", "mean", "replace", "add", "scale", "uniform_attention")


class Where(TypedDict, total=False):
    """What narrows a change; without one it holds in every layer, for every token, for every head."""

    layer: int | None
    tokens: Sequence[int] | None
    heads: Sequence[int] | None


@dataclass(frozen=True, eq=False)
class Change:
    """One thing to change, checked when it is made. A place that is None is every one."""

    action: Action
    kind: str | None = None  # the step, as a Trace names it
    value: Any = None  # a tensor of "replace", "add" and perhaps "mean"; a number of "scale" and "temperature"; a seed
    layer: int | None = None
    tokens: Sequence[int] | None = None  # as the step counts them: prefix tokens first, where it has them
    heads: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"unknown action {self.action!r} in an edit: use {', '.join(ACTIONS)}.")
        if (self.action in STEP_ACTIONS) != (isinstance(self.kind, str) and self.kind != ""):
            problem = f"has no step (found {self.kind!r})" if self.kind else "needs a step: zero('tokens', ...), e.g."
            raise UsageError(f"{self.action} {problem}.")
        if self.action in ("hide_keys", "hide_patches") and self.tokens is None:
            raise UsageError(f"{self.action} needs the tokens to hide, e.g. {self.action}([3, 4]).")
        object.__setattr__(self, "value", _checked(self.action, self.value))
        object.__setattr__(self, "layer", None if self.layer is None else _integer("layer", self.layer))
        object.__setattr__(self, "tokens", _places("tokens", self.tokens))
        object.__setattr__(self, "heads", _places("heads", self.heads))

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _json_value(value) for name, value in values.items() if value is not None}


@dataclass(frozen=True, eq=False)
class Edit:
    """Changes to one forward pass, applied in the order in which they were written."""

    changes: tuple[Change, ...] = ()

    # ---- any step

    def zero(self, kind: str, **where: Unpack[Where]) -> Edit:
        """Zeros in place of a step's values."""
        return self._with(Change("zero", kind, **where))

    def mean(self, kind: str, value: Tensor | None = None, **where: Unpack[Where]) -> Edit:
        """The mean over the patches of the same image in place of each token's value; or a given mean, e.g. of many
        images.
        """
        return self._with(Change("mean", kind, value, **where))

    def replace(self, kind: str, value: Tensor | float, **where: Unpack[Where]) -> Edit:
        """Other values, e.g. another image's (activation patching). They have the shape that a Trace shows, or one that
        expands to it; `tokens` and `heads` say which of them are taken.
        """
        return self._with(Change("replace", kind, value, **where))

    def add(self, kind: str, value: Tensor | float, **where: Unpack[Where]) -> Edit:
        """Add a vector (steering), or anything that expands to the step's shape."""
        return self._with(Change("add", kind, value, **where))

    def scale(self, kind: str, factor: float, **where: Unpack[Where]) -> Edit:
        """Multiply a step's values."""
        return self._with(Change("scale", kind, factor, **where))

    # ---- parts of the network

    def mask_patches(self, patches: Sequence[int]) -> Edit:
        """Patches without content: their embeddings are zeros, to which positions are added as ever. Patches count from
        0, row by row, without prefix tokens.
        """
        return self.zero("patch_embed", tokens=patches)

    def drop_heads(self, heads: Iterable[Sequence[int]]) -> Edit:
        """Zeros in place of what heads give, each as (layer, head)."""
        edit = self
        for pair in heads:
            if isinstance(pair, str | int) or len(pair) != 2:
                raise UsageError(f"drop_heads={pair!r} must be pairs of layer and head, e.g. [[0, 1], [-1, 3]].")
            edit = edit.zero("heads", layer=pair[0], heads=[pair[1]])
        return edit

    def drop_attention(self, layer: int) -> Edit:
        """A layer's attention adds nothing to the tokens."""
        return self.zero("attention_out", layer=layer)

    def drop_mlp(self, layer: int) -> Edit:
        """A layer's MLP adds nothing to the tokens."""
        return self.zero("mlp_out", layer=layer)

    # ---- attention

    def uniform_attention(self, **where: Unpack[Where]) -> Edit:
        """Every key that may be seen weighs the same; `tokens` are those that look."""
        return self._with(Change("uniform_attention", "attention", **where))

    def hide_keys(self, tokens: Sequence[int], *, layer: int | None = None, heads: Sequence[int] | None = None) -> Edit:
        """No token looks at these; the softmax is over the others."""
        return self._with(Change("hide_keys", layer=layer, tokens=tokens, heads=heads))

    def hide_patches(
        self, patches: Sequence[int], *, layer: int | None = None, heads: Sequence[int] | None = None
    ) -> Edit:
        """As `hide_keys`, but patches count from 0, without prefix tokens. A mean over patches still contains them."""
        return self._with(Change("hide_patches", layer=layer, tokens=patches, heads=heads))

    def temperature(self, value: float, *, layer: int | None = None, heads: Sequence[int] | None = None) -> Edit:
        """softmax(scores / value): above 1 attention is more even, below 1 sharper. Position biases are part of the
        scores, masks are not.
        """
        return self._with(Change("temperature", value=value, layer=layer, heads=heads))

    def without_sqrt_d(self, *, layer: int | None = None, heads: Sequence[int] | None = None) -> Edit:
        """softmax(q k^T) instead of softmax(q k^T / sqrt(d))."""
        return self._with(Change("without_sqrt_d", layer=layer, heads=heads))

    # ---- positions

    def remove_positions(self) -> Edit:
        """No positions: nothing is added, turned (rotary) or biased (relative)."""
        return self._with(Change("remove_positions"))

    def shuffle_positions(self, seed: int = 0) -> Edit:
        """Each patch gets the position of another one, the same in every image; prefix tokens keep theirs."""
        return self._with(Change("shuffle_positions", value=seed))

    def replace_positions(self, table: Tensor) -> Edit:
        """Another table, of the shape of Trace("position_embedding")."""
        return self.replace("position_embedding", table)

    # ---- together

    def __add__(self, other: Edit) -> Edit:
        """Both, this one's changes first."""
        return Edit((*self.changes, *other.changes))

    def __bool__(self) -> bool:
        return bool(self.changes)

    # ---- JSON

    def to_json(self) -> dict[str, Any]:
        """A small dictionary of plain values, from which `from_json` makes the same Edit."""
        result: dict[str, Any] = {}
        for change in self.changes:
            short = None if "changes" in result else _short_form(change, result)  # later ones keep their order
            if short is None:
                result.setdefault("changes", []).append(change.to_json())
            else:
                result |= short
        return result

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Edit:
        """Keys, all optional: mask_patches [3, 4], hide_patches [5], drop_heads [[layer, head]], drop_attention
        [layer], drop_mlp [layer], temperature 2.0, scale_by_sqrt_d false, positions "kept", "removed" or "shuffled" (by
        seed 0); and changes, a list: [{"action": "scale", "kind": "heads", "value": 0.5, "layer": 3, "heads": [1]}].
        """
        if not isinstance(values, dict):  # pyright: ignore[reportUnnecessaryIsInstance]  # it may come from a file
            raise UsageError(f"an edit must be a dictionary such as {{'mask_patches': [3, 4]}}, found {values!r}.")
        keys = (*SHORT_FORMS, "seed", "changes")
        if unknown := sorted(set(values) - set(keys)):
            raise UsageError(f"unknown edit {unknown[0]!r}: it can hold {', '.join(keys)}.")
        edit, seed = cls(), _integer("seed", values.get("seed", 0))
        for name, read in SHORT_FORMS.items():
            if name in values:
                edit = read(edit, values[name], seed)
        names = [field.name for field in fields(Change)]
        for change in _list("changes", values.get("changes", [])):
            if not isinstance(change, dict) or "action" not in change or not {*change} <= {*names}:
                raise UsageError(
                    f"a change must be a dictionary of action and any of {', '.join(names[1:])}: {change!r}."
                )
            edit = edit._with(Change(**cast("dict[str, Any]", change)))
        return edit

    def _with(self, change: Change) -> Edit:
        return Edit((*self.changes, change))


# ---- checks


def _integer(what: str, number: Any) -> int:
    try:
        if isinstance(number, bool):
            raise TypeError
        return index(number)
    except TypeError:
        raise UsageError(f"{what}={number!r} must be a whole number.") from None


def _places(what: str, given: Sequence[int] | None) -> tuple[int, ...] | None:
    """Different numbers from 0, rising."""
    if given is None:
        return None
    if isinstance(given, str | int):
        raise UsageError(f"{what}={given!r} must be a list of numbers from 0, e.g. {what}=[{given}].")
    numbers = sorted({_integer(what, number) for number in given})
    if not numbers or numbers[0] < 0:
        raise UsageError(f"{what}={list(given)} must be a list of at least one number, each from 0 on.")
    return tuple(numbers)


def _checked(action: str, value: Any) -> Tensor | float | int | None:
    """The value of a change, as its action needs it."""
    if action == "shuffle_positions":
        return _integer("seed", value)
    if action in ("scale", "temperature"):
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (action == "temperature" and value <= 0):
            limit = " above 0: 2 makes attention more even, 0.5 sharper" if action == "temperature" else ""
            raise UsageError(f"{action}={value!r} must be a finite number{limit}.")
        return float(value)
    if action in ("replace", "add") or (action == "mean" and value is not None):
        return _tensor(action, value)
    if value is not None:
        raise UsageError(f"{action} takes no value, found {value!r}.")
    return None


def _tensor(action: str, value: Any) -> Tensor:
    try:
        tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"{action}: the value must be a tensor or a number, found a {type(value).__name__}.") from None
    if not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"{action}: the value holds numbers that are not finite.")
    return tensor


def _list(name: str, given: Any) -> list[Any]:
    if not isinstance(given, list | tuple):
        raise UsageError(f"{name}={given!r} must be a list.")
    return list(cast("Sequence[Any]", given))


def _json_value(value: Any) -> Any:
    """A tensor or a tuple as a list."""
    if isinstance(value, Tensor):
        return cast("list[Any]", value.tolist())  # pyright: ignore[reportUnknownMemberType]  # torch has no types here
    return list(cast("Sequence[int]", value)) if isinstance(value, tuple) else value


# ---- short forms of JSON

Read = Callable[[Edit, Any, int], Edit]  # the edit so far, the value, the seed of shuffled positions


def _read_patches(method: Callable[[Edit, Any], Edit]) -> Read:
    def read(edit: Edit, given: Any, _: int) -> Edit:
        patches = _list(method.__name__, given)
        return method(edit, patches) if patches else edit

    return read


def _read_layers(method: Callable[[Edit, Any], Edit]) -> Read:
    def read(edit: Edit, given: Any, _: int) -> Edit:
        return reduce(method, _list(method.__name__, given), edit)

    return read


def _read_temperature(edit: Edit, given: Any, _: int) -> Edit:
    return edit.temperature(given) if isinstance(given, bool) or given != 1 else edit


def _read_sqrt_d(edit: Edit, given: Any, _: int) -> Edit:
    if not isinstance(given, bool):
        raise UsageError(f"scale_by_sqrt_d={given!r} must be true or false.")
    return edit if given else edit.without_sqrt_d()


def _read_positions(edit: Edit, given: object, seed: int) -> Edit:
    if given not in ("kept", "removed", "shuffled"):
        raise UsageError(f'positions={given!r} must be "kept", "removed" or "shuffled".')
    if given == "kept":
        return edit
    return edit.remove_positions() if given == "removed" else edit.shuffle_positions(seed)


BRANCHES = {"attention_out": "drop_attention", "mlp_out": "drop_mlp"}
SHORT_FORMS: dict[str, Read] = {  # in the order in which they are read
    "mask_patches": _read_patches(Edit.mask_patches),
    "hide_patches": _read_patches(Edit.hide_patches),
    "drop_heads": lambda edit, given, _: edit.drop_heads(_list("drop_heads", given)),
    "drop_attention": _read_layers(Edit.drop_attention),
    "drop_mlp": _read_layers(Edit.drop_mlp),
    "temperature": _read_temperature,
    "scale_by_sqrt_d": _read_sqrt_d,
    "positions": _read_positions,
}


def _short_form(c: Change, before: dict[str, Any]) -> dict[str, Any] | None:
    """A change under one of the short names, together with what stands there already; None where it has none."""
    everywhere = c.layer is None and c.heads is None
    at_layer = c.layer is not None and c.tokens is None
    match c.action:
        case "zero" if c.kind == "patch_embed" and c.tokens is not None and everywhere:
            return {"mask_patches": sorted({*before.get("mask_patches", []), *c.tokens})}
        case "hide_patches" if c.tokens is not None and everywhere:
            return {"hide_patches": sorted({*before.get("hide_patches", []), *c.tokens})}
        case "zero" if c.kind == "heads" and at_layer and c.heads is not None and len(c.heads) == 1:
            return {"drop_heads": [*before.get("drop_heads", []), [c.layer, c.heads[0]]]}
        case "zero" if c.kind in BRANCHES and at_layer and c.heads is None:
            return {BRANCHES[c.kind]: [*before.get(BRANCHES[c.kind], []), c.layer]}
        case "temperature" if everywhere and "temperature" not in before:
            return {"temperature": c.value}
        case "without_sqrt_d" if everywhere and "scale_by_sqrt_d" not in before:
            return {"scale_by_sqrt_d": False}
        case "remove_positions" if "positions" not in before:
            return {"positions": "removed"}
        case "shuffle_positions" if "positions" not in before:
            return {"positions": "shuffled", "seed": c.value}
        case _:
            return None
