"""vitlab.create and vitlab.load: a model ready for use, with its preprocess and labels, from a name or from any file.

load("runs/flowers/best")                                  # a native folder
load("bundled:cifar10")                                    # a small trained model in the package
load("hf-hub:google/vit-base-patch16-224", classes=10)     # new head
load("B_16.npz", image_size=384)                           # positions resized
load("mine.pth", heads=4, image_size=(32, 48))             # what a bare state dict cannot tell
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from operator import attrgetter
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.checkpoints import bundled, clip, digests, files, hub, native, schema
from vitlab.checkpoints.foreign import Found, assumed_notes, fitting_preprocess, read_foreign
from vitlab.checkpoints.plausible import check_plausible
from vitlab.checkpoints.report import Report, Row
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess
from vitlab.layers.positions import resize_positions, resize_relative
from vitlab.models import registry
from vitlab.models.base import Card, Network, unwrap
from vitlab.models.hierarchy import StagedConfig
from vitlab.models.vit_config import ViTConfig
from vitlab.text.tokenizer import Tokenizer

ModelOrName = nn.Module | str | PathLike[str]  # a model, or what `load` finds it by


class AssumedWarning(UserWarning):
    """Something a file does not say was taken at its usual value."""


def create(name: str, **options: Any):
    """A new, untrained model by name, with any option changed: create("vit_base", classes=10, image_size=384)."""
    entry, config = registry.build_config(name, **options)
    model: Network = registry.build(entry.family, config)
    model.preprocess = fitting_preprocess(entry.preprocess, entry.config.image_size, config)
    model.card = Card(name=entry.name)
    return model


def load(
    source: str | Path,
    *,
    map: str | Path | None = None,
    preprocess: dict[str, Any] | None = None,
    allow_nan: bool = False,
    encoder: bool = False,
    **overrides: Any,
):
    """A model from a native, transformers or timm folder, an .npz, .pth or .safetensors file, hf-hub:owner/name,
    or bundled:name.

    Overrides change options by name (classes=10 gives a new head, image_size=384 resizes positions) and tell what a
    bare state dict cannot: heads, image_size or grid. `map` is a rename table for a stranger's network; `preprocess`
    changes what pictures go through, e.g. preprocess=dict(mean=..., std=...). Of a model that learned without labels
    (MAE, DINO), encoder=True loads the encoder alone, which can have classes.
    """
    told: dict[str, Any] = dict(map=map, preprocess=preprocess, allow_nan=allow_nan, encoder=encoder)
    model, report = load_with_report(source, **told, **overrides)
    for note in report.notes:
        warnings.warn(f"{source}: {note}", AssumedWarning, stacklevel=2)
    return model


def as_network(model: ModelOrName, **load_options: Any) -> Network:
    """The model itself, without what torch.compile or DDP wrap around it; or `load`ed by its name or path."""
    return load(fspath(model), **load_options) if isinstance(model, str | PathLike) else unwrap(model)


def load_with_report(
    source: str | Path,
    *,
    map: str | Path | None = None,
    preprocess: dict[str, Any] | None = None,
    allow_nan: bool = False,
    encoder: bool = False,
    **overrides: Any,
) -> tuple[Any, Report]:
    """Like `load`, and what became of every key. `encoder`: of a model that learned without labels (MAE, DINO) only
    the ViT that it is about, which can be given classes; of any other, the model.
    """
    if not str(source).strip():
        raise CheckpointError("the checkpoint's name is empty: is a shell variable unset? Name a folder or a file.")
    path = locate(source)
    if not path.exists():
        raise CheckpointError(_not_there(str(source)))
    if path.is_dir() and (path / native.CARD).is_file() and map is None:
        found = _read_native(path)
        found.notes += [] if encoder else _encoder_alone(found)
    else:
        found = read_foreign(path, Path(map) if map is not None else None, overrides, encoder=encoder)
        found.notes += assumed_notes(found, preprocess or {})
        if "image_size" not in overrides and "size" not in (preprocess or {}):
            found.notes += found.size_notes
    if "grid" in overrides and path.is_dir():
        raise CheckpointError(f"{source}: the folder itself says its grid; grid= is for bare weights.")
    overrides = {k: v for k, v in overrides.items() if k != "grid"}
    overrides = clip.by_path(overrides, encoder=encoder) if found.family == "clip" else overrides
    files.check_values(found.tensors, path, allow_nan)
    found = _encoder_of(found) if encoder and _pretrains(found.config) else found
    model, report = _assemble(found, overrides, str(source))
    if preprocess:
        values = {**(model.preprocess.to_dict() if model.preprocess is not None else {}), **preprocess}
        model.preprocess = Preprocess.from_dict({"size": model.config.image_size, **values})
    _check_input_size(model, str(source))
    return model, report


def locate(source: str | Path) -> Path:
    """Where a checkpoint lies, or would lie: a path as it is, names on the hub and in the package by their prefix."""
    name = str(source)
    if name.startswith(hub.PREFIX):
        return hub.fetch(name)
    return bundled.find(name) if name.startswith(bundled.PREFIX) else Path(source).expanduser()


def is_checkpoint(source: str | Path) -> bool:
    """Whether this names a checkpoint, and not a model to be made."""
    text = str(source)
    if text.startswith((hub.PREFIX, bundled.PREFIX)) or Path(text).expanduser().exists():
        return True
    return ("/" in text or Path(text).suffix in files.SUFFIXES) and not _is_name(text)  # a path that is not there


def _read_native(folder: Path) -> Found:
    card = native.read_card(folder)
    if card["family"] not in registry.FAMILIES:
        raise CheckpointError(f"{folder}: family {card['family']!r:.60} is not known. Update vitlab.")
    if not (folder / native.WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: {native.WEIGHTS} is missing beside {native.CARD}.")
    digests.check_files(folder, card, native.CARD)
    tensors = files.read_tensors(folder / native.WEIGHTS)
    with files.naming(folder / native.CARD):
        schema.check(card, schema.CARD, native.CARD)
        check_plausible(card["config"], tensors, native.WEIGHTS)
        config: Any = registry.FAMILIES[card["family"]][0].from_dict(card["config"])
        preprocess = Preprocess.from_dict(card["preprocess"]) if card.get("preprocess") else None
        labels = card.get("labels")
        if labels is not None and len(labels) != config.classes:
            raise CheckpointError(f"labels must be a list of {config.classes} names, or null.")
    found = Found(tensors, {k: (k,) for k in tensors}, {}, "native", card["family"], config)
    found.preprocess, found.labels = preprocess, labels
    found.card = Card(card.get("name"), card.get("source"), card.get("licence"), card.get("metrics") or {})
    if (folder / native.WORDS).is_file():
        found.tokenizer = Tokenizer.read(folder / native.WORDS)
    return found


def _check_input_size(model: Network, source: str) -> None:
    """Images must be read at a size that the network can cut into patches."""
    config = _encoder(model.config)
    if model.preprocess is None or not isinstance(config, ViTConfig) or config.stem.pad:
        return
    size, P = model.preprocess.size, config.patch_size
    if size[0] % P or size[1] % P:
        fits = (max(size[0] // P, 1) * P, max(size[1] // P, 1) * P)
        raise CheckpointError(
            f"{source}: images are read at {_by(size)}, which is no multiple of the patch size {P}. "
            f"Read them at {_by(fits)}: image_size={fits}, or --image-size {_by(fits)}."
        )


def _encoder_alone(found: Found) -> list[str]:
    """What to say of a folder that holds only the encoder of the network that its card names."""
    try:
        whole = registry.find(found.card.name or "")[0]
    except (ValueError, AttributeError):  # none, or a name of their own
        return []
    if not _pretrains(whole.config) or found.family == whole.family or found.config.classes:
        return []
    return [
        f"holds the encoder of {whole.name} and nothing else: it gives features, can be explained and fine-tuned, "
        f"but it cannot go on learning as {whole.family} does. encoder=True takes it as it is."
    ]


def _assemble(found: Found, overrides: dict[str, Any], source: str) -> tuple[Any, Report]:
    """Build the asked network, fit the tensors to it, and account for every key."""
    stored = found.config
    if overrides.get("classes") and _pretrains(stored):
        raise CheckpointError(
            f"{source}: a model that learned without labels ({found.family}) has no classes to choose. Fine-tune it: "
            f"vitlab train DATA model.init_from={source}"
        )
    if overrides.get("classes") and not stored.classes and hasattr(stored, "head") and "head_hidden" not in overrides:
        overrides = {**overrides, "head_hidden": 0}  # a pre-training head goes when a new classifier comes (ViT, 3.2)
    config = stored.with_options(**overrides)
    _check_same_network(stored, config, source)
    report = Report(source, found.dialect, notes=list(found.notes))
    try:
        as_saved = native.on_meta(lambda: registry.build(found.family, stored)).state_dict()
    except RuntimeError as error:  # of torch: a tensor with more elements than a computer counts
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{source}: no network can be built from its config ({first}). Fetch it again.") from None
    model: Network = native.on_meta(lambda: registry.build(found.family, config))
    wanted = model.state_dict()
    problems = [f"{key} is missing" for key in as_saved.keys() - found.tensors.keys()]
    problems += [f"{key} is not part of this network" for key in found.tensors.keys() - as_saved.keys()]
    problems += [
        f"{key} is {_shape(found.tensors[key])}, expected {_shape(as_saved[key])}"
        for key in as_saved.keys() & found.tensors.keys()
        if found.tensors[key].shape != as_saved[key].shape
    ]
    if problems:
        hint = ""
        if "norm.weight is missing" in problems:
            hint = ' If no norm stands between blocks and head: final_norm="no"; if blocks end in norms: norm="post".'
        raise CheckpointError(
            f"{source}: {len(problems)} tensor(s) do not fit the network: {'; '.join(sorted(problems)[:4])}. "
            f"The file is incomplete, or heads, image_size or the rename table are not those it was made with.{hint}"
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
            note = f"from {_shape(value)}, grid {_by(table_grid(key, stored))} to {_by(table_grid(key, config))}"
            report.rows.append(Row("resized", key, theirs, tuple(like.shape), note))
        else:
            fresh.append(key)
            report.rows.append(
                Row("new", key, theirs if value is not None else (), tuple(like.shape), "as asked: untrained")
            )
    left = found.tensors.keys() - wanted.keys()
    for key in left:
        report.rows.append(
            Row("unused", None, found.origin[key], tuple(found.tensors[key].shape), "left out, as asked")
        )
    for key, why in found.unused.items():
        report.rows.append(Row("unused", None, (key.removeprefix(files.BESIDE),), (), why))
    if _pretrains(stored) and (fresh or left):  # half a pre-training network is of no use to anyone
        raise CheckpointError(
            f"{source}: with {', '.join(f'{k}={v}' for k, v in overrides.items())} this is another network, e.g. in "
            f"{sorted([*fresh, *left])[0]}. Loading can change image_size; vitlab.create makes another network."
        )
    if fresh:  # asked for and not in the file: initialised as in a new model, of one block where that is enough
        whole = not hasattr(config, "depth") or any(key.startswith("blocks.") for key in fresh)
        enough = config if whole else config.with_options(depth=1)
        with torch.device("cpu"):
            new = registry.build(found.family, enough).state_dict()
        state |= {key: new[key] for key in fresh}
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    state = {k: v.clone() for k, v in state.items()}  # at a file's odd addresses the last bit of sums may differ
    model.load_state_dict(state, assign=True)  # what learns and what is frozen stays as the network was built
    model.labels = found.labels if config.classes == stored.classes else None
    preprocess = found.preprocess
    if preprocess is not None and any(name.split(".")[-1] == "image_size" for name in overrides):
        preprocess = preprocess.with_size(config.image_size)
    model.preprocess, model.card = preprocess, found.card
    if found.tokenizer is not None:
        with files.naming(source):
            model.tokenizer = found.tokenizer
    return model.eval(), report


def _check_same_network(stored: Any, config: Any, source: str) -> None:
    """Weights belong to one network: what would make it another is refused, not quietly left untrained."""
    same = ["patch_size", "channels", "width", "depth", "heads", "head_dim", "stem.kind", "stem.patch_bias"]
    same += ["stem.patch_norms", "tokens.class_token", "tokens.distill_token", "positions.kind", "norm.kind"]
    same += ["positions.prefix_positions", "norm.norm_pre", "attention.qkv_bias", "attention.qk_norm"]
    same += ["mlp.kind", "mlp.mlp_ratio"]
    if hasattr(stored, "depths"):  # a ResNet, or another network of stages, whose config says it
        same = ["channels", "stem", "stem_width", "block", "depths", "widths", "stride_in"]
        same = getattr(stored, "fixed", same)
    if getattr(stored, "decoder", None) != getattr(config, "decoder", None):  # MAE's
        raise CheckpointError(
            f"{source}: the weights have decoder={stored.decoder.to_dict()}, so they cannot be loaded with "
            f"decoder={config.decoder.to_dict()}; vitlab.create makes another network."
        )
    if hasattr(stored, "text") and stored.text.heads != config.text.heads:  # CLIP's; the rest shows in the shapes
        raise CheckpointError(
            f"{source}: the weights have text.heads={stored.text.heads}, so they cannot be loaded with "
            f"text.heads={config.text.heads}; vitlab.create makes another network."
        )
    stored, config = _encoder(stored), _encoder(config)
    if isinstance(stored, ViTConfig) and stored.head.pooling == config.head.pooling:  # another may bring its own norm
        same.append("final_norm")
    for path in same:
        old, new = (attrgetter(path)(c) for c in (stored, config))
        if old != new:
            name = path.removesuffix(".kind").split(".")[-1]
            raise CheckpointError(
                f"{source}: the weights have {name}={old}, so they cannot be loaded with {name}={new}. Loading can "
                "change classes, image_size, pooling and what has no weights; vitlab.create makes another network."
            )
    placed = hasattr(stored, "tokens") and stored.positions.prefix_positions == "all"
    if placed and stored.tokens.registers != config.tokens.registers:
        raise CheckpointError(f"{source}: its registers have positions, so their number cannot change.")


def _pretrains(config: Any) -> bool:
    """Whether this is a network around an encoder (MAE, DINO), and not an encoder itself."""
    return hasattr(config, "encoder")


def _encoder_of(found: Found) -> Found:
    whole: Any = native.on_meta(lambda: registry.build(found.family, found.config))
    prefix = next(name for name, part in whole.named_children() if part is whole.encoder) + "."
    tensors, origin = (
        {key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)}
        for table in (found.tensors, found.origin)
    )
    part: dict[str, Any] = dict(family=whole.encoder.family, config=found.config.encoder, tokenizer=None)
    return replace(found, tensors=tensors, origin=origin, **part)


def _encoder(config: Any) -> Any:
    return config.encoder if _pretrains(config) else config


def _resizable(key: str) -> bool:
    return key.split(".")[-2:] == ["positions", "table"] or key.endswith("attention.relative.table")


def _other_grid(key: str, stored: Any, config: Any) -> bool:
    return _resizable(key) and table_grid(key, stored) != table_grid(key, config)


def _resize(key: str, value: Tensor, stored: Any, config: Any) -> Tensor:
    old, new = table_grid(key, stored), table_grid(key, config)
    if key.endswith("relative.table"):
        return resize_relative(value, old, new)
    config = _encoder(config)
    if isinstance(config, StagedConfig):
        return resize_positions(value, value.shape[1] - old[0] * old[1], old, new, config.resize_rule)
    return resize_positions(value, config.positioned_prefix, old, new, config.positions.resize_rule)


def table_grid(key: str, config: Any) -> tuple[int, int]:
    """What a table of positions was made for: the grid of patches; of a network of stages, what its config says."""
    config = _encoder(config)
    return config.table_grid(key) if isinstance(config, StagedConfig) else config.grid


def _by(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def _shape(tensor: Tensor) -> str:
    return "x".join(str(n) for n in tensor.shape)


def _is_name(text: str) -> bool:
    try:
        return bool(registry.find(text))
    except ValueError:
        return False


def _not_there(source: str) -> str:
    if _is_name(source):
        entry, _ = registry.find(source)
        return (
            f"{source}: no such file or folder. It is a model's name, which has no weights yet. Train one: "
            f"vitlab train DATA model.name={entry.name}. In Python: vitlab.create({entry.name!r}) makes a new one."
        )
    hint = f" For a model on the Hugging Face hub: {hub.PREFIX}{source}." if source.count("/") == 1 else ""
    hint = f" In the package: {bundled.PREFIX}{source}." if source in bundled.names() else hint
    hint = hint or f" In the package: {', '.join(bundled.PREFIX + name for name in bundled.names())}."
    return f"{source}: no such file or folder.{hint}"
