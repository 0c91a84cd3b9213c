"""One token's way through one block, number by number: eqs. 2-3 and 5-8 of ViT (arXiv:2010.11929).

view = block_view("bundled:cifar10", "cat.jpg", layer=2, head=0, token=27)
view.scores                       # (N,), q . k / sqrt(d) with every key
view.weights                      # (N,), their softmax
query_attention(model, image, 27) # (L, h, N), where this token looks in every layer and head
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import cast

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, as_batch, check_layer, token_model, wide
from vitlab.explain.walk import ForwardView, forward_view
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.edit import Edit
from vitlab.layers.trace import LayerTrace, Trace
from vitlab.models.base import evaluation_mode
from vitlab.models.plain import PlainTransformer
from vitlab.tables import Table, Tabular, by

OPTIONAL = ("norm1", "norm2")  # post-norm blocks have no norm at these places


@dataclass(frozen=True)
class BlockView(Tabular):
    """What a block computes for one query token, in the order of the pass. N tokens, prefix tokens first; D wide;
    h heads of d channels; M hidden channels.
    """

    input: Tensor  # (D,), z of the layer before
    norm1: Tensor | None  # (D,); None in a post-norm block
    q: Tensor  # (d,), of the chosen head
    keys: Tensor  # (N, d)
    values: Tensor  # (N, d)
    bias: Tensor | None  # (N,), added to the scaled products: by positions, or a mask; None where there is none
    scores: Tensor  # (N,), q . k / sqrt(d), and the bias
    weights: Tensor  # (N,), softmax of the scores
    mixed: Tensor  # (d,), values weighted and summed: this head's output
    weights_by_head: Tensor  # (h, N), of all heads
    heads: Tensor  # (h * d,), all heads' outputs side by side
    proj: Tensor  # (D,)
    scale1: Tensor | None  # (D,), LayerScale of the attention branch
    after_attention: Tensor  # (D,)
    norm2: Tensor | None  # (D,)
    fc1_pre: Tensor  # (M,), before the activation; of a gated MLP (2M,), gate and value
    fc1: Tensor  # (M,)
    fc2: Tensor  # (D,)
    scale2: Tensor | None  # (D,)
    output: Tensor  # (D,), z of this layer

    def table(self) -> Table:
        rows = [
            [name, by(tuple(value.shape)), *(f"{float(one):.4g}" for one in (value.min(), value.max(), value.norm()))]
            for name, value in self.arrays().items()
        ]
        titles = ["step", "shape", "smallest", "largest", "length"]
        return Table(titles, rows, titles[1:], ["One token's way through a block"])

    def arrays(self) -> dict[str, Tensor]:
        """By name, without what this model does not have."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@torch.no_grad()
def block_view(
    model: ModelOrName,
    image: Images,
    *,
    layer: int,
    head: int = 0,
    token: int = 0,
    edit: Edit | None = None,
    view: ForwardView | None = None,
) -> BlockView:
    """`token`: a number in the token list, prefix tokens first. Layers and heads count from 0. `edit`: changes to the
    pass; of a dropped head, `mixed` is what it computed and `heads` what is left of it. `view`: `forward_view` of the
    same image and edit, where there is one already; then only this block is run.
    """
    model, x = _one_image(model, image)
    layer = check_layer(model, layer)
    block = cast("list[Block]", model.blocks)[layer]
    head = _check("head", head, block.attention.heads)
    view = view or forward_view(model, x, edit)
    before = view.tokens_before(layer)  # (1, N, D)
    token = _check("token", token, before.shape[1])
    kinds = ["tokens", "values", "heads", "proj", "after_attention", "fc1_pre", "fc1", "fc2"]
    kinds += [kind for kind in OPTIONAL if kind in model.traceable]
    trace = Trace(*kinds, layers=[layer])
    at, layout = _layer_trace(model, x, trace, edit, layer), model.layout(*x.shape[-2:])
    rope, bias_at = model.attention_positions(layout, None, before)
    with evaluation_mode(model):
        block(before, rope, bias_at(layer), None, at)
    here = lambda kind: wide(trace[kind, layer][0, token]) if kind in kinds else None
    q, k, v = view.trace["queries", layer], view.trace["keys", layer], trace["values", layer]  # (1, h, N, d)
    scores, row = _scores(model, view, layer, token, at)
    weights = _weights(model, x, scores, layer, token, edit, at)
    return BlockView(
        input=wide(before[0, token]),
        norm1=here("norm1"),
        q=wide(q[0, head, token]),
        keys=wide(k[0, head]),
        values=wide(v[0, head]),
        bias=None if row is None else row[head],
        scores=scores[head],
        weights=weights[head],
        mixed=weights[head] @ wide(v[0, head]),
        weights_by_head=weights,
        heads=_present(here("heads")),
        proj=_present(here("proj")),
        scale1=_factors(block.scale1),
        after_attention=_present(here("after_attention")),
        norm2=here("norm2"),
        fc1_pre=_present(here("fc1_pre")),
        fc1=_present(here("fc1")),
        fc2=_present(here("fc2")),
        scale2=_factors(block.scale2),
        output=_present(here("tokens")),
    )


@torch.no_grad()
def query_attention(
    model: ModelOrName, image: Images, token: int, edit: Edit | None = None, *, view: ForwardView | None = None
) -> Tensor:
    """(L, h, N): where one token looks in every layer and head. `view`: as in `block_view`; then no block is run."""
    model, x = _one_image(model, image)
    view = view or forward_view(model, x, edit)
    token = _check("token", token, view.tokens_before(0).shape[1])
    rows = []
    for layer in range(len(model.blocks)):
        at = _layer_trace(model, x, Trace("tokens"), edit, layer)
        rows.append(_weights(model, x, _scores(model, view, layer, token, at)[0], layer, token, edit, at))
    return torch.stack(rows)


def _layer_trace(model: PlainTransformer, x: Tensor, trace: Trace, edit: Edit | None, layer: int) -> LayerTrace:
    """What the block of this layer is given in a pass with this trace and this edit."""
    pass_trace = with_edit(trace, edit) or trace
    pass_trace.begin(depth=len(model.blocks), offers=model.traceable, layout=model.layout(*x.shape[-2:]))
    at = pass_trace.at(layer)
    assert at is not None
    return at


def _scores(
    model: PlainTransformer, view: ForwardView, layer: int, token: int, at: LayerTrace
) -> tuple[Tensor, Tensor | None]:
    """What the softmax reads in each head for one query (h, N), and what of it was added to the products."""
    attention = cast("list[Block]", model.blocks)[layer].attention
    q, k = view.trace["queries", layer], view.trace["keys", layer]  # (1, h, N, d)
    assert view.trace.layout is not None
    _, bias_at = model.attention_positions(view.trace.layout, None, view.tokens_before(layer))
    q, bias, mask = at.edit_scores(q, k.shape[2], bias_at(layer), None, attention.head_dim**0.5)
    added = bias if mask is None else mask if bias is None else bias + mask
    row = None if added is None else wide(added.expand(1, q.shape[1], q.shape[2], -1)[0, :, token])  # (h, N)
    scores = torch.einsum("hd,hnd->hn", wide(q[0, :, token]) * attention.scale, wide(k[0]))
    return (scores if row is None else scores + row), row


def _weights(
    model: PlainTransformer, x: Tensor, scores: Tensor, layer: int, token: int, edit: Edit | None, at: LayerTrace
) -> Tensor:
    """(h, N). An edit of the weights themselves is followed by running the pass."""
    if not at.needs_explicit:
        return scores.softmax(dim=-1)
    trace = Trace("attention", layers=[layer])
    with evaluation_mode(model):
        model(x, trace=trace, edit=edit)
    return wide(trace["attention", layer][0, :, token])


def _one_image(model: ModelOrName, image: Images) -> tuple[PlainTransformer, Tensor]:
    model = token_model(model)
    if not isinstance(model, PlainTransformer):
        raise UsageError(f"one token's way is shown of a plain ViT, and this is a {model.family}.")
    batch = as_batch(model, image)
    if len(batch) != 1:
        raise UsageError(f"one image is looked at, found {len(batch)}.")
    return model, batch.images


def _check(what: str, number: int, count: int) -> int:
    if not -count <= number < count:
        raise UsageError(f"{what} {number} does not exist: there are {count}, 0 to {count - 1}.")
    return number % count


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _factors(scale: torch.nn.Module) -> Tensor | None:
    return wide(scale.gamma.detach()) if isinstance(scale, LayerScale) else None
