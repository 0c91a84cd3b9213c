"""Networks of stages (Swin, PVT, Twins) by other libraries' names: what their dialects have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vitlab.advice import to_type
from vitlab.checkpoints import schema, timm
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, check_agreement
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Source, State, Stated, shape_of
from vitlab.errors import CheckpointError
from vitlab.models.config import Config
from vitlab.models.entry import IMAGENET_CROP
from vitlab.parsing import is_sequence

STAGES = 8  # as many as a file may have; the published ones have 4


def family(
    name: str,
    config: type[Config],
    dialects: tuple[Dialect, ...],
    infer_options: Callable[[Renamed, Options], Options],  # tensors, and what is given or stated -> options
    *,
    bare_options: tuple[str, ...],
    model_types: Mapping[str, ModelType] | None = None,
    writers: Mapping[str, Writer] | None = None,  # --to -> how
) -> Family:
    """The record of a family whose weights show all options but `bare_options`."""

    def infer(renamed: Renamed, clues: Clues) -> Reading:
        dialect, stated = clues.dialect, clues.stated.options
        given = {name: clues.given[name] for name in bare_options if name in clues.given}
        hints = {name: clues.hints[name] for name in bare_options if name in clues.hints}
        inferred = infer_options(renamed, {**hints, **given, **stated})
        check_agreement(stated, inferred)
        usual = {"image_size": dialect.preprocess["size"], **dialect.assumed, **dialect.options}
        made = config(**{**usual, **hints, **given, **stated, **inferred})
        unstated = {*dialect.assumed, "heads"} - stated.keys() - hints.keys() - given.keys()
        return Reading(made, {name: getattr(made, name) for name in bare_options if name in unstated})

    return Family(name, config, dialects, infer, writers or {}, bare_options, model_types or {})


def timm_reader(options: Callable[[Options], Options]) -> Callable[[Source], Stated | None]:
    """How a timm folder is read: `options` from its model_args, and the preprocess in the same file."""

    def read(source: Source) -> Stated | None:
        if (config := timm.read_config(source)) is None:
            return None
        preprocess = timm.preprocess_from(config["pretrained_cfg"])
        size = {"image_size": preprocess["size"]} if "size" in preprocess else {}
        usual = {name: IMAGENET_CROP[name] for name in ("mean", "std", "how", "interpolation")}
        return Stated({**size, **options(config)}, {**usual, **preprocess}, labels=timm.labels_from(config))

    return read


def depths_of(state: State) -> tuple[int, ...]:
    """Blocks in each stage, which must be numbered without gaps."""
    numbers = [key.split(".")[1:3] for key in state if key.startswith("stages.")]
    depths: list[int] = []
    for stage in sorted({int(stage) for stage, _ in numbers}):
        blocks = {int(block) for at, block in numbers if int(at) == stage}
        if stage != len(depths) or blocks != set(range(len(blocks))):
            raise CheckpointError(f"the blocks are not numbered without gaps: stage {stage} has {sorted(blocks)}.")
        depths.append(len(blocks))
    if not depths:
        raise CheckpointError("there are no blocks in it, so this is not a complete network.")
    return tuple(depths)


def common_options(state: State) -> Options:
    """Options that all of them show."""
    _, channels, kernel, _ = shape_of(state, "embeds.0.proj.weight", 4)
    return {
        "channels": channels,
        "classes": shape_of(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "depths": depths_of(state),
        "kernel": kernel,
    }


def widths_of(state: State, depths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape_of(state, f"stages.{stage}.0.norm1.weight", 1)[0] for stage in range(len(depths)))


def mlp_ratio(state: State, stage: int, width: int) -> float:
    """So that int(width * ratio) is the number of hidden channels."""
    hidden = shape_of(state, f"stages.{stage}.0.mlp.fc1.weight", 2)[0]
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


def heads_of(widths: tuple[int, ...], stated: Options, published: dict[tuple[int, ...], tuple[int, ...]]) -> Options:
    """Weights do not show the heads, except by the published widths."""
    heads = stated.get("heads", published.get(widths))
    if heads is None:
        guess = tuple(max(1, width // 64) for width in widths)
        raise CheckpointError(
            f"the heads cannot be read from weights of widths {list(widths)}. Say them, one number for each stage: "
            + to_type(f"vitlab.load(path, heads={guess}).", "in Python, and save the model: it then knows.")
        )
    return {"heads": tuple(heads) if is_sequence(heads) else heads}


def check_type(config: Options, kind: str) -> None:
    schema.check(config, schema.HF_STAGES, "config.json")
    if config.get("model_type") != kind:
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r} beside the weights of a {kind}."
        )


def check_arguments(config: Options, known: tuple[str, ...]) -> Options:
    """timm's model_args; what would make another network of the same tensors is refused."""
    args = {key: value for key, value in config["model_args"].items() if value is not None}
    rates = ("drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate")
    harmless = ("num_classes", "in_chans", "img_size", *rates)
    wrong = {key: value for key, value in args.items() if key not in (*known, *harmless) and value}
    if wrong:
        arguments = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise CheckpointError(f"timm's {arguments} is not known for this network.")
    return args


def check_pooling(config: Options, known: tuple[str, ...]) -> None:
    """timm's global_pool, which has no weights to show it."""
    for values in (config["model_args"], config):
        pooled = values.get("global_pool")
        if pooled is not None and pooled not in known:
            raise CheckpointError(f"timm's global_pool={pooled!r} is not known here; known: {', '.join(known)}.")
