"""torchvision's VisionTransformer (state dict; read only)."""

from __future__ import annotations

from vitlab.checkpoints.keymap import Dialect, Rule
from vitlab.models.entry import IMAGENET_CROP

LAYER = "encoder.layers.encoder_layer_{i}."
DIALECT = Dialect(
    name="torchvision",
    rules=(
        Rule("patch_embed.proj.*", "conv_proj.*"),
        Rule("class_token", "class_token"),
        Rule("positions.table", "encoder.pos_embedding"),
        Rule("blocks.{i}.norm1.*", LAYER + "ln_1.*"),
        Rule("blocks.{i}.attention.qkv.weight", LAYER + "self_attention.in_proj_weight"),
        Rule("blocks.{i}.attention.qkv.bias", LAYER + "self_attention.in_proj_bias"),
        Rule("blocks.{i}.attention.proj.*", LAYER + "self_attention.out_proj.*"),
        Rule("blocks.{i}.norm2.*", LAYER + "ln_2.*"),
        Rule("blocks.{i}.mlp.fc1.*", LAYER + "mlp.0.*"),
        Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.3.*"),
        Rule("blocks.{i}.mlp.fc1.*", LAYER + "mlp.linear_1.*"),  # before torchvision 0.13
        Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.linear_2.*"),
        Rule("norm.*", "encoder.ln.*"),
        Rule("pre_logits.*", "heads.pre_logits.*"),
        Rule("head.*", "heads.head.*"),
    ),
    recognise=lambda keys: "conv_proj.weight" in keys and "encoder.pos_embedding" in keys,
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess={**IMAGENET_CROP, "interpolation": "bilinear"},
)
