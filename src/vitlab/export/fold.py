"""Fold linear operations next to a matrix product into its weights: the same function with less work.

    LN(x) * g + b, then W x + c      ->   W' = W diag(g),  c' = c + W b
    gamma * (W x + c)  (LayerScale)  ->   W' = diag(gamma) W
    q k^T / sqrt(d)                  ->   the rows of W that make q, divided by sqrt(d)
    convolution, then batch norm     ->   one convolution

Equal to rounding. For inference only: a Trace of the folded network shows other intermediate values.
"""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from vitlab.layers.attention import Attention, QVLinear
from vitlab.layers.block import MLP, Block, LayerScale, SwiGLU
from vitlab.layers.lora import merge_lora
from vitlab.layers.windows import WindowAttention
from vitlab.models.base import Network
from vitlab.models.hierarchy import GridBlock
from vitlab.models.resnet import ConvNorm
from vitlab.models.vit import VisionTransformer

N = TypeVar("N", bound=Network)


@torch.no_grad()
def fold(model: N) -> N:
    """A folded copy in evaluation mode, its adapters merged; the model stays as it is."""
    copied = merge_lora(copy.deepcopy(model)).eval().requires_grad_(False)
    for module in list(copied.modules()):
        if isinstance(module, Block):
            _fold_block(module)
        elif isinstance(module, GridBlock) and module.pre_norm and isinstance(module.mlp, MLP):
            _norm_into(module.norm2, module.mlp.fc1)  # not norm1: windows are zero-padded after it
        elif isinstance(module, ConvNorm) and isinstance(module.norm, nn.BatchNorm2d):
            module.conv, module.norm = fuse_conv_bn_eval(module.conv, module.norm), nn.Identity()  # type: ignore
    for module in copied.modules():
        if isinstance(module, WindowAttention) or (isinstance(module, Attention) and module.q_norm is None):
            _scale_into_queries(module)
    return copied


def _fold_block(block: Block) -> None:
    if isinstance(block.attention.qkv, QVLinear):
        block.attention.qkv = block.attention.qkv.as_linear()
    if block.norm == "pre":
        _norm_into(block.norm1, block.attention.qkv)
        if isinstance(block.mlp, MLP | SwiGLU):
            _norm_into(block.norm2, block.mlp.fc1)
    block.scale1 = _scale_into(block.scale1, block.attention.proj)
    block.scale2 = _scale_into(block.scale2, block.mlp.fc2)


@torch.no_grad()
def without_layer_scale(model: VisionTransformer) -> VisionTransformer:
    """The same function as a ViT without LayerScale, as in the paper; the model stays as it is."""
    folded = copy.deepcopy(model)
    for block in folded.blocks:
        assert isinstance(block, Block)
        block.scale1 = _scale_into(block.scale1, block.attention.proj)
        block.scale2 = _scale_into(block.scale2, block.mlp.fc2)
    unscaled = type(model)(model.config.with_options(layer_scale=0.0))
    unscaled.load_state_dict(folded.state_dict())
    unscaled.preprocess, unscaled.labels, unscaled.card = model.preprocess, model.labels, model.card
    return unscaled.train(model.training)


def _scale_into(scale: LayerScale | nn.Identity, layer: nn.Linear) -> nn.Identity:
    """Multiply a LayerScale into the layer before it; what is left of it is the identity."""
    if isinstance(scale, nn.Identity):
        return scale
    layer.weight.mul_(scale.gamma[:, None])
    if layer.bias is not None:
        layer.bias.mul_(scale.gamma)
    return nn.Identity()


def _norm_into(norm: nn.LayerNorm | nn.RMSNorm, layer: nn.Linear) -> None:
    if norm.weight is None:
        return
    if isinstance(norm, nn.LayerNorm):
        shift = layer.weight.double() @ norm.bias.double()
        before = layer.bias.double() if layer.bias is not None else 0.0
        layer.bias = nn.Parameter((before + shift).to(layer.weight.dtype), requires_grad=False)
        norm.bias = None  # type: ignore[assignment]
    layer.weight.mul_(norm.weight)
    norm.weight = None  # type: ignore[assignment]
    norm.elementwise_affine = False


def _scale_into_queries(attention: Attention | WindowAttention) -> None:
    rows = attention.heads * attention.head_dim  # q is first
    for part in (attention.qkv.weight, attention.qkv.bias):
        if isinstance(part, Tensor):
            part[:rows].mul_(attention.scale)
    attention.scale = 1.0
