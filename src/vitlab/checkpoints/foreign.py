"""Another library's checkpoint -> tensors under our names, the config they belong to, preprocess and labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.checkpoints import (
    clip,
    clip_config,
    facebook,
    files,
    hf,
    jax,
    keymap,
    lucidrains,
    mae,
    native,
    pvt,
    resnet,
    schema,
    swin,
    timm,
    torchvision,
    twins,
)
from vitlab.checkpoints.infer import infer_options
from vitlab.checkpoints.keymap import Dialect
from vitlab.checkpoints.staged import Family
from vitlab.checkpoints.usermap import Table, check_used, read_map
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Card
from vitlab.models.clip import CLIPConfig
from vitlab.models.config import Config, option_paths
from vitlab.models.mae import MAEConfig
from vitlab.models.resnet import ResNetConfig
from vitlab.models.vit_config import ViTConfig
from vitlab.text.tokenizer import Tokenizer

STAGED = (swin.FAMILY, pvt.PVT, pvt.PVT_V2, twins.FAMILY)
DIALECTS = (
    *(dialect for family in STAGED for dialect in family.dialects),  # before hf's, whose mark some of them have too
    *(hf.DIALECT, facebook.MAE, facebook.DIALECT, timm.DIALECT),
    *(jax.DIALECT, torchvision.DIALECT, lucidrains.DIALECT, *resnet.DIALECTS, *clip.DIALECTS),
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
    tokenizer: Tokenizer | None = None  # of a model that reads words
    unsaid: dict[str, Any] = field(default_factory=dict)  # options that had to be assumed
    stated: dict[str, Any] | None = None  # values of the preprocess that are stated; None: all of them
    table: Path | None = None  # the rename table
    taken_as: str = "taken as usual there"
    size_notes: list[str] = field(default_factory=list)  # on the size that images are read at, unless another is given


def read_foreign(path: Path, map: Path | None, overrides: dict[str, Any], *, encoder: bool = False) -> Found:
    """Read a file or folder of another library; `overrides` tell what its weights cannot.

    `encoder`: of a masked autoencoder, leave the decoder out.
    """
    chosen: list[str] = []  # where a file holds several sets of weights
    state = _read_folder(path) if path.is_dir() else files.read_tensors(path, chosen)
    table = read_map(map) if map is not None else None
    dialect, stated = (table.dialect, table.options) if table is not None else (detect(set(state), path), {})
    if table is not None and table.two_towers:
        return _read_clip(
            path,
            dialect,
            state,
            clip.by_path({**stated, **overrides}),
            chosen,
            table=(map, table) if map is not None else None,
        )
    if dialect in resnet.DIALECTS:
        return _read_resnet(path, dialect, state, overrides, chosen)
    if (family := _staged(dialect)) is not None:
        return _read_staged(path, family, dialect, state, overrides, chosen)
    if dialect in clip.DIALECTS:
        return _read_clip(path, dialect, state, clip.by_path(overrides), chosen)
    has_decoder = map is None and dialect.name in mae.DECODERS and mae.has_decoder(set(state))
    whole = has_decoder and not encoder
    with files.naming(path):
        _check_names(overrides, MAEConfig if whole else ViTConfig)
        stated = {name: overrides.get(name, value) for name, value in stated.items()}
        told = {**stated, **overrides}
        folder = _folder_says(path, dialect, state) if table is None else Folder(preprocess=table.preprocess)
        trunk = dialect is timm.DIALECT and not folder.options and "norm_pre.weight" in state
        dialect = timm.CLIP_TRUNK if trunk else dialect
        says = folder.options
        masking = _masking_says(path) if map is None else {}
        if has_decoder and dialect is hf.DIALECT and not says:  # a bare file; facebook's has its own dialect
            folder = replace(folder, usual=hf.usual_preprocess({"model_type": "vit_mae"}))
        renamed = keymap.read(dialect, state)
        if table is not None and map is not None:
            check_used(map, table, renamed)
        if dialect is hf.DIALECT and "head.weight" in renamed.tensors:
            hf.leave_out_pooler(renamed)
        certain = {**dialect.options, **dialect.hints(state), **stated, **says}
        stored_size = {"image_size": says["image_size"], "size_is_stored": True} if "image_size" in says else {}
        stored_size |= {"prefix_positions": says["prefix_positions"]} if "prefix_positions" in says else {}
        inferred = infer_options(renamed.tensors, {**told, **certain, **stored_size})
        if inferred["pooling"] in ("class", "mean"):  # the weights are the same for both
            inferred["pooling"] = says.get("pooling", inferred["pooling"])
        _check_agreement(says, inferred)
        config = ViTConfig().with_options(**{**dialect.assumed, **certain, **inferred})
        found = Found(renamed.tensors, renamed.origin, renamed.unused, dialect.name, "vit", config, notes=chosen)
        if map is not None:
            _check_channels(map, folder.preprocess, config.channels)
        folder.set_preprocess(found, dialect.preprocess)
        if whole:
            _add_decoder(found, state, {**masking, **overrides})
        _use_fixed_positions(found)
    _take_labels(found, folder.labels)
    found.card = Card(source=path.name)
    unsaid = {k: v for k, v in dialect.assumed.items() if k not in certain and k not in overrides}
    if unsaid and "heads" not in {**certain, **told} and not config.attention.qk_norm:
        unsaid["heads"] = config.heads
    if whole and not masking:
        unsaid |= {name: getattr(found.config, name) for name in mae.USUAL if name not in overrides}
    if not has_decoder and (masking or (not config.classes and found.config.positions.kind == "sincos")):
        found.notes.append(
            "holds an encoder and no decoder, as most released MAE files do: it gives features and can be fine-tuned, "
            "but it cannot reconstruct pictures."
        )
    if (wanted := overrides.get("image_size")) and "image_size" not in says and "grid" not in overrides:
        found.notes += _note_resize(config, wanted)
    found.unsaid, found.table = unsaid, map
    if trunk:
        found.taken_as = "taken as in OpenAI's CLIP, because of norm_pre (other CLIPs have activation=gelu)"
    return found


def _read_resnet(
    path: Path, dialect: Dialect, state: dict[str, Tensor], overrides: dict[str, Any], notes: list[str]
) -> Found:
    """A ResNet's weights tell nearly everything; `overrides` may tell where its bottlenecks halve."""
    with files.naming(path):
        _check_names(overrides, ResNetConfig)
        folder = _folder_says(path, dialect, state)
        says = folder.options
        renamed = keymap.read(dialect, state)
        inferred = resnet.infer_options(renamed)
        _check_agreement(says, inferred)
        told = {name: overrides[name] for name in ("stride_in",) if name in overrides}
        usual = dialect.preprocess if inferred["stem"] == "imagenet" else {"size": 32}
        size = {**usual, **folder.usual, **folder.preprocess}.get("size", 224)
        config = ResNetConfig(**{"image_size": size, **told, **says, **inferred})
        found = Found(renamed.tensors, renamed.origin, renamed.unused, dialect.name, "resnet", config, notes=notes)
        folder.set_preprocess(found, usual)
    _take_labels(found, folder.labels)
    found.card = Card(source=path.name)
    if config.block == "bottleneck" and not says and not told:
        found.unsaid = {"stride_in": config.stride_in}
    return found


def _staged(dialect: Dialect) -> Family | None:
    return next((family for family in STAGED if dialect in family.dialects), None)


def _read_staged(
    path: Path, family: Family, dialect: Dialect, state: dict[str, Tensor], overrides: dict[str, Any], notes: list[str]
) -> Found:
    """Swin, PVT, Twins: what the weights do not tell, `overrides` may."""
    with files.naming(path):
        _check_names(overrides, family.config)
        folder = _folder_says(path, dialect, state)
        says = folder.options
        renamed = keymap.read(dialect, state)
        told = {name: overrides[name] for name in family.tellable if name in overrides}
        inferred = family.infer(renamed, {**told, **says})
        _check_agreement(says, inferred)
        usual = {"image_size": dialect.preprocess["size"], **dialect.assumed, **dialect.options}
        config = family.config(**{**usual, **told, **says, **inferred})
        found = Found(renamed.tensors, renamed.origin, renamed.unused, dialect.name, family.name, config, notes=notes)
        folder.set_preprocess(found, dialect.preprocess)
    _take_labels(found, folder.labels)
    found.card = Card(source=path.name)
    names = (*dialect.assumed, *(["heads"] if "heads" in family.tellable else []))
    found.unsaid = {name: getattr(config, name) for name in names if name not in {**says, **told}}
    return found


def _read_clip(
    path: Path,
    dialect: Dialect,
    state: dict[str, Tensor],
    told: dict[str, Any],
    notes: list[str],
    table: tuple[Path, Table] | None = None,
) -> Found:
    """A CLIP; `told`, by path, may say the activation, the heads and the image size."""
    with files.naming(path):
        _check_names(told, CLIPConfig)
        renamed = keymap.read(dialect, state)
        words = path.is_dir() and any((path / name).is_file() for name in ("tokenizer.json", "vocab.json"))
        length = getattr(renamed.tensors.get("text.positions"), "shape", (77,))[0]
        tokenizer = Tokenizer.read(path, context=length) if words else None
        says: dict[str, Any] = {}
        folder = Folder()
        if table is not None:
            check_used(*table, renamed)
            folder = Folder(preprocess=table[1].preprocess)
        if dialect is clip.HF and (path / "config.json").is_file():
            says = clip_config.hf_options(files.read_json(path / "config.json"), tokenizer)
            folder = _with_processor(path, Folder(), "clip")
        if dialect is clip.OPEN_CLIP and (path / "open_clip_config.json").is_file():
            read = files.read_json(path / "open_clip_config.json")
            says, preprocess = clip_config.open_clip_options(read, tokenizer)
            folder = Folder(preprocess=preprocess)
        config = clip.infer_config(dialect, renamed, says, told)
        clip.check_agreement(says, config)
        found = Found(renamed.tensors, renamed.origin, renamed.unused, dialect.name, "clip", config, notes=notes)
        if table is not None:
            _check_channels(table[0], folder.preprocess, config.channels)
        folder.set_preprocess(found, dialect.preprocess)
    found.tokenizer, found.card = tokenizer, Card(source=path.name)
    values = {"eps": config.text.eps, "image.heads": config.image.heads, "text.heads": config.text.heads}
    unsaid = {name: value for name, value in values.items() if name not in {**says, **told}}
    found.unsaid = {} if "text.eps" in says else unsaid
    found.table = table[0] if table is not None else None
    return found


def _take_labels(found: Found, labels: list[str] | None) -> None:
    """Names of the classes; of an encoder without a classifier they are of no use."""
    if labels and len(labels) == found.config.classes:
        found.labels = labels
    elif labels and found.config.classes:
        found.notes.append(
            f"config.json names {len(labels)} classes, but the weights have {found.config.classes}: the names are left "
            "out, and classes are shown by number."
        )


def _masking_says(path: Path) -> dict[str, Any]:
    """What transformers' config.json says of masking and decoder; nothing where it is no masked autoencoder's."""
    beside = path / "config.json"
    config = files.read_json(beside) if path.is_dir() and beside.is_file() else {}
    schema.check(config, schema.HF if config.get("model_type") == "vit_mae" else {}, "config.json")
    return mae.options_from(config) if config.get("model_type") == "vit_mae" else {}


def _add_decoder(found: Found, state: dict[str, Tensor], told: dict[str, Any]) -> None:
    """From the encoder that was read to the whole masked autoencoder."""
    decoder = mae.read_decoder(found.dialect, state)
    found.config = mae.infer_config(found.config, decoder.tensors, told)
    found.tensors = {**{f"encoder.{key}": value for key, value in found.tensors.items()}, **decoder.tensors}
    found.origin = {**{f"encoder.{key}": theirs for key, theirs in found.origin.items()}, **decoder.origin}
    taken = {key for keys in decoder.origin.values() for key in keys}
    found.unused = {key: why for key, why in found.unused.items() if key not in taken}
    found.family = "mae"


def _use_fixed_positions(found: Found) -> None:
    """A table that is sin-cos is computed, any other is kept. Classifiers keep theirs: it may have been trained."""
    tables = {"positions.table": "positions"}
    if found.family == "mae":
        tables = {"encoder.positions.table": "positions", "decoder.positions.table": "decoder.positions"}
    for key, option in tables.items():
        table = found.tensors.get(key)
        if table is not None and not found.config.classes and mae.is_sincos(table, found.config.grid):
            del found.tensors[key]
            why = "equals the fixed sin-cos positions, which are computed"
            found.unused |= dict.fromkeys(found.origin.pop(key), why)
            found.config = found.config.with_options(**{option: "sincos"})


def _note_resize(config: Any, wanted: int | tuple[int, int]) -> list[str]:
    """As many patches in another grid: was it the stored one, or shall it be resized?"""
    asked = config.with_options(image_size=wanted).grid
    if asked == config.grid or asked[0] * asked[1] != config.grid[0] * config.grid[1]:
        return []
    stored = f"{config.grid[0]}x{config.grid[1]}"
    text = f"positions were taken as {stored} and resized to {asked[0]}x{asked[1]}"
    return [f"{text}; if {asked[0]}x{asked[1]} is what they were made for, pass grid={asked}."]


@dataclass(frozen=True)
class Folder:
    """What the files beside the weights, or a rename table, say; empty where there are none."""

    options: dict[str, Any] = field(default_factory=dict)
    preprocess: dict[str, Any] = field(default_factory=dict)  # values for Preprocess that are stated
    labels: list[str] | None = None
    usual: dict[str, Any] = field(default_factory=dict)  # values that networks of this kind usually have
    model_type: str = ""  # transformers' name of the network
    notes: tuple[str, ...] = ()

    def set_preprocess(self, found: Found, usual: Mapping[str, Any]) -> None:
        """Stated values over usual ones. A stated size is what images are read at, whatever the position grid."""
        config, stated = found.config, self.preprocess
        found.stated = stated
        values = {**usual, **self.usual, **stated}
        if "how" in stated and "resize" not in stated:
            values.pop("resize", None)  # it belongs to the usual crop
        found.preprocess = fitting_preprocess(values, config.image_size, config, keep_size="size" in stated)
        found.notes += self.notes
        if found.preprocess is not None and found.preprocess.size != config.image_size:
            found.size_notes = _note_other_size(found.preprocess.size, config.image_size, self.model_type)


COLOURS = ("mean", "std")
INTERPOLATE = {  # networks that their library does not run at another size by itself
    **dict.fromkeys(("vit", "deit", "vit_mae", "clip"), "transformers needs interpolate_pos_encoding=True for that"),
    "pvt": "transformers' PVT cannot do that",
    "timm": "timm needs dynamic_img_size=True for that",
}


def _note_other_size(size: tuple[int, int], made_for: tuple[int, int], model_type: str) -> list[str]:
    if model_type not in INTERPOLATE:
        return []
    read, stored = (f"{height}x{width}" for height, width in (size, made_for))
    return [
        f"images are read at {read}, as its files say, and its positions, made for {stored}, are resized to fit; "
        f"{INTERPOLATE[model_type]}. Pass image_size to read them at another size."
    ]


def _check_channels(table: Path, preprocess: dict[str, Any], channels: int) -> None:
    """A mean for another number of channels cannot be used, and must not be dropped quietly."""
    given = len(preprocess.get("mean", [0] * channels))
    if given != channels:
        raise CheckpointError(
            f"{table}: [preprocess] mean and std have {given} numbers, but the network reads {channels}."
        )


def assumed_notes(found: Found, preprocess: dict[str, Any]) -> list[str]:
    """One note on everything that was assumed about a file; `preprocess`: values that the caller gives."""
    values = [f"{name}={value}" for name, value in found.unsaid.items()]
    p, stated = found.preprocess, {**(found.stated or {}), **preprocess}
    colours, resizing = [], []
    if p is not None and found.stated is not None:
        unfit = [len(stated.get(name, ())) != len(p.mean) and len(set(stated.get(name, ()))) != 1 for name in COLOURS]
        if any(unfit) and not set(COLOURS) <= preprocess.keys():
            colours = [f"mean={p.mean}", f"std={p.std}"]
        resizing = [f"{name}={getattr(p, name)}" for name in ("interpolation", "how") if name not in stated]
    unknown = ", ".join([*values, *colours, *resizing])
    if not unknown:
        return []
    if found.table is not None:
        sections = ["[model]"] * bool(values) + ["[preprocess]"] * bool(colours or resizing)
        return [
            f"{found.table.name} does not say {unknown}: assumed. {' and '.join(sections)} in it can say otherwise."
        ]
    change = [*found.unsaid, *(["preprocess=dict(mean=..., std=...)"] if colours else [])]
    change = change or ["preprocess=dict(interpolation=..., how=...)"]
    return [
        f"{found.dialect} weights do not say {unknown}: {found.taken_as}. Pass {' or '.join(change)} to change it"
        f"{' (vitlab convert: --mean, --std)' if colours else ''}."
    ]


def _folder_says(path: Path, dialect: Dialect, state: dict[str, Tensor]) -> Folder:
    """Options, preprocess values and labels from the JSON files beside the weights."""
    if not path.is_dir() or not (path / "config.json").is_file():
        return Folder()
    config = files.read_json(path / "config.json")
    schema.check(config, {"model_type": schema.TEXT | schema.NULL}, "config.json")
    family = _staged(dialect)
    if dialect in (hf.DIALECT, resnet.HF) or (family is not None and dialect.name == "hf"):
        options = hf.options_from(config) if dialect is hf.DIALECT else {}
        options = resnet.hf_options(config) if dialect is resnet.HF else options
        options = family.says(dialect, config)[0] if family is not None else options
        return _with_processor(path, Folder(options, labels=hf.labels_from(config)), config["model_type"])
    if family is not None and "architecture" in config:
        return Folder(*family.says(dialect, config))
    if "architecture" in config and dialect is resnet.TIMM:
        return Folder(*resnet.timm_options(config))
    if "architecture" in config and dialect in (timm.DIALECT, facebook.DIALECT):
        return Folder(*timm.options_from(config, state), model_type="timm")
    if config.get("model_type"):
        known = ", ".join((*hf.MODEL_TYPES, "resnet", "clip", *(family.name for family in STAGED)))
        raise CheckpointError(f"{path}: a {config['model_type']!r} model; known are {known} and vitlab's own.")
    return Folder()


def _with_processor(path: Path, folder: Folder, model_type: str) -> Folder:
    """Adds what preprocessor_config.json says, or what is usual where it is missing."""
    beside = path / "preprocessor_config.json"
    if not beside.is_file():
        usual = hf.usual_preprocess({"model_type": model_type}) if model_type != "clip" else {}
        return replace(folder, usual=usual, model_type=model_type)
    says = files.read_json(beside)
    preprocess, notes = hf.preprocess_from(says, model_type), hf.preprocess_notes(says, model_type)
    return replace(folder, preprocess=preprocess, model_type=model_type, notes=(*folder.notes, *notes))


def _check_agreement(says: dict[str, Any], inferred: dict[str, Any]) -> None:
    """A config.json that contradicts its weights belongs to other weights."""
    for name in says.keys() & inferred.keys():
        said, found = says[name], inferred[name]
        if name == "image_size":
            said = (said, said) if isinstance(said, int) else tuple(said)
        if name != "layer_scale" and said != found:
            raise CheckpointError(
                f"config.json says {name}={said} but the weights have {found}: they do not belong together."
            )


def _read_folder(folder: Path) -> dict[str, Tensor]:
    for name in (
        "model.safetensors",
        "pytorch_model.bin",
        "open_clip_model.safetensors",
        "open_clip_pytorch_model.bin",
    ):
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


def detect(keys: set[str], path: object) -> Dialect:
    """Whose names are these?"""
    for dialect in DIALECTS:
        if dialect.recognise(keys):
            return dialect
    if {"class_token", "patch_embed.proj.weight"} <= keys or (Path(str(path)) / native.WEIGHTS).is_file():
        raise CheckpointError(
            f"{path}: vitlab weights without their {native.CARD}. Name the folder, with both files in it."
        )
    some = ", ".join(sorted(keys)[:3])
    raise CheckpointError(
        f"{path}: {len(keys)} keys of an unknown layout, e.g. {some}. Known are "
        f"{', '.join(dict.fromkeys(d.name for d in DIALECTS))}. "
        "Write a rename table and pass map='keys.toml' (--map keys.toml)."
    )


def _check_names(overrides: dict[str, Any], config: type[Config]) -> None:
    """A misspelt option is told the nearest name before anything else goes wrong."""
    known = option_paths(config)
    config().with_options(**{k: v for k, v in overrides.items() if k not in (*known, "grid", "classes")})


def fitting_preprocess(
    values: dict[str, Any], made_for: tuple[int, int], config: Any, *, keep_size: bool = False
) -> Preprocess | None:
    """Preprocess values that were made for one image size, for the size and channels that `config` has.

    `keep_size`: for its channels alone; images are read at the size that the values state.
    """
    n = config.channels
    if n not in (1, 3):
        return None  # no picture file has so many channels
    values = {"size": made_for, **values}
    for key in ("mean", "std"):
        given = set(values.get(key, ()))
        if len(values.get(key, ())) in {0, 1, 3} - {n}:  # those of colours for a grey network, or the other way round
            values[key] = (given.pop() if len(given) == 1 else 0.5,) * n
    preprocess = Preprocess(**values)
    return preprocess if keep_size else preprocess.with_size(config.image_size)
