"""Reducer: the seam for everything that shortens the token list (merging, pruning, dropping) inside a block.

An encoder calls it between attention and MLP, where ToMe and EViT stand. A step that removes nothing is skipped, so
keeping every token changes nothing, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.layers.block import Block, run
from vitlab.layers.trace import FROM_HEADS, LayerTrace

SEEN = (
    "norm1",
    "qkv",
    "heads",
    "proj",
    "attention_out",
    "after_attention",
    *FROM_HEADS,
)  # what a block has shown before it reduces


@dataclass
class Reduction:
    """What one step leaves behind."""

    tokens: Tensor  # (B, M, D), M < N, prefix tokens first
    assignment: Tensor  # (B, N) whole numbers: the new place of each old token, -1 where it was dropped
    sizes: Tensor  # (B, M), how many patches each token stands for
    key_bias: Tensor | None = None  # (B, M), added to every later Q K^T; ToMe's log size


class Reducer(Protocol):
    """One method of making fewer tokens; `needs` names trace kinds ("keys", "class_attention") it scores tokens by.

    One that computes with them, and does not only choose by them, has `gradients = True`: then training goes through.
    """

    needs: tuple[str, ...]

    def removes(self, layer: int, depth: int, tokens: int, prefix: int) -> int:
        """How many tokens this layer takes away; 0 skips the layer."""
        ...

    def reduce(self, tokens: Tensor, remove: int, prefix: int, sizes: Tensor, seen: dict[str, Tensor]) -> Reduction: ...


class Reducing:
    """One forward pass under a Reducer: runs each block with it, and keeps account of where every token went."""

    def __init__(self, reducer: Reducer, *, depth: int, prefix: int, offers: Iterable[str]):
        available = [kind for kind in offers if kind in SEEN]
        for kind in reducer.needs:
            if kind not in available:
                raise UsageError(
                    f"{type(reducer).__name__} needs {kind!r}, which this model cannot give where tokens are reduced. "
                    f"It can give: {', '.join(available)}."
                )
        self.reducer, self.depth, self.prefix = reducer, depth, prefix
        self.sizes: Tensor | None = None  # (B, M); None until something was removed
        self.assignment: Tensor | None = None  # (B, N at the start): where each first token is now, -1 dropped
        self.key_bias: Tensor | None = None

    def run(self, block: Block, z: Tensor, layer: int, trace: LayerTrace | None, recompute: bool) -> Tensor:
        """One block; `recompute` as in layers.block.run."""
        mask = None if self.key_bias is None else self.key_bias[:, None, None, :]  # (B, 1, 1, M)
        remove = self.reducer.removes(layer, self.depth, z.shape[1], self.prefix)
        if remove == 0:
            return run(block, z, None, None, mask, trace, recompute=recompute)
        patches = z.shape[1] - self.prefix
        if not 0 < remove <= patches:
            raise UsageError(
                f"{type(self.reducer).__name__} removes {remove} tokens at layer {layer}, where {patches} patches are "
                f"left (prefix tokens stay): it must be 0 to {patches}."
            )
        if self.sizes is None or self.assignment is None:
            self.sizes = z.new_ones(z.shape[:2])
            self.assignment = torch.arange(z.shape[1], device=z.device).expand(z.shape[:2])
        step = partial(self._step, block, remove, trace or LayerTrace(None, layer))
        state = (z, mask, self.sizes, self.assignment)
        z, self.sizes, self.assignment, self.key_bias = run(step, *state, recompute=recompute)
        return z

    def _step(
        self,
        block: Block,
        remove: int,
        trace: LayerTrace,
        z: Tensor,
        mask: Tensor | None,
        sizes: Tensor,
        assignment: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """A block that reduces: its tokens, their sizes, where each first token is now, and the next key bias."""
        gradients = getattr(self.reducer, "gradients", False)  # a user's reducer need not have it
        seen = trace.for_reducer(self.reducer.needs, gradients)
        account: list[tuple[Tensor, Tensor, Tensor | None]] = []

        def reduce(z: Tensor) -> Tensor:
            reduction = self.reducer.reduce(z, remove, self.prefix, sizes, seen.seen)
            moved = reduction.assignment.gather(1, assignment.clamp(min=0))
            places = torch.where(assignment < 0, assignment, moved)
            seen.mark("assignment", places)
            seen.mark("sizes", reduction.sizes)
            account.append((reduction.sizes, places, reduction.key_bias))
            return reduction.tokens

        z = block(z, None, None, mask, seen, reduce)
        return z, *account[0]
