"""The native checkpoint: a folder with weights.safetensors and model.json. Loading it needs no name and no flag.

A CLIP has its tokenizer.json beside them.
"""

from __future__ import annotations

import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitlab.checkpoints import digests, schema
from vitlab.checkpoints.family import LoadedWeights
from vitlab.checkpoints.files import check_values, naming, read_json, read_tensors, save_tensors
from vitlab.errors import CheckpointError, UsageError
from vitlab.images.preprocess import Preprocess
from vitlab.layers.lora import is_adapter_key, lora_scale, merge_tensors
from vitlab.models import registry
from vitlab.models.base import Card, Network, unwrap
from vitlab.models.task import CLASSES, ModelTask, task_from_dict
from vitlab.parsing import is_object, is_sequence, spell_not_finite
from vitlab.text.tokenizer import Tokenizer
from vitlab.version import __version__

FORMAT = 1
WITH_TASK = 2  # its outputs are no classes, which a vitlab that reads format 1 alone would take them for
WEIGHTS, CARD, TOKENIZER = "weights.safetensors", "model.json", "tokenizer.json"
TASK = "task"  # in model.json, where the outputs are no classes
LORA_SCALE = "lora_scale"  # in model.json, where weights and adapters are stored apart


def save(model: nn.Module | str | os.PathLike[str], folder: str | Path, *, merge: bool = True) -> Path:
    """Write a checkpoint folder. Files appear under their names only when they are complete and will load.

    Low-rank adapters are merged. merge=False keeps them apart, so that training can resume; `load` merges them.
    """
    if isinstance(model, str | os.PathLike):
        from vitlab.checkpoints.load import load  # which reads what is written here

        model = load(os.fspath(model))
    folder, network = Path(folder).expanduser(), unwrap(model)
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file. A checkpoint is a folder: name another place.")
    state = _complete_state(network, folder, merge)
    _check_labels(network, folder)
    folder.mkdir(parents=True, exist_ok=True)
    card = {
        "format": FORMAT if network.task == CLASSES else WITH_TASK,
        "vitlab": __version__,
        "family": network.family,
        "config": network.config.to_dict(),
        "preprocess": network.preprocess.to_dict() if network.preprocess is not None else None,
        "labels": network.labels,
        **({} if network.task == CLASSES else {TASK: network.task.to_dict()}),
        **asdict(network.card or Card()),
    }
    if not merge and (scale := lora_scale(network)) is not None:
        card[LORA_SCALE] = scale
    tokenizer = network.tokenizer
    writes: dict[str, Callable[[Path], object]] = {WEIGHTS: partial(save_tensors, state)}
    if tokenizer is not None:
        writes[TOKENIZER] = lambda path: path.write_text(tokenizer.to_json(), encoding="utf-8")
    written: dict[str, str] = {}

    def write_and_digest(name: str, path: Path) -> None:
        writes[name](path)
        written[name] = digests.file_digest(path)

    def write_card(path: Path) -> None:  # after the others, whose digests it holds
        sealed = digests.seal({**spell_not_finite(card), digests.DIGESTS: written})
        path.write_text(json.dumps(sealed, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    write_together({**{folder / name: partial(write_and_digest, name) for name in writes}, folder / CARD: write_card})
    if tokenizer is None:  # one of another model
        (folder / TOKENIZER).unlink(missing_ok=True)
    return folder


@lru_cache(maxsize=8)  # a training run saves one model many times
def _shapes(family: str, config: str) -> dict[str, tuple[int, ...]]:
    """Of the tensors of the network that this config describes, by name."""
    described: Any = registry.FAMILIES[family][0].from_dict(json.loads(config))
    network = on_meta(lambda: registry.build(family, described))
    return {key: tuple(value.shape) for key, value in network.state_dict().items()}


def _complete_state(model: Network, folder: Path, merge: bool) -> dict[str, Tensor]:
    """The tensors as `load` will want them: those of the network that model.config describes, and no others."""
    scale, state = lora_scale(model), model.state_dict()
    if scale is not None and merge:
        state = merge_tensors(state, scale)
    adapters = {key for key in state if is_adapter_key(key)}
    state = {key.replace("_orig_mod.", ""): value for key, value in state.items()}  # compiled blocks
    wanted = _shapes(model.family, json.dumps(model.config.to_dict()))
    problems = [f"{key} is not there" for key in wanted.keys() - state.keys()]
    problems += [f"{key} is not part of the network" for key in state.keys() - wanted.keys() - adapters]
    for key in wanted.keys() & state.keys():
        shape, expected = tuple(state[key].shape), wanted[key]
        if shape != expected:
            problems.append(f"{key} is {shape}, expected {expected}")
    if problems:
        raise CheckpointError(
            f"{folder}: not written, because it could not be loaded: {'; '.join(sorted(problems)[:4])}. "
            f"The model was changed after it was built with model.config: {_remedy(state, model.config.classes)}."
        )
    if any(value.is_meta for value in state.values()):
        raise CheckpointError(
            f"{folder}: not written: the model is on the meta device, where tensors have no values. Build it outside "
            'torch.device("meta"), or load weights into it first.'
        )
    check_values(state, folder, allow_nan=True)
    return {key: value.detach().cpu().contiguous() for key, value in state.items()}


def _remedy(state: dict[str, Tensor], classes: int) -> str:
    head = state.get("head.weight")
    if head is None or head.ndim != 2 or head.shape[0] == classes:
        return "change it by options of vitlab.create or vitlab.load instead"
    n = head.shape[0]
    return (
        f"for another number of classes call model.reset_classifier({n}); a head that is trained already can be put "
        f"back after it (head = model.head; model.reset_classifier({n}); model.head = head)"
    )


def _check_labels(model: Network, folder: Path) -> None:
    labels, n = model.labels, model.config.classes
    texts = schema.TEXTS.fits(labels)
    if labels is not None and not (texts and len(labels) == n):
        description = f"{len(labels)} names" if texts else f"{labels!r:.60}"
        raise CheckpointError(
            f"{folder}: not written: model.labels must be a list of {n} texts, one for each class, or None; "
            f"found {description}."
        )
    try:
        model.task.check(n)
    except UsageError as error:
        raise CheckpointError(f"{folder}: not written: {error}") from None


def read_task(card: dict[str, Any], classes: int) -> ModelTask:
    """What the outputs of a checkpoint mean."""
    task = task_from_dict(card.get(TASK))
    task.check(classes)
    return task


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """One file: under its own name it is always whole."""
    write_together({path: write})


def write_text(path: Path, text: str) -> None:
    """`write_whole` for a text, in UTF-8."""
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_together(writes: Mapping[Path, Callable[[Path], object]]) -> None:
    """Write all to temporary names, flush to disk, then rename: if one fails, the files of before stay as they were."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp") for path in writes}
    try:
        for path, write in writes.items():
            temporary[path].touch()
            mode = temporary[path].stat().st_mode  # what the user's files have; safetensors lets nobody else read
            try:
                write(temporary[path])
            except SafetensorError as error:  # its name for a full disk
                raise OSError(f"{path}: cannot be written ({error}). Make room, or name another place.") from None
            temporary[path].chmod(mode)
            with temporary[path].open("rb") as file:
                os.fsync(file.fileno())
        for path in writes:
            temporary[path].replace(path)
    finally:
        for path in writes:
            temporary[path].unlink(missing_ok=True)


def read_card(folder: Path) -> dict[str, Any]:
    """model.json, as it was saved. Whether the files beside it are is `digests.check_files`' to say."""
    card = read_json(folder / CARD)
    if card.get("format") not in (FORMAT, WITH_TASK):
        raise CheckpointError(
            f"{folder / CARD}: format {card.get('format')!r} is not known; this vitlab {__version__} reads {FORMAT} "
            f"and {WITH_TASK}. Update vitlab: pip install -U vitlab."
        )
    digests.check_seal(card, folder / CARD)
    for key, kind in (("family", str), ("config", dict)):
        if not isinstance(card.get(key), kind):
            raise CheckpointError(
                f"{folder / CARD}: {key!r} is missing or damaged. Fetch or save the checkpoint again."
            )
    return card


def on_meta(build: Callable[[], Network]) -> Network:
    """Build a model on the meta device; its weights are assigned from the file."""
    with torch.device("meta"), _WithoutFirstValues():
        return build()


class _WithoutFirstValues(TorchFunctionMode):
    """Skips what initialises weights: meta tensors have no values, and for some of it torch imports its compiler."""

    SKIPPED = (Tensor.normal_, nn.init.normal_, nn.init.uniform_, nn.init.constant_, nn.init.kaiming_uniform_)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.SKIPPED:
            return args[0] if args else kwargs["tensor"]  # torch.nn.init passes it by name
        return func(*args, **(kwargs or {}))


def read(folder: Path) -> LoadedWeights:
    """A checkpoint folder, checked against its digests and its config against the weights."""
    card = read_card(folder)
    if card["family"] not in registry.FAMILIES:
        raise CheckpointError(f"{folder}: family {card['family']!r:.60} is not known. Update vitlab.")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: {WEIGHTS} is missing beside {CARD}.")
    digests.check_files(folder, card, CARD)
    tensors = read_tensors(folder / WEIGHTS)
    with naming(folder / CARD):
        schema.check(card, schema.CARD, CARD)
        if (scale := card.get(LORA_SCALE)) is not None:
            tensors = merge_tensors(tensors, scale)
        check_plausible(card["config"], tensors, WEIGHTS)
        config: Any = registry.FAMILIES[card["family"]][0].from_dict(card["config"])
        preprocess = Preprocess.from_dict(card["preprocess"]) if card.get("preprocess") else None
        labels = card.get("labels")
        if labels is not None and len(labels) != config.classes:
            raise CheckpointError(f"labels must be a list of {config.classes} names, or null.")
        task = read_task(card, config.classes)
    return LoadedWeights(
        tensors,
        {key: (key,) for key in tensors},
        {},
        "native",
        card["family"],
        config,
        preprocess=preprocess,
        labels=labels,
        task=task,
        card=Card(card.get("name"), card.get("source"), card.get("licence"), card.get("metrics") or {}),
        tokenizer=Tokenizer.read(folder / TOKENIZER) if (folder / TOKENIZER).is_file() else None,
    )


STACKED = ("depth", "depths", "layers")  # options that count equal parts, which the weights number
NOT_IN_WEIGHTS = ("image_size", "patch_size", "window", "reductions", "sinkhorn")  # need not show in any shape
MAX_NOT_IN_WEIGHTS = 2**14
MAX_LISTED = 16  # stages; the published networks have 4
TENSORS_OF_A_BLOCK = 8  # at least: two norms, and matrices for attention and MLP


def check_plausible(config: dict[str, Any], tensors: dict[str, Tensor], weights: str) -> None:
    """Refuse a config with a number larger than anything that the file `weights` holds, before a network is built.

    Building 10**6 blocks takes minutes, and a layer 10**9 wide cannot be built at all. What passes may still not fit:
    whoever builds the network compares every name and shape.
    """
    widest = max(side for tensor in tensors.values() for side in (*tensor.shape, 1))
    longest = min(max(_stacks(tensors).values(), default=0), 1 + len(tensors) // TENSORS_OF_A_BLOCK)
    for name, value in _numbers(config):
        if name in STACKED:
            most, what = longest, f"{weights} has at most {longest} blocks in a row"
        elif name in NOT_IN_WEIGHTS:
            most, what = MAX_NOT_IN_WEIGHTS, f"{MAX_NOT_IN_WEIGHTS} is the most that is read"
        else:
            most, what = widest, f"the longest side of a tensor in {weights} is {widest}"
        if value > most:
            raise CheckpointError(
                f"{name} is {schema.abbreviated(value)}, but {what}: config and weights do not belong together. Fetch "
                "or save the checkpoint again."
            )


def _stacks(tensors: dict[str, Tensor]) -> dict[str, int]:
    """blocks.0.norm.weight, blocks.1.norm.weight -> {"blocks": 2}: how many numbers follow each beginning of a name."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for key in tensors:
        parts = key.split(".")
        for place, part in enumerate(parts):
            if part.isascii() and part.isdigit():
                numbers[".".join(parts[:place])].add(part)
    return {start: len(parts) for start, parts in numbers.items()}


def _numbers(value: object, name: str = "") -> list[tuple[str, float]]:
    """Every number that gives a size, with its option's name. The nesting of JSON is limited, so recursion ends."""
    if is_object(value):
        return [pair for key, inner in value.items() for pair in _numbers(inner, key)]
    if is_sequence(value):
        if len(value) > MAX_LISTED:
            raise CheckpointError(f"{name} has {len(value)} entries, and at most {MAX_LISTED} are read.")
        return [pair for inner in value for pair in _numbers(inner, name)]
    number = float if name == "mlp_ratio" else int
    if isinstance(value, int | number) and not isinstance(value, bool):
        return [(name, value)]
    return []
