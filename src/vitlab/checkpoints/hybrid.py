"""R + ViT by timm's names: a ViT whose patch embedding has a ResNet in it, read and written.

transformers' vit_hybrid, which version 5 no longer has, is refused by its name.
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from vitlab.checkpoints import keymap, timm, vit
from vitlab.checkpoints.family import Clues, Family, Reading, Writer, Written
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, Source, State, Stated, shape_of
from vitlab.checkpoints.staged import STAGES
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.hybrid import MODELS, VARIANTS, HybridConfig, parse_name

BACKBONE = "patch_embed.backbone."


def _both(ours: str, conv: str, norm: str) -> tuple[Rule, ...]:
    return Rule(f"patch_embed.{ours}.conv.weight", f"{BACKBONE}{conv}.weight"), Rule(
        f"patch_embed.{ours}.norm.*", f"{BACKBONE}{norm}.*"
    )


def _level(level: int) -> tuple[Rule, ...]:
    ours, theirs = f"levels.{level}.{{i}}.", f"stages.{level}.blocks.{{i}}."
    convs = [
        rule for n in range(3) for rule in _both(f"{ours}convs.{n}", f"{theirs}conv{n + 1}", f"{theirs}norm{n + 1}")
    ]
    return *convs, *_both(f"{ours}shortcut", f"{theirs}downsample.conv", f"{theirs}downsample.norm")


def _depths(state: State, prefix: str) -> tuple[int, ...]:
    """Blocks of each stage under keys that begin with `prefix` and have the numbers of stage and block next."""
    numbers = {(int(parts[0]), int(parts[1])) for key in state if (parts := _numbers(key, prefix))}
    depths = tuple(sum(stage == level for stage, _ in numbers) for level in range(len({stage for stage, _ in numbers})))
    if numbers != {(level, block) for level, depth in enumerate(depths) for block in range(depth)}:
        raise CheckpointError("the ResNet's blocks are not numbered without gaps.")
    return depths


def _numbers(key: str, prefix: str) -> list[str]:
    return key.removeprefix(prefix).replace("blocks.", "").split(".")[:2] if key.startswith(prefix) else []


def _read_stated(source: Source) -> Stated | None:
    """As of a ViT; but timm counts the patch in places of the ResNet's map."""
    if (config := timm.read_config(source)) is None:
        return None
    if parse_name(config["architecture"]) is None:
        raise CheckpointError(
            f"config.json has the architecture {config['architecture']!r} beside a ViT with a backbone before it; "
            f"known are timm's {', '.join(VARIANTS)}, with an image size behind."
        )
    args: Options = config.get("model_args") or {}
    if args.get("padding_same", True) is not True:
        raise CheckpointError("timm's padding_same=False is not known here: the released weights have it.")
    stated = timm.DIALECT.read_stated(source)
    if stated is None or "patch_size" not in stated.options:
        return stated
    stride = HybridConfig.stride_after(len(_depths(source.state, BACKBONE + "stages.")))
    return replace(stated, options={**stated.options, "patch_size": stated.options["patch_size"] * stride})


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    """The options of its ViT, as if the patches were of the image; then those of the ResNet."""
    state = renamed.tensors
    depths = _depths(state, "patch_embed.levels.")
    width, _, patch, _ = shape_of(state, "patch_embed.proj.weight", 4)
    stem_width, channels, *_ = shape_of(state, "patch_embed.stem.conv.weight", 4)
    P = patch * HybridConfig.stride_after(len(depths))
    projection = {"patch_embed.proj.weight": torch.empty(width, channels, P, P, device="meta")}
    encoder = vit.infer_config(replace(renamed, tensors={**state, **projection}), clues)
    last = "patch_embed.levels.{}.0.convs.2.conv.weight"
    backbone: Options = {
        "stem_width": stem_width,
        "stage_depths": depths,
        "stage_widths": tuple(shape_of(state, last.format(level), 4)[0] for level in range(len(depths))),
    }
    config = HybridConfig(**{f.name: getattr(encoder, f.name) for f in fields(encoder)}, **backbone)
    return Reading(config, vit.assumed_options(config, clues), notes=tuple(vit.resize_notes(config, clues)))


def _recognise(keys: set[str]) -> bool:
    return "blocks.0.attn.qkv.weight" in keys and any(key.startswith(BACKBONE) for key in keys)


TIMM: Dialect = replace(
    timm.DIALECT,
    rules=(
        *_both("stem", "stem.conv", "stem.norm"),
        *_both("stem", "conv", "norm"),  # where the stem is all
        *(rule for level in range(STAGES) for rule in _level(level)),
        *timm.RULES,
    ),
    recognise=_recognise,
    read_stated=_read_stated,
    bare_variants=(),
)


def _write(model: Network, state: State) -> Written:
    c: HybridConfig = model.config
    timm.check_writable(c)
    parts = ("stem_width", "stage_depths", "stage_widths")
    same = [name for name, known in MODELS.items() if all(getattr(known, part) == getattr(c, part) for part in parts)]
    timm.check_expressible("timm's R + ViT", {f"a ResNet of stages {c.stage_depths}, {c.stage_widths}": not same})
    config = timm.config_for(c, model.preprocess)
    config["architecture"] = f"{same[0]}_{MODELS[same[0]].image_size[0]}"
    config["model_args"]["patch_size"] = c.patch_size // c.map_stride
    whole_stem = tuple(rule.keys[0] for rule in _both("stem", "conv", "norm"))
    stem = tuple(rule.keys[0] for rule in _both("stem", "stem.conv", "stem.norm"))
    other = stem if not c.stage_depths else whole_stem
    rules = tuple(rule for rule in TIMM.rules if rule.keys[0] not in other)
    tensors = keymap.write("timm", rules, state, heads=c.heads)
    bare = [f"a bare file does not say its heads: load it with heads={c.heads}."]
    return Written(tensors, {"config.json": config}, timm.eps_note("timm's R + ViT", c.norm.eps), bare)


FAMILY = Family(
    "hybrid",
    HybridConfig,
    (TIMM,),
    _infer,
    {"timm": Writer(_write)},
    bare_options=("heads", "image_size", "eps", "activation", "final_norm"),
)
