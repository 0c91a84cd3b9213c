"""Another library's checkpoint -> tensors under our names, the config they belong to, preprocess and labels.

One reader for all: the family's record (family.py) says what is special about its weights.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab.checkpoints import declared, files, keymap, native, schema
from vitlab.checkpoints.families import FAMILIES
from vitlab.checkpoints.family import Clues, Family, LoadedWeights
from vitlab.checkpoints.keymap import Dialect, Options, Source, State, Stated
from vitlab.checkpoints.usermap import RenameTable, check_used, read_map
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import fit_preprocess
from vitlab.models.base import Card

TIMM_WRAPPER = "timm_model."
COLOURS = ("mean", "std")
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")


def read_foreign(path: Path, map: Path | None, overrides: Options, *, encoder: bool = False) -> LoadedWeights:
    """Read a file or folder of another library; `overrides` state what its weights do not show.

    `encoder`: of a masked autoencoder, leave the decoder out.
    """
    notes: list[str] = []  # where a file holds several sets of weights
    if map is None and path.is_dir():
        declared.check_known(path, FAMILIES)
    state = _read_folder(path) if path.is_dir() else files.read_tensors(path, notes)
    state = _without_wrapper(state)
    table = read_map(map) if map is not None else None
    if table is not None:
        family, dialect, table_options = table.family, table.dialect, table.options
    else:
        (family, dialect), table_options = recognise(state, path, encoder=encoder), {}
    with files.naming(path):
        given = family.by_path({**table_options, **overrides}, False)
        family.check_options(given)
        stated = _read_stated(Source(path, dialect, state), table)
        if not stated.options:
            dialect = next((variant for variant in dialect.bare_variants if variant.recognise(set(state))), dialect)
        renamed = keymap.read(dialect, state)
        if table is not None:
            check_used(table, renamed)
        hints = {**dialect.hints(state), **{name: overrides.get(name, value) for name, value in table_options.items()}}
        reading = family.infer(renamed, Clues(dialect, stated, given, hints))
        config = reading.config
        weights = LoadedWeights(
            renamed.tensors,
            renamed.origin,
            renamed.unused,
            dialect.name,
            family.name,
            config,
            card=Card(source=path.name),
            tokenizer=stated.tokenizer,
            assumed=reading.assumed,
            stated_preprocess=stated.preprocess,
            table=map,
            taken_as=dialect.taken_as,
        )
        if table is not None:
            _check_channels(table, config.channels)
        usual = dialect.preprocess if reading.preprocess is None else reading.preprocess
        values = {**usual, **stated.usual_preprocess, **stated.preprocess}
        if "how" in stated.preprocess and "resize" not in stated.preprocess:
            values.pop("resize", None)  # it belongs to the usual crop
        weights.preprocess = fit_preprocess(
            values,
            config.image_size,
            image_size=config.image_size,
            channels=config.channels,
            keep_size="size" in stated.preprocess,  # images are read at a stated size, whatever the position grid
        )
    weights.notes = [*notes, *stated.notes, *reading.notes]
    if weights.preprocess is not None and weights.preprocess.size != config.image_size and stated.size_note:
        weights.size_note = _size_note(weights.preprocess.size, config.image_size, stated.size_note)
    if stated.labels and len(stated.labels) == config.classes:
        weights.labels = stated.labels
    elif stated.labels and config.classes:  # an encoder without a classifier has no use for them
        weights.notes.append(
            f"config.json names {len(stated.labels)} classes, but the weights have {config.classes}: the names are "
            "left out, and classes are shown by number."
        )
    return weights


def recognise(state: State, path: Path, *, encoder: bool = False) -> tuple[Family, Dialect]:
    """Whose names are these? `encoder`: prefer a family that reads the encoder alone."""
    keys = set(state)
    matches = [
        (family, dialect)
        for family in reversed(FAMILIES.values())  # transformers' Swin and MAE look like a ViT
        for dialect in family.dialects
        if dialect.recognise(keys) and dialect.fits(state)
    ]
    if matches:
        return min(matches, key=lambda match: encoder and match[0].config().wraps_encoder)
    if {"class_token", "patch_embed.proj.weight"} <= keys or (path / native.WEIGHTS).is_file():
        raise CheckpointError(
            f"{path}: vitlab weights without their {native.CARD}. Name the folder, with both files in it."
        )
    some = ", ".join(sorted(keys)[:3])
    if (config := declared.declared_by(path)) is not None:
        reason = declared.refusal(config, FAMILIES)
        raise CheckpointError(
            f"{path}: {reason} Its {len(keys)} keys, e.g. {some}, are of no layout that is read. If it is a ViT under "
            "other names, write a rename table and pass map='keys.toml' (--map keys.toml)."
        )
    dialects = dict.fromkeys(dialect.name for family in FAMILIES.values() for dialect in family.dialects)
    raise CheckpointError(
        f"{path}: {len(keys)} keys of an unknown layout, e.g. {some}. Known are {', '.join(dialects)}. "
        "Write a rename table and pass map='keys.toml' (--map keys.toml)."
    )


def assumed_notes(weights: LoadedWeights, preprocess: Options) -> list[str]:
    """One note on everything that was assumed about a file; `preprocess`: values that the caller gives."""
    values = [f"{name}={value}" for name, value in weights.assumed.items()]
    p, stated = weights.preprocess, {**weights.stated_preprocess, **preprocess}
    colours: list[str] = []
    resizing: list[str] = []
    if p is not None:
        fits = {name: _fits(stated[name], len(p.mean)) for name in COLOURS if name in stated}
        if not all(fits.get(name) for name in COLOURS) and not set(COLOURS) <= preprocess.keys():
            colours = [f"mean={p.mean}", f"std={p.std}"]
        resizing = [f"{name}={getattr(p, name)}" for name in ("interpolation", "how") if name not in stated]
    unknown = ", ".join([*values, *colours, *resizing])
    if not unknown:
        return []
    if weights.table is not None:
        sections = ["[model]"] * bool(values) + ["[preprocess]"] * bool(colours or resizing)
        return [
            f"{weights.table.name} does not say {unknown}: assumed. {' and '.join(sections)} in it can say otherwise."
        ]
    change = [*weights.assumed, *(["preprocess=dict(mean=..., std=...)"] if colours else [])]
    change = change or ["preprocess=dict(interpolation=..., how=...)"]
    return [
        f"{weights.dialect} weights do not say {unknown}: {weights.taken_as}. Pass {' or '.join(change)} to change it"
        f"{' (vitlab convert: --mean, --std)' if colours else ''}."
    ]


def _fits(colours: Any, channels: int) -> bool:
    """Whether a mean or deviation can be used; what is no list of numbers is refused by Preprocess."""
    return not schema.COLOURS.fits(colours) or len(colours) == channels or len(set(colours)) == 1


def _read_stated(source: Source, table: RenameTable | None) -> Stated:
    """What the files beside the weights state; a rename table stands above them."""
    stated = source.dialect.read_stated(source) if source.path.is_dir() else None
    if table is not None:
        return replace(stated or Stated(), preprocess=table.preprocess)
    path = source.path / "config.json"
    if stated is None and source.path.is_dir() and path.is_file():
        config = schema.check(files.read_json(path), {"model_type": schema.TEXT | schema.NULL}, "config.json")
        if config.get("model_type"):
            raise CheckpointError(
                f"{source.path}: config.json has model_type {config['model_type']!r}, but its weights have the names "
                f"of {source.dialect.name}: they do not belong together. Load the weights file alone, or fetch both."
            )
    return stated or Stated()


def _size_note(size: tuple[int, int], made_for: tuple[int, int], library: str) -> str:
    read, stored = (f"{height}x{width}" for height, width in (size, made_for))
    return (
        f"images are read at {read}, as its files say, and its positions, made for {stored}, are resized to fit; "
        f"{library}. Pass image_size to read them at another size."
    )


def _check_channels(table: RenameTable, channels: int) -> None:
    """A mean for another number of channels cannot be used, and must not be dropped quietly."""
    given = len(table.preprocess.get("mean", [0] * channels))
    if given != channels:
        raise CheckpointError(
            f"{table.path}: [preprocess] mean and std have {given} numbers, but the network reads {channels}."
        )


def _without_wrapper(state: State) -> State:
    """transformers' TimmWrapper models keep timm's network under one more name."""
    wrapped = all(key.startswith(TIMM_WRAPPER) for key in state)
    return {key.removeprefix(TIMM_WRAPPER): value for key, value in state.items()} if wrapped else state


def _read_folder(folder: Path) -> State:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return files.read_tensors(folder / name)
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (folder / name).is_file():
            return files.read_shards(folder / name)
    weights = sorted(p for p in folder.iterdir() if p.suffix.lower() in files.SUFFIXES)
    if len(weights) == 1:
        return files.read_tensors(weights[0])
    inside = ", ".join(p.name for p in weights) or "none"
    raise CheckpointError(
        f"{folder}: expected model.json (vitlab) or config.json with model.safetensors (transformers, timm); "
        f"weights files in it: {inside}. Name one of them, or another folder."
    )
