"""torch.export: the network as a graph in one .pt2 file, which torch runs without vitlab."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from vitlab.errors import ExportError
from vitlab.export.archive import sanitized_copy
from vitlab.export.metadata import KEY, ExportMetadata
from vitlab.export.wrapper import ExportWrapper, SizeRange

NAME = f"{KEY}.json"


@contextmanager
def suppress_output() -> Iterator[None]:
    """Hides what exporters log, warn about and print. Errors still come through."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def to_program(wrapper: ExportWrapper, example: Tensor, sizes: SizeRange | None = None) -> ExportedProgram:
    """The batch size is dynamic; with `sizes`, height and width are too."""
    shape: dict[int, Any] = {0: Dim("batch", min=1, max=2**16)}
    if sizes is not None:
        n = sizes.stride
        rows, columns = (Dim(name, min=sizes.least // n, max=sizes.most // n) for name in ("rows", "columns"))
        shape |= {2: n * rows, 3: n * columns} if n > 1 else {2: rows, 3: columns}
    wrapper = wrapper.eval()
    try:
        with torch.no_grad(), suppress_output():
            return torch.export.export(wrapper, (example,), dynamic_shapes=(shape,), strict=False)
    except Exception as error:  # torch raises many kinds here
        dynamic = " for all image sizes: leave --dynamic-size out" if sizes is not None else ""
        raise ExportError(f"this network cannot be exported{dynamic}. torch says: {first_line(error)}") from error


def save_program(program: ExportedProgram, path: Path, metadata: ExportMetadata) -> None:
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # source file and line
    try:
        with suppress_output():
            torch.export.save(program, path, extra_files={NAME: metadata.to_json()})
    except Exception as error:  # some operations can be traced but not saved
        raise ExportError(
            f"torch cannot write this network as .pt2: name the file model.onnx. It says: {first_line(error)}"
        ) from error


def load_program(path: Path) -> tuple[Callable[[Tensor], Tensor | tuple[Tensor, ...]], ExportMetadata]:
    """A function of one tensor, and the metadata. No code from an untrusted file is run (archive.py)."""
    with ExitStack() as stack:
        with _naming(path):
            archive = stack.enter_context(sanitized_copy(path))
            with zipfile.ZipFile(archive) as entries:
                entry = f"model/extra/{NAME}"
                text = entries.read(entry).decode(errors="replace") if entry in entries.namelist() else ""
            archive.seek(0)
        metadata = ExportMetadata.from_json(text, path)  # before the graph, which takes longer to read
        with _naming(path), suppress_output():
            return torch.export.load(archive).module(), metadata


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ExportError(f"{path}: cannot be read as a torch.export program: {first_line(error)}") from None


def first_line(error: Exception) -> str:
    """The message of a library's error, without its details."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
