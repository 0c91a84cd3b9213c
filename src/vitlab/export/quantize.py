"""int8 by ONNX Runtime's quantizer: a quarter of the size, and faster where matrix products dominate.

dynamic   weights are rounded once, activations for every batch: needs no calibration, and is safer for a ViT
static    activations have a fixed scale, calibrated on real images; the only mode for convolutions

The last layer stays in float32, and so do the first convolutions of a transformer: there int8 costs accuracy and saves
little. Weights have 7 bits and a scale per output channel: with 8 bits the sum of two products silently overflows
16 bits on CPUs without VNNI.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitlab.errors import ExportError
from vitlab.export.onnx import require
from vitlab.export.program import suppress_output

MODES = ("dynamic", "static")
INTEGER = ("MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "QuantizeLinear", "ConvInteger", "QLinearConv")


def to_int8(source: Path, target: Path, mode: str, calibration: Tensor | None = None) -> int:
    """Write `target` and return its number of integer operations. `calibration` (B, C, H, W): preprocessed images."""
    require("onnx", "onnxruntime")
    if mode not in MODES:
        raise ExportError(f"--int8 {mode!r} is not known: use {' or '.join(MODES)}.")
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static

    common: dict[str, Any] = dict(per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    with suppress_output(), tempfile.TemporaryDirectory() as folder:
        stripped = _without_types(source, Path(folder) / "stripped.onnx")
        common |= dict(op_types_to_quantize=_products(stripped, mode), extra_options={"MatMulConstBOnly": True})
        common |= dict(nodes_to_exclude=_resized_positions(stripped))
        if mode == "dynamic":
            quantize_dynamic(stripped, target, **common)
        else:
            if calibration is None or not len(calibration):
                raise ExportError("static int8 is calibrated on real images: give some with --data SOURCE.")
            reader: Any = _Reader(_input_name(stripped), calibration)
            quantize_static(
                *(stripped, target, reader),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                calibrate_method=CalibrationMethod.MinMax,
                **common,
            )
    steps = integer_steps(target)
    if not steps:
        raise ExportError(
            f"int8 {mode}: this network has nothing to quantize; "
            + ("convolutions need --int8 static." if mode == "dynamic" else "export it without --int8.")
        )
    return steps


def _products(path: Path, mode: str) -> list[str]:
    """Operations to quantize. Not Gemm: that is the last layer, on one row per image."""
    import onnx

    steps = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    return ["Conv"] if mode == "static" and "MatMul" not in steps else ["MatMul"]


def _resized_positions(path: Path) -> list[str]:
    """Products with a constant that is not a matrix, as where positions are resized: no int8 kernel takes them."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    other = {held.name for held in graph.initializer if len(held.dims) != 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and other & set(node.input)]


def integer_steps(path: Path) -> int:
    import onnx

    return sum(node.op_type in INTEGER for node in onnx.load(path, load_external_data=False).graph.node)


def _without_types(source: Path, target: Path) -> Path:
    """Drop the exporter's type notes, which the quantizer would trust after it has changed the types."""
    import onnx

    model = onnx.load(source)
    del model.graph.value_info[:]
    onnx.save(model, target, save_as_external_data=model.ByteSize() > 2**31 - 1)
    return target


def _input_name(path: Path) -> str:
    import onnx

    return onnx.load(path, load_external_data=False).graph.input[0].name


class _Reader:
    """Batches for ONNX Runtime's calibrator."""

    def __init__(self, name: str, images: Tensor, batch: int = 8):
        self.batches: Iterator[dict[str, np.ndarray]] = ({name: part.numpy()} for part in images.split(batch))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)
