"""Several ONNX graphs of one model, with one file of weights for all of them: what the browser loads.

Weights that half precision holds exactly are stored in it and cast when the graph is loaded, so no number changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from vitlab.errors import ExportError
from vitlab.export.onnx import OPSET
from vitlab.export.program import first_line, suppress_output
from vitlab.optional import require

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

SMALL = 256  # bytes; smaller constants stay in the graph
ALIGNMENT = 64


def to_onnx(
    module: nn.Module, example: Mapping[str, Tensor], outputs: Sequence[str], any_length: str | None = None
) -> ModelProto:
    """An ONNX model whose inputs are those of `example`, in the order of the module's arguments. `any_length`: the
    input, a list of numbers, that may be of another length.
    """
    require("page", "onnx", "onnxscript")
    shapes: Any = None
    if any_length is not None:
        shapes = tuple({0: Dim("count", min=1, max=2**16)} if name == any_length else {} for name in example)
    names: dict[str, Any] = dict(input_names=list(example), output_names=list(outputs))
    try:
        with torch.no_grad(), suppress_output():
            program = torch.export.export(module, tuple(example.values()), dynamic_shapes=shapes, strict=False)
            exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, verbose=False, **names)
    except Exception as error:  # torch raises many kinds here
        raise ExportError(f"this network cannot be exported for a page: {first_line(error)}") from error
    assert exported is not None
    return exported.model_proto


def save_graphs(graphs: Mapping[str, ModelProto], folder: Path, weights_name: str) -> list[Path]:
    """Write NAME.onnx for each graph and their weights, each tensor once, as `weights_name`."""
    weights, places = bytearray(), dict[bytes, int]()
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
    """Move a constant into `weights`; what it is stored as, and made of again when the graph is loaded: float32 as half
    precision, where that is exact, and a matrix as its transpose, where another graph has stored that.
    """
    from onnx import TensorProto, helper, numpy_helper

    values = numpy_helper.to_array(tensor)
    if values.nbytes < SMALL:
        return
    nodes = []
    if values.ndim == 2 and _digest(_compact(values)) not in places and _digest(_compact(values.T)) in places:
        values = values.T
        nodes.append(helper.make_node("Transpose", [f"{tensor.name}.T"], [tensor.name], perm=[1, 0]))
        tensor.name = f"{tensor.name}.T"
    values, kind = _compact(values), tensor.data_type
    if values.dtype == np.float16 and kind == TensorProto.FLOAT:
        nodes.insert(0, helper.make_node("Cast", [f"{tensor.name}.half"], [tensor.name], to=kind))
        tensor.name, kind = f"{tensor.name}.half", TensorProto.FLOAT16
    for node in reversed(nodes):
        model.graph.node.insert(0, node)
    digest, content = _digest(values), values.tobytes()
    if digest not in places:
        weights.extend(b"\0" * (-len(weights) % ALIGNMENT))
        places[digest] = len(weights)
        weights.extend(content)
    name = tensor.name
    tensor.Clear()
    tensor.name, tensor.data_type = name, kind
    tensor.dims.extend(values.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", weights_name), ("offset", places[digest]), ("length", len(content))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, str(value)


def _compact(values: np.ndarray) -> np.ndarray:
    """In half precision, if no value changes."""
    if values.dtype != np.float32:
        return values
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    return halves if (halves.astype(np.float32) == values).all() else values


def _digest(values: np.ndarray) -> bytes:
    return hashlib.sha256(f"{values.dtype} {values.shape}".encode() + values.tobytes()).digest()


def _strip_origin(model: ModelProto) -> None:
    """Drop the source file and line of every operation."""
    for part in (model, model.graph, *model.graph.node, *model.graph.initializer):
        part.doc_string = ""
        del part.metadata_props[:]
    del model.graph.value_info[:]
