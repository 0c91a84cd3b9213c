"""What each step of a forward pass computes, in the letters of ViT (arXiv:2010.11929): the equations of a walk.

Read off the layers of the model itself, as in step_meanings.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.step_meanings import BlockParts, norm_name, stem_kind
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.layers.patches import PatchEmbed
from vitlab.models.plain import PlainTransformer

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
    stated = f"{stem}: {_convolutions(model)}" if stem_kind(model) == "conv" else stem
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


def _convolutions(model: PlainTransformer | PromptClassifier) -> str:
    if isinstance(model.patch_embed, HybridStem):
        return "2×2 whitening, then 3×3 convolutions and pooling by 2"
    return "3×3 convolutions of stride 2, then 1×1"


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
