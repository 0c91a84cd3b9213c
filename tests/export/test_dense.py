"""Networks for pixels and objects as files: what the gate sees and refuses. test_families.py has the answers."""

import pytest
import torch

import vitlab
from vitlab.export import runners
from vitlab.export.loader import DenseExported, open_export
from vitlab.export.verify import Comparison

FEW = Comparison(images=2)
SMALL = dict(depth=1, width=16, heads=2, image_size=16, queries=3, classes=3)


def tiny(name: str, **options):
    torch.manual_seed(0)
    model = vitlab.create(name, **SMALL, **options).eval()
    model.labels = ["a", "b", "c"]
    return model


def test_pt2_and_a_wrong_box_that_large_logits_would_hide(tmp_path, monkeypatch):
    """The gate compares each field with its own size: 1e-2 of a box is much, beside logits of 1000 it is little."""
    model = tiny("yolos_nano")
    with torch.no_grad():
        model.head.fc3.weight.mul_(1e4)
    assert vitlab.export_model(model, tmp_path / "model.pt2", compare=FEW).passed
    exported, images = open_export(tmp_path / "model.pt2"), torch.randn(2, 3, 16, 16)
    with torch.inference_mode():
        torch.testing.assert_close(exported(images).boxes, model(images).boxes, atol=1e-5, rtol=0)
    right = DenseExported.forward

    def wrong(self, x):
        output = right(self, x)
        output.boxes.add_(1e-2)
        return output

    monkeypatch.setattr(DenseExported, "forward", wrong)
    with pytest.raises(vitlab.ExportError, match=r"boxes differ by up to 1\.0e-02"):
        vitlab.export_model(model, tmp_path / "other.pt2", compare=FEW)
    assert not (tmp_path / "other.pt2").exists()


def test_what_is_not_offered_is_refused(tmp_path):
    model = tiny("yolos_nano")
    with pytest.raises(vitlab.UsageError, match="float32 with all tokens"):
        vitlab.export_model(model, tmp_path / "model.onnx", int8="dynamic", compare=FEW)
    with pytest.raises(vitlab.UsageError, match="one image size"):
        vitlab.export_model(model, tmp_path / "model.onnx", dynamic_size=True, compare=FEW)
    with pytest.raises(vitlab.UsageError, match="answers for whole images"):
        vitlab.export_model(vitlab.create("vit_digits"), tmp_path / "model.onnx", gives="dense", compare=FEW)


def test_bench_compares_with_transformers():
    """Of a network for pixels all answers side by side."""
    model, images = tiny("eomt_nano", joined=1), torch.randn(2, 3, 16, 16)
    factory = runners.RunnerFactory(model)
    expected = factory.make("eager").run(images)
    for runner in (factory.make("folded"), runners.library_runner("transformers", model, factory)):
        torch.testing.assert_close(runner.run(images), expected, atol=1e-5, rtol=1e-4)
