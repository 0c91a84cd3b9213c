"""What the browser computes: functions of one image and the page's knobs, as modules that are exported to ONNX.

    InsideGraph            every number that the page shows of a forward pass
    HeatGraph              the maps of the methods that need gradients, for one class or sentence
    ReconstructionGraph    the pixels that an MAE paints, from the patches that are left visible
    TextGraph              sentences of a CLIP

The knobs are tensors where an Edit has numbers, because they are inputs of the graph: one file answers every edit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from vitlab.explain.methods import METHODS, SHOWN
from vitlab.layers.apply_edit import EditedTrace, LayerEdit
from vitlab.layers.attention import Heads
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.edit import Edit
from vitlab.layers.lora import merge_lora
from vitlab.layers.trace import LayerTrace, Pick, Trace
from vitlab.models.base import Network
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.plain import PlainTransformer
from vitlab.models.two_towers import TwoTowers

BEFORE = ("patch_embed", "prefix", "positions", "norm_pre")  # steps before the blocks
IN_BLOCKS = (  # stacked over layers
    *("norm1", "queries", "keys", "values", "attention", "heads", "proj", "after_attention"),
    *("norm2", "fc1_pre", "fc1", "fc2", "tokens"),
)
AFTER = ("norm",)
N = TypeVar("N", bound=Network)


class Knobs(NamedTuple):
    """What the page can change in a pass; `Knobs.neutral` changes nothing."""

    patch_factors: Tensor  # (patches,), of their embeddings: 0 masks a patch
    head_factors: Tensor  # (L, h), of each head's output
    score_factor: Tensor  # (1,), of the scores: 1 / temperature, times sqrt(d) where they are not divided by it
    position_factor: Tensor  # (1,): 0 removes positions
    position_order: Tensor  # (patches,), whose position each patch gets

    @classmethod
    def neutral(cls, encoder: PlainTransformer, size: tuple[int, int]) -> Knobs:
        rows, columns = encoder.layout(*size).grid
        heads = (len(encoder.blocks), encoder.config.heads)
        return cls(
            torch.ones(rows * columns), torch.ones(heads), torch.ones(1), torch.ones(1), torch.arange(rows * columns)
        )


class KnobTrace(EditedTrace):
    """An edited pass whose changes are tensors."""

    def __init__(self, trace: Trace | None, knobs: Knobs):
        super().__init__(trace, Edit())
        self.knobs = knobs

    def at(self, layer: int) -> LayerTrace:
        traced = self.trace if self.trace is not None and layer in self.trace.layers else None
        return LayerTrace(traced, layer, edit=LayerKnobs(self, (), layer))

    def mark(self, kind: str, value: Tensor, layer: int | None = None, pick: Pick | None = None) -> Tensor:
        if kind == "patch_embed":
            value = value * self.knobs.patch_factors[:, None]  # (1, patches, D)
        elif kind == "position_embedding":  # (1, prefix + patches, D)
            assert self.layout is not None
            prefix = len(self.layout.prefix)
            patches = value[:, prefix:].index_select(1, self.knobs.position_order)
            value = torch.cat([value[:, :prefix], patches], dim=1) * self.knobs.position_factor
        return super().mark(kind, value, layer, pick)


class LayerKnobs(LayerEdit):
    parent: KnobTrace

    def apply(self, kind: str, value: Tensor, heads: int | None = None, *more: Any, **named: Any) -> Tensor:
        if kind != "heads":
            return value
        assert self.layer is not None and heads is not None
        factors = self.parent.knobs.head_factors[self.layer]  # (h,)
        return value * factors.repeat_interleave(value.shape[-1] // heads)

    def scores(
        self, q: Tensor, keys: int, bias: Tensor | None, mask: Tensor | None, root: float | None, windows: int | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return q * self.parent.knobs.score_factor, bias, mask


class InsideGraph(nn.Module):
    """(1, C, H, W) and the knobs -> the tensors named in `outputs`, of one image; those of blocks as (L, ...)."""

    factors1: Tensor | None
    factors2: Tensor | None

    def __init__(self, model: Network):
        super().__init__()
        self.model = inference_copy(model)
        self.encoder = plain_encoder(self.model)
        offered = self.encoder.traceable
        self.before, self.in_blocks, self.after = (_in_both(kinds, offered) for kinds in (BEFORE, IN_BLOCKS, AFTER))
        blocks = cast("list[Block]", self.encoder.blocks)
        for name, scales in (("factors1", [b.scale1 for b in blocks]), ("factors2", [b.scale2 for b in blocks])):
            factors: list[Tensor] = [scale.gamma for scale in scales if isinstance(scale, LayerScale)]
            self.register_buffer(name, torch.stack(factors) if factors else None)  # (L, D)

    @property
    def scales(self) -> dict[str, Tensor]:
        """LayerScale's factors, where the model has them."""
        given = {"scale1": self.factors1, "scale2": self.factors2}
        return {name: factors for name, factors in given.items() if factors is not None}

    @property
    def outputs(self) -> list[str]:
        results = ["embedding"] if isinstance(self.model, TwoTowers) else []
        results = ["logits", "by_depth"] if self.encoder.config.classes else results
        return [*self.before, *self.in_blocks, *self.after, *self.scales, "features", *results]

    def forward(self, images: Tensor, *knobs: Tensor) -> tuple[Tensor, ...]:
        trace = Trace(*self.before, *self.in_blocks, *self.after)
        features, *results = self.results(images, KnobTrace(trace, Knobs(*knobs)), trace)
        values = [trace[kind][0] for kind in self.before]
        values += [torch.stack([trace[kind, layer][0] for layer in trace.layers]) for kind in self.in_blocks]
        values += [trace[kind][0] for kind in self.after]
        return (*values, *(factors.clone() for factors in self.scales.values()), features, *results)

    def results(self, images: Tensor, edited: Trace, trace: Trace) -> list[Tensor]:
        """What the network ends in: features (E,), then the embedding of a CLIP (E,) or logits (K,) and, after each
        block, the logits if the network ended there (L, K).
        """
        encoder = self.encoder
        tokens, _ = encoder.encode(images, trace=edited)
        features = encoder.forward_head(tokens, pre_logits=True)
        if isinstance(self.model, TwoTowers):
            return [features[0], _projected(self.model, features)[0]]
        if not encoder.config.classes:
            return [features[0]]
        ended = [z if encoder.norm is None else encoder.norm(z) for z in (trace["tokens", at] for at in trace.layers)]
        by_depth = torch.cat([encoder.forward_head(z) for z in ended])
        return [features[0], encoder.forward_head(tokens)[0], by_depth]


class HeatGraph(nn.Module):
    """(1, C, H, W), weights (K,) of logits (of a CLIP: of its embedding) and the knobs -> a map (h, w) per method."""

    def __init__(self, model: Network):
        super().__init__()
        self.model = inference_copy(model)
        offered = scored(self.model)
        self.outputs = [name for name in SHOWN if METHODS[name].by_class and METHODS[name].supports(offered)]

    def forward(self, images: Tensor, weights: Tensor, *knobs: Tensor) -> tuple[Tensor, ...]:
        model = scored(self.model, weights, Knobs(*knobs))
        return tuple(METHODS[name](model, images, 0)[0] for name in self.outputs)

    def traced(self, *example: Tensor) -> nn.Module:
        """The same with the gradients written out as operations: torch.export does not take them itself."""
        module = make_fx(lambda *inputs: self(*inputs))(*example)
        merge_equal_operations(module)
        return module


def merge_equal_operations(module: GraphModule) -> None:
    """Compute once what several methods compute: each runs the whole network. Operations that write into a tensor, or
    make one of nothing, stay.
    """
    first_nodes: dict[Any, Node] = {}
    for node in list(module.graph.nodes):
        if node.op == "get_attr":
            key = ("constant", id(getattr(module, node.target)))
        elif node.op == "call_function" and node.all_input_nodes and not _writes(node.target):
            key = (node.target, str(node.args), str(node.kwargs))  # nodes are written by their names, which are unique
        else:
            continue
        first = first_nodes.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            module.graph.erase_node(node)
    module.recompile()


def _writes(operation: Any) -> bool:
    return isinstance(operation, torch._ops.OpOverload) and operation._schema.is_mutable


def scored(model: Network, weights: Tensor | float = 1.0, knobs: Knobs | None = None) -> PlainTransformer:
    """The encoder with one output: the weighted sum of what the model gives, under the knobs. So the methods of
    vitlab.explain explain a class, or a sentence, that is an input of the graph.
    """
    encoder = plain_encoder(model)

    class Scored(type(encoder)):
        def forward(self, images: Tensor, *, trace: Trace | None = None, **options: Any) -> Tensor:
            output = super().forward(images, trace=trace if knobs is None else KnobTrace(trace, knobs), **options)
            if isinstance(model, TwoTowers):
                output = model.scale * _projected(model, output)
            return (output * weights).sum(dim=-1, keepdim=True)  # (1, 1)

    twin = copy.copy(encoder)  # with the same weights
    twin.__class__ = Scored
    twin.config, twin.labels = replace(encoder.config, classes=1), None
    return twin


class ReconstructionGraph(nn.Module):
    """(1, C, H, W) and the numbers of the visible patches (n,) -> what an MAE paints (C, H, W), normalised like the
    image, and the squared error of every patch (patches,), as its loss counts it.
    """

    outputs = ("painted", "errors")

    def __init__(self, model: MaskedAutoencoder):
        super().__init__()
        self.model = inference_copy(model)

    def forward(self, images: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        model, keep = self.model, visible[None]
        latent, _ = model.encoder.encode(images, keep=keep)  # (1, 1 + n, D)
        prediction = model.decoder(latent, keep, model.encoder.layout(*images.shape[-2:]))  # (1, patches, P*P*C)
        errors = (prediction - model.target(images)).square().mean(dim=-1)
        return model.to_images(prediction, images)[0], errors[0]


class TextGraph(nn.Module):
    """Token numbers (1, context) of a CLIP -> the unit-length embedding of the sentence (E,)."""

    outputs = ("sentence",)

    def __init__(self, model: TwoTowers):
        super().__init__()
        self.model = inference_copy(model)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model.encode_text(ids)[0]


def plain_encoder(model: Network) -> PlainTransformer:
    assert isinstance(model.encoder, PlainTransformer)
    return model.encoder


def inference_copy(model: N) -> N:
    """In evaluation mode, adapters merged, attention written out so that its weights are computed once."""
    copied = merge_lora(copy.deepcopy(model)).eval().requires_grad_(False)
    for module in copied.modules():
        if isinstance(module, Heads):
            module.path = "explicit"
    return copied


def _in_both(kinds: Iterable[str], offered: Iterable[str]) -> list[str]:
    offered = set(offered)
    return [kind for kind in kinds if kind in offered]


def _projected(model: TwoTowers, features: Tensor) -> Tensor:
    """Features of the image tower -> the unit-length embedding that texts are compared with."""
    x = features if model.image_projection is None else model.image_projection(features)
    return nn.functional.normalize(x, dim=-1)
