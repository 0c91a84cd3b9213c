"""ONNX: the network as a graph that ONNX Runtime and many other programs run. The batch is always left open.

Positions are resized inside the graph where the image size is left open (layers/positions.py, cubic_weights).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitlab.export.about import KEY, About
from vitlab.export.quiet import quiet
from vitlab.export.tower import INPUTS, OUTPUTS

OPSET = 20


def need(*packages: str) -> None:
    for name in packages:
        if find_spec(name) is None:
            raise ValueError(f"this needs {name}, which is not installed: pip install 'vitlab[export]'.")


def save_onnx(program: ExportedProgram, path: Path, about: About) -> None:
    """Above 1.5 GiB, where torch draws the line (ONNX itself at 2 GB), the weights lie in PATH.data beside it."""
    need("onnx", "onnxscript")
    names: dict[str, Any] = dict(input_names=[INPUTS[about.gives]], output_names=[OUTPUTS[about.gives]])
    with quiet():
        more: dict[Any, Any] = {torch.ops.aten.sort.stable: _stable_sort}
        found = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, verbose=False, custom_translation_table=more, **names
        )
        assert found is not None
        _forget_origin(found.model)
        found.model.metadata_props[KEY] = about.to_json()
        found.save(path)


def _stable_sort(self: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """torch's exporter has none. Among equals, ONNX's TopK takes the first one first, so it is stable."""
    import onnxscript

    op: Any = onnxscript.opset20
    count = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)  # (1,)
    return op.TopK(self, count, axis=dim, largest=int(descending), sorted=1)


def _forget_origin(model: Any) -> None:
    """The exporter notes at every step which line of whose file it comes from: a tenth of a small model's size."""
    for node in model.graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
    for held in (model, model.graph, *model.graph.inputs, *model.graph.initializers.values()):
        held.metadata_props.clear()


def set_about(path: Path, about: About) -> None:
    """A quantiser leaves the metadata out."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    onnx.helper.set_model_props(model, {KEY: about.to_json()})
    onnx.save(model, path)


def beside(path: Path) -> Path:
    """Where the weights of a large model lie."""
    return path.with_name(path.name + ".data")


class Session:
    """ONNX Runtime on the CPU with as many threads as torch; tensors in, tensors out."""

    def __init__(self, path: Path, *, arena: bool = True):
        """`arena`: keep what a batch needed for the next one; without it memory is given back."""
        need("onnxruntime")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        options.enable_cpu_mem_arena = arena
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ValueError(f"{path}: ONNX Runtime cannot read it: {str(error).splitlines()[0]}") from None
        self.input = self.session.get_inputs()[0].name

    @property
    def metadata(self) -> dict[str, str]:
        return self.session.get_modelmeta().custom_metadata_map

    def __call__(self, x: Tensor) -> Tensor:
        (found,) = self.session.run(None, {self.input: x.detach().cpu().contiguous().numpy()})
        return torch.from_numpy(found)
