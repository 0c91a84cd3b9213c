"""Hugging Face transformers folders: ViT, DeiT (also distilled), DINOv2 with and without registers, ViT-MAE, ViT-MSN
and I-JEPA.

transformers 5 renamed its keys in memory but still saves the names of version 4: both are read, version 4 is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab.checkpoints import keymap, schema
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import JOIN, ONE_ROW, Dialect, Options, Rule, Source, State, Stated, layers
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network
from vitlab.models.config import Config
from vitlab.models.entry import IMAGENET, IMAGENET_CROP, OPENAI
from vitlab.models.vit_config import ViTConfig
from vitlab.parsing import is_object, is_sequence

Fields = Mapping[str, tuple[str, Any]]  # our option -> its name in config.json, and their default


def read_fields(config: Options, fields: Fields) -> Options:
    """config.json -> options; what it leaves out has the library's own default."""
    values = {ours: config.get(theirs, default) for ours, (theirs, default) in fields.items()}
    return {ours: tuple(value) if is_sequence(value) else value for ours, value in values.items()}


def write_fields(c: Config, fields: Fields) -> Options:
    """A config -> values of config.json, where a square image size is one number."""
    values = {theirs: c.option(ours) for ours, (theirs, _) in fields.items()}
    values = {name: list(value) if is_sequence(value) else value for name, value in values.items()}
    if "image_size" in values and len(set(values["image_size"])) == 1:
        values["image_size"] = values["image_size"][0]
    return values


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
    *layers("blocks.{i}.", LAYER, {"norm1": "layernorm_before", "norm2": "layernorm_after"}),
    *layers("blocks.{i}.mlp.", LAYER, {"fc1": "intermediate.dense", "fc2": "output.dense"}),
)
_DINOV2 = (
    *OLD_ATTENTION,
    *layers("blocks.{i}.", LAYER, ("norm1", "norm2")),
    Rule("blocks.{i}.scale1.gamma", LAYER + "layer_scale1.lambda1"),
    Rule("blocks.{i}.scale2.gamma", LAYER + "layer_scale2.lambda1"),
)
DINOV2_BLOCK = (*_DINOV2, *layers("blocks.{i}.mlp.", LAYER + "mlp.", ("fc1", "fc2")))
SWIGLU = {"fc1": "weights_in", "fc2": "weights_out"}
DINOV2_SWIGLU_BLOCK = (*_DINOV2, *layers("blocks.{i}.mlp.", LAYER + "mlp.", SWIGLU))


def new_names(layer: str) -> tuple[Rule, ...]:
    """Version 5's names, in memory only: ViT's stand under layers, DINOv2's under encoder.layer."""
    qkv = tuple(f"{layer}attention.{part}_proj.*" for part in "qkv")
    return (
        Rule("blocks.{i}.attention.qkv.*", qkv, JOIN),
        Rule("blocks.{i}.attention.proj.*", layer + "attention.o_proj.*"),
        *layers("blocks.{i}.", layer, {"norm1": "layernorm_before", "norm2": "layernorm_after"}),
        *layers("blocks.{i}.mlp.", layer + "mlp.", ("fc1", "fc2")),
        Rule("blocks.{i}.mlp.fc1.*", (layer + "mlp.gate_proj.*", layer + "mlp.up_proj.*"), JOIN),
        Rule("blocks.{i}.mlp.fc2.*", layer + "mlp.down_proj.*"),
    )


def tower_blocks(ours: str, theirs: str) -> tuple[Rule, ...]:
    """The blocks of both towers of a CLIP or SigLIP."""
    names = {"attention.proj": "self_attn.out_proj", "norm1": "layer_norm1", "norm2": "layer_norm2"}
    return (
        Rule(f"{ours}attention.qkv.*", tuple(f"{theirs}self_attn.{part}_proj.*" for part in "qkv"), JOIN),
        *layers(ours, theirs, names | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}),
    )


def tower_config(config: Options, tower: str) -> Options:
    """text_config or vision_config. Full dumps of transformers 4 hold null for what has no value."""
    inner: Options = config.get(f"{tower}_config") or config.get(f"{tower}_config_dict") or {}
    return schema.check({k: v for k, v in inner.items() if v is not None}, schema.HF, f"config.json's {tower}_config")


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",  # the first of a kind is the one written
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}
INTERPOLATE = "transformers needs interpolate_pos_encoding=True for that"
MODEL_TYPES: dict[str, ModelType] = {
    "vit": ModelType("ViT", INTERPOLATE, {}),
    "deit": ModelType("DeiT", INTERPOLATE),
    "dinov2": ModelType("Bit"),
    "dinov2_with_registers": ModelType("Bit"),
    "ijepa": ModelType("ViT", INTERPOLATE),
}
VIT_MAE = {"vit_mae": ModelType("ViT", INTERPOLATE)}
VIT_MSN = {"vit_msn": ModelType("ViT", INTERPOLATE)}  # the network is a ViT, and is written as one
READABLE = MODEL_TYPES | VIT_MAE | VIT_MSN
EPS = {"dinov2": 1e-6, "dinov2_with_registers": 1e-6, "vit_msn": 1e-6}  # where config.json says nothing; else 1e-12
FIELDS: Fields = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 768),
    "depth": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "qkv_bias": ("qkv_bias", True),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
}
RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def options_from(config: Options) -> Options:
    """config.json -> options for our config."""
    kind = schema.check(config, schema.HF, "config.json").get("model_type")
    if kind not in READABLE:
        raise CheckpointError(f"config.json has model_type {kind!r}; known are {', '.join(READABLE)}.")
    if config.get("pooler_act", "tanh") != "tanh":
        raise CheckpointError(f"config.json has pooler_act {config['pooler_act']!r}; only tanh is known.")
    if not isinstance(config.get("patch_size", 16), int):
        raise CheckpointError(f"config.json has patch_size {config['patch_size']}; only square patches are known.")
    options = read_fields(config, FIELDS)
    options["activation"] = activation_of(config)
    options["eps"] = config.get("layer_norm_eps", EPS.get(kind, 1e-12))
    options["stochastic_depth"] = config.get("drop_path_rate", 0.0)
    if config.get("layerscale_value"):
        options["layer_scale"] = float(config["layerscale_value"])
    if kind == "dinov2_with_registers":
        options["resize_rule"] = "bicubic_antialias"
    return options


def activation_of(config: Options, usual: str = "gelu") -> str:
    name = config.get("hidden_act", usual)
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json has hidden_act {name!r}; known are {', '.join(ACTIVATIONS)}.")
    return ACTIVATIONS[name]


def activation_for(name: str) -> str:
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == name)


def labels_from(config: Options) -> list[str] | None:
    """Class names; transformers' own fillers LABEL_0, LABEL_1, ... are none."""
    names = config.get("id2label")
    labels = [] if names is None else schema.class_names(names, "config.json")
    return None if all(label == f"LABEL_{i}" for i, label in enumerate(labels)) else labels


HALF: Options = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CROP: Options = {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": 224}
_IMAGENET: Options = {"image_mean": IMAGENET["mean"], "image_std": IMAGENET["std"]}
WHOLE_IMAGE = ("Eomt", "Yolos", "DPT")  # image processors that crop nothing and leave an image's shape open
_CLIP: Options = {"image_mean": OPENAI["mean"], "image_std": OPENAI["std"], "resample": 3, **_CROP}
PROCESSORS: dict[str, Options] = {  # transformers' image processors -> what they do where a file leaves it out
    "ViT": {"resample": 2, "size": 224, **HALF},
    "DeiT": {"resample": 3, "size": 256, "do_center_crop": True, "crop_size": 224, **HALF},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "Siglip": {"resample": 3, "size": {"height": 224, "width": 224}, **HALF},
    "Siglip2": {"resample": 2, "patch_size": 16, "max_num_patches": 256, **HALF},
    "Beit": {"resample": 3, "size": 224, **HALF},
    "Eomt": {"resample": 2, "size": {"shortest_edge": 640}, **_IMAGENET},
    "Yolos": {"resample": 2, "size": {"shortest_edge": 800}, **_IMAGENET},
    "Segformer": {"resample": 2, "size": {"height": 512, "width": 512}, **_IMAGENET},
    "DPT": {"resample": 3, "size": {"height": 384, "width": 384}, **HALF},
    "Pvt": {"resample": 3, "size": 224, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "ConvNext": {"resample": 3, "size": {"shortest_edge": 384}, **HALF},
    "Tipsv2": {"resample": 2, "size": {"height": 448, "width": 448}, "do_normalize": False},
    "DINOv3ViT": {"resample": 2, "size": 224, "image_mean": IMAGENET["mean"], "image_std": IMAGENET["std"]},
}


def preprocess_from(config: Options, usual: str = "ViT") -> Options:
    """preprocessor_config.json -> values for Preprocess; what it leaves out is as its image processor has it.

    `usual`: the image processor of a file that names none.
    """
    schema.check(config, schema.HF_PREPROCESSOR, "preprocessor_config.json")
    processor = _processor(config, usual)
    config = _with_defaults(config, processor)
    if config["resample"] not in RESAMPLE:
        raise CheckpointError(f"preprocessor_config.json has resample {config['resample']!r}; known are 0 to 5.")
    values: Options = {"how": "stretch", "interpolation": RESAMPLE[config["resample"]]}
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
    if processor == "Siglip2":  # each image keeps its aspect
        patch, patches = config["patch_size"], config["max_num_patches"]
        side = max(1, math.isqrt(patches)) * patch
        return {**values, "how": "aspect", "patch": patch, "max_patches": patches, "size": (side, side)}
    if processor in WHOLE_IMAGE:  # at the network's own size
        return {**values, "how": "fit" if config.get("do_pad") and processor == "Eomt" else "stretch"}
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


WHOLE_NOTE = (
    "preprocessor_config.json lets images keep their shape; here the input has one size, so they are stretched to it "
    "or padded. Images that are not square give other numbers."
)


def preprocess_notes(config: Options, usual: str = "ViT") -> list[str]:
    """Where our preprocess may differ from what transformers does with this preprocessor_config.json."""
    processor = _processor(config, usual)
    notes: list[str] = []
    name = _processor_name(config)
    if name and not re.match(f"({'|'.join(PROCESSORS)})(Image|Feature)", name):
        notes.append(f"preprocessor_config.json is for a {name}, which is not known: read as a {processor}'s.")
    config = _with_defaults(config, processor)
    if processor in WHOLE_IMAGE:
        return [*notes, WHOLE_NOTE]
    cropped = processor == "ConvNext" or (config.get("do_center_crop") and config.get("crop_size") is not None)
    if not cropped and processor != "Siglip2" and _shorter_side(config["size"], processor) is not None:
        notes.append(
            "preprocessor_config.json resizes the shorter side and crops nothing, so images keep their shape there; "
            "here the input has one size, so the centre square is cut out. Images that are not square give other "
            "numbers."
        )
    return notes


def _with_defaults(config: Options, processor: str) -> Options:
    return {**PROCESSORS[processor], **{key: value for key, value in config.items() if value is not None}}


def _shorter_side(size: Any, processor: str) -> int | None:
    """What the shorter side is resized to, in old files one number; None: both sides are given."""
    if is_object(size):
        return size.get("shortest_edge")
    return size if processor in ("CLIP", "Siglip", "Bit", "ConvNext") else None


def _processor(config: Options, usual: str) -> str:
    """Which of PROCESSORS this file is for."""
    name = _processor_name(config)
    return next((known for known in PROCESSORS if re.match(f"{known}(Image|Feature)", name)), usual)


def _processor_name(config: Options) -> str:
    return str(config.get("image_processor_type") or config.get("feature_extractor_type") or "")


def _pair(size: Any) -> tuple[int, int]:
    if not is_object(size):
        return size, size
    side = size.get("shortest_edge")
    return (size["height"], size["width"]) if side is None else (side, side)


def reader(options: Callable[[Options], Options], model_types: Mapping[str, ModelType]) -> Callable[[Source], Stated]:
    """How a transformers folder is read whose config.json `options` understands."""

    def read(source: Source) -> Stated:
        if not (source.path / "config.json").is_file():
            return Stated()
        config = schema.check(
            read_json(source.path / "config.json"), {"model_type": schema.TEXT | schema.NULL}, "config.json"
        )
        stated = Stated(options(config), labels=labels_from(config), model_type=config["model_type"])
        return with_processor(stated, source.path, model_types[config["model_type"]])

    return read


def with_processor(stated: Stated, folder: Path, kind: ModelType) -> Stated:
    """Adds what preprocessor_config.json states, or what is usual where it is missing."""
    stated = replace(stated, size_note=kind.size_note)
    if not (folder / "preprocessor_config.json").is_file():
        return replace(stated, usual_preprocess=kind.preprocess)
    config = read_json(folder / "preprocessor_config.json")
    preprocess = preprocess_from(config, kind.processor)
    return replace(stated, preprocess=preprocess, notes=tuple(preprocess_notes(config, kind.processor)))


def has_decoder(keys: set[str]) -> bool:
    return "decoder.decoder_pos_embed" in keys


def _without_prefix(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(replace(rule, theirs=tuple(key.replace("{p}", "") for key in rule.keys)) for rule in rules)


NO_DECODER = "MAE's decoder: only the encoder is loaded"
_BASE = Dialect(
    name="hf",
    rules=(
        *(*COMMON, *HEAD, *DISTILLED_HEAD),
        *(*VIT_BLOCK, *DINOV2_BLOCK, *DINOV2_SWIGLU_BLOCK),
        *(*new_names("{p}layers.{i}."), *new_names(LAYER)),
        *_without_prefix(VIT_BLOCK),  # version 5 saves a ViTMSNForImageClassification so
    ),
    recognise=lambda keys: any(key.endswith("embeddings.patch_embeddings.projection.weight") for key in keys),
    assumed={"eps": 1e-12, "activation": "gelu"},
    preprocess={},
    options={"resize_rule": "bicubic"},
    prefixes=("", "vit.", "deit.", "dinov2.", "dinov2_with_registers.", "ijepa."),
    ignored={r"decoder\..*": NO_DECODER},
    read_stated=reader(options_from, READABLE),
)
MAE_ENCODER = replace(_BASE, preprocess=IMAGENET_CROP, recognise=has_decoder)
DIALECT = replace(_BASE, bare_variants=(MAE_ENCODER,))


# ------------------------------------------------------------------------------------------------------------ writing


def architecture(c: ViTConfig) -> str:
    """The transformers model_type that is this network; raises, naming what none of them can express."""
    dino = bool(c.residual.layer_scale)
    kind = "dinov2_with_registers" if c.tokens.registers else "dinov2" if dino else "vit"
    kind = "deit" if c.tokens.distill_token or _one_head(c) else kind
    kind = "ijepa" if kind == "vit" and not c.tokens.class_token else kind
    pooling = "class_mean" if kind.startswith("dinov2") and c.classes else "mean" if kind == "ijepa" else "class"
    names = ["positions", "head_dim", "norm", "norm_pre", "final_norm", "qk_norm", "stem", "patch_norms", "patch_bias"]
    names += ["class_token"] * (kind != "ijepa")
    others = {
        f"prefix_positions={c.positions.prefix_positions}": (c.positions.prefix_positions == "none" and bool(c.prefix))
        or (c.positions.prefix_positions == "all" and bool(c.tokens.registers) and kind != "deit"),
        "registers without layer_scale": bool(c.tokens.registers) and not dino and kind != "deit",
        "distill_token with registers or layer_scale": c.tokens.distill_token and bool(c.tokens.registers or dino),
        f"pooling={c.head.pooling} (only {pooling})": c.head.pooling != pooling,
        "head_hidden with classes, or in DINOv2": bool(c.head.head_hidden and (c.classes or kind.startswith("dinov2"))),
        "mlp=swiglu outside DINOv2": c.mlp.kind == "swiglu" and not kind.startswith("dinov2"),
        "mask_token outside DINOv2": c.tokens.mask_token and not kind.startswith("dinov2"),
        f"mlp_ratio={c.mlp.mlp_ratio} (only whole numbers)": kind.startswith("dinov2") and c.mlp.mlp_ratio % 1 != 0,
    }
    check_vit(f"transformers' {kind}", c, names, others)
    return kind


def _one_head(c: ViTConfig) -> bool:
    """A DeiT whose distillation token no head reads: it is a register with a position."""
    return c.tokens.registers == 1 and c.positions.prefix_positions == "all" and not c.residual.layer_scale


CLASSES = {  # model_type -> its class with and without a classifier
    "vit": ("ViTForImageClassification", "ViTModel"),
    "deit": ("DeiTForImageClassificationWithTeacher", "DeiTModel"),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Model"),
    "dinov2_with_registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersModel"),
    "ijepa": ("IJepaForImageClassification", "IJepaModel"),
}


def _class_for(kind: str, c: ViTConfig) -> str:
    if kind == "deit" and c.classes and not c.tokens.distill_token:
        return "DeiTForImageClassification"
    return CLASSES[kind][0 if c.classes else 1]


def write_rules(c: ViTConfig) -> tuple[tuple[Rule, ...], str]:
    """The rename table for writing this network, and what {p} stands for."""
    kind = architecture(c)
    if kind.startswith("dinov2"):
        blocks = DINOV2_SWIGLU_BLOCK if c.mlp.kind == "swiglu" else DINOV2_BLOCK
    else:
        blocks = VIT_BLOCK
    head = DISTILLED_HEAD if c.tokens.distill_token else HEAD
    second = (Rule("register_tokens", "{p}embeddings.distillation_token"),) if kind == "deit" else ()
    return (*second, *COMMON, *head, *blocks), f"{kind}." if c.classes else ""


def config_for(c: ViTConfig, labels: list[str] | None) -> Options:
    """config.json."""
    kind = architecture(c)
    config: Options = {
        **write_fields(c, FIELDS),
        "architectures": [_class_for(kind, c)],
        "model_type": kind,
        "hidden_act": activation_for(c.mlp.activation),
        "layer_norm_eps": c.norm.eps,
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
    return config | class_fields(c.classes, labels)


def class_fields(classes: int, labels: list[str] | None) -> Options:
    """A classifier's id2label and label2id in config.json."""
    if not classes:
        return {}
    names = labels or [f"LABEL_{i}" for i in range(classes)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _write(model: Network, state: State) -> Written:
    c = model.config
    rules, prefix = write_rules(c)
    if architecture(c).startswith("dinov2") and "mask_token" not in state:  # transformers' always has one
        state = {**state, "mask_token": state["class_token"].new_zeros(1, c.width)}
    tensors = keymap.write("transformers", rules, state, prefix=prefix, heads=c.heads)
    return folder(tensors, config_for(c, model.labels), model.preprocess)


WRITER = Writer(_write, any_size=lambda config: architecture(config).startswith("dinov2"))


def folder(tensors: State, config: Options, preprocess: Preprocess | None, processor: str = "") -> Written:
    """A transformers folder of these tensors and this config.json; `processor`: its class, where that is certain."""
    values = preprocessor_for(preprocess) if preprocess is not None else None
    if values is None:
        note = "its preprocess has no counterpart in transformers, so none was written."
        return Written(tensors, {"config.json": config}, [note])
    if processor:
        values = {"do_center_crop": False, **values, "image_processor_type": processor}  # CLIP's crops if not told
    return Written(tensors, {"config.json": config, "preprocessor_config.json": values})


def classifier(model: Network, state: State, rules: tuple[Rule, ...], name: str, config: Options) -> Written:
    """The folder of transformers' NameForImageClassification, or NameModel where there are no classes."""
    c = model.config
    config = {
        **config,
        "architectures": [f"{name}ForImageClassification" if c.classes else f"{name}Model"],
        "model_type": model.family,
        "dtype": "float32",
        **class_fields(c.classes, model.labels),
    }
    prefix = f"{model.family}." if c.classes else ""
    return folder(keymap.write("transformers", rules, state, prefix=prefix, heads=1), config, model.preprocess)


def preprocessor_for(preprocess: Preprocess) -> Options | None:
    """preprocessor_config.json; None where transformers' image processors have no counterpart."""
    covers = preprocess.how == "crop" and preprocess.resize is None and preprocess.size[0] != preprocess.size[1]
    if preprocess.how == "fit" or covers:
        return None
    size: dict[str, int] = dict(zip(("height", "width"), preprocess.size, strict=True))
    config: Options = {
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
    if preprocess.how == "aspect":
        del config["size"]
        own = {"patch_size": preprocess.patch, "max_num_patches": preprocess.max_patches}
        config |= {"image_processor_type": "Siglip2ImageProcessor", **own}
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
