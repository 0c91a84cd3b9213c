"""Networks of stages (Swin, PVT, Twins) by other libraries' names: what their dialects have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vitlab.checkpoints import hf, schema, timm
from vitlab.checkpoints.keymap import Dialect, Renamed, State
from vitlab.errors import CheckpointError

STAGES = 8  # as many as a file may have; the published ones have 4
IMAGENET: dict[str, Any] = {
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "how": "crop",
    "resize": 256,
    "size": (224, 224),
    "interpolation": "bicubic",
}
Options = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How one family of networks is read."""

    name: str
    config: Any  # its Config
    dialects: tuple[Dialect, ...]
    infer: Callable[[Renamed, Options], Options]  # tensors under our names, and what is told or said -> options
    hf_options: Callable[[Options], Options] | None  # transformers' config.json -> options
    timm_options: Callable[[Options], Options] | None  # of timm's config.json, model_args
    tellable: tuple[str, ...]  # what a caller may tell of weights that do not say it

    def says(self, dialect: Dialect, config: Options) -> tuple[Options, Options]:
        """config.json -> options, and preprocess values where timm has them in the same file."""
        if dialect.name == "hf" and self.hf_options is not None:
            return self.hf_options(config), {}
        if "architecture" not in config or self.timm_options is None:
            return {}, {}
        cfg = timm.check_config(config).get("pretrained_cfg", {})
        options = self.timm_options(config)
        if len(cfg.get("input_size", ())) == 3:
            options.setdefault("image_size", tuple(cfg["input_size"][1:]))
        size = {"size": options["image_size"]} if "image_size" in options else {}
        colours = {key: IMAGENET[key] for key in ("mean", "std", "how", "interpolation")}
        return options, {**colours, **size, **timm.preprocess_from(cfg)}


def depths_of(state: State) -> tuple[int, ...]:
    """Blocks in each stage, which must be numbered without gaps."""
    numbers = [key.split(".")[1:3] for key in state if key.startswith("stages.")]
    depths: list[int] = []
    for stage in sorted({int(stage) for stage, _ in numbers}):
        blocks = {int(block) for at, block in numbers if int(at) == stage}
        if stage != len(depths) or blocks != set(range(len(blocks))):
            raise CheckpointError(f"the blocks are not numbered without gaps: stage {stage} has {sorted(blocks)}.")
        depths.append(len(blocks))
    if not depths:
        raise CheckpointError("there are no blocks in it, so this is not a whole network.")
    return tuple(depths)


def shape(state: State, key: str, axes: int) -> tuple[int, ...]:
    if key not in state:
        raise CheckpointError(f"{key} is missing, so this is not a whole network.")
    if state[key].ndim != axes:
        raise CheckpointError(f"{key} has the shape {tuple(state[key].shape)}, expected {axes} axes.")
    return tuple(state[key].shape)


def common_options(state: State) -> Options:
    """What every one of them shows: channels, patch size, classes, depths, biases."""
    _, channels, kernel, _ = shape(state, "embeds.0.proj.weight", 4)
    return {
        "channels": channels,
        "classes": shape(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "depths": depths_of(state),
        "kernel": kernel,
    }


def widths_of(state: State, depths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape(state, f"stages.{stage}.0.norm1.weight", 1)[0] for stage in range(len(depths)))


def mlp_ratio(state: State, stage: int, width: int) -> float:
    """So that int(width * ratio) is the number of hidden channels."""
    hidden = shape(state, f"stages.{stage}.0.mlp.fc1.weight", 2)[0]
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def told_heads(widths: tuple[int, ...], told: Options, known: dict[tuple[int, ...], tuple[int, ...]]) -> Options:
    """Weights do not show the heads, except by the published widths."""
    heads = told.get("heads", known.get(widths))
    if heads is None:
        guess = tuple(max(1, width // 64) for width in widths)
        raise CheckpointError(
            f"the heads cannot be read from weights of widths {list(widths)}. Say them, one number for each stage: "
            f"vitlab.load(path, heads={guess})."
        )
    return {"heads": tuple(heads) if isinstance(heads, list | tuple) else heads}


def activation_of(config: Options) -> str:
    name = config.get("hidden_act", "gelu")
    if name not in hf.ACTIVATIONS:
        raise CheckpointError(f"config.json has hidden_act {name!r}; known are {', '.join(hf.ACTIVATIONS)}.")
    return hf.ACTIVATIONS[name]


def theirs_of_activation(name: str) -> str:
    return next(theirs for theirs, ours in hf.ACTIVATIONS.items() if ours == name)


def check_type(config: Options, kind: str) -> None:
    schema.check(config, schema.HF_STAGES, "config.json")
    if config.get("model_type") != kind:
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r} beside the weights of a {kind}."
        )


def check_arguments(config: Options, known: tuple[str, ...]) -> Options:
    """timm's model_args; what would make another network of the same tensors is refused."""
    args = {key: value for key, value in config.get("model_args", {}).items() if value is not None}
    harmless = (
        "num_classes",
        "in_chans",
        "drop_rate",
        "drop_path_rate",
        "proj_drop_rate",
        "attn_drop_rate",
        "img_size",
    )
    wrong = {key: value for key, value in args.items() if key not in (*known, *harmless) and value}
    if wrong:
        told = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise CheckpointError(f"timm's {told} is not known for this network.")
    return args
