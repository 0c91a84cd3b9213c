"""timm's vit_relpos_* and vit_srelpos_*: state dicts and hub folders, read and written. No other library has them."""

from __future__ import annotations

from vitlab.checkpoints import keymap, staged, timm
from vitlab.checkpoints.family import Writer, Written
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, State, layers
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.relpos import CROP, RelPosConfig


def _options(config: Options) -> Options:
    sizes = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "init_values", "class_token")
    own = ("global_pool", "fc_norm", "rel_pos_type", "rel_pos_dim", "shared_rel_pos", "block_fn")
    args = staged.check_arguments(config, (*sizes, *own))
    staged.check_pooling(config, ("avg", "token"))
    if args.get("rel_pos_type", "mlp") != "mlp":
        raise CheckpointError(f"timm's rel_pos_type={args['rel_pos_type']!r} is not known here; known is 'mlp'.")
    name = config["architecture"]
    pooled = args.get("global_pool", config.get("global_pool") or ("token" if "_cls_" in name else "avg"))
    norm = "branch" if "_rpn_" in name else "pre"
    unnormed = pooled != "token" and args.get("fc_norm") is False  # a mean of tokens that went through the final norm
    pooling = {"pooling": "class"} if pooled == "token" else {"pooling": "mean"} if unnormed else {}
    return {"eps": 1e-6, "activation": "gelu", "norm": norm, **pooling, **config["vitlab"]}


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    state = renamed.tensors
    width, channels, patch, _ = keymap.shape_of(state, "patch_embed.proj.weight", 4, "ViT")
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    if numbers != set(range(len(numbers))) or not numbers:
        raise CheckpointError(f"the blocks are not numbered from 0 without gaps: {sorted(numbers)[-3:]} are there.")
    token = "class_token" in state
    pooling = "mean_norm" if "head_norm.weight" in state else stated.get("pooling", "class" if token else "mean")
    scaled = "blocks.0.scale1.gamma" in state  # where the norm ends the branch, it has the scale's start value
    norm = "pre" if scaled else stated.get("norm", "branch")
    return {
        "width": width,
        "channels": channels,
        "patch_size": patch,
        "depth": len(numbers),
        "heads": keymap.shape_of(state, "offsets.0.fc2.weight", 2, "ViT")[0],
        "classes": keymap.shape_of(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "mlp_ratio": keymap.shape_of(state, "blocks.0.mlp.fc1.weight", 2, "ViT")[0] / width,
        "qkv_bias": "blocks.0.attention.qkv.bias" in state,
        "layer_scale": 1e-6 if scaled else 0.0,
        "norm": norm,
        "class_token": token,
        "pooling": pooling,
        "bias_hidden": keymap.shape_of(state, "offsets.0.fc1.weight", 2, "ViT")[0],
        "shared": renamed.origin["offsets.0.fc1.weight"][0].startswith("shared"),
    }


TIMM = Dialect(
    name="timm",
    rules=(
        Rule("class_token", "cls_token"),
        Rule("patch_embed.proj.*", "patch_embed.proj.*"),
        *layers("offsets.0.", "shared_rel_pos.mlp.", ("fc1", "fc2")),
        *layers("offsets.{i}.", "blocks.{i}.attn.rel_pos.mlp.", ("fc1", "fc2")),
        *layers("blocks.{i}.", "blocks.{i}.", ("norm1", "norm2", "mlp.fc1", "mlp.fc2")),
        *layers("blocks.{i}.attention.", "blocks.{i}.attn.", ("qkv", "proj")),
        Rule("blocks.{i}.scale1.gamma", "blocks.{i}.ls1.gamma"),
        Rule("blocks.{i}.scale2.gamma", "blocks.{i}.ls2.gamma"),
        Rule("norm.*", "norm.*"),
        Rule("head_norm.*", "fc_norm.*"),
        Rule("head.*", "head.*"),
    ),
    recognise=lambda keys: bool(keys & {"blocks.0.attn.rel_pos.mlp.fc1.weight", "shared_rel_pos.mlp.fc1.weight"}),
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess=CROP,
    ignored={r".*rel_coords_log|.*relative_position_index": "computed from the grid"},
    read_stated=staged.timm_reader(_options),
)


def _write(model: Network, state: State) -> Written:
    c: RelPosConfig = model.config
    timm.check_expressible("timm's relpos", {f"activation={c.activation}": c.activation != "gelu"})
    args: Options = {
        "img_size": list(c.image_size),
        "patch_size": c.patch_size,
        "in_chans": c.channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": timm.ratio(c.width, c.mlp_ratio, c.mlp_hidden),
        "qkv_bias": c.qkv_bias,
        "init_values": c.layer_scale or None,
        "class_token": c.class_token,
        "global_pool": "token" if c.pooling == "class" else "avg",
        "fc_norm": c.pooling == "mean_norm",
        "rel_pos_dim": c.bias_hidden,
        "shared_rel_pos": c.shared,
    }
    name = "vit_relpos_base_patch16_rpn_224" if c.norm == "branch" else "vit_relpos_small_patch16_224"
    config = timm.hub_config(c, model.preprocess, name, args)
    other = "blocks.{i}.attn.rel_pos." if c.shared else "shared_rel_pos."
    rules = tuple(rule for rule in TIMM.rules if not rule.keys[0].startswith(other))
    tensors = keymap.write("timm", rules, state, heads=c.heads)
    return Written(tensors, {"config.json": config}, timm.eps_note("timm's relpos", c.eps))


FAMILY = staged.family(
    "relpos",
    RelPosConfig,
    (TIMM,),
    _infer_options,
    bare_options=("eps", "activation", "image_size"),
    writers={"timm": Writer(_write, any_size=lambda config: True)},
)
