"""CLIP in three dialects: OpenAI's and open_clip's state dicts, which share their names, and transformers' CLIPModel.

QuickGELU or GELU cannot be seen in weights and makes another network of them: where no config beside the file says
which, it is asked for. Read all; write open_clip and transformers.
"""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints.clip_config import hf_files, open_clip_files
from vitlab.checkpoints.infer import infer_options
from vitlab.checkpoints.keymap import JOIN, SAME, TOKENS, TRANSPOSE, Codec, Dialect, Renamed, Rule, State
from vitlab.checkpoints.keymap import write as rename
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.clip import CLIPConfig, TextConfig
from vitlab.models.entry import OPENAI
from vitlab.models.vit_config import ViTConfig

PREPROCESS = {**OPENAI, "interpolation": "bicubic", "how": "crop"}
TEXT_HEADS = {512: 8, 768: 12, 1024: 16, 1280: 20}  # the published widths; others must be told
CLASS = Codec(TOKENS.read, lambda t, n, h: [t.reshape(-1)])  # (D,) <-> (1, 1, D)
TABLE = Codec(TOKENS.read, lambda t, n, h: [t[0]])  # (N, D) <-> (1, N, D)

NAMES = {  # ours -> theirs, in every block of both towers
    "norm1.*": ("ln_1.*", "layer_norm1.*"),
    "attention.proj.*": ("attn.out_proj.*", "self_attn.out_proj.*"),
    "norm2.*": ("ln_2.*", "layer_norm2.*"),
    "mlp.fc1.*": ("mlp.c_fc.*", "mlp.fc1.*"),
    "mlp.fc2.*": ("mlp.c_proj.*", "mlp.fc2.*"),
}


def _openai_blocks(ours: str, theirs: str) -> tuple[Rule, ...]:
    joined = [Rule(f"{ours}attention.qkv.{part}", f"{theirs}attn.in_proj_{part}") for part in ("weight", "bias")]
    return *joined, *(Rule(ours + name, theirs + named[0]) for name, named in NAMES.items())


def _hf_blocks(ours: str, theirs: str) -> tuple[Rule, ...]:
    parts = tuple(f"{theirs}self_attn.{part}_proj.*" for part in "qkv")
    return Rule(f"{ours}attention.qkv.*", parts, JOIN), *(
        Rule(ours + n, theirs + named[1]) for n, named in NAMES.items()
    )


OPEN_CLIP = Dialect(  # {p}: newer models of open_clip keep the text tower in a part of its own
    name="open_clip",
    rules=(
        Rule("image.class_token", "visual.class_embedding", CLASS),
        Rule("image.positions.table", "visual.positional_embedding", TABLE),
        Rule("image.patch_embed.proj.weight", "visual.conv1.weight"),
        Rule("image.norm_pre.*", "visual.ln_pre.*"),
        *_openai_blocks("image.blocks.{i}.", "visual.transformer.resblocks.{i}."),
        Rule("image.norm.*", "visual.ln_post.*"),
        Rule("image_projection.weight", "visual.proj", TRANSPOSE),
        Rule("text.embed.weight", "{p}token_embedding.weight"),
        Rule("text.positions", "{p}positional_embedding"),
        *_openai_blocks("text.blocks.{i}.", "{p}transformer.resblocks.{i}."),
        Rule("text.norm.*", "{p}ln_final.*"),
        Rule("text_projection.weight", "{p}text_projection", TRANSPOSE),
        Rule("log_scale", "logit_scale", SAME),
        Rule("bias", "logit_bias", SAME),
    ),
    recognise=lambda keys: bool(keys & {"token_embedding.weight", "text.token_embedding.weight"}),
    assumed={"eps": 1e-5},
    preprocess=PREPROCESS,
    options={"resize_rule": "bicubic_antialias"},
    prefixes=("", "text."),
    ignored={"input_resolution|context_length|vocab_size": "a number beside OpenAI's weights, seen in their shapes"},
)
HF = Dialect(
    name="hf",
    rules=(
        Rule("image.class_token", "vision_model.embeddings.class_embedding", CLASS),
        Rule("image.positions.table", "vision_model.embeddings.position_embedding.weight", TABLE),
        Rule("image.patch_embed.proj.weight", "vision_model.embeddings.patch_embedding.weight"),
        Rule("image.norm_pre.*", "vision_model.pre_layrnorm.*"),
        *_hf_blocks("image.blocks.{i}.", "vision_model.encoder.layers.{i}."),
        Rule("image.norm.*", "vision_model.post_layernorm.*"),
        Rule("image_projection.weight", "visual_projection.weight"),
        Rule("text.embed.weight", "text_model.embeddings.token_embedding.weight"),
        Rule("text.positions", "text_model.embeddings.position_embedding.weight"),
        *_hf_blocks("text.blocks.{i}.", "text_model.encoder.layers.{i}."),
        Rule("text.norm.*", "text_model.final_layer_norm.*"),
        Rule("text_projection.weight", "text_projection.weight"),
        Rule("log_scale", "logit_scale"),
    ),
    recognise=lambda keys: (
        "text_model.embeddings.token_embedding.weight" in keys and "visual_projection.weight" in keys
    ),
    assumed={"eps": 1e-5},
    preprocess=PREPROCESS,
    options={"resize_rule": "bicubic"},
    ignored={r".*\.position_ids": "0, 1, 2, ...: counted anew"},
)
DIALECTS = (OPEN_CLIP, HF)
ASK = (
    "the weights do not say whether they were trained with GELU or with QuickGELU, and with the wrong one every number "
    'is a little wrong. Say it: vitlab.load(path, activation="quick_gelu"), or once and for all: vitlab convert PATH '
    "FOLDER --activation quick_gelu; in a rename table it stands under [model]. OpenAI's own weights have quick_gelu; "
    "open_clip's have gelu, unless the model's name there ends in -quickgelu."
)
FACTS = (
    "activation",
    "eps",
    *(f"{tower}.{name}" for tower in ("image", "text") for name in ("heads", "activation", "eps")),
)


def by_path(told: dict[str, Any], *, encoder: bool = False) -> dict[str, Any]:
    """Options by path: image=dict(heads=4) is image.heads, and so is heads alone. `encoder`: for the image tower."""
    flat: dict[str, Any] = {}
    for name, value in told.items():
        if name in ("image", "text") and isinstance(value, dict):
            flat |= {f"{name}.{inner}": part for inner, part in value.items()}
        else:
            flat["image.heads" if name == "heads" else name] = value
    if not encoder:
        return flat
    return {name.removeprefix("image."): value for name, value in flat.items() if not name.startswith("text.")}


def infer_config(dialect: Dialect, renamed: Renamed, says: dict[str, Any], told: dict[str, Any]) -> CLIPConfig:
    """The config of tensors under our names. `says`: what a config beside them says; `told`: what the caller does.

    Both by path (image.heads, text.heads); activation and eps without one are both towers'.
    """
    tensors, known = renamed.tensors, {**{name: told[name] for name in FACTS if name in told}, **says}
    if "image.class_token" not in tensors:
        found = next((keys[0] for ours, keys in renamed.origin.items() if ours.startswith("image.")), "none of it")
        raise CheckpointError(
            f"its image tower is no ViT of CLIP's kind ({found} is there): only those are known here."
        )
    if "image_projection.weight" not in tensors:
        raise CheckpointError("image_projection.weight is missing, so this is not a whole CLIP.")
    activation = {tower: known.get(f"{tower}.activation", known.get("activation")) for tower in ("image", "text")}
    if None in activation.values():
        raise CheckpointError(ASK)
    eps = {tower: known.get(f"{tower}.eps", known.get("eps", dialect.assumed["eps"])) for tower in ("image", "text")}
    image = {name.removeprefix("image."): value for name, value in known.items() if name.startswith("image.")}
    if "image.image_size" in says:
        image["size_is_stored"] = True
    elif "image_size" in told or "grid" in told:
        image |= {name: told[name] for name in ("image_size", "grid") if name in told}
    found = infer_options(_part(tensors, "image."), image)
    vit = ViTConfig().with_options(
        **{**dialect.options, "eps": eps["image"], "activation": activation["image"], **found, "classes": 0}
    )
    text = _infer_text(_part(tensors, "text."), known)
    text |= {"activation": activation["text"], "eps": eps["text"]}
    loss = "sigmoid" if "bias" in tensors else "softmax"
    return CLIPConfig(vit, TextConfig(**text), tensors["image_projection.weight"].shape[0], loss)


def _part(tensors: State, prefix: str) -> State:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _infer_text(state: State, known: dict[str, Any]) -> dict[str, Any]:
    for key in ("embed.weight", "positions", "blocks.0.mlp.fc1.weight"):
        if getattr(state.get(key), "ndim", None) != 2:
            raise CheckpointError(f"text.{key} is missing or damaged, so this is not a whole CLIP.")
    vocab, width = state["embed.weight"].shape
    heads = known.get("text.heads", TEXT_HEADS.get(width))
    if heads is None:
        guess = next(h for h in (8, 6, 4, 3, 2, 1) if width % h == 0)
        raise CheckpointError(
            f"the number of heads cannot be read from a text tower of width {width}. "
            f"Say it: vitlab.load(path, text=dict(heads={guess})), or --text-heads {guess}."
        )
    return {
        "context": state["positions"].shape[0],
        "vocab": vocab,
        "width": width,
        "depth": len({key.split(".")[1] for key in state if key.startswith("blocks.")}),
        "heads": heads,
        "mlp_ratio": state["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "end_id": known.get("text.end_id", vocab - 1),  # OpenAI reads a text at its largest number
        "pad_id": known.get("text.pad_id", 0),
    }


def check_agreement(says: dict[str, Any], config: CLIPConfig) -> None:
    """A config that contradicts its weights belongs to other weights."""
    found = {"embed_dim": config.embed_dim}
    for tower, c in (("image", config.image), ("text", config.text)):
        names = ("image_size", "patch_size", "width", "depth", "channels", "vocab", "context")
        found |= {f"{tower}.{name}": getattr(c, name) for name in names if hasattr(c, name)}
    for name in says.keys() & found.keys():
        said = (says[name],) * 2 if name == "image.image_size" and isinstance(says[name], int) else says[name]
        said = tuple(said) if isinstance(said, list) else said
        if said != found[name]:
            raise CheckpointError(
                f"config says {name}={said} but the weights have {found[name]}: they do not belong together."
            )


# ------------------------------------------------------------------------------------------------------------ writing


def _check_writable(c: CLIPConfig, to: str) -> None:
    v = c.image
    refuse = {
        f"image.positions={v.positions.kind}": v.positions.kind != "learned",
        f"prefix_positions={v.positions.prefix_positions}": v.positions.prefix_positions != "class",
        "an image tower without class token": not v.tokens.class_token,
        "registers, a distillation or a mask token": bool(
            v.tokens.registers or v.tokens.distill_token or v.tokens.mask_token
        ),
        f"pooling={v.head.pooling}": v.head.pooling != "class",
        "head_hidden": bool(v.head.head_hidden),
        "head_dim": v.head_dim is not None and v.head_dim * v.heads != v.width,
        "norm=post": v.norm.kind == "post",
        "norm_pre=False": not v.norm.norm_pre,
        "final_norm=no": v.final_norm == "no" and v.norm.kind == "pre",
        "layer_scale": bool(v.residual.layer_scale),
        "qk_norm": v.attention.qk_norm,
        "qkv_bias=False": not v.attention.qkv_bias,
        "stem=conv": v.stem.kind == "conv",
        "patch_norms": v.stem.patch_norms,
        "patch_bias=True": v.stem.patch_bias and v.stem.kind == "patch",
        "mlp=swiglu": v.mlp.kind == "swiglu",
    }
    if to == "hf":
        refuse |= {
            "loss=sigmoid": c.loss == "sigmoid",
            f"images of {v.image_size[0]}x{v.image_size[1]}, which are no square": v.image_size[0] != v.image_size[1],
            "end_id=2": c.text.end_id == 2,
        }
    else:
        both = {v.mlp.activation, c.text.activation}
        refuse |= {
            f"activation={' and '.join(sorted(both))}": both not in ({"gelu"}, {"quick_gelu"}),
            f"eps={v.norm.eps:g}, text.eps={c.text.eps:g}": {v.norm.eps, c.text.eps} != {1e-5},
            f"end_id={c.text.end_id}, which is not the largest": c.text.end_id != c.text.vocab - 1,
        }
    if found := [what for what, wrong in refuse.items() if wrong]:
        library = {"hf": "transformers' CLIPModel", "open_clip": "open_clip's CLIP"}[to]
        raise CheckpointError(f"{library} cannot express {', '.join(found)}. Use --to native.")


def write(model: Network, state: State, to: str) -> tuple[State, dict[str, Any]]:
    """Tensors under the other library's names, and the JSON or text files beside them."""
    if to not in ("hf", "open_clip"):
        raise CheckpointError(
            f"a CLIP is not written as {to}: use --to hf, open_clip or native, or --encoder for its ViT."
        )
    c: CLIPConfig = model.config
    _check_writable(c, to)
    if to == "open_clip":
        return rename("open_clip", OPEN_CLIP.rules, state, heads=c.image.heads), open_clip_files(model)
    return rename("transformers", HF.rules, state, heads=c.image.heads), hf_files(model)
