"""torch.export: the network as a graph in one .pt2 file, which torch runs without our code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from vitlab.export.about import KEY, About
from vitlab.export.archive import checked
from vitlab.export.quiet import quiet
from vitlab.export.tower import Sides, Tower

NAME = f"{KEY}.json"


def to_program(tower: Tower, example: Tensor, sides: Sides | None = None) -> ExportedProgram:
    """The batch is left open; with `sides`, height and width too."""
    shape: dict[int, Any] = {0: Dim("batch", min=1, max=2**16)}
    if sides is not None:
        n = sides.stride
        rows, columns = (Dim(name, min=sides.least // n, max=sides.most // n) for name in ("rows", "columns"))
        shape |= {2: n * rows, 3: n * columns} if n > 1 else {2: rows, 3: columns}
    tower = tower.eval()
    try:
        with torch.no_grad(), quiet():
            return torch.export.export(tower, (example,), dynamic_shapes=(shape,), strict=False)
    except Exception as error:  # torch raises many kinds here
        open_sizes = " for all image sizes: leave --dynamic-size out" if sides is not None else ""
        raise ValueError(f"this network cannot be exported{open_sizes}. torch.export says: {_first(error)}") from error


def save_program(program: ExportedProgram, path: Path, about: About) -> None:
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # which line of whose file it comes from
    try:
        with quiet():
            torch.export.save(program, path, extra_files={NAME: about.to_json()})
    except Exception as error:  # not every step that torch can follow can it write
        raise ValueError(
            f"torch cannot write this network as .pt2: name the file model.onnx. It says: {_first(error)}"
        ) from error


def load_program(path: Path) -> tuple[Any, About]:
    """A function of one tensor, and what came with it. Nothing that a stranger's file brings is run (archive.py)."""
    extra: dict[str, Any] = {NAME: ""}
    try:
        with quiet(), checked(path) as archive:
            run = torch.export.load(archive, extra_files=extra).module()
    except Exception as error:
        raise ValueError(f"{path}: cannot be read as a torch.export program: {_first(error)}") from None
    text = extra[NAME].decode(errors="replace") if isinstance(extra[NAME], bytes) else extra[NAME]
    return run, About.from_json(text, path)


def _first(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
