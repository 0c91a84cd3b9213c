"""Hugging Face transformers folders: ViT, DeiT (also distilled), DINOv2 with and without registers, ViT-MAE.

transformers 5 renamed its keys in memory but still saves the names of version 4: both are read, version 4 is written.
"""

from __future__ import annotations

import re
from typing import Any

from vitlab.checkpoints import schema
from vitlab.checkpoints.keymap import JOIN, ONE_ROW, Dialect, Renamed, Rule, State
from vitlab.errors import CheckpointError
from vitlab.models.entry import OPENAI
from vitlab.models.vit_config import ViTConfig

COMMON = (
    Rule("class_token", "{p}embeddings.cls_token"),
    Rule("distill_token", "{p}embeddings.distillation_token"),
    Rule("register_tokens", "{p}embeddings.register_tokens"),
    Rule("mask_token", "{p}embeddings.mask_token", ONE_ROW),
    Rule("positions.table", "{p}embeddings.position_embeddings"),
    Rule("patch_embed.proj.*", "{p}embeddings.patch_embeddings.projection.*"),
    Rule("norm.*", "{p}layernorm.*"),
    Rule("pre_logits.*", "{p}pooler.dense.*"),
    Rule("head_distill.*", "distillation_classifier.*"),
)
HEAD = (Rule("head.*", "classifier.*"),)
DISTILLED_HEAD = (Rule("head.*", "cls_classifier.*"),)

LAYER = "{p}encoder.layer.{i}."
OLD_ATTENTION = (
    Rule(
        "blocks.{i}.attention.qkv.*",
        tuple(LAYER + f"attention.attention.{part}.*" for part in ("query", "key", "value")),
        JOIN,
    ),
    Rule("blocks.{i}.attention.proj.*", LAYER + "attention.output.dense.*"),
)
VIT_BLOCK = (
    *OLD_ATTENTION,
    Rule("blocks.{i}.norm1.*", LAYER + "layernorm_before.*"),
    Rule("blocks.{i}.norm2.*", LAYER + "layernorm_after.*"),
    Rule("blocks.{i}.mlp.fc1.*", LAYER + "intermediate.dense.*"),
    Rule("blocks.{i}.mlp.fc2.*", LAYER + "output.dense.*"),
)
_DINOV2_REST = (
    Rule("blocks.{i}.norm1.*", LAYER + "norm1.*"),
    Rule("blocks.{i}.norm2.*", LAYER + "norm2.*"),
    Rule("blocks.{i}.scale1.gamma", LAYER + "layer_scale1.lambda1"),
    Rule("blocks.{i}.scale2.gamma", LAYER + "layer_scale2.lambda1"),
)
DINOV2_BLOCK = (
    *OLD_ATTENTION,
    *_DINOV2_REST,
    Rule("blocks.{i}.mlp.fc1.*", LAYER + "mlp.fc1.*"),
    Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.fc2.*"),
)
DINOV2_SWIGLU_BLOCK = (
    *OLD_ATTENTION,
    *_DINOV2_REST,
    Rule("blocks.{i}.mlp.fc1.*", LAYER + "mlp.weights_in.*"),
    Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.weights_out.*"),
)


def new_names(layer: str) -> tuple[Rule, ...]:
    """Version 5's names, in memory only: ViT's stand under layers, DINOv2's under encoder.layer."""
    qkv = tuple(f"{layer}attention.{part}_proj.*" for part in "qkv")
    return (
        Rule("blocks.{i}.attention.qkv.*", qkv, JOIN),
        Rule("blocks.{i}.attention.proj.*", layer + "attention.o_proj.*"),
        Rule("blocks.{i}.norm1.*", layer + "layernorm_before.*"),
        Rule("blocks.{i}.norm2.*", layer + "layernorm_after.*"),
        Rule("blocks.{i}.mlp.fc1.*", layer + "mlp.fc1.*"),
        Rule("blocks.{i}.mlp.fc2.*", layer + "mlp.fc2.*"),
        Rule("blocks.{i}.mlp.fc1.*", (layer + "mlp.gate_proj.*", layer + "mlp.up_proj.*"), JOIN),
        Rule("blocks.{i}.mlp.fc2.*", layer + "mlp.down_proj.*"),
    )


DIALECT = Dialect(
    name="hf",
    rules=(
        *(*COMMON, *HEAD, *DISTILLED_HEAD),
        *(*VIT_BLOCK, *DINOV2_BLOCK, *DINOV2_SWIGLU_BLOCK),
        *(*new_names("{p}layers.{i}."), *new_names(LAYER)),
    ),
    recognise=lambda keys: any(key.endswith("embeddings.patch_embeddings.projection.weight") for key in keys),
    assumed={"eps": 1e-12, "activation": "gelu"},
    preprocess={},
    options={"resize_rule": "bicubic"},
    prefixes=("", "vit.", "deit.", "dinov2.", "dinov2_with_registers."),
    ignored={r"decoder\..*": "MAE's decoder: only the encoder is loaded"},
)
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",  # the first of a kind is the one written
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
MODEL_TYPES = ("vit", "deit", "vit_mae", "dinov2", "dinov2_with_registers")
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def options_from(config: dict[str, Any]) -> dict[str, Any]:
    """config.json -> options for our config."""
    kind = schema.check(config, schema.HF, "config.json").get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(f"config.json has model_type {kind!r}; known are {', '.join(MODEL_TYPES)}.")
    activation = config.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"config.json has hidden_act {activation!r}; known are {', '.join(ACTIVATIONS)}.")
    if config.get("pooler_act", "tanh") != "tanh":
        raise CheckpointError(f"config.json has pooler_act {config['pooler_act']!r}; only tanh is known.")
    if not isinstance(config.get("patch_size", 16), int):
        raise CheckpointError(f"config.json has patch_size {config['patch_size']}; only square patches are known.")
    options: dict[str, Any] = {
        "image_size": config.get("image_size", 224),
        "patch_size": config.get("patch_size", 16),
        "channels": config.get("num_channels", 3),
        "width": config.get("hidden_size", 768),
        "depth": config.get("num_hidden_layers", 12),
        "qkv_bias": config.get("qkv_bias", True),
        "heads": config.get("num_attention_heads", 12),
        "activation": ACTIVATIONS[activation],
        "eps": config.get("layer_norm_eps", 1e-6 if kind.startswith("dinov2") else 1e-12),
        "dropout": config.get("hidden_dropout_prob", 0.0),
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.0),
        "stochastic_depth": config.get("drop_path_rate", 0.0),
    }
    if config.get("layerscale_value"):
        options["layer_scale"] = float(config["layerscale_value"])
    if kind == "dinov2_with_registers":
        options["resize_rule"] = "bicubic_antialias"
    return options


def labels_from(config: dict[str, Any]) -> list[str] | None:
    """Class names; transformers' own fillers LABEL_0, LABEL_1, ... are none."""
    names = config.get("id2label")
    labels = [] if names is None else schema.class_names(names, "config.json")
    return None if all(label == f"LABEL_{i}" for i, label in enumerate(labels)) else labels


HALF: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP: dict[str, Any] = {"image_mean": OPENAI["mean"], "image_std": OPENAI["std"], "resample": 3}
_CLIP |= {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
PROCESSORS: dict[str, dict[str, Any]] = {  # transformers' image processors -> what they do where a file leaves it out
    "ViT": {"resample": 2, "size": 224, **HALF},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224, **HALF},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Pvt": {"resample": 3, "size": 224, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "ConvNext": {"resample": 3, "size": {"shortest_edge": 384}, **HALF},
}
PROCESSOR_OF = {  # model_type -> the processor of a file that names none
    **dict.fromkeys(("vit", "vit_mae", "swin"), "ViT"),
    "deit": "DeiT",
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), "Bit"),
    **dict.fromkeys(("pvt", "pvt_v2"), "Pvt"),
    "resnet": "ConvNext",
    "clip": "CLIP",
}


def preprocess_from(config: dict[str, Any], model_type: str = "vit") -> dict[str, Any]:
    """preprocessor_config.json -> values for Preprocess; what it leaves out is as its image processor has it."""
    schema.check(config, schema.HF_PREPROCESSOR, "preprocessor_config.json")
    processor = _processor(config, model_type)
    config = _with_defaults(config, processor)
    if config["resample"] not in RESAMPLE:
        raise CheckpointError(f"preprocessor_config.json has resample {config['resample']!r}; known are 0 to 5.")
    values: dict[str, Any] = {"how": "stretch", "interpolation": RESAMPLE[config["resample"]]}
    if config.get("do_normalize", True):
        values |= {"mean": config["image_mean"], "std": config["image_std"]}
    else:
        values |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    if not config.get("do_rescale", True):
        values["scale"] = 1.0
    elif "rescale_factor" in config:
        values["scale"] = config["rescale_factor"]
    if not config.get("do_resize", True):
        raise CheckpointError("preprocessor_config.json has do_resize false, but our input size is fixed: set it true.")
    size, crop = config["size"], config.get("crop_size")
    shorter = _shorter_side(size, processor)
    if processor == "ConvNext":  # transformers' ResNets use it too
        if shorter is None:
            raise CheckpointError(
                f"preprocessor_config.json has size {size!r}; a {processor} processor has shortest_edge."
            )
        values["size"] = _pair(shorter)  # from 384 on it stretches
        values |= {"how": "crop", "resize": int(shorter / (config.get("crop_pct") or 0.875))} if shorter < 384 else {}
    elif config.get("do_center_crop") and crop is not None:
        values |= {"how": "crop", "size": _pair(crop), "resize": _pair(size) if shorter is None else shorter}
    elif shorter is not None:  # would leave the size open, see preprocess_notes
        values |= {"how": "crop", "size": _pair(shorter), "resize": shorter}
    else:
        values["size"] = _pair(size)
    return values


def preprocess_notes(config: dict[str, Any], model_type: str = "vit") -> list[str]:
    """Where our preprocess may differ from what transformers does with this preprocessor_config.json."""
    processor, notes = _processor(config, model_type), []
    named = _processor_name(config)
    if named and not re.match(f"({'|'.join(PROCESSORS)})(Image|Feature)", named):
        notes.append(f"preprocessor_config.json is for a {named}, which is not known: read as a {processor}'s.")
    config = _with_defaults(config, processor)
    cropped = processor == "ConvNext" or (config.get("do_center_crop") and config.get("crop_size") is not None)
    if not cropped and _shorter_side(config["size"], processor) is not None:
        notes.append(
            "preprocessor_config.json resizes the shorter side and crops nothing, so images keep their shape there; "
            "here the input has one size, so the centre square is cut out. Images that are not square give other "
            "numbers."
        )
    return notes


def _with_defaults(config: dict[str, Any], processor: str) -> dict[str, Any]:
    return {**PROCESSORS[processor], **{key: value for key, value in config.items() if value is not None}}


def _shorter_side(size: Any, processor: str) -> int | None:
    """What the shorter side is resized to, in old files one number; None: both sides are given."""
    if isinstance(size, dict):
        return size.get("shortest_edge")
    return size if processor in ("CLIP", "Bit", "ConvNext") else None


def _processor(config: dict[str, Any], model_type: str) -> str:
    """Which of PROCESSORS this file is for."""
    name = _processor_name(config)
    found = next((known for known in PROCESSORS if re.match(f"{known}(Image|Feature)", name)), None)
    return found or PROCESSOR_OF.get(model_type, "ViT")


def _processor_name(config: dict[str, Any]) -> str:
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")


def usual_preprocess(config: dict[str, Any]) -> dict[str, Any]:
    """What a folder without preprocessor_config.json was most likely trained with."""
    if config["model_type"] == "vit":
        return {}
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return {"mean": mean, "std": std, "interpolation": "bicubic", "how": "crop", "resize": 256, "size": (224, 224)}


def _pair(size: Any) -> tuple[int, int]:
    if isinstance(size, dict) and "shortest_edge" in size:
        size = size["shortest_edge"]
    return (size["height"], size["width"]) if isinstance(size, dict) else (size, size)


def architecture(c: ViTConfig) -> str:
    """The transformers model_type that is this network; raises, naming what none of them can express."""
    dino = bool(c.residual.layer_scale)
    kind = "dinov2_with_registers" if c.tokens.registers else "dinov2" if dino else "vit"
    kind = "deit" if c.tokens.distill_token else kind
    pooling = "class_mean" if kind.startswith("dinov2") and c.classes else "class"
    refuse = {
        f"positions={c.positions.kind}": c.positions.kind != "learned",
        f"prefix_positions={c.positions.prefix_positions}": c.positions.prefix_positions == "none"
        or (c.positions.prefix_positions == "all" and bool(c.tokens.registers)),
        "a network without class token": not c.tokens.class_token,
        "registers without layer_scale": bool(c.tokens.registers) and not dino,
        "distill_token with registers or layer_scale": c.tokens.distill_token and bool(c.tokens.registers or dino),
        f"pooling={c.head.pooling} (only {pooling})": c.head.pooling != pooling,
        "head_hidden with classes, or in DINOv2": bool(c.head.head_hidden and (c.classes or kind != "vit")),
        "head_dim": c.head_dim is not None and c.head_dim * c.heads != c.width,
        "norm=post": c.norm.kind == "post",
        "norm_pre": c.norm.norm_pre,
        "final_norm=no": c.final_norm == "no" and c.norm.kind == "pre",
        "qk_norm": c.attention.qk_norm,
        "stem=conv": c.stem.kind == "conv",
        "patch_norms": c.stem.patch_norms,
        "patch_bias=False": not c.stem.patch_bias,
        "mlp=swiglu outside DINOv2": c.mlp.kind == "swiglu" and not kind.startswith("dinov2"),
        "mask_token outside DINOv2": c.tokens.mask_token and not kind.startswith("dinov2"),
        f"mlp_ratio={c.mlp.mlp_ratio} (only whole numbers)": kind.startswith("dinov2") and c.mlp.mlp_ratio % 1 != 0,
    }
    if found := [what for what, wrong in refuse.items() if wrong]:
        raise CheckpointError(f"transformers' {kind} cannot express {', '.join(found)}. Use --to native.")
    return kind


def leave_out_pooler(renamed: Renamed) -> None:
    """Some classifier files also hold a pooler; transformers' classifiers do not read it."""
    for key in ("pre_logits.weight", "pre_logits.bias"):
        if key in renamed.tensors:
            del renamed.tensors[key]
            renamed.unused |= dict.fromkeys(renamed.origin.pop(key), "a pooler, which the classifier does not read")


CLASSES = {  # model_type -> its class with and without a classifier
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel"),
}


def write_rules(c: ViTConfig) -> tuple[tuple[Rule, ...], str]:
    """The rename table for writing this network, and what {p} stands for."""
    kind = architecture(c)
    if kind.startswith("dinov2"):
        blocks = DINOV2_SWIGLU_BLOCK if c.mlp.kind == "swiglu" else DINOV2_BLOCK
    else:
        blocks = VIT_BLOCK
    head = DISTILLED_HEAD if kind == "deit" else HEAD
    return (*COMMON, *head, *blocks), f"{kind}." if c.classes else ""


def complete(c: ViTConfig, state: State) -> State:
    """DINOv2 always has a mask token in transformers; a network of ours may not."""
    if architecture(c).startswith("dinov2") and "mask_token" not in state:
        return {**state, "mask_token": state["class_token"].new_zeros(1, c.width)}
    return state


def config_for(c: ViTConfig, labels: list[str] | None) -> dict[str, Any]:
    """config.json."""
    kind = architecture(c)
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    square = c.image_size[0] == c.image_size[1]
    config: dict[str, Any] = {
        "architectures": [CLASSES[kind][0 if c.classes else 1]],
        "model_type": kind,
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "hidden_act": theirs[c.mlp.activation],
        "layer_norm_eps": c.norm.eps,
        "image_size": c.image_size[0] if square else list(c.image_size),
        "patch_size": c.patch_size,
        "num_channels": c.channels,
        "qkv_bias": c.attention.qkv_bias,
        "hidden_dropout_prob": c.drop.dropout,
        "attention_probs_dropout_prob": c.drop.attention_dropout,
        "dtype": "float32",
    }
    if kind.startswith("dinov2"):
        config |= {
            "mlp_ratio": int(c.mlp.mlp_ratio),
            "use_swiglu_ffn": c.mlp.kind == "swiglu",
            "layerscale_value": c.residual.layer_scale,
            "drop_path_rate": c.residual.stochastic_depth,
        }
        if c.tokens.registers:
            config["num_register_tokens"] = c.tokens.registers
    else:
        config["intermediate_size"] = c.mlp_hidden
        if c.head.head_hidden:
            config["pooler_output_size"] = c.head.head_hidden
    return config | named_classes(c.classes, labels)


def named_classes(classes: int, labels: list[str] | None) -> dict[str, Any]:
    """What config.json says of a classifier's classes."""
    names = labels or [f"LABEL_{i}" for i in range(classes)]
    both = {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }
    return both if classes else {}


def preprocessor_for(preprocess: Any) -> dict[str, Any] | None:
    """preprocessor_config.json; None where transformers' image processors have no counterpart."""
    covers = preprocess.how == "crop" and preprocess.resize is None and preprocess.size[0] != preprocess.size[1]
    if preprocess.how == "fit" or covers:
        return None
    size: dict[str, int] = dict(zip(("height", "width"), preprocess.size, strict=True))
    config: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": len(preprocess.mean) == 3,
        "do_resize": True,
        "size": size,
        "resample": next(n for n, name in RESAMPLE.items() if name == preprocess.interpolation),
        "do_rescale": True,
        "rescale_factor": preprocess.scale,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
    }
    if preprocess.how == "crop":
        resize = preprocess.resize or min(preprocess.size)
        resized = {"shortest_edge": resize} if isinstance(resize, int) else dict(zip(size, resize, strict=True))
        config |= {
            "image_processor_type": "BitImageProcessor",
            "do_center_crop": True,
            "crop_size": size,
            "size": resized,
        }
    return config
