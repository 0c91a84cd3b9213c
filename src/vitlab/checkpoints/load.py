"""vitlab.load: a model ready for use, with its preprocess and labels, from any file or folder.

load("runs/flowers/best")                                  # a native folder
load("bundled:cifar10")                                    # a small trained model in the package
load("hf-hub:google/vit-base-patch16-224", classes=10)     # new head
load("B_16.npz", image_size=384)                           # positions resized
load("B_16.npz", channels=5)                               # the first layer adapted to images of five channels
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

from vitlab.advice import to_type
from vitlab.checkpoints import adapters, bundled, files, hub, native
from vitlab.checkpoints.declared import naming_network
from vitlab.checkpoints.families import family_of
from vitlab.checkpoints.family import LoadedWeights
from vitlab.checkpoints.foreign import assumed_notes, read_foreign
from vitlab.checkpoints.keymap import Options, Renamed
from vitlab.checkpoints.report import Report, Row
from vitlab.device import pick_device
from vitlab.errors import CheckpointError, UsageError
from vitlab.images.preprocess import Preprocess
from vitlab.layers import patches
from vitlab.layers.positions import resize_positions, resize_relative
from vitlab.models import registry
from vitlab.models.base import Network, unwrap
from vitlab.models.config import Config, option_paths
from vitlab.models.entry import Entry

ModelOrName = nn.Module | str | PathLike[str]  # a model, or what `load` finds it by


class AssumedWarning(UserWarning):
    """Something a file does not say was taken at its usual value."""


def load(
    source: str | Path,
    *,
    map: str | Path | None = None,
    preprocess: dict[str, Any] | None = None,
    allow_nan: bool = False,
    encoder: bool = False,
    base: str | Path | None = None,
    resize_patches: bool = False,
    **overrides: Any,
):
    """A model from a native, transformers or timm folder, an .npz, .pth or .safetensors file, hf-hub:owner/name,
    or bundled:name.

    Overrides change options by name (classes=10 gives a new head, image_size=384 resizes positions) and state what a
    bare state dict does not: heads, image_size or grid. `map` is a rename table for an unknown network; `preprocess`
    changes how images are read, e.g. preprocess=dict(mean=..., std=...). encoder=True loads the encoder alone of a
    model that learned without labels (MAE, DINO, CLIP); it can have classes. `base` is the checkpoint that a low-rank
    adapter (a folder of its own, by vitlab or peft) is put on, where it does not lie where the adapter says.
    With resize_patches=True, patch_size=8 gives a ViT patches of that size, to be fine-tuned.
    """
    options = {"allow_nan": allow_nan, "encoder": encoder, "base": base, "resize_patches": resize_patches}
    model, report = load_with_report(source, map=map, preprocess=preprocess, **options, **overrides)
    for note in report.notes:
        warnings.warn(f"{source}: {note}", AssumedWarning, stacklevel=2)
    return model


def as_network(model: ModelOrName, *, device: str | None = None, **load_options: Any) -> Network:
    """The model itself, without what torch.compile or DDP wrap around it; or `load`ed by its name or path.

    `device`: where to move it; None leaves it where it is.
    """
    place = None if device is None else pick_device(device)  # refused before a long load
    network = _as_network(model, **load_options)
    return network if place is None else network.to(place)


def _as_network(model: ModelOrName, **load_options: Any) -> Network:
    if isinstance(model, str | PathLike):
        return load(fspath(model), **load_options)
    if more := [name for name in load_options if name != "encoder"]:
        raise UsageError(f"{', '.join(more)}: the model is loaded already: pass that to vitlab.load, or pass its name.")
    return unwrap(model)


def load_with_report(
    source: str | Path,
    *,
    map: str | Path | None = None,
    preprocess: dict[str, Any] | None = None,
    allow_nan: bool = False,
    encoder: bool = False,
    base: str | Path | None = None,
    resize_patches: bool = False,
    **overrides: Any,
) -> tuple[Any, Report]:
    """Like `load`, with what became of every key. `encoder`: a model that is an encoder itself is loaded as it is."""
    if not str(source).strip():
        raise UsageError("the checkpoint's name is empty: is a shell variable unset? Name a folder or a file.")
    path = locate(source)
    resized = {name: overrides.pop(name) for name in ("patch_size",) if resize_patches and name in overrides}
    if not path.exists():
        raise CheckpointError(_not_there(str(source)))
    if base is not None and not adapters.is_adapter(path):
        raise UsageError(f"{source}: base= is for a low-rank adapter ({adapters.CONFIG}, {adapters.WEIGHTS}).")
    if adapters.is_adapter(path):
        weights = adapters.read(path, base)
    elif path.is_dir() and (path / native.CARD).is_file() and map is None:
        weights = native.read(path)
        weights.notes += [] if encoder else _encoder_alone(weights)
    else:
        with naming_network(path):
            weights = read_foreign(path, Path(map) if map is not None else None, overrides, encoder=encoder)
        weights.card = hub.card_of(str(source)) or weights.card
        weights.notes += assumed_notes(weights, preprocess or {})
        if weights.size_note and "image_size" not in overrides and "size" not in (preprocess or {}):
            weights.notes.append(weights.size_note)
    if "grid" in overrides and path.is_dir():
        raise UsageError(f"{source}: the folder itself says its grid; grid= is for bare weights.")
    overrides = {name: value for name, value in overrides.items() if name != "grid"}
    overrides = family_of(weights.family).by_path(overrides | resized, encoder)
    files.check_values(weights.tensors, path, allow_nan)
    weights = _encoder_of(weights) if encoder and weights.config.wraps_encoder else weights
    with naming_network(path):
        model, report = _assemble(weights, overrides, str(source), resize_patches)
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
    return ("/" in text or Path(text).suffix in files.SUFFIXES) and _entry_of(text) is None  # a path that is not there


def _check_input_size(model: Network, source: str) -> None:
    """Images must be read at a size that the network can cut into patches."""
    if model.preprocess is None:
        return
    size, config = model.preprocess.size, model.encoder.config
    if (fitting := config.readable_size(size)) != size:
        raise CheckpointError(
            f"{source}: images are read at {_by(size)}, which is no multiple of the patch size {config.patch_size}. "
            f"Read them at {_by(fitting)}: image_size={fitting}, or --image-size {_by(fitting)}."
        )


def _encoder_alone(weights: LoadedWeights) -> list[str]:
    """A note on a folder that holds only the encoder of the network that its card names."""
    entry = _entry_of(weights.card.name or "")
    if entry is None or not entry.config.wraps_encoder or weights.family == entry.family or weights.config.classes:
        return []
    return [
        f"holds the encoder of {entry.name} and nothing else: it gives features, can be explained and fine-tuned, "
        f"and training by {entry.family} continues from it with a new head."
        + to_type(" encoder=True takes it as it is.", "")
    ]


def _assemble(
    weights: LoadedWeights, overrides: Options, source: str, patches_may_change: bool = False
) -> tuple[Network, Report]:
    """Build the network, fit the tensors to it, and account for every key."""
    stored = weights.config
    if overrides.get("classes") and stored.wraps_encoder and not _has_classes(stored):
        raise UsageError(
            f"{source}: a model that learned without labels ({weights.family}) has no classes to choose. Fine-tune it: "
            f"vitlab train DATA model.init_from={source}"
        )
    if overrides.get("classes") and not stored.classes and _has_option(stored, "head_hidden"):
        overrides = {"head_hidden": 0, **overrides}  # a pre-training head goes when a new classifier comes (ViT, 3.2)
    config = stored.with_options(**overrides)
    sizes = [name for name in overrides if name.split(".")[-1] == "image_size"]
    input_size = config.image_size if sizes else None
    if weights.preprocess is not None and weights.preprocess.how == "aspect":
        # The table is resized to the grid of each image; resized twice, it would give other positions.
        config = config.with_options(**dict.fromkeys(sizes, stored.image_size))
    _check_same_network(stored, config, source, patches_may_change)
    report = Report(source, weights.dialect, notes=list(weights.notes))
    _check_tensors(weights, source)
    model = native.on_meta(lambda: registry.build(weights.family, config))
    wanted = model.state_dict()
    state: dict[str, Tensor] = {}
    fresh: list[str] = []
    before, after = (int(c.encoder.option("channels")) for c in (stored, config))
    adapted = False
    for key, like in wanted.items():
        theirs = weights.origin.get(key, ())
        value = weights.tensors.get(key)
        table = _resizable(key)
        if value is not None and value.shape == like.shape and not (table and _grid(key, stored) != _grid(key, config)):
            state[key] = value
            report.rows.append(Row("matched", key, theirs, tuple(like.shape)))
        elif value is not None and table:
            old, new = _grid(key, stored), _grid(key, config)
            state[key] = _resize(key, value, old, new, config)
            note = f"from {_shape(value)}, grid {_by(old)} to {_by(new)}"
            report.rows.append(Row("resized", key, theirs, tuple(like.shape), note))
        elif value is not None and value.ndim == 4 and like.shape == _with_inputs(value, before, after):
            adapted = True
            state[key] = adapt_channels(value, after)
            note = f"from {_shape(value)}, {before} channels to {after}"
            report.rows.append(Row("resized", key, theirs, tuple(like.shape), note))
        elif value is not None and _is_projection(value, stored) and _is_projection(like, config):
            state[key] = patches.resize_patches(value, like.shape[-1])
            note = f"from {_shape(value)}, patches of {value.shape[-1]} to {like.shape[-1]} pixels"
            report.rows.append(Row("resized", key, theirs, tuple(like.shape), note))
        else:
            fresh.append(key)
            origin = theirs if value is not None else ()
            report.rows.append(Row("new", key, origin, tuple(like.shape), "requested: untrained"))
    left = weights.tensors.keys() - wanted.keys()
    for key in left:
        shape = tuple(weights.tensors[key].shape)
        report.rows.append(Row("unused", None, weights.origin[key], shape, "left out: not in the requested network"))
    for key, why in weights.unused.items():
        report.rows.append(Row("unused", None, (key.removeprefix(files.BESIDE),), (), why))
    if after != before and not adapted:
        raise UsageError(f"{source}: the first layer of a {weights.family} cannot be adapted to channels={after}.")
    new_classes = "classes" in overrides and _has_classes(stored)
    if stored.wraps_encoder and not new_classes and (fresh or left):  # half a network is of no use to anyone
        raise UsageError(
            f"{source}: with {', '.join(f'{k}={v}' for k, v in overrides.items())} this is another network, e.g. in "
            f"{sorted([*fresh, *left])[0]}. Loading can change image_size"
            + to_type("; vitlab.create makes another network.", "; vitlab train model.name=NAME makes another network.")
        )
    if fresh:  # requested and not in the file: initialised as in a new model, of one block where that is enough
        one_block = _has_option(config, "depth") and not any(key.startswith("blocks.") for key in fresh)
        with torch.device("cpu"):
            new = registry.build(weights.family, config.with_options(depth=1) if one_block else config).state_dict()
        state |= {key: new[key] for key in fresh}
    state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
    state = {k: v.clone() for k, v in state.items()}  # at a file's odd addresses the last bit of sums may differ
    model.load_state_dict(state, assign=True)  # what learns and what is frozen stays as the network was built
    if config.classes == stored.classes:
        model.labels, model.task = weights.labels, weights.task
    preprocess = _with_channels(weights.preprocess, after)
    if preprocess is not None and input_size is not None:
        preprocess = preprocess.with_size(input_size)
    model.preprocess, model.card = preprocess, weights.card
    if weights.tokenizer is not None:
        with files.naming(source):
            model.tokenizer = weights.tokenizer
    return model.eval(), report


def _check_tensors(weights: LoadedWeights, source: str) -> None:
    """The file must hold every tensor of the network that it was saved from, in its shape, and no others."""
    try:
        wanted = native.on_meta(lambda: registry.build(weights.family, weights.config)).state_dict()
    except RuntimeError as error:  # of torch: a tensor with more elements than a computer counts
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{source}: no network can be built from its config ({first}). Fetch it again.") from None
    tensors = weights.tensors
    problems = [f"{key} is missing" for key in wanted.keys() - tensors.keys()]
    problems += [f"{key} is not part of this network" for key in tensors.keys() - wanted.keys()]
    problems += [
        f"{key} is {_shape(tensors[key])}, expected {_shape(wanted[key])}"
        for key in wanted.keys() & tensors.keys()
        if tensors[key].shape != wanted[key].shape
    ]
    if problems:
        hint = ""
        if "norm.weight is missing" in problems:
            hint = ' If no norm stands between blocks and head: final_norm="no"; if blocks end in norms: norm="post".'
        raise CheckpointError(
            f"{source}: {len(problems)} tensor(s) do not fit the network: {'; '.join(sorted(problems)[:4])}. "
            f"The file is incomplete, or heads, image_size or the rename table are not those it was made with.{hint}"
        )


def _check_same_network(stored: Config, config: Config, source: str, patches_may_change: bool) -> None:
    """Weights belong to one network: what would make it another is refused, not quietly left untrained."""
    pairs = [(stored, config)] if not stored.wraps_encoder else [(stored, config), (stored.encoder, config.encoder)]
    for before, after in pairs:
        for path in before.fixed_with(after):
            old, new = (attrgetter(path)(c) for c in (before, after))
            resizable = path == "patch_size" and after.one_projection
            adapted = path == "channels" or (resizable and patches_may_change)  # by the first layer
            if old != new and not adapted:
                short = path.removesuffix(".kind").split(".")[-1]
                name = short if _has_option(before, short) else path
                old, new = (value.to_dict() if isinstance(value, Config) else value for value in (old, new))
                resize = to_type("resize_patches=True", "vitlab train model.patch_size=...")
                raise UsageError(
                    f"{source}: the weights have {name}={old}, so they cannot be loaded with {name}={new}. Loading can "
                    "change classes, image_size, channels, pooling and what has no weights; "
                    + to_type("vitlab.create", "vitlab train model.name=NAME")
                    + " makes another network."
                    + (f" To resize the patches' weights before fine-tuning: {resize}." if resizable else "")
                )


def _has_option(config: Config, name: str) -> bool:
    return name in option_paths(type(config))


def _has_classes(config: Config) -> bool:
    """Whether the network itself, and not only its encoder, learns classes."""
    return option_paths(type(config)).get("classes") == (None, "classes")


def _encoder_of(weights: LoadedWeights) -> LoadedWeights:
    model = native.on_meta(lambda: registry.build(weights.family, weights.config))
    prefix = next(name for name, part in model.named_children() if part is model.encoder) + "."
    part = Renamed(weights.tensors, weights.origin, weights.unused).part(prefix)
    return replace(
        weights,
        tensors=part.tensors,
        origin=part.origin,
        family=model.encoder.family,
        config=weights.config.encoder,
        tokenizer=None,
    )


def _resizable(key: str) -> bool:
    return key.split(".")[-2:] == ["positions", "table"] or key.endswith("relative.table")


def _grid(key: str, config: Config) -> tuple[int, int]:
    return config.encoder.table_grid(key.removeprefix("encoder."))


def _resize(key: str, value: Tensor, old: tuple[int, int], new: tuple[int, int], config: Config) -> Tensor:
    if key.endswith("relative.table"):
        return resize_relative(value, old, new, config.encoder.relative_rule)
    prefix = value.shape[1] - old[0] * old[1]
    return resize_positions(value, prefix, old, new, config.encoder.table_rule)


def _is_projection(weight: Tensor, config: Config) -> bool:
    """Whether this is the weight (D, C, P, P) of a linear map from patches to tokens, which can be resized."""
    c = config.encoder
    if not c.one_projection:
        return False
    width, channels, patch_size = (c.option(name) for name in ("width", "channels", "patch_size"))
    return tuple(weight.shape) == (width, channels, patch_size, patch_size)


def _with_inputs(weight: Tensor, before: int, after: int) -> tuple[int, ...] | None:
    """The shape of the first layer, a convolution, for another number of channels; None: it is another layer."""
    outputs, inputs, *kernel = weight.shape
    return (outputs, after, *kernel) if inputs == before else None


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """The first layer (D, C, P, P) for another number of channels.

    One channel gets the sum over all, so that a grey image gives what it gave as three equal ones. More get the old
    channels in turn (R, G, B, R, ...) times old / new, so that tokens stay about as large: as timm does it.
    """
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    return weight[:, torch.arange(channels) % old] * (old / channels)


def _with_channels(preprocess: Preprocess | None, channels: int) -> Preprocess | None:
    """Grey is normalised by the mean of the colours' values; None where no photo has so many channels."""
    if preprocess is None or len(preprocess.mean) == channels:
        return preprocess
    if channels not in (1, 3) or preprocess.stored is not None:
        return None
    mean, std = (sum(values) / len(values) for values in (preprocess.mean, preprocess.std))
    return replace(preprocess, mean=(mean,) * channels, std=(std,) * channels)


def _by(grid: tuple[int, int]) -> str:
    return f"{grid[0]}x{grid[1]}"


def _shape(tensor: Tensor) -> str:
    return "x".join(str(n) for n in tensor.shape)


def _entry_of(name: str) -> Entry | None:
    """The model in the registry that has this name."""
    try:
        return registry.find(name)[0]
    except UsageError:
        return None


def _not_there(source: str) -> str:
    if (entry := _entry_of(source)) is not None:
        return (
            f"{source}: no such file or folder. It is a model's name, which has no weights yet. Train one: "
            f"vitlab train DATA model.name={entry.name}."
            + to_type(f" In Python: vitlab.create({entry.name!r}) makes a new one.", "")
        )
    hint = f" For a model on the Hugging Face hub: {hub.PREFIX}{source}." if source.count("/") == 1 else ""
    hint = f" In the package: {bundled.PREFIX}{source}." if source in (*bundled.names(), *bundled.ALIASES) else hint
    hint = hint or f" In the package: {', '.join(bundled.PREFIX + name for name in bundled.names())}."
    return f"{source}: no such file or folder.{hint}"
