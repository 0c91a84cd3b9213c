"""Another library's checkpoint -> tensors under our names, the config they belong to, preprocess and labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.checkpoints import facebook, files, hf, jax, keymap, lucidrains, native, timm, torchvision
from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.infer import infer_options
from vitlab.checkpoints.keymap import Dialect, Renamed
from vitlab.checkpoints.native import Card
from vitlab.checkpoints.usermap import read_map
from vitlab.images.preprocess import Preprocess
from vitlab.models.config import option_paths
from vitlab.models.vit_config import ViTConfig

DIALECTS = (
    *(hf.DIALECT, facebook.MAE, facebook.DIALECT, timm.DIALECT),
    *(jax.DIALECT, torchvision.DIALECT, lucidrains.DIALECT),
)


@dataclass
class Found:
    """What a file holds, under our names, with the config it was saved with."""

    tensors: dict[str, Tensor]
    origin: dict[str, tuple[str, ...]]  # our key -> the keys it came from
    unused: dict[str, str]  # foreign key -> why it is left out
    dialect: str
    family: str
    config: Any
    preprocess: Preprocess | None = None
    labels: list[str] | None = None
    card: Card = field(default_factory=Card)
    notes: list[str] = field(default_factory=list)  # what was assumed


def read_foreign(path: Path, map: Path | None, overrides: dict[str, Any]) -> Found:
    """Read a file or folder of another library; `overrides` tell what its weights cannot."""
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
        preprocess = hf.preprocess_from(preprocessor) if preprocessor else hf.usual_preprocess(folder_config)
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
    found = Found(renamed.tensors, renamed.origin, renamed.unused, dialect.name, "vit", config)
    found.preprocess = fitting_preprocess(preprocess, config.image_size, config)
    labels = hf.labels_from(folder_config)
    found.labels = labels if labels and len(labels) == config.classes else None
    found.card = Card(source=str(path.name))
    unsaid = {k: v for k, v in dialect.assumed.items() if k not in certain and k not in overrides}
    if unsaid:
        values = ", ".join(f"{k}={v}" for k, v in unsaid.items())
        p = found.preprocess
        colours = f", mean={p.mean}, std={p.std}" if p is not None and not folder_config else ""
        found.notes.append(
            f"{dialect.name} weights do not say {values}{colours}: taken as usual there. Pass {' or '.join(unsaid)}"
            f"{' or preprocess=dict(mean=..., std=...)' if colours else ''} to change it."
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
        f"{', '.join(dict.fromkeys(d.name for d in DIALECTS))}. "
        "Write a rename table and pass map='keys.toml' (--map keys.toml)."
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


def fitting_preprocess(values: dict[str, Any], made_for: tuple[int, int], config: Any) -> Preprocess | None:
    """Preprocess values that were made for one image size, for the size and channels that `config` has."""
    n = config.channels
    if n not in (1, 3):
        return None  # no picture file has so many channels
    values = {"size": made_for, **values}
    for key in ("mean", "std"):
        if len(values.get(key, ())) != n:
            values[key] = (0.5,) * n
    return Preprocess(**values).with_size(config.image_size)
