"""SegFormer by transformers' names: SegformerForSemanticSegmentation, read and written. Its encoder is a PVT v2."""

from __future__ import annotations

from vitlab.checkpoints import hf, keymap, pvt, staged
from vitlab.checkpoints.dense import encoder_clues, encoder_rules
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, Written
from vitlab.checkpoints.keymap import JOIN, Codec, Dialect, Options, Renamed, Rule, State, layers
from vitlab.checkpoints.staged import STAGES
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import STRETCH, backbone
from vitlab.models.pvt import PVTv2Config
from vitlab.models.segformer import SegFormerConfig

EPS = 1e-5  # of every norm: config.json's layer_norm_eps is not used there
AS_CONVOLUTION = Codec(lambda parts: parts[0][..., None, None], lambda t, n, h: [t[..., 0, 0]])


def _stage(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"{{p}}encoder.block.{stage}.{{i}}."
    inside = theirs + "attention.self."
    return (
        *layers(f"embeds.{stage}.", f"{{p}}encoder.patch_embeddings.{stage}.", {"proj": "proj", "norm": "layer_norm"}),
        *layers(ours, theirs, {"norm1": "layer_norm_1", "norm2": "layer_norm_2"}),
        *layers(ours, theirs, {"mlp.fc1": "mlp.dense1", "mlp.conv": "mlp.dwconv.dwconv", "mlp.fc2": "mlp.dense2"}),
        *layers(ours + "attention.", inside, {"q": "query", "reduction": "sr", "norm": "layer_norm"}),
        Rule(ours + "attention.kv.*", (inside + "key.*", inside + "value.*"), JOIN),
        Rule(ours + "attention.proj.*", theirs + "attention.output.dense.*"),
        Rule(f"norms.{stage}.*", f"{{p}}encoder.layer_norm.{stage}.*"),
    )


RULES = (
    *encoder_rules(tuple(rule for stage in range(STAGES) for rule in _stage(stage))),
    Rule("projections.{i}.weight", "decode_head.linear_c.{i}.proj.weight", AS_CONVOLUTION),
    Rule("projections.{i}.bias", "decode_head.linear_c.{i}.proj.bias"),
    Rule("fuse.weight", "decode_head.linear_fuse.weight"),
    *(
        Rule(f"norm.{part}", f"decode_head.batch_norm.{part}")
        for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ),
    Rule("head.*", "decode_head.classifier.*"),
)
FIELDS: hf.Fields = {"head_width": ("decoder_hidden_size", 256), "head_dropout": ("classifier_dropout_prob", 0.1)}
ENCODER: hf.Fields = {
    "channels": ("num_channels", 3),
    "widths": ("hidden_sizes", (32, 64, 160, 256)),
    "depths": ("depths", (2, 2, 2, 2)),
    "heads": ("num_attention_heads", (1, 2, 5, 8)),
    "reductions": ("sr_ratios", (8, 4, 2, 1)),
    "mlp_ratios": ("mlp_ratios", (4, 4, 4, 4)),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "stochastic_depth": ("drop_path_rate", 0.1),
}
PREPROCESS: Options = {**STRETCH, "size": (512, 512)}
MODEL_TYPES = {"segformer": ModelType("Segformer", preprocess=PREPROCESS)}


def _options(config: Options) -> Options:
    staged.check_type(config, "segformer")
    patches, strides = list(config.get("patch_sizes", (7, 3, 3, 3))), list(config.get("strides", (4, 2, 2, 2)))
    if patches != [7, 3, 3, 3] or strides != [4, 2, 2, 2]:
        raise CheckpointError(
            f"config.json has patch_sizes {patches} and strides {strides}; known are the released models'."
        )
    options = hf.read_fields(config, {**FIELDS, **ENCODER}) | dict.fromkeys(("eps", "merge_eps", "reduction_eps"), EPS)
    return {**options, "patch_size": 4, "image_size": 512, "activation": hf.activation_of(config)}


HF = Dialect(
    name="hf",
    rules=RULES,
    recognise=lambda keys: {"decode_head.linear_fuse.weight", "decode_head.classifier.weight"} <= keys,
    assumed={"eps": EPS, "merge_eps": EPS, "reduction_eps": EPS, "activation": "gelu"},
    preprocess=PREPROCESS,
    prefixes=("segformer.",),
    read_stated=hf.reader(_options, MODEL_TYPES),
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    own = {name: value for name, value in clues.stated.options.items() if name in FIELDS}
    reading = pvt.PVT_V2.infer(renamed.part("encoder."), encoder_clues(clues, own))
    encoder: PVTv2Config = reading.config
    classes, width = keymap.shape_of(renamed.tensors, "head.weight", 4, "SegFormer")[:2]
    config = SegFormerConfig(
        image_size=encoder.image_size,
        classes=classes,
        backbone=backbone("pvt_v2", encoder),
        head_width=width,
        head_dropout=own.get("head_dropout", 0.1),
    )
    return Reading(config, reading.assumed)


def _write(model: Network, state: State) -> Written:
    c: SegFormerConfig = model.config
    encoder = c.encoder
    four = len(encoder.option("depths")) == 4 and encoder.option("patch_size") == 4
    if not isinstance(encoder, PVTv2Config) or encoder.linear or not four:
        raise UsageError("transformers' SegFormer is around a PVT v2 of four stages with reduced keys: --to native.")
    if {encoder.eps, encoder.merge_eps, encoder.reduction_eps} != {EPS} or not encoder.qkv_bias:
        raise UsageError(f"transformers' SegFormer has eps={EPS:g} in all norms, and biases: use --to native.")
    config: Options = {
        **hf.write_fields(encoder, ENCODER),
        **hf.write_fields(c, FIELDS),
        "architectures": ["SegformerForSemanticSegmentation"],
        "model_type": "segformer",
        "num_encoder_blocks": 4,
        "patch_sizes": [7, 3, 3, 3],
        "strides": [4, 2, 2, 2],
        "hidden_act": hf.activation_for(encoder.activation),
        **hf.class_fields(c.classes, model.labels),
        "dtype": "float32",
    }
    tensors = keymap.write("transformers", RULES, state, prefix="segformer.", heads=1)
    return hf.folder(tensors, config, model.preprocess, "SegformerImageProcessor")


FAMILY = Family(
    "segformer",
    SegFormerConfig,
    (HF,),
    _infer,
    {"hf": Writer(_write, any_size=lambda config: True)},
    bare_options=("eps", "merge_eps", "reduction_eps", "activation", "image_size", "heads"),
    model_types=MODEL_TYPES,
    check_theirs=lambda theirs: DenseOutput(semantic=theirs.logits),
)
