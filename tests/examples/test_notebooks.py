"""The notebooks run from top to bottom, draw what they announce, and their stored outputs are those of their code."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import numpy as np
import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = ("look_inside", "figure7", "compare_models")
DRAWS = re.compile(r"^(draw\.(attention|heat|figure7|faithfulness|neighbours)\(|figure$)", re.MULTILINE)
MACHINE = re.compile(r"(?<![\w.])/(root|home|tmp|work|usr|Users|var)\b|site-packages|[A-Z]:\\")


class Pair(NamedTuple):
    name: str
    stored: Any
    executed: Any


@pytest.fixture(scope="module")
def kernel() -> Iterator[AsyncKernelManager]:
    """One process for all notebooks, which imports torch once."""
    manager = AsyncKernelManager(kernel_name="python3")
    yield manager
    run_sync(manager.shutdown_kernel)(now=True)


def run(notebook: Any, kernel: AsyncKernelManager) -> Any:
    """A copy, executed beside its file without anything that was stored in it, nor a variable of another one."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    copy.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    options = dict(timeout=240, record_timing=False, coalesce_streams=True)
    client = NotebookClient(copy, km=kernel, resources={"metadata": {"path": str(EXAMPLES)}}, **options)
    try:
        client.execute()
    finally:
        client.kc.stop_channels()
    del copy.cells[0]
    return copy


@pytest.fixture(scope="module")
def executed(kernel) -> Callable[[str], Pair]:
    @cache
    def once(name: str) -> Pair:
        stored = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
        return Pair(name, stored, run(stored, kernel))

    return once


@pytest.fixture(params=NOTEBOOKS)
def pair(request, executed) -> Pair:
    return executed(request.param)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pictures(cell: Any) -> list[Image.Image]:
    data = [output.data for output in cell.outputs if "data" in output]
    return [Image.open(io.BytesIO(base64.b64decode(bundle["image/jpeg"]))) for bundle in data if "image/jpeg" in bundle]


def words(cell: Any) -> str:
    """What the cell printed, with every number a 0: those may differ from machine to machine."""
    printed = "".join(output.text for output in cell.outputs if output.output_type == "stream")
    return re.sub(r"\s+", " ", re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?", "0", printed))


def said(pair: Pair) -> str:
    return "".join(output.text for cell in code(pair.executed) for output in cell.outputs if "text" in output)


def html(pair: Pair) -> str:
    outputs = [output for cell in code(pair.executed) for output in cell.outputs if "data" in output]
    return "".join(output.data.get("text/html", "") for output in outputs)


def numbers(pattern: str, text: str) -> list[float]:
    return [float(value) for found in re.findall(pattern, text) for value in found.split()]


# ---------------------------------------------------------------------------------------------------------- all of them


def test_there_is_no_notebook_that_is_not_run():
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(NOTEBOOKS)


def test_an_error_in_a_cell_is_noticed(kernel):
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        run(broken, kernel)


def test_cells_that_draw_give_a_picture(pair):
    drawing = [cell for cell in code(pair.executed) if DRAWS.search(cell.source)]
    assert len(drawing) >= 2
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
    assert (EXAMPLES / f"{pair.name}.ipynb").stat().st_size < 1_000_000
    nbformat.validate(pair.stored)
    assert set(pair.stored.metadata) == {"kernelspec", "language_info"}
    assert dict(pair.stored.metadata.language_info) == {"name": "python"}
    for cell in pair.stored.cells:
        assert cell.metadata == {}
        outputs = cell.get("outputs", [])
        texts = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs]
        assert not MACHINE.search("\n".join([cell.source, *texts])), cell.source


def test_every_heading_has_a_chinese_line_and_links_lead_somewhere(pair):
    for cell in pair.stored.cells:
        if cell.cell_type == "markdown":
            prose = re.sub(r"```.*?```", "", cell.source, flags=re.DOTALL)
            for below in re.findall(r"^#+ .*\n\n(.*)", prose, re.MULTILINE):
                assert re.search(r"[\u4e00-\u9fff]", below), below
            for target in re.findall(r"\]\(([^)#\s:]+)\)", prose):
                assert (EXAMPLES / target).exists(), target


# -------------------------------------------------------------------------------------------------- what each one finds


def test_look_inside_sees_a_cat_and_leaves_the_logits_alone(executed):
    printed = said(executed("look_inside"))
    assert "the same logits, to the bit: True" in printed and "every row sums to 1: True" in printed
    shown = html(executed("look_inside"))
    assert float(re.search(r">cat</td><td[^>]*>([\d.]+)%", shown)[1]) > 90  # the table of predictions
    assert re.search(r"trace\[&quot;attention&quot;, 5\]</td><td[^>]*>1 x 4 x 384 x 384<", shown)
    assert shown.count("<iframe") == 1 and 'sandbox="allow-scripts"' in shown and "chelsea.jpg" in shown
    same, asked = map(int, re.search(r"(\d+) of (\d+) neighbours are the same digit", printed).groups())
    assert asked == 15 and same >= 12


def test_figure7_finds_what_training_did(executed):
    """Even grey: by chance a filter of 27 values has a mean |cosine| of sqrt(2 / (27 pi)) = 0.15 with it."""
    printed = said(executed("figure7"))
    trained, untrained = numbers(r"with an even grey: (\S+)", printed)
    assert untrained == pytest.approx(0.15, abs=0.04) and trained < untrained / 3
    trained, untrained = (
        numbers(rf"{name} +cosine at 1 to 5 patches apart:(.*)", printed) for name in (r"(?<!un)trained", "untrained")
    )
    assert len(trained) == len(untrained) == 5
    assert trained[0] == max(trained) > 0.5 and max(map(abs, untrained)) < 0.05
    before, after = printed.split("untrained: looking")
    uniform = float(re.match(r" everywhere alike reaches (\S+)", after)[1])
    reach = [numbers(r"layer \d: (.*)", part) for part in (before, after)]
    assert len(reach[0]) == len(reach[1]) == 24
    trained, untrained = (np.abs(np.array(part) - uniform).mean() for part in reach)
    assert untrained < 0.5 and trained > 2 * untrained


def test_compare_models_finds_what_was_planted(executed):
    printed = said(executed("compare_models"))
    assert all(float(share) > 80 for share in re.findall(r"^[AB]: ([\d.]+)% of 300", printed, re.MULTILINE))
    assert "LayerNorm eps: 1e-06 in A, 1e-05 in B" in printed and "first difference: blocks.0.norm1" in printed
    assert "mean and std" in printed and "first difference: preprocess" in printed
    gains = re.findall(r"^(?:insertion|road) +relevance +\S+ +(\S+) ±", printed, re.MULTILINE)
    assert len(gains) == 2 and all(float(gain) > 0 for gain in gains)  # better than an order by lot
