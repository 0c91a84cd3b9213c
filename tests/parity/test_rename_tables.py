"""Strangers' networks through rename tables, against the networks themselves: torch's own post-norm encoder with a norm
before the head, a CLIP of two towers, a plain timm trunk of a CLIP.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.errors import CheckpointError, UsageError

TOLERANCE = 1e-5
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def scattered(model: nn.Module) -> nn.Module:
    """Random biases and norms too: as they start, a swapped or forgotten one would not show."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.5)
    return model.eval()


# ---------------------------------------------------------------- torch's nn.TransformerEncoder


class Stranger(nn.Module):
    """A CIFAR-sized ViT as people write it: patches by a convolution, torch's encoder, a norm, a linear head."""

    def __init__(self, *, norm_first: bool, last_norm: bool):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.patches = nn.Conv2d(3, 32, 8, 8)
        self.cls = nn.Parameter(torch.randn(32))
        self.pos = nn.Parameter(torch.randn(17, 32))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.LayerNorm(32) if last_norm else nn.Identity()
        self.classify = nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.pos
        return self.classify(self.last(self.encoder(x))[:, 0])


TABLE = """
[model]
heads = 4
eps = 1e-5
activation = "gelu"
norm = "{norm}"
{more}

[preprocess]
mean = {mean}
std = {std}
interpolation = "bilinear"
how = "stretch"

[keys]
"patch_embed.proj.*" = "patches.*"
class_token = "cls"
"positions.table" = "pos"
"blocks.{{i}}.norm1.*" = "encoder.layers.{{i}}.norm1.*"
"blocks.{{i}}.attention.qkv.weight" = "encoder.layers.{{i}}.self_attn.in_proj_weight"
"blocks.{{i}}.attention.qkv.bias" = "encoder.layers.{{i}}.self_attn.in_proj_bias"
"blocks.{{i}}.attention.proj.*" = "encoder.layers.{{i}}.self_attn.out_proj.*"
"blocks.{{i}}.norm2.*" = "encoder.layers.{{i}}.norm2.*"
"blocks.{{i}}.mlp.fc1.*" = "encoder.layers.{{i}}.linear1.*"
"blocks.{{i}}.mlp.fc2.*" = "encoder.layers.{{i}}.linear2.*"
{last}
"head.*" = "classify.*"
"""


def write(folder: Path, stranger: nn.Module, norm: str, *, last: bool, more: str = "") -> tuple[Path, Path]:
    torch.save(stranger.state_dict(), folder / "stranger.pth")
    line = '"norm.*" = "last.*"' if last else ""
    text = TABLE.format(norm=norm, more=more, last=line, mean=list(MEAN), std=list(STD))
    (folder / "keys.toml").write_text(text, encoding="utf-8")
    return folder / "stranger.pth", folder / "keys.toml"


@pytest.mark.parametrize("last", [True, False], ids=["a norm before the head", "none"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_torchs_own_encoder_agrees(norm, last, tmp_path):
    stranger = scattered(Stranger(norm_first=norm == "pre", last_norm=last))
    more = 'final_norm = "no"' if norm == "pre" and not last else ""
    weights, table = write(tmp_path, stranger, norm, last=last, more=more)
    model, report = load_with_report(weights, map=table)
    assert report.notes == []  # the table says everything
    assert (model.norm is not None, model.config.final_norm) == (last, "yes" if last else "no")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8))
    pixels = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR), dtype=np.float32) / 255
    prepared = torch.from_numpy((pixels - MEAN) / STD).permute(2, 0, 1)[None].float()
    with torch.inference_mode():
        expected = stranger(prepared)[0]
        torch.testing.assert_close(model(prepared)[0], expected, atol=TOLERANCE, rtol=0)
    scores = dict(vitlab.predict(model, image, top=5)[0].scores)
    for index, chance in enumerate(expected.softmax(0).tolist()):
        assert scores[f"class {index}"] == pytest.approx(chance, abs=TOLERANCE)
    vitlab.save(model, tmp_path / "native")
    with torch.inference_mode():
        assert torch.equal(vitlab.load(tmp_path / "native")(prepared), model(prepared))


def test_a_norm_that_is_lost_is_asked_about(tmp_path):
    weights, table = write(tmp_path, Stranger(norm_first=True, last_norm=False), "pre", last=False)
    with pytest.raises(CheckpointError, match=r'norm.weight is missing.*final_norm="no"; .*norm="post"'):
        load_with_report(weights, map=table)
    weights, table = write(tmp_path, Stranger(norm_first=True, last_norm=True), "pre", last=True)
    with pytest.raises(CheckpointError, match=r"norm.bias is not part of this network"):
        load_with_report(weights, map=table, final_norm="no")
    vitlab.save(load_with_report(weights, map=table)[0], tmp_path / "native")
    with pytest.raises(UsageError, match=r"the weights have final_norm=yes, .* with final_norm=no"):
        vitlab.load(tmp_path / "native", final_norm="no")


def test_final_norm_counts_and_old_files_load(tmp_path):
    small = dict(image_size=16, patch_size=8, width=16, depth=1, heads=2, classes=3)
    for norm in ("pre", "post"):
        with_norm, without = (
            sum(step.parameters for step in vitlab.inspect("vit_base", **small, norm=norm, final_norm=choice).steps)
            for choice in ("yes", "no")
        )
        assert with_norm - without == 2 * 16  # a weight and a bias for each channel
    model = vitlab.create("vit_base", **small)
    vitlab.save(model, tmp_path)
    card = json.loads((tmp_path / "model.json").read_text(encoding="utf-8"))
    del card["config"]["norm"]["final_norm"], card["seal"]  # as earlier versions wrote it
    (tmp_path / "model.json").write_text(json.dumps(card), encoding="utf-8")
    assert vitlab.load(tmp_path).config == model.config


@pytest.mark.parametrize("to", ["hf", "jax"])
def test_a_library_without_the_option_is_not_given_another_network(to, tmp_path):
    model = vitlab.create("vit_base", image_size=16, patch_size=8, width=16, depth=1, heads=2, final_norm="no")
    with pytest.raises(ValueError, match=r"cannot express final_norm=no. Use --to native"):
        convert.write(model, tmp_path / "out.npz", to)


def test_timm_has_the_option(tmp_path):
    model = vitlab.create("vit_base", image_size=16, patch_size=8, width=16, depth=1, heads=2, final_norm="no")
    convert.write(model, tmp_path / "out", "timm")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))["model_args"]["final_norm"] is False
    )
    assert load_with_report(tmp_path / "out")[0].config.final_norm == "no"
    convert.write(model, tmp_path / "bare.safetensors", "timm")
    (row,) = convert.compare("unused", tmp_path / "bare.safetensors", model, changed=False)
    assert row.difference == 0


# ---------------------------------------------------------------- two towers

CLIP_TABLE = """
[model]
activation = "quick_gelu"
heads = 4
"text.heads" = 2

[keys]
"image.class_token" = "vision_model.embeddings.class_embedding"
"image.positions.table" = "vision_model.embeddings.position_embedding.weight"
"image.patch_embed.proj.weight" = "vision_model.embeddings.patch_embedding.weight"
"image.norm_pre.*" = "vision_model.pre_layrnorm.*"
"image.norm.*" = "vision_model.post_layernorm.*"
"image_projection.weight" = "visual_projection.weight"
"text.embed.weight" = "text_model.embeddings.token_embedding.weight"
"text.positions" = "text_model.embeddings.position_embedding.weight"
"text.norm.*" = "text_model.final_layer_norm.*"
"text_projection.weight" = "text_projection.weight"
log_scale = "logit_scale"
"""
BLOCK = """
"{ours}.blocks.{{i}}.norm1.*" = "{theirs}.encoder.layers.{{i}}.layer_norm1.*"
"{ours}.blocks.{{i}}.attention.qkv.*" = [{parts}]
"{ours}.blocks.{{i}}.attention.proj.*" = "{theirs}.encoder.layers.{{i}}.self_attn.out_proj.*"
"{ours}.blocks.{{i}}.norm2.*" = "{theirs}.encoder.layers.{{i}}.layer_norm2.*"
"{ours}.blocks.{{i}}.mlp.fc1.*" = "{theirs}.encoder.layers.{{i}}.mlp.fc1.*"
"{ours}.blocks.{{i}}.mlp.fc2.*" = "{theirs}.encoder.layers.{{i}}.mlp.fc2.*"
"""


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(1)
    sizes = dict(hidden_size=32, num_hidden_layers=2, intermediate_size=64)
    vision = dict(**sizes, num_attention_heads=4, image_size=32, patch_size=8)
    text = dict(**sizes, num_attention_heads=2, vocab_size=50, max_position_embeddings=12)
    text |= dict(bos_token_id=48, eos_token_id=49, pad_token_id=0)
    return scattered(hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))


def two_towers(folder: Path, clip: nn.Module, change=lambda text: text) -> tuple[Path, Path]:
    """Its weights under names that no reader knows: transformers' own, each with a word before it."""
    state = {f"net.{key}": value for key, value in clip.state_dict().items() if "position_ids" not in key}
    torch.save(state, folder / "clip.pth")
    blocks = ""
    for ours, theirs in (("image", "vision_model"), ("text", "text_model")):
        parts = ", ".join(f'"{theirs}.encoder.layers.{{i}}.self_attn.{part}_proj.*"' for part in "qkv")
        blocks += BLOCK.format(ours=ours, theirs=theirs, parts=parts)
    text = change(CLIP_TABLE + blocks)
    for name in ("vision_model", "text_model", "visual_projection", "logit_scale", "text_projection"):
        text = text.replace(f'"{name}', f'"net.{name}').replace(
            '"net.text_projection.weight" =', '"text_projection.weight" ='
        )
    (folder / "keys.toml").write_text(text, encoding="utf-8")
    return folder / "clip.pth", folder / "keys.toml"


def test_a_table_of_two_towers_is_a_clip(clip, tmp_path):
    weights, table = two_towers(tmp_path, clip)
    model, report = load_with_report(weights, map=table)
    assert model.family == "clip"
    (note,) = report.notes
    assert note.startswith("keys.toml does not say eps=1e-05, mean=(0.48145466,")
    images, ids = torch.randn(3, 3, 32, 32), torch.randint(1, 48, (2, 12))
    ids[0, 5:] = ids[1, 11:] = 49
    with torch.inference_mode():
        theirs = clip(input_ids=ids, pixel_values=images).logits_per_image
        torch.testing.assert_close(model(images, ids).logits_per_image, theirs, atol=1e-4, rtol=0)


def test_two_towers_that_do_not_fit_are_told(clip, tmp_path):
    weights, table = two_towers(tmp_path, clip, lambda text: text.replace('activation = "quick_gelu"', ""))
    with pytest.raises(CheckpointError, match=r"GELU or with QuickGELU.*in a rename table it stands under \[model\]"):
        load_with_report(weights, map=table)
    weights, table = two_towers(tmp_path, clip, lambda text: text.replace("heads = 4", "haeds = 4"))
    with pytest.raises(CheckpointError, match=r"\[model\] has no option 'haeds'. Did you mean 'heads'"):
        load_with_report(weights, map=table)
    one = '"image_projection.weight" = "visual_projection.weight"'
    weights, table = two_towers(tmp_path, clip, lambda text: text.replace(one, "") + "[ignore]\n'net.visual.*' = 'no'")
    with pytest.raises(CheckpointError, match=r"image_projection.weight is missing, so this is not a complete CLIP"):
        load_with_report(weights, map=table)


# ---------------------------------------------------------------- timm's trunk of a CLIP

TO_TIMM = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding.weight": "pos_embed",
    "embeddings.patch_embedding.weight": "patch_embed.proj.weight",
    "pre_layrnorm": "norm_pre",
    "post_layernorm": "norm",
    "encoder.layers": "blocks",
    "layer_norm": "norm",
    "self_attn.out_proj": "attn.proj",
}


def test_a_bare_timm_trunk_with_norm_pre_is_read_as_clips(clip, tmp_path):
    vision = {key.removeprefix("vision_model."): v for key, v in clip.state_dict().items() if key.startswith("vision")}
    state: dict[str, Tensor] = {}
    for key, value in vision.items():
        if "position_ids" in key or ("self_attn" in key and "out_proj" not in key):
            continue
        for theirs, timm in TO_TIMM.items():
            key = key.replace(theirs, timm)
        state[key] = value.reshape(1, -1, 32) if key in ("cls_token", "pos_embed") else value.contiguous()
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [vision[f"encoder.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            state[f"blocks.{layer}.attn.qkv.{kind}"] = torch.cat(parts)
    save_file(state, tmp_path / "trunk.safetensors")
    model, report = load_with_report(tmp_path / "trunk.safetensors", heads=4)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        theirs = clip.vision_model(images).pooler_output
        torch.testing.assert_close(model(images), theirs, atol=TOLERANCE, rtol=0)
        gelu = load_with_report(tmp_path / "trunk.safetensors", heads=4, activation="gelu")[0]
        assert (gelu(images) - theirs).abs().max() > 100 * TOLERANCE  # the activation matters, so it is said
    (note,) = report.notes
    assert note.startswith("timm weights do not say eps=1e-05, activation=quick_gelu, mean=(0.48145466,")
    assert "as in OpenAI's CLIP, because of norm_pre (other CLIPs have activation=gelu)" in note
    with pytest.warns(AssumedWarning, match="activation=quick_gelu"):
        vitlab.load(tmp_path / "trunk.safetensors", heads=4)
