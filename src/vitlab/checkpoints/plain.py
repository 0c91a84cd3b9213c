"""Encoders with one grid of patches that are no plain ViT (DINOv3, EVA-02, PE): what their dialects have in common.

timm has one class, Eva, for all of them: the architecture in config.json says which paper's network it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from vitlab.advice import to_type
from vitlab.checkpoints import timm
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, check_agreement
from vitlab.checkpoints.keymap import (
    JOIN,
    Codec,
    Dialect,
    Options,
    Renamed,
    Rule,
    Source,
    State,
    Stated,
    layers,
    shape_of,
)
from vitlab.errors import CheckpointError
from vitlab.models.config import Config
from vitlab.models.plain import PlainConfig
from vitlab.parsing import is_sequence

Infer = Callable[[Renamed, Options], Options]  # tensors, and what is given or stated -> options that the weights show


def family(
    name: str,
    config: type[Config],
    dialects: tuple[Dialect, ...],
    infer_options: Infer,
    *,
    bare_options: tuple[str, ...],
    model_types: Mapping[str, ModelType] | None = None,
    writers: Mapping[str, Writer] | None = None,  # --to -> how
) -> Family:
    """The record of a family whose weights show all options but `bare_options`."""

    def infer(renamed: Renamed, clues: Clues) -> Reading:
        dialect = clues.dialect
        stated = {**dialect.options, **clues.hints, **clues.stated.options}
        given = {name: value for name, value in clues.given.items() if name in (*bare_options, "grid")}
        facts = {**dialect.assumed, **given, **stated, "size_is_stored": "image_size" in clues.stated.options}
        inferred = infer_options(renamed, facts)
        check_agreement(clues.stated.options, inferred)
        given.pop("grid", None)
        made = config(**{**dialect.assumed, **given, **stated, **inferred})
        assumed = {n: getattr(made, n) for n in (*dialect.assumed, "heads") if n not in {**stated, **given}}
        return Reading(made, assumed if set(dialect.assumed) - {*stated, *given} else {})

    return Family(name, config, dialects, infer, writers or {}, bare_options, model_types or {})


def encoder_options(state: State, facts: Options, published: Mapping[int, int], network: str) -> Options:
    """Options that all such networks show; `published`: width -> heads, where nobody states them."""
    width, channels, patch_size, _ = shape_of(state, "patch_embed.proj.weight", 4, network)
    inner, _ = shape_of(state, "blocks.0.attention.qkv.weight", 2, network)
    rows, _ = shape_of(state, "blocks.0.mlp.fc1.weight", 2, network)
    _, hidden = shape_of(state, "blocks.0.mlp.fc2.weight", 2, network)
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    if numbers != set(range(len(numbers))):
        raise CheckpointError(f"the blocks are not numbered 0 to {len(numbers) - 1}: blocks.{max(numbers)} is there.")
    if inner != 3 * width:
        raise CheckpointError(f"queries, keys and values of {inner} channels: a {network} of width {width} has 3 x it.")
    heads = facts.get("heads", published.get(width))
    if heads is None:
        guess = next((h for h in (width // 64, 8, 6, 4, 3) if h > 1 and width % h == 0), 1)
        raise CheckpointError(
            f"the number of heads cannot be read from weights of width {width}. "
            f"Say it: {to_type(f'vitlab.load(path, heads={guess})', f'--heads {guess}')}."
        )
    return {
        "width": width,
        "channels": channels,
        "patch_size": patch_size,
        "depth": len(numbers),
        "heads": heads,
        "classes": shape_of(state, "head.weight", 2, network)[0] if "head.weight" in state else 0,
        "mlp": "mlp" if rows == hidden else "swiglu",
        "mlp_ratio": hidden / width,
    }


def qkv_bias(state: State) -> bool | str:
    """The value of the option: keys may have no bias where queries and values have one."""
    prefix = "blocks.0.attention.qkv."
    return True if prefix + "bias" in state else "qv" if prefix + "q_bias" in state else False


# ------------------------------------------------------------------------------------------------------------- names

KEYS_FIRST = Codec(  # (k, q, v) <-> q, k, v in one vector: the rule only applies where keys have a bias
    lambda parts: torch.cat([parts[1], parts[0], parts[2]]),
    lambda t, n, h: [t.chunk(3)[1], t.chunk(3)[0], t.chunk(3)[2]],
)


def separate_qkv(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Queries, keys and values by themselves, each with a bias, or queries and values alone, or none."""
    return (
        Rule(f"{ours}qkv.weight", tuple(f"{theirs}{part}_proj.weight" for part in "qkv"), JOIN),
        Rule(f"{ours}qkv.bias", tuple(f"{theirs}{part}_proj.bias" for part in "kqv"), KEYS_FIRST),
        Rule(f"{ours}qkv.q_bias", f"{theirs}q_proj.bias"),
        Rule(f"{ours}qkv.v_bias", f"{theirs}v_proj.bias"),
    )


TIMM_RULES = (
    Rule("patch_embed.proj.*", "patch_embed.proj.*"),
    Rule("class_token", "cls_token"),
    Rule("register_tokens", "reg_token"),
    Rule("positions.table", "pos_embed"),
    Rule("norm_pre.*", "norm_pre.*"),
    *layers("blocks.{i}.", "blocks.{i}.", {"norm1": "norm1", "norm2": "norm2", "attention.proj": "attn.proj"}),
    *separate_qkv("blocks.{i}.attention.", "blocks.{i}.attn."),
    Rule("blocks.{i}.attention.qkv.*", "blocks.{i}.attn.qkv.*"),
    Rule("blocks.{i}.attention.qkv.q_bias", "blocks.{i}.attn.q_bias"),
    Rule("blocks.{i}.attention.qkv.v_bias", "blocks.{i}.attn.v_bias"),
    Rule("blocks.{i}.attention.inner_norm.*", "blocks.{i}.attn.norm.*"),
    Rule("blocks.{i}.scale1.gamma", "blocks.{i}.gamma_1"),
    Rule("blocks.{i}.scale2.gamma", "blocks.{i}.gamma_2"),
    Rule("blocks.{i}.mlp.fc1.*", ("blocks.{i}.mlp.fc1_g.*", "blocks.{i}.mlp.fc1_x.*"), JOIN),
    *layers("blocks.{i}.mlp.", "blocks.{i}.mlp.", ("fc1", "norm", "fc2")),
    *layers("", "", {"norm": "norm", "head_norm": "fc_norm", "head": "head"}),
)


def write_rules(*, separate: bool) -> tuple[Rule, ...]:
    """TIMM_RULES for one of timm's two forms: queries, keys, values and the gates each in a layer, or joined."""
    alone = re.compile(r".*\.(q_proj|k_proj|v_proj|fc1_g)\..*")
    joined = re.compile(r".*\.(attn\.qkv|attn\.[qv]_bias|mlp\.fc1)(\..*)?")
    return tuple(rule for rule in TIMM_RULES if not (joined if separate else alone).fullmatch(rule.keys[0]))


def timm_arguments(c: PlainConfig) -> Options:
    """model_args that all networks of timm's Eva have."""
    return {
        "img_size": list(c.image_size),
        "patch_size": c.patch_size,
        "in_chans": c.channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": timm.ratio(c.width, c.option("mlp_ratio"), c.mlp_hidden),
        "qkv_bias": bool(c.option("qkv_bias")),
        "ref_feat_shape": list(c.option("rotary_grid")),
        "rope_temperature": c.option("rotary_base"),
    }


# ------------------------------------------------------------------------------------------------------ timm's folders

SEEN = re.compile(  # model_args of timm's Eva that the weights show, or that change nothing
    r"patch_size|embed_dim|depth|in_chans|num_classes|mlp_ratio|qkv_bias|qkv_fused|swiglu_mlp|swiglu_align_to|"
    r"scale_mlp|scale_attn_inner|init_values|class_token|num_reg_tokens|use_abs_pos_emb|use_rot_pos_emb|use_fc_norm|"
    r"use_pre_transformer_norm|use_post_transformer_norm|attn_type|attn_pool_mlp_ratio|dynamic_img_\w+|head_init_scale|.*drop.*"
)
ARGUMENTS = {"num_heads": "heads"}  # those that are options here


def timm_reader(
    known: str,
    options: Callable[[str, Options], Options | None],
    arguments: Mapping[str, str] = ARGUMENTS,
) -> Callable[[Source], Stated | None]:
    """How a timm folder is read. `options`: of an architecture and its way of pooling, None where it is another paper's
    (`known` says which are this one's); `arguments`: further options that model_args may state.
    """

    def read(source: Source) -> Stated | None:
        if (config := timm.read_config(source)) is None:
            return None
        name: str = config["architecture"]
        model_args: Options = config.get("model_args") or {}
        args = {key: value for key, value in model_args.items() if value is not None}
        pool = args.pop("global_pool", config.get("global_pool"))
        if (stated := options(name, {} if pool is None else {"global_pool": pool})) is None:
            raise CheckpointError(f"config.json has the architecture {name!r}, beside weights as {known} have them.")
        if {"num_heads", "embed_dim"} & args.keys():  # the size that the name has is not this network's
            stated.pop("width", None)
        size = args.pop("img_size", None)
        stated |= config["vitlab"]
        stated |= {ours: _as_tuple(args[theirs]) for theirs, ours in arguments.items() if theirs in args}
        unknown = {k: v for k, v in args.items() if k not in arguments and not SEEN.fullmatch(k)}
        wrong = {k: v for k, v in unknown.items() if v or k.startswith("rope_")}  # those are on by default
        wrong |= {} if args.get("use_rot_pos_emb", True) else {"use_rot_pos_emb": False}
        if wrong:
            raise CheckpointError(
                f"timm's {', '.join(f'{k}={v!r}' for k, v in wrong.items())} is not known for {name}."
            )
        cfg: Options = {**(config.get("pretrained_cfg") or {})}
        if size is not None:
            sides = [size, size] if isinstance(size, int) else list(size)
            cfg["input_size"] = [3, *sides]
        preprocess = timm.preprocess_from(cfg)
        return Stated(stated | ({"image_size": preprocess["size"]} if "size" in preprocess else {}), preprocess)

    return read


def _as_tuple(value: Any) -> Any:
    return tuple(value) if is_sequence(value) else value
