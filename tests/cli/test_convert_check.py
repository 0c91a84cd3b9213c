"""vitlab convert --check: when what was written gives other numbers, the command fails and says where."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import vitlab
import vitlab.cli.main
from vitlab.checkpoints import convert

MESSAGE = "vitlab: error: logits differ: "


@pytest.fixture
def run(capsys, monkeypatch):
    """The console script's own function; returns the exit code, stdout and stderr."""

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        found = capsys.readouterr()
        return stopped.value.code or 0, found.out, found.err

    return call


@pytest.fixture
def source(tmp_path) -> Path:
    model = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4, depth=2)
    return vitlab.save(model, tmp_path / "source")


def without_digests(target: Path) -> None:
    """As a writer that is wrong from the start: its digests are of what it wrote."""
    card = target / "model.json"
    if card.is_file():
        card.write_text(
            json.dumps({**json.loads(card.read_text(encoding="utf-8")), "digests": None, "seal": None}),
            encoding="utf-8",
        )


def add_to_head(target: Path, amount: float) -> None:
    """Alter the classifier's bias in the written file, as a broken writer would."""
    if target.suffix == ".npz":
        with np.load(target) as file:
            arrays = dict(file)
        arrays["head/bias"] = arrays["head/bias"] + np.float32(amount)
        np.savez(target, **arrays)
        return
    weights = next(target.glob("*.safetensors"))
    tensors = load_file(weights)
    key = next(k for k in ("head.bias", "classifier.bias") if k in tensors)
    tensors[key] = tensors[key] + amount
    save_file(tensors, weights, metadata={"format": "pt"})
    without_digests(target)


@pytest.fixture
def broken_writer(monkeypatch):
    """convert.write, after which the file's logits are off by `amount`."""

    def broken(amount: float) -> None:
        write = convert.write

        def write_and_alter(model, target, to):
            notes = write(model, target, to)
            add_to_head(Path(target), amount)
            return notes

        monkeypatch.setattr(convert, "write", write_and_alter)

    return broken


@pytest.mark.parametrize(
    ("to", "name"), [("native", "out"), ("timm", "out"), ("hf", "out"), ("jax", "out.npz")], ids=lambda v: v
)
def test_altered_weights_are_noticed_in_every_layout(to, name, run, source, broken_writer, tmp_path):
    broken_writer(0.5)
    target = tmp_path / name
    code, out, err = run("convert", source, target, "--to", to, "--check")
    assert code == 1
    assert err.startswith(MESSAGE + f"{target} read back by vitlab")
    assert f"check: {target} read back by vitlab: largest logit difference 5.00e-01" in out
    assert (f"{target} in transformers" in err) == (to == "hf")  # the other library reads the same wrong file


def test_without_check_nothing_is_compared(run, source, broken_writer, tmp_path):
    broken_writer(0.5)
    code, out, err = run("convert", source, tmp_path / "out")
    assert (code, err) == (0, "")
    assert "check:" not in out


@pytest.mark.parametrize(("amount", "code"), [(5e-5, 0), (2e-4, 1)])
def test_the_tolerance_is_1e_4(amount, code, run, source, broken_writer, tmp_path):
    broken_writer(amount)
    assert run("convert", source, tmp_path / "out", "--check")[0] == code


def test_json_tells_the_difference_and_fails_too(run, source, broken_writer, tmp_path):
    broken_writer(0.5)
    code, out, err = run("convert", source, tmp_path / "out", "--check", "--json")
    assert code == 1
    assert json.loads(out)["check"][0]["max_difference"] == pytest.approx(0.5, abs=1e-5)
    assert err.startswith(MESSAGE)


def test_the_largest_difference_of_any_logit_counts(run, source, monkeypatch, tmp_path):
    write = convert.write

    def write_and_alter_one(model, target, to):
        notes = write(model, target, to)
        tensors = load_file(target / "weights.safetensors")
        tensors["head.bias"] = tensors["head.bias"] + torch.tensor([0.0, -0.3, 0.1, 0.0])
        save_file(tensors, target / "weights.safetensors")
        without_digests(target)
        return notes

    monkeypatch.setattr(convert, "write", write_and_alter_one)
    code, out, _ = run("convert", source, tmp_path / "out", "--check", "--json")
    assert code == 1
    assert json.loads(out)["check"][0]["max_difference"] == pytest.approx(0.3, abs=1e-5)


ROWS = {  # what was found here and there -> exit code, and what the message says
    "all equal": ((0.0, 9e-5), 0, []),
    "first differs": ((1.0, 0.0), 1, ["here: by 1.00e+00, where 1.00e-04 is allowed"]),
    "last differs": ((0.0, 1.0), 1, ["there: by 1.00e+00, where 1.00e-04 is allowed"]),
    "both differ": (
        (1.0, 0.5),
        1,
        ["here: by 1.00e+00, where 1.00e-04 is allowed", "there: by 5.00e-01, where 1.00e-04 is allowed"],
    ),
    "not a number": ((float("nan"), 0.0), 1, ["here: NaN or infinity"]),
    "not compared": ((0.0, None), 0, []),
}


@pytest.mark.parametrize(("differences", "code", "named"), ROWS.values(), ids=ROWS)
def test_every_row_of_the_check_counts(differences, code, named, run, source, monkeypatch, tmp_path):
    here, there = differences
    rows = [convert.Compared("here", here), convert.Compared("there", there, "" if there is not None else "no library")]
    monkeypatch.setattr(convert, "compare", lambda *args, **options: rows)
    found, out, err = run("convert", source, tmp_path / "out", "--check")
    assert found == code
    assert err.strip() == (MESSAGE + "; ".join(named) if named else "")
    assert ("there: no library" in out) == (there is None)


def test_the_message_says_what_was_allowed_for_tiny_logits(run, source, monkeypatch, tmp_path):
    rows = [convert.Compared("here", 5e-9, largest=1e-6)]
    monkeypatch.setattr(convert, "compare", lambda *args, **options: rows)
    code, _, err = run("convert", source, tmp_path / "out", "--check")
    assert (code, err.strip()) == (1, MESSAGE + "here: by 5.00e-09, where 1.00e-09 is allowed")
