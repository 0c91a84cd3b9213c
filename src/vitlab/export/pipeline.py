"""Export a model: fold, export, optionally quantize to int8, compare with the model, then keep or reject the file.

result = export_model(model, "model.onnx", int8="dynamic", compare=Comparison(source="cifar10"))
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import ExportError, UsageError
from vitlab.export.fold import fold
from vitlab.export.loader import SUFFIXES, open_export
from vitlab.export.metadata import OutputKind, model_metadata
from vitlab.export.onnx import external_data_path, save_onnx, set_metadata
from vitlab.export.program import save_program, to_program
from vitlab.export.quantize import MODES, to_int8
from vitlab.export.samples import preprocess_batch
from vitlab.export.verify import Comparison, Verification, verify
from vitlab.export.wrapper import ExportWrapper, dense_fields, dynamic_size_range, example_input, output_kind

CALIBRATION = 64  # images
NO_CALIBRATION = (
    "static int8 is calibrated on images like those of its later use: name them, --int8 static --data FOLDER (or "
    "cifar10, digits, ...); --int8 dynamic needs none."
)


class ExportMismatchError(ExportError):
    """The outputs of the file differ from the model's, so the file was not kept."""

    def __init__(self, path: Path, result: Verification):
        self.result = result
        super().__init__(f"{path}: not kept, because it differs from the model: {'; '.join(result.problems)}.")


def export_model(
    model: ModelOrName,
    path: str | Path,
    *,
    gives: OutputKind | None = None,
    int8: str | None = None,
    dynamic_size: bool = False,
    reducer: str | None = None,
    compare: Comparison | None = None,
    force: bool = False,
    **load_options: Any,
) -> Verification:
    """Write model.onnx or model.pt2, by the suffix of `path`. `model` may be a checkpoint's name, for vitlab.load.

    `gives`: logits where the model has classes, else features; "text" exports the text tower of a CLIP. Static int8 is
    calibrated on `compare.source`. If the outputs differ, ExportMismatchError is raised and an older file at `path`
    stays; `force` keeps the new file. With device= the model is run there; the file is made and runs on the CPU.
    """
    model = as_network(model, **load_options)
    path, compare = Path(path).expanduser(), compare or Comparison()
    _check(path, int8, compare.source, dynamic_size, reducer, gives)
    gives = output_kind(model, gives)
    size_range = dynamic_size_range(model) if dynamic_size else None
    stride = 1 if size_range is None else size_range.stride
    if gives == "dense" and (int8 or reducer):
        raise UsageError(
            "networks for pixels or objects are exported in float32 with all tokens: no --int8, --reducer."
        )
    names = dense_fields(model) if gives == "dense" else []
    options = dict(fields=names, dynamic_size=dynamic_size, stride=stride, reducer=reducer)
    metadata = model_metadata(model, gives, **options)
    channels = model.config.channels
    images = compare.sample(channels)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        written = Path(folder) / path.name
        float32 = written if int8 is None else Path(folder) / "float32" / path.name  # with its external weights
        float32.parent.mkdir(exist_ok=True)
        program = to_program(ExportWrapper(fold(model).cpu(), gives, reducer), example_input(model, gives), size_range)
        if path.suffix == ".pt2":
            save_program(program, float32, metadata)
        else:
            save_onnx(program, float32, metadata)
        del program
        if int8 is not None:
            calibration = None
            if int8 == "static":
                calibrated_on = replace(compare, images=CALIBRATION).sample(channels, calibrate=True)
                calibration = preprocess_batch(model, calibrated_on)
            to_int8(float32, written, int8, calibration)
            set_metadata(written, replace(metadata, int8=int8))
        exported = open_export(written)
        result = verify(model, exported, images, tolerance=compare.tolerance, agreement=compare.agreement)
        if result.problems and not force:
            raise ExportMismatchError(path, result)
        external_data_path(path).unlink(missing_ok=True)
        if external_data_path(written).is_file():
            shutil.move(external_data_path(written), external_data_path(path))
        written.replace(path)
    return result


def _check(
    path: Path, int8: str | None, source: str | None, dynamic_size: bool, reducer: str | None, gives: OutputKind | None
) -> None:
    text, static = gives == "text", int8 == "static"
    for refused, message in (
        (path.suffix not in SUFFIXES, f"{path}: the name must end in {' or '.join(SUFFIXES)}, which sets the format."),
        (path.is_dir(), f"{path} is a folder: name a file."),
        (int8 not in (None, *MODES), f"--int8 {int8!r} is not known: use {' or '.join(MODES)}."),
        (int8 and path.suffix != ".onnx", "int8 is written as ONNX: name the file model.onnx."),
        (static and text, "static int8 is calibrated on images: use --int8 dynamic for a text tower."),
        (static and source is None, NO_CALIBRATION),
        (text and dynamic_size, "a text tower has no image size: leave --dynamic-size out."),
        (text and reducer, "a reducer removes image patches, which a text tower does not have: leave --reducer out."),
    ):
        if refused:
            raise UsageError(message)
