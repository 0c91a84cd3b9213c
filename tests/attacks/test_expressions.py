"""Sizes and guards of a stranger's .pt2: whatever text stands there, it is read in no time or refused in no time."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import vitlab
from vitlab.export import open_export
from vitlab.export.archive import _check_text, _checked_graph
from vitlab.export.metadata import model_metadata
from vitlab.export.program import save_program, to_program
from vitlab.export.wrapper import ExportWrapper, example_input

SYMBOL = "Symbol('s18', positive=True, integer=True)"
OURS = {  # as torch writes them
    "expr_str": [
        SYMBOL,
        f"Add(Mul(Integer(-1), {SYMBOL}), Integer(3))",
        f"Mul(Integer(64), Max(Integer(1), FloorDiv(Mul({SYMBOL}, {SYMBOL}), Integer(2))))",
        "Float('0.5', dps=15)",
        "",
    ],
    "guards_code": [
        "(L['x'].size()[2] % 8) == 0",
        "(3 + (((-1)*L['x'].size()[3]) // 8)) == max(1, L['x'].size()[2] % 8)",
        "L['x'].size()[0] >= 1 and L['x'].size()[0] <= 65536 or not 1 < 2",
    ],
}
HOSTILE = {
    "expr_str": [
        "9**9**9**9",
        "Integer(9)**Integer(9)**Integer(9)**Integer(9)",
        "Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))",
        "PowByNatural(Integer(9), Integer(999999999))",
        "LShift(Integer(1), Integer(999999999))",
        "Integer(1) << Integer(999999999)",
        "Float('0.5', dps=999999999)",
        "Float('1e999999999', dps=15)",
        "Float('1e-999999999', dps=15)",
        "Rational('1e-999999999')",
        "Integer('1e-999999999')",
        "1e-999999999",
        "Add(0.5, Integer(1))",
        f"Integer({'9' * 5000})",
        f"Integer({'9' * 30})",
        "Symbol(" * 3000 + ")" * 3000,
        "Add(" * 150 + "Integer(1)" + ")" * 150,
        "-" * 9000 + "1",
        "(" * 9000,
        "Integer(1)," * 5000,
        "Factorial(Integer(999999999))",
        "Sum(Integer(1), Integer(2))",
        "Symbol('s18', commutative=999999999)",
        "Add(*Integer(1))",
    ],
    "guards_code": [
        "9**9**9**9 > 0",
        "1 << 999999999 > 0",
        "9 ** L['x'].size()[0] > 0",
        f"{'9' * 5000} > 0",
        f"{'9' * 30} > L['x'].size()[0]",
        "1e999 > 0",
        "1e-999999999 > 0",
        "1.5e-999999999 < L['x'].size()[0]",
        "(" * 9000 + "1" + ")" * 9000,
        "not " * 3000 + "1",
        "max(" * 150 + "1" + ")" * 150,
        "1 if 1 else 2",
    ],
}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in OURS.items() for text in texts])
def test_what_torch_writes_is_read(key, text):
    _check_text(text, key)


@pytest.mark.parametrize(
    ("key", "text"), [(key, text) for key, texts in HOSTILE.items() for text in texts], ids=lambda text: text[:30]
)
def test_powers_shifts_and_endless_texts_are_refused_at_once(key, text):
    began = time.process_time()
    with pytest.raises(ValueError, match=f"its graph holds .* as {key}") as told:
        _checked_graph({"nodes": [{key: [[text]]}]})
    assert time.process_time() - began < 1
    assert len(str(told.value)) < 300


def test_the_error_names_what_is_not_allowed():
    with pytest.raises(ValueError, match=r"contains a power; only \+ - \* // % comparisons, min and max are allowed"):
        _check_text("9 ** L['x'].size()[0] > 0", "guards_code")
    with pytest.raises(ValueError, match=r"contains the function 'Pow'; only"):
        _check_text("Pow(Integer(9), Integer(9))", "expr_str")


def product(number: int, *names: str) -> dict[str, Any]:
    inputs = [{"name": "a", "arg": {"as_sym_int": {"as_name": name}}} for name in names]
    return {"target": "_operator.mul", "inputs": inputs, "outputs": [{"as_sym_int": {"as_name": f"mul_{number}"}}]}


def test_products_of_products_do_not_grow_without_end():
    few = [product(0, "sym_size", "sym_size"), product(1, "mul_0", "sym_size")]
    assert _checked_graph({"nodes": few})["nodes"] == few
    squares = [product(0, "sym_size", "sym_size"), *(product(n, f"mul_{n - 1}", f"mul_{n - 1}") for n in range(1, 40))]
    with pytest.raises(ValueError, match="bits"):
        _checked_graph({"nodes": squares})
    with pytest.raises(ValueError, match="may be code"):
        _checked_graph({"nodes": [{**product(0, "a", "b"), "target": "_operator.pow"}]})


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", depth=1, width=16, heads=2).eval()
    path = tmp_path_factory.mktemp("exported") / "model.pt2"
    save_program(
        to_program(ExportWrapper(model, "logits", None), example_input(model, "logits")),
        path,
        model_metadata(model, "logits"),
    )
    return path


def changed(path: Path, target: Path, entry: str, change: Any) -> Path:
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(target, "w") as copy:
        for name in source.namelist():
            held = source.read(name)
            copy.writestr(name, change(held) if name.endswith(entry) else held)
    return target


@pytest.mark.parametrize("text", ["9**9**9**9 > 0", "(" * 9000])
def test_the_command_ends_in_one_line(text, exported, tmp_path, command):
    def change(held: bytes) -> bytes:
        graph = json.loads(held)
        graph["guards_code"] = [text]
        return json.dumps(graph).encode()

    evil = changed(exported, tmp_path / "evil.pt2", "models/model.json", change)
    told = command("predict", evil, "digits#3", code=2).stderr
    assert told.startswith(f"vitlab: error: {evil}: ") and told.count("\n") == 1
    assert command("predict", exported, "digits#3").stdout


@pytest.mark.parametrize(
    "values",
    [
        *({"gives": held} for held in (["logits"], "x", None, {})),
        *({"labels": held} for held in ([1] * 10, ["a"], "0123456789", {"0": "a"})),
        *({"classes": held} for held in ("10", -1, None, [10])),
        *({"image_size": held} for held in (8, "8x8", [8], [8, -8], [8, None])),
        *({"card": held} for held in ([], "x", {"name": 3}, {"unknown": 1}, {"metrics": [1]})),
        *({"preprocess": held} for held in ("x", {"size": None}, {"mean": 1})),
        *({"format": held} for held in (99, "1", None)),
    ],
    ids=lambda values: json.dumps(values),
)
def test_metadata_of_another_kind_is_refused_in_words(values, exported, tmp_path):
    path = changed(
        exported, tmp_path / "evil.pt2", "vitlab.json", lambda held: json.dumps({**json.loads(held), **values}).encode()
    )
    with pytest.raises(ValueError, match=r"evil\.pt2: its metadata cannot be used: "):
        open_export(path)


@pytest.mark.parametrize("held", [b"[]", b"3", b"\xff\xfe", b'{"format": NaN}', b"[" * 10**5, b'{"format": 1}'])
def test_metadata_that_is_no_table_is_refused_in_words(held, exported, tmp_path):
    path = changed(exported, tmp_path / "evil.pt2", "vitlab.json", lambda _: held)
    with pytest.raises(ValueError, match=r"evil\.pt2: (its metadata cannot be used|cannot be read)"):
        open_export(path)
