"""Low-rank adapters as files of their own: kilobytes beside a base checkpoint, in the layout of peft.

    save_adapter(model, "adapter/", base="hf-hub:google/vit-base-patch16-224")
    vitlab.load("adapter/")                                # the base, found by its name, with the adapter merged
    vitlab.load("adapter/", base="/models/vit-base")       # the same base in another place

adapter_model.safetensors   A and B of every adapted layer, what else was trained (the head), running statistics
adapter_config.json         as peft reads it
adapter.json                the network, the digest of the base's frozen weights, labels, preprocess
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitlab.advice import to_type
from vitlab.checkpoints import digests, native, schema
from vitlab.checkpoints.family import LoadedWeights
from vitlab.checkpoints.files import check_values, naming, read_json, read_tensors, save_tensors
from vitlab.errors import CheckpointError, UsageError, VitlabError
from vitlab.images.preprocess import Preprocess
from vitlab.layers.lora import LORA_A, LORA_B, adapt, is_adapter_key, lora_layers, merge_lora
from vitlab.models import registry
from vitlab.models.base import Card, Network, unwrap
from vitlab.models.task import CLASSES
from vitlab.parsing import flat, is_object, is_sequence, spell_not_finite
from vitlab.version import __version__

FORMAT = 1
WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "adapter.json"
PREFIX = "base_model.model."  # of every name in peft's files
PARTS = {".lora_A.weight": LORA_A, ".lora_B.weight": LORA_B}
CHANGES_RESULTS = (  # options of peft that are not computed here, where they are set
    *("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "layer_replication", "use_qalora"),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "alora_invocation_tokens", "arrow_config"),
    *("monteclora_config", "kasa_config", "velora_config"),
)
MOST = 2**20  # of any number in the config of an adapter
LIKE_ZERO = (True, False, "gaussian", "orthogonal", None)  # initial values that leave the base's weights as they are


def is_adapter(path: Path) -> bool:
    return (path / CONFIG).is_file() and (path / WEIGHTS).is_file()


# ------------------------------------------------------------------------------------------------------------- saving


def save_adapter(model: nn.Module, folder: str | Path, base: str | Path | None = None) -> Path:
    """Write the adapters of a model, and all else that learns in it. `base`: where the frozen weights came from."""
    folder, network = Path(folder).expanduser(), unwrap(model)
    layers = lora_layers(network)
    if not layers:
        raise UsageError("the model has no adapters to save: train with model.lora=8, or call layers.lora.add_lora.")
    first, trained, own = next(iter(layers.values())), trained_state(network), network.card or Card()
    tensors = {PREFIX + _peft_name(key): value.detach().cpu().contiguous() for key, value in trained.items()}
    check_values(tensors, folder, allow_nan=True)
    learned = [key for key, _ in network.named_parameters() if key in trained and not is_adapter_key(key)]
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": None if base is None else str(base),
        "r": first.rank,
        "lora_alpha": first.alpha,
        "target_modules": list(layers),
        "modules_to_save": sorted({key.split(".")[0] for key in learned}) or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    card = {
        "format": FORMAT if network.task == CLASSES else native.WITH_TASK,
        "vitlab": __version__,
        "family": network.family,
        "config": network.config.to_dict(),
        "base_digest": base_digest(network),
        "preprocess": network.preprocess.to_dict() if network.preprocess is not None else None,
        "labels": network.labels,
        **({} if network.task == CLASSES else {native.TASK: network.task.to_dict()}),
        **asdict(Card(own.name, f"low-rank adapter on {base or 'a base that it does not name'}", own.licence)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, str] = {}

    def write(path: Path, values: dict[str, Any]) -> None:
        path.write_text(json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    def write_and_digest(name: str, path: Path) -> None:
        save_tensors(tensors, path) if name == WEIGHTS else write(path, config)
        written[name] = digests.file_digest(path)

    def write_card(path: Path) -> None:  # after the others, whose digests it holds
        write(path, digests.seal({**spell_not_finite(card), digests.DIGESTS: written}))

    files = {folder / name: partial(write_and_digest, name) for name in (WEIGHTS, CONFIG)}
    native.write_together({**files, folder / CARD: write_card})
    return folder


def trained_state(model: Network) -> dict[str, Tensor]:
    """What a frozen base does not hold: the adapters, parameters that learn, and buffers."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return {key: value for key, value in model.state_dict().items() if key not in frozen or is_adapter_key(key)}


def base_digest(model: Network) -> str:
    """Digest of the weights that an adapter leaves as they are."""
    trained = trained_state(model)
    return digests.tensor_digest({key: value for key, value in model.state_dict().items() if key not in trained})


def _peft_name(key: str) -> str:
    """blocks.0.attention.qkv.lora_a -> blocks.0.attention.qkv.lora_A.weight"""
    layer, _, part = key.rpartition(".")
    theirs = {ours: name for name, ours in PARTS.items()}
    return f"{layer}{theirs[part]}" if part in theirs else key


# ------------------------------------------------------------------------------------------------------------ loading


@dataclass(frozen=True)
class Adapter:
    """The files of an adapter, read and checked by themselves."""

    folder: Path
    layers: dict[str, tuple[Tensor, Tensor]]  # name -> A (r, in), B (out, r)
    others: dict[str, Tensor]  # the head and whatever else was trained
    rank: int
    alpha: float  # as alpha / rank scales the product
    base: str | None  # the name of the base
    card: dict[str, Any] | None  # adapter.json; None: written by peft


def read_adapter(folder: Path) -> Adapter:
    card = None
    if (folder / CARD).is_file():
        card = read_json(folder / CARD)
        if card.get("format") not in (FORMAT, native.WITH_TASK):
            raise CheckpointError(f"{folder / CARD}: format {card.get('format')!r} is not known. Update vitlab.")
        digests.check_seal(card, folder / CARD)
        digests.check_files(folder, card, CARD)
        with naming(folder / CARD):
            schema.check(card, {**schema.CARD, "base_digest": schema.TEXT}, CARD)
            if card.get("family") not in registry.FAMILIES or not is_object(card.get("config")):
                raise CheckpointError(f"family {card.get('family')!r:.60} or its config is not known. Update vitlab.")
    config, tensors = read_json(folder / CONFIG), read_tensors(folder / WEIGHTS)
    check_values(tensors, folder / WEIGHTS, allow_nan=False)
    with naming(folder / CONFIG):
        schema.check(config, schema.PEFT, CONFIG)
        _check_peft(config)
    layers, others = _by_layer(tensors, folder / WEIGHTS)
    rank, alpha = config["r"], float(config["lora_alpha"])
    if wrong := [name for name, (a, b) in layers.items() if a.shape[0] != rank or b.shape[1] != rank]:
        raise CheckpointError(f"{folder}: the adapter of {wrong[0]} is not of rank {rank}, as {CONFIG} says.")
    alpha *= rank**0.5 if config.get("use_rslora") else 1.0  # alpha / sqrt(r) (arXiv:2312.03732)
    return Adapter(folder, layers, others, rank, alpha, config.get("base_model_name_or_path"), card)


def _check_peft(config: dict[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"peft_type is {config.get('peft_type')!r:.40}; only LORA is read.")
    for name in ("r", "lora_alpha"):
        if name not in config:
            raise CheckpointError(f"{name} is missing.")
    start, bias = config.get("init_lora_weights"), config.get("bias", "none")
    refused = [f"{name}={config[name]!r:.40}" for name in CHANGES_RESULTS if config.get(name)]
    refused += [f"init_lora_weights={start!r:.40}"] if start not in LIKE_ZERO else []
    refused += [f"bias={bias!r:.40}"] if bias != "none" else []
    if refused:
        raise CheckpointError(f"{', '.join(refused)} is not computed here: merge it by peft (merge_and_unload) first.")


def _by_layer(tensors: Mapping[str, Tensor], path: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    halves: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = key.removeprefix(PREFIX)
        end = next((end for end in PARTS if name.endswith(end)), None)
        if end is None:
            others[name] = value.float() if value.is_floating_point() else value
        else:
            halves.setdefault(name.removesuffix(end), {})[PARTS[end]] = value.float()
    for name, parts in halves.items():
        if parts.keys() != {LORA_A, LORA_B} or any(part.ndim != 2 for part in parts.values()):
            raise CheckpointError(f"{path}: the adapter of {name} is incomplete: it needs two matrices, A and B.")
    if not halves:
        raise CheckpointError(f"{path}: holds no adapter: expected names that end in {' and '.join(PARTS)}.")
    return {name: (parts[LORA_A], parts[LORA_B]) for name, parts in halves.items()}, others


def load_adapter(model: nn.Module, folder: str | Path) -> Network:
    """Put a saved adapter on its base, in place and not yet merged; another base is refused, by digest and shapes."""
    adapter, network = read_adapter(Path(folder).expanduser()), unwrap(model)
    _check_fits(adapter, network)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in adapter.others)
    for name, layer in adapt(network, list(adapter.layers), adapter.rank, adapter.alpha).items():
        layer.lora_a.data, layer.lora_b.data = (part.to(layer.weight) for part in adapter.layers[name])
    if adapter.card is not None and base_digest(network) != adapter.card["base_digest"]:
        merge_lora(network)
        raise CheckpointError(
            f"{adapter.folder}: was trained on other weights than these, although their shapes are the same. Its base "
            f"was {adapter.base or 'not named'}: load that one, as it was."
        )
    network.load_state_dict(adapter.others, strict=False)
    return network


def _check_fits(adapter: Adapter, model: Network) -> None:
    """Compare names and shapes with the network's."""
    state, problems = model.state_dict(), list[str]()
    for name, (a, b) in adapter.layers.items():
        weight = state.get(f"{name}.weight")
        if weight is None:
            problems.append(f"there is no layer {name}")
        elif tuple(weight.shape) != (b.shape[0], a.shape[1]):
            problems.append(f"{name} is {tuple(weight.shape)}, the adapter for {(b.shape[0], a.shape[1])}")
    for name, value in adapter.others.items():
        if name not in state:
            problems.append(f"there is no {name}")
        elif state[name].shape != value.shape:
            problems.append(f"{name} is {tuple(state[name].shape)}, the adapter's {tuple(value.shape)}")
    if problems:
        foreign = any(".layer." in name or name.startswith(("vit.", "encoder.")) for name in adapter.layers)
        hint = " It was made for another library's network: merge it there (merge_and_unload) and load the result."
        raise CheckpointError(
            f"{adapter.folder}: does not belong to this base, a {model.family}: {'; '.join(problems[:3])}."
            f"{hint if foreign else ' Its base was ' + str(adapter.base or 'not named') + '.'}"
        )


def read(folder: Path, base: str | Path | None) -> LoadedWeights:
    """The base with the adapter merged into it, as any other weights."""
    from vitlab.checkpoints.load import load_with_report  # which calls this

    adapter = read_adapter(folder)
    source = adapter.base if base is None else base
    if source is None:
        raise CheckpointError(
            f"{folder}: is an adapter that does not name its base. Name it: "
            + to_type(f"vitlab.load({str(folder)!r}, base=...), or ", "")
            + "vitlab convert ADAPTER FOLDER --base CHECKPOINT."
        )
    try:
        model = _load_base(adapter, source, load_with_report)
    except VitlabError as error:
        where = "" if base is not None else " If it lies elsewhere: vitlab.load(ADAPTER, base=...)."
        raise CheckpointError(f"{folder}: is an adapter, and its base cannot be used. {error}{where}") from None
    merge_lora(load_adapter(model, folder))
    card = adapter.card or {}
    labels = card.get("labels") if adapter.card is not None else model.labels
    if labels is not None and len(labels) != model.classes:
        raise CheckpointError(f"{folder / CARD}: labels must be a list of {model.classes} names, or null.")
    with naming(folder / CARD):
        task = native.read_task(card, model.classes) if adapter.card is not None else model.task
    tensors = model.state_dict()
    return LoadedWeights(
        tensors,
        {key: (key,) for key in tensors},
        {},
        "adapter",
        model.family,
        model.config,
        preprocess=Preprocess.from_dict(card["preprocess"]) if card.get("preprocess") else model.preprocess,
        labels=labels,
        task=task,
        card=Card(card.get("name"), card.get("source"), card.get("licence"), card.get("metrics") or {}),
        tokenizer=model.tokenizer,
    )


def _load_base(adapter: Adapter, source: str | Path, load: Any) -> Network:
    """The base with the options that the adapter was trained with: classes, image size, dropout."""
    if adapter.card is None:
        head = adapter.others.get("head.weight")
        return load(source, **({} if head is None else {"classes": head.shape[0]}))[0]
    kind = registry.FAMILIES[adapter.card["family"]][0]
    with naming(adapter.folder / CARD):
        wanted = kind.from_dict(adapter.card["config"])
        if large := [f"{k}={v}" for k, v in flat(adapter.card["config"]).items() if _largest(v) > MOST]:
            raise CheckpointError(f"{large[0]:.80} is more than is read.")
    encoder = not wanted.wraps_encoder
    model, _ = load(source, encoder=encoder)
    has, wants = flat(model.config.to_dict()), flat(wanted.to_dict())
    if model.family != adapter.card["family"] or has.keys() != wants.keys():
        raise CheckpointError(
            f"{adapter.folder}: is an adapter for a {adapter.card['family']}, and {source} is a {model.family}."
        )
    changed = {name: value for name, value in wants.items() if value != has[name]}
    return load(source, encoder=encoder, **changed)[0] if changed else model


def _largest(value: object) -> float:
    values = value if is_sequence(value) and not isinstance(value, str) else [value]
    return max((number for number in values if isinstance(number, int | float)), default=0)
