"""Swin by other libraries' names: transformers' folders (read and written), timm's, and the files of its authors.

transformers 5 renamed its keys in memory but still saves the names of version 4: both are read, version 4 is written.
timm counts merging to the stage after it, the authors and transformers to the one before.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from vitlab.checkpoints import hf, keymap, staged
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.keymap import JOIN, Dialect, Options, Renamed, Rule, State, layers
from vitlab.checkpoints.staged import STAGES
from vitlab.errors import CheckpointError, UsageError
from vitlab.layers.positions import relative_index
from vitlab.models.base import Network
from vitlab.models.entry import IMAGENET_CROP
from vitlab.models.swin import SwinConfig


def _hf_block(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"{{p}}encoder.layers.{stage}.blocks.{{i}}."
    qkv, table = ours + "attention.qkv.*", ours + "attention.relative.table"
    return (
        *layers(ours, theirs, {"norm1": "layernorm_before", "norm2": "layernorm_after"}),
        Rule(qkv, tuple(f"{theirs}attention.self.{part}.*" for part in ("query", "key", "value")), JOIN),
        Rule(table, theirs + "attention.self.relative_position_bias_table"),
        *layers(ours, theirs, {"attention.proj": "attention.output.dense"}),
        *layers(ours, theirs, {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}),
        # version 5, in memory
        Rule(qkv, tuple(f"{theirs}attention.{part}_proj.*" for part in "qkv"), JOIN),
        Rule(table, theirs + "attention.relative_position_bias.relative_position_bias_table"),
        *layers(ours, theirs, {"attention.proj": "attention.o_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}),
    )


def _timm_block(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"layers.{stage}.blocks.{{i}}."
    return (
        *layers(ours, theirs, ("norm1", "norm2", "mlp.fc1", "mlp.fc2")),
        *layers(ours + "attention.", theirs + "attn.", ("qkv", "proj")),
        Rule(ours + "attention.relative.table", theirs + "attn.relative_position_bias_table"),
    )


def merging(theirs: str, later: int) -> tuple[Rule, ...]:
    """`later`: how many stages after the one whose number their key has."""
    return tuple(
        rule
        for stage in range(1, STAGES)
        for rule in (
            Rule(f"embeds.{stage}.norm.*", f"{theirs.format(stage - later)}downsample.norm.*"),
            Rule(f"embeds.{stage}.reduction.weight", f"{theirs.format(stage - later)}downsample.reduction.weight"),
        )
    )


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    state = renamed.tensors
    options = staged.common_options(state)
    options["patch_size"] = options.pop("kernel")
    widths = staged.widths_of(state, options["depths"])
    check_widths(widths)
    tables = [keymap.shape_of(state, f"stages.{n}.0.attention.relative.table", 2) for n in range(len(widths))]
    rows = [rows for rows, _ in tables]
    sides = [math.isqrt(count) for count in rows]  # 2M - 1
    if any(side**2 != count or side % 2 == 0 for side, count in zip(sides, rows, strict=True)):
        raise CheckpointError(
            f"bias tables of {rows} entries: expected (2M - 1)^2 in each stage, for windows of M x M."
        )
    windows = tuple((side + 1) // 2 for side in sides)
    options |= {"width": widths[0], "heads": tuple(heads for _, heads in tables)}
    options["window"] = windows[0] if len(set(windows)) == 1 else windows
    options["qkv_bias"] = "stages.0.0.attention.qkv.bias" in state
    return options | mlp_ratio(state, widths[0], stated)


def check_widths(widths: tuple[int, ...]) -> None:
    if list(widths) != [widths[0] * 2**stage for stage in range(len(widths))]:
        raise CheckpointError(f"stages of {list(widths)} channels: in a Swin each has twice those of the one before.")


def mlp_ratio(state: State, width: int, stated: Options) -> Options:
    """As the weights show it, unless it is stated, which must then agree."""
    ratio = staged.mlp_ratio(state, 0, width)
    if "mlp_ratio" not in stated:
        return {"mlp_ratio": ratio}
    if int(width * stated["mlp_ratio"]) != int(width * ratio):
        raise CheckpointError(f"mlp_ratio={stated['mlp_ratio']} is stated, but the weights have {ratio:g}.")
    return {}


FIELDS: hf.Fields = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 4),
    "channels": ("num_channels", 3),
    "width": ("embed_dim", 96),
    "depths": ("depths", (2, 2, 6, 2)),
    "heads": ("num_heads", (3, 6, 12, 24)),
    "window": ("window_size", 7),
    "mlp_ratio": ("mlp_ratio", 4.0),
    "qkv_bias": ("qkv_bias", True),
    "eps": ("layer_norm_eps", 1e-5),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "stochastic_depth": ("drop_path_rate", 0.1),
}


def _hf_options(config: Options) -> Options:
    """transformers' config.json -> options; what they leave out has transformers' own default."""
    staged.check_type(config, "swin")
    check_positions(config)
    return {**hf.read_fields(config, FIELDS), "activation": hf.activation_of(config)}


def check_positions(config: Options) -> None:
    if config.get("use_absolute_embeddings", False):
        raise CheckpointError("config.json has use_absolute_embeddings, which is not known here.")


def _timm_options(config: Options) -> Options:
    """The weights tell the sizes; model_args may only repeat them."""
    sizes = ("window_size", "patch_size", "embed_dim", "depths", "num_heads", "mlp_ratio", "qkv_bias")
    staged.check_arguments(config, sizes)
    return {"eps": 1e-5, "activation": "gelu"}


MODEL_TYPES = {"swin": ModelType("ViT")}
MASKING = {r"(.*\.)?embeddings\.mask_token|decoder\..*": "for pre-training by masking: only the encoder is loaded"}
HF = Dialect(
    name="hf",
    rules=(
        Rule("embeds.0.proj.*", "{p}embeddings.patch_embeddings.projection.*"),
        Rule("embeds.0.norm.*", "{p}embeddings.norm.*"),
        *(rule for stage in range(STAGES) for rule in _hf_block(stage)),
        *merging("{{p}}encoder.layers.{}.", later=1),
        Rule("norm.*", "{p}layernorm.*"),
        Rule("head.*", "classifier.*"),
    ),
    recognise=lambda keys: any(key.endswith("encoder.layers.0.blocks.0.layernorm_before.weight") for key in keys),
    assumed={"eps": 1e-5, "activation": "gelu"},
    preprocess=IMAGENET_CROP,
    options={"shift_axes": "together"},
    prefixes=("", "swin."),
    read_stated=hf.reader(_hf_options, MODEL_TYPES),
    ignored={r".*relative_position_index": "computed from the window", **MASKING},
)
SHARED = (
    Rule("embeds.0.proj.*", "patch_embed.proj.*"),
    Rule("embeds.0.norm.*", "patch_embed.norm.*"),
    *(rule for stage in range(STAGES) for rule in _timm_block(stage)),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.fc.*"),
    Rule("head.*", "head.*"),  # before timm 0.9, and the authors
)
TABLE, FIRST = "layers.0.blocks.0.attn.relative_position_bias_table", "layers.0.downsample.reduction.weight"
COMPUTED = {r".*relative_position_index|.*attn_mask": "computed from the window"}
TIMM = Dialect(
    name="timm",
    rules=(*SHARED, *merging("layers.{}.", later=0)),
    recognise=lambda keys: TABLE in keys and FIRST not in keys,
    assumed={"eps": 1e-5, "activation": "gelu"},
    preprocess=IMAGENET_CROP,
    options={"shift_axes": "each", "roll_first": True},
    ignored=COMPUTED,
    read_stated=staged.timm_reader(_timm_options),
)
AUTHORS = Dialect(
    name="microsoft",
    rules=(*SHARED, *merging("layers.{}.", later=1)),
    recognise=lambda keys: {TABLE, FIRST} <= keys,
    assumed={"eps": 1e-5, "activation": "gelu"},
    preprocess=IMAGENET_CROP,
    options={"shift_axes": "together"},
    ignored=COMPUTED,
    read_stated=TIMM.read_stated,
)


# ------------------------------------------------------------------------------------------------------------ writing


def _write(model: Network, state: State) -> Written:
    c: SwinConfig = model.config
    check_merge_eps(c)
    if not isinstance(c.window, int):
        raise UsageError(
            f"transformers' swin has one window for all stages, and this network {c.window}: load it with window="
            f"{max(c.window)}, which resizes its bias tables (and changes its numbers a little), or use --to native."
        )
    activation = {"hidden_act": hf.activation_for(c.activation), "use_absolute_embeddings": False}
    written = hf.classifier(model, state, HF.rules, "Swin", hf.write_fields(c, FIELDS) | activation)
    index = relative_index((c.window, c.window), prefix=0, device=torch.device("cpu"))
    tables = [key for key in written.tensors if key.endswith("relative_position_bias_table")]
    indices = {key.replace("bias_table", "index"): index.clone() for key in tables}  # version 4 has it
    return replace(written, tensors=written.tensors | indices, notes=[*written.notes, *_shift_note(c)])


def _shift_note(c: SwinConfig) -> list[str]:
    """Whether timm and transformers cut other windows at the network's own image size."""
    theirs = replace(c, shift_axes="together", roll_first=False)
    for grid, M in zip(c.grids(*c.image_size), c.window_sizes, strict=True):
        ours, others = (config.windows(grid, M, shifted=True) for config in (c, theirs))
        if ours.shift != others.shift or (ours.padded != grid and ours.roll_first):
            return [
                f"maps of {grid[0]}x{grid[1]} are no multiple of the window {M}: timm, where it comes from, rolls them "
                "before it pads them, transformers afterwards, so its numbers will differ a little there."
            ]
    return []


def check_merge_eps(c: SwinConfig) -> None:
    if c.merge_eps != 1e-5:
        raise UsageError(f"transformers' swin cannot express merge_eps={c.merge_eps:g}: it has 1e-5 there.")


FAMILY = staged.family(
    "swin",
    SwinConfig,
    (HF, TIMM, AUTHORS),
    _infer_options,
    bare_options=("eps", "activation", "image_size"),
    model_types=MODEL_TYPES,
    writers={"hf": Writer(_write, any_size=lambda config: True)},
)
