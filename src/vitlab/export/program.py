"""torch.export: the network as a graph in one .pt2 file, which torch runs without our code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from vitlab.export.about import KEY, About
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
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"this network cannot be exported{open_sizes}. torch.export says: {first}") from error


def save_program(program: ExportedProgram, path: Path, about: About) -> None:
    with quiet():
        torch.export.save(program, path, extra_files={NAME: about.to_json()})


def load_program(path: Path) -> tuple[Any, About]:
    """A function of one tensor, and what came with it."""
    extra: dict[str, Any] = {NAME: ""}
    try:
        with quiet(), _without_pickles():
            program = torch.export.load(path, extra_files=extra)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path}: cannot be read as a torch.export program: {first}") from None
    text = extra[NAME].decode() if isinstance(extra[NAME], bytes) else extra[NAME]
    return program.module(), About.from_json(text, path)


@contextmanager
def _without_pickles() -> Iterator[None]:
    """torch's reader would otherwise run what a stranger's file has pickled."""
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
