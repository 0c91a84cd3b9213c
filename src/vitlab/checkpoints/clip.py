"""CLIP in three dialects: OpenAI's and open_clip's state dicts, which share their names, and transformers' CLIPModel.

QuickGELU or GELU cannot be seen in weights and makes another network of them: where no config beside the file says
which, it is asked for. Read all; write open_clip and transformers. Of a CLIP without a text tower that is known here,
the image tower and its projection are read: transformers' CLIPVisionModelWithProjection, BiomedCLIP's. MetaCLIP 2
(arXiv:2507.22062) is CLIP's network with XLM-V's tokens.
"""

from __future__ import annotations

from dataclasses import fields, replace

from vitlab.checkpoints import clip_image, hf, keymap, schema, timm, vit
from vitlab.checkpoints.clip_image import check_square, hf_tower, openai_blocks, openai_tower
from vitlab.checkpoints.family import Clues, Family, Reading, Writer, Written, check_agreement
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import (
    SAME,
    TRANSPOSE,
    Dialect,
    Options,
    Renamed,
    Rule,
    Source,
    State,
    Stated,
    shape_of,
)
from vitlab.checkpoints.timm_names import facts_of, other_network
from vitlab.checkpoints.two_towers import (
    FACTS,
    OPEN_CLIP_FILE,
    OPEN_CLIP_TEXT,
    TEXT_FIELDS,
    UNKNOWN_ACTIVATION,
    by_path,
    check_stated,
    infer_towers,
    open_clip_parts,
    open_clip_preprocess,
    open_clip_preprocess_cfg,
    open_clip_vision,
    read_tokenizer,
    read_tokenizer_alone,
    three_texts,
    unstated,
)
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.clip import CLIPConfig, CLIPVisionConfig
from vitlab.models.entry import CLIP_CROP
from vitlab.models.two_towers import TextConfig
from vitlab.text.tokenizer import END, PIECES_END, START, Tokenizer

OPENAI_VOCAB = 49408
TOWERLESS = ("image_projection.weight", "text_projection.weight", "log_scale", "bias")  # our names outside both towers

# ------------------------------------------------------------------------------------------ files beside the weights

METACLIP_2 = "metaclip_2"  # arXiv:2507.22062: a CLIP of many languages, whose texts end with 2
MODEL_TYPES = {"clip": clip_image.PROCESSOR, METACLIP_2: clip_image.PROCESSOR}


def _read_hf(source: Source) -> Stated:
    tokenizer, path = read_tokenizer(source), source.path / "config.json"
    if not path.is_file():
        return Stated(tokenizer=tokenizer)
    stated = Stated(hf_options(read_json(path), tokenizer), tokenizer=tokenizer)
    return hf.with_processor(stated, source.path, MODEL_TYPES["clip"])


def _read_open_clip(source: Source) -> Stated:
    tokenizer, path = read_tokenizer(source), source.path / OPEN_CLIP_FILE
    return _open_clip_stated(read_json(path), tokenizer) if path.is_file() else Stated(tokenizer=tokenizer)


IMAGE_FIELDS: hf.Fields = {f"image.{name}": field for name, field in clip_image.FIELDS.items()}


def hf_options(config: Options, tokenizer: Tokenizer | None) -> Options:
    """transformers' config.json -> options by path; what it leaves out has its library's default."""
    schema.check(config, schema.HF, "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(f"config.json has model_type {kind!r}, the weights are a CLIPModel's.")
    text, vision = (hf.tower_config(config, part) for part in ("text", "vision"))
    vocab, end = text.get("vocab_size", 49408), text.get("eos_token_id", 49407)
    pad = end  # CLIP pads with end-of-text, whatever its config.json says
    if kind == METACLIP_2:
        pad = text.get("pad_token_id", 1)
    if kind == "clip" and end == 2:  # a mistake of early files, for which transformers looks for the largest number
        end = pad = tokenizer.end_id if tokenizer is not None else vocab - 1
    options = {**hf.read_fields(text, TEXT_FIELDS), **hf.read_fields(vision, IMAGE_FIELDS)}
    return options | {
        "image.activation": hf.activation_of(vision, "quick_gelu"),
        "text.activation": hf.activation_of(text, "quick_gelu"),
        "text.end_id": end,
        "text.pad_id": tokenizer.pad_id if tokenizer is not None else pad,
        "embed_dim": config.get("projection_dim", 512),
    }


OPEN_CLIP_IMAGE: hf.Fields = {  # what open_clip_config.json leaves out, the weights show
    "image.image_size": ("image_size", None),
    "image.width": ("width", None),
    "image.depth": ("layers", None),
    "image.patch_size": ("patch_size", None),
}
READ = {
    "vision_cfg": ("head_width", "mlp_ratio", *(name for name, _ in OPEN_CLIP_IMAGE.values())),
    "text_cfg": ("mlp_ratio", *(name for name, _ in OPEN_CLIP_TEXT.values())),
}
WITHOUT_EFFECT = {  # options of open_clip that change nothing where they are not zero, false or nothing -> which values
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "proj_type": ("linear",),
    "block_type": ("default",),
    **dict.fromkeys(("patch_dropout", "eos_id", "pad_id", "output_tokens", "final_ln_after_pool")),  # any
    **dict.fromkeys(("attn_pooler_queries", "attn_pooler_heads", "timm_pool", "timm_proj", "hf_model_pretrained")),
    **dict.fromkeys(("tokenizer_kwargs", "tokenizer_mode", "hf_tokenizer_name")),
}


def _open_clip_stated(config: Options, tokenizer: Tokenizer | None) -> Stated:
    """open_clip_config.json -> options by path, and preprocess values."""
    model, vision, text = open_clip_parts(config)
    _check_options("vision_cfg", vision)
    _check_options("text_cfg", text)
    options = hf.read_fields(vision, OPEN_CLIP_IMAGE) | hf.read_fields(text, OPEN_CLIP_TEXT)
    options |= {
        "image.heads": vision["width"] // vision.get("head_width", 64) if "width" in vision else None,
        "embed_dim": model.get("embed_dim"),
        "text.pad_id": tokenizer.pad_id if tokenizer is not None else None,
        "eps": 1e-5,  # another would stand in norm_kwargs
        "activation": "quick_gelu" if model.get("quick_gelu") else "gelu",  # left out, it is GELU there
    }
    options = {name: value for name, value in options.items() if value is not None}
    return Stated(options, open_clip_preprocess(config), tokenizer=tokenizer)


def _check_options(part: str, values: Options, known: tuple[str, ...] = ()) -> None:
    for name, value in values.items():
        harmless = WITHOUT_EFFECT.get(name, ()) if name not in (*READ[part], *known) else None
        if value and harmless is not None and value not in harmless:
            raise CheckpointError(f"open_clip's {part}.{name}={value!r} is not known here: only plain CLIPs are.")


OPEN_CLIP = Dialect(  # {p}: newer models of open_clip keep the text tower in a part of its own
    name="open_clip",
    rules=(
        *openai_tower("image.", "visual."),
        Rule("image.norm.*", "visual.ln_post.*"),
        Rule("image_projection.weight", "visual.proj", TRANSPOSE),
        Rule("text.embed.weight", "{p}token_embedding.weight"),
        Rule("text.positions", "{p}positional_embedding"),
        *openai_blocks("text.blocks.{i}.", "{p}transformer.resblocks.{i}."),
        Rule("text.norm.*", "{p}ln_final.*"),
        Rule("text_projection.weight", "{p}text_projection", TRANSPOSE),
        Rule("log_scale", "logit_scale", SAME),
        Rule("bias", "logit_bias", SAME),
    ),
    recognise=lambda keys: bool(keys & {"token_embedding.weight", "text.token_embedding.weight"}),
    assumed={"eps": 1e-5},
    preprocess=CLIP_CROP,
    options={"resize_rule": "bicubic_antialias"},
    prefixes=("", "text."),
    read_stated=_read_open_clip,
    ignored={"input_resolution|context_length|vocab_size": "a number beside OpenAI's weights, seen in their shapes"},
)
HF = Dialect(
    name="hf",
    rules=(
        *hf_tower("image.", "vision_model."),
        Rule("image.norm.*", "vision_model.post_layernorm.*"),
        Rule("image_projection.weight", "visual_projection.weight"),
        Rule("text.embed.weight", "text_model.embeddings.token_embedding.weight"),
        Rule("text.positions", "text_model.embeddings.position_embedding.weight"),
        *hf.tower_blocks("text.blocks.{i}.", "text_model.encoder.layers.{i}."),
        Rule("text.norm.*", "text_model.final_layer_norm.*"),
        Rule("text_projection.weight", "text_projection.weight"),
        Rule("log_scale", "logit_scale"),
    ),
    recognise=lambda keys: (
        "text_model.embeddings.token_embedding.weight" in keys and "visual_projection.weight" in keys
    ),
    assumed={"eps": 1e-5},
    preprocess=CLIP_CROP,
    options={"resize_rule": "bicubic"},
    read_stated=_read_hf,
    ignored={r".*\.position_ids": "0, 1, 2, ...: counted anew"},
)


# ------------------------------------------------------------------------------------------------------ the network

QUICK_GELU = UNKNOWN_ACTIVATION.format(
    other="QuickGELU",
    value="quick_gelu",
    who="OpenAI's own weights have quick_gelu; open_clip's have gelu, unless the model's name ends in -quickgelu.",
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    tensors, stated = renamed.tensors, clues.stated.options
    if "image.class_token" not in tensors:
        other = next((keys[0] for ours, keys in renamed.origin.items() if ours.startswith("image.")), "none of it")
        raise CheckpointError(
            f"its image tower is no ViT of CLIP's kind ({other} is there): only those are known here."
        )
    embed_dim, _ = shape_of(tensors, "image_projection.weight", 2, "CLIP")
    vit, text = infer_towers(renamed, clues, "CLIP", QUICK_GELU)
    text["end_id"] = stated.get("text.end_id", text["vocab"] - 1)  # OpenAI reads a text at its largest number
    text["pad_id"] = stated.get("text.pad_id", 0)
    config = CLIPConfig(vit, TextConfig(**text), embed_dim, "sigmoid" if "bias" in tensors else "softmax")
    check_stated(config, embed_dim, stated)
    return Reading(config, unstated(config, clues))


# ------------------------------------------------------------------------------------------------------------ writing


def _check_writable(library: str, c: CLIPConfig, others: dict[str, bool]) -> None:
    v = c.image
    pooling = {f"pooling={v.head.pooling}": v.head.pooling != "class", "final_norm=no": v.final_norm == "no"}
    clip_image.check_tower(library, v, pooling | others)


def _hf_files(model: Network) -> Options:
    """config.json, and the tokenizer's files where the model has one."""
    c, tokenizer = model.config, model.tokenizer
    kind = METACLIP_2 if _is_metaclip_2(c, tokenizer) else "clip"
    text = {
        **hf.write_fields(c, TEXT_FIELDS),
        "model_type": f"{kind}_text_model",
        "intermediate_size": round(c.text.width * c.text.mlp_ratio),
        "hidden_act": hf.activation_for(c.text.activation),
        "projection_dim": c.embed_dim,
        "bos_token_id": tokenizer.start_id if tokenizer is not None else max(c.text.end_id - 1, 0),
        "eos_token_id": c.text.end_id,
        "pad_token_id": c.text.pad_id if kind == METACLIP_2 else c.text.end_id,
    }
    vision = {**clip_image.vision_config(c.image), "model_type": f"{kind}_vision_model", "projection_dim": c.embed_dim}
    config = {
        "architectures": ["MetaClip2Model" if kind == METACLIP_2 else "CLIPModel"],
        "model_type": kind,
        "projection_dim": c.embed_dim,
        "text_config": text,
        "vision_config": vision,
        "dtype": "float32",
    }
    return {"config.json": config, **(hf_tokenizer(tokenizer) if tokenizer is not None else {})}


def _is_metaclip_2(c: CLIPConfig, tokenizer: Tokenizer | None) -> bool:
    """transformers' CLIPModel has no text that ends by 2, and its tokenizer byte pairs only."""
    return c.text.end_id == 2 or _has_pieces(tokenizer)


def _has_pieces(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and tokenizer.backend.token_to_id(END) is None


def hf_tokenizer(tokenizer: Tokenizer) -> Options:
    """The tokenizer's files; transformers' CLIP pads with end-of-text, which changes no embedding."""
    if _has_pieces(tokenizer):
        names: Options = {"tokenizer_class": "XLMRobertaTokenizer", "model_max_length": tokenizer.context}
        if tokenizer.start_id is None:  # that class adds one
            padding = tokenizer.backend.id_to_token(tokenizer.pad_id)
            names |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": PIECES_END, "pad_token": padding}
        return {"tokenizer.json": tokenizer.to_json(), "tokenizer_config.json": names}
    copy = Tokenizer.from_json(tokenizer.to_json(), pad_id=tokenizer.end_id)
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": copy.context,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    return {"tokenizer.json": copy.to_json(), "tokenizer_config.json": config, **copy.to_two_files()}


def _open_clip_files(model: Network) -> Options:
    """open_clip_config.json; tokenizer.json too, which open_clip itself does not read."""
    c: CLIPConfig = model.config
    cfg: Options = {
        "embed_dim": c.embed_dim,
        "quick_gelu": c.text.activation == "quick_gelu",
        "vision_cfg": {
            **hf.write_fields(c, OPEN_CLIP_IMAGE),
            "head_width": c.image.width // c.image.heads,
            "mlp_ratio": c.image.mlp_hidden / c.image.width,
        },
        "text_cfg": {**hf.write_fields(c, OPEN_CLIP_TEXT), "mlp_ratio": c.text.mlp_ratio},
    }
    if c.loss == "sigmoid":
        cfg |= {"init_logit_bias": -10.0}
    files: Options = {OPEN_CLIP_FILE: {"model_cfg": cfg}}
    if model.preprocess is not None:
        files[OPEN_CLIP_FILE]["preprocess_cfg"] = open_clip_preprocess_cfg(model.preprocess)
    return files | ({"tokenizer.json": model.tokenizer.to_json()} if model.tokenizer is not None else {})


def _write_hf(model: Network, state: State) -> Written:
    c: CLIPConfig = model.config
    tokenizer = model.tokenizer
    metaclip_2 = _is_metaclip_2(c, tokenizer)
    others = {"loss=sigmoid": c.loss == "sigmoid", **check_square(c.image)}
    _check_writable(f"transformers' {'MetaClip2Model' if metaclip_2 else 'CLIPModel'}", c, others)
    files = _hf_files(model)
    notes: list[str] = []
    if tokenizer is None:
        theirs = "tokenizer.json" if metaclip_2 else "vocab.json and merges.txt"
        notes.append(f"the model has no tokenizer, so none was written: transformers needs {theirs}.")
    elif not metaclip_2 and tokenizer.pad_id != tokenizer.end_id:
        notes.append(f"transformers pads with end-of-text, this tokenizer with {tokenizer.pad_id}: both mean the same.")
    tensors = keymap.write("transformers", HF.rules, state, heads=c.image.heads)
    written = hf.folder(tensors, files["config.json"], model.preprocess, processor="CLIPImageProcessor")
    return replace(written, files={**files, **written.files}, notes=notes + written.notes)


def _write_open_clip(model: Network, state: State) -> Written:
    c: CLIPConfig = model.config
    activations, epsilons = {c.image.mlp.activation, c.text.activation}, {c.image.norm.eps, c.text.eps}
    others = {
        f"activation={' and '.join(sorted(activations))}": activations not in ({"gelu"}, {"quick_gelu"}),
        f"eps={c.image.norm.eps:g}, text.eps={c.text.eps:g}": epsilons != {1e-5},
        f"end_id={c.text.end_id}, which is not the largest": c.text.end_id != c.text.vocab - 1,
    }
    _check_writable("open_clip's CLIP", c, others)
    tensors = keymap.write("open_clip", OPEN_CLIP.rules, state, heads=c.image.heads)
    notes = ["open_clip has OpenAI's vocabulary only: give it numbers from vitlab's tokenizer."]
    own_vocabulary = model.tokenizer is None or model.tokenizer.vocab != OPENAI_VOCAB
    return Written(
        tensors, _open_clip_files(model), notes if own_vocabulary else [], weights="open_clip_model.safetensors"
    )


FAMILY = Family(
    "clip",
    CLIPConfig,
    (OPEN_CLIP, HF),
    _infer,
    {"hf": Writer(_write_hf), "open_clip": Writer(_write_open_clip)},
    bare_options=(*FACTS[2:], "image_size"),
    model_types=MODEL_TYPES,
    map_template=Dialect(
        name="",
        rules=(),
        recognise=lambda names: any(name.startswith(("image.", "text.")) or name in TOWERLESS for name in names),
        assumed={"eps": 1e-5},
        preprocess=CLIP_CROP,
        read_stated=read_tokenizer_alone,
    ),
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)


# -------------------------------------------------------------------------------------------- the image tower alone


def _read_hf_vision(source: Source) -> Stated:
    path = source.path / "config.json"
    if not path.is_file():
        return Stated()
    config = read_json(path)
    options = clip_image.hf_options(config)
    if "projection_dim" in config:
        options["embed_dim"] = config["projection_dim"]
    return clip_image.with_processor(Stated(options), source.path)


def _read_open_clip_vision(source: Source) -> Stated:
    """open_clip_config.json of a CLIP whose text tower is another network: the image tower's options."""
    path = source.path / OPEN_CLIP_FILE
    if not path.is_file():
        return Stated()
    config = read_json(path)
    model, vision = open_clip_vision(config)
    text: Options = model.get("text_cfg") or {}
    name: object = vision.get("timm_model_name")
    if isinstance(name, str):
        options = _trunk_options(name, vision, source.state)
    else:
        _check_options("vision_cfg", vision)
        fields = {ours.removeprefix("image."): field for ours, field in OPEN_CLIP_IMAGE.items()}
        options = hf.read_fields(vision, fields)
        options["heads"] = vision["width"] // vision.get("head_width", 64) if "width" in vision else None
        options |= {"eps": 1e-5, "activation": "quick_gelu" if model.get("quick_gelu") else "gelu"}
    options["embed_dim"] = model.get("embed_dim")
    options = {name: value for name, value in options.items() if value is not None}
    name_note = f" ({text['hf_model_name']})" if isinstance(text.get("hf_model_name"), str) else ""
    note = f"its text tower{name_note} is not known here and left out: the model embeds images, and reads no text."
    return Stated(options, open_clip_preprocess(config), notes=(note,))


TRUNK_OPTIONS = ("timm_model_name", "timm_model_pretrained", "timm_drop", "timm_drop_path")


def _trunk_options(name: str, vision: Options, state: State) -> Options:
    """What is certain of a timm network inside an open_clip model; open_clip's quick_gelu does not reach it."""
    _check_options("vision_cfg", vision, known=TRUNK_OPTIONS)
    pool, projection = vision.get("timm_pool") or "", vision.get("timm_proj", "linear")
    if what := other_network(name):
        raise CheckpointError(f"its image tower, timm's {name}, has {what}, which is not known here.")
    if pool not in ("", "token", "avg") or projection != "linear":
        raise CheckpointError(
            f"its image tower, timm's {name}, ends in timm_pool={pool!r}, timm_proj={projection!r}; known are token or "
            "avg, and linear."
        )
    facts = facts_of(name, state["visual.trunk.patch_embed.proj.weight"].shape[0])
    return {**facts, **timm.pooling_options(pool or timm.usual_pooling(name), state, "visual.trunk.")} | {
        "image_size": vision.get("image_size")
    }


def _is_projected(keys: set[str]) -> bool:
    return clip_image.has_tower(keys) and "visual_projection.weight" in keys


def _is_trunk(keys: set[str]) -> bool:
    """A ViT of timm in an open_clip model with another text tower than CLIP's; SigLIP's pools by attention."""
    trunk = {"visual.trunk.blocks.0.attn.qkv.weight", "visual.trunk.patch_embed.proj.weight"} <= keys
    return trunk and "visual.trunk.attn_pool.latent" not in keys and not OPEN_CLIP.recognise(keys)


VISION_HF = replace(
    clip_image.DIALECT,
    rules=(*clip_image.RULES, Rule("projection.weight", "visual_projection.weight")),
    recognise=_is_projected,
    read_stated=_read_hf_vision,
)
OTHER_TEXT = {r"text\..*|logit_scale|logit_bias": "the text tower, which is not known here, and its scale"}
VISION_OPEN_CLIP = Dialect(
    name="open_clip",
    rules=(
        *openai_tower("", "visual."),
        Rule("norm.*", "visual.ln_post.*"),
        Rule("projection.weight", "visual.proj", TRANSPOSE),
    ),
    recognise=lambda keys: {"visual.class_embedding", "visual.proj"} <= keys and not OPEN_CLIP.recognise(keys),
    assumed={"eps": 1e-5},
    preprocess=CLIP_CROP,
    options={"resize_rule": "bicubic_antialias"},
    read_stated=_read_open_clip_vision,
    ignored=OTHER_TEXT,
)
VISION_TRUNK = replace(
    VISION_OPEN_CLIP,
    rules=(
        *(
            Rule(rule.ours, tuple(f"visual.trunk.{key}" for key in rule.keys), rule.codec)
            for rule in timm.RULES
            if not rule.ours.startswith("head.")
        ),
        Rule("projection.weight", "visual.head.proj.weight"),
    ),
    recognise=_is_trunk,
    assumed={"eps": 1e-6},
)


def _infer_vision(renamed: Renamed, clues: Clues) -> Reading:
    embed_dim, _ = shape_of(renamed.tensors, "projection.weight", 2, "CLIP image tower")
    stated = dict(clues.stated.options)
    if stated.pop("embed_dim", embed_dim) != embed_dim:
        check_agreement(clues.stated.options, {"embed_dim": embed_dim})
    clues = replace(clues, stated=replace(clues.stated, options=stated))
    if not {"activation", "mlp.activation"} & {*clues.given, *clues.hints, *stated}:
        raise CheckpointError(QUICK_GELU)
    tower = vit.infer_config(renamed, clues)
    groups = {group.name: getattr(tower, group.name) for group in fields(tower)}
    config = CLIPVisionConfig(**groups, embed_dim=embed_dim)
    if "activation" in clues.given and "activation" not in stated:
        config = config.with_options(activation=clues.given["activation"])
    return Reading(config, vit.assumed_options(tower, clues), notes=tuple(vit.resize_notes(tower, clues)))


def _write_vision(model: Network, state: State) -> Written:
    """transformers' CLIPVisionModelWithProjection."""
    c: CLIPVisionConfig = model.config
    others = {
        f"pooling={c.head.pooling}": c.head.pooling not in ("class", "class_norm"),
        "final_norm=no": not clip_image.has_last_norm(state),
        "classes": bool(c.classes),
    }
    clip_image.check_tower("transformers' CLIPVisionModelWithProjection", c, others | check_square(c))
    tensors = {key: value for key, value in state.items() if not key.startswith(("norm.", "head_norm."))}
    written = keymap.write(
        "transformers", VISION_HF.rules, tensors | clip_image.last_norm(state), prefix="vision_model.", heads=c.heads
    )
    config = {**clip_image.vision_config(c), "projection_dim": c.embed_dim, "dtype": "float32"}
    config["architectures"] = ["CLIPVisionModelWithProjection"]
    return hf.folder(written, config, model.preprocess, processor="CLIPImageProcessor")


VISION = Family(
    "clip_vision",
    CLIPVisionConfig,
    (VISION_HF, VISION_OPEN_CLIP, VISION_TRUNK),
    _infer_vision,
    {"hf": Writer(_write_vision)},
    bare_options=("heads", "activation", "eps", "image_size"),
    model_types=dict.fromkeys(clip_image.TOWER_TYPES, clip_image.PROCESSOR),
)
