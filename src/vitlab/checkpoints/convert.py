"""Any checkpoint -> native, timm, transformers, JAX or open_clip files, and a check that the numbers came along."""

from __future__ import annotations

import copy
import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.checkpoints import clip, hf, jax, keymap, mae, native, pvt, resnet, swin, timm, twins
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.infer import HEADS
from vitlab.checkpoints.load import load_with_report, locate, table_grid
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.mae import MaskedAutoencoder

TARGETS = ("native", "timm", "hf", "jax", "open_clip")
OPENAI_VOCAB = 49408
STAGED = {"swin": swin.write, "pvt": pvt.write, "pvt_v2": pvt.write, "twins": twins.write}  # networks of stages
TOLERANCE = 1e-4  # of logits, between two libraries in float32


def write(model: Network, target: str | Path, to: str) -> list[str]:
    """Write a model in the named layout; returns notes on what the other library will do differently."""
    target = Path(target)
    if to not in TARGETS:
        raise CheckpointError(f"--to {to!r} is not known: use {', '.join(TARGETS)}.")
    if to == "native":
        native.save(model, target)
        return []
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    if model.input_size != model.config.image_size and not _resizes_itself(model, to):
        model, state = _at_input_size(model, state)
        size = "x".join(map(str, model.config.image_size))
        return [
            f"positions were resized to {size}, the size that images are read at.",
            *_write(model, state, target, to),
        ]
    return _write(model, state, target, to)


def _resizes_itself(model: Network, to: str) -> bool:
    """Whether the other library runs it at another size than config.json's with the same numbers."""
    if model.family == "vit":
        return to == "hf" and hf.architecture(model.config).startswith("dinov2")
    return model.family in ("swin", "pvt_v2", "twins", "resnet")  # no weights belong to a size


def _at_input_size(model: Network, state: dict[str, Tensor]) -> tuple[Any, dict[str, Tensor]]:
    """The same network with its position tables resized to the images that it reads."""
    again = copy.copy(model)
    again.config = model.config.with_options(image_size=model.input_size)
    for key in state:
        if key.endswith("positions.table"):
            positions = model.get_submodule(key.removesuffix(".table"))
            state[key] = positions(table_grid(key, again.config), like=state[key]).detach().cpu()
    return again, state


def _write(model: Network, state: dict[str, Tensor], target: Path, to: str) -> list[str]:
    c = model.config
    if model.family == "clip":
        return _write_clip(model, state, target, to)
    if to == "open_clip":
        raise CheckpointError(f"open_clip has no {model.family} alone: --to open_clip is for a CLIP.")
    if model.family == "mae":
        if to != "hf":
            raise CheckpointError(
                f"{to} has no masked autoencoder with its decoder: use --to hf or native, or --encoder for the encoder."
            )
        return _write_hf(*mae.write(cast(MaskedAutoencoder, model), state), model.preprocess, target)
    if model.family == "resnet":
        return _write_hf(*resnet.write(model, state, to), model.preprocess, target)
    if model.family in STAGED:
        return _write_hf(*STAGED[model.family](model, state, to), model.preprocess, target)
    if model.family == "vit" and c.positions.kind == "sincos":  # no other library computes them: they become a table
        positions = model.get_submodule("positions")
        state["positions.table"] = positions(c.grid, like=next(iter(state.values()))).cpu()
        c = c.with_options(positions="learned")
    if to == "jax":
        jax.check_writable(c)
        _write_npz(keymap.write("jax", jax.RULES, state, heads=c.heads), target)
        return _eps_note("Google's JAX code", c) + _size_note(c)
    if to == "timm":
        timm.check_writable(c)
        found = keymap.write("timm", timm.RULES, state, heads=c.heads)
        _write_folder(found, target, {"config.json": timm.config_for(c, model.preprocess)})
        bare = target.suffix == ".safetensors" and HEADS.get(c.width) != c.heads
        heads = [f"a bare file does not say its heads: load it with heads={c.heads}."] if bare else []
        return _eps_note("timm's ViT", c) + heads
    rules, prefix = hf.write_rules(c)
    found = keymap.write("transformers", rules, hf.complete(c, state), prefix=prefix, heads=c.heads)
    return _write_hf(found, hf.config_for(c, model.labels), model.preprocess, target)


def _write_clip(model: Network, state: dict[str, Tensor], target: Path, to: str) -> list[str]:
    found, extra = clip.write(model, state, to)
    tokenizer, notes = model.tokenizer, []
    if to == "open_clip":
        _write_folder(found, target, extra, "open_clip_model.safetensors")
        if tokenizer is None or tokenizer.vocab != OPENAI_VOCAB:
            notes.append("open_clip has OpenAI's vocabulary only: give it numbers from vitlab's tokenizer.")
        return notes
    if tokenizer is None:
        notes.append("the model has no tokenizer, so none was written: transformers needs vocab.json and merges.txt.")
    elif tokenizer.pad_id != tokenizer.end_id:
        notes.append(f"transformers pads with end-of-text, this tokenizer with {tokenizer.pad_id}: both mean the same.")
    processor = hf.preprocessor_for(model.preprocess) if model.preprocess is not None else None
    if processor is None:
        notes.append("its preprocess has no counterpart in transformers, so none was written.")
    else:
        extra["preprocessor_config.json"] = {**processor, "image_processor_type": "CLIPImageProcessor"}
    _write_folder(found, target, extra)
    return notes


def _write_hf(state: dict[str, Tensor], config: dict[str, Any], preprocess: Any, target: Path) -> list[str]:
    extra = {"config.json": config}
    processor = hf.preprocessor_for(preprocess) if preprocess is not None else None
    if processor is not None:
        extra["preprocessor_config.json"] = processor
    _write_folder(state, target, extra)
    return [] if processor is not None else ["its preprocess has no counterpart in transformers, so none was written."]


def check(source: str | Path, target: str | Path, model: Network, *, changed: bool) -> list[Compared]:
    """The result read back by us, and source and result run by the library they belong to, where it is installed.

    `changed`: head or size are no longer the source's, so its numbers cannot be compared.
    """
    c = model.config
    images = torch.randn(2, c.channels, *model.input_size, generator=torch.Generator().manual_seed(0))
    told = _told(model) if Path(target).is_file() else {}
    with torch.inference_mode():
        again, _ = load_with_report(target, **told)
        rows = [_compared(f"{target} read back by vitlab", _answer(model.eval(), images), _answer(again, images))]
        place = locate(source)
        if changed:
            rows.append(Compared(str(source), None, "head or image size were changed, so it was not compared"))
        elif _foreign_folder(place):
            rows.append(_by_library(str(source), place, images, model))
        if _foreign_folder(Path(target)):
            rows.append(_by_library(str(target), Path(target), images, model))
        elif (Path(target) / "open_clip_config.json").is_file():
            rows.append(Compared(f"{target} in open_clip", None, "open_clip is not run by vitlab: not compared"))
        elif Path(target).suffix == ".npz":
            rows.append(Compared(f"{target} in JAX", None, "there is no library of JAX ViTs to compare with"))
    return rows


def _told(model: Network) -> dict[str, Any]:
    """What a bare file cannot say."""
    c, size = model.config, model.input_size
    if model.family == "mae":
        names = ("heads", "eps", "activation", "mask_ratio", "norm_pix")
        return {**{name: getattr(c, name) for name in names}, "image_size": size, "decoder.heads": c.decoder.heads}
    if model.family == "resnet":
        return {"image_size": size, "stride_in": c.stride_in}
    if model.family in STAGED:
        return {"image_size": size, **{name: getattr(c, name) for name in ("heads", "eps", "merge_eps", "activation")}}
    if model.family == "clip":
        both = {"image": (c.image.mlp.activation, c.image.norm.eps), "text": (c.text.activation, c.text.eps)}
        told = {
            f"{tower}.{name}": v
            for tower, pair in both.items()
            for name, v in zip(("activation", "eps"), pair, strict=True)
        }
        return {**told, "image.heads": c.image.heads, "text.heads": c.text.heads, "image_size": size}
    told = {"heads": c.heads, "image_size": size, "eps": c.norm.eps, "activation": c.mlp.activation}
    return told | ({"final_norm": c.norm.final_norm} if c.norm.final_norm != "auto" else {})


def _answer(model: Network, images: Tensor) -> Tensor:
    """Logits or features; of a masked autoencoder, what it paints where the same patches are hidden."""
    if model.family == "clip":
        return model(images, _texts(model)).logits_per_image
    return model(images, _noise(model, images)).prediction if model.family == "mae" else model(images)


def _noise(model: Network, images: Tensor) -> Tensor:
    height, width = images.shape[-2:]
    rows, columns = model.grid_of((height, width))
    return torch.rand(len(images), rows * columns, generator=torch.Generator().manual_seed(1))


def _texts(model: Network) -> Tensor:
    """Three texts of any tokens, each with its end."""
    c = model.config.text
    ids = torch.randint(c.end_id, (3, c.context), generator=torch.Generator().manual_seed(1))
    for text, end in zip(ids, (2, c.context // 2, c.context - 1), strict=True):
        text[end:] = c.end_id
    return ids


class Compared(NamedTuple):
    what: str
    difference: float | None  # largest, of logits or features; None: not compared
    remark: str = ""
    largest: float = 1.0  # logit or feature that the model gives

    @property
    def allowed(self) -> float:
        """The tolerance, which shrinks with values below 0.1."""
        return TOLERANCE * min(1.0, 10 * self.largest)

    @property
    def wrong(self) -> bool:
        """Whether values differ by more than is allowed. NaN is wrong."""
        return self.difference is not None and not self.difference <= self.allowed


def _compared(what: str, ours: Tensor, theirs: Tensor) -> Compared:
    return Compared(what, float((ours - theirs).abs().max()), largest=float(ours.abs().max()))


def _foreign_folder(path: Path) -> bool:
    return (path / "config.json").is_file() and not (path / native.CARD).exists()


def _by_library(name: str, folder: Path, images: Tensor, model: Network) -> Compared:
    config = read_json(folder / "config.json")
    library = "transformers" if "model_type" in config else "timm"
    what = f"{name} in {library}"
    try:
        module = importlib.import_module(library)
    except Exception as error:  # timm raises more than ImportError where its own needs are broken
        return Compared(what, None, f"{library} cannot be imported here ({type(error).__name__}): not compared")
    if config.get("model_type") == "vit_mae" and model.family != "mae":
        return Compared(what, None, "transformers masks the input of an MAE's encoder: not compared")
    beside = {"mae": lambda: {"noise": _noise(model, images)}, "clip": lambda: {"input_ids": _texts(model)}}
    more = beside.get(model.family, dict)()
    try:
        if library == "transformers":
            module.utils.logging.disable_progress_bar()
            kind = (config.get("architectures") or ["AutoModel"])[0]
            theirs = getattr(module, kind).from_pretrained(folder).eval()(pixel_values=images, **more)
            logits = getattr(theirs, "logits_per_image", getattr(theirs, "logits", None))
            tokens = getattr(theirs, "last_hidden_state", None)
        else:
            args = config.get("model_args", {})
            net = module.create_model(config["architecture"], num_classes=config.get("num_classes", 1000), **args)
            net.load_state_dict(load_file(folder / "model.safetensors"))
            logits, tokens = net.eval()(images), None
    except Exception as error:  # whatever the other library does not like, the file is written; say it and go on
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Compared(what, None, f"{library} could not run it ({first}): not compared")
    if logits is not None:
        return _compared(what, _answer(model, images), logits)
    if tokens is not None:
        tokens = tokens.flatten(2).transpose(1, 2) if tokens.ndim == 4 else tokens  # PVT v2 gives a map
        return _compared(what, model.forward_features(images), tokens)
    return Compared(what, None, "the model there gives neither logits nor features: not compared")


def _write_folder(
    state: dict[str, Tensor], target: Path, extra: dict[str, Any], weights: str = "model.safetensors"
) -> None:
    """`extra`: what stands beside the weights, as text or as values for JSON."""
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        native.write_whole(target, lambda path: save_file(state, path, metadata={"format": "pt"}))
        return
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file. Name a folder, or a .safetensors file for the weights alone.")
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        name: values if isinstance(values, str) else json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        for name, values in extra.items()
    }
    native.write_together(
        {
            target / weights: lambda path: save_file(state, path, metadata={"format": "pt"}),
            **{target / name: partial(_write_text, text) for name, text in texts.items()},
        }
    )


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _write_npz(state: dict[str, Tensor], target: Path) -> None:
    if target.suffix != ".npz":
        raise CheckpointError(f"{target}: a JAX checkpoint is one file: name it {target.name}.npz.")
    target.parent.mkdir(parents=True, exist_ok=True)

    def save(path: Path) -> None:
        with path.open("wb") as file:  # a file object, because np.savez adds .npz to a name
            np.savez(file, **{key: value.numpy() for key, value in state.items()})  # type: ignore[arg-type]

    native.write_whole(target, save)


def _eps_note(who: str, c: Any) -> list[str]:
    if c.norm.eps == 1e-6:
        return []
    return [f"{who} uses LayerNorm eps 1e-6, this network {c.norm.eps:g}: its numbers will differ a little there."]


def _size_note(c: Any) -> list[str]:
    if c.image_size[0] == c.image_size[1]:
        return []
    return [f"an .npz does not say its grid: load it with image_size={c.image_size}."]
