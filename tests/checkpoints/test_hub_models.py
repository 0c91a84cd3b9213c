"""Popular repositories of the hub, by their real configs, load as the table in checkpoints/hub_models.py says.

The values are typed from the libraries' documentation and released configs. Networks of equal blocks have one block
here, everything else its real size. transformers builds its own networks on the meta device and gives their names and
shapes as it saves them; timm's and open_clip's are written out here, by their layouts (stored in tests/data/golden).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vitlab.checkpoints import declared, foreign
from vitlab.checkpoints.families import FAMILIES
from vitlab.checkpoints.hub_models import BY_NAME, HUB_MODELS, list_hub_models
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.registry import FAMILIES as NETWORKS

State = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
LABELS = {str(i): f"name {i}" for i in range(1000)}
VERSION = {"torch_dtype": "float32", "transformers_version": "4.31.0"}
IMAGENET = {"id2label": LABELS, "label2id": {name: int(i) for i, name in LABELS.items()}}


@dataclass(frozen=True)
class HubFolder:
    files: Mapping[str, dict[str, Any]]
    weights: Callable[[], State]
    depths: tuple[int, ...] = ()  # of the released network, tower by tower; empty: nothing was cut


def empty(shape: tuple[int, ...]) -> Tensor:
    """Matrices and filters on the meta device; loading looks at values of other tensors, so these are zeros."""
    return torch.empty(shape, device="meta" if len(shape) in (2, 4) else "cpu").zero_()


# ------------------------------------------------------------------------------------------------------- transformers


def transformers(kind: str, model_type: str, *, pooler: bool = True, **values: Any) -> HubFolder:
    """A folder by transformers' save_pretrained; `kind` is the class in `architectures`."""
    config = {"architectures": [kind], "model_type": model_type, **values, **VERSION}
    parts = [config, *(config[part] for part in ("vision_config", "text_config") if part in config)]
    usual = {"siglip_text_model": 12, "siglip_vision_model": 12}  # where a released config leaves it out
    depths: list[int] = []
    for part in parts:
        for name in ("num_hidden_layers", "decoder_num_hidden_layers"):
            if name in part or (name == "num_hidden_layers" and part["model_type"] in usual):
                depths.append(part.get(name) or usual[part["model_type"]])
                part[name] = 1
    return HubFolder({"config.json": config}, lambda: _transformers_state(kind, config, pooler), tuple(depths))


def _transformers_state(kind: str, values: dict[str, Any], pooler: bool) -> State:
    import transformers as hf
    from transformers.core_model_loading import revert_weight_conversion

    left_out = ("architectures", "out_indices", *VERSION)  # the second names blocks that were cut
    config = hf.AutoConfig.for_model(**{k: v for k, v in values.items() if k not in left_out})
    with torch.device("meta"):
        model = getattr(hf, kind)(config, **({} if pooler else {"add_pooling_layer": False}))
    saved = revert_weight_conversion(model, model.state_dict())
    return {key: empty(tuple(value.shape)) if value.is_floating_point() else value for key, value in saved.items()}


def vit(width: int, depth: int, heads: int, patch: int, size: int = 224, **values: Any) -> dict[str, Any]:
    """Values that ViT, DeiT, DINO, MAE, MSN, I-JEPA and BEiT share."""
    return {
        "attention_probs_dropout_prob": 0.0,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": width,
        "image_size": size,
        "initializer_range": 0.02,
        "intermediate_size": 4 * width,
        "layer_norm_eps": 1e-12,
        "num_attention_heads": heads,
        "num_channels": 3,
        "num_hidden_layers": depth,
        "patch_size": patch,
        "qkv_bias": True,
        **values,
    }


SMALL, BASE, LARGE, HUGE = (384, 12, 6), (768, 12, 12), (1024, 24, 16), (1280, 32, 16)


def clip(
    image: tuple[int, ...], text: tuple[int, ...], embed: int, act: str, size: int = 224, vocab: int = 49408
) -> HubFolder:
    """image: width, MLP, depth, heads, patch; text: width, depth, heads."""
    network, kind = ("CLIPModel", "clip") if vocab == 49408 else ("MetaClip2Model", "metaclip_2")
    width, mlp, depth, heads, patch = image
    both = {
        "attention_dropout": 0.0,
        "dropout": 0.0,
        "hidden_act": act,
        "layer_norm_eps": 1e-5,
        "projection_dim": embed,
    }
    return transformers(
        network,
        kind,
        projection_dim=embed,
        logit_scale_init_value=2.6592,
        initializer_factor=1.0,
        vision_config={
            **both,
            "model_type": f"{kind}_vision_model",
            "hidden_size": width,
            "intermediate_size": mlp,
            "num_hidden_layers": depth,
            "num_attention_heads": heads,
            "patch_size": patch,
            "image_size": size,
        },
        text_config={
            **both,
            "model_type": f"{kind}_text_model",
            "hidden_size": text[0],
            "intermediate_size": 4 * text[0],
            "num_hidden_layers": text[1],
            "num_attention_heads": text[2],
            "max_position_embeddings": 77,
            "vocab_size": vocab,
            "bos_token_id": 0,  # as OpenAI's configs on the hub have them
            "eos_token_id": 2,
            "pad_token_id": 1,
        },
    )


B32, B16, L14 = (768, 3072, 12, 12, 32), (768, 3072, 12, 12, 16), (1024, 4096, 24, 16, 14)
H14, BIG_G14 = (1280, 5120, 32, 16, 14), (1664, 8192, 48, 16, 14)
TEXT_B, TEXT_L, TEXT_H, TEXT_G = (512, 12, 8), (768, 12, 12), (1024, 24, 16), (1280, 32, 20)


def dinov2(size: tuple[int, int, int], **values: Any) -> HubFolder:
    width, depth, heads = size
    kind = "Dinov2ForImageClassification" if "id2label" in values else "Dinov2Model"
    model_type = "dinov2_with_registers" if "num_register_tokens" in values else "dinov2"
    kind = kind.replace("Dinov2", "Dinov2WithRegisters") if "num_register_tokens" in values else kind
    more = {"apply_layernorm": True, "drop_path_rate": 0.0, "layerscale_value": 1.0, "mlp_ratio": 4}
    more |= {"layer_norm_eps": 1e-6, "reshape_hidden_states": True, "use_swiglu_ffn": False}
    return transformers(kind, model_type, **{**vit(width, depth, heads, 14, 518), **more, **values})


def dinov3(width: int, mlp: int, depth: int, heads: int, gated: bool = False, **values: Any) -> HubFolder:
    flags = {"key_bias": False, "mlp_bias": True, "proj_bias": True, "query_bias": True, "value_bias": True}
    return transformers(
        "DINOv3ViTModel",
        "dinov3_vit",
        attention_dropout=0.0,
        drop_path_rate=0.0,
        hidden_act="silu" if gated else "gelu",
        hidden_size=width,
        image_size=224,
        initializer_range=0.02,
        intermediate_size=mlp,
        layer_norm_eps=1e-5,
        layerscale_value=1.0,
        num_attention_heads=heads,
        num_channels=3,
        num_hidden_layers=depth,
        num_register_tokens=4,
        patch_size=16,
        pos_embed_jitter=None,
        pos_embed_rescale=2.0,
        pos_embed_shift=None,
        rope_theta=100.0,
        use_gated_mlp=gated,
        **{**flags, **values},
    )


def uncut(kind: str, model_type: str, **values: Any) -> HubFolder:
    """As `transformers`, with all blocks."""
    config = {"architectures": [kind], "model_type": model_type, **values, **VERSION}
    return HubFolder({"config.json": config}, lambda: _transformers_state(kind, config, True))


def names(count: int) -> dict[str, Any]:
    labels = {str(i): f"name {i}" for i in range(count)}
    return {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}


def eomt(size: tuple[int, int, int], joined: int, classes: int, **values: Any) -> HubFolder:
    width, depth, heads = size
    own = dict(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, num_blocks=joined)
    return uncut("EomtForUniversalSegmentation", "eomt", **{**own, "image_size": 640, **names(classes), **values})


def yolos(size: tuple[int, int, int], image: list[int], *, between: bool) -> HubFolder:
    own = {**vit(*size, 16), "image_size": image, "use_mid_position_embeddings": between, "num_detection_tokens": 100}
    return uncut("YolosForObjectDetection", "yolos", **own, **names(91))


def depth_anything(size: tuple[int, int, int], blocks: list[int], widths: list[int], fusion: int) -> HubFolder:
    width, depth, heads = size
    backbone = dict(hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads, out_indices=blocks)
    backbone |= dict(model_type="dinov2", image_size=518, patch_size=14, reshape_hidden_states=False)
    own = dict(reassemble_hidden_size=width, neck_hidden_sizes=widths, fusion_hidden_size=fusion)
    return uncut("DepthAnythingForDepthEstimation", "depth_anything", backbone_config=backbone, **own)


def mae(width: int, depth: int, heads: int, patch: int = 16) -> HubFolder:
    decoder = {"decoder_hidden_size": 512, "decoder_intermediate_size": 2048, "decoder_num_attention_heads": 16}
    decoder |= {"decoder_num_hidden_layers": 8, "mask_ratio": 0.75, "norm_pix_loss": False}
    return transformers("ViTMAEForPreTraining", "vit_mae", **vit(width, depth, heads, patch), **decoder)


def swin(width: int, depths: list[int], heads: list[int], window: int, size: int) -> HubFolder:
    return transformers("SwinForImageClassification", "swin", **_swin(width, depths, heads, window, size))


def swinv2(width: int, depths: list[int], heads: list[int], window: int, size: int, trained: list[int]) -> HubFolder:
    values = {**_swin(width, depths, heads, window, size), "pretrained_window_sizes": trained}
    return transformers("Swinv2ForImageClassification", "swinv2", **values)


def _swin(width: int, depths: list[int], heads: list[int], window: int, size: int) -> dict[str, Any]:
    return {
        "attention_probs_dropout_prob": 0.0,
        "depths": depths,
        "drop_path_rate": 0.1,
        "embed_dim": width,
        "encoder_stride": 32,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "hidden_size": 8 * width,
        "image_size": size,
        "layer_norm_eps": 1e-5,
        "mlp_ratio": 4.0,
        "num_channels": 3,
        "num_heads": heads,
        "num_layers": 4,
        "patch_size": 4,
        "path_norm": True,
        "qkv_bias": True,
        "use_absolute_embeddings": False,
        "window_size": window,
        **IMAGENET,
    }


def beit(size: tuple[int, int, int], model_type: str = "beit", scale: float = 0.1, **values: Any) -> HubFolder:
    width, depth, heads = size
    kind = {"beit": "BeitForImageClassification", "data2vec-vision": "Data2VecVisionForImageClassification"}[model_type]
    more = {"drop_path_rate": 0.1, "layer_scale_init_value": scale, "use_absolute_position_embeddings": False}
    more |= {"use_mask_token": False, "use_mean_pooling": True, "use_relative_position_bias": True}
    more |= {"use_shared_relative_position_bias": False, "vocab_size": 8192, "out_indices": [3, 5, 7, 11]}
    more |= {"pool_scales": [1, 2, 3, 6], "use_auxiliary_head": True, "auxiliary_channels": 256}
    more |= {"auxiliary_num_convs": 1, "auxiliary_concat_input": False, "auxiliary_loss_weight": 0.4}
    values = {**vit(width, depth, heads, 16), **more, **IMAGENET, **values}
    values.pop("qkv_bias")
    return transformers(kind, model_type, **values)


def siglip(text: dict[str, Any], vision: dict[str, Any], name: str = "siglip") -> HubFolder:
    """Released configs state only what is not the usual value."""
    return transformers(
        f"{name.title()}Model",
        name,
        initializer_factor=1.0,
        text_config={"model_type": f"{name}_text_model", **text},
        vision_config={"model_type": f"{name}_vision_model", **vision},
    )


SIGLIP_L = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24}
SIGLIP_SO = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}
GEMMA = {"vocab_size": 256000}


def aimv2(width: int, mlp: int, depth: int, heads: int, size: int = 224, **values: Any) -> HubFolder:
    return transformers(
        "Aimv2VisionModel",
        "aimv2_vision_model",
        attention_dropout=0.0,
        hidden_act="silu",
        hidden_size=width,
        image_size=size,
        initializer_range=0.02,
        intermediate_size=mlp,
        mlp_bias=False,
        num_attention_heads=heads,
        num_channels=3,
        num_hidden_layers=depth,
        patch_size=14,
        qkv_bias=False,
        rms_norm_eps=1e-5,
        use_head=False,
        **values,
    )


def aimv2_lit() -> HubFolder:
    both = {"attention_dropout": 0.0, "hidden_act": "silu", "mlp_bias": False, "qkv_bias": False, "rms_norm_eps": 1e-5}
    text = {**both, "eos_token_id": 49407, "hidden_size": 768, "intermediate_size": 2048, "max_position_embeddings": 77}
    text |= {"num_attention_heads": 6, "num_hidden_layers": 12, "vocab_size": 49408, "model_type": "aimv2_text_model"}
    vision = {**both, "hidden_size": 1024, "image_size": 224, "intermediate_size": 2816, "num_attention_heads": 8}
    vision |= {"num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "use_head": True, "is_native": False}
    vision |= {"model_type": "aimv2_vision_model"}
    more = {"logit_scale_init_value": 2.6592, "max_logit_scale": 100.0, "projection_dim": 768}
    return transformers("Aimv2Model", "aimv2", text_config=text, vision_config=vision, **more)


def apples_aimv2(width: int, mlp: int, depth: int, heads: int) -> HubFolder:
    """By Apple's own names, beside the code that transformers runs with trust_remote_code."""
    config = {"architectures": ["AIMv2Model"], "model_type": "aimv2", "attention_dropout": 0.0, "hidden_size": width}
    config |= {"image_size": 224, "intermediate_size": mlp, "num_attention_heads": heads, "num_channels": 3}
    config |= {"num_hidden_layers": 1, "patch_size": 14, "projection_dropout": 0.0, "qkv_bias": False}
    config |= {"rms_norm_eps": 1e-5, "use_bias": False}
    shapes: Shapes = {"preprocessor.pos_embed": (1, 256, width), "preprocessor.patchifier.norm.weight": (width,)}
    shapes |= {"preprocessor.patchifier.proj.weight": (width, 3, 14, 14), "preprocessor.patchifier.proj.bias": (width,)}
    at = "trunk.blocks.0."
    shapes |= {f"{at}norm_{n}.weight": (width,) for n in (1, 2)} | {"trunk.post_trunk_norm.weight": (width,)}
    shapes |= {f"{at}attn.qkv.weight": (3 * width, width), f"{at}attn.proj.weight": (width, width)}
    shapes |= {f"{at}mlp.fc{n}.weight": (mlp, width) for n in (1, 3)} | {f"{at}mlp.fc2.weight": (width, mlp)}
    return HubFolder({"config.json": config}, lambda: _filled(shapes), (depth,))


def resnet(layer: str, depths: list[int], widths: list[int]) -> HubFolder:
    more = {"downsample_in_first_stage": False, "embedding_size": 64, "hidden_act": "relu", "num_channels": 3}
    values = {"depths": depths, "hidden_sizes": widths, "layer_type": layer, **more, **IMAGENET}
    return transformers("ResNetForImageClassification", "resnet", **values)


def pvt(depths: list[int]) -> HubFolder:
    return transformers(
        "PvtForImageClassification",
        "pvt",
        attention_probs_dropout_prob=0.0,
        depths=depths,
        drop_path_rate=0.0,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        hidden_sizes=[64, 128, 320, 512],
        image_size=224,
        layer_norm_eps=1e-6,
        mlp_ratios=[8, 8, 4, 4],
        num_attention_heads=[1, 2, 5, 8],
        num_channels=3,
        num_encoder_blocks=4,
        patch_sizes=[4, 2, 2, 2],
        qkv_bias=True,
        sequence_reduction_ratios=[8, 4, 2, 1],
        strides=[4, 2, 2, 2],
        **IMAGENET,
    )


def pvt_v2(widths: list[int], depths: list[int], mlp: list[int]) -> HubFolder:
    return transformers(
        "PvtV2ForImageClassification",
        "pvt_v2",
        attention_probs_dropout_prob=0.0,
        depths=depths,
        drop_path_rate=0.0,
        hidden_act="gelu",
        hidden_dropout_prob=0.0,
        hidden_sizes=widths,
        image_size=224,
        layer_norm_eps=1e-6,
        linear_attention=False,
        mlp_ratios=mlp,
        num_attention_heads=[1, 2, 5, 8],
        num_channels=3,
        num_encoder_blocks=4,
        patch_sizes=[7, 3, 3, 3],
        qkv_bias=True,
        sr_ratios=[8, 4, 2, 1],
        strides=[4, 2, 2, 2],
        **IMAGENET,
    )


# ------------------------------------------------------------------------------------------------ timm and open_clip


def timm(
    architecture: str, shapes: Shapes, depth: int | None = None, size: int = 224, pool: str = "token"
) -> HubFolder:
    """config.json of timm's hub, which states the architecture's name and how images are read."""
    classes, width = next((shapes[key] for key in ("head.weight", "fc.weight") if key in shapes), (0, 0))
    cfg: dict[str, Any] = {
        "tag": "a_tag",
        "custom_load": False,
        "input_size": [3, size, size],
        "fixed_input_size": True,
    }
    cfg |= {"interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center", "mean": [0.5] * 3}
    cfg |= {
        "std": [0.5] * 3,
        "num_classes": classes,
        "pool_size": None,
        "first_conv": "patch_embed.proj",
        "classifier": "head",
    }
    config = {"architecture": architecture, "num_classes": classes, "num_features": width, "global_pool": pool}
    files = {"config.json": {**config, "pretrained_cfg": cfg}}
    return HubFolder(files, lambda: _filled(shapes), (depth,) if depth else ())


def _filled(shapes: Shapes) -> State:
    return {key: empty(shape) for key, shape in shapes.items()}


def linear(name: str, rows: int, columns: int, *, bias: bool = True) -> Shapes:
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def norm(name: str, width: int) -> Shapes:
    return {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def timm_vit(
    width: int,
    patch: int,
    size: int = 224,
    *,
    classes: int = 1000,
    mlp: int | None = None,
    prefix: int = 1,  # tokens with a position, beside the patches
    registers: int = 0,
    layer_scale: bool = False,
    clip: bool = False,
    swiglu: bool = False,
) -> Shapes:
    """timm's VisionTransformer with one block."""
    mlp = mlp or 4 * width
    shapes: Shapes = {"cls_token": (1, 1, width), "pos_embed": (1, (size // patch) ** 2 + prefix, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, patch, patch)}
    shapes |= {} if clip else {"patch_embed.proj.bias": (width,)}
    shapes |= norm("norm_pre", width) if clip else {}
    shapes |= {"reg_token": (1, registers, width)} if registers else {}
    shapes |= norm("blocks.0.norm1", width) | norm("blocks.0.norm2", width) | norm("norm", width)
    shapes |= linear("blocks.0.attn.qkv", 3 * width, width) | linear("blocks.0.attn.proj", width, width)
    shapes |= linear("blocks.0.mlp.fc1", mlp, width)
    shapes |= linear("blocks.0.mlp.fc2", width, mlp // 2 if swiglu else mlp)
    shapes |= {f"blocks.0.ls{i}.gamma": (width,) for i in (1, 2)} if layer_scale else {}
    return shapes | (linear("head", classes, width) if classes else {})


def timm_eva02(width: int, mlp: int, patch: int, size: int, *, split: bool, classes: int = 1000) -> Shapes:
    """timm's Eva in its EVA-02 sizes; split: q, k, v apart and a norm in the MLP, as from base on."""
    shapes: Shapes = {"cls_token": (1, 1, width), "pos_embed": (1, (size // patch) ** 2 + 1, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, patch, patch), "patch_embed.proj.bias": (width,)}
    shapes |= norm("blocks.0.norm1", width) | norm("blocks.0.norm2", width)
    shapes |= linear("blocks.0.attn.proj", width, width) | linear("blocks.0.mlp.fc2", width, mlp)
    if split:
        shapes |= {f"blocks.0.attn.{part}_proj.weight": (width, width) for part in "qkv"}
        shapes |= {f"blocks.0.attn.{part}_proj.bias": (width,) for part in "qv"}
        shapes |= linear("blocks.0.mlp.fc1_g", mlp, width) | linear("blocks.0.mlp.fc1_x", mlp, width)
        shapes |= norm("blocks.0.mlp.norm", mlp)
    else:
        shapes |= {"blocks.0.attn.qkv.weight": (3 * width, width)}
        shapes |= {f"blocks.0.attn.{part}_bias": (width,) for part in "qv"}
        shapes |= linear("blocks.0.mlp.fc1", 2 * mlp, width)
    return shapes | norm("fc_norm", width) | linear("head", classes, width)


def timm_eva02_clip(width: int, mlp: int, patch: int, size: int, embed: int) -> Shapes:
    """The image tower of EVA-02-CLIP: one more norm in its attention, and the class token is read."""
    shapes = timm_eva02(width, mlp, patch, size, split=True, classes=embed)
    shapes = {key: shape for key, shape in shapes.items() if not key.startswith("fc_norm")}
    return shapes | norm("blocks.0.attn.norm", width) | norm("norm", width)


def timm_dinov3(width: int, patch: int = 16, *, qkv_bias: bool = False) -> Shapes:
    """timm's Eva as DINOv3, without a head."""
    shapes: Shapes = {"cls_token": (1, 1, width), "reg_token": (1, 4, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, patch, patch), "patch_embed.proj.bias": (width,)}
    shapes |= norm("blocks.0.norm1", width) | norm("blocks.0.norm2", width) | norm("norm", width)
    shapes |= linear("blocks.0.attn.qkv", 3 * width, width, bias=qkv_bias) | linear("blocks.0.attn.proj", width, width)
    shapes |= linear("blocks.0.mlp.fc1", 4 * width, width) | linear("blocks.0.mlp.fc2", width, 4 * width)
    return shapes | {"blocks.0.gamma_1": (width,), "blocks.0.gamma_2": (width,)}


def timm_beitv2(width: int, heads: int, classes: int = 1000) -> Shapes:
    shapes: Shapes = {"cls_token": (1, 1, width)}
    shapes |= {"patch_embed.proj.weight": (width, 3, 16, 16), "patch_embed.proj.bias": (width,)}
    shapes |= norm("blocks.0.norm1", width) | norm("blocks.0.norm2", width)
    shapes |= {"blocks.0.attn.qkv.weight": (3 * width, width)} | linear("blocks.0.attn.proj", width, width)
    shapes |= {f"blocks.0.attn.{part}_bias": (width,) for part in "qv"}
    shapes |= {"blocks.0.attn.relative_position_bias_table": (27 * 27 + 3, heads)}
    shapes |= {"blocks.0.gamma_1": (width,), "blocks.0.gamma_2": (width,)}
    shapes |= linear("blocks.0.mlp.fc1", 4 * width, width) | linear("blocks.0.mlp.fc2", width, 4 * width)
    return shapes | norm("fc_norm", width) | linear("head", classes, width)


def map_pool(width: int, mlp: int, name: str = "attn_pool") -> Shapes:
    """timm's AttentionPoolLatent."""
    shapes = (
        {f"{name}.latent": (1, 1, width)} | linear(f"{name}.q", width, width) | linear(f"{name}.kv", 2 * width, width)
    )
    shapes |= linear(f"{name}.proj", width, width) | norm(f"{name}.norm", width)
    return shapes | linear(f"{name}.mlp.fc1", mlp, width) | linear(f"{name}.mlp.fc2", width, mlp)


def timm_siglip(width: int, patch: int, size: int, mlp: int | None = None) -> Shapes:
    shapes = timm_vit(width, patch, size, classes=0, mlp=mlp, prefix=0) | map_pool(width, mlp or 4 * width)
    del shapes["cls_token"]
    return shapes


def timm_pe_core(width: int, patch: int, size: int, mlp: int, embed: int) -> Shapes:
    """timm's Eva as PE-Core: the projection is its head."""
    return timm_vit(width, patch, size, classes=embed, mlp=mlp, clip=True) | map_pool(width, mlp)


def batch_norm(name: str, width: int) -> Shapes:
    return norm(name, width) | {f"{name}.running_mean": (width,), f"{name}.running_var": (width,)}


def timm_resnet(depths: tuple[int, ...], *, deep: bool) -> Shapes:
    """timm's bottleneck ResNet; deep: the stem of three and the averaged shortcuts of ResNet-D."""
    shapes: Shapes = batch_norm("bn1", 64) | linear("fc", 1000, 2048)
    if deep:
        shapes |= {"conv1.0.weight": (32, 3, 3, 3), "conv1.3.weight": (32, 32, 3, 3), "conv1.6.weight": (64, 32, 3, 3)}
        shapes |= batch_norm("conv1.1", 32) | batch_norm("conv1.4", 32)
    else:
        shapes |= {"conv1.weight": (64, 3, 7, 7)}
    reads = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for i in range(depth):
            at = f"layer{stage + 1}.{i}."
            shapes |= {f"{at}conv1.weight": (width, reads, 1, 1), f"{at}conv2.weight": (width, width, 3, 3)}
            shapes |= {f"{at}conv3.weight": (4 * width, width, 1, 1)}
            shapes |= batch_norm(at + "bn1", width) | batch_norm(at + "bn2", width) | batch_norm(at + "bn3", 4 * width)
            if i == 0:
                first = 1 if deep else 0
                shapes |= {f"{at}downsample.{first}.weight": (4 * width, reads, 1, 1)}
                shapes |= batch_norm(f"{at}downsample.{first + 1}", 4 * width)
            reads = 4 * width
    return shapes


CLIP_COLOURS = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}


def open_clip(image: tuple[int, ...], text: tuple[int, ...], embed: int, **model: Any) -> HubFolder:
    """image: width, MLP, depth, heads, patch, all at 224 pixels; text: width, depth, heads."""
    width, mlp, depth, heads, patch = image
    vision: dict[str, Any] = {"image_size": 224, "layers": 1, "width": width, "patch_size": patch}
    vision |= {"head_width": width // heads} if width // heads != 64 else {}
    words = {"context_length": 77, "vocab_size": 49408, "width": text[0], "heads": text[2], "layers": 1}
    config = {"model_cfg": {"embed_dim": embed, "vision_cfg": vision, "text_cfg": words, **model}}
    shapes: Shapes = {"logit_scale": (), "visual.class_embedding": (width,), "visual.proj": (width, embed)}
    shapes |= {"visual.positional_embedding": ((224 // patch) ** 2 + 1, width)}
    shapes |= {"visual.conv1.weight": (width, 3, patch, patch)}
    shapes |= norm("visual.ln_pre", width) | norm("visual.ln_post", width) | norm("ln_final", text[0])
    shapes |= _resblock("visual.transformer.resblocks.0.", width, mlp)
    shapes |= _resblock("transformer.resblocks.0.", text[0], 4 * text[0])
    shapes |= {"token_embedding.weight": (49408, text[0]), "positional_embedding": (77, text[0])}
    shapes |= {"text_projection": (text[0], embed)}
    files = {"open_clip_config.json": {**config, "preprocess_cfg": CLIP_COLOURS}}
    return HubFolder(files, lambda: _filled(shapes), (depth, text[1]))


def _resblock(at: str, width: int, mlp: int) -> Shapes:
    shapes = {f"{at}attn.in_proj_weight": (3 * width, width), f"{at}attn.in_proj_bias": (3 * width,)}
    shapes |= linear(f"{at}attn.out_proj", width, width) | norm(f"{at}ln_1", width) | norm(f"{at}ln_2", width)
    return shapes | linear(f"{at}mlp.c_fc", mlp, width) | linear(f"{at}mlp.c_proj", width, mlp)


def text_tower(context: int, width: int, embed: int, prefix: str = "") -> Shapes:
    shapes: Shapes = {"token_embedding.weight": (49408, width), "positional_embedding": (context, width)}
    shapes |= _resblock("transformer.resblocks.0.", width, 4 * width) | norm("ln_final", width)
    shapes |= {"text_projection": (width, embed)}
    return {prefix + key: shape for key, shape in shapes.items()} | {"logit_scale": ()}


def metas_pe(width: int, patch: int, size: int, depths: tuple[int, int]) -> HubFolder:
    """PE-Core by Meta's own names: one .pt file, and no config."""
    shapes: Shapes = {"conv1.weight": (width, 3, patch, patch), "class_embedding": (width,), "proj": (width, 1024)}
    shapes |= {"positional_embedding": ((size // patch) ** 2 + 1, width), "attn_pool.probe": (1, 1, width)}
    shapes |= norm("ln_pre", width) | norm("ln_post", width) | norm("attn_pool.layernorm", width)
    shapes |= _resblock("transformer.resblocks.0.", width, 4 * width)
    shapes |= {"attn_pool.attn.in_proj_weight": (3 * width, width), "attn_pool.attn.in_proj_bias": (3 * width,)}
    shapes |= linear("attn_pool.attn.out_proj", width, width) | linear("attn_pool.mlp.c_fc", 4 * width, width)
    shapes |= linear("attn_pool.mlp.c_proj", width, 4 * width)
    both = {f"visual.{key}": shape for key, shape in shapes.items()} | text_tower(32, 1024, 1024)
    return HubFolder({}, lambda: _filled(both), depths)


def open_clip_trunk(name: str, trunk: Shapes, pool: str, text: tuple[int, int, int, int], embed: int) -> HubFolder:
    """A network of timm whose head is the projection; text: context, width, depth, heads."""
    context, width, depth, heads = text
    vision = {"image_size": 224, "timm_model_name": name, "timm_model_pretrained": False}
    words = {"context_length": context, "vocab_size": 49408, "width": width, "heads": heads, "layers": 1}
    model = {"embed_dim": embed, "vision_cfg": {**vision, "timm_pool": pool, "timm_proj": None}, "text_cfg": words}
    shapes = {f"visual.trunk.{key}": shape for key, shape in trunk.items()} | text_tower(context, width, embed, "text.")
    files = {"open_clip_config.json": {"model_cfg": {**model, "custom_text": True}, "preprocess_cfg": CLIP_COLOURS}}
    return HubFolder(files, lambda: _filled(shapes), (12, depth))


def biomed_clip() -> HubFolder:
    """A timm trunk with a linear projection, and a BERT that reads the text."""
    vision = {"timm_model_name": "vit_base_patch16_224", "timm_model_pretrained": False, "timm_pool": ""}
    text = {"hf_model_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract", "proj": "mlp"}
    text |= {"hf_tokenizer_name": text["hf_model_name"], "pooler_type": "cls_last_hidden_state_pooler"}
    config = {
        "embed_dim": 512,
        "vision_cfg": {**vision, "timm_proj": "linear", "image_size": 224},
        "text_cfg": {**text, "context_length": 256},
    }
    shapes = {f"visual.trunk.{key}": shape for key, shape in timm_vit(768, 16, classes=0).items()}
    shapes |= {"visual.head.proj.weight": (512, 768), "logit_scale": ()}
    shapes |= {"text.transformer.embeddings.word_embeddings.weight": (30522, 768)}
    shapes |= {"text.proj.0.weight": (640, 768), "text.proj.2.weight": (512, 640)}
    files = {"open_clip_config.json": {"model_cfg": config, "preprocess_cfg": CLIP_COLOURS}}
    return HubFolder(files, lambda: _filled(shapes), (12,))


def open_clip_siglip() -> HubFolder:
    """timm/ViT-B-16-SigLIP."""
    vision = {"image_size": 224, "timm_model_name": "vit_base_patch16_siglip_224", "timm_model_pretrained": False}
    text: dict[str, Any] = {"context_length": 64, "vocab_size": 32000, "hf_tokenizer_name": "timm/ViT-B-16-SigLIP"}
    text |= {"tokenizer_kwargs": {"clean": "canonicalize"}, "width": 768, "heads": 12, "layers": 1, "proj_bias": True}
    text |= {"no_causal_mask": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
    model = {"embed_dim": 768, "init_logit_bias": -10, "custom_text": True, "text_cfg": text}
    model |= {"vision_cfg": {**vision, "timm_pool": "map", "timm_proj": "none"}}
    cfg = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "squash"}
    shapes = {f"visual.trunk.{key}": shape for key, shape in timm_siglip(768, 16, 224).items()}
    shapes |= {"logit_scale": (), "logit_bias": (), "text.positional_embedding": (64, 768)}
    shapes |= {"text.token_embedding.weight": (32000, 768)} | norm("text.ln_final", 768)
    shapes |= linear("text.text_projection", 768, 768) | _resblock("text.transformer.resblocks.0.", 768, 3072)
    files = {"open_clip_config.json": {"model_cfg": model, "preprocess_cfg": cfg}}
    return HubFolder(files, lambda: _filled(shapes), (12, 12))


# ------------------------------------------------------------------------------------------------------ by their names

IN21K = {"id2label": {str(i): f"name {i}" for i in range(21841)}}
IN21K["label2id"] = {name: int(i) for i, name in IN21K["id2label"].items()}  # type: ignore[assignment]

FOLDERS: dict[str, HubFolder] = {
    "google/vit-base-patch16-224": transformers("ViTForImageClassification", "vit", **vit(*BASE, 16), **IMAGENET),
    "google/vit-base-patch16-224-in21k": transformers("ViTModel", "vit", **vit(*BASE, 16)),
    "google/vit-base-patch16-384": transformers("ViTForImageClassification", "vit", **vit(*BASE, 16, 384), **IMAGENET),
    "google/vit-large-patch16-224": transformers("ViTForImageClassification", "vit", **vit(*LARGE, 16), **IMAGENET),
    "google/vit-huge-patch14-224-in21k": transformers("ViTModel", "vit", **vit(*HUGE, 14)),
    "WinKawaks/vit-tiny-patch16-224": transformers(
        "ViTForImageClassification", "vit", **vit(192, 12, 3, 16), **IMAGENET
    ),
    "facebook/deit-small-patch16-224": transformers("ViTForImageClassification", "vit", **vit(*SMALL, 16), **IMAGENET),
    "facebook/deit-base-distilled-patch16-224": transformers(
        "DeiTForImageClassificationWithTeacher", "deit", **vit(*BASE, 16), **IMAGENET
    ),
    "facebook/dino-vits16": transformers("ViTModel", "vit", pooler=False, **vit(*SMALL, 16)),
    "facebook/dino-vitb8": transformers("ViTModel", "vit", pooler=False, **vit(*BASE, 8)),
    "facebook/dino-vitb16": transformers("ViTModel", "vit", pooler=False, **vit(*BASE, 16)),
    "facebook/dinov2-small": dinov2(SMALL),
    "facebook/dinov2-base": dinov2(BASE),
    "facebook/dinov2-large": dinov2(LARGE),
    "facebook/dinov2-giant": dinov2((1536, 40, 24), use_swiglu_ffn=True),
    "facebook/dinov2-base-imagenet1k-1-layer": dinov2(BASE, **IMAGENET),
    "facebook/dinov2-with-registers-base": dinov2(BASE, num_register_tokens=4),
    "facebook/vit-mae-base": mae(*BASE),
    "facebook/vit-mae-large": mae(*LARGE),
    "facebook/vit-mae-huge": mae(*HUGE, 14),
    "facebook/vit-msn-small": transformers("ViTMSNModel", "vit_msn", **vit(*SMALL, 16, layer_norm_eps=1e-6)),
    "facebook/vit-msn-base": transformers("ViTMSNModel", "vit_msn", **vit(*BASE, 16, layer_norm_eps=1e-6)),
    "facebook/ijepa_vith14_1k": transformers(
        "IJepaModel", "ijepa", pooler=False, **vit(*HUGE, 14, layer_norm_eps=1e-6)
    ),
    "openai/clip-vit-base-patch32": clip(B32, TEXT_B, 512, "quick_gelu"),
    "openai/clip-vit-base-patch16": clip(B16, TEXT_B, 512, "quick_gelu"),
    "openai/clip-vit-large-patch14": clip(L14, TEXT_L, 768, "quick_gelu"),
    "openai/clip-vit-large-patch14-336": clip(L14, TEXT_L, 768, "quick_gelu", 336),
    "laion/CLIP-ViT-B-32-laion2B-s34B-b79K": clip(B32, TEXT_B, 512, "gelu"),
    "laion/CLIP-ViT-L-14-laion2B-s32B-b82K": clip(L14, TEXT_L, 768, "gelu"),
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K": clip(H14, TEXT_H, 1024, "gelu"),
    "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k": open_clip(BIG_G14, TEXT_G, 1280),
    "laion/CLIP-ViT-B-16-laion2B-s34B-b88K": open_clip(B16, TEXT_B, 512),
    "imageomics/bioclip": open_clip(B16, TEXT_B, 512),
    "microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224": biomed_clip(),
    "facebook/metaclip-b32-400m": clip(B32, TEXT_B, 512, "quick_gelu"),
    "facebook/metaclip-h14-fullcc2.5b": clip(H14, TEXT_H, 1024, "quick_gelu"),
    "facebook/metaclip-2-worldwide-huge-quickgelu": clip(H14, TEXT_H, 1024, "quick_gelu", vocab=901629),  # XLM-V's
    "google/siglip-base-patch16-224": siglip({}, {}),
    "google/siglip-base-patch16-256-multilingual": siglip({"vocab_size": 250000}, {"image_size": 256}),
    "google/siglip-large-patch16-256": siglip({**SIGLIP_L}, {**SIGLIP_L, "image_size": 256}),
    "google/siglip-so400m-patch14-384": siglip({**SIGLIP_SO}, {**SIGLIP_SO, "image_size": 384, "patch_size": 14}),
    "google/siglip2-base-patch16-224": siglip({**GEMMA}, {}),
    "google/siglip2-so400m-patch14-384": siglip(
        {**SIGLIP_SO, **GEMMA}, {**SIGLIP_SO, "image_size": 384, "patch_size": 14}
    ),
    "google/siglip2-base-patch16-naflex": siglip({**GEMMA}, {"num_patches": 256}, "siglip2"),
    "timm/ViT-B-16-SigLIP": open_clip_siglip(),
    "facebook/dinov3-vits16-pretrain-lvd1689m": dinov3(384, 1536, 12, 6),
    "facebook/dinov3-vits16plus-pretrain-lvd1689m": dinov3(384, 1536, 12, 6, True),
    "facebook/dinov3-vitb16-pretrain-lvd1689m": dinov3(768, 3072, 12, 12),
    "facebook/dinov3-vitl16-pretrain-lvd1689m": dinov3(1024, 4096, 24, 16),
    "facebook/dinov3-vith16plus-pretrain-lvd1689m": dinov3(1280, 5120, 32, 20, True),
    "facebook/dinov3-vit7b16-pretrain-lvd1689m": dinov3(4096, 8192, 40, 32, True, query_bias=False, value_bias=False),
    "apple/aimv2-large-patch14-native": aimv2(1024, 2816, 24, 8, is_native=True),
    "apple/aimv2-large-patch14-224": apples_aimv2(1024, 2816, 24, 8),
    "apple/aimv2-large-patch14-224-lit": aimv2_lit(),
    "facebook/PE-Core-B16-224": metas_pe(768, 16, 224, (12, 24)),
    "facebook/PE-Core-L14-336": metas_pe(1024, 14, 336, (24, 24)),
    "timm/PE-Core-B-16": open_clip_trunk(
        *("vit_pe_core_base_patch16_224", timm_pe_core(768, 16, 224, 3072, 1024), "map"), (32, 1024, 24, 16), 1024
    ),
    "timm/eva02_base_patch16_clip_224.merged2b_s8b_b131k": open_clip_trunk(
        *("eva02_base_patch16_clip_224", timm_eva02_clip(768, 2048, 16, 224, 512), "token"), (77, 512, 12, 8), 512
    ),
    "microsoft/swin-tiny-patch4-window7-224": swin(96, [2, 2, 6, 2], [3, 6, 12, 24], 7, 224),
    "microsoft/swin-base-patch4-window7-224": swin(128, [2, 2, 18, 2], [4, 8, 16, 32], 7, 224),
    "microsoft/swin-large-patch4-window12-384": swin(192, [2, 2, 18, 2], [6, 12, 24, 48], 12, 384),
    "microsoft/swinv2-tiny-patch4-window8-256": swinv2(96, [2, 2, 6, 2], [3, 6, 12, 24], 8, 256, [0] * 4),
    "microsoft/swinv2-base-patch4-window12to16-192to256-22kto1k-ft": swinv2(
        128, [2, 2, 18, 2], [4, 8, 16, 32], 16, 256, [12, 12, 12, 6]
    ),
    "microsoft/beit-base-patch16-224": beit(BASE),
    "microsoft/beit-base-patch16-224-pt22k-ft22k": beit(BASE, **IN21K),
    "microsoft/beit-large-patch16-224": beit(LARGE, scale=1e-5),
    "facebook/data2vec-vision-base-ft1k": beit(BASE, "data2vec-vision"),
    "microsoft/resnet-18": resnet("basic", [2, 2, 2, 2], [64, 128, 256, 512]),
    "microsoft/resnet-50": resnet("bottleneck", [3, 4, 6, 3], [256, 512, 1024, 2048]),
    "Zetatech/pvt-tiny-224": pvt([2, 2, 2, 2]),
    "OpenGVLab/pvt_v2_b0": pvt_v2([32, 64, 160, 256], [2, 2, 2, 2], [8, 8, 4, 4]),
    "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k": timm("vit_tiny_patch16_224", timm_vit(192, 16), 12),
    "timm/vit_base_patch16_224.augreg2_in21k_ft_in1k": timm("vit_base_patch16_224", timm_vit(768, 16), 12),
    "timm/vit_large_patch14_clip_336.openai_ft_in12k_in1k": timm(
        "vit_large_patch14_clip_336", timm_vit(1024, 14, 336, clip=True), 24, 336
    ),
    "timm/vit_base_patch14_dinov2.lvd142m": timm(
        "vit_base_patch14_dinov2", timm_vit(768, 14, 518, classes=0, layer_scale=True), 12, 518
    ),
    "timm/vit_small_patch14_reg4_dinov2.lvd142m": timm(
        "vit_small_patch14_reg4_dinov2",
        timm_vit(384, 14, 518, classes=0, layer_scale=True, prefix=0, registers=4),
        12,
        518,
    ),
    "timm/deit3_base_patch16_224.fb_in22k_ft_in1k": timm(
        "deit3_base_patch16_224", timm_vit(768, 16, prefix=0, layer_scale=True), 12
    ),
    "timm/vit_small_patch16_dinov3.lvd1689m": timm("vit_small_patch16_dinov3", timm_dinov3(384), 12, 256, "avg"),
    "timm/eva02_tiny_patch14_336.mim_in22k_ft_in1k": timm(
        "eva02_tiny_patch14_336", timm_eva02(192, 512, 14, 336, split=False), 12, 336, "avg"
    ),
    "timm/eva02_base_patch14_448.mim_in22k_ft_in22k_in1k": timm(
        "eva02_base_patch14_448", timm_eva02(768, 2048, 14, 448, split=True), 12, 448, "avg"
    ),
    "timm/eva02_large_patch14_448.mim_m38m_ft_in22k_in1k": timm(
        "eva02_large_patch14_448", timm_eva02(1024, 2730, 14, 448, split=True), 24, 448, "avg"
    ),
    "timm/beitv2_base_patch16_224.in1k_ft_in22k_in1k": timm(
        "beitv2_base_patch16_224", timm_beitv2(768, 12), 12, pool="avg"
    ),
    "timm/vit_pe_core_base_patch16_224.fb": timm(
        "vit_pe_core_base_patch16_224", timm_pe_core(768, 16, 224, 3072, 1024), 12, pool="map"
    ),
    "timm/resnet50.a1_in1k": timm("resnet50", timm_resnet((3, 4, 6, 3), deep=False), pool="avg"),
    "timm/resnet50d.ra2_in1k": timm("resnet50d", timm_resnet((3, 4, 6, 3), deep=True), pool="avg"),
}


FOLDERS |= {  # networks around an encoder of a depth that their heads belong to: nothing is cut
    "tue-mps/coco_panoptic_eomt_small_640_2x": eomt(SMALL, 3, 133),
    "tue-mps/coco_panoptic_eomt_base_640_2x": eomt(BASE, 3, 133),
    "tue-mps/coco_panoptic_eomt_large_640": eomt(LARGE, 4, 133),
    "tue-mps/coco_instance_eomt_large_640": eomt(LARGE, 4, 80),
    "tue-mps/ade20k_semantic_eomt_large_512": eomt(LARGE, 4, 150, image_size=512, num_queries=100),
    "hustvl/yolos-tiny": yolos((192, 12, 3), [800, 1333], between=False),
    "hustvl/yolos-small": yolos(SMALL, [512, 864], between=True),
    "hustvl/yolos-base": yolos(BASE, [800, 1344], between=True),
    "depth-anything/Depth-Anything-V2-Small-hf": depth_anything(SMALL, [3, 6, 9, 12], [48, 96, 192, 384], 64),
    "depth-anything/Depth-Anything-V2-Base-hf": depth_anything(BASE, [3, 6, 9, 12], [96, 192, 384, 768], 128),
    "depth-anything/Depth-Anything-V2-Large-hf": depth_anything(LARGE, [5, 12, 18, 24], [256, 512, 1024, 1024], 256),
}


# -------------------------------------------------------------------------------------------------------------- tests

REFUSED = {  # model_type of what the table says is not read
    "facebook/dinov3-convnext-tiny-pretrain-lvd1689m": "dinov3_convnext",
    "facebook/sam-vit-base": "sam",
    "facebook/convnext-tiny-224": "convnext",
}


def load_folder(folder: HubFolder, path: Path, monkeypatch) -> Network:
    for name, values in folder.files.items():
        (path / name).write_text(json.dumps(values), encoding="utf-8")
    monkeypatch.setattr(foreign, "_read_folder", lambda _: folder.weights())
    return load_with_report(path, allow_nan=True)[0]


def parameters(model: Network, depths: tuple[int, ...]) -> int:
    """Of the released network, whose towers have so many equal blocks."""
    total = sum(p.numel() for p in model.parameters())
    towers = [part for part in model.modules() if "blocks" in dict(part.named_children())]
    for tower, depth in zip(towers, depths, strict=True) if depths else ():
        total += (depth - len(tower.blocks)) * sum(p.numel() for p in tower.blocks[-1].parameters())
    return total


@pytest.mark.parametrize("name", FOLDERS)
def test_loads_as_the_table_says(name, tmp_path, monkeypatch):
    row, folder = BY_NAME[name], FOLDERS[name]
    model = load_folder(folder, tmp_path, monkeypatch)
    assert model.family == row.loads_as
    assert model.config.image_size == ((row.image_size,) * 2 if isinstance(row.image_size, int) else row.image_size)
    assert parameters(model, folder.depths) / 1e6 == pytest.approx(row.parameters, abs=0.06)
    assert model.labels is None or len(model.labels) == model.classes


def test_sixty_popular_names_of_which_57_load():
    """With the test above, which fails for each that does not."""
    assert len(FOLDERS) >= 60
    assert sum(BY_NAME[name].loads for name in FOLDERS) >= 57
    assert FOLDERS.keys() | REFUSED.keys() == BY_NAME.keys()
    assert len(BY_NAME) == len(HUB_MODELS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_table_says_is_not_read_is_refused(name, tmp_path):
    assert not BY_NAME[name].loads and BY_NAME[name].note
    (tmp_path / "config.json").write_text(json.dumps({"model_type": REFUSED[name]}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        declared.check_known(tmp_path, FAMILIES)


def test_the_table_names_families_that_there_are():
    assert {model.loads_as for model in HUB_MODELS if model.loads} <= NETWORKS.keys()


def test_only_metas_own_dinov3_is_gated():
    assert {m.name for m in HUB_MODELS if m.gated} == {m.name for m in list_hub_models("facebook/dinov3*")}


def test_patterns():
    assert [model.name for model in list_hub_models("DINO-VITS")] == ["facebook/dino-vits16"]
    assert {model.family for model in list_hub_models("swin v2")} == {"Swin V2"}
    assert len(list_hub_models("openai/*")) == 4 and not list_hub_models("openai/")[4:]
    assert not list_hub_models("nothing of that name")


def test_command(command):
    shown = command("models", "--hub", "clip-vit").stdout
    assert "openai/clip-vit-large-patch14-336" in shown and "427.9M" in shown and "google/" not in shown
    values = json.loads(command("models", "--hub", "dinov3", "--json").stdout)
    assert {value["gated"] for value in values} == {True, False} and values[0]["parameters"] == 21_600_000
    assert "`vitlab models --hub` lists all" in command("models", "nothing like it", "--hub", code=2).stderr
