"""int8 by ONNX Runtime's own quantiser: a quarter of the size, and faster where matrix products are what takes time.

dynamic   weights are rounded now, activations anew for every batch: nothing to prepare, and the safer one for a ViT
static    activations have a fixed scale, found by looking at real pictures; the only way for convolutions

The last layer stays in float32, and so do the first convolutions of a network whose work is matrix products: there
int8 costs much and saves little. Weights have 7 bits and a scale for each output: with 8 the sums of two products
overflow 16 bits, quietly, on CPUs that lack VNNI.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitlab.export.onnx import need
from vitlab.export.quiet import quiet

WAYS = ("dynamic", "static")
INTEGER = ("MatMulInteger", "DynamicQuantizeMatMul", "QLinearMatMul", "QuantizeLinear", "ConvInteger", "QLinearConv")


def to_int8(source: Path, target: Path, way: str, calibration: Tensor | None = None) -> int:
    """Write `target`; how many of its steps are in integers. `calibration` (B, C, H, W): prepared real pictures."""
    need("onnx", "onnxruntime")
    if way not in WAYS:
        raise ValueError(f"--int8 {way!r} is not known: use {' or '.join(WAYS)}.")
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_dynamic, quantize_static

    common: dict[str, Any] = dict(per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        plain = _without_types(source, Path(folder) / "plain.onnx")
        common |= dict(op_types_to_quantize=_products(plain, way), extra_options={"MatMulConstBOnly": True})
        common |= dict(nodes_to_exclude=_tables(plain))
        if way == "dynamic":
            quantize_dynamic(plain, target, **common)
        else:
            if calibration is None or not len(calibration):
                raise ValueError("static int8 is calibrated on real pictures: give some with --data SOURCE.")
            reader: Any = _Reader(_input_of(plain), calibration)
            quantize_static(
                *(plain, target, reader),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                calibrate_method=CalibrationMethod.MinMax,
                **common,
            )
    steps = integer_steps(target)
    if not steps:
        raise ValueError(
            f"int8 {way}: there is nothing in this network to make integers of; "
            + ("convolutions need --int8 static." if way == "dynamic" else "export it without --int8.")
        )
    return steps


def _products(path: Path, way: str) -> list[str]:
    """What becomes integers. Not Gemm: it stands last, on one row per picture."""
    import onnx

    steps = [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]
    return ["Conv"] if way == "static" and "MatMul" not in steps else ["MatMul"]


def _tables(path: Path) -> list[str]:
    """Products with a constant that is no matrix: positions that are resized in the graph, which no kernel takes."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    other = {held.name for held in graph.initializer if len(held.dims) != 2}
    return [node.name for node in graph.node if node.op_type == "MatMul" and other & set(node.input)]


def integer_steps(path: Path) -> int:
    import onnx

    return sum(node.op_type in INTEGER for node in onnx.load(path, load_external_data=False).graph.node)


def _without_types(source: Path, target: Path) -> Path:
    """The exporter notes a type at every value; the quantiser takes them for true after it has changed them."""
    import onnx

    model = onnx.load(source)
    del model.graph.value_info[:]
    onnx.save(model, target, save_as_external_data=model.ByteSize() > 2**31 - 1)
    return target


def _input_of(path: Path) -> str:
    import onnx

    return onnx.load(path, load_external_data=False).graph.input[0].name


class _Reader:
    """Hands the calibrator one batch after another."""

    def __init__(self, name: str, images: Tensor, batch: int = 8):
        self.batches: Iterator[dict[str, np.ndarray]] = ({name: part.numpy()} for part in images.split(batch))

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.batches, None)
