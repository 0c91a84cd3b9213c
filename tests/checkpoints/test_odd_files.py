"""Files that nobody writes by accident: endless dicts, odd kinds of numbers; and what the hub is asked for."""

from __future__ import annotations

import huggingface_hub
import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from vitlab.checkpoints import files, hub
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import CheckpointError


def within_itself():
    found: dict = {"a": torch.zeros(2)}
    found["model"] = found
    return found


def within_itself_without_tensors():
    found: dict = {}
    found |= dict.fromkeys((*"abcdefghijklmnop", "model"), found)
    return found


def in_a_ring():
    first: dict = {}
    second = {"model": first, "a": torch.zeros(2)}
    first["state_dict"] = second
    return first


def deep():
    found: dict = {"a": torch.zeros(2)}
    for _ in range(5000):
        found = {"model": found}
    return found


NESTED = {
    "within itself": (within_itself, "unknown layout, e.g. a"),
    "within itself, without tensors": (within_itself_without_tensors, "holds no tensors"),
    "in a ring": (in_a_ring, "unknown layout, e.g. a"),
    "deep": (deep, "more than 16 dicts"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("make", "says"), NESTED.values(), ids=NESTED)
def test_dicts_without_end_are_refused_in_words(make, says, tmp_path, monkeypatch):
    """As torch.load would give them: pickle can write such dicts, but only some of them within its own depth."""
    found = make()
    monkeypatch.setattr(files, "_read_pickle", lambda path: found)
    torch.save({"a": torch.zeros(2)}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=says):
        load_with_report(tmp_path / "x.pth")


@pytest.mark.timeout(20)
def test_a_file_that_holds_itself_is_read_once(tmp_path):
    torch.save(within_itself(), tmp_path / "x.pth")
    assert list(files.read_tensors(tmp_path / "x.pth")) == ["a"]


def test_which_weights_were_read_is_told_where_there_is_a_choice(tmp_path):
    one, two = {"a": torch.zeros(2)}, {"a": torch.ones(2)}
    torch.save({"model": one, "model_ema": two, "args": {"lr": 1}}, tmp_path / "x.pth")
    notes: list[str] = []
    assert torch.equal(files.read_tensors(tmp_path / "x.pth", notes)["a"], two["a"])
    assert notes == ["holds model_ema, model: model_ema was read."]
    torch.save({"model": {"state_dict": one}}, tmp_path / "x.pth")
    notes.clear()
    files.read_tensors(tmp_path / "x.pth", notes)
    assert notes == []


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.complex64], ids=str)
def test_other_kinds_of_numbers_are_refused_in_words(dtype, tmp_path):
    save_file({"w": torch.ones(2, 2).to(dtype)}, tmp_path / "x.safetensors")
    state = files.read_tensors(tmp_path / "x.safetensors")
    for allow_nan in (False, True):
        with pytest.raises(CheckpointError, match=f"w is {dtype}.*float16, bfloat16, float32, float64"):
            files.check_values(state, "x.safetensors", allow_nan)


@pytest.mark.parametrize("dtype", files.DTYPES, ids=str)
def test_every_kind_that_is_read_can_be_checked(dtype):
    files.check_values({"w": torch.ones(2, dtype=dtype)}, "x", allow_nan=False)
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        files.check_values({"w": torch.tensor([1, float("nan")], dtype=dtype)}, "x", allow_nan=False)


def test_the_hub_is_asked_for_the_top_folder_only(tmp_path, monkeypatch):
    """By huggingface_hub's own filter; no pattern of it stops at a slash."""
    offered = ["config.json", "model.bin", "onnx/model.bin", "onnx/config.json", "openvino/a/b.safetensors", "x.txt"]
    offered.append("merges.txt")
    fetched: list[list[str]] = []

    def snapshot_download(repo, *, allow_patterns, ignore_patterns=None, **_):
        taken = filter_repo_objects(offered, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        fetched.append(list(taken))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert hub.fetch("hf-hub:t/x") == tmp_path
    assert fetched == [["config.json", "merges.txt"], ["config.json", "model.bin", "merges.txt"]]


def test_arrays_of_another_byte_order_are_read_and_those_without_a_tensor_refused(tmp_path):
    np.savez(tmp_path / "big.npz", a=np.arange(6, dtype=">f4").reshape(2, 3))
    assert files.read_tensors(tmp_path / "big.npz")["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    if np.dtype(np.longdouble) != np.dtype(np.float64):
        np.savez(tmp_path / "long.npz", a=np.zeros(2, np.longdouble))
        with pytest.raises(CheckpointError, match=r"long\.npz: a in it is float128, which torch"):
            files.read_tensors(tmp_path / "long.npz")
