"""Twins by timm's names, which are its authors' too: read. No other library has it in a layout of its own."""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints import staged
from vitlab.checkpoints.keymap import Dialect, Renamed, Rule, State
from vitlab.checkpoints.pvt import common_options
from vitlab.checkpoints.staged import IMAGENET, STAGES, Family
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.twins import VARIANTS, TwinsConfig

HEADS = {config.widths: config.heads for config in (TwinsConfig(**variant) for variant in VARIANTS.values())}
ASSUMED = {"eps": 1e-6, "merge_eps": 1e-5, "reduction_eps": 1e-5, "activation": "gelu"}
POSITIONS, WINDOWED = "pos_block.0.proj.0.weight", "blocks.0.0.attn.qkv.weight"


def _stage(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"blocks.{stage}.{{i}}."
    inside = {"q": "q", "kv": "kv", "reduction": "sr", "norm": "norm", "qkv": "qkv", "proj": "proj"}
    return (
        *(Rule(f"embeds.{stage}.{part}.*", f"patch_embeds.{stage}.{part}.*") for part in ("proj", "norm")),
        *(Rule(f"{ours}{part}.*", f"{theirs}{part}.*") for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")),
        *(Rule(f"{ours}attention.{our}.*", f"{theirs}attn.{their}.*") for our, their in inside.items()),
        Rule(f"positions.{stage}.conv.*", f"pos_block.{stage}.proj.0.*"),
    )


RULES = (
    *(rule for stage in range(STAGES) for rule in _stage(stage)),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.*"),
)
PCPVT = Dialect(
    name="timm",
    rules=RULES,
    recognise=lambda keys: POSITIONS in keys and WINDOWED not in keys,
    assumed=ASSUMED,
    preprocess=IMAGENET,
)
SVT = Dialect(
    name="timm",
    rules=RULES,
    recognise=lambda keys: {POSITIONS, WINDOWED} <= keys,
    assumed=ASSUMED | {"window": 7},  # the weights are the same for any
    preprocess=IMAGENET,
)


def infer_options(renamed: Renamed, told: dict[str, Any]) -> dict[str, Any]:
    windowed = "stages.0.0.attention.qkv.weight" in renamed.tensors
    found = common_options(renamed, told, HEADS, block=int(windowed))
    found["patch_size"] = found.pop("kernel")
    return found if windowed else {**found, "window": 0}


def timm_options(config: dict[str, Any]) -> dict[str, Any]:
    """The weights tell the sizes but for heads and windows; model_args may only repeat them."""
    known = ("patch_size", "embed_dims", "depths", "num_heads", "mlp_ratios", "sr_ratios", "wss")
    args = staged.check_arguments(config, known)
    windows = set(args.get("wss", ()))
    if len(windows) > 1:
        raise CheckpointError(f"timm's wss={args['wss']}: windows of one size in all stages are known.")
    found: dict[str, Any] = {"heads": tuple(args["num_heads"])} if "num_heads" in args else {}
    return {**ASSUMED, **found, **({"window": windows.pop()} if windows else {})}


FAMILY = Family(
    "twins",
    TwinsConfig,
    (PCPVT, SVT),
    infer_options,
    None,
    timm_options,
    tellable=("eps", "merge_eps", "reduction_eps", "activation", "image_size", "heads", "window"),
)


def write(model: Network, state: State, to: str) -> tuple[State, dict[str, Any]]:
    raise CheckpointError(f"a Twins is not written as {to}: use --to native.")
