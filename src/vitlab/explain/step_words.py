"""What each step of a forward pass does, in words (`vitlab inspect`) and in equations (a walk).

Both are read off the layers of the model itself: a convolutional stem is called that, LayerScale is named where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import nn

from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.stage_words import stage_meaning
from vitlab.layers.attention import Attention
from vitlab.layers.block import Block, LayerScale
from vitlab.layers.patches import ConvStem, PatchEmbed
from vitlab.layers.trace import TokenLayout
from vitlab.models.base import Network
from vitlab.models.hierarchy import Hierarchy
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.plain import PlainTransformer
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
    return _words(model, layout).get(kind, "")


def _words(model: Network, layout: TokenLayout | None) -> dict[str, str]:
    words = dict(BEYOND_BLOCKS)
    encoder = model.encoder
    if isinstance(encoder.config, ResNetConfig):
        words |= _resnet_words(encoder.config)
    if isinstance(encoder, PlainTransformer) and layout is not None:
        words |= _plain_words(encoder, layout)
    if isinstance(model, MaskedAutoencoder):
        words |= {DECODER + kind: text for kind, text in _decoder_words(model).items()}
    if isinstance(model, TwoTowers):
        words |= {TEXT + kind: text for kind, text in _text_words(model).items()}
    return words


# ---------------------------------------------------------------- parts of a network


def stem_kind(model: PlainTransformer | PromptClassifier) -> StemKind:
    """How the image becomes tokens: patch (one matrix), conv (a small stack of convolutions) or other (a ResNet)."""
    embed = model.patch_embed
    return "patch" if isinstance(embed, PatchEmbed) else "conv" if isinstance(embed, ConvStem) else "other"


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


# ---------------------------------------------------------------- words


def _block_words(parts: BlockParts, sizes: dict[str, Any], positions: str = "", sees: str = "") -> dict[str, str]:
    """sizes: width, heads, head_dim, hidden, mlp; positions: what attention is told of them; sees: which keys."""
    width, heads, d, mlp = (sizes[key] for key in ("width", "heads", "head_dim", "mlp"))
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
        "fc1": f"{mlp}: {width} to {sizes['hidden']} channels",
        "fc2": f"{mlp}: back to {width}",
        "tokens": parts.residual(3),
    }


def _plain_words(encoder: PlainTransformer, layout: TokenLayout) -> dict[str, str]:
    c, parts = encoder.config, BlockParts.of(encoder.blocks)
    rows, columns = c.grid
    resized = "" if layout.grid == c.grid else f", resized from {rows} x {columns}"
    added = c.position_kind.split(" + ")[0]  # rotary and relative ones are no part of the sum
    pooling = POOLING[c.pool_kind].format(norm=norm_name(encoder.head_norm))
    return {
        **_block_words(parts, _sizes(c), c.position_kind),
        **({} if stem_kind(encoder) == "other" else {"patch_embed": _stem_words(encoder)}),  # that has its own words
        "prefix": str(layout),
        "positions": f"+ {POSITIONS.get(added, added)} positions{resized} (eq. 1)",
        "norm_pre": f"{norm_name(encoder.norm_pre)} before the blocks",
        "norm": f"final {norm_name(encoder.norm)} (eq. 4)",
        "pool": f"{pooling}: one vector per image",
        "head": _head_words(encoder),
    }


def _sizes(config: Any) -> dict[str, Any]:
    sizes = {"width": config.width, "heads": config.heads, "head_dim": config.head_width}
    return {**sizes, "hidden": config.mlp_hidden, "mlp": config.mlp_name}


def _stem_words(encoder: PlainTransformer) -> str:
    P, width, embed = encoder.config.patch_size, encoder.config.width, encoder.patch_embed
    if isinstance(embed, ConvStem):
        count = sum(isinstance(layer, nn.Conv2d) for layer in embed.convs)
        return f"convolutional stem: {count} x (3x3 by 2, norm, relu), 1x1; {width} numbers for each {P}x{P} pixels"
    before = "" if embed.norm_in is None else f" ({norm_name(embed.norm_in)} first)"
    after = "" if embed.norm_out is None else f", then {norm_name(embed.norm_out)}"
    return f"every {P}x{P} patch{before} becomes a token of {width} numbers{after} (eq. 1)"


def _head_words(encoder: PlainTransformer) -> str:
    scores = f"one score for each of {encoder.config.classes} classes"
    if isinstance(encoder, VisionTransformer) and encoder.head_distill is not None:
        return f"{scores}: the mean of two heads, for the class and the distillation token"
    return scores


def _decoder_words(model: MaskedAutoencoder) -> dict[str, str]:
    stack, P = model.config.decoder_stack, model.config.patch_size
    return {
        **_block_words(BlockParts.of(model.decoder.blocks), _sizes(stack)),
        "embed": f"to the decoder's width, {stack.width}",
        "positions": f"+ {POSITIONS[stack.position_kind]} positions",
        "norm": norm_name(model.decoder.norm),
        "pixels": f"{P}x{P} pixels for every patch",
    }


def _text_words(model: TwoTowers) -> dict[str, str]:
    c, text = model.config.text, model.text
    sizes = {"width": c.width, "heads": c.heads, "head_dim": c.width // c.heads, "hidden": c.mlp_hidden}
    positions = "learned" if text.learns_positions else "computed"
    return {
        **_block_words(BlockParts.of(text.blocks), {**sizes, "mlp": c.mlp_name}, sees=f", {text.sees}"),
        "embed": f"every token of the text becomes {c.width} numbers",
        "positions": f"+ {positions} positions",
        "norm": f"final {norm_name(text.norm)}",
    }


def _resnet_words(config: ResNetConfig) -> dict[str, str]:
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


# ---------------------------------------------------------------- equations

PREFIX_LETTERS = {"class": "x_class", "distillation": "x_distill", "register": "x_register"}
NORM_LETTERS = {"LayerNorm": "LN", "RMSNorm": "RMS"}


def equations(model: PlainTransformer | PromptClassifier) -> dict[str, str]:
    """What each step of a walk computes, in the letters of ViT (arXiv:2010.11929), where it has them."""
    c, parts = model.config, BlockParts.of(model.blocks)
    ln = NORM_LETTERS[parts.norm_name]
    stem = {"patch": _projection(model.patch_embed), "conv": "stem(x)", "other": "ResNet(x)"}[stem_kind(model)]
    letters = [PREFIX_LETTERS[name] for name in dict.fromkeys(c.prefix)]
    tokens = f"[{'; '.join([*letters, stem])}]" if letters else stem
    made = [kind for kind in ("patch_embed", "prefix", "positions") if kind in model.traceable][-1]  # z₀
    stated = f"{stem}: 3×3 convolutions of stride 2, then 1×1" if stem_kind(model) == "conv" else stem
    start = {"patch_embed": stated, "prefix": tokens, "positions": f"{tokens} + E_pos"}
    last = "z_L" if model.norm is None else f"{ln}(z_L)"
    return {
        "picture": "x ∈ R^(H×W×C)",
        "patches": "x_p ∈ R^(N×(P²·C))",
        **{kind: f"z₀ = {text}" if kind == made else text for kind, text in start.items()},
        "norm_pre": f"z₀ ← {NORM_LETTERS[norm_name(model.norm_pre)]}(z₀)",
        "blocks": ";  ".join(_halves(parts, ln)),
        "norm": f"{ln}(z_L)",
        "pool": _pool_equation(model, last),
        "pre_logits": "tanh(y W)",
        "head": "(y_class W₁ + b₁ + y_distill W₂ + b₂) / 2" if "distillation" in c.prefix else "y W + b",
        "softmax": "exp(sᵢ) / Σⱼ exp(sⱼ)",
    }


def _projection(embed: nn.Module) -> str:
    """x_p E, with the norms that may stand around it."""
    if not isinstance(embed, PatchEmbed):
        return "x_p E"
    product = "x_p E" if embed.norm_in is None else f"{NORM_LETTERS[norm_name(embed.norm_in)]}(x_p) E"
    return product if embed.norm_out is None else f"{NORM_LETTERS[norm_name(embed.norm_out)]}({product})"


def _halves(parts: BlockParts, ln: str) -> Iterator[str]:
    """Eqs. 2 and 3 as this network has them."""
    for result, layer, z, factor in (("z'ₗ", "MSA", "zₗ₋₁", "λ₁"), ("zₗ", "MLP", "z'ₗ", "λ₂")):
        branch = f"{layer}({ln}({z}))" if parts.norm == "pre" else f"{layer}({z})"
        branch = f"{ln}({branch})" if parts.norm == "branch" else branch
        total = f"{factor} ⊙ {branch} + {z}" if parts.scaled else f"{branch} + {z}"
        yield f"{result} = {ln}({total})" if parts.norm == "post" else f"{result} = {total}"


def _pool_equation(model: PlainTransformer | PromptClassifier, last: str) -> str:
    """`last`: the tokens after the blocks, z_L or LN(z_L)."""
    of_class, mean = last.replace("z_L", "z_L⁰"), f"mean of {last} over the patches"
    return {
        "class": f"y = {of_class}",
        "class_norm": f"y = LN({of_class})",
        "mean": f"y = {mean}",
        "mean_norm": f"y = LN({mean})",
        "class_mean": f"y = [{of_class}; {mean}]",
        "attention": f"y = attention of a learned query over {last}",
    }[model.config.pool_kind]
