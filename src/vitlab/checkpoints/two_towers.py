"""What the files of CLIP, SigLIP and others share: two towers in config.json, open_clip's config, the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitlab.advice import to_type
from vitlab.checkpoints import hf, schema
from vitlab.checkpoints.family import Clues, check_agreement
from vitlab.checkpoints.keymap import Options, Renamed, Source, State, Stated, shape_of
from vitlab.checkpoints.vit import infer_options
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network
from vitlab.models.config import option_paths
from vitlab.models.plain import PlainConfig
from vitlab.models.two_towers import BOTH, TwoTowersConfig
from vitlab.models.vit_config import ViTConfig
from vitlab.parsing import is_object, is_sequence
from vitlab.text.tokenizer import Tokenizer

TOWERS = ("image", "text")
TEXT_HEADS = {512: 8, 768: 12, 1024: 16, 1152: 16, 1280: 20}  # the published widths; others must be passed


# ------------------------------------------------------------------------------------------ files beside the weights

TEXT_FIELDS: hf.Fields = {  # of transformers, with CLIP's defaults
    "text.vocab": ("vocab_size", 49408),
    "text.context": ("max_position_embeddings", 77),
    "text.width": ("hidden_size", 512),
    "text.depth": ("num_hidden_layers", 12),
    "text.heads": ("num_attention_heads", 8),
    "text.eps": ("layer_norm_eps", 1e-5),
}


def with_defaults(fields: hf.Fields, defaults: Mapping[str, Any]) -> hf.Fields:
    """The same fields of a library's other class, whose defaults differ."""
    return {ours: (theirs, defaults.get(theirs, usual)) for ours, (theirs, usual) in fields.items()}


def read_tokenizer(source: Source, context: int = 77) -> Tokenizer | None:
    """The tokenizer of a folder, with the context length that the text tower's positions have, or this one."""
    if not Tokenizer.is_in(source.path):
        return None
    theirs = next((rule.keys[0] for rule in source.dialect.rules if rule.ours == "text.positions"), "")
    tables = [source.state.get(theirs.replace("{p}", prefix)) for prefix in source.dialect.prefixes]
    length = next((len(table) for table in tables if table is not None), context)
    return Tokenizer.read(source.path, context=length)


def read_tokenizer_alone(source: Source) -> Stated:
    return Stated(tokenizer=read_tokenizer(source))


OPEN_CLIP_TEXT: hf.Fields = {  # what open_clip_config.json leaves out, the weights show
    "text.context": ("context_length", None),
    "text.vocab": ("vocab_size", None),
    "text.width": ("width", None),
    "text.depth": ("layers", None),
    "text.heads": ("heads", None),
}
OPEN_CLIP_FILE = "open_clip_config.json"
RESIZE_MODES = {"shortest": "crop", "squash": "stretch", "longest": "fit"}  # open_clip's -> how


def open_clip_vision(config: Options) -> tuple[Options, Options]:
    """open_clip_config.json -> model_cfg and its vision_cfg, their values checked."""
    schema.check(config, schema.OPEN_CLIP, OPEN_CLIP_FILE)
    model = schema.check(config.get("model_cfg") or {}, schema.OPEN_CLIP_MODEL, f"{OPEN_CLIP_FILE}'s model_cfg")
    vision: Options = model.get("vision_cfg") or {}
    if is_sequence(layers := vision.get("layers")):
        raise CheckpointError(
            f"{OPEN_CLIP_FILE} has an image tower of layers {list(layers)}, a ResNet of CLIP's own: only ViTs are "
            "known here."
        )
    return model, schema.check(vision, schema.OPEN_CLIP_TOWER, f"{OPEN_CLIP_FILE}'s vision_cfg")


def open_clip_parts(config: Options) -> tuple[Options, Options, Options]:
    """model_cfg, its vision_cfg and its text_cfg."""
    model, vision = open_clip_vision(config)
    text = schema.check(model.get("text_cfg") or {}, schema.OPEN_CLIP_TOWER, f"{OPEN_CLIP_FILE}'s text_cfg")
    return model, vision, text


def open_clip_preprocess(config: Options) -> Options:
    """preprocess_cfg -> values for Preprocess."""
    where = OPEN_CLIP_FILE
    cfg = schema.check(config.get("preprocess_cfg") or {}, schema.OPEN_CLIP_PREPROCESS, f"{where}'s preprocess_cfg")
    if (mode := cfg.get("resize_mode", "shortest")) not in RESIZE_MODES:
        raise CheckpointError(f"{where} has resize_mode {mode!r:.40}; known are {', '.join(RESIZE_MODES)}.")
    preprocess = {name: cfg[name] for name in ("mean", "std", "interpolation") if name in cfg}
    return preprocess | ({"how": RESIZE_MODES[mode]} if preprocess else {})


def open_clip_preprocess_cfg(preprocess: Preprocess) -> Options:
    return {
        "mean": list(preprocess.mean),
        "std": list(preprocess.std),
        "interpolation": preprocess.interpolation,
        "resize_mode": next(theirs for theirs, ours in RESIZE_MODES.items() if ours == preprocess.how),
    }


# ------------------------------------------------------------------------------------------------------ the network

UNKNOWN_ACTIVATION = (
    "the weights do not say whether they were trained with GELU or with {other}, and with the wrong one every number "
    'is a little wrong. Say it: vitlab.load(path, activation="{value}"), or once and for all: vitlab convert PATH '
    "FOLDER --activation {value}; in a rename table it stands under [model]. {who}"
)
FACTS = ("activation", "eps", *(f"{tower}.{name}" for tower in TOWERS for name in ("heads", "activation", "eps")))


def by_path(options: Options, encoder: bool) -> Options:
    """Options by path: image=dict(heads=4) is image.heads, and so is heads alone. `encoder`: for the image tower."""
    flat: Options = {}
    for name, value in options.items():
        if name in TOWERS and is_object(value):
            flat |= {f"{name}.{inner}": part for inner, part in value.items()}
        else:
            flat["image.heads" if name == "heads" else name] = value
    if not encoder:
        return flat
    return {name.removeprefix("image."): value for name, value in flat.items() if not name.startswith("text.")}


def infer_towers(
    renamed: Renamed, clues: Clues, network: str, unknown_activation: str, context: int | None = None
) -> tuple[ViTConfig, Options]:
    """The image tower, and options of the text tower; `context`: its length, where positions are computed.

    Options are by path (image.heads, text.heads); activation and eps without one are both towers'.
    """
    tensors, dialect, given, stated = renamed.tensors, clues.dialect, clues.given, clues.stated.options
    facts = {**{name: given[name] for name in FACTS if name in given}, **stated}
    usual = facts.get("activation", dialect.assumed.get("activation"))
    activation = {tower: facts.get(f"{tower}.activation", usual) for tower in TOWERS}
    if None in activation.values():
        raise CheckpointError(unknown_activation)
    eps = {tower: facts.get(f"{tower}.eps", facts.get("eps", dialect.assumed["eps"])) for tower in TOWERS}
    image = {name.removeprefix("image."): value for name, value in facts.items() if name.startswith("image.")}
    if "image.image_size" in stated:
        image["size_is_stored"] = True
    else:
        image |= {name: given[name] for name in ("image_size", "grid") if name in given}
    inferred = infer_options(renamed.part("image.").tensors, image)
    rates = {name: image[name] for name in ("dropout", "attention_dropout", "stochastic_depth") if name in image}
    vit = ViTConfig().with_options(
        **{**dialect.options, **rates, "eps": eps["image"], "activation": activation["image"], **inferred, "classes": 0}
    )
    return vit, infer_text(tensors, facts, network, context) | {"activation": activation["text"], "eps": eps["text"]}


ImageConfig = TypeVar("ImageConfig", bound=PlainConfig)


def infer_around(
    renamed: Renamed,
    clues: Clues,
    image: type[ImageConfig],
    infer_image: Callable[[Renamed, Options], Options],  # as for the image tower alone
    text_heads: Mapping[int, int] = TEXT_HEADS,
) -> tuple[ImageConfig, Options, Options]:
    """Of a CLIP around another encoder than a ViT: the image tower, options of the text tower, and those that neither
    file nor caller states. What its dialect assumes is by path (image.eps).
    """
    dialect, stated = clues.dialect, clues.stated.options
    given = {name: value for name, value in clues.given.items() if name.startswith(("image.", "text."))}
    given |= {f"image.{name}": clues.given[name] for name in ("image_size", "grid") if name in clues.given}
    given |= {f"{tower}.{name}": clues.given[name] for name in BOTH if name in clues.given for tower in TOWERS}
    facts = {**dialect.assumed, **given, **dialect.options, **clues.hints, **stated}
    of_image, of_text = (_of_tower(facts, tower) for tower in TOWERS)
    network = f"CLIP around {image.__name__.removesuffix('Config')}"
    inferred = infer_image(renamed.part("image."), {**of_image, "size_is_stored": "image.image_size" in stated})
    check_agreement(_of_tower(stated, "image"), inferred)
    options = {name: value for name, value in of_image.items() if name in option_paths(image)}
    text = {name: value for name, value in of_text.items() if name in ("activation", "eps", "end_id", "pad_id")}
    text |= infer_text(renamed.tensors, facts, network, heads_by_width=text_heads)
    check_agreement(_of_tower(stated, "text"), text)
    heads = {} if stated else {"image.heads": inferred["heads"], "text.heads": text["heads"]}
    unstated = {name: value for name, value in {**dialect.assumed, **heads}.items() if name not in {**given, **stated}}
    values: Options = {**options, **inferred, "classes": 0}
    return image(**values), text, unstated


def _of_tower(options: Options, tower: str) -> Options:
    return {name.removeprefix(f"{tower}."): v for name, v in options.items() if name.startswith(f"{tower}.")}


def infer_text(
    state: State,
    facts: Options,
    network: str,
    context: int | None = None,
    heads_by_width: Mapping[int, int] = TEXT_HEADS,
) -> Options:
    vocab, width = shape_of(state, "text.embed.weight", 2, network)
    if context is None:
        context, _ = shape_of(state, "text.positions", 2, network)
    _, hidden = shape_of(state, "text.blocks.0.mlp.fc2.weight", 2, network)
    heads = facts.get("text.heads", heads_by_width.get(width))
    if heads is None:
        guess = next(h for h in (8, 6, 4, 3, 2, 1) if width % h == 0)
        raise CheckpointError(
            f"the number of heads cannot be read from a text tower of width {width}. "
            f"Say it: {to_type(f'vitlab.load(path, text=dict(heads={guess}))', f'--text-heads {guess}')}."
        )
    return {
        "context": context,
        "vocab": vocab,
        "width": width,
        "depth": len({key.split(".")[2] for key in state if key.startswith("text.blocks.")}),
        "heads": heads,
        "mlp_ratio": hidden / width,
    }


def check_stated(config: TwoTowersConfig, embed_dim: int, stated: Options) -> None:
    """Refuse a config that does not belong to the weights."""
    sizes = ("image_size", "patch_size", "width", "depth", "channels", "vocab", "context")
    paths = {f"{tower}.{name}" for tower in TOWERS for name in sizes}
    values = {path: config.option(path) for path in paths & stated.keys()}
    check_agreement(stated, {**values, "embed_dim": embed_dim})


def unstated(config: TwoTowersConfig, clues: Clues) -> Options:
    """Options that neither file nor caller states."""
    stated = clues.stated.options
    values = {"eps": config.text.eps, "image.heads": config.image.heads, "text.heads": config.text.heads}
    if "activation" in clues.dialect.assumed:
        values = {"activation": config.text.activation, **values}
    return {} if "text.eps" in stated else {n: v for n, v in values.items() if n not in {**stated, **clues.given}}


def three_texts(model: Network, images: Tensor) -> dict[str, Tensor]:
    """Texts of any tokens, each with its end, to compare two copies of a network."""
    c = model.config.text
    ids = torch.randint(c.vocab - 1, (3, c.context), generator=torch.Generator().manual_seed(1))
    ids += ids >= c.end_id
    for text, end in zip(ids, (2, c.context // 2, c.context - 1), strict=True):
        text[end:] = c.end_id
    return {"input_ids": ids}
