"""The public functions: all of them exist, importing them is lazy, and a model can be given by its name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab

FUNCTIONS = {
    "check",
    "convert",
    "create",
    "embed",
    "embed_text",
    "evaluate",
    "export_model",
    "inspect",
    "list_models",
    "load",
    "optimize",
    "predict",
    "push",
    "save",
    "train",
    "zero_shot",
}
ERRORS = {"Checkpoint", "Data", "Export", "Image", "Search", "Tokenizer", "Training", "Usage", "Vitlab"}


def test_all_names_exist():
    assert set(vitlab.__all__) == FUNCTIONS | {f"{name}Error" for name in ERRORS} | {"Edit", "Trace", "__version__"}
    for name in vitlab.__all__:
        assert getattr(vitlab, name) is not None
    assert all(callable(getattr(vitlab, name)) for name in FUNCTIONS)
    assert vitlab.export.__name__ == "vitlab.export" and vitlab.explain.__name__ == "vitlab.explain"
    with pytest.raises(AttributeError, match=r"it has .*zero_shot"):
        vitlab.nonsense  # noqa: B018


def test_errors_are_value_errors():
    for name in ERRORS:
        assert issubclass(getattr(vitlab, f"{name}Error"), vitlab.VitlabError)
    assert issubclass(vitlab.VitlabError, ValueError)


@pytest.mark.parametrize("code", ["import vitlab; dir(vitlab); vitlab.UsageError", "import vitlab.cli.main"])
def test_importing_does_not_import_torch(code):
    code += "; import sys; sys.exit(' '.join({'torch', 'numpy', 'rich'} & sys.modules.keys()) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


@pytest.fixture
def digit() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def test_a_name_is_as_good_as_a_model(digit, tmp_path):
    model = vitlab.load("bundled:digits")
    folder = vitlab.save(model, tmp_path / "digits")
    for name in ("bundled:digits", str(folder), folder):
        (given,), (expected,) = vitlab.predict(name, digit), vitlab.predict(model, digit)
        assert given.scores == expected.scores
        np.testing.assert_array_equal(vitlab.embed(name, digit)[0].vector, vitlab.embed(model, digit)[0].vector)
        assert vitlab.inspect(name).parameters == vitlab.inspect(model).parameters


def test_a_clip_by_its_name(digit):
    model = vitlab.load("bundled:clip")
    np.testing.assert_array_equal(vitlab.embed_text("bundled:clip", "a three"), vitlab.embed_text(model, "a three"))
    given = vitlab.zero_shot("bundled:clip", digit, ["three", "eight"])
    assert given[0].scores == vitlab.zero_shot(model, digit, ["three", "eight"])[0].scores


def test_evaluate_by_name():
    options = dict(split="val", batch_size=64)
    given = vitlab.evaluate("bundled:digits", "digits", **options)
    assert given.scores.top(1) == vitlab.evaluate(vitlab.load("bundled:digits"), "digits", **options).scores.top(1)


class Images(torch.utils.data.Dataset):
    """The test split of digits as a torch Dataset, with names for labels."""

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        return self.split.read(index), self.split.classes[self.split.labels[index]]


def test_evaluate_on_pairs_is_the_same_as_on_a_dataset():
    split = vitlab.images.datasets.open_data("digits").test
    named = vitlab.evaluate("bundled:digits", "digits", split="test").scores
    pairs = [(split.read(i), torch.tensor(split.labels[i])) for i in range(len(split))]
    for data in (pairs, Images(split)):
        result = vitlab.evaluate(torch.compile(vitlab.load("bundled:digits")), data)
        torch.testing.assert_close(result.scores.logits, named.logits)
        assert torch.equal(result.scores.labels, named.labels) and result.classes == split.classes


@pytest.mark.parametrize(
    ("data", "options", "says"),
    [
        ([], {}, "is no dataset, or is empty"),
        (torch.utils.data.DataLoader([1]), {}, "DataLoader: is no dataset"),
        (["digits#3"], {}, r"sample 0 must be a pair"),
        ([(torch.zeros(1, 8, 8), 3)], {}, "Leave out the transform"),
        ([("digits#3", 10)], {}, "label 10: there are 10 classes"),
        ([("digits#3", -1)], {}, "label -1"),
        ([("digits#3", 1.5)], {}, "a name or a whole number, not a float"),
        ([("digits#3", "cat")], {}, "only the data has cat"),
        ([("digits#3", 3)], {"knn": True}, "learn from training images"),
        ([("digits#3", 3)], {"split": "val"}, "has no split 'val': use --split test"),
    ],
)
def test_pairs_that_cannot_be_evaluated(data, options, says):
    with pytest.raises(vitlab.VitlabError, match=says):
        vitlab.evaluate("bundled:digits", data, **options)


def test_load_options_and_labels_as_text(digit):
    with pytest.raises(vitlab.UsageError, match="heads: the model is loaded already"):
        vitlab.predict(vitlab.load("bundled:digits"), digit, heads=2)
    (small,), (larger,) = (vitlab.predict("bundled:digits", digit, image_size=size) for size in (8, 12))
    assert small.scores != larger.scores
    notes: list[str] = []
    given = vitlab.zero_shot("bundled:clip", digit, "three, eight", device="cpu", note=notes.append)
    assert given == vitlab.zero_shot("bundled:clip", digit, ["three", "eight"])
    assert len(notes) == 1 and "the mean of 24 sentences, e.g. 'a three'" in notes[0]


def test_save_and_convert_by_name(tmp_path):
    model = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4)
    folder = vitlab.save(model, tmp_path / "model")
    vitlab.save(folder, tmp_path / "saved")
    vitlab.convert(str(folder), tmp_path / "native")
    assert not any(row.wrong for row in vitlab.convert(model, tmp_path / "timm", "timm", check=True).checks)
    for place in ("saved", "native", "timm"):
        for key, value in vitlab.load(tmp_path / place).state_dict().items():
            assert torch.equal(value, model.state_dict()[key])
    vitlab.save("bundled:digits", tmp_path / "digits")
    assert vitlab.load(tmp_path / "digits").labels == vitlab.load("bundled:digits").labels


def test_optimize_and_export_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from vitlab.export import optimize

    monkeypatch.setitem(optimize.BACKENDS, "exact", ("eager", "folded"))  # compiling is what test_speed.py is about
    images = torch.rand(2, 1, 8, 8)
    fast = vitlab.optimize("bundled:digits", images, rounds=2)
    torch.testing.assert_close(fast(images), vitlab.load("bundled:digits").eval()(images), atol=1e-4, rtol=1e-4)
    compare = vitlab.export.Comparison(source="digits", images=8)
    exported = tmp_path / "digits.onnx"
    assert vitlab.export_model("bundled:digits", exported, compare=compare).passed
    pairs = [(f"digits#{i}", i % 10) for i in range(5)]
    (expected,), (given,) = (vitlab.predict(name, "digits#3", top=3) for name in ("bundled:digits", exported))
    assert [label for label, _ in given.scores] == [label for label, _ in expected.scores]
    np.testing.assert_allclose([p for _, p in given.scores], [p for _, p in expected.scores], atol=1e-5)
    expected, given = (vitlab.evaluate(name, pairs).scores.logits for name in ("bundled:digits", exported))
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(vitlab.UsageError, match="give --reducer to vitlab export"):
        vitlab.predict(exported, "digits#3", reducer="tome:r=1")
    with pytest.raises(vitlab.CheckpointError, match="predict, embed and evaluate open an exported file"):
        vitlab.load(exported)
