"""Words and equations of the steps: what they say is computed, and compared with what the model does."""

# ruff: noqa: E501  one network, one line

import re

import pytest
import torch
from torch import nn

import vitlab
from vitlab.explain.equations import equations
from vitlab.explain.step_meanings import stem_kind
from vitlab.layers.patches import patchify
from vitlab.layers.trace import Trace

SMALL = dict(image_size=(8, 12), patch_size=4, width=24, depth=2, heads=3, classes=5, channels=2)
CASES = {
    "plain": {},
    "conv stem, LayerScale, mean": dict(stem="conv", layer_scale=0.3, class_token=False, pooling="mean"),
    "post-norm, attention": dict(norm="post", positions="relative", pooling="attention"),
    "no positions, mean_norm": dict(positions="none", class_token=False, pooling="mean_norm", layer_scale=0.2),
    "patch norms, class_mean": dict(patch_norms=True, pooling="class_mean", norm_pre=True),
    "two heads": dict(distill_token=True, positions="sincos"),
    "post-norm and LayerScale": dict(norm="post", layer_scale=0.4, pooling="class_norm"),
}


def build(**options):
    torch.manual_seed(1)
    model = vitlab.create("vit_tiny", **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def evaluate(equation: str, names: dict) -> torch.Tensor:
    """The right side of an equation as Python: [a; b] -> cat(a, b), λ₁ ⊙ y -> λ₁ * y, and letters of the paper."""
    text = equation.rpartition(" = ")[2].partition(": ")[0]  # what follows a colon is words
    text = re.sub(r"mean of (.+?) over the patches", r"mean(\1)", text)
    text = re.sub(r"attention of a learned query over (\S+)", r"query(\1)", text)
    text = re.sub(r"\[([^\[\]]+)\]", lambda m: f"cat({m[1].replace(';', ',')})", text)
    text = text.replace("⊙", "*").replace("x_p E", "E(x_p)").replace("LN(x_p) E", "E(LN_in(x_p))")
    text = text.replace("LN(E(LN_in(x_p)))", "LN_out(E(LN_in(x_p)))")
    letters = {"z'ₗ": "zm", "zₗ₋₁": "z", "z_L⁰": "zL0", "λ₁": "l1", "λ₂": "l2", "W₁": "W1", "W₂": "W2"}
    for letter, name in letters.items():
        text = text.replace(letter, name)
    return eval(text, {}, names)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_equations_compute_what_the_model_does(options):
    model = build(**options)
    x = torch.randn(2, 2, 8, 12)
    steps = [kind for kind in model.traceable if kind in ("patch_embed", "prefix", "positions", "norm_pre", "norm")]
    trace = Trace(*steps, "tokens", *(kind for kind in ("pool", "head") if kind in model.traceable))
    written, embed, prefix = equations(model), model.patch_embed, len(model.config.prefix)
    with torch.no_grad():
        model(x, trace=trace)
        expand = lambda token: None if token is None else token.expand(2, -1, -1)
        names = {
            "x": x,
            "x_p": patchify(x, 4),
            "E": lambda p: nn.functional.linear(p, embed.proj.weight.flatten(1), embed.proj.bias),
            "stem": lambda x: embed.proj(embed.convs(x)).flatten(2).mT,
            "cat": lambda *parts: torch.cat(parts, dim=1 if parts[0].ndim == 3 else -1),
            "x_class": expand(model.class_token),
            "x_distill": expand(model.distill_token),
            "E_pos": None if model.positions is None else model.positions((2, 3), like=x),
        }
        if stem_kind(model) == "patch":
            names |= {"LN_in": embed.norm_in, "LN_out": embed.norm_out}
        z = x
        for kind in ("patch_embed", "prefix", "positions"):
            if kind in model.traceable:
                z = evaluate(written[kind], names)
                torch.testing.assert_close(z, trace[kind])
        z = z if model.norm_pre is None else model.norm_pre(z)
        first, second = written["blocks"].split(";  ")
        _, bias_at = model.attention_positions(model.layout(8, 12), None, z)
        for layer, block in enumerate(model.blocks):
            names |= {"z": z, "LN": block.norm1, "MSA": lambda y, b=block, n=layer: b.attention(y, None, bias_at(n))}
            names |= {"l1": getattr(block.scale1, "gamma", None), "l2": getattr(block.scale2, "gamma", None)}
            names["zm"] = evaluate(first, names)
            names |= {"LN": block.norm2, "MLP": block.mlp}
            z = evaluate(second, names)
            torch.testing.assert_close(z, trace["tokens", layer])
        if "pool" in model.traceable:
            final = model.norm if model.norm is not None else model.head_norm
            names |= {"z_L": z, "zL0": z[:, 0], "LN": final}
            names |= {"mean": lambda z: z[:, prefix:].mean(1), "query": lambda z: model.pool(z[:, prefix:])}
            torch.testing.assert_close(evaluate(written["pool"], names), trace["pool"])
            names |= {"y": trace["pool"], "W": model.head.weight.T, "b": model.head.bias}
            names["head"] = evaluate(written["head"].replace("y W", "y @ W"), names)
        else:
            y = model.norm(z)
            both = written["head"].replace(" W", " @ W").replace("b₁", "b1").replace("b₂", "b2")
            names |= {"y_class": y[:, 0], "W1": model.head.weight.T, "b1": model.head.bias, "W₁": None}
            names |= {"y_distill": y[:, 1], "W2": model.head_distill.weight.T, "b2": model.head_distill.bias}
            names["head"] = evaluate(both, names)
        torch.testing.assert_close(names["head"], trace["head"])


def words(model) -> dict[str, str]:
    return {step.name.replace("blocks.0.", ""): step.meaning for step in vitlab.inspect(model).steps}


def test_a_network_that_is_not_the_papers_is_described_as_it_is():
    """A convolutional stem, no class token, LayerScale, the mean of the patches."""
    model = build(**CASES["conv stem, LayerScale, mean"])
    said, has = words(model), model.config
    convolutions = [m for m in model.patch_embed.modules() if isinstance(m, nn.Conv2d) and m.stride == (2, 2)]
    stem = f"convolutional stem: {len(convolutions)} x (3x3 by 2, norm, relu), 1x1"
    assert said["patch_embed"] == f"{stem}; {has.width} numbers for each 4x4 pixels"
    assert "prefix" not in said and said["positions"] == "+ learned positions (eq. 1)"
    assert said["after_attention"] == "LayerScale, + residual (eq. 2)"
    assert said["tokens"] == "LayerScale, + residual (eq. 3)"
    assert said["pool"] == "the mean of all patches: one vector per image"
    written = equations(model)
    assert "x_class" not in "".join(written.values()) and written["positions"] == "z₀ = stem(x) + E_pos"


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("vit_tiny", SMALL, {"patch_embed": "every 4x4 patch becomes a token of 24 numbers (eq. 1)"}),
        ("vit_tiny", SMALL, {"after_attention": "+ residual (eq. 2)", "pool": "the class token: one vector per image"}),
        ("vit_tiny", {**SMALL, "norm": "post"}, {"tokens": "+ residual, LayerNorm"}),
        ("vit_tiny", {**SMALL, "positions": "sincos"}, {"positions": "+ 2-D sin-cos positions (eq. 1)"}),
        ("vit_tiny", {**SMALL, "distill_token": True}, {"head": "one score for each of 5 classes: the mean of two heads, for the class and the distillation token"}),
        ("vit_tiny", {**SMALL, "patch_norms": True}, {"patch_embed": "every 4x4 patch (LayerNorm first) becomes a token of 24 numbers, then LayerNorm (eq. 1)"}),
        ("vit_tiny", {**SMALL, "qk_norm": True, "positions": "rotary"}, {"attention.heads": "softmax(q k^T / sqrt(8)) v, q and k normalised and turned by position; 3 heads side by side"}),
        ("beit_digits", {}, {"attention.heads": "softmax(q k^T / sqrt(16) + B) v, B by relative position; 4 heads side by side"}),
        ("aimv2_digits", {}, {"patch_embed": "every 2x2 patch becomes a token of 64 numbers, then RMSNorm (eq. 1)", "norm1": "RMSNorm", "norm": "final RMSNorm (eq. 4)"}),
        ("pe_digits", {}, {"pool": "a learned query looks at every token: one vector per image"}),
        ("eva02_clip_digits", {}, {"attention.proj": "LayerNorm, heads mixed"}),
        ("clip_digits", {}, {"text.end": "the token that ends the text: one vector per text", "projection": "into the space that images and texts share"}),
        ("mae_digits", {}, {"decoder.masked": "a mask token wherever a patch is hidden", "decoder.positions": "+ 2-D sin-cos positions"}),
        ("vit_base_r50_s16", {}, {"patch_embed": "a ResNet; every patch of its map becomes a token (sec. 3.1)"}),
    ],
)  # fmt: skip
def test_words_name_what_the_network_is_made_of(name, options, expected):
    said = words(vitlab.create(name, **options) if options else name)
    assert {key: said[key] for key in expected} == expected
