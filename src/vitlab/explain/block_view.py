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
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.edit import Edit
from vitlab.layers.edited import edited
from vitlab.layers.trace import Trace
from vitlab.models.base import evaluation_mode
from vitlab.models.plain import PlainTransformer

OPTIONAL = ("norm1", "norm2")  # post-norm blocks have no norm at these places


@dataclass(frozen=True)
class BlockView:
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

    def arrays(self) -> dict[str, Tensor]:
        """By name, without what this model does not have."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@torch.no_grad()
def block_view(
    model: ModelOrName, image: Images, *, layer: int, head: int = 0, token: int = 0, edit: Edit | None = None
) -> BlockView:
    """`token`: a number in the token list, prefix tokens first. Layers and heads count from 0. `edit`: changes to the
    pass; of a dropped head, `mixed` is what it found and `heads` what is left of it.
    """
    model, x = _one_image(model, image)
    layer = check_layer(model, layer)
    block = cast("list[Block]", model.blocks)[layer]
    head = _check("head", head, block.attention.heads)
    kinds = ["tokens", "queries", "keys", "values", "attention", "heads", "proj", "after_attention", "fc1_pre", "fc1"]
    kinds += ["fc2", *(kind for kind in OPTIONAL if kind in model.traceable)]
    outside = [kind for kind in ("patch_embed", "prefix", "positions", "norm_pre") if kind in model.traceable]
    trace = Trace(*kinds, *outside, layers=[layer] if layer == 0 else [layer - 1, layer])
    pass_trace = edited(trace, edit) or trace
    with evaluation_mode(model):
        model(x, trace=pass_trace)
    before = trace[outside[-1]] if layer == 0 else trace["tokens", layer - 1]  # (1, N, D)
    token = _check("token", token, before.shape[1])
    here = lambda kind: wide(trace[kind, layer][0, token]) if kind in kinds else None
    q, k, v = (trace[kind, layer] for kind in ("queries", "keys", "values"))  # (1, h, N, d)
    at = pass_trace.at(layer)
    assert at is not None
    bias = _position_bias(model, x, before, layer)  # (1, h, N, N)
    scaled, bias, mask = at.edit_scores(q, k.shape[2], bias, None, block.attention.head_dim**0.5)
    added = bias if mask is None else mask if bias is None else bias + mask
    row = None if added is None else wide(added.expand(1, q.shape[1], q.shape[2], -1)[0, :, token])  # (h, N)
    scores = torch.einsum("hd,hnd->hn", wide(scaled[0, :, token]) * block.attention.scale, wide(k[0]))
    scores = scores if row is None else scores + row
    weights = wide(trace["attention", layer][0, :, token])  # (h, N)
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
def query_attention(model: ModelOrName, image: Images, token: int, edit: Edit | None = None) -> Tensor:
    """(L, h, N): where one token looks in every layer and head. No more than one layer's weights are held at once."""
    model, x = _one_image(model, image)
    rows, columns = model.layout(*x.shape[-2:]).grid
    token = _check("token", token, len(model.config.prefix) + rows * columns)
    trace = Trace("attention", reduce=lambda weights, _: wide(weights[:, :, token]))
    with evaluation_mode(model):
        model(x, trace=trace, edit=edit)
    return trace.stack("attention")[:, 0]


def _one_image(model: ModelOrName, image: Images) -> tuple[PlainTransformer, Tensor]:
    model = token_model(model)
    if not isinstance(model, PlainTransformer):
        raise UsageError(f"one token's way is shown of a plain ViT, and this is a {model.family}.")
    batch = as_batch(model, image)
    if len(batch) != 1:
        raise UsageError(f"one image is looked at, found {len(batch)}.")
    return model, batch.images


def _position_bias(model: PlainTransformer, x: Tensor, z: Tensor, layer: int) -> Tensor | None:
    """What the model adds to the scores of a layer by positions: (1, h, N, N)."""
    _, bias_at = model.attention_positions(model.layout(*x.shape[-2:]), None, z)
    return bias_at(layer)


def _check(what: str, number: int, count: int) -> int:
    if not -count <= number < count:
        raise UsageError(f"{what} {number} does not exist: there are {count}, 0 to {count - 1}.")
    return number % count


def _present(value: Tensor | None) -> Tensor:
    assert value is not None
    return value


def _factors(scale: torch.nn.Module) -> Tensor | None:
    return wide(scale.gamma.detach()) if isinstance(scale, LayerScale) else None
