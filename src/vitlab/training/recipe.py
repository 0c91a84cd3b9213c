"""A recipe: everything that decides a training run, as plain values in TOML.

    [data]
    source = "cifar10"
    [run]
    epochs = 12

`vitlab train recipe.toml optim.lr=3e-4` changes a value; an unknown name is an error that gives the nearest one.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Integral, Real
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, Literal, TypeVar

from vitlab.errors import TrainingError, VitlabError
from vitlab.models.config import Config, near_names, nearest
from vitlab.parsing import parse_toml
from vitlab.special_files import special_kind
from vitlab.training.objectives import DEFAULT, OBJECTIVES, option_owners

C = TypeVar("C", bound=Config)


@dataclass(frozen=True)
class DataRecipe(Config):
    source: str = "digits"  # a name, a folder of class folders, a CSV, a list of files, or shards; or "a/,b/"
    path: str | None = None  # files of a named source; default: searched for, or downloaded
    batch_size: int = 128  # images per step and process
    workers: int = 0  # processes that prepare batches; 0: the training process does
    val_fraction: float = 0.1  # of train, where there is no val split
    per_class: int | None = None  # few labels: this many images of each class
    fraction: float | None = None  # few labels: this share of the training images
    label: str | None = None  # of a table: the column of class names; default: label or class
    labels: str | None = None  # of a table: the column of several labels (cat;dog), or columns of 0 and 1: "cat,dog"
    target: str | None = None  # of a table: a column of numbers, which are learned
    balance: Literal["none", "sampling", "loss"] = "none"  # rare classes count as much: drawn as often, or weighted
    group: str | None = None  # images that no split tears apart: a CSV's column, parent, or re:EXPRESSION on the path
    pixels: Literal["auto", "photo", "stored"] = "auto"  # 8-bit RGB, or the values and channels that files hold
    decode: Literal["fast", "exact"] = "fast"  # training photos: at the size needed, or all pixels as in evaluation
    copies_gb: float = 4.0  # with fast: disk for shrunken copies, which epochs read in place of the files; 0: none
    channels: int | None = None  # of .npy files, where their shape does not tell
    repeats: int = 1  # repeated augmentation: views of an image in one batch (arXiv:1902.05509)
    max_unreadable: int = 20  # images that may be skipped before the run stops
    max_bad_annotations: int = 20  # wrong masks, boxes and polygons that may be left out
    allow_cut: bool = False  # use the complete samples of truncated tar shards instead of refusing them
    allow_outside: bool = False  # let a CSV or caption table name files outside its own folder
    apply: str | None = None  # corrections of the data: the table that vitlab check writes


@dataclass(frozen=True)
class AugmentRecipe(Config):
    crop: Literal["none", "padded", "resized", "scaled"] = "none"  # scaled: with masks and boxes (arXiv:2012.07177)
    padding: int = 4
    border: Literal["reflect", "zeros"] = "reflect"  # what a padded crop adds
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (0.75, 4 / 3)
    flip: bool = False
    flip_in_turn: bool = False  # with flip: mirrored in every second epoch, instead of by chance
    randaugment: int = 0  # operations per image
    magnitude: float = 9.0
    jitter: float = 0.0
    erasing: float = 0.0  # probability
    mixup: float = 0.0  # alpha; 0 = off
    cutmix: float = 0.0
    mix_probability: float = 1.0
    smoothing: float = 0.0  # label smoothing
    drop_patches: float = 0.0  # share of patches left out ...
    drop_patches_until: float = 1.0  # ... in this first part of the run
    flip_at_test: bool = False  # average the scores of an image and its mirror image
    shift_at_test: int = 0  # pixels: of the image moved so far up left and down right as well, at half the weight


AUTO = "auto"  # model.init_from: the best weights for the machine and the time


@dataclass(frozen=True)
class ModelRecipe(Config):
    name: str = "vit_digits"
    init_from: str | None = None  # any checkpoint or hub name: fine-tuning; with run.ladder also auto
    init_image: str | None = None  # clip: the image tower alone, from any checkpoint of a ViT
    freeze: Literal["none", "encoder"] = "none"  # "encoder": only the head learns; with clip, all but the image tower
    lora: int = 0  # rank of low-rank adapters, which learn in place of the encoder (arXiv:2106.09685); 0: none
    lora_alpha: float | None = None  # adapters are scaled by alpha / rank; default: the rank
    lora_layers: str = "attention"  # which matrices: attention, mlp, or ends of names: "qkv,fc1"
    reducer: str | None = None  # token reducer, in training and evaluation: tome:r=8, evit:keep=0.7
    options: dict[str, Any] = field(default_factory=dict)  # every other key of [model] is an option of the model

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reducer is not None:
            from vitlab.reduce import reducer_of  # torch, which a recipe alone does not need

            try:
                reducer_of(self.reducer)
            except VitlabError as error:
                raise TrainingError(f"model.reducer: {error}") from None


@dataclass(frozen=True)
class ObjectiveRecipe(Config):
    """What is learned. Each file of training/objectives declares and checks its own options."""

    name: str = DEFAULT  # one of training/objectives
    options: dict[str, Any] = field(default_factory=dict)  # every other key of [objective] that is not at its default

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.name not in OBJECTIVES:
            raise TrainingError(f"name={self.name!r} is not valid: expected {' | '.join(OBJECTIVES)}.")


@dataclass(frozen=True)
class TextRecipe(Config):
    """The tokenizer, for objectives that learn from text."""

    tokenizer: str | None = None  # a tokenizer.json, or a folder with one; default: trained on the training captions
    vocab: int = 4096  # largest vocabulary of a trained tokenizer
    context: int = 32  # tokens of a caption with start and end; longer ones are truncated


@dataclass(frozen=True)
class OptimRecipe(Config):
    name: Literal["adamw", "adam", "sgd", "muon"] = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] = (0.9, 0.999)
    momentum: float = 0.9  # of sgd; muon uses 0.95
    muon_lr: float = 0.02  # for the matrices in the blocks; lr is for everything else
    layer_decay: float = 1.0  # lr of block i is lr * layer_decay^(depth - i)
    clip: float = 0.0  # largest gradient norm; 0 = off
    accumulate: int = 1  # micro-steps per step
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_epochs: float = 0.0
    warmup_steps: int = 0  # instead of epochs
    final_lr: float = 0.0  # share of lr at the end
    ema: float = 0.0  # decay of the running average that is evaluated and kept; 0 = off


@dataclass(frozen=True)
class RunRecipe(Config):
    epochs: int = 30
    seed: int = 0
    dir: str = ""  # runs/<recipe's name> unless given
    note: str = ""  # why the run is made and what you expect of it: listed by `vitlab runs`
    save_every: int = 0  # steps between saves; 0: at the end of each epoch
    keep: int = 1  # saves kept before the last, 0 to 9, in case it is damaged; each needs as much disk again
    eval_every: int = 1  # epochs between evaluations
    minutes: float = 0.0  # the run ends here at the latest, with what it has; 0: no limit
    ladder: bool = False  # climb: k-NN, linear probe, LoRA, whole network; keep the simplest that is not beaten
    amp: Literal["off", "bf16", "fp16"] = "off"
    compile: bool = False
    device: str = "auto"
    sharding: Literal["none", "fsdp"] = "none"  # with several processes, each keeps the full model or a shard of it


@dataclass(frozen=True)
class TrackRecipe(Config):
    wandb: Literal["off", "offline", "online"] = "off"
    tensorboard: bool = False


@dataclass(frozen=True)
class Recipe(Config):
    data: DataRecipe = field(default_factory=DataRecipe)
    augment: AugmentRecipe = field(default_factory=AugmentRecipe)
    model: ModelRecipe = field(default_factory=ModelRecipe)
    objective: ObjectiveRecipe = field(default_factory=ObjectiveRecipe)
    text: TextRecipe = field(default_factory=TextRecipe)
    optim: OptimRecipe = field(default_factory=OptimRecipe)
    run: RunRecipe = field(default_factory=RunRecipe)
    track: TrackRecipe = field(default_factory=TrackRecipe)

    def __post_init__(self) -> None:
        super().__post_init__()
        for keys, is_valid, rule in RULES:
            for key in keys.split():
                value = attrgetter(key)(self)
                if not is_valid(value):
                    raise TrainingError(f"{key}={value} {rule}.")


RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("data.channels", lambda v: v is None or v >= 1, "must be 1 or more"),
    ("data.batch_size data.repeats optim.accumulate run.epochs run.eval_every", lambda v: v >= 1, "must be at least 1"),
    (
        "data.copies_gb data.workers data.max_unreadable data.max_bad_annotations optim.momentum run.save_every "
        "run.keep run.minutes",
        lambda v: v >= 0,
        "must be 0 or more",
    ),
    ("model.lora", lambda v: v >= 0, "must be 0 (none) or a rank, e.g. 8"),
    ("model.lora_alpha", lambda v: v is None or v > 0, "must be above 0"),
    ("run.keep", lambda v: v <= 9, "must be 9 at most"),
    ("optim.lr optim.muon_lr", lambda v: v > 0, "must be above 0"),
    ("optim.layer_decay", lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    ("optim.final_lr augment.drop_patches_until", lambda v: 0 <= v <= 1, "must lie between 0 and 1"),
    ("augment.smoothing augment.drop_patches optim.ema", lambda v: 0 <= v < 1, "must be at least 0 and below 1"),
    ("optim.betas", lambda v: 0 <= min(v) <= max(v) < 1, "must both be at least 0 and below 1"),
    ("run.seed", lambda v: -(2**63) <= v < 2**63, "does not fit into 64 bits"),
)
GROUPS = {f.name: f.default_factory for f in fields(Recipe)}  # type: ignore[misc]


def from_tables(tables: dict[str, Any], base: Recipe | None = None) -> Recipe:
    """Tables of a TOML file -> a recipe; what is absent keeps its default."""
    recipe = base or Recipe()
    for group, values in tables.items():
        if group not in GROUPS:
            raise TrainingError(f"there is no [{group}].{nearest(group, list(GROUPS))} Tables: {', '.join(GROUPS)}.")
        if not isinstance(values, dict):
            raise TrainingError(
                f"{group} must be a table: write [{group}] and its values below, or {group}.name=value."
            )
        for name, value in values.items():
            recipe = with_value(recipe, f"{group}.{name}", value)
    return recipe


def single_run(recipe: Recipe) -> Recipe:
    """The recipe as one training run, which does not climb the ladder: without named weights it starts from scratch."""
    start = None if recipe.model.init_from == AUTO else recipe.model.init_from
    return replace(recipe, model=replace(recipe.model, init_from=start), run=replace(recipe.run, ladder=False))


def with_value(recipe: Recipe, key: str, value: Any) -> Recipe:
    """One value changed, by its dotted name."""
    group, _, name = key.partition(".")
    keys = [f"{g}.{f.name}" for g in GROUPS for f in fields(getattr(recipe, g)) if f.name != "options"]
    if key in keys:
        part = getattr(recipe, group)
        return replace(recipe, **{group: _changed(part, group, name, value)})
    if (
        group == "model" and name and not name.startswith("lora")
    ):  # an option of the model itself; its own config checks it
        options = {**recipe.model.options, name: value}
        return replace(recipe, model=replace(recipe.model, options=options))
    if group == "objective" and name in option_owners():
        default = option_owners()[name]()
        value = getattr(_changed(default, group, name, value), name)
        options = {k: v for k, v in recipe.objective.options.items() if k != name}
        options |= {} if value == getattr(default, name) else {name: value}
        return replace(recipe, objective=replace(recipe.objective, options=options))
    near = near_keys(key, recipe.model.name)
    hint = f" Did you mean {' or '.join(setting(k, value) for k in near)}?" if near else ""
    raise TrainingError(f"there is no {key!r} in a recipe.{hint}")


def near_keys(key: str, model: str = "vit_tiny") -> list[str]:
    """Full names that may have been meant: depth is model.depth, epochs is run.epochs."""
    keys = [f"{g}.{f.name}" for g in GROUPS for f in fields(getattr(Recipe(), g)) if f.name != "options"]
    keys += [f"objective.{option}" for option in option_owners()]
    from vitlab.models.registry import find  # imports torch

    try:
        config = find(model)[0].config
    except VitlabError:  # auto, or a checkpoint's name
        config = find("vit_tiny")[0].config
    options = [f"model.{f.name}" for f in fields(config)]
    return near_names(key, keys + [option for option in options if option not in keys] if "." not in key else keys)


def _changed(part: C, group: str, name: str, value: Any) -> C:
    """One field changed; an error names its group."""
    kinds = {f.name: str(f.type) for f in fields(part)}  # type: ignore[arg-type]  # every Config is a dataclass
    if value == "none" and "None" in kinds[name]:  # TOML cannot express None
        value = None
    try:
        return replace(part, **{name: value})  # type: ignore[type-var]  # every Config is a dataclass
    except VitlabError as error:
        text = str(error)
        raise TrainingError(text if text.startswith(group + ".") else f"{group}.{text}") from None


def with_settings(recipe: Recipe, settings: list[str]) -> Recipe:
    """Apply `key=value` texts as typed on the command line."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign:
            raise TrainingError(f"{setting!r} is not a setting: write key=value, e.g. run.epochs=10.")
        try:
            value = parse_value(text.strip())
        except ValueError as error:
            raise TrainingError(f"{setting:.80}: {error}. To write it as a text: {key}='\"...\"'") from None
        recipe = with_value(recipe, key.strip(), value)
    return recipe


def setting(key: str, value: object) -> str:
    """A value as it is typed on the command line: setting("run.epochs", 3) is "run.epochs=3"."""
    return f"{key}={'none' if value is None else _toml(value)}"


def parse_value(text: str) -> Any:
    """As TOML where it is TOML (numbers, true, lists), otherwise the text itself."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    except ValueError as error:  # NaN, nested too deep, or more than 64 bits
        raise TrainingError(str(error)) from None
    try:
        number = float(text)  # 1e-3, which TOML reads, and 1.e-3, which it does not
    except ValueError:
        return text
    if not math.isfinite(number):
        raise TrainingError(f"{text} is not a finite number")
    return number


def read_recipe(path: Path) -> Recipe:
    if kind := special_kind(path):
        raise TrainingError(f"{path}: is {kind}, not a recipe. Name a TOML file.")
    try:
        tables = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TrainingError(f"{path}: no such recipe.") from None
    except ValueError as error:  # bad TOML, NaN, nested too deep, or not UTF-8
        raise TrainingError(f"{path}: is not valid TOML ({error}).") from None
    try:
        return from_tables(tables)
    except VitlabError as error:
        raise TrainingError(f"{path}: {error}") from None


def to_tables(recipe: Recipe) -> dict[str, dict[str, Any]]:
    tables = asdict(recipe)
    tables["model"] |= tables["model"].pop("options")
    chosen = tables["objective"].pop("options")
    tables["objective"] |= {name: chosen.get(name, getattr(owner(), name)) for name, owner in option_owners().items()}
    return tables


def to_toml(recipe: Recipe) -> str:
    """The whole recipe, every value resolved; None is left out, because TOML cannot express it."""
    lines: list[str] = []
    for group, values in to_tables(recipe).items():
        lines.append(f"[{group}]")
        lines += [f"{_key(name)} = {_toml(value)}" for name, value in values.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name  # norm.eps, an option by its path, is one name and no table


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | PurePath):
        escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match[0]):04x}", escaped) + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, Real):  # numpy's numbers too
        return repr(int(value) if isinstance(value, Integral) else float(value))
    return repr(value)


def difference(old: Recipe, new: Recipe) -> list[str]:
    """The differences between two recipes, a line each: optim.lr: 0.001 -> 0.0003"""
    before, after = to_tables(old), to_tables(new)
    lines = []
    for group in before:
        for name in sorted(before[group].keys() | after[group].keys()):
            a, b = before[group].get(name), after[group].get(name)
            if a != b:
                lines.append(f"{group}.{name}: {a} -> {b}")
    return lines
