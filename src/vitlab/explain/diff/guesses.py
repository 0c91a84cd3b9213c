"""Candidate causes, from the configs and tensors of the two sides. The search tries them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args

from torch import Tensor

from vitlab.explain.diff.relations import Relation, close
from vitlab.explain.diff.remedies import by_options, remedy
from vitlab.explain.diff.sides import Side
from vitlab.explain.diff.steps import Key
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
TURNED = {  # names of causes by the relation between two tensors
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
USUAL_EPS = (1e-12, 1e-6, 1e-5)
RULES = ("bicubic", "bicubic_antialias", "bicubic_offset", "bilinear_antialias")
NORMS = ("norm_pre", "norm1", "norm2", "norm", "pool", "after_attention", "tokens")
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


@dataclass(frozen=True)
class Guess:
    """A change that would make p equal r: options, and tensors to take from r."""

    kind: str
    description: str
    remedy: str
    options: dict[str, Any] = field(default_factory=dict)
    tensors: tuple[str, ...] = ()


@dataclass
class SearchState:
    """What guesses are made from; `options` and `taken` are the changes already applied to p."""

    p: Side
    r: Side
    size: tuple[int, int]  # of the input
    steps: list[Key]  # in the order of the pass
    relations: dict[str, Relation]  # of the tensors that both have in the same shape
    options: dict[str, Any] = field(default_factory=dict)
    taken: dict[str, Tensor] = field(default_factory=dict)

    @property
    def retrained(self) -> bool:
        """Most tensors differ: no single one is the cause."""
        other = sum(relation.kind == "values" for relation in self.relations.values())
        return other >= 4 and other > len(self.relations) / 2

    def read_at(self, place: int) -> set[str]:
        kind, layer = self.steps[place]
        inside = "" if layer is None else f"blocks.{layer}."
        starts = tuple(inside + start for start in READS.get(kind, (f"{kind}.",)))
        return {name for name in self.relations if name.startswith(starts)}

    def read_until(self, place: int) -> set[str]:
        return set().union(*map(self.read_at, range(place + 1)))


def guesses(state: SearchState, place: int) -> Iterator[list[Guess]]:
    """Most likely first: config differences, tensor relations, usual values, all together, other values."""
    kind, _ = state.steps[place]
    stated = [*options(state.p, state.r, state.options), *_real_eps(state)]
    turned = [*_turned(state, place)]
    for guess in (*stated, *_grids(state, kind), *turned, *_usual(state, kind)):
        yield [guess]
    if len(stated) + len(turned) > 1:
        yield [*stated, *turned]
    if state.retrained:
        return
    values = [*_values(state, place)]
    for guess in values:
        yield [guess]
    if values and (stated or turned):
        yield [*stated, *turned, values[-1]]


def options(p: Side, r: Side, made: Mapping[str, object]) -> Iterator[Guess]:
    """Options in which the configs differ, after the changes `made` already."""
    for kind, what, leaves in OPTIONS:
        mine, theirs = ({leaf: attrgetter(leaf)(side.config) for leaf in leaves} for side in (p, r))
        mine |= {leaf: value for leaf, value in made.items() if leaf in mine}
        other = {leaf: value for leaf, value in theirs.items() if value != mine[leaf]}
        if other:
            pairs = [
                f"{_value(mine[leaf])} in {p.letter}, {_value(value)} in {r.letter}" for leaf, value in other.items()
            ]
            yield Guess(kind, f"{what}: {'; '.join(pairs)}", by_options(kind, p, r, other), other)


def _real_eps(state: SearchState) -> Iterator[Guess]:
    """The eps of r's norms, where its config has another one."""
    for eps in state.r.eps - {state.r.config.norm.eps}:
        yield _hidden(state, "eps", "LayerNorm eps", "norm.eps", eps)


def _usual(state: SearchState, kind: str) -> Iterator[Guess]:
    """Usual values that neither config has."""
    configs = [side.config for side in (state.p, state.r)]
    if kind in NORMS:
        for eps in USUAL_EPS:
            if eps not in [c.norm.eps for c in configs]:
                yield _hidden(state, "eps", "LayerNorm eps", "norm.eps", eps)
    if kind in ("fc1", "fc2", "tokens") and state.p.config.mlp.kind == "mlp":
        for activation in get_args(Activation):
            if activation not in [c.mlp.activation for c in configs]:
                yield _hidden(state, "activation", "GELU kind", "mlp.activation", activation)


def _hidden(state: SearchState, kind: str, what: str, leaf: str, value: object) -> Guess:
    configured = _value(attrgetter(leaf)(state.r.config))
    text = f"{what}: {state.r.letter} computes as with {_value(value)}, although its config says {configured}"
    return Guess(kind, text, by_options(kind, state.p, state.r, {leaf: value}), {leaf: value})


def _grids(state: SearchState, kind: str) -> Iterator[Guess]:
    """Position tables of two grids, or one table at another size."""
    p, r = state.p, state.r
    mine, theirs = (side.weights.get("positions.table") for side in (p, r))
    if kind != "positions" or mine is None or theirs is None:
        return
    run_on = grid_of(*state.size, p.config.patch_size)
    own, other = (side.config.positions.resize_rule for side in (p, r))
    for rule in RULES:
        if run_on != p.config.grid and rule not in (own, other):
            what = f"rule of position resize, {_grid(p.config.grid)} to {_grid(run_on)}"
            text = f"{what}: {own} in {p.letter}, {r.letter}'s numbers come from {rule}"
            option = {"positions.resize_rule": rule}
            yield Guess("positions", text, by_options("positions", p, r, option), option)
    if p.config.grid == r.config.grid:
        return
    as_r = {"image_size": r.config.image_size}
    grids = f"{_grid(p.config.grid)} in {p.letter}, {_grid(r.config.grid)} in {r.letter}"
    if mine.shape == theirs.shape:
        text = f"one position table read as two grids: {grids}"
        yield Guess("positions", text, by_options("grid", p, r, {"grid": r.config.grid}), as_r)
    for rule in RULES:
        made = resize_positions(theirs, r.config.positioned_prefix, r.config.grid, p.config.grid, rule)
        if close(made, mine):
            text = f"{p.letter}'s position table is {r.letter}'s, resized by {rule}: {grids}"
            yield Guess("positions", text, by_options("resized", p, r, {}), as_r, ("positions.table",))
    text = f"position tables that no rule of resize turns into each other: {grids}"
    yield Guess("positions", text, remedy("values", p), as_r, ("positions.table",))


def _turned(state: SearchState, place: int) -> Iterator[Guess]:
    """Tensors that are transposed, reordered, zeroed, ...: one guess for all with the same change."""
    read = state.read_until(place)
    groups: dict[tuple[str, str], list[str]] = {}
    for key, relation in state.relations.items():
        if relation.kind not in ("equal", "values") and key not in state.taken:
            groups.setdefault((relation.kind, relation.description), []).append(key)
    for (kind, description), keys in groups.items():
        if read.intersection(keys):
            text = description.format(p=state.p.letter, r=state.r.letter)
            text = text if text.startswith("all zeros") else f"{state.r.letter}'s is {text}"
            text += _remark(state, state.relations[keys[0]])
            yield Guess(kind, f"{TURNED[kind]}: {text}", remedy(kind, state.p), {}, tuple(keys))


def _remark(state: SearchState, relation: Relation) -> str:
    p, r = state.p, state.r
    if relation.kind == "classes" and p.labels and r.labels:
        moved = r.labels == [p.labels[i] for i in relation.order]
        return "; the label names moved along" if moved else "; the label names did not move along"
    rules = [side.config.positions.resize_rule for side in (p, r)]
    if relation.kind == "positions" and not relation.order and rules[0] != rules[1]:
        return f" ({p.letter} says {rules[0]}, {r.letter} {rules[1]})"
    return ""


def _values(state: SearchState, place: int) -> Iterator[Guess]:
    """Tensors with other values: those of this step one by one, then all that were read so far."""
    other = [key for key, relation in state.relations.items() if relation.kind == "values" and key not in state.taken]
    here, until = state.read_at(place), state.read_until(place)
    alone: list[tuple[str, ...]] = [(key,) for key in other if key in here]
    so_far = tuple(key for key in other if key in until)
    groups: list[tuple[str, ...]] = [*alone, *([so_far] if so_far else [])]
    for keys in dict.fromkeys(groups):
        far = max((state.relations[key] for key in keys), key=lambda relation: relation.distance)
        text = f"other values in {state.r.letter}: relative distance {far.distance:.1e}, cosine {far.cosine:.4f}"
        yield Guess("values", text, remedy("values", state.p), {}, keys)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "there" if value else "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _grid(grid: tuple[int, int]) -> str:
    return f"{grid[0]} x {grid[1]}"
