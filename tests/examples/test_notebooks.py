"""The notebooks run from top to bottom, draw what they announce, and their stored outputs are those of their code."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = ("look_inside", "figure7", "compare_models")
DRAWS = re.compile(r"^(draw\.(attention|heat|figure7|faithfulness|neighbours)\(|figure$)", re.MULTILINE)
MACHINE = re.compile(r"(?<![\w.])/(root|home|tmp|work|usr|Users|var)\b|site-packages|[A-Z]:\\")
PICTURE = ("image/png", "image/jpeg")


class Pair(NamedTuple):
    name: str
    stored: Any
    executed: Any


def run(notebook: Any, folder: Path) -> Any:
    """A copy, executed without anything that was stored in it."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    place = {"metadata": {"path": str(folder)}}
    return NotebookClient(copy, timeout=120, kernel_name="python3", resources=place, record_timing=False).execute()


@pytest.fixture(scope="module")
def executed(tmp_path_factory) -> Callable[[str], Pair]:
    @cache
    def once(name: str) -> Pair:
        stored = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
        return Pair(name, stored, run(stored, tmp_path_factory.mktemp(name)))

    return once


@pytest.fixture(params=NOTEBOOKS)
def pair(request, executed) -> Pair:
    return executed(request.param)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cell: Any) -> list[Image.Image]:
    data = [output.data for output in cell.outputs if "data" in output]
    found = [bundle[kind] for bundle in data for kind in PICTURE if kind in bundle]
    return [Image.open(io.BytesIO(base64.b64decode(text))) for text in found]


def words(cell: Any) -> str:
    """What the cell printed, with every number a 0: those may differ from machine to machine."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "0", printed))


def said(pair: Pair) -> str:
    return "".join(output.text for cell in code(pair.executed) for output in cell.outputs if "text" in output)


def test_there_is_no_notebook_that_is_not_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


def test_an_error_in_a_cell_is_noticed(tmp_path):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(broken, tmp_path)


def test_cells_that_draw_give_a_picture(pair):
    drawing = [cell for cell in code(pair.executed) if DRAWS.search(cell.source)]
    assert len(drawing) >= 3
    for cell in code(pair.executed):
        found = pictures(cell)
        assert len(found) == bool(DRAWS.search(cell.source)), cell.source
        for picture in found:
            assert picture.width > 500 and np.asarray(picture.convert("L")).std() > 5, cell.source  # not blank


def test_nothing_is_complained_about(pair):
    for cell in code(pair.executed):
        assert not [o for o in cell.outputs if o.output_type == "error" or o.get("name") == "stderr"], cell.source


def test_stored_outputs_are_those_of_the_code(pair):
    stored, executed = code(pair.stored), code(pair.executed)
    assert [cell.execution_count for cell in stored] == list(range(1, len(executed) + 1))
    for old, new in zip(stored, executed, strict=True):
        kinds = [[(o.output_type, *sorted(o.get("data", {}))) for o in cell.outputs] for cell in (old, new)]
        assert kinds[0] == kinds[1], old.source
        assert words(old) == words(new), old.source
        for before, after in zip(pictures(old), pictures(new), strict=True):
            off = np.abs(np.subtract(before.size, after.size) / after.size).max()  # the margin is cut by what it holds
            assert off < 0.02, old.source


def test_files_are_small_and_say_nothing_of_a_machine(pair):
    path = EXAMPLES / f"{pair.name}.ipynb"
    assert path.stat().st_size < 1_000_000
    nbformat.validate(pair.stored)
    assert set(pair.stored.metadata) == {"kernelspec", "language_info"}
    assert dict(pair.stored.metadata.language_info) == {"name": "python"}
    for cell in pair.stored.cells:
        assert cell.metadata == {}
        texts = [cell.source, *(o.get("text", "") for o in cell.get("outputs", []))]
        texts += [o.data.get("text/plain", "") for o in cell.get("outputs", []) if "data" in o]
        for text in texts:
            assert not re.search(r"(?<![\w.])/(root|home|tmp|work|usr|Users|var)\b|site-packages|[A-Z]:\\\\", text), (
                text
            )


def test_every_heading_has_a_chinese_line(pair):
    for cell in pair.stored.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            for below in re.findall(r"^#+ .*\n\n(.*)", prose, re.MULTILINE):
                assert re.search(r"[\u4e00-\u9fff]", below), below
            for target in re.findall(r"\]\(([^)#\s:]+)\)", prose):
                assert (EXAMPLES / target).exists(), target


def test_look_inside_leaves_the_logits_alone(executed):
    printed = said(executed("look_inside"))
    assert "the same logits, to the bit: True" in printed and "every row sums to 1: True" in printed


def test_figure7_shows_what_training_did(executed):
    printed = said(executed("figure7"))
    assert float(re.search(r"top-1 on test: ([\d.]+)%", printed)[1]) > 80
    rough = re.search(r"noise: (\S+), untrained: (\S+), trained: (\S+)", printed)
    noise, untrained, trained = map(float, rough.groups())
    assert abs(untrained / noise - 1) < 0.5 and trained < 0.75 * untrained
    cosines = [float(value) for value in re.findall(r"apart: mean cosine (\S+)", printed)]
    assert len(cosines) == 5 and cosines[0] == max(cosines)


def test_compare_models_finds_what_was_planted(executed):
    printed = said(executed("compare_models"))
    assert "LayerNorm eps: 1e-06 in A, 1e-05 in B" in printed and "first difference: blocks.0.norm1" in printed
    assert "mean and std" in printed and "first difference: preprocess" in printed
    gains = re.findall(r"^(?:deletion|insertion|road) +relevance +\S+ +(\S+) ±", printed, re.MULTILINE)
    assert len(gains) == 3 and all(float(gain) > 0 for gain in gains)  # better than an order by lot
