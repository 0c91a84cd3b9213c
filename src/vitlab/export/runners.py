"""Ways to run one network on this machine, each a function of a batch: what bench compares and optimize chooses from.

eager      the model as it is
folded     the same with less work (fold.py)
compiled   torch.compile of the folded one, weights frozen and packed for this CPU (needs a C++ compiler)
onnx       ONNX Runtime, of the folded one
int8       ONNX Runtime, dynamic int8; int8_static where there are pictures to calibrate it with
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.export.about import Gives, about_model
from vitlab.export.fold import folded
from vitlab.export.onnx import Session, save_onnx
from vitlab.export.opened import size_of_file
from vitlab.export.program import to_program
from vitlab.export.quantize import to_int8
from vitlab.export.quiet import quiet
from vitlab.export.tower import Tower, example, what_it_gives

EXACT = ("eager", "folded", "compiled", "onnx")
WAYS = (*EXACT, "int8", "int8_static")


@dataclass
class Runner:
    name: str  # of the way, or of another library
    run: Callable[[Tensor], Tensor]
    bytes: int  # of its weights, or of its file
    reducer: str | None = None
    path: Path | None = None  # of the file that ONNX Runtime runs

    def lean(self) -> Callable[[Tensor], Tensor]:
        """The same, keeping nothing between batches, so that what a batch needs can be seen."""
        return self.run if self.path is None else Session(self.path, arena=False)

    @property
    def title(self) -> str:
        return self.name if self.reducer is None else f"{self.name} + {self.reducer}"


def check_way(way: str) -> None:
    if way not in WAYS:
        raise ValueError(f"{way!r} is no way to run a model: use {', '.join(WAYS)}.")


class Workshop:
    """Makes runners of one model. What two of them need is made once; files lie in a folder that goes with this."""

    def __init__(self, model: Any, calibration: Tensor | None = None):
        """`calibration` (B, C, H, W): prepared real pictures, for int8_static."""
        self.model, self.calibration = model.eval(), calibration
        self.gives: Gives = what_it_gives(model)
        self._folder = tempfile.TemporaryDirectory(prefix="vitlab-")
        self._made: dict[tuple[str, str | None], Any] = {}

    def make(self, way: str, reducer: str | None = None) -> Runner:
        check_way(way)
        if way == "eager":
            return _in_torch(way, Tower(self.model, self.gives, reducer), reducer)
        if way == "folded":
            return _in_torch(way, self._tower(reducer), reducer)
        if way == "compiled":
            return self._compiled(reducer)
        path = self.int8_file(reducer, way=way) if way.startswith("int8") else self.onnx_file(reducer)
        return in_onnxruntime(way, path, reducer)

    def _compiled(self, reducer: str | None) -> Runner:
        import torch._inductor.config as inductor

        tower = self._tower(reducer).eval()
        compiled, seen = torch.compile(tower, dynamic=False), set()

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                if x.shape in seen:
                    return compiled(x)
                seen.add(x.shape)
                with inductor.patch(freezing=True), quiet():  # each shape is compiled when it first comes
                    return compiled(x)

        return Runner("compiled", run, _bytes(tower), reducer)

    def _tower(self, reducer: str | None) -> Tower:
        return Tower(self._once("folded", None, lambda: folded(self.model)), self.gives, reducer)

    def onnx_file(self, reducer: str | None = None, *, fold: bool = True) -> Path:
        return self._once("onnx" if fold else "plain", reducer, lambda: self._export(reducer, fold))

    def _export(self, reducer: str | None, fold: bool) -> Path:
        path = self._path()
        tower = self._tower(reducer) if fold else Tower(self.model, self.gives, reducer)
        program = to_program(tower, example(self.model, self.gives))
        save_onnx(program, path, about_model(self.model, self.gives, reducer=reducer))
        return path

    def int8_file(self, reducer: str | None = None, *, way: str = "int8") -> Path:
        def make() -> Path:
            plain, path = self.onnx_file(reducer), self._path()
            to_int8(plain, path, "static" if way == "int8_static" else "dynamic", self.calibration)
            return path

        return self._once(way, reducer, make)

    def _path(self) -> Path:
        return Path(self._folder.name) / f"{len(self._made)}.onnx"

    def _once(self, what: str, reducer: str | None, make: Callable[[], Any]) -> Any:
        if (what, reducer) not in self._made:
            found = make()
            self._made[what, reducer] = found
        return self._made[what, reducer]


def in_onnxruntime(name: str, path: Path, reducer: str | None = None) -> Runner:
    return Runner(name, Session(path), size_of_file(path), reducer, path)


def _in_torch(name: str, tower: Tower, reducer: str | None) -> Runner:
    tower.eval()

    def run(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return tower(x)

    return Runner(name, run, _bytes(tower), reducer)


def _bytes(tower: Tower) -> int:
    return sum(value.nbytes for value in tower.state_dict().values())
