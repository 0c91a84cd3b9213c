"""Twins by timm's names, which are its authors' too: read. No other library has it in a layout of its own."""

from __future__ import annotations

from vitlab.checkpoints import staged
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, layers
from vitlab.checkpoints.pvt import common_options
from vitlab.checkpoints.staged import STAGES
from vitlab.errors import CheckpointError
from vitlab.models.entry import IMAGENET_CROP
from vitlab.models.twins import VARIANTS, TwinsConfig

HEADS = {config.widths: config.heads for config in (TwinsConfig(**variant) for variant in VARIANTS.values())}
ASSUMED = {"eps": 1e-6, "merge_eps": 1e-5, "reduction_eps": 1e-5, "activation": "gelu"}
POSITIONS, WINDOWED = "pos_block.0.proj.0.weight", "blocks.0.0.attn.qkv.weight"


def _stage(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"blocks.{stage}.{{i}}."
    inside = {"q": "q", "kv": "kv", "reduction": "sr", "norm": "norm", "qkv": "qkv", "proj": "proj"}
    return (
        *layers(f"embeds.{stage}.", f"patch_embeds.{stage}.", ("proj", "norm")),
        *layers(ours, theirs, ("norm1", "norm2", "mlp.fc1", "mlp.fc2")),
        *layers(ours + "attention.", theirs + "attn.", inside),
        Rule(f"positions.{stage}.conv.*", f"pos_block.{stage}.proj.0.*"),
    )


RULES = (
    *(rule for stage in range(STAGES) for rule in _stage(stage)),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.*"),
)


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    windowed = "stages.0.0.attention.qkv.weight" in renamed.tensors
    options = common_options(renamed, stated, HEADS, block=int(windowed))
    options["patch_size"] = options.pop("kernel")
    return options if windowed else {**options, "window": 0}


def _timm_options(config: Options) -> Options:
    """The weights tell the sizes but for heads and windows; model_args may only repeat them."""
    sizes = ("patch_size", "embed_dims", "depths", "num_heads", "mlp_ratios", "sr_ratios", "wss")
    args = staged.check_arguments(config, sizes)
    windows = set(args.get("wss", ()))
    if len(windows) > 1:
        raise CheckpointError(f"timm's wss={args['wss']}: windows of one size in all stages are known.")
    options: Options = {"heads": tuple(args["num_heads"])} if "num_heads" in args else {}
    return {**ASSUMED, **options, **({"window": windows.pop()} if windows else {})}


PCPVT = Dialect(
    name="timm",
    rules=RULES,
    recognise=lambda keys: POSITIONS in keys and WINDOWED not in keys,
    assumed=ASSUMED,
    preprocess=IMAGENET_CROP,
    read_stated=staged.timm_reader(_timm_options),
)
SVT = Dialect(
    name="timm",
    rules=RULES,
    recognise=lambda keys: {POSITIONS, WINDOWED} <= keys,
    assumed=ASSUMED | {"window": 7},  # the weights are the same for any
    preprocess=IMAGENET_CROP,
    read_stated=staged.timm_reader(_timm_options),
)
FAMILY = staged.family(
    "twins",
    TwinsConfig,
    (PCPVT, SVT),
    _infer_options,
    bare_options=("eps", "merge_eps", "reduction_eps", "activation", "window", "image_size", "heads"),
)
