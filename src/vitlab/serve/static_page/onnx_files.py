"""Several ONNX graphs of one model, with one file of weights for all of them: what the browser loads.

Weights that half precision holds exactly are stored in it and cast when the graph is loaded, so no number changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from vitlab.errors import ExportError
from vitlab.export.onnx import OPSET, require
from vitlab.export.program import first_line, suppress_output

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

SMALL = 256  # bytes; smaller constants stay in the graph
ALIGNMENT = 64


def to_onnx(module: nn.Module, example: Mapping[str, Tensor], outputs: list[str], dynamic: str | None = None) -> Any:
    """An ONNX model whose inputs are named as in `example`; the last axis of the input `dynamic` has any length."""
    require("onnx", "onnxscript")
    shapes: Any = {name: {} for name in example}
    if dynamic is not None:
        shapes[dynamic] = {example[dynamic].ndim - 1: Dim("count", min=1, max=2**16)}
    try:
        with torch.no_grad(), suppress_output():
            program = torch.export.export(module.eval(), (), dict(example), dynamic_shapes=shapes, strict=False)
            exported = torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=list(example),
                output_names=outputs,
                verbose=False,
            )
    except Exception as error:  # torch raises many kinds here
        raise ExportError(f"this network cannot be exported for a page: {first_line(error)}") from error
    assert exported is not None
    return exported.model_proto


def save_graphs(graphs: Mapping[str, ModelProto], folder: Path, weights_name: str) -> list[Path]:
    """Write NAME.onnx for each graph and their weights, each tensor once, as `weights_name`."""
    weights, places = bytearray(), {}
    files = []
    for name, graph in graphs.items():
        _strip_origin(graph)
        for tensor in list(graph.graph.initializer):
            _store_outside(graph, tensor, weights, places, weights_name)
        file = folder / f"{name}.onnx"
        file.write_bytes(graph.SerializeToString())
        files.append(file)
    (folder / weights_name).write_bytes(weights)
    return [*files, folder / weights_name]


def _store_outside(
    model: ModelProto, tensor: TensorProto, weights: bytearray, places: dict[bytes, int], weights_name: str
) -> None:
    from onnx import TensorProto, helper, numpy_helper

    values = numpy_helper.to_array(tensor)
    if values.nbytes < SMALL:
        return
    if values.dtype == np.float32 and (values.astype(np.float16).astype(np.float32) == values).all():
        stored = f"{tensor.name}.half"
        model.graph.node.insert(0, helper.make_node("Cast", [stored], [tensor.name], to=TensorProto.FLOAT))
        tensor.name, tensor.data_type, values = stored, TensorProto.FLOAT16, values.astype(np.float16)
    content = values.tobytes()
    digest = hashlib.sha256(content).digest()
    if digest not in places:
        weights.extend(b"\0" * (-len(weights) % ALIGNMENT))
        places[digest] = len(weights)
        weights.extend(content)
    tensor.ClearField("raw_data")
    tensor.ClearField("float_data")
    tensor.ClearField("int64_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in (("location", weights_name), ("offset", places[digest]), ("length", len(content))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def _strip_origin(model: ModelProto) -> None:
    """Drop the source file and line of every operation."""
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    del model.graph.value_info[:]
