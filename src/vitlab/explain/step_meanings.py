"""What each step of a forward pass does, in words, for `vitlab inspect`.

Read off the layers of the model itself: a convolutional stem is called that, LayerScale is named where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from torch import nn

from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.stage_meanings import stage_meaning
from vitlab.layers.attention import Attention
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.layers.patches import ConvStem, PatchEmbed
from vitlab.layers.trace import TokenLayout
from vitlab.models.base import Network
from vitlab.models.hierarchy import Hierarchy
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.plain import PlainConfig, PlainTransformer
from vitlab.models.resnet import ResNetConfig
from vitlab.models.two_towers import TwoTowers
from vitlab.models.vit import VisionTransformer

DECODER, TEXT = "decoder.", "text."  # prefixes of the steps of MAE's decoder and of a text tower
StemKind = Literal["patch", "conv", "other"]

POSITIONS = {"learned": "learned", "sincos": "2-D sin-cos"}
POOLING = {
    "class": "the class token",
    "class_norm": "the class token, through {norm}",
    "mean": "the mean of all patches",
    "mean_norm": "the mean of all patches, through {norm}",
    "class_mean": "the class token and the mean of all patches, side by side",
    "attention": "a learned query looks at every patch",
}
RESNET_STEMS = {
    "imagenet": "7x7 convolution by 2, batch norm, relu, 3x3 max-pooling by 2",
    "deep": "three 3x3 convolutions with batch norm and relu, the first by 2; 3x3 max-pooling by 2",
}
BEYOND_BLOCKS = {  # steps that no block and no stem has
    "visible": "only the patches that are not hidden go on",
    "pre_logits": "tanh layer before the classifier",
    "decoder.masked": "a mask token wherever a patch is hidden",
    "projection": "into the space that images and texts share",
    "text.projection": "into the space that images and texts share",
    "text.end": "the token that ends the text: one vector per text",
    "text.last": "the last token, often padding: one vector per text",
    "text.mean": "the mean of all tokens but padding: one vector per text",
    "logits": "scale x cosine (SigLIP: + bias), every image with every text",
}


def meaning(model: Network, kind: str, layer: int | None, size: tuple[int, int], layout: TokenLayout | None) -> str:
    """What the step that Trace calls `kind` does, for images of this size; a paper's own words come first."""
    if isinstance(model, Hierarchy):
        return stage_meaning(model, kind, layer, size)
    if kind in model.meanings:
        return model.meanings[kind]
    if kind in model.encoder.meanings:
        return model.encoder.meanings[kind]
    return _meanings(model, layout).get(kind, "")


def _meanings(model: Network, layout: TokenLayout | None) -> dict[str, str]:
    meanings = dict(BEYOND_BLOCKS)
    encoder = model.encoder
    if isinstance(encoder.config, ResNetConfig):
        meanings |= _resnet_meanings(encoder.config)
    if isinstance(encoder, PlainTransformer) and layout is not None:
        meanings |= _plain_meanings(encoder, layout)
    if isinstance(model, MaskedAutoencoder):
        meanings |= {DECODER + kind: text for kind, text in _decoder_meanings(model).items()}
    if isinstance(model, TwoTowers):
        meanings |= {TEXT + kind: text for kind, text in _text_meanings(model).items()}
    return meanings


# ---------------------------------------------------------------- parts of a network


def stem_kind(model: PlainTransformer | PromptClassifier) -> StemKind:
    """How the image becomes tokens: patch (one matrix), conv (a stack of convolutions) or other (a ResNet)."""
    embed = model.patch_embed
    return "patch" if isinstance(embed, PatchEmbed) else "conv" if isinstance(embed, ConvStem | HybridStem) else "other"


def norm_name(module: nn.Module | None) -> str:
    return "RMSNorm" if isinstance(module, nn.RMSNorm) else "LayerNorm"


@dataclass(frozen=True)
class BlockParts:
    """What the blocks of one network are made of."""

    norm: str  # where the norms stand: pre, post or branch
    norm_name: str
    scaled: bool  # LayerScale
    qk_norm: bool
    inner_norm: bool

    @classmethod
    def of(cls, blocks: nn.Module) -> BlockParts:
        block = cast("list[Block]", blocks)[0]
        attention = cast(Attention, block.attention)
        return cls(
            block.norm,
            norm_name(block.norm1),
            isinstance(block.scale1, LayerScale),
            attention.q_norm is not None,
            attention.inner_norm is not None,
        )

    def residual(self, equation: int) -> str:
        """How the result of attention (eq. 2) or MLP (eq. 3) joins the tokens."""
        steps = [self.norm_name] * (self.norm == "branch") + ["LayerScale"] * self.scaled + ["+ residual"]
        if self.norm == "post":
            return ", ".join([*steps, self.norm_name])
        return ", ".join(steps) + f" (eq. {equation})" * (self.norm == "pre")


# ---------------------------------------------------------------- meanings


class BlockSizes(NamedTuple):
    width: int  # D
    heads: int  # h
    head_width: int  # d
    hidden: int  # channels inside the MLP
    mlp: str  # its name

    @classmethod
    def of(cls, c: PlainConfig) -> BlockSizes:
        return cls(c.width, c.heads, c.head_width, c.mlp_hidden, c.mlp_name)


def _block_meanings(parts: BlockParts, sizes: BlockSizes, positions: str = "", sees: str = "") -> dict[str, str]:
    """positions: kind of positions that attention uses; sees: which keys each query sees."""
    width, heads, d, hidden, mlp = sizes
    bias = " + B" if "relative" in positions else ""
    done = ["normalised"] * parts.qk_norm + ["turned by position"] * ("rotary" in positions)
    with_ = f", q and k {' and '.join(done)}" if done else ""
    with_ += ", B by relative position" if bias else ""
    return {
        "norm1": parts.norm_name,
        "qkv": f"queries, keys, values: 3 x {heads} heads x {d}",
        "heads": f"softmax(q k^T / sqrt({d}){bias}) v{with_}{sees}; {heads} heads side by side",
        "proj": f"{'LayerNorm, ' if parts.inner_norm else ''}heads mixed",
        "after_attention": parts.residual(2),
        "norm2": parts.norm_name,
        "fc1": f"{mlp}: {width} to {hidden} channels",
        "fc2": f"{mlp}: back to {width}",
        "tokens": parts.residual(3),
    }


def _plain_meanings(encoder: PlainTransformer, layout: TokenLayout) -> dict[str, str]:
    c, parts = encoder.config, BlockParts.of(encoder.blocks)
    rows, columns = c.grid
    resized = "" if layout.grid == c.grid else f", resized from {rows} x {columns}"
    added = c.position_kind.split(" + ")[0]  # rotary and relative ones are no part of the sum
    pooling = POOLING[c.pool_kind].format(norm=norm_name(encoder.head_norm))
    return {
        **_block_meanings(parts, BlockSizes.of(c), c.position_kind),
        **({} if stem_kind(encoder) == "other" else {"patch_embed": _stem_meaning(encoder)}),  # that has its own words
        "prefix": str(layout),
        "positions": f"+ {POSITIONS.get(added, added)} positions{resized} (eq. 1)",
        "norm_pre": f"{norm_name(encoder.norm_pre)} before the blocks",
        "norm": f"final {norm_name(encoder.norm)} (eq. 4)",
        "pool": f"{pooling}: one vector per image",
        "head": _head_meaning(encoder),
    }


def _stem_meaning(encoder: PlainTransformer) -> str:
    P, width, embed = encoder.config.patch_size, encoder.config.width, encoder.patch_embed
    if isinstance(embed, ConvStem):
        count = sum(isinstance(layer, nn.Conv2d) for layer in embed.convs)
        return f"convolutional stem: {count} x (3x3 by 2, norm, relu), 1x1; {width} numbers for each {P}x{P} pixels"
    if isinstance(embed, HybridStem):
        count = len(embed.batch_norms)
        return (
            f"convolutional stem: 2x2 whitening, {count} x (3x3, norm, gelu), every other one with 2x2 max-pooling; "
            f"{width} numbers for each {P}x{P} pixels"
        )
    before = "" if embed.norm_in is None else f" ({norm_name(embed.norm_in)} first)"
    after = "" if embed.norm_out is None else f", then {norm_name(embed.norm_out)}"
    return f"every {P}x{P} patch{before} becomes a token of {width} numbers{after} (eq. 1)"


def _head_meaning(encoder: PlainTransformer) -> str:
    scores = f"one score for each of {encoder.config.classes} classes"
    if isinstance(encoder, VisionTransformer) and encoder.head_distill is not None:
        return f"{scores}: the mean of two heads, for the class and the distillation token"
    return scores


def _decoder_meanings(model: MaskedAutoencoder) -> dict[str, str]:
    stack, P = model.config.decoder_stack, model.config.patch_size
    return {
        **_block_meanings(BlockParts.of(model.decoder.blocks), BlockSizes.of(stack)),
        "embed": f"to the decoder's width, {stack.width}",
        "positions": f"+ {POSITIONS[stack.position_kind]} positions",
        "norm": norm_name(model.decoder.norm),
        "pixels": f"{P}x{P} pixels for every patch",
    }


def _text_meanings(model: TwoTowers) -> dict[str, str]:
    c, text = model.config.text, model.text
    sizes = BlockSizes(c.width, c.heads, c.width // c.heads, c.mlp_hidden, c.mlp_name)
    positions = "learned" if text.learns_positions else "computed"
    return {
        **_block_meanings(BlockParts.of(text.blocks), sizes, sees=f", {text.sees}"),
        "embed": f"every token of the text becomes {c.width} numbers",
        "positions": f"+ {positions} positions",
        "norm": f"final {norm_name(text.norm)}",
    }


def _resnet_meanings(config: ResNetConfig) -> dict[str, str]:
    return {
        "stem": RESNET_STEMS.get(config.stem, "3x3 convolution, batch norm, relu"),
        "conv1": "convolution, batch norm, relu",
        "conv2": f"convolution, batch norm{', relu' if config.block == 'bottleneck' else ''}",
        "conv3": "convolution, batch norm",
        "shortcut": "the input, made to fit by a 1x1 convolution and batch norm",
        "block": "+ residual, relu (eqs. 1-2)",
        "pool": "the mean over the map: one vector per image",
        "head": f"one score for each of {config.classes} classes",
    }
