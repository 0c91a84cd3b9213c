"""Why two copies of one network part: every guess is tried on the network itself, and named only if it repairs it.

The network of one side is built anew with the guess made true (the other's eps, the other's activation, a tensor as the
other has it) and runs again. What moves the first difference further back is a cause; then the next one is looked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple, get_args

from torch import Tensor

from vitlab.explain.diff.relations import Relation, close, relate
from vitlab.explain.diff.remedies import REMEDIES, by_options, typed
from vitlab.explain.diff.sides import Side
from vitlab.explain.diff.steps import Key, Row, Steps, Tally, first_difference, run_steps
from vitlab.layers.block import Activation
from vitlab.layers.patches import grid_of
from vitlab.layers.positions import resize_positions

OPTIONS = (  # kind of cause, what it is called, the options that stand or fall together
    ("eps", "LayerNorm eps", ("norm.eps",)),
    ("activation", "GELU kind", ("mlp.activation",)),
    ("bias", "bias of q, k and v", ("attention.qkv_bias",)),
    ("bias", "bias of the patch embedding", ("stem.patch_bias",)),
    ("heads", "number of heads", ("heads", "head_dim")),
    ("positions", "rule of position resize", ("positions.resize_rule",)),
    ("positions", "kind of positions", ("positions.kind", "positions.rotary_base")),
    ("pooling", "pooling", ("head.pooling",)),
    ("head", "tanh layer before the classifier", ("head.head_hidden",)),
    ("classes", "number of classes", ("classes",)),
    ("tokens", "distillation and register tokens", ("tokens.distill_token", "tokens.registers")),
    ("tokens", "positions of the prefix", ("positions.prefix_positions",)),
    ("tokens", "class token", ("tokens.class_token", "positions.prefix_positions", "head.pooling")),
)
USUAL_EPS = (1e-12, 1e-6, 1e-5)
RULES = ("bicubic", "bicubic_antialias", "bicubic_offset")
PREFIX_TOKENS = ("class_token", "distill_token", "register_tokens")
READS = {  # the tensors that a step reads, where they are not named as the step; inside a block without its number
    "prefix": PREFIX_TOKENS,
    "positions": ("positions.", *PREFIX_TOKENS),
    "qkv": ("attention.qkv.",),
    "heads": ("attention.q_norm.", "attention.k_norm.", "attention.relative."),
    "proj": ("attention.proj.",),
    "after_attention": ("scale1.", "norm1."),  # post-norm has its norms here
    "fc1": ("mlp.fc1.",),
    "fc2": ("mlp.fc2.",),
    "tokens": ("scale2.", "norm2."),
    "pool": ("pool.", "head_norm."),
    "head": ("head.", "head_distill."),
}
NORMS = ("norm_pre", "norm1", "norm2", "norm", "pool", "after_attention", "tokens")
ROUNDS = 8  # causes to look for, one behind the other


@dataclass(frozen=True)
class Cause:
    """`words` say what differs; with it undone, the step's difference falls from `before` to `after`."""

    kind: str  # eps, activation, preprocess, positions, transposed, bias, qkv, heads, pooling, tokens, classes, ...
    step: str  # where it first shows
    words: str
    remedy: str
    before: float  # relative differences; see Row
    after: float | None = None
    changed: str = ""  # the side that was changed to try it
    tensors: tuple[str, ...] = ()

    @property
    def explained(self) -> float | None:
        """The share of the step's difference that is gone."""
        if self.after is None or not self.before:
            return None
        return 1.0 if self.before == float("inf") else 1 - self.after / self.before


@dataclass(frozen=True)
class Guess:
    kind: str
    words: str
    remedy: str
    options: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()  # to be taken from the other side


class Tried(NamedTuple):
    first: tuple[int, Row] | None  # the first difference that is left, with its place among the steps
    after: float = 0.0  # what is left at the step that was to be repaired


class Search:
    """Changes p, step by step, until it agrees with r; `images` are what both are run on."""

    def __init__(self, p: Side, r: Side, images: Tensor, tolerance: float):
        self.p, self.r, self.images, self.tolerance = p, r, images, tolerance
        self.wanted: Steps = r.steps(images)
        self.options: dict[str, Any] = {}
        self.taken: dict[str, Tensor] = {}
        both = [key for key in p.weights if key in r.weights and key != "mask_token"]  # no step reads a mask token
        both = [key for key in both if p.weights[key].shape == r.weights[key].shape]
        self.relations = {key: relate(key, p.weights[key], r.weights[key], p.config) for key in both}
        self.unexplained: Row | None = None

    @property
    def retrained(self) -> bool:
        """Most tensors have other values: no single one is the cause."""
        other = sum(relation.kind == "values" for relation in self.relations.values())
        return other >= 4 and other > len(self.relations) / 2

    def run(self) -> list[Cause]:
        found: list[Cause] = []
        at = self._try(Guess("", "", ""))
        while at is not None and at.first is not None and len(found) < ROUNDS:
            place, row = at.first
            repaired = self._repair(place)
            if repaired is None:
                break
            guess, at = repaired
            found.append(self._accept(guess, row, at.after))
        self.unexplained = at.first[1] if at is not None and at.first is not None else None
        return found

    def _repair(self, place: int) -> tuple[Guess, Tried] | None:
        """The first guess that makes the step at `place` agree."""
        for guess in self._guesses(place):
            then = self._try(guess, place)
            if then is not None and (then.first is None or then.first[0] > place):
                return guess, then
        return None

    def _try(self, guess: Guess, place: int | None = None) -> Tried | None:
        """Run p with the guess made true; None where that network cannot be built."""
        tensors = {**self.taken, **{key: self.r.weights[key] for key in guess.tensors}}
        try:
            model = self.p.rebuilt({**self.options, **guess.options}, tensors, self.r.weights)
            steps = run_steps(model, self.images)
        except ValueError:  # options that do not go together, or tensors that neither side has
            return None
        first = first_difference(steps, self.wanted, self.tolerance)
        if place is None:
            return Tried(first)
        key = list(self.wanted)[place]
        if key not in steps:
            return None
        tally = Tally()
        tally.add(steps[key], self.wanted[key])
        return Tried(first, tally.row("", self.tolerance).relative)

    def _accept(self, guess: Guess, row: Row, after: float) -> Cause:
        self.options |= guess.options
        self.taken |= {key: self.r.weights[key] for key in guess.tensors}
        words = f"{guess.words} ({_named(guess.tensors)})" if guess.tensors else guess.words
        return Cause(guess.kind, row.step, words, guess.remedy, row.relative, after, self.p.letter, guess.tensors)

    def _guesses(self, place: int) -> Iterator[Guess]:
        """Most telling first: what the configs say, what the tensors show, usual values, all together, other values."""
        kind, _ = list(self.wanted)[place]
        stated = [*self._options(), *self._eps()]
        shown = [*self._grids(kind), *self._turned(place)]
        yield from stated
        yield from shown
        yield from self._usual(kind)
        if len(stated) + len(shown) > 1:
            yield _together([*stated, *self._turned(place)])
        if self.retrained:
            return
        values = [*self._values(place)]
        yield from values
        if values and stated:
            yield _together([*stated, values[-1]])

    def _options(self) -> Iterator[Guess]:
        """Options in which the configs differ."""
        p, r = self.p, self.r
        for kind, what, leaves in OPTIONS:
            mine, theirs = ({leaf: attrgetter(leaf)(side.config) for leaf in leaves} for side in (p, r))
            mine |= {leaf: value for leaf, value in self.options.items() if leaf in mine}
            other = {leaf: value for leaf, value in theirs.items() if value != mine[leaf]}
            if other:
                told = "; ".join(
                    f"{_value(mine[leaf])} in {p.letter}, {_value(value)} in {r.letter}"
                    for leaf, value in other.items()
                )
                yield Guess(kind, f"{what}: {told}", by_options(kind, p, r, other), other)

    def _eps(self) -> Iterator[Guess]:
        """What the other's norms really have, where its config says something else."""
        for eps in self.r.eps - {self.r.config.norm.eps}:
            yield self._hidden("eps", "LayerNorm eps", "norm.eps", eps)

    def _hidden(self, kind: str, what: str, leaf: str, value: Any) -> Guess:
        says = _value(attrgetter(leaf)(self.r.config))
        words = f"{what}: {self.r.letter} computes as with {_value(value)}, although its config says {says}"
        return Guess(kind, words, by_options(kind, self.p, self.r, {leaf: value}), {leaf: value})

    def _usual(self, kind: str) -> Iterator[Guess]:
        """Values that networks of this kind are often given, where nothing says them."""
        if kind in NORMS:
            for eps in USUAL_EPS:
                if eps not in (self.p.config.norm.eps, self.r.config.norm.eps):
                    yield self._hidden("eps", "LayerNorm eps", "norm.eps", eps)
        if kind in ("fc1", "fc2", "tokens") and self.p.config.mlp.kind == "mlp":
            for activation in get_args(Activation):
                if activation not in (self.p.config.mlp.activation, self.r.config.mlp.activation):
                    yield self._hidden("activation", "GELU kind", "mlp.activation", activation)

    def _grids(self, kind: str) -> Iterator[Guess]:
        """Position tables of two grids, or one table at another size: another rule, another reading."""
        p, r = self.p, self.r
        tables = [side.weights.get("positions.table") for side in (p, r)]
        if kind != "positions" or tables[0] is None or tables[1] is None:
            return
        run_on = grid_of(*self.images.shape[-2:], p.config.patch_size)
        own = p.config.positions.resize_rule
        if run_on != p.config.grid:
            for rule in RULES:
                if rule not in (own, r.config.positions.resize_rule):
                    words = (
                        f"rule of position resize, {_grid(p.config.grid)} to {_grid(run_on)}: {own} in {p.letter}, "
                        f"{r.letter}'s numbers come from {rule}"
                    )
                    option = {"positions.resize_rule": rule}
                    yield Guess("positions", words, by_options("positions", p, r, option), option)
        if p.config.grid == r.config.grid:
            return
        as_r = {"image_size": r.config.image_size}
        grids = f"{_grid(p.config.grid)} in {p.letter}, {_grid(r.config.grid)} in {r.letter}"
        if tables[0].shape == tables[1].shape:
            words = f"one position table read as two grids: {grids}"
            yield Guess("positions", words, by_options("grid", p, r, {"grid": r.config.grid}), as_r)
        for rule in RULES:
            made = resize_positions(tables[1], r.config.positioned_prefix, r.config.grid, p.config.grid, rule)
            if close(made, tables[0]):
                words = f"{p.letter}'s position table is {r.letter}'s, resized by {rule}: {grids}"
                yield Guess("positions", words, by_options("resized", p, r, {}), as_r, ("positions.table",))
        words = f"position tables that no rule of resize turns into each other: {grids}"
        yield Guess("positions", words, REMEDIES["values"], as_r, ("positions.table",))

    def _turned(self, place: int) -> Iterator[Guess]:
        """Tensors that are the other's, turned, reordered, emptied, ...: all with one and the same change at once."""
        read = self._read_until(place)
        groups: dict[tuple[str, str], list[str]] = {}
        for key, relation in self.relations.items():
            if relation.kind not in ("equal", "values") and key not in self.taken:
                groups.setdefault((relation.kind, relation.words), []).append(key)
        for (kind, words), keys in groups.items():
            if read.intersection(keys):
                said = words.format(p=self.p.letter, r=self.r.letter) + self._remark(self.relations[keys[0]])
                remedy = REMEDIES[kind].format(path=typed(self.p))
                yield Guess(kind, f"{TURNED[kind]}: {_is(kind, said, self.r.letter)}", remedy, {}, tuple(keys))

    def _remark(self, relation: Relation) -> str:
        p, r = self.p, self.r
        if relation.kind == "classes" and p.labels and r.labels:
            moved = r.labels == [p.labels[i] for i in relation.order]
            return "; the label names moved along" if moved else "; the label names did not move along"
        rules = [side.config.positions.resize_rule for side in (p, r)]
        if relation.kind == "positions" and not relation.order and rules[0] != rules[1]:
            return f" ({p.letter} says {rules[0]}, {r.letter} {rules[1]})"
        return ""

    def _values(self, place: int) -> Iterator[Guess]:
        """Tensors with other values: those of this step one by one, then all that were read so far."""
        other = [k for k, relation in self.relations.items() if relation.kind == "values" and k not in self.taken]
        here = self._read_at(list(self.wanted)[place])
        so_far = tuple(key for key in other if key in self._read_until(place))
        alone = [(key,) for key in so_far if key in here]
        for keys in dict.fromkeys([*alone, *([so_far] if so_far else [])]):
            far = max((self.relations[key] for key in keys), key=lambda relation: relation.distance)
            words = f"other values in {self.r.letter}: relative distance {far.distance:.1e}, cosine {far.cosine:.4f}"
            yield Guess("values", words, REMEDIES["values"], {}, keys)

    def _read_at(self, key: Key) -> set[str]:
        kind, layer = key
        inside = "" if layer is None else f"blocks.{layer}."
        starts = tuple(inside + start for start in READS.get(kind, (f"{kind}.",)))
        return {name for name in self.relations if name.startswith(starts)}

    def _read_until(self, place: int) -> set[str]:
        return set().union(*(self._read_at(key) for key in list(self.wanted)[: place + 1]))

    def summary(self) -> str:
        """Where no cause was found: what the tensors look like."""
        other = {k: v for k, v in self.relations.items() if v.kind != "equal" and k not in self.taken}
        if not other:
            return "all tensors and all options agree, so the two programs compute this step differently."
        most = sorted(other, key=lambda key: -other[key].distance)[:5]
        listed = ", ".join(f"{k} ({other[k].distance:.1e}, cosine {other[k].cosine:.4f})" for k in most)
        cosines = sorted(other[key].cosine for key in other)
        hint = ""
        if self.retrained:
            alike = cosines[len(cosines) // 2] > 0.5
            hint = (
                " One looks like a trained copy of the other." if alike else " They look like two separate trainings."
            )
        return (
            f"{len(other)} of {len(self.relations)} tensors differ, most (relative distance, cosine): {listed}.{hint}"
        )


TURNED = {
    "bias": "missing bias",
    "zero": "missing tensor",
    "rounded": "half precision",
    "transposed": "transposed weight",
    "qkv": "q, k, v in another layout",
    "positions": "position table",
    "classes": "classes in another order",
    "channels": "channels in another order",
    "scaled": "scaled weight",
}


def _is(kind: str, said: str, letter: str) -> str:
    return said if said.startswith("all zeros") else f"{letter}'s is {said}"


def _together(guesses: list[Guess]) -> Guess:
    options = {leaf: value for guess in guesses for leaf, value in guess.options.items()}
    tensors = tuple(dict.fromkeys(key for guess in guesses for key in guess.tensors))
    first = guesses[0]
    return replace(first, words="; and ".join(guess.words for guess in guesses), options=options, tensors=tensors)


def _named(tensors: tuple[str, ...]) -> str:
    return tensors[0] if len(tensors) == 1 else f"{tensors[0]} and {len(tensors) - 1} more"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "there" if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
