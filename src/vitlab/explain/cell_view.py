"""One number of an open block as the sum that it is: inputs times weights, plus a bias.

cell = cell_view("bundled:cifar10", "cat.jpg", layer=2, token=27, step="fc1_pre", channel=5)
cell.inputs @ cell.weights + cell.bias        # the number itself: block_view(...).fc1_pre[5]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.block_view import BlockView, block_view
from vitlab.explain.inputs import Images, check_layer, token_model, wide
from vitlab.explain.walk import ForwardView
from vitlab.layers.block import Block, SwiGLU
from vitlab.layers.edit import Edit
from vitlab.models.plain import PlainTransformer
from vitlab.tables import Table, Tabular

THIRDS = ("q", "k", "v")  # of the matrix that makes all three
LISTED = 10  # products in the table


@dataclass(frozen=True)
class CellView(Tabular):
    inputs: Tensor  # (n,), what the matrix reads of this token
    weights: Tensor  # (n,), its row for this number
    bias: float

    @property
    def value(self) -> float:
        return float(self.inputs @ self.weights) + self.bias

    def table(self) -> Table:
        products = self.inputs * self.weights
        rows = [
            [str(i + 1), *(f"{float(values[i]):.4f}" for values in (self.inputs, self.weights, products))]
            for i in products.abs().argsort(descending=True)[:LISTED].tolist()
        ]
        titles = ["channel", "input", "weight", "product"]
        notes = [f"Sum of all {len(products)} products and the bias {self.bias:.4f}: {self.value:.4f}"]
        return Table(titles, rows, titles, ["The largest products"], notes=notes)


@torch.no_grad()
def cell_view(
    model: ModelOrName,
    image: Images,
    *,
    layer: int,
    token: int,
    step: str,
    channel: int,
    edit: Edit | None = None,
    view: ForwardView | None = None,
) -> CellView:
    """`step`: q, k, v (of all heads, one after another), proj, fc1_pre or fc2; `channel`: which of its numbers, from 0.
    `edit` and `view` as in `block_view`.
    """
    model = token_model(model)
    inside = block_view(model, image, layer=layer, token=token, edit=edit, view=view)
    assert isinstance(model, PlainTransformer)
    block = cast("list[Block]", model.blocks)[check_layer(model, layer)]
    if step in ("q", "k") and "rotary" in model.config.position_kind:
        raise UsageError(f"{step} is rotated by its position here, so it is no product of one matrix.")
    matrix, x = _product(block, inside, step)
    outputs = wide(matrix(torch.cat([torch.eye(len(x)), torch.zeros(1, len(x))]).to(inside.input)))  # (n + 1, out)
    count = outputs.shape[1] // (len(THIRDS) if step in THIRDS else 1)
    if not 0 <= channel < count:
        raise UsageError(f"channel {channel} does not exist: {step} has {count}, 0 to {count - 1}.")
    column = outputs[:, channel + (count * THIRDS.index(step) if step in THIRDS else 0)]
    return CellView(wide(x), column[:-1] - column[-1], float(column[-1]))


def _product(block: Block, inside: BlockView, step: str) -> tuple[torch.nn.Module, Tensor]:
    """The matrix that makes this step's numbers, and what it reads."""
    attention, mlp = block.attention, block.mlp
    first = inside.input if inside.norm1 is None else inside.norm1
    second = inside.after_attention if inside.norm2 is None else inside.norm2
    if step in THIRDS and attention.q_norm is None:
        return attention.qkv, first
    if step == "proj" and attention.inner_norm is None:
        return attention.proj, inside.heads
    if step == "fc1_pre":
        return mlp.fc1, second
    if step == "fc2" and not (isinstance(mlp, SwiGLU) and mlp.norm is not None):
        return mlp.fc2, inside.fc1
    raise UsageError(f"{step!r} is no product of one matrix here: q, k, v, proj, fc1_pre and fc2 can be.")
