"""From a model to a file that answers as the model does: fold, export, perhaps int8, compare; then keep it or not.

verdict = export_model(model, "model.onnx", int8="dynamic", source="cifar10")
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitlab.export.about import about_model
from vitlab.export.fold import folded
from vitlab.export.onnx import beside, save_onnx, set_about
from vitlab.export.opened import ENDINGS, open_export
from vitlab.export.pictures import pictures, prepared
from vitlab.export.program import save_program, to_program
from vitlab.export.quantize import WAYS, to_int8
from vitlab.export.tower import Tower, example, open_sides, what_it_gives
from vitlab.export.verify import AGREEMENT, TOLERANCE, Verdict, verify

CALIBRATION = 64  # pictures


class RefusedError(ValueError):
    """The file does not answer as the model does, and was not kept."""

    def __init__(self, path: Path, verdict: Verdict):
        self.verdict = verdict
        super().__init__(f"{path}: not kept, because it differs from the model: {'; '.join(verdict.problems)}.")


def export_model(
    model: Any,
    path: str | Path,
    *,
    int8: str | None = None,
    source: str | None = None,
    data_path: str | None = None,
    images: int = 128,
    dynamic_size: bool = False,
    reducer: str | None = None,
    features: bool = False,
    text: bool = False,
    tolerance: float = TOLERANCE,
    agreement: float = AGREEMENT,
    force: bool = False,
) -> Verdict:
    """Write model.onnx or model.pt2, by its name. `source`: the pictures to compare on (and to calibrate static int8
    with, which needs it); without it parts of photographs. What differs raises RefusedError, and what was at `path`
    before stays; `force` keeps it.
    """
    path = Path(path).expanduser()
    _check(path, int8, source, dynamic_size, reducer, text)
    gives = what_it_gives(model, features=features, text=text)
    sides = open_sides(model) if dynamic_size else None
    stride = 1 if sides is None else sides.stride
    about = about_model(model, gives, dynamic_size=dynamic_size, stride=stride, reducer=reducer)
    channels = model.config.channels
    judged = pictures(images, channels=channels, source=source, path=data_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as folder:
        made = Path(folder) / path.name
        plain = made if int8 is None else Path(folder) / "float32" / path.name  # a large one has its weights beside it
        plain.parent.mkdir(exist_ok=True)
        program = to_program(Tower(folded(model), gives, reducer), example(model, gives), sides)
        if path.suffix == ".pt2":
            save_program(program, plain, about)
        else:
            save_onnx(program, plain, about)
        del program
        if int8 is not None:
            calibration = None
            if int8 == "static":
                seen = pictures(CALIBRATION, channels=channels, source=source, path=data_path, part="calibrate")
                calibration = prepared(model.preprocess, seen)
            to_int8(plain, made, int8, calibration)
            set_about(made, replace(about, int8=int8))
        verdict = verify(model, open_export(made), judged, tolerance=tolerance, agreement=agreement)
        if verdict.problems and not force:
            raise RefusedError(path, verdict)
        beside(path).unlink(missing_ok=True)
        if beside(made).is_file():
            shutil.move(beside(made), beside(path))
        made.replace(path)
    return verdict


def _check(
    path: Path, int8: str | None, source: str | None, dynamic_size: bool, reducer: str | None, text: bool
) -> None:
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path}: the name must end in {' or '.join(ENDINGS)}, which says what is written.")
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file.")
    if int8 is not None and int8 not in WAYS:
        raise ValueError(f"--int8 {int8!r} is not known: use {' or '.join(WAYS)}.")
    if int8 is not None and path.suffix != ".onnx":
        raise ValueError("int8 is written as ONNX: name the file model.onnx.")
    if int8 == "static" and text:
        raise ValueError("static int8 is calibrated on pictures: use --int8 dynamic for a text tower.")
    if int8 == "static" and source is None:
        raise ValueError(
            "static int8 is calibrated on pictures of the kind that it will see: name them, --int8 static --data "
            "FOLDER (or cifar10, digits, ...); --int8 dynamic needs none."
        )
    if text and dynamic_size:
        raise ValueError("a text has no image size: leave --dynamic-size out.")
    if text and reducer is not None:
        raise ValueError("a reducer takes away patches of a picture, and a text has none: leave --reducer out.")
