"""vitlab.create and vitlab.load: a model ready for use, with its preprocess and labels, from a name or from any file.

load("runs/flowers/best")                                  # a native folder
load("hf-hub:google/vit-base-patch16-224", classes=10)     # new head
load("B_16.npz", image_size=384)                           # positions resized
load("mine.pth", heads=4, image_size=(32, 48))             # what a bare state dict cannot tell
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.checkpoints import facebook, files, hf, hub, jax, keymap, lucidrains, native, timm, torchvision
from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.infer import infer_options
from vitlab.checkpoints.keymap import Dialect, Renamed
from vitlab.checkpoints.native import Card
from vitlab.checkpoints.report import Report, Row
from vitlab.checkpoints.usermap import read_map
from vitlab.images.preprocess import Preprocess
from vitlab.layers.positions import resize_positions, resize_relative
from vitlab.models import registry
from vitlab.models.config import option_paths
from vitlab.models.vit_config import ViTConfig

DIALECTS = (hf.DIALECT, facebook.DIALECT, timm.DIALECT, jax.DIALECT, torchvision.DIALECT, lucidrains.DIALECT)


class AssumedWarning(UserWarning):
    """Something a file does not say was taken at its usual value."""


def create(name: str, **options: Any):
    """A new, untrained model by name, with any option changed: create("vit_base", classes=10, image_size=384)."""
    entry, config = registry.build_config(name, **options)
    model: Any = registry.build(entry.family, config)
    model.preprocess = default_preprocess(entry.preprocess, entry.config, config)
    model.card = Card(name=entry.name)
    return model


def default_preprocess(values: dict[str, Any], stored: Any, config: Any) -> Preprocess:
    """Preprocess values made for `stored`'s image size, for the size and channels that `config` has."""
    values = {"size": stored.image_size, **values}
    n = config.channels
    for key in ("mean", "std"):
        if key in values and len(values[key]) != n:
            values[key] = (0.5,) * n
    if n not in (1, 3):
        return None  # type: ignore[return-value]  # no picture file has so many channels
    values.setdefault("mean", (0.5,) * n)
    values.setdefault("std", (0.5,) * n)
    return Preprocess(**values).with_size(config.image_size)


def load(source: str | Path, *, map: str | Path | None = None, allow_nan: bool = False, **overrides: Any):
    """A model from a native, transformers or timm folder, an .npz, .pth or .safetensors file, or hf-hub:owner/name.

    Overrides change options by name (classes=10 gives a new head, image_size=384 resizes positions) and tell what a
    bare state dict cannot: heads, image_size or grid. `map` is a rename table for a stranger's network.
    """
    model, report = load_with_report(source, map=map, allow_nan=allow_nan, **overrides)
    for note in report.notes:
        warnings.warn(f"{source}: {note}", AssumedWarning, stacklevel=2)
    return model


def load_with_report(
    source: str | Path, *, map: str | Path | None = None, allow_nan: bool = False, **overrides: Any
) -> tuple[Any, Report]:
    """Like `load`, and what became of every key."""
    path = hub.fetch(str(source)) if str(source).startswith(hub.PREFIX) else Path(source).expanduser()
    if not path.exists():
        raise CheckpointError(_not_there(str(source)))
    if path.is_dir() and (path / native.CARD).is_file() and map is None:
        found = _read_native(path)
    else:
        found = _read_foreign(path, Path(map) if map is not None else None, overrides)
    overrides = {k: v for k, v in overrides.items() if k != "grid"}
    if not allow_nan:
        files.check_finite(found.tensors, path)
    return _assemble(found, overrides, str(source))


class _Found:
    """What a file holds, under our names, with the config it was saved with."""

    def __init__(self, tensors, origin, unused, dialect: str, family: str, config: Any):
        self.tensors: dict[str, Tensor] = tensors
        self.origin: dict[str, tuple[str, ...]] = origin
        self.unused: dict[str, str] = unused
        self.dialect, self.family, self.config = dialect, family, config
        self.preprocess: Preprocess | None = None
        self.labels: list[str] | None = None
        self.card = Card()
        self.notes: list[str] = []


def _read_native(folder: Path) -> _Found:
    card = native.read_card(folder)
    if card["family"] not in registry.FAMILIES:
        raise CheckpointError(f"{folder}: family {card['family']!r} is not known. Update vitlab.")
    config = registry.FAMILIES[card["family"]][0].from_dict(card["config"])
    if not (folder / native.WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: {native.WEIGHTS} is missing beside {native.CARD}.")
    tensors = files.read_tensors(folder / native.WEIGHTS)
    found = _Found(tensors, {k: (k,) for k in tensors}, {}, "native", card["family"], config)
    found.preprocess = Preprocess.from_dict(card["preprocess"]) if card.get("preprocess") else None
    found.labels = card.get("labels")
    found.card = Card(card.get("name"), card.get("source"), card.get("licence"), card.get("metrics") or {})
    return found


def _read_foreign(path: Path, map: Path | None, overrides: dict[str, Any]) -> _Found:
    folder_config: dict[str, Any] = {}
    preprocessor: dict[str, Any] = {}
    if path.is_dir():
        state = _read_folder(path)
        folder_config = files.read_json(path / "config.json") if (path / "config.json").is_file() else {}
        if (path / "preprocessor_config.json").is_file():
            preprocessor = files.read_json(path / "preprocessor_config.json")
    else:
        state = files.read_tensors(path)
    told = _understood(overrides)
    if map is not None:
        dialect, stated = read_map(map)
        told = {**stated, **told}
    else:
        dialect = detect(set(state), path)
        stated = {}
    says: dict[str, Any] = {}
    preprocess: dict[str, Any] = dict(dialect.preprocess)
    if dialect is hf.DIALECT and folder_config:
        says = hf.options_from(folder_config)
        preprocess = hf.preprocess_from(preprocessor) if preprocessor else preprocess
    elif "architecture" in folder_config and dialect in (timm.DIALECT, facebook.DIALECT):
        says, values = timm.options_from(folder_config, state)
        preprocess |= values
    elif folder_config.get("model_type"):
        raise CheckpointError(
            f"{path}: a {folder_config['model_type']!r} model; known are {', '.join(hf.MODEL_TYPES)} and vitlab's own."
        )
    renamed: Renamed = _rename(dialect, state, path)
    certain = {**dialect.options, **dialect.hints(state), **stated, **says}
    stored_size = "image_size" in says and "grid" not in told
    told = {**certain, **told, **({"image_size": says["image_size"], "size_is_stored": True} if stored_size else {})}
    inferred = infer_options(renamed.tensors, told, path)
    options = {**dialect.assumed, **certain, **inferred}
    config = ViTConfig().with_options(**{k: v for k, v in options.items() if k not in ("grid", "size_is_stored")})
    found = _Found(renamed.tensors, renamed.origin, renamed.unused, dialect.name, "vit", config)
    size = preprocess.pop("size", config.image_size)
    found.preprocess = default_preprocess({"size": size, **preprocess}, config, config)
    labels = hf.labels_from(folder_config)
    found.labels = labels if labels and len(labels) == config.classes else None
    found.card = Card(source=str(path.name))
    unsaid = {k: v for k, v in dialect.assumed.items() if k not in certain and k not in overrides}
    if unsaid:
        values = ", ".join(f"{k}={v}" for k, v in unsaid.items())
        found.notes.append(
            f"{dialect.name} weights do not say {values}: taken as usual there. Pass another to change it."
        )
    return found


def _read_folder(folder: Path) -> dict[str, Tensor]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return files.read_tensors(folder / name)
    if (folder / "model.safetensors.index.json").is_file():
        return files.read_shards(folder / "model.safetensors.index.json")
    weights = sorted(p for p in folder.iterdir() if p.suffix.lower() in files.SUFFIXES)
    if len(weights) == 1:
        return files.read_tensors(weights[0])
    inside = ", ".join(p.name for p in weights) or "none"
    raise CheckpointError(
        f"{folder}: expected model.json (vitlab) or config.json with model.safetensors (transformers, timm); "
        f"weights files in it: {inside}. Name one of them, or another folder."
    )


def detect(keys: set[str], path: object) -> Dialect:
    """Whose names are these?"""
    for dialect in DIALECTS:
        if dialect.recognise(keys):
            return dialect
    if {"class_token", "patch_embed.proj.weight"} <= keys:
        raise CheckpointError(
            f"{path}: vitlab weights without their {native.CARD}. Name the folder, with both files in it."
        )
    some = ", ".join(sorted(keys)[:3])
    raise CheckpointError(
        f"{path}: {len(keys)} keys of an unknown layout, e.g. {some}. Known are "
        f"{', '.join(d.name for d in DIALECTS)}. Write a rename table and pass map='keys.toml' (--map keys.toml)."
    )


def _rename(dialect: Dialect, state: dict[str, Tensor], path: object) -> Renamed:
    try:
        return keymap.read(dialect, state)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _understood(overrides: dict[str, Any]) -> dict[str, Any]:
    """Only names the config has, so that a typing error is told before anything is read."""
    known = option_paths(ViTConfig)
    unknown = {k: v for k, v in overrides.items() if k not in known and k != "grid"}
    if unknown:
        ViTConfig().with_options(**unknown)  # raises, naming the nearest
    return dict(overrides)


def _assemble(found: _Found, overrides: dict[str, Any], source: str) -> tuple[Any, Report]:
    """Build the asked network, fit the tensors to it, and account for every key."""
    stored = found.config
    if overrides.get("classes") and not stored.classes and "head_hidden" not in overrides:
        overrides = {**overrides, "head_hidden": 0}  # a pre-training head goes when a new classifier comes (ViT, 3.2)
    config = stored.with_options(**overrides)
    report = Report(source, found.dialect, notes=list(found.notes))
    as_saved = native.on_meta(lambda: registry.build(found.family, stored)).state_dict()
    model: Any = native.on_meta(lambda: registry.build(found.family, config))
    wanted = model.state_dict()
    problems = [f"{key} is missing" for key in as_saved.keys() - found.tensors.keys()]
    problems += [f"{key} is not part of this network" for key in found.tensors.keys() - as_saved.keys()]
    problems += [
        f"{key} is {_shape(found.tensors[key])}, expected {_shape(as_saved[key])}"
        for key in as_saved.keys() & found.tensors.keys()
        if found.tensors[key].shape != as_saved[key].shape
    ]
    if problems:
        raise CheckpointError(
            f"{source}: {len(problems)} tensor(s) do not fit the network: {'; '.join(sorted(problems)[:4])}. "
            "The file is incomplete, or heads, image_size or the rename table are not those it was made with."
        )
    state: dict[str, Tensor] = {}
    fresh: list[str] = []
    for key, like in wanted.items():
        theirs = found.origin.get(key, ())
        value = found.tensors.get(key)
        if value is not None and value.shape == like.shape and not _other_grid(key, stored, config):
            state[key] = value
            report.rows.append(Row("matched", key, theirs, tuple(like.shape)))
        elif value is not None and _resizable(key):
            state[key] = _resize(key, value, stored, config)
            note = f"from {_shape(value)}, grid {_grid(stored)} to {_grid(config)}"
            report.rows.append(Row("resized", key, theirs, tuple(like.shape), note))
        else:
            fresh.append(key)
            report.rows.append(
                Row("new", key, theirs if value is not None else (), tuple(like.shape), "as asked: untrained")
            )
    for key in found.tensors.keys() - wanted.keys():
        report.rows.append(
            Row("unused", None, found.origin[key], tuple(found.tensors[key].shape), "left out, as asked")
        )
    for key, why in found.unused.items():
        report.rows.append(Row("unused", None, (key,), (), why))
    if fresh:  # asked for and not in the file: initialised as in a new model, of one block where that is enough
        enough = config if any(key.startswith("blocks.") for key in fresh) else config.with_options(depth=1)
        new = registry.build(found.family, enough).state_dict()
        state |= {key: new[key] for key in fresh}
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    model.load_state_dict(state, assign=True)
    model.requires_grad_(True)
    model.labels = found.labels if config.classes == stored.classes else None
    preprocess = found.preprocess
    if preprocess is not None and config.image_size != stored.image_size:
        preprocess = preprocess.with_size(config.image_size)
    model.preprocess, model.card = preprocess, found.card
    return model.eval(), report


def _resizable(key: str) -> bool:
    return key == "positions.table" or key.endswith("attention.relative.table")


def _other_grid(key: str, stored: Any, config: Any) -> bool:
    return _resizable(key) and stored.grid != config.grid


def _resize(key: str, value: Tensor, stored: Any, config: Any) -> Tensor:
    if key == "positions.table":
        rule = config.positions.resize_rule
        return resize_positions(value, stored.positioned_prefix, stored.grid, config.grid, rule)
    return resize_relative(value, stored.grid, config.grid)


def _grid(config: Any) -> str:
    return f"{config.grid[0]}x{config.grid[1]}"


def _shape(tensor: Tensor) -> str:
    return "x".join(str(n) for n in tensor.shape)


def _not_there(source: str) -> str:
    try:
        entry, _ = registry.find(source)
        return f"{source}: no such file or folder. It is a model's name: vitlab.create({entry.name!r}) makes a new one."
    except ValueError:
        pass
    hint = f" For a model on the Hugging Face hub: {hub.PREFIX}{source}." if source.count("/") == 1 else ""
    return f"{source}: no such file or folder.{hint}"
