"""CLIPs around another encoder than a ViT (EVA-02-CLIP, PE-Core): what their files share.

The text tower is CLIP's by OpenAI's names. open_clip holds the image tower as a network of timm, with timm's head as
the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from vitlab.checkpoints import hf, keymap, timm
from vitlab.checkpoints.clip_image import openai_blocks
from vitlab.checkpoints.family import Clues, Reading, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import TRANSPOSE, Options, Renamed, Rule, Source, State, Stated, shape_of
from vitlab.checkpoints.two_towers import (
    OPEN_CLIP_FILE,
    OPEN_CLIP_TEXT,
    check_stated,
    infer_around,
    open_clip_parts,
    open_clip_preprocess,
    open_clip_preprocess_cfg,
    read_tokenizer,
)
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.clip import ProjectedConfig
from vitlab.models.config import option_paths
from vitlab.models.plain import PlainConfig
from vitlab.models.two_towers import TextConfig

TEXT_RULES = (  # {p}: newer files keep the text tower in a part of its own
    Rule("text.embed.weight", "{p}token_embedding.weight"),
    Rule("text.positions", "{p}positional_embedding"),
    *openai_blocks("text.blocks.{i}.", "{p}transformer.resblocks.{i}."),
    Rule("text.norm.*", "{p}ln_final.*"),
    Rule("text_projection.weight", "{p}text_projection", TRANSPOSE),
    Rule("log_scale", "logit_scale"),
)
TEXT_PREFIXES = ("", "text.")
TEXT_OPTIONS: Options = {"text.activation": "gelu", "text.eps": 1e-5}  # certain: neither has another


def has_text(keys: set[str]) -> bool:
    """Whether CLIP's text tower is there."""
    return any(f"{prefix}token_embedding.weight" in keys for prefix in TEXT_PREFIXES)


def below(rules: tuple[Rule, ...], ours: str, theirs: str) -> tuple[Rule, ...]:
    """Rules of an encoder alone, for it as a part of another network; its head is the projection."""
    heads = {"head.*": "image_projection.*", "head.weight": "image_projection.weight"}
    return tuple(
        replace(rule, ours=heads.get(rule.ours, ours + rule.ours), theirs=tuple(theirs + key for key in rule.keys))
        for rule in rules
    )


# ---------------------------------------------------------------------------------------------------------- open_clip

HARMLESS = ("timm_model_pretrained", "timm_drop", "timm_drop_path", "patch_dropout", "output_tokens")
TEXT_HARMLESS = ("eos_id", "pad_id", "hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "hf_model_pretrained")


def open_clip_reader(
    timm_options: Callable[[str, Options], Options | None], pool: str
) -> Callable[[Source], Stated | None]:
    """How a folder of open_clip is read. `timm_options`: of the trunk by its name; `pool`: how such a trunk pools."""

    def read(source: Source) -> Stated:
        tokenizer, path = read_tokenizer(source), source.path / OPEN_CLIP_FILE
        if not path.is_file():
            return Stated(tokenizer=tokenizer)
        config = read_json(path)
        model, vision, text = open_clip_parts(config)
        name: object = vision.get("timm_model_name")
        image = timm_options(name, {}) if isinstance(name, str) else None
        if image is None:
            raise CheckpointError(f"{OPEN_CLIP_FILE} has timm_model_name {name!r}, and the weights are of another.")
        _check_part("vision_cfg", vision, {"timm_pool": (pool,), "timm_proj": (None, "", "none")}, HARMLESS)
        _check_part("text_cfg", text, {"pool_type": ("argmax",), "proj_type": ("linear",)}, TEXT_HARMLESS)
        if model.get("quick_gelu"):
            raise CheckpointError(f"{OPEN_CLIP_FILE} has quick_gelu, which no such network has.")
        image.pop("pooling", None)
        if image.pop("width") != source.state["visual.trunk.patch_embed.proj.weight"].shape[0]:
            image.pop("heads")  # of another size than the name's
        options = hf.read_fields(text, OPEN_CLIP_TEXT) | {f"image.{ours}": value for ours, value in image.items()}
        options |= {
            "embed_dim": model.get("embed_dim"),
            "image.image_size": vision.get("image_size"),
            "text.pad_id": tokenizer.pad_id if tokenizer is not None else None,
        }
        options = {ours: value for ours, value in options.items() if value is not None}
        return Stated(options, open_clip_preprocess(config), tokenizer=tokenizer)

    return read


def _check_part(
    part: str, values: Options, known: dict[str, tuple[str | None, ...]], harmless: tuple[str, ...]
) -> None:
    read = ("image_size", "timm_model_name", "mlp_ratio", *(name for name, _ in OPEN_CLIP_TEXT.values()))
    for name, value in values.items():
        if name in known and value not in known[name]:
            raise CheckpointError(f"open_clip's {part}.{name}={value!r} is not known here beside such an image tower.")
        if value and name not in (*known, *read, *harmless):
            raise CheckpointError(f"open_clip's {part}.{name}={value!r} is not known here: only plain text towers are.")


TRUNK = "visual.trunk."


def write_open_clip(
    model: Network, state: State, rules: tuple[Rule, ...], trunks: Mapping[str, PlainConfig], pool: str
) -> Written:
    """A folder of open_clip, whose image tower must be one that timm has by name. `rules`: of the tower alone."""
    c: ProjectedConfig = model.config
    reasons = {
        "loss=sigmoid": c.loss == "sigmoid",
        f"text.activation={c.text.activation}": c.text.activation != "gelu",
        f"text.eps={c.text.eps:g}": c.text.eps != 1e-5,
        f"end_id={c.text.end_id}, which is not the largest": c.text.end_id != c.text.vocab - 1,
    }
    timm.check_expressible("open_clip's CLIP", reasons)
    name = next((name for name, known in trunks.items() if _same_tower(known, c.image)), None)
    if name is None:
        raise CheckpointError(
            f"open_clip builds such an image tower by timm's name, and none of {', '.join(trunks)} is this network. "
            "Use --to native."
        )
    vision = {"image_size": c.image_size[0], "timm_model_name": name, "timm_model_pretrained": False}
    vision |= {"timm_pool": pool, "timm_proj": None}
    text = hf.write_fields(c, OPEN_CLIP_TEXT)
    text["mlp_ratio"] = timm.ratio(c.text.width, c.text.mlp_ratio, c.text.mlp_hidden)
    cfg: Options = {"embed_dim": c.embed_dim, "vision_cfg": vision, "text_cfg": text, "custom_text": True}
    config: Options = {"model_cfg": cfg}
    if model.preprocess is not None:
        config["preprocess_cfg"] = open_clip_preprocess_cfg(model.preprocess)
    files = {OPEN_CLIP_FILE: config}
    files |= {"tokenizer.json": model.tokenizer.to_json()} if model.tokenizer is not None else {}
    weight = state["image_projection.weight"]
    state = {"image_projection.bias": weight.new_zeros(len(weight)), **state}  # timm's head has one
    names = (*below(rules, "image.", TRUNK), *TEXT_RULES)
    tensors = keymap.write("open_clip", names, state, prefix="text.", heads=c.image.heads)
    return Written(tensors, files, weights="open_clip_model.safetensors")


def _same_tower(known: PlainConfig, image: PlainConfig) -> bool:
    """Whether timm's network of a name is this one, whatever its hidden channels are called."""
    own = {
        name: image.option(name)
        for name in ("mlp_ratio", "classes", "rotary_stretch", "resize_rule")
        if name in option_paths(type(image))
    }
    return known.mlp_hidden == image.mlp_hidden and known.with_options(**own) == image


# ------------------------------------------------------------------------------------------------------- the network


def reader(
    image: type[PlainConfig],
    infer_image: Callable[[Renamed, Options], Options],
    config: Callable[[Renamed, PlainConfig, TextConfig, int], ProjectedConfig],
) -> Callable[[Renamed, Clues], Reading]:
    """How the networks of a family are inferred; `config` puts the towers, around so many channels, together."""

    def infer(renamed: Renamed, clues: Clues) -> Reading:
        embed_dim, _ = shape_of(renamed.tensors, "image_projection.weight", 2, "CLIP")
        tower, text, assumed = infer_around(renamed, clues, image, infer_image)
        ends: Options = {"end_id": text["vocab"] - 1, "pad_id": 0}  # read at its largest number, as OpenAI's
        made = config(renamed, tower, TextConfig(**(ends | text)), embed_dim)
        check_stated(made, embed_dim, clues.stated.options)
        return Reading(made, assumed)

    return infer
