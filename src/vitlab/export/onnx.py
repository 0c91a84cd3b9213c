"""ONNX: the network as a graph that ONNX Runtime and many other programs run. The batch size is always dynamic.

With a dynamic image size, positions are resized inside the graph (layers/positions.py, cubic_weights).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitlab.errors import ExportError
from vitlab.export.metadata import KEY, ExportMetadata
from vitlab.export.program import first_line, suppress_output
from vitlab.export.wrapper import INPUTS, OUTPUTS, in_a_row
from vitlab.optional import require

if TYPE_CHECKING:
    from onnx_ir import Model

OPSET = 20


def save_onnx(program: ExportedProgram, path: Path, metadata: ExportMetadata) -> None:
    """Above 1.5 GiB, torch's threshold (ONNX's own is 2 GB), the weights are stored in PATH.data."""
    require("an ONNX file", "onnx", "onnxscript")
    outputs = metadata.fields if metadata.gives == "dense" else [OUTPUTS[metadata.gives]]
    names: dict[str, Any] = dict(input_names=[INPUTS[metadata.gives]], output_names=outputs)
    with suppress_output():
        translations: dict[Any, Any] = {torch.ops.aten.sort.stable: _stable_sort}
        exported = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, verbose=False, custom_translation_table=translations, **names
        )
        assert exported is not None
        _strip_origin(exported.model)
        exported.model.metadata_props[KEY] = metadata.to_json()
        exported.save(path)


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Missing in torch's exporter. ONNX's TopK returns the first of equal values first, so it is stable."""
    import onnxscript

    op: Any = onnxscript.opset20
    count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)  # (1,)
    return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)


def _strip_origin(model: Model) -> None:
    """Drop the source file and line of every operation: a tenth of a small model's size."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for part in (model, model.graph, *model.graph.inputs, *model.graph.initializers.values()):
        part.metadata_props.clear()


def set_metadata(path: Path, metadata: ExportMetadata) -> None:
    """Restore the metadata that the quantizer drops."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {KEY: metadata.to_json()})
    onnx.save(model, path)


def external_data_path(path: Path) -> Path:
    """File with the weights of a large model."""
    return path.with_name(path.name + ".data")


class Session:
    """ONNX Runtime on the CPU with torch's number of threads; tensors in, tensors out."""

    def __init__(self, path: Path, *, arena: bool = True):
        """`arena`: keep the memory of a batch for the next one."""
        require("an ONNX file", "onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = arena
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ExportError(f"{path}: ONNX Runtime cannot read it: {first_line(error)}") from None
        self.input = self.session.get_inputs()[0].name

    @property
    def metadata(self) -> dict[str, str]:
        return self.session.get_modelmeta().custom_metadata_map

    def outputs(self, x: Tensor) -> tuple[Tensor, ...]:
        values = self.session.run(None, {self.input: x.detach().cpu().contiguous().numpy()})
        return tuple(torch.from_numpy(value) for value in values)

    def __call__(self, x: Tensor) -> Tensor:
        outputs = self.outputs(x)
        return outputs[0] if len(outputs) == 1 else in_a_row(outputs)
