"""How an Edit is applied: what a model reports its steps to, in place of a Trace, while a pass is edited.

`with_edit(trace, edit)` is called where a pass begins; below that everything works with a Trace, whose `mark` hands the
changed value back. The trace that the user gave records what the edited pass computed. Attention stays on the fused
kernel unless its weights themselves are changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.layers.edit import Change, Edit
from vitlab.layers.positions import Rotary
from vitlab.layers.trace import LayerTrace, Pick, TokenLayout, Trace, check_offered

BY_HEAD = ("queries", "keys", "values", "attention")  # (B, h, N, ...)
WITHOUT_PREFIX = ("patch_embed", "merge", "pixels")  # only patches stand there
DERIVED = ("class_attention", "assignment", "sizes")  # shown beside the pass, which does not go through them
SCORE_ACTIONS = ("hide_keys", "hide_patches", "temperature", "without_sqrt_d")
POSITION_ACTIONS = ("remove_positions", "shuffle_positions")


def with_edit(trace: Trace | None, edit: Edit | None) -> Trace | None:
    """The trace as it is, or where there is something to change, one that changes the pass."""
    return EditedTrace(trace, edit) if edit is not None and edit.changes else trace


class EditedTrace(Trace):
    """Changes what a pass computes at each step, then shows it to the trace, if there is one."""

    def __init__(self, trace: Trace | None, edit: Edit):
        super().__init__("edited", gradients=trace is not None and trace.gradients)
        self.trace, self.edit = trace, edit
        self.applied: set[Change] = set()

    def begin(self, *, depth: int, offers: Iterable[str], layout: TokenLayout, places: tuple[Any, ...] = ()) -> None:
        offers = tuple(offers)
        editable = [kind for kind in offers if kind not in DERIVED]
        check_offered([c.kind for c in self.edit.changes if c.kind is not None], editable, "be edited at")
        for change in self.edit.changes:
            if change.layer is not None and not -depth <= change.layer < depth:
                raise UsageError(
                    f"{change.action}: layer {change.layer} does not exist: this model has layers 0 to {depth - 1} "
                    "(or -1, ...)."
                )
        if self.trace is not None:
            self.trace.begin(depth=depth, offers=offers, layout=layout, places=places)
        self.layout, self.places, self._depth = layout, places, depth
        self.applied.clear()

    def at(self, layer: int) -> LayerTrace | None:
        """None where a layer is neither edited nor traced."""
        traced = None if self.trace is None else self.trace.at(layer)
        changes = [
            c
            for c in self.edit.changes
            if c.action in POSITION_ACTIONS or c.layer is None or c.layer % self._depth == layer
        ]
        if not changes:
            return traced
        return LayerTrace(None if traced is None else self.trace, layer, edit=LayerEdit(self, changes, layer))

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Pick | None = None) -> Tensor:
        """A step outside the blocks."""
        value = LayerEdit(self, [c for c in self.edit.changes if c.layer is None], None).apply(kind, value)
        if self.trace is not None:
            self.trace.mark(kind, value)
        return value

    def finish(self) -> None:
        """Refuse changes that were not applied: the result would silently be that of the model as it is."""
        for change in self.edit.changes:
            if change in self.applied:
                continue
            if change.action in POSITION_ACTIONS:
                raise UsageError(
                    f"{change.action}: this model adds no positions of its own. (PVT v2 learns them by convolutions.)"
                )
            if change.action in SCORE_ACTIONS:
                raise UsageError(f"{change.action}: this model has no attention.")
            if change.layer is not None:
                raise UsageError(
                    f"layer {change.layer} has no {change.kind!r}: it stands in other layers, or in none: then leave "
                    f"out layer={change.layer}."
                )


class LayerEdit:
    """The changes to one layer (or to what stands outside the layers)."""

    def __init__(self, parent: EditedTrace, changes: Iterable[Change], layer: int | None):
        assert parent.layout is not None, "begin() comes first"
        self.parent, self.changes, self.layer = parent, tuple(changes), layer
        self.staged = bool(parent.places)  # tokens stand on other grids from stage to stage
        self.prefix = parent.places[layer].prefix if self.staged and layer is not None else len(parent.layout.prefix)
        rows, columns = parent.layout.grid
        self.tokens = None if self.staged else self.prefix + rows * columns  # at first; a reducer leaves fewer

    @property
    def changes_weights(self) -> bool:
        """Whether the attention weights must be written out."""
        return any(c.kind == "attention" for c in self.changes)

    def apply(
        self,
        kind: str,
        value: Tensor,
        heads: int | None = None,
        windows: int | None = None,
        uniform: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """The changed value. `heads`: how many stand side by side in it; `windows`: of an image, where attention runs
        in windows; `uniform`: attention weights that are equal for all keys.
        """
        for change in self.changes:
            if kind in ("position_embedding", "position_conv") and change.action in POSITION_ACTIONS:
                value = self._moved(change, kind, value)
            if change.kind != kind:
                continue
            self.parent.applied.add(change)
            if change.action == "uniform_attention":
                assert uniform is not None
                new = uniform()
            else:
                new = self._new(change, value, windows)
            places = self._places(change, value, heads, windows)
            value = new if places is None else torch.where(places, new, value)
        return value

    def _new(self, change: Change, value: Tensor, windows: int | None) -> Tensor:
        """What takes the place of a value, everywhere."""
        given = change.value
        match change.action:
            case "zero":
                return torch.zeros_like(value)
            case "scale":
                assert isinstance(given, float)
                return value * given
            case "mean" if given is None:
                return self._mean(change, value, windows)
            case _:
                assert isinstance(given, Tensor)
                fitting = self._fit(change, given, value, windows)
                return value + fitting if change.action == "add" else fitting

    def _mean(self, change: Change, value: Tensor, windows: int | None) -> Tensor:
        """Over the patches of the same image."""
        kind = change.kind
        if kind == "attention":
            raise UsageError("the mean of attention weights over tokens is none: use uniform_attention(...), or zero.")
        axis = 2 if kind in BY_HEAD else 1
        if value.ndim != axis + 2 or (value.ndim == 4 and kind not in BY_HEAD) or kind == "position_embedding":
            raise UsageError(f"{kind!r} has no patches to take the mean of: give the mean, mean({kind!r}, tensor).")
        if windows is not None:
            raise UsageError(f"{kind!r} stands in windows, some of which padding fills: use the mean of 'heads'.")
        prefix = 0 if kind in WITHOUT_PREFIX else self.prefix
        mean = value.narrow(axis, prefix, value.shape[axis] - prefix).mean(dim=axis, keepdim=True)
        return mean.expand_as(value)

    def _fit(self, change: Change, given: Tensor, value: Tensor, windows: int | None) -> Tensor:
        """A given tensor in the shape of the value; of windows as a Trace shows them, (B, h, windows, n, ...)."""
        given = given.to(value.device, value.dtype)
        if windows is not None and change.kind in BY_HEAD and given.ndim == value.ndim + 1:
            given = given.transpose(1, 2).flatten(0, 1)
        try:
            return given.expand_as(value)
        except RuntimeError:
            raise UsageError(
                f"{change.action} {change.kind!r}{self._at}: the given tensor is {tuple(given.shape)}, which does not "
                f"expand to {tuple(value.shape)}, the shape of this step here."
            ) from None

    @property
    def _at(self) -> str:
        return "" if self.layer is None else f" at layer {self.layer}"

    def _places(self, change: Change, value: Tensor, heads: int | None, windows: int | None) -> Tensor | None:
        """Where a change holds, as a mask that expands to the value; None: everywhere."""
        kind, mask = change.kind, None
        by_head = kind in BY_HEAD
        if change.tokens is not None:
            if windows is not None:
                raise UsageError(
                    f"{kind!r} stands in windows, where tokens have other numbers: leave out tokens, or edit 'norm1', "
                    "'heads' or 'tokens'."
                )
            axis = 2 if by_head else 1
            if value.ndim != axis + 2 or (value.ndim == 4 and not by_head):
                raise UsageError(f"{kind!r} holds no tokens, so leave out tokens={list(change.tokens)}.")
            self.check_tokens(change, value.shape[axis], change.tokens)
            mask = _chosen(change.tokens, value.shape[axis], value.device).view(*[1] * axis, -1, 1).squeeze(0)
        if change.heads is not None:
            if not by_head and heads is None:
                raise UsageError(
                    f"{kind!r} is not divided into heads: use 'heads', {', '.join(map(repr, BY_HEAD))}, or leave out "
                    f"heads={list(change.heads)}."
                )
            count = value.shape[1] if heads is None else heads
            chosen = self._heads(change, count, value.device)
            chosen = chosen.view(-1, 1, 1) if heads is None else chosen.repeat_interleave(value.shape[-1] // count)
            mask = chosen if mask is None else mask & chosen
        return mask

    def check_tokens(self, change: Change, count: int, tokens: Iterable[int]) -> None:
        """Refuse tokens that do not exist, and numbers that mean no patch any more."""
        before = 0 if change.kind in WITHOUT_PREFIX else self.prefix
        if self.tokens is not None:
            expected = self.tokens - (self.prefix if change.kind in WITHOUT_PREFIX else 0)
            if count != expected and max(tokens) >= before:
                raise UsageError(
                    f"{change.action}{self._at}: {count} of {expected} tokens are left here, so a token's number no "
                    "longer says which patch it is. Edit an earlier layer, leave out tokens, or the reducer."
                )
        if max(tokens) >= count:
            raise UsageError(
                f"{change.action}{self._at}: token {max(tokens)} does not exist: there are tokens 0 to {count - 1}."
            )

    def _heads(self, change: Change, count: int, device: torch.device) -> Tensor:
        assert change.heads is not None
        if max(change.heads) >= count:
            raise UsageError(
                f"{change.action}{self._at}: head {max(change.heads)} does not exist: there are heads 0 to {count - 1}."
            )
        return _chosen(change.heads, count, device)

    # ---- scores

    def scores(
        self, q: Tensor, keys: int, bias: Tensor | None, mask: Tensor | None, root: float | None, windows: int | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries (B, h, N, d), the bias that is part of the scores, and the mask that is not, changed so that the
        fused kernel gives the changed attention. `root`: sqrt(d), None where scores are not divided by it.
        """
        for change in self.changes:
            if change.action in POSITION_ACTIONS and bias is not None:
                bias = self._moved_bias(change, bias, windows)
            if change.action not in SCORE_ACTIONS:
                continue
            self.parent.applied.add(change)
            if change.action in ("hide_keys", "hide_patches"):
                mask = self._hide(change, q, keys, mask, windows)
                continue
            if change.action == "without_sqrt_d" and root is None:
                raise UsageError("without_sqrt_d: this model compares queries and keys by cosines, without sqrt(d).")
            factor = 1 / _number(change) if change.action == "temperature" else root
            assert factor is not None
            by_head = q.new_full((1, 1, 1), factor)
            if change.heads is not None:
                chosen = self._heads(change, q.shape[1], q.device).view(-1, 1, 1)
                by_head = torch.where(chosen, by_head, q.new_ones(()))  # (h, 1, 1)
            q = q * by_head
            if bias is not None and change.action == "temperature":
                bias = bias * by_head
        return q, bias, mask

    def _hide(self, change: Change, q: Tensor, keys: int, mask: Tensor | None, windows: int | None) -> Tensor:
        if self.staged:
            raise UsageError(
                f"{change.action}: keys stand in windows here, or are made of several tokens: use mask_patches(...)."
            )
        assert change.tokens is not None
        shift = self.prefix if change.action == "hide_patches" else 0
        tokens = tuple(token + shift for token in change.tokens)
        self.check_tokens(change, keys, tokens)
        hidden = _chosen(tokens, keys, q.device).view(1, 1, 1, -1)  # (1, 1, 1, M)
        if change.heads is not None:
            hidden = hidden & self._heads(change, q.shape[1], q.device).view(1, -1, 1, 1)
        new = q.new_zeros(hidden.shape).masked_fill(hidden, -math.inf)
        new = new if mask is None else new + mask
        if bool(torch.isneginf(new).all(dim=-1).any()):
            raise UsageError(f"{change.action}{self._at}: a token would have nothing left to look at.")
        return new

    # ---- positions

    def rope(self, rope: Rotary | None) -> Rotary | None:
        """Angles that turn queries and keys, moved or left out."""
        for change in self.changes:
            if change.action in POSITION_ACTIONS and rope is not None:
                self.parent.applied.add(change)
                if change.action == "remove_positions":
                    return None
                order = self._order(change, rope.cos.shape[-2], rope.cos.device)
                rope = rope._replace(cos=rope.cos.index_select(-2, order), sin=rope.sin.index_select(-2, order))
        return rope

    def _moved(self, change: Change, kind: str, table: Tensor) -> Tensor:
        """What is added to the tokens, (1, N, D)."""
        self.parent.applied.add(change)
        if change.action == "remove_positions":
            return torch.zeros_like(table)
        if kind == "position_conv":
            raise UsageError("shuffle_positions: a convolution tells where tokens stand; it can be removed only.")
        return table.index_select(1, self._order(change, table.shape[1], table.device))

    def _moved_bias(self, change: Change, bias: Tensor, windows: int | None) -> Tensor | None:
        """A bias by the offset of query and key, (1, h, N, N)."""
        self.parent.applied.add(change)
        if change.action == "remove_positions":
            return None
        if windows is not None:
            raise UsageError("shuffle_positions: positions inside windows can be removed only.")
        order = self._order(change, bias.shape[-1], bias.device)
        return bias.index_select(-2, order).index_select(-1, order)

    def _order(self, change: Change, count: int, device: torch.device) -> Tensor:
        """(N,): whose position each token gets."""
        generator = torch.Generator().manual_seed(int(_number(change)))
        patches = torch.randperm(count - self.prefix, generator=generator) + self.prefix
        return torch.cat([torch.arange(self.prefix), patches]).to(device)


def _chosen(numbers: Iterable[int], count: int, device: torch.device) -> Tensor:
    """(count,): True at these numbers."""
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[list(numbers)] = True
    return chosen.to(device)


def _number(change: Change) -> float:
    assert isinstance(change.value, int | float)
    return change.value
