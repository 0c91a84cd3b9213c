"""A stranger's .pt2: by none of the ways that torch knows does opening it run what it brings."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.export import Comparison, export_model, open_export
from vitlab.export.archive import GUARD, SIZE, TARGET

WEIGHTS, CONSTANTS = "data/weights/model_weights_config.json", "data/constants/model_constants_config.json"
GRAPH, INPUTS = "models/model.json", "data/sample_inputs/model.pt"


@pytest.fixture(scope="module")
def program(tiny, tmp_path_factory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("program") / "model.pt2"
    export_model(tiny(), path, compare=Comparison(images=8))
    with zipfile.ZipFile(path) as archive:
        return {name.removeprefix("model/"): archive.read(name) for name in archive.namelist()}


class Evil:
    """Unpickled, it makes the file `it ran` in the folder where we are."""

    def __reduce__(self):
        return Path.touch, (Path("it ran"),)


PICKLE = pickle.dumps(Evil())
CODE = "__import__('pathlib').Path('it ran').touch()"


def saved() -> bytes:
    held = io.BytesIO()
    torch.save(Evil(), held)
    return held.getvalue()


def constant(file: str, **more: Any) -> bytes:
    payload = {"path_name": file, "is_param": False, "use_pickle": True, "tensor_meta": None, **more}
    return json.dumps({"config": {"x": payload}}).encode()


def in_graph(key: str, value: Any) -> Callable[[dict[str, bytes]], dict[str, bytes]]:
    """The first value under this key of the graph is another."""

    def changed(part: Any) -> bool:
        if isinstance(part, dict) and key in part:
            part[key] = value
            return True
        return any(map(changed, part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()))

    def change(held: dict[str, bytes]) -> dict[str, bytes]:
        graph = json.loads(held[GRAPH])
        assert changed(graph)
        return {GRAPH: json.dumps(graph).encode()}

    return change


ROUTES: dict[str, tuple[Any, str]] = {
    "example input": ({INPUTS: saved()}, "more than tensors"),
    "opaque object": ({CONSTANTS: constant("opaque_obj_0"), "data/constants/opaque_obj_0": PICKLE}, "opaque_obj_0"),
    "opaque object elsewhere": ({CONSTANTS: constant("opaque_obj_0/../tensor_0")}, "pickled object"),
    "object of C++": ({CONSTANTS: constant("custom_obj_0"), "data/constants/custom_obj_0": PICKLE}, "custom_obj_0"),
    "pickled constant": ({CONSTANTS: constant("tensor_0"), "data/constants/tensor_0": saved()}, "pickled object"),
    "pickled weight": ({WEIGHTS: constant("weight_0"), "data/weights/weight_0": saved()}, "pickled object"),
    "old weights": ({"data/weights/model.pt": saved()}, "old format"),
    "old constants": ({"data/constants/model.pt": saved()}, "old format"),
    "compiled": ({"data/aotinductor/model/it.so": b"ELF"}, "compiled library"),
    "size": (in_graph("expr_str", CODE), "may be code"),
    "guard": (in_graph("guards_code", [CODE]), "may be code"),
    "target": (in_graph("target", "torch.os.system"), "may be code"),
    "name": (in_graph("forward_arg_names", [f"x={CODE}"]), "may be code"),
}


@pytest.mark.parametrize("route", ROUTES)
def test_nothing_of_a_stranger_s_program_is_run(route, program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change, message = ROUTES[route]
    with zipfile.ZipFile("evil.pt2", "w") as archive:
        for name, held in {**program, **(change(program) if callable(change) else change)}.items():
            archive.writestr(f"model/{name}", held)
    with pytest.raises(ValueError, match=f"evil.pt2: cannot be read as a torch.export program.*{message}"):
        open_export("evil.pt2")
    assert not Path("it ran").exists()


def test_a_program_of_the_old_format_is_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("old.pt2", "w") as archive:
        for name, held in (("serialized_state_dict.pt", saved()), ("version", b"8.1")):
            archive.writestr(name, held)
    with pytest.raises(ValueError, match="old format"):
        open_export("old.pt2")
    assert not Path("it ran").exists()


def test_a_program_tells_nothing_of_whose_files_it_was_made_from(program):
    assert b"stack_trace" not in program[GRAPH] and b".py" not in program[GRAPH]


@pytest.mark.parametrize(
    ("pattern", "ours", "others"),
    [
        (
            SIZE,
            [
                "Add(Mul(Integer(-1), Symbol('s18', positive=True, integer=True)), Integer(3))",
                "Float('0.5', dps=15)",
            ],
            ["x.y", "Symbol('a b')", "eval('s1')", "S('print(1)')", "Symbol('s1').__class__", "[1]", "lambda: 1"],
        ),
        (
            GUARD,
            ["(3 + (((-1)*L['x'].size()[3]) // 8)) == max(1, L['x'].size()[2] % 8)"],
            ["L['x'].size", "print(1)", "max.__self__", "L['x'].size().__class__", "1 if 1 else x"],
        ),
        (
            TARGET,
            ["torch.ops.aten.add.Tensor", "torch.ops.aten._softmax.default", "_operator.floordiv", "torch.sym_max"],
            ["torch.hub.load", "torch.ops.aten.from_file.default", "torch.ops.aten.save.default", "_operator.call"]
            + ["torch.ops.load_library", "torch.ops.aten.add.__class__", "torch.ops.aten.add.default.op", "#x:y"],
        ),
    ],
)
def test_what_is_evaluated_must_be_what_we_write(pattern, ours, others):
    assert all(pattern.fullmatch(text) for text in ours)
    assert not [text for text in others if pattern.fullmatch(text)]
