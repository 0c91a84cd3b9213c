"""Gates that compare an export with its model: NaN and infinity never pass, and tiny logits are compared too."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import vitlab
from vitlab.checkpoints.convert import Compared
from vitlab.cli.console import print_json
from vitlab.export import Comparison, ExportMismatchError, export_model, pipeline, verify
from vitlab.export.bench import fastest, measure
from vitlab.export.loader import Exported
from vitlab.export.metadata import model_metadata
from vitlab.export.runners import Runner
from vitlab.export.verify import agreement_rate
from vitlab.parsing import parse_json


def small() -> Any:
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", depth=1, width=16, heads=2).eval()
    with torch.no_grad():
        model.head.weight.normal_()
    return model


@pytest.fixture(scope="module")
def images() -> list[Image.Image]:
    torch.manual_seed(1)
    return [Image.fromarray(torch.randint(256, (8, 8), dtype=torch.uint8).numpy()) for _ in range(16)]


def exported(model: Any, change: Any, int8: str | None = None) -> Exported:
    """A file that answers as the model does, but for `change`."""
    run = torch.inference_mode()(lambda x: change(model(x)))
    return Exported(run, model_metadata(model, "logits", int8=int8), Path(__file__))


def noisy(logits: Tensor) -> Tensor:
    return logits + 0.01 * logits.abs().max() * torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e-20])
def test_the_tolerance_is_as_small_as_the_logits(scale, images):
    model = small()
    with torch.no_grad():
        model.head.weight.mul_(scale)
        model.head.bias.mul_(scale)
    assert verify(model, exported(model, lambda x: x), images, rounds=1).passed
    verdict = verify(model, exported(model, noisy), images, rounds=1)
    assert not verdict.passed and "values differ" in verdict.problems[0]


@pytest.mark.parametrize("int8", [None, "dynamic"])
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("side", ["model", "export"])
def test_nan_and_infinity_fail_on_either_side(side, value, int8, images):
    model = small()

    def spoilt(logits: Tensor) -> Tensor:
        return torch.where(torch.arange(logits.shape[1]) == 3, value, logits)

    file = exported(model, spoilt, int8)
    if side == "model":
        with torch.no_grad():
            model.head.bias[3] = value
        file = exported(model, lambda x: x, int8)
    verdict = verify(model, file, images, rounds=1)
    assert any(f"the {side} gives NaN or infinity for 16 of 16" in problem for problem in verdict.problems)
    assert verdict.agreement == 0


def test_int8_of_a_model_with_infinite_logits_is_not_kept(images, tmp_path, monkeypatch):
    """The file that is written here answers exactly as the model does: without ONNX's exporter, which takes long."""
    model = small()
    with torch.no_grad():
        model.head.bias[3] = float("inf")
    for name in ("to_program", "save_onnx", "set_metadata"):
        monkeypatch.setattr(pipeline, name, lambda *args: None)
    monkeypatch.setattr(pipeline, "to_int8", lambda plain, made, *rest: made.write_bytes(b"int8"))
    monkeypatch.setattr(pipeline, "open_export", lambda path: exported(model, lambda x: x, "dynamic"))
    with pytest.raises(ExportMismatchError, match="NaN or infinity"):
        export_model(model, tmp_path / "model.onnx", int8="dynamic", compare=Comparison(images=8))
    assert not list(tmp_path.iterdir())


def test_backends_with_nan_are_not_picked(monkeypatch):
    model = small()
    x = torch.rand(8, 1, 8, 8)
    run = torch.inference_mode()(model)
    runners = [Runner("eager", run, 1), Runner("onnx", lambda x: run(x) * float("nan"), 1)]
    rows = measure(runners, x, "logits", batch=8, rounds=1)
    assert [row.within for row in rows] == [True, False] and rows[1].agreement == 0
    assert fastest(rows[1:], 0.5) is None
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    module = import_module("vitlab.export.optimize")
    monkeypatch.setattr(module, "make_runners", lambda factory, *rest: ([factory.make("eager")], []))
    with pytest.raises(ValueError, match="NaN or infinity"):
        vitlab.optimize(model, x, goal="small", rounds=1)


def test_scores_that_are_not_finite_are_an_error_of_that_picture(tmp_path, command):
    model = small()
    with torch.no_grad():
        model.head.bias[3] = float("nan")
    (found,) = vitlab.predict(model, Image.new("L", (8, 8)))
    assert found.scores == [] and found.error == "image 0: the model's scores are not finite numbers."
    with torch.no_grad():
        model.head.bias[3] = 0.0
        model.head.weight.fill_(3e38)  # finite, so that it loads; its logits overflow
    folder = vitlab.save(model, tmp_path / "model")
    for options in ([], ["--json"]):
        done = command("predict", folder, "digits#3", *options, code=1)
        assert "digits#3: the model's scores are not finite numbers." in done.stderr
        assert "Traceback" not in done.stderr and "NaN" not in done.stdout


def test_json_of_the_command_line_has_no_nan(capsys):
    print_json({"a": float("nan"), "b": [float("inf"), (-float("inf"), 1.5)]})
    assert parse_json(capsys.readouterr().out) == {"a": "NaN", "b": ["Infinity", ["-Infinity", 1.5]]}


def test_features_that_are_all_zero_agree_with_nothing(images):
    features = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    assert agreement_rate(features, torch.zeros_like(features), "features") == 0
    assert agreement_rate(features, 0.01 * features, "features") == 1
    model = small()
    zeros = Exported(
        lambda x: torch.zeros(len(x), 16), model_metadata(model, "features", int8="dynamic"), Path(__file__)
    )
    verdict = verify(model, zeros, images, rounds=1)
    assert not verdict.passed and verdict.agreement == 0


def test_short_features_find_themselves_and_nan_finds_nothing():
    features = torch.eye(4) * 1e-30
    assert agreement_rate(features, features, "features") == 1
    assert agreement_rate(features, features.roll(1, 0), "features") == 0
    assert agreement_rate(features, features * float("nan"), "features") == 0


@pytest.mark.parametrize(
    ("difference", "largest", "wrong"),
    [(5e-5, 20.0, False), (5e-4, 20.0, True), (5e-9, 1e-6, True), (5e-12, 1e-6, False), (float("nan"), 1.0, True)],
)
def test_conversion_is_checked_by_the_size_of_the_logits(difference, largest, wrong):
    assert Compared("x", difference, largest=largest).wrong == wrong
