"""Any checkpoint -> vitlab's own folder or another library's files, and a check that the numbers came along."""

from __future__ import annotations

import copy
import importlib
import json
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints import native
from vitlab.checkpoints.families import FAMILIES, family_of
from vitlab.checkpoints.family import Written
from vitlab.checkpoints.files import read_json, read_tensors, save_tensors
from vitlab.checkpoints.keymap import Options, State
from vitlab.checkpoints.load import ModelOrName, load_with_report, locate
from vitlab.checkpoints.report import Report
from vitlab.errors import CheckpointError, UsageError
from vitlab.layers.lora import merged
from vitlab.models.base import Capability, Network, unwrap
from vitlab.models.dense import DenseOutput
from vitlab.models.task import CLASSES
from vitlab.optional import missing_package
from vitlab.text.tokenizer import Tokenizer

WRITERS = dict.fromkeys(target for family in FAMILIES.values() for target in family.writers)
TARGETS = ("native", *WRITERS)
TOLERANCE = 1e-4  # of logits, between two libraries in float32


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: what became of every key, and how far the results are apart, if that was checked."""

    report: Report
    checks: list[Compared]


def convert(
    source: ModelOrName,
    target: str | Path,
    to: str = "native",
    *,
    check: bool = False,
    force: bool = False,
    tokenizer: str | Path | None = None,
    **load_options: Any,
) -> Conversion:
    """Write a model, or the checkpoint of this name or path, in the layout of vitlab ("native") or another library.

    `check` compares the numbers, also in the other library where it is installed; `force` overwrites the target;
    `tokenizer` is added to a CLIP that has none; further options are `load`'s.
    """
    target = Path(target).expanduser()
    _check_layout(to)
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already. Name another place, or pass --force to write over it.")
    if isinstance(source, str | PathLike):
        source = fspath(source)
        model, report = load_with_report(source, **load_options)
    else:
        model = unwrap(source)
        report = Report(model.family, "native")
    if tokenizer is not None:
        _add_tokenizer(model, Path(tokenizer))
    elif Capability.TEXT in model.capabilities and model.tokenizer is None:
        report.notes.append("it came without its tokenizer; --tokenizer FILE adds one, so that it can read text.")
    report.notes += write(model, target, to)
    changed = any(row.status in ("new", "resized") for row in report.rows)
    checkpoint = source if isinstance(source, str) else None
    return Conversion(report, compare(checkpoint, target, model, changed=changed) if check else [])


def _check_layout(to: str) -> None:
    if to not in TARGETS:
        raise UsageError(f"--to {to!r} is not known: use {', '.join(TARGETS)}.")


def _add_tokenizer(model: Network, path: Path) -> None:
    """With the model's context length and padding."""
    if Capability.TEXT not in model.capabilities:
        raise UsageError(f"--tokenizer is for a CLIP; this is of the family {model.family}.")
    c = model.config.text
    model.tokenizer = Tokenizer.read(path, context=c.context, pad_id=c.pad_id)


def write(model: Network, target: str | Path, to: str) -> list[str]:
    """Write a model in the named layout; returns notes on what the other library will do differently."""
    target, model = Path(target), merged(model)
    _check_layout(to)
    if to == "native":
        native.save(model, target)
        return []
    if model.task != CLASSES:
        raise UsageError(
            f"the outputs of this model are {model.task.description}, which the formats of other libraries cannot "
            "say: use --to native, or vitlab export."
        )
    writers = family_of(model.family).writers
    if to not in writers:
        choices = " or ".join([", ".join(writers), "native"] if writers else ["native"])
        encoder = ", or its encoder alone, vitlab convert --encoder" if model.config.wraps_encoder else ""
        raise UsageError(f"a {type(model).__name__} is not written as {to}: use --to {choices}{encoder}.")
    state = {key: value.detach().cpu() for key, value in model.state_dict().items()}
    notes: list[str] = []
    if model.input_size != model.config.image_size and not writers[to].any_size(model.config):
        model, state = _at_input_size(model, state)
        size = "x".join(map(str, model.config.image_size))
        notes.append(f"positions were resized to {size}, the size that images are read at.")
    written = writers[to].write(model, state)
    if written.weights.endswith(".npz"):
        _write_npz(written.tensors, target)
        return notes + written.notes
    _write_folder(written, target)
    return notes + written.notes + (written.bare_notes if _is_bare(target) else [])


def _at_input_size(model: Network, state: State) -> tuple[Network, State]:
    """The same network with its position tables resized to the images that it reads."""
    again = copy.copy(model)
    again.config = model.config.with_options(image_size=model.input_size)
    for key in state:
        if key.endswith("positions.table"):
            positions = model.get_submodule(key.removesuffix(".table"))
            grid = again.config.encoder.table_grid(key)
            state[key] = positions(grid, like=state[key]).detach().cpu()
    return again, state


def compare(source: str | Path | None, target: str | Path, model: Network, *, changed: bool) -> list[Compared]:
    """The result read back by us, and source and result run by the library they belong to, where it is installed.

    `changed`: head or size are no longer the source's, so its numbers cannot be compared. None: there is no source.
    """
    images = torch.randn(2, model.config.channels, *model.input_size, generator=torch.Generator().manual_seed(0))
    options = _bare_options(model) if Path(target).is_file() else {}
    with torch.inference_mode():
        again, _ = load_with_report(target, **options)
        rows = [_compared(f"{target} read back by vitlab", _answer(model.eval(), images), _answer(again, images))]
        place = locate(source) if source is not None else None
        if changed:
            rows.append(Compared(str(source), None, "head or image size were changed, so it was not compared"))
        elif place is not None and _foreign_folder(place):
            rows.append(_by_library(str(source), place, images, model))
        if _foreign_folder(Path(target)):
            rows.append(_by_library(str(target), Path(target), images, model))
        elif (Path(target) / "open_clip_config.json").is_file():
            rows.append(Compared(f"{target} in open_clip", None, "open_clip is not run by vitlab: not compared"))
        elif Path(target).suffix == ".npz":
            rows.append(Compared(f"{target} in JAX", None, "there is no library of JAX ViTs to compare with"))
    return rows


def _bare_options(model: Network) -> Options:
    """What a bare file does not show."""
    options = {name: model.config.option(name) for name in family_of(model.family).bare_options}
    return {**options, "image_size": model.input_size}


def _answer(model: Network, images: Tensor) -> Tensor:
    """Logits, features or whatever the family compares; of a DenseOutput all numbers in a row."""
    family = family_of(model.family)
    output = model(images, *family.check_inputs(model, images).values())
    return _in_a_row(output) if isinstance(output, DenseOutput) else family.check_output(output)


def _in_a_row(output: DenseOutput) -> Tensor:
    return torch.cat([value.flatten() for value in output.tensors().values()])


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
        reason = missing_package(error).rstrip(".") or f"{library} cannot be imported here ({type(error).__name__})"
        return Compared(what, None, f"{reason}: not compared")
    family = next((f for f in FAMILIES.values() if config.get("model_type") in f.model_types), None)
    if family is not None and family.name != model.family:
        return Compared(what, None, f"{library} runs the {family.name} that this is a part of: not compared")
    more = family_of(model.family).check_inputs(model, images)
    theirs: Any = None
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
            net.load_state_dict(read_tensors(folder / "model.safetensors"))
            logits, tokens = net.eval()(images), None
    except Exception as error:  # whatever the other library does not like, the file is written; say it and go on
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Compared(what, None, f"{library} could not run it ({first}): not compared")
    if theirs is not None and family is not None and family.check_theirs is not None:
        return _compared(what, _answer(model, images), _in_a_row(family.check_theirs(theirs)))
    if logits is not None:
        return _compared(what, _answer(model, images), logits)
    if tokens is not None:
        tokens = tokens.flatten(2).transpose(1, 2) if tokens.ndim == 4 else tokens  # PVT v2 gives a map
        return _compared(what, model.forward_features(images), tokens)
    return Compared(what, None, "the model there gives neither logits nor features: not compared")


def _is_bare(target: Path) -> bool:
    return target.suffix == ".safetensors"


def _write_folder(written: Written, target: Path) -> None:
    save = partial(save_tensors, written.tensors)
    if _is_bare(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        native.write_whole(target, save)
        return
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file. Name a folder, or a .safetensors file for the weights alone.")
    target.mkdir(parents=True, exist_ok=True)
    texts = {
        name: values if isinstance(values, str) else json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        for name, values in written.files.items()
    }
    native.write_together(
        {
            target / written.weights: save,
            **{target / name: partial(_write_text, text) for name, text in texts.items()},
        }
    )


def _write_text(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _write_npz(state: State, target: Path) -> None:
    if target.suffix != ".npz":
        raise UsageError(f"{target}: a JAX checkpoint is one file: name it {target.name}.npz.")
    target.parent.mkdir(parents=True, exist_ok=True)

    def save(path: Path) -> None:
        with path.open("wb") as file:  # a file object, because np.savez adds .npz to a name
            np.savez(file, **{key: value.numpy() for key, value in state.items()})  # type: ignore[arg-type]

    native.write_whole(target, save)
