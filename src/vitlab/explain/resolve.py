"""Turns a model, a registered name or a checkpoint into its family, config and name, for `inspect` and `gradients`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from vitlab.checkpoints import load
from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import CheckpointError, UsageError
from vitlab.models import registry
from vitlab.models.base import Network, unwrap
from vitlab.models.dense_network import DenseConfig
from vitlab.models.two_towers import TwoTowersConfig


def resolve(
    what: ModelOrName, size: tuple[int, int] | None, options: dict[str, Any]
) -> tuple[str, Any, str, Network | None]:
    """Family, config, display name, and the model if there is one. DINO resolves to its encoder."""
    family, config, name, model = _lookup(what, size, options)
    if not config.wraps_encoder or family == "mae" or isinstance(config, TwoTowersConfig | DenseConfig):
        return family, config, name, model
    encoder = None if model is None else copy.deepcopy(model.encoder).requires_grad_(True)  # DINO's teacher is frozen
    return *encoder_config(family, config), f"{name}, its encoder", encoder


def encoder_config(family: str, config: Any) -> tuple[str, Any]:
    return ("vit", config.encoder) if config.wraps_encoder else (family, config)


def _lookup(
    what: ModelOrName, size: tuple[int, int] | None, options: dict[str, Any]
) -> tuple[str, Any, str, Network | None]:
    if not isinstance(what, str | PathLike):
        model = unwrap(what)
        return model.family, model.config.with_options(**options), type(model).__name__, model
    what = fspath(what)
    if load.is_checkpoint(what):
        model = _load(what, size, options)
        return model.family, model.config, what, model
    entry, config = registry.build_config(what, **options)
    return entry.family, config, entry.name, None


def _load(what: str, size: tuple[int, int] | None, options: dict[str, Any]) -> Network:
    """At its own size. `size` is only for a bare file that does not store its grid."""
    try:
        return load.load(what, **options)
    except CheckpointError:
        if size is None or not Path(what).expanduser().is_file():
            raise
        return load.load(what, image_size=size, **options)


def check_batch(batch: int) -> None:
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise UsageError(f"batch={batch!r} must be a whole number, at least 1.")


def input_size_of(model: Network | None, config: Any, options: dict[str, Any]) -> tuple[int, int]:
    """(H, W) of the input: by the preprocess of a built model, by the config of a name."""
    return config.image_size if model is None or "image_size" in options else model.input_size


def image_size_pair(image_size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if image_size is None:
        return None
    pair = (image_size, image_size) if isinstance(image_size, int) else image_size
    integers = isinstance(pair, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in pair)
    if not integers or len(pair) != 2:
        raise UsageError(f"image_size={image_size!r} must be a whole number or a pair: image_size=(384, 256).")
    return (pair[0], pair[1])
