"""TIPSv2: transformers' Tipsv2Model, read and written. The image tower alone is tips_tower.py's, or timm's.

The released files hold no temperature: it stands in config.json.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from vitlab.checkpoints import hf, keymap, schema, tips_tower
from vitlab.checkpoints.clip_image import openai_blocks
from vitlab.checkpoints.family import Clues, Family, Reading, Writer, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, Source, State, Stated
from vitlab.checkpoints.two_towers import (
    FACTS,
    TEXT_FIELDS,
    by_path,
    check_stated,
    infer_towers,
    read_tokenizer,
    three_texts,
    unstated,
    with_defaults,
)
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.tips import SQUASH, TEMPERATURE, TIPSConfig, TIPSTextConfig

HF_TEXT: hf.Fields = {
    **with_defaults(
        TEXT_FIELDS,
        {"vocab_size": 32000, "max_position_embeddings": 64, "hidden_size": 768, "num_attention_heads": 12},
    ),
    "text.pad_id": ("pad_token_id", 0),
    "text.scale_tokens": ("scale_sqrt_depth", True),
    "text.mean_eps": ("pooling_epsilon", 1e-8),
}
KINDS: schema.Kinds = {**schema.HF, "temperature_init_value": schema.ABOVE_ZERO}
OWN = ("pad_id", "scale_tokens", "mean_eps")  # options that only config.json states


def _read_hf(source: Source) -> Stated:
    path = source.path / "config.json"
    if not path.is_file():
        return Stated(tokenizer=read_tokenizer(source, TIPSTextConfig.context))
    config = schema.check(read_json(path), KINDS, "config.json")
    if config.get("model_type") != "tipsv2":
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r}, the weights are a Tipsv2Model's."
        )
    text, vision = hf.tower_config(config, "text"), hf.tower_config(config, "vision")
    options = hf.read_fields(text, HF_TEXT)
    options["text.activation"] = hf.activation_of(text, "relu")
    options |= {f"image.{name}": value for name, value in tips_tower.options_from(vision).items()}
    options["temperature"] = config.get("temperature_init_value", TEMPERATURE)
    tokenizer = read_tokenizer(source, options["text.context"])
    return hf.with_processor(Stated(options, tokenizer=tokenizer), source.path, tips_tower.TIPSV2["tipsv2"])


def _rules(swiglu: bool = False) -> tuple[Rule, ...]:
    return (
        *tips_tower.rules("image.", "vision_encoder.", swiglu=swiglu),
        Rule("text.embed.weight", "text_encoder.token_embedding.weight"),
        *openai_blocks("text.blocks.{i}.", "text_encoder.transformer.resblocks.{i}."),
        Rule("text.norm.*", "text_encoder.ln_final.*"),
        Rule("temperature", "temperature"),
    )


HF = Dialect(
    name="hf",
    rules=_rules(),
    recognise=lambda keys: {"text_encoder.token_embedding.weight", "vision_encoder.cls_token"} <= keys,
    assumed={"eps": 1e-6},
    preprocess=SQUASH,
    options={"resize_rule": tips_tower.RESIZE_RULE, "prefix_positions": "class"},
    read_stated=_read_hf,
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    stated: Options = {"image.activation": "gelu", "text.activation": "relu", "text.eps": 1e-5, **clues.stated.options}
    completed = replace(clues, stated=replace(clues.stated, options=stated))
    context = stated.get("text.context", TIPSTextConfig.context)
    vit, text = infer_towers(renamed, completed, "TIPSv2", "", context)
    text |= {name: stated[f"text.{name}"] for name in OWN if f"text.{name}" in stated}
    text["end_id"] = text.get("pad_id", 0)
    renamed.tensors.setdefault("temperature", torch.tensor(stated.get("temperature", TEMPERATURE)))
    config = TIPSConfig(vit, TIPSTextConfig(**text))
    check_stated(config, config.embed_dim, clues.stated.options)
    return Reading(config, unstated(config, clues))


def _hf_config(model: Network, temperature: float) -> Options:
    c: TIPSConfig = model.config
    text = {
        **hf.write_fields(c, HF_TEXT),
        "model_type": "tipsv2_text_model",
        "intermediate_size": c.text.mlp_hidden,
        "hidden_act": hf.activation_for(c.text.activation),
    }
    return {
        "architectures": ["Tipsv2Model"],
        "model_type": "tipsv2",
        "text_config": text,
        "vision_config": tips_tower.vision_config(c.image),
        "temperature_init_value": temperature,
        "dtype": "float32",
    }


def _write_hf(model: Network, state: State) -> Written:
    c: TIPSConfig = model.config
    tips_tower.check_tower("transformers' Tipsv2Model", c.image)
    state = tips_tower.with_mask_token(state, "image.mask_token")
    tensors = keymap.write("transformers", _rules(c.image.mlp.kind == "swiglu"), state, heads=c.image.heads)
    written = hf.folder(tensors, _hf_config(model, float(state["temperature"])), model.preprocess)
    if model.tokenizer is None:
        note = "the model has no tokenizer, so none was written: transformers needs tokenizer.json."
        return replace(written, notes=[note, *written.notes])
    names: Options = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.tokenizer.context}
    names["pad_token"] = model.tokenizer.backend.id_to_token(model.tokenizer.pad_id)
    files = {"tokenizer.json": model.tokenizer.to_json(), "tokenizer_config.json": names}
    return replace(written, files={**files, **written.files})


FAMILY = Family(
    "tipsv2",
    TIPSConfig,
    (HF,),
    _infer,
    {"hf": Writer(_write_hf, any_size=lambda config: True)},
    bare_options=(*FACTS[2:], "image_size"),
    model_types=tips_tower.TIPSV2,
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)
