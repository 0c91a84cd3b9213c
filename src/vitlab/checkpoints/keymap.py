"""A small two-way rename table: foreign key names <-> ours, and how the tensors under them change shape on the way.

    Rule("blocks.{i}.attention.proj.*", "encoder.layer.{i}.attention.output.dense.*")

`{i}` is a layer number, `*` is weight and bias, `{p}` an optional prefix the dialect names. A foreign key that no rule
takes is an error: the field's most expensive bug is the right weights in a slightly wrong network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import CheckpointError
from vitlab.text.tokenizer import Tokenizer

State = dict[str, Tensor]
Options = dict[str, Any]  # values of a config's or a preprocess's options, by name


@dataclass(frozen=True)
class Codec:
    """`read` makes one of our tensors from theirs; `write` is its inverse, and may need the number of heads."""

    read: Callable[[list[Tensor]], Tensor]
    write: Callable[[Tensor, int, int], list[Tensor]] | None = None  # (ours, how many parts, heads)
    part: bool = False  # theirs is several of our tensors, one below the other in our order; this is one of them


def _as_is(parts: list[Tensor]) -> Tensor:
    return parts[0]


SAME = Codec(_as_is, lambda t, n, h: [t])
JOIN = Codec(torch.cat, lambda t, n, h: list(t.chunk(n)))  # query, key, value <-> one matrix
FIRST_THIRD = Codec(lambda parts: parts[0].chunk(3)[0], lambda t, n, h: [t], part=True)  # query
LAST_THIRDS = Codec(lambda parts: torch.cat(parts[0].chunk(3)[1:]), lambda t, n, h: [t], part=True)  # key and value
TRANSPOSE = Codec(lambda parts: parts[0].T, lambda t, n, h: [t.T])
SCALAR = Codec(lambda parts: parts[0].reshape(()), lambda t, n, h: [t.reshape(1)])  # (1,) <-> ()
ONE_ROW = Codec(lambda parts: parts[0].reshape(1, -1), lambda t, n, h: [t])  # (1, 1, D) or (1, D) -> (1, D)
TOKENS = Codec(lambda parts: parts[0].reshape(1, -1, parts[0].shape[-1]))  # (n, D) -> (1, n, D)
TABLE = Codec(TOKENS.read, lambda t, n, h: [t[0]])  # (n, D) <-> (1, n, D)


@dataclass(frozen=True)
class Rule:
    ours: str
    theirs: str | tuple[str, ...]
    codec: Codec = SAME

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs


def layers(ours: str, theirs: str, names: Mapping[str, str] | Sequence[str]) -> tuple[Rule, ...]:
    """Rules for weight and bias of layers below two prefixes; `names`: ours -> theirs, or those that both share."""
    pairs = names.items() if isinstance(names, Mapping) else zip(names, names, strict=True)
    return tuple(Rule(f"{ours}{our}.*", f"{theirs}{their}.*") for our, their in pairs)


@dataclass
class Renamed:
    """Foreign tensors under our names, where each came from, and what was left over."""

    tensors: State
    origin: dict[str, tuple[str, ...]]
    unused: dict[str, str]  # foreign key -> why

    def leave_out(self, key: str, why: str) -> None:
        del self.tensors[key]
        self.unused |= dict.fromkeys(self.origin.pop(key), why)

    def rename(self, old: str, new: str) -> None:
        self.tensors[new], self.origin[new] = self.tensors.pop(old), self.origin.pop(old)

    def part(self, prefix: str) -> Renamed:
        """The tensors of one part of the network, under the part's own names."""
        keys = {key.removeprefix(prefix): key for key in self.tensors if key.startswith(prefix)}
        tensors = {own: self.tensors[key] for own, key in keys.items()}
        origin = {own: self.origin[key] for own, key in keys.items() if key in self.origin}
        return Renamed(tensors, origin, self.unused)


@dataclass(frozen=True)
class Stated:
    """What the files beside the weights, or a rename table, state; empty where there are none."""

    options: Options = field(default_factory=Options)
    preprocess: Options = field(default_factory=Options)  # values for Preprocess
    labels: list[str] | None = None
    usual_preprocess: Mapping[str, Any] = field(default_factory=Options)  # what such networks usually have
    model_type: str = ""  # transformers' name of the network
    size_note: str = ""  # what their library needs to read images of another size than the positions were made for
    notes: tuple[str, ...] = ()
    tokenizer: Tokenizer | None = None


class Source(NamedTuple):
    """Weights as another library saved them."""

    path: Path
    dialect: Dialect
    state: State


@dataclass(frozen=True)
class Dialect:
    """One library's names, what its bare files leave unsaid, and how the files beside its weights are read."""

    name: str
    rules: tuple[Rule, ...]
    recognise: Callable[[set[str]], bool]  # by the names of the tensors
    assumed: Mapping[str, Any]  # eps and activation, as this library usually has them
    preprocess: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=Options)  # what is certain in this dialect, e.g. the resize rule
    prefixes: tuple[str, ...] = ("",)  # what {p} may stand for
    ignored: Mapping[str, str] = field(default_factory=dict[str, str])  # regex of keys -> why they are left out
    hints: Callable[[State], Options] = lambda state: {}  # options that this layout shows, e.g. JAX's heads
    read_stated: Callable[[Source], Stated | None] = lambda source: None  # of a folder; None: config.json is not theirs
    bare_variants: tuple[Dialect, ...] = ()  # what weights without a config may be instead, by their keys
    fits: Callable[[State], bool] = lambda state: True  # by their shapes, where two networks have the same names
    taken_as: str = "taken as usual there"  # where the assumed values come from


def shape_of(state: State, key: str, axes: int, network: str = "network") -> tuple[int, ...]:
    """The shape of a tensor that must be there, with so many axes."""
    if key not in state:
        raise CheckpointError(f"{key} is missing, so this is not a complete {network}.")
    if state[key].ndim != axes:
        raise CheckpointError(f"{key} has the shape {tuple(state[key].shape)}, expected {axes} axes.")
    return tuple(state[key].shape)


def expand(rule: Rule, prefix: str) -> list[Rule]:
    """`*` -> weight and bias, `{p}` -> the prefix."""
    suffixes = ("weight", "bias") if rule.ours.endswith("*") else ("",)
    return [
        Rule(
            rule.ours.removesuffix("*") + suffix,
            tuple((key.removesuffix("*") + suffix if suffix else key).replace("{p}", prefix) for key in rule.keys),
            rule.codec,
        )
        for suffix in suffixes
    ]


def read(dialect: Dialect, state: State) -> Renamed:
    """Foreign names to ours. Raises where keys are left over that the dialect does not know."""
    prefix = max(dialect.prefixes, key=lambda p: sum(key.startswith(p) for key in state) if p else 0)
    tensors: State = {}
    origin: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for rule in (r for table_rule in dialect.rules for r in expand(table_rule, prefix)):
        pattern = re.compile(re.escape(rule.keys[0]).replace(r"\{i\}", r"(\d+)"))
        for key in state:
            if not (match := pattern.fullmatch(key)):
                continue
            number = match[1] if match.groups() else ""
            theirs = tuple(k.replace("{i}", number) for k in rule.keys)
            ours = rule.ours.replace("{i}", number)
            if ours in tensors or (taken.intersection(theirs) and not rule.codec.part):
                continue
            if absent := [k for k in theirs if k not in state]:
                raise CheckpointError(
                    f"{key} is there but {absent[0]} is missing: the {dialect.name} weights are incomplete."
                )
            try:
                tensors[ours] = rule.codec.read([state[k] for k in theirs]).contiguous()
            except (RuntimeError, IndexError) as error:
                shapes = ", ".join(f"{k} {tuple(state[k].shape)}" for k in theirs)
                raise CheckpointError(f"{shapes}: cannot become {ours} ({str(error).splitlines()[0]})") from None
            origin[ours] = theirs
            taken.update(theirs)
    left = sorted(state.keys() - taken)
    unused = {key: why for key in left for pattern, why in dialect.ignored.items() if re.fullmatch(pattern, key)}
    if stray := [key for key in left if key not in unused]:
        raise CheckpointError(
            f"{len(stray)} key(s) are not known in {dialect.name} weights, e.g. {', '.join(stray[:3])}. "
            "If this is another network, write a rename table (map='keys.toml', --map keys.toml); "
            "what the table leaves out goes under [ignore]."
        )
    return Renamed(tensors, origin, unused)


def write(name: str, rules: tuple[Rule, ...], state: State, *, prefix: str = "", heads: int) -> State:
    """Our names to theirs; a tensor of ours that the dialect has no name for is an error."""
    written: State = {}
    expanded = [r for rule in rules for r in expand(rule, prefix)]
    for ours, tensor in state.items():
        for rule in expanded:
            match = re.fullmatch(re.escape(rule.ours).replace(r"\{i\}", r"(\d+)"), ours)
            if match:
                number = match[1] if match.groups() else ""
                assert rule.codec.write is not None, f"{name} is read-only at {ours}"
                parts = rule.codec.write(tensor, len(rule.keys), heads)
                for key, part in zip((k.replace("{i}", number) for k in rule.keys), parts, strict=True):
                    above = [written[key]] if rule.codec.part and key in written else []
                    written[key] = torch.cat([*above, part]) if above else part.contiguous()
                break
        else:
            raise CheckpointError(
                f"{name} has no name for {ours}: this network cannot be written in that layout. Use --to native."
            )
    return written
