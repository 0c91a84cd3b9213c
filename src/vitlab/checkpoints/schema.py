"""Types of the values in the JSON files beside weights: a value of another type is refused, with its name.

    check(config, HF, "config.json")     # config.json has hidden_act ['gelu']; expected a text.

The readers (hf.py, timm.py, clip.py, ...) then take values without checking them again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.errors import CheckpointError
from vitlab.parsing import is_object, is_sequence

MOST = 2**31 - 1  # of a whole number: any that is larger is a mistake


@dataclass(frozen=True)
class Kind:
    description: str
    fits: Callable[[object], bool]

    def __or__(self, other: Kind) -> Kind:
        text = f"{self.description} or {other.description}"
        return Kind(text, lambda value: self.fits(value) or other.fits(value))


def _integer(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST


def _positive(value: object) -> bool:
    return _integer(value, least=1)


def _number(value: object, above: float = -math.inf) -> bool:
    """Finite; a larger whole number would not become a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value and abs(value) <= 1e300


def _listed(value: object, fits: Callable[[object], bool], lengths: range) -> bool:
    return is_sequence(value) and len(value) in lengths and all(map(fits, value))


def _sides(value: object) -> bool:
    if not is_object(value):
        return False
    names = ("shortest_edge",) if "shortest_edge" in value else ("height", "width")
    return all(_positive(value.get(name)) for name in names)


NULL = Kind("null", lambda value: value is None)
WHOLE = Kind(f"a whole number from 0 to {MOST}", _integer)
POSITIVE = Kind(f"a whole number from 1 to {MOST}", _positive)
NUMBER = Kind("a finite number", _number)
ABOVE_ZERO = Kind("a number above 0", lambda value: _number(value, above=0))
EPS = Kind("a number above 0, at most 1", lambda value: _number(value, above=0) and not _number(value, above=1))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a text", lambda value: isinstance(value, str))
NAME = Kind("a name", lambda value: isinstance(value, str) and bool(value.strip()))
TABLE = Kind("a JSON object", is_object)
WHOLES = Kind("a list of whole numbers from 1", lambda value: _listed(value, _positive, range(1, 17)))
WINDOWS = Kind("a list of whole numbers from 0", lambda value: _listed(value, _integer, range(1, 17)))
TEXTS = Kind("a list of texts", lambda value: is_sequence(value) and all(isinstance(text, str) for text in value))
PAIR = Kind(
    "a whole number or [height, width]", lambda value: _positive(value) or _listed(value, _positive, range(2, 3))
)
SIDES = Kind('{"height": ..., "width": ...} or {"shortest_edge": ...} in whole numbers from 1', _sides)
COLOURS = Kind("a list of numbers, one for each channel", lambda value: _listed(value, _number, range(1, 65)))

Kinds = Mapping[str, Kind]
RATES: Kinds = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "drop_path_rate"), NUMBER)
HF: Kinds = {  # config.json of every network
    **RATES,
    **dict.fromkeys(("model_type", "hidden_act", "pooler_act"), TEXT),
    **dict.fromkeys(("num_channels", "hidden_size", "num_hidden_layers"), POSITIVE),
    **dict.fromkeys(("num_attention_heads", "projection_dim", "embed_dim", "window_size"), POSITIVE),
    **dict.fromkeys(("decoder_hidden_size", "decoder_num_hidden_layers", "decoder_num_attention_heads"), POSITIVE),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), POSITIVE),
    "eos_token_id": WHOLE,
    "patch_size": POSITIVE | WHOLES,
    "num_patches": POSITIVE,
    "image_size": PAIR,
    **dict.fromkeys(("qkv_bias", "norm_pix_loss", "use_absolute_embeddings", "linear_attention"), FLAG),
    "layer_norm_eps": EPS,
    "mlp_ratio": ABOVE_ZERO,
    **dict.fromkeys(("mask_ratio", "layerscale_value"), NUMBER),
    **dict.fromkeys(("text_config", "text_config_dict", "vision_config", "vision_config_dict"), TABLE | NULL),
}
HF_DINOV3: Kinds = {
    **HF,
    "num_register_tokens": WHOLE,
    "intermediate_size": POSITIVE,
    "rope_theta": ABOVE_ZERO,
    "attention_dropout": NUMBER,
    **dict.fromkeys(("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"), NUMBER | NULL),
    **dict.fromkeys(("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias", "use_gated_mlp"), FLAG),
}
_EACH_STAGE = ("depths", "num_heads", "patch_sizes", "strides", "hidden_sizes", "mlp_ratios")
HF_STAGES: Kinds = {  # of a network of stages, which has some as lists; and of a ResNet
    **HF,
    **dict.fromkeys((*_EACH_STAGE, "num_attention_heads", "sr_ratios", "sequence_reduction_ratios"), WHOLES),
    "pretrained_window_sizes": WINDOWS | NULL,
    "image_size": PAIR | SIDES,
    "embedding_size": POSITIVE,
    "layer_type": TEXT,
    **dict.fromkeys(("downsample_in_first_stage", "downsample_in_bottleneck"), FLAG),
}
HF_PREPROCESSOR: Kinds = {
    **dict.fromkeys(("do_normalize", "do_rescale", "do_resize", "do_center_crop"), FLAG | NULL),
    **dict.fromkeys(("image_processor_type", "feature_extractor_type"), NAME | NULL),
    **dict.fromkeys(("image_mean", "image_std"), COLOURS),
    "resample": WHOLE,
    **dict.fromkeys(("patch_size", "max_num_patches"), POSITIVE),
    "rescale_factor": ABOVE_ZERO,
    "size": POSITIVE | SIDES,
    "crop_size": POSITIVE | SIDES | NULL,
    "crop_pct": ABOVE_ZERO | NULL,
}
TIMM: Kinds = {
    "architecture": TEXT,
    "global_pool": TEXT | NULL,
    "label_names": TEXTS | NULL,
    **dict.fromkeys(("model_args", "pretrained_cfg", "vitlab"), TABLE | NULL),
}
TIMM_PREPROCESS: Kinds = {  # pretrained_cfg
    "input_size": Kind("[channels, height, width]", lambda value: _listed(value, _positive, range(3, 4))),
    "interpolation": TEXT,
    "crop_pct": ABOVE_ZERO,
    "crop_mode": TEXT | NULL,
    **dict.fromkeys(("mean", "std"), COLOURS),
}
TIMM_ARGUMENTS: Kinds = {  # model_args; null means the usual value
    **dict.fromkeys(
        ("num_heads", "embed_dim", "depth", "patch_size", "in_chans", "window_size"), POSITIVE | WHOLES | NULL
    ),
    "img_size": PAIR | NULL,
    "pretrained_window_sizes": WINDOWS | NULL,
    "reg_tokens": WHOLE | NULL,
    **dict.fromkeys(("act_layer", "global_pool", "pos_embed"), TEXT | NULL),
    **dict.fromkeys(("qkv_bias", "qk_norm", "class_token", "pre_norm", "no_embed_class"), FLAG | NULL),
    **dict.fromkeys(("wss", "embed_dims", "depths", "mlp_ratios", "sr_ratios"), WHOLES | NULL),
}
OPEN_CLIP: Kinds = dict.fromkeys(("model_cfg", "preprocess_cfg"), TABLE | NULL)
OPEN_CLIP_MODEL: Kinds = {
    "embed_dim": POSITIVE,
    **dict.fromkeys(("vision_cfg", "text_cfg"), TABLE | NULL),
    "quick_gelu": FLAG | NULL,
}
OPEN_CLIP_TOWER: Kinds = {
    "image_size": PAIR,
    **dict.fromkeys(("layers", "width", "head_width", "patch_size"), POSITIVE),
    **dict.fromkeys(("context_length", "vocab_size", "heads"), POSITIVE),
    "mlp_ratio": ABOVE_ZERO,
}
OPEN_CLIP_PREPROCESS: Kinds = {
    **dict.fromkeys(("mean", "std"), COLOURS),
    "interpolation": TEXT,
    "resize_mode": TEXT,
}
PEFT: Kinds = {  # adapter_config.json
    "peft_type": TEXT,
    "r": POSITIVE,
    "lora_alpha": ABOVE_ZERO,
    "base_model_name_or_path": TEXT | NULL,
    "use_rslora": FLAG | NULL,
}
CARD: Kinds = {  # model.json, beside its config
    "family": TEXT,
    **dict.fromkeys(("config", "preprocess"), TABLE | NULL),
    "labels": TEXTS | NULL,
    **dict.fromkeys(("name", "source", "licence"), TEXT | NULL),
    **dict.fromkeys(("metrics", "task"), TABLE | NULL),
    "lora_scale": ABOVE_ZERO | NULL,
}


def check(values: object, kinds: Kinds, where: str) -> dict[str, Any]:
    """The values, once each that `kinds` names is of its kind."""
    if not is_object(values):
        raise CheckpointError(f"{where} is {abbreviated(values)}; expected a JSON object.")
    for name, kind in kinds.items():
        if name in values and not kind.fits(values[name]):
            raise CheckpointError(f"{where} has {name} {abbreviated(values[name])}; expected {kind.description}.")
    return values


def abbreviated(value: object) -> str:
    """A value in an error message, no longer than a line."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**20:
        return f"a whole number of {value.bit_length()} bits"
    text = repr(value[:20] if is_sequence(value) else value[:100] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def class_names(names: object, where: str) -> list[str]:
    """transformers' id2label, {"0": "cat", "1": "dog"} -> the names in order; every number must be there."""
    if not is_object(names):
        raise CheckpointError(f'{where} has id2label {abbreviated(names)}; expected {{"0": "cat", "1": "dog", ...}}.')
    for key, name in names.items():
        if not re.fullmatch("[0-9]{1,9}", key):
            raise CheckpointError(f"{where} has id2label with the key {abbreviated(key)}; expected numbers.")
        if not isinstance(name, str) and not _integer(name):
            raise CheckpointError(f"{where} has id2label {key}: {abbreviated(name)}; expected a text.")
    numbers = {int(key): str(name) for key, name in names.items()}
    if len(numbers) != len(names) or numbers.keys() != set(range(len(names))):
        raise CheckpointError(
            f"{where} has id2label with {len(names)} names that are not numbered from 0 without gaps."
        )
    return [numbers[number] for number in range(len(names))]
