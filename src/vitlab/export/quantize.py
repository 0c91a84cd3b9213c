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
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitlab.errors import ExportError, UsageError
from vitlab.export.program import suppress_output
from vitlab.optional import require

if TYPE_CHECKING:
    from onnx import GraphProto

MODES = ("dynamic", "static")
INTEGER = ("MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "QuantizeLinear", "ConvInteger", "QLinearConv")


def to_int8(source: Path, target: Path, mode: str, calibration: Tensor | None = None) -> None:
    """`calibration` (B, C, H, W): preprocessed images, for static int8."""
    require("int8", "onnx", "onnxruntime")
    if mode not in MODES:
        raise UsageError(f"--int8 {mode!r} is not known: use {' or '.join(MODES)}.")
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static

    with suppress_output(), tempfile.TemporaryDirectory() as folder:
        model = onnx.load(source)
        del model.graph.value_info[:]  # types, which the quantizer would trust after it has changed them
        stripped = Path(folder) / "stripped.onnx"
        onnx.save(model, stripped, save_as_external_data=model.ByteSize() > 2**31 - 1)
        common: dict[str, Any] = dict(
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=[_product_kind(model.graph, mode)],
            nodes_to_exclude=_resized_positions(model.graph),
            extra_options={"MatMulConstBOnly": True},
        )
        if mode == "dynamic":
            quantize_dynamic(stripped, target, **common)
        else:
            if calibration is None or not len(calibration):
                raise UsageError("static int8 is calibrated on real images: give some with --data SOURCE.")
            quantize_static(
                stripped,
                target,
                _Reader(model.graph.input[0].name, calibration),  # type: ignore[arg-type]
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                calibrate_method=CalibrationMethod.MinMax,
                **common,
            )
    nodes = onnx.load(target, load_external_data=False).graph.node
    if not any(node.op_type in INTEGER for node in nodes):
        remedy = "convolutions need --int8 static." if mode == "dynamic" else "export it without --int8."
        raise ExportError(f"int8 {mode}: this network has nothing to quantize; {remedy}")


def _product_kind(graph: GraphProto, mode: str) -> str:
    """The operation to quantize. Not Gemm: that is the last layer, on one row per image."""
    has_products = any(node.op_type == "MatMul" for node in graph.node)
    return "Conv" if mode == "static" and not has_products else "MatMul"


def _resized_positions(graph: GraphProto) -> list[str]:
    """Products with a constant that is not a matrix, as where positions are resized: no int8 kernel takes them."""
    other = {constant.name for constant in graph.initializer if len(constant.dims) != 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and other & set(node.input)]


class _Reader:
    """Batches for ONNX Runtime's calibrator."""

    def __init__(self, name: str, images: Tensor, batch: int = 8):
        self.batches: Iterator[dict[str, np.ndarray]] = ({name: part.numpy()} for part in images.split(batch))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)
