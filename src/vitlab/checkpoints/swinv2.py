"""Swin v2 by other libraries' names: transformers' folders (read and written), timm's, and the files of its authors.

The weights do not show the window: a config, timm's name, or the authors' buffers do. In a bare file it must be given.
"""

from __future__ import annotations

from dataclasses import replace

from vitlab.advice import to_type
from vitlab.checkpoints import hf, keymap, staged, swin
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.keymap import JOIN, Dialect, Options, Renamed, Rule, State, layers
from vitlab.checkpoints.staged import STAGES
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.swinv2 import MODELS, SwinV2Config, parse_name, preprocess_for
from vitlab.parsing import is_sequence

BIAS_NETWORK = {"fc1.weight": "0.weight", "fc1.bias": "0.bias", "fc2.weight": "2.weight"}


def _bias_network(ours: str, theirs: str) -> tuple[Rule, ...]:
    return tuple(Rule(f"{ours}position_bias.{our}", f"{theirs}.{their}") for our, their in BIAS_NETWORK.items())


def _hf_block(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"{{p}}encoder.layers.{stage}.blocks.{{i}}."
    attention, self_attention = ours + "attention.", theirs + "attention.self."
    weights = tuple(f"{self_attention}{part}.weight" for part in ("query", "key", "value"))
    return (
        *layers(ours, theirs, {"norm1": "layernorm_before", "norm2": "layernorm_after"}),
        Rule(attention + "qkv.weight", weights, JOIN),
        Rule(attention + "qkv.q_bias", self_attention + "query.bias"),
        Rule(attention + "qkv.v_bias", self_attention + "value.bias"),
        Rule(attention + "log_scale", self_attention + "logit_scale"),
        *_bias_network(attention, self_attention + "continuous_position_bias_mlp"),
        *layers(ours, theirs, {"attention.proj": "attention.output.dense"}),
        *layers(ours, theirs, {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}),
    )


def _timm_block(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"layers.{stage}.blocks.{{i}}."
    return (
        *layers(ours, theirs, ("norm1", "norm2", "mlp.fc1", "mlp.fc2")),
        Rule(ours + "attention.qkv.weight", theirs + "attn.qkv.weight"),
        Rule(ours + "attention.qkv.q_bias", theirs + "attn.q_bias"),
        Rule(ours + "attention.qkv.v_bias", theirs + "attn.v_bias"),
        Rule(ours + "attention.log_scale", theirs + "attn.logit_scale"),
        *_bias_network(ours + "attention.", theirs + "attn.cpb_mlp"),
        *layers(ours + "attention.", theirs + "attn.", ("proj",)),
    )


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    state = renamed.tensors
    options = staged.common_options(state)
    options["patch_size"] = options.pop("kernel")
    widths = staged.widths_of(state, options["depths"])
    swin.check_widths(widths)
    scales = [keymap.shape_of(state, f"stages.{n}.0.attention.log_scale", 3)[0] for n in range(len(widths))]
    options |= {"width": widths[0], "heads": tuple(scales)}
    options["qkv_bias"] = "stages.0.0.attention.qkv.q_bias" in state
    options |= swin.mlp_ratio(state, widths[0], stated)
    if "window" not in stated:
        raise CheckpointError(
            "the window cannot be read from the weights of a Swin v2. Say it, and the image size that it was trained "
            "for"
            + to_type(
                ": vitlab.load(path, window=8, image_size=256); fine-tuned to a larger window, pretrained_windows too.",
                " in Python, and save the model: it then knows.",
            )
        )
    return options


FIELDS: hf.Fields = {**swin.FIELDS, "pretrained_windows": ("pretrained_window_sizes", ())}


def _hf_options(config: Options) -> Options:
    """transformers' config.json -> options; what they leave out has transformers' own default."""
    staged.check_type(config, "swinv2")
    swin.check_positions(config)
    options: Options = {**hf.read_fields(config, FIELDS), "activation": hf.activation_of(config)}
    return {**options, "pretrained_windows": _each_stage(options["pretrained_windows"] or (), options["depths"])}


def _each_stage(windows: tuple[int, ...], depths: tuple[int, ...]) -> tuple[int, ...]:
    """A number for each stage, as both libraries take them from a list that may be longer; (): no stage has one."""
    windows = tuple(windows)[: len(depths)]
    return windows if any(windows) else ()


def _timm_options(config: Options) -> Options:
    """Window and image size from the name, unless model_args state others; the weights show the other sizes."""
    sizes = ("window_size", "pretrained_window_sizes", "patch_size", "embed_dim", "depths", "num_heads", "mlp_ratio")
    args, name = staged.check_arguments(config, (*sizes, "qkv_bias", "strict_img_size")), config["architecture"]
    parsed = parse_name(name)
    if parsed is None:
        raise CheckpointError(
            f"config.json has the architecture {name!r} beside the weights of a Swin v2; known are names such as "
            "swinv2_tiny_window8_256 and swinv2_base_window12to24_192to384."
        )
    options = {"eps": 1e-5, "activation": "gelu", **parsed[1]}
    if not {"embed_dim", "window_size"} & args.keys():  # the window of a name is that of its own weights
        options["width"] = MODELS[parsed[0]].width
    if "input_size" in config.get("pretrained_cfg", {}):
        del options["image_size"]  # of the name
    if "window_size" in args:
        options["window"] = args["window_size"]
    if is_sequence(options["window"]):
        raise CheckpointError(f"timm's window_size={options['window']}: only square windows, one number, are known.")
    if "img_size" in args:
        options["image_size"] = args["img_size"]
    windows = args.get("pretrained_window_sizes", options.get("pretrained_windows", ()))
    depths = args.get("depths", windows)
    return {**options, "pretrained_windows": _each_stage(windows, depths)}


def _authors_hints(state: State) -> Options:
    """Their files hold each window's offsets on the log scale, which show its size and the one it was trained with."""
    windows: list[int] = []
    trained: list[int] = []
    for stage in range(STAGES):
        table = state.get(f"layers.{stage}.blocks.0.attn.relative_coords_table")
        if table is None or table.ndim != 4 or table.shape[1] < 3:
            break
        windows.append((table.shape[1] + 1) // 2)
        largest = (2 ** (3 * float(table.double().max())) - 1) / 8  # of the offsets, measured by the trained window
        trained.append(round((windows[-1] - 1) / largest) + 1 if largest > 0 else 0)
    if not windows:
        return {}
    return {"window": max(windows), "pretrained_windows": () if trained == windows else tuple(trained)}


MODEL_TYPES = {"swinv2": ModelType("ViT", preprocess=preprocess_for(256))}
COMPUTED = {r".*(relative_position_index|relative_coords_table|attn_mask|k_bias)": "computed from the window"}
ASSUMED = {"eps": 1e-5, "activation": "gelu"}
HF = Dialect(
    name="hf",
    rules=(
        Rule("embeds.0.proj.*", "{p}embeddings.patch_embeddings.projection.*"),
        Rule("embeds.0.norm.*", "{p}embeddings.norm.*"),
        *(rule for stage in range(STAGES) for rule in _hf_block(stage)),
        *swin.merging("{{p}}encoder.layers.{}.", later=1),
        Rule("norm.*", "{p}layernorm.*"),
        Rule("head.*", "classifier.*"),
    ),
    recognise=lambda keys: any(key.endswith("encoder.layers.0.blocks.0.attention.self.logit_scale") for key in keys),
    assumed=ASSUMED,
    preprocess=preprocess_for(256),
    options={"windows_fit": "config", "mask_twice": True},
    prefixes=("", "swinv2."),
    read_stated=hf.reader(_hf_options, MODEL_TYPES),
    ignored={**COMPUTED, **swin.MASKING},
)
SHARED = (
    Rule("embeds.0.proj.*", "patch_embed.proj.*"),
    Rule("embeds.0.norm.*", "patch_embed.norm.*"),
    *(rule for stage in range(STAGES) for rule in _timm_block(stage)),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.fc.*"),
    Rule("head.*", "head.*"),  # the authors
)
SCALE = "layers.0.blocks.0.attn.logit_scale"
TIMM = Dialect(
    name="timm",
    rules=(*SHARED, *swin.merging("layers.{}.", later=0)),
    recognise=lambda keys: SCALE in keys and swin.FIRST not in keys,
    assumed=ASSUMED,
    preprocess=preprocess_for(256),
    options={"windows_fit": "image", "shift_axes": "each", "roll_first": True},
    ignored=COMPUTED,
    read_stated=staged.timm_reader(_timm_options),
)


def _is_authors(keys: set[str]) -> bool:
    return {SCALE, swin.FIRST} <= keys


AUTHORS = replace(
    TIMM,
    name="microsoft",
    rules=(*SHARED, *swin.merging("layers.{}.", later=1)),
    recognise=_is_authors,
    options={"windows_fit": "image", "shift_axes": "together"},
    hints=_authors_hints,
)


# ------------------------------------------------------------------------------------------------------------ writing


def _write(model: Network, state: State) -> Written:
    c: SwinV2Config = model.config
    swin.check_merge_eps(c)
    if c.places(*c.image_size) != replace(c, windows_fit="config").places(*c.image_size):
        raise UsageError(
            f"transformers' swinv2 has square windows, cut to the rows of image_size={list(c.image_size)}; this one's "
            "are cut to each side. Use --to native, or a square image_size."
        )
    config = hf.write_fields(c, FIELDS) | {"hidden_act": hf.activation_for(c.activation)}
    config |= {"pretrained_window_sizes": list(c.pretrained_windows or [0] * len(c.depths))}
    written = hf.classifier(model, state, HF.rules, "Swinv2", {**config, "use_absolute_embeddings": False})
    notes: list[str] = []
    if c.windows_fit == "image":
        notes.append(f"transformers cuts windows to the map of image_size={list(c.image_size)} at any image size.")
    if not c.mask_twice:
        notes.append("transformers masks shifted windows by -200, this network by -100: both are nearly always 0.")
    return replace(written, notes=[*written.notes, *notes])


FAMILY = staged.family(
    "swinv2",
    SwinV2Config,
    (HF, TIMM, AUTHORS),
    _infer_options,
    bare_options=("eps", "activation", "image_size", "window", "pretrained_windows"),
    model_types=MODEL_TYPES,
    writers={"hf": Writer(_write, any_size=lambda config: True)},
)
