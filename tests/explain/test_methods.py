"""The table of methods: every row works under one signature, and all that lists methods reads it."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
import typer

import vitlab
import vitlab.cli.main
from vitlab.explain.methods import BY_CLASS, COMPARED, METHODS, SHOWN
from vitlab.layers.edit import Edit


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = dict(image_size=(16, 24), patch_size=8, channels=3, classes=4, depth=2, width=32, heads=4)
    return vitlab.create("vit_digits", **shape).eval()


@pytest.mark.parametrize("name", METHODS)
def test_a_row_gives_a_map(model, name):
    x = torch.randn(3, 3, 16, 24)
    method = METHODS[name]
    first, second = method(model, x, 1), method(model, x, 2)
    assert method.supports(model) and first.shape == (3, 2, 3)
    assert torch.equal(first, second) != method.by_class
    assert bool((first < 0).any()) == method.signed


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.edits])
def test_an_edited_pass_is_that_of_edited_weights(model, name):
    """Without one head: the same as zeros in its columns of the projection."""
    x = torch.randn(2, 3, 16, 24)
    changed = copy.deepcopy(model)
    changed.blocks[1].attention.proj.weight.data[:, 8:16] = 0
    heat = METHODS[name](model, x, 2, Edit().zero("heads", layer=1, heads=[1]))
    torch.testing.assert_close(heat, METHODS[name](changed, x, 2), rtol=1e-4, atol=1e-7)
    assert not torch.allclose(heat, METHODS[name](model, x, 2), rtol=1e-3)


def test_a_method_without_edits_refuses_them(model):
    with pytest.raises(ValueError, match="relevance, grad_cam, gradient_x_input do"):
        METHODS["rollout"](model, torch.randn(1, 3, 16, 24), None, Edit().temperature(2.0))


def test_methods_by_class_need_classes():
    model = vitlab.create("vit_digits", classes=0)
    assert [name for name, method in METHODS.items() if not method.supports(model)] == list(BY_CLASS)


def test_the_lists_come_from_the_table():
    assert SHOWN[:5] == ("attention", "rollout", "relevance", "grad_cam", "gradient_x_input")
    assert "random" not in SHOWN and set(BY_CLASS) | set(COMPARED) <= set(SHOWN)
    assert BY_CLASS[:3] == SHOWN[2:5] and COMPARED[:4] == SHOWN[:4] and "gradient_x_input" not in COMPARED
    explain = typer.main.get_command(vitlab.cli.main.app).commands["explain"].commands
    metavars = {(verb, p.name): p.metavar for verb, command in explain.items() for p in command.params}
    assert metavars["relevance", "method"] == "|".join(BY_CLASS)
    assert metavars["compare", "methods"] == metavars["faithfulness", "methods"] == ",".join(SHOWN)


def test_the_table_does_not_import_torch():
    code = "import sys, vitlab.explain.methods; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_are_public_under_their_names(monkeypatch):
    assert set(vitlab.explain.__all__) <= set(dir(vitlab.explain))
    with monkeypatch.context() as added:
        added.setitem(vitlab.explain._MODULES, "new_method", "new_file")
        assert "new_method" in dir(vitlab.explain)
        with pytest.raises(AttributeError, match=r"it has .*new_method"):
            _ = vitlab.explain.other
    for name in BY_CLASS + ("rollout",):
        assert callable(getattr(vitlab.explain, name)) and name in dir(vitlab.explain)
