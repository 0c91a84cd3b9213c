"""Backends that run one network on this machine: bench compares them and optimize chooses one.

eager      the model as it is
folded     with linear operations folded into the weights (fold.py)
compiled   torch.compile of the folded model, weights frozen and packed for this CPU (needs a C++ compiler)
onnx       ONNX Runtime, of the folded model
int8       ONNX Runtime, dynamic int8; int8_static is calibrated on images

Other libraries with the same weights, for bench --against:
transformers   its network, eager, with fused attention
onnxruntime    the unfolded network by torch's exporter, with ONNX Runtime's own optimisation only
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitlab.checkpoints import convert
from vitlab.checkpoints.families import family_of
from vitlab.checkpoints.files import read_json
from vitlab.errors import UsageError
from vitlab.export.fold import fold
from vitlab.export.loader import file_size
from vitlab.export.metadata import OutputKind, model_metadata
from vitlab.export.onnx import Session, save_onnx
from vitlab.export.program import suppress_output, to_program
from vitlab.export.quantize import to_int8
from vitlab.export.wrapper import ExportWrapper, dense_fields, example_input, in_a_row, output_kind, run_where_it_is
from vitlab.models.base import Network

EXACT = ("eager", "folded", "compiled", "onnx")
T = TypeVar("T")
BACKENDS = (*EXACT, "int8", "int8_static")
LIBRARIES = ("transformers", "onnxruntime")


@dataclass
class Runner:
    name: str  # of the backend, or of another library
    run: Callable[[Tensor], Tensor]
    bytes: int  # of its weights, or of its file
    reducer: str | None = None
    path: Path | None = None  # of the file that ONNX Runtime runs

    def without_arena(self) -> Callable[[Tensor], Tensor]:
        """The same function without an arena between batches, so that its memory can be measured."""
        return self.run if self.path is None else Session(self.path, arena=False)

    @property
    def title(self) -> str:
        return self.name if self.reducer is None else f"{self.name} + {self.reducer}"


def check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise UsageError(f"unknown backend {backend!r}: use {', '.join(BACKENDS)}.")


class RunnerFactory:
    """Makes runners of one model. Shared parts are made once; files are deleted with the factory."""

    def __init__(self, model: Network, calibration: Tensor | None = None):
        """`calibration` (B, C, H, W): preprocessed real images, for int8_static."""
        self.model, self.calibration = model.eval(), calibration
        self.gives: OutputKind = output_kind(model)
        self.device = next(model.parameters()).device
        self._folder = tempfile.TemporaryDirectory(prefix="vitlab-")
        self._cache: dict[tuple[str, str | None], Any] = {}

    def make(self, backend: str, reducer: str | None = None) -> Runner:
        check_backend(backend)
        if backend == "eager":
            return _torch_runner(backend, ExportWrapper(self.model, self.gives, reducer), reducer)
        if backend == "folded":
            return _torch_runner(backend, self._folded(reducer), reducer)
        if backend == "compiled":
            return self._compiled(reducer)
        path = self.int8_file(reducer, backend=backend) if backend.startswith("int8") else self.onnx_file(reducer)
        return _onnxruntime_runner(backend, path, reducer)

    def _compiled(self, reducer: str | None) -> Runner:
        import torch._inductor.config as inductor

        wrapper = self._folded(reducer).eval()
        compiled, seen = torch.compile(wrapper, dynamic=False), set()
        compute = lambda x: in_a_row(compiled(x.to(self.device))).cpu()

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                if x.shape in seen:
                    return compute(x)
                seen.add(x.shape)
                with inductor.patch(freezing=True), suppress_output():  # compiled at the first batch of each shape
                    return compute(x)

        return Runner("compiled", run, _bytes(wrapper), reducer)

    def _folded(self, reducer: str | None) -> ExportWrapper:
        return ExportWrapper(self._once("folded", None, lambda: fold(self.model)), self.gives, reducer)

    def onnx_file(self, reducer: str | None = None, *, folded: bool = True) -> Path:
        if self.device.type != "cpu":
            raise UsageError("ONNX Runtime runs on the CPU here: use --device cpu.")
        return self._once("onnx" if folded else "unfolded", reducer, lambda: self._export(reducer, folded))

    def _export(self, reducer: str | None, folded: bool) -> Path:
        path = self._path()
        wrapper = self._folded(reducer) if folded else ExportWrapper(self.model, self.gives, reducer)
        program = to_program(wrapper, example_input(self.model, self.gives))
        names = dense_fields(self.model) if self.gives == "dense" else []
        save_onnx(program, path, model_metadata(self.model, self.gives, fields=names, reducer=reducer))
        return path

    def int8_file(self, reducer: str | None = None, *, backend: str = "int8") -> Path:
        def make() -> Path:
            float32, path = self.onnx_file(reducer), self._path()
            to_int8(float32, path, "static" if backend == "int8_static" else "dynamic", self.calibration)
            return path

        return self._once(backend, reducer, make)

    def _path(self) -> Path:
        return Path(self._folder.name) / f"{len(self._cache)}.onnx"

    def _once(self, name: str, reducer: str | None, make: Callable[[], T]) -> T:
        if (name, reducer) not in self._cache:
            value = make()  # which may fill the cache itself
            self._cache[name, reducer] = value
        return self._cache[name, reducer]


def _onnxruntime_runner(name: str, path: Path, reducer: str | None = None) -> Runner:
    return Runner(name, Session(path), file_size(path), reducer, path)


def _torch_runner(name: str, wrapper: ExportWrapper, reducer: str | None) -> Runner:
    wrapper.eval()

    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return run_where_it_is(wrapper, x)

    return Runner(name, run, _bytes(wrapper), reducer)


def _bytes(wrapper: ExportWrapper) -> int:
    return sum(value.nbytes for value in wrapper.state_dict().values())


def library_runner(name: str, model: Network, factory: RunnerFactory) -> Runner:
    if name == "onnxruntime":
        return _onnxruntime_runner("onnxruntime", factory.onnx_file(folded=False))
    return _transformers_runner(model)


def _transformers_runner(model: Network) -> Runner:
    as_dense = family_of(model.family).check_theirs
    if not model.config.classes:
        raise UsageError("--against transformers compares what has classes: this model has none.")
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        convert.write(model, path, "hf")
        name = (
            "AutoModelForImageClassification"
            if as_dense is None
            else read_json(path / "config.json")["architectures"][0]
        )
        theirs: Any = getattr(transformers, name).from_pretrained(path, attn_implementation="sdpa")
    device = next(model.parameters()).device
    theirs.to(device).eval()

    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            output = theirs(x.to(device))
            return (output.logits if as_dense is None else in_a_row(as_dense(output))).cpu()

    return Runner("transformers", run, sum(p.nbytes for p in theirs.parameters()))
