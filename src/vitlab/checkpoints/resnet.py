"""ResNets by other libraries' names: transformers' folders (read and written), timm's folders and the bare state dicts
of timm and torchvision, which name everything alike (read only).
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from vitlab.checkpoints import hf, schema, staged, timm
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, Written, check_agreement
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, Source, State, Stated, shape_of
from vitlab.checkpoints.staged import STAGES, depths_of
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.entry import IMAGENET_CROP
from vitlab.models.resnet import ResNetConfig

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


def _timm_block(stage: int, shortcut: int) -> tuple[Rule, ...]:
    """`shortcut`: the number of its convolution, which is 1 where pooling comes first."""
    ours, theirs = f"stages.{stage}.{{i}}.", f"layer{stage + 1}.{{i}}."
    convs = [rule for n in range(3) for rule in _both(f"{ours}convs.{n}", f"{theirs}conv{n + 1}", f"{theirs}bn{n + 1}")]
    return *convs, *_both(f"{ours}shortcut", f"{theirs}downsample.{shortcut}", f"{theirs}downsample.{shortcut + 1}")


STEM = "{p}embedder.embedder."
KNOWN = re.compile(r"resnet(10|14|18|26|34|50|101|152|200)[cdst]?")  # timm: those that differ in depth, and in what
# their tensors show: a deep stem (all four letters), pooling in the shortcuts (d and t)


def _infer_options(renamed: Renamed) -> Options:
    """Options for ResNetConfig from tensors under our names; the counters that old files lack are set to 0."""
    state = renamed.tensors
    deep = "stem.convs.0.conv.weight" in state
    stem_convs = [shape_of(state, f"stem.convs.{n}.conv.weight", 4) for n in range(3)] if deep else []
    stem = shape_of(state, "stem.conv.weight", 4) if not deep else (stem_convs[2][0], *stem_convs[0][1:])
    depths, widths = depths_of(state), list[int]()
    kind = "bottleneck" if "stages.0.0.convs.2.conv.weight" in state else "basic"
    last = {"basic": 1, "bottleneck": 2}[kind]
    for stage in range(len(depths)):
        widths.append(shape_of(state, f"stages.{stage}.0.convs.{last}.conv.weight", 4)[0])
        inside = shape_of(state, f"stages.{stage}.0.convs.1.conv.weight", 4)[:2]
        expected = (widths[-1] // 4,) * 2 if kind == "bottleneck" else (widths[-1],) * 2
        if inside != expected:
            raise CheckpointError(
                f"stage {stage} has a 3x3 convolution of {inside[1]} to {inside[0]} channels, and ResNet's is of "
                f"{expected[1]} to {expected[0]}: a ResNeXt or a wide ResNet, which are not known."
            )
    if stem[2:] not in ((7, 7), (3, 3)):
        raise CheckpointError(f"a stem of {stem[2]}x{stem[3]}: expected 7x7 or 3x3.")
    for key in [key for key in state if key.endswith("norm.running_mean")]:
        state.setdefault(key.replace("running_mean", "num_batches_tracked"), torch.tensor(0))
    return {
        "channels": stem[1],
        "classes": shape_of(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "stem": "deep" if deep else "imagenet" if stem[2] == 7 else "small",
        "stem_width": stem[0],
        "stem_inner": tuple(shape[0] for shape in stem_convs[:2]),
        "block": kind,
        "depths": depths,
        "widths": tuple(widths),
    }


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    stated, inferred = clues.stated, _infer_options(renamed)
    check_agreement(stated.options, inferred)
    given = {name: clues.given[name] for name in ("stride_in",) if name in clues.given}
    usual = clues.dialect.preprocess if inferred["stem"] != "small" else {"size": 32}
    size = {**usual, **stated.usual_preprocess, **stated.preprocess}.get("size", 224)
    config = ResNetConfig(**{"image_size": size, **clues.dialect.options, **given, **stated.options, **inferred})
    unstated = config.block == "bottleneck" and not stated.options and not given
    return Reading(config, {"stride_in": config.stride_in} if unstated else {}, usual)


FIELDS: hf.Fields = {
    "channels": ("num_channels", 3),
    "stem_width": ("embedding_size", 64),
    "widths": ("hidden_sizes", (256, 512, 1024, 2048)),
    "depths": ("depths", (3, 4, 6, 3)),
    "block": ("layer_type", "bottleneck"),
}


def _hf_options(config: Options) -> Options:
    """transformers' config.json -> options; what they leave out has transformers' own default."""
    kind = schema.check(config, schema.HF_STAGES, "config.json").get("model_type")
    if kind != "resnet":
        raise CheckpointError(f"config.json has model_type {kind!r} beside the weights of a ResNet.")
    if config.get("hidden_act", "relu") != "relu":
        raise CheckpointError(f"config.json has hidden_act {config['hidden_act']!r}; only relu is known for a ResNet.")
    if config.get("downsample_in_first_stage", False):
        raise CheckpointError("config.json has downsample_in_first_stage, which is not known here.")
    stride_in = "1x1" if config.get("downsample_in_bottleneck", False) else "3x3"
    return {**hf.read_fields(config, FIELDS), "stem": "imagenet", "stride_in": stride_in}


def _read_timm(source: Source) -> Stated | None:
    """Refuses a variant with the same tensors, which only its name or arguments tell from a plain ResNet."""
    if (config := timm.read_config(source)) is None:
        return None
    name = config["architecture"]
    if not KNOWN.fullmatch(name):
        raise CheckpointError(
            f"config.json has the architecture {name!r}; known are timm's resnet18, 34, 50, 101 and 152, also with the "
            "letters c, d, s and t."
        )
    staged.check_arguments(config, ("layers", "channels", "stem_width", "stem_type", "avg_down"))  # tensors show them
    usual = {**{name: IMAGENET_CROP[name] for name in ("mean", "std", "how")}, "interpolation": "bilinear"}
    preprocess = {**usual, **timm.preprocess_from(config["pretrained_cfg"])}
    return Stated({"stride_in": "3x3"}, preprocess, labels=timm.labels_from(config))


MODEL_TYPES = {"resnet": ModelType("ConvNext")}
HF = Dialect(
    name="hf",
    rules=(
        *_both("stem", STEM + "convolution", STEM + "normalization"),
        *(rule for stage in range(STAGES) for rule in _hf_block(stage)),
        Rule("head.*", "classifier.1.*"),
    ),
    recognise=lambda keys: any(key.endswith("embedder.embedder.convolution.weight") for key in keys),
    assumed={},
    preprocess=IMAGENET_CROP,
    prefixes=("", "resnet."),
    read_stated=hf.reader(_hf_options, MODEL_TYPES),
)
TIMM = Dialect(
    name="timm",
    rules=(
        *_both("stem", "conv1", "bn1"),
        *(rule for stage in range(STAGES) for rule in _timm_block(stage, shortcut=0)),
        Rule("head.*", "fc.*"),
    ),
    recognise=lambda keys: {"conv1.weight", "layer1.0.conv1.weight"} <= keys,
    assumed={},
    preprocess={**IMAGENET_CROP, "interpolation": "bilinear"},
    read_stated=_read_timm,
)
DEEP_STEM = (
    *_both("stem.convs.0", "conv1.0", "conv1.1"),
    *_both("stem.convs.1", "conv1.3", "conv1.4"),
    *_both("stem.convs.2", "conv1.6", "bn1"),
)
POOLED = "layer2.0.downsample.2.weight"  # the shortcut's norm, where pooling is number 0


def _is_deep(keys: set[str]) -> bool:
    return "conv1.0.weight" in keys and POOLED not in keys


def _is_pooled(keys: set[str]) -> bool:
    return {"conv1.0.weight", POOLED} <= keys


TIMM_C = replace(TIMM, rules=(*DEEP_STEM, *TIMM.rules), recognise=_is_deep)
TIMM_D = replace(
    TIMM,
    rules=(
        *DEEP_STEM,
        *(rule for stage in range(STAGES) for rule in _timm_block(stage, shortcut=1)),
        Rule("head.*", "fc.*"),
    ),
    recognise=_is_pooled,
    options={"shortcut": "pool"},
)


# ------------------------------------------------------------------------------------------------------------ writing


def _write(model: Network, state: State) -> Written:
    c: ResNetConfig = model.config
    others = {"stem": c.stem} if c.stem != "imagenet" else {"shortcut": c.shortcut} if c.shortcut != "stride" else {}
    for name, value in others.items():
        raise UsageError(f"transformers' resnet cannot express {name}={value}. Use --to native.")
    config: Options = {
        **hf.write_fields(c, FIELDS),
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": c.stride_in == "1x1",
    }
    return hf.classifier(model, state, HF.rules, "ResNet", config)


FAMILY = Family(
    "resnet",
    ResNetConfig,
    (HF, TIMM, TIMM_C, TIMM_D),
    _infer,
    {"hf": Writer(_write, any_size=lambda config: True)},
    bare_options=("image_size", "stride_in"),
    model_types=MODEL_TYPES,
)
