"""Direct logit attribution: the share of every head, MLP, embedding and source token in one logit, by addition.

    result = attribution("bundled:cifar10", "cat.jpg")
    result.heads[0]                            # (L, h): share of each head in the logit of the class
    result.total[0], result.logit[0]           # equal: the shares sum to the logit

What the head reads is a sum: the embedding plus what every attention layer and MLP added. The last norm (and a CLIP's
division by the length of its embedding) is linear once its statistics are fixed at their actual values, so the logit is
the sum of what each summand gives by itself (Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021).
A head's share is direct: what later layers made of it counts as theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.inputs import Images, TokenModel, run_trace
from vitlab.explain.relevance import Target, class_numbers, classifier, target_parts
from vitlab.explain.stages import Stages, heads_at, last_stage
from vitlab.layers.attention import Attention
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.trace import Trace
from vitlab.models.base import class_labels, evaluation_mode
from vitlab.models.clip import CLIPVision
from vitlab.models.hierarchy import GridBlock, Hierarchy
from vitlab.models.plain import PlainTransformer
from vitlab.models.vit import VisionTransformer
from vitlab.tables import Table, Tabular

ADDED = ("heads", "proj", "values", "attention_out", "after_attention", "mlp_out", "tokens")
BEFORE_BLOCKS = ("norm_pre", "positions", "prefix", "patch_embed")  # the last of these enters the first block


@dataclass
class Attribution(Tabular):
    """Shares in the logit of each image's class. `layers` are all, or in stages (Swin, PVT, Twins) those of the last
    one, where `embedding` is what entered that stage.
    """

    target: list[int]
    logit: Tensor  # (B,)
    layers: list[int]
    heads: Tensor  # (B, layers, h)
    attention_bias: Tensor  # (B, layers): biases between the heads and the sum
    mlps: Tensor  # (B, layers)
    embedding: Tensor  # (B,): patches and prefix tokens
    positions: Tensor  # (B,): position embeddings, where they are added without a norm after them; otherwise 0
    constant: Tensor  # (B,): biases of the norms and of the head
    sources: Tensor  # (B, layers, h, N): each head's share by the token it looked at; padding of windows is left out
    prefix: int  # of these N, tokens before the patches
    grid: tuple[int, int]
    labels: list[str]  # of all classes

    def table(self) -> Table:
        images = [self.parts(i) for i in range(len(self.target))]
        titles = ["part", *(self.labels[number] for number in self.target)]
        rows = [[name, *(f"{parts[name]:+.4f}" for parts in images)] for name in images[0]]
        total = ["logit", *(f"{value:+.4f}" for value in self.total.tolist())]
        return Table(titles, rows, titles[1:], ["Shares in the logit"], total, prose=titles[:1])

    def parts(self, image: int) -> dict[str, float]:
        """Named shares of one image, in the order of the pass; they sum to its logit. Layers count from 1 in names."""
        parts = {"embedding": float(self.embedding[image])}
        if float(self.positions[image]):
            parts["positions"] = float(self.positions[image])
        for place, layer in enumerate(self.layers):
            attention = self.heads[image, place].sum() + self.attention_bias[image, place]
            parts |= {f"attention {layer + 1}": float(attention), f"MLP {layer + 1}": float(self.mlps[image, place])}
        return {**parts, "biases at the end": float(self.constant[image])}

    @property
    def total(self) -> Tensor:
        """(B,): the sum of all shares, which is the logit."""
        layers = self.heads.sum((1, 2)) + self.attention_bias.sum(1) + self.mlps.sum(1)
        return layers + self.embedding + self.positions + self.constant

    @property
    def patches(self) -> Tensor:
        """(B, grid_h, grid_w): what heads of all layers took from each patch."""
        return self.sources[..., self.prefix :].sum((1, 2)).unflatten(1, self.grid)


@torch.no_grad()
def attribution(model: ModelOrName, images: Images, target: Target = None, *, batch_size: int = 8) -> Attribution:
    """Direct logit attribution for `target` (default: each image's top class). In float64 beside the network's pass."""
    model = classifier(model)
    parts: list[Attribution] = []
    for batch, classes in target_parts(model, images, target, batch_size):
        with evaluation_mode(model):
            parts.append(_attribute(model, batch, classes))
    first = parts[0]
    joined = {
        name: torch.cat([getattr(part, name) for part in parts]).cpu()
        for name, value in vars(first).items()
        if isinstance(value, Tensor)
    }
    numbers = [number for part in parts for number in part.target]
    return Attribution(**{**vars(first), **joined, "target": numbers})


@dataclass
class Direction:
    """An affine function of tokens: sum over tokens of g . z, plus a constant."""

    g: Tensor  # (B, N, D)
    constant: Tensor  # (B,)

    def of(self, z: Tensor) -> Tensor:
        """(B, N, D) -> (B,)"""
        return (self.g * z.double()).sum((1, 2))

    def before(self, norm: nn.Module | None, x: Tensor) -> Direction:
        """The same function of the input of a norm, whose statistics stay those of x."""
        if norm is None:
            return self
        x, g = x.double(), self.g
        weight = cast(Tensor, norm.weight).double()
        if isinstance(norm, nn.RMSNorm):
            eps = torch.finfo(cast(Tensor, norm.weight).dtype).eps if norm.eps is None else norm.eps
            return Direction(g * weight / (x.square().mean(-1, keepdim=True) + eps).sqrt(), self.constant)
        assert isinstance(norm, nn.LayerNorm)
        scaled = g * weight
        centred = scaled - scaled.mean(-1, keepdim=True)  # the norm subtracts the mean of x
        deviation = (x.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        return Direction(centred / deviation, self.constant + (g * norm.bias.double()).sum((1, 2)))


def _attribute(model: TokenModel, images: Tensor, target: Target) -> Attribution:
    layers = last_stage(model)
    staged = isinstance(model, Hierarchy)
    kinds = [kind for kind in (*ADDED, *_entering(model, layers[0])) if kind in model.traceable]
    trace = Trace(*dict.fromkeys(kinds), layers=layers)  # what stands before a stage is shown at its first block
    logits = model(images, trace=trace)
    numbers = class_numbers(model, logits, target)  # (B,)
    last = trace["tokens", layers[-1]]
    direction = _reading(model, last, numbers)
    B, depth, h = len(images), len(layers), heads_at(model, layers[-1])
    zero = last.new_zeros(B, dtype=torch.float64)
    heads, bias, mlps = (
        zero[:, None, None].repeat(1, depth, h),
        zero[:, None].repeat(1, depth),
        zero[:, None].repeat(1, depth),
    )
    positions, to_heads = zero, dict[int, Tensor]()
    entering = _entering_tokens(model, trace, layers[0])
    for place, layer in reversed(list(enumerate(layers))):
        block = cast("Block | GridBlock", model.blocks[layer])
        if ("position_conv", layer) in trace:  # Twins adds it between two blocks
            positions = positions + direction.of(trace["position_conv", layer])
        post = isinstance(block, Block) and block.norm == "post"
        if post:
            direction = direction.before(block.norm2, trace["after_attention", layer] + trace["mlp_out", layer])
        mlps[:, place] = direction.of(trace["mlp_out", layer])
        if post:
            z = trace["tokens", layer - 1] if place else entering
            direction = direction.before(block.norm1, z + trace["attention_out", layer])
        g, constant = _to_heads(block, direction.g, trace, layer)
        by_head = torch.unflatten(g * trace["heads", layer].double(), -1, (h, -1))  # (B, N, h, d)
        heads[:, place], bias[:, place], to_heads[layer] = by_head.sum((1, 3)), constant, g
    table = None
    if not staged and model.norm_pre is None and model.positions is not None:
        table = trace["position_embedding"]
    elif ("position_embedding", layers[0]) in trace:  # PVT
        table = trace["position_embedding", layers[0]]
    if table is not None:
        positions, entering = positions + direction.of(table), entering - table
    sources = _sources(model, images, trace, layers, to_heads)
    prefix, grid = len(model.config.prefix if not staged else model.prefix), _grid(model, images)
    logit = logits.gather(1, numbers[:, None])[:, 0]
    return Attribution(
        *(numbers.tolist(), logit.double(), list(layers), heads, bias, mlps),
        *(direction.of(entering), positions, direction.constant, sources, prefix, grid, class_labels(model)),
    )


# ---- from the logit back to the tokens of the last layer


def _reading(model: TokenModel, last: Tensor, numbers: Tensor) -> Direction:
    """The logit as a function of the tokens after the last block."""
    if isinstance(model, Hierarchy):
        norm = model.norm_after(len(model.stages) - 1)
        w, constant = _linear(cast(nn.Linear, model.head), numbers)
        shares = last.new_zeros(last.shape[1], dtype=torch.float64)
        shares[: 1 if model.prefix else None] = 1 if model.prefix else 1 / len(shares)
        return Direction(shares[:, None] * w[:, None], constant).before(norm, last)
    tower: Any = model.clip.image if isinstance(model, PromptClassifier) else model
    if tower.pool is not None or (isinstance(tower, VisionTransformer) and tower.pre_logits is not None):
        raise UsageError(
            "the head of this model is not linear (attention pooling, or a tanh layer), so its logit is no sum of "
            "shares: use ablate, or relevance."
        )
    normed = last if tower.norm is None else tower.norm(last)
    g = torch.zeros_like(last, dtype=torch.float64)
    if (
        isinstance(tower, VisionTransformer)
        and tower.head_distill is not None
        and not isinstance(model, PromptClassifier)
    ):
        (w, b), (v, c) = (
            _linear(cast(nn.Linear, tower.head), numbers),
            _linear(cast(nn.Linear, tower.head_distill), numbers),
        )
        g[:, 0], g[:, 1] = w / 2, v / 2  # the answer is the mean of the two heads
        return Direction(g, (b + c) / 2).before(tower.norm, last)
    w, constant = _head(model, tower, normed, numbers)
    pooling, prefix, D = tower.config.pool_kind, len(tower.config.prefix), last.shape[-1]
    if tower.head_norm is not None:
        pooled = normed[:, :1] if pooling == "class_norm" else normed[:, prefix:].mean(1, keepdim=True)
        read = Direction(w[:, None], constant).before(tower.head_norm, pooled)
        w, constant = read.g[:, 0], read.constant
    if pooling.startswith("class"):
        g[:, 0] = w[:, :D]
    if "mean" in pooling:
        g[:, prefix:] = w[:, None, -D:] / (last.shape[1] - prefix)
    return Direction(g, constant).before(tower.norm, last)


def _head(model: TokenModel, tower: PlainTransformer, normed: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The logit as a function of the pooled tokens: its direction (B, D), and a constant (B,)."""
    if not isinstance(model, PromptClassifier):
        w, constant = _linear(cast(nn.Linear, tower.head), numbers)
        return (w @ tower.projection.weight.double(), constant) if isinstance(tower, CLIPVision) else (w, constant)
    clip = model.clip
    pooled = tower.pooled(normed)  # (B, D)
    length = clip.project_image(pooled, normalise=False).double().norm(dim=-1, keepdim=True)  # stays as it is
    w = clip.scale.double() * cast(Tensor, model.sentences)[numbers].double() / length  # (B, E)
    constant = torch.zeros_like(w[:, 0]) if clip.bias is None else clip.bias.double().expand(len(w))
    if clip.image_projection is not None:
        if clip.image_projection.bias is not None:
            constant = constant + w @ clip.image_projection.bias.double()
        w = w @ clip.image_projection.weight.double()  # (B, D)
    return w, constant


def _linear(head: nn.Linear, numbers: Tensor) -> tuple[Tensor, Tensor]:
    return head.weight[numbers].double(), head.bias[numbers].double()


# ---- through one block's attention


def _to_heads(block: Block | GridBlock, g: Tensor, trace: Trace, layer: int) -> tuple[Tensor, Tensor]:
    """What the attention adds, as a function of its heads: the direction (B, N, hd), and the share of biases (B,)."""
    attention = cast(Any, block.attention)
    branch = Direction(g, g.new_zeros(len(g)))
    if isinstance(block, Block) and isinstance(block.scale1, LayerScale):
        branch = Direction(g * block.scale1.gamma.double(), branch.constant)
    in_branch = block.norm == "branch" if isinstance(block, Block) else not block.pre_norm
    if in_branch:
        branch = branch.before(block.norm1, trace["proj", layer])
    constant = branch.constant
    if attention.proj.bias is not None:
        constant = constant + (branch.g * attention.proj.bias.double()).sum((1, 2))
    inner = Direction(branch.g @ attention.proj.weight.double(), constant)
    norm = attention.inner_norm if isinstance(attention, Attention) else None
    inner = inner.before(norm, trace["heads", layer])
    return inner.g, inner.constant


def _sources(model: TokenModel, images: Tensor, trace: Trace, layers: range, to_heads: dict[int, Tensor]) -> Tensor:
    """(B, layers, h, N): sum over queries i of A_ij g_i . v_j, by token j."""
    stages = Stages(model, *images.shape[-2:]) if isinstance(model, Hierarchy) else None

    def by_source(A: Tensor, layer: int | None) -> Tensor:
        assert layer is not None
        g = torch.unflatten(to_heads[layer], -1, (A.shape[1], -1)).transpose(1, 2)  # (B, h, N, d)
        v = trace["values", layer].double()  # (B, h, M, d), in windows (B, h, windows, m, d)
        if stages is None:
            rows = g.abs().sum((0, 1, 3)) > 0  # those that the head reads
            return (A[:, :, rows].double() * (g[:, :, rows] @ v.mT)).sum(2)  # (B, h, N)
        at = stages.layers[layer]
        asking = at.at_queries(g.mT).movedim(2, -1)  # (B, h, windows, n, d)
        products = asking @ (v if at.in_windows else v[:, :, None]).mT  # (B, h, windows, n, m)
        ones = g.new_ones(*g.shape[:2], at.tokens)
        return at.look(ones, at.windowed(A).double() * products)

    seen = run_trace(model, images, "attention", layers=layers, reduce=by_source)
    return torch.stack([seen["attention", layer] for layer in layers], dim=1)


# ---- what enters the first of the layers


def _entering(model: TokenModel, first: int) -> list[str]:
    if isinstance(model, Hierarchy):
        return ["position_embedding", "position_conv", "positions", "merge" if first else "patch_embed"]
    return ["position_embedding", *BEFORE_BLOCKS]


def _entering_tokens(model: TokenModel, trace: Trace, first: int) -> Tensor:
    if not isinstance(model, Hierarchy):
        return trace[next(kind for kind in BEFORE_BLOCKS if kind in model.traceable)]
    if ("position_embedding", first) in trace:  # PVT adds them before its blocks
        return trace["positions", first]
    return trace["merge", first] if first else trace["patch_embed"]


def _grid(model: TokenModel, images: Tensor) -> tuple[int, int]:
    size = images.shape[-2:]
    return model.config.grids(*size)[-1] if isinstance(model, Hierarchy) else model.layout(*size).grid
