"""ResNets by other libraries' names: transformers' folders (read and written), timm's folders and the bare state dicts
of timm and torchvision, which name everything alike (read only).
"""

from __future__ import annotations

import re
from typing import Any

import torch

from vitlab.checkpoints import hf, schema, timm
from vitlab.checkpoints.keymap import Dialect, Renamed, Rule, State
from vitlab.checkpoints.keymap import write as rename
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.resnet import ResNetConfig

STAGES = 8  # as many as a file may have; the published ones have 4
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def _norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """A batch norm: weight, bias, and what it has seen of its inputs."""
    return Rule(f"{ours}.*", f"{theirs}.*"), *(Rule(f"{ours}.{name}", f"{theirs}.{name}") for name in STATISTICS)


def _both(ours: str, conv: str, norm: str) -> tuple[Rule, ...]:
    return Rule(f"{ours}.conv.weight", f"{conv}.weight"), *_norm(f"{ours}.norm", norm)


def _hf_block(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"{{p}}encoder.stages.{stage}.layers.{{i}}."
    parts = {f"convs.{n}": f"layer.{n}" for n in range(3)} | {"shortcut": "shortcut"}
    return tuple(
        rule
        for name, part in parts.items()
        for rule in _both(ours + name, f"{theirs}{part}.convolution", f"{theirs}{part}.normalization")
    )


def _timm_block(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"layer{stage + 1}.{{i}}."
    convs = [rule for n in range(3) for rule in _both(f"{ours}convs.{n}", f"{theirs}conv{n + 1}", f"{theirs}bn{n + 1}")]
    return *convs, *_both(f"{ours}shortcut", f"{theirs}downsample.0", f"{theirs}downsample.1")


IMAGENET = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "how": "crop",
    "resize": 256,
    "size": (224, 224),
}
STEM = "{p}embedder.embedder."
HF = Dialect(
    name="hf",
    rules=(
        *_both("stem", STEM + "convolution", STEM + "normalization"),
        *(rule for stage in range(STAGES) for rule in _hf_block(stage)),
        Rule("head.*", "classifier.1.*"),
    ),
    recognise=lambda keys: any(key.endswith("embedder.embedder.convolution.weight") for key in keys),
    assumed={},
    preprocess={**IMAGENET, "interpolation": "bicubic"},
    prefixes=("", "resnet."),
)
TIMM = Dialect(
    name="timm",
    rules=(
        *_both("stem", "conv1", "bn1"),
        *(rule for stage in range(STAGES) for rule in _timm_block(stage)),
        Rule("head.*", "fc.*"),
    ),
    recognise=lambda keys: {"conv1.weight", "layer1.0.conv1.weight"} <= keys,
    assumed={},
    preprocess={**IMAGENET, "interpolation": "bilinear"},
)
DIALECTS = (HF, TIMM)
KNOWN = re.compile(r"resnet(18|34|50|101|152)")  # timm: those that differ in depth alone


def infer_options(renamed: Renamed) -> dict[str, Any]:
    """Options for ResNetConfig from tensors under our names; the counters that old files lack are set to 0."""
    state = renamed.tensors
    stem = _shape(state, "stem.conv.weight")
    depths, widths = [], []
    kind = "bottleneck" if "stages.0.0.convs.2.conv.weight" in state else "basic"
    last = {"basic": 1, "bottleneck": 2}[kind]
    numbers = [key.split(".")[1:3] for key in state if key.startswith("stages.")]
    for stage in sorted({int(stage) for stage, _ in numbers}):
        blocks = {int(block) for at, block in numbers if int(at) == stage}
        if stage != len(depths) or blocks != set(range(len(blocks))):
            raise CheckpointError(f"the blocks are not numbered without gaps: stage {stage} has {sorted(blocks)}.")
        depths.append(len(blocks))
        widths.append(_shape(state, f"stages.{stage}.0.convs.{last}.conv.weight")[0])
        inside = _shape(state, f"stages.{stage}.0.convs.1.conv.weight")[:2]
        expected = (widths[-1] // 4,) * 2 if kind == "bottleneck" else (widths[-1],) * 2
        if inside != expected:
            raise CheckpointError(
                f"stage {stage} has a 3x3 convolution of {inside[1]} to {inside[0]} channels, and ResNet's is of "
                f"{expected[1]} to {expected[0]}: a ResNeXt or a wide ResNet, which are not known."
            )
    if stem[2:] not in ((7, 7), (3, 3)) or not depths:
        raise CheckpointError(
            f"a stem of {stem[2]}x{stem[3]} and {len(depths)} stages: expected 7x7 or 3x3, and some stages."
        )
    for key in [key for key in state if key.endswith("norm.running_mean")]:
        state.setdefault(key.replace("running_mean", "num_batches_tracked"), torch.tensor(0))
    return {
        "channels": stem[1],
        "classes": _shape(state, "head.weight", axes=2)[0] if "head.weight" in state else 0,
        "stem": "imagenet" if stem[2] == 7 else "small",
        "stem_width": stem[0],
        "block": kind,
        "depths": tuple(depths),
        "widths": tuple(widths),
    }


def _shape(state: State, key: str, axes: int = 4) -> tuple[int, ...]:
    if key not in state:
        raise CheckpointError(f"{key} is missing, so this is not a whole ResNet.")
    if state[key].ndim != axes:
        raise CheckpointError(f"{key} has the shape {tuple(state[key].shape)}, expected {axes} axes.")
    return tuple(state[key].shape)


def hf_options(config: dict[str, Any]) -> dict[str, Any]:
    """transformers' config.json -> options; what they leave out has transformers' own default."""
    kind = schema.check(config, schema.HF_STAGES, "config.json").get("model_type")
    if kind != "resnet":
        raise CheckpointError(f"config.json has model_type {kind!r} beside the weights of a ResNet.")
    if config.get("hidden_act", "relu") != "relu":
        raise CheckpointError(f"config.json has hidden_act {config['hidden_act']!r}; only relu is known for a ResNet.")
    if config.get("downsample_in_first_stage", False):
        raise CheckpointError("config.json has downsample_in_first_stage, which is not known here.")
    return {
        "channels": config.get("num_channels", 3),
        "stem": "imagenet",
        "stem_width": config.get("embedding_size", 64),
        "widths": tuple(config.get("hidden_sizes", (256, 512, 1024, 2048))),
        "depths": tuple(config.get("depths", (3, 4, 6, 3))),
        "block": config.get("layer_type", "bottleneck"),
        "stride_in": "1x1" if config.get("downsample_in_bottleneck", False) else "3x3",
    }


def timm_options(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """timm's config.json -> options and preprocess values.

    A variant with the same tensors, which only its name or arguments tell from a plain ResNet, is refused.
    """
    name = str(timm.check_config(config).get("architecture", ""))
    if not KNOWN.fullmatch(name):
        raise CheckpointError(
            f"config.json has the architecture {name!r}; known are timm's resnet18, 34, 50, 101 and 152."
        )
    if args := {key: value for key, value in config.get("model_args", {}).items() if value}:
        raise CheckpointError(f"timm's {', '.join(f'{k}={v!r}' for k, v in args.items())} is not known for a ResNet.")
    cfg = config.get("pretrained_cfg", {})
    size = {"size": tuple(cfg["input_size"][1:])} if len(cfg.get("input_size", ())) == 3 else {}
    colours = {key: IMAGENET[key] for key in ("mean", "std", "how")}
    return {"stride_in": "3x3"}, {**colours, "interpolation": "bilinear", **size, **timm.preprocess_from(cfg)}


def config_for(c: ResNetConfig, labels: list[str] | None) -> dict[str, Any]:
    """config.json for transformers."""
    if c.stem != "imagenet":
        raise CheckpointError("transformers' resnet cannot express stem=small. Use --to native.")
    config: dict[str, Any] = {
        "architectures": ["ResNetForImageClassification" if c.classes else "ResNetModel"],
        "model_type": "resnet",
        "num_channels": c.channels,
        "embedding_size": c.stem_width,
        "hidden_sizes": list(c.widths),
        "depths": list(c.depths),
        "layer_type": c.block,
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": c.stride_in == "1x1",
        "dtype": "float32",
    }
    return config | hf.named_classes(c.classes, labels)


def write(model: Network, state: State, to: str) -> tuple[State, dict[str, Any]]:
    """Tensors and config.json as transformers has them."""
    if to != "hf":
        raise CheckpointError(f"a ResNet is not written as {to}: use --to hf or native.")
    config = config_for(model.config, model.labels)
    prefix = "resnet." if model.config.classes else ""
    return rename("transformers", HF.rules, state, prefix=prefix, heads=1), config
