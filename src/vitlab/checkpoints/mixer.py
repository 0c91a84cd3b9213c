"""MLP-Mixers under timm's names: read, as bare weights and as the folder of its hub."""

from __future__ import annotations

import math

from vitlab.checkpoints import staged
from vitlab.checkpoints.family import IMAGENET, Clues, Family, Reading, check_agreement
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, shape_of
from vitlab.errors import CheckpointError
from vitlab.models.entry import HALF
from vitlab.models.mixer import MixerConfig

PARTS = {"norm1": "norm1", "mix_tokens.fc1": "mlp_tokens.fc1", "mix_tokens.fc2": "mlp_tokens.fc2"}
PARTS |= {"norm2": "norm2", "mix_channels.fc1": "mlp_channels.fc1", "mix_channels.fc2": "mlp_channels.fc2"}
RULES = (
    Rule("patch_embed.proj.*", "stem.proj.*"),
    *(Rule(f"blocks.{{i}}.{ours}.*", f"blocks.{{i}}.{theirs}.*") for ours, theirs in PARTS.items()),
    Rule("norm.*", "norm.*"),
    Rule("head.*", "head.*"),
)
ASSUMED = {"eps": 1e-6, "activation": "gelu"}


def _infer_options(renamed: Renamed, given: Options) -> Options:
    state = renamed.tensors
    width, channels, patch, _ = shape_of(state, "patch_embed.proj.weight", 4, "Mixer")
    tokens_hidden, patches = shape_of(state, "blocks.0.mix_tokens.fc1.weight", 2, "Mixer")
    side = math.isqrt(patches)
    options: Options = {
        "width": width,
        "channels": channels,
        "patch_size": patch,
        "tokens_hidden": tokens_hidden,
        "channels_hidden": shape_of(state, "blocks.0.mix_channels.fc1.weight", 2, "Mixer")[0],
        "depth": len({key.split(".")[1] for key in state if key.startswith("blocks.")}),
        "classes": shape_of(state, "head.weight", 2)[0] if "head.weight" in state else 0,
    }
    if "image_size" in given:
        return options
    if side * side != patches:
        raise CheckpointError(f"{patches} patches are no square: pass image_size=(height, width).")
    return {**options, "image_size": (side * patch, side * patch)}


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    stated, dialect = clues.stated.options, clues.dialect
    given = {name: clues.given[name] for name in FAMILY.bare_options if name in clues.given}
    inferred = _infer_options(renamed, {**given, **stated})
    check_agreement(stated, inferred)
    config = MixerConfig(**{**dialect.assumed, **given, **stated, **inferred})
    unstated = dialect.assumed.keys() - given.keys() - stated.keys()
    return Reading(config, {name: getattr(config, name) for name in dialect.assumed if name in unstated})


def _timm_options(config: Options) -> Options:
    staged.check_arguments(config, ("patch_size", "embed_dim", "num_blocks", "mlp_ratio"))
    return dict(ASSUMED)


TIMM = Dialect(
    name="timm",
    rules=RULES,
    recognise=lambda keys: {"stem.proj.weight", "blocks.0.mlp_tokens.fc1.weight"} <= keys,
    assumed=ASSUMED,
    preprocess={**IMAGENET, **HALF},
    read_stated=staged.timm_reader(_timm_options),
)
FAMILY = Family("mixer", MixerConfig, (TIMM,), _infer, bare_options=("eps", "activation", "image_size"))
