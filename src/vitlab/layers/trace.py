"""Trace: records intermediate values of a forward pass.

    trace = Trace("attention", layers=[-1])
    logits = model(images, trace=trace)
    trace["attention", -1]                     # (B, h, N, N)

The output always comes from the fused kernel; the weights are computed beside it, for the requested layers only, so
a trace never changes a bit of the logits. Only gradients of attention take the explicit path. Models call `mark`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.tables import Table, Tabular, by

if TYPE_CHECKING:
    from vitlab.layers.apply_edit import LayerEdit
    from vitlab.layers.positions import Rotary

Pick = Callable[[Tensor], Tensor]
FROM_HEADS = {  # what an attention layer can derive from its queries, keys and values
    "attention": "(B, h, N, N), softmax weights: row = who looks, column = at whom; of fewer keys (B, h, N, M), in "
    "windows (B, h, windows, n, n)",
    "class_attention": "(B, h, N), the class token's row of it, without computing the others",
    "queries": "(B, h, N, d)",
    "keys": "(B, h, N, d)",
    "values": "(B, h, N, d)",
}
# Parts of the step after them: `inspect` and `diff` count both as one.
PARTIAL_KINDS = ("position_embedding", "position_conv", "fc1_pre", "attention_out", "mlp_out")


@dataclass(frozen=True)
class TokenLayout:
    """What the token list holds at the first block: prefix tokens by name, then patches row by row."""

    prefix: tuple[str, ...]
    grid: tuple[int, int]

    def __str__(self) -> str:
        counts = {name: self.prefix.count(name) for name in dict.fromkeys(self.prefix)}
        parts = [f"{n} {name} token{'s' if n > 1 else ''}" for name, n in counts.items()]
        parts.append(f"{self.grid[0]} x {self.grid[1]} patches")
        return f"{len(self.prefix) + self.grid[0] * self.grid[1]} = {' + '.join(parts)}"


class Trace(Tabular):
    """Names what to keep of one forward pass; read it afterwards as `trace[kind, layer]` or `trace[kind]`.

    kinds      any step the model marks ("tokens", "norm1", "patch_embed", ...) or "attention", "keys", ...
    layers     "all", or layer numbers; -1 is the last
    heads      "all", or head numbers; for per-head kinds
    gradients  keep the graph, for `trace.gradient(kind, layer)`; attention then takes the explicit path
    reduce     called as reduce(value, layer) while the pass runs; its result is kept instead of the value, or nothing
               where that is None. So a sum over layers never holds more than one layer's value.
    """

    def __init__(
        self,
        *kinds: str,
        layers: str | Sequence[int] = "all",
        heads: str | Sequence[int] = "all",
        gradients: bool = False,
        reduce: Callable[[Tensor, int | None], Tensor | None] | None = None,
    ):
        if not kinds:
            raise UsageError('name what to trace, e.g. Trace("attention", layers=[-1]) or Trace("tokens").')
        self.kinds = kinds
        self.requested_layers, self.heads = _numbers("layer", layers), _numbers("head", heads)
        self.gradients, self.reduce = gradients, reduce
        self.layout: TokenLayout | None = None
        self.places: tuple[Any, ...] = ()  # of networks in stages: where each layer's queries and keys stand
        self.layers: tuple[int, ...] = ()
        self._kept: dict[tuple[str, int | None], Tensor] = {}
        self._on_path: dict[tuple[str, int | None], tuple[Tensor, Pick | None]] = {}
        self._depth = 0

    def __repr__(self) -> str:
        return f"Trace({', '.join(map(repr, self.kinds))}, layers={self.requested_layers!r})"

    def begin(self, *, depth: int, offers: Iterable[str], layout: TokenLayout, places: tuple[Any, ...] = ()) -> None:
        """A model calls this first: check the request against what it can give, and forget the last pass."""
        check_offered(self.kinds, offers)
        layers = range(depth) if isinstance(self.requested_layers, str) else self.requested_layers
        for layer in layers:
            if not -depth <= layer < depth:
                raise UsageError(f"layer {layer} does not exist: this model has layers 0 to {depth - 1} (or -1, ...).")
        self.layers = tuple(layer % depth for layer in layers)
        self.layout, self.places, self._depth = layout, places, depth
        self._kept.clear()
        self._on_path.clear()

    def at(self, layer: int) -> LayerTrace | None:
        """The view that one block gets; None where this layer is not requested, so that it runs as if untraced."""
        return LayerTrace(self, layer) if layer in self.layers else None

    def finish(self) -> None:
        """A model calls this after its last block."""

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Pick | None = None) -> Tensor:
        """Keep a value if it is requested, and hand it on; `pick` takes a part (heads, the class token's row)."""
        if self.wants(kind):
            self._keep(kind, value, layer, pick)
        return value

    def _keep(self, kind: str, value: Tensor, layer: int | None, pick: Pick | None) -> None:
        if not self.gradients:
            value = value.detach()
        elif value.requires_grad:
            value.retain_grad()
            self._on_path[kind, layer] = (value, pick)  # a part cut off here would lie beside the path to the output
        part = value if pick is None else pick(value)
        kept = part if self.reduce is None else self.reduce(part, layer)
        if kept is not None:
            self._kept[kind, layer] = kept if self.gradients else _compact(kept)

    def gradient(self, kind: str, layer: int | None = None) -> Tensor:
        """After backward(): the gradient of what `trace[kind, layer]` shows."""
        value, pick = self.on_path(kind, layer)
        if value.grad is None:
            raise UsageError("there is no gradient yet: call backward() on something the model returned.")
        return pick(value.grad)

    def on_path(self, kind: str, layer: int | None = None) -> tuple[Tensor, Pick]:
        """The tensor on the path to the output, for torch.autograd.grad, and the function that takes from it, or from
        its gradient, the part that `trace[kind, layer]` shows.
        """
        layer = self._resolve(layer)
        if (kind, layer) not in self._on_path:
            raise UsageError(f"no gradient was kept of {kind!r} at layer {layer}: pass gradients=True to Trace.")
        value, pick = self._on_path[kind, layer]
        return value, pick or (lambda value: value)

    def wants(self, kind: str) -> bool:
        return kind in self.kinds

    def pick_heads(self, value: Tensor) -> Tensor:
        """(B, h, ...) -> the requested heads."""
        if isinstance(self.heads, str):
            return value
        for head in self.heads:
            if not -value.shape[1] <= head < value.shape[1]:
                raise UsageError(f"head {head} does not exist: this layer has heads 0 to {value.shape[1] - 1}.")
        return value[:, list(self.heads)]

    def __getitem__(self, key: str | tuple[str, int]) -> Tensor:
        kind, layer = (key, None) if isinstance(key, str) else key
        layer = self._resolve(layer)
        try:
            return self._kept[kind, layer]
        except KeyError:
            kept = ", ".join(
                f"trace[{k!r}, {at}]" if at is not None else f"trace[{k!r}]" for k, at in list(self._kept)[:8]
            )
            have = f"it holds {kept}" if kept else "it is empty: run model(images, trace=trace) first"
            raise KeyError(f"the trace has no {kind!r} at layer {layer}; {have}") from None

    def _resolve(self, layer: int | None) -> int | None:
        inside = layer is not None and -self._depth <= layer < self._depth
        return layer % self._depth if layer is not None and inside else layer

    def __contains__(self, key: tuple[str, int | None]) -> bool:
        return key in self._kept

    def items(self) -> Iterator[tuple[tuple[str, int | None], Tensor]]:
        """((kind, layer), value) in the order of the pass; layer is None outside the blocks."""
        return iter(self._kept.items())

    def table(self) -> Table:
        """What the last pass left here: a row for each value, by the expression that reads it."""
        rows: list[list[str]] = []
        for (kind, layer), value in self._kept.items():
            name = f'trace["{kind}"]' if layer is None else f'trace["{kind}", {layer}]'
            rows.append([name, by(value.shape), *_range(value)])
        heading = [f"Trace of {', '.join(self.kinds)}"]
        heading += [] if self.layout is None else [f"tokens: {self.layout}"]
        notes = [] if rows else ["empty: run model(images, trace=trace) first."]
        return Table(["value", "shape", "lowest", "highest"], rows, ("lowest", "highest"), heading, notes=notes)

    def stack(self, kind: str) -> Tensor:
        """All traced layers of one kind on a new first axis: (L, B, ...)."""
        return torch.stack([self[kind, layer] for layer in self.layers])


def check_offered(kinds: Iterable[str], offers: Iterable[str], verb: str = "give") -> None:
    """Refuse what a model cannot give, and say what it can."""
    offers = tuple(offers)
    for kind in kinds:
        if kind not in offers:
            near = get_close_matches(kind, offers, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"this model cannot {verb} {kind!r}.{hint} It can {verb}: {', '.join(offers)}.")


def _compact(value: Tensor) -> Tensor:
    """A small part of a large tensor would keep all of it in memory."""
    return value.clone() if value.nbytes < value.untyped_storage().nbytes() else value


def _range(value: Tensor) -> list[str]:
    if not value.numel() or value.is_complex():
        return ["", ""]
    low, high = value.aminmax()
    return [f"{number:.4g}" for number in (low.item(), high.item())]


def _numbers(what: str, given: str | Sequence[int]) -> str | tuple[int, ...]:
    if isinstance(given, str) and given == "all":
        return given
    try:
        return tuple(index(n) for n in ([given] if isinstance(given, str) else given))  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(
            f'{what}s={given!r} must be "all" or a list of {what} numbers, e.g. {what}s=[0, -1].'
        ) from None


class LayerTrace:
    """One layer's view of a Trace, of an Edit, and of what a Reducer needs there; attention and blocks write to it.

    windows: where attention runs inside windows, which stand in the batch one after another, how many an image has.
    gradients: whether the reducer gets what it needs with the graph behind it.
    """

    def __init__(
        self,
        trace: Trace | None,
        layer: int,
        needs: Iterable[str] = (),
        windows: int | None = None,
        gradients: bool = False,
        edit: LayerEdit | None = None,
    ):
        self.trace, self.layer, self.needs, self.windows = trace, layer, frozenset(needs), windows
        self.gradients, self.edit = gradients, edit
        self.seen: dict[str, Tensor] = {}  # for the reducer of this layer

    def in_windows(self, count: int) -> LayerTrace:
        return LayerTrace(self.trace, self.layer, self.needs, count, self.gradients, self.edit)

    def for_reducer(self, needs: Iterable[str], gradients: bool) -> LayerTrace:
        return LayerTrace(self.trace, self.layer, needs, None, gradients, self.edit)

    @property
    def needs_explicit(self) -> bool:
        """A gradient of the attention weights exists, and they can be changed, only where they are written out."""
        gradients = self.trace is not None and self.trace.gradients
        traced = self.wants("attention") or self.wants("class_attention")
        return (gradients and traced) or (self.edit is not None and self.edit.changes_weights)

    def wants(self, kind: str) -> bool:
        return kind in self.needs or (self.trace is not None and self.trace.wants(kind))

    def mark(self, kind: str, value: Tensor, heads: int | None = None) -> Tensor:
        """`heads`: how many stand side by side in the value, where it is divided by heads."""
        if self.edit is not None:
            value = self.edit.apply(kind, value, heads, self.windows)
        if kind in self.needs:
            self.seen[kind] = value if self.gradients else value.detach()
        if self.trace is not None:
            self.trace.mark(kind, value, self.layer)
        return value

    def mark_heads(
        self, kind: str, value: Tensor, row: int | None = None, uniform: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """For per-head values (B, h, ...), or one row of them: a reducer sees all heads, the trace the requested ones.

        Of windows, (B * windows, h, ...) becomes (B, h, windows, ...). `uniform`: see LayerEdit.apply.
        """
        if self.edit is not None and row is None:
            value = self.edit.apply(kind, value, None, self.windows, uniform)
        if kind in self.needs:
            part = value if row is None else value[:, :, row]
            self.seen[kind] = part if self.gradients else part.detach()
        if self.trace is not None:
            heads, windows = self.trace.pick_heads, self.windows

            def pick(value: Tensor) -> Tensor:
                value = value if windows is None else torch.unflatten(value, 0, (-1, windows)).transpose(1, 2)
                return heads(value) if row is None else heads(value)[:, :, row]

            self.trace.mark(kind, value, self.layer, pick)
        return value

    def edit_scores(
        self, q: Tensor, keys: int, bias: Tensor | None, mask: Tensor | None, root: float | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See LayerEdit.scores."""
        return (q, bias, mask) if self.edit is None else self.edit.scores(q, keys, bias, mask, root, self.windows)

    def edit_rope(self, rope: Rotary | None) -> Rotary | None:
        return rope if self.edit is None else self.edit.rope(rope)


def mark(trace: Trace | LayerTrace | None, kind: str, value: Tensor) -> Tensor:
    """Show a value to the trace under its step's name, and hand it on, changed where an Edit asks for it."""
    return value if trace is None else trace.mark(kind, value)


def mark_side_by_side(trace: LayerTrace | None, kind: str, value: Tensor, heads: int) -> Tensor:
    """As `mark`, for a value (B, N, hd) in which heads stand side by side."""
    return value if trace is None else trace.mark(kind, value, heads)
